"""A row of the table as a ``Record``, and back.

What a newer release put into a note survives a write by this one: fields it does not know are carried along. A row
that makes no sense is ``RecordCorrupt``; a body that makes no sense is the codec's business.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from celery_idem.core.codec import Encoded
from celery_idem.core.records import RECORD_VERSION, Answer, Kind, Note, Outcome, Record, Right, State
from celery_idem.core.values import frozen
from celery_idem.errors import RecordCorrupt
from celery_idem.stores.sql.schema import COLUMNS

CLAIMED_AT = COLUMNS.index("claimed_at")
_STATES = {state.value: state for state in State}
_ANSWERS = {answer.value: answer for answer in Answer}
_KINDS = {kind.value: kind for kind in Kind}
_KNOWN = frozenset({"over", "successor", "parked", "continuing", "settled", "at"})


@frozen
class Row:
    """A record as read, with what a guarded write of it needs."""

    record: Record
    rev: int
    notes: Mapping[str, Any]
    """The notes as stored, with the fields this release does not know."""

    def same(self, other: Row | None) -> bool:
        """Whether nobody wrote the row between the two readings."""
        return other is not None and other.rev == self.rev and other.record.token == self.record.token


def corrupt(key: str, why: object) -> RecordCorrupt:
    """The error for a row that cannot be read."""
    return RecordCorrupt(
        f"the record of key {key} cannot be read ({str(why)[:200]}): look at it, then run "
        f"`celery -A <app> idem forget {key}`",
        key=key,
    )


def read_row(values: Sequence[Any]) -> Row:
    """Read one row, its values in the order of ``COLUMNS``; ``RecordCorrupt`` if it makes no sense."""
    version = values[25]
    try:
        if isinstance(version, int) and version > RECORD_VERSION:
            with contextlib.suppress(*_SENSELESS):
                return _row(values)
            return _newer(values)
        return _row(values)
    except _SENSELESS as error:
        raise corrupt(str(values[0]), f"{type(error).__name__}: {error}") from error


_SENSELESS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def _row(values: Sequence[Any]) -> Row:
    stored = {} if values[24] == "{}" else json.loads(values[24])
    if not isinstance(stored, dict):
        raise TypeError("notes that are no mapping")
    completed_at = values[17]
    record = Record(
        key=values[0],
        state=_STATES[values[2]],
        token=_text(values[3]),
        fence=_number(values[5], 63),
        message_id=_text(values[6]),
        generation=_number(values[7], 63),
        attempts=_number(values[8], 31),
        answer=_ANSWERS[values[4]],
        unknown=bool(values[9]),
        task=_text(values[10]),
        namespace=_text(values[11]),
        scope=_text(values[12]),
        fingerprint=_text(values[13]),
        holder=_text(values[14]),
        claimed_at=_time(values[15]),
        lease_expires_at=_time(values[16]),
        completed_at=None if completed_at is None else _time(completed_at),
        expires_at=_time(values[18]),
        outcome=None if values[19] is None else _outcome(values[19:24]),
        notes={message_id: _note(note) for message_id, note in stored.items()} if stored else {},
        record_version=_number(values[25], 31),
    )
    return Row(record, _number(values[1], 63), stored)


def _newer(values: Sequence[Any]) -> Row:
    """As much as the answer NEWER needs of a row only a newer release can read."""
    key, rev, _, token, _, fence = values[:6]
    expires_at = values[18] if isinstance(values[18], (int, float)) else float("inf")
    record = Record(
        key, State.CLAIMED, str(token), int(fence), "", 0, 0, expires_at=expires_at, record_version=values[25]
    )
    return Row(record, int(rev), {})


def _number(value: Any, bits: int) -> int:
    """A number of a column of that many bits that can still grow: every write of the row would fail otherwise."""
    number = int(value)
    if number != value:
        raise ValueError(f"{value!r:.40} where a whole number belongs")
    if not -(2**bits) <= number < 2**bits - 1:
        raise OverflowError(f"{number:.3g} cannot be kept, or cannot grow")
    return number


def _time(value: Any) -> float:
    moment = float(value)
    if not math.isfinite(moment):  # it compares with nothing, and a claim would be anybody's
        raise ValueError(f"{moment} where a time belongs")
    return moment


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} where text belongs")
    return value


def _outcome(values: Sequence[Any]) -> Outcome:
    kind, content_type, content_encoding, checksum, body = values
    if body is None:
        return Outcome(_KINDS[kind])
    if not isinstance(body, (str, bytes, memoryview)):  # bytes of a number would be that many zeros
        raise TypeError(f"{type(body).__name__} where bytes belong")
    body = body.encode() if isinstance(body, str) else bytes(body)
    return Outcome(_KINDS[kind], Encoded(body, content_type or "", content_encoding or "", checksum or ""))


def _note(stored: Mapping[str, Any]) -> Note:
    successor, parked, right = stored.get("successor"), stored.get("parked"), stored.get("continuing")
    return Note(
        over=int(stored.get("over", -1)),
        successor=None if successor is None else (int(successor["generation"]), _time(successor["until"])),
        parked=None if parked is None else (int(parked[0]), int(parked[1])),
        continuing=None
        if right is None
        else Right(_text(right["token"]), int(right["fence"]), _text(right["holder"]), _time(right["until"])),
        settled=bool(stored.get("settled", False)),
        at=_time(stored.get("at", 0.0)),
    )


def store_notes(notes: Mapping[str, Note], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes as they are stored, over what is stored already."""
    return {message_id: _stored(note, stored.get(message_id, {})) for message_id, note in notes.items()}


def _stored(note: Note, before: Mapping[str, Any]) -> dict[str, Any]:
    after = {name: value for name, value in before.items() if name not in _KNOWN}
    if note.over != -1:
        after["over"] = note.over
    if note.successor is not None:
        generation, due = note.successor
        after["successor"] = {**(before.get("successor") or {}), "generation": generation, "until": due}
    if note.parked is not None:
        after["parked"] = list(note.parked)
    if note.continuing is not None:
        right = note.continuing
        known = {"token": right.token, "fence": right.fence, "holder": right.holder, "until": right.lease_expires_at}
        after["continuing"] = {**(before.get("continuing") or {}), **known}
    if note.settled:
        after["settled"] = True
    after["at"] = note.at
    return after


def dump(stored: Mapping[str, Any]) -> str:
    """Return the text of the notes column."""
    return json.dumps(stored, separators=(",", ":")) if stored else "{}"


def outcome_values(outcome: Outcome | None) -> dict[str, Any]:
    """The outcome's five columns as parameters."""
    encoded = None if outcome is None else outcome.encoded
    return {
        "new_outcome": None if outcome is None else outcome.kind.value,
        "new_content_type": None if encoded is None else encoded.content_type,
        "new_content_encoding": None if encoded is None else encoded.content_encoding,
        "new_checksum": None if encoded is None else encoded.checksum,
        "new_body": None if encoded is None else encoded.body,
    }


def end_values(written: Record) -> dict[str, Any]:
    """What ending a claim changes, as parameters; times as ``written`` has them."""
    return {
        "new_state": written.state.value,
        "new_unknown": written.unknown,
        "new_attempts": written.attempts,
        "new_completed_at": written.completed_at,
        "new_expires_at": written.expires_at,
        **outcome_values(written.outcome),
    }


def values_of(record: Record, rev: int, notes: str) -> dict[str, Any]:
    """Every column as parameters."""
    return {
        "new_key": record.key,
        "new_rev": rev,
        "new_state": record.state.value,
        "new_token": record.token,
        "new_answer": record.answer.value,
        "new_fence": record.fence,
        "new_message_id": record.message_id,
        "new_generation": record.generation,
        "new_attempts": record.attempts,
        "new_unknown": record.unknown,
        "new_task": record.task,
        "new_namespace": record.namespace,
        "new_scope": record.scope,
        "new_fingerprint": record.fingerprint,
        "new_holder": record.holder,
        "new_claimed_at": record.claimed_at,
        "new_lease_expires_at": record.lease_expires_at,
        "new_completed_at": record.completed_at,
        "new_expires_at": record.expires_at,
        "new_notes": notes,
        "new_record_version": record.record_version,
        **outcome_values(record.outcome),
    }


def fresh_values(fresh: Record) -> dict[str, Any]:
    """A first claim as parameters; ``fresh`` is what a decision made of no record at time 0."""
    return {
        "key": fresh.key,
        "new_key": fresh.key,
        "new_state": fresh.state.value,
        "new_token": fresh.token,
        "new_answer": fresh.answer.value,
        "new_message_id": fresh.message_id,
        "new_generation": fresh.generation,
        "new_attempts": fresh.attempts,
        "new_unknown": fresh.unknown,
        "new_task": fresh.task,
        "new_namespace": fresh.namespace,
        "new_scope": fresh.scope,
        "new_fingerprint": fresh.fingerprint,
        "new_holder": fresh.holder,
        "new_lease_expires_at": fresh.lease_expires_at,
        "new_expires_at": fresh.expires_at,
        "new_record_version": fresh.record_version,
        **later(None, fresh),
    }


def later(before: Row | None, written: Record) -> dict[str, Any]:
    """The notes as parameters of a write whose ``now`` only the database will know.

    ``written`` is what a decision made of ``before`` at time 0, so whatever it changed counts from the write on. One
    decision sets at most one time in a note besides ``at``, and that is ``then`` seconds later.
    """
    if not written.notes and before is None:
        return {"new_notes": "{}", "then": 0.0}
    old, stored = ({}, {}) if before is None else (before.record.notes, before.notes)
    notes, then = store_notes(written.notes, stored), 0.0
    for message_id, note in written.notes.items():
        was = old.get(message_id, Note())
        if note is was:
            continue
        notes[message_id]["at"] = "@now"
        if note.successor is not None and note.successor != was.successor:
            then = note.successor[1]
            notes[message_id]["successor"]["until"] = "@then"
        if note.continuing is not None and note.continuing != was.continuing:
            then = note.continuing.lease_expires_at
            notes[message_id]["continuing"]["until"] = "@then"
    return {"new_notes": dump(notes), "then": then}
