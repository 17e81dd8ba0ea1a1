"""Stop the store for longer than a lease: under running bodies, and over a backlog of queued messages.

The store is a Redis of its own, stopped by SIGSTOP: connections stay open and nobody answers. The broker is another
Redis, whose own count of pushes says how many messages were published.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import redis

from tests.campaigns.report import finish, progress, table
from tests.support.services import RedisServer
from tests.support.workers import TaskApp, WorkerProc, wait_until

SOURCE = """
import time
from pathlib import Path
from celery_idem import IdempotentTask
from celery_idem.app import runtime_of

HERE = Path(__file__).parent

def write(*words):
    with open(HERE / "lines", "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def told(event):
    if event.name.value != "NEW":
        write(event.name.value, event.fields["message_id"], time.time())

runtime_of(app).emit.listeners.append(told)

@app.task(base=IdempotentTask, bind=True)
def long(self, seconds):
    write("start", self.request.id, time.time())
    deadline = time.monotonic() + seconds + 600
    while not (HERE / "go").exists():
        if time.monotonic() > deadline:
            raise RuntimeError("go never came")
        time.sleep(0.05)
    write("end", self.request.id, time.time())
    return self.request.id

@app.task(base=IdempotentTask, bind=True, ignore_result=True)
def short(self):
    write("start", self.request.id, time.time())
"""


@dataclass
class LongFigures:
    """What became of bodies under which the store was stopped."""

    bodies: int
    down: float
    shortest: float = 0.0
    starts: int = 0
    ends: int = 0
    succeeded: int = 0
    words: Counter[str] = field(default_factory=Counter)

    def broken(self) -> list[str]:
        """Promises broken."""
        wanted = {"started": self.starts, "ended": self.ends, "succeeded": self.succeeded}
        found = [f"long bodies: {got} {name}, not {self.bodies}" for name, got in wanted.items() if got != self.bodies]
        bad = {word: self.words[word] for word in ("LEASE_LOST", "COMPLETE_FAILED", "LEASE_RECLAIMED")}
        return found + [f"long bodies: {times} {word}" for word, times in bad.items() if times]


def under_long_bodies(bodies: int, lease: float, down: float, *, at_least: float = 0.0) -> LongFigures:
    """Stop the store for ``down`` seconds under that many bodies, each of which runs ``at_least`` that long."""
    with servers() as (_, store, tasks_for):
        tasks = tasks_for(idempotency_lease=lease)
        with tasks.worker(concurrency=bodies):
            results = [tasks.module.long.apply_async((at_least + down,), task_id=f"long{n}") for n in range(bodies)]
            wait_until(lambda: counts(tasks)["start"] == bodies, 60, f"{bodies} bodies run")
            stopped = time.monotonic()
            store.pause()
            elapse(stopped, down, f"{bodies} bodies run and the store is stopped")
            store.resume()
            figures = LongFigures(bodies, time.monotonic() - stopped)
            elapse(stopped, at_least, "the bodies go on")
            tasks.path("go").touch()
            with contextlib.suppress(AssertionError):
                wait_until(lambda: all(r.ready() for r in results), 60 + lease, "every result", interval=0.2)
            figures.succeeded = sum(r.state == "SUCCESS" and r.result == r.id for r in results)
        figures.words = counts(tasks)
        figures.starts, figures.ends = figures.words["start"], figures.words["end"]
        figures.shortest = shortest(tasks)
        return figures


@dataclass
class BacklogFigures:
    """What became of a queue whose store was stopped."""

    messages: int
    pool: int
    timeout: float
    down: float = 0.0
    published: int = 0
    parked: int = 0
    drained: float = float("nan")
    lost: int = 0
    twice: int = 0
    early: int = 0
    memory: float = 0.0
    at_rest: float = 0.0
    words: Counter[str] = field(default_factory=Counter)

    @property
    def most_copies(self) -> int:
        """Copies the back-pressure allows: one per slot and ``store_timeout``, and a little around it.

        Also while the queue drains, for a machine that stands still then looks like a store that does not answer.
        """
        drained = 0.0 if math.isnan(self.drained) else self.drained
        return self.pool * (int((self.down + drained) / self.timeout) + 3)

    def broken(self) -> list[str]:
        """Promises broken."""
        found = {"lost": self.lost, "bodies twice": self.twice, "bodies run unprotected": self.early}
        lines = [f"backlog: {times} {name}" for name, times in found.items() if times]
        copies = self.published - self.messages
        if copies > self.most_copies:
            lines.append(f"backlog: {copies} copies published, more than {self.most_copies}")
        return lines


def over_a_backlog(messages: int, down: float, timeout: float, *, drain: float, pool: int = 2) -> BacklogFigures:
    """Stop the store, queue that many messages, start it ``down`` seconds later, and wait until all have run."""
    figures = BacklogFigures(messages, pool, timeout)
    with servers() as (broker, store, tasks_for):
        tasks = tasks_for(idempotency_store_timeout=timeout)
        with tasks.worker(concurrency=pool) as worker, Memory(worker) as memory:
            warm(tasks, pool)
            figures.at_rest = memory.look()
            before = pushed(broker)
            stopped = time.monotonic()
            store.pause()
            send(tasks, messages)
            elapse(time.monotonic(), down, f"{messages} messages wait and the store is stopped")
            figures.early = bodies(tasks)
            store.resume()
            resumed = time.monotonic()
            figures.down = resumed - stopped
            with contextlib.suppress(AssertionError):
                wait_until(lambda: bodies(tasks) >= messages, drain, f"{messages} bodies", interval=0.2)
                figures.drained = time.monotonic() - resumed
                wait_until(lambda: waiting(broker, tasks) == 0, 90, "the queue and what is unacked empty")
            figures.published = pushed(broker) - before
        figures.memory = memory.most
        judge(figures, tasks)
        return figures


def judge(figures: BacklogFigures, tasks: TaskApp) -> None:
    """Count the lines the bodies and events wrote."""
    figures.words = counts(tasks)
    runs = Counter(message for word, message, _ in lines(tasks) if word == "start" and message.startswith("m"))
    figures.parked = figures.words["PARKED"]
    figures.lost = sum(1 for number in range(figures.messages) if f"m{number}" not in runs)
    figures.twice = sum(times - 1 for times in runs.values())


class Memory:
    """The largest resident size the whole worker had, its pool included, looked at five times a second."""

    def __init__(self, worker: WorkerProc) -> None:
        self.most = 0.0
        """In MB, the sum over main process and children, which counts shared pages once per process."""
        self._worker = worker
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, daemon=True)

    def look(self) -> float:
        """What it has now."""
        now = 0.0
        for pid in [self._worker.pid, *self._worker.children()]:
            with contextlib.suppress(psutil.Error):
                now += psutil.Process(pid).memory_info().rss / 1e6
        self.most = max(self.most, now)
        return now

    def _keep_looking(self) -> None:
        while not self._over.wait(0.2):
            self.look()

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)


@contextlib.contextmanager
def servers() -> Iterator[tuple[RedisServer, RedisServer, Any]]:
    """A Redis to be the broker, one to be the store, and what makes the app with some settings on them."""
    with contextlib.ExitStack() as stack:
        broker, store = stack.enter_context(RedisServer()), stack.enter_context(RedisServer())

        def tasks_for(**settings: Any) -> TaskApp:
            conf = {"idempotency_store": store.url, **settings}
            return stack.enter_context(TaskApp(SOURCE, broker=broker.url, settings=conf))

        yield broker, store, tasks_for


def warm(tasks: TaskApp, pool: int) -> None:
    """Let every child open its connections before the store stops."""
    for number in range(4 * pool):
        tasks.module.short.apply_async(task_id=f"warm{number}")
    wait_until(lambda: counts(tasks)["start"] == 4 * pool, 30, "the first bodies")


def send(tasks: TaskApp, messages: int) -> None:
    """Publish them over one connection."""
    with tasks.app.producer_or_acquire() as producer:
        for number in range(messages):
            tasks.module.short.apply_async(task_id=f"m{number}", producer=producer)


def pushed(broker: RedisServer) -> int:
    """How many messages were pushed into this broker's lists, by its own count."""
    with redis.Redis.from_url(broker.url, socket_timeout=20) as client:
        stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("lpush", "rpush"))


def waiting(broker: RedisServer, tasks: TaskApp) -> int:
    """Messages queued or delivered and not acked."""
    with redis.Redis.from_url(broker.url, socket_timeout=20) as client:
        return int(client.llen(tasks.queue)) + int(client.hlen("unacked"))


def elapse(since: float, seconds: float, what: str) -> None:
    """Let the clock, not a guess, say when that many seconds have passed."""
    progress(f"{what}: {max(0.0, since + seconds - time.monotonic()):.0f} s to go")
    wait_until(lambda: time.monotonic() >= since + seconds, seconds + 10, what)


def lines(tasks: TaskApp) -> list[tuple[str, str, float]]:
    """What bodies and events wrote: word, message, moment."""
    path = tasks.path("lines")
    split = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(word, message, float(at)) for word, message, at in split]


def counts(tasks: TaskApp) -> Counter[str]:
    """How often each word was written."""
    return Counter(word for word, _, _ in lines(tasks))


def bodies(tasks: TaskApp) -> int:
    """How many bodies of the backlog began."""
    return sum(1 for word, message, _ in lines(tasks) if word == "start" and message.startswith("m"))


def shortest(tasks: TaskApp) -> float:
    """Seconds of the shortest body that ended."""
    written = lines(tasks)
    began = {message: at for word, message, at in written if word == "start"}
    return min((at - began[message] for word, message, at in written if word == "end"), default=float("nan"))


def long_table(figures: LongFigures) -> str:
    """The table of the outage under running bodies."""
    header = ("store stopped s", "bodies", "shortest body s", "ran", "stopped", "completed", "renewals unanswered")
    words, row = figures.words, [figures.down, figures.bodies, figures.shortest]
    return table(header, [[*row, figures.starts, words["LEASE_LOST"], figures.succeeded, words["RENEW_FAILED"]]])


def backlog_table(figures: BacklogFigures) -> str:
    """The table of the outage over a backlog."""
    header = ("store stopped s", "messages", "published", "parked", "drained in s", "lost", "twice", "RSS MB", "before")
    row = [figures.down, figures.messages, figures.published, figures.parked, figures.drained, figures.lost]
    return table(header, [[*row, figures.twice, figures.memory, figures.at_rest]])


def main(argv: Sequence[str] | None = None) -> int:
    """Run both outages and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.outage", description=__doc__)
    parser.add_argument("--parts", default="long,backlog", help="long, backlog or both")
    parser.add_argument("--long-down", type=float, default=90, help="seconds the store is stopped under bodies (90)")
    parser.add_argument("--bodies", type=int, default=8, help="bodies that run meanwhile (8)")
    parser.add_argument("--lease", type=float, default=60, help="their lease in seconds (60)")
    parser.add_argument("--backlog-down", type=float, default=60, help="seconds it is stopped over a full queue (60)")
    parser.add_argument("--messages", type=int, default=10_000, help="messages in the backlog (10,000)")
    parser.add_argument("--store-timeout", type=float, default=5, help="idempotency_store_timeout there (5)")
    given = parser.parse_args(argv)
    printed, broken = [], []
    if "long" in given.parts:
        long = under_long_bodies(given.bodies, given.lease, given.long_down, at_least=given.long_down + 10)
        printed.append(long_table(long))
        broken += long.broken()
    if "backlog" in given.parts:
        drain = 120 + given.messages / 20
        backlog = over_a_backlog(given.messages, given.backlog_down, given.store_timeout, drain=drain)
        printed.append(backlog_table(backlog))
        broken += backlog.broken()
    return finish("The store stopped by SIGSTOP", "\n\n".join(printed), broken)


if __name__ == "__main__":
    sys.exit(main())
