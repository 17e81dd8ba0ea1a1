"""A worker with wrong settings refuses to start and says what to do; a store that is merely away does not stop it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import TaskApp, WorkerProc, wait_until

SOURCE = """
from celery_idem import IdempotentTask, Policy

@app.task(base=IdempotentTask, key="order:{order}")
def pay(order):
    return order
"""


def refused(settings: dict[str, Any], source: str = SOURCE, *, env: dict[str, str] | None = None) -> str:
    """Start a worker that must not come up, and return its log."""
    with TaskApp(source, broker="filesystem://", settings=settings) as tasks:
        worker = tasks.worker(concurrency=1, env=env or {})
        worker.start(wait=False)
        wait_until(lambda: not worker.alive, 30, "the worker to refuse")
        log = worker.log
        assert "ready." not in log
        return log


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "idempotency_store is not set"),
        ({"idempotency_store": "memory://", "idempotency_leese": 5}, "did you mean idempotency_lease?"),
        ({"idempotency_store": "memory://", "idempotency_lease": -5}, "idempotency_lease = -5: must be above 0"),
        ({"idempotency_store": "mongodb://x"}, "no store speaks 'mongodb'"),
        ({"idempotency_store": "sqlite:////no/such/place/idem.db"}, "there is no directory /no/such/place: make it"),
        ({"idempotency_store": "memory://", "idempotency_mode": "on"}, "idempotency_mode = 'on'"),
    ],
)
def test_wrong_settings_stop_a_worker(settings: dict[str, Any], said: str) -> None:
    assert said in refused(settings)


def test_a_wrong_mode_in_the_environment_stops_a_worker() -> None:
    log = refused({"idempotency_store": "memory://"}, env={"CELERY_IDEMPOTENCY_MODE": "maybe"})
    assert "CELERY_IDEMPOTENCY_MODE" in log


def test_a_key_that_names_no_argument_stops_a_worker() -> None:
    log = refused({"idempotency_store": "memory://"}, SOURCE.replace("{order}", "{oder}"))
    assert "did you mean 'order'" in log


@pytest.mark.postgres
def test_a_missing_table_stops_a_worker_and_names_the_command(postgres_url: str) -> None:
    with TaskApp(SOURCE, broker="filesystem://", settings={"idempotency_store": postgres_url}) as tasks:
        worker = tasks.worker(concurrency=1)
        worker.start(wait=False)
        wait_until(lambda: not worker.alive, 30, "the worker to refuse")
        assert "idem init" in worker.log
        subprocess.run(
            [sys.executable, "-m", "celery", "-A", f"{tasks.name}:app", "idem", "init"],
            cwd=tasks.dir,
            env={**os.environ, "PYTHONPATH": f"{tasks.dir}{os.pathsep}{Path.cwd()}"},
            check=True,
            capture_output=True,
        )
        with tasks.worker(concurrency=1):
            assert tasks.module.pay.delay(7).get(timeout=30) == 7


def test_a_store_that_does_not_answer_stops_no_worker() -> None:
    settings = {"idempotency_store": "redis://127.0.0.1:1/0", "idempotency_store_timeout": 0.5}
    with TaskApp(SOURCE, broker="filesystem://", settings=settings) as tasks:
        worker: WorkerProc = tasks.worker(concurrency=1)
        with worker:
            worker.wait_log("tasks will wait for it")


PLAIN = """
@app.task
def pay(order):
    return order
"""


@pytest.mark.parametrize("settings", [{"idempotency_store": "memory://"}, {}])
def test_settings_without_a_task_that_is_switched_on_are_told(settings: dict[str, Any]) -> None:
    with TaskApp(PLAIN, broker="filesystem://", settings=settings) as tasks, tasks.worker(concurrency=1) as worker:
        assert tasks.module.pay.delay(7).get(timeout=30) == 7
        assert ("no task is switched on" in worker.log) is bool(settings)


def test_a_worker_says_how_many_tasks_are_switched_on() -> None:
    settings = {"idempotency_store": "memory://", "task_annotations": ["celery_idem:annotation"]}
    with TaskApp(PLAIN, broker="filesystem://", settings=settings) as tasks, tasks.worker(concurrency=1) as worker:
        assert "1 task is switched on, in mode enforce\n" in worker.log


def test_a_worker_says_how_many_tasks_are_left_out() -> None:
    settings = {
        "idempotency_store": "memory://",
        "task_annotations": ["celery_idem:annotation"],
        "idempotency_tasks": {"*.refund": {"ttl": 60}},
    }
    source = PLAIN + PLAIN.replace("pay", "refund")
    with TaskApp(source, broker="filesystem://", settings=settings) as tasks, tasks.worker(concurrency=1) as worker:
        assert "1 task is switched on, in mode enforce; 1 left out by idempotency_tasks" in worker.log
