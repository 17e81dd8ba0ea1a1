"""``backend``, ``clock`` and ``store``: every contract test runs once per store it is about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_idem.stores.base import Store
from tests.contract.backends import STORES, Backend, MemoryBackend, PostgresBackend, RedisBackend, SQLiteBackend
from tests.support.clock import ManualClock
from tests.support.services import PostgresServer, RedisServer

TABLE = "celery_idem_record"


@pytest.fixture(scope="session")
def contract_database(postgres_server: PostgresServer) -> Iterator[str]:
    """One PostgreSQL database for every test of the contract: making one for each would take longer than the tests."""
    url = postgres_server.create_database()
    place = PostgresBackend("psycopg2", url)
    place.open().create_schema()
    place.close()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """An empty place of this test's own."""
    place = _place(request, request.param, tmp_path)
    yield place
    place.close()


def _place(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> Backend:
    if name == "memory":
        return MemoryBackend(name, "memory://")
    if name == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return RedisBackend(name, server.new_database())
    if name == "sqlite":
        lite = SQLiteBackend(name, f"sqlite:///{tmp_path / 'idem.db'}")
        lite.open().create_schema()
        return lite
    url: str = request.getfixturevalue("contract_database")
    driver = "postgresql+psycopg" if name == "psycopg3" else "postgresql+psycopg2"
    postgres = PostgresBackend(name, f"{driver}{url[url.index('://') :]}")
    postgres.run(f"TRUNCATE {TABLE}")
    return postgres


@pytest.fixture
def clock() -> ManualClock:
    """The time as ``store`` sees it."""
    return ManualClock()


@pytest.fixture
def store(backend: Backend, clock: ManualClock) -> Store:
    """A store on the backend that goes by ``clock``."""
    return backend.open(clock)


@pytest.fixture
def real_store(backend: Backend) -> Store:
    """A store on the backend that goes by its own clock."""
    return backend.open()
