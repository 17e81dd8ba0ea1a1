"""The tables of ``make chaos``, and which of its promises a run broke."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.campaigns.report import table
from tests.chaos.run import Run
from tests.chaos.storm import KILLS

DONE = ("system", "seconds", "messages", "bodies", "kills", "stops", "restarts", "cuts", "partitions", "clock steps")
FOUND = ("system", "lost", "lost by the broker's client", "effects doubled, explained", "unexplained", "overlaps")
MORE = ("completed twice", "old holder's effects accepted", "refused", "continuations missing", "doubled")


def tables(runs: Sequence[Run], *, left_out: str) -> str:
    """What was done, and what came of it."""
    parts = [table([*DONE, "with work in flight", "idle", "bodies hit"], [_done(run) for run in runs])]
    parts.append(table([*FOUND, *MORE], [_found(run) for run in runs]))
    if left_out:
        parts.append(f"**No network was partitioned in this run: {left_out}.**")
    return "\n\n".join(parts)


def _done(run: Run) -> list[Any]:
    verdict, of = run.verdict, run.verdict.faults
    cuts = of["store cut before"] + of["store cut after"] + of["broker cut"]
    kills = sum(of[name] for name in KILLS)
    counts = [kills, of["stop"], of["store restart"] + of["broker restart"], cuts, of["partition"], of["clock step"]]
    row = [run.system.title, round(run.plan.seconds), verdict.messages, verdict.bodies, *counts]
    return [*row, verdict.hit, verdict.idle, verdict.struck]


def _found(run: Run) -> list[Any]:
    verdict, fenced = run.verdict, run.system.idempotent
    effects = [verdict.explained, len(verdict.unexplained)]
    old = [len(verdict.stale), verdict.refused] if fenced else ["no fence", "no fence"]
    rest = [len(verdict.missing), len(verdict.doubled)]
    lost = [len(verdict.lost), len(verdict.dropped)]
    return [run.system.title, *lost, *effects, len(verdict.overlaps), len(verdict.completions), *old, *rest]


def promises(runs: Sequence[Run]) -> list[str]:
    """What celery_idem broke; the bare systems promise nothing."""
    broken = [f"{run.system.name}: {line}" for run in runs if run.system.idempotent for line in run.verdict.broken]
    idle = [run for run in runs if run.verdict.hit < run.verdict.idle]
    return broken + [f"{run.system.name}: {run.verdict.idle} faults found no work in flight" for run in idle]
