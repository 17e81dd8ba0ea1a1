"""``make simulate``: all schedules within a bound, then random ones, then the rules taken out; a table of each.

make simulate                                             two minutes
make simulate ARGS="--seconds 600 --seed 1000"            longer, other seeds
make simulate ARGS="--scenario 'a link' --replay 17"      one seed once more, with its trace
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field

from tests.campaigns.evidence import conclude
from tests.campaigns.report import progress, table
from tests.simulate.explore import Found, Walk, at_random, replay, shrunk
from tests.simulate.house import House, simulated
from tests.simulate.reverted import REVERTED, Reverted
from tests.simulate.scenarios import SCENARIOS, Scenario
from tests.simulate.world import World

SHOWN = 5
"""Failing schedules that are made small and printed."""
ENOUGH = 20.0
"""Seconds one rule that was taken out may stay undetected."""


class _Budget:
    """So many seconds of an idle machine: the processor's, or three times as many on the clock of a busy one."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._cpu, self._wall = seconds, time.process_time(), time.monotonic()

    @property
    def left(self) -> float:
        """Seconds."""
        return self._seconds - max(time.process_time() - self._cpu, (time.monotonic() - self._wall) / 3)


@dataclass
class Tally:
    """What was seen so far."""

    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    bodies: int = 0
    allowed: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    def add(self, part: str, scenario: Scenario, world: World, found: Found | None) -> None:
        """One run more."""
        self.runs[(part, scenario.name)] += 1
        self.points[part] += world.points
        self.faults += world.faults
        self.seen += world.seen
        self.bodies += len(world.ledger.runs)
        self.allowed += world.ledger.allowed
        if found is not None:
            self.broken[scenario.name] += 1
            if all(found.rules - earlier.rules for earlier in self.found) or not self.found:
                self.found.append(found)


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    warnings.simplefilter("ignore")  # Celery's, of exceptions outside of bodies
    chosen = [s for s in SCENARIOS if options.scenario in (None, s.name)]
    with simulated() as house:
        if options.replay is not None:
            return _replay(house, chosen, options.replay)
        return _campaign(house, chosen, options)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="about how long, on an idle machine")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=sys.maxsize, help="how many at most")
    parser.add_argument("--scenario", choices=[s.name for s in SCENARIOS], help="only this one")
    parser.add_argument("--replay", help="a seed, or a list of deviations as it was printed")
    return parser.parse_args(argv)


def _replay(house: House, chosen: list[Scenario], what: str) -> int:
    if what.isdigit():
        scenario = chosen[int(what) % len(chosen)]
        world, found = at_random(house, scenario, int(what))
    else:
        if len(chosen) != 1:
            raise SystemExit("--replay of deviations needs the --scenario they belong to")
        scenario = chosen[0]
        world, found = replay(house, scenario, ast.literal_eval(what))
    print(f"{scenario.name}\n" + "\n".join(world.trace))
    if found is not None and found.seed is not None:
        print(f"\nmade smaller: {list(shrunk(house, found).deviations)}")
    return 1 if found else 0


def _campaign(house: House, chosen: list[Scenario], options: argparse.Namespace) -> int:
    spent, tally = _Budget(options.seconds), Tally()
    walks = [Walk(scenario, 1) for scenario in chosen]
    for walk in walks:
        _walked(house, walk, tally, "one", None)
    progress(f"{sum(walk.runs for walk in walks)} schedules with one deviation")
    rules, missed = _reverted(house)
    deeper = [Walk(scenario, 2) for scenario in chosen if scenario.bound > 1]
    for walk in deeper:
        _walked(house, walk, tally, "two", _Budget(spent.left / 2 / len(deeper)))
        progress(f"{walk.scenario.name}: {walk.runs} schedules with two deviations")
    last = options.seed
    while last < options.seed + options.seeds and spent.left > 0:
        scenario = chosen[last % len(chosen)]
        tally.add("random", scenario, *at_random(house, scenario, last))
        last += 1
    progress(f"{last - options.seed} random schedules")
    broken = [_said(house, failing) for failing in tally.found[:SHOWN]] + missed
    left = {walk.scenario.name for walk in deeper if walk.left}
    printed = _printed(chosen, left, tally, rules, range(options.seed, last))
    return conclude("simulate", "Simulation of the real code", printed, broken)


def _walked(house: House, walk: Walk, tally: Tally, part: str, budget: _Budget | None) -> None:
    while walk.left and (budget is None or budget.left > 0):
        tally.add(part, walk.scenario, *walk.step(house))


def _said(house: House, failing: Found) -> str:
    small = shrunk(house, failing)
    rule, text = small.lines[0]
    replayed = f'ARGS="--scenario \'{small.scenario.name}\' --replay \\"{list(small.deviations)}\\""'
    seed = "" if failing.seed is None else f"seed {failing.seed}, "
    return f"{rule}: {text} ({small.scenario.name}, {seed}again with make simulate {replayed})"


# --- rules taken out --------------------------------------------------------------------------------------------------


def _reverted(house: House) -> tuple[list[list[str | int]], list[str]]:
    rows: list[list[str | int]] = []
    missed = []
    for rule in REVERTED:
        runs, caught = without(house, rule)
        if caught is None:
            missed.append(f"taken out, and nothing was noticed: {rule.rule}")
            rows.append([rule.rule, "not caught", runs, ""])
        else:
            rows.append([rule.rule, caught.lines[0][0], runs, _in_words(caught)])
    progress(f"{len(rows) - len(missed)} of {len(rows)} rules taken out were noticed")
    return rows, missed


def without(house: House, rule: Reverted, seconds: float = ENOUGH) -> tuple[int, Found | None]:
    """How many schedules it took to notice that the rule is gone, and one, made smaller, that shows it."""
    named = [scenario for name in rule.scenarios for scenario in SCENARIOS if scenario.name == name]
    budget, runs = _Budget(seconds), 0
    with rule.gone():
        for bound in (1, 2):
            for scenario in named:
                walk = Walk(scenario, bound, rule.kinds, random.Random(1))
                while walk.left and budget.left > 0:
                    _, found = walk.step(house)
                    runs += 1
                    if found is not None:
                        return runs, shrunk(house, found)
    return runs, None


def _in_words(found: Found) -> str:
    what = ", ".join(f"{label} at {place}" for place, label in found.deviations)
    return f"{found.scenario.name}: {what or 'no deviation'}"


# --- what is printed --------------------------------------------------------------------------------------------------


DEVIATION = (
    "A deviation is a decision of the scheduler that differs from the default: another worker first, a crash, a worker "
    "frozen longer than its lease, a call refused or its reply lost, a second copy of a message, a store that is down."
)


def _printed(chosen: list[Scenario], left: set[str], tally: Tally, rules: list[list[str | int]], seeds: range) -> str:
    rows: list[list[str | int]] = []
    for name in (scenario.name for scenario in chosen):
        one, two, drawn = (tally.runs[(part, name)] for part in ("one", "two", "random"))
        rows.append(
            [name, one, f"{two}{' (not all)' if name in left else ''}" if two else "-", drawn, tally.broken[name]]
        )
    totals = [sum(tally.runs[(part, s.name)] for s in chosen) for part in ("one", "two", "random")]
    rows.append(["all", *totals, sum(tally.broken.values())])
    header = ["scenario", "all with at most one deviation", "with at most two", "random", "broken"]
    faults = [[name, count] for name, count in sorted(tally.faults.items()) if not name.startswith("to ")]
    reached = ", ".join(f"{name} {count}" for name, count in sorted(tally.seen.items()))
    scale = f"{sum(tally.points.values())} points at which the scheduler decided; {tally.bodies} bodies ran."
    parts = [
        DEVIATION,
        table(header, rows),
        table(["fault", "times"], faults),
        f"Seeds {seeds.start} to {seeds.stop - 1}. {scale}" if seeds else scale,
        "No breach, for a fault explains it and the documentation says it:",
        table(["allowed", "times"], [[name, count] for name, count in sorted(tally.allowed.items())]),
        f"Reached: {reached}.",
        "Rules taken out of the product, and what the simulation said of it:",
        table(["rule", "broken promise", "schedules", "smallest schedule"], rules),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
