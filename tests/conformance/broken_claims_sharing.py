"""S7 to S9 broken: forks, threads, and what two handles know of each other."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery_idem.conformance.claim_stores import TIMEOUT, SQLHarness
from celery_idem.core import decide
from celery_idem.core.records import Answer, Decision, Kind, Outcome, Record, Renewal, State
from celery_idem.errors import RecordCorrupt, StoreUnavailable
from celery_idem.stores.base import open_store
from tests.conformance.broken_claims_base import Bed, breaks

PAUSE = 0.002
"""Seconds between reading and writing: a race that is there is lost."""

# --- S7 ---------------------------------------------------------------------------------------------------------------


@breaks("S7.a_forked_child_uses_the_store", also=["S7"])
class OneProcessOnly(Bed):
    def away(self) -> None:
        if os.getpid() != self.pid:
            raise StoreUnavailable("opened in another process", may_have_landed=False)
        super().away()


@breaks("S7.the_parent_goes_on_after_a_fork", also=["S7"])
class TheChildTookTheConnection(Bed):
    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.taken = False
        os.register_at_fork(after_in_parent=lambda: setattr(self, "taken", True))

    def away(self) -> None:
        if self.taken:
            raise StoreUnavailable("the connection is closed", may_have_landed=True)
        super().away()


@breaks("S7.a_child_forked_in_the_middle_of_a_verb_is_not_stuck")
class TheChildKeepsTheLock(Bed):
    def forked(self) -> None:
        pass

    def get(self, key: str) -> Record | None:
        with self.place.lock:
            time.sleep(PAUSE)
        return super().get(key)


class CopyHarness(SQLHarness):
    """On a file of its own."""

    def __init__(self, make: Any) -> None:
        self._make, self._directory = make, tempfile.TemporaryDirectory()
        super().__init__(f"sqlite:///{self._directory.name}/claims.db")

    def open(self, url: str, timeout: float = TIMEOUT) -> Any:
        self._opened.append(self._make(url, timeout=timeout, clock=self.clock))
        return self._opened[-1]

    def close(self) -> None:
        super().close()
        self._directory.cleanup()


@breaks("S7.what_a_child_did_is_seen_by_its_parent")
class ACopyForTheChild:
    """SQLite, where a child works on a file of its own."""

    harness = CopyHarness

    def __init__(self, url: str, **how: Any) -> None:
        self.url, self.how, self.pid = url, how, os.getpid()
        self._stores: dict[int, Any] = {}

    def __getattr__(self, verb: str) -> Any:
        pid = os.getpid()
        if pid not in self._stores:
            self._stores[pid] = open_store(self.url if pid == self.pid else f"{self.url}.{pid}", **self.how)
        return getattr(self._stores[pid], verb)


# --- S8 ---------------------------------------------------------------------------------------------------------------


class TwoSteps(Bed):
    """Reads, and then writes what it made of that."""

    def act(self, key: str, judge: Any, busy: Any = None) -> Any:
        if not self.concerns(self.place.records.get(key)):
            return super().act(key, judge, busy)
        record = self.read(key)
        answer, written = judge(record, self.now())
        time.sleep(PAUSE)
        if written is not None:
            self.write(key, written)
        return self.answered(answer)

    def concerns(self, record: Record | None) -> bool:
        raise NotImplementedError


@breaks("S8.one_of_many_claimants_gets_the_key", also=["S6.a_claim_whose_reply_was_lost_may_have_landed"])
class TakesInTwoSteps(TwoSteps):
    def concerns(self, record: Record | None) -> bool:
        return record is None and self.line == "up"


@breaks("S8.one_of_many_continues_a_message", also=["S6"])
class GrantsInTwoSteps(TwoSteps):
    def concerns(self, record: Record | None) -> bool:
        return record is not None and record.state is State.COMPLETED and self.line == "up"


class Claiming(Bed):
    """Claims of held keys are taken in two steps."""

    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: Any = None) -> Any:
        if dead_fence is None or not self.free(operation.key):
            return super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)
        record = self.read(operation.key)
        how = {"now": self.now(), "lease": lease, "ttl": ttl, "dead_fence": dead_fence}
        decision, written = self.judge_claim(record, operation, **how)
        time.sleep(PAUSE)
        if written is not None:
            self.write(operation.key, written)
        return decision


@breaks("S8.one_of_many_reclaims_from_the_dead", "S8.a_completion_and_a_thief_do_not_both_win")
class ReclaimsInTwoSteps(Claiming):
    def complete(self, claim: Any, outcome: Any, *, connection: Any = None) -> Any:
        time.sleep(PAUSE / 2)
        return super().complete(claim, outcome)


@breaks("S8.a_renewal_and_a_thief_do_not_both_win")
class RenewsInTwoSteps(Bed):
    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: Any = None) -> Any:
        time.sleep(PAUSE / 2 if dead_fence is not None else 0)
        return super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)

    def renew_one(self, claim: Any) -> Renewal:
        if not self.free(claim.key) or claim.key in self.place.garbled:
            return super().renew_one(claim)
        renewed, written = self.judge_renew(self.read(claim.key), claim, now=self.now())
        time.sleep(PAUSE)
        if written is not None:
            self.write(claim.key, written)
        return renewed


@breaks("S8.one_token_many_times_at_once_is_one_claim")
class HeldUpByItself(Bed):
    """Marks a key while it is being claimed, and does not look by whom."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.claiming: set[str] = set()

    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: Any = None) -> Any:
        if operation.key in self.claiming:
            return Decision(Answer.HELD, None, None, self.now())
        self.claiming.add(operation.key)
        try:
            time.sleep(PAUSE if self.line == "up" else 0)
            return super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)
        finally:
            self.claiming.discard(operation.key)


@breaks("S8.what_many_note_at_once_is_all_there")
class NotesInTwoSteps(Bed):
    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        record = self.read(key)
        if not self.free(key) or self.line != "up":
            return super().note_parked(key, message_id, generation, count)
        written = self.judge_parked(record, message_id, generation, count, now=self.now())
        time.sleep(PAUSE)
        if written is not None:
            self.write(key, written)
        return None


@breaks("S8.many_threads_run_keys_of_their_own", also=["S7"])
class MixesUpThreads(Bed):
    """Keeps the answer in the handle between computing and returning it."""

    last: Any = None

    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: Any = None) -> Any:
        self.last = super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)
        if threading.active_count() > 2:
            time.sleep(PAUSE)
        return self.last


@breaks("S8.one_locked_record_delays_no_other")
class RenewsBehindTheLock(Bed):
    def renew(self, claims: Sequence[Any]) -> Mapping[str, Renewal]:
        if len(claims) > 1 and not all(self.free(claim.key) for claim in claims):
            return dict.fromkeys((claim.token for claim in claims), Renewal.BUSY)
        return super().renew(claims)


# --- S9 ---------------------------------------------------------------------------------------------------------------


@breaks("S9.two_handles_take_turns_on_one_key")
class BelievesItsMemory(Bed):
    """Answers from what this handle released, though another has claimed it since."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.released: dict[str, Record] = {}

    def claim(self, operation: Any, *, lease: float, ttl: float, dead_fence: Any = None) -> Any:
        seen, now = self.released.pop(operation.key, None), self.place.records.get(operation.key)
        if seen is not None and now is not None and now.fence != seen.fence:
            return Decision(Answer.NOT_DUE, None, seen, self.now())
        return super().claim(operation, lease=lease, ttl=ttl, dead_fence=dead_fence)

    def release(self, claim: Any, reason: Any, *, successor: Any = None) -> Any:
        ended = super().release(claim, reason, successor=successor)
        if claim.key in self.place.records:
            self.released[claim.key] = self.place.records[claim.key]
        return ended


@breaks("S9.what_one_handle_completed_another_replays")
class KeepsText(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        encoded = outcome.encoded
        if encoded is not None:
            body = encoded.body.decode(errors="replace").encode()
            outcome = Outcome(outcome.kind, replace(encoded, body=body))
        return decide.decide_complete(record, claim, outcome, now=now)


@breaks("S9.a_large_value_comes_back_whole")
class KeepsSixtyFourKilobytes(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        encoded = outcome.encoded
        if encoded is not None:
            outcome = Outcome(outcome.kind, replace(encoded, body=encoded.body[:65_535]))
        return decide.decide_complete(record, claim, outcome, now=now)


@breaks("S9.what_one_handle_completed_another_replays")
class KeepsOneKind(Bed):
    def judge_complete(self, record: Any, claim: Any, outcome: Any, *, now: float) -> Any:
        return decide.decide_complete(record, claim, replace(outcome, kind=Kind.RESULT), now=now)


@breaks("S9.what_the_next_release_notes_does_not_stop_this_one")
class KnowsAllFields(Bed):
    def read(self, key: str) -> Record | None:
        if key in self.place.annotated:
            raise RecordCorrupt("a note has a field that nobody knows")
        return super().read(key)
