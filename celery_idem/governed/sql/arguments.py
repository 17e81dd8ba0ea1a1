"""What callers bring, checked before anything is asked of the database: a refusal names the argument.

Text goes through here twice over: a name or key must be text a database can keep and people can read, a reason from
somewhere else is made so, for no action may stay open because of a letter in its error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import ColumnElement

from celery_idem.errors import ActionStoreError, PayloadRefused
from celery_idem.governed.canonical import canonical_json
from celery_idem.governed.sql import schema

MAX_TEXT = 512
MAX_REASON = 2000
MAX_PAGE = 10_000


def checked_text(name: str, value: object) -> str:
    """The value, if it is text a database can keep and people can read."""
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_TEXT or not value.isprintable():
        raise ActionStoreError(f"{name} = {_shown(value)}: give a text of 1 to {MAX_TEXT} printable characters")
    return value


def checked_texts(name: str, value: object) -> list[str]:
    """The values, if they are a list of such texts."""
    if isinstance(value, str) or not isinstance(value, (Sequence, set, frozenset)):
        raise ActionStoreError(f"{name} = {_shown(value)}: give a list of texts")
    return [checked_text(name, each) for each in value]


def checked_number(name: str, value: object, low: float, high: float) -> float:
    """The value as a float, if it is a number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ActionStoreError(f"{name} = {_shown(value)}: give a number from {low:g} to {high:g}")
    return float(value)


def checked_whole(name: str, value: object, low: int, high: int) -> int:
    """The value, if it is a whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ActionStoreError(f"{name} = {_shown(value)}: give a whole number from {low} to {high}")
    return value


def checked_flag(name: str, value: object) -> bool:
    """The value, if it is True or False."""
    if not isinstance(value, bool):
        raise ActionStoreError(f"{name} = {_shown(value)}: give True or False")
    return value


def checked_evidence(value: object) -> Mapping[str, Any]:
    """The value, if it is a mapping."""
    if not isinstance(value, Mapping):
        raise ActionStoreError(f"evidence = {_shown(value)}: give a mapping, such as message_approval(...) makes")
    return value


def legible(reason: object) -> str:
    """A reason from anywhere on one line of 2,000 characters at most, without what no database can keep."""
    told = " ".join(str(reason).split())[:MAX_REASON]
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in told) or "no reason was given"


def said(value: Any, what: str) -> str:
    """The value's canonical JSON, or an ``ActionStoreError`` that says what is wrong with it."""
    try:
        return canonical_json(value, where=what)
    except PayloadRefused as error:
        raise ActionStoreError(str(error)) from error


def utc(at: float | None) -> str:
    """The moment as people write it."""
    try:
        return datetime.fromtimestamp(at or 0.0, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at!r}"


def scope(
    source: str | None, source_prefix: str | None, action_type: str | None, action_ids: Sequence[str] | None
) -> list[ColumnElement[bool]]:
    """The conditions that these arguments of a leasing verb mean."""
    c = schema.action.c
    if source is not None and source_prefix is not None:
        raise ActionStoreError("source and source_prefix exclude each other: give one of them")
    conditions: list[ColumnElement[bool]] = []
    if source is not None:
        conditions.append(c.source == checked_text("source", source))
    if source_prefix is not None:
        conditions.append(c.source.startswith(checked_text("source_prefix", source_prefix), autoescape=True))
    if action_type is not None:
        conditions.append(c.action_type == checked_text("action_type", action_type))
    if action_ids is not None:
        conditions.append(c.action_id.in_(checked_texts("action_ids", action_ids)))
    return conditions


def _shown(value: object) -> str:
    return ascii(value[:60]) if isinstance(value, str) else f"a {type(value).__name__}"
