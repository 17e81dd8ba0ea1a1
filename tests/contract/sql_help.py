"""What the tests of the SQL store share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2

from celery_idem.core.codec import Encoded
from celery_idem.core.records import Claim, Delivery, Kind, Operation, Outcome
from celery_idem.stores.sql import SQLStore

RESULT = Outcome(Kind.RESULT, Encoded(b"[1, 2]", "application/json", "utf-8", "c" * 64))


def new_key() -> str:
    return uuid.uuid4().hex * 2


def operation(
    key: str | None = None, message: str = "m", *, token: str | None = None, task: str = "shop.charge", **delivery: Any
) -> Operation:
    return Operation(key or new_key(), Delivery(message, **delivery), token or uuid.uuid4().hex, "holder", task, "shop")


def acquired(store: SQLStore, key: str | None = None, *, lease: float = 30, ttl: float = 3600, **more: Any) -> Claim:
    claim = store.claim(operation(key, **more), lease=lease, ttl=ttl).claim
    assert claim is not None
    return claim


@contextmanager
def session(url: str) -> Iterator[Any]:
    """A plain psycopg2 connection in autocommit mode."""
    connection = psycopg2.connect(url.replace("+psycopg2", "").replace("+psycopg", ""))
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


@contextmanager
def locked_row(url: str, key: str) -> Iterator[None]:
    """Somebody's transaction holds the row."""
    with session(url) as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM celery_idem_record WHERE key = %s FOR UPDATE", (key,))
        yield
        cursor.execute("ROLLBACK")
