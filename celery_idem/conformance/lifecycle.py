"""I8, I9 and I10: one way through life, witnessed, and an end that everybody can see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idem.conformance.bench import ALPHA, BETA, LEASE, LEASED, LIFE, Bench, case, seen_beside
from celery_idem.conformance.case import expect
from celery_idem.conformance.verbs import VERBS, calls
from celery_idem.errors import ActionTransitionError
from celery_idem.governed import records

DAY = 86_400.0
OF_I6 = {
    (records.STATE_DISPATCHED, "begin_owner_authorized_dispatch"),
    (records.STATE_DISPATCHED, "defer_leased"),
}
"""Wrong states that are more than that: a second mutation. I6 has cases of its own for them."""

# --- I8 ---------------------------------------------------------------------------------------------------------------


@case("I8")
def every_verb_is_refused_in_every_other_state(bench: Bench) -> None:
    """A store with a verb that does not look at the state, or looks before it holds the action."""
    for state in (*LIFE, records.STATE_FAILED):
        action_id = bench.at(state)
        wrong = [verb for verb in VERBS if state not in verb.states and (state, verb.name) not in OF_I6]
        errors = [ActionTransitionError] if state in LEASED else []
        for store in (bench.store, bench.other):
            bench.all_refused(action_id, calls(bench, store, action_id, ALPHA, f"a {state} action", wrong), *errors)


@case("I8")
def the_way_is_the_one_way(bench: Bench) -> None:
    """A store that skips a state, or reaches another than the verb leads to."""
    action_id = bench.proposed()
    for state in LIFE[1:]:
        bench.advance_to(state, action_id)
        found = bench.other.get_action(action_id)
        expect(found["state"] == state, f"the step to {state} made the action {found['state']}")
        ended = state in records.TERMINAL_STATES
        expect((found["terminal_at"] is not None) == ended, f"{state}, terminal_at is {found['terminal_at']}")
    expect(bench.other.get_action(action_id)["lease_owner"] is None, "a completed action is leased")
    expect(bench.other.get_action(action_id)["result"] == {"ok": True}, "a completed action lost its result")


@case("I8")
def an_end_is_final(bench: Bench) -> None:
    """A store in which a late caller, a sweep, another approval or mere time moves what has ended."""
    for state in sorted(records.TERMINAL_STATES):
        action_id = bench.at(state)
        before = bench.stored(action_id)
        late: dict[str, Callable[[], object]] = {}
        for owner in (ALPHA, BETA):
            late |= calls(bench, bench.store, action_id, owner, f"a {state} action by {owner}", VERBS)
        gate = partial(bench.harness.gate, action_id, bench.approval(action_id), receipt_key="late-gate")
        bench.all_refused(action_id, {**late, f"a gate for a {state} action": gate})
        for seconds in (0.0, DAY):
            bench.clock.advance(seconds)
            bench.store.recover_expired_leases(source=bench.source)
            expect(bench.lease_any(action_id) is None, f"a {state} action was leased")
        bench.unchanged(before, action_id, f"asking for a {state} action")


@case("I8")
def a_verb_of_no_action_is_refused(bench: Bench) -> None:
    """A store that makes an action up where there is none."""
    there, missing = bench.at(records.STATE_GATED), f"{bench.source}/none"
    none: dict[str, Callable[[], object]] = {
        "get_action": lambda: bench.store.get_action(missing),
        "complete": lambda: bench.store.complete(missing, ALPHA, None),
        "fail_attempt": lambda: bench.store.fail_attempt(missing, ALPHA, "no", False),
        "defer_leased": lambda: bench.store.defer_leased(missing, ALPHA, "no", 0.0),
    }
    bench.all_refused(there, {f"{name} of an action that is not there": call for name, call in none.items()})


@case("I8", "list_events")
def every_transition_appends_an_event(bench: Bench) -> None:
    """A store that changes a state without a trace, or rewrites the trace."""
    action_id = bench.proposed()
    history = bench.events(action_id)
    state = records.STATE_PROPOSED
    for following in LIFE[1:]:
        bench.clock.advance(5.0)
        bench.advance_to(following, action_id)
        history = _appended(bench, action_id, history, state, following)
        state = following
    for state in LEASED:
        action_id = bench.at(state)
        history = bench.events(action_id)
        bench.store.fail_attempt(action_id, ALPHA, "no", False)
        _appended(bench, action_id, history, state, records.STATE_FAILED)


@case("I8", "list_events")
def an_ambiguous_end_is_an_event_too(bench: Bench) -> None:
    """A store whose own decisions, unlike those of its callers, leave no trace."""
    action_id = bench.at(records.STATE_DISPATCHED, observation_window_seconds=LEASE / 2, max_observations=1)
    bench.look(action_id)
    history = bench.events(action_id)
    bench.clock.advance(LEASE + 1.0)
    bench.store.recover_expired_leases(source=bench.source)
    _appended(bench, action_id, history, records.STATE_DISPATCHED, records.STATE_FAILED)


def _appended(bench: Bench, action_id: str, history: list[Any], start: str, end: str) -> list[Any]:
    now = bench.events(action_id)
    expect(now[: len(history)] == history, f"on the way to {end} an earlier event changed: {history} became {now}")
    added = [(event["from_state"], event["to_state"]) for event in now[len(history) :]]
    moved = [(one, other) for one, other in added if one != other]
    expect(moved == [(start, end)], f"the transition {start} -> {end} left these events: {added}")
    return now


# --- I9 ---------------------------------------------------------------------------------------------------------------


@case("I9")
def a_missing_witness_is_no_witness(bench: Bench) -> None:
    """A store that verifies on receipts which are not there, or on one of two."""
    action_id = bench.at(records.STATE_ACCEPTED)
    missing: tuple[Any, ...] = (["nothing"], ["acceptance", "nothing"], ["verification"], [""])
    bench.all_refused(action_id, {f"verify on {keys}": partial(_verify, bench, action_id, keys) for keys in missing})
    _verify(bench, action_id, ["owner-gate", "acceptance"])
    expect(bench.other.get_action(action_id)["state"] == records.STATE_VERIFIED, "verify on its witnesses did nothing")


@case("I9")
def no_witness_at_all_is_refused(bench: Bench) -> None:
    """A store that takes "every one of none" for true."""
    action_id = bench.at(records.STATE_ACCEPTED)
    empty: tuple[Any, ...] = ([], ())
    bench.all_refused(action_id, {f"verify on {keys}": partial(_verify, bench, action_id, keys) for keys in empty})


@case("I9")
def a_witness_of_another_action_does_not_count(bench: Bench) -> None:
    """A store that looks for the key among all receipts."""
    action_id, other_id = bench.at(records.STATE_ACCEPTED), bench.at(records.STATE_DISPATCHED)
    bench.store.accept(other_id, ALPHA, "their-acceptance", "acceptance", {"status": "completed"})
    bench.refused(
        "verify on another action's receipt", action_id, partial(_verify, bench, action_id, ["their-acceptance"])
    )


def _verify(bench: Bench, action_id: str, keys: Any) -> object:
    return bench.store.verify(action_id, ALPHA, "verification", {"seen": True}, qualifying_receipt_keys=keys)


# --- I10 --------------------------------------------------------------------------------------------------------------


@case("I10")
def failure_tells_why_and_frees_the_action(bench: Bench) -> None:
    """A store that fails an action and keeps its lease, or loses the error."""
    for state in LEASED:
        for retryable in (True, False):
            action_id = bench.at(state)
            attempts = bench.other.get_action(action_id)["attempt_count"]
            bench.store.fail_attempt(action_id, ALPHA, "the provider is bankrupt", retryable)
            found = bench.other.get_action(action_id)
            what = f"after fail_attempt(retryable={retryable}) of a {state} action"
            expect(found["state"] == records.STATE_FAILED, f"{what} it is {found['state']}")
            expect(
                "the provider is bankrupt" in str(found["last_error"]), f"{what} last_error is {found['last_error']!r}"
            )
            expect(found["lease_owner"] is None, f"{what} it is leased to {found['lease_owner']}")
            expect(found["lease_expires_at"] is None, f"{what} its lease lasts until {found['lease_expires_at']}")
            expect(found["terminal_at"] is not None, f"{what} terminal_at is not set")
            expect(found["attempt_count"] == attempts, f"{what} attempt_count went to {found['attempt_count']}")


@case("I10")
def retryable_opens_nothing(bench: Bench) -> None:
    """A store that puts a "retryable" failure back to work, at once or some day."""
    for state in LEASED:
        action_id = bench.at(state)
        arguments = bench.arguments(action_id)
        bench.store.fail_attempt(action_id, ALPHA, "try again", True)
        for seconds in (0.0, 60.0, DAY, 30 * DAY):
            bench.clock.advance(seconds)
            bench.store.recover_expired_leases(source=bench.source)
            expect(bench.lease_any(action_id) is None, f"a {state} action that failed was leased again")
        found = bench.other.get_action(action_id)["state"]
        expect(found == records.STATE_FAILED, f"a {state} action that failed became {found}")
        bench.refused(
            "a dispatch of an action that failed",
            action_id,
            partial(bench.store.begin_owner_authorized_dispatch, action_id, ALPHA, **arguments),
        )


@case("I10", "list_dead_letters")
def failure_leaves_a_dead_letter(bench: Bench) -> None:
    """A store that fails an action and tells nobody, or tells it in a transaction of its own."""
    for state in LEASED:
        action_id = bench.at(state)
        expect(not bench.dead_letters(action_id), f"a {state} action has a dead letter")
        bench.store.fail_attempt(action_id, ALPHA, "the provider is bankrupt", True)
        letters = bench.dead_letters(action_id)
        expect(len(letters) == 1, f"after fail_attempt of a {state} action there are {len(letters)} dead letters")
        expect("the provider is bankrupt" in letters[0]["reason"], f"the dead letter says {letters[0]['reason']!r}")


@case("I10", "list_dead_letters")
def failure_and_dead_letter_are_seen_together(bench: Bench) -> None:
    """A store that commits the failure and its dead letter one after the other, so that a crash leaves one of them."""
    for _ in range(3):
        action_id = bench.at(records.STATE_GATED)
        fail = partial(bench.store.fail_attempt, action_id, ALPHA, "the provider is bankrupt", False)
        seen_beside(fail, partial(_torn, bench, action_id))


def _torn(bench: Bench, action_id: str) -> str:
    """What is there without the other, if anything is."""
    letters, state = bench.dead_letters(action_id), bench.other.get_action(action_id)["state"]
    if letters and state == records.STATE_GATED:
        return "a dead letter, and the action still gated"
    if state == records.STATE_FAILED and not bench.dead_letters(action_id):
        return "the action failed, and no dead letter"
    return ""
