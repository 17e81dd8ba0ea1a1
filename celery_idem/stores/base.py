"""The claim store: the protocol every store fulfils, and its rules.

S1  The store's clock, read when the record is held, judges leases and expiry; a worker's clock judges nothing.
S2  A fence is max(previous + 1, the store's clock in microseconds): it grows from claim to claim of a key,
    also after expiry or purge; a right to continue has one above its record's.
S3  An old token changes nothing and is told so (``Ended.LOST``, ``Renewal.LOST``).
S4  A body that fails its checksum still proves completion; a record of a newer version is never overwritten.
S5  ``expires_at`` moves with every renewal; a live claim never expires; a tombstone stays at least a day.
S6  No verb outlives the store's timeout. A driver error is ``StoreUnavailable``, whose ``may_have_landed`` is
    False only where the write certainly did not happen. A record that somebody's transaction locks is HELD, never
    an outage. A record that cannot be read is ``RecordCorrupt``.
S7  Every verb works in a child forked after the parent used the store.
S8  Every verb is thread-safe; one locked record delays no other.
S9  Releases N and N-1 share one store.

Cost, counted in server commands: Redis, first run 2 and replay 1; PostgreSQL, first run 2 statements in 2 transactions
that write WAL, replay 1 and 0; a takeover or a granted right one more; ``settle`` and ``note_parked`` one each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

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
from celery_idem.errors import ConfigurationError


@runtime_checkable
class Store(Protocol):
    """Where records live. Every verb may raise ``StoreUnavailable`` and ``RecordCorrupt``."""

    name: str
    """"memory", "sqlite", "postgresql", "redis": for events and messages, without credentials."""

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        """Claim the key in one atomic step, or report what stands in the way.

        Args:
            operation: repeated with the same token it gets the same answer, so a lost reply may be asked for again.
            lease: seconds (> 0) before another worker may reclaim.
            ttl: seconds (>= 0) a completion will be kept.
            dead_fence: counts the claim or right that carries exactly this fence as lapsed.

        Returns:
            ACQUIRED and RECLAIMED carry a claim with a higher fence than any before it; COMPLETED carries one
            (``claim.right``) where the caller now holds the right to continue its message.
        """

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Ended:
        """COMPLETED if the outcome is recorded, now or earlier by this token; LOST if another token took the key.

        Args:
            claim: current or lapsed; a lapsed claim nobody took completes normally.
            outcome: kept for ``claim.ttl`` seconds.
            connection: SQL only: the completion joins this SQLAlchemy connection's transaction.
        """

    def release(self, claim: Claim, reason: Release, *, successor: Successor | None = None) -> Ended:
        """RELEASED if this token freed the key, COMPLETED if it had completed it, LOST if the record is not its own."""

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        """What became of each lease, by token; one round trip for all of them."""

    def settle(self, key: str, message_id: str) -> None:
        """End the right to continue: the message's links, chain and chord part are out."""

    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        """Remember that a parked copy with this count was published; the highest count stays."""

    def get(self, key: str) -> Record | None:
        """The whole record, or None if there is none or it expired.

        Raises:
            RecordCorrupt: it cannot be read. Of a record whose ``record_version`` is newer, only key, state, token and
                fence count.
        """

    def find(
        self,
        *,
        task: str | None = None,
        scope: str | None = None,
        state: State | None = None,
        older_than: float | None = None,
        limit: int = 1000,
    ) -> Iterator[Record]:
        """Records that match, at most ``limit``; ``older_than`` is seconds since they were claimed.

        Raises:
            RecordCorrupt: one cannot be read; after all the others were yielded.
        """

    def forget(self, key: str, fence: int | None) -> bool:
        """Leave a tombstone without value or doubt; False if the record changed since ``fence`` was seen.

        A record that cannot be read has no fence: None removes it, and only it.
        """

    def purge(self, limit: int) -> int:
        """Delete at most ``limit`` expired records and say how many; never waits for a lock."""

    def check(self) -> list[str]:
        """Warnings about how the store is set up; ``ConfigurationError`` where it cannot work.

        Called at worker start and by ``celery idem check``, never at import.
        """

    def create_schema(self) -> None:
        """Make what the store needs (tables, indexes); nothing to do twice, or for Redis and memory."""

    def close(self) -> None:
        """Give back every connection; the store may be used again afterwards."""


class Transaction(Protocol):
    """One open transaction on the store's database. Only its own thread uses it."""

    carrier: Carrier
    may_break: bool
    """Whether its connection, and with it the record's lock, may be lost while the body goes on: then renew."""

    def commit(self, outcome: Outcome | None) -> Ended:
        """COMPLETED if what was written and the outcome of the claim are recorded together; LOST if nothing is.

        Either way it is over, as it is when this raises.

        Raises:
            StoreUnavailable: nobody knows whether it is recorded; ``release`` does.
            Exception: the database's own, or the refusal of a transaction that is no longer whole; nothing is recorded.
        """

    def rollback(self) -> None:
        """Take everything back; never raises, and does nothing to a transaction that is over."""


class Carrier(Protocol):
    """The connection a transaction goes through: the store's own, or one that belongs to a framework."""

    @property
    def connection(self) -> Any:
        """What the body works with."""

    @property
    def line(self) -> Any:
        """Where the store's statements go: ``cursor()``, ``dbapi_connection`` and ``invalidate(error)``."""

    def begin(self, deadline: float) -> None:
        """Begin a transaction, at the latest at ``deadline`` (``time.monotonic``) where that can be helped."""

    def check(self) -> None:
        """Raise if the transaction that was begun can no longer be committed as a whole."""

    def commit(self) -> None:
        """Commit it."""

    def committed(self) -> None:
        """It is committed: do what waited for that."""

    def rollback(self) -> None:
        """Roll it back and give the connection up, whatever state it is in."""

    def savepoint(self) -> AbstractContextManager[Any]:
        """A part of it that an exception takes back alone."""


@runtime_checkable
class Transactional(Protocol):
    """What a store adds in whose database a body's effects can commit together with its completion."""

    def begin(self, claim: Claim | None, carrier: Carrier | None = None) -> Transaction | None:
        """Begin a transaction whose first statement locks the claim's record; None if another token has the key.

        The lock protects the claim from then on, for as long as the connection lasts.

        Args:
            claim: None begins a plain transaction, to be committed without an outcome.
            carrier: None is a connection of the store's own, for this transaction alone.

        Raises:
            StoreUnavailable: nothing was begun.
            ConfigurationError: the carrier leads to another database.
        """


def open_store(url: str, *, timeout: float = 5.0, **options: Any) -> Store:
    """The store a URL names, unopened: no connection is made before the first verb.

    Args:
        url: ``redis://``, ``rediss://``, ``redis+socket://``, ``sentinel://``, ``postgresql://``,
            ``postgresql+psycopg2://``, ``postgresql+psycopg://``, ``sqlite:///path``, ``memory://``.
        timeout: seconds no verb outlives.
        options: passed to the client library (``idempotency_store_options``).
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"idempotency_store is of type {type(url).__name__}: name a store by its URL")
    try:
        return _open(url, timeout, options)
    except TypeError as error:
        raise ConfigurationError(f"idempotency_store_options: {error}: remove what this store does not take") from error


def _open(url: str, timeout: float, options: dict[str, Any]) -> Store:
    scheme = url.partition(":")[0].lower()
    if scheme == "memory":
        from celery_idem.stores.memory import MemoryStore

        return MemoryStore(**options)
    if scheme.partition("+")[0] in {"redis", "rediss", "sentinel"}:
        from celery_idem.stores.redis.store import RedisStore

        return RedisStore(url, timeout=timeout, **options)
    if scheme.partition("+")[0] in {"postgresql", "sqlite"}:
        from celery_idem.stores.sql.store import SQLStore

        return SQLStore(url, timeout=timeout, **options)
    raise ConfigurationError(
        f"idempotency_store: no store speaks {scheme!r}; use redis://, rediss://, redis+socket://, sentinel://, "
        "postgresql+psycopg2://, postgresql+psycopg://, sqlite:///file or memory://"
    )
