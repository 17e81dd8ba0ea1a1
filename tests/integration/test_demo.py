"""The demo is run as its reader runs it: on files alone, on private servers, lacking a server, stopped halfway."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import Process
from tests.support.workers import ROOT, pids_named, wait_until

ANYWHERE = {1: (3, 1), 2: (2, 1), 3: (2, 1), 4: (2, 1), 5: (2, 2), 6: (2, 1), 7: (2, 1)}
"""Charges by row: without celery_idem, and with it."""
WHOLE_WORKER = {8: (2, 1), 9: (2, 1)}
GOVERNED = {
    "an owner approves": (1, 1, "completed"),
    "process killed between PUT and answer": (1, 1, "completed"),
    "worker killed between PUT and answer": (1, 1, "completed"),
    "an approval of another payload": (0, 0, "failed: gate refused, action_digest"),
    "an approval that has expired": (0, 0, "failed: gate refused, expired"),
    "two owners approve at once": (1, 1, "completed"),
    "admission is closed": (1, 1, "completed"),
    "the provider says no": (1, 0, "failed: the endpoint says rejected"),
    "an answer to something else": (1, 1, "completed"),
    "an answer that never comes": (1, 1, "failed: ambiguous"),
}
"""By scenario: PUTs that reached the refund service, refunds in its ledger, the action's end."""


@contextmanager
def demo(tmp_path: Path, *words: str, env: Mapping[str, str] | None = None) -> Iterator[Process]:
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", "TMPDIR": str(tmp_path), "COLUMNS": "140", **(env or {})}
    argv = [sys.executable, "-m", "example_project.demo", *words]
    process = Process(argv, name="demo", log_path=tmp_path / "demo.log", env=env, cwd=ROOT)
    try:
        yield process
    finally:
        process.close()


def rows(log: str) -> dict[int, tuple[int, int]]:
    found = re.findall(r"│ (\d) │.*│ (\d) charges? +│ (\d) charges? +│.*│ ✓ ", log)
    return {int(number): (int(without), int(within)) for number, without, within in found}


def governed_rows(log: str) -> dict[str, tuple[int, int, str]]:
    """The second table: the lines of a row put together, and only rows that are ticked."""
    found, cells = {}, [""] * 8
    for line in log.partition("│ what was done")[2].splitlines():
        if line.startswith("│ "):
            cells = [f"{cell} {more.strip()}".strip() for cell, more in zip(cells, line.split("│")[1:-1], strict=True)]
        elif line.startswith(("├", "└")):
            if cells[-1] == "✓":
                found[cells[1]] = (int(cells[3]), int(cells[4]), cells[5])
            cells = [""] * 8
    return found


def assert_nothing_left(tmp_path: Path) -> None:
    wait_until(lambda: not pids_named(str(tmp_path)), 30, "no process of the demo is left")
    assert [path.name for path in tmp_path.iterdir()] == ["demo.log"]


@pytest.mark.crash
@pytest.mark.timeout(400)
def test_without_any_server(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.wait(380) == 0, process.log
        assert rows(process.log) == ANYWHERE
        assert "7 of 7 rows are as promised" in process.log
        assert "so it is lost, whatever celery_idem does" in " ".join(process.log.split())
        assert governed_rows(process.log) == GOVERNED
        assert "10 of 10 rows are as promised" in process.log
    assert_nothing_left(tmp_path)


@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.crash
@pytest.mark.timeout(400)
def test_with_private_servers_and_whole_workers_killed(tmp_path: Path) -> None:
    with demo(tmp_path, "--broker", "redis", "--store", "postgresql") as process:
        assert process.wait(380) == 0, process.log
        assert rows(process.log) == ANYWHERE | WHOLE_WORKER
        assert "9 of 9 rows are as promised" in process.log
        assert governed_rows(process.log) == GOVERNED
    assert_nothing_left(tmp_path)


def test_a_server_that_is_not_installed_is_named_with_what_installs_it(tmp_path: Path) -> None:
    with demo(tmp_path, "--broker", "redis", env={"PATH": str(tmp_path)}) as process:
        assert process.wait(60) == 2
        assert "apt-get install --no-install-recommends redis-server" in process.log
    assert_nothing_left(tmp_path)


def test_stopping_it_halfway_leaves_nothing_behind(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        process.wait_log("1. the same message", 60)
        process.send(signal.SIGINT)
        assert process.wait(60) == 130
    assert_nothing_left(tmp_path)
