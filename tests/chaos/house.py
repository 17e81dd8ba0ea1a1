"""One system under test: its broker and store behind proxies, its fleet of workers, and what must not be hurt.

Result backend and fenced resource are the steady ground: reached by Unix sockets, never faulted, also by a worker whose
network is cut. What Celery does when its result backend fails is not what is measured here.
"""

from __future__ import annotations

import base64
import contextlib
import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import redis

from tests.campaigns.kills import prepared
from tests.chaos import aof, recorder, resource
from tests.chaos.bodies import RESOURCE, SOURCE
from tests.chaos.history import History
from tests.chaos.netns import Namespace
from tests.support.chaos_proxy import ChaosProxy
from tests.support.processes import scratch_dir
from tests.support.services import PostgresServer, RabbitServer, RedisServer, Server
from tests.support.workers import TaskApp, WorkerProc

LEASE = 8.0
"""Seconds, of every claim."""
VISIBLE = 25.0
"""Seconds after which a Redis broker gives a message away: longer than the longest body, as it has to be."""
HEARTBEAT = 10
"""Seconds; RabbitMQ gives up on a silent worker after two."""
CLOCK = "CHAOS_CLOCK"

SHIFTED_CLOCK = """
import mmap, os, struct, time
if "CHAOS_CLOCK" in os.environ:
    with open(os.environ["CHAOS_CLOCK"], "r+b") as _file:
        _cell = mmap.mmap(_file.fileno(), 8)
    _real, _real_ns = time.time, time.time_ns
    time.time = lambda: _real() + struct.unpack("d", _cell[:8])[0]
    time.time_ns = lambda: _real_ns() + int(struct.unpack("d", _cell[:8])[0] * 1e9)
"""
"""The worker's ``sitecustomize``: its wall clock is the real one and what the storm wrote into a shared page."""


@dataclass(frozen=True)
class System:
    """What is compared."""

    name: str
    title: str
    broker: str
    store: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def idempotent(self) -> bool:
        """Whether it is celery_idem."""
        return self.store is not None


DEDUPLICATE = {"worker_deduplicate_successful_tasks": True}
SYSTEMS = [
    System("idem-redis", "celery_idem, Redis store, Redis broker", "redis", "redis"),
    System("idem-postgres", "celery_idem, PostgreSQL store, RabbitMQ broker", "rabbitmq", "postgresql"),
    System("bare-redis", "bare Celery, Redis broker", "redis"),
    System("bare-rabbit", "bare Celery, RabbitMQ broker", "rabbitmq"),
    System("dedup-redis", "Celery's own deduplication, Redis broker", "redis", None, DEDUPLICATE),
    System("dedup-rabbit", "Celery's own deduplication, RabbitMQ broker", "rabbitmq", None, DEDUPLICATE),
]

FLEET = (("prefork", 3), ("prefork", 2), ("threads", 3), ("gevent", 6), ("solo", 1))
"""Pools and their sizes; the first one that is not prefork gets the network namespace."""


class Steady:
    """The ground nobody hurts: results and resource."""

    def __init__(self) -> None:
        self._sockets = scratch_dir("ground", user="nobody" if os.geteuid() == 0 else None)
        self._results = RedisServer(options=["--unixsocket", str(self._sockets / "redis")])
        self._effects = PostgresServer(options=["-c", f"unix_socket_directories={self._sockets}"])

    def __enter__(self) -> Steady:
        self._results.start()
        self._effects.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._results.close()
        self._effects.close()

    def backend(self) -> str:
        """A result backend of its own for one system."""
        number = self._results.new_database().rpartition("/")[2]
        return f"redis+socket://{self._sockets / 'redis'}?virtual_host={number}"

    def resource(self) -> str:
        """A fenced resource of its own for one system."""
        name = self._effects.create_database().rpartition("/")[2]
        dsn = f"host={self._sockets} port={self._effects.port} user=postgres dbname={name}"
        resource.prepare(dsn)
        return dsn


@dataclass
class Hurt:
    """A server that is hurt, and the proxies the workers reach it by."""

    server: Server
    url: str
    proxies: list[ChaosProxy]
    busy: bool = False
    """Whether a fault is under way."""
    restarting: bool = False


class Slot:
    """A place in the fleet: whenever its worker is gone, the next one takes it."""

    def __init__(self, house: House, number: int, pool: str, concurrency: int, space: Namespace | None) -> None:
        self.pool, self.space = pool, space
        self.name = f"{pool}-{number}"
        self.busy = False
        """Whether a fault is under way that ends by itself."""
        self._house, self._concurrency = house, concurrency
        self._clock = house.tasks.path(f"{self.name}.clock")
        self._clock.write_bytes(struct.pack("d", 0.0))
        self.worker: WorkerProc = self._new()

    def _new(self) -> WorkerProc:
        house = self._house
        way = 0 if self.space is None else 1
        env = {recorder.RECORDED: str(house.history.path), RESOURCE: house.resource, CLOCK: str(self._clock)}
        env["CHAOS_BROKER"] = house.broker.proxies[way].url(house.broker.url)
        if house.store is not None:
            env["CHAOS_STORE"] = house.store.proxies[way].url(house.store.url)
        worker = house.tasks.worker(pool=self.pool, concurrency=self._concurrency, env=env, ready_within=90)
        worker._env[recorder.NAMED] = worker.name
        if self.space is not None:
            worker.argv = self.space.inside(worker.argv)
        return worker

    def start(self, *, wait: bool = False) -> None:
        """Put a new worker in this place."""
        self.worker = self._new()
        self.worker.start(wait=wait)

    def pids(self) -> list[int]:
        """Its processes, the main one first."""
        return [self.worker.pid, *self.worker.children()]

    def pause(self) -> None:
        """SIGSTOP all of it."""
        self.worker.pause()

    def resume(self) -> None:
        """SIGCONT all of it."""
        self.worker.resume()

    def step_clock(self, seconds: float) -> None:
        """Let its wall clock be that far off from now on."""
        with self._clock.open("r+b") as file, mmap.mmap(file.fileno(), 8) as cell:
            cell[:8] = struct.pack("d", seconds)


class House:
    """Broker, store, app and fleet of one system, and its history."""

    def __init__(self, system: System, steady: Steady, stack: contextlib.ExitStack, *, partitions: bool) -> None:
        self.system, self._stack = system, stack
        self.space = stack.enter_context(Namespace()) if partitions else None
        self.broker = self._hurt(self._broker())
        self.store = self._hurt(self._store()) if system.store else None
        self.resource = steady.resource()
        settings: dict[str, Any] = {"broker_heartbeat": HEARTBEAT, "result_expires": 86_400, **system.settings}
        settings["task_publish_retry_policy"] = {"max_retries": 300, "interval_start": 0, "interval_max": 0.5}
        way: dict[str, Any] = {"confirm_publish": True}
        if self._redis:
            # A sweeper that dies keeps all others from sweeping for five minutes, unless told otherwise.
            way = {"visibility_timeout": VISIBLE, "unacked_mutex_expire": 5}
        settings["broker_transport_options"] = way
        if self.store is not None:
            settings |= {"idempotency_store": self.store.url, "idempotency_lease": LEASE}
            settings["idempotency_max_deliveries"] = 100  # a storm kills one key more often than a crash loop should
        source = SOURCE.format(idempotent=system.idempotent)
        self.tasks = stack.enter_context(
            TaskApp(source, broker=self.broker.url, backend=steady.backend(), settings=settings)
        )
        self.tasks.path("sitecustomize.py").write_text(SHIFTED_CLOCK)
        self.history = History(self.tasks.path("history"), "harness")
        stack.callback(self.history.close)
        self.slots: list[Slot] = []

    @property
    def _redis(self) -> bool:
        return self.system.broker == "redis"

    def _broker(self) -> Server:
        return RedisServer(options=KEEPS_ALL) if self._redis else RabbitServer()

    def _store(self) -> Server:
        return RedisServer(options=KEEPS_ALL) if self.system.store == "redis" else PostgresServer(durable=True)

    def _hurt(self, server: Server) -> Hurt:
        self._stack.enter_context(server)
        url = prepared(server.url) if isinstance(server, PostgresServer) else server.url
        ways = [ChaosProxy.before(url)]
        if self.space is not None:
            ways.append(ChaosProxy.before(url, listen=self.space.host_address))
        for proxy in ways:
            self._stack.enter_context(proxy)
        return Hurt(server, url, ways)

    def staff(self, fleet: tuple[tuple[str, int], ...]) -> None:
        """Start the fleet and return when all of it is ready."""
        away = next((n for n, (pool, _) in enumerate(fleet) if pool != "prefork"), 0)
        for number, (pool, concurrency) in enumerate(fleet):
            self.slots.append(Slot(self, number, pool, concurrency, self.space if number == away else None))
            self.slots[-1].worker.start(wait=False)
        for slot in self.slots:
            slot.worker.wait_ready()

    def sweep(self) -> None:
        """Have a Redis broker give away what it may, as every worker does each 100 s; RabbitMQ does so by itself."""
        if self._redis:
            with self.tasks.app.connection_for_read() as connection:
                connection.default_channel.qos.restore_visible(interval=1)

    def waiting(self) -> int:
        """Messages in the queue, and on Redis also those delivered and not acked."""
        if self._redis:
            with redis.Redis.from_url(self.broker.url, socket_timeout=5) as client:
                return int(client.llen(self.tasks.queue)) + int(client.hlen("unacked"))
        with self.tasks.app.connection_for_read() as connection:
            return int(connection.default_channel.queue_declare(self.tasks.queue, passive=True).message_count)

    def note_what_is_left(self) -> None:
        """Write into the history which messages the broker still has, and would give away; and which vanished."""
        if not self._redis:
            return
        with redis.Redis.from_url(self.broker.url, socket_timeout=5) as client:
            queued = [(None, json.loads(raw)) for raw in client.lrange(self.tasks.queue, 0, -1)]
            held = [(tag, json.loads(raw)[0]) for tag, raw in client.hgetall("unacked").items()]
            for tag, message in queued + held:
                stuck = tag is not None and client.zscore("unacked_index", tag) is None
                (_, kwargs, _) = json.loads(base64.b64decode(message["body"]))
                self.history.write("left", key=kwargs.get("key"), id=message["headers"]["id"], stuck=stuck or None)
        for key, tag in aof.vanished(aof.read(self.broker.server.dir), self.tasks.queue):
            self.history.write("vanished", key=key, tag=tag)

    def note_records(self, records: dict[str, str]) -> None:
        """Write into the history what the store says about each record in the end; ``records`` names their keys."""
        if self.store is None:
            return
        from celery_idem.stores.base import open_store

        store = open_store(self.store.url)
        try:
            for record, key in records.items():
                found = store.get(record)
                if found is not None:
                    state = found.state.value
                    self.history.write("record", key=key, record=record, state=state, token=found.token)
        finally:
            store.close()


KEEPS_ALL = ("--appendonly", "yes", "--appendfsync", "always")
"""A Redis that is killed has kept whatever it confirmed."""


@contextlib.contextmanager
def house_of(system: System, steady: Steady, *, partitions: bool) -> Iterator[House]:
    """The system, running without a fleet; all of it is gone afterwards."""
    with contextlib.ExitStack() as stack:
        yield House(system, steady, stack, partitions=partitions)
