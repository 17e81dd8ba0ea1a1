"""No SQLite connection crosses a fork, and no fork meets a driver that connects.

SQLite keeps its file locks in memory of the process. A child inherits that memory but not the locks: its own fresh
connections would believe in locks nobody holds, wait for ever for a mutex of the parent's, or have their log deleted
by a parent that takes itself for the last user. So a fork waits for the statements of other threads, a moment each,
and closes what is idle; both sides open anew.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

from celery_idem.core.threads import real_lock

_PATIENCE = 2.0  # seconds a fork waits for other threads' statements


class ForkGate:
    """Lets verbs through, many at a time, but none while the process forks."""

    def __init__(self) -> None:
        self._closers: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()
        self._reopen()
        os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._reopen)

    def at_fork(self, close: Callable[[], None]) -> Callable[[], None]:
        """Call ``close`` before each fork, as long as the caller keeps what this returns."""
        self._closers.add(close)
        return close

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """A verb takes a connection."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        """It gave the connection back."""
        with self._changed:
            self._inside -= 1
            if self._closed:
                self._changed.notify_all()

    def _close(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        with self._changed:
            self._closed += 1
            while self._inside and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        for close in list(self._closers):
            close()

    def _open(self) -> None:
        with self._changed:
            self._closed -= 1
            self._changed.notify_all()

    def _reopen(self) -> None:
        self._changed = threading.Condition(real_lock())  # the heartbeat passes here too, in a thread of its own
        self._inside = 0
        self._closed = 0  # how many threads are forking


sqlite_gate = ForkGate()

connect_gate = ForkGate()
"""No fork while a driver connects: libpq, Kerberos and OpenSSL have locks of their own, and a child that inherits one
taken waits for it for ever."""

background_gate = ForkGate()  # made last, it closes first: what is inside still passes the others
"""No fork while a thread beside the worker's main one speaks to database or broker, for the same reason: kombu's and
SQLAlchemy's locks. It is entered for one piece of work at a time, so that a fork waits for no more than that."""
