"""Children killed at random instants of a task that writes through ``transaction()``: no effect twice, none lost.

``python -m tests.campaigns.transactions`` is the same with larger numbers.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaigns.kills import prepared, sqlite_file
from tests.campaigns.transactions import series

pytestmark = [pytest.mark.crash, pytest.mark.redis, pytest.mark.postgres, pytest.mark.rabbitmq]
KILLS = 8


def test_no_effect_is_doubled_or_lost_on_postgresql(amqp_url: str, postgres_url: str) -> None:
    figures = series("postgresql", (amqp_url, prepared(postgres_url)), KILLS)
    print(figures)
    assert figures.broken(KILLS) == []


def test_no_effect_is_doubled_or_lost_on_sqlite(redis_server: Any) -> None:
    with sqlite_file() as url:
        figures = series("sqlite", (redis_server.new_database(), url), KILLS)
    print(figures)
    assert figures.broken(KILLS) == []
