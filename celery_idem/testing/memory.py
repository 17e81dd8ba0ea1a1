"""Broker, result backend and claim store of one test, all in memory, none shared with another test.

They are the memory kinds of kombu, Celery and this library, each with a place of its own; the store knows besides which
of its claims belong to a process the test has killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.backends import cache
from celery.backends.cache import CacheBackend
from celery.exceptions import ImproperlyConfigured
from kombu.transport import TRANSPORT_ALIASES, memory, virtual
from kombu.utils.functional import LRUCache

from celery_idem.core.records import (
    Claim,
    Decision,
    Ended,
    Operation,
    Outcome,
    Record,
    Release,
    Renewal,
    State,
    Successor,
)
from celery_idem.stores.memory import MemoryStore

SCHEME = "idemtest"
SENT = "idemtest_sent"
"""Property of a message: when it was published, by the real clock."""
TRANSPORT_ALIASES[SCHEME] = "celery_idem.testing.memory:Transport"
BACKEND = "celery_idem.testing.memory:Backend"


@dataclass
class Broker:
    """What one test's broker holds."""

    queues: dict[str, Queue[Any]] = field(default_factory=dict)
    state: Any = field(default_factory=virtual.BrokerState)


BROKERS: dict[str, Broker] = {}
"""By virtual host."""


class Channel(memory.Channel):
    """A channel of the virtual host's own queues."""

    def __init__(self, connection: Any, **options: Any) -> None:
        super().__init__(connection, **options)
        self.queues = connection.broker.queues

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        # A test may look at the message much later, by the real clock that an ETA is told in.
        message["properties"][SENT] = time.time()
        super()._put(queue, message, **options)


class Transport(memory.Transport):
    """Kombu's memory transport, but for its state, which every connection of a process would share."""

    Channel = Channel

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        try:
            self.broker = BROKERS[client.virtual_host]
        except KeyError:
            raise ImproperlyConfigured("this connection belongs to a test that is over") from None
        self.state = self.broker.state


_RESULTS: WeakKeyDictionary[Celery, Any] = WeakKeyDictionary()


def forget_results(app: Celery) -> None:
    """Let the app's backend be empty."""
    results = _RESULTS[app] = getattr(cache, "DummyClient")()  # noqa: B009  celery-types has not heard of it
    results.cache = LRUCache()


class Backend(CacheBackend):
    """Celery's memory backend, but for its values, which every app of a process would share."""

    def __init__(self, app: Celery, **options: Any) -> None:
        super().__init__(app, **{**options, "backend": "memory", "url": None})
        self.client = _RESULTS[app]  # type: ignore[misc]  # a cached_property to Celery

    def wait_for(self, task_id: str, timeout: float | None = None, *args: Any, **options: Any) -> Any:
        """Celery's, but for a wait that would have no end."""
        self._refuse_endless([task_id], timeout)
        return super().wait_for(task_id, timeout, *args, **options)

    def get_many(self, task_ids: Any, timeout: float | None = None, *args: Any, **options: Any) -> Any:
        """Celery's, but for a wait that would have no end."""
        task_ids = list(task_ids)
        self._refuse_endless(task_ids, timeout)
        return super().get_many(task_ids, timeout, *args, **options)

    def _refuse_endless(self, task_ids: list[str], timeout: float | None) -> None:
        missing = [task_id for task_id in task_ids if self.get_state(task_id) not in self.READY_STATES]
        if timeout is None and missing:
            raise AssertionError(
                f"get() would wait for ever, for nobody delivers {', '.join(missing)}: call idem.run_all() before it"
            )


DEAD = "a process that the test has killed"


class Store(MemoryStore):
    """A memory store some of whose callers are dead.

    Args:
        clock: seconds since 1970.
        dying: whether the calling thread plays a process that was killed: it writes nothing any more, whatever it
            calls on its way out.
        dead_check: whether callers can prove that a killed process is dead, as on one machine they can.
    """

    def __init__(
        self, *, clock: Callable[[], float], dying: Callable[[], bool], dead_check: Callable[[], bool]
    ) -> None:
        super().__init__(clock=clock)
        self._dying, self._dead_check = dying, dead_check

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        """See ``Store.claim``; past a dead holder at once, as the engine does with the kernel's word for it."""
        decision = super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)
        held = decision.held_by
        if held is not None and held[1] == DEAD and self._dead_check():
            return super().claim(operation, lease=lease, ttl=ttl, dead_fence=held[0])
        return decision

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Ended:
        """See ``Store.complete``."""
        return Ended.LOST if self._dying() else super().complete(claim, outcome, connection=connection)

    def release(self, claim: Claim, reason: Release, *, successor: Successor | None = None) -> Ended:
        """See ``Store.release``."""
        return Ended.LOST if self._dying() else super().release(claim, reason, successor=successor)

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        """See ``Store.renew``."""
        return {} if self._dying() else super().renew(claims)

    def settle(self, key: str, message_id: str) -> None:
        """See ``Store.settle``."""
        if not self._dying():
            super().settle(key, message_id)

    def bury(self, token: str) -> None:
        """Whoever claimed under this token is dead, and the kernel would say so."""
        with self._lock:
            for key, record in self._records.items():
                self._records[key] = _buried(record, token)


def _buried(record: Record, token: str) -> Record:
    notes = {
        message_id: replace(note, continuing=replace(note.continuing, holder=DEAD))
        if note.continuing is not None and note.continuing.token == token
        else note
        for message_id, note in record.notes.items()
    }
    holder = DEAD if record.state is State.CLAIMED and record.token == token else record.holder
    return replace(record, notes=notes, holder=holder)
