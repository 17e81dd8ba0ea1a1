"""Canonical forms: two values share one exactly where they mean the same, before and after JSON."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import math
import pickle
import uuid
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_idem.core.canonical import NoCanonicalForm, canonical
from celery_idem.errors import CeleryIdemError

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

UTC = timezone.utc
DAY = datetime(2026, 1, 2)  # noqa: DTZ001
ID = uuid.UUID("6f1c8a52-0f0e-4c3b-9b53-0d6a3b6c8f11")


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


class Level(enum.IntEnum):
    LOW = 1


class Size(str, enum.Enum):
    SMALL = "s"


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    count: int = 1


class Item(pydantic.BaseModel):
    sku: str
    count: int = 1
    price: Decimal = Decimal(1)


Pair = collections.namedtuple("Pair", "left right")


def round_trip(value: object) -> Any:
    return loads(dumps(value))


# --- canonical forms ---------------------------------------------------------------------------------------------

offsets = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
# Few values of each kind, so that two draws often meet.
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2) | st.integers(),
    st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, 1e300]) | st.floats(allow_nan=False),
    st.sampled_from(["", "1", "true", "null", "é", "e\u0301", "\ud83d", "\ude00", "\ud83d\ude00"])
    | st.text(max_size=3),
    st.sampled_from([b"", b"1", b"\xff"]) | st.binary(max_size=3),
    st.sampled_from([Decimal(1), Decimal("1.00"), Decimal("1E+2"), Decimal(100), Decimal("-0"), Decimal("Infinity")])
    | st.decimals(allow_nan=False),
    st.just(ID) | st.uuids(),
    st.datetimes(),
    st.datetimes(timezones=offsets),
    st.dates(),
    st.times(),
)
keys = st.sampled_from(["", "1", "1.0", "true", "null", "a"]) | st.integers(0, 1) | st.sampled_from([1.5, None, True])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=6,
)


class Refused(Exception):
    pass


def text_as_json_has_it(text: str) -> str:
    return json.loads(json.dumps(text))


def meaning(value: Any) -> object:
    """An independent notion of equality: two values are one where these compare equal."""
    if isinstance(value, dict):
        spelled = [next(iter(json.loads(json.dumps({key: 0})))) for key in value]
        if len(set(spelled)) != len(value):
            raise Refused
        return "mapping", frozenset((key, meaning(item)) for key, item in zip(spelled, value.values(), strict=True))
    if isinstance(value, (list, tuple)):
        return "list", tuple(meaning(item) for item in value)
    if isinstance(value, str):
        return "str", text_as_json_has_it(value)
    if isinstance(value, (datetime, time)):
        return type(value).__name__, value.utcoffset() is None, value.replace(fold=0)
    return type(value).__name__, value


@any_speed
@given(values, values)
def test_two_values_share_a_form_exactly_where_they_mean_the_same(one: object, other: object) -> None:
    try:
        same = meaning(one) == meaning(other)
    except Refused:
        return
    assert (canonical(one) == canonical(other)) is same


@any_speed
@given(values)
def test_a_value_keeps_its_form_over_kombus_json(value: object) -> None:
    try:
        meaning(value)
    except Refused:
        with pytest.raises(NoCanonicalForm, match="one key in JSON"):
            canonical(value)
    else:
        assert canonical(round_trip(value)) == canonical(value)


@any_speed
@given(values, values, values, values)
def test_neighbours_cannot_bleed_into_each_other(a: object, b: object, c: object, d: object) -> None:
    try:
        different = (meaning(a), meaning(b)) != (meaning(c), meaning(d))
    except Refused:
        return
    assume(different)
    assert canonical(a) + canonical(b) != canonical(c) + canonical(d)


def test_what_looks_alike_is_kept_apart() -> None:
    alike = [
        True, 1, 1.0, "1", Decimal(1), b"1", None, "None", "null", "True", False, 0, 0.0, "", b"", [], {}, [1], ["1"],
        [[1]], {"1": 1}, {"1": "1"}, {1}, ID, str(ID), ID.hex, ID.bytes, ID.int, DAY, date(2026, 1, 2),
        DAY.replace(tzinfo=UTC), "2026-01-02", "2026-01-02T00:00:00", time(0), time(0, tzinfo=UTC), timedelta(0),
        ["a", "b"], ["ab"], ["a", ["b"]], "é", "e\u0301", "\ud83d", "\ude00", math.inf, -math.inf, Decimal("Infinity"),
        {Decimal(1): 1}, {b"1": 1}, {ID: 1}, {str(ID): 1},
    ]  # fmt: skip
    assert len({canonical(value) for value in alike}) == len(alike)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, "a"], (1, "a")),
        (Pair(1, 2), [1, 2]),
        ({1: "a", None: "b", False: "c", 2.5: "d"}, {"1": "a", "null": "b", "false": "c", "2.5": "d"}),
        ({math.inf: 1, -math.inf: 2}, {"Infinity": 1, "-Infinity": 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, MappingProxyType({"a": 1})),
        ({"a": 1}, collections.OrderedDict(a=1)),
        (Colour.RED, "red"),
        (Colour.ONE, 1),
        (Level.LOW, 1),
        (Size.SMALL, "s"),
        ({Colour.ONE: 1, Size.SMALL: 2}, {"1": 1, "s": 2}),
        (Line("x"), {"sku": "x", "count": 1}),
        (Item(sku="x"), {"sku": "x", "count": 1, "price": Decimal("1.0")}),
        ([Item(sku="x")], [{"price": Decimal(1), "count": 1, "sku": "x"}]),
        (Decimal("1.10"), Decimal("1.1")),
        (Decimal("1E+3"), Decimal(1000)),
        (Decimal("-0.00"), Decimal(0)),
        (0.0, -0.0),
        (bytearray(b"x"), b"x"),
        ({1, 2, 3}, frozenset([3, 2, 1])),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1)))),
        (datetime(2026, 7, 1, 12, tzinfo=UTC), datetime(2026, 7, 1, 14, tzinfo=ZoneInfo("Europe/Berlin"))),
        (DAY.replace(fold=1), DAY),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_what_means_the_same_is_one(one: object, other: object) -> None:
    assert canonical(one) == canonical(other)


def test_the_clock_going_back_gives_two_instants() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert canonical(first) != canonical(first.replace(fold=1))


def test_the_ends_of_the_calendar_do_not_overflow() -> None:
    early = datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))
    late = datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))
    assert canonical(early) != canonical(late)


def test_long_decimals_are_not_rounded() -> None:
    long = "1." + "0" * 60
    assert canonical(Decimal(long + "1")) != canonical(Decimal(long + "2"))
    assert canonical(Decimal("1E+999999")) != canonical(Decimal("1E+999998"))


def test_an_integer_of_any_length_has_a_form() -> None:
    assert canonical(10**9000) != canonical(10**9000 + 1)


def test_an_objects_own_json_comes_first_as_in_kombu() -> None:
    @dataclasses.dataclass
    class Money:
        cents: int

        def __json__(self) -> object:
            return f"{self.cents} cents"

    assert canonical(Money(5)) == canonical(round_trip(Money(5))) == canonical("5 cents")


class Broken:
    def model_dump(self, mode: str) -> object:
        raise RuntimeError("no")


class Breaks(collections.UserDict[str, int]):
    def __iter__(self) -> Any:
        raise RuntimeError("broke off")


@dataclasses.dataclass
class Unset:
    sku: str = dataclasses.field(init=False)


class Nested:
    def model_dump(self, mode: str) -> object:
        return self


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "argument is a builtins.object"),
        ({"items": [0, 1, 2, object()]}, "argument.items[3] is a builtins.object"),
        ({"not a name": {7: len}}, "argument['not a name'][7] is a builtins.builtin_function_or_method"),
        (Line, "argument is a builtins.type"),
        (math.nan, "argument is not a number"),
        ([{"x": math.nan}], "argument[0].x is not a number"),
        (Decimal("NaN"), "argument is a decimal.Decimal"),
        (Decimal("sNaN"), "argument is a decimal.Decimal"),
        ({math.nan: 1}, "is a key that is not a number"),
        ({10**5000: 1}, "is a key too long"),
        ({1: "a", "1": "b"}, "two keys that are one key in JSON"),
        ({"x": {None: "a", "null": "b"}}, "argument.x has two keys"),
        ({"__type__": "decimal", "__value__": "1"}, "kombu reads as another type"),
        (Broken(), "could not spell itself (RuntimeError('no'))"),
        (Breaks(a=1), "could not spell itself (RuntimeError('broke off'))"),
        ([Unset()], "argument[0] could not spell itself (AttributeError("),
        (Nested(), "contains itself"),
        (1j, "argument is a builtins.complex"),
        (iter([]), "argument is a builtins.list_iterator"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_has_no_form_is_refused_by_name(value: object, said: str) -> None:
    with pytest.raises(NoCanonicalForm) as caught:
        canonical(value)
    assert said in str(caught.value)
    assert "pass its id or its text instead" in str(caught.value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, CeleryIdemError)


def test_a_refusal_names_the_argument_and_pickles() -> None:
    with pytest.raises(NoCanonicalForm, match=r"^line\.items\[3\] is a builtins\.object") as caught:
        canonical({"items": [0, 1, 2, object()]}, where="line")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.path, copy.type_name, str(copy)) == ("line.items[3]", "builtins.object", str(caught.value))


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop += [loop, loop]
    tree: dict[str, object] = {}
    tree["child"] = {"parent": tree}
    for value in (loop, tree):
        with pytest.raises(NoCanonicalForm, match="contains itself"):
            canonical(value)


def test_the_stack_running_out_is_a_refusal_too() -> None:
    def call_from(depth: int) -> str:
        if depth:
            return call_from(depth - 1)
        with pytest.raises(NoCanonicalForm, match="nests") as caught:
            canonical(nested)
        return str(caught.value)

    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert call_from(0)
    assert call_from(600)


# --- golden vectors: these change only together with KEY_VERSION, which makes every key in flight a new one ---

FORMS: list[tuple[object, bytes]] = [
    (None, b"z"),
    (True, b"t"),
    (False, b"f"),
    (-255, b"i3:-ff"),
    (-0.0, b"d3:0.0"),
    ("é", b"s2:\xc3\xa9"),
    ("\ud800", b"s3:\xed\xa0\x80"),
    (b"\xff", b"b1:\xff"),
    ([1, ("a",)], b"l2:i1:1l1:s1:a"),
    ({2: "b", "a": None}, b"m2:s1:2s1:bs1:az"),
    (Decimal("-12.500"), b"n7:-125e-1"),
    (Decimal("-Infinity"), b"n4:-inf"),
    (ID, b"u16:o\x1c\x8aR\x0f\x0eL;\x9bS\rj;l\x8f\x11"),
    (DAY.replace(hour=3), b"DN17:63902919600000000"),
    (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), b"DA17:63902919845000006"),
    (date(2026, 1, 2), b"Y10:2026-01-02"),
    (time(3, 4, 5, 6), b"TN11:11045000006"),
    (timedelta(days=1), b"P11:86400000000"),
    ({1, 2}, b"e2:i1:1i1:2"),
    (Line("x"), b"m2:s3:skus1:xs5:counti1:1"),
    ({ID: 1}, b"m1:k20:u16:o\x1c\x8aR\x0f\x0eL;\x9bS\rj;l\x8f\x11i1:1"),
]


@pytest.mark.parametrize(("value", "form"), FORMS)
def test_forms_never_change(value: object, form: bytes) -> None:
    assert canonical(value) == form
