"""Worker events: sent where task events are on, and never waited for."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_idem.core.events import Event, EventName
from celery_idem.outbox import KEPT, Outbox
from tests.support.workers import wait_until


class Dispatcher:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.gate = threading.Event()

    def send(self, name: str, **fields: Any) -> None:
        assert self.gate.wait(10)
        if name == "idem-new":
            raise OSError("broker is gone")
        self.sent.append((name, fields))


def app_with(dispatcher: Dispatcher, monkeypatch: Any, *, on: bool) -> Celery:
    app = Celery("x", set_as_current=False)
    app.conf.worker_send_task_events = on

    @contextmanager
    def default_dispatcher(**_: Any) -> Any:
        yield dispatcher

    monkeypatch.setattr(app.events, "default_dispatcher", default_dispatcher)
    return app


def test_a_silent_broker_holds_up_nobody_and_events_are_bounded(monkeypatch: Any) -> None:
    dispatcher = Dispatcher()
    outbox = Outbox(app_with(dispatcher, monkeypatch, on=True))
    for _ in range(KEPT * 2):
        outbox(Event(EventName.LEASE_LOST, {"key": "k"}))
    dispatcher.gate.set()
    wait_until(lambda: len(dispatcher.sent) >= KEPT, 10, "what was kept to be sent")
    outbox(Event(EventName.NEW, {}))  # cannot be sent, and ends nothing
    outbox(Event(EventName.LEASE_RECLAIMED_LOSS, {"key": "last"}))
    wait_until(lambda: dispatcher.sent[-1] == ("idem-lease-reclaimed-loss", {"key": "last"}), 10, "the last event")
    assert len(dispatcher.sent) <= KEPT + 3


def test_nothing_is_sent_where_task_events_are_off(monkeypatch: Any) -> None:
    outbox = Outbox(app_with(Dispatcher(), monkeypatch, on=False))
    outbox(Event(EventName.NEW, {}))
    assert outbox._pid == 0
