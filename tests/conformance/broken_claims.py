"""Claim stores that break one rule each, and what the suite says of them.

``python -m tests.conformance.broken_claims`` holds each against the whole suite: 0 if every one was caught by the cases
it names, and by no case of another rule but those it declares. The random histories may catch anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from celery_idem.conformance import claims
from celery_idem.conformance.case import Case
from celery_idem.conformance.claim_cases import sharing
from celery_idem.conformance.suite import CaseResult
from tests.conformance import (  # noqa: F401  each adds its stores
    broken_claims_rows,
    broken_claims_sharing,
    broken_claims_times,
    broken_claims_tokens,
    broken_claims_verbs,
)
from tests.conformance.broken_claims_base import BROKEN

HISTORIES = "table.random_histories_follow_the_decision_table"


def rule_of(name: str) -> str:
    return name.partition(".")[0]


def its_rule(broken: Any) -> str:
    return rule_of(next(iter(broken.caught_by)))


def check(broken: Any, cases: Sequence[Case] = claims.CASES) -> list[CaseResult]:
    """What these cases say of it."""
    with mock.patch.object(sharing, "FORK_PATIENCE", 4.0):  # one of them hangs
        return [claims.SUITE.result(case, lambda: broken.harness(broken)) for case in cases]


def failed(results: Sequence[CaseResult]) -> list[str]:
    return [result.name for result in results if not result.ok]


def undeclared(broken: Any, names: Sequence[str]) -> list[str]:
    """Of the cases that caught it, those of other rules which it does not declare."""
    rule = its_rule(broken)
    return [
        name
        for name in names
        if rule_of(name) != rule and name != HISTORIES and not {name, rule_of(name)} & broken.also
    ]


def missed(broken: Any, names: Sequence[str]) -> list[str]:
    """The cases it names that did not catch it."""
    return sorted(broken.caught_by - set(names))


def main(only: Sequence[str] = ()) -> int:
    wrong = 0
    chosen = [broken for broken in BROKEN if not only or broken.__name__ in only]
    for broken in sorted(chosen, key=lambda broken: claims.RULES.index(its_rule(broken))):
        names = failed(check(broken))
        good = not missed(broken, names) and not undeclared(broken, names)
        wrong += not good
        print(f"{its_rule(broken):11} {broken.__name__:32} {'caught' if good else 'WRONG '} {', '.join(names)}")
        if not good:
            print(f"    missed {missed(broken, names)}, undeclared {undeclared(broken, names)}", flush=True)
    print(f"{len(chosen)} broken stores, {len(chosen) - wrong} caught as they say")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
