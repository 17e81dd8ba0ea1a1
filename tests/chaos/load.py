"""The load: what is published when, drawn from the seed alone, and the thread that publishes it.

Six kinds of operations, some of the keyed ones published twice. The publisher talks to the broker directly, and a
message counts as published once the broker has confirmed it.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery import chord

from tests.campaigns.report import progress
from tests.chaos.history import History

KINDS = {"keyed": 34, "message": 20, "again": 10, "chain": 12, "link": 12, "chord": 7, "long": 5}
"""How often each kind is drawn."""
TWICE = 0.3
"""Share of the keyed and message-keyed operations that are published a second time."""
SOON = 3.0
"""Seconds at most until that second publication."""


@dataclass(frozen=True, order=True)
class Item:
    """One publication."""

    at: float
    """Seconds after the load began."""
    kind: str
    key: str
    seconds: float
    copy: int = 0


def drawn(seed: int, lasting: float, rate: float, long: float) -> list[Item]:
    """The load of a run, by time.

    Args:
        lasting: seconds in which all of it is published.
        rate: operations a second.
        long: how long a long body works; the others take 0.3 to 2 seconds.
    """
    dice = random.Random(f"load {seed}")
    items = []
    for number in range(int(lasting * rate)):
        at = number / rate
        (kind,) = dice.choices(list(KINDS), weights=list(KINDS.values()))
        seconds = long if kind == "long" else round(dice.uniform(0.3, 2.0), 2)
        first = Item(at, kind, f"{kind}-{number}", seconds)
        items.append(first)
        if kind in {"keyed", "message"} and dice.random() < TWICE:
            items.append(Item(min(lasting, at + dice.uniform(0, SOON)), kind, first.key, seconds, copy=1))
    return sorted(items)


def work_of(item: Item) -> tuple[list[str], list[str]]:
    """The keys of its own messages, and of the continuation these lead to."""
    if item.kind in {"chain", "link"}:
        return [item.key], [f"{item.key}/then"]
    if item.kind == "chord":
        return [f"{item.key}/part{part}" for part in range(3)], [f"{item.key}/then"]
    return [item.key], []


def publish(tasks: Any, item: Item) -> None:
    """Publish it; returns when the broker has confirmed all of it."""
    heads, followers = work_of(item)
    call = {"seconds": item.seconds}
    then = tasks.follow.s(key=followers[0], **call) if followers else None
    if item.kind == "chain":
        (tasks.message.s(key=item.key, **call).set(task_id=item.key) | then).apply_async()
    elif item.kind == "link":
        tasks.message.apply_async(kwargs={"key": item.key, **call}, task_id=item.key, link=then)
    elif item.kind == "chord":
        chord([tasks.message.s(key=key, **call).set(task_id=key) for key in heads])(then)
    else:
        task = {"again": tasks.again, "message": tasks.message}.get(item.kind, tasks.keyed)
        # Published twice, a key comes in two messages; what is keyed by its message comes as the same message again.
        own_id = f"{item.key}#{item.copy}" if task is tasks.keyed else item.key
        task.apply_async(kwargs={"key": item.key, **call}, task_id=own_id)


class Publisher:
    """A thread that publishes the load on time, or late where the broker is away."""

    def __init__(self, tasks: Any, history: History, items: Sequence[Item]) -> None:
        self._tasks, self._history, self._items = tasks, history, items
        self._thread = threading.Thread(target=self._run, name="chaos publisher", daemon=True)
        self.unconfirmed: list[Item] = []
        """Chords of which nobody knows how much was published."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait for the end; whether all was published."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._publish_all()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        """Close what this thread opened: Celery gives every thread a result backend, and keeps a chord's results."""
        backend: Any = self._tasks.app.backend
        backend._pending_results.concrete.clear()
        gc.collect()  # a result that goes unsubscribes, which needs the connection
        backend.result_consumer.stop()
        backend.client.connection_pool.disconnect()

    def _publish_all(self) -> None:
        began = time.monotonic()
        for item in self._items:
            time.sleep(max(0.0, began + item.at - time.monotonic()))
            heads, followers = work_of(item)
            told = {"key": item.key, "what": item.kind, "copy": item.copy, "heads": heads, "followers": followers}
            self._history.write("publishing", **told)
            if self._confirmed(item):
                self._history.write("published", **told)
            else:
                self.unconfirmed.append(item)

    def _confirmed(self, item: Item) -> bool:
        """Publish until it is confirmed; a chord only once, for its parts would come with another callback."""
        while True:
            try:
                publish(self._tasks, item)
            except Exception as error:
                progress(f"the broker did not confirm {item.key}: {error!r}")
                with self._tasks.app.connection_for_write() as connection:
                    connection.ensure_connection(interval_start=0.2, interval_step=0, timeout=120)
                if item.kind == "chord":
                    return False
            else:
                return True
