"""The page of evidence: each proof writes its own section of ``docs/explanation/evidence.md``, and no other.

A section lies between ``<!-- chaos: written by make chaos -->`` and ``<!-- chaos: end -->``. It is written only where
``EVIDENCE_FILE`` names the page, which make does for a run without ARGS: a short run's numbers are not evidence.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from tests.campaigns.report import finish


def conclude(name: str, title: str, printed: str, broken: Sequence[str]) -> int:
    """Print tables and broken promises as every campaign does, write them under this name; return the exit status."""
    page = os.environ.get("EVIDENCE_FILE")
    if page:
        verdict = "\n".join(f"- **Broken:** {line}" for line in broken) or "Every promise held."
        write(Path(page), name, f"{printed}\n\n{verdict}\n\n{origin(name)}")
    return finish(title, printed, broken)


def write(page: Path, name: str, text: str) -> None:
    """Put the text in the place of that section; ``ValueError`` where the page has none of that name."""
    section = re.compile(rf"(<!-- {name}: written by [^\n]* -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    before = page.read_text()
    if not section.search(before):
        raise ValueError(f"{page} has no section {name}: '<!-- {name}: written by make {name} -->' and its end")
    page.write_text(section.sub(lambda found: f"{found[1]}\n{text.strip()}\n\n{found[2]}", before))


def origin(name: str) -> str:
    """Which command wrote it, when, from which commit, and on what."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    day = datetime.now(timezone.utc).date().isoformat()
    return (
        f"*`make {name}`, {day}, commit {commit.strip() or 'unknown'}, Python {platform.python_version()}, "
        f"{os.cpu_count()} processors, {platform.machine()}.*"
    )
