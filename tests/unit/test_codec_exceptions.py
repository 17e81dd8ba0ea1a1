"""Exceptions come back as they were raised, or as a stand-in that says what they were; nothing else is ever called."""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from celery_idem import errors
from celery_idem.core import codec
from celery_idem.core.canonical import NoCanonicalForm, canonical
from celery_idem.core.codec import (
    MESSAGE_KEPT,
    Encoded,
    NotKept,
    Undecodable,
    decode_exception,
    encode_exception,
    encode_value,
)
from celery_idem.errors import CeleryIdemError, ClaimConflict, LeaseLost, ReplayedFailure

PLENTY = 1_000_000


def replayed(exc: BaseException, serializer: str = "json", max_bytes: int = PLENTY) -> BaseException:
    return decode_exception(encode_exception(exc, serializer, max_bytes=max_bytes), [serializer])


class Declined(Exception):
    class Hard(ValueError):
        """Found by its qualified name."""

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail

    def __str__(self) -> str:
        return f"declined with {self.code}"


class Formatting(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class KeywordOnly(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


class Reduced(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    @classmethod
    def make(cls, code: int) -> Reduced:
        return cls(code=code)

    def __reduce__(self) -> tuple[object, ...]:
        return Reduced.make, (self.code,)


class PickledByArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.reason)


class Chameleon(Exception):
    def __new__(cls, *args: object) -> Any:
        return ValueError(*args) if args == ("other",) else super().__new__(cls, *args)


class Hostile(Exception):
    def __init__(self, *args: object) -> None:
        if args:
            raise RuntimeError("not again")

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> tuple[object, ...]:
        raise RuntimeError("no pickle")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def list_of(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def decode_failure() -> UnicodeDecodeError:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def missing_file() -> OSError:
    try:
        Path("/no/such/file").stat()
    except OSError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    "exc",
    [
        Exception(),
        ValueError("bad"),
        ValueError("bad", 1, None, [2], {"a": Decimal("1.0")}),
        KeyError("k"),
        IndexError(3),
        ZeroDivisionError("x"),
        StopIteration(5),
        RuntimeError(uuid.UUID(int=1)),
        TimeoutError(110, "timed out"),
        ConnectionRefusedError("refused"),
        missing_file(),
        decode_failure(),
        UnicodeEncodeError("ascii", "é", 0, 1, "no"),
        SyntaxError("bad", ("f.py", 1, 2, "x")),
        json.JSONDecodeError("bad", "doc", 0),
        ImportError("no module", name="m"),
        AttributeError("no x"),
        Declined(5, "poor"),
        Declined.Hard("very"),
        PickledByArguments(5, "poor"),
        Frozen(5),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_an_exception_comes_back_as_it_was(exc: Exception) -> None:
    back = replayed(exc)
    assert type(back) is type(exc)
    assert str(back) == str(exc)
    assert [*map(list_of, back.args)] == [*map(list_of, exc.args)]


@pytest.mark.parametrize(
    "exc",
    [
        ValueError((1, 2)),
        ValueError(object()),
        Formatting(5),
        KeywordOnly(code=5),
        Reduced(code=5),
        Hostile.__new__(Hostile, "x"),
        LeaseLost("gone"),
        KeyboardInterrupt(),
        SystemExit(3),
        type("Local", (Exception,), {})("local"),
        type("Elsewhere", (Exception,), {"__module__": "no.such.module"})("far"),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_an_exception_that_cannot_be_rebuilt_has_a_stand_in(exc: BaseException) -> None:
    back = replayed(exc)
    assert type(back) is ReplayedFailure
    assert back.exc_type == f"{type(exc).__module__}.{type(exc).__qualname__}"
    text = "<no text: Hostile.__str__ raised>" if isinstance(exc, Hostile) else str(exc)
    assert str(back) == (f"{back.exc_type}: {text}" if text else back.exc_type)
    assert repr(replayed(back)) == repr(back)
    assert replayed(back).exc_type == back.exc_type  # type: ignore[attr-defined]


def test_a_constructor_that_gives_another_class_is_not_believed() -> None:
    exc = Chameleon("mine")
    exc.args = ("other",)
    assert type(replayed(exc)) is ReplayedFailure


def test_attributes_and_notes_come_back() -> None:
    exc = ValueError("bad")
    exc.code, exc.nothing, exc._private, exc.socket = 5, None, 1, object()  # type: ignore[attr-defined]
    exc.__notes__ = ["look here", "and there"]  # type: ignore[attr-defined]
    back = replayed(exc)
    assert {k: v for k, v in vars(back).items() if k != "__notes__"} == {"code": 5, "nothing": None}
    assert back.__notes__ == ["look here", "and there"]  # type: ignore[attr-defined]
    exc.args = (object(),)
    assert replayed(exc).__notes__ == ["look here", "and there"]  # type: ignore[attr-defined]


def test_an_attribute_that_cannot_be_read_back_does_not_cost_the_exception() -> None:
    exc = ValueError("bad")
    exc.odd = {"__type__": "new", "__value__": 1}  # type: ignore[attr-defined]
    assert repr(replayed(exc)) == "ValueError('bad')"


@pytest.mark.parametrize(
    "name", [n for n, c in vars(errors).items() if isinstance(c, type) and c.__module__ == errors.__name__]
)
def test_our_own_errors_come_back_with_their_facts(name: str) -> None:
    cls = getattr(errors, name)
    if not issubclass(cls, CeleryIdemError):
        return
    exc = cls("what happened: what to do", key="k" * 64, attempts=3, holder=None, odd=object())
    back = replayed(exc)
    assert type(back) is cls
    assert str(back) == str(exc)
    assert back.facts == {"key": "k" * 64, "attempts": 3, "holder": None}
    assert back.attempts == 3


def test_a_refused_argument_comes_back_too() -> None:
    with pytest.raises(NoCanonicalForm) as caught:
        canonical(object())
    back = replayed(caught.value)
    assert type(back) is NoCanonicalForm
    assert back.path == "argument"


def test_pickle_says_what_json_cannot() -> None:
    back = replayed(ValueError((1, {2})), "pickle")
    assert repr(back) == "ValueError((1, {2}))"
    assert type(replayed(ValueError(lambda: None), "pickle")) is ReplayedFailure


def test_an_exception_that_is_too_big_keeps_its_class_and_the_start_of_its_text() -> None:
    exc = ValueError("x" * 10_000)
    back = replayed(exc, max_bytes=2000)
    assert str(back) == "builtins.ValueError: " + "x" * MESSAGE_KEPT
    with pytest.raises(NotKept) as caught:
        encode_exception(exc, "json", max_bytes=100)
    assert caught.value.reason == "size"


def stored(**changes: object) -> Encoded:
    said = {"module": "builtins", "type": "ValueError", "message": "x", "args": ["x"], "attributes": {}, "notes": []}
    return encode_value({**said, **changes}, "json", max_bytes=PLENTY)


@pytest.mark.parametrize(
    "changes",
    [
        {"module": "os", "type": "system", "args": ["true"]},
        {"module": "os", "type": "path.join"},
        {"module": "subprocess", "type": "Popen", "args": ["true"]},
        {"module": "builtins", "type": "eval", "args": ["1/0"]},
        {"module": "builtins", "type": "object"},
        {"module": "builtins", "type": "SystemExit"},
        {"module": "builtins", "type": "ValueError.__init__"},
        {"module": "builtins", "type": ""},
        {"module": "", "type": "ValueError"},
        {"args": None},
        {"args": "x"},
        {"args": ["y"]},
        {"args": []},
        {"attributes": [1]},
        {"message": "another"},
    ],
    ids=str,
)
def test_nothing_but_an_exception_is_ever_called(changes: dict[str, object]) -> None:
    assert type(decode_exception(stored(**changes))) is ReplayedFailure


@pytest.mark.parametrize(
    "encoded",
    [stored(module=None), stored(type=5), stored(message=[]), stored(notes=[1]), stored(notes="x"),
     encode_value([], "json", max_bytes=99), encode_value("ValueError", "json", max_bytes=99)],
    ids=range(7),
)  # fmt: skip
def test_a_value_that_is_no_exception_is_undecodable(encoded: Encoded) -> None:
    with pytest.raises(Undecodable):
        decode_exception(encoded)


def test_a_stored_name_never_imports_or_runs_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "this" not in sys.modules
    decode_exception(stored(module="this", type="Error"))
    assert "this" not in sys.modules

    lazy = ModuleType("lazy_module")
    lazy.__getattr__ = lambda name: pytest.fail("a stored name ran code")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    monkeypatch.setitem(sys.modules, "broken_module", None)
    for module in ("lazy_module", "broken_module"):
        assert type(decode_exception(stored(module=module))) is ReplayedFailure


def test_facts_of_errors_can_be_rebuilt_from_a_message_alone() -> None:
    assert str(decode_exception(stored(module=errors.__name__, type="ClaimConflict"))) == "x"
    assert isinstance(replayed(ClaimConflict()), ClaimConflict)
    assert codec.NotKept().reason == "encoding"
