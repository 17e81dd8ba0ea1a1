"""Which kinds of action there are: a name, the model of its payload, the class that acts and looks, and its bounds.

What is stored and approved is what the model makes of a payload, and it must make the same of it again whenever the
action is executed: a payload with something in it that would be lost on the way is refused.

Not here: who may approve (``gate``), what is sent where (the endpoint), and when (``chain``).
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from celery_idem.errors import ConfigurationError, PayloadRefused
from celery_idem.governed.canonical import canonical_json
from celery_idem.governed.endpoint import Endpoint, PerProcess

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

C = TypeVar("C", bound=type)

LONGEST_WINDOW = 3600.0
MOST_OBSERVATIONS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", re.ASCII)
_SHOWN = 10
"""How many problems of a payload one refusal names."""


@dataclass(frozen=True)
class ActionType:
    """One kind of action.

    Args:
        name: letters, digits and ``. _ : / -``, at most 128.
        payload: a pydantic model with fields.
        endpoint_class: called without arguments; its instances have ``execute`` and ``observe``.
        grantable: whether a standing grant may approve it; otherwise an owner approves each one.
        observation_window: seconds (1 to 3600) after dispatch in which the endpoint may be asked what became of it.
        max_observations: how often (1 to 100).
        observe_delay: seconds (0 to the window) between two looks.

    Raises:
        ConfigurationError: one of them is not that; the message names it.
    """

    name: str
    payload: type[BaseModel]
    endpoint_class: type
    grantable: bool = False
    observation_window: float = 600.0
    max_observations: int = 10
    observe_delay: float = 5.0
    _made: PerProcess[Endpoint] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"action type {self.name!r:.80}: name= is 1 to 128 letters, digits and . _ : / -: 'payments.refund'"
            )
        _check_model(self.name, self.payload)
        _check_class(self.name, self.endpoint_class)
        if not isinstance(self.grantable, bool):
            raise _wrong(self.name, "grantable", self.grantable, "True or False")
        self._check_number("observation_window", 1, LONGEST_WINDOW)
        self._check_number("max_observations", 1, MOST_OBSERVATIONS, whole=True)
        self._check_number("observe_delay", 0, self.observation_window)
        object.__setattr__(self, "_made", PerProcess(self.endpoint_class))

    def _check_number(self, argument: str, low: float, high: float, *, whole: bool = False) -> None:
        value = getattr(self, argument)
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not low <= value <= high:
            kind = "a whole number" if whole else "a number of seconds"
            raise _wrong(self.name, argument, value, f"{kind} from {low:g} to {high:g}")

    @property
    def endpoint(self) -> Endpoint:
        """The instance of this process, made when it is first asked for."""
        return self._made.get()

    def payload_of(self, value: Mapping[str, Any] | BaseModel) -> dict[str, Any]:
        """The payload as it is stored, approved and executed: plain JSON, defaults filled in, keys by alias.

        Args:
            value: what the model accepts, or an instance of it.

        Raises:
            PayloadRefused: it does not fit the model, has something the model would drop, holds a set, does not come
                back from JSON as it was (a ``SecretStr``, an excluded field), or exceeds the bounds of
                ``canonical_json``. The message names fields and never shows values.
        """
        if type(value) is self.payload:
            model = value
        elif isinstance(value, Mapping):
            model = self._fitting(self.payload.model_validate, dict(value))
        else:
            raise self._refused(f"is a {type(value).__qualname__}: give a mapping or a {self.payload.__name__}")
        stored = self._plain(model)
        if isinstance(value, Mapping):
            named = self._plain(model, by_alias=False)
            if dropped := [path for path, _ in zip(_dropped(value, stored, named), range(_SHOWN), strict=False)]:
                raise self._refused(
                    f"has {', '.join(dropped)}, which {self.payload.__name__} would drop: "
                    "leave that out, or add it to the model"
                )
        if not _alike(self.model_of(stored), model):
            raise self._changed()
        payload: dict[str, Any] = json.loads(self._json(stored))
        return payload

    def model_of(self, payload: Mapping[str, Any]) -> Any:
        """The stored payload as an instance of the model, which would be stored as the same JSON again.

        Raises:
            PayloadRefused: it would not, or the payload does not fit: the model is not what it was.
        """
        text = self._json(payload)
        model = self._fitting(self.payload.model_validate_json, text)
        if self._json(self._plain(model)) != text:
            raise self._changed()
        return model

    def _fitting(self, validate: Callable[[Any], Any], value: Any) -> Any:
        from pydantic import ValidationError
        from pydantic.errors import PydanticUserError

        try:
            return validate(value)
        except ValidationError as error:
            problem = _problems(error)
        except PydanticUserError as error:  # of the class, not of what was given: an annotation it cannot resolve, say
            raise ConfigurationError(f"action type {self.name!r}: payload= cannot be used: {error}") from error
        except Exception as error:  # noqa: BLE001  a validator of the application's, which may raise anything
            problem = f"a validator raised {type(error).__qualname__}"
        # Raised out here, so that no traceback leads to an error that shows what was in the payload.
        raise self._refused(f"does not fit {self.payload.__name__}: {problem}")

    def _plain(self, model: Any, *, by_alias: bool = True) -> dict[str, Any]:
        try:
            # Without warnings: they show values, and what they warn of does not come back as it was.
            rich = model.model_dump(by_alias=by_alias, round_trip=True, warnings=False)
            plain = model.model_dump(mode="json", by_alias=by_alias, round_trip=True, warnings=False)
        except Exception as error:  # noqa: BLE001  a serializer of the application's
            problem = (
                f"cannot be written as JSON: {type(error).__qualname__}: give {self.payload.__name__} plain fields"
            )
        else:
            place = next(_sets(rich), None)
            if place is None:
                return dict(plain)
            problem = f"has a set at {place}, and a set has no order that could be approved: declare a list"
        raise self._refused(problem)

    def _json(self, payload: Any) -> str:
        return canonical_json(payload, where=f"payload of {self.name!r}")

    def _changed(self) -> PayloadRefused:
        return self._refused(
            f"does not come back as it was from what {self.payload.__name__} makes of it: where the model was changed "
            "after the action was proposed, propose it again; else give the model fields that JSON can keep"
        )

    def _refused(self, problem: str) -> PayloadRefused:
        return PayloadRefused(f"payload of {self.name!r} {problem}")


class Catalog:
    """Action types by name; iterates over them in the order of their registration."""

    def __init__(self) -> None:
        self._types: dict[str, ActionType] = {}

    def register(self, declared: ActionType) -> None:
        """Know this type from now on; a class that was imported again replaces itself.

        Raises:
            ConfigurationError: the name belongs to another class.
        """
        known = self._types.get(declared.name)
        if known is not None and _home(known) != _home(declared):
            raise ConfigurationError(
                f"action type {declared.name!r} belongs to {'.'.join(_home(known))}, so {'.'.join(_home(declared))} "
                "cannot have it: give one of them another name"
            )
        self._types[declared.name] = declared

    def get(self, name: str) -> ActionType:
        """The type of that name.

        Raises:
            ConfigurationError: there is none in this process; the message names the nearest.
        """
        if name in self._types:
            return self._types[name]
        near = get_close_matches(str(name), self._types, n=1)
        hint = f"did you mean {near[0]!r}? If not, " if near else ""
        raise ConfigurationError(
            f"no action type {name!r:.80} is registered here: {hint}import the module with its @action, for a "
            "worker by naming it in the app's include"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def __iter__(self) -> Iterator[ActionType]:
        return iter(list(self._types.values()))

    def __len__(self) -> int:
        return len(self._types)


catalog = Catalog()
"""Where ``action`` registers, and where the chain looks, unless told otherwise."""


def action(
    name: str,
    *,
    payload: type[BaseModel],
    grantable: bool = False,
    observation_window: float = 600.0,
    max_observations: int = 10,
    observe_delay: float = 5.0,
    catalog: Catalog = catalog,
) -> Callable[[C], C]:
    """Declare the class below as an action type; the class itself stays as it is. Arguments: see ``ActionType``."""

    def declared(endpoint_class: C) -> C:
        catalog.register(
            ActionType(
                name,
                payload,
                endpoint_class,
                grantable=grantable,
                observation_window=observation_window,
                max_observations=max_observations,
                observe_delay=observe_delay,
            )
        )
        return endpoint_class

    return declared


# --- checks --------------------------------------------------------------------------------------------------------


def _wrong(name: object, argument: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"action type {name!r}: {argument}= is {value!r:.80}: give {wanted}")


def _check_model(name: str, payload: object) -> None:
    try:
        from pydantic import BaseModel, RootModel
    except ImportError as error:
        raise ConfigurationError(
            f"action type {name!r}: payload= is a pydantic model, and pydantic is missing: "
            'pip install "celery-idem[governed]"'
        ) from error
    if not (inspect.isclass(payload) and issubclass(payload, BaseModel) and not issubclass(payload, RootModel)):
        raise _wrong(name, "payload", payload, "a subclass of pydantic.BaseModel with fields")


def _check_class(name: str, endpoint_class: object) -> None:
    if not inspect.isclass(endpoint_class):
        raise _wrong(name, "endpoint_class", endpoint_class, "a class; put @action above one")
    place = f"action type {name!r}: {endpoint_class.__name__}"
    for method in ("execute", "observe"):
        found = getattr(endpoint_class, method, None)
        if not callable(found) or getattr(found, "__isabstractmethod__", False):
            raise ConfigurationError(f"{place} has no {method}(self, request): add it")
        if inspect.iscoroutinefunction(found):
            raise ConfigurationError(f"{place}.{method} is async, and nothing would await it: make it a plain method")
    try:
        inspect.signature(endpoint_class).bind()
    except TypeError as error:
        raise ConfigurationError(
            f"{place} is made without arguments, and asks for some ({error}): give defaults"
        ) from error
    except ValueError:
        pass  # written in C, so it cannot be asked


def _home(declared: ActionType) -> tuple[str, str]:
    return declared.endpoint_class.__module__, declared.endpoint_class.__qualname__


# --- payloads ------------------------------------------------------------------------------------------------------


def _problems(error: ValidationError) -> str:
    """Where and what kind: pydantic's own words may quote the value."""
    found = error.errors(include_url=False, include_context=False)
    told = [f"{_path(problem['loc'])} ({problem['type'].replace('_', ' ')})" for problem in found[:_SHOWN]]
    return ", ".join(told) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _path(place: Sequence[object]) -> str:
    return ".".join(f"{step!s:.60}" for step in place) or "the payload as a whole"


def _dropped(given: Any, kept: Any, named: Any, place: tuple[object, ...] = ()) -> Iterator[str]:
    """Paths of what was given and is not kept; ``kept`` has aliases for keys, ``named`` the same with field names."""
    if isinstance(given, Mapping) and isinstance(kept, dict) and isinstance(named, dict):
        pairs = list(zip(kept.items(), named.items(), strict=True))
        known = {name: (one, other) for (_, one), (name, other) in pairs}
        known |= {alias: (one, other) for (alias, one), (_, other) in pairs}
        for key, value in given.items():
            if key in known:
                yield from _dropped(value, *known[key], (*place, key))
            elif isinstance(key, str):  # fields are named by text; other keys are a dictionary's own, written as text
                yield _path((*place, key))
    elif isinstance(given, (list, tuple)) and isinstance(kept, list) and isinstance(named, list):
        for index, (value, one, other) in enumerate(zip(given, kept, named, strict=False)):
            yield from _dropped(value, one, other, (*place, index))


def _sets(value: Any, place: tuple[object, ...] = ()) -> Iterator[str]:
    if isinstance(value, (set, frozenset)):
        yield _path(place)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _sets(item, (*place, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _sets(item, (*place, index))


def _alike(one: Any, other: Any) -> bool:
    """Whether all fields are equal, those that are not stored included."""
    names = type(one).model_fields
    try:
        same = all(bool(one.__dict__.get(name) == other.__dict__.get(name)) for name in names)
        return same and one.model_extra == other.model_extra
    except Exception:  # noqa: BLE001  what cannot be compared cannot be vouched for
        return False
