"""Celery tasks whose effect happens once per key.

``IdempotentTask`` is the base class, ``Policy`` says how; ``current()`` is the running attempt. ``Engine`` and
``open_store`` are the same mechanism without Celery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from celery_idem.optin import annotation, install
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
    "annotation",
    "current",
    "install",
    "open_store",
]

_OF_CELERY = {"IdempotentTask": "task", "annotation": "optin", "install": "optin"}


def __getattr__(name: str) -> Any:
    """What needs Celery is imported when it is first asked for: a kombu consumer does without."""
    from difflib import get_close_matches
    from importlib import import_module

    if name not in _OF_CELERY:
        near = get_close_matches(name, __all__, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")

    value = globals()[name] = getattr(import_module(f"{__name__}.{_OF_CELERY[name]}"), name)
    return value
