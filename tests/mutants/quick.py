"""A pytest plugin for runs on mutants: a failure is enough, its smallest example is nobody's."""

from __future__ import annotations

from hypothesis import Phase, settings


def pytest_configure() -> None:
    """Let hypothesis draw the same examples for each mutant, and shrink none."""
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)
    settings.load_profile("mutants")
