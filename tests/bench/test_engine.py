"""The bench of one call works on every store; what it says of a loaded machine is nobody's promise."""

from __future__ import annotations

import pytest

from tests.bench import engine, functions

SERVERS = [
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("postgresql", marks=pytest.mark.postgres),
    "sqlite",
    "memory",
]


@pytest.mark.parametrize("server", SERVERS)
def test_floor_store_and_engine_take_turns(server: str) -> None:
    with engine.place_on(server) as place:
        layers = place.layers()
        engine.measure(layers, 6, server)
        rows, _ = engine.rows_of(server, layers)
        line = engine.others(place, 2)
        assert [len(layer.firsts) for layer in layers] == [6, 6, 6]
        assert [row[0] for row in rows] == [f"{server}: claim + complete", f"{server}: replay"]
        assert len(line) == 5
        assert "all of it" in functions.left_above(server, layers[2].first, layers[2].replay, 5)
