"""What one delivery costs, counted by the server: design section 3.

Redis: the commands its MONITOR shows, those a script runs apart. PostgreSQL: the statements its log shows for the
store's connections, and the transaction ids used up, which only a transaction that writes takes.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg2
import pytest
import redis

from celery_idem.core.engine import Engine, new_token
from celery_idem.core.policy import Policy
from celery_idem.core.records import Delivery, Operation, Status
from celery_idem.publish import PARK_HEADER, Parked
from celery_idem.stores.base import Store, open_store
from tests.support.operations import key_for
from tests.support.services import PostgresServer, RedisServer
from tests.support.workers import TaskApp, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


# --- counting on the server -------------------------------------------------------------------------------------------


@dataclass
class Cost:
    """What the server was asked in between."""

    what: list[str] = field(default_factory=list)
    """Redis: command names. PostgreSQL: the word that says what a statement does."""
    writes: int | None = None
    """PostgreSQL: transactions that wrote."""
    log: int | None = None
    """PostgreSQL: bytes of write-ahead log."""

    def __str__(self) -> str:
        written = "" if self.log is None else f", {self.writes} transactions wrote, {self.log} bytes of WAL"
        return f"{len(self.what)} asked {self.what}{written}"


class RedisCounter:
    """Counts commands by MONITOR, between two marks."""

    def __init__(self, server: RedisServer) -> None:
        self.client = redis.Redis.from_url(server.url, socket_timeout=20)
        self._marker = redis.Redis.from_url(server.url, socket_timeout=20)
        self._marker.ping()

    @contextmanager
    def counting(self) -> Iterator[Cost]:
        """Count what clients send inside the block."""
        cost, mark = Cost(), secrets.token_hex(8)
        with self.client.monitor() as monitor:
            yield cost
            self._marker.echo(mark)
            while True:
                seen = monitor.next_command()
                if mark in seen["command"]:
                    return
                if seen["client_type"] != "lua":  # a script's own commands cost no round trip
                    cost.what.append(seen["command"].split()[0])

    def close(self) -> None:
        self.client.close()
        self._marker.close()


class PostgresCounter:
    """Counts the store's statements in the server's log and the transaction ids used up."""

    NAME = "celery_idem_counted"
    OPTIONS = (
        *("-c", "log_statement=all", "-c", "log_line_prefix=%a|", "-c", "autovacuum=off"),
        *("-c", "wal_level=minimal", "-c", "max_wal_senders=0", "-c", "checkpoint_timeout=1h"),
    )
    LINE = re.compile(rf"^{NAME}\|LOG:  (?:statement|execute [^:]*): (.*)$", re.MULTILINE)

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.connection = psycopg2.connect(server.url.replace("+psycopg2", ""))
        self.connection.autocommit = True

    @contextmanager
    def counting(self) -> Iterator[Cost]:
        """Count what the store sends inside the block."""
        cost, since, (first, log) = Cost(), len(self.server.log), self._written()
        yield cost
        last, end = self._written()
        cost.writes, cost.log = last - first, end - log
        cost.what = [self._verb(text) for text in self.LINE.findall(self.server.log[since:])]

    def _written(self) -> tuple[int, int]:
        """The next transaction id and the end of the log; asking takes no id itself."""
        with self.connection.cursor() as cursor:
            cursor.execute("SELECT txid_snapshot_xmax(txid_current_snapshot()), pg_current_wal_insert_lsn() - '0/0'")
            next_id, end = cursor.fetchone()
            return int(next_id), int(end)

    @staticmethod
    def _verb(text: str) -> str:
        found = re.findall(r"\b(INSERT|UPDATE|DELETE|SELECT)\b", text)
        return next((word for word in found if word != "SELECT"), "SELECT")

    def close(self) -> None:
        self.connection.close()


Counter = RedisCounter | PostgresCounter


@pytest.fixture(scope="module", params=["redis", "postgresql"])
def server(request: Any) -> Iterator[RedisServer | PostgresServer]:
    """A server only the counted store uses."""
    with RedisServer() if request.param == "redis" else PostgresServer(options=PostgresCounter.OPTIONS) as running:
        yield running


@pytest.fixture
def counted(server: RedisServer | PostgresServer) -> Iterator[tuple[str, Counter]]:
    """A store's URL with nothing in it yet, and what counts there."""
    if isinstance(server, RedisServer):
        url, counter = server.new_database(), RedisCounter(server)
    else:
        url = f"{server.create_database()}?application_name={PostgresCounter.NAME}"
        store = open_store(url, timeout=30)
        store.create_schema()
        store.close()
        counter = PostgresCounter(server)
    yield url, counter
    counter.close()


@dataclass(frozen=True)
class Due:
    """What design section 3 allows."""

    redis: int
    statements: int
    writes: int

    def check(self, counter: Counter, cost: Cost, title: str) -> None:
        """Print what was counted, and hold it to this."""
        print(f"{title}: {cost}")
        if isinstance(counter, RedisCounter):
            assert cost.what == ["EVALSHA"] * self.redis, title
        else:
            assert (len(cost.what), cost.writes) == (self.statements, self.writes), (title, cost.what)
            assert self.writes or not cost.log, f"{title}: {cost.log} bytes of WAL"


FIRST = Due(redis=2, statements=2, writes=2)
REPLAY = Due(redis=1, statements=1, writes=0)
HELD = Due(redis=1, statements=1, writes=0)
ONE_NOTE = Due(redis=1, statements=1, writes=1)
TAKEOVER = Due(redis=2, statements=3, writes=2)
GRANTED = Due(redis=1, statements=2, writes=1)


def both(one: Due, other: Due) -> Due:
    return Due(one.redis + other.redis, one.statements + other.statements, one.writes + other.writes)


# --- through the engine -----------------------------------------------------------------------------------------------


@pytest.fixture
def warm_engine(counted: tuple[str, Counter]) -> Iterator[tuple[Engine, Counter]]:
    """An engine whose connection and scripts are there already."""
    store: Store = open_store(counted[0])
    engine = Engine(store, Policy(wait_timeout=0, lease=60))
    for continues in (False, True):  # first run, granted right, settle
        engine.run(operation("warm", f"warm {continues}", continues=continues), lambda context: "warm")
    claim = store.claim(operation("another warm"), lease=60, ttl=60).claim
    assert claim is not None
    store.renew([claim])
    store.note_parked(claim.key, "M", 0, 1)
    yield engine, counted[1]
    engine.heartbeat.stop()
    store.close()


def operation(key: str, message: str = "M", *, continues: bool = False) -> Operation:
    return Operation(key_for(key), Delivery(message, 0, continues), new_token(), task="shop.charge")


def test_a_first_run_and_a_replay(warm_engine: tuple[Engine, Counter]) -> None:
    engine, counter = warm_engine
    with counter.counting() as cost:
        assert engine.run(operation("order"), lambda context: "paid").status is Status.EXECUTED
    FIRST.check(counter, cost, "first run")
    for message in ("M", "another"):
        with counter.counting() as cost:
            assert engine.run(operation("order", message), lambda context: "twice").value == "paid"
        REPLAY.check(counter, cost, "replay")


def test_a_held_key_costs_one_look_and_writes_nothing(warm_engine: tuple[Engine, Counter]) -> None:
    engine, counter = warm_engine
    assert engine.store.claim(operation("order"), lease=60, ttl=60).claim is not None
    with counter.counting() as cost:
        assert engine.run(operation("order", "another"), lambda context: "twice").status is Status.CONFLICT
    HELD.check(counter, cost, "held")


def test_a_takeover_costs_one_statement_more(warm_engine: tuple[Engine, Counter]) -> None:
    engine, counter = warm_engine
    assert engine.store.claim(operation("order"), lease=0.05, ttl=60).claim is not None
    record = engine.store.get(key_for("order"))
    assert record is not None
    wait_until(lambda: time.time() > record.lease_expires_at + 0.05, 20, "the lease to lapse")
    with counter.counting() as cost:
        assert engine.run(operation("order", "another"), lambda context: "again").status is Status.EXECUTED
    TAKEOVER.check(counter, cost, "takeover")


def test_a_heartbeat_costs_nothing_below_a_third_of_the_lease_and_one_command_each_after(
    warm_engine: tuple[Engine, Counter], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, counter = warm_engine
    renewals: list[int] = []
    renew = warm.store.renew

    def counted(claims: Any) -> Any:
        answers = renew(claims)
        renewals.append(len(claims))  # only now: a body that ended sooner would need a connection beside this one
        return answers

    monkeypatch.setattr(warm.store, "renew", counted)
    engine = Engine(warm.store, Policy(wait_timeout=0, lease=6))
    engine.heartbeat = warm.heartbeat
    with counter.counting() as cost:
        engine.run(operation("short"), lambda context: "paid")
    FIRST.check(counter, cost, "body shorter than a third of its lease")
    with counter.counting() as cost:
        engine.run(operation("long"), lambda context: wait_until(lambda: len(renewals) >= 2, 20, "two renewals"))
    times = len(renewals)
    due = Due(FIRST.redis + times, FIRST.statements + times, FIRST.writes + times)
    due.check(counter, cost, f"body of {times} thirds of its lease")


def test_many_leases_are_renewed_in_one_go(warm_engine: tuple[Engine, Counter]) -> None:
    """Redis gets one script per key, in one pipeline."""
    engine, counter = warm_engine
    claims = [engine.store.claim(operation(f"order {n}"), lease=60, ttl=60).claim for n in range(5)]
    with counter.counting() as cost:
        engine.store.renew([claim for claim in claims if claim is not None])
    Due(redis=5, statements=1, writes=1).check(counter, cost, "renewal of five leases")


def test_a_message_that_continues_costs_one_settle_and_each_further_copy_nothing(
    warm_engine: tuple[Engine, Counter],
) -> None:
    engine, counter = warm_engine
    with counter.counting() as cost:
        engine.run(operation("order", continues=True), lambda context: "paid")
    both(FIRST, ONE_NOTE).check(counter, cost, "first run of a message that continues, settled")
    with counter.counting() as cost:
        assert engine.run(operation("order", continues=True), lambda context: "twice").value == "paid"
    REPLAY.check(counter, cost, "replay of a settled message")


def test_another_message_that_continues_is_granted_the_right_and_settles(warm_engine: tuple[Engine, Counter]) -> None:
    engine, counter = warm_engine
    engine.run(operation("order"), lambda context: "paid")
    with counter.counting() as cost:
        assert engine.run(operation("order", "another", continues=True), lambda context: "twice").value == "paid"
    both(GRANTED, ONE_NOTE).check(counter, cost, "replay with a right to continue, settled")


# --- through a real worker --------------------------------------------------------------------------------------------

SOURCE = """
import time
from pathlib import Path
from celery.signals import task_postrun
from celery_idem import IdempotentTask, Policy

HERE = Path(__file__).parent

def write(*words):
    with open(HERE / "lines", "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

@task_postrun.connect(weak=False)
def through(task_id, state, sender, **_):
    write("through", task_id, state)

@app.task(base=IdempotentTask, bind=True)
def work(self, until=None):
    write("start", self.request.id)
    deadline = time.monotonic() + 60
    while until and not (HERE / until).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{until} never came")
        time.sleep(0.01)
    return "paid"

@app.task
def plain(*_):
    pass
"""


class Till:
    """One app, one worker with two warm children, and what its bodies and tracer wrote."""

    def __init__(self, tasks: TaskApp) -> None:
        self.tasks = tasks
        for name in ("one", "other"):  # at the same time, so each child makes its connections
            self.work.apply_async(("warm",), task_id=name)
        wait_until(lambda: self.lines("start") == 2, 30, "both children run a body")
        tasks.path("warm").touch()
        wait_until(lambda: self.lines("through") == 2, 30, "both children are through")

    @property
    def work(self) -> Any:
        return self.tasks.module.work

    def lines(self, *words: str) -> int:
        """How many lines begin with these words."""
        path = self.tasks.path("lines")
        wanted = " ".join(words) + " "
        return sum(f"{line} ".startswith(wanted) for line in path.read_text().splitlines()) if path.exists() else 0

    def deliver(self, message: str, state: str = "SUCCESS", **options: Any) -> None:
        """Send one message and wait until a child is through with it, its signals included."""
        before = self.lines("through", message, state)
        self.work.apply_async(task_id=message, **options)
        wait_until(lambda: self.lines("through", message, state) > before, 30, f"{message} through as {state}")


@pytest.fixture
def till(counted: tuple[str, Counter], redis_url: str) -> Iterator[tuple[Till, Counter]]:
    """A till whose store nobody else uses; a conflict parks at once."""
    url, counter = counted
    settings = {"idempotency_store": url, "idempotency_purge": False, "idempotency_wait_timeout": 0}
    with TaskApp(SOURCE, broker=redis_url, settings=settings) as tasks, tasks.worker(concurrency=2):
        yield Till(tasks), counter


def test_a_worker_pays_what_the_engine_pays(till: tuple[Till, Counter]) -> None:
    made, counter = till
    with counter.counting() as cost:
        made.deliver("M")
    FIRST.check(counter, cost, "worker: first run, no heartbeat")
    with counter.counting() as cost:
        made.deliver("M")
    REPLAY.check(counter, cost, "worker: replay")
    with counter.counting() as cost:
        made.deliver("N", link=made.tasks.module.plain.s())
    both(FIRST, ONE_NOTE).check(counter, cost, "worker: first run with a link, settled")
    with counter.counting() as cost:
        made.deliver("N", link=made.tasks.module.plain.s())
    REPLAY.check(counter, cost, "worker: replay of a settled message")
    assert (made.lines("start", "M"), made.lines("start", "N")) == (1, 1)


def test_a_worker_pays_a_look_and_a_note_for_a_park(till: tuple[Till, Counter]) -> None:
    """The copy says it was parked five times, so it is parked for 11 s at least and does not come back meanwhile."""
    made, counter = till
    made.work.apply_async(("go",), task_id="M")
    wait_until(lambda: made.lines("start", "M") == 1, 20, "the first body")
    with counter.counting() as cost:
        made.deliver("M", "IGNORED", headers={PARK_HEADER: Parked(0, 5).header()})
    both(HELD, ONE_NOTE).check(counter, cost, "worker: park")
    made.tasks.path("go").touch()
    wait_until(lambda: made.lines("through", "M", "SUCCESS") == 1, 20, "the first body's end")
