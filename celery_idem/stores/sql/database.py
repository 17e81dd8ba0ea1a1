"""Connections: an engine per process, connected in time, and none of them shared across a fork.

What is sent over them, and again where one was stale, is ``Call``'s business; limits in time are the watchdog's.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import InvalidRequestError

from celery_idem.core.forking import sqlite_gate
from celery_idem.errors import ConfigurationError
from celery_idem.stores.sql import schema
from celery_idem.stores.sql.call import Call, JoinedCall, Line
from celery_idem.stores.sql.dialect import statements
from celery_idem.stores.sql.failures import (
    READ_ONLY,
    Again,
    Locked,
    connecting,
    sqlstate,
    unavailable,
)
from celery_idem.stores.sql.opening import Attempt, in_memory, parsed, with_driver
from celery_idem.stores.sql.spare import Spare
from celery_idem.stores.sql.watchdog import watchdog

SQLITE_BUSY = 0.1
"""Seconds one SQLite statement waits for the file; then the record is read and decided anew."""


class Database:
    """One database, reached from any thread and any forked child of this process."""

    def __init__(
        self, url: str | Engine, timeout: float, clock: Callable[[], float] | None, options: dict[str, Any]
    ) -> None:
        self.timeout = timeout
        self._given = None if isinstance(url, str) else url
        self._url = with_driver(parsed(url)) if isinstance(url, str) else url.url
        self._options = options
        self.name = self._url.get_backend_name()
        if self.name not in {"sqlite", "postgresql"}:
            raise ConfigurationError(f"idempotency_store: no SQL store on {self.name}: use postgresql:// or sqlite:///")
        if self.name == "sqlite" and in_memory(self._url):
            raise ConfigurationError("idempotency_store: use memory://, or name a file: sqlite:///path")
        # The file is on this host, so is its clock.
        self.clock = time.time if clock is None and self.name == "sqlite" else clock
        self._pid = os.getpid()
        self.statements = statements(self.name, injected_clock=self.clock is not None)
        self._engines: dict[int, Engine] = {}
        self._spares: dict[int, Spare] = {}
        self._transacting: dict[int, Engine] = {}
        self._connecting = threading.local()
        # An engine given to us is its owner's, at a fork too.
        self._gated = self.sqlite and self._given is None
        self._spared = not self.sqlite and self._given is None
        if self._gated:
            self._closer = sqlite_gate.at_fork(_closer(self._engines, self._transacting))

    @property
    def sqlite(self) -> bool:
        """Whether this is a file."""
        return self.name == "sqlite"

    @property
    def file(self) -> str | None:
        """SQLite's."""
        return self._url.database if self.sqlite else None

    def engine(self) -> Engine:
        """Return this process's engine.

        Made without a lock, which a fork could leave locked for ever. A parent's engine stays referenced and
        untouched in the child: closing its connections there would end them for the parent.
        """
        pid = os.getpid()
        return self._engines.get(pid) or self._engines.setdefault(pid, self._make_engine())

    def _make_engine(self) -> Engine:
        engine = self._given
        try:
            if engine is None:
                engine = create_engine(self._url, **self._engine_options())
                if self.sqlite:
                    event.listen(engine, "connect", _full_sync)
            else:
                if self._pid != os.getpid():
                    engine.dispose(close=False)
                engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        except Exception as error:
            raise connecting(error, self.name, landed=False) from error
        return self._in_time(engine)

    def transacting(self) -> Engine:
        """Return this process's engine for the transactions of bodies.

        Its pool is its own, so that a body in its transaction never keeps a verb waiting for a connection; what bounds
        it is how many bodies run at once.
        """
        pid = os.getpid()
        return self._transacting.get(pid) or self._transacting.setdefault(pid, self._make_transacting())

    def _make_transacting(self) -> Engine:
        # On SQLite the level means no more than that the driver begins a transaction before the first write.
        level = "SERIALIZABLE" if self.sqlite else "READ COMMITTED"
        if self._given is not None:
            self.engine()  # in a forked child, this parts it from the parent's connections
            given = self._given.execution_options(isolation_level=level)
            event.listen(given, "commit", _refuse_commit)
            return self._in_time(given)
        options = self._engine_options()
        options.update(isolation_level=level, pool_reset_on_return="rollback")
        if "poolclass" not in self._options:
            options.setdefault("max_overflow", -1)
        if self.sqlite:
            options["connect_args"]["timeout"] = self.timeout  # BEGIN waits for the file in one go
        try:
            engine = create_engine(self._url, **options)
        except Exception as error:
            raise connecting(error, self.name, landed=False) from error
        if self.sqlite:
            event.listen(engine, "connect", _full_sync)
        event.listen(engine, "commit", _refuse_commit)
        return self._in_time(engine)

    def _in_time(self, engine: Engine) -> Engine:
        if not self.sqlite and not event.contains(engine, "do_connect", self._connect):
            event.listen(engine, "do_connect", self._connect)
        return engine

    def _engine_options(self) -> dict[str, Any]:
        defaults: dict[str, Any] = {
            "isolation_level": "AUTOCOMMIT",
            "pool_reset_on_return": None,  # nothing to roll back
            "pool_timeout": self.timeout,
        }
        arguments = dict(self._options.get("connect_args", {}))
        if self.sqlite:
            arguments.setdefault("timeout", SQLITE_BUSY)
        else:
            defaults["use_native_hstore"] = False  # a query per connection
            # Only how long an abandoned attempt lingers; libpq counts whole seconds, at least 2, per address.
            arguments.setdefault("connect_timeout", max(2, math.ceil(self.timeout)))
            if self._url.get_driver_name() == "psycopg":
                arguments.setdefault("prepare_threshold", None)  # a pooler gives each statement another session
        return {**defaults, **self._options, "connect_args": arguments}

    # -- connecting in time --------------------------------------------------------------------------------------------

    def connected(self, deadline: float, *, core: bool, transacting: bool = False) -> Line:
        """Check out a connection, made and set up before ``deadline`` if none is idle.

        Only ``core`` needs SQLAlchemy's ``Connection`` around it, which costs as much as the pool. An engine given to
        us needs it always: it knows that our use is in autocommit mode and the owner's is not.
        """
        if self._spared:
            spare = self._spare()
            line = None if core else spare.take()
            if line is not None:
                return line
            with spare.asking():
                return self._from_pool(deadline, core=core, transacting=transacting)
        return self._from_pool(deadline, core=core, transacting=transacting)

    def _spare(self) -> Spare:
        pid = os.getpid()
        return self._spares.get(pid) or self._spares.setdefault(pid, Spare(self.engine()))

    def _from_pool(self, deadline: float, *, core: bool, transacting: bool) -> Line:
        state = self._connecting
        state.deadline, state.tickets = deadline, []
        if self._gated:
            sqlite_gate.enter()
        try:
            if transacting:
                return self.transacting().connect()
            engine = self.engine()
            return engine.connect() if core or self._given is not None else engine.raw_connection()
        except BaseException:
            if self._gated:
                sqlite_gate.leave()
            raise
        finally:
            state.deadline = None
            for ticket in state.tickets:
                watchdog().done(ticket)

    def _connect(self, dialect: Any, _record: Any, arguments: Any, options: Any) -> Any:
        """Make a driver connection in a thread, for nothing can interrupt libpq while it connects."""
        deadline = getattr(self._connecting, "deadline", None)
        if deadline is None:
            return None  # the caller's own use of an engine given to us
        attempt = Attempt(lambda: dialect.connect(*arguments, **options))
        connection = attempt.result(deadline)
        # SQLAlchemy's first questions to a server are statements too.
        self._connecting.tickets.append(watchdog().watch(connection, deadline))
        return connection

    def given_back(self, connection: Line) -> None:
        """Put a connection made by ``connected`` back, at hand or into the pool."""
        try:
            if self._spared and not isinstance(connection, Connection):
                self._spare().give(connection)
            else:
                connection.close()
        except Exception:  # noqa: BLE001, S110  the pool forgets it
            pass
        finally:
            if self._gated:
                sqlite_gate.leave()

    # -- the rest of its life ------------------------------------------------------------------------------------------

    def leads_nowhere(self, driver: Any, error: BaseException) -> bool:
        """Whether the driver's connection is of no use after this error."""
        if getattr(driver, "closed", False) or getattr(driver, "broken", False):
            return True
        if sqlstate(error) == READ_ONLY:  # a demoted primary: a new connection looks up where the new one is
            return True
        return self.engine().dialect.is_disconnect(error, driver, None)  # type: ignore[arg-type]

    def forget_idle(self) -> None:
        """Close the idle connections: the server they led to is gone."""
        self._give_up_spare()
        self.engine().dispose()

    def close(self) -> None:
        """Close the idle connections of this process; a given engine is its owner's."""
        if self._given is None:
            self._give_up_spare()
            _closer(self._engines, self._transacting)()

    def _give_up_spare(self) -> None:
        spare = self._spares.get(os.getpid())
        if spare is not None:
            spare.empty()

    def call(self) -> Call:
        """One verb on the store's own connection, for a ``with`` statement."""
        return Call(self, time.monotonic() + self.timeout)

    @contextlib.contextmanager
    def joined(self, connection: Any) -> Iterator[Call]:
        """One verb in the transaction of the caller's SQLAlchemy connection or session."""
        if callable(getattr(connection, "connection", None)):  # a Session
            connection = connection.connection()
        if not isinstance(connection, Connection) or connection.dialect.name != self.name:
            raise ConfigurationError(
                f"complete(connection=) takes a SQLAlchemy connection to the store's own {self.name} database"
            )
        try:
            with JoinedCall(self, time.monotonic() + self.timeout, connection) as call:
                yield call
        except Again as error:
            why = f"{error}; a REPEATABLE READ or SERIALIZABLE transaction cannot complete after a renewal"
            raise unavailable(self.name, why, landed=False) from error

    def create_schema(self, deadline: float | None = None) -> None:
        """Make what is missing, however many processes try at once."""
        deadline = deadline or time.monotonic() + self.timeout
        while True:
            with self.call() as call:
                try:
                    return call.once(schema.create)
                except (Locked, Again):
                    call.drop()
                    if time.monotonic() > deadline:
                        raise
                except BaseException:
                    call.drop()  # it may be in the middle of the transaction
                    raise
            time.sleep(random.uniform(0.005, 0.05))  # noqa: S311


def _closer(*engines: dict[int, Engine]) -> Callable[[], None]:
    def close() -> None:
        for made in engines:
            engine = made.get(os.getpid())
            if engine is not None:
                engine.dispose()

    return close


def _full_sync(driver: Any, _record: Any) -> None:
    """A commit is on the disk before it is answered: a claim that a power cut takes back is a second run."""
    driver.execute("PRAGMA synchronous=FULL").close()


def _refuse_commit(connection: Connection) -> None:
    """The transaction of a body is not the body's to commit."""
    if not connection.get_execution_options().get("celery_idem_commits", True):
        raise InvalidRequestError(
            "transaction() commits what was written when the body returns, together with its completion: leave "
            "commit() out"
        )
