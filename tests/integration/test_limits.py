"""Told to stop, by a limit, a revoke or a shutdown: the body ends, the key is free at once, and nothing runs twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Task
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from tests.integration.shop import SOURCE, Run, Shop, overlapping
from tests.support.chaos_proxy import ChaosProxy
from tests.support.workers import TaskApp, WorkerProc, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.rabbitmq, pytest.mark.crash]

MORE = """
def beat_until(self, name):
    self.log("start")
    while not (HERE / name).exists():
        try:
            write("beats", self.idempotency.fence, time.time())
            time.sleep(0.05)
        except Exception as error:
            write("swallowed", repr(error))
    self.log("end")
    return "went"

@app.task(
    base=Logged, bind=True, default_retry_delay=1, idempotency=Policy(key="order:{order}", fingerprint=["order"])
)
def stay(self, order, name):
    return beat_until(self, name)

@app.task(base=Logged, bind=True, time_limit=2, idempotency=Policy(key="order:{order}", fingerprint=["order"]))
def stay_two_seconds(self, order, name):
    return beat_until(self, name)

@app.task(base=Logged, bind=True, soft_time_limit=1, idempotency=Policy(key="order:{order}", fingerprint=["order"]))
def softly(self, order, seconds):
    self.log("start")
    time.sleep(seconds)
    self.log("end")
    return "in time"

@app.task(base=Logged, bind=True, soft_time_limit=5)
def end_on_go(self, name):
    self.log("start")
    wait_for(name)
    return "in time"
"""

SOON = 25.0
"""Seconds in which a freed key is taken; the lease is a minute, so a claim left behind would show."""


class LimitShop(Shop):
    """The shop with bodies that beat."""

    def __init__(self, broker: str, store: str, **settings: Any) -> None:
        self.tasks = TaskApp(SOURCE + MORE, broker=broker, settings={"idempotency_store": store, **settings})

    def lines(self, name: str) -> list[list[str]]:
        """What bodies wrote to a file of theirs."""
        path = self.tasks.path(name)
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def started(self, times: int = 1) -> Run:
        """The latest body, once so many have begun."""
        wait_until(lambda: self.starts() >= times, 30, f"body {times}")
        return self.runs("start")[times - 1]

    def free(self, since: float, *, of: Run) -> None:
        """The key is free and the body silent: another message runs soon, and the first body never beats again."""
        began = time.time()
        self.touch("next")
        result = self.stay.apply_async(("A", "next"), task_id="N")
        assert result.get(timeout=30) == "went"
        run = next(run for run in self.runs("start") if run.id == "N")
        assert run.at - max(since, began) < SOON, "the claim was left behind"
        beats = [float(at) for fence, at in self.lines("beats") if int(fence) == of.fence]
        assert not [at for at in beats if at > run.at], "the body went on beside its successor"
        assert not overlapping(self.runs())


Place = Callable[..., LimitShop]


BOTH = pytest.mark.parametrize("place", ["redis", "rabbitmq"], indirect=True)
"""For what depends on how the broker takes a message back; the rest is between the worker and its child."""


@pytest.fixture
def place(request: Any, redis_server: Any) -> Iterator[Place]:
    made: list[LimitShop] = []

    def make(proxy: Any = lambda url: url, **settings: Any) -> LimitShop:
        rabbit = getattr(request, "param", "redis") == "rabbitmq"
        broker = request.getfixturevalue("amqp_url") if rabbit else redis_server.new_database()
        made.append(LimitShop(proxy(broker), redis_server.new_database(), **settings))
        return made[-1]

    yield make
    for shop in made:
        shop.tasks.close()


def come_back(shop: LimitShop) -> None:
    """Have a Redis broker give back at once what nobody acked; RabbitMQ does so by itself."""
    if shop.app.connection_for_read().transport.driver_type == "redis":
        with shop.app.connection_for_read() as connection:
            connection.default_channel.qos.restore_visible(interval=1)


# --- time limits ----------------------------------------------------------------------------------


def test_a_soft_limit_in_the_body_frees_the_key(place: Place) -> None:
    shop = place()
    with shop.tasks.worker(concurrency=1):
        with pytest.raises(SoftTimeLimitExceeded):
            shop.softly.delay("A", 30).get(timeout=30)
        shop.free(time.time(), of=shop.started())


def test_a_soft_limit_while_the_result_is_stored_fails_nothing(place: Place, redis_server: Any) -> None:
    store = redis_server.new_database()
    with ChaosProxy.before(store) as proxy:
        shop = place(idempotency_store=proxy.url(store), idempotency_store_timeout=10)
        with shop.tasks.worker(concurrency=1):
            # With this, Redis has the scripts: to send one is another round trip.
            assert shop.work.delay(0).get(timeout=30) == "done"
            result = shop.end_on_go.apply_async(("go",), task_id="M")
            shop.started(2)
            proxy.delay = 3.0  # so the limit comes while the store is asked, even if the body was slow to begin
            shop.touch("go")
            assert result.get(timeout=30) == "in time"
            proxy.delay = 0.0
            assert shop.end_on_go.apply_async(("go",), task_id="M").get(timeout=30) == "in time"
            wait_until(lambda: "REPLAYED" in shop.events(), 20, "the copy to be replayed")
    assert shop.starts() == 2


@BOTH
def test_a_hard_limit_frees_the_key(place: Place) -> None:
    shop = place()
    with shop.tasks.worker(concurrency=1):
        result = shop.stay_two_seconds.delay("A", "never")
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=30)
        told = time.time()
        run = shop.started()
        wait_until(lambda: not alive(run.pid), 20, "the child to be gone")
        free_of(shop, shop.stay_two_seconds, told)
    assert not shop.lines("swallowed")


def free_of(shop: LimitShop, task: Any, since: float) -> None:
    """The key of this task, order A, is free."""
    shop.touch("next")
    assert task.apply_async(("A", "next"), task_id="N", time_limit=60).get(timeout=30) == "went"
    run = next(run for run in shop.runs("start") if run.id == "N")
    assert run.at - since < SOON, "the claim was left behind"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_hard_limit_never_strikes_a_copy_that_only_waits(place: Place) -> None:
    """It would store a failure under the id of the message that is running."""
    shop = place(idempotency_wait_timeout=20)
    with shop.tasks.worker(concurrency=2):
        result = shop.stay_two_seconds.apply_async(("A", "go"), task_id="M", time_limit=60)
        shop.started()
        shop.stay_two_seconds.apply_async(("A", "go"), task_id="M", time_limit=6)
        wait_until(lambda: "PARKED" in shop.events(), 20, "the copy to be parked")
        wait_until(lambda: shop.events().count("PARKED") >= 2, 20, "and parked again")
        assert result.state == "PENDING"
        shop.touch("go")
        assert result.get(timeout=30) == "went"


# --- revokes --------------------------------------------------------------------------------------


@BOTH
def test_a_task_revoked_before_it_began_takes_no_claim(place: Place) -> None:
    shop = place()
    with shop.tasks.worker(concurrency=1) as worker:
        shop.stay.apply_async(("B", "go"), task_id="before")
        shop.started()
        result = shop.stay.apply_async(("A", "never"), task_id="M")
        shop.app.control.revoke("M")
        worker.wait_log("flagged as revoked: M")
        shop.touch("go")
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
        wait_until(lambda: len(shop.runs("end")) == 1, 20, "the first body's end")
        shop.touch("next")
        assert shop.stay.apply_async(("A", "next"), task_id="N").get(timeout=30) == "went"
    assert [run.id for run in shop.runs("start")] == ["before", "N"]


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGQUIT", "SIGKILL"])
def test_a_terminated_task_stops_and_frees_the_key(place: Place, signal: str) -> None:
    shop = place()
    with shop.tasks.worker(concurrency=2):
        result = shop.stay.apply_async(("A", "never"), task_id="M")
        run = shop.started()
        shop.app.control.revoke("M", terminate=True, signal=signal)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
        shop.free(time.time(), of=run)
    assert not shop.lines("swallowed")


# --- shutdowns ------------------------------------------------------------------------------------


def by_signal(shop: LimitShop, worker: WorkerProc) -> None:
    worker._running.send(15)  # ``term`` would wait for the end


def by_control(shop: LimitShop, worker: WorkerProc) -> None:
    shop.app.control.shutdown(destination=[f"{worker.name}@localhost"])


@pytest.mark.parametrize("shut", [by_signal, by_control])
def test_a_warm_shutdown_lets_the_body_finish(place: Place, shut: Any) -> None:
    shop = place()
    with shop.tasks.worker(concurrency=1) as worker:
        result = shop.stay.apply_async(("A", "go"), task_id="M")
        shop.started()
        shut(shop, worker)
        wait_until(lambda: "Warm shutdown" in worker.log or "shutdown" in worker.log.lower(), 20, "the shutdown")
        shop.touch("go")
        wait_until(lambda: not worker.alive, 20, "the worker's end")
    assert result.get(timeout=30) == "went"
    assert [run.word for run in shop.runs()] == ["start", "end"]
    with shop.tasks.worker(concurrency=1):
        come_back(shop)
        assert shop.stay.apply_async(("A", "go"), task_id="M").get(timeout=30) == "went"
    assert shop.starts() == 1


@BOTH
@pytest.mark.parametrize("softly", [False, True])
def test_a_cold_shutdown_gives_the_message_to_another_worker_at_once(place: Place, *, softly: bool) -> None:
    shop = place(**({"worker_soft_shutdown_timeout": 2.0} if softly else {}))
    with shop.tasks.worker(concurrency=1) as worker:
        result = shop.stay.apply_async(("A", "go"), task_id="M")
        first = shop.started()
        wait_until(lambda: shop.lines("beats"), 20, "a beat")
        worker.quit()
        gone = time.time()
    shop.touch("go")
    with shop.tasks.worker(concurrency=1):
        ready = time.time()
        come_back(shop)
        assert result.get(timeout=30) == "went"
    second = shop.started(2)
    assert second.at - ready < SOON, "the claim was left behind"
    assert second.attempt == 1, "a run that was told to stop is no death"
    beats = [float(at) for fence, at in shop.lines("beats") if int(fence) == first.fence]
    assert max(beats) < gone
    assert not shop.lines("swallowed")


@BOTH
def test_a_cold_shutdown_of_gevent_gives_its_messages_to_another_worker(place: Place) -> None:
    shop = place()
    with shop.tasks.worker(pool="gevent", concurrency=3) as worker:
        results = [shop.stay.apply_async((order, "go"), task_id=order) for order in "ABC"]
        shop.started(3)
        worker.quit()
    shop.touch("go")
    with shop.tasks.worker(concurrency=1):
        ready = time.time()
        assert [result.get(timeout=30) for result in results] == ["went"] * 3
    assert shop.started(4).at - ready < SOON, "the claim was left behind"
    assert [run.word for run in shop.runs()] == ["start"] * 3 + ["start", "end"] * 3
    assert {run.attempt for run in shop.runs()} <= {1, 2}, "the process may be gone before its greenlets are"


@pytest.mark.parametrize(
    ("pool", "words", "state"), [("threads", ["start", "end"], "SUCCESS"), ("solo", ["start"], "FAILURE")]
)
def test_a_cold_shutdown_gives_nothing_back_on_threads_and_solo(
    place: Place, pool: str, words: list[str], state: str
) -> None:
    shop = place()
    with shop.tasks.worker(pool=pool, concurrency=1) as worker:
        result = shop.wait_for_go.apply_async(("go",), task_id="M")
        shop.started()
        worker._running.send(3)  # ``quit`` would wait for the end
        worker.wait_log("NotImplementedError" if pool == "threads" else "Hitting Ctrl+C again")
        if pool == "threads":
            shop.touch("go")
        wait_until(lambda: not worker.alive, 30, "the worker's end")
    assert [run.word for run in shop.runs()] == words
    assert result.state == state
    with shop.tasks.worker(concurrency=1):
        come_back(shop)
        assert shop.work.delay(0).get(timeout=30) == "done"
    assert [run.word for run in shop.runs() if run.id == "M"] == words


def test_a_soft_shutdown_lets_a_body_finish_that_is_nearly_done(place: Place) -> None:
    shop = place(worker_soft_shutdown_timeout=6.0)
    with shop.tasks.worker(concurrency=1) as worker:
        result = shop.stay.apply_async(("A", "go"), task_id="M")
        shop.started()
        worker._running.send(3)  # ``quit`` would wait for the end
        worker.wait_log("Initiating Soft Shutdown")
        shop.touch("go")
        wait_until(lambda: not worker.alive, 30, "the worker's end")
    assert result.get(timeout=30) == "went"
    assert [run.word for run in shop.runs()] == ["start", "end"]


@BOTH
def test_a_task_cancelled_by_a_lost_connection_runs_again_alone(place: Place) -> None:
    proxies: list[ChaosProxy] = []

    def proxied(url: str) -> str:
        proxies.append(ChaosProxy.before(url))
        return proxies[-1].url(url)

    shop = place(proxied, worker_cancel_long_running_tasks_on_connection_loss=True)
    try:
        with shop.tasks.worker(concurrency=1):
            result = shop.stay.apply_async(("A", "go"), task_id="M")
            first = shop.started()
            wait_until(lambda: shop.lines("beats"), 20, "a beat")
            proxies[0].cut()
            wait_until(lambda: not alive(first.pid), 30, "the child to be stopped")
            stopped = time.time()
            wait_until(lambda: come_back(shop) or shop.starts() >= 2, 40, "the second body")
            shop.touch("go")
            assert result.get(timeout=30) == "went"
        second = shop.started(2)
        assert second.attempt == 1
        beats = [float(at) for fence, at in shop.lines("beats") if int(fence) == first.fence]
        assert max(beats) <= min(second.at, stopped)
        assert shop.starts() == 2
    finally:
        for proxy in proxies:
            proxy.close()


if hasattr(Task, "retry_on_worker_lost"):  # Celery 5.7

    @BOTH
    def test_a_retry_in_place_of_a_killed_child_runs_after_it(place: Place) -> None:
        """Celery sends the next attempt itself: the same id, one retry more, and nothing says redelivered."""
        shop = place(task_retry_on_worker_lost=True)
        with shop.tasks.worker(concurrency=2) as worker:
            result = shop.stay.apply_async(("A", "go"), task_id="M")
            first = shop.started()
            worker.kill_child(first.pid)
            shop.touch("go")
            second = shop.started(2)
            assert result.get(timeout=30) == "went"
        assert second.retries == 1
        assert second.fence > first.fence
        assert shop.starts() == 2
