"""The ledger's tables, and the triggers that keep it a ledger; ``metadata`` may join your own Alembic migrations.

The database refuses by itself, whatever program speaks to it: a receipt, event or admission that is changed or deleted,
an action whose identity changes, a way back in an action's life, a second attempt.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.engine import Connection

from celery_idem.errors import ConfigurationError
from celery_idem.governed.records import ACTION_STATES, ALLOWED_TRANSITIONS

INIT = "celery -A <app> governed init"

metadata = MetaData()

_SERIAL = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself under this type alone


def _listed(words: frozenset[str] | tuple[str, ...]) -> str:
    return ", ".join(f"'{word}'" for word in sorted(words))


def _dated(column: str, last: str = "1e11") -> str:
    """The condition that this is a time: infinity, NaN and what SQLite takes for text are none."""
    return f"{column} BETWEEN 0 AND {last}"


action = Table(
    "celery_idem_action",
    metadata,
    Column("action_id", Text, primary_key=True),
    Column("idempotency_key", Text, nullable=False, unique=True),
    Column("source", Text, nullable=False),
    Column("source_ref", Text),
    Column("action_type", Text, nullable=False),
    Column("payload", Text, nullable=False, comment="canonical JSON"),
    Column("payload_sha256", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt_count", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("next_attempt_at", Double, nullable=False, comment="this and all times: epoch seconds"),
    Column("lease_owner", Text),
    Column("lease_expires_at", Double),
    Column("last_error", Text),
    Column("result", Text, comment="canonical JSON"),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("terminal_at", Double),
    Column("chain_id", Text, comment="the Celery chain that may work on it"),
    Column("enqueued_at", Double, comment="when that chain was last published"),
    CheckConstraint(f"state IN ({_listed(ACTION_STATES)})", name="celery_idem_action_state"),
    CheckConstraint("max_attempts = 1", name="celery_idem_action_one_attempt"),
    CheckConstraint(
        "state = 'failed' AND attempt_count IN (0, 1)"
        " OR state IN ('proposed', 'gated') AND attempt_count = 0"
        " OR state IN ('dispatched', 'accepted', 'verified', 'completed') AND attempt_count = 1",
        name="celery_idem_action_attempts",
    ),
    CheckConstraint(
        # An action's time is no earlier than these, and a lease or a delay from then on must have its place too.
        f"{_dated('created_at', '9e10')} AND {_dated('updated_at', '9e10')} AND {_dated('next_attempt_at')}"
        " AND (lease_owner IS NULL) = (lease_expires_at IS NULL)"
        f" AND (lease_expires_at IS NULL OR {_dated('lease_expires_at')})",
        name="celery_idem_action_times",
    ),
)
receipt = Table(
    "celery_idem_action_receipt",
    metadata,
    Column("receipt_id", _SERIAL, primary_key=True, autoincrement=True),
    Column("action_id", Text, nullable=False),
    Column("receipt_key", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("external_id", Text),
    Column("evidence", Text, nullable=False, comment="canonical JSON"),
    Column("evidence_sha256", Text, nullable=False),
    Column("observed_at", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("action_id", "receipt_key", name="celery_idem_action_receipt_key"),
    CheckConstraint(f"{_dated('observed_at')} AND {_dated('created_at')}", name="celery_idem_action_receipt_times"),
)
event = Table(
    "celery_idem_action_event",
    metadata,
    Column("event_id", _SERIAL, primary_key=True, autoincrement=True),
    Column("action_id", Text, nullable=False),
    Column("event_type", Text, nullable=False),
    Column("from_state", Text),
    Column("to_state", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("details", Text, nullable=False, comment="canonical JSON"),
    Column("created_at", Double, nullable=False),
    CheckConstraint(_dated("created_at"), name="celery_idem_action_event_time"),
)
dead_letter = Table(
    "celery_idem_action_dead_letter",
    metadata,
    Column("letter_id", _SERIAL, primary_key=True, autoincrement=True),
    Column("action_id", Text, nullable=False, unique=True),
    Column("reason", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    CheckConstraint(_dated("created_at"), name="celery_idem_action_dead_letter_time"),
)
admission = Table(
    "celery_idem_action_admission",
    metadata,
    Column("admission_id", _SERIAL, primary_key=True, autoincrement=True),
    Column("open", Boolean, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("changed_at", Double, nullable=False),
)

# Partial: of a million actions few are at work, and only those are looked for. A query has the condition word for word,
# or SQLite does not take the index.
LEASABLE = text("state IN ('gated', 'accepted', 'verified')")
DISPATCHED = text("state = 'dispatched'")
AT_WORK = text("state IN ('gated', 'dispatched', 'accepted', 'verified')")
_LEASED = text("lease_owner IS NOT NULL")
_READY = (action.c.next_attempt_at, action.c.created_at, action.c.action_id)
Index("celery_idem_action_ready", *_READY, postgresql_where=LEASABLE, sqlite_where=LEASABLE)
Index("celery_idem_action_observable", *_READY, postgresql_where=DISPATCHED, sqlite_where=DISPATCHED)
Index("celery_idem_action_quiet", action.c.updated_at, postgresql_where=AT_WORK, sqlite_where=AT_WORK)
Index("celery_idem_action_leased", action.c.lease_expires_at, postgresql_where=_LEASED, sqlite_where=_LEASED)
Index("celery_idem_action_by_state", action.c.state, action.c.created_at, action.c.action_id)
Index("celery_idem_action_by_age", action.c.created_at, action.c.action_id)
Index("celery_idem_action_event_of", event.c.action_id, event.c.event_id)

APPEND_ONLY = (receipt, event, admission, dead_letter)
IDENTITY = (
    "action_id",
    "idempotency_key",
    "source",
    "source_ref",
    "action_type",
    "payload",
    "payload_sha256",
    "max_attempts",
    "created_at",
)

_SCHEMA_LOCK = 0x676F_7665_726E_6564  # "governed": nobody else's advisory lock
ADMISSION_LOCK = 0x6164_6D69_7373_696F  # "admissio"


def _wrong(differs: str) -> str:
    """The condition under which a changed action is refused; ``differs`` compares two values, NULL too."""
    changed = " OR ".join(f"NEW.{name} {differs} OLD.{name}" for name in IDENTITY)
    ways = " OR ".join(
        f"OLD.state = '{start}' AND NEW.state IN ({_listed(ends)})"
        for start, ends in ALLOWED_TRANSITIONS.items()
        if ends
    )
    return f"{changed} OR NEW.attempt_count < OLD.attempt_count OR NEW.state <> OLD.state AND NOT ({ways})"


_TAKEN = {
    action: "rowid = NEW.rowid OR action_id = NEW.action_id OR idempotency_key = NEW.idempotency_key",
    receipt: "receipt_id = NEW.receipt_id OR action_id = NEW.action_id AND receipt_key = NEW.receipt_key",
    event: "event_id = NEW.event_id",
    dead_letter: "letter_id = NEW.letter_id OR action_id = NEW.action_id",
    admission: "admission_id = NEW.admission_id",
}
"""When a row of SQLite's would take the place of another."""


def _sqlite_triggers() -> list[str]:
    refused = [(table.name, verb, "is append-only") for table in APPEND_ONLY for verb in ("UPDATE", "DELETE")]
    refused.append((action.name, "DELETE", "keeps every action"))
    made = [
        f"CREATE TRIGGER IF NOT EXISTS {table}_no_{verb.lower()} BEFORE {verb} ON {table}"
        f" BEGIN SELECT RAISE(ABORT, '{table} {why}'); END"
        for table, verb, why in refused
    ]
    made += [
        # INSERT OR REPLACE deletes what is in its way, and no trigger on DELETE hears of it.
        f"CREATE TRIGGER IF NOT EXISTS {table.name}_no_replace BEFORE INSERT ON {table.name}"  # noqa: S608
        f" WHEN EXISTS (SELECT 1 FROM {table.name} WHERE {taken})"
        f" BEGIN SELECT RAISE(ABORT, '{table.name} keeps every row'); END"
        for table, taken in _TAKEN.items()
    ]
    made.append(
        f"CREATE TRIGGER IF NOT EXISTS {action.name}_one_way BEFORE UPDATE ON {action.name} "
        f"WHEN NEW.rowid <> OLD.rowid OR {_wrong('IS NOT')}"
        f" BEGIN SELECT RAISE(ABORT, '{action.name} keeps identity, attempts and ends as they are'); END"
    )
    return made


def _postgres_triggers() -> dict[str, str]:
    made: dict[str, str] = {}
    for table in APPEND_ONLY:
        made |= _refusing(
            f"{table.name}_append_only", f"UPDATE OR DELETE ON {table.name} FOR EACH ROW", "is append-only"
        )
        made |= _refusing(f"{table.name}_no_truncate", f"TRUNCATE ON {table.name}", "is append-only")
    made |= _refusing(f"{action.name}_no_delete", f"DELETE ON {action.name} FOR EACH ROW", "keeps every action")
    made |= _refusing(f"{action.name}_no_truncate", f"TRUNCATE ON {action.name}", "keeps every action")
    changed = f"UPDATE ON {action.name} FOR EACH ROW WHEN ({_wrong('IS DISTINCT FROM')})"
    return made | _refusing(f"{action.name}_one_way", changed, "keeps identity, attempts and ends as they are")


def _refusing(name: str, what: str, why: str) -> dict[str, str]:
    return {name: f"CREATE TRIGGER {name} BEFORE {what} EXECUTE FUNCTION {_REFUSE}('{why}')"}


_REFUSE = "celery_idem_action_refuse"
_REFUSAL = f"""
    CREATE OR REPLACE FUNCTION {_REFUSE}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      RAISE EXCEPTION USING MESSAGE = TG_TABLE_NAME || ' ' || TG_ARGV[0], ERRCODE = 'integrity_constraint_violation';
    END $$"""


def create(connection: Connection) -> None:
    """Make what is missing, tables, indexes and triggers, in one transaction; any number may try at once.

    Args:
        connection: in autocommit mode; on an error it must not be used again.
    """
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if sqlite else "BEGIN")
    if not sqlite:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SCHEMA_LOCK})
        _must_be_unicode(connection)
    metadata.create_all(connection)
    if sqlite:
        for statement in _sqlite_triggers():
            connection.exec_driver_sql(statement)
    else:
        _create_postgres_triggers(connection)
    connection.exec_driver_sql("COMMIT")


def _must_be_unicode(connection: Connection) -> None:
    encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
    if encoding != "UTF8":
        raise ConfigurationError(
            f"governed_store: the database is encoded in {encoding}, so some payloads and answers could not be kept: "
            "make one with ENCODING 'UTF8'"
        )


def _create_postgres_triggers(connection: Connection) -> None:
    ours = (
        "SELECT tgname FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid WHERE proname = :name AND NOT tgisinternal"
    )
    there = {name for (name,) in connection.execute(text(ours), {"name": _REFUSE})}
    wanted = _postgres_triggers()
    if there.issuperset(wanted):
        return  # to make one again would wait for every transaction on its table
    connection.exec_driver_sql(_REFUSAL)
    for name, statement in wanted.items():
        if name not in there:
            connection.exec_driver_sql(statement)
