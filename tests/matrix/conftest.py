"""Writes docs/reference/matrix.md after ``make matrix``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.matrix.cells import page

_passed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a cell that passed."""
    if report.when == "call" and report.passed and "tests/matrix" in report.nodeid and "[" in report.nodeid:
        _passed.add(report.nodeid.rpartition("[")[2].rstrip("]"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page, where MATRIX_FILE says to."""
    path = os.environ.get("MATRIX_FILE")
    if path and not hasattr(session.config, "workerinput"):  # else the process that started this one does
        Path(path).write_text(page(_passed))
