"""The codec: stored bytes of any kind, changed values, results and exceptions that no serializer likes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from kombu.serialization import registry

from celery_idem.core.codec import (
    Encoded,
    NotKept,
    Undecodable,
    decode_exception,
    decode_value,
    encode_exception,
    encode_value,
    through_codec,
)
from celery_idem.errors import ClaimConflict, ReplayedFailure
from tests.fuzz.target import Draw, Target, worded
from tests.fuzz.values import anything, json_like, odd, plain

PLENTY = 1_000_000
JSON = "application/json"
content_types = st.sampled_from(
    (JSON, "application/x-python-serialize", "application/x-yaml", "application/x-msgpack", "application/data")
) | st.sampled_from(("application/text", "", "json", "application/JSON", "\ud800", "text/plain"))
content_types |= st.text(max_size=4)
encodings = st.sampled_from(["utf-8", "binary", "us-ascii", "utf-16", "", "rot13", "zlib", "idna", "\ud800", "no-such"])
bodies = (
    st.binary(max_size=20)
    | json_like.map(repr).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.sampled_from([b"", b"null", b"[" * 100_000, b"1" * 10_000, b"NaN", b'"\\ud800"', b"\x80\x04N.", b"!!python/x"])
    | st.sampled_from([b'{"__type__": "decimal", "__value__": "x"}', b'{"__type__": "uuid", "__value__": []}'])
    | st.sampled_from([b'{"__type__": "datetime", "__value__": "9"}', b'{"__type__": 1, "__value__": 1}', b"&a [*a]"])
)
accepts = st.sampled_from([None, (), ("json",), ("yaml",), (JSON, "application/x-msgpack"), ("application/data",)])


def sealed(body: bytes, content_type: str, encoding: str) -> Encoded:
    """A body whose checksum is right, so that only the serializer stands between it and the task."""
    head = f"{len(content_type)}:{content_type}{len(encoding)}:{encoding}".encode("utf-8", "surrogatepass")
    return Encoded(body, content_type, encoding, hashlib.sha256(head + body).hexdigest())


def play_stored(draw: Draw, _: Any) -> str:
    """Whatever is stored is a value or ``Undecodable``; pickle is never read where it is not accepted."""
    stored = sealed(draw(bodies), draw(content_types), draw(encodings))
    if draw(st.booleans()):
        stored = replace(stored, checksum=draw(st.text(max_size=3) | st.just("0" * 64)))
        fits = False
    else:
        fits = True
    accept = draw(accepts)
    came = []
    for decode in (decode_value, decode_exception):
        try:
            value = decode(stored, accept)
        except Undecodable as refusal:
            worded(refusal)
            came.append("refused")
        else:
            assert fits, "a value came out whose checksum is wrong"
            assert stored.content_type != "application/x-python-serialize"
            came.append(f"{'value' if decode is decode_value else type(value).__name__}")
    return ", ".join(came)


def play_changed(draw: Draw, _: Any) -> str:
    """A stored value in which anything was changed is refused: no other value comes out."""
    serializer = draw(st.sampled_from(["json", "pickle"]))
    stored = encode_value(draw(plain), serializer, max_bytes=PLENTY)
    field = draw(st.sampled_from(["body", "content_type", "content_encoding", "checksum"]))
    old = getattr(stored, field)
    at = draw(st.integers(0, len(old)))
    more = draw(st.binary(max_size=2) if isinstance(old, bytes) else st.text(max_size=2))
    changed = replace(stored, **{field: old[:at] + more + old[at + draw(st.integers(0, 2)) :]})
    whole = decode_value(stored, {serializer})
    try:
        value = decode_value(changed, {serializer})
    except Undecodable:
        assert changed != stored
        return f"{field} refused"
    assert changed == stored
    assert repr(value) == repr(whole)
    return "unchanged"


def play_values(draw: Draw, _: Any) -> str:
    """A result is kept as every replay will have it, or ``NotKept``."""
    serializer = draw(st.sampled_from(["json", "pickle", "msgpack", "yaml", "raw", "none", "no-such"]))
    value, most = draw(anything), draw(st.sampled_from([0, 10, PLENTY]))
    accept = [serializer] if serializer in registry.name_to_type else []
    try:
        stored = encode_value(value, serializer, max_bytes=most)
        first = through_codec(stored, accept)
    except NotKept as refusal:
        worded(refusal)
        return f"not kept: {refusal.reason}"
    assert len(stored.body) <= most
    again = decode_value(stored, accept)
    assert type(again) is type(first)
    return "kept"


class _Picky(Exception):
    def __init__(self, one: Any, *, two: Any = None) -> None:
        super().__init__(one)
        self.two = two


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> Any:
        raise RuntimeError("no parts")


classes = st.sampled_from(
    [ValueError, OSError, KeyError, UnicodeDecodeError, _Picky, _Mute, ClaimConflict, StopIteration]
)
names = st.sampled_from(["builtins", "os", "sys", "celery.exceptions", __name__, "", "no.such"]) | st.text(max_size=3)
qualnames = st.sampled_from(["SystemExit", "KeyboardInterrupt", "system", "ValueError", "Exception.with_traceback"]) | (
    st.sampled_from(["Ignore", "Retry", "_Picky", "__class__", "object", "path.join", "BaseException", "", "type"])
)


def play_exceptions(draw: Draw, _: Any) -> str:
    """An exception comes back as one of its class and text, or as ``ReplayedFailure``; a body never chooses code."""
    if draw(st.booleans()):
        raised = _exception(draw)
        try:
            stored = encode_exception(raised, "json", max_bytes=draw(st.sampled_from([10, 300, PLENTY])))
        except NotKept:
            return "not kept"
        back = decode_exception(stored)
        assert type(back) in {type(raised), ReplayedFailure}
        return "its class" if type(back) is type(raised) else "ReplayedFailure"
    forged = {"module": draw(names), "type": draw(qualnames), "message": draw(st.text(max_size=3))}
    forged |= {"args": draw(json_like), "attributes": draw(json_like), "notes": draw(json_like)}
    forged |= draw(st.dictionaries(st.sampled_from(sorted(forged)), json_like, max_size=1))
    try:
        stored = encode_value(forged, "json", max_bytes=PLENTY)
        back = decode_exception(stored)
    except (NotKept, Undecodable):
        return "forged: refused"
    assert isinstance(back, Exception)
    return f"forged: {'ReplayedFailure' if isinstance(back, ReplayedFailure) else 'a known class'}"


def _exception(draw: Draw) -> BaseException:
    cls, args = draw(classes), draw(st.lists(plain | odd, max_size=3))
    try:
        raised: BaseException = cls(*args)
    except Exception:  # it does not take these
        raised = ValueError(*args)
    for name, value in draw(
        st.dictionaries(st.sampled_from(["code", "args_", "with"]), plain | odd, max_size=2)
    ).items():
        raised.__dict__[name] = value
    if draw(st.booleans()):
        raised.__dict__["__notes__"] = draw(json_like)
    return raised


TARGETS = [
    Target(
        "codec: stored", "any stored bytes are a value or Undecodable, and never past a wrong checksum", play_stored
    ),
    Target("codec: changed", "a stored value in which anything changed is refused", play_changed),
    Target("codec: values", "a result is kept as every replay has it, or NotKept", play_values),
    Target(
        "codec: exceptions", "the class and text that was raised, or ReplayedFailure; no other code", play_exceptions
    ),
]
