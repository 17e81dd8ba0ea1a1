"""Rules about ``beat_schedule``: a periodic task whose key is the same every time does not run periodically."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from celery_idem.cli_text import duration
from celery_idem.doctor.facts import Facts
from celery_idem.doctor.finding import Finding
from celery_idem.doctor.schedule import all_entries, changes_by_argument, entries, fixed_key, shortest
from celery_idem.doctor.settings import Rule
from celery_idem.doctor.tasks import MARGIN
from celery_idem.task import Idempotent


def _unknown_task(facts: Facts) -> Iterator[Finding]:
    for name, entry in all_entries(facts):
        task = str(entry.get("task"))
        if task not in facts.app.tasks:
            near = get_close_matches(task, facts.app.tasks, n=1, cutoff=0.8)
            meant = f"is {near[0]!r} meant? " if near else ""
            yield Finding(
                "hint",
                "beat-unknown-task",
                name,
                f"{task!r}, which is no task of this app",
                "A worker that does not know a task drops its messages; if another app has it, all is well.",
                f"{meant}name it right, or import its module",
            )


def _same_key(facts: Facts) -> Iterator[Finding]:
    for name, entry, task in entries(facts):
        every, policy = shortest(facts, entry.get("schedule")), facts.runtime.policy_of(task)
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
    if fixed_key(entry):
        return "a fixed idempotency_key", 'take idempotency_key out of "options"'
    kind = facts.key_kind(task)
    if kind == "message":
        return ("a fixed task_id", 'take task_id out of "options"') if options.get("task_id") else None
    if kind == "function" or changes_by_argument(entry):
        return None
    said = f"a key of fixed arguments ({kind})"
    return said, 'Policy(key="message"), or with two beats a function that names the slot, or ttl=0 for a mutex'


def _long_countdown(facts: Facts) -> Iterator[Finding]:
    out = facts.unkept
    for name, entry, task in entries(facts):
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


RULES: tuple[Rule, ...] = (_same_key, _unknown_task, _long_countdown)
