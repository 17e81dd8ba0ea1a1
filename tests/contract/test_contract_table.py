"""The decision table, one test per row and store; the time is the test's."""

from __future__ import annotations

import pytest

from celery_idem.core.records import (
    DAY,
    Answer,
    Claim,
    Ended,
    Record,
    Release,
    Renewal,
    State,
    Successor,
)
from celery_idem.stores.base import Store
from tests.contract.backends import Backend
from tests.contract.shorthand import LEASE, TTL, answer, complete, stored, take
from tests.support.clock import ManualClock
from tests.support.operations import fingerprint, op, result

# -- row 1 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 1")
def test_row_01_a_newer_record_is_left_alone(backend: Backend, store: Store, clock: ManualClock) -> None:
    claim = take(store)
    backend.newer(claim.key)
    before = backend.raw(claim.key)
    for operation in (op(), claim.operation, op(message="N", generation=3)):
        decision = store.claim(operation, lease=LEASE, ttl=TTL, dead_fence=claim.fence)
        assert (decision.answer, decision.claim) == (Answer.NEWER, None)
    assert store.complete(claim, result()) is Ended.LOST
    assert store.release(claim, Release.ENDED) is Ended.LOST
    assert store.renew([claim]) == {claim.token: Renewal.LOST}
    store.settle(claim.key, "M")
    store.note_parked(claim.key, "M", 0, 3)
    assert store.forget(claim.key, claim.fence) is False
    clock.advance(LEASE + TTL + 1)
    assert answer(store, op()) is Answer.NEWER
    assert store.complete(claim, result()) is Ended.LOST
    assert store.renew([claim]) == {claim.token: Renewal.LOST}
    assert backend.raw(claim.key) == before


# -- row 2 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 2")
def test_row_02_nothing_there_is_acquired(store: Store, clock: ManualClock) -> None:
    mine = op(fingerprint=fingerprint("a"), scope=fingerprint("tenant"), continues=True)
    decision = store.claim(mine, lease=LEASE, ttl=TTL)
    assert decision.answer is Answer.ACQUIRED
    assert decision.now == clock.now
    fence = int(clock.now * 1_000_000)
    assert decision.claim == Claim(mine, fence, Answer.ACQUIRED, 1, LEASE, TTL)
    assert stored(store) == Record(
        key=mine.key,
        state=State.CLAIMED,
        token=mine.token,
        fence=fence,
        message_id="M",
        generation=0,
        attempts=1,
        task="shop.charge",
        namespace="shop",
        scope=fingerprint("tenant"),
        fingerprint=fingerprint("a"),
        holder="holder of M",
        claimed_at=clock.now,
        lease_expires_at=clock.now + LEASE,
        expires_at=clock.now + LEASE + TTL,
    )


@pytest.mark.guarantee("row 2")
def test_row_02_an_expired_record_leaves_only_its_fence(store: Store, clock: ManualClock) -> None:
    first = take(store, op(generation=2))
    assert store.release(first, Release.INTERRUPTED) is Ended.RELEASED
    clock.advance(DAY)
    assert store.get(first.key) is None
    again = store.claim(op(generation=0), lease=LEASE, ttl=TTL)
    assert again.answer is Answer.ACQUIRED
    assert again.claim is not None
    assert (again.claim.attempts, again.claim.unknown) == (1, False)
    assert again.claim.fence > first.fence
    assert stored(store).notes == {}


@pytest.mark.guarantee("row 2")
def test_row_02_a_completion_expires_at_completion_plus_ttl(store: Store, clock: ManualClock) -> None:
    claim = take(store)
    clock.advance(30)
    store.complete(claim, result())
    clock.advance(TTL - 0.25)
    assert answer(store, op()) is Answer.COMPLETED
    clock.advance(0.25)
    assert answer(store, op()) is Answer.ACQUIRED


# -- row 3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 3")
def test_row_03_own_token_gets_the_same_answer(store: Store, clock: ManualClock) -> None:
    mine = op(token="mine")
    first = store.claim(mine, lease=LEASE, ttl=TTL)
    for seconds in (0, 30, LEASE):
        clock.advance(seconds)
        again = store.claim(mine, lease=LEASE, ttl=TTL)
        assert (again.answer, again.claim) == (Answer.ACQUIRED, first.claim)
        assert again.record == first.record
    assert stored(store) == first.record


@pytest.mark.guarantee("row 3")
def test_row_03_own_token_hears_of_its_reclaim_again(store: Store, clock: ManualClock) -> None:
    take(store)
    clock.advance(LEASE)
    mine = op(token="mine")
    first = store.claim(mine, lease=LEASE, ttl=TTL)
    again = store.claim(mine, lease=LEASE, ttl=TTL)
    assert first.answer is again.answer is Answer.RECLAIMED
    assert first.claim == again.claim
    assert again.claim is not None
    assert (again.claim.attempts, again.claim.unknown) == (2, True)


@pytest.mark.guarantee("row 3")
def test_row_03_own_token_keeps_its_right_to_continue(store: Store, clock: ManualClock) -> None:
    completer = complete(store, op(continues=True))
    again = store.claim(completer.operation, lease=LEASE, ttl=TTL)
    assert again.answer is Answer.COMPLETED
    assert again.claim is not None
    assert (again.claim.right, again.claim.fence) == (True, completer.fence)
    other = op(message="N", continues=True)
    granted = store.claim(other, lease=LEASE, ttl=TTL)
    clock.advance(LEASE + 5)
    assert store.claim(other, lease=LEASE, ttl=TTL).claim == granted.claim


# -- row 4 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 4")
@pytest.mark.parametrize("state", list(State))
def test_row_04_what_is_over_stays_over(store: Store, state: State, clock: ManualClock) -> None:
    claim = take(store, op(generation=2))
    if state is State.COMPLETED:
        store.complete(claim, result())
    elif state is State.RELEASED:
        store.release(claim, Release.ENDED)
    before = stored(store)
    for generation in range(3 if state is State.RELEASED else 2):
        decision = store.claim(op(generation=generation), lease=LEASE, ttl=TTL, dead_fence=claim.fence)
        assert (decision.answer, decision.claim) == (Answer.OVER, None)
    assert stored(store) == before
    clock.advance(LEASE)
    assert answer(store, op(generation=3)) is not Answer.OVER


@pytest.mark.guarantee("row 4")
def test_row_04_over_is_remembered_per_message(store: Store) -> None:
    store.release(take(store, op(message="M", generation=1)), Release.ENDED)
    store.release(take(store, op(message="N", generation=0)), Release.ENDED)
    assert answer(store, op(message="M", generation=1)) is Answer.OVER
    assert answer(store, op(message="N", generation=0)) is Answer.OVER
    assert answer(store, op(message="N", generation=1)) is Answer.ACQUIRED


# -- row 5 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 5")
@pytest.mark.parametrize("state", [State.CLAIMED, State.COMPLETED])
def test_row_05_another_message_with_another_fingerprint_is_a_mismatch(
    store: Store, state: State, clock: ManualClock
) -> None:
    claim = take(store, op(fingerprint=fingerprint("a")))
    if state is State.COMPLETED:
        store.complete(claim, result())
    clock.advance(LEASE)
    before = stored(store)
    decision = store.claim(op(message="N", fingerprint=fingerprint("b")), lease=LEASE, ttl=TTL, dead_fence=claim.fence)
    assert (decision.answer, decision.claim) == (Answer.MISMATCH, None)
    assert decision.record is not None
    assert decision.record.fingerprint == fingerprint("a")
    assert stored(store) == before


@pytest.mark.guarantee("row 5")
def test_row_05_compares_only_where_both_messages_have_one(store: Store) -> None:
    take(store, op("with", fingerprint=fingerprint("a")))
    take(store, op("without"))
    assert answer(store, op("with", "N", fingerprint=fingerprint("a"))) is Answer.HELD
    assert answer(store, op("with", "N")) is Answer.HELD
    assert answer(store, op("with", "M", fingerprint=fingerprint("b"))) is Answer.HELD
    assert answer(store, op("without", "N", fingerprint=fingerprint("b"))) is Answer.HELD


@pytest.mark.guarantee("row 5")
def test_row_05_a_released_key_takes_another_fingerprint(store: Store) -> None:
    store.release(take(store, op(fingerprint=fingerprint("a"))), Release.ENDED)
    take(store, op(message="N", fingerprint=fingerprint("b")))
    assert stored(store).fingerprint == fingerprint("b")


# -- row 6 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 6")
def test_row_06_a_live_lease_holds_against_everybody(store: Store, clock: ManualClock) -> None:
    claim = take(store)
    end = clock.now + LEASE
    clock.advance(LEASE - 0.25)
    before = stored(store)
    for operation in (op(), op(generation=4), op(message="N"), op(message="N", continues=True)):
        decision = store.claim(operation, lease=LEASE, ttl=TTL)
        assert (decision.answer, decision.claim) == (Answer.HELD, None)
        assert decision.held_by == (claim.fence, "holder of M", end)
    assert stored(store) == before


@pytest.mark.guarantee("row 6")
def test_row_06_another_fence_proves_nobody_dead(store: Store) -> None:
    claim = take(store)
    for fence in (0, claim.fence - 1, claim.fence + 1):
        assert answer(store, op(message="N"), dead_fence=fence) is Answer.HELD


@pytest.mark.guarantee("row 6")
def test_row_06_a_held_copy_hears_how_far_its_parking_went(store: Store) -> None:
    claim = take(store)
    store.note_parked(claim.key, "M", 0, 7)
    decision = store.claim(op(), lease=LEASE, ttl=TTL)
    assert decision.record is not None
    assert decision.record.note("M").parked == (0, 7)


# -- row 7 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 7")
def test_row_07_a_lapsed_claim_is_reclaimed(store: Store, clock: ManualClock) -> None:
    fences = [take(store).fence]
    for attempts in (2, 3, 4):
        clock.advance(LEASE)
        mine = op(message=f"m{attempts}")
        decision = store.claim(mine, lease=LEASE, ttl=TTL)
        assert decision.answer is Answer.RECLAIMED
        assert decision.claim is not None
        assert (decision.claim.attempts, decision.claim.unknown) == (attempts, True)
        fences.append(decision.claim.fence)
        record = stored(store)
        assert (record.token, record.message_id, record.unknown) == (mine.token, mine.delivery.message_id, True)
        assert record.lease_expires_at == clock.now + LEASE
    assert fences == sorted(set(fences))


@pytest.mark.guarantee("row 7")
def test_row_07_a_claim_proved_dead_is_reclaimed_at_once(store: Store) -> None:
    claim = take(store)
    decision = store.claim(op(message="N"), lease=LEASE, ttl=TTL, dead_fence=claim.fence)
    assert decision.answer is Answer.RECLAIMED
    assert decision.claim is not None
    assert (decision.claim.attempts, decision.claim.unknown) == (2, True)
    assert decision.claim.fence > claim.fence


# -- row 8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 8")
def test_row_08_a_stale_copy_waits_for_the_announced_retry(store: Store, clock: ManualClock) -> None:
    store.release(take(store), Release.RETRY, successor=Successor(1, 30))
    before = stored(store)
    assert before.note("M").successor == (1, clock.now + 30)
    for seconds in (0, 30, 59.75):
        clock.advance(seconds)
        decision = store.claim(op(), lease=LEASE, ttl=TTL)
        assert (decision.answer, decision.claim) == (Answer.NOT_DUE, None)
        assert decision.record is not None
        assert decision.record.note("M").successor == before.note("M").successor
    assert stored(store) == before
    clock.advance(0.25)
    assert answer(store, op()) is Answer.ACQUIRED


@pytest.mark.guarantee("row 8")
@pytest.mark.parametrize(("message", "generation"), [("M", 1), ("M", 2), ("N", 0)])
def test_row_08_stops_neither_the_retry_nor_another_message(store: Store, message: str, generation: int) -> None:
    store.release(take(store), Release.RETRY, successor=Successor(1, 30))
    assert answer(store, op(message=message, generation=generation)) is Answer.ACQUIRED


@pytest.mark.guarantee("row 8")
def test_row_08_the_retry_ends_its_predecessors(store: Store) -> None:
    store.release(take(store), Release.RETRY, successor=Successor(1, 30))
    claim = take(store, op(generation=1))
    assert stored(store).note("M").successor is None
    store.release(claim, Release.YIELDED)
    assert answer(store, op(generation=0)) is Answer.OVER
    assert answer(store, op(generation=1)) is Answer.ACQUIRED


@pytest.mark.guarantee("row 8")
def test_row_08_a_stale_copy_that_took_over_leaves_the_retry_its_turn(store: Store, clock: ManualClock) -> None:
    store.release(take(store), Release.RETRY, successor=Successor(1, 0))
    clock.advance(60)
    stale = take(store, op(generation=0))
    assert stored(store).note("M").successor is not None
    assert answer(store, op(generation=1)) is Answer.HELD
    store.release(stale, Release.YIELDED)
    assert answer(store, op(generation=1)) is Answer.ACQUIRED


# -- row 9 -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 9")
def test_row_09_a_released_key_is_free(store: Store, clock: ManualClock) -> None:
    claim = take(store)
    clock.advance(LEASE)
    reclaimed = store.claim(op(message="N"), lease=LEASE, ttl=TTL).claim
    assert reclaimed is not None
    store.release(take(store, op("other")), Release.YIELDED)
    free = take(store, op("other", "N"))
    assert (free.answer, free.attempts, free.unknown) == (Answer.ACQUIRED, 1, False)
    store.release(reclaimed, Release.YIELDED)
    assert stored(store).attempts == 0
    doubtful = take(store, op(message="P"))
    assert (doubtful.answer, doubtful.attempts, doubtful.unknown) == (Answer.RECLAIMED, 1, True)
    assert doubtful.fence > reclaimed.fence > claim.fence


@pytest.mark.guarantee("row 9")
def test_row_09_only_completing_or_forgetting_ends_doubt(store: Store) -> None:
    store.release(take(store), Release.INTERRUPTED)
    for reason in (Release.YIELDED, Release.RETRY, Release.ENDED):
        claim = take(store, op(message=reason.value))
        assert (claim.answer, claim.unknown, claim.attempts) == (Answer.RECLAIMED, True, 1)
        successor = Successor(1, 0) if reason is Release.RETRY else None
        assert store.release(claim, reason, successor=successor) is Ended.RELEASED
        assert stored(store).unknown
    assert store.forget(claim.key, claim.fence) is True
    assert take(store, op(message="N")).answer is Answer.ACQUIRED


@pytest.mark.guarantee("row 9")
def test_row_09_completing_ends_doubt(store: Store) -> None:
    store.release(take(store), Release.INTERRUPTED)
    assert store.complete(take(store, op(message="N")), result()) is Ended.COMPLETED
    assert not stored(store).unknown


# -- rows 10 to 12 -----------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("row 10")
def test_row_10_completed_answers_with_the_outcome(store: Store, clock: ManualClock) -> None:
    complete(store)
    before = stored(store)
    for operation in (op(), op(generation=3), op(message="N")):
        clock.advance(30)
        decision = store.claim(operation, lease=LEASE, ttl=TTL, dead_fence=before.fence)
        assert (decision.answer, decision.claim) == (Answer.COMPLETED, None)
        assert decision.record is not None
        assert decision.record.outcome == result()
        assert decision.record.fence == before.fence
    assert stored(store) == before


@pytest.mark.guarantee("row 10")
def test_row_10_a_settled_message_is_not_continued_again(store: Store) -> None:
    claim = complete(store, op(continues=True))
    store.settle(claim.key, "M")
    decision = store.claim(op(continues=True), lease=LEASE, ttl=TTL)
    assert (decision.answer, decision.claim) == (Answer.COMPLETED, None)
    assert decision.record is not None
    assert decision.record.note("M").settled


@pytest.mark.guarantee("row 11")
def test_row_11_a_message_is_continued_by_one_copy_at_a_time(store: Store, clock: ManualClock) -> None:
    claim = complete(store, op(continues=True))
    end = clock.now + LEASE
    before = stored(store)
    clock.advance(LEASE - 0.25)
    decision = store.claim(op(continues=True), lease=LEASE, ttl=TTL)
    assert (decision.answer, decision.claim) == (Answer.HELD, None)
    assert decision.held_by == (claim.fence, "holder of M", end)
    assert answer(store, op(continues=True), dead_fence=claim.fence + 1) is Answer.HELD
    assert answer(store, op(continues=False)) is Answer.COMPLETED
    assert stored(store) == before


@pytest.mark.guarantee("row 11")
def test_row_11_names_the_holder_of_this_messages_right(store: Store) -> None:
    complete(store, op(continues=True))
    rights = {}
    for message in ("N", "P"):
        rights[message] = store.claim(op(message=message, continues=True), lease=LEASE, ttl=TTL).claim
    for message, right in rights.items():
        decision = store.claim(op(message=message, continues=True), lease=LEASE, ttl=TTL)
        assert decision.answer is Answer.HELD
        assert right is not None
        assert decision.held_by is not None
        assert decision.held_by[:2] == (right.fence, f"holder of {message}")


@pytest.mark.guarantee("row 12")
@pytest.mark.parametrize("how", ["lapsed", "proved dead", "another message"])
def test_row_12_the_right_to_continue_is_granted(store: Store, clock: ManualClock, how: str) -> None:
    completer = complete(store, op(continues=True))
    if how == "lapsed":
        clock.advance(LEASE)
    mine = op(message="N" if how == "another message" else "M", continues=True)
    decision = store.claim(mine, lease=LEASE, ttl=TTL, dead_fence=completer.fence if how == "proved dead" else None)
    assert decision.answer is Answer.COMPLETED
    right = decision.claim
    assert right is not None
    assert right.right
    assert right.fence > completer.fence
    assert decision.record is not None
    assert decision.record.outcome == result()
    record = stored(store)
    assert (record.state, record.token, record.fence) == (State.COMPLETED, completer.token, completer.fence)
    continuing = record.note(mine.delivery.message_id).continuing
    assert continuing is not None
    assert (continuing.token, continuing.fence, continuing.holder) == (right.token, right.fence, mine.holder)
    assert continuing.lease_expires_at == clock.now + LEASE
    assert answer(store, op(message=mine.delivery.message_id, continues=True)) is Answer.HELD


@pytest.mark.guarantee("row 12")
def test_row_12_a_right_outlives_the_records_expiry(store: Store, clock: ManualClock) -> None:
    complete(store, op(continues=False), ttl=10)
    right = store.claim(op(continues=True), lease=LEASE, ttl=10).claim
    assert right is not None
    clock.advance(LEASE - 0.25)
    assert answer(store, op(continues=True)) is Answer.HELD
    assert store.renew([right]) == {right.token: Renewal.RENEWED}
    clock.advance(LEASE - 0.25)
    assert answer(store, op(continues=True)) is Answer.HELD


@pytest.mark.guarantee("row 12")
def test_row_12_the_completers_right_outlives_a_short_ttl(store: Store, clock: ManualClock) -> None:
    complete(store, op(continues=True), ttl=1)
    clock.advance(LEASE - 0.25)
    assert answer(store, op(continues=True)) is Answer.HELD
    clock.advance(0.25)
    assert answer(store, op(continues=True)) is Answer.ACQUIRED


# -- order of the rows -------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("rows")
def test_rows_a_token_of_its_own_comes_before_over(store: Store) -> None:
    """The reply to a claim of the last generation was lost, and the generation is asked for again."""
    mine = op(generation=2)
    take(store, mine)
    assert answer(store, mine) is Answer.ACQUIRED
    assert answer(store, op(generation=1)) is Answer.OVER


@pytest.mark.guarantee("rows")
def test_rows_over_comes_before_mismatch_and_completed(store: Store) -> None:
    """A stale copy of a retried message, whose arguments were others, must not fail what the retry completed."""
    store.release(take(store, op(fingerprint=fingerprint("a"))), Release.RETRY, successor=Successor(1, 0))
    complete(store, op(generation=1, fingerprint=fingerprint("b")))
    assert answer(store, op(generation=0, fingerprint=fingerprint("a"))) is Answer.OVER


@pytest.mark.guarantee("rows")
def test_rows_mismatch_comes_before_reclaim(store: Store, clock: ManualClock) -> None:
    """An amount of 80 must not run over an amount of 50 that may have been charged."""
    take(store, op(fingerprint=fingerprint("50")))
    clock.advance(LEASE * 2)
    assert answer(store, op(message="N", fingerprint=fingerprint("80"))) is Answer.MISMATCH
    assert answer(store, op(message="N", fingerprint=fingerprint("50"))) is Answer.RECLAIMED


@pytest.mark.guarantee("rows")
def test_rows_a_higher_generation_waits_for_a_live_holder(store: Store, clock: ManualClock) -> None:
    take(store, op(generation=0))
    assert answer(store, op(generation=1)) is Answer.HELD
    clock.advance(LEASE)
    claim = take(store, op(generation=1))
    assert claim.answer is Answer.RECLAIMED
    assert stored(store).note("M").over == 0


@pytest.mark.guarantee("rows")
@pytest.mark.parametrize("message", ["", "message with spaces", "m:1", 'quote"\\', "ünïcödé ☃", "x" * 255])
def test_rows_any_message_id_keeps_its_own_note(store: Store, message: str) -> None:
    operation = op(message=message, generation=1, holder="høst:1 ☃")
    claim = take(store, operation)
    assert store.release(claim, Release.RETRY, successor=Successor(2, 10)) is Ended.RELEASED
    record = stored(store)
    assert record.holder == "høst:1 ☃"
    assert list(record.notes) == [message]
    assert answer(store, op(message=message, generation=1)) is Answer.NOT_DUE
    assert answer(store, op(message=message, generation=0)) is Answer.OVER


@pytest.mark.guarantee("rows")
def test_rows_a_decision_carries_the_callers_note(store: Store) -> None:
    store.release(take(store, op(message="M")), Release.ENDED)
    claim = take(store, op(message="N"))
    for message in ("M", "N"):
        store.note_parked(claim.key, message, 1, 2)
    decision = store.claim(op(message="M", generation=1), lease=LEASE, ttl=TTL)
    assert decision.answer is Answer.HELD
    assert decision.record is not None
    assert decision.record.note("M").parked == (1, 2)
    assert decision.record.note("M").over == 0
    assert decision.record.others or decision.record.note("N").parked == (1, 2)
    complete(store, op("alone", message="N"))
    alone = store.claim(op("alone", message="M"), lease=LEASE, ttl=TTL).record
    assert alone is not None
    assert not alone.others
