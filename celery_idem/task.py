"""IdempotentTask: reads the request, calls the engine, and says in Celery's words what came of it.

``__call__`` is the one door: everything after it in Celery's tracer keys on what it returns or raises, so returning a
stored value continues the canvas as the first run did. ``_Delivery`` maps the engine's answers, row by row as in
docs/reference/delivery-table.md; the mechanism itself is ``core.engine``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NoReturn

from celery import Task
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.utils import uuid
from celery.utils.time import maybe_iso8601

from celery_idem import publish
from celery_idem.app import Runtime, ensure_installed, runtime_of
from celery_idem.core.context import RUNNING, RunContext, current
from celery_idem.core.engine import Ending, Engine
from celery_idem.core.events import EventName
from celery_idem.core.keys import KeySource
from celery_idem.core.policy import Policy
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
from celery_idem.parking import Wait, confirmed_producer, publish_parked
from celery_idem.signals import ATTRIBUTE


class IdempotentTask(Task):  # type: ignore[type-arg]  # not subscriptable before Celery 5.6
    """A task whose effect happens once per key, and whose duplicates get the first result.

    Options of ``@app.task(base=IdempotentTask, …)``, besides Celery's own:
        idempotency: a ``Policy``. A subclass's policy is laid over its base's.
        key: shorthand for ``Policy(key=…)``.

    Messages are acked late and given back when a worker process dies, unless the task says otherwise: a task that
    is acked before it ran happens at most once.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    idempotency_policy = Policy()
    _tracks_started = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        policy = cls.__dict__.get("idempotency")
        if isinstance(policy, Policy):
            del cls.idempotency
        elif policy is not None and not isinstance(policy, property):
            raise ConfigurationError(f"idempotency={policy!r}: give a Policy, such as Policy(key='order:{{order_id}}')")
        own = policy if isinstance(policy, Policy) else Policy()
        if "key" in cls.__dict__:
            own = own.over(Policy(key=cls.__dict__["key"]))
        cls.idempotency_policy = own.over(cls.idempotency_policy)

    @classmethod
    def bind(cls, app: Any) -> Any:
        """Bind to the app; the worker's check and signal handlers come along."""
        bound = super().bind(app)
        # STARTED must be written after the claim, or a dropped copy overwrites the final state.
        if cls.track_started:
            cls._tracks_started, cls.track_started = True, False
        ensure_installed(app)
        return bound

    @property
    def idempotency(self) -> RunContext:
        """The running attempt: key, fence, attempt, reclaimed, check()."""
        running = current()
        return running if running is not None else self._unclaimed(self.request.args or (), self.request.kwargs or {})

    # --- publishing ------------------------------------------------------------------------------------------------

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> Any:
        """Like Celery's own, with the message's key and fingerprint stamped on it.

        Args:
            idempotency_key: wins over the policy's key source.

        Raises:
            KeyMissing: the key source yields nothing for these arguments; nothing was published.
        """
        runtime = runtime_of(self.app)
        given = dict(task_id=task_id, producer=producer, link=link, link_error=link_error, shadow=shadow, **options)
        if runtime.mode != "off":
            given["task_id"] = task_id = task_id or uuid()
            given["headers"] = publish.stamped_headers(
                self,
                runtime.policy_of(self),
                args or (),
                kwargs or {},
                task_id,
                options.get("headers"),
                idempotency_key,
            )
        if options.get("retries") and producer is None and not self.app.conf.task_always_eager:
            # The attempt that sends its own successor is acked on the strength of it.
            with confirmed_producer(self.app) as given["producer"]:
                return super().apply_async(args, kwargs, **given)
        return super().apply_async(args, kwargs, **given)

    def retry(  # type: ignore[override]
        self, args: Any = None, kwargs: Any = None, exc: Any = None, throw: bool = True, **options: Any
    ) -> Any:
        """Like Celery's own; the successor is published confirmed, and refused once the lease is lost."""
        delivery = self.request.__dict__.get(ATTRIBUTE)
        if delivery is not None:
            delivery.refuse_if_lost()
        try:
            retried = super().retry(args, kwargs, exc, throw, **options)
        except Retry as retry:
            if delivery is not None and getattr(retry, "sig", None) is not None:
                delivery.announce(retry)
            raise
        if delivery is not None and isinstance(retried, Retry):
            delivery.announce(retried)
        return retried

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, queue: Any = None, **options: Any
    ) -> Any:
        """Like Celery's own, for a successor: the key stays, the fingerprint follows changed arguments."""
        request = self.request if request is None else request
        given = options.pop("headers", None)
        headers = publish.copied(request.headers if given is None else given)
        runtime = runtime_of(self.app)
        if request.id is not None and runtime.mode != "off":
            policy = runtime.policy_of(self)
            stamp = publish.stamp_of(self, policy, request, request.args or (), request.kwargs or {})
            if args is not None or kwargs is not None:
                changed = (request.args if args is None else args, request.kwargs if kwargs is None else kwargs)
                anew = publish.derive(self, Policy(key="message").over(policy), *changed, request.id)
                stamp = publish.Stamp(stamp.task, stamp.message_id, stamp.key, anew.fingerprint)
            headers[publish.STAMP_HEADER] = stamp.header()
        return super().signature_from_request(request, args, kwargs, queue, headers=headers, **options)

    def signature_of_copy(self, request: Any, **options: Any) -> Any:
        """The message itself once more, as it is parked: same id, arguments, canvas and queue."""
        return super().signature_from_request(request, **options)

    # --- running ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body once per key, or hand on what its first run left."""
        request = self.request
        runtime = runtime_of(self.app)
        if request.called_directly or runtime.mode == "off" or runtime.is_broadcast(request.delivery_info):
            running = RUNNING.set(self._unclaimed(args, kwargs))
            try:
                return self._body(args, kwargs)
            finally:
                RUNNING.reset(running)
        return _Delivery(self, runtime, request, args, kwargs).handle()

    def _body(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # Celery's own __call__ would push a copied request, whose children and mutations are lost; a base of the
        # user's that stands between must run all the same.
        inherited = next(c for c in type(self).__mro__[_place(type(self)) :] if "__call__" in c.__dict__)
        if self.request.called_directly or inherited is not Task:
            return super().__call__(*args, **kwargs)
        return self.run(*args, **kwargs)

    def _unclaimed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RunContext:
        return RunContext(lambda: self._key_of(args, kwargs))

    def _key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The key these arguments would have; empty where a bare call has none."""
        runtime, request = runtime_of(self.app), self.request
        policy = runtime.policy_of(self)
        if request.id is None and KeySource.parse(policy.key).kind == "message":
            return ""
        try:
            stamp = publish.stamp_of(self, policy, request, args, kwargs)
            return publish.operation_of(self, policy, runtime, request, stamp, continues=False).key
        except (KeyMissing, TypeError):
            return ""


class _Delivery:
    """One message in the hands of one worker."""

    def __init__(
        self, task: IdempotentTask, runtime: Runtime, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.task, self.runtime, self.request = task, runtime, request
        self.args, self.kwargs = args, kwargs
        self.observe = runtime.mode == "observe"
        self.continues = bool(request.callbacks or request.errbacks or request.chain or request.chord)
        self.successor: Successor | None = None
        self.context: RunContext | None = None
        self.operation: Operation | None = None

    def _prepare(self) -> None:
        self.engine: Engine = self.runtime.engine_for(self.task)
        self.policy = self.engine.policy
        self.stamp = publish.stamp_of(self.task, self.policy, self.request, self.args, self.kwargs)
        self.parked = publish.read_parked(self.request.headers or {})
        self.operation = self._operation()

    def _operation(self) -> Operation:
        continues = self.continues and not self.observe
        return publish.operation_of(self.task, self.policy, self.runtime, self.request, self.stamp, continues=continues)

    def handle(self) -> Any:
        """Return or raise what this delivery comes to."""
        self.request.__dict__[ATTRIBUTE] = self
        while True:
            try:
                if self.operation is None:
                    with soft_limit_held():  # what parking needs is there before the limit can ask for it
                        self._prepare()
                result = self._attempt()
                if result.status is Status.CONFLICT and result.decision is not None:
                    self._stand_back(result.decision)
            except _Expired:
                self.task.backend.mark_as_revoked(self.request.id, "expired", request=self.request)
                raise Ignore(f"expired at {self.parked.expires}") from None
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
            self.successor, self.operation = None, None

    def _attempt(self) -> RunResult:
        return self.engine.attempt(
            self.claimed,
            self.body,
            ending=self.ending,
            verify=self._verify if self.policy.verify else None,
            value_unread=self._value_unread(),
            observe=self.observe,
            on_claimed=self._claimed,
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
        self.context = context
        return self.task._body(self.args, self.kwargs)  # noqa: SLF001  the task's own half

    def ending(self, value: Any, error: BaseException | None) -> Ending:
        """What becomes of the claim: design's delivery table, the rows below ACQUIRED."""
        remembers = self.policy.ttl > 0
        if error is None:
            if self.successor is not None:  # retry(throw=False): the next attempt has the word
                return Ending.release(Release.RETRY, self.successor)
            return Ending.complete(Kind.RESULT, value) if remembers and self.engine.stores(value) else Ending.keep()
        if isinstance(error, Retry):
            return Ending.release(Release.RETRY if self.successor else Release.YIELDED, self.successor)
        if isinstance(error, Ignore):
            return Ending.complete(Kind.IGNORED) if remembers else Ending.release(Release.ENDED)
        if isinstance(error, Reject):
            return Ending.release(Release.YIELDED)
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

    def refuse_if_lost(self) -> None:
        """No retry on behalf of a run that lost its key."""
        if self.context is not None and not self.observe and self.context.lost:
            raise LeaseLost("another worker holds this key now, so this run may not send a retry: stop")

    def told(self) -> None:
        """Celery stored the result and published links, errbacks and chord part: end what is still open."""
        claim = self._still_open()
        if claim is None:
            return
        if claim.right:
            self.engine.settle(claim)
        else:
            self.engine.release(claim, Release.ENDED)

    def over(self) -> None:
        """The tracer is through. What is still open was not told to anybody, so another copy must be able to."""
        claim = self._still_open()
        if claim is None:
            return
        if claim.right:
            self.engine.abandon(claim)
        else:
            self.engine.release(claim, Release.YIELDED)

    def _still_open(self) -> Claim | None:
        return None if self.operation is None else self.engine.heartbeat.held(self.operation.token)

    def _claimed(self) -> None:
        if self.parked.expires is not None:
            expires: Any = maybe_iso8601(self.parked.expires)
            aware = expires if expires.tzinfo else expires.replace(tzinfo=timezone.utc)
            if aware <= datetime.now(timezone.utc):
                raise _Expired
        task, request = self.task, self.request
        if task._tracks_started and not request.is_eager and not _result_ignored(task, request):  # noqa: SLF001
            meta = {"pid": os.getpid(), "hostname": request.hostname}
            task.backend.store_result(request.id, meta, "STARTED", request=request)

    def _verify(self, _context: RunContext) -> Any:
        verify = self.policy.verify
        return None if verify is None else verify(*self.args, **self.kwargs)

    def _value_unread(self) -> bool:
        task, request = self.task, self.request
        unread = _result_ignored(task, request) or isinstance(task.backend, DisabledBackend)
        return unread and not self.continues and not request.is_eager

    # --- what came of it ---------------------------------------------------------------------------------------------

    def _conclude(self, result: RunResult) -> Any:
        if result.status is Status.REPLAYED:
            self._replay(result)
        elif result.status is Status.MISMATCH:
            raise self._mismatch()
        if result.error is not None:
            raise result.error
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
        note = record.note(self.request.id)
        generation = operation.delivery.generation
        noted = note.parked[1] if note.parked is not None and note.parked[0] == generation else 0
        if answer is Answer.NOT_DUE:
            due = note.successor[1] if note.successor else decision.now
            self._park(Wait("not_due", exactly=due + GRACE - decision.now, noted=noted), noting=True)
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
        if noting and wait.noted >= delivery.parked + 2:
            # The copy that replaced this one was itself delivered, so it is safe on the broker.
            emit(EventName.OVER, operation, cause="a later parked copy is on its way")
            raise Ignore("a later parked copy of this message is on its way")
        with soft_limit_held(discard=True):
            try:
                count, delay = publish_parked(self.task, request, self.stamp, wait)
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


class _Expired(Exception):
    """The parked copy's own expiry passed while it waited."""


def _conflict(operation: Operation, decision: Decision) -> ClaimConflict:
    held_by = decision.held_by
    return ClaimConflict(
        f"key {operation.key} of {operation.task} cannot run now ({decision.answer.value}): send it again later, or "
        'use on_conflict="park" on a worker',
        key=operation.key,
        answer=decision.answer.value,
        held_by=held_by[1] if held_by else None,
    )


def _result_ignored(task: IdempotentTask, request: Any) -> bool:
    own = request.__dict__.get("ignore_result")  # the class default would look like an explicit False
    return bool(task.ignore_result if own is None else own)


def _place(cls: type) -> int:
    return cls.__mro__.index(IdempotentTask) + 1


__all__ = ["IdempotentTask"]
