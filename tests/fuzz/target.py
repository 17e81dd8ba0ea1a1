"""What a fuzz target is, and running one: chunks of examples, each chunk from its own seed, until the time is up.

Any exception out of an example is a finding; hypothesis then shrinks it. One that does not end is one too.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]
PATIENCE = 20.0
"""Seconds an example may take before it counts as hung; the machine may be busy."""
ENOUGH = 3
"""Findings after which a target is left."""


class Hung(AssertionError):
    """The example did not end."""


@dataclass(frozen=True)
class Target:
    """One thing to fuzz.

    Args:
        promise: what no example may break.
        play: one example: draws its garbage, uses it on the place, checks, and says in a word what came of it.
        place: where examples happen, opened once; it is given the URL of a Redis server's empty database.
    """

    name: str
    promise: str
    play: Callable[[Draw, Any], str]
    place: Callable[[Callable[[], str]], AbstractContextManager[Any]] = field(default=lambda _: nullcontext())
    redis: bool = False
    chunk: int = 50
    """Examples from one seed."""


@dataclass
class Found:
    """What came of one target."""

    target: Target
    examples: int = 0
    came: Counter[str] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def worded(error: BaseException, begins: str = "") -> None:
    """Hold a refusal to saying something, and not too much."""
    text = str(error)
    assert text.startswith(begins)
    assert 0 < len(text) < 2_000


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise ``Hung`` in the block once it has lasted this long; another alarm that was set goes on afterwards."""

    def rings(*_: Any) -> None:
        raise Hung(f"no end after {seconds:.0f} s")

    before, began = signal.signal(signal.SIGALRM, rings), time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - began)))


def run_chunk(target: Target, place: Any, number: int, found: Found) -> None:
    """Run the examples of one seed; raises whatever the smallest failing one raises."""

    @seed(number)
    @settings(
        max_examples=target.chunk,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(st.data())
    def examples_of_chunk(data: Any) -> None:
        with bounded(PATIENCE):
            came = target.play(data.draw, place)
        found.examples += 1
        found.came[came] += 1

    found.seeds.append(number)
    examples_of_chunk()


def campaign(target: Target, redis_url: Callable[[], str], *, seconds: float, first: int) -> Found:
    """Run chunk after chunk until the time is up or enough was found."""
    found, began = Found(target), time.monotonic()
    with target.place(redis_url) as place:
        for number in itertools.count(first):
            if time.monotonic() - began >= seconds or len(found.faults) >= ENOUGH:
                break
            try:
                run_chunk(target, place, number, found)
            except Exception as error:
                found.faults.append(f"{target.name}, seed {number}: {told(error)}")
    found.seconds = time.monotonic() - began
    return found


def told(error: BaseException) -> str:
    """The error on one line, with what hypothesis drew."""
    notes = " / ".join(note.strip() for note in getattr(error, "__notes__", ()) if note.strip())
    several = getattr(error, "exceptions", ())  # hypothesis may have found more than one
    if several:
        notes = " | ".join(told(each) for each in several)
    return " ".join(f"{type(error).__name__}: {error} ({notes})".split())[:900]
