"""Every statement the store sends, built once per engine; PostgreSQL and SQLite differ here and nowhere else.

PostgreSQL reads its clock once per statement, in a CTE: ``clock_timestamp()``, for ``now()`` stands still in a
transaction. No statement waits for a row lock: rows are taken with ``SKIP LOCKED``, and a write that changed nothing
though the row is as it was has met a lock. Nothing needs a session (pgbouncer): no SET, no LISTEN, nothing prepared.

On SQLite ``:now`` is this host's ``time.time()``: the file is on this host, so every process reads the same clock, and
SQLite's own is rounded to milliseconds, too coarse for fences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Double,
    Executable,
    Float,
    Text,
    any_,
    bindparam,
    cast,
    column,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    true,
    tuple_,
    union_all,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.selectable import CTE, Select

from celery_idem.core.records import RECORD_VERSION, State
from celery_idem.stores.sql.rows import AT_NOW, NOW, THEN, UNTIL_THEN
from celery_idem.stores.sql.schema import COLUMNS, OUTCOME_COLUMNS, record

PAGE = 100  # records one statement of ``find`` reads, bodies and all


class db_epoch(FunctionElement[float]):  # noqa: N801  reads like a function in SQL
    """Seconds since 1970 by PostgreSQL's clock at this moment."""

    type = Double()
    inherit_cache = True


@compiles(db_epoch, "postgresql")
def _postgresql_epoch(_element: Any, _compiler: Any, **_: Any) -> str:
    return "EXTRACT(EPOCH FROM clock_timestamp())::float8"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement, as Core knows it and as the driver takes it."""

    construct: Executable
    text: str
    writes: bool


class Statements:
    """What every dialect has."""

    now: ColumnElement[float] = bindparam("now", type_=Double())

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = type(dialect)(paramstyle="named" if dialect.name == "sqlite" else "pyformat")
        moving = [name for name in COLUMNS if name != "key"]
        kept = [name for name in moving if name not in OUTCOME_COLUMNS]
        self.read = self._reads(select(record, self._reading()).where(record.c.key == bindparam("key")))
        self.insert = self._writes(self._insert(record).values(_new(COLUMNS)).on_conflict_do_nothing())
        self.write = self._writes(update(record).where(self._seen()).values(_new(moving)))
        self.write_but_outcome = self._writes(update(record).where(self._seen()).values(_new(kept)))
        self.drop = self._writes(delete(record).where(self._seen()))

    def _insert(self, table: Any) -> Any:
        raise NotImplementedError

    def _reading(self) -> ColumnElement[float]:
        """The clock, as a column of a statement that reads."""
        return self.now.label("now")

    def _seen(self) -> ColumnElement[bool]:
        """The row as it was seen. The token too: a clock standing still could repeat a rev after a purge."""
        return (
            (record.c.key == bindparam("key"))
            & (record.c.rev == bindparam("seen_rev"))
            & (record.c.token == bindparam("seen_token"))
        )

    def _reads(self, construct: Any) -> Statement:
        return Statement(construct, str(construct.compile(dialect=self._dialect)), writes=False)

    def _writes(self, construct: Any) -> Statement:
        return Statement(construct, str(construct.compile(dialect=self._dialect)), writes=True)

    def find(
        self,
        *,
        task: str | None,
        scope: str | None,
        state: State | None,
        older_than: float | None,
        after: tuple[float, str] | None,
        limit: int,
    ) -> Select[Any]:
        """One page of the records that match, the longest claimed first."""
        query = select(record, self._reading()).where(record.c.expires_at > self.now)
        query = query.order_by(record.c.claimed_at, record.c.key).limit(limit)
        if task is not None:
            query = query.where(record.c.task == task)
        if scope is not None:
            query = query.where(record.c.scope == scope)
            if scope:
                query = query.where(record.c.scope != literal("", literal_execute=True))
        if state is not None:  # spelled out, so that the partial index fits
            query = query.where(record.c.state == literal(state.value, literal_execute=True))
        if older_than is not None:
            query = query.where(record.c.claimed_at <= self.now - older_than)
        if after is not None:
            query = query.where(tuple_(record.c.claimed_at, record.c.key) > tuple_(*after))
        return query


class SQLiteStatements(Statements):
    """Plain reads and guarded writes; every time in them was computed by the caller."""

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        expired = select(record.c.key).where(record.c.expires_at <= self.now)
        expired = expired.order_by(record.c.expires_at).limit(bindparam("limit"))
        self.purge = self._writes(delete(record).where(record.c.key.in_(expired)))

    def _insert(self, table: Any) -> Any:
        return sqlite.insert(table)


class PostgreSQLStatements(Statements):
    """With claim, end, note and renew in one round trip each."""

    def __init__(self, dialect: Dialect, *, clock: bool) -> None:
        """``clock`` is whether the server's clock counts, or an injected one in ``:now``."""
        source = db_epoch() if clock else cast(bindparam("now"), Double)
        self._clock: CTE = select(source.label("now")).cte("clock")
        self.now = select(self._clock.c.now).scalar_subquery()
        super().__init__(dialect)
        self.claim = self._writes(self._claim())
        self.end = self._writes(self._end())
        self.note = self._writes(self._note())
        self.renew = self._writes(self._renew())
        self.read_many = self._reads(
            select(record, self._reading()).where(record.c.key == any_(bindparam("keys", type_=ARRAY(Text))))
        )
        self.purge = self._writes(self._purge())

    def _insert(self, table: Any) -> Any:
        return postgresql.insert(table)

    def _seen(self, *more: Any) -> ColumnElement[bool]:
        row = record.alias("seen")
        free = select(row.c.key).where(
            row.c.key == bindparam("key"),
            row.c.rev == bindparam("seen_rev"),
            row.c.token == bindparam("seen_token"),
            *(condition(row.c) for condition in more),
        )
        return record.c.key == free.with_for_update(key_share=True, skip_locked=True).scalar_subquery()

    def _alive(self, columns: Any) -> ColumnElement[bool]:
        return columns.expires_at > self.now

    def _claim(self) -> Any:
        """Insert the record if there is none, else read it; no row if somebody else is inserting it."""
        existing = select(record).where(record.c.key == bindparam("key")).cte("existing")
        now = self._clock.c.now
        microseconds = cast(func.greatest(func.floor(now * 1_000_000.0), 1.0), BigInteger)
        values = {
            **_new(COLUMNS),
            "rev": microseconds,
            "fence": microseconds,
            "claimed_at": now,
            "lease_expires_at": now + bindparam("new_lease_expires_at", type_=Double()),
            "expires_at": now + bindparam("new_expires_at", type_=Double()),
            "notes": self._timed(now),
        }
        source = select(*(cast(values[name], record.c[name].type) for name in COLUMNS)).select_from(self._clock)
        source = source.where(~exists(select(existing.c.key)))
        fresh = self._insert(record).from_select(COLUMNS, source).on_conflict_do_nothing()
        fresh = fresh.returning(*record.c).cte("fresh")
        return union_all(
            select(literal(False).label("inserted"), *existing.c, self.now.label("now")),
            select(true().label("inserted"), *fresh.c, self.now.label("now")),
        )

    def _end(self) -> Any:
        """End the claim this row was seen under, its times counted from the write."""
        values = {name: bindparam(f"new_{name}", type_=record.c[name].type) for name in OUTCOME_COLUMNS}
        completed = bindparam("new_completed", type_=Double())  # 0 for a completion, NULL for a release
        ended = update(record).where(self._seen(self._alive)).values(
            **values,
            rev=record.c.rev + 1,
            state=bindparam("new_state", type_=Text()),
            unknown=bindparam("new_unknown", type_=record.c.unknown.type),
            attempts=bindparam("new_attempts", type_=record.c.attempts.type),
            lease_expires_at=self.now,
            completed_at=self.now + completed,
            expires_at=self.now + bindparam("new_expires_at", type_=Double()),
            notes=self._timed(self.now),
        )
        return ended.returning(self.now)

    def _note(self) -> Any:
        """Write the notes of the row as it was seen."""
        noted = update(record).where(self._seen(self._alive))
        return noted.values(rev=record.c.rev + 1, notes=self._timed(self.now)).returning(self.now)

    def _timed(self, now: Any) -> ColumnElement[str]:
        then = now + bindparam("then", type_=Double())
        notes = func.replace(bindparam("new_notes", type_=Text()), AT_NOW, literal(NOW) + cast(now, Text))
        return func.replace(notes, UNTIL_THEN, literal(THEN) + cast(then, Text))

    def _renew(self) -> Any:
        """Move the leases of all claims that are still what they were and that nobody locks."""
        leases = func.unnest(
            bindparam("keys", type_=ARRAY(Text)),
            bindparam("tokens", type_=ARRAY(Text)),
            cast(bindparam("leases", type_=ARRAY(Double)), ARRAY(Double)),
            cast(bindparam("keeps", type_=ARRAY(Double)), ARRAY(Double)),
        )
        wanted = leases.table_valued(
            column("key", Text), column("token", Text), column("lease", Double), column("keep", Double)
        ).render_derived(name="wanted")
        row = record.alias("seen")
        free = (
            select(row.c.key, wanted.c.lease, wanted.c.keep)
            .join(wanted, (row.c.key == wanted.c.key) & (row.c.token == wanted.c.token))
            .where(
                row.c.state == State.CLAIMED.value,
                row.c.record_version <= RECORD_VERSION,
                self._alive(row.c),
            )
            .with_for_update(of=row, key_share=True, skip_locked=True)
            .cte("free")
        )
        end = self.now + free.c.lease
        moved = update(record).where(record.c.key == free.c.key)
        moved = moved.values(rev=record.c.rev + 1, lease_expires_at=end, expires_at=end + free.c.keep)
        return moved.returning(
            record.c.key, record.c.token, record.c.rev, record.c.lease_expires_at, record.c.expires_at
        )

    def _purge(self) -> Any:
        dead = select(record.c.key).where(record.c.expires_at <= self.now).order_by(record.c.expires_at)
        dead = dead.limit(bindparam("limit")).with_for_update(skip_locked=True).cte("dead")
        return delete(record).where(record.c.key.in_(select(dead.c.key)))


def _new(names: Any) -> dict[str, Any]:
    return {name: bindparam(f"new_{name}", type_=record.c[name].type) for name in names}


__all__ = ["PAGE", "Float", "PostgreSQLStatements", "SQLiteStatements", "Statement", "Statements", "db_epoch"]
