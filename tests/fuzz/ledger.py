"""The ledger of governed actions: any column of any of its rows replaced by garbage, then workers who know nothing.

As in ``tests/governed/test_ledger_tampering.py``, but nobody chose the attacks: nothing is raised that is no refusal,
an action has one mutation at most, and an honest one beside it comes through.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from celery_idem.errors import ActionStoreError
from celery_idem.governed import SQLActionStore
from celery_idem.governed.canonical import digest_of
from celery_idem.governed.sql import schema
from celery_idem.testing import ManualClock
from tests.fuzz.target import Draw, Target, worded
from tests.fuzz.values import json_like
from tests.governed.attacks import Workers, honest_comes_through
from tests.governed.ledgers import Ledger, at, gated

STATES = ("proposed", "gated", "dispatched", "accepted", "verified", "completed", "failed")
TABLES: dict[str, list[str]] = {
    table.name: [column.name for column in table.columns if column.name not in {"action_id", "idempotency_key"}]
    for table in (schema.action, schema.receipt, schema.event)
}
garbage = st.one_of(
    st.none(),
    st.integers(-2, 3) | st.sampled_from([2**31, 2**63 - 1, -(2**63)]),
    st.floats(),
    st.sampled_from(["", " ", "x", "{}", "[]", "null", "NaN", "1e400", "[" * 50_000, '{"revision":1}', "\0", "é" * 9]),
    st.sampled_from([*STATES, "gate", "acceptance", "verification", "passed", "approved", "owner", "worker-1"]),
    st.text(max_size=4).filter(lambda text: text.isprintable()),
    st.binary(max_size=4),
    json_like.map(json.dumps),
)


@contextmanager
def on_sqlite(_: Callable[[], str]) -> Iterator[Ledger]:
    """A ledger in a file."""
    with tempfile.TemporaryDirectory() as folder:
        place = Ledger("sqlite", f"sqlite:///{Path(folder) / 'ledger.db'}")
        place.open().create_schema()
        place.run("PRAGMA synchronous = OFF")
        yield place
        place.close()


def _garble(draw: Draw, ledger: Ledger, action_id: str) -> str:
    """One column of one of the action's rows becomes garbage, with the digest beside it put right half of the time."""
    table = draw(st.sampled_from(sorted(TABLES)))
    column, value = draw(st.sampled_from(TABLES[table])), draw(garbage)
    assigned, values = f"{column} = ?", [value]
    if column in {"payload", "evidence"} and isinstance(value, str) and draw(st.booleans()):
        assigned, values = f"{assigned}, {column}_sha256 = ?", [value, digest_of(value)]
    try:
        ledger.forge(f"UPDATE {table} SET {assigned} WHERE action_id = ?", *values, action_id)
    except (sqlite3.Error, OverflowError, UnicodeError):
        return "refused by the database"
    return f"{table.removeprefix('celery_idem_')}"


def _empty(ledger: Ledger) -> None:
    with ledger.without_triggers():
        for table in (*TABLES, schema.dead_letter.name):
            ledger.run(f"DELETE FROM {table}")


def play(draw: Draw, ledger: Ledger) -> str:
    """An action in any state is garbled, and workers do all they find to do."""
    _empty(ledger)
    clock = ManualClock()
    store = SQLActionStore(ledger.url, clock=clock)
    try:
        state = draw(st.sampled_from(STATES))
        victim = at(store, state)
        clock.advance(1)
        honest = gated(store)
        before = int(state in {"dispatched", "accepted", "verified", "completed"})
        what = _garble(draw, ledger, victim)
        _look(store, victim)
        workers = Workers(store, clock)
        workers.run(rounds=7)
        _look(store, victim)
        assert before + workers.mutated[victim] <= 1, "a second mutation"
        honest_comes_through(ledger, workers, honest)
        return what
    finally:
        store.close()


def _look(store: SQLActionStore, action_id: str) -> None:
    """Whatever an operator can ask for."""
    asked: list[Callable[[], Any]] = [
        lambda: store.get_action(action_id),
        lambda: store.list_receipts(action_id),
        lambda: store.list_events(action_id),
        lambda: store.list_dead_letters(limit=10),
        lambda: list(store.find(limit=10)),
    ]
    for ask in asked:
        try:
            ask()
        except ActionStoreError as refusal:
            worded(refusal)


TARGETS = [
    Target(
        "ledger: sqlite",
        "nothing is raised that is no refusal; one mutation at most; the honest action beside it completes",
        play,
        on_sqlite,
        chunk=5,
    ),
]
