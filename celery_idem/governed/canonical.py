"""Canonical JSON and its digests: what an owner approves is these bytes, and nothing that merely looks like them.

UTF-8, keys sorted, no blanks, no NaN. Other than ``core.canonical``, which gives keys to Python values, this is stored
and sent: anybody with a JSON library and SHA-256 can check it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from typing import Any

from celery_idem.errors import PayloadRefused

MAX_BYTES = 65_536
MAX_DEPTH = 16
MAX_INTEGER = 2**63 - 1


def canonical_json(
    value: Any, *, where: str = "payload", max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH
) -> str:
    """The value's one JSON text.

    Args:
        value: mappings with text keys, lists, tuples, text, numbers, booleans and None.
        where: what a refusal calls the value.

    Raises:
        PayloadRefused: anything JSON has no exact form for, or more than the bounds; the message says where.
    """
    _check(value, where, max_depth)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    size = len(text.encode())
    if size > max_bytes:
        raise PayloadRefused(f"{where} has {size} bytes as JSON, and at most {max_bytes} are allowed")
    return text


def _check(value: Any, where: str, depth: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, (int, float)):
        _check_number(value, where)
    elif depth <= 0:
        raise PayloadRefused(f"{where} nests too deep")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise PayloadRefused(f"{where} has a key that is a {type(key).__name__}: keys are text")
            _check_text(key, f"{where}, a key")
            _check(item, f"{where}.{key:.60}", depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]", depth - 1)
    else:
        kind = type(value).__qualname__
        raise PayloadRefused(f"{where} is a {kind}, which JSON cannot say exactly: write it as text")


def _check_number(value: int | float, where: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PayloadRefused(f"{where} is {value}, which JSON cannot say")
    elif abs(value) > MAX_INTEGER:
        raise PayloadRefused(f"{where} is a whole number beyond 64 bits: write it as text")


def _check_text(value: str, where: str) -> None:
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise PayloadRefused(f"{where} holds a character no database can keep")


def digest_of(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_json(value: Any, *, where: str = "payload") -> str:
    """SHA-256 of the value's canonical JSON, in hex."""
    return digest_of(canonical_json(value, where=where))


def same(one: Any, other: Any) -> bool:
    """Whether both are the same text, found out in constant time."""
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))
