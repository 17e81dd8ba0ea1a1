"""The shop's ledger, one SQLite file: what was really charged, whoever asked for it and however often.

Beside it, for the demo: what each delivery of a message came to.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

from example_project import folder

TABLES = (
    "CREATE TABLE IF NOT EXISTS charge (receipt INTEGER PRIMARY KEY, order_id TEXT, amount INTEGER, attempt INTEGER)",
    "CREATE TABLE IF NOT EXISTS delivery (task_id TEXT, state TEXT, told TEXT)",
    "CREATE TABLE IF NOT EXISTS accident (order_id TEXT, moment TEXT, kind TEXT)",
)


class Receipt(TypedDict):
    """What the customer gets."""

    receipt: int
    order_id: str
    amount: int


@dataclass(frozen=True)
class Charge:
    """One row: money that moved."""

    receipt: int
    amount: int
    attempt: int
    """1, or more where celery_idem told the run that an earlier one may have charged already."""


@dataclass(frozen=True)
class Delivery:
    """One copy of a message that a worker is done with."""

    state: str
    told: Any
    """The returned value, or the name of the exception."""


@contextmanager
def opened() -> Iterator[sqlite3.Connection]:
    """The ledger, in one transaction."""
    with closing(sqlite3.connect(folder() / "ledger.db", timeout=10)) as connection, connection:
        for table in TABLES:
            connection.execute(table)
        yield connection


def charge(order_id: str, amount: int, attempt: int = 1) -> Receipt:
    """Charge: one more row, whatever is there already."""
    with opened() as ledger:
        row = (order_id, amount, attempt)
        receipt = ledger.execute("INSERT INTO charge (order_id, amount, attempt) VALUES (?, ?, ?)", row).lastrowid
    return Receipt(receipt=receipt or 0, order_id=order_id, amount=amount)


def charges(order_id: str) -> list[Charge]:
    """Everything that was charged for an order, in that order."""
    with opened() as ledger:
        query = "SELECT receipt, amount, attempt FROM charge WHERE order_id = ? ORDER BY receipt"
        return [Charge(*row) for row in ledger.execute(query, [order_id])]


def note_delivery(task_id: str, state: str, told: Any) -> None:
    """A worker is done with a copy of this message."""
    with opened() as ledger:
        ledger.execute("INSERT INTO delivery VALUES (?, ?, ?)", (task_id, state, json.dumps(told)))


def deliveries(task_id: str) -> list[Delivery]:
    """What the copies of a message came to so far."""
    with opened() as ledger:
        rows = ledger.execute("SELECT state, told FROM delivery WHERE task_id = ?", [task_id])
        return [Delivery(state, json.loads(told)) for state, told in rows]
