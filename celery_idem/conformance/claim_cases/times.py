"""S1, S2 and S5: whose clock judges, fences that only grow, and how long a record stays."""

from __future__ import annotations

import threading
import time
from unittest import mock

from celery_idem.conformance.case import expect, expect_is
from celery_idem.conformance.claim_cases.bench import LEASE, TTL, Bench, case, close, expect_close, outcome
from celery_idem.conformance.threads import PATIENCE
from celery_idem.core.records import DAY, Answer, Ended, Release, Renewal

CENTURY = 36_525 * DAY
HEAD_START = 0.2
"""Real seconds a waiting verb has to come to where it waits."""


# --- S1 ---------------------------------------------------------------------------------------------------------------


@case("S1", "clock")
def a_claim_tells_the_stores_time(bench: Bench) -> None:
    """A store that dates a claim by the worker's clock."""
    bench.clock.advance(17.5)
    decision = bench.ask(bench.op())
    expect_close(decision.now, bench.clock(), f"claimed at {bench.clock()}, the answer says {decision.now}")
    record = bench.stored()
    expect_close(record.claimed_at, bench.clock(), f"claimed at {bench.clock()}, the record says {record.claimed_at}")
    until = record.lease_expires_at
    expect_close(until, bench.clock() + LEASE, f"claimed for {LEASE} s at {bench.clock()}, the lease ends at {until}")


@case("S1", "clock")
def an_end_tells_the_stores_time(bench: Bench) -> None:
    """A store that dates a completion or a retry by the worker's clock."""
    claim = bench.take()
    bench.clock.advance(7.5)
    bench.store.complete(claim, outcome())
    at = bench.stored().completed_at
    expect_close(at, bench.clock(), f"completed at {bench.clock()}, the record says {at}")


@case("S1", "clock")
def a_lease_ends_by_the_stores_clock_to_the_instant(bench: Bench) -> None:
    """A store that takes a key a moment too early, because the clocks may differ."""
    bench.take()
    bench.clock.advance(LEASE - 0.25)
    bench.answers(Answer.HELD, bench.op(message="N"), "a quarter of a second before the lease ends")


@case("S1")
def a_worker_whose_clock_is_wrong_steals_nothing(bench: Bench) -> None:
    """A store that also looks at the clock of the worker that asks."""
    right = time.time
    claim = bench.take()
    for years in (-100, 100):
        with mock.patch.object(time, "time", lambda years=years: right() + CENTURY / 100 * years):
            bench.answers(Answer.HELD, bench.op(message="N"), f"by a worker whose clock is {years} years off")
            renewed = bench.store.renew([claim])[claim.token]
            expect_is(renewed, Renewal.RENEWED, f"the renewal by such a worker was answered {renewed.value}")
        bench.answers(Answer.HELD, bench.op(message="N"), "after such a worker renewed it")


@case("S1", "clock", "locked")
def the_clock_is_read_when_the_record_is_held(bench: Bench) -> None:
    """A store that reads its clock, and then waits for the record: what it writes is dated before it waited."""
    claim = bench.take()
    said: list[Ended] = []
    waiting = threading.Thread(target=lambda: said.append(bench.store.complete(claim, outcome())), daemon=True)
    with bench.hook("locked")(claim.key):
        waiting.start()
        time.sleep(HEAD_START)
        bench.clock.advance(5)
        time.sleep(HEAD_START)
    waiting.join(PATIENCE)
    expect_is(said, [Ended.COMPLETED], f"a completion that waited for the record was answered {said}")
    at = bench.stored().completed_at
    expect_close(at, bench.clock(), f"the record was free at {bench.clock()}, and it is said to be completed at {at}")


# --- S2 ---------------------------------------------------------------------------------------------------------------


@case("S2", "clock")
def a_fence_is_the_stores_time_in_microseconds(bench: Bench) -> None:
    """A store that counts claims from one: after a failover that lost writes its fences are used again."""
    fence = bench.take().fence
    expect(
        abs(fence - bench.clock() * 1_000_000) <= EXACTLY,
        f"claimed at {bench.clock()}, the fence is {fence}, not in microseconds",
    )


EXACTLY = 2
"""Microseconds that a fence may be off: what a float cannot say."""


@case("S2")
def a_fence_grows_from_claim_to_claim(bench: Bench) -> None:
    """A store that gives two claims of one key the same fence, because its clock stood still."""
    fences = []
    for number in range(6):
        claim = bench.take(bench.op(message=f"m{number}"))
        fences.append(claim.fence)
        bench.store.release(claim, Release.YIELDED)
    expect(fences == sorted(set(fences)), f"the fences of claims in a row were {fences}; wanted: each above the last")


@case("S2")
def a_fence_grows_from_the_dead_to_the_living(bench: Bench) -> None:
    """A store that gives a reclaimed key the fence of the holder it was taken from."""
    first = bench.take()
    second = bench.take(bench.op(message="N"), dead=first.fence)
    expect(
        second.fence > first.fence, f"taken over from fence {first.fence}, the new one is {second.fence}, not higher"
    )


@case("S2", "clock")
def a_fence_grows_though_the_clock_was_set_back(bench: Bench) -> None:
    """A store that takes its fence from its clock alone."""
    first = bench.take()
    bench.store.release(first, Release.YIELDED)
    bench.clock.advance(-5000)
    second = bench.take(bench.op(message="N"))
    expect(
        second.fence > first.fence,
        f"with the clock set back, fence {first.fence} was followed by {second.fence}, not by a higher one",
    )


@case("S2", "clock")
def a_fence_grows_after_expiry(bench: Bench) -> None:
    """A store that forgets the fence of an expired record that is still there."""
    bench.store.release(bench.take(), Release.YIELDED)
    bench.clock.advance(-5000)
    first = bench.complete(bench.op(message="N"), lease=1, ttl=1)
    bench.clock.advance(5)
    second = bench.take(bench.op(message="P"))
    expect(
        second.fence > first.fence,
        f"after expiry, fence {first.fence} was followed by {second.fence}, not by a higher one",
    )


@case("S2", "clock")
def a_fence_grows_after_purge(bench: Bench) -> None:
    """A store that counts fences, and begins anew where a record was purged."""
    first = bench.take(lease=1, ttl=1)
    second = bench.take(bench.op(message="N"), dead=first.fence, lease=1, ttl=1)
    bench.clock.advance(10)
    bench.store.purge(1_000_000)
    third = bench.take(bench.op(message="P"))
    expect(
        third.fence > second.fence,
        f"after a purge, fence {second.fence} was followed by {third.fence}, not by a higher one",
    )


@case("S2")
def a_right_has_a_fence_above_its_records(bench: Bench) -> None:
    """A store in which two who continue one message have the same fence."""
    completer = bench.complete(bench.op(continues=True))
    fences = [completer.fence]
    for _ in range(4):
        fences.append(bench.right(bench.op(continues=True), dead=fences[-1]).fence)
    told = f"the fences of a completion and of rights after it were {fences}; wanted: each above the last"
    expect(fences == sorted(set(fences)), told)


# --- S5 ---------------------------------------------------------------------------------------------------------------


@case("S5", "clock")
def expiry_moves_with_every_renewal(bench: Bench) -> None:
    """A store that renews the lease and lets the record expire under it."""
    claim = bench.take(ttl=1)
    for _ in range(3):
        bench.clock.advance(20)
        bench.store.renew([claim])
        record = bench.stored()
        wanted = record.lease_expires_at + 1
        expect(close(record.expires_at, wanted), f"the record expires at {record.expires_at}, not {wanted}")


@case("S5", "clock")
def a_claim_keeps_its_record_for_lease_and_ttl(bench: Bench) -> None:
    """A store that lets a record expire while its claim lives."""
    bench.take(ttl=1)
    expires_at = bench.stored().expires_at
    expect_close(expires_at, bench.clock() + LEASE + 1, f"claimed at {bench.clock()}, it expires at {expires_at}")


@case("S5")
def a_live_claim_is_never_purged(bench: Bench) -> None:
    """A store that counts the ttl of a claim from its beginning: a long body loses its record."""
    since = time.monotonic()
    claim = bench.take(lease=bench.short, ttl=bench.short / 10)
    for _ in range(6):
        bench.wait(bench.short * 0.4)
        renewed = time.monotonic()
        bench.store.renew([claim])
        bench.store.purge(1_000_000)
        record = bench.other.get(claim.key)
        if not bench.stood_still(since):
            expect_is(record and record.fence, claim.fence, f"the record of a live claim became {record}")
        since = renewed


@case("S5", "clock")
def a_claim_that_is_renewed_for_days_is_never_purged(bench: Bench) -> None:
    """A store that takes a claim for abandoned because it was claimed long ago."""
    claim = bench.take(lease=DAY / 4, ttl=60)
    for hours in range(3, 3 * 24 + 1, 3):
        bench.clock.advance(DAY / 8)
        bench.store.renew([claim])
        bench.store.purge(1_000_000)
        record = bench.other.get(claim.key)
        told = f"purged {hours} h after it was claimed, the record of a claim that is renewed became {record}"
        expect(record is not None and record.fence == claim.fence, told)


@case("S5", "clock")
def a_completion_stays_for_its_ttl(bench: Bench) -> None:
    """A store that counts the ttl from the claim, or forgets the outcome when it likes."""
    claim = bench.take()
    bench.clock.advance(30)
    bench.store.complete(claim, outcome())
    bench.clock.advance(TTL - 0.25)
    bench.answers(Answer.COMPLETED, bench.op(), "just before the ttl ends")
    bench.clock.advance(0.25)
    expect(bench.other.get(claim.key) is None, "the record is still there when its ttl is over")


@case("S5", "clock")
def under_ttl_zero_a_record_stays_a_day(bench: Bench) -> None:
    """A store that takes ttl 0 for "forget at once" or "keep for ever"."""
    bench.complete(ttl=0)
    expires_at = bench.stored().expires_at
    expect_close(expires_at, bench.clock() + DAY, f"completed at {bench.clock()}, it expires at {expires_at}")


@case("S5", "clock")
def a_tombstone_stays_a_day_at_least(bench: Bench) -> None:
    """A store that forgets within the day what must not run again."""
    for ttl, stays in ((0, DAY), (60, DAY), (DAY * 7, DAY * 7)):
        name = f"ttl {ttl}"
        bench.store.release(bench.take(bench.op(name), ttl=ttl), Release.ENDED)
        expires_at = bench.stored(name).expires_at
        wanted = bench.clock() + stays
        expect(close(expires_at, wanted), f"under ttl {ttl} a tombstone expires at {expires_at}, not {wanted}")
