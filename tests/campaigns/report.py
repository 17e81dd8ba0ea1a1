"""What the campaigns share: a Markdown table, a promise that may be broken, progress on stderr, percentiles."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

_BEGAN = time.monotonic()


def progress(text: str) -> None:
    """Say on stderr what is going on."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies; not a number where there is none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, first column left, the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines)


def _text(cell: Any) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def finish(title: str, printed: str, broken: Sequence[str], unjudged: str = "") -> int:
    """Print the table, the machine's load and every broken promise; return the exit status.

    ``unjudged`` says why nothing is judged, where that is so: then nothing is broken.
    """
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{title} ({os.cpu_count()} processors, load {load})\n\n{printed}\n")
    if unjudged:
        print(f"Not judged: {unjudged}.")
        return 0
    for line in broken:
        print(f"BROKEN: {line}")
    print("" if broken else "Every promise held.")
    return 1 if broken else 0
