"""Runs tests on mutants in a copy of the tree, so that no mutant ever stands where somebody works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.support.services import PostgresServer, RedisServer

ROOT = Path(__file__).parents[2]
COPIED = ("celery_idem", "tests")
OPTIONS = (
    *("-q", "-x", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "tests.mutants.quick"),
    *("-p", "pytest_timeout"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # hypothesis is imported before pytest starts
)
_EPOCH = 1_000_000_000
FIRST = 300.0
"""Seconds the tests may take on the file as it is."""


class Fate(str, Enum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"


class Laboratory:
    """A copy of the tree, and a process in it that runs pytest."""

    def __init__(self, tree: Path, environment: dict[str, str]) -> None:
        self.tree = tree
        self.output = tree / "output.txt"
        self._writes = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.warm"],
            cwd=tree,
            env={**os.environ, **environment, "PYTHONPATH": str(tree), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], timeout: float = FIRST) -> tuple[int | None, float]:
        """Run the tests on the tree as it is now: pytest's exit status, None where time was up, and the seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        began = time.monotonic()
        order = {"arguments": [*OPTIONS, *tests], "timeout": timeout, "output": str(self.output)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that runs pytest has ended; what it wrote is above")
        status: int | None = json.loads(answer)
        return status, time.monotonic() - began

    def fate(self, mutant: Mutant, tests: Sequence[str], timeout: float) -> Fate:
        """Put the mutant in its place, run the tests, and put the file back."""
        path = self.tree / mutant.file
        original = path.read_text()
        self._write(path, mutant.code)
        try:
            status, _ = self.run(tests, timeout)
        finally:
            self._write(path, original)
        return Fate.TIMED_OUT if status is None else Fate.KILLED if status else Fate.SURVIVED

    def _write(self, path: Path, code: str) -> None:
        # Bytecode is kept, and told apart by the source's size and second: no two writes may share them.
        self._writes += 1
        path.write_text(code)
        os.utime(path, (_EPOCH + self._writes,) * 2)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def copy_to(tree: Path) -> None:
    """Make a copy of what is changed and of what is run."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)


@contextmanager
def laboratory() -> Iterator[Laboratory]:
    """A copy of this tree with a Redis and a PostgreSQL of its own; gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as directory,
        RedisServer() as redis,
        PostgresServer() as postgres,
    ):
        tree = Path(directory) / "tree"
        copy_to(tree)
        opened = Laboratory(tree, {RedisServer.env_url: redis.url, PostgresServer.env_url: postgres.url})
        try:
            yield opened
        finally:
            opened.close()
