"""``make model``: the search on the real decision functions, and the Promela models through spin.

``--larger`` adds worlds of some minutes each, ``--only search`` or ``--only spin`` leaves the other half out. Two run
at a time. Every rule is also taken out once, and that must be noticed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.campaigns.evidence import conclude
from tests.campaigns.report import progress, table
from tests.model.jobs import AS_THEY_ARE, BROKEN
from tests.model.rules import AS_IT_IS, REVERTED
from tests.model.search import Explored, explore
from tests.model.spin import Checked, check, install
from tests.model.worlds import LARGER, SHORTEST, WORLDS, world

AT_ONCE = 2
SECONDS = 900.0
"""After which a search is cut short, and that is told as broken."""


def main() -> int:
    """Run all of it and return the exit status."""
    parser = argparse.ArgumentParser(prog="make model", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--larger", action="store_true", help="worlds of some minutes each as well")
    parser.add_argument("--only", choices=("search", "spin"), help="one half alone")
    asked = parser.parse_args()
    printed: list[str] = []
    broken: list[str] = []
    if asked.only != "spin":
        _search([*WORLDS, *(LARGER if asked.larger else ())], printed, broken)
    if asked.only != "search":
        install()
        _spin(printed, broken)
    return conclude("model", "Model", "\n\n".join(printed), broken)


def searched(name: str, rule: int | None) -> Explored:
    """Search one world, with one rule taken out where it is numbered."""
    rules = AS_IT_IS if rule is None else REVERTED[rule]
    found = explore(world(name, rules), seconds=SECONDS, enough=rule is not None)
    progress(f"{name}{'' if rule is None else f', {rules.name}'}: {found.states} states")
    return found


def _search(names: Sequence[str], printed: list[str], broken: list[str]) -> None:
    with ProcessPoolExecutor(AT_ONCE) as pool:
        whole = pool.map(searched, names, [None] * len(names))
        without = pool.map(searched, [SHORTEST[rules.name] for rules in REVERTED], range(len(REVERTED)))
        rows = []
        for found in whole:
            rows.append(_row(found))
            broken += [f"{found.name}: {word}: {'; '.join(way)}" for word, way in found.violations.items()]
            if found.truncated:
                broken.append(f"{found.name}: not searched to its end in {SECONDS:.0f} s")
        caught = []
        for rules, found in zip(REVERTED, without, strict=True):
            word, way = next(iter(found.violations.items()), ("", []))
            caught.append((rules.name, found.name, found.states, word or "**nothing**", len(way)))
            if not word:
                broken.append(f"without the rule, as in {rules.name!r}, the search found nothing wrong")
    printed.append(
        "**Every order of events, on the functions of `core/decide.py`**: two workers, restores as on Redis."
    )
    header = ("world", "states", "transitions", "depth", "ends", "violations", "seconds")
    printed.append(table(header, rows))
    printed.append("Each rule taken out, and the shortest way to what breaks:")
    printed.append(table(("without the rule", "world", "states", "what breaks", "steps"), caught))


def _row(found: Explored) -> tuple[object, ...]:
    sizes = (found.states, found.transitions, found.depth, found.quiet)
    return (found.name, *sizes, ", ".join(found.violations) or "none", found.seconds)


def _spin(printed: list[str], broken: list[str]) -> None:
    with ProcessPoolExecutor(AT_ONCE) as pool:
        whole, without = pool.map(checked, AS_THEY_ARE), pool.map(checked, BROKEN)
        rows, caught = [], []
        for found in whole:
            seen = "all" if found.complete else found.coverage or "cut short"
            sizes = (found.states, found.transitions, found.depth)
            rows.append((f"{found.job.model}: {found.job.title}", *sizes, seen, found.broken or "none", found.seconds))
            if found.broken:
                broken.append(f"{found.job.model} {found.job.title}: {found.broken}")
            elif not found.complete and not found.coverage:
                broken.append(f"{found.job.model} {found.job.title}: not searched to its end")
        for found in without:
            caught.append((f"{found.job.model}: {found.job.title}", found.states, found.broken or "**nothing**"))
            if not found.broken:
                broken.append(f"{found.job.model} {found.job.title}: spin found nothing wrong")
    printed.append("**Promela through spin**: three workers, one key (`claim.pml`); a governed action (`action.pml`).")
    printed.append(table(("model", "states", "transitions", "depth", "seen", "violations", "seconds"), rows))
    printed.append("Each rule taken out:")
    printed.append(table(("model", "states", "the promise that breaks"), caught))
    printed.append(PROMISES)


def checked(job: object) -> Checked:
    """Run one job."""
    found = check(job, seconds=SECONDS)  # type: ignore[arg-type]
    progress(f"{found.job.model} {found.job.title}: {found.states} states")
    return found


PROMISES = (
    "Promises: a live lease, and a live right to continue, is never taken; a completed result never changes; a message "
    "that is acked was told of, or a copy or successor of it lives; nothing is published after it was settled; without "
    "a kill or a stall an attempt runs once and is told of once; everything ends, and then every message was told of; "
    "a governed action has one mutation at most, what is accepted happened, and what failed for certain never did."
)

if __name__ == "__main__":
    sys.exit(main())
