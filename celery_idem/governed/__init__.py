"""Governed actions: one mutation ever, approved by an owner, observed where in doubt.

Everything public is named here and imported when it is first asked for: an approver's web process needs neither Celery
nor the endpoint's client, and a store of one's own no SQLAlchemy. The contract is in ``store``, the words in
``records``, judgement in ``gate``, the life of an action as Celery tasks in ``chain``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_idem.errors import (
    ActionFailed,
    ActionIdempotencyConflict,
    ActionLeaseConflict,
    ActionNotFound,
    ActionStoreError,
    ActionTransitionError,
    AdmissionClosed,
    AlreadyDecided,
    GateRefused,
    PayloadRefused,
)
from celery_idem.governed.canonical import canonical_json, digest_json
from celery_idem.governed.records import (
    ACTION_STATES,
    ALLOWED_TRANSITIONS,
    EVENT_TYPES,
    GATE_RECEIPT_KIND,
    LEASABLE_STATES,
    OBSERVATION_RECEIPT_KIND,
    RECOVERY_RECEIPT_KIND,
    RESERVED_RECEIPT_KINDS,
    STATE_ACCEPTED,
    STATE_COMPLETED,
    STATE_DISPATCHED,
    STATE_FAILED,
    STATE_GATED,
    STATE_PROPOSED,
    STATE_VERIFIED,
    TERMINAL_STATES,
    GateAuthorization,
    GateValidator,
)
from celery_idem.governed.store import ActionStore

if TYPE_CHECKING:
    from celery_idem.governed.catalog import ActionType, Catalog, action
    from celery_idem.governed.chain import approve, governed_chain, propose, reject
    from celery_idem.governed.endpoint import Answer, EndpointDoubt, ExecutionRequest, execution_request
    from celery_idem.governed.gate import (
        DEFAULT_SHAPES,
        REFUSALS,
        ProvenanceShape,
        ProvenanceShapes,
        check_bindings,
        grant_approval,
        message_approval,
        owner_gate_validator,
        validate_owner_gate,
    )
    from celery_idem.governed.http import HTTPEndpoint
    from celery_idem.governed.recovery import sweep
    from celery_idem.governed.signing import ApprovalKey, ApprovalKeys, ApprovalSigner, generate_key
    from celery_idem.governed.sql.store import SQLActionStore
    from celery_idem.governed.telling import (
        action_accepted,
        action_ambiguous,
        action_approved,
        action_completed,
        action_dispatched,
        action_failed,
        action_proposed,
        action_rejected,
        action_verified,
    )

_LATER = {
    "catalog": ("ActionType", "Catalog", "action"),
    "chain": ("approve", "governed_chain", "propose", "reject"),
    "endpoint": ("Answer", "EndpointDoubt", "ExecutionRequest", "execution_request"),
    "gate": (
        "DEFAULT_SHAPES",
        "REFUSALS",
        "ProvenanceShape",
        "ProvenanceShapes",
        "check_bindings",
        "grant_approval",
        "message_approval",
        "owner_gate_validator",
        "validate_owner_gate",
    ),
    "http": ("HTTPEndpoint",),
    "recovery": ("sweep",),
    "signing": ("ApprovalKey", "ApprovalKeys", "ApprovalSigner", "generate_key"),
    "sql.store": ("SQLActionStore",),
    "telling": (
        "action_accepted",
        "action_ambiguous",
        "action_approved",
        "action_completed",
        "action_dispatched",
        "action_failed",
        "action_proposed",
        "action_rejected",
        "action_verified",
    ),
}
_HOME = {name: module for module, names in _LATER.items() for name in names}

__all__ = [
    "ACTION_STATES",
    "ALLOWED_TRANSITIONS",
    "DEFAULT_SHAPES",
    "EVENT_TYPES",
    "GATE_RECEIPT_KIND",
    "LEASABLE_STATES",
    "OBSERVATION_RECEIPT_KIND",
    "RECOVERY_RECEIPT_KIND",
    "REFUSALS",
    "RESERVED_RECEIPT_KINDS",
    "STATE_ACCEPTED",
    "STATE_COMPLETED",
    "STATE_DISPATCHED",
    "STATE_FAILED",
    "STATE_GATED",
    "STATE_PROPOSED",
    "STATE_VERIFIED",
    "TERMINAL_STATES",
    "ActionFailed",
    "ActionIdempotencyConflict",
    "ActionLeaseConflict",
    "ActionNotFound",
    "ActionStore",
    "ActionStoreError",
    "ActionTransitionError",
    "ActionType",
    "AdmissionClosed",
    "AlreadyDecided",
    "Answer",
    "ApprovalKey",
    "ApprovalKeys",
    "ApprovalSigner",
    "Catalog",
    "EndpointDoubt",
    "ExecutionRequest",
    "GateAuthorization",
    "GateRefused",
    "GateValidator",
    "HTTPEndpoint",
    "PayloadRefused",
    "ProvenanceShape",
    "ProvenanceShapes",
    "SQLActionStore",
    "action",
    "action_accepted",
    "action_ambiguous",
    "action_approved",
    "action_completed",
    "action_dispatched",
    "action_failed",
    "action_proposed",
    "action_rejected",
    "action_verified",
    "approve",
    "canonical_json",
    "check_bindings",
    "digest_json",
    "execution_request",
    "generate_key",
    "governed_chain",
    "grant_approval",
    "message_approval",
    "owner_gate_validator",
    "propose",
    "reject",
    "sweep",
    "validate_owner_gate",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    from difflib import get_close_matches
    from importlib import import_module

    if name not in _HOME:
        near = get_close_matches(name, __all__, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
