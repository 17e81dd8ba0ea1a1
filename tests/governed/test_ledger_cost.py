"""What the ledger costs: statements and writing transactions of each verb, and the index each query reads by."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from pydantic import BaseModel

from celery_idem.governed import Catalog, SQLActionStore, action
from celery_idem.governed.steps import Complete, Dispatch, Observe, Step, Verify
from tests.campaigns.ledger import filling, index_of, plans
from tests.governed.ledgers import (
    LEASABLE,
    OWNER,
    Ledger,
    accept,
    approval,
    at,
    expectations,
    look,
    proposed,
    unresolved,
    verify,
)
from tests.support.services import PostgresServer

pytest_plugins = ("tests.governed.ledgers",)

Cost = tuple[int, int]
Count = Callable[[Callable[[], Any]], Cost]

COSTS: dict[str, Cost] = {
    "propose": (6, 1),
    "propose, the same again": (3, 0),
    "gate": (7, 1),
    "approve": (11, 1),
    "approve, the same again": (5, 1),
    "reject": (5, 1),
    "add_receipt": (5, 1),
    "lease_next": (5, 1),
    "lease_next, nothing ready": (3, 0),
    "begin_owner_authorized_dispatch": (11, 1),
    "begin_dispatched_observation": (11, 1),
    "defer_dispatched_observation": (9, 1),
    "lease_dispatched_observation": (9, 1),
    "accept": (7, 1),
    "verify": (8, 1),
    "complete": (5, 1),
    "fail_attempt": (7, 1),
    "defer_leased": (5, 1),
    "replace_chain": (5, 1),
    "recover_expired_leases, none lapsed": (3, 0),
    "stranded": (4, 0),
    "get_action": (3, 0),
    "list_receipts": (4, 0),
    "list_events": (4, 0),
    "find": (3, 0),
    "list_dead_letters": (3, 0),
    "admission": (3, 0),
    "set_admission": (7, 1),
    "now": (3, 0),
}
"""Statements, BEGIN and COMMIT among them, and transactions that write."""
TRANSACTIONS, COMMITS = 19, 9
"""Of one governed action from proposal to completion whose endpoint answers; and how many of them write."""


@pytest.fixture(scope="module")
def logging_server() -> Iterator[PostgresServer]:
    with PostgresServer(options=["-c", "log_statement=all", "-c", "autovacuum=off"]) as server:
        yield server


@pytest.fixture(params=["psycopg2", "psycopg"])
def logged(request: pytest.FixtureRequest, logging_server: PostgresServer) -> Iterator[SQLActionStore]:
    """A store on a database of its own, whose connection is there."""
    url = logging_server.create_database()
    store = SQLActionStore(url.replace("psycopg2", request.param))
    store.create_schema()
    store.admission()
    yield store
    store.close()
    logging_server.drop_database(url)


@pytest.fixture
def sent(logging_server: PostgresServer) -> Callable[[Callable[[], Any]], tuple[list[str], int]]:
    """The statements a call sends, by the server's log, and its writing transactions, by the ids they took."""
    snapshot = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"

    def of(call: Callable[[], Any]) -> tuple[list[str], int]:
        begin = len(logging_server.log)
        written = int(logging_server.execute(snapshot))
        call()
        written = int(logging_server.execute(snapshot)) - written
        lines = re.findall(r"LOG:  (?:statement|execute [^:]*): (.*)", logging_server.log[begin:])
        return [line for line in lines if snapshot not in line], written

    return of


@pytest.fixture
def count(sent: Callable[[Callable[[], Any]], tuple[list[str], int]]) -> Count:
    def of(call: Callable[[], Any]) -> Cost:
        statements, written = sent(call)
        return len(statements), written

    return of


@pytest.mark.postgres
def test_each_verb_is_one_transaction_of_so_many_statements(logged: SQLActionStore, count: Count) -> None:
    store = logged
    found: dict[str, Cost] = {}

    def note(verb: str, call: Callable[[], Any]) -> Any:
        answers: list[Any] = []
        found[verb] = count(lambda: answers.append(call()))
        return answers[0]

    one: dict[str, Any] = {"idempotency_key": "one", "action_id": "one"}
    note("propose", lambda: proposed(store, **one))
    note("propose, the same again", lambda: proposed(store, **one))
    evidence = approval(store, "one")
    note("approve", lambda: store.approve("one", evidence, chain_id="chain"))
    note("approve, the same again", lambda: store.approve("one", evidence, chain_id="chain"))
    note("lease_next", lambda: store.lease_next(OWNER, lease_seconds=60, states=LEASABLE))
    note("lease_next, nothing ready", lambda: store.lease_next(OWNER, lease_seconds=60, states=LEASABLE))
    given = expectations(store, "one")
    note("begin_owner_authorized_dispatch", lambda: store.begin_owner_authorized_dispatch("one", OWNER, **given))
    _, receipt = note("begin_dispatched_observation", lambda: look(store, "one"))
    note("defer_dispatched_observation", lambda: unresolved(store, "one", receipt["receipt_key"]))
    note("lease_dispatched_observation", lambda: store.lease_dispatched_observation(OWNER, lease_seconds=60))
    note("accept", lambda: accept(store, "one"))
    note("verify", lambda: verify(store, "one"))
    note("complete", lambda: store.complete("one", OWNER, {"ok": True}))
    other = proposed(store)
    evidence = approval(store, other)
    note("gate", lambda: store.gate(other, evidence))
    note("replace_chain", lambda: store.replace_chain(other, None, "chain"))
    note("add_receipt", lambda: store.add_receipt(other, "mail", "note", "sent", {}))
    note("reject", lambda: store.reject(other, "no", actor="bob"))
    failing, deferred = at(store, "gated"), at(store, "gated")
    note("fail_attempt", lambda: store.fail_attempt(failing, OWNER, "no luck", retryable=False))
    note("defer_leased", lambda: store.defer_leased(deferred, OWNER, "later", 5))
    note("recover_expired_leases, none lapsed", store.recover_expired_leases)
    note("stranded", lambda: store.stranded(60))
    note("get_action", lambda: store.get_action("one"))
    note("list_receipts", lambda: store.list_receipts("one"))
    note("list_events", lambda: store.list_events("one"))
    note("find", store.find)
    note("list_dead_letters", store.list_dead_letters)
    note("admission", store.admission)
    note("set_admission", lambda: store.set_admission(True, "as it was", actor="ann"))
    note("now", store.now)
    assert found == COSTS


class Payload(BaseModel):
    order: int


catalog = Catalog()


@action("payments.refund", payload=Payload, catalog=catalog)
class Refund:
    """An endpoint that answers."""

    def execute(self, request: Any) -> Any:
        return request.completed({"paid": True})

    def observe(self, request: Any) -> Any:
        return request.completed({"paid": True})


@pytest.mark.postgres
def test_one_governed_action_costs_so_many_transactions_and_commits(logged: SQLActionStore, sent: Any) -> None:
    def step(kind: type[Step]) -> Any:
        made = kind(logged, catalog, None, lease=60.0, owner=kind.__name__, action_id="one", chain_id="chain")
        return made.run()

    def life() -> None:
        proposed(logged, action_id="one", payload={"order": 7})
        logged.approve("one", approval(logged, "one"), chain_id="chain")
        for kind in (Dispatch, Observe, Verify, Complete):
            step(kind)

    statements, written = sent(life)
    assert logged.get_action("one")["state"] == "completed"
    assert sum(statement.startswith("BEGIN") for statement in statements) == TRANSACTIONS
    assert written == COMMITS
    assert sum(statement.startswith("COMMIT") for statement in statements) == TRANSACTIONS


# --- indexes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(ledger: Ledger) -> Iterator[tuple[sa.Engine, SQLActionStore]]:
    """Ten thousand actions, few of them at work, and an engine that can be listened to."""
    now = time.time()
    busy = {"owner": "'somebody'", "until": f"{now + 60} + i"}
    lapsed = {"owner": "'somebody'", "until": f"{now - 60} + i / 100"}
    for statement in (
        filling(9_600, "completed", attempts=1, due=f"{now - 1e6} + i"),
        filling(200, "gated", attempts=0, due=f"{now - 900} + i"),
        filling(100, "dispatched", attempts=1, due=f"{now - 900} + i"),
        filling(50, "accepted", attempts=1, due=f"{now - 900} + i", **busy),
        filling(50, "verified", attempts=1, due=f"{now - 900} + i", **lapsed),
        "ANALYZE",
    ):
        ledger.run(statement)
    engine = sa.create_engine(ledger.url)
    yield engine, SQLActionStore(engine)
    engine.dispose()


QUERIES: dict[str, tuple[Callable[[SQLActionStore], Any], str]] = {
    "lease_next": (lambda store: store.lease_next("w", lease_seconds=60, states=LEASABLE), "ready"),
    "lease_next, one state": (lambda store: store.lease_next("w", lease_seconds=60, states=["gated"]), "ready"),
    "lease_next, of a source": (
        lambda store: store.lease_next("w", lease_seconds=60, states=LEASABLE, source="shop"),
        "ready",
    ),
    "lease_dispatched_observation": (
        lambda store: store.lease_dispatched_observation("w", lease_seconds=60),
        "observable",
    ),
    "recover_expired_leases": (lambda store: store.recover_expired_leases(), "leased"),
    "stranded": (lambda store: store.stranded(120), "quiet"),
    "find": (lambda store: store.find(limit=20), "by_age"),
    "find, a page in the middle": (lambda store: store.find(limit=20, after="completed-5000"), "by_age"),
}


@pytest.mark.parametrize("verb", QUERIES)
def test_actions_are_found_by_the_index_made_for_it(filled: tuple[sa.Engine, SQLActionStore], verb: str) -> None:
    engine, store = filled
    call, wanted = QUERIES[verb]
    found = plans(engine, lambda: call(store))
    plan = found[-1] if "middle" in verb else found[0]
    assert index_of(plan) == f"celery_idem_action_{wanted}", plan
    assert "Seq Scan" not in plan
