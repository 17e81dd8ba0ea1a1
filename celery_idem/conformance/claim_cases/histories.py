"""Random histories of two keys, told to the store and to ``core.decide``: the same answers and the same records.

Every history has a seed, and a breach tells it with all that was done.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery_idem.conformance.case import Breach, expect
from celery_idem.conformance.claim_cases.bench import Bench, case, outcome
from celery_idem.core.records import Claim, Decision, Kind, Outcome, Release, State, Successor
from celery_idem.stores.memory import MemoryStore

HISTORIES, STEPS = 40, 12
WAITS = (0.0, 0.25, 1.0, 29.75, 30.0, 59.999999, 60.0, 61.1, 90.0, 3600.0, 86_400.0)


@case("table", "clock")
def random_histories_follow_the_decision_table(bench: Bench) -> None:
    """A store that answers or keeps anything else than the table says, after any series of calls."""
    for seed in range(HISTORIES):
        history = History(bench, seed)
        for _ in range(STEPS):
            history.step()
        bench.clock.advance(1.0)
        bench.store.purge(1_000_000)


class History:
    """Draws one call after the other, makes it on both, and compares."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench, self.seed, self.chance = bench, seed, random.Random(seed)  # noqa: S311
        # The decision functions and a dictionary.
        self.reference = MemoryStore(clock=bench.clock)
        self.names = [f"{seed} left", f"{seed} right"]
        self.claims: list[Claim] = []
        self.told: list[str] = []

    def step(self) -> None:
        """Make one call, or let time pass."""
        verbs: list[Callable[[], None]] = [self.claim, self.wait, self.park, self.settle, self.forget, self.find]
        weights = [40, 16, 8, 8, 5, 3]
        if self.claims:
            verbs += [self.complete, self.release, self.renew]
            weights += [14, 18, 10]
        self.chance.choices(verbs, weights)[0]()
        for name in self.names:
            wanted, got = self.reference.get(self.bench.key(name)), self.bench.other.get(self.bench.key(name))
            expect(got == wanted, f"the record is {got}, the table says {wanted}; {self.history()}")

    def both(self, verb: str, *args: Any, **more: Any) -> Any:
        """The answer of the table, once the store's is the same."""
        self.told.append(f"{self.bench.clock() - 2e9:.6f} {verb} {args} {more}")
        wanted = getattr(self.reference, verb)(*args, **more)
        try:
            got = getattr(self.bench.store, verb)(*args, **more)
        except Exception as error:
            raise Breach(f"{verb} raised {error!r}; {self.history()}") from error
        same = got == wanted
        if isinstance(wanted, Decision):
            message = args[0].delivery.message_id
            same = comparable(got, message) == comparable(wanted, message)
        expect(same, f"{verb} was answered {got}, the table says {wanted}; {self.history()}")
        return wanted

    def history(self) -> str:
        """The seed, and all that was done."""
        return f"seed {self.seed}:\n" + "\n".join(f"    {line}" for line in self.told)

    def message(self) -> str:
        """One of three."""
        return self.chance.choice(["M", "N", "weird m:1 \"ü'"])

    def claim(self) -> None:
        """A new copy, or a token that asks again."""
        chance, bench = self.chance, self.bench
        if self.claims and chance.random() < 0.15:
            operation = chance.choice(self.claims).operation
        else:
            operation = bench.op(
                chance.choice(self.names),
                self.message(),
                chance.randrange(3),
                continues=chance.random() < 0.5,
                holder=chance.choice(["", "host:1:ü"]),
                scope=chance.choice(["", bench.key("tenant")]),
                fingerprint=chance.choice(["", bench.key("a"), bench.key("a"), bench.key("b")]),
            )
        times = {"lease": chance.choice([0.5, 30.0, 60.0]), "ttl": chance.choice([0.0, 5.0, 3600.0, 200_000.0])}
        record, dead = self.reference.get(operation.key), None
        if record is not None and chance.random() < 0.3:
            right = record.note(operation.delivery.message_id).continuing
            dead = chance.choice([record.fence, record.fence + 1, right.fence if right else 0])
        decision = self.both("claim", operation, dead_fence=dead, **times)
        if decision.claim is not None:
            self.claims.append(decision.claim)

    def a_claim(self) -> Claim:
        """Mostly the last one: it is the one that may still hold its key."""
        return self.claims[-1] if self.chance.random() < 0.6 else self.chance.choice(self.claims)

    def complete(self) -> None:
        """With a value or without."""
        claim, kind = self.a_claim(), self.chance.choice(list(Kind))
        value = self.chance.choice([Outcome(kind), replace(outcome(self.chance.randbytes(30)), kind=kind)])
        if not claim.right:
            self.both("complete", claim, value)

    def release(self) -> None:
        """For any reason."""
        claim, reason = self.a_claim(), self.chance.choice(list(Release))
        after = Successor(claim.operation.delivery.generation + 1, self.chance.choice([0.0, 0.1, 45.0, 7200.0]))
        if not claim.right:
            self.both("release", claim, reason, successor=after if reason is Release.RETRY else None)

    def renew(self) -> None:
        """Some of the claims."""
        claims = {claim.token: claim for claim in (self.a_claim() for _ in range(self.chance.randint(1, 4)))}
        self.both("renew", list(claims.values()))

    def park(self) -> None:
        """A copy of any message."""
        key = self.bench.key(self.chance.choice(self.names))
        self.both("note_parked", key, self.message(), self.chance.randrange(3), self.chance.randint(1, 6))

    def settle(self) -> None:
        """Any message."""
        self.both("settle", self.bench.key(self.chance.choice(self.names)), self.message())

    def forget(self) -> None:
        """With the right fence, or a wrong one."""
        key = self.bench.key(self.chance.choice(self.names))
        record = self.reference.get(key)
        self.both("forget", key, self.chance.choice([0, 0 if record is None else record.fence]))

    def find(self) -> None:
        """By any conditions."""
        conditions: dict[str, Any] = {
            "task": f"task of {self.bench.source}",
            "state": self.chance.choice([None, *State]),
            "older_than": self.chance.choice([None, 0.0, 30.0]),
        }
        mine = {self.bench.key(name) for name in self.names}
        wanted = {record.key for record in self.reference.find(**conditions)}
        got = {record.key for record in self.bench.store.find(**conditions)} & mine
        expect(got == wanted, f"find({conditions}) told {got}, the table says {wanted}; {self.history()}")

    def wait(self) -> None:
        """A while, or exactly as long as something lasts."""
        seconds = self.chance.choice([*WAITS, self.chance.random() * 100])
        self.bench.clock.advance(seconds)
        self.told.append(f"{self.bench.clock() - 2e9:.6f} (after {seconds} s)")


def comparable(decision: Decision, message: str) -> Decision:
    """The decision as every store may tell it: with no note but the caller's own."""
    record, claim = decision.record, decision.claim
    if record is not None:
        notes = {name: note for name, note in record.notes.items() if name == message}
        record = replace(record, notes=notes)
    return replace(decision, record=record, claim=claim and replace(claim, seen=None))
