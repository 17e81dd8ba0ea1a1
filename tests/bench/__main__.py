"""Run the parts of the bench, print their tables, and write them as the section ``bench`` of the evidence."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from tests.campaigns.evidence import conclude

PARTS = ("engine",)
"""Modules of this package, in the order of the page."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what ``--only`` names, or everything; exit status 1 where a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything: does it work, not how fast")
    arguments = parser.parse_args(argv)
    printed: list[str] = []
    broken: list[str] = []
    for part in arguments.only.split(","):
        text, promises = importlib.import_module(f"tests.bench.{part}").run(arguments)
        printed.append(text)
        broken += promises
    return conclude("bench", "Speed", "\n\n".join(printed), broken)


if __name__ == "__main__":
    sys.exit(main())
