"""Random histories of two keys, told to a store and to the store in memory: the same answers and the same records."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_idem.core.records import Claim, Decision, Delivery, Kind, Operation, Outcome, Release, State, Successor
from celery_idem.stores.base import Store
from celery_idem.stores.memory import MemoryStore
from tests.contract.backends import STORES
from tests.support.clock import ManualClock
from tests.support.operations import fingerprint, key_for, result, token_for

SEQUENCES, STEPS = 100, 10  # of each group
GROUPS = {"sqlite": range(3), "redis": range(3), "psycopg2": range(2), "psycopg3": range(2, 3)}
KEYS = ("left", "right")
MESSAGES = ("M", "N", "weird m:1 \"ü'")
WAITS = (0.0, 0.25, 1.0, 29.75, 30.0, 59.999999, 60.0, 61.1, 90.0, 3600.0, 86_400.0)


class Histories:
    """Draws one call after the other, makes it on both stores, and compares."""

    def __init__(self, store: Store, clock: ManualClock, seed: str) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.clock = clock
        self.reference = MemoryStore(clock=clock)
        self.store = store
        self.claims: list[Claim] = []
        self.told: list[str] = []
        self.keys = [key_for(f"{seed} {name}") for name in KEYS]
        self.touched: set[str] = set()

    def step(self) -> None:
        verbs: list[Callable[[], None]] = [self.claim, self.wait, self.park, self.settle, self.forget, self.find]
        weights = [40, 16, 8, 8, 5, 3]
        if self.claims:
            verbs += [self.complete, self.release, self.renew]
            weights += [14, 18, 10]
        self.touched.clear()
        self.random.choices(verbs, weights)[0]()
        self.compare_records()

    def both(self, verb: str, *args: Any, **more: Any) -> Any:
        """Make the call on both and return the reference's answer, once they agree."""
        self.told.append(f"{self.clock.now - 2e9:12.6f} {verb} {args} {more}")
        key = getattr(args[0], "key", args[0])
        self.touched.update(self.keys if isinstance(key, list) else [key])
        wanted = getattr(self.reference, verb)(*args, **more)
        got = getattr(self.store, verb)(*args, **more)
        if isinstance(wanted, Decision):
            message = args[0].delivery.message_id
            assert comparable(got, message) == comparable(wanted, message), self.history()
        else:
            assert got == wanted, self.history()
        return wanted

    def compare_records(self) -> None:
        for key in self.touched:
            wanted, got = self.reference.get(key), self.store.get(key)
            assert got == wanted, self.history()

    def history(self) -> str:
        return f"seed {self.seed}:\n" + "\n".join(self.told)

    def message(self) -> str:
        return self.random.choice(MESSAGES)

    def claim(self) -> None:
        chance = self.random
        if self.claims and chance.random() < 0.15:
            operation = chance.choice(self.claims).operation
        else:
            operation = Operation(
                key=chance.choice(self.keys),
                delivery=Delivery(self.message(), chance.randrange(3), chance.random() < 0.5),
                token=token_for(f"{self.seed} {len(self.told)}"),
                holder=chance.choice(["", "host:1:ü"]),
                task=chance.choice(["shop.charge", "shop.ship"]),
                scope=chance.choice(["", fingerprint("tenant")]),
                fingerprint=chance.choice(["", fingerprint("a"), fingerprint("a"), fingerprint("b")]),
            )
        decision = self.both(
            "claim",
            operation,
            lease=chance.choice([0.5, 30.0, 60.0]),
            ttl=chance.choice([0.0, 5.0, 3600.0, 200_000.0]),
            dead_fence=self.dead_fence(operation),
        )
        if decision.claim is not None:
            self.claims.append(decision.claim)

    def dead_fence(self, operation: Operation) -> int | None:
        record = self.reference.get(operation.key)
        if record is None or self.random.random() < 0.7:
            return None
        right = record.note(operation.delivery.message_id).continuing
        return self.random.choice([record.fence, record.fence + 1, right.fence if right else 0])

    def a_claim(self) -> Claim:
        # Mostly the last one: it is the one that may still hold its key.
        return self.claims[-1] if self.random.random() < 0.6 else self.random.choice(self.claims)

    def complete(self) -> None:
        claim = self.a_claim()
        kind = self.random.choice(list(Kind))
        outcome = self.random.choice([Outcome(kind), replace(result(self.random.randbytes(30)), kind=kind)])
        if not claim.right:
            self.both("complete", claim, outcome)

    def release(self) -> None:
        claim, reason = self.a_claim(), self.random.choice(list(Release))
        generation = claim.operation.delivery.generation + 1
        delay = self.random.choice([0.0, 0.1, 45.0, 7200.0])
        if not claim.right:
            after = Successor(generation, delay) if reason is Release.RETRY else None
            self.both("release", claim, reason, successor=after)

    def renew(self) -> None:
        count = self.random.randint(1, 4)
        claims = {claim.token: claim for claim in (self.a_claim() for _ in range(count))}
        self.both("renew", list(claims.values()))

    def park(self) -> None:
        key = self.random.choice(self.keys)
        self.both("note_parked", key, self.message(), self.random.randrange(3), self.random.randint(1, 6))

    def settle(self) -> None:
        self.both("settle", self.random.choice(self.keys), self.message())

    def forget(self) -> None:
        key = self.random.choice(self.keys)
        record = self.reference.get(key)
        self.both("forget", key, self.random.choice([0, 0 if record is None else record.fence]))

    def find(self) -> None:
        conditions = {
            "task": self.random.choice([None, "shop.charge"]),
            "state": self.random.choice([None, *State]),
            "older_than": self.random.choice([None, 0.0, 30.0]),
        }
        wanted = sorted(record.key for record in self.reference.find(**conditions))  # type: ignore[arg-type]
        got = sorted(record.key for record in self.store.find(**conditions) if record.key in self.keys)  # type: ignore[arg-type]
        assert got == wanted, self.history()

    def wait(self) -> None:
        seconds = self.random.choice([*WAITS, self.random.random() * 100])
        self.clock.advance(seconds)
        self.told.append(f"{self.clock.now - 2e9:12.6f} (after {seconds} s)")


def comparable(decision: Decision, message_id: str) -> Decision:
    """The decision as every store may tell it: with the caller's own note alone."""
    record = decision.record
    if record is not None:
        notes = {message: note for message, note in record.notes.items() if message == message_id}
        record = replace(record, notes=notes)
    claim = decision.claim and replace(decision.claim, seen=None)
    return replace(decision, record=record, claim=claim)


@pytest.mark.guarantee("table")
@pytest.mark.parametrize(
    ("backend", "group"),
    [
        pytest.param(param.id, group, id=f"{param.id}-{group}", marks=param.marks)
        for param in STORES
        for group in GROUPS.get(str(param.id), ())
    ],
    indirect=["backend"],
)
def test_sequences_every_store_does_what_the_decision_functions_say(
    store: Store, clock: ManualClock, group: int
) -> None:
    for number in range(SEQUENCES):
        history = Histories(store, clock, f"{group}.{number}")
        for _ in range(STEPS):
            history.step()
        history.touched = set(history.keys)
        history.compare_records()
        clock.advance(1.0)
        store.purge(1000)
