"""Every pool, with real workers: leases stay alive, a lost one ends its body and nothing else, and nothing leaks.

``docs/reference/pools.md`` says in a table what is shown here.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import celery
import pytest
import redis

from celery_idem.app import runtime_of
from celery_idem.core.records import Claim, Delivery, Operation, Release
from celery_idem.stores.base import open_store
from tests.docs.pages import page
from tests.integration.shop import SOURCE, Shop
from tests.support.workers import TaskApp, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]

POOLS = ["prefork", "threads", "solo", "gevent"]
LEASE = 4.0
"""Seconds. A third of it is the time between two renewals, so that a machine may stand still for two thirds."""

TASKS = """
import psutil

LEASE = 4.0

def burn(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass

def steps(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)

@app.task(base=Logged, bind=True, idempotency=Policy(lease=LEASE, wait_timeout=60))
def compute(self, seconds):
    self.log("start")
    burn(seconds)
    self.log("end")
    return "computed"

@app.task(base=Logged, bind=True, idempotency=Policy(lease=LEASE, wait_timeout=0))
def lose(self, ways):
    self.log("start")
    if once("first" + self.request.id):
        try:
            for way, seconds in ways:
                if way == "check":
                    while True:
                        self.idempotency.check()
                {"sleep": time.sleep, "steps": steps, "burn": burn}[way](seconds)
                self.log(way)
        except BaseException as error:
            self.log(type(error).__name__)
            raise
    self.log("end")
    return "done"

@app.task(base=Logged, bind=True, idempotency=Policy(key="arguments"))
def patient(self):
    if once("refused"):
        raise ValueError("and the key is free again")
    self.log("start")

@app.task(base=Logged, bind=True)
def quick(self):
    self.log("quick")
    return "quick"

@app.task(base=Logged, bind=True)
def limited(self, seconds):
    try:
        steps(seconds)
    except BaseException as error:
        self.log(type(error).__name__)
        raise
    return "unlimited"

@app.task(base=Logged, bind=True)
def census(self):
    return [os.getpid(), psutil.Process().num_threads()]
"""


class Pools(Shop):
    """A shop with tasks that compute, lose their leases and count threads."""

    def __init__(self, broker: str, store: str, **settings: Any) -> None:
        settings["broker_transport_options"] = settings.pop("transport_options", {})
        self.tasks = TaskApp(SOURCE + TASKS, broker=broker, settings={"idempotency_store": store, **settings})
        self.store = store

    def words(self) -> list[str]:
        """What bodies wrote, in order."""
        return [run.word for run in self.runs()]

    def take_over(self, task_id: str) -> Any:
        """Hold the key of this message, whoever holds it now; the returned function gives it back."""
        store = runtime_of(self.app).store
        record = next(r for r in store.find() if r.message_id == task_id)
        assert store.forget(record.key, record.fence)
        other = Operation(record.key, Delivery("another"), "f" * 32, task=record.task, fingerprint=record.fingerprint)
        claim = store.claim(other, lease=60, ttl=600).claim
        assert isinstance(claim, Claim)
        return lambda: store.release(claim, Release.YIELDED)

    def __exit__(self, *_: object) -> None:
        runtime_of(self.app).close()
        super().__exit__()


def places(request: Any, store: str = "redis", broker: str = "redis") -> tuple[str, str]:
    """URLs of a broker and a store of this test's own."""
    server = request.getfixturevalue("redis_server")
    at = server.new_database() if broker == "redis" else request.getfixturevalue("amqp_url")
    if store == "redis":
        return at, server.new_database()
    url = request.getfixturevalue("postgres_url")
    if store == "psycopg":
        url = url.replace("psycopg2", "psycopg")
    elif store == "sqlite":
        url = f"sqlite:///{request.getfixturevalue('tmp_path')}/idem.db"
    opened = open_store(url, timeout=30)
    opened.create_schema()
    opened.close()
    return at, url


# --- leases stay alive ------------------------------------------------------------------------------------------------

COMPUTING = [
    *[(pool, (), "redis", "redis") for pool in POOLS],
    ("prefork", ("--max-tasks-per-child", "1"), "psycopg2", "redis"),
    ("prefork", ("--autoscale", "2,1"), "redis", "redis"),
    ("solo", (), "redis", "rabbitmq"),
    ("gevent", (), "psycopg2", "rabbitmq"),
    ("gevent", (), "psycopg", "redis"),
    ("gevent", (), "sqlite", "redis"),
]


@pytest.mark.parametrize(("pool", "extra", "store", "broker"), COMPUTING, ids=lambda v: "".join(v) or "-")
def test_a_body_that_computes_keeps_its_lease(
    request: Any, pool: str, extra: tuple[str, ...], store: str, broker: str
) -> None:
    """Another worker asks for the key all the while, ten times a second."""
    with Pools(*places(request, store, broker)) as shop:
        workers = [shop.tasks.worker(pool=pool, extra=extra).start(wait=False) for _ in range(2)]
        for worker in workers:
            worker.wait_ready()
        first = shop.compute.apply_async((2 * LEASE,), task_id="M")
        wait_until(lambda: shop.starts() == 1, 20, "the body")
        shop.compute.apply_async((2 * LEASE,), task_id="M")
        wait_until(lambda: "IN_FLIGHT_WAIT" in shop.events(), 20, "the other worker to wait for the key")
        assert first.get(timeout=30) == "computed"
        wait_until(lambda: "REPLAYED" in shop.events(), 20, f"the replay, not {shop.events()}")
        assert shop.words() == ["start", "end"]
        assert shop.events() == ["NEW", "IN_FLIGHT_WAIT", "REPLAYED"]


# --- a lost lease ends its body, and nothing else ---------------------------------------------------------------------

AT_ONCE = LEASE / 3 + 10
"""Seconds from the loss to the end of the body: the next renewal, and a machine that stands still; it would take 30."""
LOSSES: dict[str, list[tuple[list[tuple[str, float]], list[str], float]]] = {
    # what the body does, which of it comes to its end, and seconds from the loss to LeaseLost, at most
    "prefork": [([("sleep", 30)], [], AT_ONCE), ([("burn", 30)], [], AT_ONCE)],
    "solo": [([("sleep", 30)], [], AT_ONCE), ([("burn", 30)], [], AT_ONCE)],
    # A system call ends first, but nothing after it begins.
    "threads": [([("steps", 30)], [], AT_ONCE), ([("sleep", 4)], [], 4 + AT_ONCE)],
    # It must yield, or ask.
    "gevent": [
        ([("sleep", 30)], [], AT_ONCE),
        ([("burn", 4), ("sleep", 30)], ["burn"], 4 + AT_ONCE),
        ([("check", 0)], [], AT_ONCE),
    ],
}


@pytest.mark.parametrize("pool", POOLS)
def test_a_lost_lease_ends_the_body_and_the_message_is_delivered_anew(request: Any, pool: str) -> None:
    with Pools(*places(request), worker_prefetch_multiplier=8) as shop, shop.tasks.worker(pool=pool):
        for number, (ways, ended, within) in enumerate(LOSSES[pool], start=1):
            seen, told = len(shop.runs()), len(shop.events())
            result = shop.lose.apply_async((ways,), task_id=f"M{number}")
            wait_until(lambda seen=seen: len(shop.runs()) > seen, 20, "the body")
            taken, give_back = time.time(), shop.take_over(f"M{number}")
            wait_until(lambda told=told: "PARKED" in shop.events()[told:], 20, "the message to be parked")
            assert shop.events()[told:] == ["NEW", "LEASE_LOST", "PARKED"]
            assert shop.words()[seen:] == ["start", *ended, "LeaseLost"]
            assert shop.runs()[-1].at - taken < within
            give_back()
            # What was meant for the body must not hit whatever runs in its place.
            others = [shop.quick.delay() for _ in range(5)]
            assert [other.get(timeout=30) for other in others] == ["quick"] * 5
            assert result.get(timeout=30) == "done"


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_worker_that_stood_still_beyond_its_lease_stops_and_replays(request: Any, pool: str) -> None:
    with Pools(*places(request)) as shop:
        slow = shop.tasks.worker(pool=pool).start()
        results = [shop.lose.apply_async(([("sleep", 30)],), task_id="M")]
        wait_until(lambda: shop.starts() == 1, 20, "the body")
        slow.pause()
        with shop.tasks.worker(pool=pool):
            results.append(shop.lose.apply_async(([("sleep", 30)],), task_id="M"))
            assert results[1].get(timeout=40) == "done"
            assert shop.events()[-1] == "LEASE_RECLAIMED"
        told = len(shop.events())
        slow.resume()
        wait_until(lambda: "REPLAYED" in shop.events(), 20, f"the replay, not {shop.events()}")
        assert shop.events()[told:] == ["LEASE_LOST", "REPLAYED"]
        assert shop.words() == ["start", "start", "end", "LeaseLost"]
        assert shop.quick.delay().get(timeout=30) == "quick"


# --- nothing leaks ----------------------------------------------------------------------------------------------------


def connections(url: str) -> int:
    """How many a Redis store's workers hold."""
    client = redis.Redis.from_url(url)
    try:
        mine = client.client_id()
        found = [c for c in client.client_list() if c["db"] == url.rpartition("/")[2] and int(c["id"]) != mine]
    finally:
        client.close()
    return len(found)


@pytest.mark.parametrize("pool", POOLS)
def test_threads_and_connections_do_not_grow(request: Any, pool: str) -> None:
    concurrency = 1 if pool == "solo" else 3
    with (
        Pools(*places(request), worker_prefetch_multiplier=8) as shop,
        shop.tasks.worker(pool=pool, concurrency=concurrency),
    ):
        counts = []
        for _ in range(4):
            before = [shop.census.delay() for _ in range(12)]
            renewed = shop.lose.apply_async(([("sleep", 1)],))
            assert renewed.get(timeout=40) == "done"
            seen = [result.get(timeout=40) for result in before]
            runtime_of(shop.app).close()
            counts.append((max(threads for _, threads in seen), connections(shop.store)))
        early, late = counts[:2], counts[2:]
        assert min(late)[0] <= max(early)[0], f"threads, more each time: {counts}"
        # One for each body, and one for the heartbeat where it has a client of its own; how many bodies meet, varies.
        most = {"prefork": 2 * concurrency, "solo": 2, "threads": concurrency + 1, "gevent": concurrency + 1}
        assert max(c for _, c in counts) <= most[pool], f"connections: {counts}"


def test_a_recycled_child_leaves_no_connection(request: Any) -> None:
    with (
        Pools(*places(request)) as shop,
        shop.tasks.worker(concurrency=1, extra=("--max-tasks-per-child", "1")),
    ):
        pids = {shop.census.delay().get(timeout=30)[0] for _ in range(5)}
        assert len(pids) == 5
        assert connections(shop.store) <= 2


# --- time limits, and who stands still while a duplicate waits --------------------------------------------------------

LIMITS = {
    # what ends the body at the soft limit, and at the hard one
    "prefork": ("SoftTimeLimitExceeded", "SystemExit"),
    "threads": (None, None),
    "solo": (None, None),
    "gevent": (None, "Timeout"),
}


@pytest.mark.parametrize("pool", POOLS)
def test_time_limits(request: Any, pool: str) -> None:
    with Pools(*places(request), worker_prefetch_multiplier=8) as shop, shop.tasks.worker(pool=pool) as worker:
        for option, word in zip(("soft_time_limit", "time_limit"), LIMITS[pool], strict=True):
            result = shop.limited.apply_async((2.5 if word is None else 20,), **{option: 1})
            if word is None:
                assert result.get(timeout=30) == "unlimited"
            else:
                children = set(worker.children())
                assert "TimeLimitExceeded" in repr(result.get(timeout=30, propagate=False))
                if word == "SystemExit":  # Celery tells of the failure first; a slow child is killed before it writes
                    wait_until(lambda gone=children: not gone & set(worker.children()), 20, "the child's end")
                    assert shop.words()[-1] in {word, "quick"}
                else:
                    wait_until(lambda word=word: shop.words()[-1] == word, 20, word)
            assert shop.quick.delay().get(timeout=30) == "quick"


@pytest.mark.parametrize("pool", POOLS)
def test_who_stands_still_while_a_duplicate_waits(request: Any, pool: str) -> None:
    concurrency = 1 if pool == "solo" else 2
    waits = 6 if pool == "solo" else 60
    with Pools(*places(request), worker_prefetch_multiplier=8, idempotency_wait_timeout=waits) as shop:
        worker = shop.tasks.worker(pool=pool, concurrency=concurrency).start()
        shop.patient.apply_async(task_id="M").get(timeout=30, propagate=False)
        give_back = shop.take_over("M")
        waiting = shop.patient.apply_async(task_id="N")
        wait_until(lambda: "IN_FLIGHT_WAIT" in shop.events(), 20, "the duplicate to wait")
        answers = shop.app.control.ping([f"{worker.name}@localhost"], timeout=2 if pool == "solo" else 20)
        assert bool(answers) is (pool != "solo")
        assert shop.quick.delay().get(timeout=30) == "quick"
        assert ("PARKED" in shop.events()) is (pool == "solo")
        give_back()
        waiting.get(timeout=30)


# --- children that are spawned, not forked ----------------------------------------------------------------------------


def test_a_spawned_child_runs_once_and_replays(request: Any) -> None:
    """Its app is not the module's: what a module hangs on its app, this suite's listener say, stays behind."""
    with Pools(*places(request), worker_pool_start_method="spawn") as shop:
        worker = shop.tasks.worker(concurrency=2).start()
        results = [shop.compute.apply_async((LEASE * 2,), task_id="M") for _ in range(2)]
        assert [result.get(timeout=60) for result in results] == ["computed"] * 2
        worker.wait_log("REPLAYED")
        assert shop.words() == ["start", "end"]
        assert ("SpawnPoolWorker" in worker.log) is (celery.VERSION >= (5, 7))


# --- gevent: many greenlets, one store --------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["redis", "psycopg2", "psycopg", "sqlite"])
def test_many_greenlets_of_one_key_run_once(request: Any, store: str) -> None:
    with (
        Pools(*places(request, store), transport_options={"max_connections": 50}) as shop,
        shop.tasks.worker(pool="gevent", concurrency=20),
    ):
        results = [shop.charge.delay(order, 50) for _ in range(6) for order in range(5)]
        assert [result.get(timeout=60)["order"] for result in results] == list(range(5)) * 6
        assert shop.starts() == 5


def test_a_lease_lost_under_gevent_is_told_as_a_worker_event(request: Any) -> None:
    """From the renewal thread through the hub to the broker."""
    with Pools(*places(request)) as shop, shop.tasks.worker(pool="gevent", extra=("-E",)):
        seen: list[str] = []
        with shop.app.connection_for_read() as connection:
            receiver = shop.app.events.Receiver(connection, handlers={"*": lambda event: seen.append(event["type"])})
            listening = threading.Thread(target=receiver.capture, kwargs={"timeout": 60}, daemon=True)
            listening.start()
            wait_until(lambda: "worker-heartbeat" in seen, 20, "events to arrive")
            shop.lose.apply_async(([("sleep", 30)],), task_id="M")
            wait_until(lambda: shop.starts() == 1, 20, "the body")
            shop.take_over("M")
            wait_until(lambda: {"idem-lease-lost", "idem-parked"} <= set(seen), 20, f"the events, not {seen}")
            receiver.should_stop = True
            listening.join(20)


def test_the_page_says_so() -> None:
    rows = {row[0].strip("`"): row for row in page("docs/reference/pools.md").rows()}
    assert [*rows] == [*POOLS, "eventlet"]
    for pool, words in LIMITS.items():
        for word, cell in zip(words, rows[pool][3:5], strict=True):
            assert cell.startswith("ignored" if word is None else f"`{word}`"), (pool, cell)
