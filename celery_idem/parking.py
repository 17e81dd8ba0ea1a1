"""Park a message: publish the same one again with a delay, confirmed, and only then let this copy be acked.

The rule: no copy is acked on the strength of a message nobody has seen or confirmed. So the order is publish,
confirm, note on the record, ``Ignore``; and where the publish fails the message goes back unacked, or, with early
acks, the task fails loudly.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery.exceptions import Reject
from celery.utils.time import rate
from kombu import pools

from celery_idem.app import runtime_of
from celery_idem.errors import ParkFailed
from celery_idem.publish import PARK_HEADER, STAMP_HEADER, Parked, Stamp, copied, read_parked
from celery_idem.routing import delays_natively, queue_of, straight_to, through_delay

if TYPE_CHECKING:
    from celery import Celery

    from celery_idem.task import Idempotent

FIRST, LONGEST = 1.0, 15.0
"""Seconds a copy that waits for another run is parked: doubled each time."""
FIRST_OUTAGE, LONGEST_OUTAGE = 5.0, 60.0
"""The same while the store does not answer or cannot be read."""
DEFAULT_VISIBILITY = 3600.0
"""Celery's visibility timeout on Redis, in seconds; on other brokers a harmless bound."""
GIVE_BACK_AFTER = 1.0
"""Seconds a message that could not be parked is held before it goes back, so that it does not spin."""
PUBLISH_TRIES = 5
"""How often an early-acked message is published again before its task fails."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a message is parked, and the bounds on how long."""

    cause: str
    below: float = float("inf")
    """Seconds; the live lease's rest."""
    exactly: float | None = None
    """Seconds, where it is known when the wait is over."""
    outage: bool = False
    noted: int = 0
    """The highest count of a parked copy of this generation the record knows."""


def delay_of(count: int, wait: Wait, visibility: float, *, jitter: float) -> float:
    """Seconds until the copy comes back: exponential in ``count``, below every bound, at least half a second."""
    first, longest = (FIRST_OUTAGE, LONGEST_OUTAGE) if wait.outage else (FIRST, LONGEST)
    exponential = min(longest, first * 2.0 ** min(count - 1, 10))
    if wait.exactly is not None:
        return max(0.5, min(wait.exactly, visibility / 3))
    spread = 0.85 + 0.3 * jitter  # the shortest still publishes no more than eight times in any minute
    return max(0.5, min(exponential * spread, wait.below, visibility / 3, longest))


def unpublished(task: Idempotent, request: Any, error: Any) -> Exception:
    """What to raise where the broker did not take the message that was to replace this one: its own copy goes back."""
    if task.acks_late:
        time.sleep(GIVE_BACK_AFTER)
        return Reject(error, requeue=True)
    return ParkFailed(
        f"{task.name}[{request.id}] could not be published again ({error!r}) and was acked early: "
        "check the broker, then send it again; acks_late=True keeps such a message on the broker",
        message_id=request.id,
    )


def visibility_timeout(app: Celery) -> float:
    """Seconds after which the broker gives an unacked message to somebody else."""
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout") or DEFAULT_VISIBILITY)


def waiting_time(task: Idempotent, wanted: float, *, jitter: float) -> float:
    """Seconds a copy waits in its slot for a key that is held, before it is parked: up to a fifth less than wanted.

    A copy the broker restored comes back at the same instant in two workers; both must not read the note before
    either has written it. Of a rate-limited task every parked copy costs one of its runs, so there the slot is held
    as long as a run costs.
    """
    wanted *= 1 - jitter / 5
    per_second = rate(task.rate_limit or 0)  # type: ignore[arg-type]
    if not per_second or task.app.conf.worker_disable_rate_limits:
        return wanted
    return max(wanted, min(1 / per_second, LONGEST, visibility_timeout(task.app) / 3))


def patience_of(task: Idempotent, request: Any) -> float:
    """Seconds a delivery may take before its body: a third of its time limits, which count them.

    A hard limit that struck a copy that only waits would fail the message, which may be running elsewhere.
    """
    return min((limit for limit in time_limits(task, request.timelimit) if limit), default=math.inf) / 3


def time_limits(task: Idempotent, own: Any = None) -> tuple[float | None, float | None]:
    """Hard and soft time limit in seconds: the message's own, else the task's, else the app's."""
    hard, soft = own or (None, None)
    of_all = runtime_of(task.app).time_limits
    hard = hard or task.time_limit or of_all[0]
    soft = soft or task.soft_time_limit or of_all[1]
    return (float(hard) if hard else None), (float(soft) if soft else None)


def publish_parked(task: Idempotent, request: Any, stamp: Stamp, wait: Wait) -> tuple[int, float]:
    """Publish the copy and have it confirmed; its count, and its delay in seconds.

    Raises:
        Reject: it could not be published, and the broker still has the message to give again.
        ParkFailed: it could not be published, and nothing else holds the message.
    """
    generation = int(request.retries or 0)
    parked = read_parked(request.headers or {})
    own = parked.count if parked.generation == generation else 0
    count = max(own, wait.noted) + 1
    visibility = visibility_timeout(task.app)
    delay = delay_of(count, wait, visibility, jitter=random.random())  # noqa: S311
    header = Parked(generation, count, _expires(request, parked))
    tries = 1 if task.acks_late else PUBLISH_TRIES
    for again in reversed(range(tries)):
        try:
            with confirmed_producer(task.app) as producer:
                copy = _copy(task, request, stamp, header)
                copy.options.update(_destination(task.app, request, producer, delay))
                copy.apply_async(producer=producer, add_to_parent=False)
        except Exception as error:
            if again:
                time.sleep(GIVE_BACK_AFTER)
                continue
            raise unpublished(task, request, error) from error
        else:
            return count, delay
    raise AssertionError("unreachable")  # pragma: no cover


def _copy(task: Idempotent, request: Any, stamp: Stamp, parked: Parked) -> Any:
    headers = copied(request.headers) | {STAMP_HEADER: stamp.header(), PARK_HEADER: parked.header()}
    return task.signature_of_copy(request, headers=headers, retries=request.retries, expires=None)


def _destination(app: Celery, request: Any, producer: Any, delay: float) -> dict[str, Any]:
    home = queue_of(app, request.delivery_info)
    if home is None:  # the exchange it came from, and every queue bound there
        return {"countdown": delay}
    if delays_natively(app):
        return through_delay(producer.channel, home, delay)
    return {**straight_to(app, home), "countdown": delay}


def _expires(request: Any, parked: Parked) -> str | None:
    if parked.expires is not None:
        return parked.expires
    expires = request.expires
    return None if expires is None else str(expires if isinstance(expires, str) else expires.isoformat())


SILENCE = 10.0
"""Seconds one answer of the broker is waited for; Celery's publish policy multiplies it by its retries."""
BOUNDED = {
    "amqp": {"read_timeout": SILENCE, "write_timeout": SILENCE},
    "redis": {"socket_timeout": SILENCE, "socket_connect_timeout": SILENCE},
}
"""Per transport, what ends a publish that a silent broker never confirms; the user's own options win."""


def confirming_options(app: Celery, driver: str) -> dict[str, Any]:
    """Transport options under which a publish is confirmed in bounded time; not every transport knows the word."""
    asked = {"confirm_publish": True} if driver == "amqp" else {}
    return {**BOUNDED.get(driver, {}), **(app.conf.broker_transport_options or {}), **asked}


@contextmanager
def confirmed_producer(app: Celery) -> Iterator[Any]:
    """A pooled producer whose publish returns only when the broker has the message.

    AMQP confirms on request; on Redis and the other virtual transports the write's own reply is the confirmation.
    """
    runtime = runtime_of(app)
    if runtime.confirming is None:
        driver = app.connection_for_write().transport.driver_type
        options = confirming_options(app, driver)
        runtime.confirming = app.connection_for_write(transport_options=options)
    pool = pools.producers[runtime.confirming]  # kombu empties it after a fork
    with pool.acquire(block=True, timeout=app.conf.get("broker_pool_acquire_timeout", SILENCE)) as producer:
        yield producer
