"""The history of a run: one line per event in a file that is only appended to, outside of everything that is hurt.

Every process of the run writes its own lines, each with one ``write`` and an ``fdatasync``, so a SIGKILL leaves whole
lines. Time is CLOCK_MONOTONIC, which all processes of one host share and no clock step moves.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One line. ``key`` names the operation as the publisher knows it; ``more`` holds what only some kinds have."""

    at: float
    kind: str
    key: str = ""
    pid: int = 0
    worker: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.more.get(name)


class History:
    """The writing end."""

    def __init__(self, path: Path | str, worker: str = "") -> None:
        self.path = Path(path)
        self._worker = worker
        self._file = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)

    def write(self, kind: str, *, at: float | None = None, **fields: Any) -> None:
        """Append one line; ``at`` is now unless the moment was taken earlier."""
        said = {name: value for name, value in fields.items() if value is not None}
        moment = time.monotonic() if at is None else at
        line = json.dumps({"at": moment, "kind": kind, "pid": os.getpid(), "worker": self._worker, **said})
        os.write(self._file, f"{line}\n".encode())
        os.fdatasync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(path: Path) -> list[Event]:
    """All events so far, by time."""
    events = []
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            said = json.loads(line)
            known = {name: said.pop(name) for name in ("at", "kind", "key", "pid", "worker") if name in said}
            events.append(Event(**known, more=said))
    return sorted(events, key=lambda event: event.at)
