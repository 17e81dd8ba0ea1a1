"""The simulator in seconds: a walk that keeps every promise, the same seed twice, and rules that are noticed gone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.simulate.__main__ import without
from tests.simulate.explore import Walk, at_random, replay, shrunk
from tests.simulate.house import House, simulated
from tests.simulate.reverted import REVERTED
from tests.simulate.scenarios import SCENARIOS


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with simulated() as built:
        yield built


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Celery's, of exceptions outside of bodies
        yield


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_the_default_and_one_random_schedule_keep_every_promise(house: House, scenario) -> None:
    for found in (replay(house, scenario, ())[1], at_random(house, scenario, 7)[1]):
        assert found is None, "\n".join(found.trace)


def test_every_schedule_with_one_deviation_keeps_every_promise(house: House) -> None:
    walk = Walk(SCENARIOS[0], 1)
    while walk.left:
        _, found = walk.step(house)
        assert found is None, "\n".join(found.trace)
    assert walk.runs > 40


def test_a_seed_is_one_run(house: House) -> None:
    first, _ = at_random(house, SCENARIOS[-1], 11)
    second, _ = at_random(house, SCENARIOS[-1], 11)
    assert first.faults, "a seed without faults shows nothing"
    assert first.trace == second.trace


@pytest.mark.parametrize("name", ["a live lease is not reclaimed", "the retry is announced", "settled at all"])
def test_a_rule_that_is_taken_out_is_noticed(house: House, name: str) -> None:
    (rule,) = [reverted for reverted in REVERTED if reverted.rule == name]
    _, found = without(house, rule)
    assert found is not None
    with rule.gone():
        _, again = replay(house, found.scenario, found.deviations)
    assert again is not None
    assert again.rules == found.rules
    assert replay(house, found.scenario, found.deviations)[1] is None, "it fails with the rule in place as well"


def test_a_failing_schedule_is_made_smaller(house: House) -> None:
    (rule,) = [reverted for reverted in REVERTED if reverted.rule == "settled at all"]
    with rule.gone():
        scenario = next(scenario for scenario in SCENARIOS if scenario.name == "a link")
        failing = next(found for seed in range(500) if (found := at_random(house, scenario, seed)[1]) is not None)
        small = shrunk(house, failing)
    assert len(small.deviations) <= len(failing.deviations)
    assert failing.lines[0][0] in small.rules
