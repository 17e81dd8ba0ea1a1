"""What both suites are: cases in the order of their rules, a harness for each, a result each, and a table of them."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from celery_idem.conformance.case import Breach, Case
from celery_idem.errors import ConfigurationError

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class CaseResult:
    """What one case came to."""

    rule: str
    """As in ``Case``."""
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


@dataclass
class Suite:
    """Cases for one kind of store."""

    word: str
    """What its rules are called, in the plural."""
    rules: Sequence[str]
    cases: Sequence[Case]
    bench: Callable[[Any], Any]
    """What a check takes, made of a harness."""
    hooks: Collection[str]
    """What a case may need of the harness; anything else it needs of the store."""

    def run(self, make_harness: Callable[[], Any], rules: Sequence[str]) -> list[CaseResult]:
        """What each case of these rules came to; every case has a harness of its own."""
        if not rules or not set(rules) <= set(self.rules):
            raise ConfigurationError(f"{self.word} = {rules!r}: give a list of some of {', '.join(self.rules)}")
        return [self.result(case, make_harness) for rule in rules for case in self.cases if case.rule == rule]

    def assert_conforms(self, make_harness: Callable[[], Any]) -> None:
        """``AssertionError`` that names every case which failed, or was not run and is not excused."""
        broken = [result for result in self.run(make_harness, self.rules) if not result.ok]
        if broken:
            told = "\n".join(f"  {result.name} {result.outcome}: {result.told}" for result in broken)
            raise AssertionError(f"the store breaks {', '.join(_rules(broken))}:\n{told}")

    def result(self, case: Case, make_harness: Callable[[], Any]) -> CaseResult:
        """What this case comes to."""
        harness = make_harness()
        start = time.monotonic()
        try:
            outcome, told, excused = self._outcome(case, harness)
        finally:
            harness.close()
        return CaseResult(case.rule, case.name, outcome, told, excused, case.catches, time.monotonic() - start)

    def _outcome(self, case: Case, harness: Any) -> tuple[str, str, bool]:
        for need in case.needs:
            hook = need in self.hooks
            if getattr(harness, need, None) not in (None, False) if hook else hasattr(harness.store, need):
                continue
            if need in harness.excused:
                return NOT_RUN, harness.excused[need], True
            lacks = f"the harness has no {need} hook" if hook else f"the store has no {need}"
            return NOT_RUN, f"{lacks}: add one, or say in excused why there can be none", False
        try:
            case.check(self.bench(harness))
        except Breach as breach:
            return FAILED, str(breach), False
        except Exception as error:  # noqa: BLE001  a store may raise anything, and the other cases still run
            last = traceback.extract_tb(error.__traceback__)[-1]
            return FAILED, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})", False
        return PASSED, "", False

    def table(self, results: Sequence[CaseResult]) -> list[str]:
        """The results as lines of text, the counts last."""
        width = max((len(result.name) for result in results), default=0)
        lines = []
        for result in results:
            lines.append(f"{result.name:{width}}  {result.outcome:7}  {result.seconds:6.2f} s")
            if result.told:
                lines.append(f"    {result.told}")
        counts = [f"{sum(result.outcome == kind for result in results)} {kind}" for kind in (PASSED, FAILED, NOT_RUN)]
        return [*lines, f"{len(results)} cases of {len(_rules(results))} {self.word}: {', '.join(counts)}"]

    def tell(self, make_harness: Callable[[], Any]) -> int:
        """Run it all and print the table; 0 where everything passed or is excused, else 1."""
        results = self.run(make_harness, self.rules)
        for line in self.table(results):
            sys.stdout.write(f"{line}\n")
        return 0 if all(result.ok for result in results) else 1


def url_of(arguments: Sequence[str], module: str) -> str | None:
    """The one argument; None, and a line that says how it is used, where it is not one URL."""
    if len(arguments) != 1 or "://" not in arguments[0]:
        sys.stderr.write(f"usage: python -m {module} URL   (of an empty database)\n")
        return None
    return arguments[0]


def _rules(results: Sequence[CaseResult]) -> list[str]:
    return list(dict.fromkeys(result.rule for result in results))
