"""What a duplicate gets of a completed record: the first run's value, or the exception it failed with."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from celery_idem.core.codec import Undecodable, decode_exception, decode_value
from celery_idem.core.events import Emitter, EventName
from celery_idem.core.policy import Policy
from celery_idem.core.records import Kind, Operation, Outcome, Record
from celery_idem.errors import ResultUnavailable

logger = logging.getLogger("celery_idem")


def replayed(
    operation: Operation,
    record: Record,
    outcome: Outcome,
    policy: Policy,
    accept: Collection[str],
    emit: Emitter,
    *,
    unread: bool = False,
) -> tuple[Any, BaseException | None]:
    """Return the value of the first run, or what it raised; ``ResultUnavailable`` where its value was not kept.

    Args:
        operation: the duplicate.
        record: completed.
        outcome: the record's.
        policy: whose ``on_replay`` may change the value.
        accept: serializers the value may be read with.
        emit: told where the stored value makes no sense.
        unread: nobody reads this duplicate's value, so None will do for one that was not kept.
    """
    encoded = outcome.encoded
    if outcome.kind not in {Kind.FAILURE, Kind.RESULT}:
        return None, None
    if encoded is None:
        return (_hooked(None, record, policy), None) if unread else (None, _unavailable(operation))
    try:
        if outcome.kind is Kind.FAILURE:
            return None, decode_exception(encoded, accept)
        return _hooked(decode_value(encoded, accept), record, policy), None
    except Undecodable as corrupt:
        emit(EventName.CORRUPT_RECORD, operation, error=str(corrupt))
        return None, _unavailable(operation)


def _hooked(value: Any, record: Record, policy: Policy) -> Any:
    if policy.on_replay is None:
        return value
    try:
        return policy.on_replay(value, record)
    except Exception:  # the first run succeeded, so its duplicates must not fail
        logger.exception("idempotency_on_replay raised; the stored value is replayed as it is")
        return value


def _unavailable(operation: Operation) -> ResultUnavailable:
    return ResultUnavailable(
        f"the first run of {operation.task or 'this operation'} happened, but its value was not kept "
        f"(key {operation.key}): return something the serializer can say and idempotency_result_max_bytes allows (its "
        "event ENCODE_FAILED or CORRUPT_RECORD says what was wrong), and where any message of the key has its result "
        "read, let none ignore it",
        key=operation.key,
    )
