"""What complete, release, renew, settle, note_parked, get, find, forget and purge do, for every store."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import sqlalchemy

from celery_idem.core.codec import Encoded
from celery_idem.core.records import (
    DAY,
    NOTES_KEPT,
    Answer,
    Ended,
    Kind,
    Note,
    Outcome,
    Release,
    Renewal,
    State,
    Successor,
)
from celery_idem.errors import ConfigurationError
from celery_idem.stores.base import Store
from tests.contract.backends import Backend, on
from tests.contract.shorthand import LEASE, TTL, answer, complete, stored, take
from tests.support.clock import ManualClock
from tests.support.operations import fingerprint, key_for, op, result

# -- complete ----------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("complete")
def test_complete_records_the_outcome(store: Store, clock: ManualClock) -> None:
    claim = take(store, op(fingerprint=fingerprint("a")))
    before = stored(store)
    clock.advance(20)
    assert store.complete(claim, result()) is Ended.COMPLETED
    assert stored(store) == replace(
        before,
        state=State.COMPLETED,
        outcome=result(),
        attempts=0,
        lease_expires_at=clock.now,
        completed_at=clock.now,
        expires_at=clock.now + TTL,
    )


BODIES = {
    "every byte": bytes(range(256)),
    "empty": b"",
    "a quarter of a megabyte": b"\x00\xff" * 131_072,
    "looks like a number": b"0e1",
}


@pytest.mark.guarantee("complete")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("kind", [Kind.RESULT, Kind.FAILURE])
def test_complete_keeps_every_byte(store: Store, kind: Kind, body: bytes) -> None:
    claim = take(store)
    outcome = Outcome(kind, Encoded(body, "application/x-python-serialize", "binary", "f" * 64))
    assert store.complete(claim, outcome) is Ended.COMPLETED
    assert stored(store).outcome == outcome
    decision = store.claim(op(), lease=LEASE, ttl=TTL)
    assert decision.record is not None
    assert decision.record.outcome == outcome


@pytest.mark.guarantee("complete")
@pytest.mark.parametrize("kind", list(Kind))
def test_complete_without_a_value(store: Store, kind: Kind) -> None:
    claim = take(store)
    assert store.complete(claim, Outcome(kind)) is Ended.COMPLETED
    assert stored(store).outcome == Outcome(kind)


@pytest.mark.guarantee("complete")
def test_complete_again_by_the_same_token_succeeds(store: Store, clock: ManualClock) -> None:
    claim = complete(store)
    before = stored(store)
    clock.advance(LEASE * 2)
    assert store.complete(claim, result(b"another value")) is Ended.COMPLETED
    assert stored(store) == before


@pytest.mark.guarantee("complete")
def test_complete_of_a_lapsed_claim_nobody_took(store: Store, clock: ManualClock) -> None:
    claim = take(store)
    clock.advance(LEASE * 10)
    assert store.complete(claim, result()) is Ended.COMPLETED
    assert answer(store, op()) is Answer.COMPLETED


@pytest.mark.guarantee("complete")
@pytest.mark.parametrize("renewed", [False, True])
def test_complete_after_somebody_noted_on_the_record(store: Store, renewed: bool) -> None:
    claim = take(store)
    store.note_parked(claim.key, "M", 0, 1)
    store.note_parked(claim.key, "N", 2, 4)
    if renewed:
        assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    assert store.complete(claim, result()) is Ended.COMPLETED
    record = stored(store)
    assert (record.note("M").parked, record.note("N").parked) == ((0, 1), (2, 4))


@pytest.mark.guarantee("complete")
def test_complete_after_a_renewal(store: Store, clock: ManualClock) -> None:
    claim = take(store)
    clock.advance(40)
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    assert store.complete(claim, result()) is Ended.COMPLETED
    assert stored(store).expires_at == clock.now + TTL


@pytest.mark.guarantee("complete")
def test_complete_keeps_the_right_to_continue(store: Store, clock: ManualClock) -> None:
    claim = take(store, op(continues=True))
    clock.advance(5)
    store.complete(claim, result())
    continuing = stored(store).note("M").continuing
    assert continuing is not None
    assert (continuing.token, continuing.fence) == (claim.token, claim.fence)
    assert continuing.lease_expires_at == clock.now + LEASE


@pytest.mark.guarantee("complete")
def test_complete_of_a_record_that_vanished_is_remembered(store: Store, clock: ManualClock) -> None:
    """A failover lost the claim; the effect happened all the same."""
    claim = take(store, op(generation=1), lease=10, ttl=10)
    clock.advance(DAY)
    store.purge(100)
    assert store.get(claim.key) is None
    assert store.complete(claim, result()) is Ended.COMPLETED
    record = stored(store)
    assert (record.fence, record.token, record.outcome) == (claim.fence, claim.token, result())
    assert record.note("M").over == 0


@pytest.mark.guarantee("complete")
@on("sqlite", "psycopg2", "psycopg3")
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_complete_joins_the_callers_transaction(backend: Backend, store: Store, commit: bool) -> None:
    """Effect and completion are one commit: the sentence "exactly once" rests on this."""
    claim = take(store, op(continues=True))
    engine = sqlalchemy.create_engine(backend.url)
    try:
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("CREATE TABLE IF NOT EXISTS effect (done text)"))
            connection.commit()
            connection.execute(sqlalchemy.text("INSERT INTO effect VALUES (:key)"), {"key": claim.key})
            assert store.complete(claim, result(), connection=connection) is Ended.COMPLETED
            assert answer(store, op(message="N")) is Answer.HELD
            connection.commit() if commit else connection.rollback()
        with engine.connect() as connection:
            effects = sqlalchemy.text("SELECT count(*) FROM effect WHERE done = :key")
            assert connection.execute(effects, {"key": claim.key}).scalar_one() == int(commit)
        if not commit:
            with engine.connect() as connection:
                assert store.complete(claim, result(), connection=connection) is Ended.COMPLETED
                connection.rollback()
            assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
            store.note_parked(claim.key, "N", 0, 1)
            assert stored(store).note("M").continuing is None
        assert answer(store, op(message="N")) is (Answer.COMPLETED if commit else Answer.HELD)
        assert store.complete(claim, result()) is Ended.COMPLETED
    finally:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text("DROP TABLE IF EXISTS effect"))
        engine.dispose()


@pytest.mark.guarantee("complete")
@on("sqlite", "psycopg2", "psycopg3")
def test_complete_in_a_transaction_is_lost_to_a_newer_token(backend: Backend, store: Store, clock: ManualClock) -> None:
    claim = take(store)
    clock.advance(LEASE)
    take(store, op(message="N"))
    engine = sqlalchemy.create_engine(backend.url)
    try:
        with engine.begin() as connection:
            assert store.complete(claim, result(), connection=connection) is Ended.LOST
    finally:
        engine.dispose()
    assert stored(store).message_id == "N"


@pytest.mark.guarantee("complete")
@on("memory", "redis")
def test_complete_refuses_a_connection_it_cannot_join(store: Store) -> None:
    claim = take(store)
    with pytest.raises(ConfigurationError, match="SQL"):
        store.complete(claim, result(), connection=object())
    assert stored(store).state is State.CLAIMED


# -- release -----------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("release")
@pytest.mark.parametrize("reason", list(Release))
def test_release_leaves_what_its_reason_says(store: Store, reason: Release, clock: ManualClock) -> None:
    claim = take(store, op(generation=1))
    before = stored(store)
    clock.advance(5)
    successor = Successor(2, 30) if reason is Release.RETRY else None
    assert store.release(claim, reason, successor=successor) is Ended.RELEASED
    note = {
        Release.RETRY: Note(over=0, successor=(2, clock.now + 30), at=clock.now),
        Release.ENDED: Note(over=1, at=clock.now),
    }.get(reason, before.note("M"))
    assert stored(store) == replace(
        before,
        state=State.RELEASED,
        attempts=0,
        unknown=reason is Release.INTERRUPTED,
        lease_expires_at=clock.now,
        expires_at=clock.now + DAY,
        notes={"M": note},
    )


@pytest.mark.guarantee("release")
def test_release_tells_what_this_token_did_before(store: Store) -> None:
    completed = complete(store, op("completed"))
    assert store.release(completed, Release.ENDED) is Ended.COMPLETED
    assert stored(store, "completed").outcome == result()
    released = take(store, op("released"))
    assert store.release(released, Release.YIELDED) is Ended.RELEASED
    assert store.release(released, Release.YIELDED) is Ended.RELEASED


@pytest.mark.guarantee("release")
def test_release_of_a_lapsed_claim_nobody_took(store: Store, clock: ManualClock) -> None:
    claim = take(store)
    clock.advance(LEASE * 10)
    assert store.release(claim, Release.ENDED) is Ended.RELEASED
    assert answer(store, op()) is Answer.OVER


@pytest.mark.guarantee("release")
@pytest.mark.parametrize(("ttl", "keeps"), [(0, DAY), (60, DAY), (DAY * 7, DAY * 7)])
def test_release_keeps_its_tombstone_a_day_at_least(store: Store, clock: ManualClock, ttl: float, keeps: float) -> None:
    claim = take(store, ttl=ttl)
    store.release(claim, Release.ENDED)
    clock.advance(keeps - 0.25)
    assert answer(store, op()) is Answer.OVER
    clock.advance(0.25)
    assert answer(store, op()) is Answer.ACQUIRED


# -- renew -------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("renew")
def test_renew_moves_lease_and_expiry(store: Store, clock: ManualClock) -> None:
    claim = take(store)
    for seconds in (20, 20, LEASE, LEASE + TTL - 1):  # the last two had lapsed
        before = stored(store)
        clock.advance(seconds)
        assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
        lease_end = clock.now + LEASE
        assert stored(store) == replace(before, lease_expires_at=lease_end, expires_at=lease_end + TTL)


@pytest.mark.guarantee("renew")
def test_renew_answers_each_claim_of_a_batch(store: Store, clock: ManualClock) -> None:
    live = [take(store, op(f"live {n}")) for n in range(25)]
    stolen = take(store, op("stolen"), lease=5)
    completed = take(store, op("completed"))
    released = take(store, op("released"))
    forgotten = take(store, op("forgotten"))
    vanished = take(store, op("vanished"), lease=1, ttl=1)
    clock.advance(10)
    store.purge(10)
    assert store.get(vanished.key) is None
    take(store, op("stolen", "N"))
    store.complete(completed, result())
    store.release(released, Release.ENDED)
    assert store.forget(forgotten.key, forgotten.fence)
    answers = store.renew([*live, stolen, completed, released, forgotten, vanished])
    assert [answers[claim.token] for claim in live] == [Renewal.RENEWED] * 25
    assert answers[stolen.token] is answers[forgotten.token] is Renewal.LOST
    assert answers[completed.token] is answers[released.token] is answers[vanished.token] is Renewal.RENEWED
    assert stored(store, "live 7").lease_expires_at == clock.now + LEASE
    assert stored(store, "stolen").message_id == "N"
    assert stored(store, "completed").state is State.COMPLETED
    assert stored(store, "released").state is State.RELEASED
    restored = stored(store, "vanished")
    assert (restored.token, restored.fence) == (vanished.token, vanished.fence)
    assert restored.lease_expires_at == clock.now + 1


@pytest.mark.guarantee("renew")
def test_renew_of_nothing(store: Store) -> None:
    assert store.renew([]) == {}


@pytest.mark.guarantee("renew")
def test_renew_restores_a_claim_with_its_doubt_and_attempts(store: Store, clock: ManualClock) -> None:
    take(store, op(generation=3), lease=1, ttl=1)
    clock.advance(1)
    claim = take(store, op(generation=3), lease=1, ttl=1)
    clock.advance(2)
    store.purge(10)
    assert store.get(claim.key) is None
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    record = stored(store)
    assert (record.attempts, record.unknown, record.answer) == (2, True, Answer.RECLAIMED)
    assert (record.fence, record.note("M").over) == (claim.fence, 2)
    again = store.claim(claim.operation, lease=1, ttl=1)
    assert again.claim == claim


@pytest.mark.guarantee("renew")
def test_renew_of_a_right_never_makes_a_record(store: Store, clock: ManualClock) -> None:
    complete(store)
    right = store.claim(op(continues=True), lease=LEASE, ttl=TTL).claim
    assert right is not None
    clock.advance(40)
    assert store.renew([right]) == {right.token: Renewal.RENEWED}
    continuing = stored(store).note("M").continuing
    assert continuing is not None
    assert continuing.lease_expires_at == clock.now + LEASE
    clock.advance(DAY)
    store.purge(10)
    assert store.renew([right]) == {right.token: Renewal.LOST}
    assert store.get(right.key) is None


@pytest.mark.guarantee("renew")
def test_renew_tells_whose_right_was_taken(store: Store, clock: ManualClock) -> None:
    completer = complete(store, op(continues=True))
    assert store.renew([completer]) == {completer.token: Renewal.RENEWED}
    clock.advance(LEASE)
    first = store.claim(op(continues=True), lease=LEASE, ttl=TTL).claim
    clock.advance(LEASE)
    second = store.claim(op(continues=True), lease=LEASE, ttl=TTL).claim
    assert first is not None
    assert second is not None
    assert store.renew([completer, first, second]) == {
        completer.token: Renewal.LOST,
        first.token: Renewal.LOST,
        second.token: Renewal.RENEWED,
    }
    store.settle(second.key, "M")
    assert set(store.renew([completer, second]).values()) == {Renewal.RENEWED}


# -- settle, note_parked -----------------------------------------------------------------------------------------------


@pytest.mark.guarantee("settle")
def test_settle_ends_the_right_for_good(store: Store, clock: ManualClock) -> None:
    claim = complete(store, op(continues=True))
    store.settle(claim.key, "M")
    before = stored(store)
    assert before.note("M") == Note(settled=True, at=clock.now)
    clock.advance(LEASE * 2)
    store.settle(claim.key, "M")
    assert stored(store) == before
    other = store.claim(op(message="N", continues=True), lease=LEASE, ttl=TTL)
    assert other.claim is not None


@pytest.mark.guarantee("settle")
def test_settle_needs_a_completion(store: Store, clock: ManualClock) -> None:
    store.settle(key_for("never seen"), "M")
    assert store.get(key_for("never seen")) is None
    claim = take(store)
    before = stored(store)
    store.settle(claim.key, "M")
    assert stored(store) == before
    store.release(claim, Release.ENDED)
    before = stored(store)
    store.settle(claim.key, "M")
    assert stored(store) == before


@pytest.mark.guarantee("note_parked")
def test_note_parked_keeps_the_highest_count_of_the_highest_generation(store: Store) -> None:
    claim = take(store)
    best = (-1, 0)
    for generation, count in [(0, 1), (0, 3), (0, 2), (1, 1), (0, 9), (1, 12), (1, 3)]:
        store.note_parked(claim.key, "M", generation, count)
        best = max(best, (generation, count))
        assert stored(store).note("M").parked == best
    assert stored(store).token == claim.token


@pytest.mark.guarantee("note_parked")
def test_note_parked_makes_no_record(store: Store, clock: ManualClock) -> None:
    store.note_parked(key_for("order:1"), "M", 0, 1)
    assert store.get(key_for("order:1")) is None
    claim = take(store, lease=1, ttl=1)
    clock.advance(2)
    store.note_parked(claim.key, "M", 0, 1)
    assert store.get(claim.key) is None
    assert answer(store, op()) is Answer.ACQUIRED


@pytest.mark.guarantee("notes")
def test_notes_the_sixty_four_youngest_stay_and_live_ones_beyond(store: Store, clock: ManualClock) -> None:
    store.release(take(store, op(message="retried", generation=1)), Release.RETRY, successor=Successor(2, DAY / 2))
    for number in range(NOTES_KEPT + 8):
        clock.advance(1)
        store.note_parked(key_for("order:1"), f"m{number}", 0, 1)
    notes = stored(store).notes
    assert "retried" in notes
    assert len(notes) == NOTES_KEPT
    assert set(notes) == {"retried", *(f"m{n}" for n in range(9, NOTES_KEPT + 8))}
    assert answer(store, op(message="retried", generation=1)) is Answer.NOT_DUE


# -- get, find ---------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("get")
def test_get_answers_until_the_record_expires(store: Store, clock: ManualClock) -> None:
    assert store.get(key_for("order:1")) is None
    complete(store)
    clock.advance(TTL - 0.25)
    assert stored(store).state is State.COMPLETED
    clock.advance(0.25)
    assert store.get(key_for("order:1")) is None


@pytest.mark.guarantee("find")
def test_find_matches_every_condition(store: Store, clock: ManualClock) -> None:
    tenant = fingerprint("tenant")
    complete(store, op("a", task="shop.charge", scope=tenant))
    take(store, op("b", task="shop.charge"))
    store.release(take(store, op("c", task="shop.ship", scope=tenant)), Release.ENDED)
    take(store, op("gone"), lease=1, ttl=1)
    clock.advance(100)
    take(store, op("d", task="shop.ship"))

    def found(**conditions: object) -> set[str]:
        names = {key_for(name): name for name in ("a", "b", "c", "d", "gone")}
        return {names[record.key] for record in store.find(**conditions)}  # type: ignore[arg-type]

    assert found() == {"a", "b", "c", "d"}
    assert found(task="shop.charge") == {"a", "b"}
    assert found(scope=tenant) == {"a", "c"}
    assert found(state=State.CLAIMED) == {"b", "d"}
    assert found(state=State.RELEASED) == {"c"}
    assert found(older_than=100) == {"a", "b", "c"}
    assert found(older_than=100.25) == set()
    assert found(task="shop.ship", state=State.CLAIMED, older_than=0) == {"d"}
    assert found(task="shop") == set()
    assert list(store.find(task="shop.charge", state=State.COMPLETED)) == [stored(store, "a")]


@pytest.mark.guarantee("find")
def test_find_stops_at_its_limit(store: Store) -> None:
    for number in range(12):
        take(store, op(f"k{number}"))
    assert len(list(store.find(limit=5))) == 5
    assert len(list(store.find(limit=0))) == 0
    assert len({record.key for record in store.find()}) == 12


@pytest.mark.guarantee("find")
def test_find_may_be_left_early_and_used_while_it_runs(store: Store) -> None:
    for number in range(8):
        take(store, op(f"k{number}"))
    for record in itertools.islice(store.find(), 3):
        assert store.forget(record.key, record.fence)
    assert len(list(store.find(state=State.RELEASED))) == 3
    assert take(store, op("another")).answer is Answer.ACQUIRED


# -- forget, purge -----------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("forget")
@pytest.mark.parametrize("state", list(State))
def test_forget_leaves_a_tombstone_without_value_or_doubt(store: Store, state: State, clock: ManualClock) -> None:
    store.release(take(store, op(message="before", generation=4)), Release.INTERRUPTED)
    claim = take(store, op(fingerprint=fingerprint("a"), continues=True))
    if state is State.COMPLETED:
        store.complete(claim, result())
    elif state is State.RELEASED:
        store.release(claim, Release.RETRY, successor=Successor(1, 5))
    store.note_parked(claim.key, "M", 0, 2)
    clock.advance(5)
    assert store.forget(claim.key, claim.fence) is True
    record = stored(store)
    assert (record.state, record.token, record.fingerprint) == (State.RELEASED, "", "")
    assert (record.outcome, record.unknown, record.attempts, record.completed_at) == (None, False, 0, None)
    assert record.fence == claim.fence
    assert record.note("before").over == 3
    assert (record.note("M").continuing, record.note("M").settled) == (None, False)
    assert record.note("M").parked == (0, 2)
    assert record.expires_at >= clock.now + DAY
    assert store.complete(claim, result()) is Ended.LOST
    assert store.renew([claim]) == {claim.token: Renewal.LOST}
    fresh = take(store, op(message="N", fingerprint=fingerprint("b")))
    assert (fresh.answer, fresh.attempts) == (Answer.ACQUIRED, 1)
    assert fresh.fence > claim.fence


@pytest.mark.guarantee("forget")
def test_forget_keeps_over(store: Store) -> None:
    claim = take(store)
    store.release(claim, Release.ENDED)
    assert store.forget(claim.key, claim.fence) is True
    assert answer(store, op()) is Answer.OVER


@pytest.mark.guarantee("forget")
def test_forget_keeps_an_announced_retry_announced(store: Store) -> None:
    claim = take(store)
    store.release(claim, Release.RETRY, successor=Successor(1, 30))
    assert store.forget(claim.key, claim.fence) is True
    assert answer(store, op(generation=0)) is Answer.NOT_DUE
    assert answer(store, op(generation=1)) is Answer.ACQUIRED


@pytest.mark.guarantee("forget")
def test_forget_needs_the_fence_it_saw(store: Store, clock: ManualClock) -> None:
    assert store.forget(key_for("order:1"), 5) is False
    claim = take(store, lease=5)
    clock.advance(5)
    other = take(store, op(message="N"))
    before = stored(store)
    for fence in (claim.fence, other.fence + 1, 0, None):
        assert store.forget(claim.key, fence) is False
    assert stored(store) == before
    clock.advance(DAY)
    assert store.forget(claim.key, other.fence) is False


@pytest.mark.guarantee("purge")
def test_purge_deletes_expired_records_only(store: Store, clock: ManualClock) -> None:
    for number in range(5):
        complete(store, op(f"done {number}"), lease=1, ttl=10)
    take(store, op("dead"), lease=1, ttl=9)
    store.release(take(store, op("tombstone"), lease=1, ttl=0), Release.ENDED)
    live = take(store, op("live"), lease=DAY * 3)
    clock.advance(10)
    purged = [store.purge(4), store.purge(4), store.purge(4)]
    assert purged in ([4, 2, 0], [0, 0, 0])  # Redis drops what expired by itself
    assert store.get(live.key) is not None
    assert store.get(key_for("tombstone")) is not None
    clock.advance(DAY)
    store.purge(100)
    assert {record.key for record in store.find()} == {live.key}


# -- set-up ------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("set-up")
def test_setup_can_be_done_twice(store: Store) -> None:
    complete(store)
    store.create_schema()
    store.create_schema()
    assert isinstance(store.check(), list)
    assert answer(store, op()) is Answer.COMPLETED


@pytest.mark.guarantee("set-up")
def test_setup_a_closed_store_opens_again(store: Store) -> None:
    complete(store)
    store.close()
    store.close()
    assert answer(store, op()) is Answer.COMPLETED
