"""``make fuzz``: every target in turn, for an equal share of the time.

``--seconds`` is the time in all, ``--seed`` the first chunk's (drawn where it is not given), ``--target`` one target
alone, by the beginning of its name. A finding names its seed: ``--target X --seed N`` comes to it again at once.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys

from tests.campaigns.evidence import conclude
from tests.campaigns.report import progress, table
from tests.fuzz.target import Found, campaign
from tests.fuzz.targets import TARGETS
from tests.support.services import RedisServer


def main() -> int:
    """Run the campaign and return its exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="in all (default: 180)")
    parser.add_argument("--seed", type=int, help="of the first chunk (default: drawn)")
    parser.add_argument("--target", default="", help="one target, by the beginning of its name")
    asked = parser.parse_args()
    targets = [target for target in TARGETS if target.name.startswith(asked.target)]
    if not targets:
        parser.error(f"no target begins so; there are {', '.join(target.name for target in TARGETS)}")
    first = random.SystemRandom().randrange(1_000_000) if asked.seed is None else asked.seed
    all_found = []
    with RedisServer() as server:
        for target in targets:
            new_url = functools.partial(server.new_database)
            all_found.append(campaign(target, new_url, seconds=asked.seconds / len(targets), first=first))
            progress(f"{target.name}: {all_found[-1].examples} examples")
    faults = [fault for found in all_found for fault in found.faults]
    return conclude("fuzz", f"Fuzz, seeds from {first}", printed(all_found), faults)


def printed(all_found: list[Found]) -> str:
    """The table, and what each target promises."""
    header = ("target", "examples", "seeds", "seconds", "what came of them", "found")
    rows = []
    for found in all_found:
        came = ", ".join(f"{what} {count}" for what, count in found.came.most_common())
        seeds = f"{found.seeds[0]} to {found.seeds[-1]}"
        rows.append((found.target.name, found.examples, seeds, found.seconds, came, len(found.faults)))
    promises = "\n".join(f"- **{found.target.name}**: {found.target.promise}." for found in all_found)
    examples = sum(found.examples for found in all_found)
    return f"{table(header, rows)}\n\n{examples} examples. What each must never break:\n\n{promises}"


if __name__ == "__main__":
    sys.exit(main())
