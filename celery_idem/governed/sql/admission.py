"""The switch before every mutation: closed, no gate is consumed, and nothing is lost but time.

Dispatches share a lock that changing the switch takes alone, so once ``close`` is answered no dispatch that saw it open
can still commit. Its history is kept; the last entry counts, and where there is none it is open.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, select, text

from celery_idem.errors import ActionStoreError, AdmissionClosed
from celery_idem.governed.sql import schema
from celery_idem.governed.sql.arguments import checked_flag, checked_text, utc
from celery_idem.governed.sql.transaction import Transaction


def current(tx: Transaction) -> dict[str, Any]:
    """``open``, ``reason``, ``actor`` and ``changed_at``; open and without a history where nobody ever closed it."""
    c = schema.admission.c
    found = tx.run(select(schema.admission).order_by(c.admission_id.desc()).limit(1)).mappings().first()
    if found is None:
        return {"open": True, "reason": "", "actor": "", "changed_at": None}
    return {name: found[name] for name in ("open", "reason", "actor", "changed_at")}


def change(tx: Transaction, is_open: bool, reason: str, actor: str) -> dict[str, Any]:
    """Open or close it, after the last dispatch that saw it otherwise has committed."""
    checked_flag("is_open", is_open)
    checked_text("reason", reason)
    checked_text("actor", actor)
    _lock(tx, "pg_advisory_xact_lock")
    written = tx.run(insert(schema.admission).values(open=is_open, reason=reason, actor=actor, changed_at=tx.now))
    last = tx.run(select(func.max(schema.admission.c.admission_id))).scalar_one()
    if written.inserted_primary_key is None or written.inserted_primary_key[0] != last:
        raise ActionStoreError(
            f"the switch was not changed: entry {last} of {schema.admission.name} outranks this one: look who wrote it"
        )
    return current(tx)


def share(tx: Transaction) -> None:
    """Whatever the switch is now, it stays so until this transaction ends."""
    _lock(tx, "pg_advisory_xact_lock_shared")


def must_be_open(tx: Transaction) -> None:
    """``AdmissionClosed`` if it is not."""
    now = current(tx)
    if not now["open"]:
        raise AdmissionClosed(
            f"admission is closed since {utc(now['changed_at'])} by {now['actor']}: {now['reason']}; nothing was "
            "consumed, and it goes on when admission is opened",
            reason=now["reason"],
        )


def _lock(tx: Transaction, function: str) -> None:
    if not tx.sqlite:  # there the transaction has the whole file
        tx.run(text(f"SELECT {function}({schema.ADMISSION_LOCK})"))
