"""Action stores that break one invariant each, and what the suite says of them.

``python -m tests.conformance.broken_actions`` holds each against the whole suite: 0 if every one was caught, and by
cases of its own invariant alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from celery_idem.conformance import actions
from celery_idem.conformance.actions import CASES
from celery_idem.conformance.case import Case
from celery_idem.conformance.sql import SQLHarness
from tests.conformance import (  # noqa: F401  each adds its stores
    broken_dispatches,
    broken_gates,
    broken_leases,
    broken_lives,
    broken_receipts,
)
from tests.conformance.broken_base import BROKEN, BrokenStore


def invariant_of(broken: type[BrokenStore]) -> str:
    return next(iter(broken.caught_by)).partition(".")[0]


def check(broken: type[BrokenStore], url: str, cases: Sequence[Case] = CASES) -> list[actions.CaseResult]:
    """What these cases say of it."""
    with ExitStack() as patched:
        for target, name, value in broken.patches:
            patched.enter_context(mock.patch.object(target, name, value))
        return [actions.SUITE.result(case, lambda: SQLHarness(url, broken)) for case in cases]


def main() -> int:
    wrong = 0
    for broken in sorted(BROKEN, key=lambda broken: actions.INVARIANTS.index(invariant_of(broken))):
        with tempfile.TemporaryDirectory() as directory:
            results = check(broken, f"sqlite:///{Path(directory) / 'ledger.db'}")
        failed = [result.name for result in results if not result.ok]
        own = [name for name in failed if name.startswith(f"{invariant_of(broken)}.")]
        good = own == failed and broken.caught_by <= set(own)
        wrong += not good
        print(f"{invariant_of(broken):4} {broken.__name__:32} {'caught' if good else 'WRONG '} {', '.join(failed)}")
    print(f"{len(BROKEN)} broken stores, {len(BROKEN) - wrong} caught by their own invariant alone")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
