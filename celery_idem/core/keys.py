"""Turns a call into hashes: the effective key its record lives under, and the fingerprint of its arguments.

Pure: no clock, no store, no Celery. ``bind`` gives every spelling of one call the same arguments by name;
``KeySource`` and ``fingerprint`` hash the canonical forms of what the policy names. Anything that changes a hash
makes every key in flight a new one, so golden vectors in the tests hold all of this still, and ``KEY_VERSION`` is in
each hash.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import inspect
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from celery_idem.core.canonical import NoCanonicalForm, canonical, fields_of, key_form, leaf, shown, text_bytes
from celery_idem.errors import ConfigurationError, KeyMissing

KEY_VERSION = 1


# --- calls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bound:
    """One call's arguments by parameter name, the same for every spelling of the call.

    ``arguments`` has what differs from its default, ``full`` the defaults too, ``open`` says that any other name may
    be there in another call (``**kwargs``). A ``**kwargs`` name that is also a parameter's, or starts with an
    asterisk, has ``**`` before it. A call the signature refuses has its positional arguments as ``*``,
    and says in ``misfit`` why.
    """

    arguments: dict[str, object]
    full: dict[str, object]
    open: bool = False
    misfit: str = field(default="", compare=False)


def bind(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], *, skip_first: bool = False
) -> Bound:
    """Name the call's arguments as the function's signature does; never raises for a call that does not match.

    Args:
        function: the task's body; a bound method's first parameter is left out.
        args: positional arguments, without a bound ``self``.
        kwargs: keyword arguments.
        skip_first: the function is not bound yet, but its first parameter will be.
    """
    return _shape_of(function, skip_first).bind(args, kwargs)


def bound_arguments(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], *, skip_first: bool = False
) -> dict[str, object]:
    """Name the call's arguments that differ from their default; ``bind(...).arguments``."""
    return bind(function, args, kwargs, skip_first=skip_first).arguments


class _Shape:
    """A function's parameters, read once: inspect needs some 20 µs for it."""

    def __init__(self, signature: inspect.Signature) -> None:
        parameters = signature.parameters.values()
        self.signature = signature
        self.var_positional = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self.var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self.names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        self.plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        self.required = {p.name for p in parameters if p.default is p.empty}
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        # What a default is, it is for good: a body that changes its own default must not change the keys.
        self.spelled = {name: _spelling(default) for name, default in self.defaults.items()}
        if self.var_positional:
            self.defaults[self.var_positional] = []
            self.spelled[self.var_positional] = canonical([])

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Bound:
        try:
            given = self._named(args, kwargs)
            if given is None:
                given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unmatched = {"*": list(args), **_extra(kwargs, ())}
            return Bound(unmatched, unmatched, open=True, misfit=str(error))
        extra = given.pop(self.var_keyword, None) if self.var_keyword else None
        if self.var_positional in given:
            given[self.var_positional] = list(given[self.var_positional])
        full = {**self.defaults, **given}
        arguments = {name: value for name, value in given.items() if not self.is_default(name, value)}
        if extra:
            named = _extra(extra, self.names)
            full.update(named)
            arguments.update(named)
        return Bound(arguments, full, open=self.var_keyword is not None)

    def _named(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any] | None:
        """What the signature binds, at a tenth of its cost; None where it is not as simple as that."""
        if not self.plain or len(args) > len(self.names):
            return None
        given = dict(zip(self.names, args, strict=False))
        if kwargs:
            if any(name in given or name not in self.names for name in kwargs):
                return None
            given = {name: given.get(name, kwargs.get(name)) for name in self.names if name in given or name in kwargs}
        return given if self.required <= given.keys() else None

    def is_default(self, name: str, value: object) -> bool:
        if name not in self.defaults:
            return False
        return value is self.defaults[name] or (
            (spelled := self.spelled[name]) is not None and spelled == _spelling(value)
        )


def _spelling(value: object) -> bytes | None:
    try:
        return canonical(value)
    except NoCanonicalForm:
        return None


def _extra(kwargs: Mapping[str, object], taken: Iterable[str]) -> dict[str, object]:
    named = ((str(name), value) for name, value in kwargs.items())
    return {f"**{name}" if name[:1] == "*" or name in taken else name: value for name, value in named}


def signature_of(function: Callable[..., object], **options: Any) -> inspect.Signature:
    """As ``inspect.signature`` has it, whatever its annotations name.

    Raises:
        ValueError: some built-ins have none.
    """
    # 3.14 evaluates annotations when they are asked for, and those under TYPE_CHECKING have no value.
    if sys.version_info >= (3, 14):
        import annotationlib

        options["annotation_format"] = annotationlib.Format.FORWARDREF
    return inspect.signature(function, **options)


def _shape_of(function: Callable[..., object], skip_first: bool) -> _Shape:
    inner = getattr(function, "__func__", None)  # a bound method is a new object at every access
    return _shape(function if inner is None else inner, skip_first or inner is not None)


@functools.lru_cache(maxsize=4096)
def _shape(function: Callable[..., object], skip_first: bool) -> _Shape:
    try:
        signature = signature_of(function)
    except ValueError:
        signature = inspect.signature(lambda *args, **kwargs: None)  # noqa: ARG005
    parameters = list(signature.parameters.values())
    if skip_first and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    return _Shape(signature.replace(parameters=parameters))


# --- hashes ----------------------------------------------------------------------------------------------------


def fingerprint(call: Bound, names: Sequence[str] | None = None) -> str:
    """Hash what two uses of one key must agree on: 64 lowercase hex characters.

    Args:
        call: from ``bind``.
        names: parameters, or parts of them (``line.sku``); None covers every argument. A name left to its default
            counts as its default spelled out; a mapping key or list index that is not there counts as absent.

    Raises:
        ConfigurationError: a name is no parameter, or a part no attribute of the object it is looked up in.
        NoCanonicalForm: a covered argument has none.
    """
    if names is None:
        return _hash(b"celery_idem fingerprint", b"all", _encode_arguments(call.arguments))
    parts = []
    for name in sorted(set(names)):
        try:
            parts += [text_bytes(name), canonical(_look_up(call, name), where=name)]
        except _Missing as missing:
            if missing.wrong:
                raise ConfigurationError(f"fingerprint names {name!r}, but {missing.text}", name=name) from None
            parts += [text_bytes(name), b"-"]
    return _hash(b"celery_idem fingerprint", b"names", *parts)


def check_names(
    function: Callable[..., object], names: Iterable[str], *, setting: str = "fingerprint", skip_first: bool = False
) -> None:
    """Check each name's first part against the function's parameters.

    Raises:
        ConfigurationError: it is none of them, and the function takes no ``**kwargs``; names the nearest one.
    """
    shape = _shape_of(function, skip_first)
    for name in names:
        first = name.partition(".")[0]
        if first == shape.var_keyword:
            raise ConfigurationError(
                f"{setting} names {name!r}, but what **{first} takes is named directly: leave {first!r} out"
            )
        if first not in shape.names and shape.var_keyword is None:
            label = getattr(function, "__qualname__", repr(function))
            raise ConfigurationError(
                f"{setting} names {name!r}, but {label} has no parameter {first!r}: {_nearest(first, shape.names)}"
            )


def effective_key(namespace: str, scope: str, task: str, depth: int, digest: str) -> str:
    """Hash everything that sets one operation apart: 64 lowercase hex characters, the key of its record.

    Args:
        namespace: which app; two apps on one store share keys only under one namespace.
        scope: which tenant, "" for none.
        task: the task's stable name.
        depth: how often the message was replaced (0 for a message as it was first sent).
        digest: from ``KeySource.digest``.
    """
    last = text_bytes(digest)
    return hashlib.sha256(_key_prefix(namespace, scope, task, depth) + b"%d:%b" % (len(last), last)).hexdigest()


@functools.lru_cache(maxsize=4096)
def _key_prefix(namespace: str, scope: str, task: str, depth: int) -> bytes:
    return _framed(b"celery_idem effective key", *map(text_bytes, (namespace, scope, task, str(depth))))


def scope_hash(scope: str) -> str:
    """Hash the scope for a record to be found by: 32 lowercase hex characters, "" where there is none."""
    return _hash(b"celery_idem scope", text_bytes(scope))[:32] if scope else ""


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(_framed(*parts)).hexdigest()


def _framed(*parts: bytes) -> bytes:
    return b"".join([b"%d:%b" % (len(part), part) for part in (b"%d" % KEY_VERSION, *parts)])


def _encode_arguments(arguments: Mapping[str, object]) -> bytes:
    return b"".join(
        [leaf(b"s", text_bytes(name)) + canonical(value, where=name) for name, value in sorted(arguments.items())]
    )


class _Missing(Exception):
    """A dotted name leads nowhere; ``wrong`` where no other call could make it lead somewhere."""

    def __init__(self, text: str, *, wrong: bool = False) -> None:
        super().__init__(text)
        self.text, self.wrong = text, wrong


def _look_up(call: Bound, name: str) -> object:
    first, *rest = name.split(".")
    if first not in call.full:
        if call.misfit:
            raise _Missing(f"the arguments do not fit the task ({call.misfit}): send what it takes")
        raise _Missing(f"there is no argument {first!r}: {_nearest(first, call.full)}", wrong=not call.open)
    value = call.full[first]
    for part in rest:
        try:
            value = _step(value, part)
        except _Missing:
            raise
        except Exception as error:
            kind = type(value).__name__
            raise _Missing(
                f"{part!r} of a {kind} cannot be read ({error!r:.200}): name another part", wrong=True
            ) from error
    return value


def _step(value: Any, part: str) -> object:
    """Look one part of a dotted name up, the same way before and after a JSON round trip."""
    if isinstance(value, (list, tuple)):  # a namedtuple arrives as a list, so its names lead nowhere here either
        if not (part.isascii() and part.isdigit()):
            raise _Missing(f"{part!r} is looked up in a list, which has numbers: use one", wrong=True)
        if len(part) > 9 or int(part) >= len(value):
            raise _Missing(f"there is no item {part} in a list of {len(value)}: send one")
        return cast("object", value[int(part)])
    if callable(dump := getattr(type(value), "model_dump", None)):
        value = dump(value, mode="python")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = fields_of(value)
    if isinstance(value, Mapping):
        if part in value:
            return cast("object", value[part])
        wanted = key_form(part, (None, part, 0))  # the publisher may have 1 where the worker has "1"
        for key, item in value.items():
            if key_form(key, (None, part, 0)) == wanted:
                return cast("object", item)
        raise _Missing(f"there is no {part!r} in it: {_nearest(part, value)}")
    if value is None:
        raise _Missing(f"{part!r} is looked up in None: send a value")
    found = _Missing if part[:1] == "_" else getattr(value, part, _Missing)
    if found is _Missing or callable(found) or isinstance(value, (str, bytes, int, float)):
        raise _Missing(f"{type(value).__name__} has no {part!r}: name the part before it", wrong=True)
    return cast("object", found)


def _nearest(name: str, candidates: Iterable[object]) -> str:
    known = [str(candidate) for candidate in candidates if candidate != "*"]
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"name one of {', '.join(sorted(known)[:20])}" if known else "there are none to name"


# --- key sources -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where a task's idempotency key comes from; ``parse`` makes one of what a policy's ``key`` says."""

    kind: Literal["message", "arguments", "names", "template", "function"]
    names: tuple[str, ...] = ()
    template: str = ""
    function: Callable[[Mapping[str, object]], object] | None = None

    @classmethod
    def parse(cls, spec: object) -> KeySource:
        """Read ``"message"``, ``"arguments"``, dotted names, a template with fields, or a callable.

        Raises:
            ConfigurationError: anything else, a template without fields (one key for every call) or with more than
                names in them.
        """
        if isinstance(spec, KeySource):
            return spec
        if isinstance(spec, str):
            if spec == "message":
                return cls("message")
            if spec == "arguments":
                return cls("arguments")
            return cls("template", names=_template_names(spec), template=spec)
        if isinstance(spec, (list, tuple)):
            if not spec:
                raise ConfigurationError("key is an empty list: name the arguments that make the key")
            return cls("names", names=tuple(sorted({_checked_name(name) for name in spec})))
        if callable(spec) and not isinstance(spec, type):
            if inspect.iscoroutinefunction(spec):
                raise ConfigurationError("key is a coroutine function: give one that returns the key itself")
            return cls("function", function=spec)
        raise ConfigurationError(
            f'key is of type {type(spec).__qualname__}: give "message", "arguments", a list of argument names, a '
            'template like "order:{order_id}" or a function of the arguments'
        )

    def check(self, function: Callable[..., object], *, skip_first: bool = False) -> None:
        """Check the names against the parameters of the task's body.

        Raises:
            ConfigurationError: a first name is no parameter; names the nearest one.
        """
        check_names(function, self.names, setting="key", skip_first=skip_first)

    def digest(self, *, message_id: str | None = None, call: Bound | None = None, explicit: object = None) -> str:
        """Hash this call's key: 64 lowercase hex characters.

        Args:
            message_id: the task id; used by ``"message"`` alone.
            call: from ``bind``; not used by ``"message"``.
            explicit: the key the caller gave, which wins over every source and is one key under all of them.

        Raises:
            KeyMissing: a part is None, blank or not there; names it.
            NoCanonicalForm: a part has none.
        """
        if explicit is not None:
            if not isinstance(explicit, str):
                raise KeyMissing(f"idempotency_key is of type {type(explicit).__qualname__}: give its text, str(…)")
            return _key_hash(b"explicit", canonical(_present(explicit, "idempotency_key")))
        if self.kind == "message":
            return _key_hash(b"message", canonical(_present(message_id, "the message's id")))
        call = call or Bound({}, {})
        if self.kind == "arguments":
            return _key_hash(b"arguments", _encode_arguments(call.arguments))
        if self.function is not None:
            label = getattr(self.function, "__qualname__", repr(self.function))
            value = _present(_ask(self.function, call, label), f"what the key function {label} returned")
            return _key_hash(b"function", canonical(value, where=label))
        values = [canonical(self._value(call, name), where=name) for name in self.names]
        if self.kind == "template":
            return _key_hash(b"template", text_bytes(self.template), *values)
        named = [part for name, value in zip(self.names, values, strict=True) for part in (text_bytes(name), value)]
        return _key_hash(b"names", *named)

    def _value(self, call: Bound, name: str) -> object:
        try:
            return _present(_look_up(call, name), f"the key's {name!r}")
        except _Missing as missing:
            raise KeyMissing(f"the key needs {name!r}, but {missing.text}", source=name) from None


def key_source(spec: object) -> KeySource:
    """``KeySource.parse``, for every message of a task: what was read once is not read again."""
    try:
        return _read(tuple(spec) if isinstance(spec, list) else spec)
    except TypeError:  # no dict has such a key
        return KeySource.parse(spec)


_read = functools.lru_cache(maxsize=1024)(KeySource.parse)


def _key_hash(kind: bytes, *parts: bytes) -> str:
    return _hash(b"celery_idem key", kind, *parts)


def _present(value: object, source: str) -> object:
    if value is None or (isinstance(value, (str, bytes)) and not value.strip()):
        text = "None" if value is None else "blank"
        raise KeyMissing(f"{source} is {text}, so there is no key: give it a value", source=source)
    return value


def _ask(function: Callable[[Mapping[str, object]], object], call: Bound, label: str) -> object:
    try:
        return function(call.full)
    except Exception as error:
        raise KeyMissing(f"the key function {label} raised {error!r}: let it return a key", source=label) from error


def _template_names(template: str) -> tuple[str, ...]:
    try:
        fields = [field for _, *field in string.Formatter().parse(template) if field[0] is not None]
    except ValueError as error:
        raise ConfigurationError(f"key={template!r} is no template ({error}): write {{{{ for a brace") from None
    for name, spec, conversion in fields:
        if spec or conversion:
            raise ConfigurationError(f"key={template!r} formats {name!r}, which no key does: write {{{name}}}")
    if not fields:
        near = difflib.get_close_matches(template, ["message", "arguments"], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f'name an argument, as in "{template}:{{order_id}}"'
        raise ConfigurationError(f"key={template!r} has no field, so every call would have one key: {hint}")
    return tuple(_checked_name(name) for name, _, _ in fields)


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name.partition(".")[0].isidentifier() or not all(name.split(".")):
        raise ConfigurationError(f'key names {shown(name)}: name an argument, or a part of it like "line.sku"')
    return name
