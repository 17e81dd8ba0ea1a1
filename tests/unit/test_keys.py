"""Keys and fingerprints: one key per call however it is spelled, and no two calls with one key."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_idem.core.canonical import NoCanonicalForm, canonical
from celery_idem.core.keys import (
    KEY_VERSION,
    Bound,
    KeySource,
    bind,
    bound_arguments,
    check_names,
    effective_key,
    fingerprint,
    scope_hash,
)
from celery_idem.errors import ConfigurationError, KeyMissing

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


@dataclasses.dataclass(frozen=True)
class Line:
    sku: str
    count: int = 1


class Item(pydantic.BaseModel):
    sku: str
    count: int = 1


def round_trip(value: object) -> Any:
    return loads(dumps(value))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([0.0, 1.0, 2.5, "", "1", "null", "a", b"1", Decimal(1), uuid.UUID(int=1)])
    | st.text(max_size=2)
    | st.dates()
)
keys = st.sampled_from(["1", "null", "a", 1, 0, None, True])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2) | st.lists(inner, max_size=2).map(tuple) | st.dictionaries(keys, inner, max_size=2)
    ),
    max_leaves=4,
)


def same_call(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two full calls mean the same, as ``test_canonical`` holds it."""
    return canonical(one) == canonical(other)


# --- binding -----------------------------------------------------------------------------------------------------


def charge(order_id: int, amount: str = "1", /, currency: str = "EUR", *more: object, note: object = None, **rest: object) -> None: ...  # fmt: skip # noqa: E501


def plain(a: Any, b: Any = 2, c: Any = (), *, d: Any = None) -> None: ...


def whole(full: Any) -> dict[str, Any]:
    return dict(full)


given_args = st.fixed_dictionaries({"a": values}, optional={"b": values, "c": values, "d": values})


@any_speed
@given(given_args, st.integers(0, 3), st.booleans(), st.sets(st.sampled_from("bcd")))
def test_every_spelling_of_a_call_is_one_call(
    named: dict[str, Any], positional: int, over_json: bool, spelled_out: set[str]
) -> None:
    try:
        reference = KeySource.parse("arguments").digest(call=bind(plain, (), named))
    except NoCanonicalForm:
        return
    defaults = {"b": 2, "c": (), "d": None}
    full = {**named, **{name: defaults[name] for name in spelled_out if name not in named}}
    args = []
    for name in "abc"[:positional]:
        if name not in full:
            break
        args.append(full.pop(name))
    if over_json:
        args, full = round_trip(args), round_trip(full)
    call = bind(plain, args, full)
    assert KeySource.parse("arguments").digest(call=call) == reference
    assert fingerprint(call) == fingerprint(bind(plain, (), named))
    assert fingerprint(call, ["b", "d"]) == fingerprint(bind(plain, (), named), ["d", "b"])


@any_speed
@given(given_args, given_args)
def test_two_calls_share_a_key_exactly_where_they_mean_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    defaults = {"b": 2, "c": (), "d": None}
    try:
        same = same_call({**defaults, **one}, {**defaults, **other})
    except NoCanonicalForm:
        return
    for source in (KeySource.parse("arguments"), KeySource.parse(whole)):
        digests = {source.digest(call=bind(plain, (), call)) for call in (one, other)}
        assert (len(digests) == 1) is same
    assert (fingerprint(bind(plain, (), one)) == fingerprint(bind(plain, (), other))) is same


@any_speed
@given(given_args)
def test_a_new_optional_parameter_changes_nothing(named: dict[str, Any]) -> None:
    def newer(a: Any, b: Any = 2, c: Any = (), *, d: Any = None, added: Any = "x", other: Any = plain) -> None: ...

    before, after = bind(plain, (), named), bind(newer, (), named)
    assert before.arguments == after.arguments
    for names in (None, ["a", "b"]):
        try:
            expected = fingerprint(before, names)
        except NoCanonicalForm:
            return
        assert fingerprint(after, names) == expected


def test_arguments_equal_to_their_default_are_left_out() -> None:
    assert bound_arguments(plain, (1, 2, []), {"d": None}) == {"a": 1}
    assert bound_arguments(plain, (1,), {"b": 2.0}) == {"a": 1, "b": 2.0}
    assert bind(plain, (1,), {}).full == {"a": 1, "b": 2, "c": (), "d": None}


def test_a_default_with_no_form_is_left_out_by_identity() -> None:
    missing = object()

    def task(a: int, b: object = missing) -> None: ...

    assert bound_arguments(task, (1, missing), {}) == {"a": 1}
    assert set(bound_arguments(task, (1, object()), {})) == {"a", "b"}


def test_a_default_the_body_changes_changes_no_key() -> None:
    def task(a: int, seen: list[int] = []) -> None: ...  # noqa: B006

    assert bound_arguments(task, (1, []), {}) == {"a": 1}
    task.__defaults__[0].append(1)  # type: ignore[index]
    assert bound_arguments(task, (1, []), {}) == {"a": 1}


def test_star_arguments_have_names_that_nothing_else_can_have() -> None:
    assert bound_arguments(charge, (1,), {"more": 5, "rest": 6}) == {"order_id": 1, "**more": 5, "rest": 6}
    assert bound_arguments(charge, (1, "2", "EUR", 3, 4), {"x": 5}) == {
        "order_id": 1, "amount": "2", "more": [3, 4], "x": 5,
    }  # fmt: skip
    clashing = bound_arguments(charge, (1,), {"order_id": 2, "**order_id": 3, "*": 4})
    assert clashing == {"order_id": 1, "**order_id": 2, "****order_id": 3, "***": 4}


@pytest.mark.parametrize(
    "call", [((), {}), ((1, 2, 3, 4), {}), ((1,), {"a": 1}), ((1,), {"x": 1}), ((1,), {"*": [2]}), ((), {1: 2})]
)
def test_a_call_that_does_not_match_is_kept_for_its_body_to_refuse(call: tuple[Any, Any]) -> None:
    bound = bind(plain, *call)
    assert bound.arguments["*"] == list(call[0])
    assert bound.open
    assert KeySource.parse("arguments").digest(call=bound) == KeySource.parse("arguments").digest(
        call=bind(plain, *call)
    )
    assert fingerprint(bound, ["b"])


def test_a_bound_first_parameter_is_left_out() -> None:
    class Task:
        def run(self, a: int, b: int = 1) -> None: ...

    assert bound_arguments(Task().run, (1,), {}) == {"a": 1}
    assert bound_arguments(Task.run, (1,), {}, skip_first=True) == {"a": 1}
    assert bound_arguments(lambda *args: None, (1,), {}, skip_first=True) == {"args": [1]}


def test_annotations_that_have_no_value_are_not_asked_for() -> None:
    # 3.14 evaluates them late, so there they may name what is imported for type checking alone.
    annotation = "Missing" if sys.version_info >= (3, 14) else "'Missing'"
    scope: dict[str, Any] = {}
    exec(compile(f"def task(a: {annotation}, b=1): ...", "task.py", "exec", dont_inherit=True), scope)
    assert bound_arguments(scope["task"], (1, 1), {}) == {"a": 1}


def test_what_is_positional_only_is_not_taken_by_name() -> None:
    def ship(order_id: int, /, express: bool = False) -> None: ...

    assert bind(ship, (1,), {"express": True}).arguments == {"order_id": 1, "express": True}
    call = bind(ship, (), {"order_id": 1})
    assert "order_id" in str(call.misfit)
    assert call.open


def test_builtins_without_a_signature_take_anything() -> None:
    assert bound_arguments(dict, (), {"a": 1})["a"] == 1


# --- fingerprints ------------------------------------------------------------------------------------------------


def test_a_fingerprint_covers_the_names_it_is_given() -> None:
    one, other = bind(plain, (1,), {"b": 5}), bind(plain, (1,), {"b": 6})
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one, ["a"]) == fingerprint(other, ["a"])
    assert fingerprint(one, ["a", "b"]) == fingerprint(one, ["b", "a", "a"]) != fingerprint(other, ["a", "b"])


def test_a_dotted_name_reads_the_same_on_both_sides_of_the_wire() -> None:
    names = ["a.sku", "b.0.count", "c.1"]
    sent = bind(plain, (Item(sku="x"), (Line("y", 3),), {1: "one"}), {})
    arrived = bind(plain, ({"sku": "x", "count": 9}, [{"sku": "z", "count": 3}], {"1": "one"}), {})
    assert fingerprint(sent, names) == fingerprint(arrived, names)
    assert fingerprint(bind(plain, (Line("x"),), {}), ["a.sku"]) != fingerprint(sent, ["a.sku", "b"])


def test_what_may_be_absent_counts_as_absent_and_not_as_none() -> None:
    def fp(a: object, name: str) -> str:
        return fingerprint(bind(plain, (a,), {}), [name])

    assert fp({}, "a.sku") == fp({"x": 1}, "a.sku") == fp(None, "a.sku") != fp({"sku": None}, "a.sku")
    assert fp([], "a.0") == fp(None, "a.0") != fp([None], "a.0")
    assert fingerprint(bind(charge, (1,), {}), ["extra"]) != fingerprint(bind(charge, (1,), {"extra": None}), ["extra"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bb", "no argument 'bb': did you mean 'b'"),
        ("zzz", "name one of a, b, c, d"),
        ("a.skuu", "Thing has no 'skuu'"),
        ("a._hidden", "Thing has no '_hidden'"),
        ("a.method", "Thing has no 'method'"),
        ("b.real", "int has no 'real'"),
        ("c.first", "'first' is looked up in a list"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_configuration_error(name: str, said: str) -> None:
    class Thing:
        sku = "x"
        _hidden = "y"

        def method(self) -> None: ...

    with pytest.raises(ConfigurationError) as caught:
        fingerprint(bind(plain, (Thing(),), {}), [name])
    assert said in str(caught.value)


def test_names_are_checked_against_the_signature() -> None:
    check_names(plain, ["a", "b.sku", "d.0"])
    check_names(charge, ["anything", "more.0"])
    with pytest.raises(ConfigurationError, match=r"fingerprint names 'bb', but plain has no parameter 'bb': .* 'b'"):
        check_names(plain, ["bb"])
    with pytest.raises(ConfigurationError, match="named directly"):
        check_names(charge, ["rest.x"])
    with pytest.raises(ConfigurationError, match="key names 'self'"):
        KeySource.parse("{self}").check(plain, skip_first=False)


# --- key sources -------------------------------------------------------------------------------------------------


def test_a_source_takes_what_it_names() -> None:
    one, other = bind(plain, (1, 5), {}), bind(plain, (1, 6), {})
    for spec in ("k:{a}", ["a"], ("a",), lambda full: full["a"]):
        source = KeySource.parse(spec)
        assert source.digest(call=one) == source.digest(call=other)
        assert source.digest(call=one) != source.digest(call=bind(plain, (2, 5), {}))
    assert KeySource.parse(["a", "b"]).digest(call=one) == KeySource.parse(("b", "a", "b")).digest(call=one)
    assert KeySource.parse(["a", "b"]).digest(call=one) != KeySource.parse(["a", "b"]).digest(call=other)
    message = KeySource.parse("message")
    assert message.digest(message_id="1", call=one) == message.digest(message_id="1") != message.digest(message_id="2")


def test_every_kind_of_key_is_apart_from_every_other() -> None:
    call = bind(plain, ("1",), {})
    digests = [
        KeySource.parse("message").digest(message_id="1"),
        KeySource.parse("message").digest(explicit="1"),
        KeySource.parse("arguments").digest(call=call),
        KeySource.parse(["a"]).digest(call=call),
        KeySource.parse("{a}").digest(call=call),
        KeySource.parse("x{a}").digest(call=call),
        KeySource.parse("{{{a}}}").digest(call=call),
        KeySource.parse(lambda full: full["a"]).digest(call=call),
        KeySource.parse(lambda full: int(full["a"])).digest(call=call),
        fingerprint(call),
        fingerprint(call, ["a"]),
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 and digest == digest.lower() for digest in digests)


@any_speed
@given(st.lists(st.text(min_size=1, max_size=4).filter(str.strip), min_size=4, max_size=4))
def test_a_template_is_not_a_concatenation(texts: list[str]) -> None:
    a, b, c, d = texts
    source = KeySource.parse("{a}-{b}")
    same = source.digest(call=bind(plain, (a, b), {})) == source.digest(call=bind(plain, (c, d), {}))
    assert same is ((a, b) == (c, d))


def test_an_explicit_key_is_one_key_under_every_source() -> None:
    sources = [KeySource.parse(spec) for spec in ("message", "arguments", ["a"], "{a}", lambda full: None)]
    assert len({source.digest(explicit="order-1", message_id="x") for source in sources}) == 1
    assert KeySource.parse("message").digest(explicit="\ud800")
    assert KeySource.parse("message").digest(explicit=" a") != KeySource.parse("message").digest(explicit="a")


@pytest.mark.parametrize("blank", [None, "", " ", "\t\n", b"", b" "])
def test_a_blank_value_is_no_key(blank: object) -> None:
    call = bind(plain, (blank,), {})
    for spec in ("order:{a}", ["a", "b"], lambda full: full["a"]):
        with pytest.raises(KeyMissing, match=r"is (None|blank), so there is no key: give it a value"):
            KeySource.parse(spec).digest(call=call)
    with pytest.raises(KeyMissing):
        KeySource.parse("message").digest(message_id=blank)  # type: ignore[arg-type]
    if blank is not None:
        with pytest.raises(KeyMissing, match="idempotency_key"):
            KeySource.parse("arguments").digest(explicit=blank, call=call)


def test_falsy_is_not_blank() -> None:
    for value in (0, False, 0.0, Decimal(0), [], {}):
        assert KeySource.parse("{a}").digest(call=bind(plain, (value,), {}))


def test_a_part_may_be_an_attribute_and_no_method() -> None:
    held = SimpleNamespace(sku="A-1", _secret="no", total=lambda: 5)
    digest = KeySource.parse(["a.sku"]).digest(call=bind(plain, (held,), {}))
    assert digest == KeySource.parse(["a.sku"]).digest(call=bind(plain, ({"sku": "A-1"},), {}))
    for part in ("price", "_secret", "total"):
        with pytest.raises(KeyMissing, match=f"SimpleNamespace has no '{part}': name the part before it"):
            KeySource.parse([f"a.{part}"]).digest(call=bind(plain, (held,), {}))


def test_a_part_that_is_not_there_is_no_key() -> None:
    with pytest.raises(KeyMissing, match=r"the key needs 'a.skuu', but there is no 'skuu' in it: did you mean 'sku'"):
        KeySource.parse(["a.skuu"]).digest(call=bind(plain, ({"sku": 1},), {}))
    with pytest.raises(KeyMissing, match="no item 1 in a list of 1"):
        KeySource.parse("{a.1}").digest(call=bind(plain, ([5],), {}))
    with pytest.raises(KeyMissing, match="there is no argument 'a'"):
        KeySource.parse("{a}").digest()
    with pytest.raises(KeyMissing, match=r"raised KeyError\('x'\)") as caught:
        KeySource.parse(lambda full: full["x"]).digest(call=bind(plain, (1,), {}))
    assert isinstance(caught.value.__cause__, KeyError)


class Refuses:
    @property
    def sku(self) -> str:
        raise RuntimeError("no line here")


def test_a_part_that_cannot_be_read_is_no_key_and_no_absent_part() -> None:
    call = bind(plain, (Refuses(),), {})
    with pytest.raises(KeyMissing, match=r"'sku' of a Refuses cannot be read \(RuntimeError\('no line here'\)\)"):
        KeySource.parse("{a.sku}").digest(call=call)
    with pytest.raises(ConfigurationError, match=r"fingerprint names 'a.sku', but 'sku' of a Refuses cannot be read"):
        fingerprint(call, ["a.sku"])


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = object.__hash__


@pytest.mark.parametrize("spec", [Mute(), [Mute()], [10**5000]], ids=["object", "objects", "number"])
def test_a_source_that_cannot_even_be_shown_is_refused(spec: object) -> None:
    with pytest.raises(ConfigurationError):
        KeySource.parse(spec)


def test_a_key_part_with_no_form_is_named() -> None:
    with pytest.raises(NoCanonicalForm, match=r"^a\.items\[0\] is"):
        KeySource.parse("arguments").digest(call=bind(plain, ({"items": [object()]},), {}))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("order", "no field, so every call would have one key"),
        ("", "no field"),
        ("{{order}}", "no field"),
        ("argument", "did you mean 'arguments'"),
        ("{}", "key names ''"),
        ("{0}", "key names '0'"),
        ("{ a }", "key names ' a '"),
        ("{a[0]}", "key names 'a[0]'"),
        ("{a..b}", "key names 'a..b'"),
        ("{a!r}", "formats 'a'"),
        ("{a:>5}", "formats 'a'"),
        ("{a", "is no template"),
        ("a}", "is no template"),
        ([], "an empty list"),
        ([1], "key names 1"),
        (["a", ""], "key names ''"),
        (None, "key is of type NoneType"),
        (5, "key is of type int"),
        ({"a"}, "key is of type set"),
        (str, "key is of type type"),
    ],
)
def test_a_source_that_names_nothing_is_refused(spec: object, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KeySource.parse(spec)
    assert said in str(caught.value)
    assert ": " in str(caught.value)


def test_a_coroutine_function_is_refused() -> None:
    async def key(full: object) -> str:
        return "x"

    with pytest.raises(ConfigurationError, match="coroutine"):
        KeySource.parse(key)


def test_parsing_twice_is_parsing_once() -> None:
    source = KeySource.parse("order:{line.sku}")
    assert KeySource.parse(source) is source
    assert source == KeySource.parse("order:{line.sku}")
    assert source.names == ("line.sku",)


# --- effective keys ----------------------------------------------------------------------------------------------

short = st.text(st.sampled_from("ab1:0"), max_size=4)


@any_speed
@given(
    st.tuples(short, short, short, st.integers(0, 12), short), st.tuples(short, short, short, st.integers(0, 12), short)
)
def test_the_parts_of_a_key_cannot_bleed_into_each_other(one: Any, other: Any) -> None:
    assert (effective_key(*one) == effective_key(*other)) is (one == other)


def test_a_scope_is_stored_as_its_hash() -> None:
    assert scope_hash("") == ""
    assert len(scope_hash("tenant-1")) == 32
    assert scope_hash("tenant-1") != scope_hash("tenant-2")


# --- golden vectors: these change only together with KEY_VERSION, which makes every key in flight a new one -------

CALL = Bound(
    {"order_id": 17, "amount": Decimal("12.50"), "line": {"sku": "x", "n": [1, None, True, 2.5]}},
    {"order_id": 17, "amount": Decimal("12.50"), "line": {"sku": "x", "n": [1, None, True, 2.5]}, "note": None},
)

HASHES: list[tuple[str, str]] = [
    (
        "KeySource.parse('message').digest(message_id='5b0a')",
        "18bcd3d430a65d810c222604277f1f1e3478032dc540741a46dce4cd36cbb4a8",
    ),
    (
        "KeySource.parse('arguments').digest(call=CALL)",
        "6f034af1517d6b4ef772ed0db12196f61a614687ce59b72ce7ab9c1af7ba7c46",
    ),
    (
        "KeySource.parse('arguments').digest(call=Bound({}, {}))",
        "2e16b3d4b11ca5f19fc9805c0e09e3034191098eb19ca069fc659fce2cd0f3c3",
    ),
    (
        "KeySource.parse(['order_id', 'line.sku']).digest(call=CALL)",
        "2211a7a8a7967e52bf7a19908f77f57bb70b18dda30696858d61836f648e16e0",
    ),
    (
        "KeySource.parse('order:{order_id}').digest(call=CALL)",
        "1e1b6a00dbe7f792cdc59f72ce2472e9d07ceff52149a9ca313cad5ab08b01cb",
    ),
    (
        "KeySource.parse('{order_id}-{line.n.0}').digest(call=CALL)",
        "49d567d14a6355db3cd7852a38c74e33f266db20f34667e53fa13a0e2e3c9b7b",
    ),
    (
        "KeySource.parse(lambda full: full['amount']).digest(call=CALL)",
        "65fbfa4c9e1170994af1236bd7cd0326cad3eec5e35eeb763bfa76fd8bb56be8",
    ),
    (
        "KeySource.parse('message').digest(explicit='order-17')",
        "1243d79a09d7294a53abdb3c9bf8f6c77f2d0a278b278094e35f3ae2f3ad5e5e",
    ),
    ("fingerprint(CALL)", "06c47d21222c83553d2f406786f449f4eea50bf0bfa7a921b868cc61f9127e64"),
    (
        "fingerprint(CALL, ['amount', 'note', 'line.absent'])",
        "83dfa1cfcefdcaeed95e9e31e207ad2275ca1b9499198e1b6225f3121c8f46aa",
    ),
    (
        "effective_key('shop', '', 'shop.charge', 0, '0' * 64)",
        "e05f5dc5820e4448180a6132ccc74437d11f9e5c272d7285d358407776b1cbf3",
    ),
    (
        "effective_key('shop', 'tenant-1', 'shop.charge', 2, 'f' * 64)",
        "bcd6ebc5530192e0d5ac75e1d734abf2d6005b929af78030e3f603f5e56ae810",
    ),
    ("scope_hash('tenant-1')", "4f9f563a40d7915b558915cb0a75be3a"),
]


@pytest.mark.parametrize(("expression", "expected"), HASHES)
def test_hashes_never_change(expression: str, expected: str) -> None:
    assert KEY_VERSION == 1
    assert eval(expression) == expected
