"""Which Celery chain may work on an action, and which actions have lost theirs."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import or_, select

from celery_idem.governed import records
from celery_idem.governed.refusals import epoch, refused
from celery_idem.governed.sql import leasing, observation, schema
from celery_idem.governed.sql.arguments import checked_text, legible
from celery_idem.governed.sql.transaction import Row, Transaction, intact

_AT_WORK = (
    records.STATE_GATED,
    records.STATE_DISPATCHED,
    records.STATE_ACCEPTED,
    records.STATE_VERIFIED,
)
_SWEEP = "sweep"
AHEAD = 2 * 86_400.0
"""Seconds. No lease and no delay is longer than half of it, so an action that was changed later was changed by a clock
that was wrong, and would be seen again only then."""


def name(tx: Transaction, row: Row, chain_id: str, actor: str) -> Row:
    """From now on this chain works on the held action, and steps of any other end."""
    checked_text("chain_id", chain_id)
    details = {"chain_id": chain_id} | ({"instead_of": legible(row["chain_id"])} if row["chain_id"] else {})
    return tx.change(row, records.ENQUEUED, actor, details, chain_id=chain_id, enqueued_at=tx.now)


def replace(tx: Transaction, action_id: str, old: str | None, new: str) -> bool:
    """Name the new chain, if the old one is still the one that was seen and the action is at work."""
    row = tx.hold(action_id)
    if row["chain_id"] != old or row["state"] not in _AT_WORK:
        return False
    name(tx, row, new, _SWEEP)
    return True


def stranded(tx: Transaction, grace: float, limit: int) -> list[dict[str, Any]]:
    """Actions at work that are due, leased by nobody, and that nothing has happened to for so many seconds.

    Those for which no chain can do anything are ended here: the approval has expired, the payload was changed in the
    database, nobody may look for the effect any more, or the clock was ahead, and has been set right.

    Returns:
        ``action_id``, ``action_type``, ``state`` and ``chain_id`` of each, the longest quiet first.
    """
    c = schema.action.c
    now = tx.time()
    at_work = select(schema.action).where(schema.AT_WORK)
    quiet = at_work.where(c.updated_at <= now - grace, c.next_attempt_at <= now - grace)
    quiet = quiet.where(or_(c.lease_owner.is_(None), c.lease_expires_at <= now))
    found = []
    for row in tx.rows(quiet.order_by(c.updated_at).limit(limit)):
        if row["state"] != records.STATE_DISPATCHED and intact(row) and not _has_expired(tx, row):
            found.append({key: row[key] for key in ("action_id", "action_type", "state", "chain_id")})
        elif (held := _still_at_work(tx, row)) is None:
            continue
        elif not intact(held):
            leasing.end_tampered(tx, held, _SWEEP)
        elif held["state"] == records.STATE_GATED:
            leasing.end(tx, held, _SWEEP, "expired", str(refused("expired", "no step consumed it before it ended")))
        elif observation.may_be_looked_for(tx, held, _SWEEP):
            found.append({key: row[key] for key in ("action_id", "action_type", "state", "chain_id")})
    # One clock alone may itself be wrong, and slow: where it is the database's, this host's own has to agree.
    ahead = [c.updated_at > now + AHEAD] + ([] if tx.by_injected_clock else [c.updated_at > time.time() + AHEAD])
    for row in tx.rows(at_work.where(*ahead).limit(observation.ENDED_AT_ONCE)):
        held = _still_at_work(tx, row)
        if held is not None:
            leasing.end(tx, held, _SWEEP, "clock", "the clock was ahead when it was last changed, and is not any more")
    return found


def _has_expired(tx: Transaction, row: Row) -> bool:
    """Whether the approval of a gated action has ended, so that no dispatch can consume it."""
    if row["state"] != records.STATE_GATED:
        return False
    gates = [receipt["evidence"] for receipt in tx.receipts(row["action_id"], records.GATE_RECEIPT_KIND)]
    ends = [epoch(gate.get("expires_at_epoch")) for gate in gates if isinstance(gate, dict)]
    return any(end is not None and end <= tx.now for end in ends)


def _still_at_work(tx: Transaction, row: Row) -> Row | None:
    """The action, held; None where another sweep or its own chain was faster."""
    held = tx.hold_first(select(schema.action).where(schema.action.c.action_id == row["action_id"]), skip_locked=True)
    return held if held is not None and held["state"] in _AT_WORK and held["updated_at"] == row["updated_at"] else None
