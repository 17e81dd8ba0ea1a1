"""A real Django project under Celery's namespace: both doors, on_commit, autodiscovered shared tasks, a worker."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import remove_dir, scratch_dir
from tests.support.services import RedisServer
from tests.support.workers import ROOT, WorkerProc, wait_until

pytestmark = pytest.mark.redis
PROJECT = Path(__file__).with_name("django_shop")
NAMES = ["charge", "remind", "refund"]


class Site:
    """The project in a directory of its own, with the door under test in its environment."""

    def __init__(self, redis_server: RedisServer, door: str) -> None:
        self.dir = scratch_dir("django")
        shutil.copytree(PROJECT, self.dir, dirs_exist_ok=True)
        self.database = self.dir / "shop.sqlite3"
        self.env = {
            "SHOP_DOOR": door,
            "SHOP_DATABASE": str(self.database),
            "SHOP_BROKER": redis_server.new_database(),
            "SHOP_STORE": redis_server.new_database(),
            "DJANGO_SETTINGS_MODULE": "shop.settings",
        }

    def run(self, *words: str) -> str:
        env = {**os.environ, **self.env, "PYTHONPATH": os.pathsep.join([str(self.dir), str(ROOT)])}
        argv = [sys.executable, "-W", "error::UserWarning", "-m", *words]
        done = subprocess.run(argv, cwd=self.dir, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ledger(self) -> dict[str, int]:
        with contextlib.closing(sqlite3.connect(self.database)) as database:
            rows = database.execute("SELECT what, COUNT(*) FROM orders_entry GROUP BY what").fetchall()
        return dict(rows)


@pytest.fixture(scope="module", params=["setting", "class"])
def site(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Site]:
    site = Site(redis_server, request.param)
    site.run("django", "migrate", "--verbosity", "0")
    yield site
    remove_dir(site.dir)


@pytest.fixture(scope="module")
def placed(site: Site) -> Any:
    """What the web process saw; the worker has worked through all of it."""
    told = json.loads(site.run("orders.place"))
    with WorkerProc("shop", cwd=site.dir, env=site.env, concurrency=2) as worker:
        wait_until(lambda: worker.log.count(" succeeded in ") == 2 * len(NAMES), 30, "every copy is through")
        assert "ERROR" not in worker.log
    return told


def test_a_duplicate_runs_once_through_either_door(site: Site, placed: Any) -> None:
    by_setting = site.env["SHOP_DOOR"] == "setting"
    assert site.ledger() == {"charge": 1 if by_setting else 2, "remind": 2, "refund": 1}


def test_every_task_keeps_djangos_own_methods(placed: Any) -> None:
    assert placed["is_django"] == [True, True, True]
    assert "celery.contrib.django.task" in placed["app_task"], "the app's own Task is left as it was"


def test_on_commit_sends_with_the_commit_and_never_without(placed: Any) -> None:
    assert placed["sent_after_rollback"] == 0
    assert placed["sent_before_commit"] == 0
    assert placed["sent_after_commit"] == len(NAMES)


def test_settings_are_read_under_djangos_namespace(site: Site) -> None:
    told = site.run("celery", "-A", "shop", "idem", "check")
    assert "refund" in told
    assert ("orders.tasks.charge" in told) == (site.env["SHOP_DOOR"] == "setting")
