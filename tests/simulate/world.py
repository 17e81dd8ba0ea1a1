"""One simulated run: workers that move one at a time, and the scheduler that moves them.

Every worker is a thread, and only the one that has the baton runs. At a *point* (before and after each call of store,
broker and result backend, and at each step of a body) the schedule says what happens: the worker goes on, another one
goes first, this one dies, freezes, or loses a reply. Time moves only when nobody can do anything before.
"""

from __future__ import annotations

import _thread
import faulthandler
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from celery_idem.testing.clock import START, ManualClock
from tests.simulate.ledger import Ledger

STALL = 65.0
"""Seconds a frozen worker stays frozen: longer than a lease, and than the grace of a retry that does not come."""
OUTAGES = {"outage": 20.0, "long outage": 70.0}
"""Seconds the store is down for everybody; the second is longer than a completion is tried."""
MOST_POINTS = 4000
"""Points of one run after which it counts as one that never ends."""
WATCH = 60.0
"""Real seconds one worker may keep the baton: more is a simulator that hangs."""
GO = "go"


class Crashed(BaseException):
    """The worker's process is gone: nothing it does on its way out reaches anybody."""


class Schedule(Protocol):
    """Who decides."""

    def choose(self, place: str, options: Sequence[str]) -> str:
        """One of the options at this place; the first is what happens by default."""


class Worker:
    """One worker process: a thread that lives on through its crashes, as a child is replaced by the next."""

    def __init__(self, number: int) -> None:
        self.name = f"w{number}"
        self.app: Any = None
        self.heartbeat: Any = None
        self._baton = _thread.allocate_lock()
        self._baton.acquire()
        self._over = False
        self._job: Callable[[], None] | None = None
        self._world: Any = None
        self.reset()
        self.thread = threading.Thread(target=self._live, name=f"simulated {self.name}", daemon=True)
        self.thread.start()

    def reset(self) -> None:
        """Be idle and newly born."""
        self.life, self.points, self.busy, self.doomed = 1, 0, False, False
        self.wake, self.frozen_until = 0.0, 0.0
        self.delivery: Any = None

    @property
    def holder(self) -> str:
        """What records name it."""
        return f"simulated {self.name} life {self.life}"

    def begin(self, world: World, job: Callable[[], None]) -> None:
        """Start a delivery with the next baton."""
        self._world, self._job, self.busy, self.wake = world, job, True, 0.0

    def end(self) -> None:
        """End its thread; it must be idle."""
        self._over = True
        self.go()
        self.thread.join()

    def go(self) -> None:
        """Hand the baton to it."""
        self._baton.release()

    def wait(self) -> None:
        """Wait for the baton, on the worker's own thread."""
        self._baton.acquire()

    def _live(self) -> None:
        while True:
            self._baton.acquire()
            if self._over:
                return
            job, self._job = self._job, None
            try:
                if job is not None:
                    job()
            except Crashed:
                pass
            except BaseException as error:  # the judge's business, whatever it is
                self._world.ledger.broken("a delivery ends without an error of its own", repr(error))
            self.busy = False
            self._world.hand_back()


class World:
    """One run from its first message to the last ack.

    Args:
        workers: idle ones.
        schedule: who decides.
        place: what the run takes place in; see ``house``.
    """

    def __init__(self, workers: Sequence[Worker], schedule: Schedule, clock: ManualClock) -> None:
        self.workers, self.schedule, self.clock = list(workers), schedule, clock
        self.ledger = Ledger(self)
        self.peek: Callable[[str], Any] = lambda _: None
        """The record of a key as it stands, seen by nobody."""
        self.start: Callable[[Worker], None] = lambda worker: None
        """Give an idle worker something to do."""
        self.expected: list[tuple[str, str]] = []
        """Message and task of each continuation that must come."""
        self.queue: list[Any] = []
        self.results: dict[str, tuple[str, Any]] = {}
        self.chords: dict[str, dict[int, Any]] = {}
        self.sizes: dict[str, int] = {}
        self.dead: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        """Answers of the store and events of the library, to show what was reached."""
        self.trace: list[str] = []
        self.down_until = 0.0
        self.sends_a_body = False
        self.points = 0
        self.copies = 0
        self.endless = False
        self._picks = 0
        self._action: tuple[str, Worker] | None = None
        self._threads = {worker.thread.ident: worker for worker in self.workers}
        self._main = _thread.allocate_lock()
        self._main.acquire()

    # --- on a worker's thread -----------------------------------------------------------------------------------------

    def here(self) -> Worker | None:
        """The worker whose thread this is; None on the scheduler's."""
        return self._threads.get(_thread.get_ident())

    def point(self, what: str, *faults: str) -> str | None:
        """Let the schedule interfere; one of ``faults``, if that is what it chose, for the caller to suffer."""
        worker = self.here()
        if worker is None:
            return None
        if worker.doomed:
            raise Crashed
        worker.points += 1
        self.points += 1
        if self.points > MOST_POINTS:
            self.endless = True
            self._hand_over(("abort", worker))
            raise Crashed
        label = self.schedule.choose(f"{worker.name}.{worker.points} {what}", self._options(worker, faults))
        if label == GO:
            return None
        self.tell(f"{label} at {what}")
        if not label.startswith("to "):
            self.faults[label] += 1
        if label in faults:
            if label in OUTAGES:
                self.down_until = max(self.down_until, self.clock.now + OUTAGES[label])
            if label in {"long outage", "exit"}:
                self.ledger.hit(*(self.workers if label == "long outage" else [worker]))
            return label
        self._hand_over((label, worker))
        if worker.doomed:
            raise Crashed
        return None

    def _options(self, worker: Worker, faults: Sequence[str]) -> list[str]:
        others = [f"to {other.name}" for other in self._enabled() if other is not worker]
        own = ["copy"] if worker.delivery is not None and worker.delivery.unacked else []
        return [GO, *others, *faults, "crash", "vanish", "freeze", *own]

    def sleep(self, seconds: float) -> None:
        """``time.sleep`` of the code under test."""
        worker = self.here()
        if worker is None:
            raise AssertionError("the scheduler does not sleep")
        if worker.doomed:
            raise Crashed
        worker.wake = self.clock.now + max(0.0, seconds)
        self._hand_over(None)
        if worker.doomed:
            raise Crashed

    def freeze(self) -> None:
        """Freeze the worker whose thread this is, in the middle of what it does."""
        worker = self.here()
        if worker is not None:
            self._hand_over(("freeze", worker))
            if worker.doomed:
                raise Crashed

    def _hand_over(self, action: tuple[str, Worker] | None) -> None:
        worker = self.here()
        self._action = action
        self._main.release()
        if worker is not None:
            worker.wait()

    def hand_back(self) -> None:
        """The worker is through with its delivery."""
        self._action = None
        self._main.release()

    def tell(self, text: str) -> None:
        """Write a line of the trace."""
        worker = self.here()
        self.trace.append(f"{self.clock.now - START:8.2f} {worker.name if worker else '--'} {text}")

    # --- on the scheduler's thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until nothing is left to do."""
        worker = self._next()
        while worker is not None:
            action = self._step(worker)
            worker = self._next() if action is None else self._apply(*action)
            if self.endless:
                break
        for left in self.workers:
            if left.busy:
                self._unwind(left)
        self.ledger.close()

    def _step(self, worker: Worker) -> tuple[str, Worker] | None:
        if not worker.busy and not worker.doomed:
            self.start(worker)
        worker.wake = 0.0
        worker.go()
        if not self._main.acquire(timeout=WATCH):
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError(f"{worker.name} does not give the baton back")
        action, self._action = self._action, None
        return action

    def _apply(self, label: str, worker: Worker) -> Worker | None:
        if label.startswith("to "):
            return next(other for other in self.workers if other.name == label[3:])
        if label in {"crash", "vanish"}:
            self._kill(worker, seen=label == "crash")
        elif label == "freeze":
            worker.frozen_until = self.clock.now + STALL
            self.ledger.hit(worker)
            self.ledger.frozen.add(worker.delivery.id)
        elif label == "copy":
            self.queue.append(worker.delivery.copy(self.clock.now))
            self.copies += 1
            return next((other for other in self._enabled() if other is not worker), worker)
        return self._next()

    def _kill(self, worker: Worker, *, seen: bool) -> None:
        """End the process; ``seen``: its machine lives on, and everybody there can tell that it is dead."""
        self.ledger.crashed(worker, seen=seen)
        if seen:
            self.dead.add(worker.holder)
        delivery = worker.delivery
        self._unwind(worker)
        worker.heartbeat.forget()
        worker.life += 1
        if delivery is not None and delivery.unacked:
            self.queue.append(delivery.copy(self.clock.now))
            delivery.unacked = False

    def _unwind(self, worker: Worker) -> None:
        worker.doomed = True
        while worker.busy:
            self._step(worker)
        worker.doomed, worker.delivery, worker.frozen_until = False, None, 0.0

    def _enabled(self) -> list[Worker]:
        """Who can do something now; of those without work only one, for they are all alike."""
        now = self.clock.now
        moving = [w for w in self.workers if w.busy and w.wake <= now and w.frozen_until <= now]
        idle = [w for w in self.workers if not w.busy]
        if idle and any(message.due <= now for message in self.queue):
            moving.append(idle[0])
        return sorted(moving, key=self.workers.index)

    def _next(self) -> Worker | None:
        while True:
            enabled = self._enabled()
            if enabled:
                break
            if not self._advance():
                return None
        self._picks += 1
        chosen = enabled[0]
        if len(enabled) > 1:
            label = self.schedule.choose(f"pick {self._picks}", [worker.name for worker in enabled])
            chosen = next(worker for worker in enabled if worker.name == label)
        return chosen

    def take(self) -> Any:
        """Take a message that is due; the schedule says which, where several are."""
        due = sorted((m for m in self.queue if m.due <= self.clock.now), key=lambda message: message.due)
        names = list(dict.fromkeys(message.name for message in due))[:3]
        name = names[0]
        if len(names) > 1:
            self._picks += 1
            name = self.schedule.choose(f"take {self._picks}", names)
        message = next(message for message in due if message.name == name)
        self.queue.remove(message)
        return message

    # --- time ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Let time pass until something can happen; False where nothing ever will."""
        now = self.clock.now
        moments = [max(w.wake, w.frozen_until) for w in self.workers if w.busy]
        if any(not w.busy for w in self.workers) or moments:
            moments += [message.due for message in self.queue]
        moments += [max(w.heartbeat.next(now), w.frozen_until) for w in self.workers]
        moments = [moment for moment in moments if now < moment < float("inf")]
        if not moments:
            return False
        woken = [w for w in self.workers if w.frozen_until > now]
        self.clock.set(min(moments))
        now = self.clock.now
        for worker in self.workers:
            if worker.frozen_until > now:
                continue
            if worker in woken:  # its heartbeat may be as late as it is
                self._picks += 1
                label = self.schedule.choose(f"thaw {self._picks}", ["late", "beat"])
                if label == "late":
                    worker.heartbeat.late(now)
                    continue
            worker.heartbeat.work(now)
        return True
