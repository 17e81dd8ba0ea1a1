"""What a worker tells the history, by hooks around Celery and the claim store; it changes nothing they do.

``sent`` after a message's publication was confirmed, ``received`` and ``acked`` in the main process, ``answered`` from
``task_success``; under celery_idem also ``claimed``, ``renewed`` and ``completed`` around the store's own
verbs, and every event of the library as ``told``. Without a store, what Celery stored as a success is the completion.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from celery import signals
from celery.worker.request import Request

from tests.chaos.history import History

RECORDED = "CHAOS_HISTORY"
NAMED = "CHAOS_WORKER"


def install(app: Any, *, idempotent: bool) -> History | None:
    """Hook into this worker; None in a process that is none, such as the publisher."""
    path = os.environ.get(RECORDED)
    if not path:
        return None
    history = History(path, os.environ.get(NAMED, ""))
    watch_publishing(history)
    _watch_deliveries(history, idempotent=idempotent)
    if idempotent:
        _watch_store(history)
        _watch_events(app, history)
    return history


def watch_publishing(history: History) -> Callable[..., None]:
    """Note every confirmed publication of this process; the receiver, to be disconnected."""

    def sent(sender: Any = None, headers: Any = None, body: Any = None, **_: Any) -> None:
        key = body[1].get("key") if isinstance(body, (tuple, list)) else None
        if key:
            history.write("sent", key=key, id=headers["id"], task=sender)

    signals.after_task_publish.connect(sent, weak=False)
    return sent


def _watch_deliveries(history: History, *, idempotent: bool) -> None:
    def received(request: Any = None, **_: Any) -> None:
        if key := _key(request):
            history.write("received", key=key, id=request.id, tag=_tag(request))

    def answered(sender: Any = None, result: Any = None, **_: Any) -> None:
        key = (sender.request.kwargs or {}).get("key")
        if key:
            history.write("answered", key=key, id=sender.request.id, value=result)
            if not idempotent:
                history.write("completed", key=key, id=sender.request.id, token=result)

    signals.task_received.connect(received, weak=False)
    signals.task_success.connect(answered, weak=False)
    acknowledge = Request.acknowledge

    def noted(self: Any) -> Any:
        before = self.acknowledged
        done = acknowledge(self)
        if not before and self.acknowledged and (key := _key(self)):
            history.write("acked", key=key, id=self.id, tag=_tag(self))
        return done

    Request.acknowledge = noted  # type: ignore[method-assign]


def _key(request: Any) -> Any:
    return (request.kwargs or {}).get("key") if isinstance(request.kwargs, dict) else None


def _tag(request: Any) -> str:
    return str(request.message.delivery_tag)


def _watch_store(history: History) -> None:
    from celery_idem.stores.redis.store import RedisStore
    from celery_idem.stores.sql.store import SQLStore

    for kind in (RedisStore, SQLStore):
        _around(kind, "claim", lambda at, claimed, *_, **__: _claimed(history, at, claimed))
        _around(kind, "renew", lambda at, renewed, *_, **__: _renewed(history, at, renewed))
        _around(kind, "complete", lambda at, ended, claim, *_, **__: _completed(history, ended, claim))


def _around(kind: type, verb: str, then: Callable[..., None]) -> None:
    inner = getattr(kind, verb)

    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        at = time.monotonic()
        answer = inner(self, *args, **kwargs)
        then(at, answer, *args, **kwargs)
        return answer

    setattr(kind, verb, outer)


def _claimed(history: History, at: float, decision: Any) -> None:
    claim = decision.claim
    if claim is not None and not claim.right:
        history.write("claimed", at=at, token=claim.token, fence=claim.fence, id=claim.operation.delivery.message_id)


def _renewed(history: History, at: float, answers: Any) -> None:
    tokens = [token for token, answer in answers.items() if answer.value == "RENEWED"]
    if tokens:
        history.write("renewed", at=at, tokens=tokens)


def _completed(history: History, ended: Any, claim: Any) -> None:
    if ended.value == "COMPLETED":
        operation = claim.operation
        history.write(
            "completed", token=claim.token, fence=claim.fence, id=operation.delivery.message_id, record=operation.key
        )


def _watch_events(app: Any, history: History) -> None:
    from celery_idem.app import runtime_of

    def told(event: Any) -> None:
        if event.name.value != "NEW":
            fields = {name: str(value)[:200] for name, value in event.fields.items() if name in _TOLD}
            history.write("told", name=event.name.value, **fields)

    runtime_of(app).emit.listeners.append(told)


_TOLD = ("message_id", "generation", "fence", "error", "cause", "outcome")
