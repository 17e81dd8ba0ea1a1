"""One transaction on the ledger: the row it holds, the time it is, and what may be written.

Time is read after the row is held, never before: who waited for a row must not judge by the time it began to wait. And
an action's time never goes back: a clock that was set back revives no approval and no lease. What an action may become
is checked here, in the one place that changes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Double,
    Executable,
    Select,
    insert,
    literal,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.engine import Connection, CursorResult

from celery_idem.errors import (
    ActionIdempotencyConflict,
    ActionLeaseConflict,
    ActionNotFound,
    ActionStoreError,
    ActionTransitionError,
)
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_of, same
from celery_idem.governed.sql import schema
from celery_idem.governed.sql.arguments import checked_text, legible, said, utc

Row = Mapping[str, Any]
"""An action as the table has it: payload and result are JSON text."""

NOW: ColumnElement[float] = literal_column("EXTRACT(EPOCH FROM clock_timestamp())::float8", Double())


class Transaction:
    """What the concerns (leasing, dispatch, observation, lifecycle, chains) do their work with."""

    def __init__(self, connection: Connection, clock: Callable[[], float] | None) -> None:
        self.connection = connection
        self.sqlite = connection.dialect.name == "sqlite"
        self.events: list[records.Event] = []
        """What was appended, for the listener, once it is committed."""
        # The file is on this host, so is its clock.
        self._clock = time.time if clock is None and self.sqlite else clock
        self.by_injected_clock = clock is not None
        self._now: float | None = None

    # --- time and rows -----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since 1970, at the moment the row was held; where none is, at the first question."""
        if self._now is None:
            asked = self._clock() if self._clock else self.run(select(NOW)).scalar_one()
            self._now = float(asked)
        return self._now

    def run(self, statement: Executable) -> CursorResult[Any]:
        """Send one statement."""
        return self.connection.execute(statement)

    def rows(self, query: Executable) -> list[dict[str, Any]]:
        """What the query finds."""
        return [dict(row) for row in self.run(query).mappings()]

    def row(self, query: Executable) -> dict[str, Any] | None:
        """The first the query finds."""
        found = self.run(query).mappings().first()
        return None if found is None else dict(found)

    def hold(self, action_id: str) -> Row:
        """Hold this action till the transaction ends, waiting for whoever holds it.

        Raises:
            ActionNotFound: there is none.
        """
        checked_text("action_id", action_id)
        row = self.hold_first(select(schema.action).where(schema.action.c.action_id == action_id))
        if row is None:
            raise no_action(action_id)
        return row

    def hold_first(self, query: Any, *, skip_locked: bool = False) -> Row | None:
        """Hold the first action of the query; None where there is none, or none that is free."""
        if self.sqlite:  # the transaction holds the whole file
            row = self.row(query)
        else:
            # The time is read above the lock: in the query itself it would be read before the wait.
            held = query.with_for_update(skip_locked=skip_locked, key_share=True).cte("held")
            row = self.row(select(held, NOW.label("read_at")))
        if row is None:
            return None
        read_at = row.pop("read_at", None)
        self._now = max(float(self._clock() if self._clock else read_at or self.now), row["updated_at"])
        return row

    def time(self) -> Any:
        """The clock for a WHERE clause: a value, or the database's own, in a form that an index can be asked with."""
        return select(NOW).scalar_subquery() if self._clock is None else self._clock()

    # --- writing -----------------------------------------------------------------------------------------------------

    def change(
        self, row: Row, event_type: str, actor: str, details: Mapping[str, Any] | None = None, **values: Any
    ) -> Row:
        """Change the held action and append the event; the row as it is now.

        Raises:
            ActionTransitionError: ``state`` in the values is none this one leads to (I8).
        """
        state = str(values.get("state", row["state"]))
        if "state" in values:
            if state not in records.ALLOWED_TRANSITIONS[row["state"]]:
                raise ActionTransitionError(
                    f"action {row['action_id']} is {row['state']} and cannot become {state}: read it again"
                )
            if state in records.TERMINAL_STATES:
                values |= {"terminal_at": self.now, "lease_owner": None, "lease_expires_at": None}
        values["updated_at"] = self.now
        of = schema.action.c.action_id == row["action_id"]
        self.run(update(schema.action).where(of).values(**values))
        self.append({**row, "state": state}, event_type, row["state"], actor, details)
        return {**row, **values}

    def append(
        self, row: Row, event_type: str, from_state: str | None, actor: str, details: Mapping[str, Any] | None = None
    ) -> None:
        """Append one event to the action's history: how it came to be as it is now."""
        noted = dict(details or {})
        values = {
            "action_id": row["action_id"],
            "event_type": event_type,
            "from_state": from_state,
            "to_state": row["state"],
            "actor": actor,
            "created_at": self.now,
        }
        self.run(insert(schema.event).values(**values, details=said(noted, "details")))
        self.events.append({**values, "details": noted, "action_type": row["action_type"]})

    def add_receipt(
        self,
        action_id: str,
        receipt_key: str,
        kind: str,
        status: str,
        evidence: Any,
        external_id: str | None,
        observed_at: float | None = None,
    ) -> tuple[records.Receipt, bool]:
        """The receipt, and whether it is new; one that is there already with the same content is returned (I2)."""
        for name, value in (("receipt_key", receipt_key), ("kind", kind), ("status", status)):
            checked_text(name, value)
        if external_id is not None:
            checked_text("external_id", external_id)
        written = said(evidence, "evidence")
        there = self._receipt(action_id, receipt_key)
        if there is None:
            values = {
                "action_id": action_id,
                "receipt_key": receipt_key,
                "kind": kind,
                "status": status,
                "external_id": external_id,
                "evidence": written,
                "evidence_sha256": digest_of(written),
                "observed_at": self.now if observed_at is None else observed_at,
                "created_at": self.now,
            }
            self.run(insert(schema.receipt).values(**values))
            return projected_receipt(values), True
        first = (there["kind"], there["status"], there["external_id"], there["evidence"])
        if first != (kind, status, external_id, written):
            raise ActionIdempotencyConflict(
                f"receipt {receipt_key!r} of action {action_id} is there with other content: receipts never change, so "
                "write this one under a key of its own"
            )
        return projected_receipt(there), False

    def _receipt(self, action_id: str, receipt_key: str) -> Row | None:
        c = schema.receipt.c
        query = select(schema.receipt).where(c.action_id == action_id, c.receipt_key == receipt_key)
        return self.row(query)

    def bury(self, action_id: str, reason: str) -> None:
        """Write the action's dead letter; one that somebody forged beforehand must not keep the action alive."""
        letter = schema.dead_letter
        if self.row(select(letter.c.letter_id).where(letter.c.action_id == action_id)) is None:
            self.run(insert(letter).values(action_id=action_id, reason=reason, created_at=self.now))

    # --- reading -----------------------------------------------------------------------------------------------------

    def receipts(self, action_id: str, kind: str | None = None) -> list[records.Receipt]:
        """The action's receipts as they were written, in that order."""
        c = schema.receipt.c
        query = select(schema.receipt).where(c.action_id == action_id).order_by(c.receipt_id)
        if kind is not None:
            query = query.where(c.kind == kind)
        return [projected_receipt(row) for row in self.rows(query)]

    def history(self, action_id: str, *event_types: str) -> list[records.Event]:
        """The action's events of these types, or all, in the order they happened."""
        c = schema.event.c
        query = select(schema.event).where(c.action_id == action_id).order_by(c.event_id)
        if event_types:
            query = query.where(c.event_type.in_(event_types))
        return [{**row, "details": loaded(row["details"])} for row in self.rows(query)]

    # --- leases ----------------------------------------------------------------------------------------

    def leased_to(self, row: Row, owner: str) -> None:
        """``ActionLeaseConflict`` unless the owner's lease on the held action is alive (I3)."""
        checked_text("owner", owner)
        if row["lease_owner"] != owner:
            whose = f"{legible(row['lease_owner'])} holds it" if row["lease_owner"] else "nobody holds it"
            raise ActionLeaseConflict(
                f"{owner} holds no lease on action {row['action_id']}, {whose}: lease it, and look at its state first"
            )
        if row["lease_expires_at"] is None or row["lease_expires_at"] <= self.now:
            raise ActionLeaseConflict(
                f"the lease of {owner} on action {row['action_id']} ended at {utc(row['lease_expires_at'])}: lease it "
                "again, and look at its state first"
            )

    def ready(self, states: Sequence[str]) -> Select[Any]:
        """The query for the first action in one of the states that is due and not leased."""
        c = schema.action.c
        now = self.time()
        query = (
            select(schema.action)
            .where(c.state.in_([literal(state, literal_execute=True) for state in states]))
            .where(c.next_attempt_at <= now, or_(c.lease_owner.is_(None), c.lease_expires_at <= now))
            .order_by(c.next_attempt_at, c.created_at, c.action_id)
            .limit(1)
        )
        if self.sqlite:  # it takes the index only for its condition word for word; PostgreSQL would count that twice
            query = query.where(schema.DISPATCHED if records.STATE_DISPATCHED in states else schema.LEASABLE)
        return query

    def lease(self, row: Row, owner: str, seconds: float, *, mode: str) -> Row:
        """Give the held action to its owner, and note from whom it was taken."""
        until = self.now + seconds
        details: dict[str, Any] = {"until": until, "mode": mode}
        if row["lease_owner"] is not None:
            details["lapsed"] = legible(row["lease_owner"])
        return self.change(row, records.LEASED, owner, details, lease_owner=owner, lease_expires_at=until)

    def release(self, row: Row, owner: str, reason: str, delay: float, event_type: str) -> Row:
        """Give the lease back; the action is due again after the delay."""
        free = {"lease_owner": None, "lease_expires_at": None, "next_attempt_at": self.now + delay}
        return self.change(row, event_type, owner, {"reason": reason, "delay": delay}, **free)


def no_action(action_id: object) -> ActionNotFound:
    """The error for an id that is not in the ledger."""
    return ActionNotFound(
        f"no action {action_id!r:.80}: check the id, and that governed_store names the right database"
    )


def expects(row: Row, state: str, verb: str) -> None:
    """``ActionTransitionError`` unless the held action is in this state."""
    if row["state"] != state:
        raise ActionTransitionError(
            f"action {row['action_id']} is {row['state']}, and {verb} needs one that is {state}: read it again"
        )


def intact(row: Row) -> bool:
    """Whether the payload is the one its digest was made of (I1)."""
    return isinstance(row["payload"], str) and same(digest_of(row["payload"]), row["payload_sha256"])


def projected(row: Row) -> records.Action:
    """The action as callers get it.

    Raises:
        ActionStoreError: the payload in the database is not the one that was proposed.
    """
    if not intact(row):
        raise ActionStoreError(
            f"the payload of action {row['action_id']} is not the one that was proposed: somebody changed it in the "
            "database, so it is not handed out"
        )
    return {**row, "payload": loaded(row["payload"]), "result": loaded(row["result"])}


def projected_receipt(row: Row) -> records.Receipt:
    """The receipt as callers get it; evidence that is no JSON any more stays text, and passes no check."""
    shown = {name: value for name, value in row.items() if name != "receipt_id"}  # the database's own
    return shown | {"evidence": loaded(row["evidence"])}


def loaded(written: str | None) -> Any:
    """What the JSON says; the text itself where it is none."""
    if written is None:
        return None
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
