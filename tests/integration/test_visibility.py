"""A message a live worker holds is not given to another one, though Redis would; a dead worker's message is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import redis
from kombu import Connection, Queue

from celery_idem.visibility import Keeper
from tests.support.chaos_proxy import ChaosProxy
from tests.support.processes import LOOPBACK, Process, free_port, listening, remove_dir, scratch_dir
from tests.support.services import RedisServer
from tests.support.workers import TaskApp, WorkerProc, wait_until

pytestmark = pytest.mark.redis
VISIBLE = 4.5
"""Seconds after which Redis gives a message away in these tests; an hour by default. A third of it is the time between
two looks at what is held, so that a machine may stand still for two thirds."""

SOURCE = """
import time
from pathlib import Path
from celery import Task
from celery_idem import IdempotentTask

HERE = Path(__file__).parent

def body(task, seconds):
    with open(HERE / "bodies", "a") as f:
        f.write(task.request.id + "\\n")
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (HERE / "go").exists():
        time.sleep(0.05)
    return "done"

@app.task(base=IdempotentTask, bind=True)
def work(self, seconds=0):
    return body(self, seconds)

@app.task(bind=True)
def plain(self, seconds=0):
    return body(self, seconds)

@app.task(base=IdempotentTask, bind=True)
def compute(self, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
    return body(self, 0)
"""


class Place:
    """An app whose broker gives messages away soon, and another worker's sweep, which does so at once."""

    def __init__(self, redis_server: RedisServer, *, proxy: ChaosProxy | None = None, **settings: Any) -> None:
        options = {"visibility_timeout": VISIBLE}
        conf = {"idempotency_store": redis_server.new_database(), "broker_transport_options": options, **settings}
        self.broker = redis_server.new_database()
        self.tasks = TaskApp(SOURCE, broker=proxy.url(self.broker) if proxy else self.broker, settings=conf)
        self.task = self.tasks.module

    def sweep(self, seconds: float, until: Callable[[], Any] = lambda: False) -> None:
        """Give away what may be given away, as every worker of the broker does each 100 s, for so long."""
        end = time.monotonic() + seconds
        with self.tasks.app.connection_for_read(self.broker) as connection:
            while time.monotonic() < end and not until():
                connection.default_channel.qos.restore_visible(interval=1)
                time.sleep(0.1)

    def held(self) -> list[str]:
        """Delivery tags of the messages some worker holds, by the broker."""
        with redis.Redis.from_url(self.broker) as client:
            return [tag.decode() for tag in client.zrange("unacked_index", 0, -1)]

    def connections(self) -> int:
        """How many connections the broker's database has."""
        with redis.Redis.from_url(self.broker) as client:
            number = self.broker.rpartition("/")[2]
            return sum(1 for one in client.client_list() if one["db"] == number)

    def threads(self, worker: WorkerProc) -> int:
        """How many threads the worker's main process has."""
        return psutil.Process(worker.pid).num_threads()

    def bodies(self) -> int:
        """How many bodies began."""
        path = self.tasks.path("bodies")
        return len(path.read_text().splitlines()) if path.exists() else 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.tasks.close()


@pytest.fixture
def place(redis_server: RedisServer) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(**settings: Any) -> Place:
        made.append(Place(redis_server, **settings))
        return made[-1]

    yield make
    for one in made:
        one.tasks.close()


def received(*workers: WorkerProc) -> int:
    """How many deliveries the workers' logs tell of."""
    return sum(len(re.findall(r"Task \S+ received", worker.log)) for worker in workers)


def gone(place: Place) -> bool:
    """Whether every message was acked."""
    return not place.held()


# --- what a live worker holds stays its own -------------------------------------------------------


@pytest.mark.parametrize(
    ("pool", "body"), [("prefork", "work"), ("threads", "work"), ("solo", "work"), ("gevent", "compute")]
)
def test_a_long_task_and_one_that_waits_for_its_eta_are_delivered_once(place: Any, pool: str, body: str) -> None:
    here = place()
    long = 2 * VISIBLE
    with here.tasks.worker(pool=pool, concurrency=2) as one, here.tasks.worker(pool=pool, concurrency=2) as other:
        sent = [
            getattr(here.task, body).delay(long),
            here.task.work.apply_async(countdown=long),
            here.task.plain.apply_async(countdown=long),
        ]
        wait_until(lambda: received(one, other) == 3, 20, "all three messages")
        here.sweep(2 * long, until=lambda: gone(here))
        assert [result.get(timeout=30) for result in sent] == ["done"] * 3
        assert received(one, other) == 3
    assert here.bodies() == 3


def test_without_it_they_are_delivered_again_and_a_task_without_a_key_runs_again(place: Any) -> None:
    here = place(idempotency_keep_visible=False)
    with here.tasks.worker(concurrency=4) as one, here.tasks.worker(concurrency=4) as other:
        work, waiting = here.task.work.delay(2 * VISIBLE), here.task.work.apply_async(countdown=2 * VISIBLE)
        plain = here.task.plain.delay(2 * VISIBLE)
        wait_until(lambda: received(one, other) == 3, 20, "all three messages")
        here.sweep(4 * VISIBLE, until=lambda: received(one, other) >= 6)
        assert received(one, other) >= 6
        assert [result.get(timeout=60) for result in (work, waiting, plain)] == ["done"] * 3
    ran = here.tasks.path("bodies").read_text().split()
    assert ran.count(work.id) == ran.count(waiting.id) == 1
    assert ran.count(plain.id) > 1


# --- what a dead or frozen worker holds comes back ------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_the_message_of_a_worker_that_is_gone_comes_back(place: Any, fate: str) -> None:
    here = place()
    with here.tasks.worker() as one:
        result = here.task.work.delay(60)
        wait_until(lambda: here.bodies() == 1, 20, "the first body")
        here.sweep(VISIBLE + 0.5)
        assert len(here.held()) == 1, "so far it lived"
        with here.tasks.worker() as other:
            one.kill() if fate == "killed" else one.pause()
            here.sweep(4 * VISIBLE, until=lambda: received(other))
            assert received(other) == 1
            here.tasks.path("go").touch()
            if fate == "frozen":
                one.resume()
            assert result.get(timeout=30) == "done"


# --- the worker's own ends and new beginnings -----------------------------------------------------


def test_a_worker_that_shuts_down_keeps_what_runs_and_leaves_what_waits_to_others(place: Any) -> None:
    here = place()
    with here.tasks.worker(concurrency=2) as one:
        running = here.task.work.delay(60)
        wait_until(lambda: here.bodies() == 1, 20, "the body")
        waiting = here.task.work.apply_async(countdown=60)
        wait_until(lambda: received(one) == 2, 20, "the message that waits")
        os.kill(one.pid, signal.SIGTERM)
        one.wait_log("Warm shutdown")
        with here.tasks.worker() as other:
            here.sweep(4 * VISIBLE, until=lambda: received(other))
            assert f"[{waiting.id}] received" in other.log
            here.sweep(VISIBLE + 0.5)
            assert f"[{running.id}] received" not in other.log
            here.tasks.path("go").touch()
            assert running.get(timeout=30) == "done"
            wait_until(lambda: not one.alive, 20, "the end of the warm shutdown")
            assert here.bodies() == 1
            assert len(here.held()) == 1


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_new_broker_connection_is_kept_too_and_nothing_of_the_old_one_stays(
    redis_server: RedisServer, pool: str
) -> None:
    # gevent's own pool of threads comes, and with this it goes too.
    env = {"GEVENT_THREADPOOL_IDLE_TASK_TIMEOUT": "0.2"}
    with (
        ChaosProxy.before(redis_server.url) as proxy,
        Place(redis_server, proxy=proxy) as here,
        here.tasks.worker(pool=pool, concurrency=2, env=env) as one,
    ):
        connections, threads = [], []
        for again in range(3):
            result = here.task.work.delay(60)
            begun = here.bodies() + 1
            wait_until(lambda begun=begun: here.bodies() == begun, 30, "the body")
            before = received(one)
            here.sweep(VISIBLE + 0.5)
            assert received(one) == before, one.log_tail()
            if again == 2:  # what stays behind would be more each time
                wait_until(lambda: here.connections() <= max(connections), 20, f"{connections} connections")
                wait_until(lambda: here.threads(one) <= max(threads), 20, f"{threads} threads")
            connections.append(here.connections())
            threads.append(here.threads(one))
            here.tasks.path("go").touch()
            assert result.get(timeout=30) == "done"
            wait_until(lambda: gone(here), 20, "the ack")
            here.tasks.path("go").unlink()
            proxy.cut()
            wait_until(lambda n=again: one.log.count("Connected to") > n + 1, 40, "the new connection")


# --- every way to a Redis broker, and the cost ----------------------------------------------------


@pytest.fixture(scope="module")
def doors() -> Iterator[dict[str, tuple[str, dict[str, Any]]]]:
    """URL and options of each way to one private Redis: TCP, a key prefix, a Unix socket, TLS, Sentinel."""
    folder, tls_port, sentinel_port = scratch_dir("doors"), free_port(), free_port()
    key, certificate, socket = folder / "key.pem", folder / "cert.pem", folder / "redis.sock"
    subject = ["-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{LOOPBACK}", "-days", "2"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *subject]
    subprocess.run(made, check=True, capture_output=True)
    files = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    tls = ["--tls-port", tls_port, *files, "--tls-auth-clients", "no"]
    with RedisServer(options=[str(word) for word in ["--unixsocket", socket, *tls]]) as server:
        config = folder / "sentinel.conf"
        config.write_text(f"port {sentinel_port}\nsentinel monitor main {LOOPBACK} {server.port} 1\n")
        argv = [server.binary, str(config), "--sentinel", "--bind", LOOPBACK]
        watching = Process(argv, name="sentinel", log_path=folder / "sentinel.log", cwd=folder)
        try:
            wait_until(lambda: listening(sentinel_port), 30, "the sentinel")
            yield {
                "tcp": (server.url, {}),
                "key prefix": (server.url, {"global_keyprefix": "shop:"}),
                "own index": (server.url, {"unacked_index_key": "shop_index", "unacked_key": "shop_unacked"}),
                "socket": (f"redis+socket://{socket}?virtual_host=3", {}),
                "tls": (f"rediss://{LOOPBACK}:{tls_port}/4?ssl_cert_reqs=required&ssl_ca_certs={certificate}", {}),
                "sentinel": (f"sentinel://{LOOPBACK}:{sentinel_port}/5", {"master_name": "main"}),
            }
        finally:
            watching.close()
            remove_dir(folder)


@contextmanager
def holding(url: str, options: dict[str, Any], count: int) -> Iterator[tuple[Any, list[Any]]]:
    """A connection that holds so many messages, of two priorities, and the messages."""
    with Connection(url, transport_options=options) as connection, connection.channel() as channel:
        queue = Queue(f"q{uuid.uuid4().hex}")(channel)
        queue.declare()
        with connection.Producer() as producer:
            for number in range(count):
                producer.publish(number, routing_key=queue.name, priority=3 * (number % 2))
        messages = [queue.get() for _ in range(count)]
        assert None not in messages
        yield connection, messages
        for message in messages:
            if not message.acknowledged:
                message.ack()


def delivered_at(channel: Any) -> dict[str, float]:
    """When each message of the broker was delivered, or kept, as Redis has it."""
    index = channel.global_keyprefix + channel.unacked_index_key
    with redis.Redis(connection_pool=channel.pool) as client:
        return {tag.decode(): at for tag, at in client.zrange(index, 0, -1, withscores=True)}


@pytest.mark.parametrize("door", ["tcp", "key prefix", "own index", "socket", "tls", "sentinel"])
def test_it_keeps_what_is_held_over_every_kind_of_connection(doors: Any, door: str) -> None:
    url, options = doors[door]
    with holding(url, options, 4) as (connection, messages):
        channel = messages[0].channel
        before = delivered_at(channel)
        messages[0].ack()
        messages[1].requeue()
        keeper = Keeper(connection, 3600)
        assert keeper.refresh() == 2
        after = delivered_at(channel)
        assert set(after) == {message.delivery_tag for message in messages[2:]}
        assert all(after[tag] > before[tag] for tag in after)
        assert max(after.values()) - time.time() < 1
        keeper._close()


def test_a_message_that_was_acked_or_given_away_meanwhile_is_not_brought_back(redis_url: str) -> None:
    with holding(redis_url, {}, 3) as (connection, messages):
        keeper = Keeper(connection, 3600)
        seen = keeper.held()
        messages[0].ack()
        messages[1].requeue()
        keeper.held = lambda: seen  # type: ignore[method-assign]
        assert keeper.refresh() == 3
        assert set(delivered_at(messages[0].channel)) == {messages[2].delivery_tag}
        keeper._close()


def test_it_costs_one_command_for_a_thousand_messages_and_nothing_for_none(redis_server: RedisServer) -> None:
    with holding(redis_server.new_database(), {}, 2500) as (connection, messages):
        keeper = Keeper(connection, 3600)
        keeper.refresh()
        before = commands(redis_server)
        assert keeper.refresh() == 2500
        assert commands(redis_server) - before == 3
        for message in messages:
            message.ack()
        before = commands(redis_server)
        assert keeper.refresh() == 0
        assert commands(redis_server) == before
        keeper._close()


def commands(server: RedisServer) -> int:
    """How many ZADD the server did so far."""
    with redis.Redis.from_url(server.url) as client:
        return int(client.info("commandstats").get("cmdstat_zadd", {}).get("calls", 0))
