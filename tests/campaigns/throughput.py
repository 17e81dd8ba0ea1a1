"""Tasks per second of an idempotent task against the bare task: same worker, same queue length, runs in turn.

A worker of two processes (or eight threads) serves both tasks. For each run a queue of its own is filled while nobody
consumes it; then the worker is told to, and the clock runs from its first message taken to its last one acked. Broker,
results and, in the first table, the store are one private Redis.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import redis

from celery_idem.stores.base import open_store
from tests.campaigns.report import finish, progress, table
from tests.support.services import PostgresServer, RedisServer
from tests.support.workers import TaskApp, WorkerProc

AT_LEAST = 0.9
"""Idempotent over bare, medians, promised on a Redis store."""
POOLS = {"prefork": 2, "threads": 8}
BODIES = {"empty": 0.0, "5 ms": 0.005}
"""Seconds a body sleeps, as one that waits for a database or a service would."""
KINDS = ("bare", "idempotent")

SOURCE = """
import time
from celery_idem import IdempotentTask

@app.task(acks_late=True, reject_on_worker_lost=True)
def bare(seconds):
    if seconds:
        time.sleep(seconds)
    return seconds

@app.task(base=IdempotentTask)
def idempotent(seconds):
    if seconds:
        time.sleep(seconds)
    return seconds
"""


class Bench:
    """One app, one running worker, and the broker's own word on how far it is."""

    def __init__(self, broker: str, store: str, pool: str) -> None:
        settings = {"idempotency_store": store, "worker_prefetch_multiplier": 4}
        self.tasks = TaskApp(SOURCE, broker=broker, backend=broker, settings=settings)
        self.client = redis.Redis.from_url(broker)
        self.worker: WorkerProc = self.tasks.worker(pool=pool, concurrency=POOLS[pool], loglevel="WARNING")
        self.worker.ready_within = 60
        self._runs = 0

    def __enter__(self) -> Bench:
        self.worker.start(wait=False)
        reply: Any = None
        while not reply:
            reply = self.tasks.app.control.ping(timeout=1)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.tasks.close()

    def run(self, kind: str, messages: int, seconds: float) -> float:
        """Tasks per second of one run."""
        self._runs += 1
        queue = f"{kind}-{self._runs}"
        task = getattr(self.tasks.module, kind)
        with self.tasks.app.producer_pool.acquire(block=True) as producer:
            for _ in range(messages):
                task.apply_async((seconds,), queue=queue, producer=producer)
        self.tasks.app.control.add_consumer(queue, reply=False)
        began = self._when(lambda: self.client.llen(queue) < messages)
        ended = self._when(lambda: self.client.llen(queue) == 0 and self.client.hlen("unacked") == 0)
        self.tasks.app.control.cancel_consumer(queue, reply=False)
        return messages / (ended - began)

    def _when(self, reached: Any) -> float:
        deadline = time.monotonic() + 120
        while not reached():
            if time.monotonic() > deadline:
                raise AssertionError(f"the queue does not move:\n{self.worker.log_tail()}")
            time.sleep(0.005)
        return time.monotonic()


def measure(bench: Bench, messages: int, runs: int, seconds: float) -> dict[str, list[float]]:
    """Tasks per second of each kind; the first pair warms up, and who goes first changes every time."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(-1, runs):
        for kind in KINDS if number % 2 else reversed(KINDS):
            rate = bench.run(kind, messages, seconds)
            if number >= 0:
                rates[kind].append(rate)
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every pool, store and body, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.throughput", description=__doc__)
    parser.add_argument("--messages", type=int, default=3000, help="messages in a full queue (3000)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each kind, in turn (5)")
    parser.add_argument("--stores", default="redis,postgresql", help="some of redis,postgresql")
    parser.add_argument("--pools", default=",".join(POOLS), help=f"some of {','.join(POOLS)}")
    given = parser.parse_args(argv)
    rows: list[list[Any]] = []
    broken: list[str] = []
    with RedisServer() as broker, PostgresServer(durable=True) as postgres:
        for name in given.stores.split(","):
            store = open_store(broker.new_database() if name == "redis" else postgres.url)
            store.create_schema()
            url = broker.new_database() if name == "redis" else postgres.url
            store.close()
            for pool in given.pools.split(","):
                for body, seconds in BODIES.items():
                    progress(
                        f"{name}, {pool}, {body} body: {given.runs} runs of {given.messages} of each kind, in turn"
                    )
                    with Bench(broker.new_database(), url, pool) as bench:
                        rates = measure(bench, given.messages, given.runs, seconds)
                    bare, ours = (statistics.median(rates[kind]) for kind in KINDS)
                    rows.append([f"{name}, {pool} {POOLS[pool]}, {body}", f"{bare:.0f}", f"{ours:.0f}", ours / bare])
                    if name == "redis" and ours / bare < AT_LEAST:
                        broken.append(f"{name}, {pool}, {body}: {ours / bare:.2f} of the bare task, not {AT_LEAST}")
    header = ("store, pool, body", "bare tasks/s", "idempotent tasks/s", "ratio")
    return finish("Throughput from a full queue", table(header, rows), broken)


if __name__ == "__main__":
    sys.exit(main())
