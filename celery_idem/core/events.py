"""What happened, told once: every event's name, level and whether it ends a decision.

Exactly one terminal event follows each delivery that reaches the engine. Every event is logged on
``celery_idem`` with all its fields and handed to the listeners, which may not raise.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
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
}
"""Log level per event; WARNING where not listed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``fields`` always holds key, task, message_id and generation; more by event."""

    name: EventName
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        """Whether it ends a decision."""
        return self.name in TERMINAL


Listener = Callable[[Event], None]


class Emitter:
    """Logs every event and hands it to the listeners; a listener that raises is logged, and the task goes on."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)

    def __call__(self, name: EventName, operation: Operation, **more: Any) -> None:
        """Tell that this happened to the operation; ``more`` are the event's own fields, without None."""
        level = LEVELS.get(name, logging.WARNING)
        logged = logger.isEnabledFor(level)
        if not (logged or self.listeners):
            return
        delivery = operation.delivery
        fields = {
            "key": operation.key,
            "task": operation.task,
            "message_id": delivery.message_id,
            "generation": delivery.generation,
            **{k: v for k, v in more.items() if v is not None},
        }
        if logged:
            text = " ".join(f"{k}={v}" for k, v in fields.items())
            logger.log(level, "%s %s", name.value, text, extra={"idem": fields})
        event = Event(name, fields)
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("an event listener raised on %s", name.value)
