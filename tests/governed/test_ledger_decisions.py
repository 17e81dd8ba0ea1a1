"""What happens to an action before its mutation: proposed, decided on once, rejected, and told to whoever listens."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from celery_idem.errors import (
    ActionIdempotencyConflict,
    ActionLeaseConflict,
    ActionNotFound,
    ActionStoreError,
    ActionTransitionError,
    AlreadyDecided,
)
from celery_idem.governed import SQLActionStore
from celery_idem.testing import ManualClock
from tests.governed.ledgers import (
    OWNER,
    Ledger,
    approval,
    at,
    dispatch,
    gated,
    happened,
    lease,
    letters,
    on_each_database,
    proposed,
    together,
)

pytest_plugins = ("tests.governed.ledgers",)


# --- proposed --------------------------------------------------------------------------------------------------------


def test_a_proposal_is_due_at_once_and_has_no_attempt(store: SQLActionStore, clock: ManualClock) -> None:
    action = store.propose("k", "shop", "payments.refund", {"order": 7}, source_ref="order/7", actor="agent-1")
    now = clock()
    assert {name: action[name] for name in ("state", "attempt_count", "max_attempts")} == {
        "state": "proposed",
        "attempt_count": 0,
        "max_attempts": 1,
    }
    assert action["created_at"] == action["updated_at"] == action["next_attempt_at"] == now
    assert all(action[name] is None for name in ("lease_owner", "last_error", "result", "terminal_at", "chain_id"))
    assert store.get_action(action["action_id"]) == action
    (event,) = store.list_events(action["action_id"])
    assert (event["event_type"], event["from_state"], event["to_state"]) == ("proposed", None, "proposed")
    assert event["actor"] == "agent-1"


def test_the_same_key_with_the_same_content_is_the_same_action(store: SQLActionStore, clock: ManualClock) -> None:
    first = store.propose("k", "shop", "refund", {"a": 1, "b": [None, True]}, source_ref="o", actor="one")
    clock.advance(100)
    again = store.propose("k", "shop", "refund", {"b": [None, True], "a": 1}, source_ref="o", actor="two")
    assert again == first
    assert happened(store, first["action_id"]) == ["proposed"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"source": "mill"}, "source"),
        ({"source_ref": None}, "source_ref"),
        ({"action_type": "payments.charge"}, "action_type"),
        ({"payload": {"order": 8}}, "payload"),
        ({"action_id": "another"}, "action_id"),
    ],
)
def test_the_same_key_with_other_content_is_a_conflict_that_says_what_differs(
    store: SQLActionStore, changed: dict[str, Any], named: str
) -> None:
    action_id = proposed(store, idempotency_key="k")
    with pytest.raises(ActionIdempotencyConflict, match=f"'k' was used before with another {named}: "):
        proposed(store, idempotency_key="k", **changed)
    assert len(store.find()) == 1
    assert happened(store, action_id) == ["proposed"]


def test_an_id_of_ones_own_is_taken_once(store: SQLActionStore) -> None:
    assert proposed(store, action_id="refund-7", idempotency_key="k") == "refund-7"
    assert proposed(store, action_id="refund-7", idempotency_key="k") == "refund-7"
    with pytest.raises(ActionIdempotencyConflict, match=r"action_id 'refund-7' was used before for another action"):
        proposed(store, action_id="refund-7", idempotency_key="other")
    assert len(store.find()) == 1


def test_many_who_propose_the_same_at_once_get_one_action(ledger: Ledger) -> None:
    stores = [ledger.open(timeout=20) for _ in range(8)]
    made = together(*(lambda store=store: proposed(store, idempotency_key="k") for store in stores))
    assert len(set(made)) == 1
    assert ledger.count("celery_idem_action_event") == 1
    made = together(
        *(lambda number=number: proposed(stores[number], idempotency_key="k", payload=number) for number in range(8))
    )
    assert {type(each) for each in made} == {ActionIdempotencyConflict}


@pytest.mark.parametrize("payload", [float("nan"), {"a": {1, 2}}, {1: 2}, "x" * 70_000, 2**70, "\0", "\ud800"])
def test_a_payload_that_json_cannot_say_exactly_is_refused(store: SQLActionStore, payload: Any) -> None:
    with pytest.raises(ActionStoreError, match=r"^payload"):
        proposed(store, payload=payload)
    assert store.find() == []


# --- gated -----------------------------------------------------------------------------------------------------------


def test_a_gate_is_recorded_as_it_is_and_once(store: SQLActionStore) -> None:
    action_id = proposed(store)
    evidence = approval(store, action_id)
    action, receipt = store.gate(action_id, evidence, actor="console")
    assert (action["state"], receipt["kind"], receipt["status"]) == ("gated", "gate", "passed")
    assert receipt["receipt_key"] == "owner-gate"
    assert (receipt["external_id"], receipt["evidence"]) == (evidence["approval_id"], evidence)
    again, same = store.gate(action_id, evidence)
    assert (again, same["created_at"]) == (action, receipt["created_at"])
    assert happened(store, action_id) == ["proposed", "gated"]
    with pytest.raises(ActionIdempotencyConflict, match=r"'owner-gate' of action .* is there with other content"):
        store.gate(action_id, approval(store, action_id))


def test_a_second_gate_is_recorded_and_then_nothing_is_dispatched(store: SQLActionStore) -> None:
    action_id = gated(store)
    store.gate(action_id, approval(store, action_id), receipt_key="second")
    assert happened(store, action_id) == ["proposed", "gated", "gate_added"]
    assert lease(store, action_id) is not None
    with pytest.raises(ActionTransitionError, match="gate refused, gate_count"):
        dispatch(store, action_id)


def test_a_gate_judges_nothing(store: SQLActionStore) -> None:
    for evidence in ({}, [], "yes", None, {"approval_id": 5}, {"decision": "rejected"}):
        action, receipt = store.gate(proposed(store), evidence, external_id="APR-1")
        assert (action["state"], receipt["evidence"], receipt["external_id"]) == ("gated", evidence, "APR-1")
        assert store.gate(proposed(store), evidence)[1]["external_id"] is None


@pytest.mark.parametrize("state", ["dispatched", "accepted", "verified", "completed", "failed"])
def test_a_gate_comes_too_late_for_what_is_dispatched_or_ended(store: SQLActionStore, state: str) -> None:
    action_id = at(store, state)
    before = (store.get_action(action_id), store.list_receipts(action_id), store.list_events(action_id))
    with pytest.raises(ActionTransitionError, match=f"is {state}, and a gate needs one that is proposed"):
        store.gate(action_id, approval(store, action_id), receipt_key="second")
    assert (store.get_action(action_id), store.list_receipts(action_id), store.list_events(action_id)) == before


# --- approved and rejected -------------------------------------------------------------------------------------------


def test_an_approval_writes_the_gate_and_names_its_chain(store: SQLActionStore, clock: ManualClock) -> None:
    action_id = proposed(store)
    action, receipt = store.approve(action_id, approval(store, action_id), chain_id="chain-1")
    assert (action["state"], action["chain_id"], action["enqueued_at"]) == ("gated", "chain-1", clock())
    assert receipt["evidence"]["principal"] == "ann@example.org"
    events = store.list_events(action_id)
    assert [(event["event_type"], event["actor"]) for event in events[1:]] == [
        ("gated", "ann@example.org"),
        ("enqueued", "ann@example.org"),
    ]
    assert store.get_action(action_id) == action


def test_the_same_approval_again_is_the_first_one(store: SQLActionStore, clock: ManualClock) -> None:
    action_id = proposed(store)
    evidence = approval(store, action_id)
    first = store.approve(action_id, evidence, chain_id="chain-1")
    clock.advance(10)
    again = store.approve(action_id, evidence, chain_id="chain-2")
    assert again[0] == first[0]
    assert again[1]["created_at"] == first[1]["created_at"]
    assert happened(store, action_id) == ["proposed", "gated", "enqueued"]


def test_a_second_approver_reads_who_was_first_and_changes_nothing(store: SQLActionStore, clock: ManualClock) -> None:
    action_id = proposed(store)
    store.approve(action_id, approval(store, action_id), chain_id="chain-1")
    before = store.get_action(action_id), store.list_receipts(action_id), store.list_events(action_id)
    clock.advance(10)
    for key in ("owner-gate", "second"):
        with pytest.raises(AlreadyDecided) as caught:
            store.approve(action_id, approval(store, action_id, principal="bob"), chain_id="chain-2", receipt_key=key)
        assert str(caught.value) == (
            f"action {action_id} was already approved by ann@example.org at 2033-05-18 03:33:20 UTC: "
            "nothing was changed"
        )
        facts = caught.value.decision, caught.value.by, caught.value.at
        assert facts == ("approved", "ann@example.org", clock() - 10)
    assert (store.get_action(action_id), store.list_receipts(action_id), store.list_events(action_id)) == before


def test_a_late_approver_reads_what_became_of_it(store: SQLActionStore) -> None:
    for state in ("dispatched", "completed", "failed"):
        action_id = at(store, state)
        with pytest.raises(AlreadyDecided, match=rf"approved by ann@example.org at .* UTC; it is {state} now: nothing"):
            store.approve(action_id, approval(store, action_id), chain_id="chain-2")
    action_id = proposed(store)
    store.reject(action_id, "not this one", actor="bob")
    with pytest.raises(AlreadyDecided, match=r"was already rejected by bob at .*; it is failed now") as caught:
        store.approve(action_id, approval(store, action_id), chain_id="chain-2")
    assert (caught.value.decision, caught.value.by) == ("rejected", "bob")


@pytest.mark.parametrize("state", ["proposed", "gated"])
def test_a_rejection_ends_what_is_not_dispatched_and_buries_nothing(
    store: SQLActionStore, clock: ManualClock, state: str
) -> None:
    action_id = at(store, state)
    action = store.reject(action_id, "a duplicate", actor="bob")
    assert (action["state"], action["last_error"]) == ("failed", "rejected by bob: a duplicate")
    assert (action["lease_owner"], action["terminal_at"]) == (None, clock())
    assert happened(store, action_id)[-1] == "rejected"
    assert letters(store, action_id) == []
    with pytest.raises(
        AlreadyDecided, match="was already rejected by bob at 2033-05-18 03:33:20 UTC; it is failed now"
    ):
        store.reject(action_id, "me too", actor="ann")
    if state == "gated":
        with pytest.raises(ActionLeaseConflict, match="nobody holds it"):
            dispatch(store, action_id)


@pytest.mark.parametrize("state", ["dispatched", "accepted", "verified", "completed", "failed"])
def test_a_rejection_comes_too_late_for_what_is_dispatched_or_ended(store: SQLActionStore, state: str) -> None:
    action_id = at(store, state)
    with pytest.raises(ActionTransitionError, match=f"is {state}, so it cannot be rejected any more"):
        store.reject(action_id, "too late", actor="bob")


@on_each_database
@pytest.mark.parametrize("rejecters", [0, 2])
def test_of_many_who_decide_at_once_one_does(ledger: Ledger, rejecters: int) -> None:
    stores = [ledger.open(timeout=20) for _ in range(6)]
    for _ in range(5):
        decide(stores, proposed(stores[0]), rejecters)


def decide(stores: list[SQLActionStore], action_id: str, rejecters: int) -> None:
    """Let some reject and the others approve at once."""

    def approve(store: SQLActionStore) -> Any:
        evidence, key = approval(store, action_id), uuid.uuid4().hex
        return store.approve(action_id, evidence, chain_id=uuid.uuid4().hex, receipt_key=key)

    clicks: list[Callable[[], Any]] = [lambda store=store: approve(store) for store in stores[rejecters:]]
    clicks += [lambda store=store: store.reject(action_id, "no", actor="bob") for store in stores[:rejecters]]
    answers = together(*clicks)
    action = stores[0].get_action(action_id)
    gates = [receipt for receipt in stores[0].list_receipts(action_id) if receipt["kind"] == "gate"]
    refusals = [answer for answer in answers if isinstance(answer, Exception)]
    assert all(isinstance(answer, AlreadyDecided) for answer in refusals), answers
    history = happened(stores[0], action_id)
    assert len(gates) == history.count("gated") == history.count("enqueued") <= 1
    assert history.count("rejected") <= 1
    assert len(answers) - len(refusals) == len(gates) + history.count("rejected")
    assert action["state"] == ("failed" if "rejected" in history else "gated")


# --- receipts of ones own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["proposed", "gated", "dispatched", "accepted", "verified", "completed", "failed"])
def test_evidence_of_ones_own_is_added_in_any_state_and_never_changed(
    store: SQLActionStore, clock: ManualClock, state: str
) -> None:
    action_id = at(store, state)
    first = store.add_receipt(action_id, "mail-1", "note", "sent", {"to": "ann"}, external_id="m1", observed_at=5.5)
    assert (first["observed_at"], first["created_at"], first["external_id"]) == (5.5, clock(), "m1")
    clock.advance(1)
    again = store.add_receipt(action_id, "mail-1", "note", "sent", {"to": "ann"}, external_id="m1")
    assert again["created_at"] == first["created_at"]
    for changed in ({"kind": "other"}, {"status": "lost"}, {"evidence": {"to": "bob"}}, {"external_id": None}):
        given: dict[str, Any] = {"kind": "note", "status": "sent", "evidence": {"to": "ann"}, "external_id": "m1"}
        with pytest.raises(ActionIdempotencyConflict, match="receipt 'mail-1' of action"):
            store.add_receipt(action_id, "mail-1", **{**given, **changed})
    assert [receipt["receipt_key"] for receipt in store.list_receipts(action_id)].count("mail-1") == 1
    assert store.get_action(action_id)["state"] == state


@pytest.mark.parametrize("kind", ["gate", "dispatch_recovery", "dispatch_observation"])
def test_reserved_kinds_are_written_by_their_own_verbs_alone(store: SQLActionStore, kind: str) -> None:
    action_id = at(store, "dispatched")
    with pytest.raises(ActionStoreError, match=f"kind '{kind}' is written by its own verb alone"):
        store.add_receipt(action_id, "k", kind, "passed", {})
    with pytest.raises(ActionStoreError, match=f"kind '{kind}' is written by its own verb alone"):
        store.accept(action_id, OWNER, "k", kind, {})


def test_what_is_not_there_is_not_found_by_any_verb(store: SQLActionStore) -> None:
    verbs: list[Callable[[], Any]] = [
        lambda: store.get_action("none"),
        lambda: store.list_receipts("none"),
        lambda: store.list_events("none"),
        lambda: store.gate("none", {}),
        lambda: store.approve("none", {}, chain_id="c"),
        lambda: store.reject("none", "r", actor="a"),
        lambda: store.add_receipt("none", "k", "note", "sent", {}),
        lambda: store.replace_chain("none", None, "c"),
        lambda: store.defer_leased("none", OWNER, "r", 1),
        lambda: store.begin_dispatched_observation("none", OWNER, "d"),
        lambda: store.accept("none", OWNER, "k", "note", {}),
        lambda: store.complete("none", OWNER, {}),
        lambda: store.fail_attempt("none", OWNER, "e", False),
        lambda: store.find(after="none"),
        lambda: store.list_dead_letters(after="none"),
    ]
    for verb in verbs:
        with pytest.raises(ActionNotFound, match="no action 'none': check the id, and that governed_store names"):
            verb()


# --- told ------------------------------------------------------------------------------------------------------------


def test_a_listener_hears_of_every_event_once_it_is_committed_and_of_nothing_else(
    ledger: Ledger, store: SQLActionStore
) -> None:
    heard: list[Any] = []

    def listen(event: Any) -> None:
        assert ledger.count("celery_idem_action_event", "action_id = ?", event["action_id"]) > 0
        heard.append(event)

    store.listener = listen
    action_id = at(store, "completed")
    assert [event["event_type"] for event in heard] == happened(store, action_id)
    assert {event["action_type"] for event in heard} == {"payments.refund"}
    assert heard[-1]["from_state"] == "verified"
    heard.clear()
    with pytest.raises(ActionTransitionError):
        store.gate(action_id, {}, receipt_key="late")
    store.recover_expired_leases()
    store.find()
    assert heard == []


def test_a_listener_that_raises_changes_nothing_and_is_logged(
    store: SQLActionStore, caplog: pytest.LogCaptureFixture
) -> None:
    def listen(event: Any) -> None:
        raise RuntimeError("deaf")

    store.listener = listen
    action_id = gated(store)
    assert store.get_action(action_id)["state"] == "gated"
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"the listener of governed actions raised on {event}" for event in ("proposed", "gated")]


def test_stores_on_one_ledger_are_used_by_many_threads(ledger: Ledger, store: SQLActionStore) -> None:
    ids = [gated(store) for _ in range(12)]
    taken: list[str] = []
    lock = threading.Lock()

    def work(owner: str) -> None:
        while (action := store.lease_next(owner, lease_seconds=60, states=["gated"])) is not None:
            with lock:
                taken.append(action["action_id"])

    together(*(lambda owner=owner: work(owner) for owner in ("a", "b", "c", "d")))
    assert sorted(taken) == sorted(ids)
