"""The stores the contract is held against, and a way past each of them to the stored bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

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


@dataclass
class Backend:
    """One empty place for records: opens stores on it, and closes them when the test is over."""

    name: str
    url: str
    opened: list[Store] = field(default_factory=list)

    def open(self, clock: Callable[[], float] | None = None, *, url: str | None = None, **options: Any) -> Store:
        """Open a store here by a clock of the test's, or by its own; in memory there is only ever one."""
        if self.name == "memory" and self.opened:
            return self.opened[0]
        if clock is not None:
            options["clock"] = clock
        store = open_store(url or self.url, **options)
        self.opened.append(store)
        store.create_schema()
        return store

    def close(self) -> None:
        """Close every store opened here."""
        for store in self.opened:
            store.close()

    # -- past the store -------------------------------------------------------------------------------------------

    def raw(self, key: str) -> dict[str, Any]:
        """Everything stored under the key, as stored."""
        raise NotImplementedError

    def overwrite(self, key: str, **fields: Any) -> None:
        """Change stored fields by the names the store gives them."""
        raise NotImplementedError

    def newer(self, key: str) -> None:
        """Make it a record of a newer release."""
        raise NotImplementedError

    def garble(self, key: str) -> None:
        """Make it a record nobody can read."""
        raise NotImplementedError

    def garble_body(self, key: str) -> None:
        """Change the stored value behind its checksum's back."""
        raise NotImplementedError

    def add_to_note(self, key: str, message: str) -> None:
        """Give a message's note a field that this release does not know."""
        raise NotImplementedError


class MemoryBackend(Backend):
    """The one store in this process."""

    def _change(self, key: str, **changes: Any) -> None:
        records = self.opened[0]._records
        records[key] = replace(records[key], **changes)

    def raw(self, key: str) -> dict[str, Any]:
        return {"record": self.opened[0]._records.get(key)}

    def newer(self, key: str) -> None:
        self._change(key, record_version=2)

    def garble_body(self, key: str) -> None:
        outcome = self.opened[0]._records[key].outcome
        self._change(key, outcome=replace(outcome, encoded=replace(outcome.encoded, body=b"garbled")))
