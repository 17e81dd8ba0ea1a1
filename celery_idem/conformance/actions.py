"""Does an action store keep I1 to I11? Every invariant has its named cases, for a store of your own too.

``run`` takes a function that opens a ``Harness`` (see ``conformance.harness``) and returns one ``CaseResult`` per case;
``assert_conforms`` raises with all that failed. Neither needs pytest, Celery or a database library. A case uses only
verbs of the contract and the harness; what its docstring calls a store is the broken one it catches. From a shell::

    python -m celery_idem.conformance.actions sqlite:///empty.db

is this suite on ``SQLActionStore`` and an empty database: a table, and 1 for anything that did not pass.

It finds faults and proves nothing: a crash inside your database's commit is your database's affair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeAlias

from celery_idem.conformance import dispatch, gates, identity, leases, lifecycle, observation, timing  # noqa: F401
from celery_idem.conformance.bench import CASES, Bench
from celery_idem.conformance.suite import FAILED, NOT_RUN, PASSED, CaseResult, Suite, url_of
from celery_idem.errors import CeleryIdemError

if TYPE_CHECKING:
    from celery_idem.conformance.harness import Harness

__all__ = ["CASES", "FAILED", "INVARIANTS", "NOT_RUN", "PASSED", "SUITE", "CaseResult", "assert_conforms", "run"]

INVARIANTS = tuple(f"I{number}" for number in range(1, 12))
SUITE = Suite("invariants", INVARIANTS, CASES, Bench, hooks={"tamper"})

MakeHarness: TypeAlias = "Callable[[], Harness]"


def run(make_harness: MakeHarness, invariants: Sequence[str] = INVARIANTS) -> list[CaseResult]:
    """What each case of these invariants came to; every case has a harness of its own."""
    return SUITE.run(make_harness, invariants)


def assert_conforms(make_harness: MakeHarness) -> None:
    """``AssertionError`` that names every case which failed, or was not run and is not excused."""
    SUITE.assert_conforms(make_harness)


def main(arguments: Sequence[str]) -> int:
    """Run the suite on the database of the one argument; 0 where everything passed, 1 if not, 2 for wrong usage."""
    url = url_of(arguments, "celery_idem.conformance.actions")
    if url is None:
        return 2
    from celery_idem.conformance.sql import SQLHarness

    try:
        with closing(SQLHarness(url)) as harness:
            used = harness.store.find(limit=1)
    except CeleryIdemError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if used:
        sys.stderr.write("this database holds actions, and the suite tampers with its tables: give it an empty one\n")
        return 2
    return SUITE.tell(lambda: SQLHarness(url))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
