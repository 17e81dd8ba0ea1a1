"""What ``beat_schedule`` sends, how often, and whether its key changes from run to run.

Entries that live in a database (django-celery-beat, redbeat) are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

from celery.beat import BeatLazyFunc
from celery.schedules import crontab, schedule

from celery_idem.doctor.facts import Facts
from celery_idem.publish import KEY_HEADER
from celery_idem.task import Idempotent

LOOKED_AHEAD = 50
"""Times of a crontab that are looked at for the shortest distance."""


def all_entries(facts: Facts) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """How a finding names each entry, and the entry."""
    for name, entry in (facts.conf.beat_schedule or {}).items():
        if isinstance(entry, Mapping):
            yield f"beat_schedule[{name!r}]", entry


def entries(facts: Facts) -> Iterator[tuple[str, Mapping[str, Any], Idempotent]]:
    """Those of idempotent tasks, with the task."""
    tasks = {task.name: task for task in facts.tasks}
    for name, entry in all_entries(facts):
        if entry.get("task") in tasks:
            yield name, entry, tasks[entry["task"]]


def shortest(facts: Facts, given: Any) -> float | None:
    """Seconds between two runs, where they are closest; None where that cannot be known."""
    if isinstance(given, schedule):
        given = given.run_every  # type: ignore[attr-defined]  # the stubs lack it
    if isinstance(given, timedelta):
        given = given.total_seconds()
    if isinstance(given, (int, float)):
        return float(given)
    if not isinstance(given, crontab):
        return None
    times = [datetime.now(timezone.utc)]
    with suppress(Exception):  # a crontab without a next time
        for _ in range(LOOKED_AHEAD):
            last, delta, _now = given.remaining_delta(times[-1], tz=facts.app.timezone)
            times.append(last + delta)
    gaps = [(b - a).total_seconds() for a, b in pairwise(times[1:])]
    return min(gaps, default=None)


def changes_by_argument(entry: Mapping[str, Any]) -> bool:
    """Whether an argument is made anew for each run."""
    values = [*(entry.get("args") or ()), *(entry.get("kwargs") or {}).values()]
    return any(isinstance(value, BeatLazyFunc) for value in values)


def fixed_key(entry: Mapping[str, Any]) -> bool:
    """Whether the entry itself names the key."""
    options = entry.get("options") or {}
    return bool(options.get("idempotency_key") or (options.get("headers") or {}).get(KEY_HEADER))


def needs_its_slot(facts: Facts, task: Idempotent, ttl: float) -> bool:
    """Whether, under this ttl, a run of the task would be a replay of the one before unless its key names the slot."""
    if facts.key_kind(task) == "message":
        return False
    return any(
        0 < (shortest(facts, entry.get("schedule")) or 0) <= ttl and not changes_by_argument(entry)
        for _name, entry, sent in entries(facts)
        if sent is task
    )
