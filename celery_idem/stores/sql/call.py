"""The statements of one verb: on one connection, within one deadline.

They go straight to the driver's cursor on a pooled autocommit connection: Core's own execution costs more than the
query. A statement that met a stale connection, or a lock that does not last, goes out again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.pool import PoolProxiedConnection

from celery_idem.errors import StoreError
from celery_idem.stores.sql.failures import (
    READ_ONLY,
    Again,
    Locked,
    NoSchema,
    cause,
    connecting,
    is_driver_error,
    no_schema,
    sqlstate,
    translated,
    unavailable,
)
from celery_idem.stores.sql.watchdog import watchdog

if TYPE_CHECKING:
    from celery_idem.stores.sql.database import Database

T = TypeVar("T")
Line = Connection | PoolProxiedConnection
"""A pooled connection, with or without SQLAlchemy's around it."""


class Call:
    """The statements of one verb: one connection, one deadline."""

    joined = False
    theirs = False
    """Whether the connection is the caller's, who may have made its transaction read-only."""

    def __init__(self, database: Database, deadline: float) -> None:
        self.database = database
        self.deadline = deadline
        self._line: Line | None = None
        self._lost = False
        self._in_doubt = False
        self._retried = False

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if isinstance(error, Locked):
            name, timeout = self.database.name, self.database.timeout
            raise unavailable(name, f"the record stayed locked for {timeout:g} s", landed=False) from error

    def left(self) -> float:
        """Seconds before the verb has to answer."""
        return self.deadline - time.monotonic()

    def execute(self, name: str, params: dict[str, Any]) -> tuple[list[Any], int]:
        """Send the statement of that name, and return its rows and how many it changed."""
        statement = self.database.statements[name]

        def send(line: Line) -> tuple[list[Any], int]:
            cursor = pooled(line).cursor()
            try:
                cursor.execute(statement.text, params)
                found = (list(cursor.fetchall()) if cursor.description else []), cursor.rowcount
            except BaseException:
                with contextlib.suppress(Exception):
                    cursor.close()
                raise
            cursor.close()
            return found

        return self._repeated(send, params, writes=statement.writes, core=False)

    def use(self, work: Callable[[Any], T], *, writes: bool) -> T:
        """Run something longer on a SQLAlchemy connection, within the deadline."""
        return self._repeated(work, {}, writes=writes, core=True)

    def once(self, work: Callable[[Any], T]) -> T:
        """Run a transaction of its own on a SQLAlchemy connection, never repeated here."""
        return self._send(work, writes=True, core=True)

    def _repeated(self, send: Callable[[Line], T], params: dict[str, Any], *, writes: bool, core: bool) -> T:
        """Send; again on a fresh connection if the pooled one was stale, for every verb may be repeated."""
        while True:
            if self.database.clock is not None:
                params["now"] = self.database.clock()
            try:
                return self._send(send, writes=writes, core=core)
            except (Again, Locked) as error:
                # A reader of SQLite meets a lock only while the file is recovered; a writer decides anew.
                if self.left() <= 0 or (writes and isinstance(error, Locked)):
                    raise
                time.sleep(random.uniform(0.001, 0.01))  # noqa: S311
            except NoSchema:
                if not self.database.sqlite or self._retried:
                    raise
                self._retried = True
                self.close()
                self.database.create_schema(self.deadline)
            except StoreError as error:
                if not self._lost or self._retried or self.left() <= 0:
                    raise
                self._in_doubt = self._in_doubt or bool(getattr(error, "may_have_landed", False))
                self._retried = True
                self.drop()
                self.database.forget_idle()

    def _send(self, send: Callable[[Line], T], *, writes: bool, core: bool) -> T:
        line = self._checked_out(core=core)
        driver: Any = pooled(line).dbapi_connection
        ticket = None if self.database.sqlite else watchdog().watch(driver, self.deadline)
        try:
            return send(line)
        except Exception as error:
            original = cause(error)
            self._lost = not self.database.sqlite and self.database.leads_nowhere(driver, original)
            self._lost = self._lost and not (self.theirs and sqlstate(original) == READ_ONLY)
            if self._lost:
                line.invalidate(original)
            elif not is_driver_error(error):
                self._give_up()
            name, file = self.database.name, self.database.file
            raise translated(error, name, writes=writes, in_doubt=self._in_doubt, file=file) from error
        except BaseException:
            self._give_up()
            raise
        finally:
            if ticket is not None:
                watchdog().done(ticket)

    def _checked_out(self, *, core: bool) -> Line:
        if self._line is None:
            self._lost = False
            try:
                self._line = self.database.connected(self.deadline, core=core)
            except Exception as error:
                name, file = self.database.name, self.database.file
                raise connecting(error, name, landed=self._in_doubt, file=file) from error
            if self.left() <= 0:
                raise unavailable(self.database.name, "no connection was free in time", landed=self._in_doubt)
        return self._line

    def _give_up(self) -> None:
        """Cut off from outside, by a time limit or the end of a greenlet: an answer may still come, to the next one."""
        if not self.joined and not self.database.sqlite:
            self.drop()

    def drop(self) -> None:
        """Give the connection up: what state it is in is not known."""
        if self._line is not None and not self._lost:  # a lost one is; doing it again is a warning in a worker's log
            with contextlib.suppress(Exception):
                self._line.invalidate()
        self.close()

    def close(self) -> None:
        """Give the connection back; the next statement takes another."""
        line, self._line = self._line, None
        if line is not None:
            self.database.given_back(line)


class JoinedCall(Call):
    """The statements of one verb inside the caller's transaction, whose connection is never replaced."""

    joined = theirs = True

    def __init__(self, database: Database, deadline: float, connection: Connection) -> None:
        super().__init__(database, deadline)
        self._line = connection

    def execute(self, name: str, params: dict[str, Any]) -> tuple[list[Any], int]:
        """Send the statement of that name through SQLAlchemy, whatever driver the caller uses."""
        statement = self.database.statements[name]
        if self.database.clock is not None:
            params["now"] = self.database.clock()

        def send(connection: Any) -> tuple[list[Any], int]:
            result = connection.execute(statement.construct, params)
            return ([tuple(row) for row in result] if result.returns_rows else []), result.rowcount

        try:
            found = self._send(send, writes=statement.writes, core=True)
        except NoSchema as error:
            raise no_schema("in the database of the connection given to complete") from error
        return found

    def close(self) -> None:
        """Leave the connection with its owner."""


def pooled(line: Line) -> PoolProxiedConnection:
    """The pool's own connection, under SQLAlchemy's if there is one."""
    return line.connection if isinstance(line, Connection) else line
