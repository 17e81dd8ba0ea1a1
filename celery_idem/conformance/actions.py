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
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from celery_idem.conformance import dispatch, gates, identity, leases, lifecycle, observation, timing  # noqa: F401
from celery_idem.conformance.bench import Bench
from celery_idem.conformance.case import CASES, Breach, Case
from celery_idem.errors import CeleryIdemError, ConfigurationError

if TYPE_CHECKING:
    from celery_idem.conformance.harness import Harness

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
INVARIANTS = tuple(f"I{number}" for number in range(1, 12))

MakeHarness: TypeAlias = "Callable[[], Harness]"


@dataclass(frozen=True)
class CaseResult:
    """What one case came to."""

    invariant: str
    """``I1`` to ``I11``."""
    name: str
    outcome: str
    """``passed``, ``failed`` or ``not run``."""
    told: str
    """What the store did instead, or why the case was not run."""
    excused: bool
    """The harness says that what the case needs cannot be: so it was not run, and that is all right."""
    catches: str
    """The broken store the case is about."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether a store with this result may conform."""
        return self.outcome == PASSED or self.excused


def run(make_harness: MakeHarness, invariants: Sequence[str] = INVARIANTS) -> list[CaseResult]:
    """What each case of these invariants came to; every case has a harness of its own."""
    if not invariants or not set(invariants) <= set(INVARIANTS):
        raise ConfigurationError(f"invariants = {invariants!r}: give a list of some of {', '.join(INVARIANTS)}")
    return [_result(case, make_harness) for invariant in invariants for case in CASES if case.invariant == invariant]


def assert_conforms(make_harness: MakeHarness) -> None:
    """``AssertionError`` that names every case which failed, or was not run and is not excused."""
    broken = [result for result in run(make_harness) if not result.ok]
    if broken:
        told = "\n".join(f"  {result.name} {result.outcome}: {result.told}" for result in broken)
        raise AssertionError(f"the store breaks {', '.join(_invariants(broken))}:\n{told}")


def _invariants(results: Sequence[CaseResult]) -> list[str]:
    return list(dict.fromkeys(result.invariant for result in results))


def _result(case: Case, make_harness: MakeHarness) -> CaseResult:
    harness = make_harness()
    start = time.monotonic()
    try:
        outcome, told, excused = _outcome(case, harness)
    finally:
        harness.close()
    return CaseResult(case.invariant, case.name, outcome, told, excused, case.catches, time.monotonic() - start)


def _outcome(case: Case, harness: Harness) -> tuple[str, str, bool]:
    for need in case.needs:
        has = harness.tamper is not None if need == "tamper" else hasattr(harness.store, need)
        if not has and need in harness.excused:
            return NOT_RUN, harness.excused[need], True
        if not has:
            lacks = "the harness has no tamper hook" if need == "tamper" else f"the store has no {need}"
            return NOT_RUN, f"{lacks}: add one, or say in excused why there can be none", False
    try:
        case.check(Bench(harness))
    except Breach as breach:
        return FAILED, str(breach), False
    except Exception as error:  # noqa: BLE001  a store may raise anything, and the other cases still run
        last = traceback.extract_tb(error.__traceback__)[-1]
        return FAILED, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})", False
    return PASSED, "", False


def main(arguments: Sequence[str]) -> int:
    """Run the suite on the database of the one argument; 0 where everything passed, 1 if not, 2 for wrong usage."""
    if len(arguments) != 1 or "://" not in arguments[0]:
        sys.stderr.write("usage: python -m celery_idem.conformance.actions URL   (of an empty database)\n")
        return 2
    from celery_idem.conformance.sql import SQLHarness

    (url,) = arguments
    try:
        with closing(SQLHarness(url)) as harness:
            used = harness.store.find(limit=1)
    except CeleryIdemError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if used:
        sys.stderr.write("this database holds actions, and the suite tampers with its tables: give it an empty one\n")
        return 2
    results = run(lambda: SQLHarness(url))
    for line in table(results):
        sys.stdout.write(f"{line}\n")
    return 0 if all(result.ok for result in results) else 1


def table(results: Sequence[CaseResult]) -> list[str]:
    """The results as lines of text, the counts last."""
    width = max((len(result.name) for result in results), default=0)
    lines = []
    for result in results:
        lines.append(f"{result.name:{width}}  {result.outcome:7}  {result.seconds:6.2f} s")
        if result.told:
            lines.append(f"    {result.told}")
    counts = [f"{sum(result.outcome == kind for result in results)} {kind}" for kind in (PASSED, FAILED, NOT_RUN)]
    return [*lines, f"{len(results)} cases of {len(_invariants(results))} invariants: {', '.join(counts)}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
