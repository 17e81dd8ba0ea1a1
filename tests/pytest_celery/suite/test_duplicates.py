"""One effect per key, as a user of pytest-celery would test it: on Redis and on RabbitMQ, killed and started again."""

from __future__ import annotations

import time
from typing import Any

from celery import chain
from pytest_celery import RESULT_TIMEOUT, CeleryTestSetup
from shop_tasks import charge, ship

from tests.support.processes import wait_until


def marks(setup: CeleryTestSetup) -> list[str]:
    with setup.backend.container.client as client:
        return list(client.lrange("marks", 0, -1))


def let(setup: CeleryTestSetup, key: str) -> None:
    with setup.backend.container.client as client:
        client.set(key, 1)


def replayed(setup: CeleryTestSetup, times: int) -> None:
    wait_until(lambda: setup.worker.logs().count("REPLAYED") >= times, RESULT_TIMEOUT, f"{times} replays")


def test_one_message_sent_twice_runs_once(celery_setup: CeleryTestSetup) -> None:
    results = [charge.s(1).apply_async(task_id="M") for _ in range(2)]
    assert [result.get(timeout=RESULT_TIMEOUT) for result in results] == ["receipt 1"] * 2
    replayed(celery_setup, 1)
    assert marks(celery_setup) == ["charge begins", "charge charges"]


def test_a_worker_killed_and_started_again_charges_once(celery_setup: CeleryTestSetup) -> None:
    result = charge.s(1, go="go").apply_async(task_id="M")
    wait_until(lambda: marks(celery_setup) == ["charge begins"], RESULT_TIMEOUT, "the body")
    celery_setup.worker.kill()
    killed = time.monotonic()
    let(celery_setup, "go")
    # A Redis broker gives the message back when a worker starts, if its visibility timeout of 1 s is over by then.
    wait_until(lambda: time.monotonic() > killed + 1.2, 20, "the visibility timeout")
    celery_setup.worker.restart()
    assert result.get(timeout=RESULT_TIMEOUT) == "receipt 1"
    assert charge.s(1).apply_async().get(timeout=RESULT_TIMEOUT) == "receipt 1"
    assert marks(celery_setup) == ["charge begins", "charge begins", "charge charges"]


def test_a_chain_sent_twice_continues_once(celery_setup: CeleryTestSetup) -> None:
    def send() -> Any:
        return chain(charge.s(1).set(task_id="M"), ship.s(order=1).set(task_id="S")).apply_async()

    assert [send().get(timeout=RESULT_TIMEOUT) for _ in range(2)] == ["receipt 1, shipped"] * 2
    replayed(celery_setup, 1)
    assert marks(celery_setup) == ["charge begins", "charge charges", "ship ships"]
