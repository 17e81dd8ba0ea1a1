"""What the drivers raise, said in the store's errors: one place for SQLite, psycopg2 and psycopg 3."""

from __future__ import annotations

from typing import Any

from sqlalchemy import exc

from celery_idem.errors import ConfigurationError, StoreError, StoreUnavailable
from celery_idem.stores.sql.refusals import next_step
from celery_idem.stores.sql.schema import INIT, record

# The server said no and rolled back, except where it was going down: that may have been after the commit.
_IN_DOUBT = ("08", "57P", "58", "XX")
READ_ONLY = "25006"
_TRY_AGAIN = frozenset({"40001", "40P01"})
_NO_SCHEMA = frozenset({"42P01", "42703", "3F000"})
_BUSY = ("database is locked", "database table is locked", "database schema is locked")
_NO_SQLITE_SCHEMA = ("no such table", "no such column", "has no column named")
_NO_FILE = "check that its directory is there, that this user may write into it, and that"
_NOT_WRITTEN = ("readonly", "read-only", "unable to open", "database or disk is full", *_BUSY)


class Locked(Exception):
    """A write found the row, or on SQLite the file, held by somebody's transaction; nothing was written."""


class Again(Exception):
    """The server rolled the statement back to let another one through; it may go out once more."""


class Refused(ConfigurationError, StoreUnavailable):
    """The database refuses the store, or its statements: no worker starts so, and for one that runs it is an outage."""


class NoSchema(Refused):
    """The store's table is missing or older than this release."""


def cause(error: BaseException) -> BaseException:
    """Return the driver's own error."""
    original = getattr(error, "orig", None)
    return original if isinstance(original, BaseException) else error


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's five characters, if the server sent any."""
    error = cause(error)
    code: Any = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


def refused(error: BaseException) -> bool:
    """Whether the server said no, so that nothing of the transaction is there."""
    for each in (error, error.__cause__):  # Django's errors have the driver's as their cause
        code = None if each is None else sqlstate(each)
        if code is not None:
            return not code.startswith(_IN_DOUBT)
    return type(cause(error)).__name__ == "IntegrityError"


def is_driver_error(error: BaseException) -> bool:
    """Whether it came from the database or the way to it."""
    if isinstance(error, (StoreError, Locked, Again, OSError)):
        return True
    bases = {base.__name__ for base in type(cause(error)).__mro__}
    return bool(bases & {"DatabaseError", "InterfaceError"})


def no_schema(why: object) -> NoSchema:
    """The error that names the command which makes the schema."""
    return NoSchema(f"the store's table {record.name} is missing or too old ({why}): run `{INIT}`")


def unavailable(name: str, why: object, *, landed: bool, file: str | None = None) -> StoreUnavailable:
    """The error for no answer, or for one that will not change by itself.

    Args:
        name: the store's.
        why: what the driver raised, or words.
        landed: whether the write may be there.
        file: SQLite's, so that what is wrong with it can be told.
    """
    step = next_step(name, str(why), file)
    if step is not None:
        return Refused(f"the {name} store refused ({_line(why)}): {step}", may_have_landed=landed)
    step = _NO_FILE if name == "sqlite" and "unable to open" in str(why) else "check that it runs and that"
    if isinstance(why, BaseException) and sqlstate(why) == READ_ONLY:
        step = "check that this is the primary, that it takes writes, and that"
    return StoreUnavailable(
        f"the {name} store gave no answer ({_line(why)}): {step} idempotency_store names it",
        may_have_landed=landed,
    )


def translated(
    error: BaseException, name: str, *, writes: bool, in_doubt: bool = False, file: str | None = None
) -> Exception:
    """Say a statement's failure in the store's words.

    Args:
        error: whatever the driver or SQLAlchemy raised.
        name: the store's, for the message.
        writes: whether the statement could have changed anything.
        in_doubt: whether an earlier attempt of the same verb may have landed.
        file: SQLite's.
    """
    error = cause(error)
    if isinstance(error, (StoreError, ConfigurationError, Locked, Again)):
        return error
    code, words = sqlstate(error), str(error)
    if code in _TRY_AGAIN:
        return Again(_line(error))
    if name == "sqlite" and any(sign in words for sign in _BUSY):
        return Locked(words)
    if code in _NO_SCHEMA or (name == "sqlite" and any(sign in words for sign in _NO_SQLITE_SCHEMA)):
        return no_schema(_line(error))
    if code is not None and code.startswith("42"):
        return Refused(f"the {name} store refused a statement ({_line(error)}): check its table and grants")
    if type(error).__name__ == "DataError" or isinstance(error, (ValueError, OverflowError)):
        return ConfigurationError(f"the {name} store cannot keep this record ({_line(error)}): give it other values")
    said_no = code is not None and not code.startswith(_IN_DOUBT)
    certain = said_no or (name == "sqlite" and any(sign in words for sign in _NOT_WRITTEN))
    return unavailable(name, error, landed=in_doubt or (writes and not certain), file=file)


def connecting(error: BaseException, name: str, *, landed: bool, file: str | None = None) -> Exception:
    """Say in the store's words that no connection came about; ``landed`` is about an earlier attempt."""
    if isinstance(error, (exc.NoSuchModuleError, exc.ArgumentError, ImportError)):
        return ConfigurationError(
            f"idempotency_store: {_line(error)}: install the driver "
            '(pip install "celery-idem[postgres]" brings psycopg2); psycopg2, psycopg and sqlite work, and no async one'
        )
    error = cause(error)
    if isinstance(error, (StoreError, ConfigurationError)):
        return error
    if name == "sqlite" and any(sign in str(error) for sign in _BUSY):
        return Locked(str(error))  # whoever makes a new file's tables holds up those who open it
    return unavailable(name, error, landed=landed, file=file)


def _line(why: object) -> str:
    return " ".join(str(why).split())[:300] or type(why).__name__
