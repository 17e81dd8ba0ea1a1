"""``make conformance``: every store broken on purpose against every case, as a table per rule."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_idem.conformance import actions, claims
from celery_idem.conformance.suite import Suite
from tests.campaigns.evidence import conclude
from tests.campaigns.report import progress, table
from tests.conformance import broken_actions, broken_claims
from tests.conformance.broken_claims import HISTORIES, rule_of
from tests.conformance.plain_claims import PlainClaimsHarness
from tests.conformance.plain_store import PlainHarness

HEADER = ("rule", "cases", "broken stores", "caught by the cases they name", "by no other rule's", "by histories too")

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where a commit costs nothing: what a disk keeps is not the question here, and there are some fifty thousand."""


@dataclass(frozen=True)
class Held:
    """One broken store, and the cases that caught it."""

    store: Any
    failed: Sequence[str]

    @property
    def rule(self) -> str:
        return rule_of(next(iter(self.store.caught_by)))

    @property
    def caught(self) -> bool:
        return self.store.caught_by <= set(self.failed)

    @property
    def foreign(self) -> list[str]:
        """Cases of other rules that caught it too, the histories aside: they hold the whole table."""
        return [name for name in self.failed if rule_of(name) != self.rule and name != HISTORIES]

    @property
    def declared(self) -> bool:
        also = getattr(self.store, "also", frozenset())
        return all({name, rule_of(name)} & also for name in self.foreign)


def held(kind: str, stores: Sequence[Any], check: Callable[[Any], Any]) -> list[Held]:
    """Each of the broken stores against every case."""
    found = []
    for number, store in enumerate(stores, 1):
        failed = [result.name for result in check(store) if not result.ok]
        found.append(Held(store, failed))
        progress(f"{kind} {number}/{len(stores)} {store.__name__}: {', '.join(failed) or 'NOT CAUGHT'}")
    return found


def check_action(store: Any) -> Any:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        return broken_actions.check(store, f"sqlite:///{Path(directory) / 'ledger.db'}")


def rows(suite: Suite, broken: Sequence[Held], histories: bool) -> list[tuple[Any, ...]]:
    """A line per rule, and one of sums."""
    lines = []
    for rule in suite.rules:
        mine = [one for one in broken if one.rule == rule]
        cases = sum(case.rule == rule for case in suite.cases)
        counts = (sum(one.caught for one in mine), sum(not one.foreign for one in mine))
        too = sum(HISTORIES in one.failed for one in mine) if histories else ""
        lines.append((rule, cases, len(mine), *counts, too))
    sums = [sum(line[column] for line in lines) for column in range(1, 5)]
    return [*lines, ("all", *sums, sum(line[5] for line in lines) if histories else "")]


def faults(suite: Suite, broken: Sequence[Held], *, whole: bool = True) -> list[str]:
    """What must not be: a store not caught, caught by what it does not declare, a case that catches nothing.

    The last is only asked where all of the broken stores were held (``whole``).
    """
    missed = [one for one in broken if not one.caught]
    found = [f"{one.store.__name__} was not caught by {sorted(one.store.caught_by)}" for one in missed]
    found += [f"{one.store.__name__} was also caught by {one.foreign}" for one in broken if not one.declared]
    if not whole:
        return found
    named = {name for one in broken for name in one.store.caught_by}
    found += [f"{case.name} has no broken store" for case in suite.cases if case.name not in named]
    return found


def rests(broken: Sequence[Held]) -> str:
    """Which stores cases of other rules caught too."""
    lines = [f"- {one.rule} {one.store.__name__}: {', '.join(one.foreign)}" for one in broken if one.foreign]
    return "\n".join(lines)


def sound(what: str, results: Sequence[Any]) -> tuple[str, list[str]]:
    """A line about a store that should pass, and what it did not."""
    passed = sum(result.outcome == claims.PASSED for result in results)
    not_run = sum(result.outcome == claims.NOT_RUN for result in results)
    wrong = [f"{what} fails {result.name}: {result.told[:200]}" for result in results if not result.ok]
    return f"- {what}: {passed} of {len(results)} cases passed, {not_run} not run", wrong


def chosen(stores: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The stores of these names; all of them where none is named."""
    return [store for store in stores if not names or store.__name__ in names]


def of_claims(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is printed of claim stores, and what is wrong."""
    broken = held("claims", chosen(broken_claims.BROKEN, names), broken_claims.check)
    texts = ["Claim stores:", table(HEADER, rows(claims.SUITE, broken, histories=True))]
    texts += ["Caught by cases of another rule too, because those rest on the broken one:", rests(broken)]
    wrong = faults(claims.SUITE, broken, whole=not names)
    if names:
        return texts, wrong
    line, also = sound("claims, a dictionary and a lock without core/decide.py", claims.run(PlainClaimsHarness))
    return [*texts, "Written from the contract alone:", line], [*also, *wrong]


def of_actions(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is printed of action stores, and what is wrong."""
    broken = held("actions", chosen(broken_actions.BROKEN, names), check_action)
    counted = [counts[:5] for counts in rows(actions.SUITE, broken, histories=False)]
    texts = ["Action stores:", table(HEADER[:5], counted)]
    wrong = faults(actions.SUITE, broken, whole=not names)
    if names:
        return texts, wrong
    line, also = sound("actions, plain dictionaries", actions.run(PlainHarness))
    return [*texts, "Written from the contract alone:", line], [*also, *wrong]


SUITES = {"claims": (of_claims, broken_claims.BROKEN), "actions": (of_actions, broken_actions.BROKEN)}


def main(argv: Sequence[str] | None = None) -> int:
    """Hold the broken stores that are asked for against all cases of their suites; 1 where one was not caught."""
    every = {store.__name__ for _, stores in SUITES.values() for store in stores}
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="claims|actions", help="one of the suites (both)")
    parser.add_argument("--store", action="append", default=[], metavar="NAME", help="this broken store alone; repeat")
    given = parser.parse_args(argv)
    if unknown := sorted({*given.suites} - {*SUITES}) or sorted({*given.store} - every):
        parser.error(f"no suite and no broken store of this name: {', '.join(unknown)}")
    texts = ["Every broken store is held against every case of its suite. A store names the cases that must catch it."]
    broken: list[str] = []
    for name, (suite, stores) in SUITES.items():
        if (given.suites and name not in given.suites) or not chosen(stores, given.store):
            continue
        printed, wrong = suite(given.store)
        texts += printed
        broken += wrong
    return conclude("conformance", "Conformance, and stores broken on purpose", "\n\n".join(texts), broken)


if __name__ == "__main__":
    sys.exit(main())
