"""How long a parked copy waits, whatever asks for it, and to which queue it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.utils.imports import symbol_by_name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue, binding

from celery_idem.parking import Wait, delay_of, patience_of, visibility_timeout, waiting_time
from celery_idem.routing import queue_of
from tests.support.delivery import Shop

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


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


@any_speed
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


def test_no_minute_sees_more_than_eight_publishes_whatever_the_jitter() -> None:
    for jitter in (0.0, 0.5, 1.0):
        at, parks = 0.0, []
        for count in range(1, 30):
            parks.append(at)
            at += delay_of(count, Wait("held"), 3600, jitter=jitter)
        assert max(sum(begin <= park < begin + 60 for park in parks) for begin in parks) <= 8


# --- which queue ----------------------------------------------------------------------------------


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("x", broker="memory://", set_as_current=False)
    topic, headers = Exchange("t", type="topic"), Exchange("h", type="headers")
    app.conf.task_queues = [
        Queue("direct", Exchange("d"), "key"),
        Queue("star", topic, "order.*"),
        Queue("hash", topic, "#.refund"),
        Queue("many", bindings=[binding(topic, "a.b.#"), binding(headers)]),
        Queue("delayed", topic, "slow"),
    ]
    yield app
    app.close()


ZEROS = "0." * 27


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("", "any.name", "any.name"),
        (None, "any.name", "any.name"),
        ("d", "key", "direct"),
        ("d", "other", None),
        ("t", "order.paid", "star"),
        ("t", "order.paid.twice", None),
        ("t", "order", None),
        ("t", "refund", "hash"),
        ("t", "a.b.refund", "hash"),
        ("t", "a.b", "many"),
        ("t", "a.b.c.d", "many"),
        ("h", "whatever", "many"),
        ("unknown", "key", None),
        ("celery_delayed_delivery", f"{ZEROS}1.slow", "delayed"),
        ("celery_delayed_3", f"{ZEROS}0.key", None),
        ("celery_delayed_delivery", f"{ZEROS}1.my.queue.celery_idem", "my.queue"),
        ("", "", None),
    ],
)
def test_the_queue_a_message_came_from(app: Celery, exchange: str | None, key: str, queue: str | None) -> None:
    assert queue_of(app, {"exchange": exchange, "routing_key": key}) == queue


def test_the_queue_is_one_this_worker_consumes(app: Celery) -> None:
    app.amqp.queues.select(["star", "direct"])
    assert queue_of(app, {"exchange": "t", "routing_key": "a.refund"}) is None
    assert queue_of(app, {"exchange": "t", "routing_key": "order.refund"}) == "star"
    app.amqp.queues.select(["hash"])
    assert queue_of(app, {"exchange": "t", "routing_key": "order.refund"}) == "hash"
    assert queue_of(app, None) is None


def nothing() -> None:
    """The body of a task that is only asked about."""


# --- how long a slot is held first ----------------------------------------------------------------


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.close()


def test_a_rate_limited_task_waits_as_long_as_a_run_costs(shop: Shop) -> None:
    def waits(**options: Any) -> float:
        name = f"t{len(shop.app.tasks)}"
        return waiting_time(shop.task(name=name, **options)(nothing), 1.0, jitter=0)

    assert waits() == 1
    assert waits(rate_limit="100/s") == 1
    assert waits(rate_limit="20/m") == 3
    assert waits(rate_limit="1/h") == 15, "no longer than a parked copy would be away"
    assert waits(rate_limit=0.25) == 4
    assert waiting_time(shop.task(name="spread")(nothing), 1.0, jitter=1) == 0.8
    shop.app.conf.worker_disable_rate_limits = True
    assert waits(rate_limit="20/m") == 1


def test_what_comes_before_the_body_takes_a_third_of_the_time_limits(shop: Shop) -> None:
    task = shop.task(name="t", time_limit=30, soft_time_limit=24)(nothing)
    bare = shop.task(name="bare")(nothing)

    def patience(task: Any, timelimit: Any = (None, None)) -> float:
        return patience_of(task, SimpleNamespace(timelimit=timelimit))

    assert patience(task) == 8
    assert patience(task, (9, None)) == 3
    assert patience(task, (None, 6)) == 2
    assert patience(bare, None) == float("inf")


def test_a_task_without_limits_has_the_apps(shop: Shop) -> None:
    shop.app.conf.task_time_limit = 60
    assert patience_of(shop.task(name="bare")(nothing), SimpleNamespace(timelimit=None)) == 20


# --- what a copy keeps and loses ------------------------------------------------------------------


def test_a_parked_copy_goes_to_its_queue_whatever_the_task_says_of_routes(shop: Shop) -> None:
    from tests.unit.test_task import hold

    shop.app.conf.task_routes = {"t": {"exchange": "elsewhere", "routing_key": "elsewhere"}}
    task = shop.task(name="t")(nothing)
    message = shop.send(task, exchange="", routing_key=shop.app.conf.task_default_queue)
    hold(shop, task, message)
    assert shop.deliver(message).state == "IGNORED"
    (copy,) = shop.messages()
    assert copy["id"] == message["id"]


def test_a_parked_copy_that_lost_its_count_is_not_taken_for_an_old_one(shop: Shop) -> None:
    """It may be the last: parked again, and its count starts behind the highest one known."""
    from tests.unit.test_task import hold

    task = shop.task(name="t")(nothing)
    message = shop.send(task)
    hold(shop, task, message)
    copy = message
    for _ in range(3):
        shop.deliver(copy)
        (copy,) = shop.messages()
    for garbage in ("{", '{"generation": 0}', '{"generation": 0, "count": "x"}', 7):
        assert shop.deliver({**copy, "idempotency_park": garbage}).state == "IGNORED"
        (copy,) = shop.messages()
    assert copy["idempotency_park"].startswith('{"generation":0,"count":7')
    shop.deliver(message)  # the first one, which never had a count
    assert shop.messages() == []


def test_a_revoked_copy_is_revoked_once_and_its_siblings_are_dropped(shop: Shop) -> None:
    runs: list[int] = []

    def append() -> None:
        runs.append(1)

    task = shop.task(name="t")(append)
    message = shop.send(task)
    revoked = {**message, "idempotency_revoked": "revoked"}
    assert shop.deliver(revoked).state == "IGNORED"
    assert task.AsyncResult(message["id"]).state == "REVOKED"
    shop.deliver(message)
    assert (runs, shop.terminal()[-1]) == ([], "OVER")


def test_what_a_worker_noted_of_a_revoke_is_not_parked_with_the_copy(shop: Shop) -> None:
    from tests.unit.test_task import hold

    task = shop.task(name="t")(nothing)
    message = shop.send(task)
    hold(shop, task, message)
    shop.deliver({**message, "idempotency_revoked": "revoked"})
    (copy,) = shop.messages()
    assert "idempotency_revoked" not in copy


@pytest.mark.parametrize("garbage", [[], {}, 7, "", "Revoked"])
def test_garbage_in_place_of_the_workers_note_of_a_revoke_is_none(shop: Shop, garbage: Any) -> None:
    message = shop.send(shop.task(name="t")(nothing))
    assert shop.deliver({**message, "idempotency_revoked": garbage}).state == "SUCCESS"


def test_a_note_of_a_revoke_that_came_with_the_message_is_no_worker_s(shop: Shop) -> None:
    task = shop.task(name="t")(nothing)
    task.apply_async(headers={"idempotency_revoked": "revoked"})
    with shop.app.connection_for_read() as connection, connection.channel() as channel:
        raw = channel.basic_get(shop.app.conf.task_default_queue, no_ack=True)
    assert "idempotency_revoked" in raw.headers
    assert "idempotency_revoked" not in symbol_by_name(task.Request)(raw, app=shop.app, task=task).request_dict


@pytest.mark.parametrize("expires", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
def test_an_expiry_outside_of_every_calendar_is_garbage(shop: Shop, expires: str) -> None:
    @shop.task(name="t", bind=True)
    def again(self: Any) -> str:
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "done"

    parked = json.dumps({"generation": 0, "count": 1, "expires": expires})
    assert shop.deliver({**shop.send(again), "idempotency_park": parked}).state == "RETRY"
    (retried,) = shop.messages()
    assert shop.deliver(retried).value == "done"
