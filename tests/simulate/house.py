"""What runs in a simulated world: Celery apps with idempotent tasks, one app for each worker, as in processes.

A delivery is Celery's own: the worker's ``Request``, its tracer, its acks; only the pool in between is a call.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import celery.app.trace
from celery import Celery
from celery._state import _task_stack
from celery.exceptions import Reject
from celery.worker import state as worker_state
from kombu import pools
from kombu.transport import virtual

import celery_idem.core.effects
import celery_idem.core.engine
import celery_idem.core.heartbeat
import celery_idem.core.holder
import celery_idem.delivery
import celery_idem.parking
import celery_idem.publish
from celery_idem import Happened, IdempotentTask, NotHappened, Policy, current
from celery_idem.app import runtime_of
from celery_idem.core.events import Event
from celery_idem.received import Request
from celery_idem.stores.memory import MemoryStore
from celery_idem.stores.sql.call import Call
from celery_idem.stores.sql.store import SQLStore
from celery_idem.testing.clock import START, ManualClock
from tests.simulate.ledger import LEASE
from tests.simulate.places import BACKEND, HERE, SCHEME, Message, SimulatedHeartbeat, Store, world
from tests.simulate.world import Crashed, Schedule, Worker, World

WORKERS = 3
SETTINGS = {
    "task_publish_retry": False,
    "result_backend_thread_safe": True,
    "worker_send_task_events": False,
    "worker_hijack_root_logger": False,
    "idempotency_namespace": "simulated",
    "idempotency_lease": LEASE,
    "idempotency_wait_timeout": 0.05,
    "idempotency_purge": False,
}


class House:
    """Workers and their apps, built once and used for one run after another."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.memory = MemoryStore(clock=self.clock)
        self._directory = Path(tempfile.mkdtemp(prefix="celery-idem-simulate-", dir=_quick()))
        self.sqlite = SQLStore(f"sqlite:///{self._directory}/claims.db", clock=self.clock)
        self.sqlite.create_schema()
        self.workers = [Worker(number + 1) for number in range(WORKERS)]
        self.publisher = self._app("publisher", Store())
        for worker in self.workers:
            store = Store()
            worker.app = self._app(worker.name, store)
            worker.heartbeat = SimulatedHeartbeat(store, runtime_of(worker.app).emit)
            runtime = runtime_of(worker.app)
            runtime._heartbeat = worker.heartbeat
            runtime.emit.listeners.append(_tell)
        self.stores = [runtime_of(worker.app)._store for worker in self.workers]

    def _app(self, name: str, store: Store) -> Celery:
        app: Any = Celery("simulated", broker=f"{SCHEME}://localhost/{name}", backend=BACKEND, set_as_current=False)
        app.conf.update(SETTINGS)
        app.now = lambda: datetime.fromtimestamp(self.clock.now, timezone.utc)
        add_tasks(app)
        app.finalize()
        runtime_of(app)._store = store  # type: ignore[assignment]
        return app  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the threads, and remove what is on the disk."""
        for worker in self.workers:
            worker.end()
        for group in (pools.producers, pools.connections):  # kombu keeps one for every broker it has ever seen
            for key in [key for key in group if SCHEME in key]:
                group.pop(key).force_close_all()
        self.sqlite.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def world(self, schedule: Schedule, *, workers: int = 2, sqlite: bool = False) -> World:
        """A new world, nothing in it."""
        self.clock.set(START)
        raw: Any = self.sqlite if sqlite else self.memory
        self.memory._records.clear()
        if sqlite:
            self.sqlite._rows._seen.clear()
            with self.sqlite._database.call() as call:
                call.use(lambda connection: connection.exec_driver_sql("DELETE FROM celery_idem_record"), writes=True)
        for store in self.stores:
            store.raw = raw
        for worker in self.workers:
            worker.reset()
            worker.heartbeat.forget()
        new = World(self.workers[:workers], schedule, self.clock)
        new.peek = self._peek if sqlite else self.memory._records.get
        new.start = lambda worker: worker.begin(new, lambda: deliver(worker))
        HERE.world = new
        return new

    def _peek(self, key: str) -> Any:
        running, HERE.world = HERE.world, None  # no points
        try:
            return self.sqlite.get(key)
        finally:
            HERE.world = running


def _quick() -> str | None:
    """A directory in memory, where there is one: a power cut is not simulated."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _tell(event: Event) -> None:
    if HERE.world is not None:
        world().seen[event.name.value] += 1
        if event.terminal:
            world().tell(f"event {event.name.value}")


# --- one delivery -----------------------------------------------------------------------------------------------------


class _Pool:
    """A pool whose process is the worker's thread."""

    def apply_async(self, target: Any, args: Any, accept_callback: Any, callback: Any, **_: Any) -> None:
        accept_callback(1, 0.0)
        callback(target(*args))


def deliver(worker: Worker) -> None:
    """Take a message and do with it what a Celery worker does."""
    here, app = world(), worker.app
    app.set_current()
    message: Message = here.take()
    worker.delivery = message
    here.tell(f"takes {message.name}")
    channel = SimpleNamespace(decode_body=lambda body, encoding: virtual.Base64().decode(body))
    raw = virtual.Message(message.payload, channel=channel)  # type: ignore[arg-type]
    raw.delivery_info["redelivered"] = message.redelivered

    def ack(*_: Any) -> None:
        here.point("ack")
        here.tell(f"acks {message.name}")
        message.unacked = False

    def reject(_log: Any, _errors: Any, requeue: bool) -> None:
        here.point("reject")
        here.tell(f"gives {message.name} {'back' if requeue else 'up'}")
        message.unacked = False
        if requeue:
            here.queue.append(message.copy(here.clock.now))

    try:
        here.point("received")
        request = Request(
            raw, on_ack=ack, on_reject=reject, hostname=worker.name, app=app, task=app.tasks[message.task]
        )
        request.execute_using_pool(_Pool())  # type: ignore[arg-type]
    except Crashed:
        _clear_stacks(app)
        raise
    except SystemExit:  # the process ends by itself, and the next one takes its place
        here.ledger.crashed(worker, seen=True)
        worker.heartbeat.forget()
        here.dead.add(worker.holder)
        worker.life += 1
        message.unacked = False
        here.queue.append(message.copy(here.clock.now))
    finally:
        worker_state.requests.clear()
        if not worker.doomed:
            worker.delivery = None


def _clear_stacks(app: Any) -> None:
    while _task_stack.top is not None:
        _task_stack.pop()
    for task in app.tasks.values():
        while task.request_stack.top is not None:
            task.request_stack.pop()


# --- tasks ------------------------------------------------------------------------------------------------------------


def effect(task: Any) -> str:
    """The step that must not happen twice; its value is another one each time."""
    here = world()
    worker = here.here()
    if worker is None:
        raise AssertionError("a body outside of a worker")
    request = task.request
    run = here.ledger.begins(worker, task.idempotency, request.id, request.retries)
    try:
        _step("body")
        run.effect = True
        value = run.shown = f"value {len(here.ledger.runs)}"
        here.tell(f"effect of {request.id[:8]}, attempt {request.retries}: {value}")
        _step("effect done")
        run.value = value
    finally:
        run.running = False
    return value


def _look_up(*_: Any, order: int = 1) -> Any:
    """Whether the effect is there, as a provider would tell, and its value."""
    here = world()
    here.point("verify")
    done = [run.shown for run in here.ledger.runs if run.effect and run.key == current().key]
    return Happened(done[-1]) if done else NotHappened()


def _step(what: str) -> None:
    if world().point(what, "exit") == "exit":
        raise SystemExit


def add_tasks(app: Any) -> None:
    """The tasks of the simulated shop."""

    def task(**options: Any) -> Any:
        return app.task(base=IdempotentTask, bind=True, shared=False, **options)

    @task(name="charge", key="order:{order}")
    def charge(self: Any, *_: Any, order: int = 1) -> str:
        return effect(self)

    @task(name="note")
    def note(self: Any, *_: Any, **__: Any) -> str:
        return effect(self)

    @task(name="fail", key="order:{order}")
    def fail(self: Any, *_: Any, order: int = 1) -> None:
        effect(self)
        raise ValueError("simulated")

    @task(name="again", key="order:{order}", max_retries=5)
    def again(self: Any, *_: Any, order: int = 1, times: int = 1, countdown: float = 0, fails: bool = False) -> str:
        value = effect(self)
        if self.request.retries < times:
            raise self.retry(countdown=countdown)
        if fails:
            raise ValueError("simulated")
        return value

    @task(name="swap", key="order:{order}")
    def swap(self: Any, *_: Any, order: int = 1) -> Any:
        effect(self)
        return self.replace(app.signature("charge", kwargs={"order": order}))

    @task(name="later", key="order:{order}")
    def later(self: Any, *_: Any, order: int = 1) -> str:
        if not self.request.delivery_info["redelivered"]:
            raise Reject("not now", requeue=True)
        return effect(self)

    @task(name="checked", idempotency=Policy(key="order:{order}", verify=_look_up))
    def checked(self: Any, *_: Any, order: int = 1) -> str:
        return effect(self)

    @task(name="long", key="order:{order}")
    def long(self: Any, *_: Any, order: int = 1) -> str:
        here = world()
        value = effect(self)
        here.sleep(3 * LEASE)
        self.idempotency.check()
        return value


# --- the code under test, in simulated time ---------------------------------------------------------------------------


class _Time:
    """``time`` for the modules that wait."""

    def time(self) -> float:
        return world().clock.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        world().sleep(seconds)


class _Briefly:
    """``ExceptionInfo`` without the copy of every frame, which is what a dropped delivery costs most."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.type, self.exception, _ = sys.exc_info()
        self.exc_info = (self.type, self.exception, None)
        self.tb, self.traceback, self.internal = None, "", True


class _Dice:
    """``random`` for the modules that spread their waiting."""

    def random(self) -> float:
        return 0.5

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2


def _this_process() -> str:
    worker = None if HERE.world is None else world().here()
    return "publisher" if worker is None else worker.holder


def _statement_points(execute: Any) -> Any:
    def stepwise(call: Any, name: str, params: dict[str, Any]) -> Any:
        whole = getattr(call, "whole", False)  # inside one transaction of SQLite's nobody else gets at the file
        if not whole and HERE.world is not None and world().here() is not None:
            world().point(f"statement {name}")
        found = execute(call, name, params)
        call.whole = name == "begin" or (whole and name != "commit")
        return found

    return stepwise


@contextmanager
def simulated() -> Iterator[House]:
    """The house, and the library's clocks, waits and processes in the hands of the scheduler."""
    time, dice = _Time(), _Dice()
    idem: Any = celery_idem
    changes: list[tuple[Any, str, Any]] = [
        (celery.app.trace, "ExceptionInfo", _Briefly),
        (idem.core.engine, "time", time),
        (idem.core.heartbeat, "time", time),
        (idem.core.heartbeat, "random", dice),
        (idem.core.effects, "time", time),
        (idem.parking, "time", time),
        (idem.parking, "random", dice),
        (idem.delivery, "random", dice),
        (idem.publish, "this_process", _this_process),
        (idem.core.holder, "provably_dead", lambda text: text in world().dead),
        (Call, "execute", _statement_points(Call.execute)),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    loggers = [
        logging.getLogger(name) for name in ("celery", "celery_idem", "celery.app.trace", "celery.worker.request")
    ]
    levels = [logger.level for logger in loggers]
    current_app = celery._state._tls.current_app  # asking the public way would make a default app
    HERE.world = World([], _Nobody(), ManualClock())
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        house = House()
        try:
            yield house
        finally:
            house.close()
    finally:
        for place, name, value in before:
            setattr(place, name, value)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        celery._state._set_current_app(current_app)
        HERE.world = None


class _Nobody:
    def choose(self, place: str, options: Any) -> str:
        raise AssertionError(place)
