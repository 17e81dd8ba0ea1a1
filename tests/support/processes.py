"""Child processes that cannot outlive the test run.

Owns: starting a process in its own group with its output in a file, signals to one process or to the whole tree,
reaping, and a watchdog that cleans up even when the test run itself is SIGKILLed. Knows nothing of what it runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
STARTED: list[Process] = []
"""Every process started since the list was last trimmed; a failed test's report shows the end of their logs."""

_PORTS = range(20_000, 32_000)  # below the ephemeral range: a client retrying a stopped server cannot take its port

_WATCHDOG = """
import os, shutil, signal, sys
groups, trees = set(), set()
for line in sys.stdin:
    verb, _, what = line.rstrip("\\n").partition(" ")
    kept = groups if verb.endswith("group") else trees
    (kept.add if verb.startswith("+") else kept.discard)(what)
for group in groups:
    try:
        os.killpg(int(group), signal.SIGKILL)
    except OSError:
        pass
for tree in trees:
    shutil.rmtree(tree, ignore_errors=True)
"""


def wait_until(predicate: Callable[[], T], timeout: float, what: str, *, interval: float = 0.02) -> T:
    """Return the first true answer of ``predicate``; an AssertionError naming ``what`` once ``timeout`` s are over."""
    deadline = time.monotonic() + timeout
    while True:
        over = time.monotonic() > deadline  # before it is asked: what came true while the machine stood still counts
        answer = predicate()
        if answer:
            return answer
        if over:
            raise AssertionError(f"not within {timeout:g} s: {what} (last answer: {answer!r})")
        time.sleep(interval)


def free_port() -> int:
    """Return a loopback port nobody listens on, outside the range the kernel hands to clients."""
    for port in random.sample(_PORTS, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((LOOPBACK, port))
                return port
    raise AssertionError(f"no free port in {_PORTS}")


def listening(port: int) -> bool:
    """Say whether something accepts connections on a loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0


class Watchdog:
    """A process that outlives this one just long enough to kill what it left behind."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def tell(self, line: str) -> None:
        """Note ``+group PGID``, ``-group PGID``, ``+tree DIR`` or ``-tree DIR``."""
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            argv = [sys.executable, "-I", "-S", "-c", _WATCHDOG]
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, text=True, bufsize=1, cwd="/", start_new_session=True
            )
            atexit.register(self.close)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")

    def close(self) -> None:
        """Let it clean up and go."""
        if self._process is not None and self._process.stdin is not None and self._owner == os.getpid():
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait(30)
            self._process = None


watchdog = Watchdog()


def scratch_dir(prefix: str, *, user: str | None = None) -> Path:
    """Make a directory in /tmp that ``user`` owns; it is removed with the run at the latest."""
    path = Path(tempfile.mkdtemp(prefix=f"celery-idem-{prefix}-", dir="/tmp"))
    if user is not None:
        entry = pwd.getpwnam(user)
        os.chown(path, entry.pw_uid, entry.pw_gid)
    watchdog.tell(f"+tree {path}")
    return path


def remove_dir(path: Path) -> None:
    """Remove a directory made by :func:`scratch_dir`."""
    shutil.rmtree(path, ignore_errors=True)
    watchdog.tell(f"-tree {path}")


class Process:
    """One child process, its descendants and its log."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self._log_path = log_path
        self._final_log: str | None = None
        self._mark = 0
        drop: dict[str, Any] = {}
        if user is not None:
            drop = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        with log_path.open("ab") as log:
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                self.argv,
                env=None if env is None else dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **drop,
            )
        watchdog.tell(f"+group {self.pid}")
        self._handle: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._handle = psutil.Process(self.pid)
        STARTED.append(self)

    @property
    def pid(self) -> int:
        """The process started; in its log and in ``ps`` it is the parent of the rest."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether the process itself still runs."""
        return self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal, None while it runs."""
        return self._popen.poll()

    @property
    def log(self) -> str:
        """Everything it has written so far, stdout and stderr in one."""
        if self._final_log is not None:
            return self._final_log
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log, none from before the last :meth:`mark_log`."""
        return "\n".join(self.log[self._mark :].splitlines()[-lines:])

    def mark_log(self) -> None:
        """Let :meth:`log_tail` begin here."""
        self._mark = len(self.log)

    def tree(self) -> list[psutil.Process]:
        """List the process and its living descendants, parents first."""
        if self._handle is None:
            return []
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [self._handle, *self._handle.children(recursive=True)]
        return [p for p in found if living(p)]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone; a process that is gone already is no error."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def send_tree(self, number: signal.Signals) -> None:
        """Send a signal to the process first, then to every descendant, whatever group they moved to."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        """Return the exit code; an AssertionError with the log's end when it does not end in time."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            tail = self.log_tail()
            raise AssertionError(f"{self.name} (pid {self.pid}) did not end within {timeout:g} s:\n{tail}") from None

    def wait_log(self, text: str, timeout: float) -> None:
        """Return when ``text`` is in the log; an AssertionError with the log's end if it never comes."""
        deadline = time.monotonic() + timeout
        while text not in self.log:
            if not self.alive or time.monotonic() > deadline:
                state = "runs" if self.alive else f"ended with {self.returncode}"
                tail = self.log_tail()
                raise AssertionError(f"{self.name} {state} and never logged {text!r} ({timeout:g} s):\n{tail}")
            time.sleep(0.02)

    def kill_tree(self) -> None:
        """SIGKILL the process and all descendants, reap it, and return when none of them is left."""
        tree = self.tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait(30)
        wait_until(lambda: not any(living(p) for p in tree), 30, f"{self.name} and its children are gone")
        watchdog.tell(f"-group {self.pid}")

    def close(self) -> None:
        """Kill whatever is left of it and keep the end of its log."""
        self.kill_tree()
        if self._final_log is None:
            self._final_log = self.log


def living(process: psutil.Process) -> bool:
    """Say whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
