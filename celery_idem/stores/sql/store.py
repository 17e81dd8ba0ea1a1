"""The claim store on SQLite and PostgreSQL: the verbs, each a decision of ``core.decide`` on a guarded row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from sqlalchemy.engine import Connection, Engine

from celery_idem.core import decide
from celery_idem.core.records import (
    RECORD_VERSION,
    Answer,
    Claim,
    Decision,
    Ended,
    Operation,
    Outcome,
    Record,
    Release,
    Renewal,
    State,
    Successor,
)
from celery_idem.core.values import replace
from celery_idem.errors import RecordCorrupt
from celery_idem.stores.base import Carrier
from celery_idem.stores.sql import rows
from celery_idem.stores.sql.call import Call
from celery_idem.stores.sql.checks import check_database
from celery_idem.stores.sql.database import Database
from celery_idem.stores.sql.dialect import find_page
from celery_idem.stores.sql.failures import Locked
from celery_idem.stores.sql.guarded import GuardedRows, Judge, LockedRow
from celery_idem.stores.sql.rows import Row
from celery_idem.stores.sql.transaction import SQLTransaction, begun

PATIENCE = 0.1
"""Seconds ``claim`` gives a PostgreSQL row lock to go: another claim holds one for a commit, a transaction longer."""
PAGE = 100
"""Records one statement of ``find`` reads, bodies and all."""

_PARKED = frozenset({Answer.HELD, Answer.NOT_DUE})


class SQLStore:
    """Records in one table of SQLite or PostgreSQL.

    Args:
        url: of SQLAlchemy, or an ``Engine``, which keeps its pool, its limits and its lifetime.
        timeout: seconds no verb outlives; waiting for the pool of an engine of yours comes on top.
        clock: seconds since 1970 in place of the database's clock; for tests.
        engine_options: for ``create_engine``.
    """

    def __init__(
        self,
        url: str | Engine,
        *,
        timeout: float = 5.0,
        clock: Callable[[], float] | None = None,
        **engine_options: Any,
    ) -> None:
        self._database = Database(url, timeout, clock, engine_options)
        self._rows = GuardedRows(self._database)
        self.name = self._database.name

    # -- one key -------------------------------------------------------------------------------------------------------

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        """See ``Store.claim``."""

        def judge(record: Record | None, now: float) -> tuple[Decision, Record | None]:
            return decide.decide_claim(record, operation, now=now, lease=lease, ttl=ttl, dead_fence=dead_fence)

        with self._database.call() as call:
            first = None
            if not self._database.sqlite:
                fresh = decide.first_claim(operation, now=0.0, lease=lease, ttl=ttl)
                taken, row, now = self._rows.take(call, fresh, judge)
                if taken is not None:
                    return _with_row(taken, row)
                first = None if row is None else (row, now)
            # SQLite locks the whole file for each commit: meeting a lock there says nothing about this record.
            patience = self._database.timeout if self._database.sqlite else PATIENCE
            try:
                decision, after = self._rows.change(call, operation.key, judge, first=first, patience=patience)
            except LockedRow as locked:
                if locked.row is None:
                    raise
                return Decision(Answer.HELD, None, locked.row.record, locked.now)
        if after is not None and (decision.answer in _PARKED or (decision.claim is not None and decision.claim.right)):
            self._rows.remember(after)  # for the park or the settling to come
        return _with_row(decision, after)

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Ended:
        """See ``Store.complete``."""

        def judge(record: Record | None, now: float) -> tuple[Ended, Record | None]:
            return decide.decide_complete(record, claim, outcome, now=now)

        if connection is None:
            with self._database.call() as call:
                return self._end(call, claim, judge)
        # A row inserted in the caller's transaction would make every other claim of the key wait for it.
        absent = None if self._database.sqlite else lambda: self.renew([claim])
        with self._database.joined(connection) as call:
            return self._end(call, claim, judge, absent=absent)

    def begin(self, claim: Claim | None, carrier: Carrier | None = None) -> SQLTransaction | None:
        """See ``Transactional.begin``."""
        return begun(self, self._database, self._rows, claim, carrier)

    def release(self, claim: Claim, reason: Release, *, successor: Successor | None = None) -> Ended:
        """See ``Store.release``."""

        def judge(record: Record | None, now: float) -> tuple[Ended, Record | None]:
            return decide.decide_release(record, claim, reason, successor, now=now)

        with self._database.call() as call:
            return self._end(call, claim, judge)

    def _end(self, call: Call, claim: Claim, judge: Judge[Ended], *, absent: Callable[[], Any] | None = None) -> Ended:
        # A row written in the caller's transaction may yet be rolled back.
        remember = claim.operation.delivery.continues and not call.joined
        row = self._rows.seen_under(claim)
        if row is not None:
            guessed = self._rows.guess(call, "end", row, judge, remember=remember)
            if guessed is not None:
                return guessed
        ended, row = self._rows.change(call, claim.key, judge, absent=absent)
        if row is not None and remember:
            self._rows.remember(row)
        return ended

    def settle(self, key: str, message_id: str) -> None:
        """See ``Store.settle``."""
        self._note(key, lambda record, now: (True, decide.decide_settle(record, message_id, now=now)))

    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        """See ``Store.note_parked``."""

        def judge(record: Record | None, now: float) -> tuple[bool, Record | None]:
            return True, decide.decide_parked(record, message_id, generation, count, now=now)

        self._note(key, judge)

    def _note(self, key: str, judge: Judge[bool]) -> None:
        with self._database.call() as call:
            row = self._rows.seen(key)
            if row is None or self._rows.guess(call, "note", row, judge, remember=False) is None:
                self._rows.change(call, key, judge)

    def get(self, key: str) -> Record | None:
        """See ``Store.get``."""
        with self._database.call() as call:
            row, now = self._rows.read(call, key)
        return None if row is None or row.record.expires_at <= now else row.record

    def forget(self, key: str, fence: int | None) -> bool:
        """See ``Store.forget``."""
        with self._database.call() as call:
            if fence is None:
                return self._drop_unreadable(call, key)
            return self._rows.change(call, key, lambda record, now: decide.decide_forget(record, fence, now=now))[0]

    def _drop_unreadable(self, call: Call, key: str) -> bool:
        values = call.execute("read", {"key": key})[0][0]
        if values[0] is None:
            return False
        try:
            rows.read_row(values)
        except RecordCorrupt:
            return call.execute("drop", {"key": key, "seen_rev": values[1]})[1] == 1
        return False

    # -- many keys -----------------------------------------------------------------------------------------------------

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        """See ``Store.renew``."""
        with self._database.call() as call:
            if self._database.sqlite:
                return self._renew_together(call, claims) if claims else {}
            answers = self._renew_free(call, [claim for claim in claims if not claim.right])
            firsts = self._read_many(call, [claim.key for claim in claims if claim.token not in answers])
            for claim in claims:
                if claim.token not in answers:
                    answers[claim.token] = self._renew_one(call, claim, firsts)
        return answers

    def _renew_together(self, call: Call, claims: Sequence[Claim]) -> dict[str, Renewal]:
        """Renew them in one transaction of SQLite's; all are busy where the file stays locked."""
        busy = {claim.token: Renewal.BUSY for claim in claims}
        call.execute("read", {"key": claims[0].key})  # a new file gets its table here
        if not self._rows.locked_file(call):
            return busy
        answers, written = dict(busy), []
        try:
            for claim in claims:
                # In a transaction of its own it waits for no lock: waiting gives back the connection that it is on.
                with contextlib.suppress(RecordCorrupt, LockedRow):
                    answers[claim.token], row = self._rows.change(call, claim.key, _renewal_of(claim), patience=0.0)
                    written.append(row)
            call.execute("commit", {})
        except BaseException as error:
            call.drop()  # which rolls back
            if isinstance(error, Locked):
                return busy
            raise
        for row in written:
            if row is not None:
                self._rows.remember(row)
        return answers

    def _renew_free(self, call: Call, claims: list[Claim]) -> dict[str, Renewal]:
        """Renew the plain claims that nobody locks, in one statement."""
        if not claims:
            return {}
        by_token = {claim.token: claim for claim in claims}
        params = {
            "keys": [claim.key for claim in by_token.values()],
            "tokens": list(by_token),
            "leases": [float(claim.lease) for claim in by_token.values()],
            "keeps": [float(decide.kept(claim.ttl)) for claim in by_token.values()],
        }
        found, _ = call.execute("renew", params)
        for _, token, rev, lease_expires_at, expires_at in found:
            row = self._rows.seen_under(by_token[token])
            if row is not None and row.rev + 1 == rev:
                moved = replace(row.record, lease_expires_at=lease_expires_at, expires_at=expires_at)
                self._rows.remember(Row(moved, rev, row.notes))
        return {token: Renewal.RENEWED for _, token, *_ in found}

    def _read_many(self, call: Call, keys: list[str]) -> dict[str, tuple[Row | None, float] | None]:
        """Rows and clock by key, None for a row that cannot be read."""
        if not keys:
            return {}
        read: dict[str, tuple[Row | None, float] | None] = {}
        for *values, now, key in call.execute("read_many", {"keys": keys})[0]:
            try:
                read[key] = (None if values[0] is None else rows.read_row(values)), now
            except RecordCorrupt:
                read[key] = None
        return read

    def _renew_one(self, call: Call, claim: Claim, firsts: dict[str, tuple[Row | None, float] | None]) -> Renewal:
        """One renewal the batch did not make; whatever hinders it hinders no other."""
        first = firsts.get(claim.key)
        if claim.key in firsts and (first is None or _would_have_been_renewed(claim, *first)):
            return Renewal.BUSY  # unreadable, or locked: neither is a loss
        try:
            answer, row = self._rows.change(call, claim.key, _renewal_of(claim), first=first, patience=0.0)
        except (Locked, RecordCorrupt):
            return Renewal.BUSY
        if row is not None:
            self._rows.remember(row)
        return answer

    def find(
        self,
        *,
        task: str | None = None,
        scope: str | None = None,
        state: State | None = None,
        older_than: float | None = None,
        limit: int = 1000,
    ) -> Iterator[Record]:
        """See ``Store.find``; the longest claimed first."""
        pages = self._pages(task=task, scope=scope, state=state, older_than=older_than, limit=limit)
        corrupt: RecordCorrupt | None = None
        for values in islice(pages, max(0, limit)):
            try:
                yield rows.read_row(values).record
            except RecordCorrupt as error:
                corrupt = corrupt or error
        if corrupt is not None:
            raise corrupt

    def _pages(self, *, limit: int, **filters: Any) -> Iterator[Any]:
        """Rows, read by the page in a statement of its own, so that nothing stays open between two."""
        after: tuple[float, str] | None = None
        size = min(PAGE, limit)
        while size > 0:
            page = find_page(self._database.clock, after=after, limit=size, **filters)

            def fetch(connection: Connection, page: Any = page) -> list[Any]:
                return [tuple(row) for row in connection.execute(page)]

            with self._database.call() as call:
                found = call.use(fetch, writes=False)
            yield from found
            if len(found) < size:
                return
            after = found[-1][rows.CLAIMED_AT], found[-1][0]

    def purge(self, limit: int) -> int:
        """See ``Store.purge``."""
        with self._database.call() as call:
            try:
                return call.execute("purge", {"limit": limit})[1]
            except Locked:
                return 0

    # -- the store itself ----------------------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """See ``Store.check``."""
        return check_database(self._database)

    def create_schema(self) -> None:
        """See ``Store.create_schema``."""
        self._database.create_schema()

    def close(self) -> None:
        """See ``Store.close``."""
        self._database.close()


def _with_row(decision: Decision, row: Row | None) -> Decision:
    """The decision, its claim remembering the row it can end in one step."""
    claim = decision.claim
    if claim is None or row is None:
        return decision
    operation, fence, answer, attempts = claim.operation, claim.fence, claim.answer, claim.attempts
    seen = Claim(operation, fence, answer, attempts, claim.lease, claim.ttl, claim.unknown, claim.right, row)
    return Decision(decision.answer, seen, decision.record, decision.now)


def _renewal_of(claim: Claim) -> Judge[Renewal]:
    def judge(record: Record | None, now: float) -> tuple[Renewal, Record | None]:
        return decide.decide_renew(record, claim, now=now)

    return judge


def _would_have_been_renewed(claim: Claim, row: Row | None, now: float) -> bool:
    """Whether only a lock can have kept the row out of the batch."""
    if claim.right or row is None:
        return False
    record = row.record
    mine = record.state is State.CLAIMED and record.token == claim.token
    return mine and record.expires_at > now and record.record_version <= RECORD_VERSION
