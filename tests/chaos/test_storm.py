"""Ten seconds of the storm: children and workers of one store die under load, and the history shows nothing lost.

``make chaos`` is the same with every fault, every pool, two stores and two brokers, for longer, beside bare Celery.
"""

from __future__ import annotations

import pytest

from tests.chaos.checker import Verdict
from tests.chaos.house import SYSTEMS, Steady
from tests.chaos.report import promises, tables, weak_storms
from tests.chaos.run import Plan, Run, play
from tests.chaos.storm import last_words, schedule

pytestmark = [pytest.mark.crash, pytest.mark.redis, pytest.mark.postgres]


def test_a_short_storm_loses_nothing_and_doubles_nothing_unexplained() -> None:
    """Children only: a Redis broker gives the messages of a whole dead worker back after 25 s."""
    weights = {"kill child": 6, "store restart": 1, "store cut before": 1, "store cut after": 1}
    plan = Plan(seed=3, seconds=5, rate=2, every=0.6, weights=weights, fleet=(("prefork", 4),), long=2, drained=1.5)
    with Steady() as steady:
        run = play(SYSTEMS[0], steady, plan)
    print(tables([run], left_out=""))
    assert promises([run]) == []
    assert run.verdict.lost == run.verdict.dropped == []
    assert run.verdict.faults["kill child"] >= 2
    assert run.verdict.hit >= 1, "it met no body at all, so it showed nothing"


def test_load_and_faults_are_drawn_from_the_seed_alone() -> None:
    """Two systems under one seed see the same storm."""
    weights = {"kill child": 3, "stop": 1}
    assert schedule(1, 60, 2, weights) == schedule(1, 60, 2, weights) != schedule(2, 60, 2, weights)


@pytest.mark.parametrize(("hit", "idle", "weak"), [(5, 6, True), (6, 5, False)], ids=["mostly idle", "mostly busy"])
def test_a_storm_that_hits_little_is_weak_and_breaks_no_promise(hit: int, idle: int, weak: bool) -> None:
    run = Run(SYSTEMS[1], Plan(1, 30, 3, 2.4), Verdict(hit=hit, idle=idle), [], 0, 0.0, 0)
    said = "6 of 11 faults met no work in flight; give it more --seconds or --rate"
    assert promises([run]) == []
    assert weak_storms([run]) == ([f"WEAK STORM: idem-postgres: {said}"] if weak else [])


def test_a_worker_that_ends_by_celerys_own_fault_does_not_read_like_a_crash_of_the_proof() -> None:
    assert last_words("x\nAttributeError: 'NoneType' object has no attribute 'hostname'\n").startswith("(Celery's own")
    assert last_words("MemoryError") == "and is started again; the end of its log: MemoryError"
