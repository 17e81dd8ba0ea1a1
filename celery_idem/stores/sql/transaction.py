"""A body's transaction: its first statement locks the claim's record, its last one completes the claim.

The lock is what makes it one: whoever asks for the key meanwhile finds the record locked, which is HELD, and a lease
that lapses meanwhile is nobody's to take. ``SQLTransaction`` speaks to the record; a ``Carrier`` has the connection.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.exc import InvalidRequestError

from celery_idem.core import decide
from celery_idem.core.records import RECORD_VERSION, Claim, Ended, Outcome, Record, State
from celery_idem.errors import ConfigurationError, StoreError
from celery_idem.stores.base import Carrier
from celery_idem.stores.sql import rows
from celery_idem.stores.sql.call import Call, pooled
from celery_idem.stores.sql.database import Database
from celery_idem.stores.sql.failures import (
    Again,
    Locked,
    NoSchema,
    connecting,
    is_driver_error,
    refused,
    translated,
    unavailable,
)
from celery_idem.stores.sql.guarded import GuardedRows
from celery_idem.stores.sql.rows import Row
from celery_idem.stores.sql.watchdog import watchdog

if TYPE_CHECKING:
    from celery_idem.stores.sql.store import SQLStore

logger = logging.getLogger("celery_idem")
T = TypeVar("T")


class OwnCarrier:
    """A connection of the store's transaction pool, READ COMMITTED whatever the database's default."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None
        self._transaction: Any = None

    @property
    def connection(self) -> Any:
        """SQLAlchemy's."""
        return self._connection

    @property
    def line(self) -> Any:
        """It serves the store's statements too."""
        return self._connection

    def begin(self, deadline: float) -> None:
        """See ``Carrier.begin``."""
        self._transaction = None
        try:
            self._connection = self._database.connected(deadline, core=True, transacting=True)
        except Exception as error:
            raise connecting(error, self._database.name, landed=False, file=self._database.file) from error
        self.connection.execution_options(celery_idem_commits=False)
        self._transaction = self.connection.begin()

    def check(self) -> None:
        """See ``Carrier.check``."""
        connection = self.connection
        if connection.closed or connection.invalidated or not self._transaction.is_active:
            raise InvalidRequestError(
                "transaction() was rolled back, closed or cut off inside its with statement, so what was written is "
                "not there: to take it back, let an exception leave the with statement"
            )

    def commit(self) -> None:
        """See ``Carrier.commit``."""
        self.connection.execution_options(celery_idem_commits=True)
        self._transaction.commit()

    def committed(self) -> None:
        """The connection goes back to its pool."""
        self._database.given_back(self.connection)

    def rollback(self) -> None:
        """See ``Carrier.rollback``."""
        if self._transaction is None:  # no connection came
            return
        try:
            self._transaction.rollback()
        except Exception:  # noqa: BLE001  its state is not known, so nobody may have it after us
            with contextlib.suppress(Exception):
                self.connection.invalidate()
        finally:
            self._database.given_back(self.connection)

    def savepoint(self) -> AbstractContextManager[Any]:
        """See ``Carrier.savepoint``."""
        savepoint: AbstractContextManager[Any] = self.connection.begin_nested()
        return savepoint


class _HeldCall(Call):
    """Statements in the open transaction: none is repeated, for its connection is never replaced."""

    joined = True

    def __init__(self, database: Database, line: Any) -> None:
        super().__init__(database, time.monotonic() + database.timeout)
        self._line = line

    def _repeated(self, send: Callable[[Any], T], params: dict[str, Any], *, writes: bool, core: bool) -> T:
        if self.database.clock is not None:
            params["now"] = self.database.clock()
        return self._send(send, writes=writes, core=core)

    def close(self) -> None:
        """Leave the connection with its carrier."""


class SQLTransaction:
    """One open transaction; see ``Transaction``."""

    def __init__(self, database: Database, known: GuardedRows, claim: Claim | None, carrier: Carrier) -> None:
        self._database, self._rows, self._claim = database, known, claim
        self.carrier = carrier
        self.may_break = not database.sqlite
        self._row: Row | None = None
        self._open = False

    # -- its first statement -------------------------------------------------------------------------------------------

    def begin(self) -> Row | None:
        """Begin, and lock the claim's record; None if there is none.

        Raises:
            StoreUnavailable: nothing is begun.
        """
        deadline = time.monotonic() + self._database.timeout
        self._open = True
        try:
            self.carrier.begin(deadline)
            if self._claim is not None or self._database.sqlite:
                self._row = self._held(_HeldCall(self._database, self.carrier.line))
        except Exception as error:
            self.rollback()
            raise self._unbegun(error) from error
        except BaseException:
            self.rollback()
            raise
        return self._row

    def _held(self, call: Call) -> Row | None:
        key = "" if self._claim is None else self._claim.key
        spare = min(0.2, self._database.timeout / 4)  # before the watchdog cuts the connection off
        while True:
            found, _ = call.execute("hold", {"key": key})
            if found:
                return rows.read_row(found[0])
            row, _ = self._rows.read(call, key)
            if row is None or self._database.sqlite:
                return row
            if call.left() <= spare:
                raise Locked("locked")
            time.sleep(random.uniform(0.001, 0.01))  # noqa: S311

    def _unbegun(self, error: Exception) -> Exception:
        error = translated(error, self._database.name, writes=False, file=self._database.file)
        if isinstance(error, (Locked, Again)):
            return unavailable(self._database.name, f"the record stayed locked: {error}", landed=False)
        return error

    # -- its last ones -------------------------------------------------------------------------------------------------

    def commit(self, outcome: Outcome | None) -> Ended:
        """See ``Transaction.commit``."""
        try:
            self.carrier.check()
            ended = self._sent(outcome)
        finally:
            self.rollback()
        if ended is Ended.COMPLETED:
            try:
                self.carrier.committed()
            except Exception:  # it is committed, so this cannot be the task's failure any more
                logger.exception("what was to follow the commit of a transaction raised")
        return ended

    def _sent(self, outcome: Outcome | None) -> Ended:
        try:
            if outcome is not None and self._completed(outcome) is Ended.LOST:
                return Ended.LOST
            with self._watched():
                self.carrier.commit()
        except Exception as error:
            # What a statement of the store's ran into is said in the store's words already.
            original = error.__cause__ if isinstance(error, (StoreError, Locked, Again)) else error
            if original is not None and (refused(original) or not is_driver_error(original)):
                raise original from original.__cause__
            raise unavailable(self._database.name, original or error, landed=True) from error
        self._open = False
        return Ended.COMPLETED

    def _completed(self, outcome: Outcome) -> Ended:
        claim, row, call = self._claim, self._row, _HeldCall(self._database, self.carrier.line)
        assert claim is not None  # noqa: S101  only a claim has an outcome
        assert row is not None  # noqa: S101  which was locked

        def judge(record: Record | None, now: float) -> tuple[Ended, Record | None]:
            return decide.decide_complete(record, claim, outcome, now=now)

        remember = claim.operation.delivery.continues
        ended = self._rows.guess(call, "end", row, judge, remember=remember)
        if ended is not None:
            return ended
        if not row.same(self._rows.read(call, claim.key)[0]):
            raise InvalidRequestError(
                "transaction() was ended by a statement (ROLLBACK, INSERT OR ROLLBACK) or by the database, so not all "
                "that was written is there: to take it back, let an exception leave the with statement"
            )
        return self._rows.change(call, claim.key, judge)[0]

    def rollback(self) -> None:
        """See ``Transaction.rollback``."""
        if not self._open:
            return
        self._open = False
        if self._claim is not None:
            self._rows.forget(self._claim.key)
        with contextlib.suppress(Exception), self._watched():
            self.carrier.rollback()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Let what the carrier does with the server not outlive the store's timeout."""
        driver = None
        if not self._database.sqlite:
            with contextlib.suppress(Exception):
                driver = pooled(self.carrier.line).dbapi_connection
        if driver is None:
            yield
            return
        ticket = watchdog().watch(driver, time.monotonic() + self._database.timeout)
        try:
            yield
        finally:
            watchdog().done(ticket)


def begun(
    store: SQLStore, database: Database, known: GuardedRows, claim: Claim | None, carrier: Carrier | None
) -> SQLTransaction | None:
    """See ``Transactional.begin``."""
    transaction = SQLTransaction(database, known, claim, carrier or OwnCarrier(database))
    try:
        row = transaction.begin()
        if row is None and claim is not None:  # a failover lost it: the renewal restores it, for everybody to see
            transaction.rollback()
            store.renew([claim])
            row = transaction.begin()
    except NoSchema as error:
        raise error if carrier is None else _elsewhere(database) from error
    if claim is None or (row is not None and _holds(row.record, claim)):
        return transaction
    transaction.rollback()
    if carrier is not None:
        record = store.get(claim.key)
        if record is not None and _holds(record, claim):
            raise _elsewhere(database)
    return None


def _holds(record: Record, claim: Claim) -> bool:
    current = record.state is State.CLAIMED and record.record_version <= RECORD_VERSION
    return current and record.token == claim.token


def _elsewhere(database: Database) -> ConfigurationError:
    return ConfigurationError(
        f"the connection leads to another database than the {database.name} store (its record is not there): name the "
        "same database in idempotency_store, or use self.idempotency.transaction()"
    )
