"""A claim store written from the contract alone: a dictionary and a lock, and nothing of ``core.decide``.

It passes the suite, so the suite asks for the contract and not for our way of keeping it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from celery_idem.conformance.claim_harness import ClaimHarness
from celery_idem.conformance.clock import Clock
from celery_idem.core.records import (
    DAY,
    GRACE,
    NOTES_KEPT,
    RECORD_VERSION,
    Answer,
    Claim,
    Decision,
    Ended,
    Note,
    Operation,
    Outcome,
    Record,
    Release,
    Renewal,
    Right,
    State,
    Successor,
)


@dataclass
class Slip:
    """One key."""

    fence: int = 0
    version: int = RECORD_VERSION
    state: State = State.RELEASED
    token: str = ""
    answer: Answer = Answer.ACQUIRED
    attempts: int = 0
    unknown: bool = False
    operation: Operation | None = None
    fingerprint: str = ""
    claimed: float = 0.0
    lease_end: float = 0.0
    completed: float | None = None
    expires: float = 0.0
    outcome: Outcome | None = None
    notes: dict[str, Note] = field(default_factory=dict)

    def record(self, key: str) -> Record:
        mine = self.operation
        assert mine is not None
        return Record(
            key=key,
            state=self.state,
            token=self.token,
            fence=self.fence,
            message_id=mine.delivery.message_id,
            generation=mine.delivery.generation,
            attempts=self.attempts,
            answer=self.answer,
            unknown=self.unknown,
            task=mine.task,
            namespace=mine.namespace,
            scope=mine.scope,
            fingerprint=self.fingerprint,
            holder=mine.holder,
            claimed_at=self.claimed,
            lease_expires_at=self.lease_end,
            completed_at=self.completed,
            expires_at=self.expires,
            outcome=self.outcome,
            notes=dict(self.notes),
            record_version=self.version,
        )

    def note(self, message: str) -> Note:
        return self.notes.get(message, Note())

    def jot(self, message: str, now: float, **changed: Any) -> None:
        self.notes[message] = replace(self.note(message), at=now, **changed)
        dead = [m for m, note in self.notes.items() if m != message and not note.live(now)]
        dead.sort(key=lambda m: (self.notes[m].at, m))
        for m in dead[: max(0, len(self.notes) - NOTES_KEPT)]:
            del self.notes[m]


def stays(ttl: float) -> float:
    return ttl or DAY


class PlainClaims:
    """Everything under one lock."""

    name = "plain"

    def __init__(self, clock: Any) -> None:
        self.clock, self.slips, self.lock = clock, {}, threading.Lock()
        os.register_at_fork(after_in_child=lambda: setattr(self, "lock", threading.Lock()))

    def there(self, key: str) -> Slip | None:
        """What counts: neither expired nor of another release."""
        slip: Slip | None = self.slips.get(key)
        old = slip is not None and slip.version <= RECORD_VERSION and slip.expires > self.clock()
        return slip if old else None

    def newer(self, key: str) -> bool:
        return key in self.slips and self.slips[key].version > RECORD_VERSION

    # -- claim ----------------------------------------------------------------------------------------------------

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        with self.lock:
            answer, claim = self._claim(operation, lease, ttl, dead_fence)
            slip = self.slips[operation.key]
            record = slip.record(operation.key)
            if answer is Answer.HELD and slip.state is State.COMPLETED:
                message = operation.delivery.message_id
                record = replace(record, notes={message: slip.note(message)})
            return Decision(answer, claim, record, self.clock())

    def _claim(
        self, operation: Operation, lease: float, ttl: float, dead_fence: int | None
    ) -> tuple[Answer, Claim | None]:
        now, delivery = self.clock(), operation.delivery
        if self.newer(operation.key):
            return Answer.NEWER, None
        slip = self.there(operation.key)
        if slip is None:
            slip = self.slips.setdefault(operation.key, Slip())
            slip.notes = {}
            return self._take(slip, operation, Answer.ACQUIRED, 1, False, lease, ttl)
        note = slip.note(delivery.message_id)
        right = note.continuing
        if slip.state is State.CLAIMED and slip.token == operation.token:
            return slip.answer, self._proof(slip, operation, lease, ttl)
        if slip.state is State.COMPLETED and right and right.token == operation.token:
            return Answer.COMPLETED, self._proof_of(right, slip, operation, lease, ttl)
        if delivery.generation <= note.over:
            return Answer.OVER, None
        mine, theirs = operation.fingerprint, slip.fingerprint
        assert slip.operation is not None
        other = slip.operation.delivery.message_id != delivery.message_id
        if slip.state is not State.RELEASED and other and mine and theirs and mine != theirs:
            return Answer.MISMATCH, None
        if slip.state is State.CLAIMED:
            if slip.lease_end > now and slip.fence != dead_fence:
                return Answer.HELD, None
            return self._take(slip, operation, Answer.RECLAIMED, slip.attempts + 1, True, lease, ttl)
        if slip.state is State.RELEASED:
            after = note.successor
            if after and after[0] > delivery.generation and now < after[1] + GRACE:
                return Answer.NOT_DUE, None
            how = Answer.RECLAIMED if slip.unknown else Answer.ACQUIRED
            return self._take(slip, operation, how, 1, slip.unknown, lease, ttl)
        if not delivery.continues or note.settled:
            return Answer.COMPLETED, None
        if right and right.lease_expires_at > now and right.fence != dead_fence:
            return Answer.HELD, None
        fence = max(slip.fence + 1, right.fence + 1 if right else 0, int(now * 1e6))
        granted = Right(operation.token, fence, operation.holder, now + lease)
        slip.jot(delivery.message_id, now, continuing=granted)
        slip.expires = max(slip.expires, now + lease)
        return Answer.COMPLETED, self._proof_of(granted, slip, operation, lease, ttl)

    def _take(
        self, slip: Slip, operation: Operation, answer: Answer, attempts: int, unknown: bool, lease: float, ttl: float
    ) -> tuple[Answer, Claim]:
        now, delivery = self.clock(), operation.delivery
        slip.fence = max(slip.fence + 1, int(now * 1e6))
        slip.state, slip.token, slip.answer = State.CLAIMED, operation.token, answer
        slip.attempts, slip.unknown, slip.operation = attempts, unknown, operation
        slip.fingerprint, slip.claimed, slip.lease_end = operation.fingerprint, now, now + lease
        slip.completed, slip.outcome, slip.expires = None, None, now + lease + stays(ttl)
        note = slip.note(delivery.message_id)
        over = max(note.over, delivery.generation - 1)
        after = note.successor if note.successor and note.successor[0] > delivery.generation else None
        if (over, after) != (note.over, note.successor):
            slip.jot(delivery.message_id, now, over=over, successor=after)
        return answer, self._proof(slip, operation, lease, ttl)

    def _proof(self, slip: Slip, operation: Operation, lease: float, ttl: float) -> Claim:
        return Claim(operation, slip.fence, slip.answer, slip.attempts, lease, ttl, unknown=slip.unknown)

    def _proof_of(self, right: Right, slip: Slip, operation: Operation, lease: float, ttl: float) -> Claim:
        return Claim(operation, right.fence, Answer.COMPLETED, slip.attempts, lease, ttl, right=True)

    def _restored(self, claim: Claim) -> Slip:
        """A claim that vanished, with its token and fence."""
        slip = self.slips[claim.key] = Slip()
        self._take(slip, claim.operation, claim.answer, claim.attempts, claim.unknown, claim.lease, claim.ttl)
        slip.fence = claim.fence
        return slip

    # -- the end of a claim, and its heartbeat --------------------------------------------------------------------

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Ended:
        with self.lock:
            if self.newer(claim.key):
                return Ended.LOST
            slip = self.there(claim.key) or self._restored(claim)
            if slip.token != claim.token or slip.state is State.RELEASED:
                return Ended.LOST
            if slip.state is State.COMPLETED:
                return Ended.COMPLETED
            now = self.clock()
            slip.state, slip.outcome, slip.attempts, slip.unknown = State.COMPLETED, outcome, 0, False
            slip.completed = slip.lease_end = now
            slip.expires = now + stays(claim.ttl)
            if claim.operation.delivery.continues:
                until = now + claim.lease
                right = Right(claim.token, claim.fence, claim.operation.holder, until)
                slip.jot(claim.operation.delivery.message_id, now, continuing=right)
                slip.expires = max(slip.expires, until)
            return Ended.COMPLETED

    def release(self, claim: Claim, reason: Release, *, successor: Successor | None = None) -> Ended:
        with self.lock:
            slip, now = self.slips.get(claim.key), self.clock()
            if slip is None or self.newer(claim.key) or slip.token != claim.token:
                return Ended.LOST
            if slip.state is not State.CLAIMED:
                return Ended(slip.state.value)
            message, generation = claim.operation.delivery.message_id, claim.operation.delivery.generation
            slip.state, slip.attempts, slip.lease_end = State.RELEASED, 0, now
            slip.expires = now + max(claim.ttl, DAY)
            if reason is Release.RETRY and successor:
                slip.jot(message, now, successor=(successor.generation, now + successor.delay))
                slip.expires = max(slip.expires, now + successor.delay + GRACE)
            elif reason is Release.ENDED:
                slip.jot(message, now, over=max(slip.note(message).over, generation))
            elif reason is Release.INTERRUPTED:
                slip.unknown = True
            return Ended.RELEASED

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        with self.lock:
            return {claim.token: self._renew(claim) for claim in claims}

    def _renew(self, claim: Claim) -> Renewal:
        now, message = self.clock(), claim.operation.delivery.message_id
        if self.newer(claim.key):
            return Renewal.LOST
        slip = self.there(claim.key)
        if slip is None:
            if claim.right:
                return Renewal.LOST
            self._restored(claim)
            return Renewal.RENEWED
        note = slip.note(message)
        if note.continuing and note.continuing.token == claim.token:
            slip.jot(message, now, continuing=replace(note.continuing, lease_expires_at=now + claim.lease))
            slip.expires = max(slip.expires, now + claim.lease)
            return Renewal.RENEWED
        if slip.token != claim.token:
            return Renewal.RENEWED if claim.right and note.settled else Renewal.LOST
        if slip.state is State.CLAIMED:
            slip.lease_end = now + claim.lease
            slip.expires = slip.lease_end + stays(claim.ttl)
            return Renewal.RENEWED
        stolen = slip.state is State.COMPLETED and claim.operation.delivery.continues and note.continuing
        return Renewal.LOST if stolen else Renewal.RENEWED

    # -- notes, and what operators do -----------------------------------------------------------------------------

    def settle(self, key: str, message_id: str) -> None:
        with self.lock:
            slip = self.there(key)
            if slip and slip.state is State.COMPLETED and not slip.note(message_id).settled:
                slip.jot(message_id, self.clock(), settled=True, continuing=None)

    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        with self.lock:
            slip = self.there(key)
            if slip and (generation, count) > (slip.note(message_id).parked or (-1, -1)):
                slip.jot(message_id, self.clock(), parked=(generation, count))

    def get(self, key: str) -> Record | None:
        with self.lock:
            slip = self.there(key)
            return slip and deepcopy(slip.record(key))

    def find(
        self,
        *,
        task: str | None = None,
        scope: str | None = None,
        state: State | None = None,
        older_than: float | None = None,
        limit: int = 1000,
    ) -> Iterator[Record]:
        with self.lock:
            now = self.clock()
            found = [deepcopy(slip.record(key)) for key, slip in self.slips.items() if self.there(key)]
        for record in found:
            wrong = (task is not None and record.task != task) or (scope is not None and record.scope != scope)
            wrong = wrong or (state is not None and record.state is not state)
            if limit > 0 and not wrong and (older_than is None or now - record.claimed_at >= older_than):
                limit -= 1
                yield record

    def forget(self, key: str, fence: int | None) -> bool:
        with self.lock:
            slip = self.there(key)
            if slip is None or slip.fence != fence:
                return False
            now = self.clock()
            slip.state, slip.token, slip.answer, slip.fingerprint = State.RELEASED, "", Answer.ACQUIRED, ""
            slip.outcome, slip.attempts, slip.unknown, slip.completed = None, 0, False, None
            slip.lease_end, slip.expires = now, max(slip.expires, now + DAY)
            slip.notes = {m: replace(n, continuing=None, settled=False) for m, n in slip.notes.items()}
            return True

    def purge(self, limit: int) -> int:
        with self.lock:
            gone = [key for key, slip in self.slips.items() if slip.expires <= self.clock()][:limit]
            for key in gone:
                del self.slips[key]
            return len(gone)

    def check(self) -> list[str]:
        return []

    def create_schema(self) -> None:
        pass

    def close(self) -> None:
        pass


class PlainClaimsHarness(ClaimHarness):
    """A dictionary of its own for every case."""

    shared = False
    excused: Mapping[str, str] = {
        "shared": "other processes have memories of their own",
        **dict.fromkeys(("garble", "annotate"), "values in memory cannot be unreadable"),
        **dict.fromkeys(("locked", "lost_reply", "unreachable", "silent"), "there is no server"),
    }

    def __init__(self) -> None:
        self.clock = Clock()
        self.plain = PlainClaims(self.clock)
        self.store = self.plain

    def reopen(self) -> Any:
        return self.store

    def raw(self, key: str) -> Any:
        return deepcopy(self.plain.slips.get(key))

    def newer(self, key: str) -> None:
        self.plain.slips[key].version += 1

    def garble_body(self, key: str) -> None:
        slip = self.plain.slips[key]
        slip.outcome = replace(slip.outcome, encoded=replace(slip.outcome.encoded, body=b"garbled"))

    def close(self) -> None:
        self.plain.slips.clear()
