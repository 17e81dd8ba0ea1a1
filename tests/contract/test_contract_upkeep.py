"""Purging a backlog of expired records while claims go on, and what it leaves."""

from __future__ import annotations

import statistics
import threading
import time

import pytest

from celery_idem.core.records import Answer, Ended
from celery_idem.stores.base import Store
from tests.contract.backends import PostgresBackend, SQLBackend, on
from tests.contract.shorthand import answer, complete, take
from tests.support.operations import op, result

BACKLOG = 100_000
BATCH = 2_000
LIMIT = 60.0  # seconds for the whole backlog, which takes one or two on a machine that does nothing else

# A dead record as short as one can be; its key is a number.
FILL = {
    "psycopg2": "INSERT INTO celery_idem_record (key, rev, state, token, fence, expires_at)"
    " SELECT n::text, 1, 'RELEASED', '', 1, n FROM generate_series(1, {count}) AS n",
    "sqlite": "INSERT INTO celery_idem_record (key, rev, state, token, fence, expires_at)"
    " WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count})"
    " SELECT n, 1, 'RELEASED', '', 1, n FROM s",
}


@pytest.mark.guarantee("purge")
@on("psycopg2", "sqlite")
def test_purge_clears_a_backlog_while_claims_go_on(backend: SQLBackend, real_store: Store) -> None:
    backend.run(FILL[backend.name].format(count=BACKLOG))
    complete(real_store, op("kept"))
    stop = threading.Event()
    waits: list[float] = []

    def keep_claiming() -> None:
        number = 0
        while not stop.is_set():
            began = time.monotonic()
            claim = take(real_store, op(f"k{number}"))
            assert real_store.complete(claim, result()) is Ended.COMPLETED
            waits.append(time.monotonic() - began)
            number += 1

    claimer = threading.Thread(target=keep_claiming)
    claimer.start()
    began = time.monotonic()
    purged = 0
    try:
        while purged < BACKLOG:
            deleted = real_store.purge(BATCH)  # nothing while a claim is being written to the same file
            assert deleted <= BATCH
            purged += deleted
            assert time.monotonic() < began + LIMIT, f"{purged} of {BACKLOG} purged in {LIMIT:g} s"
    finally:
        stop.set()
        claimer.join(20)
    assert purged == BACKLOG
    assert real_store.purge(BATCH) == 0
    assert len(waits) >= 2  # on SQLite they share one write lock with the purge
    assert statistics.median_low(waits) < 2, "a claim and its completion wait for no purge"
    assert answer(real_store, op("kept")) is Answer.COMPLETED
    assert len(list(real_store.find(limit=5000))) == min(5000, len(waits) + 1)


@pytest.mark.guarantee("purge")
@on("psycopg2")
def test_purge_waits_for_no_lock(backend: PostgresBackend, real_store: Store) -> None:
    patient = backend.open(timeout=30)
    backend.run(FILL["psycopg2"].format(count=10))
    with backend.connection() as connection:
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM celery_idem_record WHERE key IN ('3', '4') FOR UPDATE")
        began = time.monotonic()
        assert patient.purge(100) == 8
        assert patient.purge(100) == 0
        assert time.monotonic() - began < 10
        cursor.execute("ROLLBACK")
    assert real_store.purge(100) == 2
