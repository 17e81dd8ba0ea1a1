"""The suite's own tools do what they say: servers, proxy, workers, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import pytest
import redis
from kombu import Connection

from tests.support.chaos_proxy import ChaosProxy
from tests.support.processes import free_port, living
from tests.support.services import PostgresServer, RabbitServer, RedisServer, Server, find_binary
from tests.support.workers import ROOT, TaskApp, pids_named, wait_until

ECHO = """
    import os, signal, time
    from pathlib import Path


    @app.task
    def add(a, b):
        return a + b


    @app.task
    def slow(mark, seconds):
        with Path(mark).open("a") as f:
            f.write(f"{os.getpid()}\\n")
        time.sleep(seconds)
        return "done"
"""


def runs(path: Path) -> list[str]:
    """Return one line per start of ``slow``."""
    return path.read_text().split() if path.exists() else []


IMPATIENT: dict[str, Any] = {"socket_timeout": 0.3, "retry": None}
"""For a Redis client that is to find nobody there; a machine that stands still must not look like that to another."""


def postgres_dsn(url: str) -> str:
    return url.replace("+psycopg2", "")


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.mark.redis
def test_redis_survives_every_treatment() -> None:
    with RedisServer() as server, redis.Redis.from_url(server.url, socket_timeout=20) as client:
        assert client.ping()
        server.pause()
        with redis.Redis.from_url(server.url, **IMPATIENT) as other, pytest.raises(redis.TimeoutError):
            other.ping()
        server.resume()
        assert client.ping()
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.start()
        assert client.ping()
        first = server.pid
        server.restart()
        assert client.ping()
        assert server.pid != first
        assert f":{server.port}" in server.describe
        gone = str(server.dir)
    assert not Path(gone).exists()
    assert pids_named(f":{server.port}") == []


@pytest.mark.redis
def test_redis_databases_are_apart(redis_server: RedisServer, redis_url: str) -> None:
    other = redis_server.new_database()
    assert other != redis_url
    with redis.Redis.from_url(redis_url) as one, redis.Redis.from_url(other) as two:
        one.set("k", "v")
        assert two.get("k") is None


@pytest.mark.postgres
def test_postgres_keeps_commits_over_kill_and_restart(private_postgres: PostgresServer) -> None:
    server = private_postgres
    url = server.create_database("kept")
    dsn = postgres_dsn(url)

    def count() -> int:
        connection = psycopg2.connect(dsn, connect_timeout=20)
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute("CREATE TABLE IF NOT EXISTS t (n int)")
                cursor.execute("INSERT INTO t VALUES (1)")
                cursor.execute("SELECT count(*) FROM t")
                row = cursor.fetchone()
                assert row is not None
                return int(row[0])
        finally:
            connection.close()

    assert count() == 1
    server.kill()
    with pytest.raises(psycopg2.OperationalError):
        count()
    server.start()
    assert count() == 2
    server.restart()
    assert count() == 3
    open_connection = psycopg2.connect(dsn)
    server.pause()
    with pytest.raises(psycopg2.OperationalError):
        psycopg2.connect(dsn, connect_timeout=2)
    server.resume()
    with open_connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    open_connection.close()
    server.close()
    assert pids_named(str(server.dir)) == []


@pytest.mark.postgres
def test_postgres_databases_are_apart(postgres_server: PostgresServer, postgres_url: str) -> None:
    assert postgres_url.startswith("postgresql+psycopg2://")
    assert postgres_server.execute("SHOW fsync") == "off"
    assert postgres_server.create_database() != postgres_url


@pytest.mark.rabbitmq
def test_rabbit_vhosts_are_apart(rabbit_server: RabbitServer, amqp_url: str) -> None:
    other = rabbit_server.create_vhost()
    with Connection(amqp_url) as one, Connection(other) as two:
        with one.SimpleQueue("q") as queue:
            queue.put("here")
        with two.SimpleQueue("q") as queue:
            assert queue.qsize() == 0
        with one.SimpleQueue("q") as queue:
            assert queue.qsize() == 1


@pytest.mark.rabbitmq
def test_rabbit_keeps_durable_messages_over_kill(private_rabbit: RabbitServer) -> None:
    server = private_rabbit
    url = server.create_vhost("kept")
    confirmed = {"confirm_publish": True}
    with Connection(url, transport_options=confirmed) as connection, connection.SimpleQueue("q") as queue:
        queue.put("here")
    server.kill()
    with pytest.raises(ConnectionRefusedError):
        Connection(url, connect_timeout=1).connect()
    server.start()
    with Connection(url) as connection, connection.SimpleQueue("q") as queue:
        assert queue.get(timeout=30).payload == "here"
    marks = [str(server.dir), f"-port {server._epmd_port}"]
    server.close()
    assert [pid for mark in marks for pid in pids_named(mark)] == []


def test_a_missing_server_stops_the_run_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_SERVER", "/nowhere/redis-server")
    with pytest.raises(pytest.UsageError, match="sudo scripts/install-services"):
        RedisServer()
    with pytest.raises(pytest.UsageError, match="sudo scripts/install-services"):
        find_binary("Nothing", "NO_SUCH_VARIABLE", ["no-such-binary"])


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        (RedisServer, "redis://127.0.0.1:{port}/0"),
        (PostgresServer, "postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres"),
        (RabbitServer, "amqp://guest:guest@127.0.0.1:{port}//"),
    ],
)
def test_a_given_server_that_does_not_answer_fails(
    kind: type[Server], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kind.env_url, url.format(port=free_port()))
    with pytest.raises(pytest.UsageError, match=kind.env_url):
        kind.resolve()


@pytest.mark.redis
def test_a_given_server_is_used_and_never_hurt(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REDIS_URL", redis_server.url)
    given = RedisServer.resolve()
    assert given.url == redis_server.url
    assert "TEST_REDIS_URL" in given.describe
    with pytest.raises(AssertionError, match="not ours"):
        given.kill()
    given.close()
    assert redis_server.start().url == redis_server.url


def test_nothing_outlives_a_run_that_is_killed() -> None:
    code = """
from tests.support.services import PostgresServer, RabbitServer, RedisServer
kept = [RedisServer().start(), PostgresServer().start(), RabbitServer()]
kept[2]._launch()
print(*[server.dir for server in kept], flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        dirs = run.stdout.readline().split()
        assert len(dirs) == 3
        wait_until(lambda: len(pids_named(dirs[2])) > 0, 30, "the broker's machine runs")
        family = psutil.Process(run.pid).children(recursive=True)
        assert {"redis-server", "postgres", "epmd", "beam.smp"} <= {p.name() for p in family}
        run.kill()
    wait_until(lambda: not any(map(living, family)), 30, "the watchdog killed the servers and went")
    assert not any(Path(path).exists() for path in dirs)


# -- proxy -------------------------------------------------------------------------------------------------------------


@pytest.mark.redis
def test_proxy_faults_as_redis_sees_them(redis_url: str) -> None:
    with (
        ChaosProxy.before(redis_url) as proxy,
        redis.Redis.from_url(proxy.url(redis_url), socket_timeout=20, retry=None) as client,
        redis.Redis.from_url(proxy.url(redis_url), **IMPATIENT) as impatient,
        redis.Redis.from_url(redis_url) as direct,
    ):
        assert client.incr("n") == 1
        proxy.drop_replies()
        with pytest.raises(redis.ConnectionError):
            client.execute_command("INCR", "n")
        proxy.heal()
        assert direct.get("n") in {b"1", b"2"}
        proxy.cut()
        assert client.incr("m") == 1
        proxy.blackhole = True
        with pytest.raises(redis.TimeoutError):
            impatient.get("m")
        proxy.heal()
        proxy.delay = 0.05
        started = time.monotonic()
        client.ping()
        assert time.monotonic() - started >= 0.1
        proxy.heal()
        proxy.refuse = True
        proxy.cut()
        with pytest.raises(redis.ConnectionError):
            client.ping()


@pytest.mark.postgres
def test_proxy_loses_the_reply_to_a_commit(postgres_url: str) -> None:
    dsn = postgres_dsn(postgres_url)
    with ChaosProxy.before(postgres_url) as proxy:
        connection = psycopg2.connect(proxy.url(dsn))
        cursor = connection.cursor()
        cursor.execute("CREATE TABLE t (n int)")
        connection.commit()
        cursor.execute("INSERT INTO t VALUES (1)")
        proxy.drop_replies()
        with pytest.raises(psycopg2.OperationalError):
            connection.commit()
        assert proxy.dropped == 1
    direct = psycopg2.connect(dsn)
    with direct.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM t")
        assert cursor.fetchone() == (1,)
    direct.close()


@pytest.mark.rabbitmq
def test_proxy_loses_a_publish_confirm(amqp_url: str) -> None:
    with ChaosProxy.before(amqp_url) as proxy:
        connection = Connection(proxy.url(amqp_url), transport_options={"confirm_publish": True, "read_timeout": 5})
        producer = connection.Producer()
        producer.publish("one", routing_key="q", declare=[connection.SimpleQueue("q").queue])
        proxy.drop_replies()
        with pytest.raises(connection.connection_errors):
            producer.publish("two", routing_key="q")
        connection.collect()
    with Connection(amqp_url) as direct, direct.SimpleQueue("q") as queue:
        assert queue.qsize() == 2


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["redis_url", "filesystem"])
def test_a_worker_runs_a_task_and_a_killed_child_costs_one_redelivery(
    broker: str, request: pytest.FixtureRequest
) -> None:
    url = "filesystem://" if broker == "filesystem" else request.getfixturevalue(broker)
    with TaskApp(ECHO, broker=url) as tasks, tasks.worker() as worker:
        assert tasks.module.add.delay(2, 3).get(timeout=30, interval=0.05) == 5
        mark = tasks.path("mark")
        result = tasks.module.slow.delay(str(mark), 0.5)
        wait_until(lambda: len(runs(mark)) == 1, 30, "the task began")
        assert worker.kill_child() == int(runs(mark)[0])
        assert result.get(timeout=30, interval=0.05) == "done"
        assert len(runs(mark)) == 2
    assert pids_named(worker.name) == []


@pytest.mark.rabbitmq
@pytest.mark.crash
@pytest.mark.parametrize("how", ["kill", "quit"])
def test_a_worker_that_is_ended_gives_its_task_to_the_next(how: str, amqp_url: str) -> None:
    with TaskApp(ECHO, broker=amqp_url) as tasks:
        mark = tasks.path("mark")
        with tasks.worker() as worker:
            result = tasks.module.slow.delay(str(mark), 1.0)
            wait_until(lambda: len(runs(mark)) == 1, 30, "the task began")
            getattr(worker, how)()
            assert not worker.alive
        assert pids_named(worker.name) == []
        with tasks.worker(pool="solo"):
            assert result.get(timeout=30, interval=0.05) == "done"
        assert len(runs(mark)) == 2


@pytest.mark.redis
def test_a_paused_worker_goes_on(redis_url: str) -> None:
    with TaskApp(ECHO, broker=redis_url, backend=redis_url) as tasks, tasks.worker(pool="threads") as worker:
        worker.pause()
        result = tasks.module.add.delay(1, 1)
        assert not result.ready()
        worker.resume()
        assert result.get(timeout=30) == 2
        assert worker.term() == 0


def test_a_worker_that_cannot_start_says_why() -> None:
    source = "raise RuntimeError('no such luck')"
    with TaskApp(source, broker="memory://") as tasks, pytest.raises(AssertionError, match="no such luck"):
        tasks.worker().start()


def test_wait_until_names_what_it_waited_for() -> None:
    with pytest.raises(AssertionError, match="the moon is blue"):
        wait_until(lambda: False, 0.05, "the moon is blue")


# -- the suite's own rules ---------------------------------------------------------------------------------------------


UNRUN = """
def test_skipped(): pytest.skip("no server")

@pytest.mark.xfail(strict=False, reason="known")
def test_expected(): assert 0
"""


@pytest.mark.parametrize(("body", "unrun"), [("", 0), (UNRUN, 3)])
def test_a_run_that_skips_anything_fails(body: str, unrun: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (tmp_path / "test_one.py").write_text(f"import pytest\n\ndef test_it(): pass\n{body}")
    if unrun:
        (tmp_path / "test_two.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    count = tmp_path / "count"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "."],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TEST_COUNT_FILE": str(count),
        },
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) is (unrun == 0), done.stdout
    assert done.stdout.count("NOT RUN") == unrun
    assert int(count.read_text()) == 1
