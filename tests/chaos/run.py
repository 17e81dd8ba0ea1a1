"""One run: publish under the storm, calm down, drain, and have the history judged."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import signals

from tests.campaigns.report import progress
from tests.chaos import load, recorder
from tests.chaos.checker import Verdict, judge
from tests.chaos.history import Event, read
from tests.chaos.house import FLEET, LEASE, House, Steady, System, house_of
from tests.chaos.resource import Resource
from tests.chaos.storm import WEIGHTS, Storm, schedule

QUIET = 45.0
"""Seconds without an event after which what is still missing is lost: longer than a broker or a lease waits."""
DRAIN_AT_MOST = 240.0


@dataclass(frozen=True)
class Plan:
    """What is done to a system."""

    seed: int
    seconds: float
    rate: float
    every: float
    partitions: bool = False
    keep: str | None = None
    weights: Mapping[str, int] = field(default_factory=lambda: WEIGHTS)
    fleet: tuple[tuple[str, int], ...] = FLEET
    long: float = 1.5 * LEASE
    drained: float = 5.0
    """Seconds without an event, the queue empty and nothing missing, after which a run is over."""


@dataclass
class Run:
    """What came of it."""

    system: System
    plan: Plan
    verdict: Verdict
    without_target: list[str]
    died: int
    drained: float
    unconfirmed: int
    """Chords of which nobody knows how much was published; their losses are not judged."""


def play(system: System, steady: Steady, plan: Plan) -> Run:
    """One storm over one system, from its servers' start to the verdict."""
    with house_of(system, steady, partitions=plan.partitions) as house:
        house.staff(plan.fleet)
        items = load.drawn(plan.seed, plan.seconds, plan.rate, plan.long)
        publisher = load.Publisher(house.tasks.module, house.history, items)
        storm = Storm(house, schedule(plan.seed, plan.seconds, plan.every, plan.weights))
        with _SentIsNoted(house):
            publisher.start()
            storm.run()
            storm.calm()
            if not publisher.join(120):
                raise AssertionError("the publisher never ended")
            calm = time.monotonic()
            unknown = _expected(publisher.unconfirmed)
            _drain(house, storm, plan, _expected(items) - unknown)
        drained = time.monotonic() - calm
        verdict = _judged(house, storm, plan)
        return Run(system, plan, verdict, storm.without_target, storm.died, drained, len(publisher.unconfirmed))


class _SentIsNoted:
    """This process's own publications go into the history too."""

    def __init__(self, house: House) -> None:
        self._history = house.history
        self._receiver: Any = None

    def __enter__(self) -> None:
        self._receiver = recorder.watch_publishing(self._history)

    def __exit__(self, *_: object) -> None:
        signals.after_task_publish.disconnect(self._receiver)


def _expected(items: list[load.Item]) -> set[str]:
    return {key for item in items for part in load.work_of(item) for key in part}


def _drain(house: House, storm: Storm, plan: Plan, expected: set[str]) -> None:
    """Return when nothing is missing and nothing moves, or when nothing has moved for long."""
    began = time.monotonic()
    while (now := time.monotonic()) < began + DRAIN_AT_MOST:
        storm.until(now + 0.5)
        storm.bodies.look()
        still = time.monotonic() - max(storm.bodies.last, began)
        missing = expected - storm.bodies.completed
        if still > QUIET or (still > plan.drained and not missing and not storm.bodies.open and not house.waiting()):
            return
    progress(f"{house.system.name} is not quiet {DRAIN_AT_MOST:g} s after the storm: {sorted(missing)[:5]} missing")


def _judged(house: House, storm: Storm, plan: Plan) -> Verdict:
    house.note_records(storm.bodies.records)
    house.note_what_is_left()
    resource = Resource(house.resource)
    try:
        effects = resource.effects()
    finally:
        resource.close()
    if plan.keep:
        _kept(house, effects, Path(plan.keep))
    return judge([*read(house.history.path), *effects], lease=LEASE, fenced=house.system.idempotent)


def _kept(house: House, effects: list[Event], directory: Path) -> None:
    """Copy history and logs there; the effects come after the history, in their order."""
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / f"{house.system.name}.history"
    shutil.copy(house.history.path, place)
    with place.open("a") as file:
        for effect in effects:
            said = {"at": effect.at, "kind": effect.kind, "key": effect.key, "pid": effect.pid, **effect.more}
            file.write(json.dumps(said) + "\n")
    logs = "\n".join(path.read_text(errors="replace") for path in house.tasks.dir.glob("*.log"))
    (directory / f"{house.system.name}.log").write_text(logs)
