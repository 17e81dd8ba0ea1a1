"""What the suite needs to know of a store: how to open it, fill it, move its clock, and get past it.

A harness is written once per store. The suite asks it for a new one per case and closes it afterwards; the cases keep
to actions they proposed themselves, so all harnesses may lead to one database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from celery_idem.conformance.clock import Clock
from celery_idem.governed.records import Action, Receipt
from celery_idem.governed.store import ActionStore

__all__ = ["Clock", "Harness", "Tamper"]


class Tamper(Protocol):
    """Writes past the store, as somebody with the database's password would; fields are named as in ``records``.

    ``payload``, ``result`` and ``evidence`` are given as values and stored in the store's own way; digests stay as they
    are unless they are given too.
    """

    def change_action(self, action_id: str, **fields: Any) -> None:
        """Overwrite these fields of the action."""
        ...

    def change_receipt(self, action_id: str, receipt_key: str, **fields: Any) -> None:
        """Overwrite these fields of the receipt."""
        ...

    def add_receipt(self, receipt: Receipt) -> None:
        """Insert the receipt as it is, behind the ones that are there."""
        ...

    def remove_receipt(self, action_id: str, receipt_key: str) -> None:
        """Delete the receipt."""
        ...


class Harness(Protocol):
    """One opened store; inherit from it, and the optional members have their defaults."""

    store: ActionStore
    """Empty, or without actions of this suite; made with ``clock``."""
    clock: Clock
    """The store's clock: it must read this one, in every handle ``reopen`` makes too."""
    tamper: Tamper | None = None
    """The way past the store; None where nobody has written one."""
    excused: Mapping[str, str] = {}
    """What the store cannot have, with the reason: ``{"tamper": "its rows are on write-once media"}``.

    A case that needs ``tamper``, or the store's ``list_events`` or ``list_dead_letters``, and finds none is told as not
    run, and fails the suite unless it is excused here.
    """

    def propose(
        self, *, idempotency_key: str, source: str, source_ref: str | None, action_type: str, payload: Any
    ) -> Action:
        """Bring a new action into the store: state ``proposed``, ready at once."""
        ...

    def gate(self, action_id: str, evidence: Mapping[str, Any], *, receipt_key: str = "owner-gate") -> Receipt:
        """Record an approval as a gate receipt that is ``passed``: ``proposed`` becomes ``gated``.

        Its ``external_id`` is the evidence's ``approval_id``. It records and does not judge, so that a second gate can
        be recorded too; the same key with the same evidence is the first receipt again.
        """
        ...

    def reopen(self) -> ActionStore:
        """Another handle to the same data, as another process would open it."""
        ...

    def close(self) -> None:
        """Close the store and every handle."""
        ...
