"""I5 and I6: the dispatch and its contract are one, and there is one dispatch."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import Any

from celery_idem.conformance.bench import ALPHA, BETA, LIFE, Bench, case, seen_beside
from celery_idem.conformance.case import expect
from celery_idem.conformance.threads import together
from celery_idem.conformance.verbs import VERBS, ready
from celery_idem.errors import ActionStoreError, ConfigurationError
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.records import Receipt

DAY = 86_400.0

# --- I5 ---------------------------------------------------------------------------------------------------------------


@case("I5")
def dispatch_leaves_one_contract(bench: Bench) -> None:
    """A store that dispatches without a contract, or binds it to something else than the execution about to be sent."""
    action_id = bench.at(records.STATE_GATED)
    expect(not bench.receipts(action_id, records.RECOVERY_RECEIPT_KIND), "there is a contract before the dispatch")
    bench.dispatch(action_id)
    contracts = bench.receipts(action_id, records.RECOVERY_RECEIPT_KIND)
    expect(len(contracts) == 1, f"the dispatch left {len(contracts)} recovery contracts, not one")
    told = json.dumps(dict(contracts[0]), default=repr)
    expect(bench.execution(action_id) in told, "the contract does not name the execution it is for")


@case("I5")
def the_contract_is_for_one_execution(bench: Bench) -> None:
    """A store that lets one look for an execution its contract does not name."""
    action_id = bench.at(records.STATE_DISPATCHED)
    other = digest_json({"another": "execution"})
    bench.refused(
        "a look for another execution",
        action_id,
        lambda: bench.store.begin_dispatched_observation(action_id, ALPHA, other),
    )
    look = bench.look(action_id)
    key = look["receipt_key"] if look else "no-look"
    bench.refused(
        "a deferral for another execution",
        action_id,
        lambda: bench.store.defer_dispatched_observation(action_id, ALPHA, other, key, "nothing yet", 0.0),
    )


@case("I5", "tamper")
def beside_a_contract_nothing_is_dispatched(bench: Bench) -> None:
    """A store that dispatches first and writes the contract afterwards, or writes a second one.

    A contract was put into the database beforehand, under the key that the store itself would use.
    """
    pattern_id, action_id = bench.at(records.STATE_DISPATCHED), bench.at(records.STATE_GATED)
    contract = bench.receipts(pattern_id, records.RECOVERY_RECEIPT_KIND)[0]
    bench.tamper.add_receipt(_carried_over(bench, contract, action_id))
    bench.refused("a dispatch beside a contract", action_id, partial(bench.dispatch, action_id))
    state = bench.other.get_action(action_id)
    expect(state["state"] == records.STATE_GATED, f"the refused dispatch left the action {state['state']}")


def _carried_over(bench: Bench, contract: Receipt, action_id: str) -> Receipt:
    """The contract as the store would have written it for this action, in whatever form the store has."""
    whose = str(contract["action_id"])
    words = {
        whose: action_id,
        bench.execution(whose): bench.execution(action_id),
        bench.other.get_action(whose)["payload_sha256"]: bench.other.get_action(action_id)["payload_sha256"],
    }
    kept = {name: value for name, value in contract.items() if not name.endswith("_sha256")}
    text = json.dumps(kept)
    for word, other in words.items():
        text = text.replace(word, other)
    carried: dict[str, Any] = json.loads(text)
    return {**carried, "evidence_sha256": digest_json(carried["evidence"])}


@case("I5")
def state_and_contract_are_seen_together(bench: Bench) -> None:
    """A store that commits the state and the contract one after the other, so that a crash leaves one of them."""
    for _ in range(5):
        action_id = bench.at(records.STATE_GATED)
        seen_beside(partial(bench.dispatch, action_id), partial(_torn, bench, action_id))


def _torn(bench: Bench, action_id: str) -> str:
    """What is there without the other, if anything is."""
    contracts = bench.receipts(action_id, records.RECOVERY_RECEIPT_KIND)
    state = bench.other.get_action(action_id)["state"]
    if contracts and state == records.STATE_GATED:
        return "a contract, and the action still gated"
    if state == records.STATE_DISPATCHED and not bench.receipts(action_id, records.RECOVERY_RECEIPT_KIND):
        return "the action dispatched, and no contract"
    return ""


@case("I5")
def reserved_kinds_are_written_by_their_own_verbs(bench: Bench) -> None:
    """A store that lets ``accept`` write a contract, a gate or a look."""
    action_id = bench.at(records.STATE_DISPATCHED)
    accept, forged = bench.store.accept, {"forged": True}
    forging = {
        f"accept with a receipt of kind {kind}": partial(accept, action_id, ALPHA, f"forged-{kind}", kind, forged)
        for kind in sorted(records.RESERVED_RECEIPT_KINDS)
    }
    bench.all_refused(action_id, forging)


@case("I5")
def the_contract_has_bounds(bench: Bench) -> None:
    """A store that opens a contract without end, or one that allows no look at all."""
    action_id = bench.at(records.STATE_GATED)
    wrong: list[dict[str, Any]] = [
        {"observation_window_seconds": seconds} for seconds in (0.0, -1.0, 3601.0, float("nan"), float("inf"))
    ]
    wrong += [{"max_observations": looks} for looks in (0, -1, 101)]
    begin, arguments = bench.store.begin_owner_authorized_dispatch, bench.arguments(action_id)
    unbounded = {
        f"a dispatch with {given}": partial(begin, action_id, ALPHA, **{**arguments, **given}) for given in wrong
    }
    bench.all_refused(action_id, unbounded, ActionStoreError, ConfigurationError, ValueError)


# --- I6 ---------------------------------------------------------------------------------------------------------------


@case("I6")
def attempts_go_from_zero_to_one(bench: Bench) -> None:
    """A store that counts attempts elsewhere than in the dispatch, or more than one."""
    action_id = bench.proposed()
    for state in LIFE:
        if state != records.STATE_PROPOSED:
            bench.advance_to(state, action_id)
        if state == records.STATE_DISPATCHED:
            look = bench.look(action_id)
            bench.unresolved(action_id, look["receipt_key"] if look else "no-look")
            bench.hold(action_id)
            bench.lapse(action_id)
        found = bench.other.get_action(action_id)
        expected = 0 if state in {records.STATE_PROPOSED, records.STATE_GATED} else 1
        expect(found["attempt_count"] == expected, f"{state}, attempt_count is {found['attempt_count']}")
        expect(found["max_attempts"] == 1, f"{state}, max_attempts is {found['max_attempts']}")


@case("I6")
def a_second_dispatch_is_refused(bench: Bench) -> None:
    """A store that hands the permission out twice: to the same holder, or to the next one after a crash."""
    action_id = bench.at(records.STATE_GATED)
    arguments = bench.arguments(action_id)
    again = partial(bench.store.begin_owner_authorized_dispatch, action_id, **arguments)
    again(owner=ALPHA)
    bench.refused("a second dispatch by the holder", action_id, partial(again, owner=ALPHA))
    bench.lapse(action_id)
    bench.refused("a second dispatch after the lease lapsed", action_id, partial(again, owner=ALPHA))
    bench.hold(action_id, BETA)
    bench.refused("a second dispatch by the next holder", action_id, partial(again, owner=BETA))


@case("I6")
def one_of_many_dispatches_wins(bench: Bench) -> None:
    """A store that reads the state and writes it in two steps, so that two callers may both send."""
    for _ in range(3):
        action_id = bench.at(records.STATE_GATED)
        arguments = bench.arguments(action_id)
        answers = together(
            *(
                partial(store.begin_owner_authorized_dispatch, action_id, ALPHA, **arguments)
                for store in (bench.store, bench.other) * 4
            )
        )
        won = [answer for answer in answers if not isinstance(answer, Exception)]
        expect(len(won) == 1, f"{len(won)} of 8 dispatches of one action went through")
        lost = [answer for answer in answers if isinstance(answer, Exception)]
        wrong = [answer for answer in lost if not isinstance(answer, ActionStoreError)]
        expect(not wrong, f"a dispatch that came too late was told {wrong}")
        attempts = bench.other.get_action(action_id)["attempt_count"]
        expect(attempts == 1, f"8 dispatches left attempt_count at {attempts}")


@case("I6")
def a_dispatched_action_is_not_work(bench: Bench) -> None:
    """A store whose ``lease_next`` gives out what was dispatched, leased or lapsed, asked for it or not."""
    action_id = bench.at(records.STATE_DISPATCHED)
    for lapsed in (False, True):
        if lapsed:
            bench.lapse(action_id)
        before = bench.stored(action_id)
        for states in (sorted(records.LEASABLE_STATES), [records.STATE_DISPATCHED], sorted(records.ACTION_STATES)):
            for store in (bench.store, bench.other):
                try:
                    leased = store.lease_next(BETA, lease_seconds=60.0, states=states, source=bench.source)
                except (ActionStoreError, ConfigurationError, ValueError):  # it may refuse to be asked for such a state
                    leased = None
                expect(leased is None, f"lease_next(states={states}) gave out a dispatched action")
        bench.unchanged(before, action_id, "lease_next")


@case("I6")
def nothing_leads_back(bench: Bench) -> None:
    """A store in which some verb, or an end of a lease, opens a dispatched action again."""
    for verb in VERBS:
        action_id = ready(bench, records.STATE_DISPATCHED)
        before = bench.stored(action_id)
        try:
            verb.call(bench, bench.store, action_id, ALPHA)
        except ActionStoreError:
            bench.unchanged(before, action_id, f"{verb.name} was refused, and yet")
        bench.clock.advance(DAY)
        bench.store.recover_expired_leases(source=bench.source)
        found = bench.other.get_action(action_id)
        behind = {records.STATE_PROPOSED, records.STATE_GATED}
        expect(found["state"] not in behind, f"{verb.name} led a dispatched action back to {found['state']}")
        expect(found["attempt_count"] == 1, f"{verb.name} left attempt_count at {found['attempt_count']}")
    action_id = bench.at(records.STATE_DISPATCHED)
    bench.refused(
        "defer_leased of a dispatched action",
        action_id,
        lambda: bench.store.defer_leased(action_id, ALPHA, "not now", 0.0),
    )


@case("I6")
def another_gate_opens_nothing(bench: Bench) -> None:
    """A store in which a new approval revives what was dispatched."""
    action_id = bench.at(records.STATE_DISPATCHED)
    arguments = bench.arguments(action_id)
    with suppress(ActionStoreError):  # it may take no second gate
        bench.harness.gate(action_id, bench.approval(action_id), receipt_key="second-gate")
    found = bench.other.get_action(action_id)
    expect(found["state"] == records.STATE_DISPATCHED, f"a gate made a dispatched action {found['state']}")
    bench.refused(
        "a dispatch after another gate",
        action_id,
        lambda: bench.store.begin_owner_authorized_dispatch(action_id, ALPHA, **arguments),
    )


@case("I6")
def a_crash_after_the_dispatch_leaves_looking_only(bench: Bench) -> None:
    """A store that ends a dispatch whose holder died, or gives it out again, though its contract allows to look."""
    action_id = bench.at(records.STATE_DISPATCHED)
    arguments = bench.arguments(action_id)
    bench.lapse(action_id)
    found = bench.other.get_action(action_id)
    expect(found["state"] == records.STATE_DISPATCHED, f"a lapsed dispatch with a contract is {found['state']}")
    expect(found["lease_owner"] is None, "the lapsed lease of a dispatch with a contract was not released")
    leased = bench.lease(action_id, BETA)
    expect(leased is not None, "a lapsed dispatch with a contract cannot be leased for looking")
    bench.refused(
        "a dispatch on a lease for looking",
        action_id,
        lambda: bench.store.begin_owner_authorized_dispatch(action_id, BETA, **arguments),
    )
    expect(bench.look(action_id, BETA) is not None, "the lease for looking allows no look")


@case("I6", "tamper")
def without_a_contract_a_lapsed_dispatch_is_ambiguous(bench: Bench) -> None:
    """A store that gives a dispatched action out, or leaves it for ever, though no contract allows to look."""
    for reap in (True, False):
        action_id = bench.at(records.STATE_DISPATCHED)
        contract = bench.receipts(action_id, records.RECOVERY_RECEIPT_KIND)[0]
        bench.tamper.remove_receipt(action_id, contract["receipt_key"])
        bench.lapse(action_id, reap=reap)
        if not reap:
            expect(bench.lease(action_id, BETA) is None, "a dispatch without a contract was leased")
        bench.ambiguous(action_id, "after the lease of a dispatch without a contract lapsed")


@case("I6", "tamper")
def a_changed_contract_is_none(bench: Bench) -> None:
    """A store that believes a contract whose evidence is not what its digest was made of, and grants looks on it."""
    for reap in (True, False):
        action_id = _with_changed_contract(bench)
        bench.lapse(action_id, reap=reap)
        if not reap:
            expect(bench.lease(action_id, BETA) is None, "a dispatch with a changed contract was leased")
        bench.ambiguous(action_id, "after the lease of a dispatch with a changed contract lapsed")
    action_id = _with_changed_contract(bench)
    try:
        receipt = bench.look(action_id)
    except ActionStoreError:
        receipt = None
    expect(receipt is None, "a look was granted on a contract that was changed in the database")
    bench.lapse(action_id)
    bench.ambiguous(action_id, "after a look was asked for on a changed contract")


def _with_changed_contract(bench: Bench) -> str:
    action_id = bench.at(records.STATE_DISPATCHED, max_observations=1)
    contract = bench.receipts(action_id, records.RECOVERY_RECEIPT_KIND)[0]
    more = {name: 100 if value == 1 else value for name, value in contract["evidence"].items()}
    bench.tamper.change_receipt(action_id, contract["receipt_key"], evidence={**more, "more": "looks"})
    return action_id
