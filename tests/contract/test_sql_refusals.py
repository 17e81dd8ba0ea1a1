"""A database that lets nobody in says what to do: no worker starts so, and one that runs waits."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.stores.sql import SQLStore
from tests.contract.sql_help import forked, operation, session
from tests.support.services import PostgresServer


def refused_at_start_and_away_at_run_time(url: str) -> str:
    """What a store says that ``check`` refuses and a message waits for."""
    store = SQLStore(url, timeout=30)
    with pytest.raises(ConfigurationError) as at_start:
        store.check()
    with pytest.raises(StoreUnavailable) as at_run_time:
        store.claim(operation(), lease=30, ttl=60)
    assert not at_run_time.value.may_have_landed
    store.close()
    assert str(at_start.value).rpartition(": ")[2] == str(at_run_time.value).rpartition(": ")[2]
    return str(at_start.value)


def test_a_sqlite_file_whose_directory_is_missing(tmp_path: Path) -> None:
    said = refused_at_start_and_away_at_run_time(f"sqlite:///{tmp_path}/no/such/directory/idem.db")
    assert f"there is no directory {tmp_path}/no/such/directory: make it" in said
    (tmp_path / "file").write_text("")
    assert f"{tmp_path}/file is no directory: " in refused_at_start_and_away_at_run_time(
        f"sqlite:///{tmp_path}/file/idem.db"
    )


def test_a_sqlite_store_that_names_a_directory(tmp_path: Path) -> None:
    assert f"{tmp_path} is a directory: name a file" in refused_at_start_and_away_at_run_time(f"sqlite:///{tmp_path}")


def test_a_sqlite_file_that_this_user_may_not_write() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        folder = Path(made)
        for name in ("locked.db", "shut/idem.db", "closed/in/idem.db"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            store = SQLStore(f"sqlite:///{folder / name}")
            store.create_schema()
            store.close()
        (folder / "locked.db").chmod(0o444)
        folder.chmod(0o777)
        (folder / "shut").chmod(0o555)
        (folder / "closed").chmod(0o000)

        def as_nobody(_: int) -> list[str]:
            if os.getuid() == 0:
                os.setuid(65534)
            names = ("locked.db", "shut/idem.db", "closed/in/idem.db", "shut/new.db")
            return [refused_at_start_and_away_at_run_time(f"sqlite:///{folder / name}") for name in names]

        (locked, shut, closed, new) = forked(1, as_nobody)[0]
        (folder / "closed").chmod(0o755)
    assert f"this user may not write {folder}/locked.db: grant it" in locked
    assert f"this user may not write into {folder}/shut: grant it" in shut
    assert f"this user may not get to {folder}/closed/in: grant it" in closed
    assert f"this user may not write into {folder}/shut: grant it" in new


def test_a_file_that_another_process_writes_passes_the_check(tmp_path: Path) -> None:
    store = SQLStore(f"sqlite:///{tmp_path}/idem.db", timeout=1)
    assert store.check() == []
    with contextlib.closing(sqlite3.connect(tmp_path / "idem.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store.check() == []
    store.close()


# -- PostgreSQL --------------------------------------------------------------------------------------------------------

HBA = """
host all postgres,ghost,locked_out all trust
host all secretive all scram-sha-256
host all banned all reject
"""


@pytest.fixture(scope="module")
def strict_postgres() -> Iterator[str]:
    with PostgresServer() as server:
        with session(server.url) as cursor:
            cursor.execute("CREATE ROLE secretive LOGIN PASSWORD 'r1ght'")
            cursor.execute("CREATE ROLE locked_out")
            cursor.execute("CREATE ROLE banned LOGIN")
            cursor.execute("CREATE DATABASE private")
            cursor.execute("REVOKE CONNECT ON DATABASE private FROM public")
            cursor.execute("SHOW hba_file")
            Path(cursor.fetchone()[0]).write_text(HBA)
            cursor.execute("SELECT pg_reload_conf()")
        yield server.url


@pytest.mark.postgres
@pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
@pytest.mark.parametrize(
    ("user", "database", "step"),
    [
        ("postgres", "nowhere", "create it, or correct idempotency_store"),
        ("ghost", "postgres", "create it, or correct the user in idempotency_store"),
        ("locked_out", "postgres", "grant it LOGIN"),
        ("secretive:wr0ng", "postgres", "correct user and password"),
        ("secretive", "postgres", "correct user and password"),
        ("secretive:r1ght", "private", "grant this role CONNECT"),
        ("banned", "postgres", "by pg_hba.conf"),
        ("stranger", "postgres", "by pg_hba.conf"),
    ],
)
def test_postgresql_lets_nobody_in(strict_postgres: str, driver: str, user: str, database: str, step: str) -> None:
    url = strict_postgres.replace("psycopg2", driver).replace("postgres@", f"{user}@")
    said = refused_at_start_and_away_at_run_time(f"{url.rpartition('/')[0]}/{database}")
    assert step in said.rpartition(": ")[2]
    assert "the postgresql store refused" in said
    assert "wr0ng" not in said
