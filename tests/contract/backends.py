"""The stores the contract is held against, and a way past each of them to the stored bytes."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg2
import pytest
import redis

from celery_idem.stores.base import Store, open_store

STORES = [
    pytest.param("memory", id="memory"),
    pytest.param("sqlite", id="sqlite"),
    pytest.param("redis", id="redis", marks=pytest.mark.redis),
    pytest.param("psycopg2", id="psycopg2", marks=pytest.mark.postgres),
    pytest.param("psycopg3", id="psycopg3", marks=pytest.mark.postgres),
]
"""Every store; PostgreSQL through both of its drivers."""


def on(*names: str) -> pytest.MarkDecorator:
    """Hold a test against these stores only: the others cannot get into the situation it is about."""
    chosen = [param for param in STORES if param.id in names]
    assert len(chosen) == len(names), names
    return pytest.mark.parametrize("backend", chosen, indirect=True)


on_shared = on("sqlite", "redis", "psycopg2", "psycopg3")
"""Stores that several processes share."""

on_servers = on("redis", "psycopg2", "psycopg3")
"""Stores behind a connection that can break."""

on_postgres = on("psycopg2", "psycopg3")


GARBAGE = {
    "redis": ("state", "fence", "answer", "v", "expires", "notes", "type"),
    "sqlite": ("answer", "notes"),
    "psycopg2": ("answer", "notes"),
    "psycopg3": ("answer", "notes"),
}
"""Ways to make a record unreadable that each store lets happen."""


@dataclass
class Backend:
    """One empty place for records: opens stores on it, and closes them when the test is over."""

    name: str
    url: str
    opened: list[Store] = field(default_factory=list)

    def open(self, clock: Callable[[], float] | None = None, *, url: str | None = None, **options: Any) -> Store:
        """Open a store here by a clock of the test's, or by its own; in memory there is only ever one.

        Its timeout is longer than a machine stands still, unless the test is about it.
        """
        if self.name == "memory" and self.opened:
            return self.opened[0]
        if clock is not None:
            options["clock"] = clock
        store = open_store(url or self.url, **{"timeout": 30.0, **options})
        self.opened.append(store)
        return store

    def close(self) -> None:
        """Close every store opened here."""
        for store in self.opened:
            store.close()

    # -- past the store -------------------------------------------------------------------------------------------

    def raw(self, key: str) -> Any:
        """Everything stored under the key, as stored."""
        raise NotImplementedError

    def newer(self, key: str) -> None:
        """Make it a record of a newer release, in a layout of which this one knows only the version."""
        raise NotImplementedError

    def garble(self, key: str, what: str) -> None:
        """Make it a record nobody can read."""
        raise NotImplementedError

    def garble_body(self, key: str) -> None:
        """Change the stored value behind its checksum's back."""
        raise NotImplementedError

    def add_to_note(self, key: str, message: str, **fields: Any) -> None:
        """Give a message's note fields that this release does not know."""
        raise NotImplementedError

    def stored_note(self, key: str, message: str) -> dict[str, Any]:
        """A message's note as stored."""
        raise NotImplementedError


class MemoryBackend(Backend):
    """The one store in this process."""

    def _change(self, key: str, **changes: Any) -> None:
        records = self.opened[0]._records
        records[key] = replace(records[key], **changes)

    def raw(self, key: str) -> Any:
        return self.opened[0]._records.get(key)

    def newer(self, key: str) -> None:
        self._change(key, record_version=2)

    def garble_body(self, key: str) -> None:
        outcome = self.opened[0]._records[key].outcome
        self._change(key, outcome=replace(outcome, encoded=replace(outcome.encoded, body=b"garbled")))


class RedisBackend(Backend):
    """A database of the run's Redis; a record is one hash."""

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A client of the test's own."""
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            yield client

    def raw(self, key: str) -> Any:
        with self.client() as client:
            return client.dump(f"celery_idem:{key}")

    def _set(self, key: str, **fields: Any) -> None:
        with self.client() as client:
            client.hset(f"celery_idem:{key}", mapping=fields)

    def newer(self, key: str) -> None:
        self._set(key, v=2, state="SOMETHING_NEW")

    def garble(self, key: str, what: str) -> None:
        if what == "type":
            with self.client() as client:
                client.set(f"celery_idem:{key}", "not a hash")
        elif what == "notes":
            self._set(key, **{"m:M": "not json"})
        else:
            self._set(key, **{what: "garbage"})

    def garble_body(self, key: str) -> None:
        self._set(key, body=b"garbled")

    def add_to_note(self, key: str, message: str, **fields: Any) -> None:
        note = self.stored_note(key, message)
        self._set(key, **{f"m:{message}": json.dumps({**note, **fields})})

    def stored_note(self, key: str, message: str) -> dict[str, Any]:
        with self.client() as client:
            return json.loads(client.hget(f"celery_idem:{key}", f"m:{message}") or "{}")  # type: ignore[arg-type]


class SQLBackend(Backend):
    """A table ``celery_idem_record``; the notes are one JSON column."""

    mark = "%s"

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection of the test's own, in autocommit mode."""
        raise NotImplementedError

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        with self.connection() as connection:
            cursor = connection.cursor()
            cursor.execute(statement.replace("?", self.mark), values)
            return cursor.fetchall() if cursor.description else []

    def raw(self, key: str) -> Any:
        return self.run("SELECT * FROM celery_idem_record WHERE key = ?", key)

    def _set(self, key: str, **fields: Any) -> None:
        assigned = ", ".join(f"{name} = ?" for name in fields)
        self.run(f"UPDATE celery_idem_record SET {assigned} WHERE key = ?", *fields.values(), key)

    def newer(self, key: str) -> None:
        self._set(key, record_version=2, notes="a layout of its own", answer="SOMETHING_NEW")
        self.run("UPDATE celery_idem_record SET rev = rev + 1 WHERE key = ?", key)  # as every write does

    def garble(self, key: str, what: str) -> None:
        self._set(key, **{"notes": {"notes": "not json"}, "answer": {"answer": "garbage"}}[what])

    def garble_body(self, key: str) -> None:
        self._set(key, body=b"garbled")

    def add_to_note(self, key: str, message: str, **fields: Any) -> None:
        notes = self._notes(key)
        notes.setdefault(message, {}).update(fields)
        self._set(key, notes=json.dumps(notes))

    def stored_note(self, key: str, message: str) -> dict[str, Any]:
        return self._notes(key).get(message, {})

    def _notes(self, key: str) -> dict[str, Any]:
        ((text,),) = self.run("SELECT notes FROM celery_idem_record WHERE key = ?", key)
        return json.loads(text)


class SQLiteBackend(SQLBackend):
    """A file."""

    mark = "?"

    @contextmanager
    def connection(self) -> Iterator[Any]:
        connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None, timeout=5)
        try:
            yield connection
        finally:
            connection.close()


class PostgresBackend(SQLBackend):
    """A database of the run's PostgreSQL."""

    @contextmanager
    def connection(self) -> Iterator[Any]:
        connection = psycopg2.connect(re.sub(r"^postgresql\+\w+", "postgresql", self.url), connect_timeout=5)
        connection.autocommit = True
        try:
            yield connection
        finally:
            connection.close()
