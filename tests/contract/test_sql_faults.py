"""The server stops, restarts or never answers; the process forks."""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_idem.core.records import Answer, Claim, Ended, Release, Renewal, State
from celery_idem.errors import StoreUnavailable
from celery_idem.stores.sql import SQLStore
from tests.contract.sql_help import MARGIN, RESULT, acquired, forked, new_key, operation, session
from tests.support.operations import answered
from tests.support.processes import wait_until

postgres = pytest.mark.postgres
DRIVERS = ["psycopg2", "psycopg"]


def driven(url: str, driver: str) -> str:
    return url.replace("psycopg2", driver)


@pytest.fixture(params=["sqlite", *(pytest.param(driver, marks=postgres) for driver in DRIVERS)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/idem.db"
    return driven(request.getfixturevalue("postgres_url"), request.param)


@pytest.fixture
def store(url: str) -> Iterator[SQLStore]:
    store = SQLStore(url, timeout=30)
    store.create_schema()
    yield store
    store.close()


def verbs(store: SQLStore, claim: Claim) -> list[tuple[Callable[[], Any], bool]]:
    """Every verb, and whether it writes."""
    return [
        (lambda: store.claim(operation(), lease=30, ttl=60), True),
        (lambda: store.complete(claim, RESULT), True),
        (lambda: store.release(claim, Release.ENDED), True),
        (lambda: store.renew([claim]), True),
        (lambda: store.settle(claim.key, "m"), False),  # begins with a read
        (lambda: store.note_parked(claim.key, "m", 0, 1), False),
        (lambda: store.get(claim.key), False),
        (lambda: list(store.find()), False),
        (lambda: store.forget(claim.key, 1), False),
        (lambda: store.purge(1), True),
    ]


@postgres
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_connection_that_was_cut_is_replaced_without_a_word(driver: str, postgres_url: str) -> None:
    store = SQLStore(driven(postgres_url, driver), timeout=30)
    store.create_schema()
    claim = acquired(store)
    engine = sa.create_engine(postgres_url)
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid != %s"
    for verb, _ in verbs(store, claim):
        with engine.connect() as connection:
            (mine,) = connection.exec_driver_sql("SELECT pg_backend_pid()").one()
            connection.exec_driver_sql(cut, (mine,))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            verb()
        assert [str(warning.message) for warning in told] == []
    engine.dispose()
    store.close()


# -- no answer ---------------------------------------------------------------------------------------------------------


@postgres
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_stopped_server_costs_no_verb_more_than_the_timeout(private_postgres: Any, driver: str) -> None:
    store = SQLStore(driven(private_postgres.url, driver), timeout=1)
    patient = SQLStore(driven(private_postgres.url, driver), timeout=10)
    patient.create_schema()
    claim, all_took = acquired(patient), []
    for verb, writes in verbs(store, claim):
        wait_until(lambda: answered(lambda: acquired(store)), 20, "that a connection is idle")
        private_postgres.pause()
        try:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable) as caught:
                verb()
            took = time.monotonic() - start
        finally:
            private_postgres.resume()
        assert took < 1 + MARGIN
        all_took.append(took)
        assert caught.value.may_have_landed is writes
    assert statistics.median(all_took) < 1.9, "nor did they wait a second time"
    store.close()
    private_postgres.pause()
    try:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:  # with no connection yet
            store.claim(operation(), lease=30, ttl=60)
        assert time.monotonic() - start < 1 + MARGIN
        assert not caught.value.may_have_landed
    finally:
        private_postgres.resume()
    assert patient.release(claim, Release.YIELDED) in {Ended.RELEASED, Ended.COMPLETED}
    patient.close()
    store.close()


@postgres
def test_a_port_that_never_answers_costs_no_more_than_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
        store = SQLStore(f"postgresql+psycopg2://u@127.0.0.1:{silent.getsockname()[1]}/d", timeout=0.4)
        start = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.get(new_key())
        assert time.monotonic() - start < 0.4 + MARGIN
        assert not caught.value.may_have_landed
        store.close()


@postgres
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_restart_between_two_verbs_goes_unnoticed(private_postgres: Any, driver: str) -> None:
    store = SQLStore(driven(private_postgres.url, driver), timeout=30)
    store.create_schema()
    claim = acquired(store)
    threads = [threading.Thread(target=store.get, args=(claim.key,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    private_postgres.restart()
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    private_postgres.restart()
    assert store.claim(claim.operation, lease=30, ttl=60).answer is Answer.ACQUIRED
    private_postgres.restart()
    assert store.complete(claim, RESULT) is Ended.COMPLETED
    private_postgres.kill()
    with pytest.raises(StoreUnavailable):
        store.get(claim.key)
    with pytest.raises(StoreUnavailable) as caught:
        store.claim(operation(), lease=30, ttl=60)
    assert not caught.value.may_have_landed  # there was no connection to send it on
    private_postgres.start()
    assert store.get(claim.key) is not None
    store.close()


def read_only(url: str, how: str) -> None:
    """Every session that begins from now on is one of a server that takes no writes, or is not."""
    with session(url) as cursor:
        cursor.execute("SET default_transaction_read_only = off")
        cursor.execute(f"ALTER DATABASE {sa.make_url(url).database} SET default_transaction_read_only = {how}")


@postgres
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_demoted_primary_is_left_for_the_new_one(postgres_url: str, driver: str) -> None:
    before, store = SQLStore(postgres_url, timeout=30), SQLStore(driven(postgres_url, driver), timeout=30)
    before.create_schema()
    claim = acquired(before)
    read_only(postgres_url, "on")
    for verb in (lambda: acquired(store), lambda: store.begin(claim)):
        with pytest.raises(StoreUnavailable, match="primary") as refused:
            verb()
        assert not refused.value.may_have_landed
    read_only(postgres_url, "off")
    acquired(store)
    transaction = store.begin(claim)
    assert transaction is not None
    assert transaction.commit(RESULT) is Ended.COMPLETED
    before.close()
    store.close()


@postgres
def test_a_free_connection_is_waited_for_no_longer_than_the_timeout(postgres_url: str) -> None:
    prepared = SQLStore(postgres_url, timeout=30)
    prepared.create_schema()
    prepared.close()
    store = SQLStore(postgres_url, timeout=1, pool_size=1, max_overflow=0)
    with store._database.engine().connect():
        start = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.claim(operation(), lease=30, ttl=60)
        assert time.monotonic() - start < 1 + MARGIN
        assert not caught.value.may_have_landed
    store.close()


# -- forks -------------------------------------------------------------------------------------------------------------


def test_every_verb_works_in_a_forked_child_and_afterwards_in_the_parent(store: SQLStore) -> None:
    parents = acquired(store)

    def child(number: int) -> list[Any]:
        claim = acquired(store)
        renewals = store.renew([claim, parents])  # the parent's is renewed by four at once, so it may be busy
        answers: list[Any] = [renewals[claim.token] is Renewal.RENEWED and renewals[parents.token] is not Renewal.LOST]
        answers += [store.complete(claim, RESULT), forked(1, lambda _: store.get(claim.key))[0]]
        return answers

    for renewed, ended, record in forked(4, child):
        assert renewed
        assert ended is Ended.COMPLETED
        assert record.state is State.COMPLETED
    assert store.complete(parents, RESULT) is Ended.COMPLETED


def test_a_fork_in_the_middle_of_other_threads_verbs(store: SQLStore) -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            acquired(store)

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert forked(1, lambda _: store.claim(operation(), lease=30, ttl=60).answer) == [Answer.ACQUIRED]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_parent_that_closes_takes_nothing_from_its_child(tmp_path: Path) -> None:
    """A child that inherited SQLite's belief in its parent's locks would lose its log when the parent closes."""
    url = f"sqlite:///{tmp_path}/idem.db"
    store = SQLStore(url, timeout=30)
    acquired(store)
    to_child, from_parent = os.pipe()

    def child(number: int) -> Claim:
        first = acquired(store)
        os.read(to_child, 1)
        acquired(store)
        return first

    closer = threading.Timer(0.5, lambda: (store.close(), os.write(from_parent, b"x")))
    closer.start()
    [claim] = forked(1, child)
    closer.join()
    assert len(list(store.find())) == 3
    assert store.get(claim.key) is not None
    store.close()
    os.close(to_child)
    os.close(from_parent)


@postgres
def test_an_engine_of_the_callers_own(postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url)
    store = SQLStore(engine, timeout=30)
    store.create_schema()
    assert store.name == "postgresql"
    claim = acquired(store)
    assert forked(1, lambda _: store.complete(claim, RESULT)) == [Ended.COMPLETED]
    with engine.connect() as connection:  # it is as it was: in a transaction, and its connections are alive
        connection.execute(sa.text("CREATE TABLE gone (id INTEGER)"))
        connection.rollback()
        assert not sa.inspect(connection).has_table("gone")
    record = store.get(claim.key)
    assert record is not None
    assert record.state is State.COMPLETED
    store.close()
    engine.dispose()


# -- odd rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("column", "value"), [("rev", "5.5"), ("rev", "x'00'"), ("record_version", "1.5")])
def test_an_odd_row_costs_no_other_lease_its_renewal_and_leaves_no_transaction_open(
    tmp_path: Path, column: str, value: str
) -> None:
    store = SQLStore(f"sqlite:///{tmp_path}/idem.db", timeout=30)
    store.create_schema()
    odd, sound = acquired(store), acquired(store)
    calls = [store._database.call() for _ in range(3)]  # as many connections as a pool of threads has used
    for call in calls:
        call.execute("read", {"key": odd.key})
    for call in calls:
        call.close()
    others = sa.create_engine(f"sqlite:///{tmp_path}/idem.db", connect_args={"timeout": 0.2})
    with others.begin() as connection:
        connection.execute(
            sa.text(f"UPDATE celery_idem_record SET {column} = {value} WHERE key = :key"), {"key": odd.key}
        )
    answers = store.renew([odd, sound])
    assert answers[sound.token] is Renewal.RENEWED
    assert answers.get(odd.token, Renewal.BUSY) is Renewal.BUSY
    claims = [acquired(store) for _ in range(4)]
    with others.begin() as connection:  # another process finds every claim, and may write
        found = connection.execute(sa.text("SELECT key FROM celery_idem_record")).scalars().all()
        connection.execute(sa.text("UPDATE celery_idem_record SET holder = 'x' WHERE key = 'nobody'"))
    assert {claim.key for claim in claims} <= set(found)
    others.dispose()
    store.close()


@postgres
@pytest.mark.parametrize(("options", "looks"), [({}, 1), ({"pool_pre_ping": True}, 6), ({"pool_recycle": 3600}, 6)])
def test_a_pool_that_is_to_look_at_its_connections_does(postgres_url: str, options: Any, looks: int) -> None:
    """Else a connection at hand is taken, of which the pool knows nothing for as long as there is work."""
    store = SQLStore(postgres_url, **options)
    store.create_schema()
    taken = []
    sa.event.listen(store._database.engine(), "checkout", lambda *_: taken.append(1))
    for _ in range(6):
        store.get(new_key())
    assert len(taken) == looks
    store.close()
