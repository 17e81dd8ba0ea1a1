"""The store stopped for twice a lease: under running bodies, and over a backlog.

``python -m tests.campaigns.outage`` is the same with larger numbers.
"""

from __future__ import annotations

import pytest

from tests.campaigns.outage import over_a_backlog, under_long_bodies

pytestmark = [pytest.mark.crash, pytest.mark.redis]


def test_bodies_outlive_a_store_that_is_stopped_for_two_leases() -> None:
    figures = under_long_bodies(bodies=4, lease=4, down=8)
    print(figures)
    assert figures.broken() == []
    assert figures.shortest > 8, "the bodies ran all through the outage"
    assert figures.words["RENEW_FAILED"] >= 4, "the leases were due meanwhile"


def test_a_backlog_waits_for_the_store_and_runs_once() -> None:
    figures = over_a_backlog(messages=100, down=8, timeout=1, drain=90)
    print(figures)
    assert figures.broken() == []
    assert figures.parked > 0, "the store was down for the messages, too"
    assert figures.published - figures.messages == figures.parked
