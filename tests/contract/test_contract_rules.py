"""Rules S1 to S5 and S9: whose clock counts, fences, old tokens, unreadable and newer records, expiry, two releases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy

from celery_idem.core.records import (
    DAY,
    Answer,
    Claim,
    Ended,
    Kind,
    Outcome,
    Release,
    Renewal,
    State,
    Successor,
)
from celery_idem.errors import RecordCorrupt
from celery_idem.stores.base import Store
from tests.contract.backends import GARBAGE, STORES, Backend, RedisBackend, on, on_postgres, on_servers, on_shared
from tests.contract.shorthand import LEASE, TTL, answer, complete, stored, take
from tests.support.clock import ManualClock
from tests.support.operations import key_for, op, result
from tests.support.processes import wait_until

SHORT = 0.3  # seconds of a lease that a test waits out by the store's own clock

# -- S1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S1")
@on_shared
@pytest.mark.parametrize("days", [-1, 1, 400])
def test_s1_a_worker_whose_clock_is_wrong_steals_nothing(
    real_store: Store, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    right = time.time
    claim = take(real_store, lease=30)
    monkeypatch.setattr(time, "time", lambda: right() + days * DAY)
    assert answer(real_store, op(message="N")) is Answer.HELD
    assert real_store.renew([claim]) == {claim.token: Renewal.RENEWED}
    other = take(real_store, op("other"), lease=30)
    assert real_store.complete(claim, result()) is Ended.COMPLETED
    monkeypatch.undo()
    assert answer(real_store, op("other", "N")) is Answer.HELD
    assert abs(other.fence - right() * 1_000_000) < 20 * 1_000_000
    completed = stored(real_store)
    assert completed.completed_at is not None
    assert abs(completed.completed_at - right()) < 20
    assert completed.expires_at - completed.completed_at == pytest.approx(TTL)


@pytest.mark.guarantee("S1")
@on_shared
def test_s1_a_lease_lapses_by_the_stores_clock(real_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() - DAY)
    first = take(real_store, lease=3)  # longer than a machine stands still before the next line
    assert answer(real_store, op(message="N")) is Answer.HELD
    wait_until(lambda: answer(real_store, op(message="N")) is Answer.RECLAIMED, 10, "the lease lapses")
    assert real_store.complete(first, result()) is Ended.LOST


@pytest.mark.guarantee("S1")
@on("memory", "sqlite", "redis", "psycopg2", "psycopg3")
def test_s1_the_answer_tells_the_stores_time(real_store: Store) -> None:
    before = time.time()
    decision = real_store.claim(op(), lease=LEASE, ttl=TTL)
    assert before - 5 < decision.now < time.time() + 5
    assert decision.record is not None
    assert decision.record.claimed_at == decision.now
    assert decision.record.lease_expires_at == pytest.approx(decision.now + LEASE, abs=1e-3)
    assert decision.claim is not None
    assert decision.claim.fence == pytest.approx(decision.now * 1_000_000, abs=1000)
    record = stored(real_store)
    assert record == replace(decision.record, notes=record.notes)


@pytest.mark.guarantee("S1")
@on_postgres
def test_s1_the_time_is_read_when_the_row_is_held(backend: Backend, real_store: Store) -> None:
    """``now()`` would stand still from the start of the caller's transaction."""
    claim = take(real_store)
    engine = sqlalchemy.create_engine(backend.url)
    try:
        with engine.begin() as connection:
            begun = connection.execute(sqlalchemy.text("SELECT extract(epoch FROM now())::float8")).scalar_one()

            def later() -> bool:
                clock = sqlalchemy.text("SELECT extract(epoch FROM clock_timestamp())::float8")
                return bool(connection.execute(clock).scalar_one() > begun + SHORT)

            wait_until(later, 10, "the transaction is old")
            assert real_store.complete(claim, result(), connection=connection) is Ended.COMPLETED
        record = stored(real_store)
        assert record.completed_at is not None
        assert record.completed_at >= begun + SHORT
    finally:
        engine.dispose()


# -- S2 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S2")
def test_s2_fences_grow_through_everything_that_can_happen_to_a_key(store: Store, clock: ManualClock) -> None:
    fences: list[int] = []

    def next_claim(**times: float) -> Claim:
        claim = take(store, op(message=f"m{len(fences)}"), **times)
        fences.append(claim.fence)
        return claim

    store.release(next_claim(), Release.INTERRUPTED)
    store.release(next_claim(), Release.ENDED)  # the clock stood still: one more than the last
    clock.advance(-5000)  # a failover to a server whose clock is behind
    next_claim()
    clock.advance(LEASE)
    reclaimed = next_claim()
    assert store.forget(reclaimed.key, reclaimed.fence)
    store.complete(next_claim(lease=1, ttl=1), result())
    clock.advance(1)
    store.complete(next_claim(lease=1, ttl=1), result())  # it had expired
    clock.advance(6000)
    store.purge(100)
    next_claim()
    assert fences == sorted(set(fences)), fences
    assert fences[1] == fences[0] + 1
    assert fences[-1] == int(clock.now * 1_000_000)


@pytest.mark.guarantee("S2")
def test_s2_fences_grow_by_the_stores_own_clock(real_store: Store) -> None:
    fences = []
    for number in range(50):
        claim = take(real_store, op(message=f"m{number}"))
        fences.append(claim.fence)
        real_store.release(claim, Release.ENDED)
    assert fences == sorted(set(fences))


@pytest.mark.guarantee("S2")
def test_s2_a_right_has_a_fence_of_its_own(store: Store, clock: ManualClock) -> None:
    completer = complete(store, op(continues=True))
    fences = [completer.fence]
    for _ in range(4):
        right = store.claim(op(continues=True), lease=LEASE, ttl=TTL, dead_fence=fences[-1]).claim
        assert right is not None
        fences.append(right.fence)
    assert fences == sorted(set(fences))
    assert stored(store).fence == completer.fence


# -- S3 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S3")
@pytest.mark.parametrize("end", ["claimed", "completed", "released", "forgotten"])
def test_s3_an_old_token_changes_nothing_and_is_told_so(store: Store, clock: ManualClock, end: str) -> None:
    old = take(store, op(continues=True))
    clock.advance(LEASE)
    new = take(store, op(message="N", continues=True))
    if end == "completed":
        store.complete(new, result(b"new"))
    elif end == "released":
        store.release(new, Release.INTERRUPTED)
    elif end == "forgotten":
        assert store.forget(new.key, new.fence)
    before = stored(store)
    for claim in (old, replace(old, fence=new.fence)):
        assert store.complete(claim, result(b"old")) is Ended.LOST
        for reason in Release:
            assert store.release(claim, reason, successor=Successor(1, 5)) is Ended.LOST
        assert store.renew([claim]) == {claim.token: Renewal.LOST}
    assert stored(store) == before


@pytest.mark.guarantee("S3")
def test_s3_the_current_token_is_not_disturbed_by_an_old_one(store: Store, clock: ManualClock) -> None:
    old = take(store)
    clock.advance(LEASE)
    new = take(store, op(message="N"))
    assert store.renew([old, new]) == {old.token: Renewal.LOST, new.token: Renewal.RENEWED}
    assert store.complete(old, result(b"old")) is Ended.LOST
    assert store.complete(new, result(b"new")) is Ended.COMPLETED
    assert stored(store).outcome == result(b"new")


# -- S4 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S4")
def test_s4_a_body_that_fails_its_checksum_still_proves_completion(backend: Backend, store: Store) -> None:
    claim = complete(store)
    backend.garble_body(claim.key)
    for operation in (op(), op(message="N")):
        decision = store.claim(operation, lease=LEASE, ttl=TTL)
        assert decision.answer is Answer.COMPLETED
        assert decision.record is not None
        assert decision.record.outcome is not None
        assert decision.record.outcome.encoded is not None
        assert decision.record.outcome.encoded.body == b"garbled"
    assert store.complete(claim, result()) is Ended.COMPLETED
    assert stored(store).state is State.COMPLETED


unreadable = pytest.mark.parametrize(
    ("backend", "what"),
    [
        pytest.param(param.id, what, id=f"{param.id}-{what}", marks=param.marks)
        for param in STORES
        for what in GARBAGE.get(str(param.id), ())
    ],
    indirect=["backend"],
)


@pytest.mark.guarantee("S4")
@pytest.mark.guarantee("S6")
@unreadable
def test_s6_a_record_that_cannot_be_read_is_corrupt_and_left_alone(
    backend: Backend, clock: ManualClock, what: str
) -> None:
    first = backend.open(clock)
    claim, healthy = (replace(take(first, op(name, generation=1)), seen=None) for name in ("order:1", "healthy"))
    store = backend.open(clock)  # one that remembers nothing of the record
    backend.garble(claim.key, what)
    before = backend.raw(claim.key)
    refused: list[Callable[[], Any]] = [
        lambda: store.claim(op(), lease=LEASE, ttl=TTL),
        lambda: store.claim(claim.operation, lease=LEASE, ttl=TTL),
        lambda: store.claim(op(generation=2), lease=LEASE, ttl=TTL, dead_fence=claim.fence),
        lambda: store.release(claim, Release.ENDED),
        lambda: store.note_parked(claim.key, "M", 0, 1),
        lambda: store.get(claim.key),
        lambda: store.forget(claim.key, claim.fence),
    ]
    for verb in refused:
        with pytest.raises(RecordCorrupt) as caught:
            verb()
        assert claim.key in str(caught.value)
    found: list[str] = []
    with pytest.raises(RecordCorrupt, match=claim.key):  # after all the others
        found.extend(record.key for record in store.find())
    assert found == [healthy.key]
    store.purge(100)
    assert backend.raw(claim.key) == before
    with contextlib.suppress(RecordCorrupt):  # it may say so, or answer for the others, or move the lease alone
        assert store.renew([claim, healthy])[healthy.token] is Renewal.RENEWED
    with pytest.raises(RecordCorrupt):
        store.get(claim.key)


@pytest.mark.guarantee("S6")
@unreadable
def test_s6_forget_removes_what_cannot_be_read_and_only_that(backend: Backend, store: Store, what: str) -> None:
    claim = take(store)
    assert store.forget(claim.key, None) is False
    backend.garble(claim.key, what)
    assert store.forget(claim.key, None) is True
    assert store.forget(claim.key, None) is False
    assert store.get(claim.key) is None
    again = take(store, op(message="N"))
    assert (again.answer, again.attempts) == (Answer.ACQUIRED, 1)


@pytest.mark.guarantee("S4")
def test_s4_a_record_of_a_newer_release_is_never_overwritten(
    backend: Backend, store: Store, clock: ManualClock
) -> None:
    claim = take(store, lease=1, ttl=1)
    backend.newer(claim.key)
    before = backend.raw(claim.key)
    clock.advance(DAY)
    assert answer(store, op()) is Answer.NEWER
    assert store.forget(claim.key, None) is False
    assert backend.raw(claim.key) == before


# -- S5 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S5")
def test_s5_a_live_claim_never_expires(store: Store, clock: ManualClock) -> None:
    """A body of ten minutes under a ttl of one second."""
    claim = take(store, lease=60, ttl=1)
    for _ in range(30):
        clock.advance(20)
        assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
        store.purge(100)
        record = stored(store)
        assert record.expires_at == record.lease_expires_at + 1
    assert answer(store, op(message="N")) is Answer.HELD
    assert store.complete(claim, result()) is Ended.COMPLETED


@pytest.mark.guarantee("S5")
def test_s5_a_live_claim_never_expires_by_the_stores_own_clock(real_store: Store) -> None:
    claim = take(real_store, lease=SHORT * 2, ttl=SHORT / 3)
    end = time.monotonic() + SHORT * 3
    seen: list[bool] = []

    def long_enough() -> bool:
        asked = time.monotonic()
        assert real_store.renew([claim]) == {claim.token: Renewal.RENEWED}
        real_store.purge(100)
        record = real_store.get(claim.key)
        if time.monotonic() - asked < SHORT * 2:  # else the machine stood still, and its lease is really over
            assert record is not None
            assert (record.token, record.fence) == (claim.token, claim.fence)
            seen.append(True)
        return len(seen) > 3 and time.monotonic() > end

    wait_until(long_enough, 20, "its expiry would have come", interval=SHORT / 4)
    wait_until(lambda: real_store.get(claim.key) is None, 10, "an abandoned record expires")


@pytest.mark.guarantee("S5")
@pytest.mark.parametrize("ttl", [0, 1, DAY, DAY * 10])
def test_s5_a_tombstone_and_a_record_under_ttl_zero_stay_a_day(store: Store, clock: ManualClock, ttl: float) -> None:
    store.release(take(store, op("tombstone"), ttl=ttl), Release.ENDED)
    complete(store, op("completed"), ttl=ttl)
    take(store, op("claimed"), ttl=ttl)
    assert stored(store, "tombstone").expires_at == clock.now + max(ttl, DAY)
    assert stored(store, "completed").expires_at == clock.now + (ttl or DAY)
    assert stored(store, "claimed").expires_at == clock.now + LEASE + (ttl or DAY)


@pytest.mark.guarantee("S5")
@on("redis")
def test_s5_redis_drops_a_record_when_it_expires_and_not_before(backend: RedisBackend, real_store: Store) -> None:
    """The server's own expiry follows ``expires_at`` through every verb that moves it."""

    def left(key: str) -> float:
        with backend.client() as client:
            milliseconds = client.pttl(f"celery_idem:{key}")
        record = real_store.get(key)
        assert record is not None
        assert milliseconds / 1000 == pytest.approx(record.expires_at - time.time(), abs=10)
        return float(milliseconds) / 1000  # type: ignore[arg-type]

    claim = take(real_store, op(continues=True), lease=100, ttl=50)
    assert left(claim.key) == pytest.approx(150, abs=10)
    real_store.renew([replace(claim, lease=200)])
    assert left(claim.key) == pytest.approx(250, abs=10)
    real_store.complete(claim, result())
    assert left(claim.key) == pytest.approx(100, abs=10)  # the right to continue outlives the ttl
    real_store.claim(op(message="N", continues=True), lease=300, ttl=50)
    assert left(claim.key) == pytest.approx(300, abs=10)
    real_store.settle(claim.key, "N")
    real_store.note_parked(claim.key, "P", 0, 1)
    assert left(claim.key) == pytest.approx(300, abs=10)
    assert real_store.forget(claim.key, claim.fence)
    assert left(claim.key) == pytest.approx(DAY, abs=10)
    released = take(real_store, op("released"), lease=1, ttl=1)
    real_store.release(released, Release.ENDED)
    assert left(released.key) == pytest.approx(DAY, abs=10)


# -- S9 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("S9")
@on_shared
def test_s9_what_the_next_release_adds_to_a_note_does_not_stop_this_one(backend: Backend, store: Store) -> None:
    claim = take(store, op(generation=1))
    store.note_parked(claim.key, "M", 1, 2)
    backend.add_to_note(claim.key, "M", flavour="new", deeper={"more": [1, 2, 3]})
    record = stored(store)
    assert (record.note("M").over, record.note("M").parked) == (0, (1, 2))
    assert answer(store, op(generation=1)) is Answer.HELD
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    assert backend.stored_note(claim.key, "M")["flavour"] == "new"
    store.note_parked(claim.key, "M", 1, 3)
    assert stored(store).note("M").parked == (1, 3)
    assert store.complete(claim, result()) is Ended.COMPLETED
    assert stored(store).note("M").parked == (1, 3)


@pytest.mark.guarantee("S9")
@on_shared
def test_s9_two_releases_take_turns_on_one_key(backend: Backend, clock: ManualClock) -> None:
    """Two workers of one deploy in progress: each reads what the other wrote, and each respects the other's claim."""
    old, new = backend.open(clock), backend.open(clock)
    for turn in range(4):
        mine, theirs = (old, new) if turn % 2 else (new, old)
        claim = take(mine, op(message=f"m{turn}"))
        assert answer(theirs, op(message="x")) is Answer.HELD
        assert mine.release(claim, Release.RETRY, successor=Successor(1, 5)) is Ended.RELEASED
        assert answer(theirs, op(message=f"m{turn}")) is Answer.NOT_DUE
        assert stored(theirs) == stored(mine)
    complete(old, op(message="last"))
    assert answer(new, op()) is Answer.COMPLETED
    claim = take(new, op("beyond"))
    backend.newer(claim.key)
    assert answer(old, op("beyond")) is Answer.NEWER


@pytest.mark.guarantee("S9")
@on_servers
def test_s9_a_failure_kept_by_one_process_is_read_by_another(backend: Backend, clock: ManualClock) -> None:
    first, second = backend.open(clock), backend.open(clock)
    outcome = Outcome(Kind.FAILURE, result(b"\x80\x05.").encoded)
    assert first.complete(take(first), outcome) is Ended.COMPLETED
    assert stored(second).outcome == outcome
    assert second.get(key_for("order:1")) == first.get(key_for("order:1"))
