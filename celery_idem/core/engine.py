"""Claim, wait, run once, store, replay: one delivery through one store, with nothing of Celery in it.

The engine owns the mechanism: which answer leads to a run, what becomes of the claim afterwards, how long a store
that is down is waited for. It does not own what an exception means or how a message waits: the caller says so with
``ending`` and by what it does with a CONFLICT. ``attempt`` reports; ``run`` is the same for callers with no more to
say. Read next: ``core.run`` for one claim from its grant to its end, ``core.decide`` for the table behind the answers.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any

from celery_idem.core import holder
from celery_idem.core.codec import Encoded, encode_exception, encode_value
from celery_idem.core.context import RunContext
from celery_idem.core.effects import Effects
from celery_idem.core.events import Emitter, EventName
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.local_cache import LocalCache
from celery_idem.core.policy import Policy
from celery_idem.core.records import (
    Answer,
    Claim,
    Decision,
    Ended,
    Kind,
    Operation,
    Outcome,
    Release,
    Renewal,
    RunResult,
    Status,
    Successor,
)
from celery_idem.core.replay import replayed
from celery_idem.core.run import Body, Ending, Run, call
from celery_idem.errors import (
    ConfigurationError,
    RecordCorrupt,
    StoreError,
    StoreUnavailable,
)
from celery_idem.interrupt import soft_limit_held
from celery_idem.stores.base import Carrier, Store, Transaction, Transactional

logger = logging.getLogger("celery_idem")
POLLS = (0.02, 0.04, 0.08, 0.16, 0.2)
"""Seconds between two looks at a held key; the last one repeats."""
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)
"""Seconds between two calls of a store that does not answer; the last one repeats."""


def new_token() -> str:
    """128 random bits in hex, for one claim."""
    return secrets.token_hex(16)


class _Attempt:
    """How far one delivery has come, kept where an exception from outside cannot lose it."""

    __slots__ = ("asked", "decision", "run", "since")

    def __init__(self) -> None:
        self.asked = False
        self.decision: Decision | None = None
        self.run: Run | None = None
        self.since = 0.0
        """When the claim was asked for, by the monotonic clock: its lease began no earlier."""


class Engine:
    """Runs bodies at most once per key against one store under one complete policy.

    Args:
        store: where the records live.
        policy: what is unset in it takes the settings' defaults.
        heartbeat: the process's renewal thread for this store; made if not given.
        accept: serializers stored values may be read with.
        dead_check: take over from holders that are provably dead on this host.
        store_timeout: seconds a delivery holds its slot while the store does not answer.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy | None = None,
        *,
        emit: Emitter | None = None,
        heartbeat: Heartbeat | None = None,
        cache: LocalCache | None = None,
        accept: Collection[str] = ("json",),
        dead_check: bool = True,
        store_timeout: float = 5.0,
    ) -> None:
        self.store = store
        self.policy = (policy or Policy()).under()
        self.emit = Emitter() if emit is None else emit
        self.heartbeat = Heartbeat(store, self.emit) if heartbeat is None else heartbeat
        self.cache = LocalCache(0) if cache is None else cache
        self._accept = tuple(accept)
        self._dead_check = dead_check
        self._store_timeout = store_timeout
        self._serializer = self.policy.serializer or "json"

    # --- one delivery ------------------------------------------------------------------------------------------

    def run(self, operation: Operation, body: Body) -> RunResult:
        """Run the body unless its effect is there already; raise what it, or its first run, raised.

        Returns:
            EXECUTED, REPLAYED, UNPROTECTED or ENCODE_FAILED with the value; MISMATCH, CONFLICT or LEASE_LOST where
            this call had no effect that counts.

        Raises:
            StoreUnavailable: under ``fail_closed``, after ``store_timeout`` seconds; the body did not run.
        """
        try:
            result = self.attempt(operation, body)
        except StoreError as error:
            self.emit(EventName.STORAGE_ERROR, operation, error=str(error))
            raise
        if result.claim is not None and result.claim.right:
            self.settle(result.claim)
        self.heartbeat.told(operation.token, published=True)
        if result.status is Status.CONFLICT:
            over = result.decision is not None and result.decision.answer is Answer.OVER
            self.emit(EventName.OVER if over else EventName.CONFLICT, operation, cause=_answer_of(result))
        if result.error is not None:
            raise result.error
        return result

    def attempt(
        self,
        operation: Operation,
        body: Body,
        *,
        ending: Callable[[Any, BaseException | None], Ending] | None = None,
        verify: Callable[[RunContext], Any] | None = None,
        value_unread: bool = False,
        observe: bool = False,
        on_claimed: Callable[[], None] = lambda: None,
        hopeless: Callable[[Decision], bool] = lambda _: False,
        wait: float | None = None,
        patience: float = math.inf,
    ) -> RunResult:
        """Like ``run``, but the caller reports a CONFLICT or a ``StoreError``, and ends what stays open.

        Args:
            operation: with a token of its own.
            body: called at most once, with its ``RunContext``.
            ending: what becomes of the claim, from the body's value and exception; values complete, exceptions give
                the key back.
            verify: asked before a second run whether the first had its effect.
            value_unread: nobody reads this delivery's value, so none is kept, and None will do for one that was not.
            observe: run the body whatever the answer, and say what enforcing would have done.
            on_claimed: called before the body starts.
            hopeless: asked at every HELD; true ends the wait at once.
            wait: seconds to wait for a key that is held, where it is not the policy's ``wait_timeout``.
            patience: seconds to wait at most before the body, be it for the key or for the store.

        Returns:
            ``error`` is what the body or its first run raised; ``claim`` is still open, to be ended with ``release``,
            ``settle`` or ``abandon``.
        """
        cached = None if observe else self.cache.get(operation)
        if cached is not None:
            return self._replay(operation, Decision(Answer.COMPLETED, None, cached), value_unread, local=True)
        attempt = _Attempt()
        try:
            wait = min(self.policy.wait_timeout if wait is None else wait, patience)
            self._claim(operation, attempt, hopeless, wait, min(self._store_timeout, patience), observe=observe)
            decision = attempt.decision
            if decision is None:
                return self._unprotected(operation, body)
            claim = decision.claim
            if claim is not None and not claim.right:
                ending = ending or self._default_ending
                run = Run(self, operation, claim, body, ending, value_unread=value_unread, observe=observe)
                attempt.run = run
                return run.start(decision, verify, on_claimed, attempt.since)
            if observe:
                return self._observed(operation, decision, body)
            return self._answer(operation, decision, value_unread)
        except StoreError:
            raise
        except BaseException:
            self._give_back_unstarted(operation, attempt)
            raise

    def _answer(self, operation: Operation, decision: Decision, unread: bool) -> RunResult:
        if decision.answer is Answer.COMPLETED:
            return self._replay(operation, decision, unread)
        if decision.answer is Answer.MISMATCH:
            self.emit(EventName.PAYLOAD_MISMATCH, operation)
            return RunResult(Status.MISMATCH, decision=decision)
        if decision.answer is Answer.NEWER:
            self.emit(EventName.NEWER_RECORD, operation)
        return RunResult(Status.CONFLICT, decision=decision)

    # --- what stays open -----------------------------------------------------------------------------------------

    def release(self, claim: Claim, reason: Release, successor: Successor | None = None) -> Ended | None:
        """Give the key back; None if the store did not answer in time: then the heartbeat goes on trying."""
        self.cache.drop(claim.key)
        try:
            ended: Ended = self._patiently(
                lambda: self.store.release(claim, reason, successor=successor), self._store_timeout
            )
        except StoreError as error:
            self.emit(EventName.RELEASE_FAILED, claim.operation, reason=reason.value, error=str(error))
            self.heartbeat.release_later(claim, reason, successor)
            return None
        else:
            return ended
        finally:
            self.heartbeat.discard(claim)

    def settle(self, claim: Claim) -> None:
        """The message's continuation is published: end the right to do it. Without an answer the right lapses."""
        message_id = claim.operation.delivery.message_id
        try:
            self._patiently(lambda: self.store.settle(claim.key, message_id), self._store_timeout)
        except StoreError as error:
            self.emit(EventName.RELEASE_FAILED, claim.operation, reason="SETTLE", error=str(error))
        finally:
            self.heartbeat.discard(claim)

    def lapsed(self, claim: Claim) -> bool:
        """Whether another took the key while this process stood still; asked only where nobody renewed for a lease."""
        if not self.heartbeat.overdue(claim.token):
            return False
        try:
            return self.store.renew([claim]).get(claim.token) is Renewal.LOST
        except StoreError:
            return False

    def abandon(self, claim: Claim) -> None:
        """Stop renewing: the lease lapses."""
        self.heartbeat.discard(claim)

    # --- claim and wait --------------------------------------------------------------------------------------------

    def _claim(
        self,
        operation: Operation,
        attempt: _Attempt,
        hopeless: Callable[[Decision], bool],
        wait: float,
        hold: float,
        *,
        observe: bool,
    ) -> None:
        """Ask until the answer is not HELD, at most ``wait`` seconds; past a dead holder at once.

        No decision is left where the store is down and the policy says to run all the same.
        """
        fail_closed = not observe and self.policy.storage_policy == "fail_closed"
        hold = hold if fail_closed else 0.0
        give_up = time.monotonic() + (0.0 if observe else wait)
        polls, waited, dead_fence = iter(POLLS), False, None
        while True:
            try:
                self._ask(operation, attempt, dead_fence, hold)
            except StoreError as error:
                # fail_open answers an outage; a record that cannot be read may well be that of a first run.
                if fail_closed or not (observe or isinstance(error, StoreUnavailable)):
                    raise
                self.emit(EventName.RAN_UNPROTECTED, operation, error=str(error))
                attempt.decision = None
                return
            decision = attempt.decision
            if decision is None or decision.answer is not Answer.HELD:
                return
            fence, held_for, _ = decision.held_by or (0, "", 0.0)  # nobody: a transaction has the record for a moment
            if self._dead_check and dead_fence != fence and holder.provably_dead(held_for):
                dead_fence = fence
                continue
            left = give_up - time.monotonic()
            if left <= 0 or hopeless(decision):
                return
            if not waited:
                self.emit(EventName.IN_FLIGHT_WAIT, operation, fence=fence or None, held_by=held_for or None)
                waited = True
            time.sleep(min(next(polls, POLLS[-1]), left))

    def _ask(self, operation: Operation, attempt: _Attempt, dead_fence: int | None, hold: float) -> None:
        """One claim. A soft time limit waits for the answer, so that no claim is left behind unseen."""
        lease, ttl = self.policy.lease, self.policy.ttl

        def claim() -> Decision:
            self.heartbeat.catch_up(operation.key, self.store)  # or this copy would run what has run, or runs, here
            attempt.since = time.monotonic()
            return self.store.claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)

        attempt.asked = True
        try:
            with soft_limit_held():
                attempt.decision = self._patiently(claim, hold)
                attempt.asked = False
        except RecordCorrupt as error:
            self.emit(EventName.CORRUPT_RECORD, operation, error=str(error))
            raise
        except StoreUnavailable as error:
            if error.may_have_landed:  # else this process would hold what it does not know of
                self.heartbeat.release_later(self._unseen(operation), Release.YIELDED)
            raise

    def _unseen(self, operation: Operation) -> Claim:
        """Stands for a claim whose answer never came: the token alone is enough to give it back."""
        return Claim(operation, 0, Answer.ACQUIRED, 1, self.policy.lease, self.policy.ttl)

    def _give_back_unstarted(self, operation: Operation, attempt: _Attempt) -> None:
        """Stopped from outside between asking and running: nothing happened, so nothing may stay held."""
        if attempt.run is not None and attempt.run.began:
            return
        decision = attempt.decision
        if attempt.asked:
            self.release(self._unseen(operation), Release.YIELDED)
        elif decision is not None and decision.claim is not None and not decision.claim.right:
            self.release(decision.claim, Release.YIELDED)

    def _patiently(self, call: Callable[[], Any], seconds: float, *, once_more: bool = False) -> Any:
        """Call until the store answers, at most that long; holding the slot meanwhile is the back-pressure.

        With ``once_more`` the last try begins when the time is over: a stall may have used it up in the middle of one.
        """
        deadline, pauses = time.monotonic() + seconds, iter(PAUSES)
        while True:
            began = time.monotonic()
            try:
                return call()
            except StoreUnavailable:
                left = deadline - time.monotonic()
                if left <= 0 and (began >= deadline or not once_more):
                    raise
                time.sleep(max(0.0, min(next(pauses, PAUSES[-1]), left)))

    # --- answers without a claim ---------------------------------------------------------------------------------

    def _replay(self, operation: Operation, decision: Decision, unread: bool, *, local: bool = False) -> RunResult:
        record, claim = decision.record, decision.claim
        if record is None or record.outcome is None:
            raise RecordCorrupt(f"record {operation.key} is completed without an outcome: forget the key")
        value, error = replayed(operation, record, record.outcome, self.policy, self._accept, self.emit, unread=unread)
        if claim is not None:
            self.heartbeat.add(claim, lambda: None)
        elif not local:
            self.cache.put(record, decision.now)
        kind = record.outcome.kind.value
        self.emit(EventName.REPLAYED, operation, outcome=kind, fence=record.fence, local=local or None)
        return RunResult(Status.REPLAYED, value, decision, claim, error)

    def _unprotected(self, operation: Operation, body: Body, decision: Decision | None = None) -> RunResult:
        context = RunContext(operation.key, token=operation.token, effects=Effects(lambda: self))
        value, error = call(body, context)
        return RunResult(Status.UNPROTECTED, value, decision, None, error)

    def _observed(self, operation: Operation, decision: Decision, body: Body) -> RunResult:
        would = {Answer.COMPLETED: EventName.WOULD_REPLAY, Answer.MISMATCH: EventName.WOULD_MISMATCH}
        would[Answer.OVER] = EventName.WOULD_REPLAY
        self.emit(would.get(decision.answer, EventName.WOULD_PARK), operation, cause=decision.answer.value)
        return self._unprotected(operation, body, decision)

    def _default_ending(self, value: Any, error: BaseException | None) -> Ending:
        if error is None:
            if self.policy.ttl == 0 or not self.stores(value):
                return Ending.release(Release.ENDED)
            return Ending.complete(Kind.RESULT, value)
        if self.policy.replays(error):
            return Ending.complete(Kind.FAILURE, error)
        return Ending.release(Release.YIELDED if isinstance(error, Exception) else Release.INTERRUPTED)

    def stores(self, value: Any) -> bool:
        """Whether the policy's ``cacheable`` wants this value kept."""
        if self.policy.cacheable is None:
            return True
        try:
            return bool(self.policy.cacheable(value))
        except Exception:  # the effect happened: a broken callable must not make it happen again
            logger.exception("idempotency_cacheable raised; the value is stored")
            return True

    # --- storing an outcome ----------------------------------------------------------------------------------------

    def encode(self, kind: Kind, value: Any) -> Encoded | None:
        """The outcome's stored form. This run's own value goes on as it is: duplicates get what the serializer says.

        Raises:
            NotKept: the value cannot be said or is too big.
        """
        limit = self.policy.result_max_bytes
        if kind is Kind.RESULT:
            return encode_value(value, self._serializer, max_bytes=limit)
        if kind is Kind.FAILURE:
            return encode_exception(value, self._serializer, max_bytes=limit)
        return None

    def begin(self, claim: Claim | None, carrier: Carrier | None) -> Transaction | None:
        """Begin a body's transaction, asking for at most ``store_timeout``; None if another token has the key."""
        store = self.store
        if not isinstance(store, Transactional):
            raise ConfigurationError(
                f"transaction() needs records and effects in one SQL database, and idempotency_store is {store.name}: "
                "name that database there (postgresql+psycopg2://…, sqlite:///…), or hand self.idempotency.key to "
                "whoever takes your effect"
            )
        transaction: Transaction | None = self._patiently(lambda: store.begin(claim, carrier), self._store_timeout)
        return transaction

    def complete(self, claim: Claim, outcome: Outcome, *, patient: bool = True) -> Ended | None:
        """Record the outcome, asking for one lease; None without an answer: then the heartbeat goes on asking."""
        self.cache.drop(claim.key)
        try:
            ended: Ended = self._patiently(
                lambda: self.store.complete(claim, outcome), claim.lease if patient else 0.0, once_more=True
            )
        except StoreError as error:
            self.emit(EventName.COMPLETE_FAILED, claim.operation, fence=claim.fence, error=str(error))
            self.heartbeat.discard(claim)
            if isinstance(error, StoreUnavailable):
                self.heartbeat.complete_later(claim, outcome)
            return None
        if ended is not Ended.COMPLETED:
            self.emit(EventName.LEASE_RECLAIMED_LOSS, claim.operation, fence=claim.fence)
        if ended is not Ended.COMPLETED or not claim.operation.delivery.continues:
            self.heartbeat.discard(claim)
        return ended


def _answer_of(result: RunResult) -> str | None:
    return None if result.decision is None else result.decision.answer.value


__all__ = ["Body", "Ending", "Engine", "new_token"]
