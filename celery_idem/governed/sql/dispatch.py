"""Consuming the one gate: everything that must be true, in the one transaction that makes it so (I4, I5, I6).

The order is that of cost and of blame: the caller's lease, the row, the admission switch, the gate as the store sees
it, the gate as the caller's validator sees it. Whatever fails, nothing is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from celery_idem.errors import ActionStoreError, ActionTransitionError, GateRefused
from celery_idem.governed import gate, records
from celery_idem.governed.canonical import same
from celery_idem.governed.sql import admission, observation
from celery_idem.governed.sql.arguments import checked_number, checked_text, checked_whole, said
from celery_idem.governed.sql.transaction import Row, Transaction, expects, intact
from celery_idem.governed.sql.transaction import projected as projection


@dataclass(frozen=True, slots=True)
class Expected:
    """What the caller believes it was authorized to do; every field must be what the database holds."""

    gate_receipt_key: str
    source: str
    source_ref: str | None
    action_type: str
    payload: Any
    approval_id: str
    decision_id: str
    execution_digest: str
    observation_window: float
    max_observations: int

    def check(self) -> None:
        """``ActionStoreError`` where an argument cannot be right, whatever the database holds."""
        for name in ("gate_receipt_key", "source", "action_type", "approval_id", "decision_id"):
            checked_text(name if name == "gate_receipt_key" else f"expected_{name}", getattr(self, name))
        if not isinstance(self.execution_digest, str) or not re.fullmatch(r"[0-9a-f]{64}", self.execution_digest):
            raise ActionStoreError("expected_execution_digest: give the 64 hex characters of the request's digest")
        checked_number("observation_window_seconds", self.observation_window, 1, observation.MAX_WINDOW)
        checked_whole("max_observations", self.max_observations, 1, observation.MAX_OBSERVATIONS)


def begin(
    tx: Transaction, action_id: str, owner: str, expected: Expected, validator: records.GateValidator
) -> records.Action:
    """Consume the gate and open the attempt, or raise and leave everything as it was."""
    admission.share(tx)  # before the row and the time: nothing is waited for between the time and the commit
    row = tx.hold(action_id)
    tx.leased_to(row, owner)
    expects(row, records.STATE_GATED, "a dispatch")
    if row["next_attempt_at"] > tx.now:
        raise ActionTransitionError(
            f"action {action_id} is not due yet: wait for {row['next_attempt_at'] - tx.now:.1f} s"
        )
    _is_what_was_expected(row, expected)
    admission.must_be_open(tx)
    action, receipts = projection(row), tx.receipts(action_id)
    gate.check_bindings(
        action,
        receipts,
        tx.now,
        gate_receipt_key=expected.gate_receipt_key,
        approval_id=expected.approval_id,
        decision_id=expected.decision_id,
    )
    authorization = _judged(validator, action, receipts, tx.now)
    for name in ("approval_id", "decision_id"):
        if getattr(authorization, name) != getattr(expected, name):
            raise gate.refused(name, "the validator authorized another one than was expected")
    if authorization.receipt_key != expected.gate_receipt_key:
        raise gate.refused("gate_key", "the validator authorized another gate than was expected")
    contracts = [receipt for receipt in receipts if receipt["kind"] == records.RECOVERY_RECEIPT_KIND]
    if contracts or tx.history(action_id, records.DISPATCHED):
        raise gate.refused("contract_exists")
    contract = observation.write_contract(
        tx, row, expected.execution_digest, float(expected.observation_window), expected.max_observations
    )
    details = {
        "attempt": row["attempt_count"] + 1,
        "approval_id": expected.approval_id,
        "execution_digest": expected.execution_digest,
        "contract_sha256": contract["evidence_sha256"],
    }
    state = {"state": records.STATE_DISPATCHED, "attempt_count": row["attempt_count"] + 1, "last_error": None}
    return projection(tx.change(row, records.DISPATCHED, owner, details, **state))


def _is_what_was_expected(row: Row, expected: Expected) -> None:
    if not intact(row) or not same(said(expected.payload, "expected_payload"), row["payload"]):
        raise gate.refused("payload", "the stored payload is not the one that was expected")
    for name in ("source", "source_ref", "action_type"):
        if row[name] != getattr(expected, name):
            raise gate.refused(name, f"the action's {name} is {row[name]!r:.80}, not {getattr(expected, name)!r:.80}")


def _judged(
    validator: records.GateValidator, action: records.Action, receipts: list[records.Receipt], now: float
) -> records.GateAuthorization:
    try:
        authorization = validator(action, receipts, now)
    except ActionStoreError:
        raise
    except Exception as error:
        raise GateRefused(
            f"gate refused, validator: it raised {type(error).__name__}: see the cause, and propose the action again",
            code="validator",
        ) from error
    if not isinstance(authorization, records.GateAuthorization):
        raise gate.refused("validator", f"it returned {type(authorization).__name__} and no GateAuthorization")
    if authorization.expired:
        raise gate.refused("expired", "the validator returned an authorization that has expired")
    return authorization
