"""The Lua scripts answer as core/decide.py does: random histories, told to both, compared word by word."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from celery_idem.core.codec import Encoded
from celery_idem.core.records import (
    DAY,
    NOTES_KEPT,
    Answer,
    Claim,
    Decision,
    Delivery,
    Kind,
    Operation,
    Outcome,
    Release,
    State,
    Successor,
)
from celery_idem.stores.memory import MemoryStore
from celery_idem.stores.redis.store import RedisStore
from tests.support.clock import ManualClock

pytestmark = pytest.mark.redis

KEY = "ab" * 32
LEASES = (0.25, 7.0, 30.000001, 600.1)
TTLS = (0.0, 0.3, 50.0, DAY, 3 * DAY)
JUMPS = (*[0.0] * 8, *[0.000001] * 4, 0.1, 0.1, 1.7, 29.3, 60.0, 61.5, 700.0, DAY - 1, DAY + 700, -3.0)


class Pair:
    """The reference and Redis under one clock; every verb goes to both, and they must say the same."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = ManualClock(1_700_000_000 + self.random.random() * 1e8)
        self.memory = MemoryStore(clock=self.clock)
        self.redis = RedisStore(url, clock=self.clock, prefix=f"{seed}:")
        self.claims: list[Claim] = []
        self.operations: list[Operation] = []
        self.said: set[object] = set()

    def both(self, verb: str, *args: Any, **named: Any) -> Any:
        expected = getattr(self.memory, verb)(*args, **named)
        actual = getattr(self.redis, verb)(*args, **named)
        if isinstance(expected, Decision):
            expected = self.own_note(expected, args[0])
        assert actual == expected, (verb, args, named)
        record = self.memory.get(KEY)
        assert self.redis.get(KEY) == record, (verb, args, named)
        assert list(self.redis.find()) == list(self.memory.find())
        return actual

    @staticmethod
    def own_note(decision: Decision, operation: Operation) -> Decision:
        """What Redis answers: of the notes only the caller's."""
        if decision.record is None:
            return decision
        notes = {m: n for m, n in decision.record.notes.items() if m == operation.delivery.message_id}
        return replace(decision, record=replace(decision.record, notes=notes))

    def operation(self) -> Operation:
        pick = self.random.choice
        token, dice = f"{self.random.getrandbits(128):032x}", self.random.random()
        if self.operations and dice < 0.2:
            return pick(self.operations)  # the same question again
        if self.claims and dice < 0.45:
            return replace(self.claims[-1].operation, token=token)  # another copy of the latest message
        operation = Operation(
            KEY,
            Delivery(f"m{pick('aaabcd')}", pick((0, 0, 1, 1, 2, 3)), pick((True, False))),
            token,
            holder=pick(("", "host:1:ünïcode", 'quo"te\\/\n')),
            task=pick(("shop.charge", "")),
            namespace=pick(("", "shop")),
            scope=pick(("", "ef" * 32)),
            fingerprint=pick(("", "11" * 32, "11" * 32, "22" * 32)),
        )
        self.operations.append(operation)
        return operation

    def claim(self) -> None:
        pick, record = self.random.choice, self.memory.get(KEY)
        fences = [None, None, 1]
        if record is not None:
            fences += [record.fence]
            fences += [n.continuing.fence for n in record.notes.values() if n.continuing]
        decision = self.both("claim", self.operation(), lease=pick(LEASES), ttl=pick(TTLS), dead_fence=pick(fences))
        self.said.add(decision.answer)
        if decision.claim is not None:
            self.claims.append(decision.claim)
            del self.claims[:-8]
            if decision.claim.right:
                self.said.add("right")

    def step(self) -> None:
        pick = self.random.choice
        self.clock.advance(pick(JUMPS))
        verb = pick(("claim",) * 5 + ("complete", "complete", "release", "renew", "settle", "note_parked", "forget"))
        if verb == "claim" or not self.claims:
            self.claim()
            return
        claim = pick(self.claims[-3:])
        if verb == "complete":
            self.said.add((verb, self.both(verb, claim, self.outcome())))
        elif verb == "release":
            reason = pick([*Release, Release.RETRY])
            after = Successor(claim.operation.delivery.generation + 1, pick((0.0, 5.5, 90, 5000)))
            after = after if reason is Release.RETRY and self.random.random() < 0.9 else None
            self.said.add((verb, self.both(verb, claim, reason, successor=after)))
        elif verb == "renew":
            several = {c.token: c for c in self.random.sample(self.claims, min(3, len(self.claims)))}
            self.said.update(("renew", answer) for answer in self.both(verb, list(several.values())).values())
        elif verb == "settle":
            self.both(verb, KEY, claim.operation.delivery.message_id)
        elif verb == "note_parked":
            self.both(verb, KEY, f"m{pick('abcde')}", pick((0, 1, 2)), pick((1, 2, 3)))
        elif self.random.random() < 0.4:
            record = self.memory.get(KEY)
            fence = record.fence if record and self.random.random() < 0.8 else 5
            self.said.add((verb, self.both(verb, KEY, fence)))

    def outcome(self) -> Outcome:
        kind = self.random.choice(list(Kind))
        body = self.random.choice((b"", b"{}", bytes(range(256)), b"x" * 9000))
        kept = Encoded(body, "application/json", "utf-8", "c" * 64)
        return Outcome(kind, self.random.choice((kept, None)))

    def close(self) -> None:
        self.redis.close()


@pytest.fixture
def pair(redis_url: str, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(redis_url, getattr(request, "param", 0))
    yield pair
    pair.close()


@pytest.mark.parametrize("pair", range(10), indirect=True)
def test_random_histories(pair: Pair) -> None:
    for _ in range(300):
        pair.step()


def test_random_histories_reach_every_answer_of_every_verb(redis_url: str) -> None:
    said: set[object] = set()
    for seed in range(100, 112):
        pair = Pair(redis_url, seed)
        for _ in range(150):
            pair.step()
        said |= pair.said
        pair.close()
    reached = {f"{item[0]} {getattr(item[1], 'value', item[1])}" for item in said if isinstance(item, tuple)}
    assert reached == {
        *("complete COMPLETED", "complete LOST", "release COMPLETED", "release LOST", "release RELEASED"),
        *("renew LOST", "renew RENEWED", "forget False", "forget True"),
    }
    assert said >= {"right", *set(Answer) - {Answer.NEWER}}


def test_notes_are_pruned_alike(pair: Pair) -> None:
    """Beyond the limit the oldest dead notes go, whatever their names; live ones stay."""
    first = Operation(KEY, Delivery("first", 0, continues=True), "0" * 32)
    claim = pair.both("claim", first, lease=5, ttl=DAY).claim
    pair.both("complete", claim, Outcome(Kind.RESULT))
    for number in range(NOTES_KEPT + 20):
        pair.clock.advance(pair.random.choice((0.0, 0.05)))
        if number % 3:
            pair.both("note_parked", KEY, f"n{number * 7919 % 97}é", 0, number)
        else:
            operation = Operation(KEY, Delivery(f"live{number}", 0, continues=True), f"{number:032x}")
            pair.both("claim", operation, lease=pair.random.choice((0.2, 1000)), ttl=DAY)
    record = pair.memory.get(KEY)
    assert record is not None
    assert len(record.notes) == NOTES_KEPT
    assert len(next(pair.redis.find(state=State.COMPLETED)).notes) == NOTES_KEPT


def test_more_live_notes_than_the_limit_all_stay(pair: Pair) -> None:
    claim = pair.both("claim", Operation(KEY, Delivery("first"), "f" * 32), lease=5, ttl=DAY).claim
    pair.both("complete", claim, Outcome(Kind.IGNORED))
    for number in range(NOTES_KEPT + 6):
        operation = Operation(KEY, Delivery(f"live{number}", 0, continues=True), f"{number:032x}")
        pair.both("claim", operation, lease=1000, ttl=DAY)
    record = pair.memory.get(KEY)
    assert record is not None
    assert len(record.notes) == NOTES_KEPT + 6
    pair.clock.advance(2000)
    pair.both("note_parked", KEY, "last", 0, 1)
    record = pair.memory.get(KEY)
    assert record is not None
    assert len(record.notes) == NOTES_KEPT
