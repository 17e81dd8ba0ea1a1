"""S3, S4 and S6 broken: old tokens, damaged records, lost answers, locks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from celery_idem.conformance.claim_cases.trouble import MARGIN
from celery_idem.core import decide
from celery_idem.core.records import RECORD_VERSION, Answer, Decision, Ended, Record, Renewal, State
from celery_idem.errors import RecordCorrupt, StoreUnavailable
from tests.conformance.broken_claims_base import Bed, breaks

# --- S3 ---------------------------------------------------------------------------------------------------------------


@breaks("S3.an_old_token_completes_nothing")
class AnyFenceCompletes(Bed):
    """Compares fences, and not tokens."""

    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        if record is not None and record.state is State.CLAIMED and record.fence == claim.fence:
            claim = replace(claim, operation=replace(claim.operation, token=record.token))
        return decide.decide_complete(record, claim, outcome, now=now)


@breaks("S3.an_old_token_releases_nothing")
class FreesWhoeverHasIt(Bed):
    def judge_release(self, record: Any, claim: Any, *args: Any, now: float) -> Any:
        if record is not None and record.state is State.CLAIMED and record.record_version == RECORD_VERSION:
            claim = replace(claim, operation=replace(claim.operation, token=record.token))
        return decide.decide_release(record, claim, *args, now=now)


@breaks("S3.an_old_token_renews_nothing")
class SaysRenewedWhateverWasLost(Bed):
    def judge_renew(self, record: Any, claim: Any, *, now: float) -> Any:
        renewed, written = decide.decide_renew(record, claim, now=now)
        lost = record is not None and record.token != claim.token and record.state is State.RELEASED
        return (Renewal.RENEWED if lost else renewed), written


@breaks("S3.an_old_token_disturbs_nobody_in_its_batch")
class OneLostAllLost(Bed):
    def renew(self, claims: Sequence[Any]) -> Mapping[str, Renewal]:
        answers = super().renew(claims)
        lost = len(claims) > 3 and Renewal.LOST in answers.values()
        return dict.fromkeys(answers, Renewal.LOST) if lost else answers


# --- S4 ---------------------------------------------------------------------------------------------------------------


@breaks("S4.a_garbled_body_still_proves_completion")
class ChecksTheChecksum(Bed):
    def judge_claim(self, record: Any, operation: Any, **how: Any) -> Any:
        encoded = record.outcome.encoded if record is not None and record.outcome else None
        return decide.decide_claim(None if encoded and encoded.body == b"garbled" else record, operation, **how)


@breaks("S4.no_verb_touches_a_newer_record", also=["S4.a_newer_record_is_nobodys_claim"])
class NotesOnTheFuture(Bed):
    def judge_parked(self, record: Any, *args: Any, now: float) -> Any:
        if record is None or record.record_version <= RECORD_VERSION:
            return decide.decide_parked(record, *args, now=now)
        written = decide.decide_parked(replace(record, record_version=RECORD_VERSION), *args, now=now)
        return written and replace(written, record_version=record.record_version)


@breaks("S4.a_newer_record_is_nobodys_claim")
class SaysRenewedOfTheFuture(Bed):
    def judge_renew(self, record: Any, claim: Any, *, now: float) -> Any:
        if record is not None and record.record_version > RECORD_VERSION:
            return Renewal.RENEWED, None
        return decide.decide_renew(record, claim, now=now)


# --- S6: answers that never come --------------------------------------------------------------------------------------


class Certain(Bed):
    """Says of one verb that it certainly did nothing, because no answer came."""

    verb = ""

    def answered(self, answer: Any) -> Any:
        if self.line == "cut" and isinstance(answer, Decision if self.verb == "claim" else Ended):
            raise StoreUnavailable("no answer", may_have_landed=False)
        return super().answered(answer)


@breaks("S6.a_claim_whose_reply_was_lost_may_have_landed")
class CertainAboutClaims(Certain):
    verb = "claim"


@breaks("S6.a_completion_whose_reply_was_lost_may_be_repeated", "S6.a_release_whose_reply_was_lost_may_be_repeated")
class CertainAboutEnds(Certain):
    verb = "end"


@breaks("S6.nothing_lands_where_nobody_listens")
class AlwaysInDoubt(Bed):
    def away(self) -> None:
        try:
            super().away()
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), may_have_landed=True) from error


@breaks("S6.no_verb_outlives_its_timeout")
class WaitsForTheSilent(Bed):
    def away(self) -> None:
        if self.line == "silent":
            time.sleep(MARGIN + 0.2)
        super().away()


# --- S6: locked records -----------------------------------------------------------------------------------------------


@breaks("S6.a_locked_record_is_held")
class ALockIsAnOutage(Bed):
    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: Any = None) -> Any:
        record = self.place.records.get(operation.key)
        locked = not self.free(operation.key) and record is not None and record.state is State.CLAIMED
        if locked:
            raise StoreUnavailable("the record is locked", may_have_landed=False)
        return super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)


@breaks("S6.a_locked_completion_is_replayed")
class LocksToRead(Bed):
    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: Any = None) -> Any:
        record = self.place.records.get(operation.key)
        if record is not None and record.state is State.COMPLETED and not self.free(operation.key):
            return Decision(Answer.HELD, None, record, self.now())
        return super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)


@breaks("S6.a_locked_lease_is_busy_and_not_lost")
class LockedIsLost(Bed):
    def renew_one(self, claim: Any) -> Renewal:
        return super().renew_one(claim) if self.free(claim.key) else Renewal.LOST


@breaks("S6.ending_a_locked_claim_ends_in_time")
class SaysReleasedAndForgets(Bed):
    def release(self, claim: Any, reason: Any, *, successor: Any = None) -> Any:
        if not self.free(claim.key):
            return Ended.RELEASED
        return super().release(claim, reason, successor=successor)


# --- S6: unreadable records -------------------------------------------------------------------------------------------


@breaks("S6.an_unreadable_record_is_corrupt", also=["S6"])
class UnreadableIsNothing(Bed):
    def read(self, key: str) -> Record | None:
        return None if key in self.place.garbled else super().read(key)


@breaks("S6.an_unreadable_record_is_left_alone")
class PurgesTheUnreadable(Bed):
    def purge(self, limit: int) -> int:
        for key in list(self.place.garbled):
            self.place.garbled.discard(key)
            del self.place.records[key]
        return super().purge(limit)


@breaks("S6.an_unreadable_record_hides_no_other")
class TheListEndsThere(Bed):
    def find(self, **conditions: Any) -> Iterator[Record]:
        found = super().find(**conditions)
        if not self.place.garbled:
            return found
        return self._until(found)

    def _until(self, found: Iterator[Record]) -> Iterator[Record]:
        yield from islice(found, 2)
        raise RecordCorrupt("one cannot be read")


@breaks("S6.forget_removes_what_cannot_be_read_and_only_that", also=["forget.forget_needs_the_fence_it_saw", "S4"])
class ForgetsAnythingWithoutAFence(Bed):
    def forget(self, key: str, fence: int | None) -> bool:
        if fence is None and key in self.place.records:
            self.place.garbled.discard(key)
            del self.place.records[key]
            return True
        return super().forget(key, fence)
