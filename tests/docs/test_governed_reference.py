"""The reference pages of governed actions say what the code says: states, receipts, events, codes, tables, commands."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from celery_idem import cli_governed_text as text
from celery_idem.cli_governed import governed
from celery_idem.cli_text import Clock
from celery_idem.governed import REFUSALS, SQLActionStore, message_approval, records
from celery_idem.governed.gate import COMMON_FIELDS, DEFAULT_SHAPES, OPTIONAL_FIELDS
from celery_idem.governed.settings import TABLE
from celery_idem.governed.sql import schema
from celery_idem.governed.steps import ACCEPTANCE, VERIFICATION
from celery_idem.governed.telling import DETAILS, SIGNALS
from tests.docs.pages import Page, page
from tests.docs.test_reference import in_code

PAGE = page("docs/reference/governed.md")
CLI = page("docs/reference/governed-cli.md")
HOW_TO = [page(f"docs/how-to/{name}.md") for name in ("approve-actions", "admission", "dead-letters")]


def section(of: Page, heading: str) -> list[list[str]]:
    """The cells of every table row between this heading and the next."""
    lines = of.path.read_text("utf-8").splitlines()
    begin = lines.index(heading) + 1
    end = next((n for n in range(begin, len(lines)) if lines[n].startswith("#")), len(lines))
    table = [line for line in lines[begin:end] if line.startswith("|") and not re.fullmatch(r"\|[-| ]+\|", line)]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    heads = {0, *(n for n, row in enumerate(rows) if not row[0].startswith("`"))}
    return [row for n, row in enumerate(rows) if n not in heads]


def bare(cell: str) -> str:
    return cell.strip("`")


def test_states_and_what_each_leads_to() -> None:
    rows = section(PAGE, "## States")
    shown = {bare(row[0]): frozenset(in_code(row[1])) for row in rows}
    assert shown == records.ALLOWED_TRANSITIONS
    assert [bare(row[0]) for row in rows] == list(records.ALLOWED_TRANSITIONS)
    leased = {bare(row[0]) for row in rows if row[2] == "a step, under a lease"}
    assert leased == records.LEASABLE_STATES
    assert {bare(row[0]) for row in rows if row[2] == "nobody"} == records.TERMINAL_STATES | {records.STATE_PROPOSED}


def test_receipts() -> None:
    rows = section(PAGE, "## Receipts")
    kinds = [bare(row[0]) for row in rows]
    assert set(kinds[:3]) == records.RESERVED_RECEIPT_KINDS
    assert kinds[3:] == [ACCEPTANCE, VERIFICATION]


def test_evidence_of_a_gate_has_the_fields_and_shapes_that_are_judged() -> None:
    rows = section(PAGE, "### Evidence of a gate")
    fields = {name for row in rows if len(row) == 2 for name in in_code(row[0])}
    assert fields == COMMON_FIELDS | OPTIONAL_FIELDS
    shapes = {bare(row[0]): in_code(row[1]) - {'"unlimited"', '"bounded_grant"'} for row in rows if len(row) == 3}
    assert shapes == {name: shape.provenance_fields for name, shape in DEFAULT_SHAPES._shapes.items()}


def test_events_their_signals_and_what_is_told_of_them() -> None:
    rows = section(PAGE, "## Events")
    assert [bare(row[0]) for row in rows] == list(records.EVENT_TYPES)
    signals = {bare(row[0]): bare(row[1]) for row in rows if row[1]}
    assert signals == {event: signal.name for event, signal in SIGNALS.items()}
    told = {bare(row[0]): tuple(filter(None, map(str.strip, row[2].split(",")))) for row in rows}
    assert told == DETAILS


def test_refusal_codes_with_their_meanings() -> None:
    assert {bare(row[0]): row[1] for row in section(PAGE, "## Refusal codes")} == REFUSALS


def test_settings() -> None:
    rows = section(PAGE, "## Settings")
    assert [(bare(row[0]), bare(row[1])) for row in rows] == [(s.name, repr(s.default)) for s in TABLE]


def test_schema() -> None:
    tables = schema.metadata.tables
    shown = {name: [bare(row[0]) for row in section(PAGE, f"### `{name}`")] for name in tables}
    assert shown == {name: [column.name for column in table.columns] for name, table in tables.items()}
    said = in_code(PAGE.path.read_text("utf-8").partition("## Schema")[2].partition("###")[0])
    assert set(schema.IDENTITY) <= said


# --- commands --------------------------------------------------------------------------------------------------------


def test_commands() -> None:
    rows = [row for row in CLI.rows() if row[0].startswith("[`")]
    assert [re.sub(r"\W*\(.*|\W", "", row[0].replace("-", "_")) for row in rows] == [
        name.replace("-", "_") for name in ordered()
    ]
    assert sorted(ordered()) == sorted(governed.commands)


def ordered() -> list[str]:
    """The commands in the order of the page."""
    return re.findall(r"^## `([\w-]+)`$", CLI.path.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", sorted(governed.commands))
def test_options(name: str) -> None:
    taken = {
        word: parameter
        for parameter in governed.commands[name].params
        if isinstance(parameter, click.Option)
        for word in parameter.opts
        if word not in {"--json", "--help"}
    }
    shown = {bare(row[0]).split()[0]: row[1] for row in section(CLI, f"## `{name}`")}
    assert shown.keys() == taken.keys()
    for word, parameter in taken.items():
        assert not parameter.required or "needed" in shown[word]
        if name in {"list", "dead-letters"} and parameter.default == 100:
            assert "100" in shown[word]


def test_shapes_of_json(tmp_path: Path) -> None:
    shapes = [block.text for block in CLI.blocks if block.tag == "json"]
    with SQLActionStore(f"sqlite:///{tmp_path / 'ledger.db'}") as store:
        proposed = store.propose("k", "shop", "shop.refund", {})
        clock = Clock(store.now(), "store")
        evidence = message_approval(
            proposed, principal="ann", channel="cli", thread_id="t", event_id="e", decided_at=clock.now
        )
        action, receipt = store.approve(proposed["action_id"], evidence, chain_id="c")
        (rejection,) = text.rejection_shapes(
            [{"event_type": records.REJECTED, "actor": "bob", "details": {}, "created_at": 1.0}], clock
        )
        expected = [
            text.action_shape(action, clock),
            text.approval_shape(receipt, clock),
            text.letter_shape({"action_id": "a", "reason": "r", "created_at": 1.0}, None, clock),
        ]
        for shape in expected:
            assert any(keys(block) == list(shape) for block in shapes), list(shape)
        prose = re.sub(r"^```.*?^```$", "", CLI.path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        lists = [re.findall(r'"(\w+)"', word) for word in in_code(prose.replace("\n", " ")) if word.startswith("{")]
        assert list(text.receipt_shape(receipt, clock)) in lists
        assert list(text.event_shape(store.list_events(action["action_id"])[0], clock)) in lists
        assert ["clock", "now", "admission", *text.admission_shape(store.admission(), clock)] in lists
        assert ["clock", "now", "action", "approvals", "rejection", *rejection] in lists


def keys(block: str) -> list[str]:
    """The keys of the outermost object, as it is written over several lines."""
    return re.findall(r'^  "(\w+)":', block, re.MULTILINE)


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [PAGE, CLI, *HOW_TO], ids=lambda of: of.name)
def test_every_governed_setting_and_refusal_code_a_page_names_is_one(of: Page) -> None:
    said = of.path.read_text("utf-8")
    settings = {f"governed_{setting.name}" for setting in TABLE}
    named = {word for word in re.findall(r"\bgoverned_[a-z_]+\b", said) if not word.endswith("_")}
    assert named - settings <= {"governed_chain"}
    codes = set(re.findall(r"gate refused, (\w+)", said))
    assert codes <= REFUSALS.keys()
    commands = set(re.findall(r"celery -A \w+ governed ([\w-]+)", said))
    assert commands <= governed.commands.keys()
