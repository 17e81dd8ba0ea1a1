"""What earlier runs found out, so that a run that was ended goes on where it was.

A file of JSON lines, one per mutant. A survivor that nobody judged is asked again: there may be a new test.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.running import Fate


class Session:
    """The fates that are known, kept in a file where there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Fate] = {}
        if path is not None and path.exists():
            lines = map(json.loads, path.read_text().splitlines())
            self._known = {line["mutant"]: Fate(line["fate"]) for line in lines}

    def known(self, mutant: Mutant) -> Fate | None:
        """What became of this very change to this very file; None where nobody tried."""
        return self._known.get(_digest(mutant))

    def note(self, mutant: Mutant, fate: Fate) -> None:
        """Remember it."""
        if self._path is None:
            return
        with self._path.open("a") as lines:
            lines.write(json.dumps({"mutant": _digest(mutant), "fate": fate.value, "what": str(mutant)}) + "\n")


def _digest(mutant: Mutant) -> str:
    return hashlib.sha256(f"{mutant.file}\0{mutant.code}".encode()).hexdigest()
