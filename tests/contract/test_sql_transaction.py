"""A body's transaction on the SQL store: the record's lock, its completion, and all that can go wrong with it."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from celery_idem.core.engine import Ending, Engine
from celery_idem.core.policy import Policy
from celery_idem.core.records import Answer, Claim, Ended, Release, Renewal, State, Status
from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.stores.base import Transactional
from celery_idem.stores.memory import MemoryStore
from celery_idem.stores.sql import SQLStore
from celery_idem.stores.sql.transaction import SQLTransaction
from tests.contract.sql_help import AT_ONCE, MARGIN, RESULT, acquired, forked, locked_row, operation, session
from tests.support.chaos_proxy import ChaosProxy
from tests.support.operations import answered
from tests.support.services import PostgresServer
from tests.support.workers import wait_until

postgres = pytest.mark.postgres
DRIVERS = ["psycopg2", "psycopg"]
LEDGER = "CREATE TABLE ledger (amount INTEGER UNIQUE DEFERRABLE INITIALLY DEFERRED)"


@pytest.fixture(params=["sqlite", *(pytest.param(driver, marks=postgres) for driver in DRIVERS)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return prepared(f"sqlite:///{tmp_path}/idem.db")
    return prepared(request.getfixturevalue("postgres_url").replace("psycopg2", request.param))


@pytest.fixture(params=DRIVERS)
def pg_url(request: pytest.FixtureRequest, postgres_url: str) -> str:
    return prepared(postgres_url.replace("psycopg2", request.param))


def prepared(url: str) -> str:
    store = SQLStore(url, timeout=30)
    store.create_schema()
    store.close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text(LEDGER if "postgresql" in url else "CREATE TABLE ledger (amount INTEGER UNIQUE)"))
    engine.dispose()
    return url


@pytest.fixture
def store(url: str) -> Iterator[SQLStore]:
    store = SQLStore(url, timeout=30)
    yield store
    assert checked_out(store) == 0
    store.close()


@pytest.fixture
def pg(pg_url: str) -> Iterator[SQLStore]:
    store = SQLStore(pg_url, timeout=30)
    yield store
    assert checked_out(store) == 0
    store.close()


def checked_out(store: SQLStore) -> int:
    pool: Any = store._database.transacting().pool
    return int(pool.checkedout())


def begun(store: SQLStore, claim: Claim | None) -> SQLTransaction:
    transaction = store.begin(claim)
    assert transaction is not None
    return transaction


def write(transaction: SQLTransaction, amount: int = 50) -> None:
    transaction.carrier.connection.execute(sa.text("INSERT INTO ledger VALUES (:amount)"), {"amount": amount})


def amounts(url: str) -> list[int]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = [row[0] for row in connection.execute(sa.text("SELECT amount FROM ledger ORDER BY amount"))]
    engine.dispose()
    return found


def state(store: SQLStore, claim: Claim) -> State:
    record = store.get(claim.key)
    assert record is not None
    return record.state


# -- together or not at all --------------------------------------------------------------------------------------------


def test_only_sql_stores_have_transactions(store: SQLStore) -> None:
    assert isinstance(store, Transactional)
    assert not isinstance(MemoryStore(), Transactional)


@pytest.mark.parametrize("continues", [False, True])
def test_what_was_written_commits_with_the_completion(store: SQLStore, url: str, continues: bool) -> None:
    claim = acquired(store, continues=continues)
    transaction = begun(store, claim)
    write(transaction)
    assert (amounts(url), state(store, claim)) == ([], State.CLAIMED)
    assert transaction.commit(RESULT) is Ended.COMPLETED
    assert (amounts(url), state(store, claim)) == ([50], State.COMPLETED)
    transaction.rollback()  # it is over
    assert amounts(url) == [50]
    store.settle(claim.key, "m")
    record = store.get(claim.key)
    assert record is not None
    assert (record.outcome, record.note("m").settled) == (RESULT, continues or record.note("m").settled)
    assert store.release(claim, Release.ENDED) is Ended.COMPLETED


def test_what_was_rolled_back_is_not_there(store: SQLStore, url: str) -> None:
    claim = acquired(store, continues=True)
    transaction = begun(store, claim)
    write(transaction)
    transaction.rollback()
    transaction.rollback()
    assert (amounts(url), state(store, claim)) == ([], State.CLAIMED)
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    again = begun(store, claim)
    write(again)
    assert again.commit(RESULT) is Ended.COMPLETED
    assert amounts(url) == [50]


def test_a_completion_rolled_back_at_the_last_moment_leaves_no_trace(store: SQLStore, url: str) -> None:
    """A row is remembered for ``settle``: one that was never committed must not be."""
    claim = acquired(store, continues=True)
    transaction = begun(store, claim)
    write(transaction)
    transaction.carrier.commit = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        transaction.commit(RESULT)
    assert (amounts(url), state(store, claim)) == ([], State.CLAIMED)
    store.renew([claim])  # the row is of the rev now that the completion would have given it
    store.settle(claim.key, "m")
    record = store.get(claim.key)
    assert record is not None
    assert (record.state, dict(record.notes)) == (State.CLAIMED, {})


def test_a_plain_transaction_commits_without_an_outcome(store: SQLStore, url: str) -> None:
    transaction = begun(store, None)
    write(transaction)
    assert amounts(url) == []
    assert transaction.commit(None) is Ended.COMPLETED
    assert amounts(url) == [50]


def test_a_savepoint_is_taken_back_alone(store: SQLStore, url: str) -> None:
    transaction = begun(store, acquired(store))
    write(transaction, 1)
    with contextlib.suppress(KeyError), transaction.carrier.savepoint():
        write(transaction, 2)
        raise KeyError
    with transaction.carrier.savepoint():
        write(transaction, 3)
    assert transaction.commit(RESULT) is Ended.COMPLETED
    assert amounts(url) == [1, 3]


def test_an_orm_session_works_on_it(store: SQLStore, url: str) -> None:
    transaction = begun(store, acquired(store))
    with Session(bind=transaction.carrier.connection) as orm:
        orm.execute(sa.text("INSERT INTO ledger VALUES (1)"))
        orm.commit()
        orm.execute(sa.text("INSERT INTO ledger VALUES (2)"))
        orm.commit()
    assert amounts(url) == []
    assert transaction.commit(RESULT) is Ended.COMPLETED
    assert amounts(url) == [1, 2]


def test_the_owners_engine_serves_too(url: str) -> None:
    """Also one in autocommit mode, as long as the transaction lasts."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    store = SQLStore(engine, timeout=30)
    for amount, ends in ((50, "commit"), (60, "rollback")):
        transaction = begun(store, acquired(store))
        write(transaction, amount)
        assert amounts(url) == ([] if ends == "commit" else [50])
        if ends == "commit":
            transaction.commit(RESULT)
        else:
            transaction.rollback()
    assert amounts(url) == [50]
    with engine.connect() as connection:
        connection.execute(sa.text("INSERT INTO ledger VALUES (51)"))
    with engine.execution_options(isolation_level="SERIALIZABLE").begin() as connection:
        connection.execute(sa.text("INSERT INTO ledger VALUES (52)"))
    assert amounts(url) == [50, 51, 52]
    store.close()
    engine.dispose()


# -- the lock ----------------------------------------------------------------------------------------------------------


def test_a_token_that_has_not_the_key_gets_none(store: SQLStore) -> None:
    lost, done, free = [acquired(store) for _ in range(3)]
    store.claim(operation(lost.key, "thief"), lease=30, ttl=60, dead_fence=lost.fence)
    store.complete(done, RESULT)
    store.release(free, Release.ENDED)
    for claim in (lost, done, free):
        assert store.begin(claim) is None


def test_a_record_that_a_failover_lost_is_restored_for_all_to_see(store: SQLStore, url: str) -> None:
    claim = acquired(store)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM celery_idem_record"))
    engine.dispose()
    transaction = begun(store, claim)
    write(transaction)
    assert store.claim(operation(claim.key), lease=30, ttl=60).answer is Answer.HELD
    assert transaction.commit(RESULT) is Ended.COMPLETED
    assert amounts(url) == [50]


def test_a_lapsed_lease_completes_for_nobody_could_take_it(store: SQLStore, url: str) -> None:
    claim = acquired(store, lease=0.01)
    transaction = begun(store, claim)
    write(transaction)
    time.sleep(0.02)
    other = SQLStore(url, timeout=2)
    start = time.monotonic()
    assert other.claim(operation(claim.key), lease=30, ttl=60).answer is Answer.HELD
    assert other.renew([claim])[claim.token] is not Renewal.LOST
    assert time.monotonic() - start < 4 + MARGIN
    other.close()
    assert transaction.commit(RESULT) is Ended.COMPLETED


@postgres
def test_it_waits_for_a_lock_no_longer_than_the_timeout(pg_url: str) -> None:
    store, patient = SQLStore(pg_url, timeout=1), SQLStore(pg_url, timeout=30)
    claim = acquired(patient)
    with locked_row(pg_url, claim.key):
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="locked"):
            store.begin(claim)
        assert 0.7 < time.monotonic() - start < 1 + MARGIN
    lock = locked_row(pg_url, claim.key)
    lock.__enter__()
    threading.Timer(0.2, lock.__exit__, (None, None, None)).start()
    begun(patient, claim).rollback()
    for each in (store, patient):
        assert checked_out(each) == 0
        each.close()


def test_a_locked_file_costs_no_more_than_the_timeout(tmp_path: Path) -> None:
    url = prepared(f"sqlite:///{tmp_path}/idem.db")
    store, other = SQLStore(url, timeout=0.5), SQLStore(url, timeout=30)
    first = begun(store, acquired(store))
    for claim in (None, first._claim):
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.begin(claim)
        assert 0.3 < time.monotonic() - start < 4, "not the 5 s that SQLite waits by itself"
    first.rollback()
    assert checked_out(store) == 0
    store.close()
    other.close()


@postgres
def test_it_is_read_committed_whatever_the_database_says(pg: SQLStore, pg_url: str) -> None:
    with session(pg_url) as cursor:
        cursor.execute("SELECT current_database()")
        name = cursor.fetchone()[0]
        cursor.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    claim = acquired(pg)
    transaction = begun(pg, claim)
    level = transaction.carrier.connection.exec_driver_sql("SHOW transaction_isolation").scalar_one()
    assert level == "read committed"
    write(transaction)
    assert transaction.commit(RESULT) is Ended.COMPLETED


@postgres
def test_the_time_is_read_after_the_row_is_held(pg: SQLStore) -> None:
    claim = acquired(pg)
    transaction = begun(pg, claim)
    began = time.time()
    time.sleep(0.3)
    assert transaction.commit(RESULT) is Ended.COMPLETED
    record = pg.get(claim.key)
    assert record is not None
    assert record.completed_at is not None
    assert record.completed_at > began + 0.25  # now() would have stood still


# -- no answer, or a no ------------------------------------------------------------------------------------------------


@postgres
def test_a_long_statement_of_the_bodys_is_nobodys_business(pg_url: str) -> None:
    store = SQLStore(pg_url, timeout=3)
    transaction = begun(store, acquired(store))
    write(transaction)
    transaction.carrier.connection.exec_driver_sql("SELECT pg_sleep(3.5)")
    assert transaction.commit(RESULT) is Ended.COMPLETED
    assert amounts(pg_url) == [50]
    store.close()


@postgres
def test_a_stopped_server_costs_no_more_than_the_timeout(private_postgres: PostgresServer) -> None:
    url = prepared(private_postgres.url)
    store, patient = SQLStore(url, timeout=1), SQLStore(url, timeout=20)
    claim = acquired(patient)

    def patiently_begun(claim: Claim | None) -> SQLTransaction:
        made: list[SQLTransaction] = []
        wait_until(lambda: answered(lambda: made.append(begun(store, claim))), 20, "a transaction")
        return made[0]

    def timed(work: Callable[[], Any]) -> None:
        private_postgres.pause()
        try:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                work()
            assert time.monotonic() - start < 2 + MARGIN  # a verb, and the rollback of what it left
        finally:
            private_postgres.resume()

    timed(lambda: store.begin(claim))
    transaction = patiently_begun(claim)
    timed(lambda: transaction.commit(RESULT))
    plain = patiently_begun(None)
    write(plain)
    timed(lambda: plain.commit(None))
    transaction = patiently_begun(claim)
    private_postgres.pause()
    start = time.monotonic()
    transaction.rollback()
    assert time.monotonic() - start < 1 + MARGIN
    private_postgres.resume()
    assert patient.release(claim, Release.YIELDED) is Ended.RELEASED
    assert checked_out(store) == 0
    store.close()
    patient.close()


@postgres
def test_a_connection_cut_before_the_commit_leaves_nothing(pg: SQLStore, pg_url: str) -> None:
    claim = acquired(pg)
    transaction = begun(pg, claim)
    write(transaction)
    pid = transaction.carrier.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with session(pg_url) as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", (pid,))
    with pytest.raises(StoreUnavailable):
        transaction.commit(RESULT)
    assert amounts(pg_url) == []
    assert pg.release(claim, Release.INTERRUPTED) is Ended.RELEASED


def cut_off(connection: Any, url: str) -> None:
    """As a pooler, a proxy or idle_in_transaction_session_timeout would."""
    pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with session(url) as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", (pid,))


@postgres
def test_a_body_whose_transaction_was_cut_off_keeps_its_key(pg: SQLStore, pg_url: str) -> None:
    policy = Policy(wait_timeout=0, lease=3)
    engine, other = Engine(pg, policy), SQLStore(pg_url)
    asked, answers = operation(), []

    def body(context: Any) -> str:
        with context.transaction() as connection:
            connection.execute(sa.text("INSERT INTO ledger VALUES (50)"))
            cut_off(connection, pg_url)
            until = time.monotonic() + 1.5 * policy.lease
            while time.monotonic() < until:
                answers.append(other.claim(operation(asked.key), lease=3, ttl=60).answer)
                time.sleep(0.05)
        return "paid"

    with pytest.raises(StoreUnavailable):
        engine.run(asked, body)
    assert set(answers) == {Answer.HELD}
    assert amounts(pg_url) == []
    anew = other.claim(operation(asked.key), lease=3, ttl=60)
    assert anew.answer is Answer.RECLAIMED
    engine.heartbeat.stop()
    other.close()


@postgres
def test_a_body_whose_transaction_was_cut_off_and_whose_key_was_taken_is_stopped(pg_url: str) -> None:
    store, other = SQLStore(pg_url), SQLStore(pg_url)
    engine = Engine(store, Policy(wait_timeout=0, lease=0.6))
    asked = operation()

    def body(context: Any) -> str:
        with context.transaction() as connection:
            cut_off(connection, pg_url)
            wait_until(taken, 10, "the lock is gone, and another worker takes the key")
            wait_until(lambda: context.lost, 10, "the renewal hears of it")
            context.check()
        return "paid"

    def taken() -> bool:
        (record,) = other.find()
        return other.claim(taking, lease=60, ttl=60, dead_fence=record.fence).claim is not None

    taking = operation(asked.key)
    assert engine.attempt(asked, body).status is Status.LEASE_LOST
    engine.heartbeat.stop()
    store.close()
    other.close()


@postgres
def test_an_error_the_body_swallowed_is_not_lost(pg: SQLStore, pg_url: str) -> None:
    claim = acquired(pg)
    transaction = begun(pg, claim)
    write(transaction)
    with pytest.raises(DBAPIError):
        transaction.carrier.connection.exec_driver_sql("SELECT nonsense")
    with pytest.raises(Exception, match="transaction is aborted"):
        transaction.commit(RESULT)
    assert (amounts(pg_url), state(pg, claim)) == ([], State.CLAIMED)


@postgres
def test_a_constraint_that_is_checked_at_the_end_is_told_as_it_is(pg: SQLStore, pg_url: str) -> None:
    claim = acquired(pg)
    transaction = begun(pg, claim)
    write(transaction)
    write(transaction)
    with pytest.raises(IntegrityError, match="ledger_amount_key"):
        transaction.commit(RESULT)
    assert (amounts(pg_url), state(pg, claim)) == ([], State.CLAIMED)


@postgres
@pytest.mark.parametrize("landed", [True, False])
def test_a_commit_whose_reply_was_lost_is_asked_for(pg_url: str, landed: bool) -> None:
    with ChaosProxy.before(pg_url) as proxy:
        store = SQLStore(proxy.url(pg_url), timeout=2)
        engine = Engine(store, Policy(wait_timeout=0), store_timeout=10)
        engine.run(operation(), lambda context: None)  # its connection is there
        asked = operation()
        runs: list[bool] = []

        def body(context: Any) -> str:
            runs.append(context.reclaimed)
            with context.transaction() as connection:
                connection.execute(sa.text("INSERT INTO ledger VALUES (50)"))
            if len(runs) == 1:
                proxy.drop_replies(after=1 if landed else 0)  # the completion's, then the commit's
                threading.Thread(target=heal).start()
            return "paid"

        def heal() -> None:
            wait_until(lambda: proxy.dropped, 10, "a lost reply", interval=0.001)
            proxy.heal()

        if landed:
            result = engine.run(asked, body)
            assert (result.status, result.value, amounts(pg_url)) == (Status.EXECUTED, "paid", [50])
        else:  # later, for a body that outlives its connection each time must not be run without a pause
            with pytest.raises(StoreUnavailable):
                engine.run(asked, body)
            assert amounts(pg_url) == []
        assert proxy.dropped
        anew = engine.run(operation(asked.key), body)
        assert (anew.value, amounts(pg_url)) == ("paid", [50])
        assert runs == ([False] if landed else [False, True])
        assert checked_out(store) == 0
        engine.heartbeat.stop()
        store.close()


@postgres
def test_a_stale_connection_goes_unnoticed(private_postgres: PostgresServer) -> None:
    url = prepared(private_postgres.url)
    store = SQLStore(url, timeout=30)
    engine = Engine(store, Policy(wait_timeout=0))

    def body(context: Any) -> str:
        with context.transaction() as connection:
            connection.exec_driver_sql("INSERT INTO ledger VALUES (DEFAULT)")
        return "paid"

    assert engine.run(operation(), body).value == "paid"
    private_postgres.restart()
    assert engine.run(operation(), body).value == "paid"
    engine.heartbeat.stop()
    store.close()


def test_a_begin_without_an_answer_is_an_outage_and_not_the_bodys_failure(tmp_path: Path) -> None:
    url = prepared(f"sqlite:///{tmp_path}/idem.db")
    store, blocker = SQLStore(url, timeout=0.3), SQLStore(url, timeout=30)
    engine = Engine(store, Policy(wait_timeout=0), store_timeout=0)
    held: list[SQLTransaction] = []

    def body(context: Any) -> str:
        held.append(begun(blocker, None))
        with context.transaction():
            return "never"

    asked = operation()
    with pytest.raises(StoreUnavailable):  # and no result that tells of the body's own error
        engine.attempt(asked, body, ending=lambda value, error: Ending.keep())
    held[0].rollback()

    def released() -> bool:
        record = store.get(asked.key)
        return record is not None and record.state is State.RELEASED

    wait_until(released, 10, "the heartbeat gives the key back")
    engine.heartbeat.stop()
    store.close()
    blocker.close()


# -- many at once ------------------------------------------------------------------------------------------------------


@postgres
def test_open_transactions_keep_no_verb_waiting(pg_url: str) -> None:
    """More of them than the store's own pool has connections."""
    patient = SQLStore(pg_url, timeout=30)
    open_ones = [begun(patient, acquired(patient)) for _ in range(20)]
    for number, transaction in enumerate(open_ones):
        write(transaction, number)
    start = time.monotonic()
    assert patient.claim(operation(), lease=30, ttl=60).answer is Answer.ACQUIRED
    assert time.monotonic() - start < AT_ONCE
    for transaction in open_ones:
        assert transaction.commit(RESULT) is Ended.COMPLETED
    assert checked_out(patient) == 0
    patient.close()
    assert len(amounts(pg_url)) == 20


def test_threads_share_a_store(store: SQLStore, url: str) -> None:
    def work(number: int) -> None:
        transaction = begun(store, acquired(store))
        write(transaction, number)
        if number % 2:
            transaction.rollback()
        else:
            transaction.commit(RESULT)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert amounts(url) == [0, 2, 4, 6, 8]


def test_forked_children_have_transactions_of_their_own(store: SQLStore, url: str) -> None:
    begun(store, acquired(store)).rollback()  # a connection is idle in the parent

    def work(number: int) -> int:
        transaction = begun(store, acquired(store))
        write(transaction, number)
        if number == 3:
            transaction.rollback()
        else:
            transaction.commit(RESULT)
        return number

    assert sorted(forked(4, work)) == [0, 1, 2, 3]
    transaction = begun(store, acquired(store))
    write(transaction, 4)
    transaction.commit(RESULT)
    assert amounts(url) == [0, 1, 2, 4]


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logging_server() -> Iterator[PostgresServer]:
    with PostgresServer(options=["-c", "log_statement=all", "-c", "autovacuum=off"]) as server:
        prepared(server.url)
        yield server


@postgres
@pytest.mark.parametrize("driver", DRIVERS)
def test_it_costs_one_lock_and_no_transaction_more(logging_server: PostgresServer, driver: str) -> None:
    store = SQLStore(logging_server.url.replace("psycopg2", driver))
    begun(store, acquired(store)).rollback()
    snapshot = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
    began, written = len(logging_server.log), int(logging_server.execute(snapshot))

    claim = acquired(store, continues=True)
    transaction = begun(store, claim)
    write(transaction, {"psycopg2": 1, "psycopg": 2}[driver])
    transaction.commit(RESULT)
    store.settle(claim.key, "m")

    written = int(logging_server.execute(snapshot)) - written
    lines = re.findall(r"LOG:  (?:statement|execute [^:]*): (.*)", logging_server.log[began:])
    words = [re.findall(r"BEGIN|COMMIT|INSERT|UPDATE|SELECT", line) for line in lines if snapshot not in line]
    first = [line[0] if "INSERT" not in line and "UPDATE" not in line else line[-1] for line in words]
    assert len(first) == 7, lines  # claim, BEGIN, lock, the body's own, completion, COMMIT; settle
    assert (first[1], first[5]) == ("BEGIN", "COMMIT")
    assert written == 3  # as without it: the claim, the completion with what was written; settle
    store.close()


@postgres
def test_another_database_is_refused(pg: SQLStore, postgres_server: PostgresServer) -> None:
    """By the record, which only the store's own database has."""
    from celery_idem.stores.sql.database import Database
    from celery_idem.stores.sql.transaction import OwnCarrier

    elsewhere = postgres_server.create_database()
    claim = acquired(pg)
    for ready in (False, True):
        if ready:
            prepared(elsewhere)
        database = Database(elsewhere, 5, None, {})
        with pytest.raises(ConfigurationError, match="another database"):
            pg.begin(claim, OwnCarrier(database))
        database.transacting().dispose()
    assert state(pg, claim) is State.CLAIMED
    postgres_server.drop_database(elsewhere)
