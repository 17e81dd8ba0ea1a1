"""Every statement the store sends; PostgreSQL and SQLite differ here and nowhere else.

PostgreSQL reads its clock once per statement, in the CTE ``clock``: ``clock_timestamp()``, for ``now()`` stands still
in a transaction. No statement waits for a row lock: rows are taken with ``SKIP LOCKED``, and a write that changed
nothing though the row is as it was has met a lock. Nothing needs a session (pgbouncer): no SET, no LISTEN, nothing
prepared.

On SQLite ``:now`` is this host's ``time.time()``: the file is on this host, so every process reads the same clock, and
SQLite's own is rounded to milliseconds, too coarse for fences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Double, TextClause, literal, literal_column, select, text, tuple_
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.sql.selectable import Select

from celery_idem.core.records import RECORD_VERSION, State
from celery_idem.stores.sql.schema import COLUMNS, OUTCOME_COLUMNS, record

_PLACES = {
    "columns": ", ".join(COLUMNS),
    "row": ", ".join(f"r.{name}" for name in COLUMNS),
    "new": ", ".join(f":new_{name}" for name in COLUMNS),
    "set": ", ".join(f"{name} = :new_{name}" for name in COLUMNS if name != "key"),
    "set_but_outcome": ", ".join(f"{name} = :new_{name}" for name in COLUMNS if name not in {"key", *OUTCOME_COLUMNS}),
    # The row as it was seen. The token too: a clock that stands still could repeat a rev after a purge.
    "seen": "key = :key AND rev = :seen_rev AND token = :seen_token AND record_version <= :version",
    # The same, taken without waiting; a plain UPDATE would wait for whoever locks the row.
    "free": """key = (
        SELECT key FROM celery_idem_record
        WHERE key = :key AND rev = :seen_rev AND token = :seen_token AND record_version <= :version
        FOR NO KEY UPDATE SKIP LOCKED)""",
    "free_alive": """key = (
        SELECT key FROM celery_idem_record
        WHERE key = :key AND rev = :seen_rev AND token = :seen_token AND record_version <= :version
        AND expires_at > (SELECT now FROM clock) FOR NO KEY UPDATE SKIP LOCKED)""",
    # Times in a note that only the database knows; see ``rows.later``.
    "timed_notes": """replace(replace(:new_notes, '"at":"@now"', '"at":' || clock.now::text),
        '"until":"@then"', '"until":' || (clock.now + :then)::text)""",
}

_CLOCK = "clock AS MATERIALIZED (SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8 AS now)"
_INJECTED_CLOCK = "clock AS MATERIALIZED (SELECT CAST(:now AS float8) AS now)"

_EPOCH: Any = literal_column("EXTRACT(EPOCH FROM clock_timestamp())::float8", Double())

_SQLITE = {
    "read": "SELECT {row}, :now FROM (SELECT 1) LEFT JOIN celery_idem_record r ON r.key = :key",
    "insert": "INSERT INTO celery_idem_record ({columns}) VALUES ({new}) ON CONFLICT DO NOTHING",
    "write": "UPDATE celery_idem_record SET {set} WHERE {seen}",
    "write_but_outcome": "UPDATE celery_idem_record SET {set_but_outcome} WHERE {seen}",
    # The first statement of a body's transaction must write: only that waits for the file, and then sees the newest.
    # What it writes is gone again where somebody rolled the transaction back.
    "hold": "UPDATE celery_idem_record SET rev = rev + 1 WHERE key = :key",
    # Around many writes: a file has one lock for all its rows, and each commit waits for the disk.
    "begin": "BEGIN IMMEDIATE",
    "commit": "COMMIT",
    "drop": "DELETE FROM celery_idem_record WHERE key = :key AND rev IS :seen_rev",
    "purge": """
        DELETE FROM celery_idem_record WHERE key IN (
          SELECT key FROM celery_idem_record WHERE expires_at <= :now ORDER BY expires_at LIMIT :limit)""",
}

_POSTGRESQL = {
    # A first run inserts, everything else reads and writes nothing. The outer query sees what was there before: no row
    # and not inserted means that somebody is inserting it right now, so read again.
    "claim": """
        WITH {clock},
        fresh AS (
          INSERT INTO celery_idem_record ({columns})
          SELECT :new_key, greatest(floor(now * 1e6), 1)::bigint, :new_state, :new_token, :new_answer,
            greatest(floor(now * 1e6), 1)::bigint, :new_message_id, :new_generation, :new_attempts, :new_unknown,
            :new_task, :new_namespace, :new_scope, :new_fingerprint, :new_holder,
            now, now + :new_lease_expires_at, NULL, now + :new_expires_at,
            NULL, NULL, NULL, NULL, NULL, {timed_notes}, :new_record_version
          FROM clock WHERE NOT EXISTS (SELECT FROM celery_idem_record WHERE key = :key)
          ON CONFLICT (key) DO NOTHING RETURNING true AS inserted)
        SELECT {row}, now, inserted FROM clock
        LEFT JOIN celery_idem_record r ON r.key = :key LEFT JOIN fresh ON true""",
    "read": "WITH {clock} SELECT {row}, now FROM clock LEFT JOIN celery_idem_record r ON r.key = :key",
    "read_many": """
        WITH {clock}
        SELECT {row}, now, wanted.key FROM unnest(CAST(:keys AS text[])) AS wanted(key) CROSS JOIN clock
        LEFT JOIN celery_idem_record r ON r.key = wanted.key""",
    # It writes, so that its rev is gone again where somebody rolled the transaction back.
    "hold": """
        UPDATE celery_idem_record r SET rev = rev + 1
        WHERE key = (SELECT key FROM celery_idem_record WHERE key = :key FOR NO KEY UPDATE SKIP LOCKED)
        RETURNING {row}""",
    "insert": "INSERT INTO celery_idem_record ({columns}) VALUES ({new}) ON CONFLICT (key) DO NOTHING",
    "write": "UPDATE celery_idem_record SET {set} WHERE {free}",
    "write_but_outcome": "UPDATE celery_idem_record SET {set_but_outcome} WHERE {free}",
    # The claim this row was seen under ends; its times count from the write.
    "end": """
        WITH {clock}
        UPDATE celery_idem_record SET rev = rev + 1, state = :new_state, unknown = :new_unknown,
          attempts = :new_attempts, lease_expires_at = clock.now, completed_at = clock.now + :new_completed_at,
          expires_at = clock.now + :new_expires_at, notes = {timed_notes}, outcome = :new_outcome, body = :new_body,
          content_type = :new_content_type, content_encoding = :new_content_encoding, checksum = :new_checksum
        FROM clock WHERE {free_alive} RETURNING clock.now""",
    "note": """
        WITH {clock}
        UPDATE celery_idem_record SET rev = rev + 1, notes = {timed_notes}
        FROM clock WHERE {free_alive} RETURNING clock.now""",
    # Claims that are still what they were and that nobody locks; the others are read and decided one by one.
    "renew": """
        WITH {clock},
        wanted AS (
          SELECT * FROM unnest(CAST(:keys AS text[]), CAST(:tokens AS text[]), CAST(:leases AS float8[]),
            CAST(:keeps AS float8[])) AS wanted(key, token, lease, keep)),
        free AS (
          SELECT r.key, lease, keep FROM celery_idem_record r
          JOIN wanted ON r.key = wanted.key AND r.token = wanted.token
          WHERE state = 'CLAIMED' AND record_version <= :version AND expires_at > (SELECT now FROM clock)
          FOR NO KEY UPDATE OF r SKIP LOCKED)
        UPDATE celery_idem_record r SET rev = rev + 1, lease_expires_at = now + lease, expires_at = now + lease + keep
        FROM free, clock WHERE r.key = free.key
        RETURNING r.key, r.token, r.rev, r.lease_expires_at, r.expires_at""",
    "drop": """
        DELETE FROM celery_idem_record WHERE key = (
          SELECT key FROM celery_idem_record WHERE key = :key AND rev = :seen_rev FOR UPDATE SKIP LOCKED)""",
    "purge": """
        WITH {clock},
        dead AS MATERIALIZED (
          SELECT key FROM celery_idem_record WHERE expires_at <= (SELECT now FROM clock)
          ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED)
        DELETE FROM celery_idem_record WHERE key IN (SELECT key FROM dead)""",
}


# How the drivers name parameters; nothing else in the text depends on the dialect.
_PYFORMAT, _NAMED = DefaultDialect(paramstyle="pyformat"), DefaultDialect(paramstyle="named")


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement: for a connection of the caller's, and as the driver of the store's own takes it."""

    construct: TextClause
    text: str
    writes: bool


def statements(dialect: str, *, injected_clock: bool) -> dict[str, Statement]:
    """Every statement of the dialect by its name."""
    sources, compiler = (_SQLITE, _NAMED) if dialect == "sqlite" else (_POSTGRESQL, _PYFORMAT)
    clock = _INJECTED_CLOCK if injected_clock else _CLOCK
    made = {}
    for name, source in sources.items():
        words = source.format(clock=clock, **_PLACES).replace(":version", str(RECORD_VERSION)).split()
        construct = text(" ".join(words))
        made[name] = Statement(construct, str(construct.compile(dialect=compiler)), not name.startswith("read"))
    return made


def find_page(
    clock: Callable[[], float] | None,
    *,
    task: str | None,
    scope: str | None,
    state: State | None,
    older_than: float | None,
    after: tuple[float, str] | None,
    limit: int,
) -> Select[Any]:
    """One page of the records that match, the longest claimed first.

    Args:
        clock: in place of PostgreSQL's.
        after: ``claimed_at`` and key of the page before's last record.
    """
    c = record.c
    now: Any = select(_EPOCH).scalar_subquery() if clock is None else literal(clock(), Double())
    query = select(record, now).where(c.expires_at > now).order_by(c.claimed_at, c.key).limit(limit)
    if task is not None:
        query = query.where(c.task == task)
    if scope is not None:
        query = query.where(c.scope == scope)
    if scope:  # spelled out, like the state below, so that the partial index fits
        query = query.where(c.scope != literal("", literal_execute=True))
    if state is not None:
        query = query.where(c.state == literal(state.value, literal_execute=True))
    if older_than is not None:
        query = query.where(c.claimed_at <= now - older_than)
    if after is not None:
        query = query.where(tuple_(c.claimed_at, c.key) > tuple_(*after))
    return query
