"""One pool on one broker: the app, its workers, the messages that are delivered again, and what the bodies wrote."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

from celery import chain, chord, group
from celery.signals import before_task_publish

from celery_idem.testing.killing import KillPoints
from tests.matrix.cells import Cell
from tests.support.workers import TaskApp, WorkerProc, wait_until

SOURCE = """
import os, time
from pathlib import Path
from celery_idem import IdempotentTask
from celery_idem.app import runtime_of

HERE = Path(__file__).parent

def write(name, *words):
    with open(HERE / name, "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

runtime_of(app).emit.listeners.append(lambda event: write("events", event.name.value, event.fields["message_id"]))

class Logged(IdempotentTask):
    abstract = True

    def ran(self, tag, step):
        write("runs", tag, step)
        if step in ("plain", "try-0", "head-0", "swap") and (HERE / f"gate-{tag}").exists():
            deadline = time.monotonic() + 60
            while not (HERE / f"open-{tag}").exists() and time.monotonic() < deadline:
                time.sleep(0.01)

@app.task(base=Logged, bind=True)
def plain(self, tag):
    self.ran(tag, "plain")
    return tag

@app.task(base=Logged, bind=True)
def again(self, tag):
    self.ran(tag, f"try-{self.request.retries}")
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return tag

@app.task(base=Logged, bind=True)
def head(self, tag, number):
    self.ran(tag, f"head-{number}")
    return number

@app.task(base=Logged, bind=True)
def tail(self, previous, tag):
    self.ran(tag, "tail")
    return previous

@app.task(acks_late=True, reject_on_worker_lost=True)
def last(previous, tag):
    write("runs", tag, "last")
    return [previous, tag]

@app.task(base=Logged, bind=True)
def total(self, previous, tag):
    self.ran(tag, "last")
    return [previous, tag]

@app.task(base=Logged, bind=True)
def swap(self, tag):
    self.ran(tag, "swap")
    raise self.replace(inner.s(tag))

@app.task(base=Logged, bind=True)
def inner(self, tag):
    self.ran(tag, "inner")
    return tag
"""

STEPS = {
    "plain": ("plain",),
    "retry": ("try-0", "try-1"),
    "chain": ("head-0", "tail", "last"),
    "chord": ("head-0", "head-1", "last"),
    "link": ("head-0", "last"),
    "replace": ("swap", "inner"),
    "group": ("head-0", "head-1"),
}
"""Bodies of each shape, each of which must run once; the first one's message is the one that suffers."""
RUNS_AGAIN = frozenset({"plain", "head-0"})
"""First bodies that run a second time when their process is killed before the completion.

A retry's may, unless its successor was quicker, for nothing is recorded of it before RETRY is stored. So may a replaced
one's: if the replacement was quicker, Celery finds its result under the same id, and acks for the dead.
"""
CONCURRENCY = {"prefork": 2, "threads": 4, "solo": 1, "gevent": 8}


class House:
    """The app of one pool and broker."""

    def __init__(self, pool: str, broker: str, store: str, *, backend: str | None) -> None:
        settings: dict[str, Any] = {"idempotency_store": store, "worker_prefetch_multiplier": 1}
        if broker.startswith("redis"):
            settings["broker_transport_options"] = {"visibility_timeout": 2}
        self.pool = pool
        self.counts_chords = backend is not None
        self.tasks = TaskApp(SOURCE, broker=broker, backend=backend, settings=settings)
        self.points = KillPoints(self.tasks.path("points"))
        self.published: dict[str, dict[str, Any]] = {}
        self.workers: list[WorkerProc] = []
        # Celery 5.5 takes two objects' methods for one receiver, unless they are named apart.
        before_task_publish.connect(self._note, dispatch_uid=self.tasks.name)

    def start(self, workers: int = 1) -> None:
        """Have this many workers, not counting the dead."""
        self.workers = [worker for worker in self.workers if worker.alive]
        for _ in range(workers - len(self.workers)):
            worker = self.tasks.worker(
                pool=self.pool,
                concurrency=CONCURRENCY[self.pool],
                env=self.points.env,
                extra=self.points.arguments,
            )
            worker.ready_within = 60
            self.workers.append(worker.start())

    def close(self) -> None:
        """Reap it all."""
        before_task_publish.disconnect(self._note, dispatch_uid=self.tasks.name)
        self.tasks.close()

    # --- messages ----------------------------------------------------------------------------------------------------

    def _note(self, sender: str, body: Any, headers: Any, properties: Any, **where: Any) -> None:
        """Keep the message whose copies will be delivered: the first one of its cell's first body."""
        name = sender.rpartition(".")[2]
        if name in {"plain", "again", "head", "swap"} and sender.startswith(self.tasks.name) and body[0][-1] != 1:
            message = {"body": body, "headers": headers, **where, **properties}
            self.published.setdefault(body[0][0], copy.deepcopy(_sendable(message)))

    def send(self, cell: Cell, *, gated: bool) -> Any:
        """Publish the cell's work; a gated first body waits for ``open``."""
        if gated:
            self.tasks.path(f"gate-{cell.tag}").touch()
        return self._canvas(cell.shape, cell.tag).apply_async()

    def _canvas(self, shape: str, tag: str) -> Any:
        tasks = self.tasks.module
        head, last = tasks.head, tasks.last
        if shape == "chain":
            return chain(head.s(tag, 0), tasks.tail.s(tag), last.s(tag))
        if shape == "chord":
            # Without a counter in the backend Celery's own chord_unlock publishes the body, and a worker that is
            # killed may have that delivered twice.
            body = last if self.counts_chords else tasks.total
            return chord([head.s(tag, 0), head.s(tag, 1)], body.s(tag))
        if shape == "group":
            return group(head.s(tag, 0), head.s(tag, 1))
        if shape == "link":
            return head.signature((tag, 0), link=last.s(tag))
        return {"plain": tasks.plain, "retry": tasks.again, "replace": tasks.swap}[shape].s(tag)

    def send_copy(self, cell: Cell) -> None:
        """Publish the very same message once more."""
        message = copy.deepcopy(self.published[cell.tag])
        with self.tasks.app.producer_pool.acquire(block=True) as producer:
            producer.publish(message.pop("body"), serializer="json", **message)

    def id_of(self, cell: Cell) -> str:
        """The id of the message that suffers."""
        return str(self.published[cell.tag]["headers"]["id"])

    def suffering(self, cell: Cell) -> dict[str, str]:
        """Task and id of the message that suffers; a replacement has the same id."""
        headers = self.published[cell.tag]["headers"]
        return {"task": headers["task"], "message_id": headers["id"]}

    def take_no_more(self) -> None:
        """Have the workers leave in the queue what is published from now on.

        Kombu's Redis transport takes a message and notes it as unacked in two steps; a process that is killed between
        them loses it, and with it the cell.
        """
        if self.pool in {"threads", "gevent"}:
            self.tasks.app.control.cancel_consumer(self.tasks.queue, reply=True, timeout=20, limit=1)

    def open(self, cell: Cell) -> None:
        """Let the gated body go on."""
        self.tasks.path(f"open-{cell.tag}").touch()

    # --- what is seen ------------------------------------------------------------------------------------------------

    def steps(self, cell: Cell) -> Counter[str]:
        """How often each of the cell's bodies ran."""
        lines = [line.split() for line in self._lines("runs")]
        return Counter(step for tag, step in lines if tag == cell.tag)

    def events(self, cell: Cell) -> list[str]:
        """What was told about the message that suffers."""
        lines = [line.split() for line in self._lines("events")]
        return [name for name, message_id in lines if message_id == self.id_of(cell)]

    def finished(self, cell: Cell) -> bool:
        """Whether every body of the cell ran."""
        return set(STEPS[cell.shape]) <= set(self.steps(cell))

    def await_(self, condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
        """Wait; an AssertionError with the workers' logs where it never comes."""
        try:
            wait_until(condition, seconds, what)
        except AssertionError as error:
            tails = "\n".join(worker.log_tail(30) for worker in self.workers)
            raise AssertionError(f"{error}\nevents: {self._lines('events')[-20:]}\n{tails}") from None

    def drained(self) -> bool:
        """Whether no worker has or can get a message, so that nothing more will happen."""
        app = self.tasks.app
        with app.connection_for_read() as connection, connection.channel() as channel:
            if app.amqp.queues[self.tasks.queue](channel).queue_declare()[1]:
                return False
            if self.tasks.broker.startswith("redis") and channel.client.hlen("unacked"):
                return False
        held = app.control.inspect(timeout=2, limit=len(self.workers))
        answers = [held.active(), held.reserved(), held.scheduled()]
        return all(answer is not None and not any(answer.values()) for answer in answers)

    def restore(self) -> None:
        """Have a Redis broker give back what a dead worker held, as its own sweep does every 100 s."""
        if not self.tasks.broker.startswith("redis"):
            return

        def visible() -> bool:
            with self.tasks.app.connection_for_read() as connection:
                connection.default_channel.qos.restore_visible(interval=1)
                return int(connection.default_channel.client.hlen("unacked")) == 0

        self.await_(visible, "the broker to give the message back")

    def _lines(self, name: str) -> list[str]:
        path = self.tasks.path(name)
        return path.read_text().splitlines() if path.exists() else []


def _sendable(message: dict[str, Any]) -> dict[str, Any]:
    wanted = {"body", "headers", "exchange", "routing_key", "declare", "correlation_id", "reply_to", "delivery_mode"}
    sent = {name: value for name, value in message.items() if name in wanted and value is not None}
    sent["declare"] = []
    return sent


def expected_value(cell: Cell) -> Any:
    """What the result of the cell's work says; a link has none of its own."""
    values = {"chain": [0, cell.tag], "chord": [[0, 1], cell.tag], "group": [0, 1], "link": 0}
    return values.get(cell.shape, cell.tag)
