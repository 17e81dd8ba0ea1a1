"""The harness of ``SQLActionStore``, and a pattern for one of your own; every row it writes belongs to the suite.

It switches the tables' triggers off and on again to tamper with them, so it is for a database of its own and never for
one with actions that matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery_idem.conformance.harness import Clock, Harness, Tamper
from celery_idem.governed.canonical import canonical_json
from celery_idem.governed.records import Action, Receipt
from celery_idem.governed.sql import schema
from celery_idem.governed.sql.ledger import Ledger
from celery_idem.governed.sql.store import SQLActionStore
from celery_idem.governed.sql.transaction import Transaction

AS_JSON = frozenset({"payload", "result", "evidence"})
TIMEOUT = 10.0


class SQLHarness(Harness):
    """A ``SQLActionStore``, or what is made like one, on a database that is empty or of this suite alone."""

    def __init__(self, url: Any, make: Callable[..., SQLActionStore] = SQLActionStore) -> None:
        self._url, self._make = url, make
        self.clock = Clock()
        self._opened: list[SQLActionStore] = []
        self.store: SQLActionStore = self.reopen()
        self.store.create_schema()
        self._tamper = SQLTamper(url)
        self.tamper: Tamper | None = self._tamper

    def propose(
        self, *, idempotency_key: str, source: str, source_ref: str | None, action_type: str, payload: Any
    ) -> Action:
        """See ``Harness``."""
        return self.store.propose(idempotency_key, source, action_type, payload, source_ref=source_ref)

    def gate(self, action_id: str, evidence: Mapping[str, Any], *, receipt_key: str = "owner-gate") -> Receipt:
        """See ``Harness``."""
        return self.store.gate(action_id, evidence, receipt_key=receipt_key)[1]

    def reopen(self) -> SQLActionStore:
        """See ``Harness``."""
        store = self._make(self._url, clock=self.clock, timeout=TIMEOUT)
        self._opened.append(store)
        return store

    def close(self) -> None:
        """See ``Harness``."""
        for store in self._opened:
            store.close()
        self._tamper.close()


class SQLTamper:
    """Writes with the tables' triggers switched off, as their owner can."""

    def __init__(self, url: Any) -> None:
        self._ledger = Ledger(url, TIMEOUT, None, {})

    def change_action(self, action_id: str, **fields: Any) -> None:
        """See ``Tamper``."""
        table = schema.action
        self._past(table.name, table.update().where(table.c.action_id == action_id).values(_stored(fields)))

    def change_receipt(self, action_id: str, receipt_key: str, **fields: Any) -> None:
        """See ``Tamper``."""
        c = schema.receipt.c
        change = schema.receipt.update().where(c.action_id == action_id, c.receipt_key == receipt_key)
        self._past(schema.receipt.name, change.values(_stored(fields)))

    def add_receipt(self, receipt: Receipt) -> None:
        """See ``Tamper``."""
        fields = {name: value for name, value in receipt.items() if name != "receipt_id"}
        self._past(schema.receipt.name, schema.receipt.insert().values(_stored(fields)))

    def remove_receipt(self, action_id: str, receipt_key: str) -> None:
        """See ``Tamper``."""
        c = schema.receipt.c
        where = (c.action_id == action_id, c.receipt_key == receipt_key)
        self._past(schema.receipt.name, schema.receipt.delete().where(*where))

    def close(self) -> None:
        """Close its connections."""
        self._ledger.close()

    def _past(self, table: str, statement: Any) -> None:
        def work(tx: Transaction) -> None:
            restore = without_triggers(tx, table)
            if tx.run(statement).rowcount == 0:
                raise LookupError(f"nothing in {table} to tamper with")
            for command in restore:
                tx.connection.exec_driver_sql(command)

        self._ledger.run(work)


def without_triggers(tx: Transaction, table: str) -> list[str]:
    """Switch the table's triggers off, and return what switches them on again."""
    if not tx.sqlite:
        tx.connection.exec_driver_sql(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        return [f"ALTER TABLE {table} ENABLE TRIGGER USER"]
    found = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ?"
    triggers = tx.connection.exec_driver_sql(found, (table,)).all()
    for name, _ in triggers:
        tx.connection.exec_driver_sql(f"DROP TRIGGER {name}")
    return [str(made) for _, made in triggers]


def _stored(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: canonical_json(value) if name in AS_JSON else value for name, value in fields.items()}
