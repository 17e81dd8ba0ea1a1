"""The owner's gate: evidence, receipts, actions, keys and times of every shape, most of them nearly right."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from celery_idem.errors import GateRefused, PayloadRefused
from celery_idem.governed.canonical import canonical_json, digest_json
from celery_idem.governed.gate import REFUSALS, grant_approval, message_approval, validate_owner_gate
from celery_idem.governed.records import GATE_RECEIPT_KIND
from celery_idem.governed.signing import ApprovalKey, ApprovalKeys, ApprovalSigner, generate_key
from tests.fuzz.target import Draw, Target, worded
from tests.fuzz.values import anything, json_like

NOW = 2_000_000_000.0
PAYLOAD = {"order": 7, "amount": "12.50", "lines": [1, 2.5, True, None]}
ACTION: dict[str, Any] = {
    "action_id": "act-1",
    "action_type": "payments.refund",
    "source": "shop",
    "payload": PAYLOAD,
    "payload_sha256": digest_json(PAYLOAD),
}
PEM, PUBLIC = generate_key()
OTHER_PEM, OTHER_PUBLIC = generate_key()
SIGNER, STRANGER = ApprovalSigner.from_pem("2026", PEM), ApprovalSigner.from_pem("2026", OTHER_PEM)
KEYS = ApprovalKeys({"2026": PUBLIC, "old": ApprovalKey(OTHER_PUBLIC, expires_at=NOW - 1)})

MESSAGE = message_approval(
    ACTION, principal="ann@example.org", channel="web", thread_id="t-1", event_id="click-1", decided_at=NOW - 60
)
GRANT = grant_approval(
    ACTION,
    principal="ann@example.org",
    grant_id="G-1",
    source_request_id="R-1",
    grant_expires_at=NOW + 86_400,
    decided_at=NOW - 60,
)
ALL_FIELDS = sorted({*MESSAGE, *GRANT, *ACTION, "signature", "key_id", "status", "kind", "evidence_sha256"})
times = st.sampled_from([NOW - 61, NOW - 60, NOW, NOW + 29, NOW + 31, NOW + 3540, NOW + 1e9, 0, -1, "unlimited", True])


def _changed(draw: Draw, mapping: Mapping[str, Any], least: int = 0) -> dict[str, Any]:
    """The mapping with a few fields taken away, swapped, added or given other values."""
    changed = copy.deepcopy(dict(mapping))
    for _ in range(draw(st.integers(least, 2))):
        name = draw(st.sampled_from(sorted(changed) or ["x"]) | st.sampled_from(ALL_FIELDS) | st.text(max_size=3))
        how = draw(st.sampled_from(["gone", "other", "swapped", "time"]))
        if how == "gone":
            changed.pop(name, None)
        elif how == "other":
            changed[name] = draw(json_like)
        elif how == "time":
            changed[name] = draw(times)
        elif changed:
            changed[name] = changed[draw(st.sampled_from(sorted(changed)))]
    return changed


def _receipt(evidence: Any, **more: Any) -> dict[str, Any]:
    """The gate receipt with this evidence, its digest right wherever there can be one."""
    try:
        digest = digest_json(evidence)
    except PayloadRefused:
        digest = "0" * 64
    return {
        "action_id": ACTION["action_id"],
        "receipt_key": "owner-gate",
        "kind": GATE_RECEIPT_KIND,
        "status": "passed",
        "external_id": evidence.get("approval_id") if isinstance(evidence, Mapping) else None,
        "evidence": evidence,
        "evidence_sha256": digest,
        "observed_at": NOW,
        "created_at": NOW,
        **more,
    }


def _judge(*args: Any, **options: Any) -> Any:
    """The authorization, or the code it was refused with."""
    try:
        return validate_owner_gate(*args, **options)
    except GateRefused as refusal:
        worded(refusal, f"gate refused, {refusal.code}: ")
        return refusal.code


def play_signed(draw: Draw, _: Any) -> str:
    """Whoever may write to the database, but has no key, authorizes nothing the owner has not signed."""
    signed = SIGNER.sign(draw(st.sampled_from([MESSAGE, GRANT])))
    evidence, action = _changed(draw, signed), _changed(draw, ACTION)
    if draw(st.integers(0, 3)) == 0:
        with contextlib.suppress(GateRefused):
            evidence = STRANGER.sign(evidence)
    receipt = _changed(draw, _receipt(evidence))
    now = draw(st.just(NOW) | times)
    came = _judge(action, [receipt], now=now, grantable=draw(st.booleans()), keys=KEYS)
    if isinstance(came, str):
        assert came in REFUSALS
        return "refused"
    read = receipt["evidence"]
    assert canonical_json(read) == canonical_json(signed), "this is not what the owner signed"
    for name in ("action_id", "action_type", "source"):
        assert action[name] == ACTION[name]
    assert canonical_json(action["payload"]) == canonical_json(PAYLOAD)
    assert signed["decided_at_epoch"] - 30 <= now < signed["expires_at_epoch"]
    assert came.key_id == "2026"
    return "authorized"


def play_unsigned(draw: Draw, _: Any) -> str:
    """Without keys an approval still has to say the right things about this action, at this time."""
    evidence = _changed(draw, draw(st.sampled_from([MESSAGE, GRANT])), least=1)
    action = _changed(draw, ACTION)
    grantable = draw(st.booleans())
    came = _judge(action, [_changed(draw, _receipt(evidence))], now=NOW, grantable=grantable)
    if isinstance(came, str):
        return "refused"
    assert evidence["decision"] == "approved"
    assert evidence["authority"] == "owner"
    assert evidence["action_id"] == action["action_id"]
    assert evidence["action_digest"] == digest_json(action["payload"]) == action["payload_sha256"]
    assert type(evidence["revision"]) is int
    assert evidence["decided_at_epoch"] - 30 <= NOW < evidence["expires_at_epoch"]
    assert grantable or not came.granted
    assert came.key_id is None
    return "authorized"


def play_garbage(draw: Draw, _: Any) -> str:
    """Nothing but a refusal comes out, whatever the action, the receipts and the time are."""
    receipts = draw(
        st.lists(anything | st.dictionaries(st.sampled_from(["kind", "evidence", "status"]), anything), max_size=3)
        | st.lists(json_like.map(_receipt), max_size=2)
        | st.lists(anything.map(lambda value: {**_receipt(MESSAGE), "evidence": value}), max_size=2)
        | json_like
    )
    action = draw(st.just(ACTION) | anything)
    keys = draw(st.sampled_from([None, KEYS]))
    came = _judge(action, receipts, now=draw(st.just(NOW) | anything), grantable=draw(anything), keys=keys)
    assert isinstance(came, str), "garbage was authorized"
    assert came in REFUSALS
    return came


def play_json(draw: Draw, _: Any) -> str:
    """The text that is approved says the value exactly, or the value is refused."""
    value = draw(json_like | anything)
    try:
        text = canonical_json(value)
    except PayloadRefused as refusal:
        worded(refusal, "payload")
        return "refused"
    assert canonical_json(json.loads(text)) == text
    text.encode()
    return "a text"


TARGETS = [
    Target(
        "gate: signed", "what is authorized is what the owner signed, to the byte, for this action, now", play_signed
    ),
    Target("gate: unsigned", "what is authorized says so of this action, its payload and this time", play_unsigned),
    Target("gate: garbage", "nothing but GateRefused with a known code", play_garbage),
    Target("gate: canonical JSON", "one text that says the value exactly, or PayloadRefused", play_json),
]
