"""The page of evidence: each proof writes its own section of ``docs/explanation/evidence.md``, and no other.

A section lies between ``<!-- chaos: written by make chaos -->`` and ``<!-- chaos: end -->``. It is written only where
``EVIDENCE_FILE`` names the page, which make does for a run without ARGS: a short run's numbers are not evidence. The
table of verdicts at the top of the page is made anew from its sections each time.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from tests.campaigns.report import finish, table

ANCHORS = {
    "chaos": "chaos-on-real-servers",
    "bench": "speed",
    "conformance": "conformance-and-stores-broken-on-purpose",
    "simulate": "simulation-of-the-real-code",
    "fuzz": "fuzz",
    "mutants": "mutants",
    "model": "model",
}
"""Where each proof stands on the page."""


def conclude(name: str, title: str, printed: str, broken: Sequence[str], *, unjudged: str = "", more: str = "") -> int:
    """Print tables and broken promises as every campaign does, write them under this name; return the exit status.

    Args:
        name: of the section.
        title: what the printed text is called.
        printed: the tables, for the page too.
        broken: the promises that did not hold.
        unjudged: why nothing is judged, where that is so.
        more: what is printed above the tables, and not written.
    """
    page = os.environ.get("EVIDENCE_FILE")
    if page:
        verdict = "\n".join(f"- **Broken:** {line}" for line in broken) or "Every promise held."
        verdict = f"**Not judged: {unjudged}.**" if unjudged else verdict
        write(Path(page), name, f"{printed}\n\n{verdict}\n\n{origin(name)}")
    return finish(title, f"{more}\n\n{printed}" if more else printed, broken, unjudged)


def write(page: Path, name: str, text: str) -> None:
    """Put the text in the place of that section; ``ValueError`` where the page has none of that name."""
    section = re.compile(rf"(<!-- {name}: written by [^\n]* -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    before = page.read_text()
    if not section.search(before):
        raise ValueError(f"{page} has no section {name}: '<!-- {name}: written by make {name} -->' and its end")
    page.write_text(_judged(section.sub(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[2]}", before)))


_SECTION = re.compile(r"<!-- (\w+): written by make \1 -->\n(.*?)<!-- \1: end -->", re.DOTALL)
_VERDICTS = re.compile(r"(<!-- verdicts -->\n).*?(<!-- verdicts: end -->)", re.DOTALL)
_ORIGIN = re.compile(r"\*`make \w+`, ([\d-]+), commit (\w+)")


def _judged(page: str) -> str:
    """The page with its table of verdicts, if it has one."""
    rows = []
    for name, text in _SECTION.findall(page):
        ran = _ORIGIN.search(text)
        missed = text.count("- **Broken:**")
        verdict = f"{missed} missed, named there" if missed else "every promise held"
        unjudged = re.search(r"\*\*(Not judged: [^*]*)\*\*", text)
        verdict = unjudged[1] if unjudged else verdict
        rows.append([f"[{name}](#{ANCHORS[name]})", *((verdict, *ran.groups()) if ran else ("not run yet", "", ""))])
    made = table(("proof", "verdict", "day", "commit"), rows)
    return _VERDICTS.sub(lambda found: f"{found[1]}\n{made}\n\n{found[2]}", page)


def origin(name: str) -> str:
    """Which command wrote it, when, from which commit, and on what."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    day = datetime.now(timezone.utc).date().isoformat()
    return (
        f"*`make {name}`, {day}, commit {commit.strip() or 'unknown'}, Python {platform.python_version()}, "
        f"{os.cpu_count()} processors, {platform.machine()}.*"
    )
