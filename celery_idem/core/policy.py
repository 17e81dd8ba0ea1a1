"""The frozen policy a task runs under: what ``@app.task(idempotency=Policy(...))`` says, over the app's settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Literal

from celery_idem.core.settings import BY_NAME, PER_TASK, Settings, check_name, checked
from celery_idem.errors import ConfigurationError


class _Unset:
    def __repr__(self) -> str:
        return "<from the settings>"


UNSET: Any = _Unset()
"""A field nobody set: the parent class's policy or the app's setting decides."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How one task is made idempotent. What is left out comes from the base class, then from the settings.

    Field by field this is the per-task part of docs/reference/settings.md; an unknown name is a TypeError that says the
    nearest, a value a setting would refuse is a ``ConfigurationError``. ``name`` is the stable task name inside the
    key: set it before you rename a task, so that messages in flight keep their keys.
    """

    name: str | None = None
    key: str | Sequence[str] | Callable[[Mapping[str, Any]], Any] = UNSET
    scope: str | Callable[[Any], str] | None = UNSET
    fingerprint: Sequence[str] | None = UNSET
    lease: float = UNSET
    ttl: float = UNSET
    wait_timeout: float = UNSET
    on_conflict: Literal["park", "fail", "skip"] = UNSET
    verify: Callable[..., Any] | None = UNSET
    on_unknown: Literal["run", "fail"] = UNSET
    on_lease_lost: Literal["stop", "continue"] = UNSET
    max_deliveries: int = UNSET
    storage_policy: Literal["fail_closed", "fail_open"] = UNSET
    serializer: str | None = UNSET
    result_max_bytes: int = UNSET
    replay_failures: tuple[type[Exception], ...] = UNSET
    cacheable: Callable[[Any], bool] | None = UNSET
    on_replay: Callable[[Any, Any], Any] | None = UNSET

    def __post_init__(self) -> None:
        check_name(self.name)
        for name in PER_TASK:
            value = getattr(self, name)
            if value is not UNSET:
                checked(name, value, shown_as=f"Policy({name}=…)")

    def over(self, base: Policy) -> Policy:
        """This policy where it says something, the base's elsewhere."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(base, **{k: v for k, v in said.items() if v is not UNSET and not (k == "name" and v is None)})

    def under(self, settings: Settings | None = None) -> Policy:
        """The complete policy: every field still unset taken from the settings, or from their defaults."""
        values = {n: BY_NAME[n].default if settings is None else settings[n] for n in PER_TASK}
        return self.over(Policy(**values))

    def replays(self, error: BaseException) -> bool:
        """Whether this exception is an outcome to be stored."""
        return isinstance(error, tuple(self.replay_failures))


def _known(function: Callable[..., None]) -> Callable[..., None]:
    """Name the nearest option where Python would name none; for everybody who asks, the signature stays."""

    @wraps(function)
    def init(self: Policy, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in _OPTIONS:
                raise TypeError(f"Policy has no option {name!r}: {_nearest(name)}")
        function(self, *args, **given)

    return init


def _nearest(option: object) -> str:
    near = get_close_matches(str(option), _OPTIONS, n=1)
    return f"did you mean {near[0]!r}?" if near else "see docs/reference/settings.md"


_OPTIONS = ("name", *PER_TASK)
Policy.__init__ = _known(Policy.__init__)  # type: ignore[method-assign]


class Patterns:
    """``idempotency_tasks``, read: which tasks the setting names, and the options it gives them.

    Raises:
        ConfigurationError: an unknown option, with the nearest match; a value its option refuses; nothing switched on.
    """

    def __init__(self, given: Mapping[str, Any] | Sequence[str] | None) -> None:
        said = ["*"] if given is None else given
        pairs = said.items() if isinstance(said, Mapping) else [(glob, True) for glob in said]
        self._rows = [(glob, _options(glob, word)) for glob, word in pairs]
        if not any(policy for _, policy in self._rows):
            raise ConfigurationError('idempotency_tasks switches nothing on: add "*": True for all the rest')

    def of(self, name: str) -> Policy | Literal[False] | None:
        """The options of the first glob that fits; False where it says False, None where none fits."""
        return next((policy for glob, policy in self._rows if fnmatchcase(name, glob)), None)

    def idle(self, names: Collection[str]) -> list[str]:
        """The globs that fit none of these tasks."""
        return [glob for glob, _ in self._rows if not any(fnmatchcase(name, glob) for name in names)]


def _options(glob: str, word: Any) -> Policy | Literal[False]:
    if word is False or isinstance(word, Policy):
        return word
    options = {} if word is True else word
    for option in options:
        if option not in _OPTIONS:
            raise ConfigurationError(
                f"idempotency_tasks[{glob!r}] names {option!r}, which is no option: {_nearest(option)}"
            )
    try:
        return Policy(**options)
    except ConfigurationError as error:
        raise ConfigurationError(f"idempotency_tasks[{glob!r}]: {error}") from None
