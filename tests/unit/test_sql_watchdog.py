"""The watchdog hangs up in time, on the right one, and costs the others nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from celery_idem.stores.sql.watchdog import Watchdog

PROMPT = 10.0  # seconds a machine that stands still now and then may take; the alternative is a minute, or for ever


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_statement_past_its_deadline_loses_its_socket(line: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = line
    watchdog, start = Watchdog(), time.monotonic()
    ticket = watchdog.watch(ours, start + 0.2)
    assert ours.recv(1) == b""
    assert 0.19 <= time.monotonic() - start < PROMPT
    watchdog.done(ticket)


def test_a_statement_done_in_time_keeps_it(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    watchdog, start = Watchdog(), time.monotonic()
    watchdog.done(watchdog.watch(ours, start + 3))
    here, there = socket.socketpair()
    with here, there:
        watchdog.watch(here, start + 3.1)
        assert here.recv(1) == b"", "the watchdog is past both deadlines"
    theirs.send(b"x")
    assert ours.recv(1) == b"x"


def test_a_later_statement_with_an_earlier_deadline(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    watchdog, start = Watchdog(), time.monotonic()
    long = watchdog.watch(theirs, start + 60)
    time.sleep(0.1)
    watchdog.watch(ours, start + 0.3)
    assert ours.recv(1) == b""
    assert time.monotonic() - start < PROMPT, "not when the first one would be due"
    watchdog.done(long)


def test_a_connection_that_is_gone_does_not_end_the_watchdog(line: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = line
    watchdog, start = Watchdog(), time.monotonic()
    watchdog.watch(object(), start + 0.05)
    watchdog.watch(ours, start + 0.1)
    assert ours.recv(1) == b""


def test_one_thread_serves_all(line: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = line
    watchdog, before = Watchdog(), set(threading.enumerate())
    for _ in range(1000):
        watchdog.done(watchdog.watch(ours, time.monotonic() + 60))
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["celery_idem watchdog"]
