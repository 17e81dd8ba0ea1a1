"""The steps that are measured: a first run and a replay, through a store object or a whole engine."""

from __future__ import annotations

from collections.abc import Callable

from celery_idem.core.codec import encode_value
from celery_idem.core.engine import Engine
from celery_idem.core.holder import current as this_process
from celery_idem.core.records import Answer, Delivery, Ended, Kind, Operation, Outcome, Status
from celery_idem.stores.base import Store
from tests.support.operations import key_for

Step = Callable[[str, str], None]
"""One first run, or one replay, of an effective key under a token."""
LEASE, TTL = 60.0, 86_400.0
VALUE = {"order": 1, "paid": 50, "receipt": "r" * 150}
"""A result of about 200 bytes."""
FINGERPRINT = key_for("arguments")


def operation(key: str, token: str) -> Operation:
    """What a task's delivery claims."""
    return Operation(
        key=key,
        delivery=Delivery(key[:36]),
        token=token,
        holder=this_process(),
        task="shop.charge",
        namespace="shop",
        fingerprint=FINGERPRINT,
    )


def store_first(store: Store) -> Step:
    """Claim and complete through the store object."""
    outcome = Outcome(Kind.RESULT, encode_value(VALUE, "json", max_bytes=10_000))

    def first(key: str, token: str) -> None:
        claim = store.claim(operation(key, token), lease=LEASE, ttl=TTL).claim
        assert claim is not None
        assert store.complete(claim, outcome) is Ended.COMPLETED

    return first


def store_replay(store: Store) -> Step:
    """Claim what is completed through the store object."""

    def replay(key: str, token: str) -> None:
        assert store.claim(operation(key, token), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED

    return replay


def engine_run(engine: Engine, status: Status) -> Step:
    """A whole delivery through the engine, with a body that returns ``VALUE``."""

    def run(key: str, token: str) -> None:
        result = engine.run(operation(key, token), lambda context: VALUE)
        assert result.status is status
        assert result.value == VALUE

    return run
