"""One claim from its grant to its end: what an earlier run left, the body, and what becomes of the claim.

``Ending`` is the caller's word on the last part. Nothing here talks to the store but through the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery_idem.core.codec import NotKept
from celery_idem.core.context import RUNNING, RunContext
from celery_idem.core.effects import Effects
from celery_idem.core.events import EventName
from celery_idem.core.records import (
    Answer,
    Claim,
    Decision,
    Ended,
    Happened,
    Kind,
    NotHappened,
    Operation,
    Outcome,
    Release,
    RunResult,
    Status,
    Successor,
)
from celery_idem.core.values import frozen, replace
from celery_idem.errors import DeliveriesExhausted, LeaseLost, OutcomeUnknown, StoreUnavailable
from celery_idem.interrupt import Guard, soft_limit_held

if TYPE_CHECKING:
    from celery_idem.core.engine import Engine

logger = logging.getLogger("celery_idem")
Body = Callable[[RunContext], Any]


@frozen
class Ending:
    """What becomes of the claim when the body is through; made by the three constructors below."""

    outcome: Kind | None = None
    value: Any = None
    reason: Release | None = None
    successor: Successor | None = None

    @classmethod
    def complete(cls, kind: Kind, value: Any = None) -> Ending:
        """Store the outcome; ``value`` is the result, or the exception with FAILURE."""
        return cls(outcome=kind, value=value)

    @classmethod
    def release(cls, reason: Release, successor: Successor | None = None) -> Ending:
        """Give the key back."""
        return cls(reason=reason, successor=successor)

    @classmethod
    def keep(cls) -> Ending:
        """Hold the claim; the caller ends it when it has told everybody."""
        return cls()


class Run:
    """One claim from its grant to its end."""

    def __init__(
        self,
        engine: Engine,
        operation: Operation,
        claim: Claim,
        body: Body,
        ending: Callable[[Any, BaseException | None], Ending],
        *,
        value_unread: bool,
        observe: bool,
    ) -> None:
        self.engine, self.operation, self.claim = engine, operation, claim
        self.body, self.ending = body, ending
        self.value_unread, self.observe = value_unread, observe
        self.guard = Guard()
        self.around = RUNNING.get()
        self.lost = False
        self.began = False
        self.effects = Effects(
            lambda: engine,
            None if observe else claim,
            on_lost=self._on_lost,
            lose=self._lose,
            lost=lambda: self.lost,
        )
        self.context = RunContext(
            operation.key,
            effects=self.effects,
            fence=claim.fence,
            attempt=claim.attempts,
            reclaimed=claim.unknown,
            token=claim.token,
            lost=lambda: self.lost,
        )
        self.decision: Decision | None = None

    def start(
        self,
        decision: Decision,
        verify: Callable[[RunContext], Any] | None,
        on_claimed: Callable[[], None],
        since: float,
    ) -> RunResult:
        """Ask what became of an earlier run, run the body, end the claim, whose lease began at ``since``."""
        self.decision = decision
        engine, claim = self.engine, self.claim
        engine.heartbeat.add(claim, self._on_lost, since)
        kept = False
        try:
            if decision.answer is Answer.RECLAIMED and not self.observe:
                instead = self._instead_of_running(verify)
                if instead is not None:
                    kept = instead.claim is not None
                    return instead
            if decision.answer is Answer.RECLAIMED:
                self._tell(EventName.LEASE_RECLAIMED, attempt=claim.attempts)
            else:
                self._tell(EventName.NEW)
            on_claimed()
            result = self._run()
            kept = result.claim is not None
            return result
        except BaseException as error:
            if self.lost and isinstance(error, LeaseLost):
                return RunResult(Status.LEASE_LOST, decision=decision)
            if error is self.effects.outage and not self.observe:
                raise
            if self.began:  # struck between the body and its ending: the effect may be there
                result = self._end(self.ending(None, error), None, error)
                kept = result.claim is not None
                return result
            raise
        finally:
            self.effects.undo(last=True)
            if not kept:
                engine.heartbeat.discard(claim)
            # Again, in case a soft limit cut either off.
            self.guard.close()
            RUNNING.set(self.around)

    def _on_lost(self) -> None:
        """Called on the renewal thread: another worker holds the key."""
        self.lost = True
        if self.engine.policy.on_lease_lost == "stop" and not self.observe:
            self.guard.interrupt()

    def _lose(self) -> None:
        """The body itself found that another worker holds the key."""
        self.lost = True
        self._tell(EventName.LEASE_LOST)

    def _tell(self, name: EventName, **more: Any) -> None:
        self.engine.emit(name, self.operation, fence=self.claim.fence, **more)

    # --- the body --------------------------------------------------------------------------------------------------

    def _run(self) -> RunResult:
        value, error = None, None
        try:
            with self.guard:
                self.began = True
                value, error = call(self.body, self.context)
        except BaseException as struck:  # noqa: BLE001  LeaseLost, or a soft limit or exit on the way out of the body
            error = struck
        with soft_limit_held(discard=True):
            outage = self.effects.outage
            if outage is not None and error is outage and not self.observe:
                self.engine.release(self.claim, Release.INTERRUPTED)
                raise outage
            if self.lost and not self.observe and (error is None or isinstance(error, (LeaseLost, Exception))):
                return RunResult(Status.LEASE_LOST, decision=self.decision)
            return self._end(self.ending(value, error), value, error)

    def _end(self, ending: Ending, value: Any, error: BaseException | None) -> RunResult:
        if ending.outcome in {None, Kind.FAILURE}:
            self.effects.undo()
        else:
            self.effects.check_left()
        if ending.outcome is not None:
            return self._complete(ending, value, error)
        if ending.reason is not None:
            ended = self.engine.release(self.claim, ending.reason, ending.successor)
            if ended is Ended.LOST and error is None and not self.observe:
                self._tell(EventName.LEASE_RECLAIMED_LOSS)
                return RunResult(Status.LEASE_LOST, decision=self.decision)
            return RunResult(Status.EXECUTED, value, self.decision, None, error)
        if not self.observe and self.engine.lapsed(self.claim):  # before Celery tells of a run that does not count
            self._tell(EventName.LEASE_RECLAIMED_LOSS)
            return RunResult(Status.LEASE_LOST, decision=self.decision)
        return RunResult(Status.EXECUTED, value, self.decision, self.claim, error)

    def _complete(self, ending: Ending, value: Any, error: BaseException | None) -> RunResult:
        engine, kind, status = self.engine, ending.outcome, Status.EXECUTED
        assert kind is not None  # noqa: S101  narrows the type; _end has just looked
        outcome = ending.value
        encoded = None
        if kind is not Kind.RESULT or outcome is None or not self.value_unread:
            try:
                encoded = engine.encode(kind, outcome)
            except NotKept as not_kept:
                status = Status.ENCODE_FAILED
                self._tell(EventName.ENCODE_FAILED, error=str(not_kept))
        ended = self._record(Outcome(kind, encoded))
        if not self.observe and (ended is Ended.LOST or (ended is None and self.lost)):
            # Where the completion got no answer, the renewal thread may have heard meanwhile that the key is another's.
            engine.heartbeat.told(self.claim.token, published=False)  # by this run, which is none
            return RunResult(Status.LEASE_LOST, decision=self.decision)
        right = None
        if ended is Ended.COMPLETED and self.operation.delivery.continues:
            right = replace(self.claim, right=True)
            engine.heartbeat.add(right, lambda: None)
        return RunResult(status, value, self.decision, right, error)

    def _record(self, outcome: Outcome) -> Ended | None:
        engine, claim = self.engine, self.claim
        if not self.effects.open:
            return engine.complete(claim, outcome, patient=not self.observe)
        engine.cache.drop(claim.key)
        try:
            ended = self.effects.commit(outcome)
        except StoreUnavailable as error:
            # Whether the commit landed is in the record, and nobody can write that while the commit is under way.
            found = engine.release(claim, Release.INTERRUPTED)
            if found in {None, Ended.RELEASED}:  # to be tried later: what cut this one off may cut off the next
                self.effects.outage = error
                raise
            logger.warning("a commit of key %s got no answer, and the record is %s: %s", claim.key, found, error)
            return found
        if ended is Ended.LOST:
            self._tell(EventName.LEASE_RECLAIMED_LOSS)
        return ended

    # --- an earlier run whose outcome nobody knows -------------------------------------------------------------------

    def _instead_of_running(self, verify: Callable[[RunContext], Any] | None) -> RunResult | None:
        """What to answer without running, or None to run: verify first, then the cap, then the policy."""
        policy, attempts = self.engine.policy, self.claim.attempts
        if verify is not None and attempts <= policy.max_deliveries + 1:
            known = self._verified(verify)
            if isinstance(known, NotHappened):
                return None
            if isinstance(known, Happened):
                self._tell(EventName.REPLAYED, outcome=Kind.RESULT.value, verified=True)
                return self._complete(Ending.complete(Kind.RESULT, known.value), known.value, None)
        if attempts > policy.max_deliveries:
            self._tell(EventName.EXHAUSTED, attempt=attempts)
            text = (
                f"{attempts - 1} runs of {self.operation.task or 'this operation'} died without an outcome "
                f"(max_deliveries={policy.max_deliveries}): find out why, then run "
                f"`celery -A <app> idem forget {self.operation.key}` and send it again"
            )
            return self._fail(DeliveriesExhausted(text, key=self.operation.key, attempts=attempts - 1))
        if policy.on_unknown == "fail":
            self._tell(EventName.UNKNOWN_OUTCOME, attempt=attempts)
            text = (
                f"an earlier run of {self.operation.task or 'this operation'} may have had its effect: look, then "
                f"`celery -A <app> idem forget {self.operation.key}` and send it again"
            )
            return self._fail(OutcomeUnknown(text, key=self.operation.key))
        return None

    def _verified(self, verify: Callable[[RunContext], Any]) -> Any:
        with self.guard:
            known, error = call(verify, self.context)
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is not None:
            self.effects.undo()
            self._tell(EventName.VERIFY_FAILED, error=repr(error))
        elif not isinstance(known, (Happened, NotHappened)):
            self._tell(EventName.VERIFY_FAILED, error=f"verify returned {known!r}, not Happened or NotHappened")
        return known

    def _fail(self, failure: Exception) -> RunResult:
        return self._complete(Ending.complete(Kind.FAILURE, failure), None, failure)


def call(body: Body, context: RunContext) -> tuple[Any, BaseException | None]:
    """The body's value or exception; only LeaseLost, which may belong to a run around it, comes out as itself."""
    token = RUNNING.set(context)
    try:
        return body(context), None
    except LeaseLost:
        raise
    except BaseException as error:  # noqa: BLE001  every way out of a body has a row in the table
        return None, error
    finally:
        RUNNING.reset(token)
