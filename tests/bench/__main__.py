"""Run the parts of the bench, print their tables, and write them as the section ``bench`` of the evidence."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tests.bench import page

PARTS = ("drain", "profile", "engine", "growth")
"""Modules of this package, in the order of the page."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``--only`` names, or everything; exit status 1 where a promise is broken on a machine that has time."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything: does it work, not how fast")
    arguments = parser.parse_args(argv)
    unjudged = page.not_judged(os.getloadavg()[0], os.cpu_count() or 1, quick=arguments.quick)
    printed: dict[str, str] = {}
    broken: list[str] = []
    for part in arguments.only.split(","):
        text, promises = importlib.import_module(f"tests.bench.{part}").run(arguments)
        printed[part] = text
        broken += promises
    return page.publish(printed, broken, unjudged)


if __name__ == "__main__":
    sys.exit(main())
