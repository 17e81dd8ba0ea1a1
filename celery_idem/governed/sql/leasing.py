"""Who may work on an action: leases given to the longest ready, taken back when they lapse.

Nobody waits in a queue for a row: what another transaction holds is skipped, and of a million actions only those at
work are looked at, through a partial index. ``dispatched`` is leased in ``observation``, for looking only.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, select

from celery_idem.errors import ActionStoreError
from celery_idem.governed import records
from celery_idem.governed.sql import observation, schema
from celery_idem.governed.sql.arguments import checked_texts, legible, utc
from celery_idem.governed.sql.transaction import Row, Transaction, intact, projected

PAGE = 100
"""Lapsed leases looked up at a time."""


def lease_next(
    tx: Transaction, owner: str, lease_seconds: float, states: Sequence[str], scope: Sequence[ColumnElement[bool]]
) -> tuple[records.Action | None, bool]:
    """Lease one ready action for its owner; one whose payload was changed ends instead, and the next is taken.

    Returns:
        The action, if there is one; and whether to ask again, once what ended here is committed.
    """
    wanted = frozenset(checked_texts("states", states))
    if not wanted or not wanted <= records.LEASABLE_STATES:
        raise ActionStoreError(
            f"states = {sorted(wanted)!r:.80}: lease_next leases {', '.join(sorted(records.LEASABLE_STATES))}; what is "
            "dispatched is only looked at: lease_dispatched_observation"
        )
    query = tx.ready(sorted(wanted)).where(*scope)
    for _ in range(observation.ENDED_AT_ONCE):
        row = tx.hold_first(query, skip_locked=True)
        if row is None:
            return None, False
        if intact(row):
            return projected(tx.lease(row, owner, lease_seconds, mode="work")), False
        end_tampered(tx, row, owner)
    return None, True


def end_tampered(tx: Transaction, row: Row, actor: str) -> None:
    """The payload in the database is not the one that was proposed: nothing may be done with it, ever."""
    end(tx, row, actor, "payload", "the payload in the database is not the one that was proposed")


def end(tx: Transaction, row: Row, actor: str, reason: str, why: str) -> None:
    """End the held action for a person to look at, as ambiguous where its mutation may have happened."""
    if row["state"] == records.STATE_DISPATCHED:
        observation.end_ambiguous(tx, row, actor, reason, None, 0)
        return
    tx.change(row, records.FAILED, actor, {"reason": reason}, state=records.STATE_FAILED, last_error=why)
    tx.bury(row["action_id"], why)


def lapsed(tx: Transaction, scope: Sequence[ColumnElement[bool]], after: str) -> list[str]:
    """The ids of actions whose lease has lapsed, a page at a time."""
    c = schema.action.c
    query = (
        select(c.action_id)
        .where(c.lease_owner.is_not(None), c.lease_expires_at <= tx.time(), c.action_id > after, *scope)
        .order_by(c.action_id)
        .limit(PAGE)
    )
    return list(tx.run(query).scalars())


def recover(tx: Transaction, action_id: str) -> None:
    """Release the lapsed lease of this action, or end it as ambiguous where nobody may look any more (I6)."""
    row = tx.hold_first(select(schema.action).where(schema.action.c.action_id == action_id), skip_locked=True)
    if row is None or row["lease_owner"] is None or row["lease_expires_at"] > tx.now:
        return
    actor = "recovery"
    if not intact(row) and row["state"] not in records.TERMINAL_STATES:
        end_tampered(tx, row, actor)
        return
    if row["state"] == records.STATE_DISPATCHED and not observation.may_be_looked_for(tx, row, actor):
        return
    details = {"of": legible(row["lease_owner"]), "until": utc(row["lease_expires_at"])}
    tx.change(row, records.LEASE_EXPIRED, actor, details, lease_owner=None, lease_expires_at=None)
