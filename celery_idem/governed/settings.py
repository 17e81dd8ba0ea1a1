"""Every setting of governed actions: name, default, check and meaning, in one table.

In a Celery configuration each name is prefixed ``governed_``; under Django's ``CELERY`` namespace ``CELERY_GOVERNED_``.
Plain numbers are seconds. What a key or a URL must look like beyond its form is judged by who uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from celery_idem.core.settings import BY_NAME as CORE
from celery_idem.core.settings import Setting, given_under
from celery_idem.errors import ConfigurationError

PREFIX = "governed_"


def _keys(value: Any) -> str | None:
    named = isinstance(value, Mapping) and value and all(isinstance(key_id, str) and key_id for key_id in value)
    return None if value is None or named else "must map key ids to public keys, or be None where nothing is signed"


TABLE: tuple[Setting, ...] = (
    Setting(
        "store", None, CORE["store"].check, False, "URL of the action store: postgresql+psycopg2://… or sqlite:///…"
    ),
    Setting("store_timeout", 5.0, CORE["store_timeout"].check, False, "seconds no call of the action store outlives"),
    Setting(
        "lease",
        60.0,
        CORE["lease"].check,
        False,
        "seconds a step holds an action; more than twice what any endpoint takes to answer",
    ),
    Setting(
        "sweep_interval",
        30.0,
        CORE["ttl"].check,
        False,
        "seconds between two looks of a worker for actions that lost their message; 0 looks for none",
    ),
    Setting(
        "sweep_grace",
        120.0,
        CORE["lease"].check,
        False,
        "seconds nothing may happen to an approved action before it gets a new message; doubled each time it does",
    ),
    Setting(
        "approval_keys",
        None,
        _keys,
        False,
        "public keys by key id; where given, an approval counts only if one of them signed it",
    ),
)
_BY_NAME = {setting.name: setting for setting in TABLE}


@dataclass(frozen=True, slots=True)
class GovernedSettings:
    """All settings of one app, checked."""

    values: Mapping[str, Any]

    @classmethod
    def load(cls, given: Mapping[str, Any]) -> GovernedSettings:
        """Check every given setting (bare names) and fill in the defaults.

        Raises:
            ConfigurationError: an unknown name, with the nearest match; or a value its setting refuses.
        """
        for name, value in given.items():
            if name not in _BY_NAME:
                near = get_close_matches(name, _BY_NAME, n=1)
                hint = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(_BY_NAME)}"
                raise ConfigurationError(f"{PREFIX}{name} is not a setting: {hint}")
            if problem := _BY_NAME[name].check(value):
                raise ConfigurationError(f"{PREFIX}{name} = {_shown(name, value)}: {problem}")
        return cls({setting.name: given.get(setting.name, setting.default) for setting in TABLE})

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def given_settings(conf: Any) -> dict[str, Any]:
    """The ``governed_*`` settings of a Celery configuration under their bare names, its namespace removed."""
    given, others = given_under(PREFIX, conf)
    unread = [name for name in others if name in _BY_NAME]
    if unread:  # an approval that must be signed, say, and Celery does not see that it must
        raise ConfigurationError(
            f"{PREFIX}{unread[0]} is written so that Celery does not read it: give it the prefix its configuration "
            f"has, CELERY_{PREFIX.upper()}{unread[0].upper()} under namespace='CELERY', or write it in small letters"
        )
    return given


def _shown(name: str, value: Any) -> str:
    """The value for a message; what may be a secret is not shown."""
    return f"a {type(value).__name__}" if name in {"store", "approval_keys"} else f"{value!r:.80}"
