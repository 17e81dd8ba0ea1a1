"""One mutant, and what it is called."""

from __future__ import annotations

from dataclasses import dataclass, field

Name = tuple[str, str, str, str, str]
"""File, function, operator, the line before and after."""


@dataclass(frozen=True)
class Mutant:
    """One change to one file."""

    file: str
    operator: str
    line: int
    column: int
    function: str
    before: str
    after: str
    code: str = field(repr=False)
    """The whole file with the change."""

    @property
    def name(self) -> Name:
        """What it is called from one version of the file to the next."""
        return self.file, self.function, self.operator, self.before, self.after

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}, {self.operator}:\n    - {self.before}\n    + {self.after}"
