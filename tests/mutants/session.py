"""What earlier runs found out, so that a run that was ended goes on where it was.

A file of JSON lines, one per mutant. A survivor that nobody judged is asked again: there may be a new test.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.mutants.mutant import Mutant, Name
from tests.mutants.running import Fate


class Session:
    """The fates that are known, kept in a file where there is one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[Name, Fate] = {}
        if path is not None and path.exists():
            lines = map(json.loads, path.read_text().splitlines())
            self._known = {tuple(line["mutant"]): Fate(line["fate"]) for line in lines}

    @property
    def kept(self) -> bool:
        """Whether there is a file."""
        return self._path is not None

    def known(self, mutant: Mutant) -> Fate | None:
        """What became of this change to this line of the function; None where nobody tried."""
        return self._known.get(mutant.name)

    def note(self, mutant: Mutant, fate: Fate) -> None:
        """Remember it."""
        if self._path is None:
            return
        with self._path.open("a") as lines:
            lines.write(json.dumps({"mutant": mutant.name, "fate": fate.value}) + "\n")
