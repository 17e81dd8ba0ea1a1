"""Does what a reader of one page does: writes its files, runs its commands, types its Python, compares what it shows.

All of it happens in one directory of the reader's own. URLs of servers on localhost become those of the run's servers,
and become what the page says again in whatever is compared with it.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path
from typing import IO, Any

from tests.docs.pages import ROOT, Block, Page
from tests.support.processes import Process, remove_dir, scratch_dir, wait_until

DEADLINE = 300.0
"""Seconds one block may take: what a broker in a file loses with a killed child, the sweep brings back."""

_REDIS = re.compile(r"redis://localhost(?::6379)?/(\d+)")
_POSTGRES = re.compile(r"postgresql(\+\w+)?://\w+@localhost/\w+")
_WORKER = re.compile(r"celery .*\bworker\b")


class Reader:
    """One page being read; ``redis`` and ``postgres`` make an empty database and return its URL."""

    def __init__(self, page: Page, *, redis: Callable[[], str], postgres: Callable[[], str]) -> None:
        self._page, self._redis, self._postgres = page, redis, postgres
        self._places: dict[str, str] = {}
        self.dir = scratch_dir("docs")
        self._typed: Typed | None = None
        self._workers: list[Process] = []
        path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CELERY_", "PYTEST_"))}
        self._env = kept | {
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join([str(self.dir), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
        }

    def close(self) -> None:
        """End what runs, and remove the directory."""
        for worker in self._workers:
            worker.close()
        if self._typed is not None:
            self._typed.close()
        remove_dir(self.dir)

    def read(self, block: Block) -> None:
        """Do what the block says; an AssertionError that names it where that fails."""
        {"python": self._python, "console": self._console, "bash": self._bash}[block.tag](block)

    def _where(self, block: Block) -> str:
        return f"{self._page.name}:{block.line}"

    # --- the three kinds ---------------------------------------------------------------------------------------------

    def _python(self, block: Block) -> None:
        source = self._here(block.text)
        if block.title is not None:
            (self.dir / block.title).write_text(source)
            return
        if self._typed is None:
            self._typed = Typed(self.dir, self._env)
        # The empty lines in front make a traceback's line numbers the page's own.
        self._typed.run("\n" * (block.line - 1) + source, self._page.name)

    def _bash(self, block: Block) -> None:
        done = self._run(["bash", "-e", "-c", self._here(block.text)])
        assert done.returncode == 0, f"{self._where(block)} ended with {done.returncode}:\n{done.stdout}"

    def _console(self, block: Block) -> None:
        for command, shown in _dialogue(block.text):
            if command.startswith("pip install "):
                _can_be_installed(command)
            elif _WORKER.match(command):
                self._work(command, shown, block)
            else:
                done = self._run(["bash", "-e", "-o", "pipefail", "-c", self._here(command)])
                output = self._there(done.stdout)
                assert done.returncode == 0, f"{self._where(block)}: {command}\nended with {done.returncode}:\n{output}"
                if shown.strip():
                    told = f"{self._where(block)}: {command}\nshould show\n{shown}\nand shows\n{output}"
                    assert shows(shown, output), told

    def _work(self, command: str, shown: str, block: Block) -> None:
        argv = shlex.split(self._here(command))
        argv[0] = shutil.which(argv[0], path=self._env["PATH"]) or argv[0]
        if "--loglevel" not in argv:
            argv += ["--loglevel", "INFO"]  # below it, nothing says that the worker is ready
        log = self.dir / f"worker{len(self._workers)}.log"
        worker = Process(argv, name=f"worker of {self._page.name}", log_path=log, env=self._env, cwd=self.dir)
        self._workers.append(worker)
        wait_until(lambda: " ready." in worker.log or not worker.alive, DEADLINE, f"{command} is ready")
        assert worker.alive, f"{self._where(block)}: {command}\nended with\n{worker.log_tail()}"
        head = worker.log[: worker.log.index(" ready.") + len(" ready.")]
        assert not shown.strip() or shows(shown, self._there(head)), f"{self._where(block)}: the worker shows\n{head}"

    # --- running and comparing ---------------------------------------------------------------------------------------

    def _run(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            cwd=self.dir,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE,
        )

    def _here(self, text: str) -> str:
        """The text with the run's own servers."""
        text = _REDIS.sub(lambda url: self._place(url[0], self._redis), text)

        def postgres(url: re.Match[str]) -> str:
            place = self._place(re.sub(r"\+\w+", "", url[0]), self._postgres)
            return re.sub(r"^postgresql(\+\w+)?", f"postgresql{url[1] or ''}", place)

        return _POSTGRES.sub(postgres, text)

    def _place(self, url: str, make: Callable[[], str]) -> str:
        if url not in self._places:
            self._places[url] = make()
        return self._places[url]

    def _there(self, text: str) -> str:
        """The text with the page's servers."""
        for said, place in self._places.items():
            text = text.replace(place, said)
        return text


class Typed:
    """A Python process that is typed into; see ``driver.py``."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        reading, writing = os.pipe()
        self._log = directory / "python.log"
        argv = [sys.executable, str(Path(__file__).with_name("driver.py")), str(writing)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                argv,
                cwd=directory,
                env=env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[writing],
            )
        os.close(writing)
        self._answers: IO[str] = os.fdopen(reading)

    def run(self, source: str, name: str) -> None:
        """Run one block; an AssertionError with its traceback where it raises."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"source": source, "filename": name}) + "\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._answers], [], [], DEADLINE)
        answer = self._answers.readline() if ready else ""
        assert answer, f"{name}: no answer within {DEADLINE:g} s, or the process died:\n{self._log.read_text()}"
        error: Any = json.loads(answer)["error"]
        assert error is None, f"{error}\n{self._log.read_text()}"

    def close(self) -> None:
        """End it, by force if it does not end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        deadline = time.monotonic() + 10
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self._process.kill()
        self._process.wait()
        self._answers.close()


def _dialogue(text: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with what it shows."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)
    assert not parts[0].strip(), f"a console block starts with a command, not with {parts[0]!r}"
    return [(command, shown) for command, _, shown in (part.partition("\n") for part in parts[1:])]


def shows(expected: str, actual: str) -> bool:
    """Whether the output is as the page shows it: ``...`` stands for anything, blanks for any number of them."""

    def squeezed(text: str) -> str:
        return "\n".join(re.sub(r"[ \t]+", " ", line).strip() for line in text.strip().splitlines())

    pattern = re.escape(squeezed(expected)).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, squeezed(actual), re.DOTALL) is not None


def _can_be_installed(command: str) -> None:
    """Not run here: what it asks for is this package, with extras it has."""
    (asked,) = shlex.split(command)[2:]
    found = re.fullmatch(r"celery-idem(?:\[(?P<extras>[\w,]+)\])?", asked)
    assert found, f"{command}: this package is called celery-idem"
    extras = set(filter(None, (found["extras"] or "").split(",")))
    known = set(metadata("celery-idem").get_all("Provides-Extra") or ())
    assert extras <= known, f"{command}: no extras {extras - known}"
