"""A pytest plugin for runs on mutants: a failure is enough, its smallest example is nobody's."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def pytest_configure() -> None:
    """Let hypothesis draw the same examples for each mutant, and shrink none; a busy machine kills no mutant."""
    settings.register_profile(
        "mutants",
        phases=(Phase.explicit, Phase.generate),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("mutants")
