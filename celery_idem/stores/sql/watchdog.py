"""Ends statements that outlive their deadline by shutting down their socket: the driver then fails at once.

A driver waiting in ``recv`` for a stopped server cannot be interrupted from its own thread, and a timer per statement
would cost more than the statement. So one daemon thread per process looks when the next deadline is due; a statement
that ends in time costs two dictionary operations. After a fork the child starts with a watchdog of its own. It is a
real thread under gevent too, where a driver that waits in C stops every greenlet.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from celery_idem.core.threads import Bell, original, real_lock, start_thread

_NAP = 1.0  # seconds; while statements come and go the thread looks this often instead of being woken for each


class Watchdog:
    """The statements of one process that may not run for ever."""

    def __init__(self) -> None:
        self._mutex = real_lock()
        self._bell = Bell()
        self._watched: dict[int, tuple[float, Any]] = {}
        self._next = 0
        self._wakes_at = float("-inf")
        self._thread: Callable[[], object] | None = None

    def watch(self, connection: Any, deadline: float) -> int:
        """End whatever this driver connection does at ``deadline`` (``time.monotonic``), until ``done``."""
        with self._mutex:
            self._next += 1
            self._watched[self._next] = (deadline, connection)
            if self._thread is None:
                self._thread = start_thread(self._run, "celery_idem watchdog")
            elif deadline < self._wakes_at:
                self._bell.ring()
            return self._next

    def done(self, ticket: int) -> None:
        """The statement is over, one way or the other."""
        with self._mutex:
            self._watched.pop(ticket, None)

    def _run(self) -> None:
        seen = 0
        while True:
            with self._mutex:
                now = time.monotonic()
                for ticket, (deadline, connection) in list(self._watched.items()):
                    if deadline <= now:
                        # Under the lock: the connection cannot be given back, and its socket reused, meanwhile.
                        del self._watched[ticket]
                        hang_up(connection)
                idle, seen = not self._watched and self._next == seen, self._next
                default = float("inf") if idle else now + _NAP
                self._wakes_at = min((deadline for deadline, _ in self._watched.values()), default=default)
            self._bell.wait(None if idle else self._wakes_at - now)


def hang_up(connection: Any) -> None:
    """Shut down the driver connection's socket without touching the driver's own state."""
    plain = original("socket", "socket")
    with contextlib.suppress(Exception), plain(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


_watchdogs: dict[int, Watchdog] = {}


def watchdog() -> Watchdog:
    """Return this process's watchdog; no lock, for a fork could leave one locked for ever."""
    pid = os.getpid()
    return _watchdogs.get(pid) or _watchdogs.setdefault(pid, Watchdog())
