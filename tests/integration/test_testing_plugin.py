"""``celery_idem.testing`` as its users have it: real workers killed at every point, and a suite of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_idem.core.records import State
from celery_idem.testing import POINTS, KillPoints, Worker
from tests.integration.shop import Shop
from tests.support.workers import ROOT, wait_until

pytestmark = [pytest.mark.redis, pytest.mark.crash]
RUNS = {"claim": [1], "body": [2], "completion": [1, 2], "publish": [1], "settle": [1], "ack": [1]}
"""The attempts whose body ran, by the point at which the first process was killed."""


@pytest.fixture
def shop(redis_server: object) -> Iterator[Shop]:
    new = redis_server.new_database  # type: ignore[attr-defined]
    with Shop(new(), new(), transport_options={"visibility_timeout": 1}) as shop:
        yield shop


def test_a_child_killed_at_each_point_leaves_what_the_point_says(shop: Shop, tmp_path: Path) -> None:
    points = KillPoints(tmp_path / "points")
    strikes = {point: points.kill(before=point, task=shop.work, message_id=point) for point in POINTS}
    with shop.tasks.worker(concurrency=3, env=points.env, extra=points.arguments):
        results = {point: shop.work.apply_async((0, point), task_id=point) for point in POINTS}
        for point in POINTS:
            strikes[point].wait(30)
            assert results[point].get(timeout=30) == point
        # With the result stored, Celery 5.7 acks for the dead child; before, it came twice.
        wait_until(lambda: "REPLAYED" in shop.events(), 30, "the replay after a death between completion and result")
    starts = {point: [run.attempt for run in shop.runs("start") if run.id == point] for point in POINTS}
    assert starts == RUNS


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_worker_that_is_killed_whole_and_another_one(shop: Shop, pool: str) -> None:
    from celery_idem.stores.base import open_store

    with Worker(f"{shop.tasks.name}:app", pool=pool, cwd=shop.tasks.dir, env=path()) as worker:
        killed = worker.kill(before="completion", task="shop.other", whole=True)
        spared = shop.work.delay(0, "spared")
        assert spared.get(timeout=30) == "spared"
        assert not killed.struck
        killed.cancel()
        killed = worker.kill(before="completion", whole=True)
        result = shop.work.apply_async((0, "paid"), task_id="M")
        killed.wait(20)
        wait_until(lambda: not worker.alive, 20, "the worker is dead")
        (record,) = [r for r in open_store(shop.app.conf.idempotency_store).find() if r.message_id == "M"]
        assert record.state is State.CLAIMED
    deadline = (
        time.monotonic() + 1.2
    )  # Redis gives a message back after its visibility timeout, to a worker that starts
    wait_until(lambda: time.monotonic() > deadline, 20, "the visibility timeout")
    with Worker(f"{shop.tasks.name}:app", pool=pool, cwd=shop.tasks.dir, env=path()):
        assert result.get(timeout=30) == "paid"
    assert [run.attempt for run in shop.runs("start") if run.id == "M"] == [1, 2]


def test_a_held_delivery_lets_a_second_message_arrive_while_it_runs(shop: Shop) -> None:
    with Worker(f"{shop.tasks.name}:app", concurrency=2, cwd=shop.tasks.dir, env=path()) as worker:
        with worker.hold(before="completion", task=shop.charge) as held:
            first = shop.charge.delay(1, 50)
            held.wait()
            second = shop.charge.delay(1, 50)
            wait_until(lambda: "PARKED" in shop.events(), 20, "the second message is parked")
            assert not first.ready()
        assert first.get(timeout=30) == second.get(timeout=30)
    assert shop.starts() == 1


def test_a_plan_nobody_comes_to_is_told(tmp_path: Path) -> None:
    strike = KillPoints(tmp_path).kill(before="body", task="shop.charge")
    with pytest.raises(AssertionError, match=r"shop\.charge"):
        strike.wait(0.05)
    with pytest.raises(ValueError, match="completion"):
        KillPoints(tmp_path).kill(before="bodies")  # type: ignore[arg-type]


def test_a_worker_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_module"):
        Worker("no_such_module:app", cwd=tmp_path).start()


def path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


# --- somebody's own suite -------------------------------------------------------------------------

SUITE = {
    "shop.py": """
        from celery import Celery
        from celery_idem import IdempotentTask, Policy

        app = Celery("shop", broker={broker!r}, backend={broker!r})
        app.conf.update(idempotency_store={store!r}, worker_lost_wait=0.5, task_always_eager=True)
        charged = []

        @app.task(base=IdempotentTask, idempotency=Policy(key="order:{{order}}"))
        def charge(order):
            charged.append(order)
            return order
        """,
    "conftest.py": """
        import pytest

        pytest_plugins = ["celery_idem.testing"]

        @pytest.fixture
        def idempotency_app():
            from shop import app
            return app
        """,
    "test_shop.py": """
        from shop import app, charge, charged

        def test_in_memory(idem):
            assert idem.again(idem.send(charge, 7)).event == "REPLAYED"
            assert charged == [7]
            assert idem.runs(charge) == 1

        def test_all_is_back():
            assert (app.conf.broker_url, app.conf.task_always_eager) == ({broker!r}, True)
            assert app.backend.url.startswith("redis:")

        def test_a_real_worker(idem_worker):
            app.conf.task_always_eager = False
            worker = idem_worker("shop:app", concurrency=1)
            killed = worker.kill(before="publish", task=charge)
            assert charge.delay(7).get(timeout=30) == 7
            assert killed.struck
        """,
}


def run_pytest(folder: Path, *words: str, cwd: Path | None = None) -> str:
    argv = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *words, str(folder)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CELERY_", "PYTEST_"))}
    env |= {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(argv, cwd=cwd or folder, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_in_a_suite_of_its_users(redis_server: object, tmp_path: Path) -> None:
    places = {name: redis_server.new_database() for name in ("broker", "store")}  # type: ignore[attr-defined]
    for name, text in SUITE.items():
        (tmp_path / name).write_text(textwrap.dedent(text).format(**places))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert "3 passed" in run_pytest(tmp_path)


def test_pytest_is_not_needed_by_a_worker_and_not_imported_by_the_library() -> None:
    code = "import celery_idem, celery_idem.testing.armed, sys; assert 'pytest' not in sys.modules; "
    code += "from celery_idem.delivery import Delivering; assert not hasattr(Delivering.body, '__wrapped__')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_example_projects_own_suite() -> None:
    assert " passed" in run_pytest(ROOT / "example_project" / "tests", cwd=ROOT)
