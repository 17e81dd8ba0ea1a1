"""The clock a harness gives its store."""

from __future__ import annotations

import threading

START = 2_000_000_000.0
"""Where a ``Clock`` starts: years from any real clock, so that a store which reads its own is found out."""


class Clock:
    """Seconds since 1970, for the store's clock; it stands still until the suite moves it, and threads may share it."""

    def __init__(self, now: float = START) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """What it shows."""
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Let that time pass."""
        with self._lock:
            self._now += seconds
