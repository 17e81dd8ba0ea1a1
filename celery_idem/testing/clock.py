"""A clock that moves only when a test says so: ``MemoryStore(clock=ManualClock())``."""

from __future__ import annotations

import threading

START = 2_000_000_000.0
"""Seconds since 1970 where a manual clock starts: in the future, so that no server drops a record by its own clock."""


class ManualClock:
    """Seconds since 1970 as a store's ``clock=``; thread-safe, and it never moves by itself."""

    def __init__(self, now: float = START) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """What it shows."""
        return self.now

    @property
    def now(self) -> float:
        """What it shows."""
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> float:
        """Move it, back too, and return what it shows then."""
        with self._lock:
            self._now += seconds
            return self._now

    def set(self, now: float) -> None:
        """Set it to a time."""
        with self._lock:
            self._now = now
