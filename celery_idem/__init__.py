"""Celery tasks whose effect happens once per key.

``IdempotentTask`` is the base class, ``Policy`` says how; ``current()`` is the running attempt. ``Engine`` and
``open_store`` are the same mechanism without Celery.
"""

from __future__ import annotations

from celery_idem.core.context import RunContext, current
from celery_idem.core.engine import Engine
from celery_idem.core.policy import Policy
from celery_idem.core.records import Happened, NotHappened
from celery_idem.errors import (
    CeleryIdemError,
    ClaimConflict,
    ConfigurationError,
    DeliveriesExhausted,
    FingerprintMismatch,
    KeyMissing,
    LeaseLost,
    OutcomeUnknown,
    ParkFailed,
    RecordCorrupt,
    ReplayedFailure,
    ReplayImpossible,
    ResultUnavailable,
    StoreError,
    StoreUnavailable,
)
from celery_idem.stores.base import Store, open_store
from celery_idem.task import IdempotentTask

__version__ = "0.1.0"

__all__ = [
    "CeleryIdemError",
    "ClaimConflict",
    "ConfigurationError",
    "DeliveriesExhausted",
    "Engine",
    "FingerprintMismatch",
    "Happened",
    "IdempotentTask",
    "KeyMissing",
    "LeaseLost",
    "NotHappened",
    "OutcomeUnknown",
    "ParkFailed",
    "Policy",
    "RecordCorrupt",
    "ReplayImpossible",
    "ReplayedFailure",
    "ResultUnavailable",
    "RunContext",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "__version__",
    "current",
    "open_store",
]
