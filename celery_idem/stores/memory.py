"""A store in this process's memory: for tests, eager apps and single-process tools. Nothing survives the process.

It is the decision functions and a lock, so it doubles as the reference the other stores are compared with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from celery_idem.core import decide
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
from celery_idem.core.threads import real_lock
from celery_idem.errors import ConfigurationError


class MemoryStore:
    """Records in a dictionary, guarded by one lock; ``clock`` returns seconds since 1970."""

    name = "memory"

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = real_lock()
        self._records: dict[str, Record] = {}
        # A child forked while another thread held the lock would wait for ever.
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = real_lock()

    def _write(self, key: str, record: Record | None) -> None:
        if record is not None:
            self._records[key] = record

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        """See ``Store.claim``."""
        with self._lock:
            decision, written = decide.decide_claim(
                self._records.get(operation.key),
                operation,
                now=self._clock(),
                lease=lease,
                ttl=ttl,
                dead_fence=dead_fence,
            )
            self._write(operation.key, written)
            return decision

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Ended:
        """See ``Store.complete``."""
        if connection is not None:
            raise ConfigurationError("complete(connection=) needs a SQL store; this one is memory://")
        with self._lock:
            ended, written = decide.decide_complete(self._records.get(claim.key), claim, outcome, now=self._clock())
            self._write(claim.key, written)
            return ended

    def release(self, claim: Claim, reason: Release, *, successor: Successor | None = None) -> Ended:
        """See ``Store.release``."""
        with self._lock:
            ended, written = decide.decide_release(
                self._records.get(claim.key), claim, reason, successor, now=self._clock()
            )
            self._write(claim.key, written)
            return ended

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        """See ``Store.renew``."""
        answers = {}
        with self._lock:
            for claim in claims:
                record = self._records.get(claim.key)
                answers[claim.token], written = decide.decide_renew(record, claim, now=self._clock())
                self._write(claim.key, written)
        return answers

    def settle(self, key: str, message_id: str) -> None:
        """See ``Store.settle``."""
        with self._lock:
            self._write(key, decide.decide_settle(self._records.get(key), message_id, now=self._clock()))

    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        """See ``Store.note_parked``."""
        with self._lock:
            record = self._records.get(key)
            written = decide.decide_parked(record, message_id, generation, count, now=self._clock())
            self._write(key, written)

    def get(self, key: str) -> Record | None:
        """See ``Store.get``."""
        with self._lock:
            record = self._records.get(key)
            return None if record is None or record.expires_at <= self._clock() else record

    def find(
        self,
        *,
        task: str | None = None,
        scope: str | None = None,
        state: State | None = None,
        older_than: float | None = None,
        limit: int = 1000,
    ) -> Iterator[Record]:
        """See ``Store.find``."""
        with self._lock:
            now, records = self._clock(), list(self._records.values())
        matching = (
            record
            for record in records
            if record.expires_at > now
            and (task is None or record.task == task)
            and (scope is None or record.scope == scope)
            and (state is None or record.state is state)
            and (older_than is None or record.claimed_at <= now - older_than)
        )
        return islice(matching, limit)

    def forget(self, key: str, fence: int | None) -> bool:
        """See ``Store.forget``; nothing in memory is ever unreadable, so a fence is always needed."""
        if fence is None:
            return False
        with self._lock:
            forgotten, written = decide.decide_forget(self._records.get(key), fence, now=self._clock())
            self._write(key, written)
            return forgotten

    def purge(self, limit: int) -> int:
        """See ``Store.purge``."""
        with self._lock:
            now = self._clock()
            expired = list(islice((k for k, r in self._records.items() if r.expires_at <= now), limit))
            for key in expired:
                del self._records[key]
            return len(expired)

    def check(self) -> list[str]:
        """See ``Store.check``."""
        return ["memory:// keeps records in one process only: workers and restarts will run tasks again"]

    def create_schema(self) -> None:
        """See ``Store.create_schema``: nothing to make."""

    def close(self) -> None:
        """See ``Store.close``: nothing to give back."""
