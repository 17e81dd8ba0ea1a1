"""The steps of a life that are no lease, no dispatch and no look: proposed, decided on, accepted, verified, ended."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from celery_idem.errors import (
    ActionIdempotencyConflict,
    ActionStoreError,
    ActionTransitionError,
    AlreadyDecided,
)
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_of, same
from celery_idem.governed.sql import chains, schema
from celery_idem.governed.sql.arguments import checked_number, checked_text, checked_texts, legible, said, utc
from celery_idem.governed.sql.transaction import Row, Transaction, expects, projected

MAX_DELAY = 86_400.0


# --- before the mutation ---------------------------------------------------------------------------------------------


def propose(
    tx: Transaction,
    idempotency_key: str,
    source: str,
    action_type: str,
    payload: Any,
    *,
    source_ref: str | None,
    action_id: str | None,
    actor: str,
) -> records.Action:
    """The action of this key, made now or before; ``ActionIdempotencyConflict`` where that one is another."""
    named = {"idempotency_key": idempotency_key, "source": source, "action_type": action_type, "actor": actor}
    named |= {name: v for name, v in (("source_ref", source_ref), ("action_id", action_id)) if v is not None}
    for name, value in named.items():
        checked_text(name, value)
    written = said(payload, "payload")
    content = {
        "source": source,
        "source_ref": source_ref,
        "action_type": action_type,
        "payload_sha256": digest_of(written),
    }
    if action_id is not None:
        content["action_id"] = action_id
    there = _by_key(tx, idempotency_key)
    if there is not None:
        return projected(_if_same(there, content))
    values = {
        **content,
        "action_id": action_id or uuid.uuid4().hex,
        "idempotency_key": idempotency_key,
        "payload": written,
        "state": records.STATE_PROPOSED,
        "attempt_count": 0,
        "max_attempts": 1,
        "next_attempt_at": tx.now,
        "created_at": tx.now,
        "updated_at": tx.now,
    }
    if not _inserted(tx, values):
        there = _by_key(tx, idempotency_key)
        if there is None:
            raise ActionIdempotencyConflict(
                f"action_id {action_id!r} was used before for another action: leave it out, and one is drawn"
            )
        return projected(_if_same(there, content))
    row = {column.name: None for column in schema.action.columns} | values
    tx.append(row, records.PROPOSED, None, actor, {"key": idempotency_key})
    return projected(row)


def _by_key(tx: Transaction, idempotency_key: str) -> Row | None:
    return tx.row(select(schema.action).where(schema.action.c.idempotency_key == idempotency_key))


def _if_same(there: Row, content: Mapping[str, Any]) -> Row:
    other = [name for name, value in content.items() if there[name] != value]
    if other:
        raise ActionIdempotencyConflict(
            f"idempotency key {there['idempotency_key']!r} was used before with another "
            f"{', '.join(name.removesuffix('_sha256') for name in other)}: another action needs a key of its own"
        )
    return there


def _inserted(tx: Transaction, values: Mapping[str, Any]) -> bool:
    """Whether the row is in; False where its key or id was there, of another transaction perhaps."""
    if tx.sqlite:  # the file is ours, and nobody else's insert can come between
        try:
            tx.run(schema.action.insert().values(**values))
        except IntegrityError:
            return False
        return True
    from sqlalchemy.dialects.postgresql import insert

    written = insert(schema.action).values(**values).on_conflict_do_nothing().returning(schema.action.c.action_id)
    return tx.row(written) is not None


def gate(
    tx: Transaction, action_id: str, evidence: Any, receipt_key: str, external_id: str | None, actor: str
) -> tuple[records.Action, records.Receipt]:
    """Record an owner's decision; it is judged where it is used (I4)."""
    row, receipt = _gated(tx, tx.hold(action_id), evidence, receipt_key, external_id, actor)
    return projected(row), receipt


def _gated(
    tx: Transaction, row: Row, evidence: Any, receipt_key: str, external_id: str | None, actor: str
) -> tuple[Row, records.Receipt]:
    checked_text("actor", actor)
    if external_id is None and isinstance(evidence, Mapping):
        given = evidence.get("approval_id")
        external_id = given if isinstance(given, str) else None
    kind = records.GATE_RECEIPT_KIND
    receipt, is_new = tx.add_receipt(row["action_id"], receipt_key, kind, "passed", evidence, external_id)
    if not is_new:
        return row, receipt
    details = {"receipt_key": receipt_key}
    if row["state"] == records.STATE_GATED:  # two gates are none: the dispatch will refuse both
        return tx.change(row, records.GATE_ADDED, actor, details), receipt
    if row["state"] == records.STATE_PROPOSED:
        change = {"state": records.STATE_GATED, "next_attempt_at": tx.now}
        return tx.change(row, records.GATED, actor, details, **change), receipt
    expects(row, records.STATE_PROPOSED, "a gate")
    return row, receipt


def approve(
    tx: Transaction, action_id: str, evidence: Mapping[str, Any], chain_id: str, receipt_key: str
) -> tuple[records.Action, records.Receipt]:
    """Record the first decision and name the chain that may act on it, or say who decided before."""
    row = tx.hold(action_id)
    _undecided(tx, row, evidence, receipt_key)
    principal = evidence.get("principal")
    by = principal if isinstance(principal, str) else "gate"
    gated, receipt = _gated(tx, row, evidence, receipt_key, None, by)
    if row["state"] == records.STATE_PROPOSED:
        gated = chains.name(tx, gated, chain_id, by)
    return projected(gated), receipt


def _undecided(tx: Transaction, row: Row, evidence: Mapping[str, Any], receipt_key: str) -> None:
    """``AlreadyDecided`` if somebody decided before, unless it was this very evidence."""
    gates = tx.receipts(row["action_id"], records.GATE_RECEIPT_KIND)
    if not gates:
        rejections = tx.history(row["action_id"], records.REJECTED)
        if rejections:
            raise _already("rejected", rejections[0]["actor"], rejections[0]["created_at"], row)
        return
    first = gates[0]
    if first["receipt_key"] == receipt_key and first["evidence"] == evidence:
        return
    said_by = first["evidence"] if isinstance(first["evidence"], dict) else {}
    raise _already("approved", legible(said_by.get("principal", "somebody")), first["created_at"], row)


def _already(decision: str, by: str, at: float, row: Row) -> AlreadyDecided:
    now = "" if row["state"] == records.STATE_GATED else f"; it is {row['state']} now"
    return AlreadyDecided(
        f"action {row['action_id']} was already {decision} by {by} at {utc(at)}{now}: nothing was changed",
        decision=decision,
        by=by,
        at=at,
    )


def reject(tx: Transaction, action_id: str, reason: str, actor: str) -> records.Action:
    """End an action before its mutation, also one that was approved but not dispatched yet."""
    checked_text("actor", actor)
    checked_text("reason", reason)
    row = tx.hold(action_id)
    if row["state"] not in {records.STATE_PROPOSED, records.STATE_GATED}:
        rejections = tx.history(action_id, records.REJECTED)
        if rejections:
            raise _already("rejected", rejections[0]["actor"], rejections[0]["created_at"], row)
        raise ActionTransitionError(f"action {action_id} is {row['state']}, so it cannot be rejected any more")
    ended = {"state": records.STATE_FAILED, "last_error": f"rejected by {actor}: {reason}"}
    return projected(tx.change(row, records.REJECTED, actor, {"reason": reason}, **ended))


def add_receipt(
    tx: Transaction,
    action_id: str,
    receipt_key: str,
    kind: str,
    status: str,
    evidence: Any,
    external_id: str | None,
    observed_at: float | None,
) -> records.Receipt:
    """Append evidence of a kind that no verb reserves for itself."""
    _refuse_reserved(kind)
    if checked_text("receipt_key", receipt_key).startswith(records.RESERVED_RECEIPT_KEYS):
        raise ActionStoreError(f"receipt_key {receipt_key!r} is written by a step of the action's own: use another key")
    if observed_at is not None:
        checked_number("observed_at", observed_at, 0.0, 1e11)
    tx.hold(action_id)
    return tx.add_receipt(action_id, receipt_key, kind, status, evidence, external_id, observed_at)[0]


def _refuse_reserved(kind: str) -> None:
    if checked_text("kind", kind) in records.RESERVED_RECEIPT_KINDS:
        raise ActionStoreError(f"kind {kind!r} is written by its own verb alone: use another kind")


# --- after the mutation ----------------------------------------------------------------------------------------------


def accept(
    tx: Transaction,
    action_id: str,
    owner: str,
    receipt_key: str,
    kind: str,
    evidence: Any,
    *,
    external_id: str | None,
    result: Any,
    keep_lease: bool,
) -> tuple[records.Action, records.Receipt]:
    """Record what the endpoint said, and that the mutation happened."""
    row = tx.hold(action_id)
    tx.leased_to(row, owner)
    expects(row, records.STATE_DISPATCHED, "accept")
    _refuse_reserved(kind)
    receipt, _ = tx.add_receipt(action_id, receipt_key, kind, "accepted", evidence, external_id)
    change = {"state": records.STATE_ACCEPTED, "result": None if result is None else said(result, "result")}
    details = {"receipt_key": receipt_key}
    row = tx.change(row, records.ACCEPTED, owner, details, **change, **_due(tx, keep_lease=keep_lease))
    return projected(row), receipt


def _due(tx: Transaction, *, keep_lease: bool) -> dict[str, Any]:
    """The next step may begin at once; whose it is, is left open unless the lease is kept."""
    free = {} if keep_lease else {"lease_owner": None, "lease_expires_at": None}
    return {"next_attempt_at": tx.now, **free}


def verify(
    tx: Transaction,
    action_id: str,
    owner: str,
    receipt_key: str,
    evidence: Any,
    *,
    qualifying: Sequence[str],
    keep_lease: bool,
) -> tuple[records.Action, records.Receipt]:
    """Record the verification of what other receipts witness (I9)."""
    row = tx.hold(action_id)
    tx.leased_to(row, owner)
    expects(row, records.STATE_ACCEPTED, "verify")
    named = checked_texts("qualifying_receipt_keys", qualifying)
    if not named:
        raise ActionStoreError("qualifying_receipt_keys: name at least one receipt that witnesses the effect")
    there = {receipt["receipt_key"]: receipt for receipt in tx.receipts(action_id)}
    missing = [key for key in named if key not in there]
    if missing:
        raise ActionTransitionError(
            f"action {action_id} has no receipt {missing[0]!r:.80}: what verifies it must be recorded on it first"
        )
    forged = [key for key in named if not _is_as_written(there[key])]
    if forged:
        raise ActionTransitionError(f"receipt {forged[0]!r:.80} of action {action_id} was changed in the database")
    receipt, _ = tx.add_receipt(action_id, receipt_key, records.VERIFICATION, "verified", evidence, None)
    details = {"receipt_key": receipt_key, "qualified_by": named}
    change = {"state": records.STATE_VERIFIED, **_due(tx, keep_lease=keep_lease)}
    return projected(tx.change(row, records.VERIFIED, owner, details, **change)), receipt


def _is_as_written(receipt: records.Receipt) -> bool:
    return same(digest_of(said(receipt["evidence"], "evidence")), receipt["evidence_sha256"])


def complete(tx: Transaction, action_id: str, owner: str, result: Any) -> records.Action:
    """End it well."""
    row = tx.hold(action_id)
    tx.leased_to(row, owner)
    expects(row, records.STATE_VERIFIED, "complete")
    ended = {"state": records.STATE_COMPLETED, "result": said(result, "result")}
    return projected(tx.change(row, records.COMPLETED, owner, None, **ended))


def fail(tx: Transaction, action_id: str, owner: str, error: str, retryable: bool) -> records.Action:
    """End it badly, in plain sight; ``retryable`` is noted, and opens nothing again (I10)."""
    row = tx.hold(action_id)
    tx.leased_to(row, owner)
    told = legible(error)
    details = {"error": told, "retryable": bool(retryable)}
    ended = {"state": records.STATE_FAILED, "last_error": told}
    row = tx.change(row, records.FAILED, owner, details, **ended)
    tx.bury(action_id, told)
    return projected(row)


def defer(tx: Transaction, action_id: str, owner: str, reason: str, delay: float, event_type: str) -> records.Action:
    """Release the lease of work that is safe to do again (I6)."""
    checked_number("delay_seconds", delay, 0.0, MAX_DELAY)
    checked_text("event_type", event_type)
    if event_type in records.EVENT_TYPES and event_type != records.DEFERRED:
        raise ActionStoreError(f"event_type {event_type!r} says that something else happened: use a word of your own")
    row = tx.hold(action_id)
    tx.leased_to(row, owner)
    if row["state"] not in records.LEASABLE_STATES:
        raise ActionTransitionError(
            f"action {action_id} is {row['state']}, and only work that is safe to do again is deferred: after a "
            "dispatch that is defer_dispatched_observation"
        )
    return projected(tx.release(row, owner, legible(reason), delay, event_type))
