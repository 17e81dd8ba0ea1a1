"""Why a database lets nobody in, and what to do: what is wrong with SQLite's file, what PostgreSQL says."""

from __future__ import annotations

import os
import re
from pathlib import Path

# libpq gives no SQLSTATE for a connection that did not come about.
_POSTGRESQL = (
    (r'FATAL: +database "[^"]*" does not exist', "create it, or correct idempotency_store"),
    (r'FATAL: +role "[^"]*" does not exist', "create it, or correct the user in idempotency_store"),
    (r'FATAL: +role "[^"]*" is not permitted to log in', "grant it LOGIN, or correct the user in idempotency_store"),
    (r"FATAL: +permission denied for database", "grant this role CONNECT, or correct idempotency_store"),
    (r"authentication failed|no password supplied", "correct user and password in idempotency_store, or pg_hba.conf"),
    (r"FATAL: +(no pg_hba\.conf entry|pg_hba\.conf rejects)", "let this host, user and database in by pg_hba.conf"),
)
_SQLITE = ("unable to open", "readonly", "read-only")


def next_step(name: str, said: str, file: str | None) -> str | None:
    """What to do about a refusal that will not end by itself; None where it may be an outage.

    Args:
        name: the store's.
        said: what the driver said.
        file: the one that SQLite's URL names.
    """
    if name == "postgresql":
        return next((step for sign, step in _POSTGRESQL if re.search(sign, said)), None)
    if file is None or not any(sign in said for sign in _SQLITE):
        return None
    return _about(Path(file.removeprefix("file:")).absolute())


def _about(file: Path) -> str | None:
    folder = file.parent
    try:
        folder.stat()
    except PermissionError:
        return f"this user may not get to {folder}: grant it, or correct idempotency_store"
    except OSError:
        return f"there is no directory {folder}: make it, or correct idempotency_store"
    if not folder.is_dir():
        return f"{folder} is no directory: correct idempotency_store"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"this user may not write into {folder}: grant it, for SQLite keeps its journal beside the file"
    if file.is_dir():
        return f"{file} is a directory: name a file in idempotency_store"
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        return f"this user may not write {file}: grant it, or correct idempotency_store"
    return None
