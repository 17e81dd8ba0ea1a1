"""The way to the database breaks, or somebody is in it for too long: what is told, and that nothing is done twice."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa

from celery_idem.errors import ActionStoreError, ActionTransitionError, LeaseLost, StoreUnavailable
from celery_idem.governed import SQLActionStore
from tests.contract.sql_help import forked
from tests.governed.ledgers import (
    LEASABLE,
    OWNER,
    TABLES,
    VALID,
    Ledger,
    accept,
    approval,
    at,
    dispatch,
    execution_of,
    expectations,
    gated,
    happened,
    lease,
    on,
    on_each_database,
    on_postgres,
    proposed,
    unresolved,
    verify,
)
from tests.support.chaos_proxy import ChaosProxy
from tests.support.processes import wait_until

pytest_plugins = ("tests.governed.ledgers",)

Call = Callable[[SQLActionStore], Any]


# --- a reply is lost -------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(ledger: Ledger) -> Iterator[ChaosProxy]:
    with ChaosProxy.before(ledger.url) as proxy:
        yield proxy


def deferrable(store: SQLActionStore) -> tuple[str, str]:
    """A dispatched action and its last look."""
    action_id = at(store, "dispatched")
    _, receipt = store.begin_dispatched_observation(action_id, OWNER, execution_of(action_id))
    return action_id, receipt["receipt_key"]  # type: ignore[index]


def prepared(verb: str, direct: SQLActionStore) -> Call:
    """A call of the verb that would write, on an action of its own."""
    if verb == "propose":
        return lambda store: proposed(store, idempotency_key="one")
    if verb == "set_admission":
        return lambda store: store.set_admission(True, "as it was", actor="ann")
    if verb == "defer_dispatched_observation":
        action_id, key = deferrable(direct)
        return lambda store: unresolved(store, action_id, key)
    needs = {"approve": "proposed", "gate": "proposed", "reject": "proposed", "accept": "dispatched"}
    needs |= {"begin_dispatched_observation": "dispatched", "verify": "accepted", "complete": "verified"}
    action_id = at(direct, needs.get(verb, "gated"))
    evidence = approval(direct, action_id)
    given = expectations(direct, action_id)
    if verb == "lease_next":
        direct.defer_leased(action_id, OWNER, "later", 0)
    return {
        "gate": lambda store: store.gate(action_id, evidence),
        "approve": lambda store: store.approve(action_id, evidence, chain_id="chain"),
        "reject": lambda store: store.reject(action_id, "no", actor="bob"),
        "add_receipt": lambda store: store.add_receipt(action_id, "mail", "note", "sent", {}),
        "lease_next": lambda store: store.lease_next("w", lease_seconds=60, states=LEASABLE, action_ids=[action_id]),
        "begin_owner_authorized_dispatch": lambda store: store.begin_owner_authorized_dispatch(
            action_id, OWNER, **given
        ),
        "begin_dispatched_observation": lambda store: store.begin_dispatched_observation(
            action_id, OWNER, execution_of(action_id)
        ),
        "accept": lambda store: accept(store, action_id),
        "verify": lambda store: verify(store, action_id),
        "complete": lambda store: store.complete(action_id, OWNER, {}),
        "fail_attempt": lambda store: store.fail_attempt(action_id, OWNER, "no luck", retryable=False),
        "defer_leased": lambda store: store.defer_leased(action_id, OWNER, "later", 5),
        "replace_chain": lambda store: store.replace_chain(action_id, None, "chain"),
    }[verb]


WRITES = (
    "propose",
    "gate",
    "approve",
    "reject",
    "add_receipt",
    "lease_next",
    "begin_owner_authorized_dispatch",
    "begin_dispatched_observation",
    "defer_dispatched_observation",
    "accept",
    "verify",
    "complete",
    "fail_attempt",
    "defer_leased",
    "set_admission",
    "replace_chain",
)
AGAIN_IS_ANOTHER = {"set_admission", "lease_next", "begin_dispatched_observation"}
"""Verbs that, called again, may write again: another entry, another lease, another of the bounded looks."""


@on_postgres
@pytest.mark.parametrize("verb", WRITES)
def test_a_reply_lost_at_any_statement_is_told_truly(
    ledger: Ledger, real_store: SQLActionStore, proxy: ChaosProxy, verb: str
) -> None:
    told: list[bool] = []
    for number in range(40):
        store = ledger.open(url=proxy.url(ledger.url))
        call = prepared(verb, real_store)
        store.admission()  # so that the connection is there
        before = everything(ledger)
        proxy.drop_replies(after=number)
        error = lost(call, store)
        proxy.heal()
        proxy.cut()
        if error is None:
            break
        told.append(error.may_have_landed)
        assert "governed_store" in str(error)
        wait_until(lambda: sessions(ledger) == 0, 10, "the server has given the broken sessions up")
        landed = everything(ledger)
        assert (landed != before) is told[-1]
        if told[-1] and verb not in AGAIN_IS_ANOTHER:
            with suppress(ActionStoreError):
                call(real_store)  # refused, or answered with what is there
            assert everything(ledger) == landed
    assert told == [False] * (len(told) - 1) + [True]
    assert len(told) >= 4  # BEGIN, a read, a write and COMMIT at the least


def lost(call: Callable[..., Any], *arguments: Any, **given: Any) -> StoreUnavailable | None:
    """What is told where a reply was lost; None where none was."""
    try:
        call(*arguments, **given)
    except StoreUnavailable as error:
        return error
    return None


def everything(ledger: Ledger) -> dict[str, list[Any]]:
    return {table: ledger.run(f"SELECT * FROM {table} ORDER BY 1") for table in TABLES}


def sessions(ledger: Ledger) -> int:
    """Sessions in the middle of a transaction."""
    ((found,),) = ledger.run(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state <> 'idle'"
        " AND pid <> pg_backend_pid()"
    )
    return int(found)


@on_postgres
def test_a_dispatch_whose_commit_was_not_answered_is_not_made_again(
    ledger: Ledger, real_store: SQLActionStore, proxy: ChaosProxy
) -> None:
    for number in range(40):
        store = ledger.open(url=proxy.url(ledger.url))
        action_id = at(real_store, "gated")
        given = expectations(real_store, action_id)
        store.admission()
        proxy.drop_replies(after=number)
        error = lost(store.begin_owner_authorized_dispatch, action_id, OWNER, **given)
        proxy.heal()
        proxy.cut()
        if error is None:
            break
        wait_until(lambda: sessions(ledger) == 0, 10, "the server has given the broken sessions up")
        if error.may_have_landed:
            with pytest.raises(ActionTransitionError, match="is dispatched"):
                real_store.begin_owner_authorized_dispatch(action_id, OWNER, **given)
        else:
            assert real_store.get_action(action_id)["attempt_count"] == 0
            real_store.begin_owner_authorized_dispatch(action_id, OWNER, **given)
        contracts = [each for each in real_store.list_receipts(action_id) if each["kind"] == "dispatch_recovery"]
        assert len(contracts) == real_store.get_action(action_id)["attempt_count"] == 1
        assert happened(real_store, action_id).count("dispatched") == 1


@on_postgres
def test_a_connection_that_breaks_before_the_commit_is_replaced_and_the_work_done_once(
    ledger: Ledger, real_store: SQLActionStore, proxy: ChaosProxy
) -> None:
    store = ledger.open(url=proxy.url(ledger.url))
    action_id = at(real_store, "gated")
    asked: list[float] = []

    def cutting(*given: Any) -> Any:
        asked.append(given[2])
        if len(asked) == 1:
            proxy.cut()
        return VALID(*given)

    assert dispatch(store, action_id, gate_validator=cutting)["attempt_count"] == 1
    assert len(asked) == 2
    assert happened(real_store, action_id).count("dispatched") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, LeaseLost])
def test_whatever_ends_a_process_in_the_middle_leaves_nothing_and_holds_nothing(
    ledger: Ledger, real_store: SQLActionStore, error: type[BaseException]
) -> None:
    action_id = at(real_store, "gated")
    before = everything(ledger)

    def ending(*_: Any) -> Any:
        raise error

    with pytest.raises(error):
        dispatch(real_store, action_id, gate_validator=ending)
    assert everything(ledger) == before
    assert dispatch(ledger.open(), action_id)["state"] == "dispatched"


@on_postgres
def test_idle_connections_that_died_cost_nobody_an_error(
    ledger: Ledger, real_store: SQLActionStore, proxy: ChaosProxy
) -> None:
    store = ledger.open(url=proxy.url(ledger.url))
    for _ in range(3):
        action_id = gated(store)
        proxy.cut()
        assert lease(store, action_id) is not None
        proxy.cut()
        assert dispatch(store, action_id)["state"] == "dispatched"
    assert {action["attempt_count"] for action in real_store.find()} == {1}


@on_postgres
def test_a_server_that_does_not_answer_is_given_up_in_time(
    ledger: Ledger, real_store: SQLActionStore, proxy: ChaosProxy
) -> None:
    store = ledger.open(url=proxy.url(ledger.url), timeout=3)
    store.admission()
    proxy.blackhole = True
    began = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        proposed(store)
    assert time.monotonic() - began < 15
    assert caught.value.may_have_landed is False
    proxy.heal()
    assert proposed(store)


# --- somebody holds it too long --------------------------------------------------------------------------------------


@on_postgres
def test_a_row_held_too_long_is_told_in_time_and_nothing_waits_on(ledger: Ledger, real_store: SQLActionStore) -> None:
    action_id = at(real_store, "gated")
    store = ledger.open(timeout=3)
    with ledger.connection() as busy:
        ledger.send(busy, "BEGIN")
        ledger.send(busy, "SELECT 1 FROM celery_idem_action WHERE action_id = ? FOR UPDATE", action_id)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            dispatch(store, action_id)
        assert 2.4 < time.monotonic() - began < 15
        assert caught.value.may_have_landed is False
        ledger.send(busy, "COMMIT")
    assert real_store.get_action(action_id)["state"] == "gated"
    assert dispatch(store, action_id)["state"] == "dispatched"


HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=5)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
connection.execute("COMMIT")
"""


@on("sqlite")
def test_a_file_another_process_holds_too_long_is_told_clearly_and_can_still_be_read(
    ledger: Ledger, real_store: SQLActionStore
) -> None:
    action_id = at(real_store, "gated")
    store = ledger.open(timeout=1)
    argv = [sys.executable, "-c", HOLD, ledger.url.removeprefix("sqlite:///")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for call in (lambda: dispatch(store, action_id), lambda: proposed(store), lambda: store.stranded(1)):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable) as caught:
                call()
            assert 0.9 < time.monotonic() - began < 4.5, "not the 5 s of a store that was told nothing"
            assert str(caught.value) == ("the database of governed actions was busy for 1 s: look what holds its rows")
            assert caught.value.may_have_landed is False
        assert store.get_action(action_id)["state"] == "gated"
        assert store.find()[0]["action_id"] == action_id
        waiter: list[Any] = []
        thread = threading.Thread(target=lambda: waiter.append(dispatch(ledger.open(timeout=30), action_id)))
        thread.start()
        thread.join(0.5)  # longer than SQLite itself waits
        assert waiter == []
        holder.communicate("")
        thread.join(40)
    assert waiter[0]["state"] == "dispatched"


# --- forks and engines ------------------------------------------------------------------------------------------------


@on_each_database
def test_a_store_is_used_on_by_forked_children(ledger: Ledger, real_store: SQLActionStore) -> None:
    proposed(real_store, idempotency_key="parent")

    def work(number: int) -> str:
        action_id = gated(real_store, idempotency_key=f"child {number}")
        assert lease(real_store, action_id) is not None
        return str(dispatch(real_store, action_id)["state"])

    assert forked(4, work) == ["dispatched"] * 4
    assert len(real_store.find("dispatched")) == 4
    assert proposed(real_store)


@on_each_database
def test_an_engine_of_ones_own_stays_ones_own(ledger: Ledger) -> None:
    engine = sa.create_engine(ledger.url)
    with SQLActionStore(engine) as store:
        assert at(store, "completed")
    with engine.begin() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM celery_idem_action")).scalar_one() == 1
        connection.execute(sa.text("UPDATE celery_idem_action SET last_error = 'x'"))
        connection.rollback()
    assert ledger.count("celery_idem_action", "last_error = 'x'") == 0
    engine.dispose()
