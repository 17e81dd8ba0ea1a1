"""The table of guarantees and the marked tests say the same."""

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path

from tests.contract.rows import ROWS


def marked() -> dict[str, set[str]]:
    """The names of the test functions under each line they are marked with; unmarked ones under ""."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in Path(__file__).parent.glob("test_contract_*.py"):
        module = importlib.import_module(f"tests.contract.{path.stem}")
        if path.stem == Path(__file__).stem:
            continue
        for name, test in vars(module).items():
            if name.startswith("test_"):
                rules = [mark.args[0] for mark in getattr(test, "pytestmark", []) if mark.name == "guarantee"]
                for rule in rules or [""]:
                    found[rule].add(name)
    return dict(found)


def test_every_line_has_the_tests_it_names() -> None:
    assert marked() == {rule: set(guarantee.tests) for rule, guarantee in ROWS.items()}


def test_every_row_and_rule_is_there() -> None:
    assert {f"row {n}" for n in range(1, 13)} | {f"S{n}" for n in range(1, 10)} <= set(ROWS)
    assert all(guarantee.tests and guarantee.text.endswith(".") for guarantee in ROWS.values())
