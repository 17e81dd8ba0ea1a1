"""What a body can ask about its own run: ``self.idempotency`` in a task, ``celery_idem.current()`` anywhere below."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from celery_idem.errors import LeaseLost

if TYPE_CHECKING:
    from celery_idem.core.effects import Effects


class RunContext:
    """The running attempt as its body sees it."""

    __slots__ = ("_key", "_lost", "attempt", "effects", "fence", "reclaimed", "token")

    def __init__(
        self,
        key: str | Callable[[], str],
        *,
        effects: Effects,
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
        self.effects = effects
        """What ``transaction`` begins; other connections than the store's begin it here too."""
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

    def transaction(self) -> AbstractContextManager[Any]:
        """A SQLAlchemy ``Connection`` on the store's database: what is written there happens once, or not at all.

        It commits when the body returns, together with the completion of the claim; an exception that leaves the
        ``with`` statement, or the body, takes it back. Entered again it is the same transaction. In a direct call, with
        the mode ``off`` or ``observe``, nothing is completed: it commits at the end of the ``with`` statement.

        Raises:
            ConfigurationError: the store is no SQL database, or keeps no outcome of this task.
            LeaseLost: another worker holds the key.
            StoreUnavailable: the store's database does not answer.
        """
        return self.effects.transaction()

    def __repr__(self) -> str:
        return f"RunContext(key={self.key!r}, fence={self.fence}, attempt={self.attempt}, reclaimed={self.reclaimed})"


RUNNING: ContextVar[RunContext | None] = ContextVar("celery_idem_running", default=None)


def current() -> RunContext | None:
    """The run this thread or greenlet is in, or None outside of one."""
    return RUNNING.get()
