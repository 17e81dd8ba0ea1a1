"""What is thrown: plain values with a notion of sameness of their own, values of every kind, and objects that bite."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import uuid
from collections.abc import Mapping
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pydantic
from hypothesis import strategies as st

# --- plain values: what a message's arguments are made of -------------------------------------------------------------

offsets = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
framing = st.text(alphabet="01:saé\0\ud83d\ude00 {}", max_size=4)
"""Text that looks like the frames of a canonical form, so that one which runs into the next would show."""
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2) | st.integers(),
    st.sampled_from([0.0, -0.0, 1.0, math.inf, 1e300]) | st.floats(allow_nan=False),
    framing | st.text(max_size=3),
    st.sampled_from([b"", b"1", b"\xff"]) | st.binary(max_size=3),
    st.sampled_from([Decimal(1), Decimal("1.00"), Decimal("1E+2"), Decimal("-0")]) | st.decimals(allow_nan=False),
    st.just(uuid.UUID(int=1)) | st.uuids(),
    st.datetimes() | st.datetimes(timezones=offsets),
    st.dates(),
    st.times(),
)
mapping_keys = st.sampled_from(["", "1", "1.0", "true", "null", "a", 0, 1, 1.5, None, True])
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(mapping_keys, inner)
    ),
    max_leaves=5,
)


class Refused(Exception):
    """The value means nothing JSON could say."""


def meaning(value: Any) -> object:
    """An independent notion of sameness: two plain values are one where these compare equal."""
    if isinstance(value, dict):
        spelled = [next(iter(json.loads(json.dumps({key: 0})))) for key in value]
        if len(set(spelled)) != len(value):
            raise Refused
        return "mapping", frozenset((key, meaning(item)) for key, item in zip(spelled, value.values(), strict=True))
    if isinstance(value, (list, tuple)):
        return "list", tuple(meaning(item) for item in value)
    if isinstance(value, str):
        return "str", json.loads(json.dumps(value))
    if isinstance(value, (datetime, time)):
        return type(value).__name__, value.utcoffset() is None, value.replace(fold=0)
    return type(value).__name__, value


# --- objects that bite ------------------------------------------------------------------------------------------------


class Bites:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"do not ask for {name}")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = object.__hash__


class Spells:
    """Spells itself as itself, for ever."""

    def __json__(self) -> object:
        return self


class Dumps(pydantic.BaseModel):
    """A model."""

    sku: str = "s"
    line: Any = None


@dataclasses.dataclass
class Line:
    """A dataclass."""

    sku: Any = 1


class Falls(Mapping[Any, Any]):
    """A mapping that breaks while it is read."""

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Any:
        yield "a"
        raise RuntimeError("broke off")

    def __len__(self) -> int:
        return 2


class Colour(enum.Enum):
    """An enum."""

    RED = "red"
    ODD = (1, "a")


def _endless() -> list[Any]:
    around: list[Any] = []
    around.append(around)
    return around


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


odd = st.one_of(
    st.builds(Bites),
    st.builds(Spells),
    st.builds(Falls),
    st.builds(Dumps),
    st.builds(_endless),
    st.sampled_from([99, 100, 101, 5000]).map(_deep),
    st.just(5000).map(lambda digits: 10**digits),
    st.sampled_from(list(Colour)),
    st.sampled_from([math.nan, Decimal("NaN"), Decimal("sNaN"), 1j, object, print, range(3), object()]),
    st.sampled_from([{"__type__": "decimal", "__value__": "x"}, {1: 0, "1": 0}, {(1, 2): 0}, {Colour.RED: 0}]),
    st.sets(st.integers(0, 3)) | st.frozensets(st.text(max_size=1), max_size=2),
    st.builds(bytearray, st.binary(max_size=2)) | st.binary(max_size=2).map(memoryview),
    plain.map(Line),
)
anything = st.recursive(
    plain | odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(mapping_keys, inner, max_size=3) | inner.map(Line),
    max_leaves=4,
)
"""Any Python value a caller, a pickle or a YAML document can hand over."""

json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, math.inf, -math.inf, math.nan, 1e308])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", " ", "\0", "\ud800", "0" * 64, "passed", "owner", "unlimited", "[" * 100_000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
"""What a remote publisher or a row of a database can hold."""
on_the_wire = json_like | st.binary(max_size=4) | st.datetimes() | st.decimals() | st.uuids()
"""What a header of a message can be, AMQP's own types and pickle among them."""
