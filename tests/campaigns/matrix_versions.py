"""The unit suite and the live cells of the matrix under every Python found here and every Celery we support.

Each pair gets a virtual environment of its own, made anew, with Celery held to one minor release and all else as new as
pip finds it. An older Celery may use what a newer client library calls deprecated; that is not held against it here.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.report import finish, progress, table
from tests.support.processes import remove_dir, scratch_dir
from tests.support.workers import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
CELERIES = ("5.5", "5.6", "5.7")
SUITES = {
    "unit": ["tests/unit"],
    "matrix": ["tests/matrix", "-k", "test_every_body_runs_once and (prefork or threads)"],
}


def found(version: str) -> str | None:
    """The interpreter of that version: on the path, or where pyenv keeps them."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    kept = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    for candidate in [*map(str, reversed(kept)), shutil.which(f"python{version}")]:
        if candidate and subprocess.run([candidate, "-V"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def run(python: str, celery: str, suites: Sequence[str]) -> list[Any]:
    """Install and test one pair; the row of the table, with what failed first where anything did."""
    place = scratch_dir("versions")
    try:
        env = {**os.environ, "VIRTUAL_ENV": str(place / "venv"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run([python, "-m", "venv", str(place / "venv")], check=True, env=env)
        ours = str(place / "venv/bin/python")
        wanted = [f"celery~={celery}.0", "-e", f"{ROOT}[dev]"]
        installed = subprocess.run(
            [ours, "-m", "pip", "install", "--quiet", *wanted], env=env, capture_output=True, text=True, check=False
        )
        if installed.returncode:
            return [celery, "not installed", installed.stderr.strip().splitlines()[-1], "", 1]
        exact = subprocess.run(
            [ours, "-c", "import celery, kombu; print(celery.__version__, kombu.__version__)"],
            capture_output=True,
            text=True,
            check=True,
            cwd=place,
        ).stdout.split()
        began, results = time.monotonic(), [_pytest(ours, SUITES[suite], env) for suite in suites]
        return [
            *exact,
            "; ".join(text for text, _ in results),
            f"{time.monotonic() - began:.0f}",
            sum(b for _, b in results),
        ]
    finally:
        remove_dir(place)


def _pytest(python: str, arguments: Sequence[str], env: dict[str, str]) -> tuple[str, int]:
    words = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning", *arguments]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    said = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "no result")
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            progress(line)
    if said == "no result":
        progress("\n".join(lines[-15:] + done.stderr.splitlines()[-15:]))
    return f"{arguments[0]}: {re.sub(r' in .*', '', said).strip('= ')}", int(done.returncode != 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Test every pair and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.matrix_versions", description=__doc__)
    parser.add_argument("--pythons", default=",".join(PYTHONS))
    parser.add_argument("--celeries", default=",".join(CELERIES))
    parser.add_argument("--suites", default=",".join(SUITES))
    given = parser.parse_args(argv)
    rows: list[list[Any]] = []
    broken: list[str] = []
    for version, celery in itertools.product(given.pythons.split(","), given.celeries.split(",")):
        python = found(version)
        if python is None:
            rows.append([version, celery, "", "no such Python here", ""])
            continue
        progress(f"Python {version}, Celery {celery}")
        *row, bad = run(python, celery, given.suites.split(","))
        rows.append([version, *row])
        if bad:
            broken.append(f"Python {version}, Celery {celery}: {row[2]}")
    header = ("Python", "Celery", "kombu", "tests", "seconds")
    return finish("Versions", table(header, rows), broken)


if __name__ == "__main__":
    sys.exit(main())
