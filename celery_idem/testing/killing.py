"""Kill or hold a real worker at a named point: the test's side. ``armed`` is the worker's.

The two talk through a directory. The test writes ``<n>.plan``; the first delivery that fits renames it, so it is struck
once, whatever number of processes look. ``<n>.go`` lets a held one go on.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery_idem.testing.points import Point, checked

VARIABLE = "CELERY_IDEM_KILL_POINTS"
"""Names the directory to a worker that was started with ``--include celery_idem.testing.armed``."""


class KillPoints:
    """Kills and holds planned in one directory, for every worker started with ``env`` and ``arguments``."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._numbers = itertools.count(1)

    @property
    def env(self) -> dict[str, str]:
        """What the worker's environment needs besides its own."""
        return {VARIABLE: str(self.directory)}

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the worker's command line needs besides its own."""
        return ("--include", "celery_idem.testing.armed")

    def kill(self, *, before: Point, task: Any = None, message_id: str | None = None, whole: bool = False) -> Strike:
        """SIGKILL the process that next comes to this point.

        Args:
            before: see ``points``.
            task: a task or its name; None for any.
            message_id: None for any.
            whole: the main process of the worker as well, as when a machine goes down. Solo, threads and gevent are
                one process anyway.
        """
        return self._plan("worker" if whole else "process", before, task, message_id)

    @contextmanager
    def hold(
        self, *, before: Point, task: Any = None, message_id: str | None = None, within: float = 30
    ) -> Iterator[Strike]:
        """Have the next delivery stop at this point for as long as the ``with`` block lasts, 60 s at most.

        Send the message inside the block, and call ``wait()`` on what you get for the moment it is held.
        """
        strike = self._plan("hold", before, task, message_id, within=within)
        try:
            yield strike
        finally:
            strike.cancel()

    def _plan(self, how: str, before: str, task: Any, message_id: str | None, *, within: float = 30) -> Strike:
        name = getattr(task, "name", task)
        plan = {"how": how, "before": checked(before), "task": name, "message_id": message_id}
        strike = Strike(self.directory / f"{next(self._numbers)}.plan", plan, within)
        part = strike.path.with_suffix(".part")
        part.write_text(json.dumps(plan))
        part.rename(strike.path)  # a worker must never read half of it
        return strike


class Strike:
    """One planned kill or hold."""

    def __init__(self, path: Path, plan: dict[str, Any], within: float) -> None:
        self.path, self.plan, self.within = path, plan, within

    @property
    def struck(self) -> bool:
        """Whether a delivery came to the point."""
        return self.path.with_suffix(".struck").exists()

    def wait(self, timeout: float | None = None) -> None:
        """Return when it is struck; an AssertionError after ``timeout`` seconds (``within`` if not given)."""
        seconds = self.within if timeout is None else timeout
        deadline = time.monotonic() + seconds
        while not self.struck:
            if time.monotonic() > deadline:
                raise AssertionError(f"no delivery came to {self.plan} within {seconds:g} s: is the worker armed?")
            time.sleep(0.01)

    def cancel(self) -> None:
        """Strike nobody any more, and let go whom this holds."""
        self.path.with_suffix(".go").touch()
        self.path.unlink(missing_ok=True)
