"""``Idem``: one app's deliveries in the hands of a test, without a broker, a store or a worker of their own.

A message goes through Celery's own tracer, as in a worker's process, and the library does all it does there. What the
worker's main process does is done by the test: it takes messages from the broker, and acks or gives them back.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.app.trace import build_tracer
from celery.signals import task_postrun

from celery_idem.core.events import Event
from celery_idem.core.records import Record
from celery_idem.delivery import Delivering
from celery_idem.testing.clock import ManualClock
from celery_idem.testing.memory import Store
from celery_idem.testing.message import Delivered, Message, taken
from celery_idem.testing.points import Point, checked, listen, unlisten
from celery_idem.testing.swap import Swap

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE = 10.0
"""Seconds ``during`` waits for its delivery to come to the point, and to end."""


class Killed(BaseException):
    """Ends a delivery in the middle, as SIGKILL would; nothing it passes on its way out can write or publish."""


class Idem:
    """One app between ``start`` and ``close``: broker, results, claims and time are the test's own.

    Args:
        app: yours, with its tasks and settings. Places (broker, result backend, store) are swapped for memory,
            ``task_always_eager`` is off, held keys are not waited for; all of it is put back by ``close``.
        settings: laid over the app's for the test.
    """

    def __init__(self, app: Celery, **settings: Any) -> None:
        self.app = app
        self.clock = ManualClock()
        self.store = Store(clock=self.clock, dying=lambda: self._local.dying is not None, dead_check=self._dead_check)
        self.events: list[Event] = []
        """Everything the library told, in order."""
        self.queued: list[Message] = []
        """What is on the broker, for ``run_all``; read it through ``messages``."""
        self._swap = Swap(app, settings)
        self._local = _Local()
        self._running = threading.RLock()
        self._runs: Counter[str] = Counter()
        self._counted: list[tuple[Any, dict[str, Any]]] = []
        self._planned: _Kill | None = None

    def start(self) -> Self:
        """Swap the app's places for memory."""
        self.runtime = self._swap.enter(self.store)
        self.runtime.emit.listeners.append(self._told)
        listen(self._reached)
        try:
            self._count_bodies()  # makes the tasks, where nobody has asked for one before
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Put everything back."""
        unlisten(self._reached)
        for task, before in self._counted:
            del vars(task)["run"]
            vars(task).update(before)
        self._counted.clear()
        self._swap.leave()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- deliver ------------------------------------------------------------------------------------------------------

    def send(self, call: Any, *args: Any, **kwargs: Any) -> Delivered:
        """Publish a call and deliver its message.

        Args:
            call: a task, or a signature where options are needed: ``charge.s(7, 50).set(task_id="m")``.
        """
        return self.deliver(self.publish(call, *args, **kwargs))

    def again(self, earlier: Delivered | Message, **changes: Any) -> Delivered:
        """Deliver the same message once more, as a broker does with one that it thinks was not acked."""
        message = earlier.message if isinstance(earlier, Delivered) else earlier
        same = (message.id, message.retries)
        self._forget(lambda queued: queued.redelivered and (queued.id, queued.retries) == same)
        return self.deliver(message.copy(), **changes)

    @contextmanager
    def during(self, call: Any, *, before: Point = "completion") -> Iterator[Delivered]:
        """Deliver a message in a thread, and stop it at a point for as long as the ``with`` block lasts.

        Args:
            call: a task without arguments, a signature, a message, or an earlier delivery to be repeated.
            before: see ``points``. By default the body is through, and nothing is recorded yet.
        """
        if isinstance(call, Delivered):
            call = call.message.copy()
        message = call if isinstance(call, Message) else self.publish(call)
        delivered, hold = Delivered(message), _Hold(checked(before))
        thread = threading.Thread(target=self._held, args=(delivered, hold), name=f"idem {message}", daemon=True)
        thread.start()
        try:
            if not hold.there.wait(PATIENCE) or hold.missed:
                raise AssertionError(f"{delivered} did not come to {before!r}") from hold.error
            yield delivered
        finally:
            hold.go.set()
            thread.join(PATIENCE)
        if thread.is_alive() or hold.error is not None:
            raise AssertionError(f"{delivered} did not end well") from hold.error

    @contextmanager
    def killed(self, *, before: Point, task: Any = None, machine: bool = False) -> Iterator[None]:
        """Kill the process of the delivery that comes to this point inside of the ``with`` block.

        What it claimed stays claimed, and nothing of what comes after the point happens. Its message goes back to the
        broker unless Celery acked it early. Only ``task_postrun`` is sent, as ever.

        Args:
            before: see ``points``.
            task: a task or its name; None for any.
            machine: the whole machine is gone: nobody can see that the holder is dead, and its lease must lapse.
        """
        self._planned = planned = _Kill(checked(before), getattr(task, "name", task), machine)
        try:
            yield
        finally:
            self._planned = None
        if not planned.struck:
            raise AssertionError(f"nothing was killed: no delivery came to {before!r}")

    def run_all(self, limit: int = 100) -> list[Delivered]:
        """Deliver everything on the broker, and what that publishes, in the order it is due, until nothing is left.

        The clock is advanced to each retry and parked copy.

        Raises:
            AssertionError: something is still queued after ``limit`` deliveries.
        """
        done: list[Delivered] = []
        while self.messages():
            if len(done) == limit:
                raise AssertionError(f"still queued after {limit} deliveries: {self.queued[:5]}; last were {done[-5:]}")
            message = min(self.queued, key=lambda queued: queued.due)  # the first of those due at once
            self.advance(max(0.0, message.due - self.clock.now))
            done.append(self.deliver(message))
        return done

    def deliver(self, message: Mapping[str, Any], **changes: Any) -> Delivered:
        """Deliver one message now, whenever it is due; ``changes`` are laid over its headers.

        Raises:
            BaseException: the body raised one, such as SystemExit.
        """
        delivered = Delivered(message if isinstance(message, Message) else Message.of(message))
        self._forget(lambda queued: queued is message)
        self._deliver(delivered, changes)
        return delivered

    # --- time ---------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float, *, stalled: bool = False) -> None:
        """Let time pass: leases lapse, records expire, retries and parked copies become due.

        Args:
            stalled: deliveries that ``during`` keeps running cannot renew their leases, as in a frozen process.
        """
        end = self.clock.now + seconds
        while self.clock.now < end:
            leases = [] if stalled or self._heartbeat is None else list(self._heartbeat._leases.values())  # noqa: SLF001
            step = min([end - self.clock.now, *(lease.claim.lease / 3 for lease in leases)])
            self.clock.set(end if step >= end - self.clock.now else self.clock.now + step)
            if leases:
                self._heartbeat.beat(leases)

    # --- look ---------------------------------------------------------------------------------------------------------

    def runs(self, task: Any) -> int:
        """How often the task's body ran."""
        self._count_bodies()
        name = getattr(task, "name", task)
        if name not in self.app.tasks:  # or a test that it did not run would pass for a misspelt name
            raise ValueError(f"{name!r} is no task of this app: give the task, or its whole name")
        return self._runs[name]

    def told(self) -> list[str]:
        """Names of all events that ended a decision so far, in order."""
        return [event.name.value for event in self.events if event.terminal]

    def record(self, delivered: Delivered) -> Record | None:
        """The record of the delivery's key as the store has it; None where there is none, or it expired."""
        return self.store.get(delivered.key)

    def messages(self) -> list[Message]:
        """What is on the broker."""
        self._collect()
        return self.queued

    def take(self) -> list[Message]:
        """Take all of it, to be delivered by hand, or lost."""
        messages, self.queued = self.messages(), []
        return messages

    def publish(self, call: Any, *args: Any, **kwargs: Any) -> Message:
        """Publish a call and take its message off the broker, undelivered; see ``send``."""
        self._collect()
        call.delay(*args, **kwargs)
        published = self._collect()
        if len(published) != 1:
            raise AssertionError(f"{call} published {len(published)} messages: call it yourself, then run_all()")
        self._forget(lambda queued: queued is published[0])
        return published[0]

    # --- one delivery -------------------------------------------------------------------------------------------------

    def _deliver(self, delivered: Delivered, changes: Mapping[str, Any]) -> None:
        self._collect()
        self._count_bodies()
        message = delivered.message
        request = {**message, "delivery_info": message.delivery_info, "hostname": "idem@localhost", **changes}
        request = copy.deepcopy(request)  # a body may change its arguments, and Celery takes steps off the chain
        args, kwargs = request.pop("args"), request.pop("kwargs")
        task = self.app.tasks[message.task]
        tracer = build_tracer(task.name, task, app=self.app)
        outer = self._local.begin(delivered)
        try:
            with _seen() as seen:
                traced = tracer(request["id"], args, kwargs, request)
            delivered.state, delivered.value = seen[-1]
            delivered.info = traced.info
        except Killed:
            pass
        finally:
            killed = self._local.end(outer)
            delivered.published = self._collect()
        if killed:
            delivered.state, delivered.value = "KILLED", None
        if self._goes_back(task, delivered, machine=killed is not None and killed.machine):
            back = message.copy()
            back.due = self.clock.now
            self.queued.append(back)

    def _goes_back(self, task: Any, delivered: Delivered, *, machine: bool) -> bool:
        if delivered.state == "KILLED":
            return bool(task.acks_late and (machine or task.reject_on_worker_lost))
        return delivered.state == "REJECTED" and bool(getattr(delivered.value, "requeue", False))

    def _held(self, delivered: Delivered, hold: _Hold) -> None:
        self.app.set_current()
        self._local.hold = hold
        try:
            self._deliver(delivered, {})
        except BaseException as error:  # noqa: BLE001  told by the test's own thread
            hold.error = error
        finally:
            hold.missed = not hold.there.is_set()
            hold.there.set()

    def _reached(self, point: Point, delivery: Delivering) -> None:
        if delivery.runtime is not self.runtime or self._local.dying:
            return
        hold, planned = self._local.hold, self._planned
        if hold is not None and hold.point == point and not hold.there.is_set():
            hold.there.set()
            hold.go.wait()
        elif planned is not None and planned.fits(point, delivery):
            planned.struck = True
            self._local.dying = planned
            if delivery.operation is not None and not planned.machine:
                self.store.bury(delivery.operation.token)
            if point != "ack":  # there the delivery is through
                raise Killed

    # --- under the hood -----------------------------------------------------------------------------------------------

    def _collect(self) -> list[Message]:
        """Take what was published since; it is queued now."""
        with self._running:
            fresh = list(taken(self.app, self._swap.broker.queues))
            for message in fresh:
                message.due = self.clock.now + message.delay
            self.queued += fresh
            return fresh

    def _forget(self, gone: Callable[[Message], bool]) -> None:
        self.queued = [message for message in self.queued if not gone(message)]

    def _told(self, event: Event) -> None:
        self.events.append(event)
        if self._local.delivered is not None:
            self._local.delivered.events.append(event)

    def _dead_check(self) -> bool:
        return bool(self.runtime.settings["dead_check"])

    @property
    def _heartbeat(self) -> Any:
        return self.runtime._heartbeat  # noqa: SLF001  made when the first task runs

    def _count_bodies(self) -> None:
        """Have every task's ``run`` counted, those that were made since the last look as well."""
        for name, task in list(self.app.tasks.items()):
            if not name.startswith("celery.") and not any(task is counted for counted, _ in self._counted):
                self._counted.append((task, {"run": vars(task)["run"]} if "run" in vars(task) else {}))
                vars(task)["run"] = self._counting(name, task.run)

    def _counting(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._running:
                self._runs[name] += 1
            return run(*args, **kwargs)

        return counted


class _Local(threading.local):
    """What one thread is about."""

    dying: _Kill | None = None
    delivered: Delivered | None = None
    hold: _Hold | None = None

    def begin(self, delivered: Delivered) -> Delivered | None:
        """Start a delivery, and return the one it stands in, if any."""
        outer, self.delivered, self.dying = self.delivered, delivered, None
        return outer

    def end(self, outer: Delivered | None) -> _Kill | None:
        """End a delivery, and return what killed it, if anything."""
        killed, self.delivered, self.dying = self.dying, outer, None
        return killed


class _Hold:
    """Where ``during`` stops its delivery."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.there, self.go = threading.Event(), threading.Event()
        self.missed = False
        self.error: BaseException | None = None


class _Kill:
    """What ``killed`` waits for."""

    def __init__(self, point: Point, task: str | None, machine: bool) -> None:
        self.point, self.task, self.machine = point, task, machine
        self.struck = False

    def fits(self, point: Point, delivery: Delivering) -> bool:
        return not self.struck and self.point == point and self.task in (None, delivery.task.name)


@contextmanager
def _seen() -> Iterator[list[tuple[str, Any]]]:
    """State and value of the task that this thread runs, as Celery's last signal tells them."""
    seen: list[tuple[str, Any]] = [("IGNORED", None)]  # Celery's own deduplication sends no signal
    here = threading.get_ident()

    def postrun(state: str = "", retval: Any = None, **_: Any) -> None:
        if threading.get_ident() == here:
            seen.append((state, retval))

    task_postrun.connect(postrun, weak=False)
    try:
        yield seen
    finally:
        task_postrun.disconnect(postrun)
