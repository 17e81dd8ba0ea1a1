"""Where a case works: keys of its own, claims and records by readable names, and time that passes.

Records are read through a second handle, so that what a store only remembers does not count.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from celery_idem.conformance.case import Breach, Case, adding_to, expect, expect_is
from celery_idem.conformance.claim_harness import ClaimHarness
from celery_idem.conformance.clock import Clock
from celery_idem.core.codec import Encoded
from celery_idem.core.records import Answer, Claim, Decision, Delivery, Ended, Kind, Operation, Outcome, Record, Release
from celery_idem.stores.base import Store

CASES: list[Case] = []
"""In the order their modules were imported."""
case = adding_to(CASES)

LEASE, TTL = 60.0, 3600.0
REAL_LEASE = 1.0
"""Seconds of a lease that is waited out because the store's clock cannot be moved."""
EXACT = 1e-3
"""Seconds that a store's way of keeping times may lose."""


class Bench:
    """One case's own corner of the store."""

    def __init__(self, harness: ClaimHarness) -> None:
        self.harness, self.store = harness, harness.store
        self.source = uuid.uuid4().hex
        self.short = REAL_LEASE if harness.clock is None else LEASE
        """Seconds of a lease that ``lapse`` ends."""

    @cached_property
    def other(self) -> Store:
        """A second handle to the same records."""
        return self.harness.reopen()

    @property
    def clock(self) -> Clock:
        """The store's clock, for cases that say they need it."""
        return self.hook("clock")  # type: ignore[no-any-return]

    def hook(self, name: str) -> Any:
        """A member of the harness, for cases that say they need it."""
        found = getattr(self.harness, name)
        if found is None:
            raise AssertionError(f"a case that did not say it needs {name}")
        return found

    # --- claims by readable names ------------------------------------------------------------------------------------

    def key(self, name: str = "order") -> str:
        """The key of that name."""
        return hashlib.sha256(f"{self.source} {name}".encode()).hexdigest()

    def op(
        self, key: str = "order", message: str = "M", generation: int = 0, *, continues: bool = False, **more: Any
    ) -> Operation:
        """One copy of ``message`` that wants ``key``; its token is fresh."""
        facts = {"holder": f"holder of {message}", "task": f"task of {self.source}", "namespace": "shop", **more}
        delivery = Delivery(message, generation, continues)
        return Operation(key=self.key(key), delivery=delivery, token=uuid.uuid4().hex, **facts)

    def ask(
        self,
        operation: Operation,
        *,
        store: Store | None = None,
        dead: int | None = None,
        lease: float = LEASE,
        ttl: float = TTL,
    ) -> Decision:
        """Claim, for a minute unless told otherwise."""
        return (store or self.store).claim(operation, lease=lease, ttl=ttl, dead_fence=dead)

    def answer(self, operation: Operation, *, store: Store | None = None, dead: int | None = None) -> Answer:
        """What a claim is answered."""
        return self.ask(operation, store=store, dead=dead).answer

    def answers(self, wanted: Answer, operation: Operation, when: str, *, dead: int | None = None) -> Decision:
        """``Breach`` unless the claim is answered so, with a claim where that answer has one."""
        decision = self.ask(operation, dead=dead)
        got = decision.answer
        expect(got is wanted, f"{when}, a claim was answered {got.value}, not {wanted.value}")
        owns = wanted in {Answer.ACQUIRED, Answer.RECLAIMED}
        if owns or wanted is not Answer.COMPLETED:
            expect((decision.claim is not None) == owns, f"{when}, {wanted.value} came with the claim {decision.claim}")
        return decision

    def take(
        self, operation: Operation | None = None, *, dead: int | None = None, lease: float = LEASE, ttl: float = TTL
    ) -> Claim:
        """Claim a key that must be free."""
        decision = self.ask(operation or self.op(), dead=dead, lease=lease, ttl=ttl)
        claim = decision.claim
        if claim is None or claim.right:
            raise Breach(f"a key that was free was answered {decision.answer.value}")
        return claim

    def right(self, operation: Operation, *, dead: int | None = None, ttl: float = TTL) -> Claim:
        """Claim a right to continue that must be free."""
        decision = self.ask(operation, dead=dead, ttl=ttl)
        claim = decision.claim
        if claim is None or not claim.right:
            raise Breach(f"a right to continue that was free was answered {decision.answer.value} without it")
        return claim

    def complete(
        self,
        operation: Operation | None = None,
        value: Outcome | None = None,
        *,
        lease: float = LEASE,
        ttl: float = TTL,
    ) -> Claim:
        """Claim a key that must be free, and complete it."""
        claim = self.take(operation, lease=lease, ttl=ttl)
        ended = self.store.complete(claim, value or outcome())
        expect_is(ended, Ended.COMPLETED, f"the completion of a live claim was answered {ended.value}")
        return claim

    # --- what is stored ----------------------------------------------------------------------------------------------

    def stored(self, key: str = "order") -> Record:
        """The key's record; ``Breach`` if there is none."""
        record = self.other.get(self.key(key))
        if record is None:
            raise Breach("a record that should be there is not")
        return record

    def same(self, before: Record | None, what: str, key: str = "order") -> None:
        """``Breach`` if the key's record is not as it was."""
        after = self.other.get(self.key(key))
        expect(after == before, f"{what} changed the record from {before} to {after}")

    # --- time --------------------------------------------------------------------------------------------------------

    def lapse(self) -> None:
        """Let a lease of ``short`` seconds lapse."""
        self.wait(self.short + 0.05)

    def stood_still(self, since: float) -> bool:
        """Whether a lease of ``short`` seconds, asked for at this monotonic time, is over: the machine stalled."""
        return self.harness.clock is None and time.monotonic() > since + self.short

    def wait(self, seconds: float) -> None:
        """Let that time pass by the store's clock."""
        if self.harness.clock is None:
            time.sleep(seconds)
        else:
            self.harness.clock.advance(seconds)


def outcome(body: bytes = b'{"paid": 50}', kind: Kind = Kind.RESULT) -> Outcome:
    """An outcome with this value."""
    return Outcome(kind, Encoded(body, "application/json", "utf-8", hashlib.sha256(body).hexdigest()))


def every_verb(bench: Bench, store: Store, claim: Claim) -> Mapping[str, Callable[[], Any]]:
    """A call of each verb that speaks to the server about this claim, by what it is."""
    return {
        "claim": lambda: store.claim(bench.op("another"), lease=LEASE, ttl=TTL),
        "complete": lambda: store.complete(claim, outcome()),
        "release": lambda: store.release(claim, Release.ENDED),
        "renew": lambda: store.renew([claim]),
        "settle": lambda: store.settle(claim.key, "M"),
        "note_parked": lambda: store.note_parked(claim.key, "M", 0, 1),
        "get": lambda: store.get(claim.key),
        "find": lambda: list(store.find(task=claim.operation.task)),
        "forget": lambda: store.forget(claim.key, claim.fence),
    }


def close(one: float | None, other: float) -> bool:
    """Whether it is this time."""
    return one is not None and abs(one - other) <= EXACT


def expect_close(at: float | None, wanted: float, told: str) -> None:
    """``Breach`` with what the store said, and what was wanted, unless it is this time."""
    expect(close(at, wanted), f"{told}; wanted: {wanted}")
