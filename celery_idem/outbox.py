"""Worker events on a thread of their own: a broker that is silent must hold up neither a lease nor a body."""

from __future__ import annotations

import logging
import os
import threading
from queue import SimpleQueue

from celery import Celery

from celery_idem.core.events import Event

logger = logging.getLogger("celery_idem")

KEPT = 1000
"""Events that wait for the broker at most; later ones are dropped, for they are only for watching."""


class Outbox:
    """Sends ``idem-…`` worker events where Celery's own task events are on; nothing waits for it."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._pid = 0
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._listening: bool | None = None

    @property
    def listening(self) -> bool:
        """Whether Celery's task events are on; asked of the configuration once, which takes its time to answer."""
        if self._listening is None:
            self._listening = bool(self._app.conf.worker_send_task_events)
        return self._listening

    def switch_on(self) -> None:
        """The worker was told to on its command line."""
        self._app.conf.worker_send_task_events = True
        self._listening = None

    def __call__(self, event: Event) -> None:
        """Have the event sent some time soon."""
        if not self.listening:
            return
        if self._pid != os.getpid():
            self._pid, self._events = os.getpid(), SimpleQueue()
            threading.Thread(target=self._run, args=(self._events,), name="celery_idem events", daemon=True).start()
        if self._events.qsize() < KEPT:
            self._events.put(event)

    def _run(self, events: SimpleQueue[Event]) -> None:
        while True:
            event = events.get()
            name = f"idem-{event.name.value.lower().replace('_', '-')}"
            try:
                with self._app.events.default_dispatcher() as dispatcher:
                    dispatcher.send(name, **event.fields)
            except Exception as error:  # noqa: BLE001  only for watching
                logger.info("a worker event was not sent: %s", error)
