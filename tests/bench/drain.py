"""A full queue drained by one worker: bare Celery, celery_idem on each store, and what else there is, in turn.

Every contestant has an app and a running worker of its own. For each run a queue is filled while nobody consumes it;
then that worker is told to, and the clock runs from its first message taken to its last result stored. Rounds go
through the contestants in random order. Broker, results and every store in Redis are one private server, and the
processor time is that of the worker's processes and of the servers, read from the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.bench import rivals
from tests.bench.page import MORE
from tests.campaigns.report import progress, table
from tests.support.processes import remove_dir, scratch_dir
from tests.support.services import PostgresServer, RedisServer
from tests.support.workers import TaskApp, WorkerProc

AT_LEAST = {"celery_idem, redis": 0.95, "celery_idem, postgresql": 0.85}
"""The goal, of bare Celery's tasks per second, where a scene promises it.

An empty body leaves two calls of a store no time to hide in, and eight threads share one interpreter: what they get is
said, and the profile says why.
"""
OF_LEAST = 0.7
"""The promise in every scene, of the rate of a bare task that sends our two calls itself."""
BARE = "bare, late acks"
WITHIN = 120.0
"""Seconds one run may take; longer is a fault."""
ROUNDS, MOST_ROUNDS, BUDGET = 3, 7, 90.0
"""Rounds of a scene: at least so many, then more until the seconds are spent."""


@dataclass(frozen=True)
class Scene:
    """One kind of worker and body."""

    title: str
    pool: str
    concurrency: int
    seconds: float
    messages: int
    promises: bool = False


SCENES = (
    Scene("prefork, 2 processes, empty body", "prefork", 2, 0.0, 1500),
    Scene("prefork, 2 processes, 5 ms body", "prefork", 2, 0.005, 900, promises=True),
    Scene("threads, 8, 5 ms body", "threads", 8, 0.005, 1500),
)


@dataclass
class Servers:
    """The private servers, and where a contestant keeps what."""

    broker: RedisServer
    postgres: PostgresServer
    directory: Path
    urls: dict[str, str] = field(default_factory=dict)
    runs: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers every run of every contestant, so that no key comes twice unless it should."""

    def store_url(self, store: str, name: str) -> str:
        """The store of a contestant: one for all scenes, for there are libraries that keep a process on their first."""
        if name not in self.urls:
            if store == "postgresql":
                self.urls[name] = self.postgres.create_database()
            elif store == "sqlite":
                self.urls[name] = f"sqlite:///{self.directory}/store.db"
            else:
                self.urls[name] = self.broker.new_database()
        return self.urls[name]

    def processes(self) -> list[psutil.Process]:
        """The main process of every server that is ours."""
        return [psutil.Process(server.pid) for server in (self.broker, self.postgres) if server.private]


@dataclass
class Run:
    """What one run came to; seconds, and processor seconds by whose they are."""

    messages: int
    publish: float
    wall: float
    main: float
    children: float
    servers: float

    @property
    def rate(self) -> float:
        """Messages per second of draining."""
        return self.messages / self.wall


class Out(Exception):
    """Why a run does not count."""

    def __init__(self, word: str, more: str) -> None:
        super().__init__(f"{word}: {more}")
        self.word = word


@dataclass
class Contestant:
    """One app, its running worker, and the servers' own word on how far it is."""

    name: str
    tasks: TaskApp
    worker: WorkerProc
    servers: Servers
    results: str
    done: list[Run] = field(default_factory=list)
    turns: int = 0
    out: str = ""
    """How a run of it went wrong: another library is out then, and the table says this word in place of its numbers."""

    def run(self, messages: int, seconds: float, duplicates: float = 0.0) -> Run:
        """Fill a queue, drain it, and say what it took.

        Args:
            messages: how many calls are made; who refuses duplicates when they are sent drains fewer.
            seconds: how long each body sleeps.
            duplicates: the share of calls whose key was in the queue before.
        """
        self.turns += 1
        queue = f"{self.tasks.name}-{self.turns}"
        keys = keys_of(messages, duplicates, first=next(self.servers.runs) * 1_000_000)
        client, results = (redis.Redis.from_url(url) for url in (self.tasks.broker, self.results))
        with contextlib.closing(client), contextlib.closing(results):
            results.flushdb()
            began = time.monotonic()
            sent = self._publish(keys, seconds, queue)
            publish = time.monotonic() - began
            before = self._spent()
            self.tasks.app.control.add_consumer(queue, reply=False, destination=[self._node])
            first = self._when(lambda: client.llen(queue) < sent, 0.002)
            last = self._when(lambda: results.dbsize() >= sent, 0.02)
            after = self._spent()
            failed = sum(b'"SUCCESS"' not in stored for stored in results.mget(results.keys()) if stored)
            if failed:
                raise Out("failed", f"{self.name}: {failed} of {sent} tasks:\n{self.worker.log_tail()}")
            self._when(lambda: client.hlen("unacked") == 0, 0.02)
            self.tasks.app.control.cancel_consumer(queue, reply=False, destination=[self._node])
            results.flushdb()
        return Run(messages, publish, last - first, *(b - a for a, b in zip(before, after, strict=True)))

    @property
    def _node(self) -> str:
        return f"{self.worker.name}@localhost"

    def _publish(self, keys: Sequence[int], seconds: float, queue: str) -> int:
        task, ids = self.tasks.module.task, set()
        with self.tasks.app.producer_pool.acquire(block=True) as producer:
            for key in keys:
                result = task.apply_async((key, seconds), queue=queue, producer=producer)
                if result is not None and result.id is not None:
                    ids.add(result.id)
        return len(ids)

    def _spent(self) -> tuple[float, float, float]:
        main = psutil.Process(self.worker.pid)
        children = sum(_seconds(child) for child in main.children(recursive=True))
        servers = self.servers.processes()
        spent = sum(_seconds(server, ended=True) for server in servers)
        spent += sum(_seconds(child) for server in servers for child in server.children(recursive=True))
        return _seconds(main), children, spent

    def _when(self, reached: Any, pause: float) -> float:
        deadline = time.monotonic() + WITHIN
        while not reached():
            if time.monotonic() > deadline:
                raise Out("stalled", f"{self.name}'s queue does not move:\n{self.worker.log_tail()}")
            time.sleep(pause)
        return time.monotonic()


def keys_of(messages: int, duplicates: float, *, first: int) -> list[int]:
    """The calls' keys: every original once, the duplicates drawn among them and in between."""
    originals = max(1, round(messages * (1 - duplicates)))
    keys = [first + number for number in range(originals)]
    draw = random.Random(first)
    keys += [draw.choice(keys) for _ in range(messages - originals)]
    draw.shuffle(keys)
    return keys


def _seconds(process: psutil.Process, *, ended: bool = False) -> float:
    """Processor time of a process; with ``ended`` that of its children who are no more, such as a closed backend."""
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        parts = [times.user, times.system, *([times.children_user, times.children_system] if ended else [])]
        return float(sum(parts))
    return 0.0


@contextlib.contextmanager
def contestants(servers: Servers, names: Sequence[str], pool: str, concurrency: int) -> Iterator[list[Contestant]]:
    """Their apps with a worker each, all ready."""
    with contextlib.ExitStack() as stack:
        made = []
        for number, name in enumerate(names):
            entry = rivals.ENTRIES[name]
            broker, results = servers.broker.new_database(), servers.broker.new_database()
            store = entry.prepare(servers.store_url(entry.store, name)) if entry.store else ""
            settings = {"worker_prefetch_multiplier": 4, "task_acks_late": False, **entry.settings(store)}
            tasks = stack.enter_context(
                TaskApp(entry.source.replace("STORE", store), broker=broker, backend=results, settings=settings)
            )
            worker = tasks.worker(
                pool=pool, concurrency=concurrency, loglevel="WARNING", queues=[f"idle-{number}"], ready_within=90
            )
            worker.start(wait=False)
            made.append(Contestant(name, tasks, worker, servers, results))
        for contestant in made:
            reply: Any = None
            deadline = time.monotonic() + 90
            while not reply:
                if time.monotonic() > deadline or not contestant.worker.alive:
                    raise AssertionError(f"{contestant.name} does not start:\n{contestant.worker.log_tail()}")
                reply = contestant.tasks.app.control.ping(timeout=1, destination=[contestant._node])
        yield made


def measure(made: Sequence[Contestant], scene: Scene, messages: int, budget: float) -> None:
    """Everybody in each round, in an order drawn anew; the first round only warms up."""
    draw, until = random.Random(scene.title), time.monotonic() + budget
    for number in range(-1, MOST_ROUNDS):
        if number >= ROUNDS and time.monotonic() > until:
            break
        for contestant in draw.sample(list(made), len(made)):
            run = counted(contestant, messages if number >= 0 else messages // 5, scene.seconds)
            if run and number >= 0:
                contestant.done.append(run)


def counted(contestant: Contestant, messages: int, seconds: float, duplicates: float = 0.0) -> Run | None:
    """One run; None, now and from now on, where another library's went wrong. Ours ends the bench."""
    if contestant.out:
        return None
    try:
        return contestant.run(messages, seconds, duplicates)
    except Out as out:
        if contestant.name in rivals.OURS:
            raise
        contestant.out = out.word
        progress(str(out))
        return None


HEADER = (
    "",
    "tasks/s",
    "of bare",
    "sent and drained, of bare",
    "send µs",
    "main µs",
    "pool µs",
    "servers µs",
    "CPU, of bare",
)


def rows_of(made: Sequence[Contestant]) -> list[list[Any]]:
    """A line each: medians, and the median over the rounds of the shares of the bare task's rate."""
    bare = next(contestant for contestant in made if contestant.name == BARE)
    rows = []
    for contestant in made:
        if contestant.out:
            rows.append([contestant.name, *([contestant.out] * (len(HEADER) - 1))])
            continue
        pairs = list(zip(contestant.done, bare.done, strict=True))
        drained = statistics.median(run.rate / other.rate for run, other in pairs)
        both = statistics.median((other.publish + other.wall) / (run.publish + run.wall) for run, other in pairs)
        micro = [f"{1e6 * value:.0f}" for value in spent_of(contestant)]
        sums = sum(spent_of(contestant)[1:]) / max(sum(spent_of(bare)[1:]), 1e-9)
        rate = statistics.median(run.rate for run in contestant.done)
        rows.append([contestant.name, f"{rate:.0f}", drained, both, *micro, sums])
    return rows


def spent_of(contestant: Contestant) -> tuple[float, float, float, float]:
    """Seconds per message: to publish it, and processor time of the worker's main process, its pool, the servers."""
    runs = contestant.done

    def median(name: str) -> float:
        return float(statistics.median(getattr(run, name) / run.messages for run in runs))

    return median("publish"), median("main"), median("children"), median("servers")


def judged(scene: Scene, rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[str]]:
    """The promises this scene broke, and the goals that asking a store twice already puts out of reach.

    Such a goal is missed by a bare task too that sends our two calls and does nothing else.
    """
    finished = [row for row in rows if not isinstance(row[2], str)]
    shares, sent = {row[0]: row[2] for row in finished}, {row[0]: row[3] for row in finished}
    missed: list[tuple[str, float, float]] = []
    for ours, goal in AT_LEAST.items():
        if scene.promises and ours in shares and shares[ours] < goal:
            said = f"{ours} drains at {shares[ours]:.2f} of bare Celery, not {goal}"
            missed.append((said, _least(ours, shares), goal))
    for ours, theirs in rivals.COMPARABLE:
        by = sent if theirs in rivals.WHEN_SENT else shares
        if ours in by and theirs in by and by[ours] <= by[theirs]:
            said = f"{ours} ({by[ours]:.2f}) is behind {theirs} ({by[theirs]:.2f})"
            missed.append((said, _least(ours, by), by[theirs]))
    broken = [f"{scene.title}: {said}" for said, least, goal in missed if least > goal]
    beyond = [
        f"{scene.title}: {said}; its two calls alone leave {least:.2f}" for said, least, goal in missed if least <= goal
    ]
    for ours, alone in ((ours, shares[least]) for ours, least in rivals.LEAST.items() if {ours, least} <= set(shares)):
        if shares[ours] < OF_LEAST * alone:
            broken.append(f"{scene.title}: {ours} drains at {shares[ours]:.2f}, its two calls alone at {alone:.2f}")
    return broken, beyond


def _least(ours: str, by: Mapping[str, float]) -> float:
    return by.get(rivals.LEAST[ours], math.inf)


# --- duplicates -------------------------------------------------------------------------------------------------------

SHARES = (0.0, 0.3, 0.6, 0.9)
ALIKE = {"bare, default acks", "celery_idem, sqlite", "idemkit, postgresql", *rivals.LEAST.values()}
"""Left out where duplicates grow: another line shows the same, or they know none."""


def duplicates_table(made: Sequence[Contestant], messages: int, seconds: float) -> str:
    """Calls per second, sent and drained, as the share of duplicates among them grows."""
    present = [contestant for contestant in made if contestant.name not in ALIKE and not contestant.out]
    rows = {contestant.name: [contestant.name] for contestant in present}
    for share in SHARES:
        for contestant in random.Random(share).sample(present, len(present)):
            run = counted(contestant, messages, seconds, share)
            rows[contestant.name].append(f"{messages / (run.publish + run.wall):.0f}" if run else contestant.out)
    header = ("calls/s, sent and drained", *(f"{share:.0%} duplicates" for share in SHARES))
    return table(header, list(rows.values()))


# --- all of it --------------------------------------------------------------------------------------------------------


def setup_of(servers: Servers) -> str:
    """What every contestant ran on."""
    with contextlib.closing(redis.Redis.from_url(servers.broker.url)) as client:
        version = client.info("server")["redis_version"]
    show = servers.postgres.execute
    libraries = ", ".join(f"{name} {metadata.version(name)}" for name in ("celery", "kombu", "redis"))
    return (
        f"The same for all: {libraries}; Redis {version} without persistence (broker, results, and every store that is "
        f"in Redis); PostgreSQL {show('SHOW server_version').split()[0]} with fsync={show('SHOW fsync')}, "
        f"synchronous_commit={show('SHOW synchronous_commit')}; SQLite as celery_idem opens it; prefetch 4, results "
        f"kept. {rivals.versions()}"
    )


def run(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Every scene, its table and promises; then duplicates."""
    names = rivals.OURS if arguments.quick else rivals.installed()
    printed: list[str] = []
    broken: list[str] = []
    beyond: list[str] = []
    shares: dict[str, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        directory = scratch_dir("bench")
        stack.callback(remove_dir, directory)
        broker, postgres = stack.enter_context(RedisServer()), stack.enter_context(PostgresServer(durable=True))
        servers = Servers(broker, postgres, directory)
        for scene in SCENES:
            messages = scene.messages // 10 if arguments.quick else scene.messages
            progress(f"drain: {scene.title}, {messages} messages each, {len(names)} in turn")
            with contestants(servers, names, scene.pool, scene.concurrency) as made:
                measure(made, scene, messages, 0.0 if arguments.quick else BUDGET)
                rows = rows_of(made)
                rounds = f"{len(made[0].done)} rounds of {messages} messages"
                printed.append(f"**{scene.title}**\n\n{rounds}:\n\n{table(HEADER, rows)}")
                shares[scene.title] = {row[0]: row[2] for row in rows}
                found = judged(scene, rows)
                broken += found[0]
                beyond += found[1]
                if scene is SCENES[1]:
                    progress("drain: duplicates")
                    duplicated = duplicates_table(made, messages // 2, scene.seconds)
                    printed.append(f"**Duplicates, {scene.title}**\n\n{duplicated}")
        short = [table(("drained, of bare", *shares), [[name, *(shares[s][name] for s in shares)] for name in names])]
        if beyond:
            short.append("Goals out of reach of whoever asks a store twice, here:")
            short.append("\n".join(f"- {line}" for line in beyond))
        printed = [*short, MORE, setup_of(servers), *printed]
    return "\n\n".join(printed), broken
