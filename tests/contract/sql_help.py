"""What the tests of the SQL store share."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
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


AT_ONCE = 10.0
"""Seconds for what waits for nothing, on a machine that stands still now and then; what waits has a timeout of 30."""
MARGIN = 5.0
"""Seconds that such a machine may add to a timeout."""


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


def forked(count: int, work: Callable[[int], Any], *, timeout: float = 60) -> list[Any]:
    """Run ``work(i)`` in children forked from this very process, all released at once, and return their answers."""
    start_read, start_write = os.pipe()
    children = []
    for number in range(count):
        answer_read, answer_write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads around is the point
            pid = os.fork()
        if pid == 0:
            _child(number, work, start_read, start_write, answer_write)
        os.close(answer_write)
        children.append((pid, answer_read))
    os.close(start_read)
    os.close(start_write)
    answers, deadline = [], time.monotonic() + timeout
    for pid, answer_read in children:
        with open(answer_read, "rb") as stream:  # noqa: PTH123  a descriptor
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(pid, signal.SIGKILL)
            data = stream.read()
        os.waitpid(pid, 0)
        assert data, f"a forked child hung or died within {timeout:g} s"
        answers.append(pickle.loads(data))
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _child(number: int, work: Callable[[int], Any], start_read: int, start_write: int, answer: int) -> None:
    try:
        os.close(start_write)
        os.read(start_read, 1)
        try:
            data = pickle.dumps(work(number))
        except BaseException as error:
            data = pickle.dumps(error)
        view = memoryview(data)
        while view:
            view = view[os.write(answer, view) :]
    finally:
        os._exit(0)
