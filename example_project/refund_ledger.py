"""The refund service's ledger, one SQLite file: every request that came, and the money that moved.

Beside it, for the demo: what is to go wrong with an action's requests.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Fault = Literal["hold", "silent", "garbage", "refuse"]
"""hold: refunds, and keeps the answer to the PUT back until the caller has gone. silent: refunds, and never answers
anybody. garbage: refunds, and answers the PUT for another execution. refuse: says no, and refunds nothing."""

REQUEST = "number INTEGER PRIMARY KEY, method TEXT, action_id TEXT, key TEXT, worker TEXT"
REFUND = "number INTEGER PRIMARY KEY, action_id TEXT, key TEXT UNIQUE, order_id TEXT, amount INTEGER"
TABLES = (
    f"CREATE TABLE IF NOT EXISTS request ({REQUEST})",
    f"CREATE TABLE IF NOT EXISTS refund ({REFUND})",
    "CREATE TABLE IF NOT EXISTS fault (action_id TEXT PRIMARY KEY, fault TEXT)",
)


@dataclass(frozen=True)
class Request:
    """One request, as it came in."""

    method: str
    key: str
    worker: str
    """Process id of the caller, where it said so."""


@dataclass(frozen=True)
class Refund:
    """One row: money that went back."""

    number: int
    key: str
    order_id: str
    amount: int


class RefundLedger:
    """The ledger in a file; any number of processes may have it open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._opened() as ledger:
            for table in TABLES:
                ledger.execute(table)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path, timeout=10)) as connection, connection:
            yield connection

    def note(self, method: str, action_id: str, key: str, worker: str) -> None:
        """Write a request down, whatever becomes of it."""
        with self._opened() as ledger:
            row = (method, action_id, key, worker)
            ledger.execute("INSERT INTO request (method, action_id, key, worker) VALUES (?, ?, ?, ?)", row)

    def requests(self, action_id: str, method: str) -> list[Request]:
        """Every request that came for an action, in that order."""
        with self._opened() as ledger:
            query = "SELECT method, key, worker FROM request WHERE action_id = ? AND method = ? ORDER BY number"
            return [Request(*row) for row in ledger.execute(query, (action_id, method))]

    def refund(self, action_id: str, key: str, order_id: str, amount: int) -> tuple[Refund, bool]:
        """The refund made under this key, and whether it was made now."""
        with self._opened() as ledger:
            insert = "INSERT INTO refund (action_id, key, order_id, amount) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
            new = ledger.execute(insert, (action_id, key, order_id, amount)).rowcount == 1
            row = ledger.execute("SELECT number, key, order_id, amount FROM refund WHERE key = ?", [key]).fetchone()
        return Refund(*row), new

    def find(self, action_id: str, key: str) -> Refund | None:
        """The refund of an action made under this key."""
        return next((refund for refund in self.refunds(action_id) if refund.key == key), None)

    def refunds(self, action_id: str) -> list[Refund]:
        """Everything that was refunded for an action."""
        with self._opened() as ledger:
            query = "SELECT number, key, order_id, amount FROM refund WHERE action_id = ? ORDER BY number"
            return [Refund(*row) for row in ledger.execute(query, [action_id])]

    def plan(self, action_id: str, fault: Fault) -> None:
        """Have this go wrong with the action's requests."""
        with self._opened() as ledger:
            ledger.execute("INSERT OR REPLACE INTO fault VALUES (?, ?)", (action_id, fault))

    def fault(self, action_id: str) -> Fault | None:
        """What is to go wrong."""
        with self._opened() as ledger:
            row = ledger.execute("SELECT fault FROM fault WHERE action_id = ?", [action_id]).fetchone()
        return None if row is None else row[0]
