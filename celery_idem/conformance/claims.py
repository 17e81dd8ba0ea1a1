"""Does a claim store keep S1 to S9 and the decision table? Each has its named cases, for a store of yours too.

``run`` takes a function that opens a ``ClaimHarness`` (see ``conformance.claim_harness``) and returns a ``CaseResult``
per case; ``assert_conforms`` raises with all that failed. Neither needs pytest, Celery or a database library. A case
uses only the verbs of ``stores.base.Store`` and the harness; what its docstring calls a store is the broken one it
catches. From a shell::

    python -m celery_idem.conformance.claims redis://localhost/7

is this suite on the store that a URL names, in an empty place: a table, and 1 for anything that did not pass.

It finds faults and proves nothing: a crash inside your database's commit is your database's affair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from celery_idem.conformance.claim_cases import (  # noqa: F401
    histories,
    rows,
    sharing,
    times,
    tokens,
    trouble,
    upkeep,
    verbs,
)
from celery_idem.conformance.claim_cases.bench import CASES, Bench
from celery_idem.conformance.claim_harness import HOOKS
from celery_idem.conformance.suite import FAILED, NOT_RUN, PASSED, CaseResult, Suite, url_of
from celery_idem.errors import CeleryIdemError

if TYPE_CHECKING:
    from celery_idem.conformance.claim_harness import ClaimHarness

__all__ = ["CASES", "FAILED", "NOT_RUN", "PASSED", "RULES", "SUITE", "CaseResult", "assert_conforms", "run"]

VERBS = ("complete", "release", "renew", "settle", "note_parked", "find", "forget", "purge", "close")
RULES = (
    *(f"S{number}" for number in range(1, 10)),
    *(f"R{number}" for number in range(1, 13)),
    *("order", *VERBS, "table"),
)
"""S1 to S9 of ``stores.base``, the rows of the decision table and their order, the other verbs, random histories."""
SUITE = Suite("rules", RULES, CASES, Bench, hooks=HOOKS)

MakeHarness: TypeAlias = "Callable[[], ClaimHarness]"


def run(make_harness: MakeHarness, rules: Sequence[str] = RULES) -> list[CaseResult]:
    """What each case of these rules came to; every case has a harness of its own."""
    return SUITE.run(make_harness, rules)


def assert_conforms(make_harness: MakeHarness) -> None:
    """``AssertionError`` that names every case which failed, or was not run and is not excused."""
    SUITE.assert_conforms(make_harness)


def main(arguments: Sequence[str]) -> int:
    """Run the suite on the store of the one argument; 0 where everything passed, 1 if not, 2 for wrong usage."""
    url = url_of(arguments, "celery_idem.conformance.claims")
    if url is None:
        return 2
    from celery_idem.conformance.claim_stores import harnesses

    try:
        make_harness = harnesses(url)
    except CeleryIdemError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return SUITE.tell(make_harness)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
