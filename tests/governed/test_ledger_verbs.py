"""Leases, time, the switch and the chains: what the contract's own checks do not ask of this ledger."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from celery_idem.errors import (
    ActionLeaseConflict,
    ActionTransitionError,
    AdmissionClosed,
    GateRefused,
)
from celery_idem.governed import SQLActionStore
from celery_idem.testing import ManualClock
from tests.governed.ledgers import (
    LEASABLE,
    OWNER,
    VALID,
    Ledger,
    accept,
    approval,
    at,
    authorize,
    dispatch,
    dispatched,
    execution_of,
    expectations,
    gated,
    happened,
    lease,
    look,
    on_each_database,
    on_postgres,
    proposed,
    together,
    unresolved,
    verify,
)
from tests.support.processes import wait_until

pytest_plugins = ("tests.governed.ledgers",)


def lease_next(store: SQLActionStore, owner: str = OWNER, **scope: Any) -> Any:
    found = store.lease_next(owner, lease_seconds=60, states=LEASABLE, **scope)
    return found and found["action_id"]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_the_longest_ready_is_leased_first_whatever_its_state(store: SQLActionStore, clock: ManualClock) -> None:
    waiting = []
    for state in ("gated", "accepted", "verified", "gated"):
        waiting.append(at(store, state))
        store.defer_leased(waiting[-1], OWNER, "later", 0)
        clock.advance(1)
    assert [lease_next(store) for _ in range(5)] == [*waiting, None]


def test_who_is_deferred_goes_behind_those_who_were_due_before(store: SQLActionStore, clock: ManualClock) -> None:
    first, second = gated(store), None
    clock.advance(1)
    second = gated(store)
    assert lease_next(store) == first
    store.defer_leased(first, OWNER, "later", 5)
    assert [lease_next(store), lease_next(store)] == [second, None]
    clock.advance(5)
    assert lease_next(store) == first


def test_a_lapsed_lease_goes_to_the_next_who_asks_and_the_event_says_whose_it_was(
    store: SQLActionStore, clock: ManualClock
) -> None:
    action_id = gated(store)
    assert lease_next(store, "one") == action_id
    clock.advance(60)
    assert lease_next(store, "two") == action_id
    assert store.list_events(action_id)[-1]["details"] == {"lapsed": "one", "mode": "work", "until": clock() + 60}
    with pytest.raises(ActionLeaseConflict, match=r"one holds no lease on action .*, two holds it"):
        dispatch(store, action_id, "one")


@on_postgres
def test_a_row_that_somebody_holds_is_passed_by(ledger: Ledger, store: SQLActionStore, clock: ManualClock) -> None:
    first = gated(store)
    clock.advance(1)
    second = gated(store)
    with ledger.connection() as busy:
        ledger.send(busy, "BEGIN")
        ledger.send(busy, "SELECT 1 FROM celery_idem_action WHERE action_id = ? FOR UPDATE", first)
        assert [lease_next(store), lease_next(store)] == [second, None]
        clock.advance(61)
        store.recover_expired_leases()
        assert store.get_action(second)["lease_owner"] is None
        ledger.send(busy, "ROLLBACK")
    assert lease_next(store) == first


@pytest.mark.parametrize("keep", [True, False])
def test_a_step_keeps_its_lease_or_gives_it_back_with_its_own_commit(store: SQLActionStore, keep: bool) -> None:
    action_id = dispatched(store)
    for step in (accept, verify):
        action, _ = step(store, action_id, keep_lease=keep)
        assert (action["lease_owner"], action["lease_expires_at"] is None) == (OWNER if keep else None, not keep)
        assert store.get_action(action_id) == action
        if keep:
            assert lease_next(store, "other") is None
        else:
            assert lease_next(store) == action_id
    assert happened(store, action_id).count("leased") == (1 if keep else 3)


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_clock_set_back_revives_no_approval(store: SQLActionStore, clock: ManualClock) -> None:
    action_id = gated(store, lifetime=100)
    clock.advance(101)
    assert lease(store, action_id) is not None
    with pytest.raises(GateRefused, match="expired"):
        dispatch(store, action_id, gate_validator=authorize)
    clock.advance(-100)
    for validator in (authorize, VALID):
        with pytest.raises(GateRefused, match="expired") as caught:
            dispatch(store, action_id, gate_validator=validator)
        assert caught.value.code == "expired"


def test_a_clock_set_back_revives_no_lease_no_look_and_no_time_of_an_action(
    store: SQLActionStore, clock: ManualClock
) -> None:
    action_id = dispatched(store, max_observations=1)
    look(store, action_id)
    clock.advance(61)
    store.recover_expired_leases()  # its one look is made, so it ends
    assert store.get_action(action_id)["state"] == "failed"
    other = gated(store)
    assert lease_next(store, "one") == other
    clock.advance(61)
    assert lease_next(store, "two") == other
    clock.advance(-120)
    with pytest.raises(ActionLeaseConflict):
        dispatch(store, other, "one")
    before = store.get_action(other)["updated_at"]
    assert store.defer_leased(other, "two", "later", 10)["updated_at"] == before
    assert store.get_action(other)["next_attempt_at"] == before + 10
    times = [event["created_at"] for event in store.list_events(other)]
    assert times == sorted(times)


def test_a_dispatch_counts_the_one_attempt_and_says_what_it_was_allowed_by(store: SQLActionStore) -> None:
    action_id = dispatched(store)
    assert store.get_action(action_id)["attempt_count"] == 1
    gate = next(receipt for receipt in store.list_receipts(action_id) if receipt["kind"] == "gate")
    contract = next(receipt for receipt in store.list_receipts(action_id) if receipt["kind"] == "dispatch_recovery")
    events = {event["event_type"]: event["details"] for event in store.list_events(action_id)}
    assert events["dispatched"] == {
        "attempt": 1,
        "approval_id": gate["evidence"]["approval_id"],
        "execution_digest": execution_of(action_id),
        "contract_sha256": contract["evidence_sha256"],
    }


def test_a_dispatch_that_is_not_due_says_how_long_to_wait_and_changes_nothing(
    ledger: Ledger, store: SQLActionStore
) -> None:
    action_id = at(store, "gated")
    ledger.forge("UPDATE celery_idem_action SET next_attempt_at = next_attempt_at + 30 WHERE action_id = ?", action_id)
    before = store.get_action(action_id)
    with pytest.raises(ActionTransitionError, match=r"is not due yet: wait for 30\.0 s$"):
        dispatch(store, action_id)
    assert store.get_action(action_id) == before


@pytest.mark.parametrize("error", [KeyError("decision_id"), RecursionError("too deep")])
def test_a_validator_that_raises_refuses_and_is_the_cause(store: SQLActionStore, error: Exception) -> None:
    def validator(*_: Any) -> Any:
        raise error

    action_id = at(store, "gated")
    with pytest.raises(GateRefused, match=rf"validator: it raised {type(error).__name__}: see the cause") as caught:
        dispatch(store, action_id, gate_validator=validator)
    assert (caught.value.code, caught.value.__cause__) == ("validator", error)
    assert store.get_action(action_id)["state"] == "gated"


def test_evidence_of_ones_own_keeps_no_action_from_its_dispatch(store: SQLActionStore) -> None:
    action_id = at(store, "gated")
    for kind in ("a note", "note"):
        store.add_receipt(action_id, kind, kind, "seen", {})
    assert dispatch(store, action_id)["state"] == "dispatched"


def test_the_deadline_of_looking_is_not_moved_by_a_clock_set_back(store: SQLActionStore, clock: ManualClock) -> None:
    action_id = dispatched(store, seconds=1000, observation_window_seconds=100, max_observations=100)
    made = []
    for seconds in (60, -50, 30, 40, 19, 1):
        clock.advance(seconds)
        made.append(look(store, action_id)[1])
    assert [receipt is not None for receipt in made] == [True] * 5 + [False]
    assert happened(store, action_id)[-1] == "ambiguous"


@on_postgres
def test_an_approval_that_ends_while_its_row_is_waited_for_is_refused(
    ledger: Ledger, real_store: SQLActionStore
) -> None:
    action_id = gated(real_store, lifetime=4.0)
    assert lease(real_store, action_id) is not None
    given = expectations(real_store, action_id, gate_validator=authorize)
    with ledger.connection() as busy:
        ledger.send(busy, "BEGIN")
        ledger.send(busy, "SELECT 1 FROM celery_idem_action WHERE action_id = ? FOR UPDATE", action_id)
        assert real_store.now() < given_end(real_store, action_id)  # alive when the dispatch begins
        thread, answers = begun(ledger.open(timeout=30), action_id, given)
        wait_until(lambda: waiting(ledger) == 1, 20, "the dispatch waits for the row")
        wait_until(lambda: real_store.now() > given_end(real_store, action_id), 20, "the approval has ended")
        ledger.send(busy, "COMMIT")
        thread.join(40)
    (refusal,) = answers
    assert isinstance(refusal, GateRefused), refusal
    assert refusal.code == "expired"
    assert real_store.get_action(action_id)["state"] == "gated"


@on_postgres
def test_an_approval_that_ends_while_the_switch_is_waited_for_is_refused(
    ledger: Ledger, real_store: SQLActionStore
) -> None:
    action_id = gated(real_store, lifetime=4.0)
    assert lease(real_store, action_id) is not None
    given = expectations(real_store, action_id, gate_validator=authorize)
    from celery_idem.governed.sql.schema import ADMISSION_LOCK

    with ledger.connection() as busy:
        ledger.send(busy, f"SELECT pg_advisory_lock({ADMISSION_LOCK})")
        thread, answers = begun(ledger.open(timeout=30), action_id, given)
        wait_until(lambda: waiting(ledger) == 1, 20, "the dispatch waits for the switch")
        wait_until(lambda: real_store.now() > given_end(real_store, action_id), 20, "the approval has ended")
        ledger.send(busy, f"SELECT pg_advisory_unlock({ADMISSION_LOCK})")
        thread.join(40)
    (refusal,) = answers
    assert isinstance(refusal, GateRefused), refusal
    assert refusal.code == "expired"


def begun(store: SQLActionStore, action_id: str, given: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """A dispatch under way on a thread, and where its answer will be."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(store.begin_owner_authorized_dispatch(action_id, OWNER, **given))
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


def given_end(store: SQLActionStore, action_id: str) -> float:
    """When the action's approval ends."""
    return float(store.list_receipts(action_id)[0]["evidence"]["expires_at_epoch"])


def waiting(ledger: Ledger) -> int:
    """How many sessions of the database wait for a lock."""
    ((found,),) = ledger.run(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return int(found)


@on_each_database
def test_the_ledgers_own_clock_is_the_databases(ledger: Ledger, real_store: SQLActionStore) -> None:
    before = time.time() - 10
    action_id = at(real_store, "completed")
    action = real_store.get_action(action_id)
    assert before < action["created_at"] <= action["updated_at"] <= real_store.now() < time.time() + 10


# --- the switch ------------------------------------------------------------------------------------------------------


def test_the_switch_is_open_until_somebody_closes_it_and_keeps_its_history(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock
) -> None:
    assert store.admission() == {"open": True, "reason": "", "actor": "", "changed_at": None}
    closed = store.set_admission(False, "the bank is down", actor="ann")
    assert closed == {"open": False, "reason": "the bank is down", "actor": "ann", "changed_at": clock()}
    clock.advance(10)
    assert store.admission() == closed
    opened = store.set_admission(True, "the bank is back", actor="bob")
    assert ledger.open(clock).admission() == opened
    assert ledger.count("celery_idem_action_admission") == 2


def test_while_the_switch_is_closed_nothing_is_consumed_and_then_it_goes_on(
    store: SQLActionStore, clock: ManualClock
) -> None:
    action_id = gated(store)
    assert lease(store, action_id) is not None
    store.set_admission(False, "the bank is down", actor="ann")
    before = store.get_action(action_id), store.list_receipts(action_id), store.list_events(action_id)
    asked: list[Any] = []

    def validator(*given: Any) -> Any:
        asked.append(given)
        return VALID(*given)

    with pytest.raises(AdmissionClosed) as caught:
        dispatch(store, action_id, gate_validator=validator)
    assert str(caught.value) == (
        "admission is closed since 2033-05-18 03:33:20 UTC by ann: the bank is down; nothing was consumed, and it "
        "goes on when admission is opened"
    )
    assert caught.value.reason == "the bank is down"
    assert asked == []
    assert (store.get_action(action_id), store.list_receipts(action_id), store.list_events(action_id)) == before
    store.set_admission(True, "the bank is back", actor="ann")
    assert dispatch(store, action_id, gate_validator=validator)["state"] == "dispatched"


def test_a_closed_switch_keeps_nobody_from_looking_verifying_and_ending(store: SQLActionStore) -> None:
    store.set_admission(False, "the bank is down", actor="ann")
    assert store.approve(action_id := proposed(store), approval(store, action_id), chain_id="c")[0]["state"] == "gated"
    store.set_admission(True, "a moment", actor="ann")
    action_id = dispatched(store)
    store.set_admission(False, "the bank is down", actor="ann")
    _, receipt = look(store, action_id)
    unresolved(store, action_id, receipt["receipt_key"])
    assert lease(store, action_id) is not None
    accept(store, action_id)
    verify(store, action_id)
    assert store.complete(action_id, OWNER, {})["state"] == "completed"


@on_each_database
def test_once_a_closing_is_answered_no_dispatch_that_saw_it_open_commits(
    ledger: Ledger, real_store: SQLActionStore
) -> None:
    held, late = gated(real_store), gated(real_store)
    assert lease(real_store, held) is not None
    assert lease(real_store, late) is not None
    inside, go = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        inside.set()
        assert go.wait(20)
        return VALID(*given)

    thread, answers = begun(ledger.open(timeout=30), held, expectations(real_store, held, gate_validator=slow))
    assert inside.wait(10)
    closer, closed = ledger.open(timeout=20), []
    closing = threading.Thread(target=lambda: closed.append(closer.set_admission(False, "stop", actor="ann")))
    closing.start()
    if not ledger.sqlite:  # there the file itself is what it waits for
        wait_until(lambda: waiting(ledger) == 1, 20, "the closing waits for the dispatch")
    closing.join(0.2)
    assert closed == []
    go.set()
    closing.join(20)
    assert [answer["open"] for answer in closed] == [False]
    assert ledger.run("SELECT state FROM celery_idem_action WHERE action_id = ?", held) == [("dispatched",)]
    thread.join(10)
    assert answers[0]["state"] == "dispatched"
    with pytest.raises(AdmissionClosed):
        dispatch(real_store, late)


# --- chains ----------------------------------------------------------------------------------------------------------


def test_stranded_is_what_is_due_quiet_and_nobodys(store: SQLActionStore, clock: ManualClock) -> None:
    quiet = {state: at(store, state) for state in ("gated", "dispatched", "accepted", "verified")}
    for state in ("proposed", "completed", "failed"):
        at(store, state)
    assert store.stranded(0) == []  # all of them leased
    clock.advance(60)
    assert {found["action_id"]: found["state"] for found in store.stranded(60)} == {
        action_id: state for state, action_id in quiet.items()
    }
    assert store.stranded(61) == []
    assert len(store.stranded(0, limit=2)) == 2
    assert lease(store, quiet["gated"]) is not None
    store.replace_chain(quiet["accepted"], None, "chain-2")
    assert {found["state"] for found in store.stranded(60)} == {"dispatched", "verified"}
    assert lease(store, quiet["verified"]) is not None
    store.defer_leased(quiet["verified"], OWNER, "later", 300)
    clock.advance(120)
    assert {found["state"] for found in store.stranded(60)} == {"gated", "dispatched", "accepted"}
    clock.advance(240)
    found = store.stranded(60)
    assert set(found[0]) == {"action_id", "action_type", "state", "chain_id"}
    assert found[0]["state"] == "dispatched"  # the longest quiet
    assert len(found) == 4


def test_a_chain_is_replaced_by_one_of_those_who_saw_it(ledger: Ledger, store: SQLActionStore) -> None:
    action_id = proposed(store)
    store.approve(action_id, approval(store, action_id), chain_id="first")
    stores = [ledger.open(timeout=20) for _ in range(6)]
    answers = together(
        *(
            lambda store=store, name=f"chain-{number}": store.replace_chain(action_id, "first", name)
            for number, store in enumerate(stores)
        )
    )
    assert sorted(answers) == [False] * 5 + [True]
    action = store.get_action(action_id)
    assert action["chain_id"] == f"chain-{answers.index(True)}"
    event = store.list_events(action_id)[-1]
    assert event["event_type"] == "enqueued"
    assert event["details"] == {"chain_id": action["chain_id"], "instead_of": "first"}


@pytest.mark.parametrize("state", ["proposed", "completed", "failed"])
def test_what_is_not_at_work_gets_no_chain(store: SQLActionStore, state: str) -> None:
    action_id = at(store, state)
    assert store.replace_chain(action_id, None, "chain") is False
    assert store.get_action(action_id)["chain_id"] is None


# --- looking -----------------------------------------------------------------------------------------------------


def test_a_look_is_due_again_at_the_deadline_at_the_latest(store: SQLActionStore, clock: ManualClock) -> None:
    action_id = dispatched(store, observation_window_seconds=100)
    _, receipt = look(store, action_id)
    action = unresolved(store, action_id, receipt["receipt_key"], 5000)
    assert action["next_attempt_at"] == pytest.approx(clock() + 100)
    clock.advance(100)
    assert lease(store, action_id) is None  # it has ended now
    assert happened(store, action_id)[-1] == "ambiguous"


def test_only_the_last_look_has_the_word(store: SQLActionStore) -> None:
    action_id = dispatched(store)
    first, second = look(store, action_id)[1], look(store, action_id)[1]
    with pytest.raises(ActionTransitionError, match=r"is not the last look at action .*, that is .*:002"):
        unresolved(store, action_id, first["receipt_key"])
    with pytest.raises(ActionTransitionError, match="is not the last look"):
        unresolved(store, action_id, "dispatch-observation:nonsense")
    assert unresolved(store, action_id, second["receipt_key"])["lease_owner"] is None
