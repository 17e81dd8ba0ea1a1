"""The words of the ledger: states, transitions, receipt kinds and event types, and what an action or receipt holds.

Actions, receipts, events and dead letters travel as plain mappings; all times are seconds since 1970 by the store's
clock, all digests 64 lowercase hex characters.

action: ``action_id idempotency_key source source_ref action_type payload payload_sha256 state attempt_count
max_attempts next_attempt_at lease_owner lease_expires_at last_error result created_at updated_at terminal_at``, and of
this library's own ``chain_id enqueued_at``.
receipt: ``action_id receipt_key kind status external_id evidence evidence_sha256 observed_at created_at``.
event: ``event_id action_id event_type from_state to_state actor details created_at``.
dead letter: ``action_id reason created_at``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Action: TypeAlias = Mapping[str, Any]
Receipt: TypeAlias = Mapping[str, Any]
Event: TypeAlias = Mapping[str, Any]
DeadLetter: TypeAlias = Mapping[str, Any]

STATE_PROPOSED = "proposed"
STATE_GATED = "gated"
STATE_DISPATCHED = "dispatched"
STATE_ACCEPTED = "accepted"
STATE_VERIFIED = "verified"
STATE_COMPLETED = "completed"
STATE_FAILED = "failed"

ALLOWED_TRANSITIONS: Mapping[str, frozenset[str]] = {
    STATE_PROPOSED: frozenset({STATE_GATED, STATE_FAILED}),
    STATE_GATED: frozenset({STATE_DISPATCHED, STATE_FAILED}),
    STATE_DISPATCHED: frozenset({STATE_ACCEPTED, STATE_FAILED}),
    STATE_ACCEPTED: frozenset({STATE_VERIFIED, STATE_FAILED}),
    STATE_VERIFIED: frozenset({STATE_COMPLETED, STATE_FAILED}),
    STATE_COMPLETED: frozenset(),
    STATE_FAILED: frozenset(),
}
"""From each state to which; nothing leads back from ``dispatched``, for its mutation may have happened (I6, I8)."""

ACTION_STATES = frozenset(ALLOWED_TRANSITIONS)
TERMINAL_STATES = frozenset({STATE_COMPLETED, STATE_FAILED})
LEASABLE_STATES = frozenset({STATE_GATED, STATE_ACCEPTED, STATE_VERIFIED})
"""What ``lease_next`` may lease: work that is safe to do again. Never ``dispatched``."""

GATE_RECEIPT_KIND = "gate"
RECOVERY_RECEIPT_KIND = "dispatch_recovery"
OBSERVATION_RECEIPT_KIND = "dispatch_observation"
RESERVED_RECEIPT_KINDS = frozenset({GATE_RECEIPT_KIND, RECOVERY_RECEIPT_KIND, OBSERVATION_RECEIPT_KIND})
"""Kinds only their own verbs write; ``add_receipt``, ``accept`` and ``verify`` refuse them."""

ACCEPTANCE = "acceptance"
"""Key and kind of the receipt of what the endpoint said when it had done it."""
VERIFICATION = "verification"
"""Key and kind of the receipt of the second look that found it done."""
RESERVED_RECEIPT_KEYS = (ACCEPTANCE, VERIFICATION, "owner-gate", "dispatch-recovery:", "dispatch-observation:")
"""How the keys begin under which a life's own receipts are written; ``add_receipt`` refuses them."""

PROPOSED = "proposed"
GATED = "gated"
GATE_ADDED = "gate_added"
REJECTED = "rejected"
ENQUEUED = "enqueued"
LEASED = "leased"
LEASE_EXPIRED = "lease_expired"
DEFERRED = "deferred"
DISPATCHED = "dispatched"
OBSERVING = "observing"
UNRESOLVED = "unresolved"
ACCEPTED = "accepted"
VERIFIED = "verified"
COMPLETED = "completed"
FAILED = "failed"
AMBIGUOUS = "ambiguous"

EVENT_TYPES = (
    PROPOSED,
    GATED,
    GATE_ADDED,
    REJECTED,
    ENQUEUED,
    LEASED,
    LEASE_EXPIRED,
    DEFERRED,
    DISPATCHED,
    OBSERVING,
    UNRESOLVED,
    ACCEPTED,
    VERIFIED,
    COMPLETED,
    FAILED,
    AMBIGUOUS,
)
"""What may be appended to an action's history, in the order of a life; ``defer_leased`` may name one of its own."""


@dataclass(frozen=True, slots=True)
class GateAuthorization:
    """What a gate that holds comes to, at the moment it was judged."""

    shape: str
    """Name of the provenance shape."""
    granted: bool
    """Whether a standing grant approved, and not a person this once."""
    receipt_key: str
    evidence_sha256: str
    approval_id: str
    decision_id: str
    revision: int
    decided_at: float
    expires_at: float
    expired: bool
    """Whether any expiry it carries has passed: then it authorizes nothing."""
    key_id: str | None = None
    """Of the key that signed it; None where it is not signed."""


GateValidator: TypeAlias = Callable[[Action, Sequence[Receipt], float], GateAuthorization]
"""Called inside the dispatch transaction with the durable action, its durable receipts and the store's clock (I4)."""
