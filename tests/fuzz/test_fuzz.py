"""Every fuzz target for a moment, from a seed that stays: ``make fuzz`` goes on from here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fuzz.target import Draw, Found, Target, bounded, campaign, run_chunk
from tests.fuzz.targets import TARGETS

A_MOMENT = 8
"""Examples."""


def _marked(target: Target) -> Any:
    return pytest.param(target, id=target.name.replace(": ", "-").replace(" ", "-"), marks=_marks(target))


def _marks(target: Target) -> list[pytest.MarkDecorator]:
    return [pytest.mark.redis] if target.redis else []


@pytest.mark.parametrize("target", [_marked(target) for target in TARGETS])
def test_a_moment_of_fuzz(request: pytest.FixtureRequest, target: Target) -> None:
    short, found = replace(target, chunk=min(A_MOMENT, target.chunk)), Found(target)
    with target.place(lambda: request.getfixturevalue("redis_url")) as place:
        run_chunk(short, place, 0, found)
    assert found.examples >= min(A_MOMENT, target.chunk) / 2
    assert sum(found.came.values()) == found.examples


def _breaks(draw: Draw, _: Any) -> str:
    from hypothesis import strategies as st

    assert draw(st.integers(0, 100)) < 50, "too much"
    return "fine"


def _hangs(draw: Draw, _: Any) -> str:
    with bounded(0.01):
        while True:
            pass


def test_what_breaks_and_what_hangs_is_found_with_its_seed() -> None:
    for play, told in ((_breaks, "too much"), (_hangs, "no end after")):
        found = campaign(Target("broken", "none", play), lambda: "", seconds=5.0, first=7)
        assert len(found.faults) == 3
        assert "broken, seed 7" in found.faults[0]
        assert told in found.faults[0]
