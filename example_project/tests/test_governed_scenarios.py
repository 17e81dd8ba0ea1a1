"""A row of the demo's second table is kept only where exactly what it promises was counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from example_project.governed_scenarios import SCENARIOS, Scenario, Seen
from example_project.refunds import RefundPayload


def as_promised(scenario: Scenario) -> Seen:
    state, _, dead_letter = scenario.end.partition(": ")
    told = "gate refused; already approved by ann" if "approv" in scenario.title else "nothing consumed"
    verb = "execute" if scenario.title == "an owner approves" else "observe"
    return Seen(told, scenario.puts, 2, scenario.refunds, verb, "one", "another", state, dead_letter)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.title)
def test_one_put_or_refund_too_many_breaks_the_promise(scenario: Scenario) -> None:
    seen = as_promised(scenario)
    assert scenario.promise_kept(seen)
    assert not scenario.promise_kept(replace(seen, puts=seen.puts + 1))
    assert not scenario.promise_kept(replace(seen, refunds=seen.refunds + 1))
    assert not scenario.promise_kept(replace(seen, state="gated"))


def test_a_refund_found_by_the_process_that_sent_it_shows_no_crash() -> None:
    killed = [scenario for scenario in SCENARIOS if "killed" in scenario.title]
    assert len(killed) == 2
    for scenario in killed:
        assert not scenario.promise_kept(replace(as_promised(scenario), finder="one"))


@pytest.mark.parametrize("amount", [0, -5])
def test_no_refund_takes_money(amount: int) -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        RefundPayload(order_id="A1", amount=amount)
