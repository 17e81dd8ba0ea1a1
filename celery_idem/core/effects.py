"""One run's transaction on the store's database: begun by the body, committed with the completion by the run.

It is one transaction however often the body enters it. The first ``with`` begins it and, where an exception leaves it,
takes it back; a later one is a savepoint of it. Without a claim there is no completion to wait for, so the first
``with`` commits at its own end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from celery_idem.core.records import Claim, Ended, Outcome, Renewal
from celery_idem.errors import ConfigurationError, LeaseLost, StoreError
from celery_idem.interrupt import soft_limit_held
from celery_idem.stores.base import Carrier, Transaction

if TYPE_CHECKING:
    from celery_idem.core.engine import Engine


class Effects:
    """What one body writes to the store's database.

    Args:
        engine: whose store and policy it is; asked for when the body first wants a transaction.
        claim: what is completed with it; None where there is none.
        on_lost: for the heartbeat, as ``Heartbeat.add`` has it.
        lose: called here when another token turns out to have the key.
        lost: whether one is known to have it.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        claim: Claim | None = None,
        *,
        on_lost: Callable[[], None] = lambda: None,
        lose: Callable[[], None] = lambda: None,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine, self._claim = engine, claim
        self._on_lost, self._lose, self._lost = on_lost, lose, lost
        self._transaction: Transaction | None = None
        self._carrier: Carrier | None = None
        self._since = 0.0
        self._over = False
        self.outage: StoreError | None = None
        """Why no transaction could be begun."""
        self.abandoned = False
        """A ``with`` was never left: what held it, a generator say, was thrown away, and what was written with it."""

    @property
    def open(self) -> bool:
        """Whether there is something to commit or to take back."""
        return self._transaction is not None

    @contextmanager
    def transaction(self, carrier: Carrier | None = None) -> Iterator[Any]:
        """See ``RunContext.transaction``; the carrier is a framework's connection, None the store's own."""
        try:
            with self._entered(carrier) as connection:
                yield connection
        except GeneratorExit:  # Python tells nobody of it, so the body would return as if it had written
            self.abandoned = self._claim is not None
            raise

    @contextmanager
    def _entered(self, carrier: Carrier | None) -> Iterator[Any]:
        if self._claim is None and carrier is not None:  # nothing to complete: the framework's own transaction will do
            with carrier.savepoint():
                yield carrier.connection
            return
        if self._transaction is not None:
            with self._joined(self._transaction, carrier) as connection:
                yield connection
            return
        try:
            with soft_limit_held():
                transaction = self._begun(carrier)
                self._transaction, self._carrier = transaction, carrier
            yield transaction.carrier.connection
            transaction.carrier.check()
            if self._claim is None:
                self.commit(None)
        except BaseException:
            self.undo()
            raise

    @contextmanager
    def _joined(self, transaction: Transaction, carrier: Carrier | None) -> Iterator[Any]:
        if carrier != self._carrier:
            raise ConfigurationError(
                "this run has begun its transaction on another connection: a run has one transaction, so use that "
                "connection throughout"
            )
        transaction.carrier.check()
        with transaction.carrier.savepoint():
            yield transaction.carrier.connection

    def _begun(self, carrier: Carrier | None) -> Transaction:
        claim = self._claim
        if self._over:
            raise ConfigurationError("this run is over: begin a transaction in the body, before it returns")
        engine = self._engine()
        if claim is not None and (engine.policy.ttl == 0 or engine.policy.cacheable is not None):
            raise ConfigurationError(
                "transaction() needs an outcome that is kept, or a duplicate would write again: leave ttl=0 and "
                "cacheable out of this task's Policy"
            )
        if self._lost():
            raise LeaseLost(_LOST)
        try:
            transaction = engine.begin(claim, carrier)
        except StoreError as error:
            self.outage = error
            raise
        if transaction is None:
            self._lose()
            raise LeaseLost(_LOST)
        if claim is not None and not transaction.may_break:
            engine.heartbeat.discard(claim)  # the record is locked: nobody can take it, and nobody renew it
        self._since = time.monotonic()
        return transaction

    def commit(self, outcome: Outcome | None) -> Ended:
        """See ``Transaction.commit``; ``undo`` after it raised."""
        if self._transaction is None:
            raise AssertionError("asked to commit what was not begun")
        ended = self._transaction.commit(outcome)
        self._transaction = None
        return ended

    def check_left(self) -> None:
        """``ConfigurationError`` if a body that succeeded has lost what it wrote in a ``with`` it never left."""
        if self.abandoned:
            raise ConfigurationError(
                "a with statement of transaction() was never left, so what was written there was taken back: a "
                "generator that holds it was not run to its end, or __enter__ was called without __exit__"
            )

    def undo(self, *, last: bool = False) -> None:
        """Take back what was written, if anything was, and have the claim renewed again unless it is the ``last`` time.

        Raises:
            LeaseLost: meanwhile the lease had lapsed, and another worker took the key in this very moment.
        """
        self._over = self._over or last
        if self._transaction is None:
            return
        with soft_limit_held():
            self._transaction.rollback()
            self._transaction = None
            if self._claim is not None and not last:
                self._resume(self._claim)

    def _resume(self, claim: Claim) -> None:
        engine = self._engine()
        engine.heartbeat.add(claim, self._on_lost)
        if time.monotonic() - self._since < claim.lease / 3:
            return
        answer = None
        with suppress(StoreError):  # then the heartbeat goes on asking
            answer = engine.store.renew([claim]).get(claim.token)
        if answer is Renewal.LOST:
            engine.heartbeat.discard(claim)
            self._lose()
            if engine.policy.on_lease_lost == "stop":
                raise LeaseLost(_LOST)


_LOST = "another worker holds this key now: stop, nothing this run does counts any more"
