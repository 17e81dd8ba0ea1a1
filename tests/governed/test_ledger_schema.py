"""What the database refuses by itself, whatever program speaks to it, and how its tables come to be."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2
import pytest

from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.governed import ACTION_STATES, ALLOWED_TRANSITIONS, SQLActionStore
from celery_idem.governed.sql import schema
from tests.contract.sql_help import forked
from tests.governed.ledgers import (
    REFUSED,
    TABLES,
    Ledger,
    at,
    gated,
    happened,
    lease,
    letters,
    on,
    on_each_database,
    on_postgres,
    proposed,
)

pytest_plugins = ("tests.governed.ledgers",)

APPEND_ONLY = [table for table in TABLES if table != "celery_idem_action"]
SAYS = {table: f"{table} is append-only" for table in APPEND_ONLY} | {"celery_idem_action": "keeps every action"}


@pytest.fixture
def full(ledger: Ledger, store: SQLActionStore) -> Ledger:
    """A ledger with something in every table."""
    assert letters(store, at(store, "failed"))
    at(store, "completed")
    store.set_admission(True, "a rule of the house", actor="ann")
    return ledger


def refused(ledger: Ledger, statement: str, *values: Any) -> str:
    """What the database says as it refuses the statement, with nothing changed."""
    before = {table: ledger.run(f"SELECT * FROM {table} ORDER BY 1") for table in TABLES}
    with pytest.raises(REFUSED) as caught:
        ledger.run(statement, *values)
    assert {table: ledger.run(f"SELECT * FROM {table} ORDER BY 1") for table in TABLES} == before
    return str(caught.value)


# --- what the tables refuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_nothing_is_deleted(full: Ledger, table: str) -> None:
    assert full.count(table) > 0
    assert SAYS[table] in refused(full, f"DELETE FROM {table}")
    (oldest,) = full.run(f"SELECT min({first_column(full, table)}) FROM {table}")[0]
    assert SAYS[table] in refused(full, f"DELETE FROM {table} WHERE {first_column(full, table)} = ?", oldest)


@on_postgres
@pytest.mark.parametrize("table", TABLES)
def test_no_table_is_emptied_by_truncate(full: Ledger, table: str) -> None:
    assert SAYS[table] in refused(full, f"TRUNCATE {table}")
    for more in ("CASCADE", "RESTART IDENTITY CASCADE"):
        assert "append-only" in refused(full, f"TRUNCATE celery_idem_action_event, {table} {more}")


@pytest.mark.parametrize("table", APPEND_ONLY)
def test_no_column_of_an_entry_is_changed(full: Ledger, table: str) -> None:
    for column in columns(full, table):
        assert SAYS[table] in refused(full, f"UPDATE {table} SET {column} = {column}")
        refused(full, f"UPDATE {table} SET {column} = NULL")


@pytest.mark.parametrize("table", APPEND_ONLY)
def test_an_insert_does_not_overwrite_an_entry(full: Ledger, table: str) -> None:
    names = columns(full, table)
    same = f"SELECT {', '.join(names)} FROM {table}"
    refused(full, f"INSERT INTO {table} {same} WHERE 1 = 1 ON CONFLICT ({names[0]}) DO UPDATE SET {names[1]} = NULL")
    if full.sqlite:
        assert "keeps every row" in refused(full, f"INSERT OR REPLACE INTO {table} {same}")


@on("sqlite")
def test_a_replacement_takes_no_action_away(full: Ledger, store: SQLActionStore) -> None:
    action_id = at(store, "completed")
    names = columns(full, "celery_idem_action")
    other = {"state": "'gated'", "attempt_count": "0"}
    changed = ", ".join(other.get(name, name) for name in names)
    refused(
        full,
        f"REPLACE INTO celery_idem_action ({', '.join(names)}) SELECT {changed} FROM celery_idem_action"
        " WHERE action_id = ?",
        action_id,
    )
    new = ", ".join({**other, "action_id": "'new'", "idempotency_key": "'new'"}.get(name, name) for name in names)
    refused(
        full,
        f"REPLACE INTO celery_idem_action (rowid, {', '.join(names)}) SELECT rowid, {new} FROM celery_idem_action"
        " WHERE action_id = ?",
        action_id,
    )
    decoy = proposed(store)
    refused(
        full,
        "UPDATE OR REPLACE celery_idem_action SET rowid = (SELECT rowid FROM celery_idem_action WHERE action_id = ?)"
        " WHERE action_id = ?",
        action_id,
        decoy,
    )


@pytest.mark.parametrize("state", ["proposed", "gated", "completed", "failed"])
def test_identity_never_changes(ledger: Ledger, store: SQLActionStore, state: str) -> None:
    action_id = at(store, state)
    texts = {"action_id", "idempotency_key", "source", "source_ref", "action_type", "payload", "payload_sha256"}
    assert set(schema.IDENTITY) == texts | {"max_attempts", "created_at"}
    for column in schema.IDENTITY:
        for value in ("other", None) if column in texts else (2, None):
            said = refused(ledger, f"UPDATE celery_idem_action SET {column} = ? WHERE action_id = ?", value, action_id)
            assert "keeps identity" in said
    without = proposed(store, source_ref=None)
    assert "keeps identity" in refused(
        ledger, "UPDATE celery_idem_action SET source_ref = 'order/7' WHERE action_id = ?", without
    )


def test_no_action_comes_in_with_more_than_one_attempt_or_a_state_nobody_knows(
    ledger: Ledger, store: SQLActionStore
) -> None:
    at(store, "gated")
    names = columns(ledger, "celery_idem_action")

    def another(**changed: str) -> str:
        values = {"action_id": "'new'", "idempotency_key": "'new'", **changed}
        selected = ", ".join(values.get(name, name) for name in names)
        return f"INSERT INTO celery_idem_action ({', '.join(names)}) SELECT {selected} FROM celery_idem_action"

    assert "celery_idem_action_one_attempt" in refused(ledger, another(max_attempts="2"))
    assert "celery_idem_action_one_attempt" in refused(ledger, another(max_attempts="0"))
    assert "celery_idem_action_" in refused(ledger, another(state="'cancelled'"))  # whichever is asked first
    assert "celery_idem_action_attempts" in refused(ledger, another(attempt_count="1"))
    assert "celery_idem_action_attempts" in refused(ledger, another(state="'dispatched'"))
    assert "celery_idem_action_attempts" in refused(ledger, another(state="'failed'", attempt_count="2"))
    refused(ledger, another(idempotency_key="idempotency_key"))
    refused(ledger, another(action_id="action_id"))
    ledger.run(another())


def test_no_time_is_written_that_no_clock_shows(ledger: Ledger, store: SQLActionStore) -> None:
    action_id = gated(store)
    assert lease(store, action_id) is not None
    impossible = [
        "1e12",
        "-1",
        *(["'soon'", "x'00'", "9e999"] if ledger.sqlite else ["'Infinity'", "'-Infinity'", "'NaN'"]),
    ]
    for column in ("updated_at", "next_attempt_at", "lease_expires_at"):
        for value in impossible:
            refused(ledger, f"UPDATE celery_idem_action SET {column} = {value} WHERE action_id = ?", action_id)
    refused(ledger, "UPDATE celery_idem_action SET updated_at = 9.1e10 WHERE action_id = ?", action_id)
    refused(ledger, "UPDATE celery_idem_action SET lease_expires_at = NULL WHERE action_id = ?", action_id)
    refused(ledger, "UPDATE celery_idem_action SET lease_owner = NULL WHERE action_id = ?", action_id)
    for value in impossible:
        refused(
            ledger,
            "INSERT INTO celery_idem_action_event (action_id, event_type, to_state, actor, details, created_at)"
            f" VALUES (?, 'gated', 'gated', 'm', '{{}}', {value})",
            action_id,
        )


@on_each_database
def test_only_the_transitions_of_a_life_are_possible(ledger: Ledger, store: SQLActionStore) -> None:
    seen = set()
    for start in sorted(ACTION_STATES):
        for end in sorted(ACTION_STATES - {start}):
            action_id = at(store, start)
            ((attempts,),) = ledger.run("SELECT attempt_count FROM celery_idem_action WHERE action_id = ?", action_id)
            move = "UPDATE celery_idem_action SET state = ?, attempt_count = ? WHERE action_id = ?"
            if end in ALLOWED_TRANSITIONS[start]:
                fits = 1 if (start, end) == ("gated", "dispatched") else attempts
                ledger.run(move, end, fits, action_id)
                seen.add((start, end))
            else:
                for count in (0, 1):
                    refused(ledger, move, end, count, action_id)
    assert len(seen) == sum(map(len, ALLOWED_TRANSITIONS.values())) == 10


def test_an_attempt_is_never_taken_back_and_never_made_twice(ledger: Ledger, store: SQLActionStore) -> None:
    dispatched = at(store, "dispatched")
    assert dispatched
    for attempts in (0, 2, None):
        refused(ledger, "UPDATE celery_idem_action SET attempt_count = ? WHERE action_id = ?", attempts, dispatched)
    back = "UPDATE celery_idem_action SET state = 'gated', attempt_count = 0 WHERE action_id = ?"
    assert "keeps identity, attempts and ends as they are" in refused(ledger, back, dispatched)
    store.fail_attempt(dispatched, "worker-1", "no luck", retryable=True)
    assert "keeps identity" in refused(
        ledger, "UPDATE celery_idem_action SET attempt_count = 0 WHERE action_id = ?", dispatched
    )
    refused(ledger, "UPDATE celery_idem_action SET attempt_count = 1 WHERE action_id = ?", gated(store))


# --- how the tables come to be ------------------------------------------------------------------------------------


def test_eight_processes_make_the_schema_at_once(empty: Ledger) -> None:
    def work(number: int) -> str:
        with SQLActionStore(empty.url, timeout=20) as store:
            store.create_schema()
            return proposed(store, idempotency_key=f"key {number}")

    made = forked(8, work)
    assert empty.count("celery_idem_action") == len(set(made)) == 8
    assert_complete(empty)


def test_making_the_schema_again_changes_nothing_but_brings_back_what_is_missing(empty: Ledger) -> None:
    ledger, store = empty, empty.open()
    store.create_schema()
    action_id = at(store, "accepted")
    history = happened(store, action_id)
    store.create_schema()
    assert happened(store, action_id) == history
    gone = "celery_idem_action_receipt_no_update" if ledger.sqlite else "celery_idem_action_receipt_append_only"
    ledger.run(f"DROP TRIGGER {gone}" if ledger.sqlite else f"DROP TRIGGER {gone} ON celery_idem_action_receipt")
    ledger.run("DROP TABLE celery_idem_action_admission")
    store.create_schema()
    assert_complete(ledger)
    assert "append-only" in refused(ledger, "UPDATE celery_idem_action_receipt SET status = 'other'")


@on_postgres
def test_making_a_schema_that_is_there_waits_for_nobody(ledger: Ledger, store: SQLActionStore) -> None:
    action_id = gated(store)
    with ledger.connection() as busy:
        ledger.send(busy, "BEGIN")
        ledger.send(busy, "UPDATE celery_idem_action SET last_error = 'x' WHERE action_id = ?", action_id)
        ledger.open(timeout=2).create_schema()
        ledger.send(busy, "ROLLBACK")


def test_missing_tables_are_told_with_the_command_that_makes_them_and_a_file_makes_its_own(empty: Ledger) -> None:
    store = empty.open()
    if empty.sqlite:
        action_id = gated(store)
        assert lease(store, action_id) is not None
        assert_complete(empty)
        return
    calls = [
        store.admission,
        store.find,
        store.recover_expired_leases,
        lambda: proposed(store),
        lambda: store.get_action("a"),
        lambda: store.gate("a", {}),
        lambda: lease_anything(store),
        lambda: store.set_admission(False, "closed", actor="ann"),
        lambda: store.stranded(60),
        store.list_dead_letters,
    ]
    for call in calls:
        with pytest.raises(
            ConfigurationError, match=r"tables of governed actions.* `celery -A <app> governed init`"
        ) as caught:
            call()
        assert isinstance(caught.value, StoreUnavailable), "a step that runs tries again"
    store.create_schema()
    assert lease_anything(store) is None


def test_a_table_of_another_release_is_told_too(empty: Ledger) -> None:
    store = empty.open()
    store.create_schema()
    empty.run("ALTER TABLE celery_idem_action RENAME COLUMN chain_id TO chain")
    with pytest.raises(ConfigurationError, match="missing or too old"):
        store.find()


@on_postgres
def test_the_refusal_is_an_integrity_error_with_its_own_state(full: Ledger) -> None:
    with full.connection() as connection, closing(connection.cursor()) as cursor:
        with pytest.raises(psycopg2.errors.IntegrityConstraintViolation) as caught:
            cursor.execute("DELETE FROM celery_idem_action_event")
        assert caught.value.pgcode == "23000"


# --- help ----------------------------------------------------------------------------------------------------------


def lease_anything(store: SQLActionStore) -> Any:
    return store.lease_next("w", lease_seconds=60, states=["gated"])


def columns(ledger: Ledger, table: str) -> list[str]:
    """The table's columns, in order."""
    if ledger.sqlite:
        return [name for (name,) in ledger.run(f"SELECT name FROM pragma_table_info('{table}')")]
    found = ledger.run(
        "SELECT column_name FROM information_schema.columns WHERE table_name = ? ORDER BY ordinal_position", table
    )
    return [name for (name,) in found]


def first_column(ledger: Ledger, table: str) -> str:
    return columns(ledger, table)[0]


def assert_complete(ledger: Ledger) -> None:
    """Every table, named index and trigger is there, once."""
    if ledger.sqlite:
        there = [name for (name,) in ledger.run("SELECT name FROM sqlite_master WHERE name LIKE 'celery_idem_%'")]
    else:
        there = [name for (name,) in ledger.run("SELECT relname FROM pg_class WHERE relname LIKE 'celery_idem_%'")]
        there += [name for (name,) in ledger.run("SELECT tgname FROM pg_trigger WHERE NOT tgisinternal")]
    wanted = {*TABLES, *(str(index.name) for table in schema.metadata.tables.values() for index in table.indexes)}
    wanted |= {f"{table}_no_update" if ledger.sqlite else f"{table}_append_only" for table in APPEND_ONLY}
    wanted |= {"celery_idem_action_one_way", "celery_idem_action_no_delete"}
    assert wanted <= set(there)
    assert len(there) == len(set(there))
