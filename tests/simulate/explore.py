"""Ways through the schedules: all that differ from the default in a few decisions, random ones, and one again.

A decision is known by its place: the worker, how many points it has passed, and what it was about to do. So a list of
places and choices is a whole schedule, and one that loses some of them is still one: that is how a failing schedule is
made smaller.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.simulate.house import House
from tests.simulate.scenarios import Scenario, run
from tests.simulate.world import World

Deviation = tuple[str, str]
"""A place, and what is chosen there."""
FAULTS = {"crash", "exit", "vanish", "freeze", "copy", "refused", "unanswered", "cut off", "outage", "long outage"}


class Scripted:
    """The default, but for these deviations."""

    def __init__(self, deviations: Sequence[Deviation] = ()) -> None:
        self.wanted = dict(deviations)
        self.offered: list[tuple[str, tuple[str, ...]]] = []

    def choose(self, place: str, options: Sequence[str]) -> str:
        self.offered.append((place, tuple(options)))
        wanted = self.wanted.get(place)
        return wanted if wanted in options else options[0]


class Random:
    """Choices drawn with a seed: now and then another worker first, and a few faults."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._switch = self._dice.choice((0.02, 0.1, 0.3))
        self._fault = self._dice.choice((0.02, 0.05, 0.1))
        self._left = self._dice.randint(1, 5)
        self.taken: list[Deviation] = []

    def choose(self, place: str, options: Sequence[str]) -> str:
        faults = [option for option in options if option in FAULTS]
        others = [option for option in options[1:] if option not in FAULTS]
        choice, drawn = options[0], self._dice.random()
        if faults and self._left and drawn < self._fault:
            self._left -= 1
            choice = self._dice.choice(faults)
        elif others and drawn > 1 - self._switch:
            choice = self._dice.choice(others)
        if choice != options[0]:
            self.taken.append((place, choice))
        return choice


@dataclass
class Found:
    """A run that broke something."""

    scenario: Scenario
    deviations: tuple[Deviation, ...]
    lines: list[tuple[str, str]]
    trace: list[str]
    seed: int | None = None

    @property
    def rules(self) -> set[str]:
        """What it broke."""
        return {rule for rule, _ in self.lines}


@dataclass
class Walk:
    """All schedules of a scenario within a bound, one by one; ``left`` is what is still to do."""

    scenario: Scenario
    bound: int
    kinds: frozenset[str] = frozenset()
    """Choices that are tried; none named is all of them."""
    dice: random.Random | None = None
    """Draws which schedule is next; without it they come in order."""
    runs: int = 0
    left: list[tuple[Deviation, ...]] = field(default_factory=lambda: [()])

    def step(self, house: House) -> tuple[World, Found | None]:
        """Run the next schedule."""
        if self.dice is not None:
            drawn = self.dice.randrange(len(self.left))
            self.left[drawn], self.left[-1] = self.left[-1], self.left[drawn]
        deviations = self.left.pop()
        script = Scripted(deviations)
        world = run(house, self.scenario, script)
        self.runs += 1
        if len(deviations) < self.bound:
            further = [more for more in _further(deviations, script.offered) if self._tries(more[-1])]
            self.left += reversed(further)
        return world, found(self.scenario, deviations, world)

    def _tries(self, deviation: Deviation) -> bool:
        label = deviation[1]
        return not self.kinds or (label if label in FAULTS else "other") in self.kinds


def _further(
    deviations: tuple[Deviation, ...], offered: list[tuple[str, tuple[str, ...]]]
) -> Iterator[tuple[Deviation, ...]]:
    last = deviations[-1][0] if deviations else None
    begun = last is None
    for place, options in offered:
        if begun:
            yield from ((*deviations, (place, option)) for option in options[1:])
        begun = begun or place == last


def found(scenario: Scenario, deviations: Sequence[Deviation], world: World, seed: int | None = None) -> Found | None:
    """What the run broke, if anything."""
    lines = world.ledger.lines
    return Found(scenario, tuple(deviations), lines, world.trace, seed) if lines else None


def at_random(house: House, scenario: Scenario, seed: int) -> tuple[World, Found | None]:
    """One run whose choices are drawn with this seed."""
    dice = Random(seed)
    world = run(house, scenario, dice)
    return world, found(scenario, dice.taken, world, seed)


def replay(house: House, scenario: Scenario, deviations: Sequence[Deviation]) -> tuple[World, Found | None]:
    """The run with these deviations once more."""
    world = run(house, scenario, Scripted(deviations))
    return world, found(scenario, deviations, world)


def shrunk(house: House, failing: Found) -> Found:
    """The same fault with as few deviations as dropping them one by one leaves."""
    best, rule = failing, failing.lines[0][0]
    again = True
    while again:
        again = False
        for index in range(len(best.deviations)):
            fewer = best.deviations[:index] + best.deviations[index + 1 :]
            _, smaller = replay(house, failing.scenario, fewer)
            if smaller is not None and rule in smaller.rules:
                smaller.seed, best, again = failing.seed, smaller, True
                break
    return best
