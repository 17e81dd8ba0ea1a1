"""What a broken claim store is: a sound one in memory, of which one part is replaced.

``Bed`` is ``MemoryStore`` in a place that several handles share and in which anything can happen: records that are
garbled or locked, lines that lose answers. It passes every case but the one that needs another process's records.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

from celery_idem.conformance.claim_harness import ClaimHarness
from celery_idem.conformance.clock import Clock
from celery_idem.core import decide
from celery_idem.core.records import RECORD_VERSION, Answer, Claim, Decision, Operation, Outcome, Record, Renewal
from celery_idem.errors import RecordCorrupt, StoreUnavailable

Judged = tuple[Any, Record | None]


@dataclass
class Place:
    """What every handle sees."""

    clock: Callable[[], float]
    records: dict[str, Record] = field(default_factory=dict)
    garbled: set[str] = field(default_factory=set)
    annotated: set[str] = field(default_factory=set)
    locked: set[str] = field(default_factory=set)
    lock: Any = field(default_factory=threading.Lock)


class Bed:
    """A handle; ``line`` is "up", or how its server cannot be spoken to."""

    name = "bed"
    caught_by: ClassVar[frozenset[str]] = frozenset()
    also: ClassVar[frozenset[str]] = frozenset()
    harness: ClassVar[Any]

    def __init__(self, place: Place, *, line: str = "up", timeout: float = 5.0) -> None:
        self.place, self.line, self.timeout = place, line, timeout
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=self.forked)

    def forked(self) -> None:
        self.place.lock = threading.Lock()

    # -- one record, and what may be wrong with the way to it -----------------------------------------------------

    def now(self) -> float:
        return self.place.clock()

    def read(self, key: str) -> Record | None:
        if key in self.place.garbled:
            raise RecordCorrupt(f"{key} cannot be read")
        return self.place.records.get(key)

    def write(self, key: str, record: Record) -> None:
        self.place.records[key] = record

    def away(self) -> None:
        """Raise if there is no answer to be had before anything was done."""
        if self.line == "away":
            raise StoreUnavailable("nobody listens", may_have_landed=False)
        if self.line == "silent":
            time.sleep(self.timeout)
            raise StoreUnavailable("no answer", may_have_landed=True)

    def answered(self, answer: Any) -> Any:
        if self.line == "cut":
            raise StoreUnavailable("the answer was lost", may_have_landed=True)
        return answer

    def free(self, key: str) -> bool:
        return key not in self.place.locked

    def act(
        self, key: str, judge: Callable[[Record | None, float], Judged], busy: Callable[[Record], Any] | None = None
    ) -> Any:
        """Read, judge and write in one step; ``busy`` answers where somebody's transaction locks the record."""
        self.away()
        give_up = time.monotonic() + self.timeout
        while True:
            with self.place.lock:
                record = self.read(key)
                answer, written = judge(record, self.now())
                if written is None or self.free(key):
                    if written is not None:
                        self.write(key, written)
                    return self.answered(answer)
            if busy is not None and record is not None:
                return self.answered(busy(record))
            if time.monotonic() > give_up:
                raise StoreUnavailable("the record is locked", may_have_landed=False)
            time.sleep(0.005)

    # -- the verbs ------------------------------------------------------------------------------------------------

    judge_claim = staticmethod(decide.decide_claim)
    judge_complete = staticmethod(decide.decide_complete)
    judge_release = staticmethod(decide.decide_release)
    judge_renew = staticmethod(decide.decide_renew)
    judge_settle = staticmethod(decide.decide_settle)
    judge_parked = staticmethod(decide.decide_parked)
    judge_forget = staticmethod(decide.decide_forget)

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        how = {"lease": lease, "ttl": ttl, "dead_fence": dead_fence}
        return self.act(
            operation.key,
            lambda record, now: self.judge_claim(record, operation, now=now, **how),
            lambda record: Decision(Answer.HELD, None, record, self.now()),
        )

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Any:
        return self.act(claim.key, lambda record, now: self.judge_complete(record, claim, outcome, now=now))

    def release(self, claim: Claim, reason: Any, *, successor: Any = None) -> Any:
        return self.act(claim.key, lambda record, now: self.judge_release(record, claim, reason, successor, now=now))

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        self.away()
        return {claim.token: self.renew_one(claim) for claim in claims}

    def renew_one(self, claim: Claim) -> Renewal:
        try:
            return self.act(
                claim.key,
                lambda record, now: self.judge_renew(record, claim, now=now),
                lambda record: Renewal.BUSY,
            )
        except RecordCorrupt:
            return Renewal.BUSY

    def settle(self, key: str, message_id: str) -> None:
        self.act(key, lambda record, now: (None, self.judge_settle(record, message_id, now=now)))

    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        def judge(record: Record | None, now: float) -> Judged:
            return None, self.judge_parked(record, message_id, generation, count, now=now)

        self.act(key, judge)

    def get(self, key: str) -> Record | None:
        def judge(record: Record | None, now: float) -> Judged:
            return None if record is None or self.expired(record, now) else record, None

        return self.act(key, judge)

    def expired(self, record: Record, now: float) -> bool:
        return record.expires_at <= now

    def matches(self, record: Record, now: float, task: Any, scope: Any, state: Any, older_than: Any) -> bool:
        return (
            not self.expired(record, now)
            and (task is None or record.task == task)
            and (scope is None or record.scope == scope)
            and (state is None or record.state is state)
            and (older_than is None or record.claimed_at <= now - older_than)
        )

    def find(
        self, *, task: Any = None, scope: Any = None, state: Any = None, older_than: Any = None, limit: int = 1000
    ) -> Iterator[Record]:
        self.away()
        self.answered(None)
        with self.place.lock:
            now, records = self.now(), list(self.place.records.items())
        readable = [record for key, record in records if key not in self.place.garbled]
        found = (record for record in readable if self.matches(record, now, task, scope, state, older_than))
        yield from islice(found, limit)
        if self.place.garbled:
            raise RecordCorrupt("one cannot be read")

    def forget(self, key: str, fence: int | None) -> bool:
        if fence is None:
            with self.place.lock:
                if key not in self.place.garbled:
                    return False
                self.place.garbled.discard(key)
                del self.place.records[key]
                return True
        return self.act(key, lambda record, now: self.judge_forget(record, fence, now=now))

    def purge(self, limit: int) -> int:
        with self.place.lock:
            free = [key for key in self.place.records if self.free(key) and key not in self.place.garbled]
            doomed = list(islice((key for key in free if self.doomed(self.place.records[key])), limit))
            for key in doomed:
                del self.place.records[key]
        return len(doomed)

    def doomed(self, record: Record) -> bool:
        return record.expires_at <= self.now()

    def check(self) -> list[str]:
        return []

    def create_schema(self) -> None:
        pass

    def close(self) -> None:
        pass


class BedHarness(ClaimHarness):
    """Everything can be done to it."""

    shared = False
    excused: Mapping[str, str] = {"shared": "other processes have memories of their own"}
    timeout = 0.05

    def __init__(self, make: Callable[..., Any] = Bed) -> None:
        self.make, self.clock = make, Clock()
        self.place = Place(self.clock)
        self.store = self.reopen()

    def reopen(self) -> Any:
        return self.make(self.place)

    def impatient(self) -> Any:
        return self.make(self.place, timeout=self.timeout)

    def raw(self, key: str) -> Any:
        return self.place.records.get(key), key in self.place.garbled

    def newer(self, key: str) -> None:
        self.place.records[key] = replace(self.place.records[key], record_version=RECORD_VERSION + 1)

    def garble(self, key: str) -> None:
        self.place.garbled.add(key)

    def garble_body(self, key: str) -> None:
        record = self.place.records[key]
        encoded = replace(record.outcome.encoded, body=b"garbled")
        self.place.records[key] = replace(record, outcome=replace(record.outcome, encoded=encoded))

    def annotate(self, key: str, message: str) -> None:
        self.place.annotated.add(key)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        self.place.locked.add(key)
        try:
            yield
        finally:
            self.place.locked.discard(key)

    @contextmanager
    def lost_reply(self) -> Iterator[Any]:
        yield self.make(self.place, line="cut")

    def unreachable(self) -> Any:
        return self.make(self.place, line="away", timeout=self.timeout)

    def silent(self) -> Any:
        return self.make(self.place, line="silent", timeout=self.timeout)

    def close(self) -> None:
        pass


Bed.harness = BedHarness
BROKEN: list[Any] = []


def breaks(*cases: str, also: Sequence[str] = ()) -> Callable[[type], type]:
    """Add the store to the broken ones.

    Args:
        cases: that must fail, all of one rule.
        also: cases or rules of others that may fail too, because they rest on the broken one.
    """

    def add(store: Any) -> Any:
        store.caught_by, store.also = frozenset(cases), frozenset(also)
        BROKEN.append(store)
        return store

    return add
