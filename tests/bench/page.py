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


def not_judged(load: float, processors: int, *, quick: bool) -> str:
    """Why this run says nothing of a promise; empty where it does.

    Args:
        load: the machine's, of the minute before the bench began: its own would count against it.
        processors: how many there are.
        quick: whether it is a tenth of a run.
    """
    if quick:
        return "a quick run says whether everything runs, not how fast"
    return f"load {load:.1f} on {processors} processors before it began" if load > processors else ""


def publish(printed: Mapping[str, str], broken: Sequence[str], unjudged: str = "") -> int:
    """Print everything, the verdict last; where make asked for it, write page, plot and the section of evidence.

    Args:
        printed: every part's text, by the part's name.
        broken: the promises that did not hold.
        unjudged: why there is no verdict, where that is so.
    """
    page = os.environ.get("EVIDENCE_FILE")
    if page:
        speed = Path(page).parents[1] / "reference" / "speed.md"
        for part, text in printed.items():
            evidence.write(speed, f"speed-{part}", f"{_whole(text)}\n\n{evidence.origin('bench')}")
        if "drain" in printed:
            (speed.parent / "speed.svg").write_text(plot.shares(printed["drain"]))
    short = "\n\n".join(text.split(MORE)[0].strip() for text in printed.values())
    more = "\n\n".join(text.split(MORE)[1].strip() for text in printed.values() if MORE in text)
    return evidence.conclude("bench", "Speed", short, broken, unjudged=unjudged, more=more)


def _whole(text: str) -> str:
    return text.replace(f"{MORE}\n\n", "")
