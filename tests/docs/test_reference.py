"""The reference pages say what the code says: settings, events, errors, headers, records, names."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import re
from collections import defaultdict

import celery_idem
from celery_idem import errors
from celery_idem.core.events import TERMINAL, WARNED, EventName, level_of
from celery_idem.core.policy import Policy
from celery_idem.core.records import Answer, Note, Record
from celery_idem.core.settings import PER_TASK, TABLE
from celery_idem.governed.telling import DETAILS
from celery_idem.publish import KEY_HEADER, PARK_HEADER, STAMP_HEADER, Parked, Stamp
from celery_idem.stores.base import Store
from celery_idem.stores.redis.rows import FIELDS
from celery_idem.stores.sql.schema import COLUMNS
from tests.docs.pages import ROOT, page

REFERENCE = "docs/reference"


def in_code(text: str) -> set[str]:
    """Every word that a page or cell sets in backticks, fenced blocks left out."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)))


def test_settings() -> None:
    shown = page(f"{REFERENCE}/settings.md")
    rows = [(row[0], row[1].strip("`"), row[2]) for row in shown.rows()]
    expected = [(f"[`{s.name}`](#{s.name})", repr(s.default), "yes" if s.per_task else "") for s in TABLE]
    assert rows == expected
    assert {s.name for s in TABLE} <= shown.anchors
    assert {field.name for field in dataclasses.fields(Policy)} == {*PER_TASK, "name"}


def test_events() -> None:
    rows = page(f"{REFERENCE}/events.md").rows()
    expected = [
        (
            name.value,
            "yes" if name in TERMINAL else "no",
            _levels(name),
        )
        for name in EventName
    ]
    assert sorted(tuple(row[:3]) for row in rows) == sorted(expected)
    fields = {row[0]: {field.strip() for field in row[3].split(",") if field.strip()} for row in rows}
    in_the_code = told()
    assert fields == {name.value: in_the_code[name.value] for name in EventName}


def _levels(name: EventName) -> str:
    """The level of an event as the page has it, with the causes that change it."""
    causes = sorted(WARNED.get(name, ()))
    assert all(level_of(name, {"cause": cause}) == logging.WARNING for cause in causes)
    warned = f"; WARNING for {', '.join(causes[:-1])} and {causes[-1]}" if causes else ""
    return logging.getLevelName(level_of(name, {})) + warned


def told() -> dict[str, set[str]]:
    """The fields of each event, from every call in the code that tells one."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "celery_idem").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, (ast.Name, ast.Attribute)) and call.args:
                called = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
                if called in {"emit", "_emit", "_tell"}:
                    given = {keyword.arg for keyword in call.keywords if keyword.arg}
                    given |= {"fence"} if called == "_tell" else set()
                    for name in _events_of(call.args[0]):
                        found[name] |= given
    # What happens to actions is told by one call, as a table says it.
    return found | {f"ACTION_{happened.upper()}": set(details) for happened, details in DETAILS.items()}


def _events_of(argument: ast.expr) -> list[str]:
    """The events an argument may name; of a lookup in observe mode, all three."""
    names = [
        part.attr
        for part in ast.walk(argument)
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "EventName"
    ]
    return [name.value for name in EventName if name.value.startswith("WOULD_")] if "WOULD_PARK" in names else names


def test_errors() -> None:
    text = page(f"{REFERENCE}/errors.md").path.read_text("utf-8")
    assert drawn(text) == drawn(errors.__doc__ or "")
    public = [getattr(celery_idem, name) for name in celery_idem.__all__]
    raised = {kind.__name__ for kind in public if isinstance(kind, type) and issubclass(kind, BaseException)}
    assert raised - {"CeleryIdemError"} <= in_code(text)
    assert raised <= set(re.findall(r"\w+", "\n".join(drawn(text))))


def drawn(text: str) -> list[str]:
    """The exception tree as it is drawn, without what stands beside the names."""
    lines = [line.strip() for line in text.splitlines()]
    tree = [line for line in lines if "──" in line or line == "CeleryIdemError" or line.startswith("LeaseLost (")]
    return [re.split(r"\s{2,}(?=\w)", line)[0] for line in tree if not line.startswith("|")]


def test_headers() -> None:
    rows = page(f"{REFERENCE}/headers.md").rows()
    assert [row[0].strip("`") for row in rows[:3]] == [KEY_HEADER, STAMP_HEADER, PARK_HEADER]
    stamp, park = Stamp("t", "m", "a" * 64, "").header(), Parked(1, 2, None).header()
    documented = {row[0].strip("`") for row in rows[3:]}
    assert documented == {*json.loads(stamp), *json.loads(park)}


def test_record() -> None:
    rows = page(f"{REFERENCE}/record.md").rows()
    fields, notes = [row for row in rows if len(row) == 4], [row for row in rows if len(row) == 2]
    assert {row[0].strip("`") for row in fields} - {""} == {field.name for field in dataclasses.fields(Record)}
    assert {name for row in fields for name in in_code(row[2])} == {*FIELDS, "m:<message id>"}
    assert {name for row in fields for name in in_code(row[3])} == set(COLUMNS)
    assert [row[0].strip("`") for row in notes] == [field.name for field in dataclasses.fields(Note)]


def test_decision_table() -> None:
    rows = page(f"{REFERENCE}/decision-table.md").rows()
    answers = {word for row in rows if row[0].isdigit() for word in re.findall(r"\b[A-Z_]{4,}\b", row[3])}
    assert answers == {answer.value for answer in Answer}
    assert [row[0] for row in rows if row[0].isdigit()] == [str(n) for n in range(1, 13)]
    verbs = {name for row in rows if len(row) == 2 for name in in_code(row[0])}
    claimed = {name for name in vars(Store) if not name.startswith("_")} - {"claim", "name"}
    assert claimed - verbs == {"check", "create_schema", "close"}


def test_python_api() -> None:
    text = page(f"{REFERENCE}/python-api.md").path.read_text("utf-8")
    named = in_code(text) | set(re.findall(r"^## (.*)$", text, re.MULTILINE))
    words = {word for name in named for word in re.split(r"\W+", name)}
    assert set(celery_idem.__all__) <= words
