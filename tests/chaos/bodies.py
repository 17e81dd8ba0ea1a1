"""The tasks of the storm: the same bodies as bare Celery tasks and as idempotent ones.

Each body works, has its effect on the fenced resource, works on, and returns a value that no other attempt returns.
Every task is called with ``key``, the operation's name in the history, and ``seconds``, how long it works.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

from celery import Task

from tests.chaos import recorder
from tests.chaos.history import History
from tests.chaos.resource import Resource

RESOURCE = "CHAOS_RESOURCE"
SLICE = 0.1
"""Seconds between two looks of a working body, where a thread can be stopped."""

SOURCE = """
import os
from tests.chaos.bodies import define
for _name, _variable in (("broker_url", "CHAOS_BROKER"), ("idempotency_store", "CHAOS_STORE")):
    if _variable in os.environ:
        app.conf[_name] = os.environ[_variable]
globals().update(define(app, idempotent={idempotent!r}))
"""


def define(app: Any, *, idempotent: bool) -> dict[str, Any]:
    """The tasks by name, bound to the app, with what they tell the history."""
    history = recorder.install(app, idempotent=idempotent)
    keyed, plain = _bases(idempotent=idempotent)
    late: dict[str, Any] = {"acks_late": True, "reject_on_worker_lost": True, "bind": True}

    @app.task(base=keyed, name="keyed", **late)
    def keyed_task(self: Any, key: str, seconds: float) -> str:
        return act(self, history, key, seconds)

    @app.task(base=plain, name="message", **late)
    def message(self: Any, key: str, seconds: float) -> str:
        return act(self, history, key, seconds)

    @app.task(base=plain, name="follow", **late)
    def follow(self: Any, before: Any, key: str, seconds: float) -> str:
        return act(self, history, key, seconds)

    @app.task(base=keyed, name="again", max_retries=None, **late)
    def again(self: Any, key: str, seconds: float) -> str:
        if self.request.retries == 0:
            raise self.retry(countdown=1)
        return act(self, history, key, seconds)

    return {"keyed": keyed_task, "message": message, "follow": follow, "again": again}


def _bases(*, idempotent: bool) -> tuple[Any, Any]:
    if not idempotent:
        return Task, Task
    from celery_idem import IdempotentTask, Policy

    class Keyed(IdempotentTask):
        abstract = True
        idempotency = Policy(key="{key}", fingerprint=["key"])

    return Keyed, IdempotentTask


def act(task: Any, history: History | None, key: str, seconds: float) -> str:
    """One attempt, from its beginning in the history to its end."""
    if history is None:
        raise AssertionError("only a worker of the storm runs these bodies")
    attempt, running = uuid.uuid4().hex, getattr(task, "idempotency", None)
    fence, token = (running.fence, running.token) if running is not None else (0, None)
    resource = Resource(os.environ[RESOURCE])
    try:
        held = resource.hold(key, fence)
        told = {"attempt": attempt, "fence": fence, "token": token, "id": task.request.id, "held": held}
        record = running.key if running is not None else None
        history.write("start", key=key, record=record, generation=task.request.retries, **told)
        try:
            work(seconds / 2)
            resource.effect(key, attempt, fence, os.getpid())
            work(seconds / 2)
        except BaseException as error:
            history.write("end", key=key, attempt=attempt, error=type(error).__name__)
            raise
        history.write("end", key=key, attempt=attempt)
    finally:
        resource.close()
    return f"{key} by {attempt}"


def work(seconds: float) -> None:
    """Be busy that long."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(SLICE, left))
