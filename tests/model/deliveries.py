"""Two workers, one key, one or two messages: deliveries step by step as the task, the parking and Celery make them.

A worker may be killed before any step, a broker may give a message again while its copy still runs, a lease may lapse
under its holder, and a broker may confirm a message and lose it. As on Redis, a restored copy shares its tag with the
first one, so one ack removes the only durable entry. Steps carry the names of the functions they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_idem.core.records import Answer, Ended, Release, Renewal
from tests.model.rules import AS_IT_IS, Nt, Rec, Rules, Verbs, Who
from tests.model.search import Broken


class Worker(NamedTuple):
    """One slot: the copy it has, how far it is, and the token it claimed with."""

    at: str = "idle"
    message: int = -1
    generation: int = 0
    parked: int = 0
    tag: int = 0
    token: int = 0
    count: int = 0
    """Of the parked copy it has just published."""
    ack_lost: bool = False
    heard: str = ""


class Copy(NamedTuple):
    """One copy of a message on the broker."""

    message: int
    generation: int
    parked: int
    tag: int


class St(NamedTuple):
    """Everything there is. ``left`` is what may still go wrong, ``said`` what Celery published per message."""

    rec: Rec
    queue: tuple[Copy, ...]
    unacked: tuple[Copy, ...]
    workers: tuple[Worker, Worker]
    crashes: int
    restores: int
    lapses: int
    losses: int
    failures: int
    said: tuple[int, ...]
    runs: tuple[int, ...]
    doubt: bool = False
    fault: bool = False


IDLE = Worker()
Step = tuple[str, Any]
HOLDING = ("body", "complete", "release_retry", "tell", "release_ended")
COPIES, FEW = 6, 3


@dataclass
class Deliveries:
    """One world.

    Args:
        ends: how a body may end: value, retry, fail (or a value that is not kept), exit.
        crashes: how often a worker is killed; ``restores`` how often the broker gives again what still runs; ``lapses``
            how often a live holder's lease lapses; ``losses`` how often the broker loses what it confirmed.
        dead_check: a killed holder is provably dead at once, and need not be waited for.
        crowded: what has to be reached is not an end, but that of all copies that were given again three are left.
    """

    name: str
    rules: Rules = AS_IT_IS
    messages: int = 1
    generations: int = 2
    ends: tuple[str, ...] = ("value",)
    crashes: int = 0
    restores: int = 0
    lapses: int = 0
    losses: int = 0
    failures: int = 1
    dead_check: bool = True
    crowded: bool = False

    def __post_init__(self) -> None:
        self.verbs: Any = Verbs(self.rules, self.messages)
        self.moves: dict[str, Callable[[St, int, Worker], Iterator[Step]]] = {
            "idle": self.deliver,
            "claim": self.claim,
            "held": self.held,
            "note_parked": self.note_parked,
            "body": self.body,
            "complete": self.complete,
            "publish": self.publish,
            "settle": self.settle,
            "tell": self.tell,
            "release_retry": self.release_retry,
            "release_ended": self.release_ended,
            "ack": self.ack,
        }

    def first(self) -> St:
        """Every message on the broker, nothing stored."""
        rec = Rec(notes=(Nt(),) * self.messages)
        queue = tuple(Copy(message, 0, 0, message + 1) for message in range(self.messages))
        budget = (self.crashes, self.restores, self.lapses, self.losses, self.failures)
        return St(rec, queue, (), (IDLE, IDLE), *budget, (0,) * self.messages, (0,) * self.messages * self.generations)

    def steps(self, state: St) -> Iterator[Step]:
        """What workers, broker and time can do."""
        for index, worker in enumerate(state.workers):
            if index and state.workers[0] == worker:
                continue  # the same again
            if worker.at != "idle" and state.crashes:
                yield f"w{index} killed before {worker.at}", self.killed(state, index, worker)
            try:
                yield from self.moves[worker.at](state, index, worker)
            except Broken as broken:
                yield f"w{index} {worker.at}", broken
            yield from self.renew(state, index, worker)
        yield from self.restore(state)
        yield from self.pass_time(state)

    # --- a worker ----------------------------------------------------------------------------------------------------

    def killed(self, state: St, index: int, worker: Worker) -> St:
        """SIGKILL: nothing it would have done happens."""
        holds, rec = self._holds(state, worker), state.rec
        if self.dead_check and worker.token:
            notes = tuple(n._replace(right_lapsed=True) if n.right == worker.token else n for n in rec.notes)
            rec = rec._replace(lapsed=rec.lapsed or holds, notes=notes)
        doubt = state.doubt or (worker.at in HOLDING[:2] and holds)
        return self._set(state._replace(rec=rec, crashes=state.crashes - 1, fault=True, doubt=doubt), index, IDLE)

    def deliver(self, state: St, index: int, _: Worker) -> Iterator[Step]:
        """The broker gives a copy."""
        for copy in state.queue:
            queue = _without(state.queue, copy)
            unacked = _with(tuple(each for each in state.unacked if each.tag != copy.tag), copy)
            taken = Worker("claim", copy.message, copy.generation, copy.parked, copy.tag)
            yield f"w{index} gets {_said(copy)}", self._set(state._replace(queue=queue, unacked=unacked), index, taken)

    def claim(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """``Store.claim``, under a token of its own."""
        token = _unused({state.rec.token, *(w.token for w in state.workers), *(n.right for n in state.rec.notes)})
        answer, right, rec = self.verbs.claim(state.rec, (worker.message, worker.generation, token))
        after = state._replace(rec=rec)
        label = f"w{index} claim {_said(worker)} {answer.value}"
        if answer in (Answer.ACQUIRED, Answer.RECLAIMED):
            place = worker.message * self.generations + worker.generation
            after = after._replace(runs=_counted(state.runs, place))
            yield label, self._set(after, index, worker._replace(at="body", token=token, heard=answer.value))
        elif right:
            yield f"{label}, right", self._set(after, index, worker._replace(at="publish", token=token))
        elif answer in (Answer.OVER, Answer.COMPLETED):
            yield label, self._set(after, index, worker._replace(at="ack", token=0))
        elif worker.at == "claim" or worker.heard != answer.value:
            yield label, self._set(after, index, worker._replace(at="held", token=0, heard=answer.value))

    def held(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """Ask again, or give up waiting: dropped where a later copy was itself delivered, else parked."""
        yield from self.claim(state, index, worker)
        generation, noted = state.rec.notes[worker.message].parked
        if self.rules.per_generation and generation != worker.generation:
            noted = 0
        if noted >= worker.parked + self.rules.surplus:
            yield f"w{index} drops {_said(worker)}", self._set(state, index, worker._replace(at="ack"))
            return
        count = max(noted, worker.parked) + 1
        copy = Copy(worker.message, worker.generation, count, self._tag(state))
        after = worker._replace(at="note_parked", count=count)
        label = f"w{index} publish_parked {_said(copy)}"
        yield label, self._set(state._replace(queue=_with(state.queue, copy)), index, after)
        if state.losses:
            lost = state._replace(losses=state.losses - 1)
            yield f"{label}, lost", self._set(lost, index, after._replace(ack_lost=True))

    def note_parked(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """``Store.note_parked``, then ``Ignore``."""
        rec = self.verbs.note_parked(state.rec, worker.message, worker.generation, worker.count)
        after = worker._replace(at="ack", count=0)
        yield f"w{index} note_parked {worker.count}", self._set(state._replace(rec=rec), index, after)

    def body(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """The body ends in one of the ways it can."""
        copy = Copy(worker.message, worker.generation + 1, 0, self._tag(state))
        if "value" in self.ends:
            yield f"w{index} returns", self._set(state, index, worker._replace(at="complete"))
        if "retry" in self.ends and copy.generation < self.generations:
            after = worker._replace(at="release_retry")
            label = f"w{index} publishes {_said(copy)}"
            yield label, self._set(state._replace(queue=_with(state.queue, copy)), index, after)
            if state.losses:
                lost = state._replace(losses=state.losses - 1)
                yield f"{label}, lost", self._set(lost, index, after._replace(ack_lost=True))
        if "fail" in self.ends and state.failures:
            at = "tell" if self.rules.tells_first else "release_ended"
            spent = state._replace(failures=state.failures - 1)
            yield f"w{index} raises", self._set(spent, index, worker._replace(at=at))
        if "exit" in self.ends and state.failures:
            holds = self._holds(state, worker)
            rec = self.verbs.release(state.rec, _who(worker), Release.INTERRUPTED)
            spent = state._replace(failures=state.failures - 1, fault=True, rec=rec, doubt=state.doubt or holds)
            yield f"w{index} release INTERRUPTED", self._set(spent, index, IDLE)

    def complete(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """``Store.complete``; fenced out, the message is delivered anew."""
        ended, rec = self.verbs.complete(state.rec, _who(worker))
        if ended is Ended.COMPLETED:
            after = state._replace(rec=rec, doubt=False)
            yield f"w{index} complete", self._set(after, index, worker._replace(at="publish"))
        else:
            yield f"w{index} complete {ended.value}", self._set(state, index, worker._replace(at="claim", token=0))

    def publish(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """Celery publishes links, chain and chord part, and stores the result."""
        if state.rec.notes[worker.message].settled:
            yield f"w{index} publishes", Broken("a continuation was published after it was settled")
            return
        after = state._replace(said=_counted(state.said, worker.message))
        yield f"w{index} publishes what follows", self._set(after, index, worker._replace(at="settle"))

    def settle(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """``Store.settle``, from task_success."""
        rec = self.verbs.settle(state.rec, worker.message)
        yield f"w{index} settle", self._set(state._replace(rec=rec), index, worker._replace(at="ack", token=0))

    def tell(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """Celery tells errbacks and chord (or publishes what a value that is not kept goes on to)."""
        at = "release_ended" if self.rules.tells_first else "ack"
        after = state._replace(said=_counted(state.said, worker.message))
        yield f"w{index} tells errbacks and chord", self._set(after, index, worker._replace(at=at))

    def release_retry(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """``Store.release`` with RETRY, the successor published."""
        rec = self.verbs.release(state.rec, _who(worker), Release.RETRY)
        yield f"w{index} release RETRY", self._set(state._replace(rec=rec), index, worker._replace(at="ack", token=0))

    def release_ended(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """``Store.release`` with ENDED, from task_failure."""
        rec = self.verbs.release(state.rec, _who(worker), Release.ENDED)
        at = "ack" if self.rules.tells_first else "tell"
        yield f"w{index} release ENDED", self._set(state._replace(rec=rec), index, worker._replace(at=at, token=0))

    def ack(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """The copy's tag is acked, and with it every copy that has it."""
        kept = tuple(each for each in state.unacked if worker.ack_lost or each.tag != worker.tag)
        yield f"w{index} acks {_said(worker)}", self._set(state._replace(unacked=kept), index, IDLE)

    # --- what goes on beside ----------------------------------------------------------------------------------------

    def renew(self, state: St, index: int, worker: Worker) -> Iterator[Step]:
        """The heartbeat: a lapsed lease nobody took is renewed, and a body that lost its claim is stopped."""
        right = worker.at in ("publish", "settle")
        if not worker.token or not (right or worker.at in HOLDING):
            return
        renewal, rec = self.verbs.renew(state.rec, _who(worker), right)
        if renewal is Renewal.LOST and worker.at == "body":
            yield f"w{index} renew LOST", self._set(state, index, worker._replace(at="claim", token=0, heard=""))
        elif rec != state.rec:
            yield f"w{index} renew", state._replace(rec=rec)

    def restore(self, state: St) -> Iterator[Step]:
        """The broker gives an unacked copy again: its worker is gone, or it thinks so."""
        for copy in state.unacked:
            held = any(worker.at != "idle" and worker.tag == copy.tag for worker in state.workers)
            if held and not state.restores:
                continue
            after = state._replace(unacked=_without(state.unacked, copy), queue=_with(state.queue, copy))
            label = f"restores {_said(copy)}{', which runs' if held else ''}"
            yield label, after._replace(restores=state.restores - held)

    def pass_time(self, state: St) -> Iterator[Step]:
        """Leases lapse, of the dead always, of the living as often as allowed; a retry that never came is overdue."""
        rec, tokens = state.rec, {worker.token for worker in state.workers if worker.at != "idle"}
        if rec.state == "CLAIMED" and not rec.lapsed and (rec.token not in tokens or state.lapses):
            live = rec.token in tokens
            after = state._replace(rec=rec._replace(lapsed=True), lapses=state.lapses - live, fault=state.fault or live)
            yield f"the lease{' of a live holder' if live else ''} lapses", after
        for message, note in enumerate(rec.notes):
            if note.right and not note.right_lapsed and note.right not in tokens:
                yield f"the right of m{message} lapses", state._replace(rec=_noted(rec, message, right_lapsed=True))
            waited_for = any(
                each.message == message and each.generation >= note.successor
                for each in (*state.queue, *state.unacked, *(w for w in state.workers if w.at != "idle"))
            )
            if note.successor >= 0 and not note.overdue and not waited_for:
                yield f"the retry of m{message} is overdue", state._replace(rec=_noted(rec, message, overdue=True))

    # --- promises ----------------------------------------------------------------------------------------------------

    def quiet(self, state: St) -> bool:
        """No copy anywhere, no worker busy; in a crowded world, few copies."""
        if self.crowded:
            return len(state.queue) + len(state.unacked) <= FEW
        return self._over(state)

    def _over(self, state: St) -> bool:
        return not state.queue and not state.unacked and all(worker.at == "idle" for worker in state.workers)

    def broken(self, state: St) -> list[str]:
        """Promises that a state by itself can break."""
        words = []
        bodies = [worker for worker in state.workers if worker.at == "body"]
        calm = not state.fault and state.losses == self.losses
        if self._over(state) and not all(state.said):
            words.append("a message was acked, and neither its value nor its failure was ever told")
        if len(bodies) > 1 and not state.fault:
            words.append("two bodies at once, and nobody was killed or stalled")
        if calm and max(state.said) > 1:
            words.append("a continuation was published twice, without any fault")
        if calm and max(state.runs) > 1:
            words.append("an attempt ran twice, without any fault")
        if any(worker.heard == "ACQUIRED" and state.doubt and self._holds(state, worker) for worker in bodies):
            words.append("a run was told that nothing happened before, and that is not known")
        if len(state.queue) + len(state.unacked) > COPIES:
            words.append(f"more than {COPIES} copies of a message")
        return words

    # --- under the hood ----------------------------------------------------------------------------------------------

    def _holds(self, state: St, worker: Worker) -> bool:
        return state.rec.state == "CLAIMED" and state.rec.token == worker.token

    def _tag(self, state: St) -> int:
        return _unused({copy.tag for copy in (*state.queue, *state.unacked)} | {w.tag for w in state.workers})

    def _set(self, state: St, index: int, worker: Worker) -> St:
        other = state.workers[1 - index]
        return state._replace(workers=(worker, other) if index == 0 else (other, worker))

    def normal(self, state: St) -> St:
        """Tokens, tags and counts renamed in the order in which they stand, workers sorted."""
        from tests.model.normal import normal

        return normal(state, calm=not state.fault and state.losses == self.losses)


def _who(worker: Worker) -> Who:
    return worker.message, worker.generation, worker.token


def _said(copy: Copy | Worker) -> str:
    return f"m{copy.message}g{copy.generation}" + (f"p{copy.parked}" if copy.parked else "")


def _unused(taken: set[int]) -> int:
    return next(number for number in range(1, 99) if number not in taken)


def _counted(counts: tuple[int, ...], place: int) -> tuple[int, ...]:
    return tuple(min(count + (index == place), 2) for index, count in enumerate(counts))


def _with(copies: tuple[Copy, ...], copy: Copy) -> tuple[Copy, ...]:
    return tuple(sorted((*copies, copy)))


def _without(copies: tuple[Copy, ...], copy: Copy) -> tuple[Copy, ...]:
    index = copies.index(copy)
    return copies[:index] + copies[index + 1 :]


def _noted(rec: Rec, message: int, **changed: Any) -> Rec:
    notes = list(rec.notes)
    notes[message] = notes[message]._replace(**changed)
    return rec._replace(notes=tuple(notes))
