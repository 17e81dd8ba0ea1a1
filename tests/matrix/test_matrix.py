"""Every pool, every broker, every shape of work: whatever happens to its message, each body's effect is there once.

All live cells of one pool and broker share a worker. The kill cells run pairwise here; ``make matrix`` runs them all
and writes docs/reference/matrix.md.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idem.stores.base import open_store
from tests.matrix.cells import BROKERS, KILL_CELLS, LIVE_CELLS, POOLS, SHAPES, Cell, page, pairwise
from tests.matrix.house import RUNS_AGAIN, STEPS, House, expected_value

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]
WHOLE = bool(os.environ.get("MATRIX_FILE"))
"""Every kill cell, not one of each pair."""
FIRST = {"plain": "plain", "retry": "try-0", "replace": "swap"}


@pytest.fixture(scope="module")
def houses(redis_server: Any, rabbit_server: Any, postgres_server: Any) -> Iterator[Any]:
    """Makes the house of a pool and broker when it is first asked for; RabbitMQ goes with PostgreSQL."""
    made: dict[tuple[str, str], House] = {}

    def house(pool: str, broker: str) -> House:
        if (pool, broker) not in made:
            if broker == "redis":
                places = redis_server.new_database(), redis_server.new_database(), redis_server.new_database()
            else:
                places = rabbit_server.create_vhost(), postgres_server.create_database(), None
                store = open_store(places[1], timeout=30)
                store.create_schema()
                store.close()
            made[pool, broker] = House(pool, *places[:2], backend=places[2])
        return made[pool, broker]

    yield house
    for one in made.values():
        one.close()


# --- cells that kill nothing ----------------------------------------------------------------------

_lived: dict[tuple[str, str], dict[Cell, Any]] = {}


def live(house: House, pool: str, broker: str) -> dict[Cell, Any]:
    """Run all live cells of this worker together; what became of each: its steps and its value, or what went wrong."""
    cells = [cell for cell in LIVE_CELLS if (cell.pool, cell.broker) == (pool, broker)]
    house.start(2 if pool == "solo" else 1)  # a solo worker cannot take a copy while its body runs
    results: dict[Cell, Any] = {}
    wrong: dict[Cell, str] = {}
    for cell in cells:
        try:
            results[cell] = _live_one(house, cell)
        except AssertionError as error:
            wrong[cell] = str(error)
    house.await_(house.drained, "the workers to be idle")
    told: dict[Cell, Any] = {}
    for cell in cells:
        told[cell] = wrong.get(cell) or (house.steps(cell), house.events(cell), results[cell])
    return told


def _live_one(house: House, cell: Cell) -> Any:
    result = house.send(cell, gated=cell.moment == "duplicate during")
    first = FIRST.get(cell.shape, "head-0")
    if cell.moment == "duplicate during":
        house.await_(lambda: house.steps(cell)[first], f"{cell}: the first body")
        house.send_copy(cell)
        house.await_(lambda: {"IN_FLIGHT_WAIT", "PARKED"} & set(house.events(cell)), f"{cell}: the copy to wait")
        house.open(cell)
    house.await_(lambda: house.finished(cell), f"{cell}: all its bodies")
    value = result.get(timeout=30)
    if cell.moment == "duplicate after":
        house.send_copy(cell)
    if cell.moment != "first run":
        house.await_(lambda: {"REPLAYED", "OVER"} & set(house.events(cell)), f"{cell}: the copy to be answered")
    return value


@pytest.mark.parametrize("cell", LIVE_CELLS, ids=str)
def test_every_body_runs_once(houses: Any, cell: Cell) -> None:
    place = cell.pool, cell.broker
    if place not in _lived:
        house = houses(*place)
        try:
            _lived[place] = live(house, *place)
        finally:
            for worker in house.workers:
                worker.stop()
    told = _lived[place][cell]
    assert not isinstance(told, str), told
    steps, events, value = told
    assert steps == Counter(STEPS[cell.shape]), f"{cell}: {dict(steps)} {events}"
    assert value == expected_value(cell)


# --- cells that kill ------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("cell", sorted(KILL_CELLS if WHOLE else pairwise(), key=str), ids=str)
def test_a_killed_process_doubles_and_loses_nothing(houses: Any, cell: Cell) -> None:
    house = houses(cell.pool, cell.broker)
    house.start()
    first = FIRST.get(cell.shape, "head-0")
    result = house.send(cell, gated=True)
    house.await_(lambda: house.steps(cell)[first], f"{cell}: the first body")
    before: Any = cell.moment.removeprefix("kill before ")
    strike = house.points.kill(before=before, **house.suffering(cell))
    house.take_no_more()
    house.open(cell)
    house.await_(lambda: strike.struck, f"{cell}: the kill")
    if cell.pool != "prefork":  # the whole worker died
        house.await_(lambda: not house.workers[0].alive, f"{cell}: the worker's end")
        house.restore()
        house.start()
    house.await_(lambda: house.finished(cell), f"{cell}: all its bodies")
    assert result.get(timeout=60) == expected_value(cell)
    house.await_(house.drained, f"{cell}: the worker to be idle")
    steps, expected = house.steps(cell), Counter(STEPS[cell.shape])
    if before == "completion" or cell.shape == "retry":
        again = steps[first] - 1
        assert again == 1 or (again == 0 and first not in RUNS_AGAIN), f"{cell}: {dict(steps)} {house.events(cell)}"
        expected[first] += again
    assert steps == expected, f"{cell}: {dict(steps)} {house.events(cell)}"


def test_the_kill_cells_of_every_run_hold_every_pair() -> None:
    chosen = pairwise()
    axes = ("pool", "broker", "shape", "moment")
    for one in axes:
        for other in axes:
            if one != other and {one, other} != {"broker", "moment"}:
                wanted = {(getattr(c, one), getattr(c, other)) for c in KILL_CELLS}
                assert {(getattr(c, one), getattr(c, other)) for c in chosen} == wanted, (one, other)
    assert len(LIVE_CELLS) + len(KILL_CELLS) == len(POOLS) * len(BROKERS) * len(SHAPES) * 5


if not WHOLE:

    def test_the_page_shows_every_cell_passed() -> None:
        shown = (Path(__file__).parents[2] / "docs/reference/matrix.md").read_text()
        assert shown == page({str(cell) for cell in [*LIVE_CELLS, *KILL_CELLS]})
