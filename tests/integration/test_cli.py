"""``celery -A app idem`` as an operator types it: real processes on every store that outlives one."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import ROOT

MODULE = """
import os, signal
from celery import Celery
from click import Option
from celery_idem import IdempotentTask, Policy

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.update(idempotency_store={url!r}, task_always_eager=True)
app.user_options["preload"].add(Option(["--region"], default="north"))

@app.task(base=IdempotentTask, idempotency=Policy(key="order:{{order_id}}", fingerprint=["amount"]))
def charge(order_id, amount):
    if amount < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {{"order": order_id, "paid": amount}}
"""


@dataclass
class Project:
    """A directory with one module, ``shop``."""

    path: Path

    def run(self, *argv: str, exit_code: int = 0, answer: str = "") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.path), str(ROOT)])}
        done = subprocess.run(
            [sys.executable, *argv], cwd=self.path, env=env, input=answer, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    def idem(self, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "celery", "-A", "shop", "idem", *words, **how)

    def charge(self, order_id: int, amount: int, **how: Any) -> str:
        return self.run("-c", f"import shop; print(shop.charge.delay({order_id}, {amount}).get())", **how).stdout


@pytest.fixture
def project_on(tmp_path: Path) -> Callable[[str], Project]:
    def make(url: str) -> Project:
        (tmp_path / "shop.py").write_text(textwrap.dedent(MODULE.format(url=url)))
        return Project(tmp_path)

    return make


STORES = [
    "sqlite",
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("postgresql", marks=pytest.mark.postgres),
]


@pytest.mark.parametrize("store", STORES)
def test_an_operators_day(store: str, project_on: Any, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"sqlite:///{tmp_path}/idem.db"
    if store != "sqlite":
        url = request.getfixturevalue({"redis": "redis_url", "postgresql": "postgres_url"}[store])
    project = project_on(url)

    if store == "postgresql":
        assert "idem init" in project.idem("check", exit_code=1).stderr
    assert json.loads(project.idem("init", "--json").stdout)["schema"] is (store != "redis")
    project.idem("init")
    assert "shop.charge  key order:{order_id}; fingerprint amount" in project.idem("check").stdout

    assert project.charge(1, 20) == "{'order': 1, 'paid': 20}\n"
    project.charge(2, -1, exit_code=-signal.SIGKILL)
    listed = json.loads(project.idem("list", "--json").stdout)["records"]
    assert [record["state"] for record in listed] == ["COMPLETED", "CLAIMED"]
    assert listed[1]["holder"]["provably_dead"] is True
    completed = listed[0]["key"]
    shown = project.idem("show", completed[:8], "--value").stdout
    assert '{"order": 1, "paid": 20}' in shown

    by_arguments = ("--task", "shop.charge", "--args", "[1]")
    assert "Forget it?" in project.idem("forget", *by_arguments, exit_code=1).stdout
    project.idem("forget", *by_arguments, answer="y\n")
    assert project.charge(1, 30) == "{'order': 1, 'paid': 30}\n"
    project.idem("forget", "--task", "shop.charge", "--kwargs", '{"order_id": 2}', "--yes")
    assert project.charge(2, 5) == "{'order': 2, 'paid': 5}\n"
    assert json.loads(project.idem("purge", "--all", "--json").stdout) == {"purged": 0, "more": False}


def test_a_record_nobody_can_read(project_on: Any, tmp_path: Path) -> None:
    project = project_on(f"sqlite:///{tmp_path}/idem.db")
    project.charge(1, 20)
    with sqlite3.connect(tmp_path / "idem.db") as connection:
        connection.execute("UPDATE celery_idem_record SET notes = 'not json'")
    connection.close()
    by_arguments = ("--task", "shop.charge", "--args", "[1]")
    assert "RecordCorrupt" in project.idem("show", *by_arguments, "--json", exit_code=1).stdout
    assert "warning: " in project.idem("list").stdout
    project.idem("forget", *by_arguments, "--yes")
    assert project.charge(1, 30) == "{'order': 1, 'paid': 30}\n"


def test_help_reads_well_and_the_apps_preload_options_pass(project_on: Any, tmp_path: Path) -> None:
    project = project_on(f"sqlite:///{tmp_path}/idem.db")
    assert re.search(r"\n  idem +Look after the records", project.run("-m", "celery", "-A", "shop", "--help").stdout)
    shown = project.idem("--help").stdout
    for command in ("init", "check", "show", "list", "forget", "purge"):
        assert f"\n  {command:<7} " in shown
    assert "..." not in shown.partition("Commands:")[2]
    assert project.idem("--region", "south", "list").stdout == "no record\n"


def test_a_store_that_does_not_answer_is_told_in_one_line(project_on: Any) -> None:
    down = {"check": "redis://:hunter2@127.0.0.1:1/0", "list": "postgresql+psycopg2://me:hunter2@127.0.0.1:1/db"}
    for command, url in down.items():
        done = project_on(url).idem(command, exit_code=1)
        assert done.stderr.startswith("Error: ")
        assert done.stderr.count("\n") == 1
        assert "hunter2" not in done.stdout + done.stderr
