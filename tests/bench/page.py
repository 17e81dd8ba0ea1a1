"""Writes docs/reference/speed.md and its plot, and tells the evidence the short form.

A part's printed text may hold the line ``MORE``: what stands before it is short enough for the page of evidence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench import plot
from tests.campaigns import evidence

MORE = "<!-- more -->"


def publish(printed: Mapping[str, str], broken: Sequence[str]) -> int:
    """Print everything; where make asked for it, write the page, the plot and the section of evidence.

    Args:
        printed: every part's text, by the part's name.
        broken: the promises that did not hold.
    """
    page = os.environ.get("EVIDENCE_FILE")
    if page:
        speed = Path(page).parents[1] / "reference" / "speed.md"
        for part, text in printed.items():
            evidence.write(speed, f"speed-{part}", f"{_whole(text)}\n\n{evidence.origin('bench')}")
        if "drain" in printed:
            (speed.parent / "speed.svg").write_text(plot.shares(printed["drain"]))
    short = [text.split(MORE)[0].strip() for text in printed.values()]
    status = evidence.conclude("bench", "Speed", "\n\n".join(short), broken)
    print("\n\n".join(text.split(MORE)[1].strip() for text in printed.values() if MORE in text))
    return status


def _whole(text: str) -> str:
    return text.replace(f"{MORE}\n\n", "")
