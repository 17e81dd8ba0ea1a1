"""Records to rows and back, and the driver's errors in the store's words."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from typing import Any

import psycopg
import psycopg2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_idem.core import decide
from celery_idem.core.codec import Encoded
from celery_idem.core.records import RECORD_VERSION, Answer, Kind, Note, Outcome, Record, Right, State
from celery_idem.errors import ConfigurationError, RecordCorrupt, StoreUnavailable
from celery_idem.stores.sql import rows
from celery_idem.stores.sql.failures import Again, Locked, NoSchema, translated
from celery_idem.stores.sql.schema import COLUMNS
from tests.support.operations import op

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

text = st.text(max_size=8)
seconds = st.floats(0, 4e9)
rights = st.builds(Right, text, st.integers(0, 2**62), text, seconds)
notes = st.builds(
    Note,
    over=st.integers(-1, 9),
    successor=st.none() | st.tuples(st.integers(0, 9), seconds),
    parked=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    continuing=st.none() | rights,
    settled=st.booleans(),
    at=seconds,
)
encoded = st.builds(Encoded, st.binary(max_size=9), text, text, text)
records = st.builds(
    Record,
    key=text,
    state=st.sampled_from(State),
    token=text,
    fence=st.integers(0, 2**62),
    message_id=text,
    generation=st.integers(0, 9),
    attempts=st.integers(0, 9),
    answer=st.sampled_from(Answer),
    unknown=st.booleans(),
    task=text,
    namespace=text,
    scope=text,
    fingerprint=text,
    holder=text,
    claimed_at=seconds,
    lease_expires_at=seconds,
    completed_at=st.none() | seconds,
    expires_at=seconds,
    outcome=st.none() | st.builds(Outcome, st.sampled_from(Kind), st.none() | encoded),
    notes=st.dictionaries(text, notes, max_size=3),
)


def as_stored(record: Record, rev: int = 7) -> list[Any]:
    params = rows.values_of(record, rev, rows.dump(rows.store_notes(record.notes, {})))
    return [params[f"new_{name}"] for name in COLUMNS]


@any_speed
@given(records)
def test_a_row_says_all_of_its_record(record: Record) -> None:
    row = rows.read_row(as_stored(record))
    assert row.record == record
    assert row.rev == 7


@any_speed
@given(st.dictionaries(text, notes, max_size=3), text, notes, st.floats(0, 1e6))
def test_times_the_database_fills_in(before: dict[str, Note], message_id: str, note: Note, offset: float) -> None:
    """What the statement's two ``replace`` make of the notes is what the decision would have written."""
    spoof = '"at":"@now" "until":"@then"'
    before = {**before, spoof: Note(over=3)}
    now = 1_700_000_000.0
    note = replace(note, at=0.0, successor=None, continuing=Right("t", 1, spoof, offset))
    record = rows.read_row(as_stored(Record("k", State.CLAIMED, "t", 1, "m", 0, 1, notes=before))).record
    stored = rows.store_notes(before, {})
    params = rows.later(rows.Row(record, 1, stored), replace(record, notes={**record.notes, message_id: note}))
    filled = params["new_notes"].replace('"at":"@now"', f'"at":{now!r}')
    filled = filled.replace('"until":"@then"', f'"until":{now + params["then"]!r}')
    expected = replace(note, at=now, continuing=Right("t", 1, spoof, now + offset))
    assert json.loads(filled) == rows.store_notes({**before, message_id: expected}, {})


def test_a_first_claim_carries_its_notes() -> None:
    fresh = decide.first_claim(op(message="M", generation=2), now=0.0, lease=10, ttl=10)
    assert json.loads(rows.fresh_values(fresh)["new_notes"]) == {"M": {"over": 1, "at": "@now"}}


def test_fields_of_a_newer_release_are_kept() -> None:
    stored = {
        "m": {"over": 1, "new": [1], "continuing": {"token": "t", "fence": 1, "holder": "h", "until": 2.0, "new": 2}}
    }
    values = as_stored(Record("k", State.COMPLETED, "t", 1, "m", 0, 1))
    values[COLUMNS.index("notes")] = json.dumps(stored)
    row = rows.read_row(values)
    note = replace(row.record.notes["m"], parked=(0, 1), at=5.0)
    kept = rows.store_notes({"m": note, "n": Note()}, row.notes)
    assert kept["m"] == {**stored["m"], "parked": [0, 1], "at": 5.0}
    ended = rows.store_notes({"m": replace(note, continuing=None, settled=True)}, row.notes)
    assert ended["m"] == {"over": 1, "new": [1], "parked": [0, 1], "settled": True, "at": 5.0}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("state", "MAYBE"),
        ("answer", None),
        ("fence", "garbage"),
        ("fence", 2**63 - 1),
        ("rev", 2**63 - 1),
        ("attempts", 2**31 - 1),
        ("generation", 1e19),
        ("generation", -1e300),
        ("record_version", -1e300),
        ("expires_at", None),
        ("token", b"\x00"),
        ("notes", "["),
        ("notes", "[1]"),
        ("notes", "7"),
        *(("notes", empty) for empty in ("0", "null", "false", '""', "[]")),
        ("notes", '{"m": 7}'),
        ("notes", '{"m": {"successor": {"generation": "x"}}}'),
        ("notes", "[" * 100_000),
        ("outcome", "NONSENSE"),
        ("outcome", "N" * 50_000),
        ("record_version", "garbage"),
        ("lease_expires_at", float("nan")),  # lapsed and not lapsed: PostgreSQL keeps it too
        ("expires_at", float("inf")),
        ("notes", '{"m": {"at": NaN}}'),
        ("notes", '{"m": {"successor": {"generation": 1, "until": Infinity}}}'),
    ],
)
def test_a_row_that_makes_no_sense(column: str, value: Any) -> None:
    values = as_stored(Record("k" * 64, State.CLAIMED, "t", 1, "m", 0, 1))
    values[COLUMNS.index(column)] = value
    with pytest.raises(RecordCorrupt, match=r"idem forget k{64}") as caught:
        rows.read_row(values)
    assert caught.value.facts["key"] == "k" * 64
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("body", [2**62, 10**10, 1.5])
def test_a_body_that_is_a_number_takes_no_memory(body: Any) -> None:
    """SQLite keeps whatever it is given."""
    outcome = Outcome(Kind.RESULT, Encoded(b"1", "application/json", "utf-8", "checksum"))
    values = as_stored(Record("k" * 64, State.COMPLETED, "t", 1, "m", 0, 1, outcome=outcome))
    assert rows.read_row(values).record.outcome == outcome
    values[COLUMNS.index("body")] = body
    with pytest.raises(RecordCorrupt, match="bytes belong"):
        rows.read_row(values)


@pytest.mark.parametrize(("column", "value"), [("fence", "garbage"), ("fence", None), ("rev", "x"), ("rev", 1e999)])
def test_a_row_of_a_newer_release_whose_numbers_make_no_sense(column: str, value: Any) -> None:
    values = as_stored(Record("k", State.CLAIMED, "t", 1, "m", 0, 1, record_version=RECORD_VERSION + 1))
    values[COLUMNS.index("state")] = "SLEEPING"
    values[COLUMNS.index(column)] = value
    with pytest.raises(RecordCorrupt, match="idem forget k`"):
        rows.read_row(values)


def test_a_row_only_a_newer_release_can_read() -> None:
    values = as_stored(Record("k", State.CLAIMED, "t", 1, "m", 0, 1, expires_at=9.0))
    values[COLUMNS.index("record_version")] = 2
    values[COLUMNS.index("state")] = "SLEEPING"
    record = rows.read_row(values).record
    assert (record.record_version, record.expires_at) == (2, 9.0)


# -- errors ------------------------------------------------------------------------------------------------------------


def sent(code: str, base: type[psycopg.Error] = psycopg.OperationalError) -> psycopg.Error:
    return type("Sent", (base,), {"sqlstate": code})("the server said so")


@pytest.mark.parametrize(
    ("error", "name", "kind"),
    [
        (sqlite3.OperationalError("no such table: celery_idem_record"), "sqlite", NoSchema),
        (sqlite3.OperationalError("database is locked"), "sqlite", Locked),
        (sent("42P01"), "postgresql", NoSchema),
        (sent("42703"), "postgresql", NoSchema),
        (sent("42501"), "postgresql", ConfigurationError),
        (sent("40001"), "postgresql", Again),
        (psycopg2.DataError("integer out of range"), "postgresql", ConfigurationError),
        (ValueError("A string literal cannot contain NUL (0x00) characters."), "postgresql", ConfigurationError),
        (OverflowError("Python int too large to convert to SQLite INTEGER"), "sqlite", ConfigurationError),
    ],
)
def test_errors_that_are_no_outage(error: Exception, name: str, kind: type[Exception]) -> None:
    assert isinstance(translated(error, name, writes=True), kind)


@pytest.mark.parametrize(
    ("error", "name", "landed"),
    [
        (psycopg2.OperationalError("server closed the connection unexpectedly"), "postgresql", True),
        (psycopg2.InterfaceError("connection already closed"), "postgresql", True),
        (sent("57P01"), "postgresql", True),  # shut down, maybe right after the commit
        (sent("57014"), "postgresql", False),  # the statement was cancelled
        (sent("53100"), "postgresql", False),
        (sent("25006"), "postgresql", False),
        (sqlite3.OperationalError("attempt to write a readonly database"), "sqlite", False),
        (sqlite3.OperationalError("unable to open database file"), "sqlite", False),
        (sqlite3.OperationalError("database or disk is full"), "sqlite", False),
        (sqlite3.OperationalError("disk I/O error"), "sqlite", True),
        (TypeError("a driver's own bug"), "postgresql", True),
    ],
)
def test_whether_the_write_may_have_landed(error: Exception, name: str, landed: bool) -> None:
    said = translated(error, name, writes=True)
    assert isinstance(said, StoreUnavailable)
    assert said.may_have_landed is landed
    read = translated(error, name, writes=False)
    assert isinstance(read, StoreUnavailable)
    assert not read.may_have_landed
    again = translated(error, name, writes=False, in_doubt=True)
    assert isinstance(again, StoreUnavailable)
    assert again.may_have_landed


def test_a_file_that_cannot_be_opened_sends_one_to_its_directory_and_not_to_a_server() -> None:
    said = str(translated(sqlite3.OperationalError("unable to open database file"), "sqlite", writes=True))
    assert "check that its directory is there" in said
    assert "idempotency_store" in said
    assert "it runs" not in said


def test_a_row_is_the_same_where_revision_and_token_are() -> None:
    record = Record("k", State.CLAIMED, "m", 1, "M", 0, 1)
    row = rows.Row(record, 5, {})
    assert row.same(rows.Row(replace(record, holder="read later"), 5, {}))
    assert not row.same(None)
    for rev, token in ((4, "m"), (6, "m"), (5, "a"), (5, "z")):
        assert not row.same(rows.Row(replace(record, token=token), rev, {}))
