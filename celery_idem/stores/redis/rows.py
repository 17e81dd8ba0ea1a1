"""A record as one Redis hash: fields in, ``Record`` out. What is stored is strictly read; what is odd is corrupt.

The field list and the rules of what can be read are those of lua/common.lua. Writing is the scripts' business.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from celery_idem.core.codec import Encoded
from celery_idem.core.records import (
    RECORD_VERSION,
    Answer,
    Kind,
    Note,
    Outcome,
    Record,
    Right,
    State,
)

FIELDS = (
    *("v", "state", "token", "fence", "message", "generation", "attempts", "answer", "unknown", "task", "namespace"),
    *("scope", "fingerprint", "holder", "claimed", "lease_end", "expires", "completed", "kind", "body", "type"),
    *("encoding", "checksum"),
)
"""In the order of lua/common.lua."""

NOTE = b"m:"
"""What the field of a message's note begins with."""

_INTEGER = re.compile(rb"(?=.{1,17}\Z)-?[0-9]+")
_NUMBER = re.compile(rb"[0-9.eE+-]+")
_FLAGS = {b"0": False, b"1": True}
_STATES = {state.value.encode(): state for state in State}
_ANSWERS = {answer.value.encode(): answer for answer in (Answer.ACQUIRED, Answer.RECLAIMED, Answer.COMPLETED)}
_KINDS = {kind.value.encode(): kind for kind in Kind}

Fields = Mapping[str, bytes | None]
T = TypeVar("T")


class Unreadable(Exception):
    """A field that cannot be read; ``args[0]`` names it."""


def by_name(values: Sequence[bytes | None]) -> dict[str, bytes | None]:
    """The fixed fields under their names, from the list a script answers with."""
    return dict(zip(FIELDS, values, strict=False))


def record_of(key: str, fields: Fields, notes: Mapping[str, Note]) -> Record:
    """The record that these fields spell; ``Unreadable`` names the first one that cannot be read."""
    state = _one_of(_STATES, fields, "state")
    kind = None if fields.get("kind") is None else _one_of(_KINDS, fields, "kind")
    if state is State.COMPLETED and kind is None:
        raise Unreadable("kind")
    unknown = _FLAGS.get(fields.get("unknown") or b"")
    if unknown is None:
        raise Unreadable("unknown")
    return Record(
        key=key,
        state=state,
        token=_text(fields, "token"),
        fence=_integer(fields, "fence"),
        message_id=_text(fields, "message"),
        generation=_integer(fields, "generation"),
        attempts=_integer(fields, "attempts"),
        answer=_one_of(_ANSWERS, fields, "answer"),
        unknown=unknown,
        task=_text(fields, "task"),
        namespace=_text(fields, "namespace"),
        scope=_text(fields, "scope"),
        fingerprint=_text(fields, "fingerprint"),
        holder=_text(fields, "holder"),
        claimed_at=_number(fields, "claimed"),
        lease_expires_at=_number(fields, "lease_end"),
        completed_at=None if fields.get("completed") is None else _number(fields, "completed"),
        expires_at=_number(fields, "expires"),
        outcome=None if kind is None else Outcome(kind, _encoded(fields)),
        notes=notes,
        record_version=_integer(fields, "v"),
    )


def whole_record(key: str, pairs: Mapping[bytes, bytes]) -> Record:
    """The record of a whole hash, every note included."""
    fields: dict[str, bytes | None] = {}
    notes: dict[str, Note] = {}
    for name, value in pairs.items():
        if name.startswith(NOTE):
            message_id = name[len(NOTE) :].decode(errors="replace")
            notes[message_id] = note_of(message_id, value)
        else:
            fields[name.decode(errors="replace")] = value
    return record_of(key, fields, notes)


def is_newer(version: bytes | None) -> bool:
    """Whether a newer release wrote this record."""
    return version is not None and _INTEGER.fullmatch(version) is not None and int(version) > RECORD_VERSION


def note_of(message_id: str, text: bytes) -> Note:
    """The note a field spells; ``Unreadable`` where it spells none."""
    try:
        data = json.loads(text)
        right = data.get("continuing")
        return Note(
            over=_whole(data["over"]),
            successor=(_whole(data["successor"][0]), _real(data["successor"][1])) if "successor" in data else None,
            parked=(_whole(data["parked"][0]), _whole(data["parked"][1])) if "parked" in data else None,
            continuing=None if "continuing" not in data else _right(right),
            settled=_boolean(data.get("settled", False)),
            at=_real(data["at"]),
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise Unreadable(f"m:{message_id}") from error


def pairs_of(reply: Any) -> dict[bytes, bytes]:
    """HGETALL's answer as a mapping, whichever protocol brought it."""
    if isinstance(reply, dict):
        return reply
    flat: Iterator[bytes] = iter(reply)
    return dict(zip(flat, flat, strict=True))


def _right(data: Mapping[str, Any]) -> Right:
    token, holder = data["token"], data["holder"]
    if not (isinstance(token, str) and isinstance(holder, str)):
        raise TypeError("token and holder are text")
    return Right(token, _whole(data["fence"]), holder, _real(data["until"]))


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("a flag is true or false")
    return value


def _whole(value: Any) -> int:
    if _real(value) != int(value):
        raise ValueError("a whole number is asked for")
    return int(value)


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError("a number is asked for")
    return float(value)


def _encoded(fields: Fields) -> Encoded | None:
    body = fields.get("body")
    if body is None:
        return None
    kind, encoding, checksum = ((fields.get(name) or b"").decode(errors="replace") for name in FIELDS[-3:])
    return Encoded(body, kind, encoding, checksum)


def _one_of(kinds: Mapping[bytes, T], fields: Fields, name: str) -> T:
    found = kinds.get(fields.get(name) or b"")
    if found is None:
        raise Unreadable(name)
    return found


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise Unreadable(name)
    return value.decode(errors="replace")


def _integer(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if value is None or not ((value.isdigit() and len(value) <= 17) or _INTEGER.fullmatch(value)):
        raise Unreadable(name)
    return int(value)


def _number(fields: Fields, name: str) -> float:
    value = fields.get(name)
    try:
        if (
            value is not None
            and (value.isdigit() or _NUMBER.fullmatch(value))
            and math.isfinite(number := float(value))
        ):
            return number
    except ValueError:
        pass
    raise Unreadable(name)
