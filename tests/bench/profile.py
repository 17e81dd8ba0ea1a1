"""Where a message's time goes in the process that runs it: Celery's own tracer, layer upon layer, in one process.

Bare task; the library with a store that answers at once, so that only its own Python is left; the library on a real
store; a bare task whose body sends the store's two calls by the bare driver; and these two calls alone. They take
turns, message by message. The bare task with the two calls is the least that a library can cost which asks a store
before and after a body.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, signals
from celery.app.trace import build_tracer
from celery.utils import uuid

from celery_idem import IdempotentTask, publish
from celery_idem.app import runtime_of
from celery_idem.core.engine import new_token
from celery_idem.core.records import Answer, Claim, Decision, Ended
from celery_idem.stores.base import open_store
from tests.bench.floors import InHalves, RawPostgres, RawRedis
from tests.bench.page import MORE
from tests.campaigns.report import percentile, progress, table
from tests.support.operations import key_for
from tests.support.services import PostgresServer, RedisServer

MESSAGES, WARM_UP = 2000, 200
FLOORS = {"redis": RawRedis, "postgresql": RawPostgres}
HEARD = (signals.task_success, signals.task_postrun)
"""What the library listens to; a worker without it has nobody there."""


class AnswersAtOnce:
    """A store that grants every claim and completes it, without a word to anybody."""

    name = "none"

    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        """Granted."""
        return Decision(Answer.ACQUIRED, Claim(operation, 1, Answer.ACQUIRED, 1, lease, ttl))

    def complete(self, *_: Any) -> Ended:
        """Done."""
        return Ended.COMPLETED

    def purge(self, _limit: int) -> int:
        """Nothing expires."""
        return 0

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class Layer:
    """One of those that take turns: what it needs, what it does with that once, and what that took."""

    name: str
    prepare: Callable[[int], Any]
    step: Callable[[Any], None]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def turn(self, number: int) -> None:
        """Do it once, and note it unless it warms up."""
        given = self.prepare(number)
        cpu, wall = time.process_time(), time.perf_counter()
        self.step(given)
        taken = time.perf_counter() - wall, time.process_time() - cpu
        if number >= 0:
            self.wall.append(taken[0])
            self.cpu.append(taken[1])


def arriving(task: Any, number: int) -> tuple[str, dict[str, Any]]:
    """A message as a worker's child gets it."""
    message = uuid()
    headers: dict[str, Any] = {}
    if isinstance(task, IdempotentTask):
        policy = runtime_of(task.app).policy_of(task)
        headers = publish.stamped_headers(task, policy, (number,), {}, message, None, None)
    protocol = {"id": message, "task": task.name, "retries": 0, "root_id": message, "timelimit": [None, None]}
    info = {"exchange": "", "routing_key": "celery", "priority": 0, "redelivered": False}
    rest = {"args": [number], "kwargs": {}, "is_eager": False, "hostname": "bench", "delivery_info": info}
    return message, {**protocol, **headers, "headers": headers, **rest}


def returns(number: int) -> int:
    """The body."""
    return number


def asking(raw: InHalves) -> Callable[[int], int]:
    """The body, after a claim and before a completion by the bare driver."""

    def body(number: int) -> int:
        held = raw.claim(key_for(f"asked {number}"), new_token())
        raw.complete(held)
        return number

    return body


@contextlib.contextmanager
def tracer(title: str, results: str, store: Any, name: str, body: Callable[[int], int] = returns) -> Iterator[Layer]:
    """What runs one message of a task: bare where ``store`` is None, else on the store's URL or on the store itself."""
    app = Celery(name, broker="memory://", backend=results, set_as_current=False)
    options: dict[str, Any] = {"acks_late": True, "name": name, "shared": False}
    if store is not None:
        app.conf.idempotency_store = store if isinstance(store, str) else "memory://"
        options.update(base=IdempotentTask, key=["number"])

    app.task(**options)(body)
    app.finalize(auto=True)
    task = app.tasks[name]
    if store is not None and not isinstance(store, str):
        runtime_of(app)._store = store
    trace = build_tracer(name, task, app.loader, "bench", app=app)

    def step(arrived: tuple[str, dict[str, Any]]) -> None:
        message, request = arrived
        trace(message, request["args"], request["kwargs"], request)

    try:
        yield Layer(title, lambda number: arriving(task, number), step)
    finally:
        runtime_of(app).close()
        backend: Any = app.backend
        backend.client.connection_pool.disconnect()


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """As in a worker that never imported the library."""
    kept = [(signal.receivers, signal.receivers[:]) for signal in HEARD]
    for receivers, _ in kept:
        receivers[:] = []
    try:
        yield
    finally:
        for receivers, before in kept:
            receivers[:] = before


@contextlib.contextmanager
def layers_on(stores: Mapping[str, str], results: str) -> Iterator[list[Layer]]:
    """Every layer, ready."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(tracer("bare Celery", results, None, "bare"))]
        made.append(stack.enter_context(tracer("+ the library", results, AnswersAtOnce(), "instant")))
        for name, url in stores.items():
            opened = open_store(url)
            stack.callback(opened.close)
            opened.create_schema()
            made.append(stack.enter_context(tracer(f"+ the library on {name}", results, url, f"on_{name}")))
            raw: Any = FLOORS[name](url, opened)
            stack.callback(raw.close)
            title = f"bare Celery + {name}'s two calls"
            made.append(stack.enter_context(tracer(title, results, None, f"asks_{name}", asking(raw))))
            made.append(Layer(f"{name}'s two calls alone", _fresh, _spread(raw.first)))
        yield made


def _fresh(number: int) -> tuple[str, str]:
    return key_for(f"profile {number}"), new_token()


def _spread(first: Callable[[str, str], None]) -> Callable[[tuple[str, str]], None]:
    return lambda given: first(*given)


HEADER = ("one message, empty body", "p50 µs", "above bare", "processor µs", "above bare")


def rows_of(layers: list[Layer]) -> list[list[Any]]:
    """A line each: medians."""
    bare = [1e6 * percentile(taken, 0.5) for taken in (layers[0].wall, layers[0].cpu)]
    rows = []
    for layer in layers:
        wall, cpu = (1e6 * percentile(taken, 0.5) for taken in (layer.wall, layer.cpu))
        above = (wall, cpu) if "alone" in layer.name else (wall - bare[0], cpu - bare[1])
        rows.append([layer.name, f"{wall:.0f}", f"{above[0]:.0f}", f"{cpu:.0f}", f"{above[1]:.0f}"])
    return rows


def run(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The layers, and what even the bare driver would leave of bare Celery's rate."""
    messages = MESSAGES // 10 if arguments.quick else MESSAGES
    with RedisServer() as server, PostgresServer(durable=True) as postgres:
        stores = {"redis": server.new_database(), "postgresql": postgres.url}
        progress(f"profile: {messages} messages of each layer, in turn")
        with layers_on(stores, server.new_database()) as layers:
            gc.collect()
            for number in range(-WARM_UP, messages):
                for layer in layers[number % len(layers) :] + layers[: number % len(layers)]:
                    with unheard() if "bare" in layer.name else contextlib.nullcontext():
                        layer.turn(number)
    median = {layer.name: percentile(layer.wall, 0.5) for layer in layers}
    bare = median[layers[0].name]

    def left(name: str, more: float) -> str:
        return f"{(bare + more) / (median[name] + more):.2f}"

    said = "; ".join(
        f"on {name} {left(least, 0.0)} of the rate of an empty body and {left(least, 0.005)} of one of 5 ms, and the "
        f"library {left(ours, 0.0)} and {left(ours, 0.005)}"
        for name in stores
        for least, ours in ((f"bare Celery + {name}'s two calls", f"+ the library on {name}"),)
    )
    text = (
        "In one process, Celery's tracer with results in Redis, messages in turn. A bare task that sends the store's "
        f"two calls itself, by redis-py or psycopg2, is left this: {said}. So much can reach who asks a store before "
        "and after a body."
    )
    return f"{table(HEADER, rows_of(layers))}\n\n{MORE}\n\n{text}", []
