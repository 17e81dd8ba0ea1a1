"""Fifty callers at the same instant, from five processes of ten threads; in memory, from fifty threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from celery_idem.core.records import Answer, Decision, Ended, Release, Renewal, State
from celery_idem.stores.base import Store
from tests.contract.backends import Backend
from tests.contract.racing import (
    Call,
    Racers,
    Raised,
    Verb,
    claim_and_finish,
    claim_once,
    complete_or_steal,
    fork_in_use,
    renew_or_claim,
    run_verb,
    threads_of,
)
from tests.contract.shorthand import LEASE, complete, stored, take
from tests.support.clock import ManualClock
from tests.support.operations import key_for, op, result

CALLERS = 50
ROUNDS = 8

Race = Callable[[Verb, Sequence[Call]], list[Any]]


@pytest.fixture(scope="session")
def racers() -> Iterator[Racers]:
    """The other processes, started at first use."""
    pool = Racers()
    yield pool
    pool.close()


@pytest.fixture
def race(request: pytest.FixtureRequest, backend: Backend, store: Store, clock: ManualClock) -> Race:
    """Start calls together, wherever the store can be reached from, at the time ``clock`` shows."""

    def run(verb: Verb, calls: Sequence[Call]) -> list[Any]:
        if backend.name == "memory":
            answers = threads_of(store)(verb, calls)
        else:
            racers: Racers = request.getfixturevalue("racers")
            answers = racers.run(backend.url, verb, calls, now=clock.now)
        raised = [answer.trace for answer in answers if isinstance(answer, Raised)]
        assert not raised, f"{len(raised)} of {len(calls)} raised, the first:\n{raised[0]}"
        return answers

    return run


def tally(decisions: Sequence[Decision]) -> Counter[Answer]:
    return Counter(decision.answer for decision in decisions)


@pytest.mark.guarantee("race")
def test_race_fifty_callers_of_one_key_and_one_acquires(race: Race, store: Store) -> None:
    decisions = race(claim_once, [(op(message=f"m{n}"),) for n in range(CALLERS)])
    assert tally(decisions) == {Answer.ACQUIRED: 1, Answer.HELD: CALLERS - 1}
    winner = next(decision.claim for decision in decisions if decision.claim is not None)
    record = stored(store)
    assert (record.token, record.fence, record.attempts) == (winner.token, winner.fence, 1)
    for decision in decisions:
        assert decision.answer is Answer.ACQUIRED or decision.held_by is not None


@pytest.mark.guarantee("race")
def test_race_the_winner_completes_and_forty_nine_replay(race: Race) -> None:
    calls = [(op(message=f"m{n}"), result(f"value {n}".encode())) for n in range(CALLERS)]
    answers = race(claim_and_finish, calls)
    assert [won for won, _ in answers].count(True) == 1
    assert len({outcome for _, outcome in answers}) == 1


@pytest.mark.guarantee("race")
def test_race_for_a_lapsed_lease_has_one_winner(race: Race, store: Store, clock: ManualClock) -> None:
    first = take(store)
    clock.advance(LEASE)
    decisions = race(claim_once, [(op(message=f"m{n}"),) for n in range(CALLERS)])
    assert tally(decisions) == {Answer.RECLAIMED: 1, Answer.HELD: CALLERS - 1}
    record = stored(store)
    assert record.attempts == 2
    assert record.fence > first.fence
    assert store.complete(first, result()) is Ended.LOST


@pytest.mark.guarantee("race")
def test_race_of_two_who_saw_the_same_death_has_one_winner(race: Race, store: Store) -> None:
    """The verdict was taken outside the store: whoever comes second must not steal from whoever came first."""
    dead = take(store)
    decisions = race(claim_once, [(op(message=f"m{n}"), dead.fence) for n in range(CALLERS)])
    assert tally(decisions) == {Answer.RECLAIMED: 1, Answer.HELD: CALLERS - 1}
    assert stored(store).attempts == 2


@pytest.mark.guarantee("race")
def test_race_for_the_right_to_continue_has_one_holder(race: Race, store: Store, clock: ManualClock) -> None:
    complete(store, op(continues=True))
    clock.advance(LEASE)
    decisions = race(claim_once, [(op(continues=True),) for _ in range(CALLERS)])
    assert tally(decisions) == {Answer.COMPLETED: 1, Answer.HELD: CALLERS - 1}
    holder = next(decision.claim for decision in decisions if decision.claim is not None)
    continuing = stored(store).note("M").continuing
    assert continuing is not None
    assert (continuing.token, continuing.fence) == (holder.token, holder.fence)


@pytest.mark.guarantee("race")
def test_race_on_ten_keys_has_one_winner_each(race: Race) -> None:
    calls = [(op(f"k{n % 10}", f"m{n}"),) for n in range(CALLERS)]
    decisions = race(claim_once, calls)
    winners = Counter(decision.claim.key for decision in decisions if decision.claim is not None)
    assert winners == {key_for(f"k{n}"): 1 for n in range(10)}


@pytest.mark.guarantee("race")
def test_race_for_a_released_key_has_one_winner(race: Race, store: Store) -> None:
    store.release(take(store), Release.INTERRUPTED)
    decisions = race(claim_once, [(op(message=f"m{n}"),) for n in range(CALLERS)])
    assert tally(decisions) == {Answer.RECLAIMED: 1, Answer.HELD: CALLERS - 1}


@pytest.mark.guarantee("race")
def test_race_of_one_token_with_itself_is_one_claim(race: Race, store: Store) -> None:
    """A client that repeats a request it believes lost."""
    operation = op()
    decisions = race(claim_once, [(operation,)] * CALLERS)
    assert tally(decisions) == {Answer.ACQUIRED: CALLERS}
    assert len({decision.claim.fence for decision in decisions if decision.claim is not None}) == 1
    assert stored(store).attempts == 1


@pytest.mark.guarantee("race")
def test_race_between_renewing_and_reclaiming_a_lapsed_lease(race: Race, store: Store, clock: ManualClock) -> None:
    claims = [take(store, op(f"k{n}")) for n in range(ROUNDS)]
    clock.advance(LEASE)
    calls: list[Call] = []
    for number, claim in enumerate(claims):
        calls += [("renew", [claim]), ("claim", op(f"k{number}", "N"))]
    answers = race(renew_or_claim, calls)
    for claim, renewal, decision in zip(claims, answers[::2], answers[1::2], strict=True):
        # A renewal that found the row in somebody's hand may answer BUSY, and knows only next time.
        renewed = renewal[claim.token]
        if decision.answer is Answer.RECLAIMED:
            assert renewed is not Renewal.RENEWED
            assert store.renew([claim]) == {claim.token: Renewal.LOST}
        else:
            assert decision.answer is Answer.HELD
            assert store.renew([claim]) == {claim.token: Renewal.RENEWED}


@pytest.mark.guarantee("race")
def test_race_between_completing_and_a_false_death(race: Race, store: Store) -> None:
    claims = [take(store, op(f"k{n}")) for n in range(ROUNDS)]
    calls: list[Call] = []
    for number, claim in enumerate(claims):
        calls += [(claim, None), (claim, op(f"k{number}", "N"))]
    answers = race(complete_or_steal, calls)
    for claim, ended, decision in zip(claims, answers[::2], answers[1::2], strict=True):
        record = store.get(claim.key)
        assert record is not None
        if ended is Ended.COMPLETED:
            assert decision.answer is not Answer.RECLAIMED
            assert (record.state, record.token) == (State.COMPLETED, claim.token)
        else:
            assert decision.answer is Answer.RECLAIMED
            assert (record.state, record.token) == (State.CLAIMED, decision.claim.token)


@pytest.mark.guarantee("race")
def test_race_of_notes_loses_none(race: Race, store: Store) -> None:
    """Parks of forty messages, renewals and the completion all rewrite one record."""
    claim = take(store, op(continues=True))
    calls: list[Call] = [("note_parked", claim.key, f"m{n}", 0, n + 1) for n in range(CALLERS - 10)]
    calls += [("renew", [claim])] * 9
    calls.append(("complete", claim, result()))
    answers = race(run_verb, calls)
    assert answers[-1] is Ended.COMPLETED
    record = stored(store)
    assert {message: note.parked for message, note in record.notes.items() if message != "M"} == {
        f"m{n}": (0, n + 1) for n in range(CALLERS - 10)
    }
    assert record.outcome == result()
    assert record.note("M").continuing is not None


# -- S7, S8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S7")
def test_s7_works_in_a_child_forked_while_the_parent_is_using_it(backend: Backend, racers: Racers) -> None:
    """The fork happens in another process, so that no other test's threads are in it."""
    forks = 4
    operations = [op(f"fork {n}") for n in range(forks * 2)]
    (said,) = racers.run(backend.url, fork_in_use, [(operations, forks)])
    assert isinstance(said, dict), said
    assert said == {"child": ["ACQUIRED COMPLETED COMPLETED"] * forks, "parent": said["parent"], "busy": []}
    assert said["parent"] == ["ACQUIRED COMPLETED COMPLETED"] * forks


@pytest.mark.guarantee("S8")
def test_s8_one_store_serves_many_threads(store: Store) -> None:
    calls = [(op(f"k{n}"), result(f"value {n}".encode())) for n in range(40)]
    answers = threads_of(store)(claim_and_finish, calls)
    assert [answer for answer in answers if isinstance(answer, Raised)] == []
    assert all(won for won, _ in answers)
    for number in range(40):
        assert stored(store, f"k{number}").outcome == result(f"value {number}".encode())
