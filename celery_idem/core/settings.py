"""Every setting: its name, default, unit and check, in one table; docs/reference/settings.md is held to it.

In a Celery configuration each name is prefixed ``idempotency_``; under Django's ``CELERY`` namespace
``CELERY_IDEMPOTENCY_``. Settings marked per task may also be given to ``Policy`` under the bare name. Plain numbers
are seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from celery_idem.core.keys import KeySource
from celery_idem.errors import ConfigurationError

PREFIX = "idempotency_"
MODE_VARIABLE = "CELERY_IDEMPOTENCY_MODE"
"""Environment variable that overrides the mode, so one worker can be switched without a deploy."""

Check = Callable[[Any], str | None]
"""Says what is wrong with a value, or None."""


def _one_of(*choices: str) -> Check:
    return lambda value: None if value in choices else f"must be one of {', '.join(map(repr, choices))}"


FOREVER = 1e11
"""Seconds, three thousand years: what no store could add to its clock, infinity above all, is more."""


def _number(low: float, high: float = FOREVER, *, above: bool = False) -> Check:
    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return "must be a number"
        if value > high or math.isnan(value) or (value <= low if above else value < low):
            return f"must be {'above' if above else 'at least'} {low:g} and at most {high:g}"
        return None

    return check


def _whole(low: int) -> Check:
    def check(value: Any) -> str | None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and value >= low else f"must be a whole number, at least {low}"

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be True or False"


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        return "must be a non-empty string"
    kept = "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)
    return None if kept else "holds a character no store can keep"


def _callable(value: Any) -> str | None:
    return None if value is None or callable(value) else "must be a callable"


def _text_or_callable(value: Any) -> str | None:
    return None if callable(value) else _text(value)


def _options(value: Any) -> str | None:
    good = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    return None if good else "must be a mapping of client options by name"


def _names(value: Any) -> str | None:
    if value is None:
        return None
    named = isinstance(value, (list, tuple)) and value and all(isinstance(n, str) and n for n in value)
    return None if named else "must be a non-empty list of argument names, or None for all"


def _exceptions(value: Any) -> str | None:
    kinds = isinstance(value, (list, tuple)) and all(isinstance(c, type) and issubclass(c, Exception) for c in value)
    return None if kinds else "must be a tuple of Exception classes"


def _key(value: Any) -> str | None:
    try:
        KeySource.parse(value)
    except ConfigurationError as error:
        return str(error)
    return None


def _tasks(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        good = all(isinstance(word, (bool, Mapping)) or hasattr(word, "under") for word in value.values())
    else:
        good = isinstance(value, (list, tuple))
    named = good and value and all(isinstance(glob, str) and glob for glob in value)
    return None if named else "must map globs of task names to options, True or False, or list them"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    default: Any
    check: Check
    per_task: bool
    meaning: str


TABLE: tuple[Setting, ...] = (
    Setting(
        "mode",
        "enforce",
        _one_of("enforce", "observe", "off"),
        False,
        "enforce; observe claims and reports but always runs the body; off does nothing",
    ),
    Setting("store", None, _text, False, "URL of the claim store"),
    Setting("store_options", {}, _options, False, "options for the store's client library"),
    Setting(
        "store_timeout",
        5.0,
        _number(0, 3600, above=True),
        False,
        "seconds no store call outlives, and how long a task holds its slot while the store is down",
    ),
    Setting("namespace", None, _text, False, "separates apps that share a store; the app's name by default"),
    Setting("dead_check", True, _flag, False, "take over at once from a holder that is provably dead on this host"),
    Setting("local_cache", 0, _whole(0), False, "completed records each process may replay without asking the store"),
    Setting("purge", True, _flag, False, "delete expired records in the background, a few hundred a minute"),
    Setting(
        "keep_visible",
        True,
        _flag,
        False,
        "on a Redis broker, keep messages this worker holds from being given to another at the visibility timeout",
    ),
    Setting(
        "tasks", None, _tasks, False, "which tasks the app-wide switch means, by glob, and their options; all of them"
    ),
    Setting("key", "message", _key, True, "where the idempotency key comes from"),
    Setting("scope", None, _text_or_callable, True, "tenant: a string, or a callable over the request on the worker"),
    Setting("fingerprint", None, _names, True, "argument names a duplicate must agree on; all by default"),
    Setting(
        "lease",
        60.0,
        _number(0, 86_400, above=True),
        True,
        "seconds without a renewal until another worker may take over",
    ),
    Setting("ttl", 86_400.0, _number(0), True, "seconds a completion answers duplicates; 0 remembers no result"),
    Setting("wait_timeout", 1.0, _number(0, 60), True, "seconds a duplicate waits in its slot for the first run"),
    Setting(
        "on_conflict",
        "park",
        _one_of("park", "fail", "skip"),
        True,
        "what becomes of another message whose key is held",
    ),
    Setting(
        "verify",
        None,
        _callable,
        True,
        "asked before a second run whether the first had its effect: Happened(value), NotHappened() or an exception",
    ),
    Setting(
        "on_unknown", "run", _one_of("run", "fail"), True, "what to do where nobody knows whether the effect happened"
    ),
    Setting(
        "on_lease_lost",
        "stop",
        _one_of("stop", "continue"),
        True,
        "raise LeaseLost in a body whose key went to another worker, or let it finish for nothing",
    ),
    Setting("max_deliveries", 5, _whole(1), True, "runs that may die without an outcome before the task fails"),
    Setting(
        "storage_policy",
        "fail_closed",
        _one_of("fail_closed", "fail_open"),
        True,
        "with the store down: wait and park, or run unprotected",
    ),
    Setting("serializer", None, _text, True, "kombu serializer of stored results; the task's own by default"),
    Setting("result_max_bytes", 262_144, _whole(1), True, "encoded results above this many bytes are not kept"),
    Setting(
        "replay_failures",
        (),
        _exceptions,
        True,
        "exceptions that are outcomes: stored, and raised again for duplicates",
    ),
    Setting(
        "cacheable",
        None,
        _callable,
        True,
        "callable over the value; false means do not store it, the next message runs",
    ),
    Setting("on_replay", None, _callable, True, "callable over (value, record) whose result is replayed instead"),
)

BY_NAME = {setting.name: setting for setting in TABLE}
PER_TASK = tuple(setting.name for setting in TABLE if setting.per_task)


def check_name(value: Any) -> None:
    """``ConfigurationError`` if this cannot be a policy's name."""
    if problem := _text(value):
        raise ConfigurationError(f"Policy(name=…) = {value!r}: {problem}")


def checked(name: str, value: Any, *, shown_as: str | None = None) -> Any:
    """The value, if the setting accepts it; ``ConfigurationError`` naming setting, value and rule otherwise."""
    problem = BY_NAME[name].check(value)
    if problem:
        raise ConfigurationError(f"{shown_as or PREFIX + name} = {value!r}: {problem}")
    return value


def given_under(prefix: str, conf: Any) -> tuple[dict[str, Any], list[str]]:
    """Settings by their bare names, namespace and prefix removed; and names that Celery does not read as written."""
    # Whatever stands in front is the namespace only if Celery finds the setting without it.
    names = {name[name.index(prefix) :] for key in conf if prefix in (name := str(key).lower())}
    missing = object()
    found = {name.removeprefix(prefix): conf.get(name, missing) for name in names}
    given = {name: value for name, value in found.items() if value is not missing}
    return given, [name for name in found if name not in given]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one app, checked."""

    values: Mapping[str, Any]

    @classmethod
    def load(cls, given: Mapping[str, Any], *, environment: Mapping[str, str] | None = None) -> Settings:
        """Check every given setting (bare names) and fill in the defaults.

        Raises:
            ConfigurationError: an unknown name, with the nearest match; or a value its setting refuses.
        """
        for name in given:
            if name not in BY_NAME:
                near = get_close_matches(name, BY_NAME, n=1)
                hint = f"did you mean {PREFIX}{near[0]}?" if near else "see docs/reference/settings.md"
                raise ConfigurationError(f"{PREFIX}{name} is not a setting: {hint}")
        values = {s.name: checked(s.name, given[s.name]) if s.name in given else s.default for s in TABLE}
        mode = (os.environ if environment is None else environment).get(MODE_VARIABLE)
        if mode:
            values["mode"] = checked("mode", mode, shown_as=MODE_VARIABLE)
        return cls(values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]
