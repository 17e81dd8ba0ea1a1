"""The SQL store answers and writes what the memory store does, whatever is asked in whatever order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from celery_idem.core.codec import Encoded
from celery_idem.core.records import Claim, Delivery, Kind, Operation, Outcome, Release, State, Successor
from celery_idem.stores.memory import MemoryStore
from celery_idem.stores.sql import SQLStore

KEYS = [letter * 64 for letter in "abc"]
MESSAGES = ["m1", "m2", '@now "at":"@now" "until":"@then" \\ \u2603']


class Clock:
    """Moves in steps that floats say exactly, so that the records can be compared exactly."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """One sequence of operations on both stores; the SQL side changes between two processes' views of it."""

    def __init__(self, seed: int, clock: Clock, memory: MemoryStore, stores: list[SQLStore]) -> None:
        self.random = random.Random(seed)
        self.clock, self.memory, self.stores = clock, memory, stores
        self.claims: list[tuple[Claim, Claim]] = []
        self.operations: list[Operation] = []
        self.drawn = seed * 1_000_000

    def both(self, verb: str, *arguments: Any, **more: Any) -> tuple[Any, Any]:
        expected = getattr(self.memory, verb)(*arguments, **more)
        actual = getattr(self.random.choice(self.stores), verb)(*arguments, **more)
        return expected, actual

    def claim(self) -> None:
        draw = self.random
        self.drawn += 1
        operation = Operation(
            draw.choice(KEYS),
            Delivery(draw.choice(MESSAGES), draw.randrange(3), continues=draw.random() < 0.5),
            f"{self.drawn:032x}",
            f"holder {self.drawn}",
            draw.choice(["shop.charge", "shop.mail"]),
            "shop",
            draw.choice(["", "s" * 64]),
            draw.choice(["", "f" * 64, "e" * 64]),
        )
        if self.operations and draw.random() < 0.15:
            operation = draw.choice(self.operations[-5:])
        self.operations.append(operation)
        fences = [claim.fence for claim, _ in self.claims[-5:]]
        dead_fence = draw.choice(fences) if fences and draw.random() < 0.2 else None
        lease, ttl = draw.choice([1, 8, 60]), draw.choice([0, 64, 4096])
        expected, actual = self.both("claim", operation, lease=lease, ttl=ttl, dead_fence=dead_fence)
        assert actual == expected
        if expected.claim is not None:
            self.claims.append((expected.claim, actual.claim))

    def end(self) -> None:
        draw = self.random
        if not self.claims:
            return
        mine, theirs = draw.choice(self.claims[-4:])
        store = draw.choice(self.stores)
        if draw.random() < 0.5:
            body = Encoded(draw.randbytes(5), "application/json", "utf-8", "c" * 64)
            outcome = Outcome(draw.choice(list(Kind)), draw.choice([None, body]))
            assert store.complete(theirs, outcome) == self.memory.complete(mine, outcome)
        else:
            reason = draw.choice(list(Release))
            successor = Successor(mine.operation.delivery.generation + 1, draw.choice([0, 4, 100]))
            ended = store.release(theirs, reason, successor=successor)
            assert ended == self.memory.release(mine, reason, successor=successor)

    def renew(self) -> None:
        chosen = self.random.sample(self.claims, min(len(self.claims), self.random.randrange(5)))
        by_key = {mine.key: (mine, theirs) for mine, theirs in chosen}
        expected = self.memory.renew([mine for mine, _ in by_key.values()])
        actual = self.random.choice(self.stores).renew([theirs for _, theirs in by_key.values()])
        assert dict(actual) == dict(expected)

    def note(self) -> None:
        draw = self.random
        self.both("settle", draw.choice(KEYS), draw.choice(MESSAGES))
        self.both("note_parked", draw.choice(KEYS), draw.choice(MESSAGES), draw.randrange(3), draw.randrange(4))

    def operate(self) -> None:
        draw = self.random
        record = self.memory.get(key := draw.choice(KEYS))
        fence = record.fence if record is not None and draw.random() < 0.7 else 7
        expected, actual = self.both("forget", key, fence)
        assert actual == expected
        expected, actual = self.both("purge", 100)
        assert actual == expected

    def compare(self) -> None:
        draw = self.random
        for key in KEYS:
            expected, actual = self.both("get", key)
            assert actual == expected
        wanted: dict[str, Any] = {
            "task": draw.choice([None, "shop.mail"]),
            "scope": draw.choice([None, "", "s" * 64]),
            "state": draw.choice([None, *State]),
            "older_than": draw.choice([None, 0, 8]),
        }
        expected, actual = self.both("find", **wanted)
        assert sorted(actual, key=lambda r: r.key) == sorted(expected, key=lambda r: r.key)

    def run(self, steps: int) -> None:
        verbs = [self.claim, self.claim, self.claim, self.end, self.end, self.renew, self.note, self.operate]
        weights = [3, 3, 3, 4, 4, 2, 2, 0.5]
        for _ in range(steps):
            self.random.choices(verbs, weights)[0]()
            self.clock.now += self.random.choice([0, 0, 0.25, 2, 16, 512] if self.random.random() < 0.9 else [5000])
            self.compare()


def run(url: str, seed: int, steps: int) -> None:
    clock = Clock()
    stores = [SQLStore(url, timeout=30, clock=clock) for _ in range(2)]
    try:
        stores[0].create_schema()
        Pair(seed, clock, MemoryStore(clock=clock), stores).run(steps)
    finally:
        for store in stores:
            store.close()


@pytest.mark.parametrize("seed", range(6))
def test_sqlite_agrees_with_memory(tmp_path: Path, seed: int) -> None:
    run(f"sqlite:///{tmp_path}/idem.db", seed, 150)


@pytest.fixture(params=["psycopg2", "psycopg"])
def driver_url(request: pytest.FixtureRequest, postgres_url: str) -> str:
    return postgres_url.replace("+psycopg2", f"+{request.param}")


@pytest.mark.postgres
@pytest.mark.parametrize("seed", range(4))
def test_postgresql_agrees_with_memory(driver_url: str, seed: int) -> None:
    run(driver_url, 100 + seed, 200)
