"""What happened, told once: every event's name, level and whether it ends a decision.

Exactly one terminal event follows each delivery that reaches the engine; what happens to governed actions,
``ACTION_…``, is told beside that. Every event is logged on ``celery_idem`` with all its fields and handed to the
listeners, which may not raise.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_idem.core.records import Operation

logger = logging.getLogger("celery_idem")


class EventName(str, enum.Enum):
    """Every event there is; the table in docs/reference/events.md is held to this."""

    NEW = "NEW"
    REPLAYED = "REPLAYED"
    IN_FLIGHT_WAIT = "IN_FLIGHT_WAIT"
    PARKED = "PARKED"
    CONFLICT = "CONFLICT"
    PAYLOAD_MISMATCH = "PAYLOAD_MISMATCH"
    LEASE_RECLAIMED = "LEASE_RECLAIMED"
    OVER = "OVER"
    LEASE_LOST = "LEASE_LOST"
    LEASE_RECLAIMED_LOSS = "LEASE_RECLAIMED_LOSS"
    RENEW_FAILED = "RENEW_FAILED"
    COMPLETE_FAILED = "COMPLETE_FAILED"
    COMPLETED_LATE = "COMPLETED_LATE"
    RELEASE_FAILED = "RELEASE_FAILED"
    ENCODE_FAILED = "ENCODE_FAILED"
    STORAGE_ERROR = "STORAGE_ERROR"
    RAN_UNPROTECTED = "RAN_UNPROTECTED"
    CORRUPT_RECORD = "CORRUPT_RECORD"
    NEWER_RECORD = "NEWER_RECORD"
    EXHAUSTED = "EXHAUSTED"
    UNKNOWN_OUTCOME = "UNKNOWN_OUTCOME"
    VERIFY_FAILED = "VERIFY_FAILED"
    PARK_FAILED = "PARK_FAILED"
    WOULD_REPLAY = "WOULD_REPLAY"
    WOULD_PARK = "WOULD_PARK"
    WOULD_MISMATCH = "WOULD_MISMATCH"
    ACTION_PROPOSED = "ACTION_PROPOSED"
    ACTION_GATED = "ACTION_GATED"
    ACTION_GATE_ADDED = "ACTION_GATE_ADDED"
    ACTION_REJECTED = "ACTION_REJECTED"
    ACTION_ENQUEUED = "ACTION_ENQUEUED"
    ACTION_LEASED = "ACTION_LEASED"
    ACTION_LEASE_EXPIRED = "ACTION_LEASE_EXPIRED"
    ACTION_DEFERRED = "ACTION_DEFERRED"
    ACTION_DISPATCHED = "ACTION_DISPATCHED"
    ACTION_OBSERVING = "ACTION_OBSERVING"
    ACTION_UNRESOLVED = "ACTION_UNRESOLVED"
    ACTION_ACCEPTED = "ACTION_ACCEPTED"
    ACTION_VERIFIED = "ACTION_VERIFIED"
    ACTION_COMPLETED = "ACTION_COMPLETED"
    ACTION_FAILED = "ACTION_FAILED"
    ACTION_AMBIGUOUS = "ACTION_AMBIGUOUS"


TERMINAL = frozenset(
    {
        EventName.NEW,
        EventName.REPLAYED,
        EventName.PARKED,
        EventName.CONFLICT,
        EventName.PAYLOAD_MISMATCH,
        EventName.LEASE_RECLAIMED,
        EventName.OVER,
        EventName.STORAGE_ERROR,
        EventName.RAN_UNPROTECTED,
        EventName.EXHAUSTED,
        EventName.UNKNOWN_OUTCOME,
        EventName.PARK_FAILED,
        EventName.WOULD_REPLAY,
        EventName.WOULD_PARK,
        EventName.WOULD_MISMATCH,
    }
)
"""Events that end a decision; the others tell what happened on the way or after it."""

LEVELS = {
    EventName.NEW: logging.DEBUG,
    EventName.REPLAYED: logging.INFO,
    EventName.IN_FLIGHT_WAIT: logging.DEBUG,
    EventName.PARKED: logging.INFO,
    EventName.CONFLICT: logging.INFO,
    EventName.OVER: logging.INFO,
    EventName.LEASE_RECLAIMED: logging.WARNING,
    EventName.WOULD_REPLAY: logging.INFO,
    EventName.WOULD_PARK: logging.INFO,
    EventName.PAYLOAD_MISMATCH: logging.ERROR,
    EventName.COMPLETE_FAILED: logging.ERROR,
    EventName.CORRUPT_RECORD: logging.ERROR,
    EventName.EXHAUSTED: logging.ERROR,
    EventName.UNKNOWN_OUTCOME: logging.ERROR,
    EventName.PARK_FAILED: logging.ERROR,
    EventName.ACTION_PROPOSED: logging.INFO,
    EventName.ACTION_GATED: logging.INFO,
    EventName.ACTION_REJECTED: logging.INFO,
    EventName.ACTION_ENQUEUED: logging.DEBUG,
    EventName.ACTION_LEASED: logging.DEBUG,
    EventName.ACTION_DEFERRED: logging.INFO,
    EventName.ACTION_DISPATCHED: logging.INFO,
    EventName.ACTION_OBSERVING: logging.INFO,
    EventName.ACTION_ACCEPTED: logging.INFO,
    EventName.ACTION_VERIFIED: logging.DEBUG,
    EventName.ACTION_COMPLETED: logging.INFO,
    EventName.ACTION_FAILED: logging.ERROR,
    EventName.ACTION_AMBIGUOUS: logging.ERROR,
}
"""Log level per event; WARNING where not listed, or where ``WARNED`` names the cause."""
WARNED = {EventName.PARKED: frozenset({"store_down", "corrupt_record", "newer_record"})}
"""Causes that make an event a WARNING: nothing of the kind happens in ordinary work, and somebody has to act."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``fields`` always holds key, task, message_id and generation, or an action_id; more by event."""

    name: EventName
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        """Whether it ends a decision."""
        return self.name in TERMINAL


Listener = Callable[[Event], None]


class Emitter:
    """Logs every event and hands it to the listeners; a listener that raises is logged, and the task goes on.

    A listener may have an attribute ``listening``: where it is false for all of them, and no log is kept at the event's
    level, the event is not even made.
    """

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)

    def __call__(self, name: EventName, operation: Operation, **more: Any) -> None:
        """Tell that this happened to the operation; ``more`` are the event's own fields, without None."""
        if not self._anybody_hears(name, more):
            return
        delivery = operation.delivery
        of = {
            "key": operation.key,
            "task": operation.task,
            "message_id": delivery.message_id,
            "generation": delivery.generation,
        }
        self.tell(name, {**of, **more})

    def tell(self, name: EventName, fields: Mapping[str, Any]) -> None:
        """Tell what happened to something that is no operation; ``fields`` without None are all there is to say."""
        if not self._anybody_hears(name, fields):
            return
        said = {k: v for k, v in fields.items() if v is not None}
        level = level_of(name, fields)
        if logger.isEnabledFor(level):
            text = " ".join(f"{k}={v}" for k, v in said.items())
            logger.log(level, "%s %s", name.value, text, extra={"idem": said})
        event = Event(name, said)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("an event listener raised on %s", name.value)

    def _anybody_hears(self, name: EventName, fields: Mapping[str, Any]) -> bool:
        logged = logger.isEnabledFor(level_of(name, fields))
        return logged or any(getattr(heard, "listening", True) for heard in self.listeners)


def level_of(name: EventName, fields: Mapping[str, Any]) -> int:
    """The level an event is logged at."""
    if name in WARNED and fields.get("cause") in WARNED[name]:
        return logging.WARNING
    return LEVELS.get(name, logging.WARNING)
