"""What a run must keep, whatever happened in it: written down as it goes, by nobody's word but the ledger's own.

It knows leases from what the store answered and from the clock, not from the records; what bodies did; what was
published and told. A rule that is broken becomes a line; a run without lines kept every promise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_idem.core.records import GRACE, Ended, Renewal, State

if TYPE_CHECKING:
    from tests.simulate.world import Worker, World

READY = {"SUCCESS", "FAILURE"}
LEASE = 60.0
"""Seconds of every claim."""
SILENCES = {"outage", "long outage", "cut off"}
"""Faults that leave a verb without an answer for longer than it is asked."""


@dataclass
class Lease:
    """A claim or a right to continue, as the store granted it."""

    worker: str
    life: int
    key: str
    message: str
    right: bool
    ends: float
    dead: bool = False
    """Its process died, and everybody on that machine can see it."""


@dataclass
class Run:
    """One body."""

    worker: str
    life: int
    key: str
    message: str
    generation: int
    token: str
    running: bool = True
    effect: bool = False
    landed: bool = False
    """What became of it is in the store."""
    excused: bool = False
    """A fault fell on its worker before that."""
    value: Any = None
    shown: Any = None
    """The same, from the moment of the effect on."""


@dataclass
class Ledger:
    """The judge of one run."""

    world: World
    lines: list[tuple[str, str]] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    outcomes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """The record's outcome and the body's value, by key, as they first were."""
    settled: set[tuple[str, str]] = field(default_factory=set)
    children: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ids under which a message's continuation was published, by message and task."""
    published: dict[str, str] = field(default_factory=dict)
    """Task of every message, by id."""
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    """Key by message and task."""
    dues: dict[tuple[str, int], float] = field(default_factory=dict)
    """When each attempt of each message was due; one that is a minute late may be taken for lost."""
    hits: set[str] = field(default_factory=set)
    """Messages in whose hands a worker died or froze, or the store was down for long."""
    allowed: Counter[str] = field(default_factory=Counter)
    """What is no breach, for a fault explains it and the documentation says it."""
    frozen: set[str] = field(default_factory=set)
    """Messages in whose hands a worker froze."""
    finals: set[str] = field(default_factory=set)
    """Messages that were once told as SUCCESS or FAILURE."""
    unheard: set[str] = field(default_factory=set)
    """Messages whose completion got no answer for a whole lease."""
    asked: dict[str, float] = field(default_factory=dict)
    """When the completion of a message was first asked for; gone with the answer."""
    unsent: set[str] = field(default_factory=set)
    """Messages of which the broker did not take what follows them, or did not say so."""
    verbs: int = 0
    """Calls of the store that changed a record."""

    def broken(self, rule: str, text: str) -> None:
        """A promise is broken."""
        self.world.tell(f"BROKEN: {rule}: {text}")
        self.lines.append((rule, text))

    # --- faults -------------------------------------------------------------------------------------------------------

    def hit(self, *workers: Worker) -> None:
        """A fault falls on these workers: what they have not recorded yet may have to be done again."""
        for worker in workers:
            who = (worker.name, worker.life)
            if worker.delivery is not None:
                worker.delivery.hit = True
                self.hits.add(worker.delivery.id)
            for run in self.runs:
                run.excused = run.excused or ((run.worker, run.life) == who and not run.landed)
            for lease in self.leases.values():
                if (lease.worker, lease.life) == who:
                    self.hits.add(lease.message)

    def crashed(self, worker: Worker, *, seen: bool) -> None:
        """The worker's process is gone."""
        self.hit(worker)
        for run in self.runs:
            if (run.worker, run.life) == (worker.name, worker.life):
                run.running = False
        for lease in self.leases.values():
            if (lease.worker, lease.life) == (worker.name, worker.life):
                lease.dead = lease.dead or seen

    # --- the store's answers ------------------------------------------------------------------------------------------

    def claimed(self, worker: Worker, operation: Any, decision: Any) -> None:
        """What ``claim`` answered."""
        self.keys[(operation.delivery.message_id, operation.task)] = operation.key
        claim = decision.claim
        if claim is None:
            return
        message, key, now = operation.delivery.message_id, operation.key, self.world.clock.now
        for token, other in self.leases.items():
            same = other.key == key and other.right == claim.right and (not claim.right or other.message == message)
            if same and token != operation.token and other.ends > now and not other.dead:
                what = "a right to continue" if claim.right else "a claim"
                self.broken(
                    "no two hold one lease",
                    f"{worker.name} was granted {what} of {message}, {other.worker} has it for {other.ends - now:g} s",
                )
        if operation.token not in self.leases:  # asked again, it got the same answer
            ends = decision.now + claim.lease
            self.leases[operation.token] = Lease(worker.name, worker.life, key, message, claim.right, ends)

    def completed(self, claim: Any, ended: Ended) -> None:
        """What ``complete`` answered."""
        lease = self.leases.get(claim.token)
        if lease is not None and ended is Ended.COMPLETED and claim.operation.delivery.continues:
            if not lease.right:
                lease.right, lease.ends = True, self._right_ends(claim)
        else:
            self.leases.pop(claim.token, None)
        run = self._run_of(claim.token)
        if run is not None and ended is Ended.COMPLETED:
            run.landed = True

    def _right_ends(self, claim: Any) -> float:
        """A statement of SQLite that stood still wrote an end that is nearer by as much."""
        record = self.world.peek(claim.key)
        right = None if record is None else record.note(claim.operation.delivery.message_id).continuing
        ends = self.world.clock.now + claim.lease
        return ends if right is None or right.token != claim.token else min(ends, right.lease_expires_at)

    def released(self, claim: Any, ended: Ended) -> None:
        """What ``release`` answered."""
        self.leases.pop(claim.token, None)
        run = self._run_of(claim.token)
        if run is not None and ended is Ended.RELEASED:
            run.landed = True

    def renewed(self, claim: Any, renewal: Renewal) -> None:
        """What ``renew`` answered about one claim."""
        lease = self.leases.get(claim.token)
        if lease is not None and renewal is Renewal.RENEWED:
            lease.ends = self.world.clock.now + claim.lease
        elif lease is not None and renewal is Renewal.LOST:
            del self.leases[claim.token]

    def settles(self, key: str, message: str) -> None:
        """``settle`` was called and answered."""
        self.settled.add((key, message))
        for token in [
            t for t, lease in self.leases.items() if lease.right and (lease.key, lease.message) == (key, message)
        ]:
            del self.leases[token]

    def looked(self, key: str, before: Any, after: Any, token: str | None = None) -> None:
        """The record around one verb, which was called under this token and alone."""
        if before == after:
            return
        self.verbs += 1
        if token is not None and before is not None and token not in _tokens(before):
            self.broken("a late writer changes nothing", f"{before.state.value} of another became {after.state.value}")
        if after is not None and after.state is State.COMPLETED:
            shown = [
                run.shown for run in self.runs if run.effect and run.key == key and not self._overtaken(run, after)
            ]
            if key not in self.outcomes and not shown:
                self.broken("what is completed had its effect", f"{after.message_id} completed before its body")
            first = self.outcomes.setdefault(key, (after.outcome, shown[-1] if shown else None))
            if first[0] != after.outcome:
                self.broken("a completed outcome never changes", f"{first[0]} became {after.outcome}")
        elif key in self.outcomes:
            self.broken("a completed outcome never changes", f"the record went on to {after and after.state.value}")
        if before is not None and after is not None and after.fence < before.fence:
            self.broken("a fence only grows", f"{before.fence} became {after.fence}")

    def _overtaken(self, run: Run, record: Any) -> bool:
        """Whether the record was completed by another run than this one."""
        return run.token != record.token and self._run_of(record.token) is not None

    def _run_of(self, token: str) -> Run | None:
        return next((run for run in self.runs if run.token == token), None)

    # --- bodies -------------------------------------------------------------------------------------------------------

    def begins(self, worker: Worker, context: Any, message: str, generation: int) -> Run:
        """A body begins."""
        now = self.world.clock.now
        if context.key in self.outcomes and not worker.delivery.hit:
            self.broken("what is completed never runs again", f"{message} on {worker.name}")
        for run in self.runs:
            lease = self.leases.get(run.token)
            if run.running and run.key == context.key and lease is not None and lease.ends > now and not lease.dead:
                self.broken(
                    "no two bodies run under a live lease", f"{message} on {worker.name}, {run.message} on {run.worker}"
                )
        late = self.dues.get((message, generation + 1), now) + GRACE <= now
        for run in self.runs:
            if run.effect and (run.key, run.message, run.generation) == (context.key, message, generation):
                self._doubles(run, worker, late=late)
        run = Run(worker.name, worker.life, context.key, message, generation, context.token)
        run.excused = worker.delivery.hit
        self.runs.append(run)
        return run

    def _doubles(self, run: Run, worker: Worker, *, late: bool) -> None:
        """The same attempt's effect is about to come again."""
        if late and not run.excused:
            run.excused = True
            self.allowed["an attempt again, its retry being a minute late"] += 1
        elif run.landed and not run.excused and not worker.delivery.hit:
            text = f"{run.message}, attempt {run.generation}, is in the record and runs again on {worker.name}"
            self.broken("an effect doubles only under a fault", text)
        else:
            self.allowed["an effect again, cut off from its record"] += 1

    # --- what others see ----------------------------------------------------------------------------------------------

    def publishes(self, worker: Worker | None, message: Any) -> None:
        """A message reaches the broker."""
        self.published[message.id] = message.task
        if not message.park:
            self.dues[(message.id, message.retries)] = message.due
        delivery = None if worker is None else worker.delivery
        if delivery is None or (message.id == delivery.id and message.task == delivery.task):
            return
        key = self.keys.get((delivery.id, delivery.task), "")
        kind = self.outcomes.get(key, (None,))[0]
        if kind is None and message.id == delivery.id:  # a replacement: told to nobody yet
            return
        if (key, delivery.id) in self.settled and delivery.id in self.frozen:
            self.allowed["published twice, by a worker frozen meanwhile and its successor"] += 1
        elif (key, delivery.id) in self.settled:
            self.broken("after settle never again", f"{delivery.id} published {message.task} again")
        ids = self.children[(delivery.id, message.slot)]
        ids.add(message.id)
        if len(ids) > 1 and not self._silent(delivery.id):
            self.broken("a continuation keeps its ids", f"{delivery.id} published {message.slot} as {sorted(ids)}")

    def refused(self, delivery: Any, message: Any, *, own: bool) -> None:
        """The broker does not take a message, or does not say that it does."""
        if own:
            self.dues.setdefault((message.id, message.retries), message.due)
            return
        self.unsent.add(delivery.id)
        for run in self.runs:  # a failure that was not told may have to be made again
            run.excused = run.excused or (run.message == delivery.id and run.key not in self.outcomes)

    def answers(self, worker: Worker, task_id: str, state: str, value: Any) -> None:
        """A result reaches the backend."""
        delivery = worker.delivery
        if state in READY:
            self.finals.add(task_id)
        if state != "SUCCESS" or delivery is None:
            return
        key = self.keys.get((delivery.id, delivery.task), "")
        first = self.outcomes.get(key, (None, None))[1]
        if key in self.outcomes and first in {None, value}:
            return
        if self._silent(delivery.id):
            self.allowed["a value told and not recorded, the store being silent for more than a lease"] += 1
        elif key not in self.outcomes:
            self.broken("a value told is a value recorded", f"{task_id} on {worker.name}: {value!r} is in no record")
        else:
            self.broken("every copy tells the first value", f"{task_id}: {value!r} after {first!r}")

    def _silent(self, message: str) -> bool:
        """Whether the store was silent for a whole lease after a body of this message, for all its worker knew."""
        now = self.world.clock.now
        if now - self.asked.get(message, now) >= LEASE:
            self.unheard.add(message)
        return message in self.unheard or (bool(self.world.faults["long outage"]) and message in self.hits)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Judge what is left when nothing moves any more."""
        world = self.world
        if world.endless:
            self.broken("every run ends", f"{world.points} points, and {len(world.queue)} messages queued")
            return
        for message, task in self.published.items():
            state = world.results.get(message, ("nothing", None))[0]
            if state == "RETRY" and message in self.finals and message in self.frozen:
                self.allowed["RETRY stored over FAILURE by a worker frozen meanwhile"] += 1
            elif state not in READY:
                self.broken("no task is lost", f"{task}[{message}] ends as {state}")
            record = world.peek(self.keys.get((message, task), ""))
            note = None if record is None else record.note(message)
            if record is None or note is None:
                self.broken("no task is lost", f"{task}[{message}] has no record")
            elif record.state is State.COMPLETED or note.over >= 0 or self._silent(message):
                continue
            elif state == "FAILURE" and message in self.unsent:
                self.allowed["a failure told and not over, the broker having refused its errback"] += 1
            elif state == "FAILURE" and message in self.hits and self.world.faults.keys() & SILENCES:
                self.allowed["a failure told and not over, its process having died while the store was silent"] += 1
            elif state == "FAILURE" and message in self.frozen:
                self.allowed["a failure told and not over, by a worker frozen for more than a lease"] += 1
            else:
                self.broken(
                    "what is told is recorded", f"{task}[{message}] is {record.state.value}, and nothing is over"
                )
        self._judge_effects()
        self._judge_continuations()

    def _judge_continuations(self) -> None:
        sent = {(message, slot.partition("#")[0]) for message, slot in self.children}
        for message, slot in self.world.expected:
            state = self.world.results.get(message, ("",))[0]
            if (message, slot) in sent or message not in self.published or state not in READY:
                continue
            if state == "FAILURE" and message in self.unsent:
                self.allowed["a continuation that the broker refused, which is told as FAILURE"] += 1
            else:
                self.broken("a continuation is published", f"{message} never published {slot}")

    def _judge_effects(self) -> None:
        done: dict[Any, list[Run]] = defaultdict(list)
        shown: Counter[str] = Counter()
        for run in self.runs:
            if run.effect:
                done[(run.key, run.message, run.generation)].append(run)
            shown[run.key] += run.effect
        looked_up = self.world.faults.keys() & {"freeze", "cut off"} == set()
        for (message, task), key in self.keys.items():
            if task == "checked" and shown[key] > 1 and looked_up:
                self.broken("an effect that can be looked up comes once", f"{message}: {shown[key]} times")
        for (_, message, generation), runs in done.items():
            if sum(not run.excused for run in runs) > 1:
                self.broken(
                    "an effect doubles only under a fault", f"{message}, attempt {generation}: {len(runs)} times"
                )


def _tokens(record: Any) -> set[str]:
    """Whose writes may change it."""
    rights = (note.continuing for note in record.notes.values())
    return {record.token, *(right.token for right in rights if right is not None)}
