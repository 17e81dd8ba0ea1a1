"""The sweep: what lost its message gets a new one, and what nobody may look for any more ends, in plain sight.

Every worker does it by itself, on a thread with connections of its own, open only while it looks: a fork inherits none,
and no outage of store or broker ends it. Two workers that sweep at once are told apart by the database, action by
action. Whoever waits in a long queue is not lost: each time an action gets a new message, the grace doubles.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from celery import bootsteps
from celery.app import app_or_default

from celery_idem.core.forking import background_gate
from celery_idem.core.threads import Bell, start_thread, way_back
from celery_idem.errors import ActionStoreError, StoreUnavailable
from celery_idem.governed import records
from celery_idem.governed.chain import Governance, governance_of, governed_chain, new_chain, register, sweeps_of
from celery_idem.parking import SILENCE, confirming_options

if TYPE_CHECKING:
    from celery import Celery

    from celery_idem.governed.sql.store import SQLActionStore

logger = logging.getLogger("celery_idem")

_T = TypeVar("_T")

PAGE = 1000
DOUBLED = 5
"""How often the grace doubles at most."""
END_WITHIN = 10.0
"""Seconds a worker that ends waits for a sweep that is under way."""


def sweep(app: Celery | None = None) -> dict[str, int]:
    """Look once for actions that lost their worker or their message.

    Returns:
        ``released`` lapsed leases, ``ended`` actions nobody may look for any more, ``enqueued`` actions that got a new
        message, ``unpublished`` those the broker did not take: the next sweep after their grace does.
    """
    app = app_or_default(app)
    register(app)
    found = _Sweep(app, governance_of(app).tell, lambda: False)
    found.run()
    if found.error is not None:
        logger.warning("celery_idem: a sweep could not publish: %r", found.error)
    return found.counts


class _Sweep:
    """One look. ``tell`` hears of every event, ``stopping`` says whether to leave the rest to another."""

    def __init__(self, app: Celery, tell: Callable[[records.Event], None], stopping: Callable[[], bool]) -> None:
        self._app, self._tell, self._stopping = app, tell, stopping
        self.counts = {"released": 0, "ended": 0, "enqueued": 0, "unpublished": 0}
        self.error: Exception | None = None
        """Why the broker took no message."""

    def run(self) -> None:
        """Reap, then publish; what the store raises is raised."""
        governance = governance_of(self._app)
        with _opened(governance.open_store()) as store:
            store.listener = self._heard
            with background_gate:
                store.recover_expired_leases()
                lost = self._lost(store, governance.settings["sweep_grace"])
            if not lost or self._stopping():
                return
            try:
                with _opened(own_producer(self._app)) as producer:
                    self._publish(store, lost, producer)
            except StoreUnavailable:
                raise
            except Exception as error:  # noqa: BLE001  a broker's own
                self.error = error
                self.counts["unpublished"] = len(lost) - self.counts["enqueued"]

    def _heard(self, event: records.Event) -> None:
        if event["event_type"] == records.LEASE_EXPIRED:
            self.counts["released"] += 1
        elif event["event_type"] in {records.FAILED, records.AMBIGUOUS}:
            self.counts["ended"] += 1
        self._tell(event)

    def _lost(self, store: SQLActionStore, grace: float) -> list[tuple[str, str | None]]:
        """Actions whose chain is silent for too long, and the chain."""
        lost: dict[str, str | None] = {}
        for sweeps in range(DOUBLED + 1):
            quiet = store.stranded(grace * 2**sweeps, limit=PAGE)
            for action in quiet:
                if min(sweeps_of(action["chain_id"]), DOUBLED) == sweeps:
                    lost[action["action_id"]] = action["chain_id"]
            if not quiet:
                break
        return list(lost.items())

    def _publish(self, store: SQLActionStore, lost: list[tuple[str, str | None]], producer: Any) -> None:
        for action_id, old in lost:
            if self._stopping():
                return
            with background_gate:
                self._replace(store, action_id, old, producer)

    def _replace(self, store: SQLActionStore, action_id: str, old: str | None, producer: Any) -> None:
        new = new_chain(old or "")
        try:
            if not store.replace_chain(action_id, old, new):
                return  # another sweep was faster, or it is over
        except ActionStoreError as refused:  # a row that no verb can name must not keep the others waiting
            logger.warning("celery_idem: an action cannot be given a new message: %s", refused)
            return
        _send(self._app, action_id, new, producer)
        self.counts["enqueued"] += 1


def _send(app: Celery, action_id: str, chain_id: str, producer: Any) -> None:
    """Publish the chain through this producer, which a chain's own ``apply_async`` would drop."""
    canvas = governed_chain(action_id, chain_id, app)
    tasks, _ = canvas.prepare_steps((), {}, canvas.tasks, app=app)
    first = tasks.pop()
    rest = {} if app.conf.task_protocol == 1 else {"chain": tasks}  # there each step is the link of the one before
    first.apply_async(producer=producer, **rest)


@contextmanager
def _opened(what: AbstractContextManager[_T]) -> Iterator[_T]:
    """Open it and close it while no child is forked."""
    with ExitStack() as stack:
        with background_gate:
            opened = stack.enter_context(what)
        try:
            yield opened
        finally:
            with background_gate:
                stack.close()


@contextmanager
def own_producer(app: Celery) -> Iterator[Any]:
    """A confirming producer on a connection of its own, open as long as the ``with`` block lasts."""
    driver = app.connection_for_write().transport.driver_type
    options = confirming_options(app, driver)
    with app.connection_for_write(transport_options=options, connect_timeout=SILENCE) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        yield app.amqp.Producer(connection, auto_declare=False)


# --- in a worker -----------------------------------------------------------------------------------------------------


def _warn_of_short_windows(governance: Governance) -> None:
    """A worker that is killed keeps its action until lease, interval and grace are over; then somebody has to look."""
    waits = sum(governance.settings[name] for name in ("lease", "sweep_interval", "sweep_grace"))
    for kind in governance.catalog:
        if kind.observation_window <= waits:
            logger.warning(
                "celery_idem: %s may be looked for only %g s long, and where a worker is killed the first look may "
                "come after %g s (governed_lease + governed_sweep_interval + governed_sweep_grace): give it a longer "
                "observation_window",
                kind.name,
                kind.observation_window,
                waits,
            )


class SweepStep(bootsteps.StartStopStep):
    """Worker step: sweep every ``governed_sweep_interval``; a worker with wrong settings does not start."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._sweeper: Sweeper | None = None

    def start(self, parent: Any) -> None:
        """Begin, where there is a store and an interval."""
        governance = governance_of(parent.app)
        governance.check()
        _warn_of_short_windows(governance)
        interval = governance.settings["sweep_interval"]
        if governance.settings["store"] and interval:
            self._sweeper = Sweeper(parent.app, interval)
            self._sweeper.start()

    def stop(self, parent: Any) -> None:  # noqa: ARG002  Celery's signature
        """End it, with the sweep that is under way."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.stop()

    def terminate(self, parent: Any) -> None:
        """The same in a hurry."""
        self.stop(parent)


class Sweeper:
    """The thread that sweeps, a real one: bodies that compute hold up no recovery."""

    def __init__(self, app: Celery, interval: float) -> None:
        self._app, self._interval = app, interval
        self._stopping, self._bell, self._ended = False, Bell(), Bell()
        self._over = False
        self._join: Callable[[], object] | None = None
        self._back = way_back()

    def start(self) -> None:
        """Start the thread."""
        self._join = start_thread(self._run, "celery_idem sweep")

    def stop(self) -> None:
        """End the thread, and wait for it no longer than its connections may take to answer."""
        self._stopping = True
        self._bell.ring()
        self._ended.wait(END_WITHIN)
        if self._over and self._join is not None:
            self._join()  # under gevent it still takes its hub down, and a process that ends beside that crashes

    def _run(self) -> None:
        pause, failing = self._interval * random.random(), False  # noqa: S311  workers started together sweep apart
        try:
            while True:
                self._bell.wait(pause)
                if self._stopping:
                    return
                failed = self._tried()
                if failed is not None and not failing:
                    self._say(logging.WARNING, f"actions that lost their message are not looked after now: {failed!r}")
                elif failing and failed is None:
                    self._say(logging.INFO, "actions that lost their message are looked after again")
                failing = failed is not None
                pause = self._interval
        finally:
            self._over = True
            self._ended.ring()

    def _tried(self) -> Exception | None:
        found = _Sweep(self._app, self._tell, lambda: self._stopping)
        try:
            found.run()
        except Exception as error:  # noqa: BLE001  whatever it is, the worker goes on
            return error
        return found.error

    def _tell(self, event: records.Event) -> None:
        self._back(lambda: governance_of(self._app).tell(event))

    def _say(self, level: int, text: str) -> None:
        self._back(lambda: logger.log(level, "celery_idem: %s", text))
