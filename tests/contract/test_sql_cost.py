"""What the SQL store costs on PostgreSQL: statements, transactions that write, and a backlog to purge."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idem.core.records import Answer, Ended, Release, Successor
from celery_idem.stores.sql import SQLStore
from tests.contract.sql_help import RESULT, acquired, locked_row, operation, session
from tests.support.services import PostgresServer

pytestmark = pytest.mark.postgres
Count = Callable[[Callable[[], Any]], tuple[int, int]]


@pytest.fixture(scope="module")
def logging_server() -> Iterator[PostgresServer]:
    with PostgresServer(options=["-c", "log_statement=all", "-c", "autovacuum=off"]) as server:
        yield server


@pytest.fixture(params=["psycopg2", "psycopg"])
def store(request: pytest.FixtureRequest, logging_server: PostgresServer) -> Iterator[SQLStore]:
    store = SQLStore(logging_server.url.replace("psycopg2", request.param))
    store.create_schema()
    acquired(store)  # the first connection asks the server who it is
    yield store
    store.close()


@pytest.fixture
def count(logging_server: PostgresServer) -> Count:
    """Counts a verb's statements by the server's log, and its writing transactions by the ids they took."""

    def counted(verb: Callable[[], Any]) -> tuple[int, int]:
        snapshot = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
        begin = len(logging_server.log)
        written = int(logging_server.execute(snapshot))
        verb()
        written = int(logging_server.execute(snapshot)) - written
        lines = re.findall(r"LOG:  (?:statement|execute [^:]*): (.*)", logging_server.log[begin:])
        return len([line for line in lines if snapshot not in line]), written

    return counted


def test_a_first_run_is_two_statements_and_a_replay_one(store: SQLStore, count: Count) -> None:
    first = operation()

    def run() -> None:
        claim = store.claim(first, lease=30, ttl=60).claim
        assert claim is not None
        assert store.complete(claim, RESULT) is Ended.COMPLETED

    def replay() -> None:
        assert store.claim(operation(first.key), lease=30, ttl=60).answer is Answer.COMPLETED

    assert count(run) == (2, 2)
    assert count(replay) == (1, 0)


def test_whatever_changes_nothing_writes_nothing(store: SQLStore, logging_server: PostgresServer) -> None:
    held, released, failed = acquired(store), acquired(store), acquired(store)
    store.release(released, Release.RETRY, successor=Successor(1, 100))
    store.release(failed, Release.ENDED)
    done = acquired(store)
    store.complete(done, RESULT)
    seen = {
        held.key: Answer.HELD,
        released.key: Answer.NOT_DUE,
        failed.key: Answer.OVER,
        done.key: Answer.COMPLETED,
    }
    for _ in range(5):  # something else in the server may write meanwhile
        before = logging_server.execute("SELECT pg_current_wal_insert_lsn()")
        for key, answer in seen.items():
            assert store.claim(operation(key), lease=30, ttl=60).answer is answer
        if logging_server.execute("SELECT pg_current_wal_insert_lsn()") == before:
            return
    raise AssertionError("every replay wrote WAL")


def test_the_rest_of_a_life_costs_one_statement_a_step(store: SQLStore, count: Count) -> None:
    def one(verb: Callable[[], Any]) -> None:
        assert count(verb) == (1, 1)

    once = acquired(store)
    one(lambda: store.renew([once]))
    one(lambda: store.complete(once, RESULT))
    claim = acquired(store, continues=True)
    others = [acquired(store) for _ in range(9)]
    one(lambda: store.renew([claim, *others]))
    one(lambda: store.renew([claim, *others]))
    assert store.claim(operation(claim.key, "w"), lease=30, ttl=60).answer is Answer.HELD
    one(lambda: store.note_parked(claim.key, "w", 0, 1))
    assert store.claim(operation(claim.key, "w"), lease=30, ttl=60).answer is Answer.HELD
    one(lambda: store.complete(claim, RESULT))
    one(lambda: store.settle(claim.key, "m"))
    one(lambda: store.release(others[0], Release.ENDED))
    assert count(lambda: store.claim(operation(others[0].key, "n"), lease=30, ttl=60)) == (2, 1)
    follower = operation(claim.key, "follower", continues=True)
    assert count(lambda: store.claim(follower, lease=30, ttl=60)) == (2, 1)
    one(lambda: store.settle(claim.key, "follower"))


def test_a_locked_lease_costs_the_batch_one_more_statement(
    store: SQLStore, count: Count, logging_server: PostgresServer
) -> None:
    claims = [acquired(store) for _ in range(5)]
    with locked_row(logging_server.url, claims[2].key):
        assert count(lambda: store.renew(claims))[0] == 2


def test_a_million_expired_records_are_purged_beside_the_claims(postgres_url: str) -> None:
    store = SQLStore(postgres_url, timeout=30)
    store.create_schema()
    with session(postgres_url) as cursor:
        cursor.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'celery_idem_record'")
        definitions = [row[0] for row in cursor.fetchall() if "_pkey" not in row[0]]
        for definition in definitions:
            cursor.execute(f"DROP INDEX {definition.split()[2]}")
        cursor.execute(
            "INSERT INTO celery_idem_record (key, rev, state, token, fence, task, claimed_at, expires_at) SELECT"
            " lpad(i::text, 64, '0'), 1, 'COMPLETED', '', 1, 'shop.charge', i, i FROM generate_series(1, 1000000) i"
        )
        for definition in definitions:
            cursor.execute(definition)
        cursor.execute("ANALYZE celery_idem_record")
    took: list[float] = []
    over = threading.Event()

    def purge() -> None:
        for _ in range(10):
            start = time.monotonic()
            assert store.purge(500) == 500
            took.append(time.monotonic() - start)
        over.set()

    thread = threading.Thread(target=purge)
    thread.start()
    claims = 0
    while not over.is_set():
        store.complete(acquired(store), RESULT)
        claims += 1
    thread.join()
    assert claims > 0
    assert statistics.median(took) < 2  # by the index; a scan of the million is slower than that ten times over
    with session(postgres_url) as cursor:
        plan_of = "EXPLAIN " + store._database.statements["purge"].text % {"limit": 500}
        cursor.execute(plan_of)
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "celery_idem_record_expires_at" in plan
    assert "Seq Scan on celery_idem_record" not in plan
    assert next(store.find(task="shop.charge"), None) is not None
    store.close()
