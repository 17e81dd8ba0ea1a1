"""``self.idempotency.transaction()`` in real workers, and on Django's own connection."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_idem.stores.base import open_store
from tests.support.workers import ROOT, TaskApp, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.postgres]

SOURCE = """
import os, time
from pathlib import Path
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import text
from celery_idem import IdempotentTask, Policy
from celery_idem.app import runtime_of

HERE = Path(__file__).parent

def write(*words):
    with open(HERE / "lines", "a") as f:
        f.write(" ".join(map(str, words)) + "\\n")

def wait_for(name, seconds=30):
    deadline = time.monotonic() + seconds
    while not (HERE / name).exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} never came")
        time.sleep(0.01)

runtime_of(app).emit.listeners.append(lambda event: write(event.name.value, event.fields["message_id"]))

class Ledger(IdempotentTask):
    abstract = True

    def pay(self, order, seconds=0, name=None):
        with self.idempotency.transaction() as connection:
            write("start", order)
            connection.execute(text("INSERT INTO ledger VALUES (:order)"), {"order": order})
            time.sleep(seconds)
            if name:
                wait_for(name)
        write("end", order)
        return os.getpid()

@app.task(base=Ledger, bind=True, idempotency=Policy(key="order:{order}", fingerprint=["order"]))
def pay(self, order, seconds=0, name=None):
    return self.pay(order, seconds, name)

@app.task(base=Ledger, bind=True, soft_time_limit=1)
def limited(self, order, seconds, swallow=False):
    try:
        self.pay(order, seconds)
    except SoftTimeLimitExceeded:
        if not swallow:
            raise
        return "came too late"
"""


class Shop:
    """A ``TaskApp`` of ``SOURCE`` on a store with a ledger."""

    def __init__(self, broker: str, url: str, **settings: Any) -> None:
        store = open_store(url, timeout=30)
        store.create_schema()
        self.url, self.store, self.engine = url, store, sa.create_engine(url)
        with self.engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE ledger (amount INTEGER)"))
        self.tasks = TaskApp(SOURCE, broker=broker, settings={"idempotency_store": url, **settings})
        self.pay, self.limited = self.tasks.module.pay, self.tasks.module.limited

    def amounts(self) -> list[int]:
        with self.engine.connect() as connection:
            return [row[0] for row in connection.execute(sa.text("SELECT amount FROM ledger ORDER BY amount"))]

    def lines(self, word: str) -> list[str]:
        path = self.tasks.path("lines")
        found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [line[1] for line in found if line[0] == word]

    def close(self) -> None:
        self.tasks.close()
        self.store.close()
        self.engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@contextmanager
def opened(broker: str, url: str, **settings: Any) -> Iterator[Shop]:
    shop = Shop(broker, url, **settings)
    try:
        yield shop
    finally:
        shop.close()


def test_threads_have_transactions_of_their_own(redis_url: str, postgres_url: str) -> None:
    with opened(redis_url, postgres_url) as shop, shop.tasks.worker(pool="threads", concurrency=5):
        results = [shop.pay.delay(order, 0, "go") for order in range(4)]
        wait_until(lambda: len(shop.lines("start")) == 4, 20, "four bodies in their transactions at once")
        assert shop.amounts() == []
        copy = shop.pay.delay(0)
        wait_until(lambda: shop.lines("IN_FLIGHT_WAIT"), 20, "a copy that finds the key held")
        shop.tasks.path("go").touch()
        for result in results:
            result.get(timeout=30)
        assert copy.get(timeout=30) == results[0].result
        assert shop.amounts() == [0, 1, 2, 3]


def test_a_soft_limit_takes_it_back_and_leaves_a_clean_connection(redis_url: str, url: str) -> None:
    with opened(redis_url, url) as shop, shop.tasks.worker():
        assert shop.limited.delay(1, 30, True).get(timeout=30) == "came too late"
        failed = shop.limited.delay(2, 30)
        failed.get(timeout=30, propagate=False)
        assert failed.state == "FAILURE"
        shop.pay.delay(3).get(timeout=30)
        assert shop.amounts() == [3]
        states = sorted(record.state.value for record in shop.store.find())
        assert states == ["COMPLETED", "COMPLETED", "RELEASED"]


def test_a_body_outlives_its_lease_in_its_transaction(redis_url: str, url: str) -> None:
    """Its record is locked: nobody renews it, and nobody takes it."""
    settings = {"idempotency_lease": 3, "idempotency_dead_check": False}
    with opened(redis_url, url, **settings) as shop, shop.tasks.worker(concurrency=2):
        first, second = shop.pay.delay(1, 6), shop.pay.delay(1)
        assert first.get(timeout=30) == second.get(timeout=60)
        assert (shop.amounts(), shop.lines("start"), shop.lines("LEASE_LOST")) == ([1], ["1"], [])


def test_a_frozen_worker_keeps_its_key_and_its_effect(redis_url: str, postgres_url: str) -> None:
    settings = {"idempotency_lease": 1, "idempotency_dead_check": False}
    with opened(redis_url, postgres_url, **settings) as shop:
        with shop.tasks.worker() as frozen:
            first = shop.pay.delay(1, 0, "go")
            wait_until(lambda: shop.lines("start"), 20, "the body is in its transaction")
            frozen.pause()
            shop.tasks.path("go").touch()
            with shop.tasks.worker():
                second = shop.pay.delay(1)
                wait_until(lambda: shop.lines("PARKED"), 30, "the other message is parked, though the lease lapsed")
                assert shop.amounts() == []
                frozen.resume()
                assert second.get(timeout=60) == first.get(timeout=30)
        assert (shop.amounts(), shop.lines("start")) == ([1], ["1"])


def test_a_cold_shutdown_takes_it_back(redis_url: str, url: str) -> None:
    with opened(redis_url, url) as shop:
        with shop.tasks.worker() as worker:
            result = shop.pay.delay(1, 0, "go")
            wait_until(lambda: shop.lines("start"), 20, "the body is in its transaction")
            worker.quit()
        assert shop.amounts() == []
        shop.tasks.path("go").touch()
        with shop.tasks.worker():
            result.get(timeout=60)
        assert shop.amounts() == [1]


# -- Django ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["sqlite3", "psycopg2", "psycopg"])
def test_django_writes_on_its_own_connection(driver: str, request: Any, tmp_path: Path) -> None:
    if driver == "sqlite3":
        urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("shop", "other")]
    else:
        server = request.getfixturevalue("postgres_server")
        urls = [server.create_database().replace("psycopg2", driver) for _ in range(2)]
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(Path(__file__).with_name("django_ledger.py")), *urls],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"all held with {driver}" in done.stdout.splitlines()
    if driver != "sqlite3":
        for url in urls:
            server.drop_database(url.replace(driver, "psycopg2"))
