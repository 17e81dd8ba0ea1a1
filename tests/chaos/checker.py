"""The judge of a history: it knows the rules and nothing of how the run was made.

An *attempt* is one run of a body, from ``start`` to ``end`` or to the death of its process. Effects come from the
fenced resource, in the order it took them.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.history import Event

FOREVER = float("inf")
STRIKES = {"kill child", "kill worker", "kill main", "stop", "partition"}
"""Faults that part an effect from its completion."""
SILENCES = {"partition", "store restart", "store cut before", "store cut after"}
"""Faults that keep a store from answering."""


@dataclass
class Attempt:
    """One run of a body."""

    id: str
    key: str
    pid: int
    worker: str
    began: float
    fence: int = 0
    token: str = ""
    ended: float = FOREVER
    """When its body returned or raised, or its process was killed."""
    determined: bool = True
    """Whether that moment is known; a process may die by itself."""
    effect: Event | None = None
    completed: float = FOREVER
    unrecorded: float = FOREVER
    """When it gave up telling the store that it is complete, and its value went on to Celery all the same."""
    leased: float = 0.0
    """Until when at least its lease lived: the last claim or renewal that was confirmed, from when it was asked for."""


@dataclass(frozen=True)
class Fault:
    """Something done to the system."""

    name: str
    at: float
    until: float
    pids: frozenset[int]
    """The processes it hit; none named means all."""

    def strikes(self, attempt: Attempt) -> bool:
        """Whether it hit the attempt's process between effect and completion."""
        if self.name not in STRIKES or attempt.pid not in self.pids or attempt.effect is None:
            return False
        return self.at < attempt.completed and self.until >= attempt.effect.at

    def silences(self, attempt: Attempt) -> bool:
        """Whether the store may have been silent for it after its body ended."""
        there = not self.pids or attempt.pid in self.pids
        return self.name in SILENCES and there and self.at < attempt.unrecorded and self.until >= attempt.ended


@dataclass
class Verdict:
    """The counts of one run, and every broken rule in words."""

    messages: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    hit: int = 0
    """Faults that found bodies running where they struck."""
    idle: int = 0
    struck: int = 0
    """Bodies that were running when and where a fault struck."""
    bodies: int = 0
    lost: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Lost before anybody saw it: the broker's own log has it popped, and nobody noted it as unacked."""
    explained: int = 0
    unexplained: list[str] = field(default_factory=list)
    twice: int = 0
    """Unexplained ones of keys that were published twice."""
    overlaps: list[str] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    unrecorded: int = 0
    """Completions whose value went on although the store was silent for a lease: answered, but not remembered."""
    late: int = 0
    """Completions whose value went on in the same way, and which were recorded when the store was back."""
    contradicted: int = 0
    """Those of them after which another run of the key completed it with an answer of its own, or had."""
    forgotten: list[str] = field(default_factory=list)
    """The same where the store was not silent."""
    stale: list[str] = field(default_factory=list)
    refused: int = 0
    missing: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    replayed: int = 0

    @property
    def broken(self) -> list[str]:
        """Every rule that was broken, in words."""
        named = {
            "lost": self.lost,
            "effect doubled without a kill between effect and completion": self.unexplained,
            "two bodies at once under a live lease": self.overlaps,
            "completed twice": self.completions,
            "completion not recorded, and the store was there": self.forgotten,
            "effect of a holder that was fenced out": self.stale,
            "continuation missing": self.missing,
            "continuation doubled": self.doubled,
        }
        return [f"{rule}: {what}" for rule, found in named.items() for what in found]


def judge(events: Iterable[Event], *, lease: float, fenced: bool) -> Verdict:
    """Judge a whole history.

    Args:
        events: history and effects, effects in the order the resource took them.
        lease: seconds a claim or renewal lasts by the store's clock.
        fenced: whether there are leases and fences at all; without, every two bodies of a key at once count.
    """
    return _Trial(list(events), lease, fenced).verdict()


class _Trial:
    def __init__(self, events: list[Event], lease: float, fenced: bool) -> None:
        self.lease, self.fenced = lease, fenced
        self.by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.by_kind[event.kind].append(event)
        self.faults = list(self._read_faults())
        self.attempts = {attempt.id: attempt for attempt in self._read_attempts()}
        self._place_effects()
        self._place_failures()
        self._place_leases()
        self.keys_of_records = {e["record"]: e.key for e in self.by_kind["start"] if e["record"]}
        self.completions = self._read_completions()
        self.runs: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in sorted(self.attempts.values(), key=lambda one: one.began):
            self.runs[attempt.key].append(attempt)
        self.followers = {key for event in self.by_kind["published"] for key in event["followers"] or ()}
        self.out = Verdict(messages=len(self.by_kind["published"]), bodies=len(self.attempts))

    def verdict(self) -> Verdict:
        self._count_faults()
        self._judge_losses()
        self._judge_effects()
        self._judge_overlaps()
        self._judge_completions()
        self._judge_unrecorded()
        told = Counter(event["name"] for event in self.by_kind["told"])
        self.out.replayed, self.out.late = told["REPLAYED"], told["COMPLETED_LATE"]
        return self.out

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_faults(self) -> Iterator[Fault]:
        over = {event["number"]: event.at for event in self.by_kind["healed"]}
        for event in self.by_kind["fault"]:
            until = over.get(event["number"], FOREVER)
            yield Fault(event["name"], event.at, until, frozenset(event["pids"] or ()))

    def _read_attempts(self) -> Iterator[Attempt]:
        ends = {event["attempt"]: event.at for event in self.by_kind["end"]}
        over = {event["number"]: event.at for event in self.by_kind["healed"]}
        deaths = [
            (event.at, over.get(event["number"], event.at), frozenset(event["pids"]))
            for event in self.by_kind["fault"]
            if event["deadly"]
        ]
        gone = [(event.at, frozenset(event["pids"])) for event in self.by_kind["gone"]]
        for e in self.by_kind["start"]:
            attempt = Attempt(e["attempt"], e.key, e.pid, e.worker, e.at, e["fence"] or 0, e["token"] or "")
            if attempt.id in ends:
                attempt.ended = ends[attempt.id]
            else:
                # A body may begin between the word that it will be killed and its death.
                struck = [max(at, e.at) for at, until, pids in deaths if e.pid in pids and until >= e.at]
                attempt.ended = min(struck, default=FOREVER)
                attempt.determined = attempt.ended < FOREVER or not any(e.pid in pids for _, pids in gone)
            yield attempt

    def _place_effects(self) -> None:
        for event in self.by_kind["effect"]:
            attempt = self.attempts.get(event["attempt"])
            if attempt is not None:
                attempt.effect = event

    def _place_failures(self) -> None:
        named = {(e["id"], e["fence"]): self.attempts[e["attempt"]] for e in self.by_kind["start"]}
        for event in self.by_kind["told"]:
            attempt = named.get((event["message_id"], int(event["fence"] or 0)))
            if attempt is not None and event["name"] == "COMPLETE_FAILED":
                attempt.unrecorded = event.at

    def _place_leases(self) -> None:
        last: dict[str, float] = {}
        for event in self.by_kind["claimed"]:
            last[event["token"]] = max(event.at, last.get(event["token"], 0.0))
        for event in self.by_kind["renewed"]:
            for token in event["tokens"]:
                last[token] = max(event.at, last.get(token, 0.0))
        for attempt in self.attempts.values():
            if attempt.token in last:
                attempt.leased = last[attempt.token] + self.lease

    def _read_completions(self) -> dict[str, dict[str, float]]:
        """By key: what completed it, and when: tokens of claims, or values where there is no store."""
        found: dict[str, dict[str, float]] = defaultdict(dict)
        by_token = {attempt.token: attempt for attempt in self.attempts.values() if attempt.token}
        by_value = {f"{attempt.key} by {attempt.id}": attempt for attempt in self.attempts.values()}
        for event in self.by_kind["completed"]:
            key = event.key or self.keys_of_records.get(event["record"], event["record"])
            found[key].setdefault(event["token"], event.at)
            attempt = by_token.get(event["token"]) or by_value.get(event["token"])
            if attempt is not None:
                attempt.completed = min(attempt.completed, event.at)
        for event in self.by_kind["record"]:  # what the store says in the end
            if event["state"] == "COMPLETED":
                found[event.key].setdefault(event["token"], event.at)
        return found

    # --- judging -----------------------------------------------------------------------------------------------------

    def _count_faults(self) -> None:
        for fault in self.faults:
            self.out.faults[fault.name] += 1
            running = self._running(fault)
            self.out.struck += len(running)
            self.out.hit += bool(running)
            self.out.idle += not running

    def _running(self, fault: Fault) -> list[Attempt]:
        return [
            attempt
            for attempt in self.attempts.values()
            if attempt.began <= fault.at <= attempt.ended
            and attempt.determined
            and (not fault.pids or attempt.pid in fault.pids)
        ]

    def _judge_losses(self) -> None:
        due = {key for event in self.by_kind["published"] for key in event["heads"]}
        for key in sorted(due):
            if not self._done(key):
                self._lose(key, [key], self.out.lost)
        for event in self.by_kind["published"]:
            for key in event["followers"] or ():
                if all(self._done(head) for head in event["heads"]) and not self._done(key):
                    self._lose(key, [key, *event["heads"]], self.out.missing)

    def _done(self, key: str) -> bool:
        happened = any(run.effect and run.effect["accepted"] for run in self.runs[key])
        return happened and (key in self.completions or any(run.unrecorded < FOREVER for run in self.runs[key]))

    def _lose(self, key: str, messages: Sequence[str], to: list[str]) -> None:
        (self.out.dropped if any(map(self._forgotten, messages)) else to).append(key)

    def _forgotten(self, key: str) -> bool:
        """Whether the broker's own log says that it popped a copy nobody noted, or it keeps one nobody will get."""
        vanished = any(event.key == key for event in self.by_kind["vanished"])
        return vanished or any(event.key == key and event["stuck"] for event in self.by_kind["left"])

    def _judge_effects(self) -> None:
        highest: dict[str, int] = {}
        taken: dict[str, list[Attempt]] = defaultdict(list)
        for event in self.by_kind["effect"]:
            if not event["accepted"]:
                self.out.refused += 1
                continue
            if event["fence"] < highest.get(event.key, 0):
                self.out.stale.append(f"{event.key}: fence {event['fence']} after {highest[event.key]}")
            highest[event.key] = max(event["fence"], highest.get(event.key, 0))
            attempt = self.attempts.get(event["attempt"])
            if attempt is None:
                self.out.unexplained.append(f"{event.key}: an effect without a body")
                continue
            taken[event.key].append(attempt)
        for key, attempts in taken.items():
            self._judge_order(key, attempts)
            for first, second in itertools.pairwise(attempts):
                self._judge_doubled(key, first, second)

    def _judge_order(self, key: str, attempts: Sequence[Attempt]) -> None:
        """An effect after a later body of the key showed a fence of its own: the holder had been fenced out."""
        if not self.fenced:
            return
        for attempt in attempts:
            after = [run for run in self.runs[key] if run.fence > attempt.fence and run.began < _moment(attempt)]
            if after and not any(f"{key}:" in line for line in self.out.stale):
                self.out.stale.append(f"{key}: fence {attempt.fence} after {after[0].fence} had begun")

    def _judge_doubled(self, key: str, first: Attempt, second: Attempt) -> None:
        if any(fault.strikes(first) for fault in self.faults) and first.completed > second.began:
            self.out.explained += 1
        elif key in self.followers:
            self.out.doubled.append(f"{key}: effects of {first.id} and {second.id}")
        else:
            self.out.unexplained.append(f"{key}: effects of {first.id} and {second.id}")
            self.out.twice += sum(event.key == key for event in self.by_kind["published"]) > 1

    def _judge_overlaps(self) -> None:
        for key, runs in self.runs.items():
            for position, second in enumerate(runs):
                for first in runs[:position]:
                    until = min(first.ended, first.leased) if self.fenced else first.ended
                    if first.determined and second.began < until:
                        self.out.overlaps.append(f"{key}: {second.id} began {until - second.began:.3f} s too early")

    def _judge_completions(self) -> None:
        for key, tokens in self.completions.items():
            if len(tokens) > 1:
                self.out.completions.append(f"{key}: by {', '.join(map(str, tokens))}")
            for run in self.runs[key]:
                if self.fenced and run.token in tokens and run.effect is not None and not run.effect["accepted"]:
                    self.out.completions.append(f"{key}: by {run.token}, whose effect was refused")
        answers: dict[str, set[Any]] = defaultdict(set)
        unknown = {f"{run.key} by {run.id}" for run in self.attempts.values() if run.unrecorded < FOREVER}
        if self.fenced:
            for event in self.by_kind["answered"]:
                answers[event.key] |= {event["value"]} - unknown
        self.out.completions += [f"{key}: {len(values)} answers" for key, values in answers.items() if len(values) > 1]

    def _judge_unrecorded(self) -> None:
        for run in self.attempts.values():
            if run.unrecorded < FOREVER and run.completed == FOREVER:
                self.out.unrecorded += 1
                self.out.contradicted += run.key in self.completions
                if not any(fault.silences(run) for fault in self.faults):
                    self.out.forgotten.append(f"{run.key}: by {run.id}")


def _moment(attempt: Attempt) -> float:
    return attempt.effect.at if attempt.effect is not None else FOREVER
