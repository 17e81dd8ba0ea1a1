"""``make chaos``: the same load and the same storm on celery_idem and on bare Celery, and what each made of it."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from tests.campaigns.evidence import conclude
from tests.campaigns.report import progress
from tests.chaos.house import SYSTEMS, Steady
from tests.chaos.netns import unavailable
from tests.chaos.report import promises, tables, weak_storms
from tests.chaos.run import Plan, Run, play

FULL = 300.0
"""Seconds of storm from which on a weak one is a fault: what is written as evidence is no shorter."""


def main(argv: Sequence[str] | None = None) -> int:
    """Play every system, print the tables, and say which promise was broken; 1 too for a long storm that hit little."""
    names = [system.name for system in SYSTEMS]
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=FULL, help="of storm over each pair of store and broker (300)")
    parser.add_argument("--bare-seconds", type=float, help="the storm over each bare system (a fifth of the other)")
    parser.add_argument("--seed", type=int, default=1, help="load and faults are drawn from it (1)")
    parser.add_argument("--only", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument("--rate", type=float, default=3.0, help="operations published a second (3)")
    parser.add_argument("--every", type=float, default=2.4, help="seconds from fault to fault (2.4)")
    parser.add_argument("--keep", help="a directory to copy the histories to")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a namespace outlives a process that does not clean up
    left_out = unavailable()
    if left_out:
        progress(f"NO PARTITIONS IN THIS RUN: {left_out}")
    runs: list[Run] = []
    with Steady() as steady:
        for system in [system for system in SYSTEMS if system.name in given.only.split(",")]:
            bare = given.bare_seconds or given.seconds / 5
            seconds = given.seconds if system.idempotent else bare
            plan = Plan(given.seed, seconds, given.rate, given.every, partitions=not left_out, keep=given.keep)
            progress(f"{system.title}: {seconds:g} s")
            runs.append(play(system, steady, plan))
            progress(f"{system.name}: {'; '.join(runs[-1].verdict.broken[:8]) or 'every rule held'}")
    weak = weak_storms(runs)
    printed = "\n\n".join([tables(runs, left_out=left_out), *weak])
    status = conclude("chaos", f"Chaos, seed {given.seed}", printed, promises(runs))
    return 1 if weak and given.seconds >= FULL else status


if __name__ == "__main__":
    sys.exit(main())
