"""A revoked or expired copy in the hands of the task: what ``received`` left to be judged after the claim.

The message's other copies are known not to run now, and not to have run, so REVOKED is the truth. It is told as
Celery tells it, and the attempt is over: a later copy is dropped, and tells nobody a second time.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore
from celery.signals import task_revoked

from celery_idem.publish import REVOKED_HEADER, Parked, moment

if TYPE_CHECKING:
    from celery_idem.task import Idempotent


class Revoked(Ignore):
    """Raised in place of the body."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason} before it began")
        self.reason = reason


def refuse_revoked(request: Any, parked: Parked) -> None:
    """``Revoked`` if the message was revoked, or expired while it was parked."""
    reason = (request.headers or {}).get(REVOKED_HEADER)
    if reason in ("revoked", "expired"):  # not a set: garbage need not be hashable
        raise Revoked(reason)
    if parked.expires is not None and moment(parked.expires) <= datetime.now(timezone.utc):
        raise Revoked("expired")


def tell_revoked(task: Idempotent, request: Any, revoked: Revoked, *, store: bool) -> None:
    """Store REVOKED, count the chord part as failed, and send the signal, as a worker does on arrival."""
    task.backend.mark_as_revoked(request.id, revoked.reason, request=request, store_result=store)
    expired = revoked.reason == "expired"
    task_revoked.send(sender=task, request=request, terminated=False, signum=None, expired=expired)
