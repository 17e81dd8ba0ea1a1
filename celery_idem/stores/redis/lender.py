"""Connections at hand between two verbs: to take one out of redis-py's pool costs a fifth of a verb.

The pool stays their owner: it makes them, bounds them, and looks at one that is not silent while it lies here, or that
lay here when another failed.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from redis import VERSION, BlockingConnectionPool

from celery_idem.core.threads import original

# Since 5.3 redis-py warns about the argument it needed before.
_ASKED_FOR = () if tuple(int(part) for part in VERSION[:2]) >= (5, 3) else ("EVALSHA",)


class Lender:
    """One process's pool, and what its verbs used last.

    Args:
        pool: redis-py's.
        patience: seconds to wait for an answer, for the sockets.
    """

    def __init__(self, pool: Any, patience: float) -> None:
        self.pool = pool
        self._patience = patience
        # In a bounded pool somebody may be waiting for the connection.
        self._keeps = not isinstance(pool, BlockingConnectionPool)
        self._idle: list[Lent] = []

    def take(self) -> Lent:
        """Lend a connection: the one used last, unless the server has closed it, else what the pool has looked at."""
        while self._idle:
            try:
                lent = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if not lent.heard(0):
                return lent
            self.pool.release(lent.connection)
        return Lent(self.pool.get_connection(*_ASKED_FOR), self._patience)

    def give(self, lent: Lent) -> None:
        """Take back what was lent, every answer read."""
        if self._keeps:
            self._idle.append(lent)
        else:
            self.pool.release(lent.connection)

    def drop(self, lent: Lent) -> None:
        """Take back a connection that failed, closed; an answer may still come, and it would be the next one's."""
        lent.connection.disconnect()
        self.pool.release(lent.connection)
        self.empty()

    def empty(self) -> None:
        """Give everything to the pool."""
        while self._idle:
            try:
                self.pool.release(self._idle.pop().connection)
            except IndexError:
                return


class Lent:
    """A connection of redis-py's, connected.

    Its socket waits ``patience`` seconds: redis-py's own setting is for getting connected.
    """

    __slots__ = ("connection", "heard", "socket")

    def __init__(self, connection: Any, patience: float) -> None:
        self.connection = connection
        self.socket = connection._sock  # noqa: SLF001
        self.socket.settimeout(patience)
        poll = original("select", "poll")()
        poll.register(self.socket.fileno(), select.POLLIN)
        self.heard: Callable[[int], list[Any]] = poll.poll
        """Whether something came, or the server closed it; 0 asks without waiting."""
