"""The ledgers the governed tests run on, a way past each of them into its tables, and the steps of an action's life.

A test module names this one in ``pytest_plugins`` and has the fixtures ``ledger``, ``clock``, ``store`` (by ``clock``)
and ``real_store`` (by the database's own), or ``empty`` and makes the schema itself: on SQLite, and on PostgreSQL
through each of its two drivers.

PYTEST_DONT_REWRITE: the modules import it before pytest does.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from celery_idem.governed import GateAuthorization, SQLActionStore, message_approval, owner_gate_validator
from celery_idem.governed.canonical import canonical_json, digest_of
from celery_idem.testing import ManualClock
from tests.support.services import PostgresServer

LEDGERS = [
    pytest.param("sqlite", id="sqlite"),
    pytest.param("psycopg2", id="psycopg2", marks=pytest.mark.postgres),
    pytest.param("psycopg", id="psycopg", marks=pytest.mark.postgres),
]
TABLES = (
    "celery_idem_action",
    "celery_idem_action_receipt",
    "celery_idem_action_event",
    "celery_idem_action_dead_letter",
    "celery_idem_action_admission",
)
LEASABLE = ("gated", "accepted", "verified")
OWNER = "worker-1"
VALID = owner_gate_validator(grantable=False)
REFUSED = (sqlite3.Error, psycopg2.Error)
"""What the database itself raises at a statement it refuses."""


def on(*names: str) -> pytest.MarkDecorator:
    """Hold a test against these ledgers only: the others cannot get into the situation it is about."""
    chosen = [param for param in LEDGERS if param.id in names]
    assert len(chosen) == len(names), names
    return pytest.mark.parametrize("ledger", chosen, indirect=True)


on_postgres = on("psycopg2", "psycopg")
on_each_database = on("sqlite", "psycopg2")
"""For what the driver cannot change."""


@dataclass
class Ledger:
    """One place for a ledger: opens stores on it, and closes them when the test is over."""

    name: str
    url: str
    opened: list[SQLActionStore] = field(default_factory=list)
    _line: Any = None

    @property
    def sqlite(self) -> bool:
        return self.name == "sqlite"

    def open(self, clock: Callable[[], float] | None = None, *, url: str | None = None, **options: Any) -> Any:
        """A store on it, whose timeout is longer than a machine stands still, unless the test is about it."""
        store = SQLActionStore(url or self.url, clock=clock, **{"timeout": 30.0, **options})
        self.opened.append(store)
        return store

    def close(self) -> None:
        for store in self.opened:
            store.close()
        if self._line is not None:
            self._line.close()

    # -- past the store -----------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        if self.sqlite:
            return sqlite3.connect(self.url.removeprefix("sqlite:///"), isolation_level=None, timeout=5)
        connection = psycopg2.connect(re.sub(r"^postgresql\+\w+", "postgresql", self.url), connect_timeout=5)
        connection.autocommit = True
        return connection

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Another connection of the test's own, in autocommit mode."""
        connection = self._connect()
        try:
            yield connection
        finally:
            connection.close()

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement past the store, as whoever has the database's password can, and return its rows."""
        if self._line is None:
            self._line = self._connect()
        return self.send(self._line, statement, *values)

    def send(self, connection: Any, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The same on a connection that is there."""
        cursor = connection.cursor()
        if self.sqlite:
            cursor.execute(statement, values)
        else:
            cursor.execute(statement.replace("%", "%%").replace("?", "%s"), values)
        return list(cursor.fetchall()) if cursor.description else []

    @contextmanager
    def without_triggers(self) -> Iterator[None]:
        """As whoever may take the triggers away: none refuses what ``run`` does here, and afterwards they are back."""
        if not self.sqlite:
            self.run("SET session_replication_role = replica")
            yield
            self.run("RESET session_replication_role")
            return
        made = self.run("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        self._script(f"DROP TRIGGER {name}" for name, _ in made)
        yield
        self._script(f"{statement}" for _, statement in made)

    def _script(self, statements: Iterable[str]) -> None:
        self.run("BEGIN IMMEDIATE")
        for statement in statements:
            self.run(statement)
        self.run("COMMIT")

    def forge(self, statement: str, *values: Any) -> None:
        """Run one statement that the triggers would refuse."""
        with self.without_triggers():
            self.run(statement, *values)

    def count(self, table: str, where: str = "1 = 1", *values: Any) -> int:
        """How many rows of the table there are."""
        ((found,),) = self.run(f"SELECT count(*) FROM {table} WHERE {where}", *values)
        return int(found)

    def insert_receipt(self, action_id: str, receipt_key: str, kind: str, evidence: Any, **changed: Any) -> None:
        """Write a receipt past the store; evidence that is no text is written as canonical JSON, with its digest."""
        written = evidence if isinstance(evidence, str) else canonical_json(evidence)
        values: dict[str, Any] = {
            "action_id": action_id,
            "receipt_key": receipt_key,
            "kind": kind,
            "status": "passed",
            "external_id": None,
            "evidence": written,
            "evidence_sha256": digest_of(written),
            "observed_at": 1.0,
            "created_at": 1.0,
            **changed,
        }
        self._insert("celery_idem_action_receipt", values)

    def insert_event(self, action_id: str, event_type: str, **changed: Any) -> None:
        """Write an event past the store."""
        values = {
            "action_id": action_id,
            "event_type": event_type,
            "from_state": "dispatched",
            "to_state": "dispatched",
            "actor": "mallory",
            "details": "{}",
            "created_at": 1.0,
            **changed,
        }
        self._insert("celery_idem_action_event", values)

    def _insert(self, table: str, values: Mapping[str, Any]) -> None:
        places = ", ".join("?" for _ in values)
        self.run(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({places})", *values.values())


# --- fixtures ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ledger_database(postgres_server: PostgresServer) -> Iterator[str]:
    """A PostgreSQL database with the schema, for every test: making one for each would take longer than the tests."""
    url = postgres_server.create_database()
    with SQLActionStore(url, timeout=30) as store:
        store.create_schema()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture(params=LEDGERS)
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger; on PostgreSQL what a test changes about the schema it must change back."""
    if request.param == "sqlite":
        place = Ledger("sqlite", f"sqlite:///{tmp_path / 'ledger.db'}")
        place.open().create_schema()
    else:
        url: str = request.getfixturevalue("ledger_database")
        place = Ledger(request.param, url.replace("+psycopg2", f"+{request.param}"))
        place.forge(f"TRUNCATE {', '.join(TABLES)} RESTART IDENTITY")
    yield place
    place.close()


@pytest.fixture(params=LEDGERS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """A database of the test's own, without a schema."""
    if request.param == "sqlite":
        place = Ledger("sqlite", f"sqlite:///{tmp_path / 'new.db'}")
    else:
        url: str = request.getfixturevalue("postgres_url")
        place = Ledger(request.param, url.replace("+psycopg2", f"+{request.param}"))
    yield place
    place.close()


@pytest.fixture
def clock() -> ManualClock:
    """The time as ``store`` sees it."""
    return ManualClock()


@pytest.fixture
def store(ledger: Ledger, clock: ManualClock) -> SQLActionStore:
    """A store on the ledger that goes by ``clock``."""
    opened: SQLActionStore = ledger.open(clock)
    return opened


@pytest.fixture
def real_store(ledger: Ledger) -> SQLActionStore:
    """A store on the ledger that goes by the database's own clock."""
    opened: SQLActionStore = ledger.open()
    return opened


# --- a life --------------------------------------------------------------------------------------------------------


def proposed(store: SQLActionStore, **changed: Any) -> str:
    """The id of a new action."""
    arguments: dict[str, Any] = {
        "idempotency_key": uuid.uuid4().hex,
        "source": "shop",
        "action_type": "payments.refund",
        "payload": {"order": 7, "amount": "12.50", "lines": [1, 2.5, True, None], "to": "Zoë"},
        "source_ref": "order/7",
        **changed,
    }
    return str(store.propose(**arguments)["action_id"])


def approval(store: SQLActionStore, action_id: str, *, lifetime: float = 3600.0, **changed: Any) -> dict[str, Any]:
    """Evidence that an owner approved the action just now."""
    evidence = message_approval(
        store.get_action(action_id),
        principal="ann@example.org",
        channel="web",
        thread_id="orders",
        event_id=uuid.uuid4().hex,
        decided_at=store.now(),
        lifetime=lifetime,
    )
    return {**evidence, **changed}


def gated(store: SQLActionStore, *, lifetime: float = 3600.0, **changed: Any) -> str:
    """The id of a new action an owner has approved."""
    action_id = proposed(store, **changed)
    store.gate(action_id, approval(store, action_id, lifetime=lifetime))
    return action_id


def lease(store: SQLActionStore, action_id: str, owner: str = OWNER, seconds: float = 60.0) -> Any:
    """Lease this action for its next step, whatever that is."""
    if store.get_action(action_id)["state"] == "dispatched":
        return store.lease_dispatched_observation(owner, lease_seconds=seconds, action_ids=[action_id])
    return store.lease_next(owner, lease_seconds=seconds, states=LEASABLE, action_ids=[action_id])


def execution_of(action_id: str) -> str:
    """The digest of the action's one execution."""
    return digest_of(f"execution of {action_id}")


def expectations(store: SQLActionStore, action_id: str, **changed: Any) -> dict[str, Any]:
    """The arguments of a dispatch that finds everything as it is stored now."""
    action = store.get_action(action_id)
    gates = [receipt for receipt in store.list_receipts(action_id) if receipt["kind"] == "gate"]
    evidence = gates[0]["evidence"] if gates and isinstance(gates[0]["evidence"], dict) else {}
    return {
        "gate_receipt_key": gates[0]["receipt_key"] if gates else "owner-gate",
        "expected_source": action["source"],
        "expected_source_ref": action["source_ref"],
        "expected_action_type": action["action_type"],
        "expected_payload": action["payload"],
        "expected_approval_id": evidence.get("approval_id", "none"),
        "expected_decision_id": evidence.get("decision_id", "none"),
        "expected_execution_digest": execution_of(action_id),
        "observation_window_seconds": 600.0,
        "max_observations": 3,
        "gate_validator": VALID,
        **changed,
    }


def dispatch(store: SQLActionStore, action_id: str, owner: str = OWNER, **changed: Any) -> Any:
    """Consume the gate of an action that is leased."""
    return store.begin_owner_authorized_dispatch(action_id, owner, **expectations(store, action_id, **changed))


def dispatched(store: SQLActionStore, *, seconds: float = 60.0, **changed: Any) -> str:
    """The id of a new dispatched action, leased."""
    action_id = gated(store)
    assert lease(store, action_id, seconds=seconds) is not None
    dispatch(store, action_id, **changed)
    return action_id


def look(store: SQLActionStore, action_id: str, owner: str = OWNER) -> Any:
    """Journal one look: action and receipt."""
    return store.begin_dispatched_observation(action_id, owner, execution_of(action_id))


def unresolved(store: SQLActionStore, action_id: str, receipt_key: str, delay: float = 0.0, owner: str = OWNER) -> Any:
    """Say that the look found nothing certain."""
    digest = execution_of(action_id)
    return store.defer_dispatched_observation(action_id, owner, digest, receipt_key, "nothing yet", delay)


def accept(store: SQLActionStore, action_id: str, owner: str = OWNER, **more: Any) -> Any:
    """Record that the mutation happened."""
    return store.accept(action_id, owner, "acceptance", "acceptance", {"status": "completed"}, **more)


def verify(store: SQLActionStore, action_id: str, owner: str = OWNER, **more: Any) -> Any:
    """Record that it was seen."""
    given = {"qualifying_receipt_keys": ["acceptance"], **more}
    return store.verify(action_id, owner, "verification", {"seen": True}, **given)


def at(store: SQLActionStore, state: str, *, seconds: float = 60.0) -> str:
    """The id of a new action in this state, leased where it can be."""
    if state == "proposed":
        return proposed(store)
    action_id = gated(store)
    assert lease(store, action_id, seconds=seconds) is not None
    if state == "failed":
        store.fail_attempt(action_id, OWNER, "no luck", retryable=False)
        return action_id
    steps: dict[str, Callable[[], Any]] = {
        "gated": lambda: None,
        "dispatched": lambda: dispatch(store, action_id),
        "accepted": lambda: accept(store, action_id),
        "verified": lambda: verify(store, action_id),
        "completed": lambda: store.complete(action_id, OWNER, {"ok": True}),
    }
    for name, step in steps.items():
        step()
        if name == state:
            break
    assert store.get_action(action_id)["state"] == state
    return action_id


def authorize(action: Mapping[str, Any], receipts: Any, now: float) -> GateAuthorization:
    """A validator that authorizes whatever gate comes first, alive or not: with it, only the store can refuse."""
    gate = next(receipt for receipt in receipts if receipt["kind"] == "gate")
    evidence = gate["evidence"]
    return GateAuthorization(
        shape="message_delivery",
        granted=False,
        receipt_key=gate["receipt_key"],
        evidence_sha256=gate["evidence_sha256"],
        approval_id=evidence["approval_id"],
        decision_id=evidence["decision_id"],
        revision=1,
        decided_at=evidence["decided_at_epoch"],
        expires_at=evidence["expires_at_epoch"],
        expired=False,
    )


def letters(store: SQLActionStore, action_id: str) -> list[str]:
    """The reasons in the action's dead letters."""
    return [letter["reason"] for letter in store.list_dead_letters(limit=1000) if letter["action_id"] == action_id]


def happened(store: SQLActionStore, action_id: str) -> list[str]:
    """The types of the action's events, in order."""
    return [event["event_type"] for event in store.list_events(action_id)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call returned, or the exception it raised, all of them started at once on threads of their own."""
    start = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        start.wait(30)
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls, timeout=60))
