"""S1, S2 and S5 broken: clocks, fences and expiry."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from celery_idem.core import decide
from celery_idem.core.records import Answer, Record, State
from tests.conformance.broken_claims_base import Bed, breaks

# --- S1 ---------------------------------------------------------------------------------------------------------------


@breaks("S1.a_claim_tells_the_stores_time", also=["find.find_matches_every_condition"])
class DatesClaimsItself(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if written is not None and written.state is State.CLAIMED:
            written = replace(written, claimed_at=time.time())
        return replace(decision, record=written or decision.record), written


@breaks("S1.an_end_tells_the_stores_time")
class DatesCompletionsItself(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        ended, written = decide.decide_complete(record, claim, outcome, now=now)
        return ended, written and replace(written, completed_at=time.time())


@breaks("S1.a_lease_ends_by_the_stores_clock_to_the_instant")
class TakesALittleEarly(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        early = record is not None and record.state is State.CLAIMED and record.lease_expires_at < now + 0.3
        if early and record.expires_at > now and record.token != operation.token:
            record = replace(record, lease_expires_at=now)
        return decide.decide_claim(record, operation, now=now, **how)


@breaks("S1.a_worker_whose_clock_is_wrong_steals_nothing")
class TheLaterClockIsRight(Bed):
    def now(self) -> float:
        return max(super().now(), time.time())


@breaks("S1.the_clock_is_read_when_the_record_is_held")
class ReadsTheClockAndWaits(Bed):
    def complete(self, claim: Any, outcome: Any, *, connection: Any = None) -> Any:
        now = self.now()
        return self.act(claim.key, lambda record, _: self.judge_complete(record, claim, outcome, now=now))


# --- S2 ---------------------------------------------------------------------------------------------------------------


class Fencing(Bed):
    """Claims and rights get a fence of another make."""

    def fence(self, record: Record | None, written: Record, now: float) -> int:
        raise NotImplementedError

    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if written is not None and written.state is State.CLAIMED:
            written = replace(written, fence=self.fence(record, written, now))
            decision = replace(decision, record=written, claim=replace(decision.claim, fence=written.fence))
        return decision, written


@breaks("S2.a_fence_is_the_stores_time_in_microseconds")
class FencesInMilliseconds(Fencing):
    def fence(self, record: Record | None, written: Record, now: float) -> int:
        return max(0 if record is None else record.fence + 1, int(now * 1000))


@breaks(
    "S2.a_fence_grows_from_claim_to_claim",
    "S2.a_fence_grows_though_the_clock_was_set_back",
    also=["S3", "S8", "forget.forget_needs_the_fence_it_saw"],
)
class TheClockIsEnough(Fencing):
    def fence(self, record: Record | None, written: Record, now: float) -> int:
        return int(now * 1_000_000)


@breaks("S2.a_fence_grows_from_the_dead_to_the_living", also=["S3", "S8", "forget.forget_needs_the_fence_it_saw"])
class InheritsTheFence(Fencing):
    def fence(self, record: Record | None, written: Record, now: float) -> int:
        reclaimed = record is not None and written.answer is Answer.RECLAIMED and record.state is State.CLAIMED
        return record.fence if record is not None and reclaimed else written.fence


@breaks("S2.a_fence_grows_after_expiry")
class ExpiryTakesTheFence(Fencing):
    def fence(self, record: Record | None, written: Record, now: float) -> int:
        expired = record is not None and record.expires_at <= now
        return int(now * 1_000_000) if expired else written.fence


@breaks("S2.a_fence_grows_after_purge", "S2.a_fence_is_the_stores_time_in_microseconds", also=["R6"])
class CountsFromOne(Fencing):
    def fence(self, record: Record | None, written: Record, now: float) -> int:
        return 100 if record is None else record.fence + 1


@breaks(
    "S2.a_right_has_a_fence_above_its_records",
    also=["R12.a_right_passes_on_from_the_dead", "S8.one_of_many_continues_a_message", "R11"],
)
class RightsShareTheFence(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if written is None or decision.answer is not Answer.COMPLETED:
            return decision, written
        message = operation.delivery.message_id
        note = written.note(message)
        right = replace(note.continuing, fence=record.fence)
        written = replace(written, notes={**written.notes, message: replace(note, continuing=right)})
        return replace(decision, record=written, claim=replace(decision.claim, fence=record.fence)), written


# --- S5 ---------------------------------------------------------------------------------------------------------------


@breaks("S5.expiry_moves_with_every_renewal", "S5.a_live_claim_is_never_purged")
class ExpiryStays(Bed):
    def judge_renew(self, record: Any, claim: Any, *, now: float) -> Any:
        renewed, written = decide.decide_renew(record, claim, now=now)
        there = written is not None and record is not None and written.state is State.CLAIMED
        return renewed, replace(written, expires_at=record.expires_at) if there else written


@breaks(
    "S5.a_claim_keeps_its_record_for_lease_and_ttl",
    also=["complete", "release", "renew", "R7", "R12", "S2", "purge", "R3", "find"],
)
class ExpiresByTtlAlone(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, lease: float, ttl: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, lease=lease, ttl=ttl, **how)
        if written is not None and written.state is State.CLAIMED:
            written = replace(written, expires_at=now + decide.kept(ttl))
        return decision, written


@breaks("S5.a_live_claim_is_never_purged")
class PurgesByAge(Bed):
    def doomed(self, record: Record) -> bool:
        aged = record.state is State.CLAIMED and record.claimed_at + 120 <= self.now()
        return super().doomed(record) or (aged and record.lease_expires_at > self.now())


@breaks("S5.a_claim_that_is_renewed_for_days_is_never_purged")
class PurgesWhatWasClaimedLongAgo(Bed):
    def doomed(self, record: Record) -> bool:
        long_ago = record.state is State.CLAIMED and record.claimed_at + 7200 <= self.now()
        return super().doomed(record) or long_ago


@breaks("S5.a_completion_stays_for_its_ttl")
class TtlCountsFromTheClaim(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        ended, written = decide.decide_complete(record, claim, outcome, now=now)
        shortened = written is not None and record is not None and record.claimed_at < now
        return ended, replace(written, expires_at=written.expires_at - 30) if shortened else written


@breaks("S5.under_ttl_zero_a_record_stays_a_day")
class TtlZeroIsForEver(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        ended, written = decide.decide_complete(record, claim, outcome, now=now)
        return ended, replace(written, expires_at=now + 1e9) if written is not None and claim.ttl == 0 else written


@breaks("S5.a_tombstone_stays_a_day_at_least", also=["R2"])
class TombstonesStayForTheTtl(Bed):
    def judge_release(self, record: Any, claim: Any, *args: Any, now: float) -> Any:
        ended, written = decide.decide_release(record, claim, *args, now=now)
        return ended, replace(
            written, expires_at=now + claim.ttl
        ) if written is not None and 0 < claim.ttl < 100 else written
