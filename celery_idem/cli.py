"""``celery -A app idem …``: the operator's view of the claim store.

Each command asks the app's own settings, tasks and store, prints text or (``--json``) one document, and ends with 0,
with 1 where it refused or the store gave no answer, or with 2 for wrong usage. Which record is meant is the business
of ``cli_key``, how things are said that of ``cli_text``; docs/reference/cli.md describes both.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options
from celery.signals import worker_ready

from celery_idem import cli_text as text
from celery_idem.app import Runtime, given_settings, runtime_of, tell_if_nothing_is_on
from celery_idem.cli_base import Commands, chosen_app, json_option, say, seen, wants_json
from celery_idem.cli_key import (
    Choice,
    Duration,
    Refusal,
    chosen_key,
    key_text,
    names_a_record,
    option,
    readable,
    task_named,
    tasks_of,
)
from celery_idem.core import holder, keys
from celery_idem.core.codec import Undecodable, decode_exception, decode_value
from celery_idem.core.policy import UNSET, Policy
from celery_idem.core.records import Kind, Outcome, Record, State
from celery_idem.doctor import examine
from celery_idem.doctor.finding import SEVERITIES, merged
from celery_idem.doctor.settings import store_findings
from celery_idem.errors import CeleryIdemError, RecordCorrupt
from celery_idem.stores.base import Store
from celery_idem.task import Idempotent

# The ``celery`` command loads this module whatever it is asked to do: the one place where an app that never imported us
# can be told that its settings do nothing.
worker_ready.connect(tell_if_nothing_is_on, weak=False, dispatch_uid="celery_idem.nothing_is_on")


class Idem(Commands):
    """The group of these commands."""

    def secrets(self, ctx: click.Context) -> list[str]:
        """Of the store's URL and options."""
        given = given_settings(ctx.obj.app.conf)
        url, options = given.get("store"), given.get("store_options")
        return text.secrets_of(url if isinstance(url, str) else "", options if isinstance(options, Mapping) else {})


@click.group(cls=Idem)
@click.pass_context
@handle_preload_options
def idem(_ctx: click.Context, **_preload: Any) -> None:
    """Look after the records of this app's idempotent tasks.

    Exit codes: 0 done, 1 refused, not found or no answer from the store, 2 wrong usage.
    """


_command = functools.partial(idem.command, cls=CeleryCommand)


def _runtime(ctx: click.Context) -> Runtime:
    runtime = runtime_of(chosen_app(ctx))
    ctx.call_on_close(runtime.close)
    return runtime


def _clock(store: Store) -> text.Clock:
    now = getattr(store, "now", None)
    return text.Clock(float(now()), "store") if callable(now) else text.Clock(time.time(), "host")


def _not_found(key: str) -> Refusal:
    return Refusal("NotFound", f"no record {key}: it was never claimed here, or it expired", key=key)


# --- init and check --------------------------------------------------------------------------------------------------


@_command("init")
@json_option
@click.pass_context
def init(ctx: click.Context) -> None:
    """Make the tables and indexes the store needs.

    Doing it again changes nothing.
    """
    runtime = _runtime(ctx)
    store, url = runtime.store, text.shown_url(runtime.store_url or "")
    store.create_schema()
    needed = store.name not in {"memory", "redis"}
    said = "the schema is in place" if needed else "needs no schema"
    say(ctx, f"{store.name} store {url}: {said}", {"store": store.name, "url": url, "schema": needed})


@_command("check")
@json_option
@click.pass_context
def check(ctx: click.Context) -> None:
    """Check settings, idempotent tasks and the store.

    Shows the settings and the tasks, and checks what a worker checks when it starts.
    Warnings end with exit code 0; what would keep a worker from starting, or a store that gives no answer, with 1.
    """
    runtime = _runtime(ctx)
    settings, tasks = _settings(runtime), tasks_of(runtime)
    shape: dict[str, Any] = {
        "settings": settings,
        "tasks": {name: _policy(runtime.policy_of(task)) for name, task in tasks.items()},
        "left_out": [text.printable(name) for name in runtime.left_out()],
        "warnings": [],
    }
    parts = ["settings", text.aligned((f"  {name}", _shown(value)) for name, value in settings.items())]
    lines = [(f"  {name}", _policy_line(task, runtime)) for name, task in tasks.items()]
    parts += ["tasks", text.aligned(lines) or "  none: import the modules that define them, or name them in `imports`"]
    if shape["left_out"]:
        parts += ["left out by idempotency_tasks", *(f"  {name}" for name in shape["left_out"])]
    try:
        shape["warnings"] = [text.printable(warning) for warning in runtime.check()]
    except CeleryIdemError as error:
        if not wants_json(ctx):
            click.echo("\n".join(parts))
        raise Refusal(type(error).__name__, str(error), **shape) from error
    parts += ["warnings", *(f"  {warning}" for warning in shape["warnings"] or ["none"])]
    say(ctx, "\n".join(parts), shape)


def _settings(runtime: Runtime) -> dict[str, Any]:
    shown = {name: _plain(value) for name, value in runtime.settings.values.items()}
    url, options = runtime.store_url, runtime.settings["store_options"]
    shown["store"] = None if url is None else text.shown_url(url)
    shown["store_options"] = sorted(map(str, options))
    shown["namespace"] = runtime.namespace
    return shown


def _policy(policy: Policy) -> dict[str, Any]:
    return {field.name: _plain(getattr(policy, field.name)) for field in fields(policy)}


def _policy_line(task: Idempotent, runtime: Runtime) -> str:
    """The key source, and whatever else the task or its glob says that the settings do not."""
    policy = runtime.policy_of(task)
    own = task.idempotency_policy.over(runtime.patterns.of(task.name) or Policy())
    said = [f"key {key_text(policy)}"] + ([f"name {own.name}"] if own.name else [])
    for name, default in runtime.settings.values.items():
        value = getattr(own, name, UNSET)
        if name != "key" and value is not UNSET and value != default:
            said.append(f"{name} {_shown(_plain(value))}")
    return "; ".join(said)


def _plain(value: Any) -> Any:
    """A setting's value as JSON has it; what is code by its name."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else text.printable(value)


# --- doctor ----------------------------------------------------------------------------------------------------------


@_command("doctor")
@option("--store", "asks_store", is_flag=True, help="Ask the store as well, as `check` does.")
@json_option
@click.pass_context
def doctor(ctx: click.Context, asks_store: bool) -> None:
    """Find settings that do not go together.

    Looks at Celery's settings and at ours, at every idempotent task and at the beat schedule, and says what to change.
    Exit code 1 where there is a fault. Opens no connection, unless --store is given.
    """
    runtime = _runtime(ctx)
    tasks_of(runtime)
    found = examine(runtime.app)
    if asks_store:
        found = merged([*found, *store_findings(runtime, found)])
    counts = {f"{severity}s": sum(one.severity == severity for one in found) for severity in SEVERITIES}
    said = [text.finding_text(one) for one in found]
    counted = ", ".join(f"{n} {word if n != 1 else word[:-1]}" for word, n in counts.items() if n)
    say(ctx, "\n\n".join([*said, counted or "nothing found"]), {**counts, "findings": [one.shape() for one in found]})
    ctx.exit(1 if counts["faults"] else 0)


# --- show and list ---------------------------------------------------------------------------------------------------


@_command("show")
@names_a_record
@option("--value", "wants_value", is_flag=True, help="Print the stored result or exception too.")
@json_option
@click.pass_context
def show(ctx: click.Context, /, wants_value: bool, **chosen: Any) -> None:
    """Show one record.

    Tells who holds it, how it ended, and what it remembers of each message. HASH is its key, or at least the first
    8 characters of it.
    """
    runtime = _runtime(ctx)
    key = chosen_key(runtime, Choice(**chosen))
    record = runtime.store.get(key)
    if record is None:
        raise _not_found(key)
    clock = _clock(runtime.store)
    value: dict[str, Any] = {}
    if wants_value and record.outcome is not None:
        value = _stored_value(runtime, record.outcome)
    shown = None
    if value:
        shown = f"not readable: {value['value_error']}" if value.get("value_error") else json.dumps(value["value"])
    shape = {**seen(clock), "record": text.record_shape(record, clock, **value)}
    say(ctx, text.record_text(record, clock, shown), shape)


def _stored_value(runtime: Runtime, outcome: Outcome) -> dict[str, Any]:
    conf = runtime.app.conf
    accept = conf.result_accept_content or conf.accept_content
    if outcome.encoded is None:
        return {"value": None, "value_error": "no value was kept"}
    try:
        if outcome.kind is Kind.FAILURE:
            error = decode_exception(outcome.encoded, accept)
            return {"value": {"type": _plain(type(error)), "message": str(error)}, "value_error": None}
        return {"value": _sayable(decode_value(outcome.encoded, accept)), "value_error": None}
    except Undecodable as error:
        return {"value": None, "value_error": text.one_line(error)}


def _sayable(value: Any) -> Any:
    """The value as JSON has it, or its ``repr``."""
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=repr))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


@_command("list")
@option("--task", metavar="NAME", help="Only this task's.")
@option("--scope", metavar="TEXT", help="Only this tenant's.")
@option("--state", type=click.Choice([s.value.lower() for s in State], case_sensitive=False), help="Only these.")
@option("--older-than", type=Duration(), metavar="DURATION", help="Only those claimed longer ago: 90, 10m, 2h, 1d.")
@option("--limit", type=click.IntRange(min=1), default=100, help="At most so many [100].")
@json_option
@click.pass_context
def list_(
    ctx: click.Context, task: str | None, scope: str | None, state: str | None, older_than: float | None, limit: int
) -> None:
    """List records, the longest ago claimed first."""
    runtime = _runtime(ctx)
    store = runtime.store
    found = store.find(
        task=None if task is None else _stable_name(runtime, task),
        scope=None if scope is None else keys.scope_hash(scope),
        state=None if state is None else State(state.upper()),
        older_than=older_than,
        limit=limit + 1,
    )
    warnings: list[str] = []
    records = list(readable(found, warnings))
    more, records = len(records) > limit, sorted(records[:limit], key=lambda record: record.claimed_at)
    clock = _clock(store)
    counted = f"{len(records)} record{'' if len(records) == 1 else 's'}" if records else "no record"
    lines = [text.table(records, clock)] if records else []
    lines += [f"{counted}{', and more: raise --limit' if more else ''}", *(f"warning: {told}" for told in warnings)]
    shapes = [text.record_shape(record, clock) for record in records]
    say(ctx, "\n".join(lines), {**seen(clock), "records": shapes, "more": more, "warnings": warnings})


def _stable_name(runtime: Runtime, name: str) -> str:
    """What records call this task; a task that is gone from the app is asked for as it was called."""
    try:
        task = task_named(runtime, name)
    except click.BadParameter:
        return name
    return str(runtime.policy_of(task).name or task.name)


# --- forget and purge ------------------------------------------------------------------------------------------------


@_command("forget")
@names_a_record
@option("--yes", is_flag=True, help="Do not ask.")
@option("--force", is_flag=True, help="Even while a living process holds it.")
@json_option
@click.pass_context
def forget(ctx: click.Context, /, yes: bool, force: bool, **chosen: Any) -> None:
    """Forget a record: the next message of its key runs.

    HASH is its key, or at least the first 8 characters of it. A record that cannot be read needs all 64.
    """
    runtime = _runtime(ctx)
    store, as_json = runtime.store, wants_json(ctx)
    key, clock = chosen_key(runtime, Choice(**chosen)), _clock(store)
    record, told = _to_forget(store, key, clock)
    held = None if record is None else _held(record, clock)
    if held and not force:
        raise Refusal("Held", f"{held}: wait, or use --force", key=key)
    if not (yes and as_json):
        click.echo(told, err=as_json)
    if not (yes or _confirmed(as_json)):
        raise Refusal("NotConfirmed", "nothing was forgotten", key=key)
    if not store.forget(key, None if record is None else record.fence):
        why = "changed meanwhile" if record else "can be read now, is gone, or was written by a newer release"
        raise Refusal("Changed", f"record {key} {why}, nothing was forgotten: look again", key=key)
    then = _what_now(runtime, forced=held is not None)
    was = None if record is None else text.record_shape(record, clock)
    say(ctx, f"forgotten: {then}", {"forgotten": True, "key": key, "was": was, "then": then})


def _to_forget(store: Store, key: str, clock: text.Clock) -> tuple[Record | None, str]:
    """The record and the line that tells it; None for one that cannot be read."""
    try:
        record = store.get(key)
    except RecordCorrupt as error:
        return None, text.one_line(error)
    if record is None:
        raise _not_found(key)
    if text.is_newer(record):
        raise Refusal("Newer", f"record {key} was written by a newer release: forget it with that one", key=key)
    return record, text.record_line(record, clock)


def _held(record: Record, clock: text.Clock) -> str | None:
    """Who is at work under this record right now, if anybody may be."""
    if record.state is State.CLAIMED:
        if record.lease_expires_at > clock.now and not holder.provably_dead(record.holder):
            who, until = holder.describe(record.holder), clock.told(record.lease_expires_at)
            return f"{who} holds it and its body may be running; its lease ends {until}"
        return None
    for message_id, note in record.notes.items():
        right = note.continuing
        if right is not None and right.lease_expires_at > clock.now and not holder.provably_dead(right.holder):
            who, until = holder.describe(right.holder), clock.told(right.lease_expires_at)
            return f"{who} may be publishing what follows message {text.printable(message_id)}; its lease ends {until}"
    return None


def _confirmed(as_json: bool) -> bool:
    try:
        return click.confirm("Forget it?", err=as_json)
    except click.Abort:  # no answer can be had
        click.echo(err=True)
        return False


def _what_now(runtime: Runtime, *, forced: bool) -> str:
    then = "the next message of this key runs; copies of a failed attempt do not"
    if forced:
        then += "; a body that is still running is not stopped before its next renewal, and its completion is shut out"
    if runtime.settings["local_cache"]:
        then += "; a worker's local cache may replay the old result for up to 60 s"
    return then


@_command("purge")
@option("--limit", type=click.IntRange(min=1), default=1000, help="Delete at most so many at a time [1000].")
@option("--all", "every", is_flag=True, help="Go on until none is left.")
@json_option
@click.pass_context
def purge(ctx: click.Context, limit: int, every: bool) -> None:
    """Delete expired records.

    Workers do so too, a few hundred a minute, and Redis by itself.
    """
    store = _runtime(ctx).store
    purged = last = store.purge(limit)
    while every and last:
        last = store.purge(limit)
        purged += last
    said = f"{purged} expired record{'' if purged == 1 else 's'} deleted"
    if store.name == "redis":
        said += ": Redis drops them by itself"
    elif last >= limit:
        said += ", and there may be more: use --all"
    say(ctx, said, {"purged": purged, "more": last >= limit})
