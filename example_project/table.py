"""Tables for a terminal of any width: drawn with box characters where the output can say them, in colour on a TTY."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Colour = Literal["", "red", "green", "bold"]
CODES = {"red": "31", "green": "32", "bold": "1"}
WIDTH = 120
"""Columns at most, and where the output is no terminal."""
ROOMY = 100
"""Columns below which a table leaves out what was done."""


@dataclass(frozen=True)
class Cell:
    """Text, and how it looks on a TTY."""

    text: str
    colour: Colour = ""


class Clock:
    """The seconds since the start, in front of everything it says."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """What has just happened."""
        print(f"{self.seconds:5.1f} s  {text}", flush=True)


def says(text: str) -> bool:
    """Whether standard output can encode this."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def painted(text: str, colour: Colour) -> str:
    """The text in colour, on a TTY whose owner did not say NO_COLOR."""
    if not colour or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m"


def width() -> int:
    """Columns to fill: the terminal's, but no more than can be read at ease."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def mark(kept: bool) -> Cell:
    """Whether a row is as promised."""
    yes, no = ("✓", "✗") if says("✓✗") else ("yes", "NO")
    return Cell(yes, "green") if kept else Cell(no, "red")


def verdict(rows: int, broken: Sequence[str], seconds: float) -> str:
    """The line below a table, after what there is to say about each broken row."""
    kept = painted(f"{rows - len(broken)} of {rows} rows are as promised", "red" if broken else "green")
    return "\n".join([*(["not as promised:", *broken] if broken else []), f"{kept}, after {seconds:.0f} s"])


def draw(header: Sequence[str], rows: Sequence[Sequence[Cell]], flexible: Sequence[int]) -> str:
    """The table; the columns numbered in ``flexible`` share the width the others leave, and wrap."""
    box = "┌─┬┐├┼┤└┴┘│" if says("┌─") else "+-++++++++|"
    top, middle, bottom = (box[0], box[2], box[3]), (box[4], box[5], box[6]), (box[7], box[8], box[9])
    head = [Cell(text, "bold") for text in header]
    widths = _widths([head, *rows], flexible)

    def rule(ends: tuple[str, str, str]) -> str:
        left, cross, right = ends
        return left + cross.join(box[1] * (wide + 2) for wide in widths) + right

    lines = [rule(top)]
    for number, row in enumerate([head, *rows]):
        lines += [rule(middle)] if number else []
        lines += _lines(row, widths, box[10])
    return "\n".join([*lines, rule(bottom)])


def _widths(rows: Sequence[Sequence[Cell]], flexible: Sequence[int]) -> list[int]:
    columns = [[row[column].text for row in rows] for column in range(len(rows[0]))]
    widths = [max(map(len, texts)) for texts in columns]
    left = width() - 1 - 3 * len(columns) - sum(wide for column, wide in enumerate(widths) if column not in flexible)
    wanted = sum(widths[column] for column in flexible)
    for column in flexible:
        longest_word = max(len(word) for text in columns[column] for word in text.split())
        widths[column] = max(longest_word, min(widths[column], widths[column] * left // wanted))
    return widths


def _lines(row: Sequence[Cell], widths: Sequence[int], side: str) -> list[str]:
    wrapped = [textwrap.wrap(cell.text, wide) or [""] for cell, wide in zip(row, widths, strict=True)]
    height = max(map(len, wrapped))
    padded = [lines + [""] * (height - len(lines)) for lines in wrapped]
    return [
        f"{side} " + f" {side} ".join(map(_painted_cell, texts, widths, row)) + f" {side}"
        for texts in zip(*padded, strict=True)
    ]


def _painted_cell(text: str, wide: int, cell: Cell) -> str:
    return painted(text, cell.colour) + " " * (wide - len(text))
