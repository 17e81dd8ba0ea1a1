"""Somebody has the database's password and no more: the triggers stay, and all they let through is tried.

Whoever can write there can stop an action, for nobody can keep them from that. They cannot get a mutation nobody
approved, nor a second one, and cannot stop the actions of others through one row of theirs.
"""

from __future__ import annotations

import pytest

from celery_idem.errors import ActionLeaseConflict, ActionTransitionError, GateRefused
from celery_idem.governed import ApprovalKeys, ApprovalSigner, SQLActionStore, generate_key, owner_gate_validator
from celery_idem.testing import ManualClock
from tests.campaigns.ledger import filling
from tests.governed.attacks import Workers, dead_letter, evidence, honest_comes_through, state_of
from tests.governed.ledgers import (
    OWNER,
    Ledger,
    accept,
    approval,
    at,
    dispatch,
    dispatched,
    gated,
    lease,
    look,
    on_each_database,
    proposed,
    unresolved,
)

pytest_plugins = ("tests.governed.ledgers",)

LONG = "x" * 70_000
ROWS = {
    "a lease of a name too long": ("lease_owner = ?, lease_expires_at = 1", LONG),
    "a lease of no name": ("lease_owner = ?, lease_expires_at = 1", ""),
    "a lease of a name in two lines": ("lease_owner = ?, lease_expires_at = 1", "a\nb"),
    "a chain of a name too long": ("chain_id = ?", LONG),
    "an error too long": ("last_error = ?", LONG),
    "a result that is no JSON": ("result = ?", "{"),
    "a result too deep to read": ("result = ?", "[" * 70_000),
    "the last moment there is": ("updated_at = ?", 9e10),
    "the first moment there is": ("updated_at = ?", 0.0),
    "due since ever": ("next_attempt_at = ?", 0.0),
}
FILES = {
    "a lease of a name in no code": ("lease_owner = CAST(x'ff' AS TEXT), lease_expires_at = 1",),
    "a lease of bytes": ("lease_owner = x'ff', lease_expires_at = 1",),
    "an error in no code": ("last_error = CAST(x'ff' AS TEXT)",),
    "a chain in no code": ("chain_id = CAST(x'ff' AS TEXT)",),
    "a result in no code": ("result = CAST(x'ff' AS TEXT)",),
    "a result of bytes": ("result = x'ff'",),
}
"""What only a file takes, which has no types and no code of letters."""


@pytest.fixture
def workers(store: SQLActionStore, clock: ManualClock) -> Workers:
    return Workers(store, clock)


# --- nobody else is stopped ----------------------------------------------------------------------------------------


def test_no_row_keeps_the_workers_from_the_next_one(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers
) -> None:
    rows = {**ROWS, **(FILES if ledger.sqlite else {})}
    victims = {
        (name, state): gated(store) if state == "gated" else dispatched(store, seconds=5)
        for name in rows
        for state in ("gated", "dispatched")
    }
    clock.advance(1)
    honest, looked_for = gated(store), dispatched(store, seconds=5)
    for (name, _), victim in victims.items():
        change, *values = rows[name]
        ledger.run(f"UPDATE celery_idem_action SET {change} WHERE action_id = ?", *values, victim)
    clock.advance(6)
    workers.run()
    honest_comes_through(ledger, workers, honest)
    assert workers.looks[looked_for] == 3
    for which, victim in victims.items():
        assert workers.mutated[victim] <= (which[1] == "gated"), which
        assert state_of(ledger, victim)[0] in {"completed", "failed"}, which
        assert store.get_action(victim)["action_id"] == victim


@on_each_database
@pytest.mark.parametrize("state", ["gated", "dispatched"])
def test_however_many_have_to_be_ended_first_the_next_honest_one_is_leased(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, state: str
) -> None:
    ledger.run(filling(600, state, attempts=int(state == "dispatched"), due="1999999000 + i"))
    ledger.forge("UPDATE celery_idem_action SET payload = 'x'")
    honest = gated(store) if state == "gated" else dispatched(store, seconds=5)
    clock.advance(6)
    again, transactions = ledger.open(clock), []
    run = again._ledger.run
    again._ledger.run = lambda *work, **how: transactions.append(1) or run(*work, **how)
    leased = (
        again.lease_next(OWNER, lease_seconds=60, states=["gated"])
        if state == "gated"
        else again.lease_dispatched_observation(OWNER, lease_seconds=60)
    )
    assert len(transactions) >= 6, "none is long, and none holds many of them up"
    assert leased["action_id"] == honest
    assert ledger.count("celery_idem_action", "state = 'failed'") == 600
    assert ledger.count("celery_idem_action_dead_letter") == 600


@on_each_database
def test_a_page_of_tampered_actions_hides_none_behind_it(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock
) -> None:
    hidden = [proposed(store) for _ in range(5)]
    clock.advance(1)
    seen = [proposed(store) for _ in range(3)]
    for action_id in hidden:
        ledger.forge("UPDATE celery_idem_action SET payload = 'x' WHERE action_id = ?", action_id)
    first = store.find(limit=2)
    assert [action["action_id"] for action in first] == sorted(seen)[:2]
    assert [action["action_id"] for action in store.find(limit=2, after=sorted(seen)[1])] == sorted(seen)[2:]


@on_each_database
def test_a_receipt_or_event_of_nonsense_stops_its_own_action_at_most(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers
) -> None:
    victims = [gated(store), at(store, "accepted"), at(store, "verified"), dispatched(store)]
    for victim in victims:
        for number, text in enumerate(["[" * 70_000, "NaN", "x", '"\\ud800"', "1" * 10_000]):
            for kind in ("note", "dispatch_observation"):
                ledger.insert_receipt(victim, f"{kind}-{number}", kind, text)
            ledger.insert_event(victim, "deferred", details=text)
        dead_letter(ledger, victim)
    clock.advance(61)
    honest = gated(store)
    workers.run()
    assert sum(workers.mutated[victim] for victim in victims[1:]) == 0
    honest_comes_through(ledger, workers, honest)
    for victim in victims:
        assert state_of(ledger, victim)[0] in {"completed", "failed"}
        assert len(store.list_receipts(victim)) >= 10
        assert len(store.list_events(victim)) >= 5


# --- no mutation nobody approved, and no second one -----------------------------------------------------------------


@on_each_database
def test_a_stolen_lease_gives_its_thief_no_second_mutation(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock
) -> None:
    action_id = gated(store)
    assert lease(store, action_id) is not None
    steal = "UPDATE celery_idem_action SET lease_owner = 'mallory' WHERE action_id = ?"
    ledger.run(steal, action_id)
    with pytest.raises(ActionLeaseConflict, match="mallory holds it"):
        dispatch(store, action_id)
    dispatch(store, action_id, "mallory")  # what was approved, once: whoever holds the lease
    with pytest.raises(ActionTransitionError, match="is dispatched, and a dispatch needs one that is gated"):
        dispatch(store, action_id, "mallory")
    ledger.run("UPDATE celery_idem_action SET lease_owner = ? WHERE action_id = ?", OWNER, action_id)
    with pytest.raises(ActionTransitionError):
        dispatch(store, action_id)
    ledger.run(steal, action_id)
    with pytest.raises(ActionLeaseConflict):
        accept(store, action_id)
    clock.advance(61)
    assert lease(store, action_id)["state"] == "dispatched"


@on_each_database
def test_two_who_believe_in_one_lease_make_one_mutation(ledger: Ledger, store: SQLActionStore) -> None:
    action_id = gated(store)
    lease(store, action_id)
    dispatch(store, action_id)
    for change in ("lease_expires_at = 9e10", "next_attempt_at = 0", "updated_at = 0", "enqueued_at = NULL"):
        ledger.run(f"UPDATE celery_idem_action SET {change} WHERE action_id = ?", action_id)
        with pytest.raises(ActionTransitionError):
            dispatch(store, action_id)
    assert state_of(ledger, action_id) == ("dispatched", 1)


@on_each_database
def test_a_clock_set_back_together_with_the_row_gives_no_look_more(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers
) -> None:
    action_id = dispatched(store)
    for _ in range(2):
        _, receipt = look(store, action_id)
        clock.advance(10)
        unresolved(store, action_id, receipt["receipt_key"])
        assert lease(store, action_id) is not None
    ledger.run("UPDATE celery_idem_action SET updated_at = created_at WHERE action_id = ?", action_id)
    clock.advance(-3600)
    ended, receipt = look(store, action_id)
    assert (ended["state"], receipt) == ("failed", None)
    assert ended["result"]["reason"].startswith("journal, attempt")
    workers.run()
    assert workers.looks == workers.mutated == {}


@on_each_database
def test_nobody_without_the_key_makes_or_stretches_a_signed_approval(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock
) -> None:
    pem, public = generate_key()
    signer = ApprovalSigner.from_pem("2026", pem)
    signed_only = owner_gate_validator(grantable=False, keys=ApprovalKeys({"2026": public}))
    foreign = ApprovalSigner.from_pem("2026", generate_key()[0])

    def tried(action_id: str) -> str:
        assert lease(store, action_id) is not None
        with pytest.raises(GateRefused) as caught:
            dispatch(store, action_id, gate_validator=signed_only)
        assert state_of(ledger, action_id) == ("gated", 0)
        return caught.value.code

    unsigned = gated(store)
    assert tried(unsigned) == "unsigned"
    forged = proposed(store)
    store.gate(forged, foreign.sign(approval(store, forged)))
    assert tried(forged) == "signature"
    moved, other = proposed(store), proposed(store)
    store.gate(moved, {**signer.sign(approval(store, other)), "action_id": moved})
    assert tried(moved) == "signature"
    stretched = proposed(store)
    store.gate(stretched, signer.sign(approval(store, stretched, lifetime=10)))
    evidence("gate", expires_at_epoch=clock() + 10_000)(ledger, stretched)
    clock.advance(11)
    assert tried(stretched) == "signature"
    good = proposed(store)
    store.gate(good, signer.sign(approval(store, good)))
    assert lease(store, good) is not None
    dispatch(store, good, gate_validator=signed_only)
