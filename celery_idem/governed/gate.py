"""The owner's gate: what an approval has to say, what it must agree with, and when it has ended.

Pure. It is given an action, its receipts and the time, and answers with a ``GateAuthorization`` or with the one binding
that does not hold, as ``GateRefused.code``. An approval is evidence with exactly the fields of one provenance shape: of
each way in which an owner can have said yes there is one, so that no evidence can be read in two ways.

Not here: who may record an approval (whoever lets them do it decides), whose signature counts (``signing``), and the
transaction around the judgement (the store, I4).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from celery_idem.errors import ConfigurationError
from celery_idem.governed.canonical import same
from celery_idem.governed.records import GATE_RECEIPT_KIND, Action, GateAuthorization, GateValidator, Receipt
from celery_idem.governed.refusals import REFUSALS as REFUSALS  # noqa: PLC0414  part of this module's own interface
from celery_idem.governed.refusals import check_text, digest_or_refusal, epoch, is_text, shown
from celery_idem.governed.refusals import refused as refused  # noqa: PLC0414
from celery_idem.governed.signing import SIGNATURE, ApprovalKeys, signature_parts

PASSED = "passed"
APPROVED = "approved"
OWNER = "owner"
REVISION = 1
UNLIMITED = "unlimited"
"""What stands instead of a time where an approval says in so many words that something never ends."""
SKEW_SECONDS = 30.0
"""How far ahead of the store's clock the approver's may be."""

_COMMON_TEXT = frozenset({"decision_id", "approval_id", "action_id", "principal"})
_COMMON_REST = {"decision", "authority", "action_digest", "revision", "decided_at_epoch", "expires_at_epoch"}
COMMON_FIELDS = _COMMON_TEXT | _COMMON_REST
"""What evidence of every shape has."""
BOUND_FIELDS = {"action_type": "action_type", "action_source": "source"}
"""What evidence may repeat of its action, and signed evidence must: the payload's digest alone would also hold for the
same payload under another type."""
OPTIONAL_FIELDS = frozenset({SIGNATURE, *BOUND_FIELDS})
"""What evidence of every shape may have."""


# --- shapes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProvenanceShape:
    """One way in which an owner's approval can have come about.

    Args:
        provenance_fields: what its evidence has besides the common fields; text, but for ``expiry_fields``.
        grants: whether a standing grant approves, and not a person this once.
        binding_method: the only value of the field ``binding_method``, which no other shape may then have.
        expiry_fields: seconds since 1970 or ``"unlimited"``; past any of them the approval authorizes nothing.
    """

    name: str
    provenance_fields: frozenset[str]
    grants: bool = False
    binding_method: str | None = None
    expiry_fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not is_text(self.name) or not self.provenance_fields or not all(map(is_text, self.provenance_fields)):
            raise ConfigurationError(f"ProvenanceShape {self.name!r}: give it a name and the names of its fields")
        taken = sorted(self.provenance_fields & (COMMON_FIELDS | OPTIONAL_FIELDS))
        if taken:
            raise ConfigurationError(f"ProvenanceShape {self.name!r}: every shape has {taken}: name other fields")
        texts = self.provenance_fields - {"binding_method"}
        if not texts.issuperset(self.expiry_fields):
            raise ConfigurationError(
                f"ProvenanceShape {self.name!r}: expiry_fields are some of its provenance_fields, not binding_method"
            )
        if self.binding_method is not None and (
            "binding_method" not in self.provenance_fields or not is_text(self.binding_method)
        ):
            raise ConfigurationError(
                f"ProvenanceShape {self.name!r}: a binding_method of its own is a text, and needs the field "
                "'binding_method' in provenance_fields"
            )


MESSAGE_DELIVERY = ProvenanceShape(
    "message_delivery",
    frozenset({"channel", "thread_id", "event_id", "event_key", "delivery_id"})
    | {"delivery_message_id", "binding_method"},
)
"""An owner answered a message about this very action."""
BOUNDED_GRANT = ProvenanceShape(
    "bounded_grant",
    frozenset({"bounded_grant_id", "approval_source_request_id", "bounded_grant_expires_at_epoch", "binding_method"}),
    grants=True,
    binding_method="bounded_grant",
    expiry_fields=("bounded_grant_expires_at_epoch",),
)
"""An owner allowed actions like this one, once, until a time or in so many words without end."""


def _clash(shape: ProvenanceShape, other: ProvenanceShape) -> str | None:
    if shape.name == other.name:
        return "give it a name of its own"
    if shape.provenance_fields <= other.provenance_fields or shape.provenance_fields >= other.provenance_fields:
        return "the fields of one are all among those of the other: give each a field the other has not"
    if shape.binding_method is not None and shape.binding_method == other.binding_method:
        return f"the binding method {shape.binding_method!r} is reserved: give it another"
    return None


def _listed(fields: frozenset[str]) -> str:
    first = sorted(fields)[:5]
    return ", ".join(map(shown, first)) + (", …" if len(fields) > len(first) else "") or "none"


class ProvenanceShapes:
    """The shapes an application knows, none of which can be taken for another."""

    def __init__(self, shapes: Iterable[ProvenanceShape] = (MESSAGE_DELIVERY, BOUNDED_GRANT)) -> None:
        self._shapes: dict[str, ProvenanceShape] = {}
        for shape in shapes:
            self.register(shape)

    def register(self, shape: ProvenanceShape) -> None:
        """Know this shape from now on.

        Raises:
            ConfigurationError: it has the name of another, a field set within or around another's, or claims another's
                binding method.
        """
        for other in self._shapes.values():
            if (clash := _clash(shape, other)) is not None:
                raise ConfigurationError(f"ProvenanceShape {shape.name!r} collides with {other.name!r}: {clash}")
        self._shapes[shape.name] = shape

    def select(self, fields: Iterable[str]) -> ProvenanceShape:
        """The shape of evidence with these fields, optional ones aside.

        Raises:
            GateRefused: ``shape``; it says what the nearest one lacks or has too much.
        """
        found = frozenset(fields) - OPTIONAL_FIELDS
        for shape in self._shapes.values():
            if found == COMMON_FIELDS | shape.provenance_fields:
                return shape
        raise refused("shape", self._nearest(found))

    def reserved_by(self, binding_method: str) -> ProvenanceShape | None:
        """The shape whose own binding method this is."""
        owners = (shape for shape in self._shapes.values() if shape.binding_method is not None)
        return next((shape for shape in owners if same(shape.binding_method, binding_method)), None)

    def _nearest(self, found: frozenset[str]) -> str:
        wanted = {name: COMMON_FIELDS | shape.provenance_fields for name, shape in self._shapes.items()}
        if not wanted:
            return "no provenance shape is registered"
        name = min(wanted, key=lambda name: len(found ^ wanted[name]))
        missing, unknown = _listed(wanted[name] - found), _listed(found - wanted[name])
        return f"{REFUSALS['shape']} (nearest is {name}; missing: {missing}; unknown: {unknown})"


DEFAULT_SHAPES = ProvenanceShapes()
"""What is judged by where nothing else is given; an application registers its own shapes here, at import."""


# --- judgement -----------------------------------------------------------------------------------------------------


def owner_gate_validator(
    *, grantable: bool, shapes: ProvenanceShapes = DEFAULT_SHAPES, keys: ApprovalKeys | None = None
) -> GateValidator:
    """``validate_owner_gate`` with its settings given, for ``begin_owner_authorized_dispatch``."""

    def validator(action: Action, receipts: Sequence[Receipt], now: float) -> GateAuthorization:
        return validate_owner_gate(action, receipts, now=now, grantable=grantable, shapes=shapes, keys=keys)

    return validator


def validate_owner_gate(
    action: Action,
    receipts: Sequence[Receipt],
    *,
    now: float,
    grantable: bool,
    shapes: ProvenanceShapes = DEFAULT_SHAPES,
    keys: ApprovalKeys | None = None,
) -> GateAuthorization:
    """What the action's one gate authorizes at this moment.

    Args:
        now: seconds since 1970, by the store's clock.
        grantable: whether a standing grant may approve this type of action.
        keys: whose signature counts; then an approval without one authorizes nothing. Without keys a signature has to
            have the form of one, and proves nothing: ``key_id`` stays None.

    Raises:
        GateRefused: ``code`` names the binding that does not hold. Nothing else comes out, whatever is in the receipts.
    """
    receipt = check_bindings(action, receipts, now)
    evidence = dict(receipt["evidence"])
    shape = shapes.select(evidence)
    _check_provenance(evidence, shape, shapes, now)
    if shape.grants and grantable is not True:
        raise refused("not_grantable")
    return GateAuthorization(
        shape=shape.name,
        granted=shape.grants,
        receipt_key=receipt["receipt_key"],
        evidence_sha256=receipt["evidence_sha256"],
        approval_id=evidence["approval_id"],
        decision_id=evidence["decision_id"],
        revision=evidence["revision"],
        decided_at=float(evidence["decided_at_epoch"]),
        expires_at=float(evidence["expires_at_epoch"]),
        expired=False,
        key_id=_signer_of(evidence, keys, now),
    )


def check_bindings(
    action: Action,
    receipts: Sequence[Receipt],
    now: float,
    *,
    gate_receipt_key: str | None = None,
    approval_id: str | None = None,
    decision_id: str | None = None,
) -> Receipt:
    """The action's one gate receipt, once everything holds that does not depend on the shape of its evidence.

    Any store checks this itself, besides calling the validator. What is None is not asked for.

    Raises:
        GateRefused: ``code`` names the binding that does not hold.
    """
    receipt = _only_gate(receipts)
    if not is_text(receipt.get("receipt_key")):
        raise refused("gate_key", "the gate receipt has no key")
    evidence = _evidence_of(receipt)
    for field in sorted(_COMMON_TEXT):
        check_text(evidence, field)
    if type(evidence.get("revision")) is not int or evidence["revision"] != REVISION:
        raise refused("revision")
    asked_for = [
        ("gate_key", receipt["receipt_key"], gate_receipt_key),
        ("approval_id", evidence["approval_id"], approval_id),
        ("decision_id", evidence["decision_id"], decision_id),
    ]
    asked_for = [binding for binding in asked_for if binding[2] is not None]
    for code, found, wanted in [*_bindings(action, receipt, evidence), *asked_for]:
        if not same(found, wanted):
            raise refused(code, f"{REFUSALS[code]} (found {shown(found)}, wanted {shown(wanted)})")
    _check_times(evidence, now)
    return receipt


def _only_gate(receipts: Sequence[Receipt]) -> Receipt:
    listed = receipts if isinstance(receipts, Iterable) else ()
    gates = [each for each in listed if isinstance(each, Mapping) and same(each.get("kind"), GATE_RECEIPT_KIND)]
    if len(gates) != 1:
        raise refused("gate_count", f"{REFUSALS['gate_count']}, and this one has {len(gates)}")
    return gates[0]


def _evidence_of(receipt: Receipt) -> dict[str, Any]:
    evidence = receipt.get("evidence")
    if not isinstance(evidence, Mapping):
        raise refused("evidence")
    try:
        read = dict(evidence)
    except Exception as error:  # a mapping of somebody's own, which breaks while it is read
        raise refused("evidence") from error
    if not same(digest_or_refusal(read, "evidence"), receipt.get("evidence_sha256")):
        raise refused("evidence_digest")
    return read


def _bindings(action: Action, receipt: Receipt, evidence: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What the evidence says beside what it has to say, each under its code."""
    if not isinstance(action, Mapping):
        raise refused("action_id", "there is no action to compare the approval with")
    digest = digest_or_refusal(action.get("payload"), "payload")
    return [
        ("status", receipt.get("status"), PASSED),
        ("decision", evidence.get("decision"), APPROVED),
        ("authority", evidence.get("authority"), OWNER),
        ("payload", action.get("payload_sha256"), digest),
        ("action_digest", evidence.get("action_digest"), digest),
        ("action_id", action.get("action_id"), evidence["action_id"]),
        ("action_id", receipt.get("action_id"), evidence["action_id"]),
        ("external_id", receipt.get("external_id"), evidence["approval_id"]),
        *((code, action.get(name), evidence[code]) for code, name in BOUND_FIELDS.items() if code in evidence),
    ]


def _check_times(evidence: Mapping[str, Any], now: object) -> None:
    moment = epoch(now)
    decided = epoch(evidence.get("decided_at_epoch"))
    expires = epoch(evidence.get("expires_at_epoch"))
    if moment is None or moment <= 0:
        raise refused("time", "the store's clock shows no time")
    if decided is None or expires is None:
        raise refused("time")
    if decided > moment + SKEW_SECONDS:
        raise refused("decided_in_future", f"it was decided {decided - moment:.0f} s ahead of the store's clock")
    if expires <= decided:
        raise refused("expires_before_decided")
    if moment >= expires:
        raise refused("expired", f"the approval ended {moment - expires:.0f} s ago")


def _check_provenance(
    evidence: Mapping[str, Any], shape: ProvenanceShape, shapes: ProvenanceShapes, now: float
) -> None:
    for field in sorted(shape.provenance_fields.difference(shape.expiry_fields)):
        check_text(evidence, field)
    if "binding_method" in shape.provenance_fields:
        method = evidence["binding_method"]
        owner = shapes.reserved_by(method)
        if shape.binding_method is not None and not same(method, shape.binding_method):
            raise refused("binding_method", f"that of {shape.name} is {shape.binding_method!r}")
        if shape.binding_method is None and owner is not None:
            raise refused("binding_method", f"{shown(method)} is reserved for {owner.name}")
    for field in shape.expiry_fields:
        if same(evidence[field], UNLIMITED):
            continue
        end = epoch(evidence[field])
        if end is None:
            raise refused("time", f"{field} is neither a finite number nor 'unlimited'")
        if end <= max(now, evidence["decided_at_epoch"]):
            raise refused("grant_expired")


def _signer_of(evidence: Mapping[str, Any], keys: ApprovalKeys | None, now: float) -> str | None:
    if keys is None:
        if SIGNATURE in evidence:
            signature_parts(evidence[SIGNATURE])
        return None
    key_id = keys.check(evidence, now)
    for field, name in BOUND_FIELDS.items():
        if field not in evidence:
            raise refused(field, f"a signed approval names the action's {name} as {field!r}")
    return key_id


# --- evidence ------------------------------------------------------------------------------------------------------


def message_approval(
    action: Action,
    *,
    principal: str,
    channel: str,
    thread_id: str,
    event_id: str,
    decided_at: float,
    lifetime: float = 3600.0,
    event_key: str | None = None,
    delivery_id: str | None = None,
    delivery_message_id: str | None = None,
    binding_method: str = "reply",
    approval_id: str | None = None,
    decision_id: str | None = None,
) -> dict[str, Any]:
    """Evidence that an owner approved this very action, in a message or by a click.

    Args:
        principal: who approved.
        channel: where: ``"web"``, ``"slack"``; ``thread_id`` names the conversation or form, ``event_id`` the answer.
        decided_at: seconds since 1970.
        lifetime: seconds until the approval ends.
        event_key: this, ``delivery_id`` and ``delivery_message_id`` are ``event_id`` where not given.
        approval_id: drawn where not given, and so is ``decision_id``.

    Raises:
        GateRefused: ``payload``, where the action's payload is not what its digest was made of.
    """
    return {
        **_approval(action, principal, decided_at, lifetime, approval_id, decision_id),
        "channel": channel,
        "thread_id": thread_id,
        "event_id": event_id,
        "event_key": event_id if event_key is None else event_key,
        "delivery_id": event_id if delivery_id is None else delivery_id,
        "delivery_message_id": event_id if delivery_message_id is None else delivery_message_id,
        "binding_method": binding_method,
    }


def grant_approval(
    action: Action,
    *,
    principal: str,
    grant_id: str,
    source_request_id: str,
    grant_expires_at: float | Literal["unlimited"],
    decided_at: float,
    lifetime: float = 3600.0,
    approval_id: str | None = None,
    decision_id: str | None = None,
) -> dict[str, Any]:
    """Evidence that a standing grant of the owner's covers this action.

    Args:
        principal: who gave the grant.
        source_request_id: of the request in whose approval the grant was given.
        grant_expires_at: seconds since 1970, or ``"unlimited"``; the rest as ``message_approval`` has it.
    """
    return {
        **_approval(action, principal, decided_at, lifetime, approval_id, decision_id),
        "bounded_grant_id": grant_id,
        "approval_source_request_id": source_request_id,
        "bounded_grant_expires_at_epoch": grant_expires_at,
        "binding_method": BOUNDED_GRANT.binding_method,
    }


def _approval(
    action: Action,
    principal: str,
    decided_at: float,
    lifetime: float,
    approval_id: str | None,
    decision_id: str | None,
) -> dict[str, Any]:
    if epoch(lifetime) is None or lifetime <= 0:
        raise ConfigurationError(f"lifetime = {lifetime!r:.60}: give the seconds the approval lasts, above 0")
    # Of the payload the approver was shown, and not of the digest beside it: whoever served both could have lied.
    digest = digest_or_refusal(action["payload"], "payload")
    if not same(digest, action["payload_sha256"]):
        raise refused("payload")
    return {
        "decision": APPROVED,
        "authority": OWNER,
        "decision_id": f"DEC-{uuid.uuid4()}" if decision_id is None else decision_id,
        "approval_id": f"APR-{uuid.uuid4()}" if approval_id is None else approval_id,
        "action_id": action["action_id"],
        "action_digest": digest,
        "revision": REVISION,
        "principal": principal,
        "decided_at_epoch": float(decided_at),
        "expires_at_epoch": float(decided_at + lifetime),
        **{field: action[name] for field, name in BOUND_FIELDS.items()},
    }
