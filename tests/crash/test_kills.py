"""Children killed at the two worst moments, four times each, one worker process serving all.

``python -m tests.campaigns.kills`` is the same with larger numbers and more stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.campaigns.kills import prepared, series, sqlite_file

pytestmark = [pytest.mark.crash, pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]
KILLS = 4


@pytest.fixture(params=["redis", "postgresql", "sqlite"])
def places(request: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """The store's name, a broker and the store: Redis for both, RabbitMQ and PostgreSQL, or files and Redis."""
    server = request.getfixturevalue("redis_server") if request.param != "postgresql" else None
    if request.param == "redis":
        yield "redis", (server.new_database(), server.new_database())
    elif request.param == "postgresql":
        url = prepared(request.getfixturevalue("postgres_url"))
        yield "postgresql", (request.getfixturevalue("amqp_url"), url)
    else:
        with sqlite_file() as url:
            yield "sqlite", (server.new_database(), url)


def test_every_killed_child_is_replaced_and_nothing_is_lost(places: tuple[str, tuple[str, str]]) -> None:
    """Between effect and completion the body runs again, unless it can verify; after completion it never does."""
    all_figures = series(*places, KILLS)
    for figures in all_figures:
        print(figures)
        assert figures.broken(KILLS) == []
        assert figures.reclaims == (KILLS if figures.moment == "between" else 0)
