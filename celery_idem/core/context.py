"""What a body can ask about its own run: ``self.idempotency`` in a task, ``celery_idem.current()`` anywhere below."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from celery_idem.errors import LeaseLost


class RunContext:
    """The running attempt as its body sees it."""

    __slots__ = ("_key", "_lost", "attempt", "fence", "reclaimed", "token")

    def __init__(
        self,
        key: str | Callable[[], str],
        *,
        fence: int = 0,
        attempt: int = 1,
        reclaimed: bool = False,
        token: str = "",
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self._key = key
        self.fence = fence
        """Grows with every claim of the key: ``UPDATE … WHERE fence < :fence`` shuts out late writers. 0 = no claim."""
        self.attempt = attempt
        """1, or one more for every run before this one that died without an outcome."""
        self.reclaimed = reclaimed
        """An earlier run may have had its effect."""
        self.token = token
        self._lost = lost

    @property
    def key(self) -> str:
        """Effective key, 64 hex characters: hand it to a payment provider as its idempotency key.

        Empty only in a bare call of a task whose key would be its message's id.
        """
        if callable(self._key):
            self._key = self._key()
        return self._key

    @property
    def lost(self) -> bool:
        """Whether another worker holds the key by now, as far as this process knows."""
        return self._lost()

    def check(self) -> None:
        """Raise ``LeaseLost`` if another worker holds the key by now; for bodies that no pool can interrupt."""
        if self._lost():
            raise LeaseLost("another worker holds this key now: stop, nothing this run does counts any more")

    def __repr__(self) -> str:
        return f"RunContext(key={self.key!r}, fence={self.fence}, attempt={self.attempt}, reclaimed={self.reclaimed})"


RUNNING: ContextVar[RunContext | None] = ContextVar("celery_idem_running", default=None)


def current() -> RunContext | None:
    """The run this thread or greenlet is in, or None outside of one."""
    return RUNNING.get()
