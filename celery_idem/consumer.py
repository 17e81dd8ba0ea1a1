"""Idempotent kombu consumers: claim, run once, replay, for messages that are no Celery tasks. Celery is not needed.

A message is acked only when its effect is recorded. One that cannot run now stays unacked and is tried again from
``on_iteration``, on the thread that consumes it: no other thread may use its channel, and a requeue per try would
meet the delivery limit of a quorum queue. What never can run goes to ``dead_letter``. Nothing is published here.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from kombu.serialization import loads

from celery_idem.core import keys
from celery_idem.core.canonical import NoCanonicalForm
from celery_idem.core.engine import Engine, new_token
from celery_idem.core.events import Emitter, EventName
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.holder import current as this_process
from celery_idem.core.policy import UNSET, Policy
from celery_idem.core.records import Answer, Decision, Delivery, Kind, Operation, Release, RunResult, Status
from celery_idem.core.run import Ending
from celery_idem.errors import CeleryIdemError, ConfigurationError, FingerprintMismatch, KeyMissing, StoreError
from celery_idem.stores.base import Store, open_store

logger = logging.getLogger("celery_idem")

Handler = Callable[[Any, Any], Any]
"""Takes the decoded body and the kombu message."""
DeadLetter = Callable[[Any, Any, Exception], Any]
"""Takes the body (None where it cannot be decoded), the kombu message and why it is given up."""

KEY_HEADER = "idempotency_key"
"""The same header a task's message carries; wins over the policy's key source."""
LONGEST = 30.0
"""Seconds between two tries at most."""
KEPT_AT_MOST = 600.0
"""Seconds a message is kept before it goes back to the broker: a third of RabbitMQ's consumer timeout."""
BREATH = 1.0
"""Seconds of tries in one go, roughly; then the loop gets to its heartbeats and new messages."""
NO_USE = {
    "on_conflict": "a message whose key is held is always kept and tried again",
    "on_replay": "nobody reads a handler's value",
    "serializer": "nobody reads a handler's value",
    "result_max_bytes": "nobody reads a handler's value",
}


class IdempotentConsumer:
    """Makes handlers of kombu messages idempotent. One object per process; its threads may share it.

    Args:
        store: a URL as for ``open_store``, or a store.
        namespace: separates programs that share a store.
        delay: seconds until the second try; doubled for each further one, up to half a minute.
        store_timeout: seconds no store call outlives.
        clock: seconds, for tests.
        options: of the store's client library.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        namespace: str = "kombu",
        delay: float = 2.0,
        store_timeout: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self.store = open_store(store, timeout=store_timeout, **options) if isinstance(store, str) else store
        self.namespace, self.delay, self.clock = namespace, delay, clock
        self.emit = Emitter()
        self.heartbeat = Heartbeat(self.store, self.emit)
        self._here = threading.local()
        self._numbers = count()

    def handles(
        self, handler: Handler, policy: Policy, *, max_attempts: int = 5, dead_letter: DeadLetter | None = None
    ) -> dict[str, Any]:
        """Arguments for a kombu ``Consumer``, whose messages then go to the handler once per key.

        Args:
            handler: called with body and message. It leaves the acking to us; an exception means to try again.
            policy: ``name`` is needed. Keys and fingerprints are made of the body's fields, or of ``body`` where it
                is no mapping.
            max_attempts: exceptions of one message after which it is given up; counted in the store.
            dead_letter: called before a message that is given up is acked, unless it acks or rejects that itself.
                Where it raises, the message is kept and it is asked again. None rejects: the queue's own
                dead-letter exchange gets the message, and a queue without one drops it.

        Raises:
            ConfigurationError: no name, or an option that means nothing without Celery.
        """
        if not policy.name:
            raise ConfigurationError("Policy(name=…) is missing: the key needs a name that survives a renamed function")
        for name, reason in NO_USE.items():
            if getattr(policy, name) is not UNSET:
                raise ConfigurationError(f"Policy({name}=…) has no use in a consumer: {reason}")
        if max_attempts < 1:
            raise ConfigurationError(f"max_attempts={max_attempts!r}: must be at least 1")
        # Waiting in the consumer's thread would hold up every other message.
        policy = policy.over(Policy(wait_timeout=0))
        engine = Engine(self.store, policy, emit=self.emit, heartbeat=self.heartbeat, store_timeout=0)
        handling = _Handling(self, handler, engine, max_attempts, dead_letter)
        return {"callbacks": [handling.received], "on_decode_error": handling.unreadable, "no_ack": False}

    def on_iteration(self) -> None:
        """Try again what was kept long enough. Call it in the loop of each thread that consumes, about every second.

        ``ConsumerMixin`` does so when a class says ``on_iteration = consumer.on_iteration``.
        """
        if not hasattr(self._here, "kept"):
            self._here.kept = []
        kept, now = self._here.kept, self.clock()
        while kept and kept[0].due <= now and self.clock() < now + BREATH:
            heappop(kept).delivery.due()

    def check_loop(self) -> None:
        """``ConfigurationError`` if this thread never called ``on_iteration``: what is kept would be kept for ever."""
        if not hasattr(self._here, "kept"):
            raise ConfigurationError(
                "this thread consumes, but never calls the consumer's on_iteration(): call it in your loop, or say "
                "on_iteration = consumer.on_iteration in your ConsumerMixin"
            )

    def keep(self, delivery: _Delivery, delay: float) -> None:
        """Have this message tried again on this thread, after so many seconds."""
        heappush(self._here.kept, _Kept(self.clock() + delay, next(self._numbers), delivery))

    def close(self) -> None:
        """Stop the heartbeat and give back the store's connections."""
        self.heartbeat.stop()
        self.store.close()


@dataclass(order=True)
class _Kept:
    """A message that waits, unacked."""

    due: float
    number: int
    delivery: _Delivery = field(compare=False)


@dataclass(frozen=True)
class _Handling:
    """One handler under its policy: what every message for it shares."""

    consumer: IdempotentConsumer
    handler: Handler
    engine: Engine
    max_attempts: int
    dead_letter: DeadLetter | None

    def received(self, body: Any, message: Any) -> None:
        """Take a message: kombu's callback."""
        self.consumer.check_loop()
        _Delivery(self, message, body).attempt()

    def unreadable(self, message: Any, error: Exception) -> None:
        """Take a message that cannot be decoded: kombu's ``on_decode_error``."""
        self.consumer.check_loop()
        _Delivery(self, message, None, error).attempt()

    def operation(self, body: Any, message: Any) -> Operation:
        """What this message claims, under a fresh token.

        Raises:
            KeyMissing, NoCanonicalForm: it never will have a key.
        """
        policy, name, namespace = self.engine.policy, str(self.engine.policy.name), self.consumer.namespace
        named = isinstance(body, Mapping) and all(isinstance(part, str) for part in body)
        fields = dict(body) if named else {"body": body}
        call = keys.Bound(fields, fields, open=True)
        source, explicit = keys.KeySource.parse(policy.key), message.headers.get(KEY_HEADER)
        message_id = _id_of(message)
        try:
            digest = source.digest(message_id=message_id, call=call, explicit=explicit)
            scope = _scope(policy, message)
        except KeyMissing as missing:
            raise KeyMissing(f"{name}: {missing}", **missing.facts) from missing
        try:
            fingerprint = keys.fingerprint(call, policy.fingerprint)
        except NoCanonicalForm:
            if explicit is None and source.kind != "message":
                raise
            fingerprint = ""
        return Operation(
            key=keys.effective_key(namespace, scope, name, 0, digest),
            # Without an id, equal messages are copies of one.
            delivery=Delivery(message_id or fingerprint or digest),
            token=new_token(),
            holder=this_process(),
            task=name,
            namespace=namespace,
            scope=keys.scope_hash(scope),
            fingerprint=fingerprint,
        )

    def ending(self, value: Any, error: BaseException | None) -> Ending:
        """What becomes of the claim; an exception leaves it open until it is counted."""
        policy = self.engine.policy
        if error is None:
            keep = policy.ttl > 0 and self.engine.stores(value)
            return Ending.complete(Kind.RESULT) if keep else Ending.release(Release.ENDED)
        if not isinstance(error, Exception):
            return Ending.release(Release.INTERRUPTED)
        return Ending.complete(Kind.FAILURE, error) if policy.replays(error) else Ending.keep()


class _Delivery:
    """One message from its arrival until it is acked, rejected or back with the broker."""

    def __init__(self, handling: _Handling, message: Any, body: Any, unreadable: Exception | None = None) -> None:
        self._handling, self._message, self._body, self._unreadable = handling, message, body, unreadable
        self._since, self._tries = handling.consumer.clock(), 0

    def due(self) -> None:
        """Try again, or let the broker have it where it was kept for long; nothing where its channel is gone."""
        channel = self._message.channel
        if getattr(channel, "closed", False) or channel.connection is None or self._message.acknowledged:
            return  # with the channel the broker took the message back; or a handler acked, which ends it
        if self._handling.consumer.clock() - self._since >= self._most:
            self._message.requeue()
            return
        if self._unreadable is None:  # the handler may have changed the body it had
            message = self._message
            self._body = loads(message.body, message.content_type, message.content_encoding, accept=message.accept)
        self.attempt()

    def attempt(self) -> None:
        """Run the handler unless its effect is there; ack, keep or dead-letter the message."""
        engine, verify = self._handling.engine, self._handling.engine.policy.verify
        body, message = self._body, self._message
        if self._unreadable is not None:
            self._give_up(self._unreadable)
            return
        try:
            operation = self._handling.operation(body, message)
        except CeleryIdemError as error:
            self._give_up(error)
            return
        try:
            result = engine.attempt(
                operation,
                lambda _: self._handling.handler(body, message),
                ending=self._handling.ending,
                verify=None if verify is None else lambda _: verify(body, message),
            )
        except StoreError as error:
            engine.emit(EventName.STORAGE_ERROR, operation, error=str(error))
            self._keep(self._tries)
            return
        self._conclude(operation, result)

    def _conclude(self, operation: Operation, result: RunResult) -> None:
        decision, error = result.decision, result.error
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is not None and result.claim is not None:
            self._failed(result, error)
        elif result.status is Status.CONFLICT and decision is not None:
            self._stand_back(operation, decision)
        elif result.status is Status.MISMATCH:
            text = f"{operation.task}: key {operation.key} was used before by a message with another body"
            self._give_up(FingerprintMismatch(f"{text}: use a new key for a new operation", key=operation.key))
        elif result.status is Status.LEASE_LOST or (result.status is Status.UNPROTECTED and error is not None):
            logger.warning("%s will be tried again: %s", operation.task, error or "another consumer holds its key")
            self._keep(self._tries)
        elif error is not None and not _happened(result):
            self._give_up(error)
        else:
            self._ack()

    def _stand_back(self, operation: Operation, decision: Decision) -> None:
        emit = self._handling.engine.emit
        if decision.answer is Answer.OVER:
            emit(EventName.OVER, operation, cause="this message ended before")
            self._ack()
            return
        emit(EventName.CONFLICT, operation, cause=decision.answer.value)
        held_by = decision.held_by
        self._keep(self._tries, below=math.inf if held_by is None else held_by[2] - decision.now)

    def _failed(self, result: RunResult, error: Exception) -> None:
        """Count the exception on the record, where every process sees it, and only then let go of the key."""
        claim, engine, most = result.claim, self._handling.engine, self._handling.max_attempts
        if claim is None:
            raise AssertionError("failed without a claim")
        name, delivery = claim.operation.task, claim.operation.delivery
        series, failures = _counted(result.decision, delivery.message_id)
        failures, told = failures + 1, False
        try:
            logger.warning("%s raised in attempt %d of %d", name, failures, most, exc_info=error)
            if failures >= most:
                told = self._told(error)
            # One that is sent again from the dead letters begins anew: the count only grows within a series.
            noted = (series + 1, 0) if told else (series, failures)
            engine.store.note_parked(claim.key, delivery.message_id, *noted)
        except StoreError as lost:
            logger.warning("an attempt of %s was not counted: %s", name, lost)
        finally:
            engine.release(claim, Release.YIELDED)
        if told:
            self._ack()
        else:
            self._keep(failures - 1)

    def _give_up(self, error: Exception) -> None:
        if self._told(error):
            self._ack()
        else:
            self._keep(self._tries)

    def _told(self, error: Exception) -> bool:
        """Whether the message may go: somebody has it who looks after it."""
        message, hook = self._message, self._handling.dead_letter
        logger.error("%s gives a message up: %s", self._handling.engine.policy.name, error)
        if hook is None:
            if not message.acknowledged:  # by the handler
                message.reject()
            return True
        try:
            hook(self._body, message, error)
        except Exception:
            logger.exception("dead_letter raised; the message is kept, and it will be asked again")
            return False
        return True

    def _ack(self) -> None:
        if not self._message.acknowledged:
            self._message.ack()

    @property
    def _most(self) -> float:
        """Seconds this message may be kept: the broker has an opinion on that."""
        visibility = getattr(self._message.channel, "visibility_timeout", None)
        return min(KEPT_AT_MOST, visibility / 3) if visibility else KEPT_AT_MOST

    def _keep(self, tries: int, below: float = math.inf) -> None:
        consumer = self._handling.consumer
        self._tries += 1
        delay = min(LONGEST, consumer.delay * 2.0 ** min(tries, 10)) * random.uniform(0.75, 1.25)  # noqa: S311
        consumer.keep(self, max(0.1, min(delay, below, self._most)))


def _happened(result: RunResult) -> bool:
    """Whether what is replayed is a success, be its value readable or not."""
    record = None if result.decision is None else result.decision.record
    outcome = None if record is None else record.outcome
    return result.status is Status.REPLAYED and outcome is not None and outcome.kind is not Kind.FAILURE


def _counted(decision: Decision | None, message_id: str) -> tuple[int, int]:
    """The message's series and its exceptions so far.

    Tasks count parked copies in this note. No message of a consumer is parked, and its record is of no task.
    """
    record = None if decision is None else decision.record
    return (record.note(message_id).parked if record is not None else None) or (0, 0)


def _id_of(message: Any) -> str | None:
    message_id = message.properties.get("message_id")
    if message_id is None:
        return None
    try:
        if isinstance(message_id, str) and "\0" not in message_id.encode().decode():
            return message_id
    except UnicodeEncodeError:
        pass
    raise KeyMissing(f"message_id={message_id!r} is nothing a store can keep: publish plain text")


def _scope(policy: Policy, message: Any) -> str:
    if policy.scope is None:
        return ""
    try:
        scope = policy.scope(message) if callable(policy.scope) else policy.scope
    except Exception as error:
        raise KeyMissing(f"scope raised {error!r} for this message: let it return the tenant") from error
    if not isinstance(scope, str) or not scope.strip():
        raise KeyMissing(f"scope yielded {scope!r} for this message: it must name the tenant")
    return scope
