"""The table of guarantees is made the same way whatever order the tests ran in, and says where one failed."""

from __future__ import annotations

import random
from collections import defaultdict

from tests.contract.rows import ROWS
from tests.docs.pages import ROOT, page
from tests.support.guarantees import Place, Shown, Table
from tests.support.guarantees import page as written

CASES = [
    ("row 10", "test_b", Place("Redis", ""), True),
    ("row 10", "test_b", Place("memory", ""), True),
    ("row 2", "test_a", Place("SQLite", ""), True),
    ("row 2", "test_a", Place("Redis", ""), False),
    ("row 2", "test_a", Place("Redis", ""), True),
    ("S1", "test_c", Place("", ""), True),
    ("delivery: a value | completes", "test_d", Place("memory", "memory"), True),
]


def test_order_and_failures() -> None:
    pages = set()
    for seed in range(5):
        table: Table = defaultdict(lambda: defaultdict(Shown))
        for rule, test, place, passed in random.Random(seed).sample(CASES, len(CASES)):
            table[rule]["tests/unit/test_x.py", test].note(place, passed=passed)
        pages.add(written(table, ROOT / "docs"))
    (text,) = pages
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| rule")]
    assert [(row[0].partition(":")[0], *row[1:3], row[-1]) for row in rows] == [
        ("| row 2", "SQLite, Redis", "", "no: Redis |"),
        ("| row 10", "memory, Redis", "", "yes |"),
        ("| a value \\| completes", "memory", "memory", "yes |"),
        ("| S1", "", "", "yes |"),
    ]
    assert "[`test_a`](../tests/unit/test_x.py)" in text
    assert f"| row 2: {ROWS['row 2'].text} |" in text


def test_the_committed_table_has_every_rule_of_the_contract() -> None:
    rules = {row[0].partition(":")[0] for row in page("docs/reference/guarantees.md").rows()}
    assert set(ROWS) <= rules
