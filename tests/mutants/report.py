"""What became of the mutants, as it is printed and written: sums for the page of evidence, the rest for its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns import evidence
from tests.campaigns.report import table
from tests.mutants.judged import judgement
from tests.mutants.mutant import Mutant, Name
from tests.mutants.running import Fate
from tests.mutants.targets import Target


@dataclass
class Report:
    """What became of one file's mutants."""

    target: Target
    made: int = 0
    fates: Counter[Fate] = field(default_factory=Counter)
    judged: list[Mutant] = field(default_factory=list)
    unjudged: list[Mutant] = field(default_factory=list)
    sound: bool = True

    def add(self, mutant: Mutant, fate: Fate, judged: Mapping[Name, str]) -> None:
        """Count one more."""
        self.fates[fate] += 1
        if fate is Fate.SURVIVED:
            (self.unjudged if judgement(mutant, judged) is None else self.judged).append(mutant)

    @property
    def row(self) -> list[object]:
        """Its line of the table."""
        run = sum(self.fates.values())
        counts = [self.fates[fate] for fate in Fate]
        return [self.target.file, self.made, run, *counts, len(self.judged), len(self.unjudged)]


def conclude(reports: Sequence[Report], judged: Mapping[Name, str], *, whole: bool, seed: int, kept: bool) -> int:
    """Write what became of each to a page of its own, and the sums to the page of evidence."""
    header = ("mutants", "run", *(fate.value for fate in Fate), "of them judged", "not judged yet")
    totals = [sum(column) for column in zip(*(report.row[1:] for report in reports), strict=True)]  # type: ignore[arg-type]
    each = [table(("file", *header), [report.row for report in reports])]
    each.append(_listed("Not judged yet", [f"{one}" for report in reports for one in report.unjudged]))
    equivalent = [f"{one}\n    = {judgement(one, judged)}" for report in reports for one in report.judged]
    each.append(_listed("Judged: nothing that anybody relies on changes", equivalent))
    printed = [table(("files", *header), [[len(reports), *totals]])]
    if not whole:
        printed.append(
            f"Drawn with seed {seed}, one mutant of every place in a file before a second one of any, as "
            "far as the time went. All of them: `make mutants ARGS=--whole`."
        )
    if kept:
        printed.append("Put together from several goes, between which other lines of the files changed (`--session`).")
    broken = [f"the tests of {report.target.file} fail without a mutant" for report in reports if not report.sound]
    if whole:
        broken += [f"nobody judged the survivor {one}" for report in reports for one in report.unjudged]
    listed = "\n\n".join(filter(None, each))
    page = os.environ.get("EVIDENCE_FILE")
    if page:
        evidence.write(Path(page).with_name("mutants.md"), "mutants", f"{listed}\n\n{evidence.origin('mutants')}")
    return evidence.conclude("mutants", "Mutants", "\n\n".join(printed), broken, more=listed)


def _listed(title: str, entries: Sequence[str]) -> str:
    return f"{title}:\n\n```text\n" + "\n".join(entries) + "\n```" if entries else ""
