"""Which Celery chain may work on an action, and which actions have lost theirs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import literal, or_, select

from celery_idem.governed import records
from celery_idem.governed.sql import leasing, schema
from celery_idem.governed.sql.arguments import checked_text, legible
from celery_idem.governed.sql.transaction import Row, Transaction, intact

_AT_WORK = (
    records.STATE_GATED,
    records.STATE_DISPATCHED,
    records.STATE_ACCEPTED,
    records.STATE_VERIFIED,
)


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
    name(tx, row, new, "sweep")
    return True


def stranded(tx: Transaction, grace: float, limit: int) -> list[dict[str, Any]]:
    """Actions at work that are due, leased by nobody, and that nothing has happened to for so many seconds.

    One whose payload was changed in the database is ended here: no chain can do anything for it.

    Returns:
        ``action_id``, ``action_type``, ``state`` and ``chain_id`` of each, the longest quiet first.
    """
    c = schema.action.c
    now = tx.time()
    query = (
        select(schema.action)
        # Spelled out, so that the partial index fits.
        .where(c.state.in_([literal(state, literal_execute=True) for state in _AT_WORK]))
        .where(c.updated_at <= now - grace, c.next_attempt_at <= now - grace)
        .where(or_(c.lease_owner.is_(None), c.lease_expires_at <= now))
        .order_by(c.updated_at)
        .limit(limit)
    )
    found = []
    for row in tx.rows(query):
        if intact(row):
            found.append({key: row[key] for key in ("action_id", "action_type", "state", "chain_id")})
            continue
        held = tx.hold(row["action_id"])
        if held["state"] in _AT_WORK and not intact(held):
            leasing.end_tampered(tx, held, "sweep")
    return found
