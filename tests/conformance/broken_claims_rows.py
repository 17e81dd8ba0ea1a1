"""R1 to R12 broken: the decision table with one row, or their order, wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_idem.core import decide
from celery_idem.core.records import RECORD_VERSION, Answer, Decision, Note, Record, State
from tests.conformance.broken_claims_base import Bed, breaks


def note_of(record: Record | None, operation: Any) -> Note:
    return Note() if record is None else record.note(operation.delivery.message_id)


def noting(record: Record, operation: Any, **changed: Any) -> Record:
    """The record with something else in the caller's note."""
    message = operation.delivery.message_id
    return replace(record, notes={**record.notes, message: replace(record.note(message), **changed)})


def alive(record: Record | None, now: float) -> bool:
    return record is not None and record.expires_at > now and record.record_version <= RECORD_VERSION


class Judging(Bed):
    """The claim is judged by a table that is wrong."""

    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        if alive(record, now):
            wrong = self.wrong(record, operation, now, **how)
            if wrong is not None:
                return wrong
        return decide.decide_claim(record, operation, now=now, **how)

    def wrong(self, record: Record, operation: Any, now: float, *, lease: float, ttl: float, dead_fence: Any) -> Any:
        """Another answer to the claim of a record that is there, or None."""


def standing(answer: Answer, record: Record, now: float) -> Any:
    return Decision(answer, None, record, now), None


def as_if(record: Record, operation: Any, now: float, **how: Any) -> Any:
    return decide.decide_claim(record, operation, now=now, **how)


# --- R1, R2 -----------------------------------------------------------------------------------------------------------


@breaks("R1.a_newer_record_is_not_understood")
class UnderstandsTheFuture(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        if record is not None and record.record_version > RECORD_VERSION and record.expires_at > now:
            return standing(Answer.HELD, record, now)
        return decide.decide_claim(record, operation, now=now, **how)


@breaks("R1.a_newer_record_is_newer_after_it_expired")
class LooksAtExpiryFirst(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        gone = record is not None and record.expires_at <= now and record.record_version > RECORD_VERSION
        return decide.decide_claim(None if gone else record, operation, now=now, **how)


@breaks("R2.a_key_nobody_used_is_acquired", also=["find.find_matches_every_condition"])
class ForgetsTheScope(Bed):
    def write(self, key: str, record: Record) -> None:
        super().write(key, replace(record, scope=""))


@breaks("R2.an_expired_record_is_as_good_as_none")
class NotesNeverExpire(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if written is not None and record is not None and record.expires_at <= now:
            written = replace(written, notes={**record.notes, **written.notes})
        return decision, written


# --- R3 ---------------------------------------------------------------------------------------------------------------


@breaks(
    "R3.ones_own_claim_is_answered_again",
    also=["R3", "S8.one_token_many_times_at_once_is_one_claim", "S6.a_claim_whose_reply_was_lost_may_have_landed"],
)
class KnowsNobodyAgain(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        if record.state is State.CLAIMED and record.token == operation.token:
            return standing(Answer.HELD, record, now)
        return None


@breaks("R3.ones_own_reclaim_is_told_as_one")
class TellsEveryClaimAsNew(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        if record.state is State.CLAIMED and record.token == operation.token:
            return as_if(replace(record, answer=Answer.ACQUIRED), operation, now, **how)
        return None


@breaks("R3.ones_own_lapsed_claim_is_answered_again")
class TakesOverFromItself(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        lapsed = record.state is State.CLAIMED and record.lease_expires_at <= now
        if lapsed and record.token == operation.token:
            return as_if(replace(record, token="somebody"), operation, now, **how)
        return None


@breaks("R3.ones_own_right_is_answered_again")
class KnowsNoRightAgain(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        right = record.note(operation.delivery.message_id).continuing
        if right is not None and right.token == operation.token:
            return standing(Answer.HELD, record, now)
        return None


# --- R4 ---------------------------------------------------------------------------------------------------------------


@breaks("R4.what_is_over_stays_over", also=["forget.forget_wakes_no_copies", "order"])
class EndedMayRunAgain(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        over = record.note(operation.delivery.message_id).over
        if record.state is State.RELEASED and over >= operation.delivery.generation:
            return as_if(noting(record, operation, over=operation.delivery.generation - 1), operation, now, **how)
        return None


@breaks(
    "R4.a_claim_ends_the_generations_before_it",
    also=["release.a_release_keeps_what_its_reason_says", "S9.what_the_next_release_notes_does_not_stop_this_one"],
)
class OnlyReleasesEnd(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if written is not None and decision.answer is not Answer.COMPLETED and note_of(written, operation).over >= 0:
            before = note_of(record, operation).over if alive(record, now) else -1
            written = noting(written, operation, over=before)
        return decision, written


@breaks("R4.over_is_one_messages_affair", also=["R9", "forget.forget_leaves_a_tombstone"])
class OverIsTheKeysAffair(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        over = max((note.over for note in record.notes.values()), default=-1)
        if record.state is State.RELEASED and over >= 3 and operation.delivery.generation <= over:
            return standing(Answer.OVER, record, now)
        return None


# --- R5 ---------------------------------------------------------------------------------------------------------------


@breaks("R5.another_message_with_another_fingerprint_is_a_mismatch", also=["order.mismatch_comes_before_reclaim"])
class ComparesNothing(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        return as_if(record, replace(operation, fingerprint=""), now, **how) if record.fingerprint else None


@breaks("R5.fingerprints_are_compared_where_both_have_one")
class ComparesEmptyOnes(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        if record.state is State.CLAIMED and bool(record.fingerprint) != bool(operation.fingerprint):
            return standing(Answer.MISMATCH, record, now)
        return None


@breaks("R5.a_released_key_takes_another_fingerprint")
class RemembersWhatWasReleased(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        differ = record.fingerprint and operation.fingerprint and record.fingerprint != operation.fingerprint
        return standing(Answer.MISMATCH, record, now) if record.state is State.RELEASED and differ else None


# --- R6, R7 -----------------------------------------------------------------------------------------------------------


@breaks("R6.a_live_lease_holds_against_everybody")
class ARetryDoesNotWait(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        if record.state is State.CLAIMED and operation.delivery.generation > record.generation + 3:
            return as_if(record, operation, now, **{**how, "dead_fence": record.fence})
        return None


@breaks("R6.another_fence_proves_nobody_dead")
class AnyDeathWillDo(Judging):
    def wrong(self, record: Record, operation: Any, now: float, *, dead_fence: Any, **how: Any) -> Any:
        if record.state is State.CLAIMED and dead_fence is not None and dead_fence < record.fence - 1:
            return as_if(record, operation, now, dead_fence=record.fence, **how)
        return None


@breaks(
    "R7.a_claim_proved_dead_is_reclaimed_at_once",
    also=["R3", "R7", "R9", "S2", "S3", "S8", "complete", "renew", "forget"],
)
class WaitsForTheDead(Judging):
    def wrong(self, record: Record, operation: Any, now: float, *, dead_fence: Any, **how: Any) -> Any:
        if record.state is State.CLAIMED and dead_fence is not None:
            return as_if(record, operation, now, dead_fence=None, **how)
        return None


@breaks("R7.a_lapsed_claim_is_reclaimed")
class TheDeadKeepTheirKeys(Judging):
    def wrong(self, record: Record, operation: Any, now: float, *, dead_fence: Any, **how: Any) -> Any:
        if record.state is State.CLAIMED and record.token != operation.token and dead_fence != record.fence:
            return as_if(replace(record, lease_expires_at=now + 1), operation, now, dead_fence=dead_fence, **how)
        return None


@breaks("R7.attempts_are_counted_and_doubt_is_kept")
class CountsToTwo(Bed):
    def write(self, key: str, record: Record) -> None:
        super().write(key, replace(record, attempts=min(record.attempts, 2)))


# --- R8, R9 -----------------------------------------------------------------------------------------------------------


@breaks("R8.a_stale_copy_waits_for_the_announced_retry", also=["R8", "S9", "S6", "forget.forget_wakes_no_copies"])
class ForgetsTheRetry(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        if record.state is State.RELEASED:
            return as_if(noting(record, operation, successor=None), operation, now, **how)
        return None


@breaks("R8.a_retry_that_never_came_is_not_waited_for_for_ever")
class WaitsForEver(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        after = record.note(operation.delivery.message_id).successor
        if record.state is State.RELEASED and after is not None:
            return as_if(noting(record, operation, successor=(after[0], now + 1)), operation, now, **how)
        return None


@breaks("R8.the_retry_and_other_messages_wait_for_nothing")
class EverybodyWaits(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        announced = any(note.successor and note.successor[1] + 60 > now for note in record.notes.values())
        mine = record.note(operation.delivery.message_id).successor
        if record.state is State.RELEASED and announced and mine is None and record.note("M").successor is not None:
            return standing(Answer.NOT_DUE, record, now)
        return None


@breaks("R8.the_retry_clears_its_announcement")
class StillAnnounced(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        after = note_of(record, operation).successor
        if written is not None and after is not None and alive(record, now):
            written = noting(written, operation, successor=after)
        return decision, written


@breaks("R9.a_released_key_is_free")
class AttemptsGoOn(Bed):
    def judge_release(self, record: Any, *args: Any, **how: Any) -> Any:
        ended, written = decide.decide_release(record, *args, **how)
        return ended, written and replace(written, attempts=record.attempts)


@breaks("R9.doubt_outlives_a_release")
class AReleaseEndsDoubt(Bed):
    def judge_release(self, record: Any, claim: Any, reason: Any, successor: Any, *, now: float) -> Any:
        ended, written = decide.decide_release(record, claim, reason, successor, now=now)
        certain = written is not None and reason.value != "INTERRUPTED"
        return ended, replace(written, unknown=False) if certain else written


# --- R10 to R12 -------------------------------------------------------------------------------------------------------


@breaks("R10.completed_answers_with_the_outcome", also=["R12", "S6", "S9", "S4"])
class ReplaysNothing(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if decision.answer is Answer.COMPLETED:
            decision = replace(decision, record=replace(decision.record, outcome=None))
        return decision, written


@breaks("R10.a_settled_message_is_not_continued_again")
class SettledIsForgotten(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        if record.note(operation.delivery.message_id).settled:
            return as_if(noting(record, operation, settled=False), operation, now, **how)
        return None


@breaks("R11.one_copy_continues_a_message_at_a_time", also=["R11", "S8.one_of_many_continues_a_message"])
class EverybodyContinues(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        right = record.note(operation.delivery.message_id).continuing
        if right is not None and right.token != operation.token:
            return as_if(record, operation, now, **{**how, "dead_fence": right.fence})
        return None


@breaks("R11.held_names_the_holder_of_this_messages_right")
class NamesAnybody(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if decision.answer is Answer.HELD and record.state is State.COMPLETED:
            decision = replace(decision, record=record)
        return decision, written


@breaks("R12.another_message_gets_a_right_of_its_own", also=["R3", "R11", "R12", "renew", "settle"])
class OneRightForAll(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        mine = operation.delivery.message_id == record.message_id
        if record.state is State.COMPLETED and operation.delivery.continues and not mine:
            return standing(Answer.COMPLETED, record, now)
        return None


@breaks("R12.a_right_passes_on_from_the_dead", also=["S2", "S8.one_of_many_continues_a_message", "renew"])
class TheDeadKeepTheirRights(Judging):
    def wrong(self, record: Record, operation: Any, now: float, *, dead_fence: Any, **how: Any) -> Any:
        if record.state is State.COMPLETED:
            return as_if(record, operation, now, dead_fence=None, **how)
        return None


@breaks("R12.a_lapsed_right_is_granted_again")
class RightsDoNotLapse(Judging):
    def wrong(self, record: Record, operation: Any, now: float, *, dead_fence: Any, **how: Any) -> Any:
        right = record.note(operation.delivery.message_id).continuing
        lapsed = right is not None and right.lease_expires_at <= now and right.token != operation.token
        if record.state is State.COMPLETED and lapsed and dead_fence is None:
            return standing(Answer.HELD, record, now)
        return None


@breaks("R12.a_right_outlives_its_record")
class ExpiresUnderARight(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if decision.answer is Answer.COMPLETED and written is not None:
            written = replace(written, expires_at=record.expires_at)
        return decision, written


# --- their order ------------------------------------------------------------------------------------------------------


@breaks("order.over_comes_before_mismatch")
class ComparesFirst(Judging):
    def wrong(self, record: Record, operation: Any, now: float, **how: Any) -> Any:
        differ = record.fingerprint and operation.fingerprint and record.fingerprint != operation.fingerprint
        if record.state is State.COMPLETED and differ and record.message_id != operation.delivery.message_id:
            return standing(Answer.MISMATCH, record, now)
        return None


@breaks("order.mismatch_comes_before_reclaim")
class ReclaimsFirst(Judging):
    def wrong(self, record: Record, operation: Any, now: float, *, dead_fence: Any, **how: Any) -> Any:
        if record.state is State.CLAIMED and dead_fence == record.fence:
            return as_if(replace(record, fingerprint=""), operation, now, dead_fence=dead_fence, **how)
        return None


@breaks("order.any_message_id_has_a_note_of_its_own")
class ReadsIntoAMessageId(Bed):
    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        super().note_parked(key, message_id.partition(":")[0], generation, count)


@breaks("order.an_answer_carries_the_callers_note")
class HeldSaysNothingElse(Bed):
    def judge_claim(self, record: Any, operation: Any, *, now: float, **how: Any) -> Any:
        decision, written = decide.decide_claim(record, operation, now=now, **how)
        if decision.answer is Answer.HELD and record.state is State.CLAIMED:
            decision = replace(decision, record=replace(decision.record, notes={}))
        return decision, written
