"""Rules about ``beat_schedule``: a periodic task whose key is the same every time does not run periodically.

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

from celery_idem.cli_text import duration
from celery_idem.doctor.facts import Facts
from celery_idem.doctor.finding import Finding
from celery_idem.doctor.settings import Rule
from celery_idem.doctor.tasks import MARGIN
from celery_idem.publish import KEY_HEADER
from celery_idem.task import Idempotent

LOOKED_AHEAD = 50
"""Times of a crontab that are looked at for the shortest distance."""


def _entries(facts: Facts) -> Iterator[tuple[str, Mapping[str, Any], Idempotent]]:
    """Name and entry of what beat sends to an idempotent task."""
    tasks = {task.name: task for task in facts.tasks}
    for name, entry in (facts.conf.beat_schedule or {}).items():
        if isinstance(entry, Mapping) and entry.get("task") in tasks:
            yield f"beat_schedule[{name!r}]", entry, tasks[entry["task"]]


def _same_key(facts: Facts) -> Iterator[Finding]:
    for name, entry, task in _entries(facts):
        every, policy = _shortest(facts, entry.get("schedule")), facts.runtime.policy_of(task)
        same = _what_never_changes(facts, entry, task)
        if same and every is not None and 0 < every <= policy.ttl:
            said, change = same
            yield Finding(
                "fault",
                "beat-key-never-changes",
                name,
                f"every {duration(every)}, {said}, ttl {duration(policy.ttl)}",
                "Its key is the same each time, so within the ttl every run after the first is a replay, and the body "
                "does not run.",
                change,
                (str(task.name),),
            )


def _what_never_changes(facts: Facts, entry: Mapping[str, Any], task: Idempotent) -> tuple[str, str] | None:
    """What makes the same key each time and the line that changes it; None where it changes or nobody knows."""
    options = entry.get("options") or {}
    if options.get("idempotency_key") or (options.get("headers") or {}).get(KEY_HEADER):
        return "a fixed idempotency_key", 'take idempotency_key out of "options"'
    kind = facts.key_kind(task)
    if kind == "message":
        return ("a fixed task_id", 'take task_id out of "options"') if options.get("task_id") else None
    values = [*(entry.get("args") or ()), *(entry.get("kwargs") or {}).values()]
    if kind == "function" or any(isinstance(value, BeatLazyFunc) for value in values):
        return None
    said = f"a key of fixed arguments ({kind})"
    return said, 'Policy(key="message"), or with two beats a function that names the slot, or ttl=0 for a mutex'


def _shortest(facts: Facts, given: Any) -> float | None:
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


def _long_countdown(facts: Facts) -> Iterator[Finding]:
    out = facts.unkept
    for name, entry, task in _entries(facts):
        countdown = (entry.get("options") or {}).get("countdown")
        if out and isinstance(countdown, (int, float)) and countdown > out:
            change = f'broker_transport_options["visibility_timeout"] = {int(countdown) + MARGIN}'
            yield Finding(
                "risk",
                "countdown-longer-than-visibility",
                name,
                f"countdown {duration(countdown)}, visibility timeout {duration(out)}",
                "It waits for its time in a worker, and after the timeout in every worker.",
                "idempotency_keep_visible = True" if facts.broker == "redis" else change,
                (str(task.name),),
            )


RULES: tuple[Rule, ...] = (_same_key, _long_countdown)
