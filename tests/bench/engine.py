"""What the library costs over the raw floor: its own scripts and statements sent by the bare driver.

One run of the store is recorded as the server gets it; the floor sends the same script with the same arguments through
a bare redis-py client, and the same SQL with the same parameters through a bare psycopg2 cursor in autocommit mode,
for a fresh key and token each time; from there on, all is on the clock. Floor, store and engine take turns, iteration
by iteration, so a change of the machine's speed meets all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg2
import redis

from celery_idem.core.codec import encode_value
from celery_idem.core.engine import Engine, new_token
from celery_idem.core.holder import current as this_process
from celery_idem.core.policy import Policy
from celery_idem.core.records import Answer, Delivery, Ended, Kind, Operation, Outcome, Status
from celery_idem.stores.base import Store, open_store
from celery_idem.stores.redis.scripts import script
from celery_idem.stores.sql.database import Call
from tests.campaigns.report import percentile, progress, table
from tests.support.operations import key_for
from tests.support.services import PostgresServer, RedisServer

AT_MOST = 1.5
"""Median over the floor's median that is promised."""
LEASE, TTL = 60.0, 86_400.0
VALUE = {"order": 1, "paid": 50, "receipt": "r" * 150}
"""A result of about 200 bytes."""
FINGERPRINT = key_for("arguments")
WARM_UP = 300
SERVERS = ("redis", "postgresql", "postgresql-fsync")

Step = Callable[[str, str], None]
"""One first run, or one replay, of an effective key under a token."""


def operation(key: str, token: str) -> Operation:
    """What a task's delivery claims."""
    return Operation(
        key=key,
        delivery=Delivery(key[:36]),
        token=token,
        holder=this_process(),
        task="shop.charge",
        namespace="shop",
        fingerprint=FINGERPRINT,
    )


# --- the raw floor ----------------------------------------------------------------------------------------------------


class RawRedis:
    """The scripts, by EVALSHA through a bare client."""

    def __init__(self, url: str, store: Any) -> None:
        self.client = redis.Redis.from_url(url, socket_timeout=5)
        self.prefix = store._prefix
        sent: list[tuple[Any, str, Sequence[Any]]] = []
        run = store.wire.run
        store.wire.run = lambda name, key, args: sent.append((name, key, args)) or run(name, key, args)
        store_first(store)(key_for("recorded"), new_token())
        del store.wire.run
        (self.claim, _, self.claim_args), (self.complete, _, self.complete_args) = sent
        assert self.claim == script("claim")

    def first(self, key: str, token: str) -> None:
        """Claim and complete."""
        name = self.prefix + key
        fence = self.client.evalsha(self.claim.sha, 1, name, *self._with(self.claim_args, key, token))[3]
        args = self._with(self.complete_args, key, token)
        args[7] = fence
        assert self.client.evalsha(self.complete.sha, 1, name, *args) == b"COMPLETED"

    def replay(self, key: str, token: str) -> None:
        """Claim what is completed."""
        reply = self.client.evalsha(self.claim.sha, 1, self.prefix + key, *self._with(self.claim_args, key, token))
        assert reply[0] == b"COMPLETED"

    @staticmethod
    def _with(args: Sequence[Any], key: str, token: str) -> list[Any]:
        changed = list(args)
        changed[1], changed[2] = token, key[:36]
        return changed

    def close(self) -> None:
        """Give the connection back."""
        self.client.close()


class RawPostgres:
    """The statements, through a bare cursor."""

    def __init__(self, url: str, store: Any) -> None:
        self.connection = psycopg2.connect(urlunsplit(urlsplit(url)._replace(scheme="postgresql")))
        self.connection.autocommit = True
        self.cursor = self.connection.cursor()
        sent: list[tuple[str, dict[str, Any]]] = []
        execute = Call.execute

        def recorded(call: Call, name: str, params: dict[str, Any]) -> Any:
            sent.append((name, dict(params)))
            return execute(call, name, params)

        Call.execute = recorded  # type: ignore[method-assign]
        try:
            store_first(store)(key_for("recorded"), new_token())
        finally:
            Call.execute = execute  # type: ignore[method-assign]
        (claim, self.claim_params), (end, self.end_params) = sent
        texts = store._database.statements
        self.claim, self.end = texts[claim].text, texts[end].text

    def _claimed(self, key: str, token: str) -> Any:
        params = {**self.claim_params, "key": key, "new_key": key, "new_token": token, "new_message_id": key[:36]}
        self.cursor.execute(self.claim, params)
        (row,) = self.cursor.fetchall()
        return row

    def first(self, key: str, token: str) -> None:
        """Claim and complete."""
        row = self._claimed(key, token)  # of a row it inserted the statement answers the clock, which is its rev
        rev = int(row[-2] * 1_000_000)
        self.cursor.execute(self.end, {**self.end_params, "key": key, "seen_rev": rev, "seen_token": token})
        assert len(self.cursor.fetchall()) == 1

    def replay(self, key: str, token: str) -> None:
        """Claim what is completed."""
        assert self._claimed(key, token)[2] == "COMPLETED"

    def close(self) -> None:
        """Give the connection back."""
        self.connection.close()


# --- the library ------------------------------------------------------------------------------------------------------


def store_first(store: Store) -> Step:
    """Claim and complete through the store object."""
    outcome = Outcome(Kind.RESULT, encode_value(VALUE, "json", max_bytes=10_000))

    def first(key: str, token: str) -> None:
        claim = store.claim(operation(key, token), lease=LEASE, ttl=TTL).claim
        assert claim is not None
        assert store.complete(claim, outcome) is Ended.COMPLETED

    return first


def store_replay(store: Store) -> Step:
    """Claim what is completed through the store object."""

    def replay(key: str, token: str) -> None:
        assert store.claim(operation(key, token), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED

    return replay


def engine_run(engine: Engine, status: Status) -> Step:
    """A whole delivery through the engine, with a body that returns ``VALUE``."""

    def run(key: str, token: str) -> None:
        result = engine.run(operation(key, token), lambda context: VALUE)
        assert result.status is status
        assert result.value == VALUE

    return run


# --- taking turns -----------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """One of the three that take turns: its steps and the seconds they took."""

    name: str
    first: Step
    replay: Step
    firsts: list[float] = field(default_factory=list)
    replays: list[float] = field(default_factory=list)


def measure(layers: Sequence[Layer], iterations: int, server: str) -> None:
    """Warm up, then let the layers take turns: a first run each, a replay each."""
    gc.collect()
    gc.freeze()
    try:
        for number in range(-WARM_UP, iterations):
            for layer in turned(layers, number):
                key = key_for(f"{server} {layer.name} {number}")
                tokens = new_token(), new_token()
                first, replay = timed(layer.first, key, tokens[0]), timed(layer.replay, key, tokens[1])
                if number >= 0:
                    layer.firsts.append(first)
                    layer.replays.append(replay)
    finally:
        gc.unfreeze()


def turned(layers: Sequence[Layer], number: int) -> Sequence[Layer]:
    """The layers, another one first each time, so that none always follows the same other."""
    by = number % len(layers)
    return [*layers[by:], *layers[:by]]


def timed(step: Step, key: str, token: str) -> float:
    """Seconds one step took."""
    began = time.perf_counter()
    step(key, token)
    return time.perf_counter() - began


@contextlib.contextmanager
def layers_on(server: str) -> Iterator[list[Layer]]:
    """The floor, the store and the engine on one private server."""
    with contextlib.ExitStack() as stack:
        running: RedisServer | PostgresServer = (
            RedisServer() if server == "redis" else PostgresServer(durable=server.endswith("fsync"))
        )
        url = stack.enter_context(running).url
        store = open_store(url)
        stack.callback(store.close)
        store.create_schema()
        engine = Engine(store, Policy(lease=LEASE, ttl=TTL))
        stack.callback(engine.heartbeat.stop)
        raw: Any = RawRedis(url, store) if server == "redis" else RawPostgres(url, store)
        stack.callback(raw.close)
        yield [
            Layer("floor", raw.first, raw.replay),
            Layer("store", store_first(store), store_replay(store)),
            Layer("engine", engine_run(engine, Status.EXECUTED), engine_run(engine, Status.REPLAYED)),
        ]


def rows_of(server: str, layers: Sequence[Layer]) -> tuple[list[list[Any]], list[str]]:
    """Lines of the table, and the promises broken."""
    rows, broken = [], []
    for what in ("firsts", "replays"):
        floor = percentile(getattr(layers[0], what), 0.5)
        title = "first run" if what == "firsts" else "replay"
        for layer in layers:
            seconds = getattr(layer, what)
            median, ratio = percentile(seconds, 0.5), percentile(seconds, 0.5) / floor
            micro = [f"{1e6 * value:.0f}" for value in (median, percentile(seconds, 0.95))]
            rows.append([f"{server}, {title}, {layer.name}", *micro, ratio])
            if ratio > AT_MOST:
                broken.append(f"{server}, {title}: {layer.name} takes {ratio:.2f} times the floor, not {AT_MOST}")
    return rows, broken


def run(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """The table of every server, and the promises broken."""
    iterations = 400 if arguments.quick else 4000
    rows: list[list[Any]] = []
    broken: list[str] = []
    for server in SERVERS:
        progress(f"{server}: {iterations} iterations of floor, store and engine in turn")
        with layers_on(server) as layers:
            measure(layers, iterations, server)
        measured = rows_of(server, layers)
        rows += measured[0]
        broken += measured[1]
    header = ("server, what, through", "p50 µs", "p95 µs", "p50 / floor")
    return f"### Cost over the raw floor\n\n{table(header, rows)}", broken
