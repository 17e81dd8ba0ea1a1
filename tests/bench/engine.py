"""What one call of store and engine costs over the raw floor, in the same run.

Floor, store and engine take turns, iteration by iteration, so a change of the machine's speed meets all of them alike;
from a fresh key and token on, all is on the clock. What is left above the floor is then told by function.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_idem.core.engine import Engine, new_token
from celery_idem.core.local_cache import LocalCache
from celery_idem.core.policy import Policy
from celery_idem.core.records import Claim, Renewal, Status
from celery_idem.stores.base import Store, open_store
from tests.bench.floors import Floor, floor_of
from tests.bench.functions import left_above
from tests.bench.page import MORE
from tests.bench.steps import LEASE, TTL, Step, engine_run, operation, store_first, store_replay
from tests.campaigns.report import percentile, progress, table
from tests.support.operations import key_for
from tests.support.processes import remove_dir, scratch_dir
from tests.support.services import PostgresServer, RedisServer

AT_MOST = 1.3
"""Median over the floor's median that is promised for ``PROMISED``."""
PROMISED = ("redis", "postgresql", "postgresql, fsync")
SERVERS = (*PROMISED, "postgresql, psycopg 3", "sqlite", "memory")
WARM_UP = 300
MANY = 100
"""Claims of one renewal."""


# --- taking turns -----------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """One of the three that take turns: its steps, and seconds passed and of the processor that each took."""

    name: str
    first: Step
    replay: Step
    firsts: list[tuple[float, float]] = field(default_factory=list)
    replays: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Place:
    """One private server with a store and an engine on it."""

    server: str
    store: Store
    engine: Engine
    floor: Floor

    def layers(self) -> list[Layer]:
        """The floor, the store and the engine."""
        return [
            Layer("floor", self.floor.first, self.floor.replay),
            Layer("store", store_first(self.store), store_replay(self.store)),
            Layer("engine", engine_run(self.engine, Status.EXECUTED), engine_run(self.engine, Status.REPLAYED)),
        ]


@contextlib.contextmanager
def place_on(server: str) -> Iterator[Place]:
    """A private server, and a store and an engine on it."""
    with contextlib.ExitStack() as stack:
        url = _url(server, stack)
        store = open_store(url)
        stack.callback(store.close)
        store.create_schema()
        engine = Engine(store, Policy(lease=LEASE, ttl=TTL))
        stack.callback(engine.heartbeat.stop)
        floor = floor_of(url, store)
        stack.callback(floor.close)
        yield Place(server, store, engine, floor)


def _url(server: str, stack: contextlib.ExitStack) -> str:
    if server == "memory":
        return "memory://"
    if server == "sqlite":
        directory = scratch_dir("bench-")
        stack.callback(remove_dir, directory)
        return f"sqlite:///{directory}/records.db"
    running: RedisServer | PostgresServer
    running = RedisServer() if server == "redis" else PostgresServer(durable=server.endswith("fsync"))
    url = stack.enter_context(running).url
    return url.replace("+psycopg2:", "+psycopg:") if server.endswith("psycopg 3") else url


def measure(layers: Sequence[Layer], iterations: int, server: str) -> None:
    """Warm up, then let the layers take turns: a first run each, a replay each."""
    with _no_garbage():
        for number in range(-min(WARM_UP, iterations), iterations):
            for layer in turned(layers, number):
                key = key_for(f"{server} {layer.name} {number}")
                tokens = new_token(), new_token()
                first, replay = clocked(layer.first, key, tokens[0]), clocked(layer.replay, key, tokens[1])
                if number >= 0:
                    layer.firsts.append(first)
                    layer.replays.append(replay)


def turned(layers: Sequence[Any], number: int) -> Sequence[Any]:
    """The layers, another one first each time, so that none always follows the same other."""
    by = number % len(layers)
    return [*layers[by:], *layers[:by]]


def timed(step: Callable[..., object], *args: Any) -> float:
    """Seconds one step took."""
    began = time.perf_counter()
    step(*args)
    return time.perf_counter() - began


def clocked(step: Step, key: str, token: str) -> tuple[float, float]:
    """Seconds one step took, and seconds of the processor in this thread."""
    worked = time.thread_time()
    passed = timed(step, key, token)
    return passed, time.thread_time() - worked


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """What was there before is not looked at by the collector, which goes on for what comes."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def rows_of(server: str, layers: Sequence[Layer]) -> tuple[list[list[Any]], list[str]]:
    """Lines of the table, and the promises broken."""
    rows, broken = [], []
    for what, title in (("firsts", "claim + complete"), ("replays", "replay")):
        taken = [[(1e6 * passed, 1e6 * worked) for passed, worked in getattr(layer, what)] for layer in layers]
        half, late = ([percentile([passed for passed, _ in each], share) for each in taken] for share in (0.5, 0.99))
        work = [percentile([worked for _, worked in each], 0.5) for each in taken]
        ratio = half[2] / half[0]
        cells = [f"{each:.0f}" for each in (*half, *late, *work)]
        rows.append([f"{server}: {title}", *cells[:3], half[1] / half[0], ratio, *cells[3:]])
        if server in PROMISED and ratio > AT_MOST:
            broken.append(f"{server}, {title}: the engine takes {ratio:.2f} times the floor, not {AT_MOST}")
    return rows, broken


# --- what else a call costs -------------------------------------------------------------------------------------------


def others(place: Place, times: int) -> list[Any]:
    """A line: a replay out of the local cache, and a renewal of many claims beside its floor."""
    cached = Engine(place.store, Policy(lease=LEASE, ttl=TTL), heartbeat=place.engine.heartbeat, cache=LocalCache(10))
    replay, key = engine_run(cached, Status.REPLAYED), key_for(f"{place.server} cached")
    engine_run(cached, Status.EXECUTED)(key, new_token())
    local = [timed(replay, key, new_token()) for _ in range(10 * times)][times:]
    ours, theirs = (held(place.store, f"{place.server} {name}", MANY) for name in ("ours", "theirs"))
    floor = place.floor.renewal(place.store, theirs)
    seconds: tuple[list[float], list[float]] = [], []
    for number in range(times):
        for which, step in turned([(0, floor), (1, lambda: renew(place.store, ours))], number):
            seconds[which].append(timed(step))
    renewal = [1000 * percentile(each, 0.5) for each in seconds]
    micro = f"{1e6 * percentile(local, 0.5):.0f}"
    return [place.server, micro, *(f"{each:.1f}" for each in renewal), renewal[1] / renewal[0]]


def held(store: Store, name: str, many: int) -> list[Claim]:
    """So many claims, not completed."""
    claims = []
    for number in range(many):
        claim = store.claim(operation(key_for(f"{name} {number}"), new_token()), lease=LEASE, ttl=TTL).claim
        assert claim is not None
        claims.append(claim)
    return claims


def renew(store: Store, claims: Sequence[Claim]) -> None:
    """Renew them all."""
    assert set(store.renew(claims).values()) == {Renewal.RENEWED}


def run(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The tables of every server, and the promises broken."""
    iterations = 300 if arguments.quick else 4000
    rows: list[list[Any]] = []
    more: list[list[Any]] = []
    broken: list[str] = []
    profiles: list[str] = []
    for server in SERVERS:
        progress(f"{server}: {iterations} iterations of floor, store and engine in turn")
        with place_on(server) as place:
            layers = place.layers()
            measure(layers, iterations, server)
            measured = rows_of(server, layers)
            rows += measured[0]
            broken += measured[1]
            more.append(others(place, 10 if arguments.quick else 100))
            if server in PROMISED[:2]:
                profiles.append(left_above(server, layers[2].first, layers[2].replay, iterations // 4))
    layered = ("floor", "store", "engine")
    header = ("µs", *(f"{name} p50" for name in layered), "store / floor", "engine / floor")
    header += (*(f"{name} p99" for name in layered), *(f"{name} processor" for name in layered))
    second = ("", "local replay µs", f"floor, renew {MANY} ms", "store ms", "store / floor")
    text = f"### Cost over the raw floor\n\n{table(header, rows)}\n\n{MORE}\n\n{table(second, more)}\n\n"
    return text + "\n\n".join(profiles), broken
