"""Keys: canonical forms, key sources, templates and fingerprints."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_idem.core.canonical import NoCanonicalForm, canonical
from celery_idem.core.keys import KeySource, bind, check_names, effective_key, fingerprint, scope_hash
from celery_idem.errors import ConfigurationError, KeyMissing
from tests.fuzz.target import Draw, Target, worded
from tests.fuzz.values import Refused, anything, framing, meaning, plain


def body(a: Any, b: Any = None, *rest: Any, c: Any = 1, **more: Any) -> None:
    """The task of every call here."""


def _call(draw: Draw, values: st.SearchStrategy[Any]) -> tuple[list[Any], dict[str, Any]]:
    args = draw(st.lists(values, min_size=1, max_size=4))
    names = ["c", "rest", "x", "*a", "**rest"] + (["b"] if len(args) == 1 else [])
    return args, draw(st.dictionaries(st.sampled_from(names), values, max_size=2))


def _whole(args: list[Any], kwargs: dict[str, Any]) -> object:
    """The call as an independent reader has it."""
    more = {name: value for name, value in kwargs.items() if name not in {"b", "c"}}
    b = args[1] if len(args) > 1 else kwargs.get("b")
    return meaning([args[0], b, args[2:], kwargs.get("c", 1), sorted(more), [more[name] for name in sorted(more)]])


# --- no two operations share a key -----------------------------------------------------------------------------------


def _parts(draw: Draw) -> dict[str, Any]:
    """All that one operation is made of."""
    return {
        "place": tuple(draw(framing) for _ in range(3)),
        "depth": draw(st.integers(0, 2)),
        "call": _call(draw, plain),
        "kind": draw(st.sampled_from(["message", "explicit", "arguments", "names", "template", "function"])),
        "text": draw(framing.filter(str.strip)),
        "names": sorted(draw(st.sets(st.sampled_from(["a", "b", "c"]), min_size=1))),
        "template": draw(st.sampled_from(["{a}", "x:{a}", "{a}{c}", "{a}:{c}", "{c}{a}", "{{{a}"])),
    }


def _identified(parts: dict[str, Any]) -> tuple[object, str]:
    """Who an operation is to an independent reader, and its effective key."""
    kind, text, names, template = (parts[name] for name in ("kind", "text", "names", "template"))
    call = bind(body, *parts["call"])
    if kind == "message":
        who, digest = text, KeySource.parse("message").digest(message_id=text, call=call)
    elif kind == "explicit":
        who, digest = text, KeySource.parse("message").digest(message_id="m", call=call, explicit=text)
    elif kind == "arguments":
        who, digest = _whole(*parts["call"]), KeySource.parse("arguments").digest(call=call)
    elif kind == "names":
        who = (tuple(names), tuple(meaning(call.full[name]) for name in names))
        digest = KeySource.parse(names).digest(call=call)
    elif kind == "template":
        fields = sorted((n for n in ("a", "c") if "{" + n + "}" in template), key=template.index)
        who = (template, tuple(meaning(call.full[name]) for name in fields))
        digest = KeySource.parse(template).digest(call=call)
    else:
        who = meaning([call.full["a"]])
        digest = KeySource.parse(lambda arguments: [arguments["a"]]).digest(call=call)
    return (parts["place"], parts["depth"], kind, who), effective_key(*parts["place"], parts["depth"], digest)


def play_pairs(draw: Draw, _: Any) -> str:
    """Two operations, which have some parts in common, share a key exactly where an independent reader says one."""
    parts, fresh = _parts(draw), _parts(draw)
    common = draw(st.sets(st.sampled_from(sorted(parts))))
    try:
        one, one_key = _identified(parts)
        other, other_key = _identified({**fresh, **{name: parts[name] for name in common}})
    except Refused:
        return "means nothing in JSON"
    except KeyMissing:
        return "no key"
    assert (one == other) is (one_key == other_key), (one, other)
    assert scope_hash(one_key) != scope_hash(other_key) or one_key == other_key
    return "one operation" if one == other else "two operations"


def play_neighbours(draw: Draw, _: Any) -> str:
    """The same source over two calls that differ in one place, or in none."""
    args, kwargs = _call(draw, plain)
    changed, where = list(args), draw(st.integers(0, len(args) - 1))
    changed[where] = draw(plain)
    spec = draw(st.sampled_from(["arguments", ["a"], ["a", "b", "c"], "{a}:{b}", "k:{c}{a}"]))
    names = ["a", "b", "c"] if spec == "arguments" else [n for n in ("a", "b", "c") if n in spec or f"{{{n}}}" in spec]
    source = KeySource.parse(spec)
    try:
        whole, other = _whole(args, kwargs), _whole(changed, kwargs)
        calls = bind(body, args, kwargs), bind(body, changed, kwargs)
        if spec != "arguments":
            whole, other = ([meaning(call.full[name]) for name in names] for call in calls)
        digests = [source.digest(call=call) for call in calls]
        prints = [fingerprint(call, None if spec == "arguments" else names) for call in calls]
    except Refused:
        return "means nothing in JSON"
    except KeyMissing:
        return "no key"
    assert (whole == other) is (digests[0] == digests[1]), (args, changed)
    assert (whole == other) is (prints[0] == prints[1]), (args, changed)
    return "one call" if whole == other else "two calls"


def play_spellings(draw: Draw, _: Any) -> str:
    """One call spelled in several ways, and as the worker reads it from JSON: one key, one fingerprint."""
    a, b, c = draw(plain), draw(plain), draw(plain)
    spellings = [([a, b], {"c": c}), ([a], {"b": b, "c": c}), ([], {"c": c, "b": b, "a": a})]
    source = KeySource.parse(draw(st.sampled_from(["arguments", ["c", "a"], "{a}/{c}"])))
    try:
        meaning([a, b, c])
        spellings.append(tuple(loads(dumps(spellings[0]))))
        calls = [bind(body, *spelling) for spelling in spellings]
        keys = {source.digest(call=call) for call in calls}
    except Refused:
        return "means nothing in JSON"
    except KeyMissing:
        return "no key"
    assert len(keys) == 1
    assert len({fingerprint(call) for call in calls}) == 1
    return "one key"


# --- nothing but a refusal comes out ---------------------------------------------------------------------------------

some_names = st.lists(
    st.sampled_from(["a", "b", "rest", "rest.0", "a.x", "a.0", "b.sku", "c.__class__", "a..b", "", "zz"]) | st.text(),
    max_size=3,
)
template_text = st.text(alphabet="{}ab.:!r0_ ", max_size=8) | framing | st.sampled_from(["{a.x}", "{a!r}", "{a:>9}"])


def play_garbage(draw: Draw, _: Any) -> str:
    """Any source, any names, any values: a key or one of the documented refusals."""
    args = draw(st.lists(anything, max_size=3))
    kwargs = draw(st.dictionaries(st.sampled_from(["a", "b", "c", "rest", "x", "**x", "*"]), anything, max_size=2))
    spec = draw(template_text | some_names | st.sampled_from(["message", "arguments"]) | anything)
    try:
        source = KeySource.parse(spec)
        source.check(body)
    except ConfigurationError:
        return "source refused"
    call = bind(body, args, kwargs)
    try:
        digest = source.digest(message_id=draw(st.none() | framing), call=call, explicit=draw(st.none() | anything))
        names = draw(st.none() | some_names)
        check_names(body, names or ())
        marks = digest, fingerprint(call, names)
    except (KeyMissing, NoCanonicalForm, ConfigurationError) as refusal:
        worded(refusal)
        return f"refused: {type(refusal).__name__}"
    assert all(len(mark) == 64 and set(mark) <= set("0123456789abcdef") for mark in marks)
    return "a key"


def play_canonical(draw: Draw, _: Any) -> str:
    """Any value has one form, the same twice, or none."""
    value = draw(anything)
    try:
        form = canonical(value)
    except NoCanonicalForm as refusal:
        worded(refusal, "argument")
        return "no form"
    assert canonical(value) == form
    return "a form"


TARGETS = [
    Target("keys: pairs", "two operations share a key exactly where they are one", play_pairs),
    Target("keys: neighbours", "calls that differ in one argument the key names never share it", play_neighbours),
    Target("keys: spellings", "every spelling of a call, before and after JSON, has one key", play_spellings),
    Target("keys: garbage", "a key, or KeyMissing, NoCanonicalForm, ConfigurationError", play_garbage),
    Target("canonical", "one form, or NoCanonicalForm", play_canonical),
]
