"""Connections at hand between two verbs: to take one out of SQLAlchemy's pool costs more than all else a verb does.

The pool stays their owner, and its limits hold: nobody waits for the pool while a connection lies here. One that lay
for a second goes through the pool again, which knows when it is too old or no longer alive.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy.engine import Engine
from sqlalchemy.pool import PoolProxiedConnection, QueuePool

from celery_idem.core.threads import real_lock

FRESH = 1.0
"""Seconds a connection may lie here and be used again without a look at it."""


class Spare:
    """What one process's verbs on one engine used last."""

    def __init__(self, engine: Engine) -> None:
        # Other pools are there so that a connection is closed, or shared, after each use; and with ``pool_recycle`` or
        # ``pool_pre_ping`` it is to be looked at whenever it is taken out.
        pool: Any = engine.pool
        self._keeps = type(pool) is QueuePool and pool._recycle < 0 and not pool._pre_ping  # noqa: SLF001
        self._idle: list[tuple[PoolProxiedConnection, float]] = []
        self._asking = 0
        self._mutex = real_lock()

    def take(self) -> PoolProxiedConnection | None:
        """Return the connection used last, or None: ask the pool."""
        while self._idle:
            try:
                line, since = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if time.monotonic() - since < FRESH:
                return line
            line.close()
        return None

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around whatever may have to wait for the pool: what lies here goes there, and so does what is given back."""
        with self._mutex:
            self._asking += 1
        try:
            self.empty()
            yield
        finally:
            with self._mutex:
                self._asking -= 1

    def give(self, line: PoolProxiedConnection) -> None:
        """Take back what came from here or from the pool."""
        if self._asking or not self._keeps or not line.is_valid:
            line.close()
        else:
            self._idle.append((line, time.monotonic()))

    def empty(self) -> None:
        """Give everything to the pool."""
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop()[0].close()
