"""What a Redis broker gives twice, side by side: how often each body ran under bare Celery, and under celery_idem.

``eta`` and ``long`` outlast the visibility timeout, and the broker's messages are swept all the time, as every worker
does each 100 s. ``chord`` and ``chain`` have each header or head twice in the queue, as a redelivery leaves it.
``killed`` loses its process after the body, when the next chain step is about to be published. Both sides ack late; the
last step of each chain, and the chord's callback, is a plain task on both sides.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from celery import chain, chord

from tests.campaigns.report import finish, progress, table
from tests.support.services import RedisServer
from tests.support.workers import TaskApp, WorkerProc, wait_until

VISIBLE = 3.0
"""Seconds after which the broker gives a message away."""
LONG = 3 * VISIBLE
CASES = ("eta", "long", "chord", "chain", "killed")
SIDES = {"bare": "Task", "celery_idem": "IdempotentTask"}

SOURCE = """
import os, signal, time
from pathlib import Path
from celery import Task
from celery.signals import before_task_publish
from celery_idem import IdempotentTask

HERE = Path(__file__).parent
Base = {base}

def ran(task):
    with open(HERE / "bodies", "a") as f:
        f.write(task.name.rpartition(".")[2] + " " + task.request.id + "\\n")

@app.task(base=Base, bind=True)
def eta(self):
    ran(self)

@app.task(base=Base, bind=True)
def long(self, seconds):
    ran(self)
    time.sleep(seconds)

@app.task(base=Base, bind=True)
def head(self, value):
    ran(self)
    return value

@app.task(base=Base, bind=True)
def dies(self, value):
    ran(self)
    return value

@app.task(bind=True)
def last(self, values):
    ran(self)
    return values

def die_once(sender=None, headers=None, **_):
    parent = headers["parent_id"] or ""
    if sender != last.name or not parent.startswith("dies"):
        return
    try:
        os.close(os.open(HERE / ("killed-" + parent), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

if "WORKER" in os.environ:
    before_task_publish.connect(die_once, weak=False)
"""


class Side:
    """One app, bare or idempotent, with its broker, two workers and the bodies that ran."""

    def __init__(self, name: str, server: RedisServer) -> None:
        self.name = name
        self._broker = server.new_database()
        settings = {
            "broker_transport_options": {"visibility_timeout": VISIBLE},
            "idempotency_store": server.new_database(),
            "worker_prefetch_multiplier": 10,
        }
        source = SOURCE.replace("{base}", SIDES[name])
        backend = server.new_database()
        self.app = TaskApp(source, broker=self._broker, backend=backend, settings=settings, env={"WORKER": "1"})
        self.tasks = self.app.module
        self._workers: list[WorkerProc] = []
        self._redis = redis.Redis.from_url(self._broker)

    def start(self) -> None:
        """Start the two workers."""
        self._workers = [self.app.worker(concurrency=3).start() for _ in range(2)]

    def stop(self) -> None:
        """Wait until the broker has nothing left, and end the workers."""
        self.sweep(self._empty, 90)
        for worker in self._workers:
            worker.stop()  # bare workers sometimes do not end by themselves after this

    def double(self) -> None:
        """Put a second copy of every queued message into the queue: what a redelivery leaves there."""
        for raw in self._redis.lrange(self.app.queue, 0, -1):
            self._redis.lpush(self.app.queue, raw)

    def sweep(self, done: Callable[[], bool], seconds: float) -> None:
        """Have the broker give away what it may, until all is done."""
        with self.app.app.connection_for_read() as connection:

            def swept() -> bool:
                connection.default_channel.qos.restore_visible(interval=1)
                return done()

            try:
                wait_until(swept, seconds, f"{self.name}: all is done", interval=0.1)
            except AssertionError as error:
                progress(str(error))  # the figures say what is missing

    def _empty(self) -> bool:
        return not self._redis.llen(self.app.queue) and not self._redis.hlen("unacked")

    def bodies(self) -> Counter[str]:
        """How often each task's body ran."""
        path = self.app.path("bodies")
        return Counter(line.split()[0] for line in path.read_text().splitlines()) if path.exists() else Counter()

    def deliveries(self) -> int:
        """How many messages the workers received."""
        return sum(worker.log.count("] received") for worker in self._workers)

    def close(self) -> None:
        """Reap and remove everything."""
        self._redis.close()
        # Celery keeps the results of a chord's header, and a result unsubscribes when it goes: while there is a server.
        self.app.app.backend._pending_results.concrete.clear()
        gc.collect()
        self.app.close()


# --- the cases --------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """What one side made of one case."""

    case: str
    side: str
    bodies: Counter[str]
    wanted: Counter[str]
    deliveries: int
    answers: int
    sent: int

    def shown(self) -> str:
        """Bodies by task, as the table shows them."""
        return ", ".join(f"{name} {self.bodies[name]}" for name in self.wanted)


def publish(name: str, tasks: Any, count: int) -> tuple[list[Any], dict[str, int]]:
    """Publish what the case is about; the results to wait for, and how often each body is due."""
    if name == "eta":
        return [tasks.eta.apply_async(countdown=LONG) for _ in range(count)], {"eta": count}
    if name == "long":
        return [tasks.long.delay(LONG) for _ in range(count)], {"long": count}
    if name == "chord":
        chords = [chord([tasks.head.s(n) for n in range(3)]) for _ in range(count)]
        return [one(tasks.last.s()) for one in chords], {"head": 3 * count, "last": count}
    word = "dies" if name == "killed" else "head"
    heads = [getattr(tasks, word).s(n).set(task_id=f"{word}{n}") for n in range(count)]
    return [chain(first, tasks.last.s()).apply_async() for first in heads], {word: count, "last": count}


def case(name: str, side: Side, count: int) -> Figures:
    """Play the case once and count."""
    results, due = publish(name, side.tasks, count)
    if name in {"chord", "chain"}:
        side.double()
    side.start()
    side.sweep(lambda: all(result.ready() for result in results), 60 + 2 * LONG)
    side.stop()
    answers = sum(result.successful() for result in results)
    return Figures(name, side.name, side.bodies(), Counter(due), side.deliveries(), answers, count)


def run(server: RedisServer, cases: Sequence[str], count: int) -> list[Figures]:
    """Play every case on both sides, each in an app of its own."""
    found = []
    for name in cases:
        for side in SIDES:
            progress(f"{name}, {side}")
            playing = Side(side, server)
            try:
                found.append(case(name, playing, count))
            finally:
                playing.close()
    return found


HEADER = ("case", "messages", "bodies due", "bare: bodies", "bare: deliveries", "celery_idem: bodies", "deliveries")


def rows(found: Sequence[Figures]) -> list[list[Any]]:
    """One line per case, both sides beside each other."""
    lines: list[list[Any]] = []
    for bare, ours in zip(found[::2], found[1::2], strict=True):
        due = ", ".join(f"{name} {times}" for name, times in bare.wanted.items())
        lines.append([bare.case, bare.sent, due, bare.shown(), bare.deliveries, ours.shown(), ours.deliveries])
    return lines


def broken(found: Sequence[Figures]) -> list[str]:
    """Promises broken: ours runs each body as often as it is due, and all is answered; bare Celery shows the need."""
    lines = []
    for figures in found:
        where = f"{figures.case}, {figures.side}"
        if figures.answers != figures.sent:
            lines.append(f"{where}: {figures.answers} answers, not {figures.sent}")
        if figures.side == "bare":
            if figures.bodies == figures.wanted:
                lines.append(f"{where}: nothing ran twice, so the case shows nothing")
        elif figures.bodies != figures.wanted:
            lines.append(f"{where}: bodies {figures.shown()}")
        if figures.side != "bare" and figures.case in {"eta", "long"} and figures.deliveries != figures.sent:
            lines.append(f"{where}: {figures.deliveries} deliveries, not {figures.sent}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Play all cases and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.redelivery", description=__doc__)
    parser.add_argument("--messages", type=int, default=10, help="messages, chords or chains per case (10)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    given = parser.parse_args(argv)
    with RedisServer() as server:
        found = run(server, given.cases.split(","), given.messages)
    return finish("Delivered more than once by Redis", table(HEADER, rows(found)), broken(found))


if __name__ == "__main__":
    sys.exit(main())
