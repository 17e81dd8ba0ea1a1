"""Two public projects' own test suites, bare and with the whole app switched on by its setting: the same results.

The source distributions are downloaded, pinned by exact version, and run in environments of their own under ``--dir``.
What switches them on is one file of configuration, loaded as a pytest plugin, which gives Celery the two settings as
defaults of every app; nothing of theirs or of Celery's is replaced. A test that differs is run again, alone and both
ways, and counts where it differs again: some of these tests race with the clock on a slow machine. A project's
records in the store say how many messages went through ``celery_idem``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import redis

from tests.campaigns.report import finish, progress, table
from tests.support.processes import remove_dir, scratch_dir
from tests.support.services import RedisServer

ROOT = Path(__file__).resolve().parents[2]
SWITCHED_ON = """
import os
from celery.app.defaults import DEFAULTS

DEFAULTS["task_annotations"] = ("celery_idem:annotation",)
DEFAULTS["idempotency_store"] = os.environ["IDEMPOTENCY_STORE"]
"""
PYTEST = ("pytest", "pytest-timeout")


@dataclass(frozen=True)
class Project:
    """A source distribution with tests, and what they need beside it."""

    name: str
    version: str
    tests: Sequence[str]
    needs: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Values ``redis`` become the URL of a database of its own."""


PROJECTS = (
    Project(
        "opentelemetry-instrumentation-celery",
        "0.66b2",
        ["tests", "-p", "no:celery"],
        ["opentelemetry-instrumentation-celery==0.66b2", "opentelemetry-test-utils==0.66b2"],
    ),
    Project(
        "celery",
        "5.7.0",
        ["t/integration/test_canvas.py", "t/integration/test_tasks.py"],
        ["pydantic", "pytest-celery", "pytest-click", "pytest-order", "pytest-rerunfailures", "pytest-subtests"],
        {"TEST_BROKER": "redis", "TEST_BACKEND": "redis"},
    ),
)


class Suite:
    """One project's sources and environment, and its results."""

    def __init__(self, project: Project, place: Path, server: RedisServer, celery: str) -> None:
        self.project, self.server = project, server
        self.place = place / project.name
        self.place.mkdir(exist_ok=True)
        self._celery = celery
        self.source = self._unpacked()
        self.python = self._environment()

    def _unpacked(self) -> Path:
        pinned = f"{self.project.name}=={self.project.version}"
        _run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", self.project.name, pinned], self.place
        )
        (archive,) = self.place.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(self.place, filter="data")
        return self.place / archive.name.removesuffix(".tar.gz")

    def _environment(self) -> Path:
        python = self.place / "venv" / "bin" / "python"
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(self.place / "venv")], self.place)
        needs = [f"celery[redis]=={self._celery}", "--editable", f"{ROOT}[redis]", *PYTEST, *self.project.needs]
        _run([str(python), "-m", "pip", "install", "--quiet", *needs], self.place)
        (self.place / "switched_on.py").write_text(SWITCHED_ON)
        return python

    def results(self, *, store: str | None, only: Sequence[str] = (), select: str | None = None) -> dict[str, str]:
        """Each test's outcome; ``store`` switches it on."""
        report = self.place / "report.xml"
        report.unlink(missing_ok=True)
        env = {**os.environ, "PYTHONPATH": f"{self.place}{os.pathsep}{self.source}", "C_FORCE_ROOT": "1"}
        env |= {k: self.server.new_database() if v == "redis" else v for k, v in self.project.env.items()}
        argv = [str(self.python), "-m", "pytest", *(only or self.project.tests), "-q", f"--junitxml={report}"]
        argv += ["-p", "no:cacheprovider", "--timeout", "300"]
        if store is not None:
            argv += ["-p", "switched_on"]
            env["IDEMPOTENCY_STORE"] = store
        if select:
            argv += ["-k", select]
        log = self.place / ("on.log" if store else "bare.log")
        with log.open("ab") as output:
            subprocess.run(argv, cwd=self.source, env=env, stdout=output, stderr=output, check=False)
        if not report.exists():
            raise SystemExit(f"{self.project.name} wrote no report: see {log}")
        return _outcomes(report)


def _run(argv: Sequence[str], where: Path) -> None:
    subprocess.run(argv, cwd=where, check=True, stdout=subprocess.DEVNULL)


def _outcomes(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
        found[f"{case.get('classname')}::{case.get('name')}"] = bad[0] if bad else "passed"
    return found


def records_in(store: str) -> int:
    """How many messages left a record in this Redis."""
    client = redis.Redis.from_url(store)
    try:
        return int(client.dbsize())
    finally:
        client.close()


def compared(suite: Suite, select: str | None) -> tuple[list[Any], list[str]]:
    """A line of the table, and the differences that stood when they were looked at again."""
    project, store = suite.project, suite.server.new_database()
    progress(f"{project.name} {project.version}, bare")
    bare = suite.results(store=None, select=select)
    progress(f"{project.name} {project.version}, switched on")
    on = suite.results(store=store, select=select)
    claimed = records_in(store)
    differ = sorted(test for test in bare.keys() | on.keys() if bare.get(test) != on.get(test))
    stood = [test for test in differ if _differs_again(suite, test)]
    for test in differ:
        again = "and again" if test in stood else "but not when run again alone: see on.log and bare.log"
        print(f"DIFFERED: {project.name}: {test}: {bare.get(test)} bare, {on.get(test)} switched on, {again}")
    broken = [f"{project.name}: {test} is {bare.get(test)} bare and {on.get(test)} switched on" for test in stood]
    if not claimed:
        broken.append(f"{project.name}: no message went through celery_idem")
    row = [project.name, project.version, len(bare), *_counts(bare), *_counts(on)]
    return [*row, len(differ), len(stood), claimed], broken


def _differs_again(suite: Suite, test: str) -> bool:
    for _ in range(2):
        progress(f"once more, both ways: {test}")
        stores = (None, suite.server.new_database())
        bare, on = (suite.results(store=store, only=[_node(suite.source, test)]) for store in stores)
        if bare.get(test) == on.get(test):
            return False
    return True


def _node(source: Path, test: str) -> str:
    """What pytest calls a test of its report: ``t.unit.test_x.TestX::test_y`` is in ``t/unit/test_x.py``."""
    where, _, name = test.partition("::")
    words = where.split(".")
    size = next(n for n in range(len(words), 0, -1) if source.joinpath(*words[:n]).with_suffix(".py").exists())
    return "::".join(["/".join(words[:size]) + ".py", *words[size:], name])


def _counts(results: Mapping[str, str]) -> list[int]:
    values = list(results.values())
    return [values.count("passed"), len(values) - values.count("passed") - values.count("skipped")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run every project both ways and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.public_suites", description=__doc__)
    parser.add_argument("--projects", default=",".join(p.name for p in PROJECTS), help="some of them, by name")
    parser.add_argument("--select", help="only tests that fit, as for pytest -k")
    parser.add_argument("--celery", default="5.7.0", help="the Celery they run on (5.7.0)")
    parser.add_argument("--dir", type=Path, help="where to keep sources, environments and logs; else removed")
    given = parser.parse_args(argv)
    place = given.dir.resolve() if given.dir else scratch_dir("public")
    place.mkdir(parents=True, exist_ok=True)
    rows, broken = [], []
    try:
        with RedisServer() as server:
            for project in PROJECTS:
                if project.name in given.projects.split(","):
                    progress(f"{project.name} {project.version}: download and install")
                    row, wrong = compared(Suite(project, place, server, given.celery), given.select)
                    rows.append(row)
                    broken += wrong
    finally:
        if not given.dir:
            remove_dir(place)
    header = ("project", "version", "tests", "passed bare", "failed bare", "passed on", "failed on")
    header += ("differ", "differ again", "messages claimed")
    return finish("Public suites, bare and switched on", table(header, rows), broken)


if __name__ == "__main__":
    sys.exit(main())
