"""The page of failures names a test or a page for every row, or says that the row is advice."""

from __future__ import annotations

from tests.docs.pages import ROOT

PAGE = ROOT / "docs/explanation/failures.md"
HEADER = "| what goes wrong | what happens | shown by |"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line != HEADER]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_is_shown_or_said_to_be_advice() -> None:
    assert len(rows()) > 80
    silent = [row[0] for row in rows() if "](" not in row[2] and row[2] != "advice"]
    assert not silent


def test_what_is_not_covered_says_what_to_do() -> None:
    bare = [row[0] for row in rows() if row[1].lower() in {"**not covered**", "**not covered**."}]
    assert not bare
