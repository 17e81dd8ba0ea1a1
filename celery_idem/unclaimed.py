"""Tasks that look as if they were switched on, and whose duplicates run all the same.

Each is a word or a class that Celery takes without complaint, so nothing else would say so. ``celery idem check`` and
a worker's start warn of them, ``celery idem doctor`` finds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import Task
from kombu.utils.imports import symbol_by_name

from celery_idem.core.keys import KeySource
from celery_idem.errors import ConfigurationError
from celery_idem.optin import SETTING, annotation
from celery_idem.task import Idempotent

if TYPE_CHECKING:
    from celery_idem.app import Runtime


class Unclaimed(NamedTuple):
    """One such task: what was found, what comes of it, and the line that mends it."""

    task: str
    found: str
    why: str
    change: str

    def __str__(self) -> str:
        return f"{self.task} has {self.found}: {self.change}"


def unclaimed(runtime: Runtime) -> Iterator[Unclaimed]:
    """Every such task of the app, by name."""
    for name, task in sorted(runtime.app.tasks.items()):
        found = _without_base(name, task)
        if found is None and isinstance(task, Idempotent) and runtime.protects(task):
            found = _own_strategy(name, task) or _coroutine(name, task)
        if found is not None:
            yield found


def _without_base(name: str, task: Any) -> Unclaimed | None:
    """``key=`` is a short word that only ``IdempotentTask`` reads; anything else that has one may mean its own."""
    key = vars(type(task)).get("key")
    if getattr(task, "always_idempotent", False) or not isinstance(key, (str, list, tuple)):
        return None
    try:
        KeySource.parse(key).check(task.run)
    except ConfigurationError:
        return None
    why = "The word is read by IdempotentTask alone, so this task has another key or none, and duplicates run."
    return Unclaimed(
        name, f"key={key!r} without the base class", why, "base=IdempotentTask, or idempotency=Policy(key=…)"
    )


def _own_strategy(name: str, task: Idempotent) -> Unclaimed | None:
    """As celery-batches has it: messages are collected and run together, and none of them asks for its key."""
    if task.Strategy == Task.Strategy:
        return None
    why = "Its messages do not come one by one through Celery's tracer, so none of them is claimed and duplicates run."
    change = f'idempotency_tasks = {{{name!r}: False, "*": True}}, and let the body itself know duplicates'
    return Unclaimed(name, "a Strategy of its own", why, change)


def _coroutine(name: str, task: Idempotent) -> Unclaimed | None:
    """Fine where a ``__call__`` of the application's runs the coroutine to its end."""
    called = any("__call__" in vars(base) for base in type(task).__mro__ if base not in {Task, Idempotent, object})
    body = getattr(task, "_orig_run", task.run)  # what autoretry_for put in front is a plain function
    if called or not inspect.iscoroutinefunction(body):
        return None
    why = "A coroutine is not run by calling it, so there is nothing whose end could be recorded: each message fails."
    return Unclaimed(name, "an async body", why, "a plain function that calls asyncio.run(…)")


def check_annotations(conf: Any) -> None:
    """``ConfigurationError`` where ``task_annotations`` names something of ours that is not there.

    Celery passes over it in silence, and no task is switched on.
    """
    given = conf.task_annotations or ()
    for entry in given if isinstance(given, (list, tuple)) else (given,):
        if not isinstance(entry, str) or entry.partition(":")[0].partition(".")[0] != "celery_idem":
            continue
        try:
            meant = symbol_by_name(entry) is annotation
        except (AttributeError, ImportError, ValueError):
            meant = False
        if not meant:
            raise ConfigurationError(f"task_annotations names {entry!r}, which switches nothing on: write {SETTING}")


__all__ = ["Unclaimed", "check_annotations", "unclaimed"]
