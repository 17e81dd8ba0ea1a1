"""Reading a row, deciding, and writing it only if nobody else did: the one mechanism under every verb.

A write names the ``rev`` it saw. It changes nothing where the row moved on (read and decide again) and where somebody's
transaction holds the row (wait a little, or say so). A row seen a moment ago is written without reading it again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from celery_idem.core.records import Claim, Record
from celery_idem.core.values import replace
from celery_idem.stores.sql import rows
from celery_idem.stores.sql.call import Call
from celery_idem.stores.sql.database import Database
from celery_idem.stores.sql.failures import Locked
from celery_idem.stores.sql.rows import Row
from celery_idem.stores.sql.schema import COLUMNS

A = TypeVar("A")
Judge = Callable[[Record | None, float], tuple[A, Record | None]]
"""A decision function with everything but the record and the clock filled in."""

SEEN = 1024
"""Rows remembered, so that ``settle``, ``note_parked`` and a completion after renewals are one statement each."""


class LockedRow(Locked):
    """The row as it was read while somebody's transaction held it."""

    def __init__(self, row: Row | None, now: float) -> None:
        super().__init__("locked")
        self.row = row
        self.now = now


class GuardedRows:
    """The rows of one database, and those seen lately."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen: dict[str, Row] = {}

    def read(self, call: Call, key: str) -> tuple[Row | None, float]:
        """Return the row, expired or not, and the clock."""
        found, _ = call.execute("read", {"key": key})
        values = found[0]
        return (None if values[0] is None else rows.read_row(values)), values[len(COLUMNS)]

    def take(self, call: Call, fresh: Record, judge: Judge[A]) -> tuple[A | None, Row | None, float]:
        """Insert a record, or read the one there is, in one statement. PostgreSQL only.

        Args:
            call: the verb's statements.
            fresh: what ``judge`` makes of no record at time 0.
            judge: called again with the clock if it was inserted.

        Returns:
            the answer if the record was inserted, else None; the row, None if somebody is inserting it; the clock.
        """
        values = call.execute("claim", rows.fresh_values(fresh))[0][0]
        now, inserted = values[-2:]
        if not inserted:
            return None, None if values[0] is None else rows.read_row(values), now
        answer, written = judge(None, now)
        fresh = _made(written)
        return answer, Row(fresh, fresh.fence, rows.store_notes(fresh.notes, {})), now

    def change(
        self,
        call: Call,
        key: str,
        judge: Judge[A],
        *,
        first: tuple[Row | None, float] | None = None,
        patience: float | None = None,
        absent: Callable[[], Any] | None = None,
    ) -> tuple[A, Row | None]:
        """Read, decide and write until the write fits.

        Args:
            call: the verb's statements.
            key: of the record.
            judge: called with what was read, each time it was.
            first: the row and the clock, where they were just read.
            patience: seconds to give a lock; None is until the verb's deadline.
            absent: called once before the first write of a record that is not there.

        Returns:
            the answer, and the row as it is now.

        Raises:
            LockedRow: somebody's transaction held the row longer than ``patience``.
        """
        give_up = self._give_up(call)
        if patience is not None:
            give_up = min(give_up, time.monotonic() + patience)
        row, now = first or self.read(call, key)
        while True:
            answer, written = judge(None if row is None else row.record, now)
            if written is None:
                return answer, row
            if row is None and absent is not None:
                absent()
                absent = None
                row, now = self.read(call, key)
                continue
            try:
                after, locked = self._write(call, row, written, now), False
            except Locked:
                after, locked = None, True
            if after is not None:
                return answer, after
            before = row
            row, now = self.read(call, key)
            locked = locked or (before is not None and before.same(row))
            if time.monotonic() >= (give_up if locked else call.deadline):
                raise LockedRow(row, now)
            if locked:
                call.close()
                time.sleep(random.uniform(0.001, 0.01))  # noqa: S311

    def locked_file(self, call: Call) -> bool:
        """Begin a transaction that has SQLite's file for itself; False where others had it until the deadline."""
        while True:
            try:
                call.execute("begin", {})
            except Locked:
                call.close()
                if time.monotonic() >= self._give_up(call):
                    return False
                time.sleep(random.uniform(0.001, 0.01))  # noqa: S311
            else:
                return True

    def guess(self, call: Call, name: str, row: Row, judge: Judge[A], *, remember: bool) -> A | None:
        """Write what ``judge`` makes of a row seen before, in one statement; None where that did not fit.

        Args:
            call: the verb's statements.
            name: of PostgreSQL's statement; SQLite writes the whole row.
            row: as last seen.
            judge: must answer something.
            remember: whether a later verb will want the row.
        """
        clock = self._database.clock
        if self._database.sqlite and clock is not None:
            now = clock()
            answer, written = judge(row.record, now)
            after = None
            if written is not None:
                with contextlib.suppress(Locked):
                    after = self._write(call, row, written, now)
            if after is not None and remember:
                self.remember(after)
            return None if after is None else answer
        answer, written = judge(row.record, 0.0)
        if written is None:
            return None
        params = {
            "key": written.key,
            "seen_rev": row.rev,
            "seen_token": row.record.token,
            **rows.end_values(written),
            **rows.later(row, written),
        }
        found, _ = call.execute(name, params)
        if not found:
            return None
        if remember:
            written = judge(row.record, found[0][0])[1] or written
            self.remember(Row(written, row.rev + 1, rows.store_notes(written.notes, row.notes)))
        return answer

    def _give_up(self, call: Call) -> float:
        """A little before the deadline, or the watchdog would cut the last attempt, and its write would be in doubt."""
        return call.deadline - min(0.2, self._database.timeout / 4)

    def _write(self, call: Call, row: Row | None, written: Record, now: float) -> Row | None:
        """Insert or update; None if the row is not what it was, or locked."""
        if row is None:
            rev, stored = max(1, int(now * 1_000_000)), rows.store_notes(written.notes, {})
            _, count = call.execute("insert", rows.values_of(written, rev, rows.dump(stored)))
        else:
            rev, stored = row.rev + 1, rows.store_notes(written.notes, row.notes)
            params = rows.values_of(written, rev, rows.dump(stored))
            params.update(key=written.key, seen_rev=row.rev, seen_token=row.record.token)
            same = written.outcome is row.record.outcome  # then it need not travel
            _, count = call.execute("write_but_outcome" if same else "write", params)
        return Row(written, rev, stored) if count == 1 else None

    # -- rows seen lately ----------------------------------------------------------------------------------------------

    def remember(self, row: Row) -> None:
        """Keep the row, without its outcome, for the next verb on its key."""
        if row.record.outcome is not None:
            row = replace(row, record=replace(row.record, outcome=None))
        self._seen.pop(row.record.key, None)
        self._seen[row.record.key] = row
        if len(self._seen) > SEEN:
            # Another thread may be dropping the same one; a lock could stay locked in a forked child.
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):
                del self._seen[next(iter(self._seen))]

    def forget(self, key: str) -> None:
        """The row is not what was remembered: its transaction was rolled back."""
        self._seen.pop(key, None)

    def seen(self, key: str) -> Row | None:
        """The row as last remembered."""
        return self._seen.get(key)

    def seen_under(self, claim: Claim) -> Row | None:
        """The latest row known to carry this claim's token."""
        row = claim.seen if isinstance(claim.seen, Row) else None
        recent = self._seen.get(claim.key)
        if recent is not None and recent.record.token == claim.token and (row is None or recent.rev > row.rev):
            return recent
        return row


def _made(record: Record | None) -> Record:
    """What a claim makes of no record, which is always a record."""
    if record is None:
        raise ValueError("a claim on no record must make one")
    return record
