"""The schema or a row is not what this release expects."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_idem.core.records import RECORD_VERSION, Answer, Ended, Renewal
from celery_idem.errors import ConfigurationError, RecordCorrupt
from celery_idem.stores.sql import SQLStore, metadata
from tests.contract.sql_help import RESULT, acquired, forked, operation, session

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


# -- schema ------------------------------------------------------------------------------------------------------------


@postgres
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_missing_table_names_the_command_that_makes_it(postgres_url: str, driver: str) -> None:
    store = SQLStore(driven(postgres_url, driver), timeout=30)
    for verb in (store.check, lambda: store.claim(operation(), lease=30, ttl=60), lambda: store.get("k")):
        with pytest.raises(ConfigurationError, match="celery -A <app> idem init"):
            verb()
    store.create_schema()
    assert acquired(store)
    store.close()


def test_an_outdated_table_names_the_command_that_updates_it(store: SQLStore, url: str) -> None:
    claim = acquired(store)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE celery_idem_record DROP COLUMN namespace"))
    if store.name == "postgresql":
        with pytest.raises(ConfigurationError, match=r"lacks namespace.*celery -A <app> idem init"):
            store.check()
        with pytest.raises(ConfigurationError, match="celery -A <app> idem init"):
            store.get(claim.key)
        store.create_schema()
    record = store.get(claim.key)
    assert record is not None
    assert record.namespace == ""
    assert store.complete(claim, RESULT) is Ended.COMPLETED
    engine.dispose()


def test_a_table_of_a_newer_release_serves_this_one(store: SQLStore, url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE celery_idem_record ADD COLUMN future TEXT NOT NULL DEFAULT 'x'"))
    store.check()
    store.create_schema()
    assert store.complete(acquired(store), RESULT) is Ended.COMPLETED
    engine.dispose()


def test_many_processes_make_the_schema_at_once(url: str) -> None:
    store = SQLStore(url, timeout=30)

    def first_use(number: int) -> Answer:
        if store.name == "postgresql":
            store.create_schema()
        return store.claim(operation(), lease=30, ttl=60).answer

    assert forked(12, first_use) == [Answer.ACQUIRED] * 12
    store.create_schema()
    store.close()


def test_the_metadata_alone_makes_the_schema(url: str) -> None:
    engine = sa.create_engine(url)
    metadata.create_all(engine)
    engine.dispose()
    store = SQLStore(url, timeout=30)
    assert all("schema" not in warning for warning in store.check())
    assert acquired(store)
    store.close()


@postgres
def test_check_finds_a_role_without_rights_and_a_server_that_forgets(postgres_url: str) -> None:
    store = SQLStore(postgres_url, timeout=30)
    store.create_schema()
    store.close()
    name = f"reader_{os.getpid()}"
    with session(postgres_url) as cursor:
        cursor.execute("SELECT current_database()")
        database = cursor.fetchone()[0]
        cursor.execute(f"CREATE ROLE {name} LOGIN")
        cursor.execute(f"ALTER DATABASE {database} SET synchronous_commit = off")
        reader = SQLStore(postgres_url.replace("postgres@", f"{name}@"))
        with pytest.raises(ConfigurationError, match="SELECT, INSERT, UPDATE, DELETE"):
            reader.check()
        with pytest.raises(ConfigurationError, match="grants"):
            reader.get("k")
        reader.close()
        assert any("synchronous_commit" in warning for warning in store.check())
        store.close()
        cursor.execute(f"DROP ROLE {name}")


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("sqlite://", "memory://"),
        ("sqlite:///:memory:", "memory://"),
        ("mysql://u@h/d", "no SQL store on mysql"),
        ("postgresql", "no SQLAlchemy URL"),
        ("postgresql://u@h:port/d", "no SQLAlchemy URL"),
    ],
)
def test_a_url_no_store_can_serve(url: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        SQLStore(url, timeout=30)


def test_a_missing_driver() -> None:
    with pytest.raises(ConfigurationError, match="install the driver"):
        SQLStore("postgresql+nonesuch://u@h/d").get("k")


# -- rows --------------------------------------------------------------------------------------------------------------


def alter(url: str, key: str, **values: Any) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        table = metadata.tables["celery_idem_record"]
        connection.execute(sa.update(table).where(table.c.key == key).values(**values))
    engine.dispose()


@pytest.mark.parametrize(
    "garbage",
    [{"notes": "{"}, {"notes": '{"m": {"continuing": {"token": 7}}}'}, {"answer": "MAYBE"}, {"outcome": "GARBAGE"}],
)
def test_an_unreadable_record_is_named_and_can_be_forgotten(store: SQLStore, url: str, garbage: dict[str, str]) -> None:
    claim, fine = acquired(store), acquired(store)
    assert not store.forget(claim.key, None)
    alter(url, claim.key, **garbage)
    for verb in (
        lambda: store.claim(operation(claim.key), lease=30, ttl=60),
        lambda: store.get(claim.key),
        lambda: store.forget(claim.key, claim.fence),
    ):
        with pytest.raises(RecordCorrupt, match=f"idem forget {claim.key}"):
            verb()
    found = store.find()
    assert next(found).key == fine.key
    with pytest.raises(RecordCorrupt, match=claim.key):
        next(found)
    assert not store.forget(fine.key, None)
    assert store.forget(claim.key, None)
    assert not store.forget(claim.key, None)
    assert store.claim(operation(claim.key), lease=30, ttl=60).answer is Answer.ACQUIRED


def test_a_body_that_makes_no_sense_still_proves_completion(store: SQLStore, url: str) -> None:
    claim = acquired(store)
    store.complete(claim, RESULT)
    alter(url, claim.key, body=b"\xff\x00", content_type=None, checksum="wrong")
    decision = store.claim(operation(claim.key), lease=30, ttl=60)
    assert decision.answer is Answer.COMPLETED
    assert decision.record is not None
    assert decision.record.outcome is not None
    assert decision.record.outcome.encoded is not None
    assert decision.record.outcome.encoded.body == b"\xff\x00"


@pytest.mark.parametrize("notes", ["{}", '{"m": "of another shape"}'])
def test_a_record_of_a_newer_release_is_never_touched(store: SQLStore, url: str, notes: str) -> None:
    claim = acquired(store, lease=0.001)
    alter(url, claim.key, record_version=RECORD_VERSION + 1, notes=notes)
    before = raw(url, claim.key)
    assert store.claim(operation(claim.key), lease=30, ttl=60).answer is Answer.NEWER
    assert store.complete(claim, RESULT) in {Ended.LOST, Ended.COMPLETED}
    assert store.renew([claim]) == {claim.token: Renewal.LOST}
    store.settle(claim.key, "m")
    store.note_parked(claim.key, "m", 0, 1)
    assert not store.forget(claim.key, claim.fence)
    assert not store.forget(claim.key, None)
    assert raw(url, claim.key) == before


def raw(url: str, key: str) -> tuple[Any, ...]:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        table = metadata.tables["celery_idem_record"]
        found = tuple(connection.execute(sa.select(table).where(table.c.key == key)).one())
    engine.dispose()
    return found


def test_what_a_newer_release_put_into_a_note_survives(store: SQLStore, url: str) -> None:
    claim = acquired(store, continues=True)
    future = {"m": {"over": -1, "future": [1]}, "other": {"future": "kept", "at": 1.0}}
    alter(url, claim.key, notes=json.dumps(future), rev=5)
    assert store.complete(claim, RESULT) is Ended.COMPLETED
    store.note_parked(claim.key, "m", 0, 2)
    store.settle(claim.key, "m")
    notes = json.loads(raw(url, claim.key)[24])
    assert notes["other"] == future["other"]
    assert notes["m"]["future"] == [1]
    assert notes["m"]["settled"] is True
    assert notes["m"]["parked"] == [0, 2]


def test_values_the_database_cannot_hold_are_a_configuration_error(store: SQLStore) -> None:
    with pytest.raises(ConfigurationError, match="cannot keep"):
        store.claim(operation(message="m\udcff"), lease=30, ttl=60)
    if store.name == "postgresql":
        with pytest.raises(ConfigurationError, match="cannot keep"):
            store.claim(operation(message="m\0"), lease=30, ttl=60)
    assert acquired(store)
