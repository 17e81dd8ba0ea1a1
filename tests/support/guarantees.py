"""Which test shows which rule on which store: a pytest plugin that writes docs/reference/guarantees.md, and guards it.

A test names its rule with ``@pytest.mark.guarantee("row 3")``. With ``GUARANTEES_FILE`` set, a run writes the table of
every marked test that ran; ``make guarantees`` does that. A run of the whole suite fails where the committed table is
not the one it would write. The table holds no times and nothing of this machine.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs" / "reference" / "guarantees.md"
DELIVERY = "delivery: "
STORES = {
    "memory": "memory",
    "sqlite": "SQLite",
    "redis": "Redis",
    "psycopg2": "PostgreSQL (psycopg2)",
    "psycopg3": "PostgreSQL (psycopg 3)",
    "postgres": "PostgreSQL (psycopg2)",
}
"""Names by what parameters and fixtures call them, in the table's order."""
BROKERS = {"memory": "memory", "filesystem": "filesystem", "redis": "Redis", "rabbitmq": "RabbitMQ"}
HEAD = """\
# Guarantees

Every rule, the tests that show it, and the stores and brokers they ran on. Made by `make guarantees` from a run; the
whole suite fails where this page is not what it would write. The rules themselves are explained in the
[decision table](decision-table.md), the [delivery table](delivery-table.md) and
[`stores/base.py`](../../celery_idem/stores/base.py).
"""


@dataclass(frozen=True)
class Place:
    """What one test ran on."""

    store: str
    broker: str


@dataclass
class Shown:
    """One test's part in showing one rule: where it ran, and whether it passed there."""

    places: dict[Place, bool] = field(default_factory=dict)

    def note(self, place: Place, *, passed: bool) -> None:
        """One of its cases ended."""
        self.places[place] = passed and self.places.get(place, True)


Table = dict[str, dict[tuple[str, str], Shown]]
"""By rule, then by file and function."""


PROPERTY = "guarantee"


class Guarantees:
    """The marked tests of one run; what they show travels with their reports, from whatever process ran them."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[list[str], tuple[str, str], Place]] = {}
        self._failed: set[str] = set()
        self.complaint = ""

    @staticmethod
    def mark(item: pytest.Item) -> None:
        """Note on the item what its report will say."""
        rules = sorted({str(mark.args[0]) for mark in item.iter_markers("guarantee")})
        if rules:
            function = getattr(item, "originalname", None) or item.name
            place = place_of(item)
            facts = [rules, str(item.path.relative_to(ROOT)), function, place.store, place.broker]
            item.user_properties.append((PROPERTY, json.dumps(facts)))

    def report(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        facts = next((value for name, value in report.user_properties if name == PROPERTY), None)
        if facts is None:
            return
        rules, path, function, store, broker = json.loads(str(facts))
        if report.when == "call":
            self._shown[report.nodeid] = rules, (path, function), Place(store, broker)
        if not report.passed:
            self._failed.add(report.nodeid)

    @property
    def all_passed(self) -> bool:
        """Whether every marked test that ran passed."""
        return not self._failed

    def table(self) -> Table:
        """What ran."""
        table: Table = defaultdict(lambda: defaultdict(Shown))
        for nodeid, (rules, test, place) in self._shown.items():
            for rule in rules:
                table[rule][test].note(place, passed=nodeid not in self._failed)
        return table


def place_of(item: pytest.Item) -> Place:
    """Store and broker, from the item's parameters, else from the fixtures it asks for, else by its directory."""
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    backend = params.get("backend")
    if backend in STORES:
        return Place(STORES[backend], "")
    for value in params.values():
        broker, plus, store = value.partition("+") if isinstance(value, str) else ("", "", "")
        if plus and broker in BROKERS and store in STORES:
            return Place(STORES[store], BROKERS[broker])
    asked = " ".join(getattr(item, "fixturenames", ()))
    for name in ("redis", "postgres"):
        if f"{name}_" in asked or f"private_{name}" in asked:
            return Place(STORES[name], "")
    unit = "unit" in item.path.parts
    return Place("memory" if unit else "", "memory" if unit and "shop" in asked else "")


# --- the page -------------------------------------------------------------------------------------------------------


def page(table: Table, directory: Path) -> str:
    """The whole page, as it lies in ``directory``."""
    return "\n".join([HEAD, *_sections(table, directory)])


def _sections(table: Table, directory: Path) -> Iterator[str]:
    sections: dict[str, list[str]] = {
        "Decision table": [rule for rule in table if re.match(r"rows?\b|table$", rule)],
        "Delivery table": [rule for rule in table if rule.startswith(DELIVERY)],
        "Rules of the store": [rule for rule in table if re.fullmatch(r"S\d+", rule)],
    }
    placed = {rule for rules in sections.values() for rule in rules}
    sections["Verbs and races"] = [rule for rule in table if rule not in placed]
    for title, rules in sections.items():
        if not rules:
            continue
        yield f"## {title}\n"
        yield "| rule | store | broker | test | passed |\n|---|---|---|---|---|"
        for rule in sorted(rules, key=_in_order):
            for number, (test, shown) in enumerate(sorted(table[rule].items())):
                yield _row(rule if number else _spelled(rule), test, shown, directory)
        yield ""


def _in_order(rule: str) -> tuple[str, int]:
    number = re.search(r"\d+$", rule)
    return (rule[: number.start()], int(number[0])) if number else (f"{rule}~", 0)


def _spelled(rule: str) -> str:
    """The rule with its text, where it has one besides its name."""
    if rule in ROWS:
        return f"{rule}: {ROWS[rule].text}"
    return rule


def _row(rule: str, test: tuple[str, str], shown: Shown, directory: Path) -> str:
    path, function = test
    stores = _joined((place.store for place in shown.places), STORES)
    brokers = _joined((place.broker for place in shown.places), BROKERS)
    failed = _joined((place.store for place, passed in shown.places.items() if not passed), STORES)
    passed = f"no: {failed or 'failed'}" if not all(shown.places.values()) else "yes"
    link = f"[`{function}`]({os.path.relpath(ROOT / path, directory)})"
    cells = (rule.removeprefix(DELIVERY).replace("|", "\\|"), stores, brokers, link, passed)
    return f"| {' | '.join(cells)} |"


def _joined(names: Iterator[str], known: Mapping[str, str]) -> str:
    order = list(dict.fromkeys(known.values()))
    return ", ".join(sorted({name for name in names if name}, key=order.index))


# --- the plugin -----------------------------------------------------------------------------------------------------

_guarantees = Guarantees()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the marked tests' reports say what they show."""
    for item in items:
        _guarantees.mark(item)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what ran and what failed."""
    _guarantees.report(report)


def whole_suite(session: pytest.Session) -> bool:
    """Whether nothing was left out of this run."""
    config = session.config
    chosen = config.option.keyword or config.option.markexpr or config.getoption("deselect", None)
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen
    return whole and not (config.option.collectonly or config.getoption("lf", False) or session.shouldstop)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table where it is asked for; fail a whole run that would write another one."""
    wanted = os.environ.get("GUARANTEES_FILE")
    if hasattr(session.config, "workerinput"):
        return  # one process of several: the one that started them sees all reports
    if wanted:
        file = Path(wanted).resolve()
        file.write_text(page(_guarantees.table(), file.parent), "utf-8")
    elif whole_suite(session) and session.exitstatus == pytest.ExitCode.OK and _guarantees.all_passed:
        there = COMMITTED.read_text("utf-8") if COMMITTED.exists() else ""
        if there != page(_guarantees.table(), COMMITTED.parent):
            _guarantees.complaint = f"{COMMITTED.relative_to(ROOT)} is not what this run shows: run `make guarantees`"
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say so."""
    if _guarantees.complaint:
        terminalreporter.write_line(_guarantees.complaint, red=True)
