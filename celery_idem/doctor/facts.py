"""What the rules look at: the broker as its URL names it, and each task's limits and delays, in seconds.

Nothing here opens a connection or imports a broker's library. What cannot be known is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from celery import Task

from celery_idem.app import Runtime
from celery_idem.core.keys import KeySource
from celery_idem.parking import DEFAULT_VISIBILITY, time_limits
from celery_idem.routing import delays_natively
from celery_idem.task import Idempotent

KINDS = {"rediss": "redis", "sentinel": "redis", "amqps": "amqp", "pyamqp": "amqp", "librabbitmq": "amqp"}
"""Schemes of broker URLs that mean the same kind of broker."""
VISIBILITY = {"redis": DEFAULT_VISIBILITY, "sqs": 1800.0}
"""Kinds of broker that give a message to another worker after a time, and kombu's default for it."""
CONSUMER_TIMEOUT = 1800.0
"""RabbitMQ's default for the seconds a consumer may take to ack."""
OURS = "celery_idem."
LOCAL = frozenset({"", "localhost", "127.0.0.1", "::1"})


class Facts:
    """One app's configuration, read."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.app, self.conf = runtime, runtime.app, runtime.app.conf
        on = sorted(runtime.tasks(), key=lambda task: str(task.name))
        self.nothing_on = not on
        # What celery_idem brings along has the policies it needs, and nobody is to change them.
        self.tasks = [task for task in on if not str(task.name).startswith(OURS)]

    # --- broker and results ------------------------------------------------------------------------------------------

    @cached_property
    def broker_url(self) -> str:
        """The first broker's URL."""
        given = self.conf.broker_read_url or self.conf.broker_transport or "amqp://"
        return str(given[0] if isinstance(given, (list, tuple)) else given).partition(";")[0]

    @cached_property
    def broker(self) -> str:
        """``redis``, ``amqp``, ``sqs``, ``memory`` or another scheme."""
        scheme = self.broker_url.partition(":")[0].partition("+")[0].lower()
        return KINDS.get(scheme, scheme)

    @property
    def broker_is_remote(self) -> bool:
        """Whether workers on other machines may take its messages, as far as the URL tells."""
        if self.broker not in {"redis", "amqp", "sqs"} or "+socket:" in self.broker_url:
            return False
        host = self.broker_url.partition("://")[2].rpartition("@")[2].partition("/")[0]
        name = host.partition("]")[0][1:] if host.startswith("[") else host.partition(":")[0]
        return self.broker == "sqs" or name.lower() not in LOCAL

    @property
    def shared_redis(self) -> str | None:
        """The one Redis that holds both broker and claims, as far as the URLs tell: ``host:port``, or its socket."""
        ours, theirs = (_redis_place(url) for url in (self.runtime.store_url or "", self.broker_url))
        return ours if ours == theirs else None

    @property
    def options(self) -> dict[str, Any]:
        """``broker_transport_options``."""
        return dict(self.conf.broker_transport_options or {})

    @property
    def visibility(self) -> float | None:
        """Seconds until an unacked message goes to another worker; None where no clock decides that."""
        if self.broker not in VISIBILITY:
            return None
        return float(self.options.get("visibility_timeout") or VISIBILITY[self.broker])

    @property
    def unkept(self) -> float | None:
        """``visibility``, where it also meets messages whose worker lives; None where they are kept visible."""
        kept = self.broker == "redis" and self.runtime.settings["keep_visible"]
        return None if kept else self.visibility

    @property
    def keeps_results(self) -> bool:
        """Whether there is a result backend that can be asked later."""
        backend = str(self.conf.result_backend or "")
        return bool(backend) and not backend.startswith(("disabled", "rpc", "amqp"))

    @property
    def result_expires(self) -> float | None:
        """Seconds the backend keeps a result; None for ever."""
        given = self.conf.result_expires
        seconds = given.total_seconds() if isinstance(given, timedelta) else float(given or 0)
        return seconds or None

    def annotated(self, task: Idempotent, option: str) -> bool:
        """Whether ``task_annotations`` sets this option of the task; objects among them are not asked."""
        given = self.conf.task_annotations or ()
        for one in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(one, Mapping) and any(option in (one.get(name) or {}) for name in (task.name, "*")):
                return True
        return False

    # --- one task ----------------------------------------------------------------------------------------------------

    def limit(self, task: Idempotent) -> float | None:
        """Seconds its body may take at most: the hard limit, else the soft one; None where nothing bounds it."""
        hard, soft = time_limits(task)
        return hard or soft

    def key_kind(self, task: Idempotent) -> str:
        """``message``, ``arguments``, ``names``, ``template`` or ``function``."""
        return KeySource.parse(self.runtime.policy_of(task).key).kind

    def longest_retry(self, task: Idempotent) -> float:
        """Seconds its longest known retry is delayed; 0 where it is not known to retry."""
        kwargs = getattr(task, "retry_kwargs", None) or {}
        times = kwargs.get("max_retries", task.max_retries)
        if times is not None and times <= 0:
            return 0.0
        if getattr(task, "autoretry_for", ()):
            backoff = float(getattr(task, "retry_backoff", False) or 0)
            if backoff:  # doubled from attempt to attempt, as Celery does it
                most = float(getattr(task, "retry_backoff_max", 600))
                return most if times is None else min(most, int(max(1.0, backoff)) * 2.0 ** min(times - 1, 60))
            return float(kwargs.get("countdown", task.default_retry_delay) or 0)
        set_on_purpose = task.default_retry_delay != Task.default_retry_delay
        return float(task.default_retry_delay or 0) if set_on_purpose else 0.0

    def consumer_timeout(self, task: Idempotent) -> tuple[float, str]:
        """RabbitMQ's patience with who does not ack a message of this task, in seconds, and who says so."""
        queue = self._queue(task)
        for kind in ("queue_arguments", "consumer_arguments"):
            milliseconds = (getattr(queue, kind, None) or {}).get("x-consumer-timeout")
            if milliseconds:
                return float(milliseconds) / 1000, f"x-consumer-timeout of queue {queue.name}"
        return CONSUMER_TIMEOUT, ""

    def _queue(self, task: Idempotent) -> Any:
        try:
            route: Any = self.app.amqp.router.lookup_route(task.name)
        except Exception:  # noqa: BLE001  a router of the app's own, asked without arguments
            route = None
        said = route.get("queue") if isinstance(route, Mapping) else route
        queue = said or getattr(task, "queue", None) or self.conf.task_default_queue
        return self.app.amqp.queues.get(queue) if isinstance(queue, str) else queue

    @cached_property
    def delays_in_worker(self) -> bool:
        """Whether a message waits for its ETA unacked, in a worker."""
        return self.broker != "amqp" or not delays_natively(self.app)


def _redis_place(url: str) -> str | None:
    """Which server a Redis URL means, one word per server; None where it is none, or Sentinel decides."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() not in {"redis", "rediss", "redis+socket"}:
        return None
    if scheme.lower() == "redis+socket":
        return rest.partition("?")[0].rpartition("@")[2]
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "localhost").lower(), parts.port or 6379
    except ValueError:
        return None
    return f"{'localhost' if host in LOCAL else host}:{port}"
