"""Values and exceptions come back as they went in, and bytes that cannot be read are only ever Undecodable."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import uuid
from datetime import date, datetime, time, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_idem.core.codec import (
    Encoded,
    NotKept,
    Undecodable,
    decode_exception,
    decode_value,
    encode_value,
    through_codec,
)

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

PLENTY = 1_000_000
JSON = "application/json"
PICKLE = "application/x-python-serialize"


def sealed(body: bytes, content_type: str = JSON, content_encoding: str = "utf-8") -> Encoded:
    """A body whose checksum is right, so that only the serializer stands between it and the task."""
    head = f"{len(content_type)}:{content_type}{len(content_encoding)}:{content_encoding}".encode()
    return Encoded(body, content_type, content_encoding, hashlib.sha256(head + body).hexdigest())


# --- values ------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
typed = st.uuids() | st.decimals(allow_nan=False) | st.datetimes() | st.dates() | st.times() | st.binary()
any_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | typed,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.none() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=6,
)


@any_speed
@given(json_values)
def test_what_json_can_say_comes_back_as_it_was(value: object) -> None:
    assert decode_value(encode_value(value, "json", max_bytes=PLENTY)) == value


@pytest.mark.parametrize("value", [None, 0, False, 0.0, "", [], {}, [None], {"a": {}}, "\ud800", b"", b"\xff\x00"])
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_falsy_and_odd_values_come_back_as_they_were(value: object, serializer: str) -> None:
    back = decode_value(encode_value(value, serializer, max_bytes=PLENTY), {serializer})
    assert (type(back), back) == (type(value), value)


@any_speed
@given(any_values)
def test_the_first_run_and_every_replay_give_one_value(value: object) -> None:
    encoded = encode_value(value, "json", max_bytes=PLENTY)
    first = through_codec(encoded)
    assert first == decode_value(encoded)
    # What Celery's own JSON backend then makes of it is that value again.
    assert decode_value(encode_value(first, "json", max_bytes=PLENTY)) == first


def test_the_first_run_hands_on_what_json_makes_of_its_value() -> None:
    value = {1: (1, 2), None: {"id": uuid.UUID(int=7), "at": datetime(2026, 1, 1, tzinfo=timezone.utc)}}
    more = {"day": date(2026, 1, 1), "hour": time(3), "sum": Decimal("1.10"), "raw": b"\xff"}
    encoded = encode_value([value, more], "json", max_bytes=PLENTY)
    assert through_codec(encoded) == [
        {"1": [1, 2], "null": {"id": uuid.UUID(int=7), "at": datetime(2026, 1, 1, tzinfo=timezone.utc)}},
        more,
    ]


@any_speed
@given(any_values)
def test_pickle_keeps_every_type(value: object) -> None:
    encoded = encode_value(value, "pickle", max_bytes=PLENTY)
    assert (encoded.content_type, encoded.content_encoding) == (PICKLE, "binary")
    assert through_codec(encoded, ["pickle"]) == value


def test_json_is_stored_as_text() -> None:
    encoded = encode_value({"a": "é"}, "json", max_bytes=PLENTY)
    assert (encoded.body, encoded.content_type, encoded.content_encoding) == (b'{"a": "\\u00e9"}', JSON, "utf-8")
    assert encoded == sealed(encoded.body)


@pytest.mark.parametrize("accept", [["json"], {JSON}, ("pickle", "json"), [PICKLE, JSON], None])
def test_accept_takes_names_and_content_types(accept: Any) -> None:
    assert decode_value(encode_value([1], "json", max_bytes=PLENTY), accept) == [1]


@pytest.mark.parametrize("accept", [None, [], ["json"], {JSON}, ["msgpack", "yaml"]])
def test_pickle_is_read_only_where_it_is_accepted(accept: Any) -> None:
    encoded = encode_value([1], "pickle", max_bytes=PLENTY)
    with pytest.raises(Undecodable, match="accept_content"):
        decode_value(encoded, accept)
    with pytest.raises(NotKept, match="cannot be read back") as caught:
        through_codec(encoded, accept)
    assert caught.value.reason == "encoding"
    assert decode_value(encoded, ["pickle"]) == decode_value(encoded, {PICKLE}) == [1]


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (9,)


def test_a_pickle_that_is_not_accepted_is_never_loaded() -> None:
    for content_type in (PICKLE, JSON):
        with pytest.raises(Undecodable):
            decode_value(sealed(pickle.dumps(Bomb()), content_type, "binary"), ["json"])


def cyclic() -> object:
    loop: list[object] = []
    loop.append(loop)
    return loop


def deep() -> object:
    nested: list[object] = []
    for _ in range(200_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    ("value", "serializer"),
    [
        (object(), "json"),
        ({1, 2}, "json"),
        ({(1, 2): 3}, "json"),
        (cyclic(), "json"),
        (deep(), "json"),
        (10**5000, "json"),
        (lambda: None, "pickle"),
        ({"a": 1}, "raw"),
        (1, "no-such-serializer"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_said_is_not_kept(value: object, serializer: str) -> None:
    with pytest.raises(NotKept) as caught:
        encode_value(value, serializer, max_bytes=PLENTY)
    assert caught.value.reason == "encoding"
    assert "idempotency_serializer" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_what_is_too_big_is_not_kept() -> None:
    assert encode_value("x" * 98, "json", max_bytes=100)
    with pytest.raises(NotKept, match="101 bytes, and idempotency_result_max_bytes is 100") as caught:
        encode_value("x" * 99, "json", max_bytes=100)
    assert caught.value.reason == "size"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.reason, copy.size, str(copy)) == ("size", 101, str(caught.value))


@pytest.mark.parametrize(
    "value", [{"__type__": "new", "__value__": 1}, {"__type__": "uuid", "__value__": {"hex": "x"}}]
)
def test_what_json_writes_but_cannot_read_is_not_kept(value: object) -> None:
    with pytest.raises(NotKept):
        through_codec(encode_value(value, "json", max_bytes=PLENTY))


# --- bodies that cannot be read ----------------------------------------------------------------------------------


content_types = [JSON, PICKLE, "application/x-msgpack", "application/x-yaml", "application/data", "x/y", ""]
encodings = ["utf-8", "binary", "no-such-encoding", ""]
accepts = [None, ["json"], ["json", "yaml", "msgpack", "x/y"]]


@any_speed
@given(st.binary(), st.sampled_from(content_types), st.sampled_from(encodings), st.sampled_from(accepts))
def test_garbage_is_undecodable_and_nothing_else(body: bytes, content_type: str, encoding: str, accept: Any) -> None:
    encoded = sealed(body, content_type, encoding)
    for decode in (decode_value, decode_exception):
        with contextlib.suppress(Undecodable):
            decode(encoded, accept)


@any_speed
@given(st.binary(max_size=40))
def test_a_garbage_pickle_is_undecodable_and_nothing_else(body: bytes) -> None:
    with contextlib.suppress(Undecodable):
        decode_value(sealed(body, PICKLE, "binary"), ["pickle"])


@any_speed
@given(any_values, st.integers(0), st.integers(1, 255))
def test_one_changed_byte_is_found(value: object, where: int, change: int) -> None:
    encoded = encode_value(value, "json", max_bytes=PLENTY)
    body = bytearray(encoded.body)
    body[where % len(body)] ^= change
    with pytest.raises(Undecodable, match="checksum"):
        decode_value(dataclasses.replace(encoded, body=bytes(body)))


def test_a_changed_type_or_encoding_is_found() -> None:
    encoded = encode_value("1", "json", max_bytes=PLENTY)
    for change in ({"content_type": PICKLE}, {"content_encoding": "binary"}, {"checksum": ""}, {"body": b""}):
        with pytest.raises(Undecodable, match="checksum"):
            decode_value(dataclasses.replace(encoded, **change), ["json", "pickle"])


@pytest.mark.parametrize(
    "encoded",
    [
        sealed(b""),
        sealed(b"[" * 200_000),
        sealed(b'{"a":' * 200_000),
        sealed(b"[" * 100_000 + b"]" * 100_000),
        sealed(b"1" * 5000),
        sealed(b"\xff"),
        sealed(b'{"__type__": "uuid", "__value__": {"int": "x"}}'),
        sealed(b'{"__type__": [], "__value__": 1}'),
        sealed(b"1", "application/x-unknown"),
        sealed(b"", PICKLE, "binary"),
        Encoded(None, None, None, None),  # type: ignore[arg-type]
    ],
    ids=range(11),
)
def test_a_body_that_is_no_value_is_undecodable(encoded: Encoded) -> None:
    for decode in (decode_value, decode_exception):
        with pytest.raises(Undecodable):
            decode(encoded, ["json", "application/x-unknown"])


def test_an_accept_list_this_kombu_does_not_know_is_undecodable() -> None:
    with pytest.raises(Undecodable):
        decode_value(encode_value(1, "json", max_bytes=PLENTY), ["no-such-serializer"])
