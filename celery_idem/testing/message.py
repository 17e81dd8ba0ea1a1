"""One message on the test's broker, and what a delivery of it came to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from queue import Queue
from typing import Any

from celery import Celery
from kombu.serialization import prepare_accept_content

from celery_idem.core.events import Event
from celery_idem.publish import moment
from celery_idem.testing.memory import SENT


class Message(dict[str, Any]):
    """One message as the worker sees it: its headers, canvas, ``args`` and ``kwargs``; change what you like."""

    delivery_info: dict[str, Any]
    queue: str
    delay: float
    """Seconds from when it was published until it is due; 0 for at once."""
    due: float = 0.0
    """By the test's clock."""

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> Message:
        """A message that was never on a broker, from all it consists of."""
        message = cls(headers)
        message.queue, message.delay = "", 0.0
        message.delivery_info = {"exchange": "", "routing_key": "", "priority": None, "redelivered": False}
        return message

    @property
    def id(self) -> str:
        """The task id."""
        return str(self["id"])

    @property
    def task(self) -> str:
        """The task's name."""
        return str(self["task"])

    @property
    def retries(self) -> int:
        """0 for a first attempt."""
        return int(self.get("retries") or 0)

    @property
    def redelivered(self) -> bool:
        """Whether the broker gave it before."""
        return bool(self.delivery_info["redelivered"])

    def copy(self) -> Message:
        """The same message once more, as the broker gives it after a delivery that was not acked."""
        again = Message(self)
        again.__dict__.update(self.__dict__, delivery_info={**self.delivery_info, "redelivered": True})
        return again

    def __repr__(self) -> str:
        return f"Message({self.task}[{self.id}], args={self['args']!r}, kwargs={self['kwargs']!r})"


@dataclass
class Delivered:
    """What one delivery came to."""

    message: Message
    state: str = "RUNNING"
    """Celery's: SUCCESS, FAILURE, RETRY, IGNORED (a parked or dropped copy too), REJECTED. And KILLED."""
    value: Any = None
    """What the task returned, or the exception."""
    info: Any = None
    """What Celery's tracer says of a task that did not succeed."""
    events: list[Event] = field(default_factory=list)
    """What the library told of it, in order."""
    published: list[Message] = field(default_factory=list)
    """What it sent: retries, parked copies, links, chain steps, chord bodies, calls of other tasks. All of it is queued
    for ``run_all``."""

    @property
    def event(self) -> str | None:
        """Name of the one event that tells what became of the message; None for a task that is not protected."""
        return next((event.name.value for event in reversed(self.events) if event.terminal), None)

    @property
    def key(self) -> str:
        """Effective key of the record."""
        for event in self.events:
            if "key" in event.fields:
                return str(event.fields["key"])
        raise AssertionError(f"{self.message} made no record: its task is not idempotent, or it died before")

    def __repr__(self) -> str:
        return f"<{self.message.task}[{self.message.id}] {self.state} {self.event or ''} {self.value!r}>"


def taken(app: Celery, queues: dict[str, Queue[Any]]) -> Iterator[Message]:
    """Take every message off these queues of the app's broker, in the order of each queue."""
    if not any(queue.qsize() for queue in queues.values()):
        return
    connection: Any = app.connection_for_read()
    with connection, connection.channel() as channel:
        for name in list(queues):
            while (raw := channel.basic_get(name, no_ack=True)) is not None:
                raw.accept = prepare_accept_content(app.conf.accept_content)
                yield _read(raw, name)


def _read(raw: Any, queue: str) -> Message:
    args, kwargs, embedded = raw.decode()
    properties = raw.properties
    answer = {name: properties[name] for name in ("reply_to", "correlation_id") if name in properties}
    message = Message({**raw.headers, **answer, **embedded, "args": args, "kwargs": kwargs})
    message.queue = queue
    message.delivery_info = {
        "exchange": raw.delivery_info.get("exchange"),
        "routing_key": raw.delivery_info.get("routing_key"),
        "priority": properties.get("priority"),
        "redelivered": False,
    }
    eta = message.get("eta")
    message.delay = 0.0
    if eta:
        message.delay = max(0.0, moment(eta).timestamp() - properties[SENT])
    return message
