"""What is left above the floor, by function."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from pathlib import Path

from celery_idem.core.engine import new_token
from tests.bench.steps import Step
from tests.campaigns.report import table
from tests.support.operations import key_for

DRIVER = ("/site-packages/redis/", "/site-packages/psycopg", "/encodings/")
"""Whose functions the floor calls too."""
SHOWN = 8


def left_above(server: str, first: Step, replay: Step, times: int) -> str:
    """A table: the functions that take most above the driver, for a first run and for a replay."""
    tokens = [(key_for(f"{server} profiled {number}"), new_token(), new_token()) for number in range(times)]
    firsts = _own_time(first, [(key, token) for key, token, _ in tokens])
    replays = _own_time(replay, [(key, token) for key, _, token in tokens])
    rows = []
    for names in zip(_top(firsts), _top(replays), strict=True):
        cells = zip(names, (firsts, replays), strict=True)
        rows.append([cell for name, of in cells for cell in (name, f"{of[name] / times * 1e6:.1f}")])
    totals = [f"{sum(of.values()) / times * 1e6:.1f}" for of in (firsts, replays)]
    rows.append(["all of it", totals[0], "all of it", totals[1]])
    header = (f"{server}, claim + complete", "µs, profiled", "replay", "µs, profiled")
    said = "What is left above the driver, functions in Python alone; the profiler itself doubles it."
    return f"{said}\n\n{table(header, rows)}"


def _top(of: Counter[str]) -> list[str]:
    return [name for name, _ in of.most_common(SHOWN)]


def _own_time(step: Step, calls: list[tuple[str, str]]) -> Counter[str]:
    """Seconds in each function itself, the driver's left out."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for key, token in calls:
        step(key, token)
    profiler.disable()
    found: Counter[str] = Counter()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, _, function), (_, _, own, _, _) in stats.items():
        # What is written in C has no file: most of it is the driver's or called by it.
        if file != "~" and not any(part in file for part in DRIVER):
            found[f"{Path(file).stem}.{function}"] += own
    return found
