"""Runs one piece of work in one transaction of the ledger's database, in time, and says failures in its words.

Connections, deadlines, forks and the drivers' errors are those of the claim store (``stores.sql.database``). Work may
be run again, so it only speaks to the database: a deadlock, a busy file or a connection that was dead before anything
was sent begins it anew.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Engine

from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.governed import records
from celery_idem.governed.sql import schema
from celery_idem.governed.sql.transaction import Transaction
from celery_idem.stores.sql.call import Call
from celery_idem.stores.sql.database import Database
from celery_idem.stores.sql.failures import Again, Locked, NoSchema, Refused, is_driver_error

logger = logging.getLogger("celery_idem")
T = TypeVar("T")
Work = Callable[[Transaction], T]


class Ledger:
    """One database of governed actions, reached from any thread and any forked child of this process."""

    def __init__(
        self, url: str | Engine, timeout: float, clock: Callable[[], float] | None, options: dict[str, Any]
    ) -> None:
        try:
            self._database = Database(url, timeout, clock, options)
        except ConfigurationError as error:
            raise ConfigurationError(_in_our_words(error)) from error
        self._clock = clock
        self.listener: Callable[[records.Event], None] | None = None

    @property
    def sqlite(self) -> bool:
        """Whether this is a file."""
        return self._database.sqlite

    def read(self, work: Work[T]) -> T:
        """What the work comes to, in a transaction that writes nothing and holds up nobody."""
        return self.run(work, writes=False)

    def run(self, work: Work[T], *, writes: bool = True) -> T:
        """What the work comes to, committed; or its error, with nothing written.

        Raises:
            StoreUnavailable: no answer; ``may_have_landed`` only where the commit itself was under way.
        """
        deadline = time.monotonic() + self._database.timeout
        made = fresh = False
        busy: Exception | None = None
        while True:
            attempt = _Attempt(work, self._clock, writes=writes)
            try:
                with self._database.call() as call:
                    call.deadline = deadline
                    result: T = attempt.run(call)
            except (Again, Locked) as error:
                busy = error
                if time.monotonic() > deadline:
                    raise self._busy() from error
                time.sleep(random.uniform(0.001, 0.02))  # noqa: S311
            except NoSchema as error:
                if made or not self.sqlite:
                    raise Refused(
                        f"the tables of governed actions are missing or too old: run `{schema.INIT}`, or call "
                        "create_schema()"
                    ) from error
                made = True
                self.create_schema()
            except ConfigurationError as error:
                kind = Refused if isinstance(error, Refused) else ConfigurationError
                raise kind(_in_our_words(error)) from error
            except StoreUnavailable as error:
                doubt = attempt.committing and writes
                if busy is not None and not doubt and time.monotonic() > deadline:
                    raise self._busy() from busy  # its time was over before it could ask once more
                if doubt or fresh or time.monotonic() > deadline:
                    raise StoreUnavailable(_in_our_words(error), may_have_landed=doubt) from error
                fresh = True  # a pooled connection may have been dead for long
                self._database.forget_idle()
            else:
                self._tell(attempt.events)
                return result

    def create_schema(self) -> None:
        """Make what is missing, however many processes try at once."""
        deadline = time.monotonic() + self._database.timeout
        while True:
            with self._database.call() as call:
                try:
                    return call.once(schema.create)
                except (Locked, Again) as error:
                    call.drop()
                    if time.monotonic() > deadline:
                        raise self._busy() from error
                except BaseException:
                    call.drop()  # it may be in the middle of the transaction
                    raise
            time.sleep(random.uniform(0.005, 0.05))  # noqa: S311

    def close(self) -> None:
        """Close the idle connections of this process; a given engine is its owner's."""
        self._database.close()

    def _busy(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"the database of governed actions was busy for {self._database.timeout:g} s: look what holds its rows",
            may_have_landed=False,
        )

    def _tell(self, events: list[records.Event]) -> None:
        if self.listener is None:
            return
        for event in events:
            try:
                self.listener(event)
            except Exception:
                logger.exception("the listener of governed actions raised on %s", event["event_type"])


class _Attempt:
    """One try at one transaction."""

    def __init__(self, work: Work[Any], clock: Callable[[], float] | None, *, writes: bool) -> None:
        self._work, self._clock, self._writes = work, clock, writes
        self._refusal: Exception | None = None
        self.events: list[records.Event] = []
        self.committing = False

    def run(self, call: Call) -> Any:
        """Begin, work, commit; or roll back, and raise the work's own error."""
        try:
            result = call.once(self._transaction)
        except Locked as error:
            call.drop()
            raise Again(str(error)) from error  # ``Database.call`` would tell a busy file as one whose time is over
        except BaseException:
            call.drop()  # what state it is in is not known
            raise
        if self._refusal is not None:
            raise self._refusal
        return result

    def _transaction(self, connection: Connection) -> Any:
        if connection.dialect.name != "sqlite":
            return self._within(connection, "BEGIN ISOLATION LEVEL READ COMMITTED", "" if self._writes else "READ ONLY")
        driver: Any = connection.connection.dbapi_connection
        as_it_was, driver.text_factory = driver.text_factory, _readable
        try:
            return self._within(connection, "BEGIN", "IMMEDIATE" if self._writes else "")
        finally:
            driver.text_factory = as_it_was

    def _within(self, connection: Connection, begin: str, how: str) -> Any:
        connection.exec_driver_sql(f"{begin} {how}")
        tx = Transaction(connection, self._clock)
        try:
            result = self._work(tx)
        except Exception as error:
            if is_driver_error(error):
                raise
            connection.exec_driver_sql("ROLLBACK")
            self._refusal = error  # no failure of the database, so it is not to be told as one
            return None
        self.committing = True
        connection.exec_driver_sql("COMMIT")
        self.events = tx.events
        return result


def _readable(raw: bytes) -> str:
    """Text from the file, where a byte that is none must not keep the rest from being read."""
    return raw.decode(errors="replace")


def _in_our_words(error: Exception) -> str:
    told = str(error).replace("idempotency_store", "governed_store")
    return told.replace("use memory://, or name a file", "name a file")
