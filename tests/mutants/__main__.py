"""Change one thing in the mechanism, run the quick tests of that file, and see whether one of them fails; many times.

What no test noticed has survived. Each survivor is judged in ``judged.txt``; those that are not are listed.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.report import progress
from tests.mutants.judged import PAGE, judgement, read
from tests.mutants.making import drawn, mutants_of
from tests.mutants.mutant import Mutant, Name
from tests.mutants.report import Report, conclude
from tests.mutants.running import Fate, Laboratory, laboratory
from tests.mutants.session import Session
from tests.mutants.targets import TARGETS, Target

PATIENCE = 10.0, 3.0
"""Seconds, and times what the tests take on the file as it is: longer than that, and a mutant hangs."""


@dataclass(frozen=True)
class Plan:
    """What a run was asked for."""

    whole: bool
    count: int | None
    seed: int
    session: Session
    judged: dict[Name, str]

    def of(self, target: Target, mutants: Sequence[Mutant]) -> list[Mutant]:
        """The mutants of this file to try, and those that the session tried."""
        order = drawn(mutants, self.seed)
        count = len(order) if self.whole else self.count or target.drawn
        return order[:count] + [mutant for mutant in order[count:] if self.session.known(mutant) is not None]

    def settles(self, mutant: Mutant, fate: Fate) -> bool:
        """Whether a fate of an earlier run still holds: a survivor may meet a new test."""
        return fate is not Fate.SURVIVED or judgement(mutant, self.judged) is not None


def experiment(place: Laboratory, target: Target, plan: Plan, until: float) -> Report:
    """Run the target's tests on its mutants, or on those drawn of them; none is begun after ``until``."""
    mutants = mutants_of(place.tree, target.file)
    chosen = plan.of(target, mutants)
    report = Report(target, made=len(mutants))
    fates = {mutant: plan.session.known(mutant) for mutant in chosen}
    settled = {mutant for mutant, fate in fates.items() if fate is not None and plan.settles(mutant, fate)}
    unknown = sorted((mutant for mutant in chosen if mutant not in settled), key=lambda each: fates[each] is None)
    status, took = place.run(target.tests) if unknown and time.monotonic() < until else (0, 0.0)
    if status != 0:
        report.sound = False
        progress(f"{target.file}: its tests fail without a mutant\n{place.output.read_text()[-2000:]}")
        return report
    progress(f"{target.file}: {len(unknown)} of {len(mutants)} mutants, its tests take {took:.1f} s")
    for number, mutant in enumerate(unknown, 1):
        if time.monotonic() > until:
            break
        fates[mutant] = fate = place.fate(mutant, target.tests, PATIENCE[0] + PATIENCE[1] * took)
        plan.session.note(mutant, fate)
        if fate is Fate.SURVIVED:
            progress(f"survived: {mutant}")
        if number % 20 == 0:
            progress(f"{target.file}: {number} of {len(unknown)}")
    for mutant, known in fates.items():
        if known is not None:
            report.add(mutant, known, plan.judged)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants and print the table; exit status 1 at an unjudged survivor of a whole run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="every mutant of every file: hours")
    parser.add_argument("--only", default="", help="files whose path contains one of these words, comma between")
    parser.add_argument("--count", type=int, help="mutants of each file, instead of the number each file has")
    parser.add_argument("--minutes", type=float, default=25, help="a busy machine gets less far; not with --whole")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--session", type=Path, help="a file that remembers who died, for a run in several goes")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its servers and its copy of the tree go with it
    words = arguments.only.split(",")
    session = Session(arguments.session)
    plan = Plan(arguments.whole, arguments.count, arguments.seed, session, read(PAGE.read_text()))
    chosen = [target for target in TARGETS if any(word in target.file for word in words)]
    began, share, reports = time.monotonic(), 0, []
    with laboratory() as place:
        for target in chosen:
            share += target.drawn
            part = share / sum(each.drawn for each in chosen)
            until = math.inf if arguments.whole else began + 60 * arguments.minutes * part
            reports.append(experiment(place, target, plan, until))
    return conclude(reports, plan.judged, whole=plan.whole, seed=plan.seed, kept=session.kept)


if __name__ == "__main__":
    sys.exit(main())
