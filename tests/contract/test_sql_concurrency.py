"""Many processes, other people's locks and the caller's own transaction."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from celery_idem.core.records import Answer, Claim, Ended, Release, Renewal, State, replace
from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.stores.sql import SQLStore
from tests.contract.sql_help import AT_ONCE, MARGIN, RESULT, acquired, forked, locked_row, new_key, operation, session

PROCESSES = 16
postgres = pytest.mark.postgres


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/idem.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def store(url: str) -> Iterator[SQLStore]:
    store = SQLStore(url, timeout=20)
    store.create_schema()
    yield store
    store.close()


@pytest.fixture
def pg(postgres_url: str) -> Iterator[SQLStore]:
    store = SQLStore(postgres_url, timeout=30)
    store.create_schema()
    yield store
    store.close()


# -- races -------------------------------------------------------------------------------------------------------------


def race(store: SQLStore, keys: list[str]) -> list[tuple[str, Claim]]:
    """Every process claims every key; returns who got what."""

    def claim_all(number: int) -> list[tuple[str, Claim | None]]:
        shuffled = random.Random(number).sample(keys, len(keys))
        answers = [store.claim(operation(key, f"m{number}"), lease=60, ttl=60) for key in shuffled]
        return [(d.answer.value, None if d.claim is None else replace(d.claim, seen=None)) for d in answers]

    answers = [answer for child in forked(PROCESSES, claim_all) for answer in child]
    assert {answer for answer, claim in answers if claim is None} <= {"HELD"}
    return [(answer, claim) for answer, claim in answers if claim is not None]


def test_one_winner_per_key(store: SQLStore) -> None:
    keys = [new_key() for _ in range(25)]
    won = race(store, keys)
    assert Counter(claim.key for _, claim in won) == dict.fromkeys(keys, 1)
    for _, claim in won:
        record = store.get(claim.key)
        assert record is not None
        assert (record.token, record.fence) == (claim.token, claim.fence)
        assert store.complete(claim, RESULT) is Ended.COMPLETED


def test_one_winner_per_lapsed_claim(store: SQLStore) -> None:
    keys = [new_key() for _ in range(25)]
    lapsed = {key: acquired(store, key, lease=0.001) for key in keys}
    time.sleep(0.01)
    won = race(store, keys)
    assert Counter(claim.key for _, claim in won) == dict.fromkeys(keys, 1)
    assert {answer for answer, _ in won} == {"RECLAIMED"}
    for _, claim in won:
        assert claim.fence > lapsed[claim.key].fence
        assert claim.attempts == 2
        assert store.complete(lapsed[claim.key], RESULT) is Ended.LOST
        assert store.complete(claim, RESULT) is Ended.COMPLETED


def test_threads_share_a_store(store: SQLStore) -> None:
    keys = [new_key() for _ in range(10)]
    answers: list[Answer] = []

    def work() -> None:
        for key in keys:
            decision = store.claim(operation(key), lease=60, ttl=60)
            answers.append(decision.answer)
            if decision.claim is not None:
                store.renew([decision.claim])
                store.complete(decision.claim, RESULT)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 200
    assert answers.count(Answer.ACQUIRED) == 10


# -- a row somebody locks ----------------------------------------------------------------------------------------------


def timed(work: Any, *arguments: Any, **more: Any) -> tuple[Any, float]:
    start = time.monotonic()
    return work(*arguments, **more), time.monotonic() - start


@postgres
def test_a_locked_record_is_held_and_delays_no_other(pg: SQLStore, postgres_url: str) -> None:
    locked = acquired(pg, lease=0.001)
    others = [acquired(pg, lease=0.001) for _ in range(9)]
    time.sleep(0.01)
    with locked_row(postgres_url, locked.key):
        decision, took = timed(pg.claim, operation(locked.key), lease=30, ttl=60)
        assert decision.answer is Answer.HELD
        assert decision.record is not None
        assert decision.record.fence == locked.fence
        assert took < AT_ONCE
        for other in others:
            assert pg.claim(operation(other.key), lease=30, ttl=60).answer is Answer.RECLAIMED
        assert pg.claim(operation(), lease=30, ttl=60).answer is Answer.ACQUIRED
    assert pg.claim(operation(locked.key), lease=30, ttl=60).answer is Answer.RECLAIMED


@postgres
def test_a_locked_row_is_busy_in_a_batch_of_renewals(pg: SQLStore, postgres_url: str) -> None:
    claims = [acquired(pg) for _ in range(10)]
    with locked_row(postgres_url, claims[4].key):
        answers, took = timed(pg.renew, claims)
    assert answers == {c.token: Renewal.BUSY if c is claims[4] else Renewal.RENEWED for c in claims}
    assert took < AT_ONCE
    assert set(pg.renew(claims).values()) == {Renewal.RENEWED}


@postgres
def test_a_batch_answers_each_lease_for_itself(pg: SQLStore, postgres_url: str) -> None:
    plain, lost, vanished, ended = [acquired(pg) for _ in range(4)]
    continuing = acquired(pg, message="c", continues=True)
    pg.complete(continuing, RESULT)
    pg.complete(ended, RESULT)
    pg.claim(operation(lost.key, "thief"), lease=30, ttl=60, dead_fence=lost.fence)
    garbled = acquired(pg)
    with session(postgres_url) as cursor:
        cursor.execute("DELETE FROM celery_idem_record WHERE key = %s", (vanished.key,))
        cursor.execute("UPDATE celery_idem_record SET notes = '{' WHERE key = %s", (garbled.key,))
    claims = [plain, lost, vanished, ended, continuing]
    answers = pg.renew([*claims, garbled])
    assert [answers[c.token] for c in claims] == [
        Renewal.RENEWED,
        Renewal.LOST,
        Renewal.RENEWED,
        Renewal.RENEWED,
        Renewal.RENEWED,
    ]
    assert answers[garbled.token] is not Renewal.LOST
    restored = pg.get(vanished.key)
    assert restored is not None
    assert (restored.token, restored.fence) == (vanished.token, vanished.fence)


@postgres
def test_a_write_waits_for_a_lock_no_longer_than_the_timeout(postgres_url: str) -> None:
    prepared = SQLStore(postgres_url, timeout=30)
    prepared.create_schema()
    store = SQLStore(postgres_url, timeout=1)
    claim = acquired(prepared)
    verbs = [
        lambda: store.complete(claim, RESULT),
        lambda: store.release(claim, Release.ENDED),
        lambda: store.note_parked(claim.key, "m", 0, 1),
        lambda: store.forget(claim.key, claim.fence),
    ]
    with locked_row(postgres_url, claim.key):
        for verb in verbs:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable) as caught:
                verb()
            assert 0.5 < time.monotonic() - start < 1 + MARGIN
            assert not caught.value.may_have_landed
        assert prepared.purge(10) == 0
    assert prepared.complete(claim, RESULT) is Ended.COMPLETED
    prepared.close()
    store.close()


@postgres
def test_a_write_goes_on_when_the_lock_goes(pg: SQLStore, postgres_url: str) -> None:
    claim = acquired(pg)
    lock = locked_row(postgres_url, claim.key)
    lock.__enter__()
    threading.Timer(0.3, lock.__exit__, (None, None, None)).start()
    assert pg.complete(claim, RESULT) is Ended.COMPLETED


def test_a_locked_sqlite_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/idem.db"
    store = SQLStore(url, timeout=0.5)
    live, lapsed = acquired(store), acquired(store, lease=0.001)
    time.sleep(0.01)
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        assert store.claim(operation(live.key), lease=30, ttl=60).answer is Answer.HELD
        decision, took = timed(store.claim, operation(lapsed.key), lease=30, ttl=60)
        assert decision.answer is Answer.HELD
        assert took < 4, "not the 5 s that SQLite waits by itself"
        with pytest.raises(StoreUnavailable) as caught:
            store.claim(operation(), lease=30, ttl=60)
        assert not caught.value.may_have_landed
        answers, took = timed(store.renew, [live, lapsed])
        assert set(answers.values()) == {Renewal.BUSY}
        assert took < 4, "not the 5 s that SQLite waits by itself"
        assert store.purge(10) == 0
        assert store.get(live.key) is not None
        connection.exec_driver_sql("ROLLBACK")
    engine.dispose()
    assert store.claim(operation(lapsed.key), lease=30, ttl=60).answer is Answer.RECLAIMED
    store.close()


# -- completion in the caller's transaction ----------------------------------------------------------------------------


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url)
    yield engine
    engine.dispose()


def state(store: SQLStore, claim: Claim) -> State:
    record = store.get(claim.key)
    assert record is not None
    return record.state


def test_a_completion_commits_with_the_transaction(store: SQLStore, engine: sa.Engine) -> None:
    claim = acquired(store)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ledger (amount INTEGER)"))
    with engine.begin() as connection:
        connection.execute(sa.text("INSERT INTO ledger VALUES (50)"))
        assert store.complete(claim, RESULT, connection=connection) is Ended.COMPLETED
        assert state(store, claim) is State.CLAIMED
    assert state(store, claim) is State.COMPLETED
    assert store.complete(claim, RESULT) is Ended.COMPLETED
    record = store.get(claim.key)
    assert record is not None
    assert record.outcome == RESULT


def test_a_completion_rolls_back_with_the_transaction(store: SQLStore, engine: sa.Engine) -> None:
    claim = acquired(store, continues=True)
    with Session(engine) as orm:
        assert store.complete(claim, RESULT, connection=orm) is Ended.COMPLETED
        orm.rollback()
    assert state(store, claim) is State.CLAIMED
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    store.settle(claim.key, "m")
    assert state(store, claim) is State.CLAIMED
    assert store.release(claim, Release.YIELDED) is Ended.RELEASED


def test_a_lost_claim_is_lost_in_a_transaction_too(store: SQLStore, engine: sa.Engine) -> None:
    claim = acquired(store)
    store.claim(operation(claim.key, "thief"), lease=30, ttl=60, dead_fence=claim.fence)
    with engine.begin() as connection:
        assert store.complete(claim, RESULT, connection=connection) is Ended.LOST


@postgres
def test_an_open_completion_is_held_even_when_the_lease_lapses(pg: SQLStore, postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url)
    claim = acquired(pg, lease=0.2)
    with engine.begin() as connection:
        assert pg.complete(claim, RESULT, connection=connection) is Ended.COMPLETED
        time.sleep(0.3)
        decision, took = timed(pg.claim, operation(claim.key), lease=30, ttl=60)
        assert decision.answer is Answer.HELD
        assert took < AT_ONCE
    assert pg.claim(operation(claim.key), lease=30, ttl=60).answer is Answer.COMPLETED
    engine.dispose()


@postgres
def test_a_vanished_record_is_restored_outside_the_transaction(pg: SQLStore, postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url.replace("psycopg2", "psycopg"))
    claim = acquired(pg)
    with session(postgres_url) as cursor:
        cursor.execute("DELETE FROM celery_idem_record")
    with engine.begin() as connection:
        assert pg.complete(claim, RESULT, connection=connection) is Ended.COMPLETED
        decision, took = timed(pg.claim, operation(claim.key), lease=30, ttl=60)
        assert decision.answer is Answer.HELD
        assert took < AT_ONCE
    assert state(pg, claim) is State.COMPLETED
    engine.dispose()


@postgres
def test_a_repeatable_read_transaction_is_told_what_to_do(pg: SQLStore, postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url, isolation_level="REPEATABLE READ")
    claim = acquired(pg)
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT count(*) FROM celery_idem_record"))
        pg.renew([claim])
        with pytest.raises(StoreUnavailable, match="REPEATABLE READ") as caught:
            pg.complete(claim, RESULT, connection=connection)
        assert not caught.value.may_have_landed
    assert pg.complete(claim, RESULT) is Ended.COMPLETED
    engine.dispose()


@postgres
def test_repeatable_read_by_default_changes_nothing_for_the_store(pg: SQLStore, postgres_url: str) -> None:
    with session(postgres_url) as cursor:
        cursor.execute("SELECT current_database()")
        name = cursor.fetchone()[0]
        cursor.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    store = SQLStore(postgres_url, timeout=20)
    keys = [new_key() for _ in range(10)]
    assert Counter(claim.key for _, claim in race(store, keys)) == dict.fromkeys(keys, 1)
    store.close()


@postgres
def test_a_transaction_elsewhere_is_refused(pg: SQLStore, tmp_path: Path, postgres_server: Any) -> None:
    claim = acquired(pg)
    elsewhere = sa.create_engine(f"sqlite:///{tmp_path}/other.db")
    with elsewhere.connect() as connection, pytest.raises(ConfigurationError, match="postgresql"):
        pg.complete(claim, RESULT, connection=connection)
    elsewhere.dispose()
    with pytest.raises(ConfigurationError, match="SQLAlchemy"):
        pg.complete(claim, RESULT, connection=object())
    empty_url = postgres_server.create_database()
    empty = sa.create_engine(empty_url)
    with empty.connect() as connection, pytest.raises(ConfigurationError, match="given to complete"):
        pg.complete(claim, RESULT, connection=connection)
    empty.dispose()
    postgres_server.drop_database(empty_url)
