"""A real ``celery worker`` in a process of its own, which a test can kill at a named point.

It runs on the broker, backend and store the app is configured for, so those must be servers of the test's own. It is
started with ``sys.executable -m celery`` in a session of its own, and nothing of it outlives ``stop``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_idem.testing.killing import KillPoints, Strike
from celery_idem.testing.points import Point

if TYPE_CHECKING:
    from typing_extensions import Self

QUIET = ("--without-gossip", "--without-mingle")
"""Start-up chatter between workers: a second of waiting."""


class Worker:
    """One worker process with its pool; ``with Worker("shop:app") as worker:`` starts and ends it.

    Args:
        app: what ``-A`` names.
        pool: ``prefork``, ``solo``, ``threads``, ``gevent``…
        queues: names to consume; None for the app's own.
        arguments: more words of the command line.
        cwd: where it runs; the app is imported from there.
        env: added to this process's environment.
        ready_within: seconds until it must be ready.
    """

    def __init__(
        self,
        app: str,
        *,
        pool: str = "prefork",
        concurrency: int = 1,
        queues: Sequence[str] | None = None,
        arguments: Sequence[str] = (),
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        ready_within: float = 30,
    ) -> None:
        self.name = f"idem-{uuid.uuid4().hex[:8]}@localhost"
        self.cwd = Path.cwd() if cwd is None else Path(cwd)
        self.ready_within = ready_within
        self._directory = Path(tempfile.mkdtemp(prefix="celery-idem-worker-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._points = KillPoints(self._directory / "points")
        words = ["--pool", pool, "--concurrency", str(concurrency), "--loglevel", "INFO", "--hostname", self.name]
        if queues is not None:
            words += ["--queues", ",".join(queues)]
        start = [sys.executable, "-m", "celery", "-A", app, "worker"]
        self._argv = [*start, *words, *QUIET, *self._points.arguments, *arguments]
        path = os.pathsep.join(filter(None, [str(self.cwd), os.environ.get("PYTHONPATH", "")]))
        self._env = {**os.environ, "PYTHONPATH": path, "C_FORCE_ROOT": "1", **self._points.env, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    # --- what is to happen to it --------------------------------------------------------------------------------------

    def kill(self, *, before: Point, task: Any = None, message_id: str | None = None, whole: bool = False) -> Strike:
        """SIGKILL the pool process that next comes to this point; see ``KillPoints.kill``."""
        return self._points.kill(before=before, task=task, message_id=message_id, whole=whole)

    def hold(self, *, before: Point, task: Any = None, message_id: str | None = None) -> AbstractContextManager[Strike]:
        """Have the next delivery stop at this point while the ``with`` block lasts; see ``KillPoints.hold``."""
        return self._points.hold(before=before, task=task, message_id=message_id)

    def kill_now(self) -> None:
        """SIGKILL the worker with its pool, as when the machine goes down."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)

    # --- its life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start it, and return when it takes tasks."""
        self._log_path.unlink(missing_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  the words are this class's own and the test's
                self._argv,
                cwd=self.cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.wait_log(" ready.", self.ready_within)
        except BaseException:
            self.__exit__()
            raise
        return self

    def stop(self, timeout: float = 10) -> None:
        """End it: running tasks get ``timeout`` seconds, then it is killed with its pool. May be repeated."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
            self.kill_now()

    @property
    def alive(self) -> bool:
        """Whether its main process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """Everything it wrote since it was started last."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def wait_log(self, text: str, timeout: float = 30) -> None:
        """Return when ``text`` is in the log; an AssertionError with the log's end if it never comes."""
        deadline = time.monotonic() + timeout
        while text not in self.log:
            if not self.alive or time.monotonic() > deadline:
                said = "\n".join(self.log.splitlines()[-40:])
                state = "is not there" if self.alive else "never came, and the worker has ended"
                raise AssertionError(f"{text!r} {state} after {timeout:g} s at most:\n{said}")
            time.sleep(0.02)

    @property
    def _log_path(self) -> Path:
        return self._directory / "log"

    def __enter__(self) -> Self:
        return self if self.alive else self.start()

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self._remove()
