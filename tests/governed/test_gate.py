"""The owner's gate: each binding by itself, every boundary of time, and garbage of every kind."""

from __future__ import annotations

import ast
import math
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import celery_idem.governed
from celery_idem.errors import ConfigurationError, GateRefused, PayloadRefused
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.gate import (
    BOUNDED_GRANT,
    DEFAULT_SHAPES,
    MESSAGE_DELIVERY,
    REFUSALS,
    ProvenanceShape,
    ProvenanceShapes,
    check_bindings,
    grant_approval,
    message_approval,
    owner_gate_validator,
    refused,
    validate_owner_gate,
)
from celery_idem.governed.signing import ApprovalKey, ApprovalKeys, ApprovalSigner, generate_key

NOW = 2_000_000_000.0
PAYLOAD = {"order": 7, "amount": "12.50", "lines": [1, 2.5, True, None]}
ACTION: dict[str, Any] = {
    "action_id": "act-1",
    "action_type": "payments.refund",
    "source": "shop",
    "payload": PAYLOAD,
    "payload_sha256": digest_json(PAYLOAD),
}
GONE = object()
"""A field that is taken away."""
PEM, PUBLIC = generate_key()
SIGNER = ApprovalSigner.from_pem("2026", PEM)
KEYS = ApprovalKeys({"2026": PUBLIC})

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


def message(**changed: Any) -> dict[str, Any]:
    """Evidence of an approval by message, and what is changed about it."""
    evidence = message_approval(
        ACTION, principal="ann@example.org", channel="web", thread_id="t-1", event_id="click-1", decided_at=NOW - 60
    )
    return changed_by(evidence, changed)


def grant(**changed: Any) -> dict[str, Any]:
    """Evidence of an approval by a standing grant, and what is changed about it."""
    evidence = grant_approval(
        ACTION,
        principal="ann@example.org",
        grant_id="G-1",
        source_request_id="R-1",
        grant_expires_at=NOW + 86_400,
        decided_at=NOW - 60,
    )
    return changed_by(evidence, changed)


def changed_by(mapping: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**mapping, **changes}.items() if value is not GONE}


def gate_of(evidence: Any, /, **changed: Any) -> dict[str, Any]:
    """The gate receipt a store would keep of this evidence, its digest right wherever there can be one."""
    try:
        digest = digest_json(dict(evidence) if isinstance(evidence, Mapping) else evidence)
    except (PayloadRefused, ValueError):
        digest = "0" * 64
    receipt = {
        "action_id": ACTION["action_id"],
        "receipt_key": "owner-gate",
        "kind": records.GATE_RECEIPT_KIND,
        "status": "passed",
        "external_id": evidence.get("approval_id") if isinstance(evidence, Mapping) else None,
        "evidence": evidence,
        "evidence_sha256": digest,
        "observed_at": NOW,
        "created_at": NOW,
    }
    return changed_by(receipt, changed)


def code_of(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The code of the refusal that comes of this call."""
    with pytest.raises(GateRefused) as caught:
        call(*args, **kwargs)
    assert str(caught.value).startswith(f"gate refused, {caught.value.code}: ")
    assert len(str(caught.value)) < 1_000
    return caught.value.code


def judged(evidence: Any, *, now: float = NOW, **options: Any) -> records.GateAuthorization:
    return validate_owner_gate(ACTION, [gate_of(evidence)], now=now, **{"grantable": True, **options})


@dataclass(frozen=True)
class Wrong:
    """One thing that is wrong, and the code it is refused with."""

    code: str
    evidence: Any
    receipt: Mapping[str, Any] = field(default_factory=dict)
    action: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class _Unwritable:
    pass


class _BreaksOff(UserDict[str, Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("broke off")


WRONG = [
    Wrong("gate_count", message(), receipt={"kind": "acceptance"}),
    Wrong("gate_count", message(), receipt={"kind": GONE}),
    Wrong("gate_key", message(), receipt={"receipt_key": GONE}),
    Wrong("gate_key", message(), receipt={"receipt_key": " "}),
    Wrong("gate_key", message(), receipt={"receipt_key": 7}),
    Wrong("status", message(), receipt={"status": "failed"}),
    Wrong("status", message(), receipt={"status": None}),
    Wrong("status", message(), receipt={"status": GONE}),
    Wrong("evidence", message(), receipt={"evidence": GONE}),
    Wrong("evidence", None),
    Wrong("evidence", message(), receipt={"evidence": _BreaksOff(message())}),
    Wrong("evidence", "approved"),
    Wrong("evidence", [["decision", "approved"]]),
    Wrong("evidence", message(thread_id=math.nan)),
    Wrong("evidence", message(thread_id=math.inf)),
    Wrong("evidence", message(thread_id=10**400)),
    Wrong("evidence", message(thread_id="\ud800")),
    Wrong("evidence", message(thread_id=b"t-1")),
    Wrong("evidence", message(thread_id=_Unwritable())),
    Wrong("evidence", message(thread_id="x" * 70_000)),
    Wrong("evidence", {**message(), 7: "seven"}),
    Wrong("evidence", {**message(), 10**5000: "a key that cannot even be shown"}),
    Wrong("evidence_digest", message(), receipt={"evidence_sha256": "0" * 64}),
    Wrong("evidence_digest", message(), receipt={"evidence_sha256": None}),
    Wrong("evidence_digest", message(), receipt={"evidence_sha256": GONE}),
    Wrong("shape", message(note="one field too many")),
    Wrong("shape", message(thread_id=GONE)),
    Wrong("shape", message(bounded_grant_id="G-1")),
    Wrong("shape", {**message(), **grant()}),
    Wrong("shape", message(**dict.fromkeys(MESSAGE_DELIVERY.provenance_fields, GONE))),
    Wrong("shape", message(), options={"shapes": ProvenanceShapes([])}),
    Wrong("shape", grant(), options={"shapes": ProvenanceShapes([MESSAGE_DELIVERY])}),
    Wrong("decision", message(decision="rejected")),
    Wrong("decision", message(decision="Approved")),
    Wrong("decision", message(decision=True)),
    Wrong("decision", message(decision=GONE)),
    Wrong("authority", message(authority="agent")),
    Wrong("authority", message(authority=GONE)),
    Wrong("action_id", message(action_id="act-2")),
    Wrong("action_id", message(), receipt={"action_id": "act-2"}),
    Wrong("action_id", message(), receipt={"action_id": GONE}),
    Wrong("action_id", message(), action={"action_id": "act-2"}),
    Wrong("action_id", message(), action={"action_id": GONE}),
    Wrong("action_type", message(action_type="payments.charge")),
    Wrong("action_type", message(), action={"action_type": "payments.charge"}),
    Wrong("action_type", message(action_type=None)),
    Wrong("action_type", SIGNER.sign(message(action_type=GONE)), options={"keys": KEYS}),
    Wrong("action_source", message(action_source="billing")),
    Wrong("action_source", message(), action={"source": "billing"}),
    Wrong("action_source", SIGNER.sign(message(action_source=GONE)), options={"keys": KEYS}),
    Wrong("action_digest", message(action_digest=digest_json({"order": 8}))),
    Wrong("action_digest", message(action_digest=digest_json(PAYLOAD).upper())),
    Wrong("action_digest", message(action_digest=None)),
    Wrong("payload", message(), action={"payload": {"order": 8}}),
    Wrong("payload", message(), action={"payload_sha256": digest_json({"order": 8})}),
    Wrong("payload", message(), action={"payload_sha256": GONE}),
    Wrong("payload", message(), action={"payload": math.nan}),
    Wrong("revision", message(revision=0)),
    Wrong("revision", message(revision=2)),
    Wrong("revision", message(revision=True)),
    Wrong("revision", message(revision=1.0)),
    Wrong("revision", message(revision="1")),
    Wrong("revision", message(revision=GONE)),
    Wrong("external_id", message(), receipt={"external_id": "APR-other"}),
    Wrong("external_id", message(), receipt={"external_id": None}),
    Wrong("external_id", message(), receipt={"external_id": GONE}),
    *(
        Wrong("field", make(**{name: value}))
        for make, names in (
            (message, {"decision_id", "approval_id", "action_id", "principal", *MESSAGE_DELIVERY.provenance_fields}),
            (grant, BOUNDED_GRANT.provenance_fields.difference(BOUNDED_GRANT.expiry_fields)),
        )
        for name in sorted(names)
        for value in ("", " \t\n", "x" * 513, 7, None, ["x"])
    ),
    Wrong("binding_method", message(binding_method="bounded_grant")),
    Wrong("binding_method", grant(binding_method="reply")),
    Wrong("binding_method", grant(binding_method="bounded_grant ")),
    *(
        Wrong("time", message(**{name: value}))
        for name in ("decided_at_epoch", "expires_at_epoch")
        for value in (True, False, None, "2000000000", [], {}, GONE)
    ),
    *(
        Wrong("time", grant(bounded_grant_expires_at_epoch=value))
        for value in (True, None, "never", "Unlimited", "", [], str(NOW + 60))
    ),
    *(
        Wrong("time", message(), options={"now": value})
        for value in (None, True, "2000000000", 0, -1.0, math.nan, math.inf, -math.inf, 10**400, [])
    ),
    Wrong("decided_in_future", message(decided_at_epoch=NOW + 30.001, expires_at_epoch=NOW + 60)),
    Wrong("expires_before_decided", message(decided_at_epoch=NOW, expires_at_epoch=NOW - 1)),
    Wrong("expires_before_decided", message(decided_at_epoch=NOW, expires_at_epoch=NOW)),
    Wrong("expired", message(expires_at_epoch=NOW)),
    Wrong("expired", message(), options={"now": NOW + 3540}),
    Wrong("expired", grant(expires_at_epoch=NOW - 1)),
    Wrong("grant_expired", grant(bounded_grant_expires_at_epoch=NOW)),
    Wrong("grant_expired", grant(bounded_grant_expires_at_epoch=-1)),
    Wrong("grant_expired", grant(decided_at_epoch=NOW + 20, bounded_grant_expires_at_epoch=NOW + 10)),
    Wrong("not_grantable", grant(), options={"grantable": False}),
    Wrong("not_grantable", grant(bounded_grant_expires_at_epoch="unlimited"), options={"grantable": False}),
    Wrong("not_grantable", grant(), options={"grantable": "no"}),
    Wrong("not_grantable", SIGNER.sign(grant()), options={"grantable": False, "keys": KEYS}),
    Wrong("unsigned", message(), options={"keys": KEYS}),
    Wrong("unsigned", message(action_type=GONE, action_source=GONE), options={"keys": KEYS}),
    Wrong("unknown_key", SIGNER.sign(message()), options={"keys": ApprovalKeys({"2027": PUBLIC})}),
    Wrong("key_expired", SIGNER.sign(message()), options={"keys": ApprovalKeys({"2026": ApprovalKey(PUBLIC, NOW)})}),
    Wrong("signature", {**SIGNER.sign(message()), "principal": "eve@example.org"}, options={"keys": KEYS}),
    *(
        Wrong("signature", message(signature=value), options={"keys": keys})
        for value in ({}, None, "x", {"key_id": "2026"}, {"key_id": "2026", "value": "00"})
        for keys in (None, KEYS)
    ),
]
ASKED_FOR = {"gate_key": "gate_receipt_key", "approval_id": "approval_id", "decision_id": "decision_id"}
STORES_OWN = {"source", "source_ref", "validator", "contract_exists"}


class TestWhatIsRefused:
    @pytest.mark.parametrize("wrong", WRONG, ids=[f"{wrong.code}-{number}" for number, wrong in enumerate(WRONG)])
    def test_the_one_thing_that_is_wrong_is_named(self, wrong: Wrong) -> None:
        action, receipt = changed_by(ACTION, wrong.action), gate_of(wrong.evidence, **wrong.receipt)
        options = {"now": NOW, "grantable": True, **wrong.options}
        assert code_of(validate_owner_gate, action, [receipt], **options) == wrong.code

    @pytest.mark.parametrize(("code", "argument"), ASKED_FOR.items())
    def test_what_was_asked_for_is_what_is_there(self, code: str, argument: str) -> None:
        receipt = gate_of(message(approval_id="APR-1", decision_id="DEC-1"))
        right = {"gate_receipt_key": "owner-gate", "approval_id": "APR-1", "decision_id": "DEC-1"}
        assert check_bindings(ACTION, [receipt], NOW, **right) is receipt
        for other in ("another", "", 7):
            assert code_of(check_bindings, ACTION, [receipt], NOW, **{**right, argument: other}) == code

    @pytest.mark.parametrize("action", [None, 7, "act-1", []])
    def test_no_action_no_approval(self, action: Any) -> None:
        assert code_of(validate_owner_gate, action, [gate_of(message())], now=NOW, grantable=True) == "action_id"

    @pytest.mark.parametrize("receipts", [None, 7, "gate", [], [None, 7, "gate"], {}, [[gate_of(message())]]])
    def test_no_receipt_no_approval(self, receipts: Any) -> None:
        assert code_of(validate_owner_gate, ACTION, receipts, now=NOW, grantable=True) == "gate_count"

    @pytest.mark.parametrize("changed", [{}, {"receipt_key": "second"}, {"status": "failed"}, {"evidence": None}])
    def test_a_second_gate_of_whatever_kind_leaves_none(self, changed: dict[str, Any]) -> None:
        receipts = [gate_of(message()), gate_of(message(), **changed)]
        for order in (receipts, receipts[::-1]):
            assert code_of(validate_owner_gate, ACTION, order, now=NOW, grantable=True) == "gate_count"

    def test_messages_do_not_repeat_what_might_be_huge_or_unprintable(self) -> None:
        with pytest.raises(GateRefused) as caught:
            judged({**message(), "x" * 5_000: "\x1b[31m", "y\n": 1})
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()

    def test_the_next_step_is_at_the_end(self) -> None:
        assert str(refused("expired")).endswith(
            "have it approved again; if it has ended, propose it first, under another idempotency key"
        )
        assert str(refused("unsigned")).endswith("sign it with ApprovalSigner before it is recorded")

    def test_every_shape_says_what_is_missing_and_what_is_too_much(self) -> None:
        with pytest.raises(GateRefused, match="nearest is message_delivery; missing: 'thread_id'; unknown: 'thread'"):
            judged(message(thread_id=GONE, thread="t-1"))

    @pytest.mark.parametrize(("extra", "says"), [(5, r"'x3', 'x4'\)"), (6, r"'x3', 'x4', …\)")])
    def test_of_many_fields_the_first_five_are_named(self, extra: int, says: str) -> None:
        with pytest.raises(GateRefused, match=rf"missing: none; unknown: 'x0', 'x1', 'x2', {says}"):
            judged({**message(), **{f"x{number}": "more" for number in range(extra)}})


class TestWhatIsAuthorized:
    def test_an_approval_by_message(self) -> None:
        receipt = gate_of(message(approval_id="APR-1", decision_id="DEC-1"))
        assert validate_owner_gate(ACTION, [receipt], now=NOW, grantable=False) == records.GateAuthorization(
            shape="message_delivery",
            granted=False,
            receipt_key="owner-gate",
            evidence_sha256=receipt["evidence_sha256"],
            approval_id="APR-1",
            decision_id="DEC-1",
            revision=1,
            decided_at=NOW - 60,
            expires_at=NOW + 3540,
            expired=False,
        )

    @pytest.mark.parametrize("end", [NOW + 0.001, int(NOW) + 1, "unlimited"])
    def test_a_standing_grant_where_the_type_allows_one(self, end: Any) -> None:
        authorization = judged(grant(bounded_grant_expires_at_epoch=end))
        assert (authorization.shape, authorization.granted) == ("bounded_grant", True)

    def test_a_signed_approval_names_its_key(self) -> None:
        assert judged(SIGNER.sign(message()), keys=KEYS).key_id == "2026"
        assert judged(SIGNER.sign(grant()), keys=KEYS).key_id == "2026"

    def test_without_keys_a_signature_is_allowed_and_proves_nothing(self) -> None:
        forged = {"key_id": "2026", "value": "0" * 128}
        assert judged(message(signature=forged)).key_id is None

    def test_evidence_need_not_repeat_type_and_source_where_nothing_is_signed(self) -> None:
        assert judged(message(action_type=GONE, action_source=GONE)).shape == "message_delivery"

    def test_texts_may_have_512_characters(self) -> None:
        assert judged(message(approval_id="x" * 512, thread_id=" \N{SNOWMAN}" * 256)).approval_id == "x" * 512

    def test_other_receipts_do_not_count(self) -> None:
        other = gate_of({"schema": "x"}, kind="acceptance", receipt_key="answer")
        assert validate_owner_gate(ACTION, [other, gate_of(message()), other], now=NOW, grantable=False)

    def test_any_mapping_will_do(self) -> None:
        receipt, evidence = gate_of(message()), message()
        read_only = MappingProxyType({**gate_of(evidence), "evidence": UserDict(evidence)})
        assert validate_owner_gate(MappingProxyType(ACTION), (read_only,), now=int(NOW), grantable=False)
        assert receipt.keys() == read_only.keys()

    def test_the_validator_for_a_store_judges_the_same(self) -> None:
        validator = owner_gate_validator(grantable=False, keys=KEYS)
        receipt = gate_of(SIGNER.sign(message()))
        assert validator(ACTION, [receipt], NOW) == validate_owner_gate(
            ACTION, [receipt], now=NOW, grantable=False, keys=KEYS
        )
        assert code_of(validator, ACTION, [gate_of(SIGNER.sign(grant()))], NOW) == "not_grantable"
        assert code_of(validator, ACTION, [gate_of(message())], NOW) == "unsigned"


class TestTime:
    def test_an_approval_ends_at_its_last_moment(self) -> None:
        evidence = message(decided_at_epoch=NOW, expires_at_epoch=NOW + 10)
        assert judged(evidence, now=math.nextafter(NOW + 10, 0))
        assert code_of(judged, evidence, now=NOW + 10) == "expired"

    def test_a_grant_ends_at_its_last_moment(self) -> None:
        evidence = grant(bounded_grant_expires_at_epoch=NOW + 10)
        assert judged(evidence, now=math.nextafter(NOW + 10, 0))
        assert code_of(judged, evidence, now=NOW + 10) == "grant_expired"

    def test_the_approvers_clock_may_be_ahead_by_half_a_minute(self) -> None:
        evidence = message(decided_at_epoch=NOW + 30, expires_at_epoch=NOW + 90)
        assert judged(evidence, now=NOW)
        assert code_of(judged, evidence, now=math.nextafter(NOW, 0)) == "decided_in_future"

    def test_a_refusal_says_how_long_ago_it_ended(self) -> None:
        with pytest.raises(GateRefused, match="gate refused, expired: the approval ended 12 s ago: "):
            judged(message(), now=NOW + 3552)


TICKET = ProvenanceShape("ticket", frozenset({"ticket", "closes_at", "binding_method"}), expiry_fields=("closes_at",))
PASS = ProvenanceShape("pass", frozenset({"pass_id", "binding_method"}), grants=True, binding_method="pass")


def evidence_of(shape: ProvenanceShape, **provenance: Any) -> dict[str, Any]:
    common = message(**dict.fromkeys(MESSAGE_DELIVERY.provenance_fields, GONE))
    assert provenance.keys() == shape.provenance_fields
    return {**common, **provenance}


class TestShapes:
    def test_an_application_has_shapes_of_its_own(self) -> None:
        shapes = ProvenanceShapes()
        shapes.register(TICKET)
        evidence = evidence_of(TICKET, ticket="T-1", closes_at=NOW + 10, binding_method="desk")
        assert judged(evidence, shapes=shapes, grantable=False).shape == "ticket"
        assert code_of(judged, evidence, shapes=shapes, now=NOW + 10) == "grant_expired"
        assert code_of(judged, {**evidence, "closes_at": "soon"}, shapes=shapes) == "time"
        assert code_of(judged, {**evidence, "binding_method": "bounded_grant"}, shapes=shapes) == "binding_method"
        assert code_of(judged, evidence) == "shape"
        assert judged(message(), shapes=shapes)

    def test_a_grant_of_its_own_covers_no_type_that_is_not_grantable(self) -> None:
        shapes = ProvenanceShapes([MESSAGE_DELIVERY, BOUNDED_GRANT, PASS])
        evidence = evidence_of(PASS, pass_id="P-1", binding_method="pass")
        assert judged(evidence, shapes=shapes, grantable=True).granted
        assert code_of(judged, evidence, shapes=shapes, grantable=False) == "not_grantable"
        assert code_of(judged, message(binding_method="pass"), shapes=shapes) == "binding_method"
        assert judged(message(binding_method="pass")), "nobody reserved it there"

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"name": "_".join(("message", "delivery"))}, "'message_delivery': give it a name of its own"),
            ({"provenance_fields": MESSAGE_DELIVERY.provenance_fields}, "'message_delivery': the fields of one"),
            ({"provenance_fields": MESSAGE_DELIVERY.provenance_fields - {"channel"}}, "'message_delivery': the fields"),
            ({"provenance_fields": BOUNDED_GRANT.provenance_fields | {"more"}}, "'bounded_grant': the fields of one"),
            (
                {"binding_method": "_".join(("bounded", "grant"))},
                "'bounded_grant': the binding method 'bounded_grant' is reserved",
            ),
        ],
    )
    def test_a_shape_that_could_be_taken_for_another_is_refused(self, fields: dict[str, Any], says: str) -> None:
        shapes = ProvenanceShapes()
        with pytest.raises(ConfigurationError, match=says):
            shapes.register(replace(PASS, **fields))
        with pytest.raises(GateRefused):
            shapes.select({*PASS.provenance_fields})
        shapes.register(PASS)

    @pytest.mark.parametrize(
        "fields",
        [
            {"name": ""},
            {"name": None},
            {"provenance_fields": frozenset()},
            {"provenance_fields": frozenset({"binding_method", 7})},
            {"provenance_fields": frozenset({"binding_method", ""})},
            {"provenance_fields": frozenset({"binding_method", "principal"})},
            {"provenance_fields": frozenset({"binding_method", "signature"})},
            {"provenance_fields": frozenset({"binding_method", "action_type"})},
            {"provenance_fields": frozenset({"pass_id"})},
            {"binding_method": ""},
            {"binding_method": 7},
            {"expiry_fields": ("ends_at",)},
            {"expiry_fields": ("binding_method",)},
        ],
    )
    def test_a_shape_that_cannot_be_is_refused_where_it_is_made(self, fields: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="ProvenanceShape "):
            replace(PASS, **fields)

    def test_nobody_changes_a_shape(self) -> None:
        with pytest.raises(FrozenInstanceError):
            BOUNDED_GRANT.grants = False  # type: ignore[misc]

    def test_the_two_that_ship_are_the_default(self) -> None:
        assert DEFAULT_SHAPES.select(message()) is MESSAGE_DELIVERY
        assert DEFAULT_SHAPES.select(SIGNER.sign(grant())) is BOUNDED_GRANT


class TestEvidence:
    def test_it_lasts_as_long_as_it_says_and_draws_its_ids(self) -> None:
        one, two = message(), message()
        assert one["expires_at_epoch"] - one["decided_at_epoch"] == 3600.0
        assert one["approval_id"].startswith("APR-")
        assert one["decision_id"].startswith("DEC-")
        assert len({one["approval_id"], two["approval_id"], one["decision_id"], two["decision_id"]}) == 4

    def test_what_is_not_told_about_the_delivery_is_the_event(self) -> None:
        assert {message()[name] for name in ("event_id", "event_key", "delivery_id", "delivery_message_id")} == {
            "click-1"
        }
        told = message_approval(
            ACTION,
            principal="ann",
            channel="slack",
            thread_id="t",
            event_id="e",
            event_key="k",
            delivery_id="d",
            delivery_message_id="m",
            binding_method="button",
            approval_id="APR-1",
            decision_id="DEC-1",
            decided_at=NOW,
            lifetime=10,
        )
        given = ("event_id", "event_key", "delivery_id", "delivery_message_id", "binding_method", "expires_at_epoch")
        assert [told[name] for name in given] == ["e", "k", "d", "m", "button", NOW + 10]
        assert judged(told).approval_id == "APR-1"

    @pytest.mark.parametrize(
        "changed", [{"payload": {"order": 8}}, {"payload": math.nan}, {"payload_sha256": "0" * 64}]
    )
    def test_nobody_approves_a_payload_by_another_ones_digest(self, changed: dict[str, Any]) -> None:
        action = {**ACTION, **changed}
        where = {"channel": "web", "thread_id": "t", "event_id": "e"}
        assert code_of(message_approval, action, principal="ann", decided_at=NOW, **where) == "payload"

    def test_an_approval_lasts_an_hour_where_nothing_else_is_said(self) -> None:
        for evidence in (message(), grant()):
            assert evidence["expires_at_epoch"] - evidence["decided_at_epoch"] == 3600
        where = {"principal": "ann", "channel": "web", "thread_id": "t", "event_id": "e", "decided_at": NOW}
        assert message_approval(ACTION, lifetime=0.5, **where)["expires_at_epoch"] == NOW + 0.5

    @pytest.mark.parametrize("lifetime", [0, -1, math.nan, "an hour"])
    def test_an_approval_lasts_more_than_no_time(self, lifetime: Any) -> None:
        where = {"principal": "ann", "channel": "web", "thread_id": "t", "event_id": "e", "decided_at": NOW}
        with pytest.raises(ConfigurationError, match=f"lifetime = {lifetime!r}: "):
            message_approval(ACTION, lifetime=lifetime, **where)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, math.nan, math.inf, -math.inf, -0.0, NOW, NOW - 1, "unlimited", "x" * 600, "\ud800"])
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=4)
    | st.builds(object)
    | st.just(GONE),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3).map(MappingProxyType)
        | st.dictionaries(st.sampled_from(["key_id", "value"]), inner, max_size=2)
    ),
    max_leaves=6,
)
evidence_fields = st.sampled_from(sorted({*message(), *grant(), "signature", "extra"}))
receipt_fields = st.sampled_from(sorted(gate_of(message())))
action_fields = st.sampled_from(sorted(ACTION))
FREE = {
    "principal",
    "decision_id",
    "approval_id",
    *MESSAGE_DELIVERY.provenance_fields,
    *BOUNDED_GRANT.provenance_fields,
}


class TestGarbage:
    @any_speed
    @given(
        evidence=st.dictionaries(evidence_fields, anything, max_size=4),
        receipt=st.dictionaries(receipt_fields, anything, max_size=2),
        action=st.dictionaries(action_fields, anything, max_size=1),
        make=st.sampled_from([message, grant]),
        keys=st.sampled_from([None, KEYS]),
        now=st.just(NOW) | anything,
    )
    def test_only_a_refusal_comes_out_of_it(
        self,
        evidence: dict[str, Any],
        receipt: dict[str, Any],
        action: dict[str, Any],
        make: Callable[..., dict[str, Any]],
        keys: ApprovalKeys | None,
        now: Any,
    ) -> None:
        stored = gate_of(make(**evidence), **receipt)
        with suppress(GateRefused):
            found = validate_owner_gate(changed_by(ACTION, action), [stored], now=now, grantable=True, keys=keys)
            assert keys is None
            assert isinstance(found, records.GateAuthorization)
            assert all(value is GONE or text_or_time(value) for name, value in evidence.items() if name in FREE)

    @any_speed
    @given(
        action=anything | st.dictionaries(action_fields, anything),
        receipts=anything
        | st.lists(st.dictionaries(receipt_fields, anything).map(lambda gate: {**gate, "kind": "gate"})),
        now=anything,
    )
    def test_nothing_but_garbage_is_never_authorized(self, action: Any, receipts: Any, now: Any) -> None:
        for call in (validate_owner_gate, check_bindings):
            options = {"grantable": True, "now": now} if call is validate_owner_gate else {"now": now}
            assert code_of(call, action, receipts, **options) in REFUSALS


def text_or_time(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


class TestCodes:
    def test_every_code_is_reached_and_every_one_reached_is_known(self) -> None:
        assert {wrong.code for wrong in WRONG} | set(ASKED_FOR) | STORES_OWN == set(REFUSALS)

    def test_the_package_refuses_with_no_other_code(self) -> None:
        package = Path(celery_idem.governed.__file__).parent
        raised = {path.name: codes_in(path.read_text("utf-8")) for path in package.rglob("*.py")}
        assert set().union(*raised.values()) <= set(REFUSALS), raised
        assert {"gate_count", "expired", "not_grantable"} <= raised["gate.py"]
        assert {"unsigned", "unknown_key", "key_expired", "signature"} <= raised["signing.py"]

    def test_a_wrong_code_would_be_noticed(self) -> None:
        assert codes_in('raise refused("one"); gate.refused("two", "x"); GateRefused("x", code="three")') == {
            "one",
            "two",
            "three",
        }

    def test_every_meaning_is_one_sentence(self) -> None:
        assert all(meaning and not meaning.endswith(".") and ". " not in meaning for meaning in REFUSALS.values())


def codes_in(source: str) -> set[str]:
    """The literal codes of every refusal that is made in this source."""
    found: set[str] = set()
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, (ast.Name, ast.Attribute)):
            called = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
            codes = call.args[:1] if called == "refused" else []
            codes += [keyword.value for keyword in call.keywords if called == "GateRefused" and keyword.arg == "code"]
            found |= {str(code.value) for code in codes if isinstance(code, ast.Constant)}
    return found
