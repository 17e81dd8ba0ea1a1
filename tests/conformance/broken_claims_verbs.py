"""The other verbs broken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from celery_idem.core import decide
from celery_idem.core.records import Answer, Ended, Note, Record, Release, Renewal, State
from celery_idem.errors import StoreUnavailable
from tests.conformance.broken_claims_base import Bed, breaks

# --- complete ---------------------------------------------------------------------------------------------------------


class Completing(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        wrong = self.wrong(record, claim, outcome, now) if record is not None and record.expires_at > now else None
        return wrong or decide.decide_complete(record, claim, outcome, now=now)

    def wrong(self, record: Record, claim: Any, outcome: Any, now: float) -> Any:
        """Another answer, and what is written, or None."""


@breaks(
    "complete.a_completion_by_the_same_token_may_be_repeated",
    also=["S6.a_completion_whose_reply_was_lost_may_be_repeated"],
)
class CompletesOnce(Completing):
    def wrong(self, record: Record, claim: Any, outcome: Any, now: float) -> Any:
        return (Ended.LOST, None) if record.state is State.COMPLETED else None


@breaks("complete.a_completion_by_the_same_token_may_be_repeated")
class TheLastValueStays(Completing):
    def wrong(self, record: Record, claim: Any, outcome: Any, now: float) -> Any:
        again = record.state is State.COMPLETED and record.token == claim.token
        return (Ended.COMPLETED, replace(record, outcome=outcome)) if again else None


@breaks("complete.a_completion_makes_the_record_whole")
class KeepsAttempts(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        ended, written = decide.decide_complete(record, claim, outcome, now=now)
        return ended, written and replace(written, attempts=claim.attempts, unknown=claim.unknown)


@breaks("complete.a_lapsed_claim_nobody_took_completes")
class TooLateIsTooLate(Completing):
    def wrong(self, record: Record, claim: Any, outcome: Any, now: float) -> Any:
        late = record.state is State.CLAIMED and record.lease_expires_at <= now
        return (Ended.LOST, None) if late else None


@breaks("complete.a_vanished_claim_completes")
class WhatIsGoneIsGone(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        if record is None or record.expires_at <= now:
            return Ended.LOST, None
        return decide.decide_complete(record, claim, outcome, now=now)


@breaks("complete.who_completes_may_continue", also=["R3", "R10", "R11", "R12", "S2", "settle", "renew", "S8"])
class WhoAsksFirstContinues(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        delivery = replace(claim.operation.delivery, continues=False)
        claim = replace(claim, operation=replace(claim.operation, delivery=delivery))
        return decide.decide_complete(record, claim, outcome, now=now)


# --- release ----------------------------------------------------------------------------------------------------------


@breaks("release.a_release_keeps_what_its_reason_says")
class YieldedIsInterrupted(Bed):
    def judge_release(self, record: Any, claim: Any, reason: Any, successor: Any, *, now: float) -> Any:
        ended, written = decide.decide_release(record, claim, reason, successor, now=now)
        doubtful = written is not None and reason is Release.YIELDED and claim.operation.delivery.generation
        return ended, replace(written, unknown=True) if doubtful else written


@breaks("release.a_retry_is_announced_for_when_it_is_due")
class TheDelayCountsFromTheClaim(Bed):
    def judge_release(self, record: Any, claim: Any, reason: Any, successor: Any, *, now: float) -> Any:
        if successor is not None and record is not None:
            successor = replace(successor, delay=successor.delay - (now - record.claimed_at))
        return decide.decide_release(record, claim, reason, successor, now=now)


@breaks("release.a_release_tells_what_its_token_did_before")
class TakesBackACompletion(Bed):
    def judge_release(self, record: Any, claim: Any, *args: Any, now: float) -> Any:
        if record is not None and record.token == claim.token and record.state is State.COMPLETED:
            record = replace(record, state=State.CLAIMED)
        return decide.decide_release(record, claim, *args, now=now)


@breaks("release.a_release_tells_what_its_token_did_before", also=["S6.a_release_whose_reply_was_lost_may_be_repeated"])
class ReleasesOnce(Bed):
    def judge_release(self, record: Any, claim: Any, *args: Any, now: float) -> Any:
        if record is not None and record.state is State.RELEASED:
            return Ended.LOST, None
        return decide.decide_release(record, claim, *args, now=now)


@breaks("release.a_lapsed_claim_nobody_took_is_released")
class TooLateToRelease(Bed):
    def judge_release(self, record: Any, claim: Any, *args: Any, now: float) -> Any:
        if record is not None and record.state is State.CLAIMED and record.lease_expires_at <= now:
            return Ended.LOST, None
        return decide.decide_release(record, claim, *args, now=now)


# --- renew ------------------------------------------------------------------------------------------------------------


class Renewing(Bed):
    def judge_renew(self, record: Any, claim: Any, *, now: float) -> Any:
        there = record if record is not None and record.expires_at > now else None
        return self.wrong(there, claim, now) or decide.decide_renew(record, claim, now=now)

    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        """Another answer, and what is written, or None."""


@breaks("renew.a_lapsed_lease_nobody_took_is_renewed")
class LapsedIsLost(Renewing):
    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        lapsed = record is not None and record.state is State.CLAIMED and record.lease_expires_at <= now
        return (Renewal.LOST, None) if lapsed else None


@breaks("renew.a_renewal_counts_from_now", also=["S5"])
class SaysRenewed(Renewing):
    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        if record is None or record.state is not State.CLAIMED or not self.free(claim.key):
            return None
        early = record.lease_expires_at > now + 30 and record.token == claim.token and record.record_version == 1
        return (Renewal.RENEWED, None) if early else None


@breaks("renew.a_vanished_claim_is_restored")
class VanishedIsLost(Renewing):
    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        return (Renewal.LOST, None) if record is None else None


@breaks("renew.a_vanished_claim_is_restored")
class RestoredWithoutDoubt(Renewing):
    def judge_renew(self, record: Any, claim: Any, *, now: float) -> Any:
        renewed, written = super().judge_renew(record, claim, now=now)
        return renewed, replace(written, unknown=False) if record is None and written is not None else written


@breaks("renew.a_right_never_makes_a_record")
class RightsMakeRecords(Renewing):
    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        return decide.decide_renew(None, replace(claim, right=False), now=now) if record is None else None


@breaks("renew.a_right_is_renewed")
class RightsAreLeftAlone(Renewing):
    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        right = record.note(claim.operation.delivery.message_id).continuing if record is not None else None
        return (Renewal.RENEWED, None) if right is not None and right.token == claim.token else None


@breaks("renew.a_renewal_tells_whose_right_was_taken")
class TheCompleterContinuesForEver(Renewing):
    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        completer = record is not None and record.state is State.COMPLETED and record.token == claim.token
        return (Renewal.RENEWED, None) if completer else None


@breaks("renew.an_ended_claim_is_not_lost")
class EndedIsLost(Renewing):
    def wrong(self, record: Record | None, claim: Any, now: float) -> Any:
        ended = record is not None and record.state is State.RELEASED and record.token == claim.token
        return (Renewal.LOST, None) if ended else None


@breaks("renew.a_large_batch_is_renewed_whole")
class RenewsTheFirstHundred(Bed):
    def renew(self, claims: Sequence[Any]) -> Mapping[str, Renewal]:
        return super().renew(claims[:100])


@breaks("renew.a_large_batch_is_renewed_whole")
class SaysThatItRenewedAll(Bed):
    def renew(self, claims: Sequence[Any]) -> Mapping[str, Renewal]:
        return {**{claim.token: Renewal.RENEWED for claim in claims}, **super().renew(claims[:100])}


@breaks("renew.of_nothing_nothing_is_renewed")
class NeedsAClaimToRenew(Bed):
    def renew(self, claims: Sequence[Any]) -> Mapping[str, Renewal]:
        return {claims[0].token: self.renew_one(claims[0]), **super().renew(claims[1:])}


# --- settle, note_parked ----------------------------------------------------------------------------------------------


@breaks("settle.settling_ends_the_right_for_good")
class SettlesEverybody(Bed):
    def judge_settle(self, record: Any, message_id: str, *, now: float) -> Any:
        written = decide.decide_settle(record, message_id, now=now)
        if written is None:
            return None
        return replace(written, notes={m: replace(note, continuing=None) for m, note in written.notes.items()})


@breaks("settle.settling_needs_a_completion")
class SettlesAnything(Bed):
    def judge_settle(self, record: Any, message_id: str, *, now: float) -> Any:
        if record is None or record.state is State.COMPLETED:
            return decide.decide_settle(record, message_id, now=now)
        written = decide.decide_settle(replace(record, state=State.COMPLETED), message_id, now=now)
        return written and replace(written, state=record.state)


@breaks("note_parked.the_highest_count_of_the_highest_generation_stays")
class TheLastCountStays(Bed):
    def judge_parked(self, record: Any, message_id: str, *args: Any, now: float) -> Any:
        if record is not None and message_id in record.notes:
            note = replace(record.notes[message_id], parked=None)
            record = replace(record, notes={**record.notes, message_id: note})
        return decide.decide_parked(record, message_id, *args, now=now)


@breaks("note_parked.noting_a_park_makes_no_record")
class ANoteMakesARecord(Bed):
    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        if self.line == "up" and key not in self.place.records:
            blank = Record(key, State.RELEASED, "", 1, message_id, generation, 0, expires_at=self.now() + 100)
            self.place.records[key] = blank
        super().note_parked(key, message_id, generation, count)


@breaks("note_parked.the_youngest_notes_stay_and_live_ones_beyond")
class KeepsEveryNote(Bed):
    def judge_parked(self, record: Any, message_id: str, *args: Any, now: float) -> Any:
        written = decide.decide_parked(record, message_id, *args, now=now)
        return written and replace(written, notes={**record.notes, **written.notes})


@breaks("note_parked.the_youngest_notes_stay_and_live_ones_beyond")
class DropsTheOldestNote(Bed):
    def judge_parked(self, record: Any, message_id: str, *args: Any, now: float) -> Any:
        written = decide.decide_parked(record, message_id, *args, now=now)
        if written is None:
            return None
        youngest = sorted({**record.notes, **written.notes}.items(), key=lambda item: item[1].at)[-64:]
        return replace(written, notes=dict(youngest))


# --- get, find --------------------------------------------------------------------------------------------------------


@breaks("find.what_expired_is_not_told", also=["S5", "complete", "renew", "note_parked", "purge", "R2"])
class TellsTheExpired(Bed):
    def expired(self, record: Record, now: float) -> bool:
        return False


@breaks("find.find_matches_every_condition")
class IgnoresTheAge(Bed):
    def matches(self, record: Record, now: float, task: Any, scope: Any, state: Any, older_than: Any) -> bool:
        return super().matches(record, now, task, scope, state, None)


@breaks("find.find_matches_every_condition")
class IgnoresTheState(Bed):
    def matches(self, record: Record, now: float, task: Any, scope: Any, state: Any, older_than: Any) -> bool:
        return super().matches(record, now, task, scope, None, older_than)


@breaks("find.find_stops_at_its_limit", also=["S8.one_locked_record_delays_no_other"])
class TellsOnePage(Bed):
    def find(self, **conditions: Any) -> Iterator[Record]:
        return islice(super().find(**conditions), 10)


# --- forget, purge ----------------------------------------------------------------------------------------------------


class Forgetting(Bed):
    def judge_forget(self, record: Any, fence: int, *, now: float) -> Any:
        forgotten, written = decide.decide_forget(record, fence, now=now)
        return forgotten, written and self.tombstone(record, written)

    def tombstone(self, record: Record, written: Record) -> Record:
        raise NotImplementedError


@breaks("forget.forget_leaves_a_tombstone", also=["S3"])
class KeepsTheValue(Forgetting):
    def tombstone(self, record: Record, written: Record) -> Record:
        return replace(written, outcome=record.outcome)


@breaks("forget.forget_ends_doubt")
class KeepsTheDoubt(Forgetting):
    def tombstone(self, record: Record, written: Record) -> Record:
        return replace(written, unknown=record.unknown)


@breaks("forget.forget_wakes_no_copies", also=["forget.forget_leaves_a_tombstone", "S3"])
class ForgetsEverything(Forgetting):
    def tombstone(self, record: Record, written: Record) -> Record:
        return replace(written, notes={m: Note(parked=note.parked, at=note.at) for m, note in written.notes.items()})


@breaks("forget.forget_needs_the_fence_it_saw")
class ForgetsWhateverIsThere(Bed):
    def judge_forget(self, record: Any, fence: int, *, now: float) -> Any:
        newer = record is not None and 0 < fence < record.fence
        return decide.decide_forget(record, record.fence if newer else fence, now=now)


@breaks("purge.purge_deletes_expired_records_only", also=["S5"])
class PurgesLapsedClaims(Bed):
    def doomed(self, record: Record) -> bool:
        lapsed = record.state is State.CLAIMED and record.lease_expires_at <= self.now()
        return lapsed or super().doomed(record)


@breaks("purge.purge_stops_at_its_limit")
class PurgesEverythingAtOnce(Bed):
    def purge(self, limit: int) -> int:
        return super().purge(1_000_000)


@breaks("purge.purge_stops_at_its_limit")
class NeverPurges(Bed):
    def purge(self, limit: int) -> int:
        return 0


@breaks("purge.purge_stops_at_its_limit")
class PurgesByTheWorkersClock(Bed):
    def doomed(self, record: Record) -> bool:
        return record.expires_at <= time.time()


# --- close ------------------------------------------------------------------------------------------------------------


@breaks("close.a_closed_store_opens_again")
class ClosedForGood(Bed):
    closed = False

    def close(self) -> None:
        self.closed = True

    def away(self) -> None:
        if self.closed:
            raise StoreUnavailable("the pool is closed", may_have_landed=False)
        super().away()


# --- the table --------------------------------------------------------------------------------------------------------


@breaks("table.random_histories_follow_the_decision_table")
class AnswersWithoutTheClock(Bed):
    """No rule's own case looks at the time in an answer that is HELD."""

    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        return (replace(decision, now=0.0) if decision.answer is Answer.OVER else decision), written
