"""Retries on real brokers, every message published twice: each attempt runs once, as often as without us."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.shop import SOURCE, Shop, overlapping
from tests.integration.test_parking import published_twice
from tests.support.chaos_proxy import ChaosProxy
from tests.support.workers import TaskApp, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.rabbitmq]

MORE = """
from celery import Task

@app.task(base=Logged, bind=True)
def change(self, n):
    self.log("start")
    if self.request.retries == 0:
        raise self.retry(args=(n + 1,), countdown=0)
    return n

@app.task(base=Logged, bind=True, autoretry_for=(ValueError,), retry_backoff=1, retry_jitter=False, max_retries=2)
def back_off(self):
    self.log("start")
    if self.request.retries < 2:
        raise ValueError("not yet")
    return "third"

@app.task(base=Logged, bind=True)
def quietly(self):
    self.log("start")
    if self.request.retries == 0:
        self.retry(countdown=0, throw=False)
        return "first"
    return "second"

def give_up(self):
    write("tries", self.name, self.request.retries)
    raise self.retry(exc=ValueError("declined"), countdown=0)

app.task(give_up, base=Logged, bind=True, name="ours", max_retries=2)
app.task(give_up, base=Task, bind=True, name="bare", max_retries=2)

class ToldLate(Logged):
    abstract = True

    @property
    def backend(self):
        backend = super().backend
        backend.mark_as_retry = partial(slowly, type(backend).mark_as_retry, backend)
        return backend

def slowly(store, *args, **kwargs):
    time.sleep(1.5)
    return store(*args, **kwargs)

app.task(give_up, base=ToldLate, bind=True, name="told_late", max_retries=1)

class StopsInRetry(Logged):
    abstract = True

    def apply_async(self, *args, **kwargs):
        if kwargs.get("retries") == 1 and self.name.endswith("stop_before") and once("before"):
            wait_for("go-on")
        sent = super().apply_async(*args, **kwargs)
        if kwargs.get("retries") == 1 and self.name.endswith("stop_after") and once("after"):
            wait_for("go-on")
        return sent

def retry_after_a_second(self):
    self.log("start")
    if self.request.retries == 0:
        raise self.retry(countdown=1)
    self.log("end")
    return "second"

stop_before = app.task(retry_after_a_second, base=StopsInRetry, bind=True, name="shop.stop_before")
stop_after = app.task(retry_after_a_second, base=StopsInRetry, bind=True, name="shop.stop_after")

@app.task(base=Logged, bind=True, idempotency=Policy(key="order:{order}", fingerprint=["order"]))
def decline(self, order, declined):
    self.log("start")
    if declined:
        raise ValueError("declined")
    return "paid"
"""


class RetryShop(Shop):
    """The shop with tasks that retry in every way there is."""

    def __init__(self, broker: str, store: str, **more: Any) -> None:
        # What waits for a successor to come is parked for three seconds at a time, not for a minute.
        options = {"visibility_timeout": 9}
        conf = {"idempotency_store": store, "broker_transport_options": options, **more}
        self.tasks = TaskApp(SOURCE + MORE, broker=broker, settings=conf)

    def retries(self) -> list[int]:
        """Of every body that began, the attempt it was."""
        return [run.retries for run in self.runs("start")]


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: Any) -> str:
    redis = request.param == "redis"
    return str(request.getfixturevalue("redis_server").new_database() if redis else request.getfixturevalue("amqp_url"))


@pytest.fixture
def shop(broker: str, redis_server: Any) -> Iterator[RetryShop]:
    with RetryShop(broker, redis_server.new_database()) as made:
        yield made


def doubled(shop: RetryShop, task: Any, *args: Any) -> Any:
    with published_twice(shop):
        return task.apply_async(args, task_id="M")


def settled(shop: RetryShop, copies: int = 1) -> None:
    """Every other copy has come to its end."""

    def ended() -> bool:
        return sum(shop.events().count(name) for name in ("REPLAYED", "OVER")) >= copies

    wait_until(ended, 30, "the other copy's end")


def test_a_retry_with_other_arguments_and_no_countdown(shop: RetryShop) -> None:
    with shop.tasks.worker(concurrency=2):
        assert doubled(shop, shop.change, 1).get(timeout=30) == 2
        settled(shop)
    assert shop.retries() == [0, 1]
    assert "PAYLOAD_MISMATCH" not in shop.events()


def test_autoretry_with_backoff(shop: RetryShop) -> None:
    with shop.tasks.worker(concurrency=2):
        assert doubled(shop, shop.back_off).get(timeout=30) == "third"
        settled(shop)
    assert shop.retries() == [0, 1, 2]


def test_a_retry_that_is_not_thrown(shop: RetryShop) -> None:
    with shop.tasks.worker(concurrency=2):
        doubled(shop, shop.quietly)
        settled(shop)
    assert shop.retries() == [0, 1]


def test_exhausted_retries_run_as_often_as_those_of_a_bare_task(shop: RetryShop) -> None:
    ours, bare = shop.app.tasks["ours"], shop.app.tasks["bare"]
    with shop.tasks.worker(concurrency=2):
        bare.delay()
        with pytest.raises(ValueError, match="declined"):
            doubled(shop, ours).get(timeout=30)
        settled(shop)
        wait_until(lambda: tries(shop, "bare") == [0, 1, 2], 30, "the bare task's attempts")
    assert tries(shop, "ours") == [0, 1, 2]


def tries(shop: RetryShop, name: str) -> list[int]:
    path = shop.tasks.path("tries")
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [int(n) for who, n in lines if who == name]


def test_a_retry_that_ends_before_its_predecessor_was_told_has_the_last_word(shop: RetryShop) -> None:
    """Celery publishes the retry first, and stores RETRY then: over the FAILURE of an attempt that was faster."""
    with shop.tasks.worker(concurrency=2) as worker:
        result = shop.app.tasks["told_late"].delay()
        wait_until(lambda: len(tries(shop, "told_late")) == 2, 20, "both attempts")
        worker.wait_log("retry: Retry in")
        with pytest.raises(ValueError, match="declined"):
            result.get(timeout=30)
        assert result.state == "FAILURE"


def test_a_stale_first_copy_after_the_retry_ran_does_nothing(shop: RetryShop) -> None:
    with shop.tasks.worker(concurrency=1):
        assert shop.retry_once.apply_async((0,), task_id="M").get(timeout=30) == "second"
        shop.retry_once.apply_async((0,), task_id="M")
        settled(shop)
        assert shop.retry_once.AsyncResult("M").state == "SUCCESS"
    assert shop.retries() == [0, 1]


def test_a_failed_task_sent_again_runs(shop: RetryShop) -> None:
    with shop.tasks.worker(concurrency=1):
        with pytest.raises(ValueError, match="declined"):
            shop.decline.delay("A", declined=True).get(timeout=30)
        assert shop.decline.delay("A", declined=False).get(timeout=30) == "paid"
    assert shop.starts() == 2


# --- the connection is cut around the publish ----------------------------------------------------


@pytest.fixture
def cut(amqp_url: str, redis_server: Any) -> Iterator[tuple[RetryShop, ChaosProxy]]:
    with ChaosProxy.before(amqp_url) as proxy, RetryShop(proxy.url(amqp_url), redis_server.new_database()) as shop:
        yield shop, proxy


def stopped(shop: RetryShop, task: Any, where: str) -> Any:
    result = task.apply_async(task_id="M")
    wait_until(lambda: shop.exists(where), 20, "the retry")
    return result


def test_a_connection_cut_between_the_retrys_publish_and_the_ack_doubles_nothing(
    cut: tuple[RetryShop, ChaosProxy],
) -> None:
    shop, proxy = cut
    with shop.tasks.worker(concurrency=2):
        result = stopped(shop, shop.stop_after, "after")
        proxy.cut()
        shop.touch("go-on")
        assert result.get(timeout=40) == "second"
        settled(shop)
    assert shop.retries() == [0, 1]
    assert not overlapping(shop.runs())


def test_a_retry_that_never_reached_the_broker_is_made_up_for(cut: tuple[RetryShop, ChaosProxy]) -> None:
    """The message comes back, waits for its retry until that is due for a minute, and runs again in its place."""
    shop, proxy = cut
    with shop.tasks.worker(concurrency=2) as worker:
        stopped(shop, shop.stop_before, "before")
        proxy.refuse = True
        proxy.cut()
        shop.touch("go-on")
        worker.wait_log("Reject: (OperationalError", 60)
        proxy.refuse = False
        wait_until(lambda: shop.runs("end"), 150, "the second attempt")
    assert shop.retries() == [0, 0, 1]
    assert not overlapping(shop.runs())


def test_a_retry_that_the_broker_refuses_leaves_its_message_there(broker: str, redis_server: Any) -> None:
    """Only what is published is refused: the worker goes on consuming, and Celery alone would give the message up."""
    with (
        ChaosProxy.before(broker) as proxy,
        RetryShop(broker, redis_server.new_database(), broker_write_url=proxy.url(broker)) as shop,
    ):
        result = shop.stop_before.apply_async(task_id="M")
        with shop.tasks.worker(concurrency=2) as worker:
            wait_until(lambda: shop.exists("before"), 30, "the retry")
            proxy.refuse = True
            proxy.cut()
            shop.touch("go-on")
            worker.wait_log("Reject", 60)
            proxy.refuse = False
            wait_until(lambda: "PARKED" in shop.events(), 60, "the message, which waits for its retry")
            assert result.state not in {"FAILURE", "SUCCESS"}
            assert shop.retries() == [0]
