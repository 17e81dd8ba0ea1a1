"""What happens to governed actions, told as everything else is: log line, worker event, and a Celery signal.

The store calls a ``Teller`` after each commit, in the process that made the change. Told is what the event says of
itself, field by field as ``DETAILS`` lists it: never a payload, a result or an idempotency key. Nothing here decides
anything, and a receiver that raises changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.utils.dispatch import Signal

from celery_idem.app import runtime_of
from celery_idem.core.events import EventName
from celery_idem.governed import records

if TYPE_CHECKING:
    from celery import Celery

_ARGUMENTS = ("action_id", "action_type", "event")

action_proposed = Signal(name="action_proposed", providing_args=_ARGUMENTS)
action_approved = Signal(name="action_approved", providing_args=_ARGUMENTS)
action_rejected = Signal(name="action_rejected", providing_args=_ARGUMENTS)
action_dispatched = Signal(name="action_dispatched", providing_args=_ARGUMENTS)
action_accepted = Signal(name="action_accepted", providing_args=_ARGUMENTS)
action_verified = Signal(name="action_verified", providing_args=_ARGUMENTS)
action_completed = Signal(name="action_completed", providing_args=_ARGUMENTS)
action_failed = Signal(name="action_failed", providing_args=_ARGUMENTS)
action_ambiguous = Signal(name="action_ambiguous", providing_args=_ARGUMENTS)

SIGNALS = {
    records.PROPOSED: action_proposed,
    records.GATED: action_approved,
    records.REJECTED: action_rejected,
    records.DISPATCHED: action_dispatched,
    records.ACCEPTED: action_accepted,
    records.VERIFIED: action_verified,
    records.COMPLETED: action_completed,
    records.FAILED: action_failed,
    records.AMBIGUOUS: action_ambiguous,
}
"""Sent with the app as sender, and ``action_id``, ``action_type`` and ``event``, a mapping, as arguments."""

DETAILS: dict[str, tuple[str, ...]] = {
    records.PROPOSED: (),
    records.GATED: ("receipt_key",),
    records.GATE_ADDED: ("receipt_key",),
    records.REJECTED: ("reason",),
    records.ENQUEUED: ("chain_id", "instead_of"),
    records.LEASED: ("mode", "until", "lapsed"),
    records.LEASE_EXPIRED: ("of", "until"),
    records.DEFERRED: ("reason", "delay", "event_type"),
    records.DISPATCHED: ("approval_id", "execution_digest"),
    records.OBSERVING: ("attempt",),
    records.UNRESOLVED: ("reason", "delay"),
    records.ACCEPTED: ("receipt_key",),
    records.VERIFIED: ("receipt_key",),
    records.COMPLETED: (),
    records.FAILED: ("error", "reason"),
    records.AMBIGUOUS: ("reason", "observations", "found"),
}
"""What is told of each event besides action_id, action_type, from_state, to_state and actor."""


class Teller:
    """The listener of one app's action store."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def __call__(self, event: records.Event) -> None:
        """Tell it once to everybody."""
        happened = event["event_type"]
        known = happened if happened in DETAILS else records.DEFERRED  # ``defer_leased`` may have a word of its own
        details = event["details"]
        fields: dict[str, Any] = {
            name: event.get(name) for name in ("action_id", "action_type", "from_state", "to_state", "actor")
        }
        fields |= {name: details.get(name) for name in DETAILS[known]}
        if known != happened:
            fields["event_type"] = happened
        runtime_of(self._app).emit.tell(EventName[f"ACTION_{known.upper()}"], fields)
        if happened in SIGNALS:
            SIGNALS[happened].send(
                sender=self._app, action_id=event["action_id"], action_type=event.get("action_type"), event=event
            )
