"""Deliver messages to a task through Celery's real tracer, without a worker process: one thread, a memory broker."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer

from celery_idem import IdempotentTask
from celery_idem.app import runtime_of
from celery_idem.core.events import Event
from celery_idem.stores.memory import MemoryStore
from tests.support.clock import ManualClock


@dataclass
class Delivered:
    """What the tracer made of one delivery."""

    state: str
    value: Any
    info: Any


class Shop:
    """An app with a memory broker, backend and store, whose queue the test empties by hand."""

    def __init__(self, **conf: Any) -> None:
        self.clock = ManualClock()
        self.app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.queue = f"q{uuid.uuid4().hex}"
        self.app.conf.update(
            task_default_queue=self.queue,
            idempotency_store="memory://",
            idempotency_store_options={"clock": self.clock},
            idempotency_wait_timeout=0,
            broker_connection_retry_on_startup=True,
            **conf,
        )
        self.events: list[Event] = []
        runtime_of(self.app).emit.listeners.append(self.events.append)

    def task(self, **options: Any) -> Any:
        """``app.task`` for this app alone; Celery shares tasks between all apps of a process by default."""
        return self.app.task(**{"base": IdempotentTask, "shared": False, **options})

    @property
    def store(self) -> MemoryStore:
        store = runtime_of(self.app).store
        assert isinstance(store, MemoryStore)
        return store

    def terminal(self) -> list[str]:
        """Names of the terminal events so far."""
        return [event.name.value for event in self.events if event.terminal]

    def names(self) -> list[str]:
        """Names of all events so far."""
        return [event.name.value for event in self.events]

    def messages(self) -> list[dict[str, Any]]:
        """Take every message off the queue: headers as the worker sees them, with args and kwargs."""
        taken = []
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            queue = self.app.amqp.queues[self.queue](channel)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                args, kwargs, embed = json.loads(message.body)
                taken.append({**message.headers, **embed, "args": args, "kwargs": kwargs})
        return taken

    def deliver(self, message: dict[str, Any], **changes: Any) -> Delivered:
        """Run one copy of the message through the tracer, as a prefork child would."""
        request = {
            **message,
            "delivery_info": {"exchange": "", "routing_key": self.queue, "priority": 0, "redelivered": False},
            "hostname": "test@host",
            **changes,
        }
        args, kwargs = request.pop("args"), request.pop("kwargs")
        task = self.app.tasks[request["task"]]
        tracer = build_tracer(task.name, task, app=self.app)
        seen: list[Any] = []
        from celery.signals import task_postrun

        def postrun(state: Any = None, retval: Any = None, **_: Any) -> None:
            seen.append((state, retval))

        task_postrun.connect(postrun, weak=False)
        try:
            traced = tracer(request["id"], args, kwargs, request)
        finally:
            task_postrun.disconnect(postrun)
        state, value = seen[-1]
        return Delivered(state, value, traced.info)

    def send(self, task: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Publish a call and take its message off the queue."""
        task.apply_async(args, **options)
        (message,) = self.messages()
        return message

    def close(self) -> None:
        """Stop the heartbeat and close the app."""
        runtime_of(self.app).close()
        self.app.close()
