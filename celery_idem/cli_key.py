"""Which record a ``celery idem`` command means: by hash, or by what a message of the task carries.

A key is derived exactly as publisher and worker do it (``core.keys``), with the task's own policy from the app, so a
task that is not loaded cannot be asked for by name. What is refused here was not looked up and changed nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
from celery.bin.base import CeleryOption
from kombu.utils.json import loads

from celery_idem.app import Runtime
from celery_idem.cli_text import as_json, one_line
from celery_idem.core import keys
from celery_idem.core.policy import Policy
from celery_idem.core.records import Record
from celery_idem.errors import RecordCorrupt
from celery_idem.task import Idempotent

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic only since click 8.5

F = TypeVar("F", bound=Callable[..., Any])

SHORTEST = 8
"""Characters a prefix of a hash has at least."""
EVERY = 2**31 - 1
"""A limit that is none."""
LISTED = 10
"""Records an ambiguous prefix lists."""


class Refusal(click.ClickException):
    """Exit code 1, told in one line, or with ``--json`` as ``{"error": {"type", "message"}, …}``."""

    def __init__(self, kind: str, message: str, **shape: Any) -> None:
        super().__init__(message)
        self.kind, self.shape, self.wants_json = kind, shape, False

    def show(self, file: IO[Any] | None = None) -> None:
        """Tell it."""
        if self.wants_json:
            click.echo(as_json({"error": {"type": self.kind, "message": self.message}, **self.shape}))
        else:
            super().show(file)


class Json(ParamType):
    """JSON of one type, with the typed values that kombu writes for UUIDs, dates and decimals."""

    def __init__(self, kind: type, name: str) -> None:
        self.kind, self.name = kind, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or a usage error."""
        if isinstance(value, self.kind):
            return value
        try:
            loaded = loads(value)
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)
        if not isinstance(loaded, self.kind):
            self.fail(f"{value!r} is not a {self.name}", param, ctx)
        return loaded


class Duration(ParamType):
    """Seconds, or ``90s``, ``10m``, ``2h``, ``1d``, ``1h30m``."""

    name = "duration"
    UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}  # noqa: RUF012 - a table

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Seconds, or a usage error."""
        if isinstance(value, (int, float)):
            return float(value)
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
            return float(value)
        if not re.fullmatch(r"([0-9]+(\.[0-9]+)?[smhd])+", value):
            self.fail(f"{value!r} is no duration: write 90, 90s, 10m, 2h, 1d or 1h30m", param, ctx)
        return sum(float(part[:-1]) * self.UNITS[part[-1]] for part in re.findall(r"[0-9.]+[smhd]", value))


class Unlisted(click.Argument):
    """An argument that the command's own text explains."""

    def get_help_record(self, _ctx: click.Context) -> None:  # type: ignore[override]  # click's own return
        """Not among the options."""


def option(*names: str, group: str = "Options", **how: Any) -> Callable[[F], F]:
    """An option under a heading of its own in ``--help``."""
    return click.option(*names, cls=CeleryOption, help_group=group, **how)


# --- options ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the options of ``names_a_record`` said."""

    digest: str | None
    task: str | None
    key: str | None
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    task_id: str | None
    scope: str | None
    depth: int

    @property
    def from_arguments(self) -> bool:
        """Whether arguments were given, empty ones included."""
        return self.args is not None or self.kwargs is not None


def names_a_record(command: F) -> F:
    """Add the argument and options that name one record; the command gets them as the fields of a ``Choice``."""
    group, whole = "Which record, if not by HASH", click.IntRange(min=0)
    for add in (
        option("--depth", type=whole, default=0, group=group, help="How often the message was replaced [0]."),
        option("--scope", group=group, metavar="TEXT", help="The tenant, where the task has a scope."),
        option("--id", "task_id", group=group, metavar="TASK_ID", help="The task id, where each message is a key."),
        option("--kwargs", type=Json(dict, "JSON object"), group=group, metavar="JSON", help="Its keyword arguments."),
        option("--args", type=Json(list, "JSON array"), group=group, metavar="JSON", help="Its positional arguments."),
        option("--key", group=group, metavar="KEY", help="The idempotency_key it was published with."),
        option("--task", group=group, metavar="NAME", help="The task, with one of the following."),
        click.argument("digest", cls=Unlisted, metavar="[HASH]", required=False, callback=_checked_hash),
    ):
        command = add(command)
    return command


def _checked_hash(_ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    if given is None:
        return None
    digest = given.lower()
    if not SHORTEST <= len(digest) <= 64 or set(digest) - set("0123456789abcdef"):
        raise click.BadParameter(f"{given!r} is no hash: give at least the first {SHORTEST} of its 64 hex characters")
    return digest


# --- from the choice to the key --------------------------------------------------------------------------------------


def chosen_key(runtime: Runtime, choice: Choice) -> str:
    """The 64 characters of the chosen record's key; whether there is such a record is only known for a prefix.

    Raises:
        click.UsageError: the options name no record, or more than one way to it.
        Refusal: no record, or several, have the prefix.
        KeyMissing, NoCanonicalForm: the arguments yield no key, as they would not for the worker.
    """
    by_task = choice.task, choice.key, choice.args, choice.kwargs, choice.task_id, choice.scope
    if choice.digest is not None:
        if any(given is not None for given in by_task) or choice.depth:
            raise click.UsageError("give HASH or --task with its options, not both")
        return choice.digest if len(choice.digest) == 64 else _by_prefix(runtime, choice.digest)
    if choice.task is None:
        raise click.UsageError("name a record: HASH, or --task with --key, --args and --kwargs, or --id")
    task = task_named(runtime, choice.task)
    policy = runtime.policy_of(task)
    scope, name, digest = _scope(task, policy, choice), policy.name or task.name, _digest(task, policy, choice)
    return keys.effective_key(runtime.namespace, scope, name, choice.depth, digest)


def _digest(task: Idempotent, policy: Policy, choice: Choice) -> str:
    source = keys.KeySource.parse(policy.key)
    if [choice.key is not None, choice.from_arguments, choice.task_id is not None].count(True) > 1:
        raise click.UsageError("give one of --key, --args with --kwargs, or --id")
    if choice.key is not None:
        return source.digest(explicit=choice.key)
    by_id = source.kind == "message"
    if not (choice.task_id is not None if by_id else choice.from_arguments):
        needed = "--id" if by_id else "--args and --kwargs"
        raise click.UsageError(f"{task.name} has the key {key_text(policy)}: give {needed}, or the message's own --key")
    return source.digest(message_id=choice.task_id, call=None if by_id else _call(task, source, choice))


def _call(task: Idempotent, source: keys.KeySource, choice: Choice) -> keys.Bound:
    """The call as the worker binds it; what a key made of named arguments does not name may be left out."""
    args, kwargs = choice.args or [], choice.kwargs or {}
    call = keys.bind(task.run, args, kwargs)
    if not source.names or _fits(call):
        return call
    with suppress(TypeError, ValueError, NameError):  # too many arguments; or annotations that nobody can evaluate
        signature = inspect.signature(task.run)
        given = signature.bind_partial(*args, **kwargs).arguments
        named = (p for p in signature.parameters.values() if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY})
        left_out = {p.name: None for p in named if p.default is p.empty and p.name not in given}
        call = keys.bind(task.run, args, {**kwargs, **left_out})
    if not _fits(call):
        raise click.UsageError(f"{task.name} takes no such arguments: give them as they were published")
    return call


def _fits(call: keys.Bound) -> bool:
    return "*" not in call.full  # where bind() puts what the signature refuses


def _scope(task: Idempotent, policy: Policy, choice: Choice) -> str:
    if choice.scope is not None:
        return choice.scope
    if callable(policy.scope):
        raise click.UsageError(f"{task.name} asks each request for its scope: give --scope")
    return policy.scope or ""


def _by_prefix(runtime: Runtime, prefix: str) -> str:
    records = readable(runtime.store.find(limit=EVERY), [])
    matching = (record.key for record in records if record.key.startswith(prefix))
    found = list(dict.fromkeys(islice(matching, LISTED + 1)))
    if not found:
        raise Refusal(
            "NotFound",
            f"no record whose key begins with {prefix}: it was never claimed here, or it expired "
            "(a record that cannot be read is found by its whole hash alone)",
        )
    if len(found) > 1:
        listed = ", ".join(found[:LISTED]) + (", ..." if len(found) > LISTED else "")
        raise Refusal("Ambiguous", f"several keys begin with {prefix}: {listed}", keys=found[:LISTED])
    return found[0]


def readable(found: Iterable[Record], warnings: list[str]) -> Iterator[Record]:
    """What ``Store.find`` finds; a record that cannot be read, where the store tells of one, becomes a warning."""
    try:
        yield from found
    except RecordCorrupt as error:
        warnings.append(one_line(error))


# --- tasks -----------------------------------------------------------------------------------------------------------


def tasks_of(runtime: Runtime) -> dict[str, Idempotent]:
    """Every idempotent task of the app by name, its task modules imported as a worker does."""
    try:
        runtime.app.loader.import_default_modules()
    except Exception as error:  # the app's own modules may raise anything
        text = f"the app's task modules cannot be imported: {type(error).__name__}: {error}"
        raise Refusal("ImportFailed", text) from error
    return {task.name: task for task in sorted(runtime.tasks(), key=lambda task: str(task.name))}


def task_named(runtime: Runtime, name: str) -> Idempotent:
    """The task of this name, or of this ``Policy.name``; else a usage error that names the nearest."""
    tasks = tasks_of(runtime)
    stable = {runtime.policy_of(task).name: task for task in tasks.values()}
    task = tasks.get(name) or stable.get(name)
    if task is None:
        near = get_close_matches(name, tasks, n=1)
        hint = f"did you mean {near[0]}?" if near else "`celery idem check` lists them"
        raise click.BadParameter(f"{name!r} is no idempotent task of this app: {hint}", param_hint="--task")
    return task


def key_text(policy: Policy) -> str:
    """The key source as the policy spells it."""
    key = policy.key
    if callable(key):
        return f"{getattr(key, '__qualname__', key)}()"
    return key if isinstance(key, str) else ", ".join(key)
