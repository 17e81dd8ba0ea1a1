"""The suite in pytest-celery's own style, in a pytest of its own.

The plugin registers tasks with every app of its process, and its ``celery_worker`` takes the place of Celery's own
fixture of that name: neither may reach the rest of our tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = ("-p", "pytest_celery.plugin", "-p", "pytest_docker_tools.plugin")
"""By the modules' names: under their own, ``pyproject.toml`` switches them off."""


@pytest.mark.redis
@pytest.mark.rabbitmq
@pytest.mark.timeout(400)
def test_the_suite_passes_on_local_processes() -> None:
    argv = [sys.executable, "-m", "pytest", str(Path(__file__).parent), *PLUGINS]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_COUNT_FILE"))}
    done = subprocess.run(
        argv,
        cwd=Path(__file__).parents[2],
        env=env | {"TEST_CONTAINERS": "local"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout


def test_the_plugins_fixtures_stay_where_they_are(request: pytest.FixtureRequest) -> None:
    for name in ("celery_setup", "celery_worker", "docker_client"):
        with pytest.raises(pytest.FixtureLookupError):
            request.getfixturevalue(name)
