"""Explicit-state search: every state a world can reach, each checked, with the shortest way to whatever is broken."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


class World(Protocol):
    """What is searched. States are hashable; two that differ in names alone have one ``normal``."""

    name: str

    def first(self) -> Any:
        """Where it begins."""

    def steps(self, state: Any) -> Iterable[tuple[str, Any]]:
        """Everything that can happen next, each with its label."""

    def normal(self, state: Any) -> Any:
        """The one state that stands for all that differ from it in names alone."""

    def broken(self, state: Any) -> list[str]:
        """The promises this state breaks."""

    def quiet(self, state: Any) -> bool:
        """Whether nothing is left to do."""


class Broken(Exception):
    """A step that breaks a promise, by its words."""


@dataclass
class Explored:
    """What a search found."""

    name: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    quiet: int = 0
    truncated: bool = False
    seconds: float = 0.0
    violations: dict[str, list[str]] = field(default_factory=dict)
    """The steps of the shortest way to each."""


@dataclass
class _Graph:
    """States by number, whence each was first reached, and who leads to it."""

    states: list[Any]
    number: dict[Any, int]
    whence: list[tuple[int, str]]
    depth: list[int]
    before: list[list[int]]

    @classmethod
    def of(cls, first: Any) -> _Graph:
        return cls([first], {first: 0}, [(-1, "")], [0], [[]])

    def add(self, state: Any, parent: int, label: str) -> int:
        index = self.number[state] = len(self.states)
        self.states.append(state)
        self.whence.append((parent, label))
        self.depth.append(self.depth[parent] + 1)
        self.before.append([])
        return index

    def way_to(self, index: int) -> list[str]:
        steps: list[str] = []
        while index > 0:
            index, label = self.whence[index]
            steps.append(label)
        return steps[::-1]

    def stuck(self, quiet: list[int]) -> int | None:
        """The first state from which no quiet one can be reached."""
        able, stack = bytearray(len(self.states)), list(quiet)
        for index in stack:
            able[index] = 1
        while stack:
            for index in self.before[stack.pop()]:
                if not able[index]:
                    able[index] = 1
                    stack.append(index)
        return next((index for index in range(len(able)) if not able[index]), None)


def explore(world: World, *, limit: int = 2_000_000, seconds: float = 600.0, enough: bool = False) -> Explored:
    """Search breadth first; ``enough`` stops at the first violation."""
    began, found = time.monotonic(), Explored(world.name)
    graph, quiet = _Graph.of(world.normal(world.first())), []
    waiting = deque([0])
    while waiting and not (enough and found.violations):
        if time.monotonic() - began > seconds or len(graph.states) > limit:
            found.truncated = True
            break
        index = waiting.popleft()
        state = graph.states[index]
        words = world.broken(state)
        for word in words:
            found.violations.setdefault(word, graph.way_to(index))
        if words:
            continue  # beyond it everything may be broken
        if world.quiet(state):
            quiet.append(index)
        waiting.extend(_follow(world, graph, index, found))
    if not found.truncated and not found.violations and (stuck := graph.stuck(quiet)) is not None:
        found.violations["stuck: nothing quiet can be reached"] = graph.way_to(stuck)
    found.states, found.depth, found.quiet = len(graph.states), max(graph.depth), len(quiet)
    found.seconds = time.monotonic() - began
    return found


def _follow(world: World, graph: _Graph, index: int, found: Explored) -> list[int]:
    fresh = []
    for label, following in world.steps(graph.states[index]):
        if isinstance(following, Broken):
            found.violations.setdefault(str(following), [*graph.way_to(index), label])
            continue
        found.transitions += 1
        state = world.normal(following)
        reached = graph.number.get(state)
        if reached is None:
            reached = graph.add(state, index, label)
            fresh.append(reached)
        graph.before[reached].append(index)
    return fresh
