"""Gives every value one unambiguous byte form, the same before and after kombu's JSON round trip.

Every form is a tag, a length and a payload, so no two values share one and no two neighbours run into each other.
Pure, and it imports neither kombu nor pydantic: what those do is matched, and the tests hold it to them. Changing a
form changes every key in flight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, TypeAlias
from uuid import UUID

from celery_idem.errors import CeleryIdemError

MAX_DEPTH = 100

Trail: TypeAlias = "tuple[Any, object, int]"  # (parent trail or None, step taken from there, depth)


class NoCanonicalForm(CeleryIdemError, TypeError):
    """An argument has no canonical form, so it can be part of no key and no fingerprint: pass its id or its text."""

    path: str = ""
    type_name: str = ""


def canonical(value: object, *, where: str = "argument") -> bytes:
    """Give the value's one canonical form: equal bytes for equal values, also after kombu's JSON round trip.

    A list equals a tuple; a dict key that is an int, float, bool or None equals its JSON spelling; an enum member
    equals its value, a pydantic model its ``model_dump()``, a dataclass the mapping of its fields, an aware datetime
    the same instant elsewhere, a Decimal any other of its numeric value. ``True``, ``1``, ``1.0``, ``Decimal(1)``,
    ``"1"`` and ``b"1"`` all differ; strings are not normalised.

    Args:
        value: what to spell; never kept.
        where: the name a refusal's path starts with.

    Raises:
        NoCanonicalForm: no such form, NaN, keys that are one key in JSON, or deeper than ``MAX_DEPTH``.
    """
    try:
        return _encode(value, (None, where, 0))
    except RecursionError:
        raise _refusal(value, (None, where, 0), "nests too deep for the stack it is called on") from None


def _encode(value: object, trail: Trail) -> bytes:
    # The order of these tests is the JSON encoder's, so that a subclass is spelled as JSON would spell it.
    if isinstance(value, str):
        return leaf(b"s", text_bytes(value))
    if value is None:
        return b"z"
    if value is True:
        return b"t"
    if value is False:
        return b"f"
    if isinstance(value, int):
        return leaf(b"i", int.__format__(value, "x").encode())
    if isinstance(value, float):
        if value != value:  # noqa: PLR0124 - NaN is the one float that is not itself
            raise _refusal(value, trail, "is not a number, and equals nothing, itself included")
        return leaf(b"d", float.__repr__(float.__add__(value, 0.0)).encode())  # + 0.0 makes -0.0 the 0.0 it equals
    if trail[2] >= MAX_DEPTH:
        raise _refusal(value, trail, f"nests more than {MAX_DEPTH} levels deep, or contains itself")
    if isinstance(value, (list, tuple)):
        return b"l%d:" % len(value) + b"".join(_encode(v, (trail, i, trail[2] + 1)) for i, v in enumerate(value))
    if isinstance(value, dict):
        return _encode_mapping(value, trail)
    return _encode_scalar(value) or _encode_object(value, trail)


def _encode_mapping(value: Mapping[Any, object], trail: Trail) -> bytes:
    return _encode_items(list(value.items()), value, trail)


def _encode_items(items: list[tuple[Any, object]], value: object, trail: Trail) -> bytes:
    if len(items) == 2 and {key for key, _ in items} == {"__type__", "__value__"}:
        raise _refusal(value, trail, 'is a mapping of "__type__" and "__value__", which kombu reads as another type')
    entries: dict[bytes, bytes] = {}
    for key, item in items:
        below = (trail, key, trail[2] + 1)
        entries[key_form(key, below)] = _encode(item, below)
    if len(entries) != len(items):
        raise _refusal(value, trail, "has two keys that are one key in JSON")
    return b"m%d:" % len(entries) + b"".join(key + entries[key] for key in sorted(entries))


def key_form(key: object, trail: Trail) -> bytes:
    """Give a mapping key's form: JSON's spelling of it where JSON has one."""
    if isinstance(key, str):
        return leaf(b"s", text_bytes(key))
    if key is None or isinstance(key, (int, float)):
        return leaf(b"s", _json_key(key, trail).encode())
    if isinstance(key, Enum):
        return key_form(key.value, trail)
    return leaf(b"k", _encode(key, trail))  # JSON has no such key, pickle and YAML do: kept apart from its text


def _json_key(key: float | None, trail: Trail) -> str:
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    if isinstance(key, int):
        try:
            return int.__repr__(key)
        except ValueError:
            raise _refusal(key, trail, "is a key too long for a JSON key") from None
    text = float.__repr__(key)
    if text == "nan":
        raise _refusal(key, trail, "is a key that is not a number")
    return text.replace("inf", "Infinity")


def _encode_scalar(value: object) -> bytes:
    """Spell what kombu's JSON carries typed, and its near relations; empty bytes for anything else."""
    if isinstance(value, UUID):
        return leaf(b"u", value.bytes)
    if isinstance(value, Decimal):
        return _encode_decimal(value)
    if isinstance(value, (bytes, bytearray)):
        return leaf(b"b", bytes(value))
    if isinstance(value, datetime):  # a datetime is a date too
        # Counted from year 1 in a timedelta: moving it to UTC would overflow at either end of the calendar.
        since = value.replace(tzinfo=None, fold=0) - datetime.min  # noqa: DTZ901
        return _encode_moment(b"DN", b"DA", since, value.utcoffset())
    if isinstance(value, date):
        return leaf(b"Y", date.isoformat(value).encode())
    if isinstance(value, time):
        since = timedelta(0, value.hour * 3600 + value.minute * 60 + value.second, value.microsecond)
        return _encode_moment(b"TN", b"TA", since, value.utcoffset())
    if isinstance(value, timedelta):
        return _encode_moment(b"P", b"", value, None)
    return b""


def _encode_moment(naive: bytes, aware: bytes, since: timedelta, offset: timedelta | None) -> bytes:
    tag, span = (naive, since) if offset is None else (aware, since - offset)
    return leaf(tag, b"%d" % ((span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds))


def _encode_decimal(value: Decimal) -> bytes:
    # Not normalize(), which rounds to the context's precision and would make one key of two amounts.
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        if exponent != "F":
            return b""
        return leaf(b"n", b"-inf" if sign else b"inf")
    text = "".join(map(str, digits)).lstrip("0")
    short = text.rstrip("0")
    if not short:
        return leaf(b"n", b"0")
    return leaf(b"n", f"{'-' * sign}{short}e{exponent + len(text) - len(short)}".encode())


def _encode_object(value: object, trail: Trail) -> bytes:
    cls = type(value)
    below = (trail, None, trail[2] + 1)  # a value spelled through another one has the same path
    if callable(spell := getattr(cls, "__json__", None)):
        # First, as kombu does, so that publisher and worker agree.
        return _encode(_ask(spell, value, trail), below)
    if isinstance(value, Enum):
        return _encode(value.value, below)
    if isinstance(value, (set, frozenset)):
        return b"e%d:" % len(value) + b"".join(sorted(_encode(item, below) for item in value))
    if isinstance(value, Mapping):
        return _encode_items(_ask(_items, value, trail), value, trail)
    if callable(dump := getattr(cls, "model_dump", None)):
        return _encode(_ask(functools.partial(dump, mode="python"), value, trail), below)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_mapping(_ask(fields_of, value, trail), trail)
    raise _refusal(value, trail, f"is a {cls.__module__}.{cls.__qualname__}, which has no canonical form")


def _ask(method: Callable[[Any], Any], value: object, trail: Trail) -> Any:
    try:
        return method(value)
    except Exception as error:
        raise _refusal(value, trail, f"could not spell itself ({error!r:.200})") from error


def _items(value: Mapping[Any, object]) -> list[tuple[Any, object]]:
    return list(value.items())


def fields_of(value: Any) -> dict[str, object]:
    """Give a dataclass instance's fields by name, one level deep."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def text_bytes(value: str) -> bytes:
    """Give the text as UTF-8; what UTF-8 has no form for, lone surrogates, is kept apart too."""
    try:
        return str.encode(value)
    except UnicodeEncodeError:
        # JSON makes one character of two lone surrogates that form a pair, and so do we; the rest stay as they are.
        joined = str.encode(value, "utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "surrogatepass")


def leaf(tag: bytes, payload: bytes) -> bytes:
    """Frame the payload so that it can run into nothing after it."""
    return b"%b%d:%b" % (tag, len(payload), payload)


def shown(key: object) -> str:
    """Print the key, however long it is and whatever its repr does."""
    try:
        return repr(key)[:60]
    except Exception:  # noqa: BLE001 - an int may be too long to print, and a key's own repr may raise anything
        return type(key).__name__


def _refusal(value: object, trail: Trail, why: str) -> NoCanonicalForm:
    steps: list[str] = []
    at: Trail | None = trail
    while at is not None:
        parent, step, _ = at
        if parent is None or (isinstance(step, str) and step.isidentifier()):
            steps.append(f"{step}" if parent is None else f".{step}")
        elif step is not None:
            steps.append(f"[{shown(step)}]")
        at = parent
    path = "".join(reversed(steps))
    if len(path) > 200:  # a value that contains itself has a path as long as it was followed
        path = path[:200] + "…"
    cls = type(value)
    return NoCanonicalForm(
        f"{path} {why}: pass its id or its text instead, or name the arguments that make the key or fingerprint",
        path=path,
        type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
