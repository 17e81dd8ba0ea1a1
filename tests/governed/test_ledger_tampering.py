"""Somebody writes into the ledger's tables: with the password alone, or with the right to take the triggers away.

Every action tampered with is refused or ended, and never gets another attempt; an honest one that waits behind it comes
through, and nothing is raised that is no refusal.
"""

from __future__ import annotations

import json

import pytest

from celery_idem.errors import ActionStoreError
from celery_idem.governed import (
    SQLActionStore,
)
from celery_idem.governed.canonical import digest_of
from celery_idem.testing import ManualClock
from tests.governed.attacks import (
    BOTH,
    DEEP,
    EVENTS,
    OTHER,
    PAYLOAD,
    RECEIPTS,
    Attack,
    Workers,
    action,
    both,
    contract_inserted,
    copied,
    dead_letter,
    deleted,
    event,
    evidence,
    forged_action,
    honest_comes_through,
    inserted_event,
    look_inserted,
    receipt,
    state_of,
    unreadable,
)
from tests.governed.ledgers import (
    OWNER,
    REFUSED,
    Ledger,
    at,
    dispatched,
    gated,
    happened,
    lease,
    letters,
    look,
    on_each_database,
    proposed,
    unresolved,
    verify,
)

pytest_plugins = ("tests.governed.ledgers",)


@pytest.fixture
def workers(store: SQLActionStore, clock: ManualClock) -> Workers:
    return Workers(store, clock)


# --- before the mutation: it never happens ------------------------------------------------------------------------

BEFORE: dict[str, tuple[Attack, str]] = {
    "another payload": (PAYLOAD, "payload"),
    "another payload, its dead letter there": (both(dead_letter, PAYLOAD), "payload"),
    "a payload that is no JSON": (forged_action("payload = 'x'"), "payload"),
    "another digest": (forged_action("payload_sha256 = ?", "0" * 64), "payload"),
    "payload and digest": (BOTH, "action_digest"),
    "payload and digest, too deep": (
        forged_action("payload = ?, payload_sha256 = ?", DEEP, digest_of(DEEP)),
        "payload",
    ),
    "another action's approval": (evidence("gate", action_id="other"), "action_id"),
    "an approval of another payload": (evidence("gate", action_digest=digest_of(OTHER)), "action_digest"),
    "a longer approval, its digest as it was": (evidence("gate", False, expires_at_epoch=9e9), "evidence_digest"),
    "an approval that is no JSON": (unreadable("gate", "yes"), "evidence"),
    "an approval too deep to read": (unreadable("gate", DEEP), "evidence"),
    "an approval with a number that is none": (unreadable("gate", '{"revision":NaN}'), "evidence"),
    "a revoked approval": (receipt("gate", "status = 'revoked'"), "status"),
    "an approval under another id": (receipt("gate", "external_id = 'other'"), "external_id"),
    "no approval": (deleted(RECEIPTS, "kind = 'gate'"), "gate_count"),
    "no receipt of that kind": (receipt("gate", "kind = 'note'"), "gate_count"),
    "a second approval": (copied("gate"), "gate_count"),
    "a contract before the dispatch": (contract_inserted, "contract_exists"),
    "an event of a dispatch": (inserted_event("dispatched"), "contract_exists"),
    "accepted by hand": (forged_action("state = 'accepted', attempt_count = 1"), "no receipt 'acceptance'"),
}


def test_what_was_tampered_with_before_its_mutation_never_has_one(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers
) -> None:
    victims = {name: gated(store) for name in BEFORE}
    clock.advance(1)
    honest = gated(store)
    for name, (attack, _) in BEFORE.items():
        attack(ledger, victims[name])
    workers.run()
    assert workers.mutated == {honest: 1}
    assert workers.looks == {}
    honest_comes_through(ledger, workers, honest)
    for name, (_, why) in BEFORE.items():
        victim = victims[name]
        ((last_error,),) = ledger.run("SELECT last_error FROM celery_idem_action WHERE action_id = ?", victim)
        assert any(why in told for told in [*workers.refusals[victim], last_error]), name
        assert state_of(ledger, victim)[0] == "failed", name
        assert len(letters(store, victim)) == 1, name


@on_each_database
def test_what_nobody_approved_is_not_dispatched_though_it_is_made_to_look_gated(
    ledger: Ledger, store: SQLActionStore, workers: Workers
) -> None:
    action_id = proposed(store)
    action("state = 'gated'")(ledger, action_id)
    workers.run()
    assert workers.mutated == {}
    assert any("gate_count" in told for told in workers.refusals[action_id])
    assert state_of(ledger, action_id) == ("failed", 0)


@on_each_database
@pytest.mark.parametrize("with_contract", [False, True])
def test_what_is_made_to_look_dispatched_was_perhaps_and_ends_ambiguous(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers, with_contract: bool
) -> None:
    victim = gated(store)
    clock.advance(1)
    honest = gated(store)
    action("state = 'dispatched', attempt_count = 1")(ledger, victim)
    if with_contract:
        contract_inserted(ledger, victim)
    workers.run()
    assert workers.mutated[victim] == workers.looks[victim] == 0
    assert state_of(ledger, victim) == ("failed", 1)
    assert happened(store, victim)[-1] == "ambiguous"
    honest_comes_through(ledger, workers, honest)


# --- after the mutation: it is looked for or not, and never made again ------------------------------------------------

CONTRACT: dict[str, Attack] = {
    "another payload": PAYLOAD,
    "another payload, its dead letter there": both(dead_letter, PAYLOAD),
    "another digest": forged_action("payload_sha256 = ?", "0" * 64),
    "payload and digest": BOTH,
    "a later deadline": evidence("dispatch_recovery", observation_deadline=2e9 + 3599),
    "a later deadline, its digest as it was": evidence("dispatch_recovery", False, observation_deadline=2e9 + 3599),
    "a deadline without end": evidence("dispatch_recovery", observation_deadline=9e9),
    "a larger budget": evidence("dispatch_recovery", max_observations=100),
    "a larger budget, its digest as it was": evidence("dispatch_recovery", False, max_observations=100),
    "a budget that is no number": evidence("dispatch_recovery", max_observations=True),
    "another execution": evidence("dispatch_recovery", execution_digest="0" * 64),
    "another action's contract": evidence("dispatch_recovery", action_id="other"),
    "another payload's contract": evidence("dispatch_recovery", action_digest="0" * 64),
    "a contract of another kind": evidence("dispatch_recovery", schema="celery_idem.dispatch_recovery.v2"),
    "a contract that allows more": evidence("dispatch_recovery", may_dispatch=True),
    "a contract that is no JSON": unreadable("dispatch_recovery", "yes"),
    "a contract that is a list": unreadable("dispatch_recovery", "[]"),
    "a contract too deep to read": unreadable("dispatch_recovery", DEEP),
    "a contract with another status": receipt("dispatch_recovery", "status = 'execute'"),
    "a contract under another key": receipt("dispatch_recovery", "receipt_key = 'dispatch-recovery:0'"),
    "a contract of another time": receipt("dispatch_recovery", "created_at = created_at + 1"),
    "no contract": deleted(RECEIPTS, "kind = 'dispatch_recovery'"),
    "a second contract": copied("dispatch_recovery"),
    "no event of the dispatch": deleted(EVENTS, "event_type = 'dispatched'"),
    "a second event of the dispatch": inserted_event("dispatched"),
    "an event that says nothing": event("details = '{}'", "dispatched"),
    "an event that is no JSON": event("details = 'x'", "dispatched"),
    "an event that is a list": event("details = '[]'", "dispatched"),
    "an event too deep to read": event(f"details = '{DEEP}'", "dispatched"),
}
for name, number in {"no number": "NaN", "no end": "Infinity", "no place for it": "1" + "0" * 400}.items():
    for field in ("issued_at", "observation_deadline", "max_observations"):
        CONTRACT[f"a contract whose {field} has {name}"] = both(
            deleted(RECEIPTS, "kind = 'dispatch_recovery'"),
            lambda ledger, action_id, field=field, number=number: contract_inserted(
                ledger, action_id, **{field: float(number) if "0" not in number else int(number)}
            ),
        )

JOURNAL: dict[str, Attack] = {
    "the last look taken out": deleted(RECEIPTS, "receipt_key LIKE '%:002'"),
    "the first look taken out": deleted(RECEIPTS, "receipt_key LIKE '%:001'"),
    "every look taken out": deleted(RECEIPTS, "kind = 'dispatch_observation'"),
    "the events of the looks taken out": deleted(EVENTS, "event_type = 'observing'"),
    "an event of a look too many": inserted_event("observing"),
    "a look nobody made": look_inserted(3),
    "a look that was made before": look_inserted(2 + 2, told=True),
    "a look of no time": look_inserted(3, told=True, started_at=float("nan")),
    "a look of no time known": look_inserted(3, told=True, started_at=10**400),
    "a look of tomorrow": look_inserted(3, told=True, started_at=2e9 + 86_400),
    "a look of another action": look_inserted(3, told=True, action_id="other"),
    "a look of another number": evidence("dispatch_observation", key="%:002", attempt=1),
    "an earlier look": evidence("dispatch_observation", key="%:002", started_at=2e9 + 1),
    "an earlier look, its digest as it was": evidence("dispatch_observation", False, "%:002", started_at=2e9 + 1),
    "looks that ended": receipt("dispatch_observation", "status = 'completed'"),
    "looks for another execution": receipt("dispatch_observation", "external_id = '0'"),
    "a look that is no JSON": unreadable("dispatch_observation", "yes"),
    "a look too deep to read": unreadable("dispatch_observation", DEEP),
}
AFTER = {f"dispatched: {name}": (0, attack) for name, attack in CONTRACT.items()}
AFTER |= {f"looked for: {name}": (2, attack) for name, attack in JOURNAL.items()}
AFTER |= {f"looked for: {name}": (2, CONTRACT[name]) for name in ("another payload", "a larger budget", "no contract")}


@on_each_database
def test_what_was_tampered_with_after_its_mutation_ends_ambiguous_without_another_look(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers
) -> None:
    victims = {name: dispatched(store, seconds=30) for name in AFTER}
    for _ in range(2):
        looked_for = {name: look(store, victims[name])[1] for name, (looks, _) in AFTER.items() if looks}
        clock.advance(5)
        for name, made in looked_for.items():
            unresolved(store, victims[name], made["receipt_key"])
            assert lease(store, victims[name], seconds=20) is not None
    honest = dispatched(store, seconds=30)
    for name, (_, attack) in AFTER.items():
        attack(ledger, victims[name])
    clock.advance(31)
    workers.run()
    assert workers.mutated == {}
    assert workers.looks == {honest: 3}
    buried = [letter["action_id"] for letter in store.list_dead_letters(limit=1000)]
    for name, victim in victims.items():
        assert state_of(ledger, victim) == ("failed", 1), name
        assert happened(store, victim)[-1] == "ambiguous", name
        assert buried.count(victim) == 1, name
        ((result,),) = ledger.run("SELECT result FROM celery_idem_action WHERE action_id = ?", victim)
        assert json.loads(result)["status"] == "ambiguous", name


@on_each_database
def test_the_holder_of_a_lease_gets_no_look_more_out_of_a_journal_tampered_with(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock
) -> None:
    for name, attack in JOURNAL.items():
        for verb in ("look", "defer"):
            victim = dispatched(store)
            for _ in range(2):
                _, made = look(store, victim)
                clock.advance(5)
            attack(ledger, victim)
            if verb == "look":
                ended, another = look(store, victim)
                assert another is None, name
            else:
                ended = unresolved(store, victim, made["receipt_key"])
            assert (ended["state"], ended["attempt_count"], ended["lease_owner"]) == ("failed", 1, None), name
            assert happened(store, victim)[-1] == "ambiguous", name


@on_each_database
def test_a_look_taken_out_with_its_event_is_made_again_and_no_more(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers
) -> None:
    victim = dispatched(store)
    _, receipt = look(store, victim)
    unresolved(store, victim, receipt["receipt_key"])
    deleted(RECEIPTS, "kind = 'dispatch_observation'")(ledger, victim)
    deleted(EVENTS, "event_type = 'observing'")(ledger, victim)
    workers.run()
    assert workers.looks[victim] == 3
    assert workers.mutated == {}
    assert state_of(ledger, victim) == ("failed", 1)


# --- an attempt given back -------------------------------------------------------------------------------------------

BACK = forged_action("state = 'gated', attempt_count = 0, lease_owner = NULL, lease_expires_at = NULL")
GIVEN_BACK: dict[str, Attack] = {
    "the state": BACK,
    "the state, and no contract": both(BACK, deleted(RECEIPTS, "kind = 'dispatch_recovery'")),
    "the state, and no event of the dispatch": both(BACK, deleted(EVENTS, "event_type = 'dispatched'")),
}


@on_each_database
def test_an_attempt_given_back_is_not_made_again(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers
) -> None:
    states = ("dispatched", "accepted", "verified", "completed")
    victims = {(name, state): at(store, state) for name in GIVEN_BACK for state in states}
    for name in GIVEN_BACK:
        victims[name, "failed"] = at(store, "dispatched")
        store.fail_attempt(victims[name, "failed"], OWNER, "no luck", retryable=True)
    clock.advance(1)
    honest = gated(store)
    for (name, _), victim in victims.items():
        GIVEN_BACK[name](ledger, victim)
    workers.run()
    assert workers.mutated == {honest: 1}
    honest_comes_through(ledger, workers, honest)
    for which, victim in victims.items():
        assert any("contract_exists" in told for told in workers.refusals[victim]), which
        assert state_of(ledger, victim) == ("failed", 0), which


@on_each_database
def test_the_count_alone_is_given_back_to_nobody_even_without_triggers(ledger: Ledger, store: SQLActionStore) -> None:
    for state in ("dispatched", "accepted", "verified", "completed"):
        with ledger.without_triggers(), pytest.raises(REFUSED):
            ledger.run("UPDATE celery_idem_action SET attempt_count = 0 WHERE action_id = ?", at(store, state))


# --- what witnesses it -----------------------------------------------------------------------------------------------


@on_each_database
@pytest.mark.parametrize(
    "attack",
    [
        evidence("acceptance", False, status="rejected"),
        receipt("acceptance", "evidence = 'x'"),
        receipt("acceptance", "evidence = ?", DEEP),
        deleted(RECEIPTS, "kind = 'acceptance'"),
    ],
)
def test_a_witness_that_was_tampered_with_verifies_nothing(
    ledger: Ledger, store: SQLActionStore, workers: Workers, attack: Attack
) -> None:
    action_id = at(store, "accepted")
    attack(ledger, action_id)
    with pytest.raises(ActionStoreError, match="'acceptance'"):
        verify(store, action_id)
    assert state_of(ledger, action_id) == ("accepted", 1)


@on_each_database
@pytest.mark.parametrize("state", ["accepted", "verified"])
def test_a_payload_changed_after_acceptance_ends_the_action(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers, state: str
) -> None:
    action_id = at(store, state)
    PAYLOAD(ledger, action_id)
    for verb in (lambda: verify(store, action_id), lambda: store.complete(action_id, OWNER, 1)):
        with pytest.raises(ActionStoreError):
            verb()
    clock.advance(61)
    workers.run()
    assert workers.mutated == {}
    assert state_of(ledger, action_id) == ("failed", 1)
    assert len(letters(store, action_id)) == 1


@on_each_database
@pytest.mark.parametrize("state", ["completed", "failed"])
def test_what_has_ended_is_disturbed_by_nothing_and_disturbs_nobody(
    ledger: Ledger, store: SQLActionStore, clock: ManualClock, workers: Workers, state: str
) -> None:
    ended, honest = at(store, state), dispatched(store, seconds=30)
    forged_action("payload = 'x', lease_owner = 'mallory', lease_expires_at = 1")(ledger, ended)
    before = state_of(ledger, ended)
    clock.advance(31)
    workers.run()
    assert state_of(ledger, ended) == before
    assert workers.mutated == {}
    assert workers.looks == {honest: 3}
