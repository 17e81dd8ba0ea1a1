"""Short ways to say an operation, an outcome and a claim, for the tests of stores and of the decision table."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

from celery_idem.core.codec import Encoded
from celery_idem.core.records import Delivery, Kind, Operation, Outcome
from celery_idem.errors import StoreUnavailable

_numbers = itertools.count(1)


def key_for(name: str) -> str:
    """The effective key for a readable name: 64 hexadecimal characters."""
    return hashlib.sha256(name.encode()).hexdigest()


def token_for(name: str) -> str:
    """The token for a readable name: 32 hexadecimal characters."""
    return hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()


def fresh_token() -> str:
    """A token nobody had before in this process."""
    return token_for(f"fresh {next(_numbers)}")


def op(
    key: str = "order:1",
    message: str = "M",
    generation: int = 0,
    *,
    token: str | None = None,
    continues: bool = False,
    **more: Any,
) -> Operation:
    """One copy of ``message`` that wants ``key``, both by readable names; a fresh token unless one is named."""
    return Operation(
        key=key_for(key),
        delivery=Delivery(message, generation, continues),
        token=fresh_token() if token is None else token_for(token),
        **{"holder": f"holder of {message}", "task": "shop.charge", "namespace": "shop", **more},
    )


def fingerprint(name: str) -> str:
    """The fingerprint for a readable name."""
    return key_for(f"fingerprint {name}")


def result(body: bytes = b'{"paid": 50}', **changes: Any) -> Outcome:
    """A stored value with a checksum that fits."""
    facts = {"content_type": "application/json", "content_encoding": "utf-8", "checksum": checksum(body), **changes}
    return Outcome(Kind.RESULT, Encoded(body=body, **facts))


def checksum(body: bytes) -> str:
    """SHA-256 of a body in hexadecimal; a store keeps checksums and never judges them."""
    return hashlib.sha256(body).hexdigest()


def answered(verb: Callable[[], Any]) -> bool:
    """Whether the verb got an answer: a short timeout may be over before it, where the machine stands still."""
    try:
        verb()
    except StoreUnavailable:
        return False
    return True
