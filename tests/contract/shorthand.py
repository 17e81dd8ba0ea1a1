"""The few calls that most contract tests are made of."""

from __future__ import annotations

from celery_idem.core.records import Answer, Claim, Ended, Operation, Record
from celery_idem.stores.base import Store
from tests.support.operations import key_for, op, result

LEASE, TTL = 60.0, 3600.0


def take(store: Store, operation: Operation | None = None, *, lease: float = LEASE, ttl: float = TTL) -> Claim:
    """Claim a key that must be free."""
    decision = store.claim(operation or op(), lease=lease, ttl=ttl)
    assert decision.answer in {Answer.ACQUIRED, Answer.RECLAIMED}
    assert decision.claim is not None
    return decision.claim


def complete(store: Store, operation: Operation | None = None, **times: float) -> Claim:
    """Claim a key that must be free, and complete it."""
    claim = take(store, operation, **times)
    assert store.complete(claim, result()) is Ended.COMPLETED
    return claim


def answer(store: Store, operation: Operation, *, dead_fence: int | None = None) -> Answer:
    return store.claim(operation, lease=LEASE, ttl=TTL, dead_fence=dead_fence).answer


def stored(store: Store, key: str = "order:1") -> Record:
    record = store.get(key_for(key))
    assert record is not None
    return record
