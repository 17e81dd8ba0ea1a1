"""Doubled chains and a chain whose worker died before its next step, side by side with bare Celery.

``python -m tests.campaigns.redelivery`` is the same with more cases and larger numbers.
"""

from __future__ import annotations

import pytest

from tests.campaigns.redelivery import broken, run
from tests.support.services import RedisServer

pytestmark = [pytest.mark.crash, pytest.mark.redis]


def test_what_is_delivered_twice_runs_once_and_bare_celery_runs_it_twice(redis_server: RedisServer) -> None:
    found = run(redis_server, ["chain", "killed"], 2)
    assert broken(found) == []
    bare = {figures.case: figures.bodies for figures in found if figures.side == "bare"}
    assert bare["chain"] == {"head": 4, "last": 4}
    assert bare["killed"] == {"dies": 4, "last": 2}
