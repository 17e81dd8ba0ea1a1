"""What ``check`` looks at before a worker relies on the database: schema, rights, durability."""

from __future__ import annotations

import contextlib
import sqlite3

from sqlalchemy import delete, false, text
from sqlalchemy.engine import Connection

from celery_idem.errors import ConfigurationError
from celery_idem.stores.sql import schema
from celery_idem.stores.sql.database import Database
from celery_idem.stores.sql.failures import Locked, no_schema

_POSTGRESQL = """
SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), current_setting('synchronous_commit'),
  current_setting('fsync')
"""
_RIGHTS = f"SELECT has_table_privilege('{schema.record.name}', :right)"


def check_database(database: Database) -> list[str]:
    """Warnings; ``ConfigurationError`` where the store cannot work. SQLite makes its table here if it has none."""
    with database.call() as call:
        lacking = call.use(schema.missing, writes=False)
    if database.sqlite and (lacking is None or lacking):
        database.create_schema()
    elif lacking is None:
        raise no_schema("no such table")
    elif lacking:
        raise no_schema(f"it lacks {', '.join(lacking)}")
    with database.call() as call:
        if database.sqlite:
            with contextlib.suppress(Locked):  # by somebody who writes
                call.once(_writable)
        warnings: list[str] = call.use(_sqlite if database.sqlite else _postgresql, writes=False)
    return warnings


def _writable(connection: Connection) -> None:
    """Raise what SQLite says of a file that it can only read; ``BEGIN IMMEDIATE`` would let it pass."""
    connection.execute(delete(schema.record).where(false()))


def _sqlite(connection: Connection) -> list[str]:
    if sqlite3.sqlite_version_info < (3, 24, 0):
        raise ConfigurationError(f"SQLite {sqlite3.sqlite_version} is too old for this store: it needs 3.24 or later")
    warnings = []
    mode = connection.execute(text("PRAGMA journal_mode")).scalar_one()
    if mode != "wal":
        warnings.append(f"the SQLite file's journal mode is {mode}: readers and writers wait for each other; use WAL")
    if connection.execute(text("PRAGMA synchronous")).scalar_one() < 2:
        warnings.append("SQLite's synchronous is below FULL: a power cut can take claims and completions back")
    return warnings


def _postgresql(connection: Connection) -> list[str]:
    version, replica, commit, fsync = connection.execute(text(_POSTGRESQL)).one()
    if version < 120_000:
        raise ConfigurationError(f"PostgreSQL {version // 10_000} is too old for this store: it needs 12 or later")
    if replica:
        raise ConfigurationError("idempotency_store names a read-only replica: name the primary")
    lacking = [
        right
        for right in ("SELECT", "INSERT", "UPDATE", "DELETE")
        if not connection.execute(text(_RIGHTS), {"right": right}).scalar_one()
    ]
    if lacking:
        raise ConfigurationError(f"the store's role may not {', '.join(lacking)} {schema.record.name}: grant it")
    warnings = []
    if commit == "off":
        warnings.append("synchronous_commit is off: a crash of PostgreSQL can take claims and completions back")
    if fsync == "off":
        warnings.append("fsync is off: a power cut can take claims and completions back")
    return warnings
