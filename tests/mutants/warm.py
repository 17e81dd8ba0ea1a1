"""Runs pytest again and again, each time in a child forked where the libraries are imported and our own code is not.

Reads one JSON line per run from stdin, ``{"arguments": […], "timeout": s, "output": file}``, and answers with pytest's
exit status, or with ``null`` where it had to be ended. Works on the tree it is started in.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

LIBRARIES = (
    "pytest",
    "psutil",
    "celery.app.base",
    "celery.app.task",
    "celery.app.trace",
    "celery.worker.request",
    "kombu",
    "sqlalchemy.dialects.postgresql.psycopg2",
    "sqlalchemy.dialects.sqlite",
    "redis",
    "psycopg2",
    "psycopg",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cryptography.hazmat.primitives.serialization",
    "pydantic",
    "anyio",
    "httpx",
    "hypothesis.strategies",
)


def main() -> None:
    """Serve runs until stdin ends."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _run(arguments: list[str], timeout: float, output: str) -> int | None:
    pid = os.fork()
    if pid == 0:
        _child(arguments, output)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            _end_rest(pid, [])
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    import psutil

    _end_rest(pid, psutil.Process(pid).children(recursive=True))
    os.waitpid(pid, 0)
    return None


def _child(arguments: list[str], output: str) -> None:
    status = 3
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)
        os.dup2(written, 2)
        import pytest

        status = int(pytest.main(arguments))
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # a thread that a mutant keeps alive keeps no process


def _end_rest(group: int, descendants: list[Any]) -> None:
    for process in descendants:
        try:
            process.kill()
        except Exception:  # gone already
            continue
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
