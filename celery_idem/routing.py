"""Where a parked copy goes: to the one queue its message came from, and nowhere else.

A message is told to a task by exchange and routing key, and an exchange may feed many queues. A copy sent there again
would come once per queue, each of those would be parked again, and so on. So the queue is looked up among those this
worker consumes, and the copy goes there through the default exchange, whose routing keys are queue names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Exchange, Queue
from kombu.transport.native_delayed_delivery import (
    CELERY_DELAYED_DELIVERY_EXCHANGE,
    MAX_LEVEL,
    MAX_NUMBER_OF_BITS_TO_USE,
    calculate_routing_key,
    level_name,
)

if TYPE_CHECKING:
    from celery import Celery

OURS = ".celery_idem"
"""Ends the routing key of a copy that waits in RabbitMQ's delay queues, so that no binding of Celery's takes it."""
_DELAYED = re.compile(rf"(?:[01]\.){{{MAX_NUMBER_OF_BITS_TO_USE}}}(.+)", re.DOTALL)


def queue_of(app: Celery, delivery_info: Mapping[str, Any] | None) -> str | None:
    """The queue a message came from; None where this worker consumes none its exchange would have fed."""
    info = delivery_info or {}
    exchange, key = info.get("exchange") or "", info.get("routing_key") or ""
    delayed = _DELAYED.fullmatch(key)
    if delayed is not None:  # through RabbitMQ's delay queues, whose exchanges are not the one it was sent to
        key = delayed.group(1)
        if key.endswith(OURS):
            return key.removesuffix(OURS)
        fed = (queue for queue, bound, pattern in _bindings(app) if bound.type != "direct" and _ends(pattern, key))
        return next(fed, None)
    if not exchange:
        return key or None
    return next(
        (q for q, bound, pattern in _bindings(app) if bound.name == exchange and _feeds(bound, pattern, key)), None
    )


def _bindings(app: Celery) -> Iterator[tuple[str, Exchange, str]]:
    """Name, exchange and routing key of every binding this worker consumes from."""
    for queue in app.amqp.queues.consume_from.values():
        if queue.exchange is not None:
            yield queue.name, queue.exchange, queue.routing_key or ""
        for more in queue.bindings or ():
            if more.exchange is not None:
                yield queue.name, more.exchange, more.routing_key or ""


def _feeds(exchange: Exchange, pattern: str, key: str) -> bool:
    if exchange.type == "direct":
        return pattern == key
    return exchange.type != "topic" or _matches(pattern, key)


def _ends(pattern: str, key: str) -> bool:
    """Celery's own bindings behind the delay queues: ``#.`` and the pattern."""
    return _matches(pattern if pattern.startswith("#") else f"#.{pattern}", key)


def _matches(pattern: str, key: str) -> bool:
    """AMQP's topic rule: ``*`` is one word, ``#`` any number of them."""
    return _fits(pattern.split("."), key.split(".") if key else [])


def _fits(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(_fits(pattern[1:], words[skip:]) for skip in range(len(words) + 1))
    return bool(words) and pattern[0] in {"*", words[0]} and _fits(pattern[1:], words[1:])


def delays_natively(app: Celery) -> bool:
    """Whether the broker itself holds delayed messages: RabbitMQ, once the app has a quorum queue.

    There a worker cannot raise its prefetch for messages it holds until their time, so a few would block it.
    """
    return bool(detect_quorum_queues(app, app.connection_for_write().transport.driver_type)[0])


def straight_to(app: Celery, name: str) -> dict[str, Any]:
    """Publishing options that bring a message to this queue alone, whatever routes the task has."""
    known = app.amqp.queues.get(name)  # its arguments are right; another queue exists, for its message came from there
    queue = Queue(name, exchange=Exchange(""), routing_key=name)
    return {"queue": queue, "exchange": "", "routing_key": name, "declare": [known] if known is not None else []}


def through_delay(channel: Any, name: str, delay: float) -> dict[str, Any]:
    """Publishing options that bring a message to this queue alone after a delay, held by the broker.

    Args:
        delay: rounded up to whole seconds, the broker's measure.
    """
    # The pattern spells every digit of the delay: ``#.name`` would take what is on its way to ``other.name`` as well.
    pattern = "*." * MAX_NUMBER_OF_BITS_TO_USE + name + OURS
    channel.queue_bind(queue=name, exchange=CELERY_DELAYED_DELIVERY_EXCHANGE, routing_key=pattern)
    key = calculate_routing_key(max(1, math.ceil(delay)), name + OURS)
    return {"queue": None, "exchange": level_name(MAX_LEVEL), "routing_key": key, "declare": [], "countdown": None}
