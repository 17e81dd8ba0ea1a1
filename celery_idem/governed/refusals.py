"""Why a gate is refused: every code with its meaning and the next step, and what text and time evidence may hold.

Pure words and forms. Which binding is refused when is ``gate``'s, and for signatures ``signing``'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from celery_idem.errors import GateRefused, PayloadRefused
from celery_idem.governed.canonical import digest_json

LONGEST_TEXT = 512

REFUSALS: dict[str, str] = {
    "gate_count": "an action has exactly one gate receipt",
    "gate_key": "the gate receipt is not the one that was asked for",
    "status": "the gate receipt's status is not 'passed'",
    "evidence": "the gate's evidence is no JSON object that can be read",
    "evidence_digest": "the gate's evidence is not what its digest was made of",
    "shape": "the evidence has not exactly the fields of one registered provenance shape",
    "decision": "the decision is not 'approved'",
    "authority": "the authority is not 'owner'",
    "action_id": "the approval is of another action",
    "action_type": "the action's type is not the one that was approved or asked for",
    "action_source": "the action's source is not the one that was approved",
    "action_digest": "the approval is of another payload",
    "payload": "the action's payload is not what its digest was made of, or not the one that was asked for",
    "revision": "the evidence is not of revision 1, the only one there is",
    "external_id": "the gate receipt's external_id is not the approval's id",
    "approval_id": "the approval is not the one that was asked for",
    "decision_id": "the decision is not the one that was asked for",
    "field": "a field of the evidence is no printable text, blank, or longer than 512 characters",
    "binding_method": "the binding method is not the shape's own, or is another's",
    "time": "a time is no finite number of seconds since 1970",
    "decided_in_future": "the approval was decided more than 30 s ahead of the store's clock",
    "expires_before_decided": "the approval ends before it was decided",
    "expired": "the approval has ended",
    "grant_expired": "the grant behind the approval has ended",
    "not_grantable": "no standing grant covers this type of action",
    "unsigned": "approvals must be signed here, and this one is not",
    "unknown_key": "the approval is signed with a key that is not configured",
    "key_expired": "the key that signed the approval has ended",
    "signature": "the signature does not fit the approval",
    "source": "the action's source is not the one that was asked for",
    "source_ref": "the action's source_ref is not the one that was asked for",
    "validator": "the gate validator did not answer with a live authorization of this gate",
    "contract_exists": "the action has its recovery contract already, so its one attempt was made",
}
"""Every ``GateRefused.code`` there is, and what it means."""

_NEXT = {
    "gate_count": "propose the action again, and record one approval",
    "not_grantable": "have the owner approve this very action",
    "unsigned": "sign it with ApprovalSigner before it is recorded",
    "unknown_key": "add the public key to governed_approval_keys, or sign with one that is there",
    "key_expired": "sign with a key that is still good",
    "validator": "let it raise or return a GateAuthorization, as owner_gate_validator does",
    "contract_exists": "observe the action, it is never dispatched again",
}
_NEXT_OF_ALL = "have it approved again; if it has ended, propose it first, under another idempotency key"


def refused(code: str, detail: str = "") -> GateRefused:
    """The refusal to raise; ``code`` is one of ``REFUSALS``, whose meaning is told where there is no detail."""
    return GateRefused(f"gate refused, {code}: {detail or REFUSALS[code]}: {_NEXT.get(code, _NEXT_OF_ALL)}", code=code)


def is_text(value: object) -> bool:
    """Whether it is printable text of at most 512 characters that is not blank."""
    return isinstance(value, str) and len(value) <= LONGEST_TEXT and bool(value.strip()) and value.isprintable()


def check_text(evidence: Mapping[str, Any], field: str) -> None:
    """``GateRefused`` (``field``) where the evidence has no such text there."""
    if not is_text(evidence.get(field)):
        raise refused("field", f"{field} is no printable text, blank, or longer than {LONGEST_TEXT} characters")


def epoch(value: object) -> float | None:
    """Seconds since 1970, or None where the value is no finite number; True is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) else None


def digest_or_refusal(value: object, code: str) -> str:
    """The value's digest; ``GateRefused`` of this code where it has no canonical JSON."""
    try:
        return digest_json(value, where=code)
    except PayloadRefused as error:
        raise refused(code, str(error)) from error
    except ValueError as error:  # a whole number so long that Python will not even write it into a message
        raise refused(code) from error


def shown(value: object) -> str:
    """A short form of any value, for messages."""
    return ascii(value[:64]) if isinstance(value, str) else f"a {type(value).__name__}"
