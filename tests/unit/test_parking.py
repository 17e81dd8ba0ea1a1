"""How long a parked copy waits, whatever asks for it."""

from __future__ import annotations

from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_idem.parking import Wait, delay_of, visibility_timeout


def test_delays_double_up_to_fifteen_seconds() -> None:
    assert [delay_of(n, Wait("held"), 3600, jitter=0.5) for n in range(1, 8)] == [1, 2, 4, 8, 15, 15, 15]


def test_delays_of_an_outage_double_up_to_a_minute() -> None:
    delays = [delay_of(n, Wait("store_down", outage=True), 3600, jitter=0.5) for n in range(1, 7)]
    assert delays == [5, 10, 20, 40, 60, 60]


def test_a_live_leases_rest_and_a_third_of_the_visibility_timeout_bound_them() -> None:
    assert delay_of(9, Wait("held", below=3), 3600, jitter=0.5) == 3
    assert delay_of(9, Wait("held"), 12, jitter=0.5) == 4
    assert delay_of(1, Wait("not_due", exactly=90), 3600, jitter=0.5) == 90
    assert delay_of(1, Wait("not_due", exactly=90), 30, jitter=0.5) == 10


@given(st.integers(1, 10**9), st.floats(0, 1), st.floats(0.001, 1e9), st.floats(3, 1e6), st.booleans())
def test_every_delay_is_bounded(count: int, jitter: float, below: float, visibility: float, outage: bool) -> None:
    delay = delay_of(count, Wait("held", below=below, outage=outage), visibility, jitter=jitter)
    assert 0.5 <= delay <= (60 if outage else 15)
    assert delay <= max(0.5, below)
    assert delay <= max(0.5, visibility / 3)


def test_the_visibility_timeout_comes_from_the_broker_options() -> None:
    app = Celery("x", set_as_current=False)
    assert visibility_timeout(app) == 3600
    app.conf.broker_transport_options = {"visibility_timeout": 30}
    assert visibility_timeout(app) == 30
