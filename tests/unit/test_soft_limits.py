"""A soft time limit may strike at any instant; whatever it hits, an effect that happened is never forgotten.

Exhaustively: the signal is raised at every line the engine executes for one delivery, one line per run.
"""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

import celery_idem
from celery_idem import Engine, Policy
from celery_idem.core.events import Emitter
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.records import Kind, Release, State, Status
from celery_idem.core.run import Ending
from celery_idem.stores.memory import MemoryStore
from tests.support.delivery import Shop
from tests.support.operations import op

PACKAGE = str(Path(celery_idem.__file__).parent)
HARNESS = str(Path(celery_idem.__file__).parent / "testing")


def soft_limit(*_: Any) -> None:
    raise SoftTimeLimitExceeded


@pytest.fixture(autouse=True)
def soft_limits() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, soft_limit)
    yield
    signal.signal(signal.SIGUSR1, before)


class Striker:
    """Raises SIGUSR1 once, at the n-th line executed inside the package.

    Not where a with block is being left: tracing stops there, but CPython runs no signal handler between the end of
    the block and a lock's ``__exit__``.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.fired = False
        self.entered: set[tuple[int, int]] = set()

    def leaves_with(self, frame: FrameType) -> bool:
        here = (id(frame), frame.f_lineno)
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        if here in self.entered:
            self.entered.discard(here)
            return True
        self.entered.add(here)
        return False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or file.startswith(HARNESS):
            return None
        if event == "line" and not self.fired and not self.leaves_with(frame):
            self.left -= 1
            if self.left < 0:
                self.fired = True
                signal.raise_signal(signal.SIGUSR1)
        return self

    def __enter__(self) -> Striker:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def ending(value: Any, error: BaseException | None) -> Ending:
    return Ending.release(Release.ENDED) if error else Ending.complete(Kind.RESULT, value)


@pytest.mark.parametrize("continues", [False, True])
def test_a_soft_limit_at_any_line_of_the_engine_leaves_the_record_true_to_the_effect(continues: bool) -> None:
    seen = {"before the body": 0, "in it or after": 0, "moot": 0}
    for number in range(10_000):
        store = MemoryStore()
        heartbeat = Heartbeat(store, Emitter(), purge=False)
        engine = Engine(store, Policy(wait_timeout=0), heartbeat=heartbeat)
        operation, effects, result = op(continues=continues), [], None
        try:
            with Striker(number) as striker:
                result = engine.attempt(operation, lambda _, effects=effects: effects.append(1), ending=ending)
        except SoftTimeLimitExceeded:
            pass
        record = store.get(operation.key)
        if result is not None and result.error is None:
            seen["moot"] += 1
            assert record is not None
            assert record.state is State.COMPLETED
        elif effects:
            seen["in it or after"] += 1
            assert record is not None
            assert record.state is State.COMPLETED or record.note("M").over == 0, f"line {number}: it may happen again"
        else:
            seen["before the body"] += 1
            assert record is None or record.state is State.RELEASED, f"line {number}: a claim was left behind"
        held = heartbeat.held(operation.token)
        assert held is None or (record is not None and record.state is State.COMPLETED and continues), number
        heartbeat.stop()
        if not striker.fired:
            break
    assert seen["before the body"] > 10, seen
    assert seen["in it or after"] > 3, seen
    assert seen["moot"] > 10, seen


def test_a_soft_limit_while_the_outcome_is_recorded_is_moot() -> None:
    class Struck(MemoryStore):
        def complete(self, *args: Any, **named: Any) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return super().complete(*args, **named)

    heartbeat = Heartbeat(store := Struck(), Emitter(), purge=False)
    result = Engine(store, heartbeat=heartbeat).attempt(op(), lambda _: "paid", ending=ending)
    heartbeat.stop()
    assert (result.status, result.value, result.error) == (Status.EXECUTED, "paid", None)


def test_a_soft_limit_at_any_line_of_a_delivery_parks_or_fails_and_loses_nothing() -> None:
    """Through task and tracer: parked where the body did not run, and never where it did; every seventh line."""
    seen = {"parked": 0, "failed": 0, "done": 0}
    shop = Shop()
    runs: list[int] = []

    @shop.task(name="charge", bind=True)
    def charge(self: Any, order: int) -> str:
        runs.append(order)
        return "paid"

    shop.deliver(shop.send(charge, -1))  # what is made once, is made
    for number in range(0, 10_000, 3):
        runs.clear()
        message = shop.send(charge, number)
        with Striker(number) as striker:
            delivered = shop.deliver(message)
        published = shop.messages()
        if published:
            seen["parked"] += 1
            assert not runs, f"line {number}: parked although it ran"
            assert delivered.state == "IGNORED"
        elif delivered.state == "FAILURE":
            seen["failed"] += 1
            assert isinstance(delivered.value, SoftTimeLimitExceeded)
        else:
            seen["done"] += 1
            assert delivered.state == "SUCCESS"
            assert runs
        for copy in published or [message]:
            shop.deliver(copy)
        assert len(runs) <= 1, f"line {number}: a copy ran again"
        assert runs or not published, f"line {number}: the parked copy did not run"
        if not striker.fired:
            break
    shop.close()
    assert seen["failed"] < seen["parked"] / 2, seen  # on the first lines, and between the body and its ending
    assert seen["parked"] > 10, seen
    assert seen["done"] > 10, seen
