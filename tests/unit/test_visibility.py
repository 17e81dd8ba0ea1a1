"""Which messages a worker keeps for itself, and which workers do: decided without a broker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker.state import active_requests
from kombu import Connection

from celery_idem import IdempotentTask
from celery_idem.visibility import Keeper, KeepVisible
from tests.support.delivery import Shop
from tests.support.processes import wait_until


@pytest.fixture
def connection() -> Iterator[Connection]:
    with Connection("memory://") as connection:
        yield connection


def hold(connection: Connection, *tags: str) -> Any:
    """A channel of the connection that holds these messages, as kombu's own bookkeeping has it."""
    channel = connection.channel()
    for tag in tags:
        channel.qos.append(f"message {tag}", tag)
    channel._qos._on_collect.cancel()  # nothing of this test is given back
    return channel


class Running:
    """A request in the worker's pool."""

    def __init__(self, tag: str) -> None:
        self.message = SimpleNamespace(delivery_tag=tag)


# --- what is kept ---------------------------------------------------------------------------------


def test_all_channels_count_and_what_was_acked_or_given_back_does_not(connection: Connection) -> None:
    first = hold(connection, "a", "b", "c")
    hold(connection, "d")
    connection.channel()  # one that never saw a message
    first.qos.ack("b")
    assert sorted(Keeper(connection, 3).held()) == ["a", "c", "d"]


def test_in_a_shutdown_only_what_runs_counts(connection: Connection) -> None:
    hold(connection, "a", "b")
    keeper = Keeper(connection, 3)
    request = Running("b")
    active_requests.add(request)
    try:
        keeper.draining = True
        assert keeper.held() == ["b"]
    finally:
        active_requests.discard(request)


def test_it_reads_what_the_consumer_changes_meanwhile(connection: Connection) -> None:
    """A plain loop over kombu's dictionary fails here: it sees that it was changed."""
    channel = hold(connection, *map(str, range(5000)))
    done, failed, keeper = threading.Event(), [], Keeper(connection, 3)

    def read() -> None:
        try:
            while not done.is_set():
                keeper.held()
        except Exception as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    end = time.monotonic() + 1
    number = 5000
    while time.monotonic() < end:
        channel.qos.append("message", str(number))
        channel.qos.ack(str(number - 5000))
        number += 1
    done.set()
    reader.join()
    assert not failed
    assert len(keeper.held()) == 5000


# --- the thread -----------------------------------------------------------------------------------

NAME = "celery_idem visibility"


def new_threads(before: set[threading.Thread]) -> list[str]:
    """The names of those that are not among these."""
    return [thread.name for thread in set(threading.enumerate()) - before]


class Tried(Keeper):
    """Answers a refresh with what the test says, and counts them."""

    answers: list[Exception | None]
    times = 0

    def refresh(self) -> int:
        self.times += 1
        answer = self.answers.pop(0) if self.answers else None
        if answer:
            raise answer
        return 0


def test_an_error_is_logged_at_its_first_time_and_tried_again(
    connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Tried(connection, 0.03)
    keeper.answers = [OSError("away"), OSError("away"), ValueError("odd"), None]
    with caplog.at_level(logging.INFO, logger="celery_idem"):
        keeper.start()
        wait_until(lambda: keeper.times >= 6, 30, "six tries")
        keeper.stop()
    told = [(record.levelname, record.message) for record in caplog.records if record.name == "celery_idem"]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert "away" in told[0][1]


def test_stop_ends_the_thread_at_once(connection: Connection) -> None:
    keeper = Tried(connection, 3600)
    keeper.answers = []
    before = set(threading.enumerate())
    keeper.start()
    assert new_threads(before) == [NAME]
    keeper.stop()
    wait_until(lambda: new_threads(before) == [], 30, "the thread's end, long before it would look again")
    assert keeper.times == 0


# --- the step -------------------------------------------------------------------------------------


class Step(KeepVisible):
    """Starts no thread, and remembers what it would keep."""

    @property
    def keeps(self) -> bool:
        return self._keeper is not None


def consumer(app: Celery, *, driver_type: str = "redis", ack_emulation: bool = True) -> Any:
    """What the step looks at of Celery's consumer."""
    channel = SimpleNamespace(ack_emulation=ack_emulation, visibility_timeout=3600)
    transport = SimpleNamespace(driver_type=driver_type, channels=[])
    connection = SimpleNamespace(transport=transport, transport_options={}, clone=lambda **_: None)
    return SimpleNamespace(app=app, connection=connection, task_consumer=SimpleNamespace(channel=channel))


@pytest.mark.parametrize(
    ("conf", "broker", "keeps"),
    [
        ({}, {}, True),
        ({"idempotency_mode": "observe"}, {}, True),
        ({"idempotency_mode": "off"}, {}, False),
        ({"idempotency_keep_visible": False}, {}, False),
        ({}, {"driver_type": "amqp"}, False),
        ({}, {"ack_emulation": False}, False),
    ],
)
def test_it_keeps_on_redis_unless_told_otherwise(conf: dict[str, Any], broker: dict[str, Any], keeps: bool) -> None:
    shop = Shop(**conf)
    parent = consumer(shop.app, **broker)
    step = Step(parent)
    step.start(parent)
    assert step.keeps is keeps
    step.shutdown(parent)
    assert not step.keeps
    shop.close()


def test_a_new_connection_ends_the_thread_of_the_one_before() -> None:
    shop = Shop()
    before = set(threading.enumerate())
    step = Step(consumer(shop.app))
    for _ in range(3):
        step.start(consumer(shop.app))
    wait_until(lambda: new_threads(before) == [NAME], 30, "the end of the threads before")
    step.shutdown(None)
    wait_until(lambda: new_threads(before) == [], 30, "the thread's end")
    shop.close()


def test_a_bound_task_brings_it_along() -> None:
    app = Celery("kept", broker="memory://", set_as_current=False)
    assert KeepVisible not in app.steps["consumer"]

    @app.task(base=IdempotentTask, shared=False)
    def charge() -> None: ...

    app.finalize()
    assert KeepVisible in app.steps["consumer"]
