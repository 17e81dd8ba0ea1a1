"""Imported by a worker under test (``--include celery_idem.testing.armed``), it obeys the plans of ``KillPoints``.

Importing it is harmless without the environment variable. It is imported by the worker's main process before it forks;
a pool whose children start as fresh interpreters is not armed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery_idem.delivery import Delivering
from celery_idem.testing.killing import VARIABLE
from celery_idem.testing.points import Point, listen

MAIN = os.getpid()
LONGEST_HOLD = 60.0
"""Seconds after which a held delivery goes on by itself: the test that held it is gone."""


def obey(point: Point, delivery: Delivering) -> None:
    """Suffer the first plan for this point, task and message; nobody else will."""
    for plan in sorted(Path(os.environ[VARIABLE]).glob("*.plan"), key=lambda path: int(path.stem)):
        try:
            said: dict[str, Any] = json.loads(plan.read_text())
            if not _fits(said, point, delivery):
                continue
            plan.rename(plan.with_suffix(".struck"))
        except FileNotFoundError:  # another process was first, or it was cancelled
            continue
        if said["how"] == "hold":
            _hold(plan.with_suffix(".go"))
            continue
        if said["how"] == "worker":
            os.kill(MAIN, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _fits(plan: dict[str, Any], point: Point, delivery: Delivering) -> bool:
    here = {"before": point, "task": delivery.task.name, "message_id": delivery.request.id}
    return all(plan[name] in (None, here[name]) for name in here)


def _hold(go: Path) -> None:
    deadline = time.monotonic() + LONGEST_HOLD
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


if VARIABLE in os.environ:
    listen(obey)
