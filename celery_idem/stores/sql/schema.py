"""The tables, and making them: ``metadata`` may be included in your own Alembic migrations.

A column added by a later release has a server default, so releases N and N-1 share one table (S9): N-1 neither reads
nor writes it. Which columns are there *is* the schema version, so a table made by a migration needs no version row.
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
    LargeBinary,
    MetaData,
    Table,
    Text,
    false,
    inspect,
    text,
)
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateColumn

INIT = "celery -A <app> idem init"

metadata = MetaData()

record = Table(
    "celery_idem_record",
    metadata,
    Column("key", Text, primary_key=True, comment="effective key, 64 hex characters"),
    Column("rev", BigInteger, nullable=False, comment="moves with every write; what a guarded update saw"),
    Column("state", Text, nullable=False),
    Column("token", Text, nullable=False),
    Column("answer", Text, nullable=False, server_default="ACQUIRED", comment="given to the token"),
    Column("fence", BigInteger, nullable=False),
    Column("message_id", Text, nullable=False, server_default=""),
    Column("generation", Integer, nullable=False, server_default="0"),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("unknown", Boolean, nullable=False, server_default=false()),
    Column("task", Text, nullable=False, server_default=""),
    Column("namespace", Text, nullable=False, server_default=""),
    Column("scope", Text, nullable=False, server_default=""),
    Column("fingerprint", Text, nullable=False, server_default=""),
    Column("holder", Text, nullable=False, server_default=""),
    Column("claimed_at", Double, nullable=False, server_default="0", comment="this and all times: epoch seconds"),
    Column("lease_expires_at", Double, nullable=False, server_default="0"),
    Column("completed_at", Double),
    Column("expires_at", Double, nullable=False, server_default="0"),
    Column("outcome", Text),
    Column("content_type", Text),
    Column("content_encoding", Text),
    Column("checksum", Text),
    Column("body", LargeBinary),
    Column("notes", Text, nullable=False, server_default="{}", comment="JSON by message id"),
    Column("record_version", Integer, nullable=False, server_default="1"),
    CheckConstraint("state IN ('CLAIMED', 'COMPLETED', 'RELEASED')", name="celery_idem_record_state"),
)
Index("celery_idem_record_expires_at", record.c.expires_at)
Index("celery_idem_record_task", record.c.task, record.c.claimed_at)
# Partial, because every write pays for every index of a row: most records have no scope, and few are claimed.
_scoped, _claimed = text("scope <> ''"), text("state = 'CLAIMED'")
Index("celery_idem_record_scope", record.c.scope, record.c.claimed_at, postgresql_where=_scoped, sqlite_where=_scoped)
Index("celery_idem_record_claimed", record.c.claimed_at, postgresql_where=_claimed, sqlite_where=_claimed)

COLUMNS = tuple(column.name for column in record.columns)
OUTCOME_COLUMNS = ("outcome", "content_type", "content_encoding", "checksum", "body")

_SCHEMA_LOCK = 0x6365_6C65_6964_656D  # "celeidem": nobody else's advisory lock


def missing(connection: Connection) -> list[str] | None:
    """Name the columns this release needs and the table lacks; None if there is no table."""
    there = inspect(connection)
    if not there.has_table(record.name):
        return None
    present = {column["name"] for column in there.get_columns(record.name)}
    return [name for name in COLUMNS if name not in present]


def create(connection: Connection) -> None:
    """Make the table, or the columns and indexes it lacks, in one transaction; any number may try at once.

    Args:
        connection: in autocommit mode; on an error it must not be used again.
    """
    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if sqlite else "BEGIN")
    if not sqlite:
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _SCHEMA_LOCK})
    metadata.create_all(connection)
    for name in missing(connection) or ():
        column = CreateColumn(record.c[name]).compile(dialect=connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE {record.name} ADD COLUMN {column}")
    for index in sorted(record.indexes, key=lambda index: str(index.name)):
        index.create(connection, checkfirst=True)
    connection.exec_driver_sql("COMMIT")
