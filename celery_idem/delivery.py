"""One message in the hands of one worker: the delivery table, row by row, from the engine's answers to Celery's words.

docs/reference/delivery-table.md is this file in prose; the mechanism itself is ``core.engine``.
"""

from __future__ import annotations

import inspect
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NoReturn

from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_idem import continuation, message, publish
from celery_idem.core.canonical import NoCanonicalForm
from celery_idem.core.context import RunContext
from celery_idem.core.engine import Ending, Engine
from celery_idem.core.events import EventName
from celery_idem.core.records import (
    GRACE,
    Answer,
    Claim,
    Decision,
    Kind,
    Operation,
    Release,
    RunResult,
    State,
    Status,
    Successor,
)
from celery_idem.errors import (
    ClaimConflict,
    ConfigurationError,
    FingerprintMismatch,
    KeyMissing,
    LeaseLost,
    ParkFailed,
    RecordCorrupt,
    ReplayImpossible,
    StoreError,
)
from celery_idem.interrupt import soft_limit_held
from celery_idem.parking import Wait, patience_of, publish_parked, waiting_time
from celery_idem.revoking import Revoked, refuse_revoked, tell_revoked
from celery_idem.signals import ATTRIBUTE

if TYPE_CHECKING:
    from celery_idem.app import Runtime
    from celery_idem.task import Idempotent

logger = logging.getLogger("celery_idem")


class Delivering:
    """One message in the hands of one worker."""

    def __init__(
        self,
        task: Idempotent,
        runtime: Runtime,
        request: Any,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.task, self.runtime, self.request = task, runtime, request
        if request.is_eager and publish.DEPTH_HEADER in (request.headers or {}):
            request.replaced_task_nesting = request.headers[publish.DEPTH_HEADER]
        self.run, self.args, self.kwargs = run, args, kwargs
        self.in_body = False
        self.observe = runtime.mode == "observe"
        self.continues = message.continues(request)
        self.successor: Successor | None = None
        self.replaced = False
        self.returned = False
        self.ended_by: tuple[Any, ...] | None = None if self.observe else ("generation", request.retries)
        self.context: RunContext | None = None
        self.stamp: publish.Stamp | None = None
        self.operation: Operation | None = None

    def _prepare(self) -> None:
        self.engine: Engine = self.runtime.engine_for(self.task)
        self.policy = self.engine.policy
        self.parked = publish.read_parked(self.request.headers or {})
        if self.stamp is None:
            self.stamp = publish.stamp_of(self.task, self.policy, self.request, self.args, self.kwargs)
        continues = self.continues and not self.observe
        self.operation = publish.operation_of(
            self.task, self.policy, self.runtime, self.request, self.stamp, continues=continues
        )

    def handle(self) -> Any:
        """Return or raise what this delivery comes to."""
        self.request.__dict__[ATTRIBUTE] = self
        try:
            return self._deliver()
        except BaseException as error:
            if message.cut_by_shutdown(self.task, self.request, error):
                raise Reject("cut by a cold shutdown", requeue=True) from error
            raise
        finally:
            # After any park or retry, whose copies carry no ids of ours.
            if self.ended_by is not None and message.continues(self.request):
                with soft_limit_held(discard=True):
                    continuation.identify(self.task.app, self.request, *self._place(*self.ended_by))

    def _place(self, *more: Any) -> tuple[Any, ...]:
        """What ids of this message's canvas are derived from."""
        return (self.task.name, self.request.id, self.request.replaced_task_nesting or 0, *more)

    def _deliver(self) -> Any:
        while True:
            try:
                if self.operation is None:
                    with soft_limit_held():  # what parking needs is there before the limit can ask for it
                        self._prepare()
                result = self._attempt()
                if result.status is Status.CONFLICT and result.decision is not None:
                    self._stand_back(result.decision)
            except (KeyMissing, NoCanonicalForm) as error:
                if not self.observe or self.operation is not None:
                    raise
                logger.warning("%s[%s] would be refused: %s", self.task.name, self.request.id, error)
                return self.run(*self.args, **self.kwargs)
            except SoftTimeLimitExceeded:
                if self.context is not None:  # the body ran
                    raise
                if self.operation is None:
                    self._prepare()
                self._park(Wait("soft_limit"))
            except StoreError as error:
                with soft_limit_held(discard=True):
                    self._outage(error)
            if result.status is not Status.LEASE_LOST:
                return self._conclude(result)
            # Somebody else has the key: whatever this run made does not count. Deliver the message anew.
            self.successor, self.operation, self.context, self.replaced = None, None, None, False

    def _attempt(self) -> RunResult:
        return self.engine.attempt(
            self.claimed,
            self.body,
            ending=self.ending,
            verify=self._verify if self.policy.verify else None,
            value_unread=self._value_unread(),
            observe=self.observe,
            on_claimed=self._claimed,
            hopeless=self._is_surplus,
            wait=waiting_time(self.task, self.policy.wait_timeout, jitter=random.random()),  # noqa: S311
            patience=patience_of(self.task, self.request),
        )

    @property
    def claimed(self) -> Operation:
        """The operation this delivery claims."""
        if self.operation is None:
            raise AssertionError("asked for before the delivery was prepared")
        return self.operation

    # --- around the body -------------------------------------------------------------------------------------------

    def body(self, context: RunContext) -> Any:
        """Run the task's own body, where it can see its context."""
        refuse_revoked(self.request, self.parked)
        self.context = context
        args, kwargs = message.own_copy(self.args, self.kwargs)
        self.in_body = True
        try:
            value = self.run(*args, **kwargs)
        finally:
            self.in_body = False
        if inspect.iscoroutine(value) and not self.observe:
            value.close()
            raise ConfigurationError(
                f"task {self.task.name} is async and nothing awaits it here, so its body did not run: make it a plain "
                "function that calls asyncio.run(…), or leave the task out with idempotency_tasks"
            )
        return value

    def ending(self, value: Any, error: BaseException | None) -> Ending:
        """What becomes of the claim: design's delivery table, the rows below ACQUIRED."""
        remembers = self.policy.ttl > 0
        if error is None:
            if self.successor is not None:  # retry(throw=False): the next attempt has the word
                return Ending.release(Release.RETRY, self.successor)
            return Ending.complete(Kind.RESULT, value) if remembers and self.engine.stores(value) else Ending.keep()
        if isinstance(error, Retry):
            # Of an attempt whose earlier run died a successor may be on its way already, and due.
            reclaimed = self.context is not None and self.context.reclaimed
            if self.successor is not None and self.successor.delay >= SOON and not reclaimed:
                return Ending.release(Release.RETRY, self.successor)
            return Ending.keep()  # till RETRY is stored, or it may come after what the successor stores, and stay
        if isinstance(error, Revoked):
            return Ending.keep()
        if isinstance(error, Ignore):
            if self.replaced and self.task.app.conf.task_protocol == 1:  # whose messages do not tell one from the other
                return Ending.release(Release.YIELDED)
            kind = Kind.REPLACED if self.replaced else Kind.IGNORED
            return Ending.complete(kind) if remembers else Ending.release(Release.ENDED)
        if isinstance(error, Reject):
            return Ending.release(Release.YIELDED if self.successor is None else Release.RETRY, self.successor)
        if not isinstance(error, Exception):
            return Ending.release(Release.INTERRUPTED)
        if remembers and self.policy.replays(error):
            return Ending.complete(Kind.FAILURE, error)
        return Ending.keep()

    def announce(self, retry: Retry) -> None:
        """A successor was published: copies of this generation wait for it."""
        when: Any = retry.when
        if isinstance(when, datetime):
            aware = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
            when = (aware - datetime.now(timezone.utc)).total_seconds()
        self.successor = Successor(int(self.request.retries or 0) + 1, max(0.0, float(when or 0.0)))

    def replacement(self, sig: Any) -> Any:
        """The signature the body wants to be replaced by; a body that runs again publishes the same ids."""
        self.refuse_if_lost()
        if self.observe:
            return sig
        return continuation.replacement(self.task.app, sig, *self._place("replace", self.request.retries))

    def replacing(self, sig: Any) -> Any:
        """The same as it is published, with the message's own links and chain behind it."""
        self.replaced = not self.request.is_eager
        names = {*(publish.replaced_names(self.request) or ()), self.policy.name or self.task.name}
        continuation.tell(sig, publish.REPLACED_HEADER, json.dumps(sorted(names)))
        if self.observe:
            return sig
        return continuation.placed(self.task.app, sig, *self._place("replace", self.request.retries))

    def refuse_if_lost(self) -> None:
        """No retry or replacement on behalf of a run that lost its key."""
        if self.context is not None and not self.observe and self.context.lost:
            raise LeaseLost("another worker holds this key now, so this run may send nothing in its place: stop")

    def told(self) -> None:
        """Celery stored the result and published links, errbacks and chord part: end what is still open."""
        self._end(Release.ENDED, published=True)

    def untold(self) -> None:
        """The broker did not take what follows a value: another copy of the message, if one comes, may publish it."""
        self._end(Release.ENDED, published=False)

    def over(self) -> None:
        """The tracer is through, or has told of a retry. What nobody was told of, another copy must be able to tell."""
        self._end(Release.RETRY if self.successor else Release.YIELDED, self.successor, published=False)

    def _end(self, reason: Release, successor: Successor | None = None, *, published: bool) -> None:
        """End a claim that is still open for this reason, or the right to publish what follows."""
        claim = self._still_open(published=published)
        if claim is None:
            return
        if not claim.right:
            self.engine.release(claim, reason, successor)
        elif published:
            self.engine.settle(claim)
        else:
            self.engine.abandon(claim)

    def _still_open(self, *, published: bool) -> Claim | None:
        if self.operation is None:
            return None
        self.engine.heartbeat.told(self.operation.token, published=published)
        return self.engine.heartbeat.held(self.operation.token)

    def _claimed(self) -> None:
        message.tell_started(self.task, self.request)

    def _verify(self, _context: RunContext) -> Any:
        verify = self.policy.verify
        args, kwargs = message.own_copy(self.args, self.kwargs)
        return None if verify is None else verify(*args, **kwargs)

    def _value_unread(self) -> bool:
        task, request = self.task, self.request
        unread = message.result_ignored(task, request) or isinstance(task.backend, DisabledBackend)
        return unread and not self.continues and not request.is_eager

    # --- what came of it ---------------------------------------------------------------------------------------------

    def _conclude(self, result: RunResult) -> Any:
        if not self.observe:
            self.ended_by = continuation.ended_by(result, self.request.retries)
        if result.status is Status.REPLAYED:
            self._replay(result)
        elif result.status is Status.MISMATCH:
            raise self._mismatch()
        if isinstance(result.error, Revoked):
            unread = message.result_ignored(self.task, self.request) and not self.task.store_errors_even_if_ignored
            tell_revoked(self.task, self.request, result.error, store=not unread)
        if isinstance(result.error, Ignore):  # Celery publishes nothing and tells nobody
            self.told()
        if result.error is not None:
            raise result.error
        self.returned = True
        return result.value

    def _replay(self, result: RunResult) -> None:
        decision, request = result.decision, self.request
        record = None if decision is None else decision.record
        if record is None or record.outcome is None:  # verify said it happened: this copy continues as a first run
            return
        if self.continues and result.claim is None:  # settled: everything this message had to publish is out
            request.callbacks = request.errbacks = request.chain = request.chord = None
        if record.outcome.kind is Kind.IGNORED:
            self.told()
            raise Ignore("replayed: the first run of this key raised Ignore")
        if record.outcome.kind is Kind.REPLACED:
            if record.message_id == request.id:
                self.told()
                raise Ignore("replayed: this message was replaced by another task")
            if self._value_unread():
                raise Ignore("replayed: the first run was replaced by another task, and nobody waits for this one")
            raise ReplayImpossible(
                f"the first run of key {record.key} was replaced by another task, which answers only for its own "
                "message: send this one with a key of its own",
                key=record.key,
            )

    def _stand_back(self, decision: Decision) -> NoReturn:
        """Another run holds the key, is due, is past this copy, or speaks a newer layout."""
        operation, record, answer = self.claimed, decision.record, decision.answer
        if answer is Answer.OVER:
            self.engine.emit(EventName.OVER, operation)
            raise Ignore("a later attempt took over, or this one ended and everybody was told")
        if self.request.is_eager:
            self.engine.emit(EventName.CONFLICT, operation, cause=answer.value)
            raise _conflict(operation, decision)
        if answer is Answer.NEWER or record is None:
            self._park(Wait("newer_record", outage=True))
        note, noted = record.note(self.request.id), self._noted(decision)
        if answer is Answer.NOT_DUE:
            due_in = note.successor[1] - decision.now if note.successor else 0.0
            # Most find, soon after it was due, that the retry ran; only one whose retry never came waits all its grace.
            exactly = due_in + RETRY_HAS if due_in > 0 else None
            self._park(Wait("not_due", below=due_in + GRACE, exactly=exactly, noted=noted), noting=True)
        held_by = decision.held_by
        rest = held_by[2] - decision.now if held_by else float("inf")
        own = record.state is State.COMPLETED or record.message_id == self.request.id
        if not own and self.policy.on_conflict == "fail":
            self.engine.emit(EventName.CONFLICT, operation, policy="fail")
            raise _conflict(operation, decision)
        if not own and self.policy.on_conflict == "skip" and not self.continues:
            self.engine.emit(EventName.CONFLICT, operation, policy="skip")
            raise Ignore("another message holds the key, and on_conflict is skip")
        self._park(Wait("held", below=rest, noted=noted), noting=True)

    def _noted(self, decision: Decision) -> int:
        """The highest count of a parked copy of this attempt that the record knows to be published."""
        parked = decision.record.note(self.request.id).parked if decision.record is not None else None
        return parked[1] if parked is not None and parked[0] == self.claimed.delivery.generation else 0

    def _is_surplus(self, decision: Decision) -> bool:
        """Whether this copy will be dropped, so that it need not wait in its slot before."""
        return self._is_behind(self._noted(decision))

    def _is_behind(self, noted: int) -> bool:
        """Whether a later copy was itself delivered. One that was parked, but lost its count, may be that very copy."""
        uncounted = self.parked.count == 0 and publish.PARK_HEADER in (self.request.headers or {})
        return not uncounted and noted >= self.claimed.delivery.parked + SURPLUS

    def _mismatch(self) -> FingerprintMismatch:
        covered = "all arguments" if self.policy.fingerprint is None else ", ".join(self.policy.fingerprint)
        return FingerprintMismatch(
            f"{self.task.name}: key {self.claimed.key} was used before with other arguments (compared: {covered}): "
            "use a new key for a new operation, or narrow Policy(fingerprint=[…])",
            key=self.claimed.key,
        )

    def _outage(self, error: StoreError) -> NoReturn:
        operation = self.claimed
        if self.request.is_eager:
            self.engine.emit(EventName.STORAGE_ERROR, operation, error=str(error))
            raise error
        cause = "corrupt_record" if isinstance(error, RecordCorrupt) else "store_down"
        self._park(Wait(cause, outage=True), error=str(error))

    def _park(self, wait: Wait, *, noting: bool = False, error: str | None = None) -> NoReturn:
        operation, request, emit = self.claimed, self.request, self.engine.emit
        delivery = operation.delivery
        if noting and self._is_behind(wait.noted):
            emit(EventName.OVER, operation, cause="a later parked copy is on its way")
            raise Ignore("a later parked copy of this message is on its way")
        stamp = self.stamp
        if stamp is None:
            raise AssertionError("parked before the delivery was prepared")
        with soft_limit_held(discard=True):
            try:
                count, delay = publish_parked(self.task, request, stamp, wait)
            except (Reject, ParkFailed) as failure:
                emit(EventName.PARK_FAILED, operation, cause=wait.cause, error=str(failure))
                raise
            if noting:
                try:
                    self.engine.store.note_parked(operation.key, delivery.message_id, delivery.generation, count)
                except StoreError as unnoted:  # only the bound on copies depends on it
                    error = str(unnoted)
        emit(EventName.PARKED, operation, cause=wait.cause, count=count, delay=round(delay, 3), error=error)
        raise Ignore(f"parked for {delay:.1f} s: {wait.cause}")


SOON = 5.0
"""Seconds; a retry that is due earlier might end before Celery has stored RETRY for its predecessor."""
RETRY_HAS = 2.0
"""Seconds a retry that is due is given to be claimed, before a stale copy of its predecessor looks again."""
SURPLUS = 2
"""A copy this many counts behind is dropped: the one that replaced it was itself delivered, so it is on the broker."""


def _conflict(operation: Operation, decision: Decision) -> ClaimConflict:
    held_by = decision.held_by
    return ClaimConflict(
        f"key {operation.key} of {operation.task} cannot run now ({decision.answer.value}): send it again later, or "
        'use on_conflict="park" on a worker',
        key=operation.key,
        answer=decision.answer.value,
        held_by=held_by[1] if held_by else None,
    )
