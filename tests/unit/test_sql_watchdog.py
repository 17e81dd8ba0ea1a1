"""The watchdog hangs up in time, on the right one, and costs the others nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from celery_idem.stores.sql.watchdog import Watchdog


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
    assert 0.19 <= time.monotonic() - start < 0.6
    watchdog.done(ticket)


def test_a_statement_done_in_time_keeps_it(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    watchdog = Watchdog()
    watchdog.done(watchdog.watch(ours, time.monotonic() + 0.1))
    time.sleep(0.3)
    theirs.send(b"x")
    assert ours.recv(1) == b"x"


def test_a_later_statement_with_an_earlier_deadline(line: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = line
    watchdog, start = Watchdog(), time.monotonic()
    long = watchdog.watch(theirs, start + 60)
    time.sleep(0.1)
    watchdog.watch(ours, start + 0.3)
    assert ours.recv(1) == b""
    assert time.monotonic() - start < 0.8
    watchdog.done(long)


def test_a_connection_that_is_gone_does_not_end_the_watchdog(line: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = line
    watchdog, start = Watchdog(), time.monotonic()
    watchdog.watch(object(), start + 0.05)
    watchdog.watch(ours, start + 0.1)
    assert ours.recv(1) == b""


def test_one_thread_serves_all(line: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = line
    watchdog, before = Watchdog(), threading.active_count()
    for _ in range(1000):
        watchdog.done(watchdog.watch(ours, time.monotonic() + 5))
    assert threading.active_count() == before + 1
