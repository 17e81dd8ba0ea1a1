"""A received message in the worker's main process, where two verdicts are left to whoever holds the claim.

*Revoked, or expired.* Celery discards such a message and stores REVOKED, which counts as a failed chord part as well.
Of one that was parked or redelivered another copy may be running, and then that is no answer: it goes on to the task
with a note, and ``revoking`` says what becomes of it.

*Its child died after the result was stored.* Celery 5.7 acks the message, although the chord part is counted only after
the result is stored, and the chord would never end. Such a message comes back, and its copy is replayed. Celery 5.5 and
5.6 give it back by themselves.
"""

from __future__ import annotations

from typing import Any

from celery.worker.request import Request as CeleryRequest

from celery_idem.app import runtime_of
from celery_idem.publish import PARK_HEADER, REVOKED_HEADER


class Request(CeleryRequest):
    """A received message of an idempotent task."""

    app: Any
    task: Any
    _context: Any
    _left_to_the_claim = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_dict.pop(REVOKED_HEADER, None)  # ours to write; a producer's is none

    def revoked(self) -> bool:
        """Whether the message is discarded here."""
        return bool(super().revoked()) and not self._left_to_the_claim

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        copied = self.delivery_info["redelivered"] or PARK_HEADER in self.request_dict
        if copied and not terminated and self._claims():
            self._left_to_the_claim = True
            self.request_dict[REVOKED_HEADER] = reason
            return
        super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]

    def _success_was_stored(self) -> Any:
        return False if self._comes_back() else super()._success_was_stored()  # type: ignore[misc]  # since 5.7

    def _comes_back(self) -> bool:
        """Whether a copy can be given back, has a chord part to count, and is sure to run no body and count once."""
        task = self.task
        if not (self._context.chord and task.acks_late and task.reject_on_worker_lost and self._claims()):
            return False
        if getattr(task.backend, "implements_incr", False):  # such a backend would count the part a second time
            return False
        policy = runtime_of(self.app).policy_of(task)
        return bool(policy.ttl > 0 and policy.cacheable is None)

    def _claims(self) -> bool:
        """Whether the task claims the message before it does anything."""
        runtime = runtime_of(self.app)
        enforced = runtime.mode == "enforce" and runtime.protects(self.task)
        return enforced and not runtime.is_broadcast(self.delivery_info)
