"""``celery_idem.testing.Idem`` for our own unit tests: an app per test, and every message handled by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_idem import IdempotentTask
from celery_idem.testing import Delivered, Idem, Message


class Shop:
    """An app without tasks, whose queue the test empties by hand."""

    def __init__(self, **conf: Any) -> None:
        self.app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.update(conf)  # before anything reads it
        self.idem = Idem(self.app, **conf).start()
        self.clock, self.store, self.events = self.idem.clock, self.idem.store, self.idem.events
        self.terminal, self.close = self.idem.told, self.idem.close

    def task(self, **options: Any) -> Any:
        """``app.task`` for this app alone; Celery shares tasks between all apps of a process by default."""
        return self.app.task(**{"base": IdempotentTask, "shared": False, **options})

    def names(self) -> list[str]:
        """Names of all events so far."""
        return [event.name.value for event in self.events]

    def messages(self) -> list[Message]:
        """Take every message off the queue, but for copies of earlier ones that went back."""
        return [message for message in self.idem.take() if not message.redelivered]

    def deliver(self, message: Mapping[str, Any], **changes: Any) -> Delivered:
        """Run one copy of the message."""
        return self.idem.deliver(message, **changes)

    def send(self, task: Any, *args: Any, **options: Any) -> Message:
        """Publish a call with these options of ``apply_async``, and take its message off the queue."""
        task.apply_async(args, **options)
        (message,) = self.messages()
        return message
