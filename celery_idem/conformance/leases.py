"""I3: whoever changes an action holds its live lease, alone."""

from __future__ import annotations

from functools import partial

from celery_idem.conformance.bench import ALPHA, BETA, LEASE, Bench, case
from celery_idem.conformance.case import expect
from celery_idem.conformance.threads import together
from celery_idem.conformance.verbs import belonging_to, calls, ready
from celery_idem.errors import ActionLeaseConflict
from celery_idem.governed import records

WORKABLE = (records.STATE_GATED, records.STATE_DISPATCHED, records.STATE_ACCEPTED, records.STATE_VERIFIED)


@case("I3")
def without_a_lease_every_verb_is_refused(bench: Bench) -> None:
    """A store with a verb that works on an action nobody has leased."""
    for state in WORKABLE:
        action_id = ready(bench, state)
        bench.lapse(action_id)
        free = bench.other.get_action(action_id)
        expect(free["lease_owner"] is None, f"a lapsed lease on a {state} action was not released")
        of, verbs = f"a {state} action that nobody holds", belonging_to(state)
        bench.all_refused(action_id, calls(bench, bench.store, action_id, ALPHA, of, verbs), ActionLeaseConflict)


@case("I3")
def with_a_lapsed_lease_every_verb_is_refused(bench: Bench) -> None:
    """A store with a verb that compares the owner and not the time, while nobody has reaped the lease."""
    for state in WORKABLE:
        action_id = ready(bench, state)
        bench.lapse(action_id, reap=False)
        of, verbs = f"a {state} action whose lease lapsed a second ago", belonging_to(state)
        bench.all_refused(action_id, calls(bench, bench.store, action_id, ALPHA, of, verbs), ActionLeaseConflict)


@case("I3")
def with_anothers_lease_every_verb_is_refused(bench: Bench) -> None:
    """A store with a verb that asks whether the action is leased, and not to whom."""
    for state in WORKABLE:
        action_id = ready(bench, state)
        of, verbs = f"a {state} action that another holds", belonging_to(state)
        for store in (bench.store, bench.other):
            bench.all_refused(action_id, calls(bench, store, action_id, BETA, of, verbs), ActionLeaseConflict)


@case("I3")
def a_stolen_lease_is_gone(bench: Bench) -> None:
    """A store that lets the earlier holder go on, from its own handle and its own memory, after another has leased."""
    for state in WORKABLE:
        action_id = ready(bench, state)
        bench.lapse(action_id)
        stolen = bench.lease(action_id, BETA, store=bench.other)
        expect(stolen is not None, f"a {state} action whose lease lapsed could not be leased again")
        of, verbs = f"a {state} action that another has leased since", belonging_to(state)
        bench.all_refused(action_id, calls(bench, bench.store, action_id, ALPHA, of, verbs), ActionLeaseConflict)


@case("I3")
def a_live_lease_is_not_given_away(bench: Bench) -> None:
    """A store that leases, or reaps, what another holds."""
    for state in WORKABLE:
        action_id = bench.at(state)
        bench.clock.advance(LEASE - 1.0)
        before = bench.stored(action_id)
        bench.other.recover_expired_leases(source=bench.source)
        for owner in (BETA, ALPHA):
            leased = bench.lease(action_id, owner, store=bench.other)
            expect(leased is None, f"a {state} action that {ALPHA} holds was leased to {owner}")
        bench.unchanged(before, action_id, "an attempt to lease it")
        bench.clock.advance(2.0)
        bench.other.recover_expired_leases(source=bench.source)
        leased = bench.lease(action_id, BETA, store=bench.other)
        expect(leased is not None, f"a {state} action whose lease lapsed could not be leased again")
        expect(leased is not None and leased["lease_owner"] == BETA, "the lease does not name its new owner")


@case("I3")
def one_of_many_claimants_gets_the_lease(bench: Bench) -> None:
    """A store that looks for a free action and takes it in two steps."""
    for state in (records.STATE_GATED, records.STATE_DISPATCHED):
        for _ in range(3):
            action_id = bench.at(state)
            bench.lapse(action_id)
            claims = [
                partial(bench.lease, action_id, f"claimant-{number}", store=(bench.store, bench.other)[number % 2])
                for number in range(8)
            ]
            leased = [action for action in together(*claims) if action is not None]
            expect(all(not isinstance(action, Exception) for action in leased), f"a claimant was told {leased}")
            expect(len(leased) == 1, f"{len(leased)} of 8 claimants were given one {state} action")
            stored = bench.other.get_action(action_id)["lease_owner"]
            expect(stored == leased[0]["lease_owner"], f"the lease is {stored}'s, and another was given it")


@case("I3")
def many_claimants_never_share(bench: Bench) -> None:
    """A store that gives one action to two claimants who ask for any."""
    wanted = {bench.at(records.STATE_GATED) for _ in range(6)}
    for action_id in wanted:
        bench.store.defer_leased(action_id, ALPHA, "free again", 0.0)

    def work(number: int) -> list[str]:
        store, found = (bench.store, bench.other)[number % 2], []
        states = [records.STATE_GATED]
        while action := store.lease_next(f"w{number}", lease_seconds=LEASE, states=states, source=bench.source):
            found.append(action["action_id"])
        return found

    answers = together(*(partial(work, number) for number in range(4)))
    expect(not any(isinstance(answer, Exception) for answer in answers), f"a claimant was told {answers}")
    given = sorted(action_id for answer in answers for action_id in answer)
    expect(
        given == sorted(wanted), f"of {len(wanted)} actions {len(given)} were given out, {len(set(given))} different"
    )
