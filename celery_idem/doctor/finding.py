"""One thing the doctor found, and how findings that say the same of several tasks become one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Severity = Literal["fault", "risk", "hint"]
SEVERITIES: tuple[Severity, ...] = ("fault", "risk", "hint")
NAMED = 3
"""Tasks named in the text of one finding; JSON has them all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, of what, and what to change."""

    severity: Severity
    """``fault``: it will go wrong in ordinary use. ``risk``: it goes wrong when something else does. ``hint``: it may
    be what you want."""
    rule: str
    """Stable name of the rule."""
    subject: str
    """The setting or beat entry it is about; of tasks, the word ``task``."""
    found: str
    """The values, with their units."""
    why: str
    """What comes of it, in one sentence."""
    change: str
    """The line to write."""
    tasks: tuple[str, ...] = ()
    """The tasks it is about, by name."""

    def shape(self) -> dict[str, Any]:
        """The finding as JSON has it."""
        return {**asdict(self), "tasks": list(self.tasks)}

    @property
    def where(self) -> str:
        """Setting, beat entry or tasks, for people."""
        if not self.tasks:
            return self.subject
        more = len(self.tasks) - NAMED
        named = ", ".join(self.tasks[:NAMED]) + (f" and {more} more" if more > 0 else "")
        return named if self.subject == "task" else f"{self.subject}: {named}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, those alike in all but their tasks as one, each task once."""
    alike: dict[Finding, dict[str, None]] = {}
    for finding in findings:
        alike.setdefault(replace(finding, tasks=()), {}).update(dict.fromkeys(finding.tasks))
    found = [replace(finding, tasks=tuple(tasks)) for finding, tasks in alike.items()]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
