"""What holds for every history of one key: random calls by several workers on the pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_idem.core import decide
from celery_idem.core.records import (
    NOTES_KEPT,
    Answer,
    Claim,
    Decision,
    Delivery,
    Ended,
    Operation,
    Record,
    Release,
    Renewal,
    State,
    Successor,
)
from tests.support.clock import START
from tests.support.operations import fingerprint, key_for, result

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

MESSAGES = ("M", "N", "P")
LEASES = (10.0, 60.0)
TTLS = (0.0, 30.0, 3600.0)


@dataclass
class World:
    """One key, the clock, every claim ever handed out, and what is checked at each step."""

    now: float = START
    record: Record | None = None
    claims: list[Claim] = field(default_factory=list)
    tokens: int = 0

    @property
    def alive(self) -> Record | None:
        """The record as a reader sees it."""
        return None if self.record is None or self.record.expires_at <= self.now else self.record

    def write(self, written: Record | None, verb: str) -> None:
        before = self.alive
        if written is None:
            return
        assert written.key == key_for("k")
        assert written.expires_at > self.now
        assert written.lease_expires_at <= written.expires_at
        assert sum(not note.live(self.now) for note in written.notes.values()) <= NOTES_KEPT
        if before is not None:
            self.check_change(before, written, verb)
        self.record = written

    def check_change(self, before: Record, written: Record, verb: str) -> None:
        for message, note in before.notes.items():
            assert written.note(message).over >= note.over
            assert written.note(message).settled or not note.settled or verb == "forget"
        assert written.fence >= before.fence
        if before.state is State.COMPLETED and verb != "forget":
            facts = (written.state, written.outcome, written.completed_at, written.token)
            assert facts == (State.COMPLETED, before.outcome, before.completed_at, before.token)
        if before.unknown and not written.unknown:
            assert verb in {"complete", "forget"}
        if written.token != before.token and verb != "forget":
            assert verb == "claim"
            assert written.fence > before.fence

    # -- one step each --------------------------------------------------------------------------------------------

    def claim(self, draw: Callable[..., Any]) -> None:
        operation = self.operation(draw)
        before = self.alive
        dead = draw(st.sampled_from([None, None, 0, "fence", "right"]))
        dead_fence = self.fence_named(dead, operation)
        decision, written = decide.decide_claim(
            self.record,
            operation,
            now=self.now,
            lease=draw(st.sampled_from(LEASES)),
            ttl=draw(st.sampled_from(TTLS)),
            dead_fence=dead_fence,
        )
        if before is not None:
            self.check_claim(before, operation, decision, written, dead_fence)
        self.write(written, "claim")
        if decision.claim is not None:
            if written is not None:
                earlier = [claim.fence for claim in self.claims if not claim.right]
                assert decision.claim.right or decision.claim.fence > max(earlier, default=0)
            self.claims.append(decision.claim)

    def operation(self, draw: Callable[..., Any]) -> Operation:
        if self.claims and draw(st.integers(0, 4)) == 0:
            return draw(st.sampled_from(self.claims)).operation
        self.tokens += 1
        delivery = Delivery(draw(st.sampled_from(MESSAGES)), draw(st.integers(0, 3)), draw(st.booleans()))
        prints = draw(st.sampled_from(["", "", fingerprint("a"), fingerprint("b")]))
        return Operation(key_for("k"), delivery, f"token {self.tokens}", fingerprint=prints)

    def fence_named(self, dead: Any, operation: Operation) -> int | None:
        if self.record is None or dead in {None, 0}:
            return dead
        right = self.record.note(operation.delivery.message_id).continuing
        return self.record.fence if dead == "fence" else (right.fence if right else None)

    def check_claim(
        self,
        before: Record,
        operation: Operation,
        decision: Decision,
        written: Record | None,
        dead_fence: int | None,
    ) -> None:
        leased = before.state is State.CLAIMED and before.lease_expires_at > self.now
        if leased and dead_fence != before.fence:
            assert written is None
            assert decision.claim is None or operation.token == before.token
        if before.state is State.RELEASED and before.unknown:
            assert decision.answer is not Answer.ACQUIRED
        if operation.delivery.generation <= before.note(operation.delivery.message_id).over:
            assert decision.claim is None or written is None
        right = before.note(operation.delivery.message_id).continuing
        if right is not None and right.lease_expires_at > self.now and dead_fence != right.fence:
            assert written is None
        if written is not None and before.state is State.COMPLETED:
            assert decision.claim is not None
            assert decision.claim.right
            assert decision.claim.fence > before.fence
            assert right is None or decision.claim.fence > right.fence

    def is_current(self, claim: Claim) -> bool:
        record = self.alive
        return record is None or record.token == claim.token

    def complete(self, draw: Callable[..., Any]) -> None:
        claim = draw(st.sampled_from(self.claims))
        if claim.right:
            return
        ended, written = decide.decide_complete(self.record, claim, result(), now=self.now)
        assert (ended is Ended.LOST) or self.is_current(claim)
        assert written is None or ended is Ended.COMPLETED
        self.write(written, "complete")
        if ended is Ended.COMPLETED and self.record is not None:
            assert self.record.token == claim.token
            assert not self.record.unknown

    def release(self, draw: Callable[..., Any]) -> None:
        claim = draw(st.sampled_from(self.claims))
        if claim.right:
            return
        reason = draw(st.sampled_from(Release))
        successor = Successor(claim.operation.delivery.generation + 1, draw(st.sampled_from([0.0, 20.0, 200.0])))
        retry = successor if reason is Release.RETRY else None
        ended, written = decide.decide_release(self.record, claim, reason, retry, now=self.now)
        assert (ended is Ended.LOST) or (self.record is not None and self.record.token == claim.token)
        self.write(written, "release")

    def renew(self, draw: Callable[..., Any]) -> None:
        claim = draw(st.sampled_from(self.claims))
        answer, written = decide.decide_renew(self.record, claim, now=self.now)
        assert answer is not Renewal.BUSY
        if not claim.right and not self.is_current(claim):
            assert (answer, written) == (Renewal.LOST, None)
        if self.alive is None and not claim.right:
            assert written is not None
            # A lost record comes back under its old fence; the next claim is above it all the same.
            self.record = written
            return
        self.write(written, "renew")

    def settle(self, draw: Callable[..., Any]) -> None:
        self.write(decide.decide_settle(self.record, draw(st.sampled_from(MESSAGES)), now=self.now), "settle")

    def park(self, draw: Callable[..., Any]) -> None:
        message, generation = draw(st.sampled_from(MESSAGES)), draw(st.integers(0, 3))
        before = None if self.alive is None else self.alive.note(message).parked
        count = draw(st.integers(1, 5))
        written = decide.decide_parked(self.record, message, generation, count, now=self.now)
        self.write(written, "park")
        if self.alive is not None:
            assert self.alive.note(message).parked == max(before or (-1, 0), (generation, count))

    def forget(self, draw: Callable[..., Any]) -> None:
        fence = draw(st.sampled_from([0, 0 if self.record is None else self.record.fence]))
        forgotten, written = decide.decide_forget(self.record, fence, now=self.now)
        assert forgotten == (written is not None) == (self.alive is not None and self.alive.fence == fence)
        self.write(written, "forget")

    def wait(self, draw: Callable[..., Any]) -> None:
        self.now += draw(st.sampled_from([0.0, 0.25, 9.75, 10.0, 50.0, 60.0, 3600.0, 90_000.0]))


STEPS = (
    "claim",
    "claim",
    "claim",
    "complete",
    "release",
    "release",
    "renew",
    "settle",
    "park",
    "forget",
    "wait",
    "wait",
)


@settings(any_speed, max_examples=250, derandomize=True)
@given(st.data())
def test_no_history_breaks_a_rule(data: st.DataObject) -> None:
    world = World()
    for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=4, max_size=30)):
        if step in {"complete", "release", "renew"} and not world.claims:
            continue
        getattr(world, step)(data.draw)


@settings(any_speed, max_examples=300, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["complete", "release", "abandon"]),
            st.floats(-5, 200, allow_nan=False),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_claim_fences_grow_even_when_the_clock_goes_back(history: list[tuple[str, float, bool]]) -> None:
    now, record, fences = START, None, [0]
    for number, (end, seconds, purge) in enumerate(history):
        operation = Operation(key_for("k"), Delivery(f"m{number}"), f"t{number}")
        decision, written = decide.decide_claim(record, operation, now=now, lease=10, ttl=50)
        if decision.claim is not None:
            assert written is not None
            assert written.fence == decision.claim.fence > fences[-1]
            fences.append(decision.claim.fence)
            record = written
            if end == "complete":
                record = decide.decide_complete(record, decision.claim, result(), now=now)[1]
            elif end == "release":
                record = decide.decide_release(record, decision.claim, Release.ENDED, None, now=now)[1]
        now += seconds
        if purge and seconds > 0 and record is not None and record.expires_at <= now:
            record = None


@settings(any_speed, max_examples=200, derandomize=True)
@given(st.sampled_from(Release), st.booleans(), st.floats(0, 1e6), st.integers(0, 5))
def test_a_released_record_with_doubt_is_never_acquired(
    reason: Release, doubt: bool, later: float, generation: int
) -> None:
    operation = Operation(key_for("k"), Delivery("M"), "first")
    decision, record = decide.decide_claim(None, operation, now=START, lease=10, ttl=1e9)
    assert decision.claim is not None
    assert record is not None
    record = replace(record, unknown=doubt)
    _, record = decide.decide_release(record, decision.claim, reason, None, now=START)
    again, _ = decide.decide_claim(
        record, Operation(key_for("k"), Delivery("M", generation), "second"), now=START + later, lease=10, ttl=10
    )
    if doubt or reason is Release.INTERRUPTED:
        assert again.answer in {Answer.RECLAIMED, Answer.OVER}
        assert again.claim is None or again.claim.unknown
