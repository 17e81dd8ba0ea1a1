"""What one Celery app needs to run idempotent tasks: settings, store, heartbeat and one engine per task.

Nothing here does I/O before a task runs: publishers and web processes never need the store. A worker checks settings
and store before it takes its first message and refuses to start where they are wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery import Celery, bootsteps
from kombu.serialization import registry as serializers  # type: ignore[attr-defined]  # the stubs lack it

from celery_idem.core.codec import NotKept, through_codec
from celery_idem.core.engine import Engine
from celery_idem.core.events import Emitter
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.local_cache import LocalCache
from celery_idem.core.policy import Patterns, Policy
from celery_idem.core.records import Kind
from celery_idem.core.settings import PREFIX, Settings, given_under
from celery_idem.core.threads import gevent_patched
from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.governed.settings import given_settings as governed_settings
from celery_idem.outbox import Outbox
from celery_idem.stores.base import Store, open_store

if TYPE_CHECKING:
    from celery_idem.task import Idempotent

logger = logging.getLogger("celery_idem")
OWN = ("celery.", "celery_idem.")
"""Beginnings of task names that are not the application's."""
NOTHING_ON = (
    "idempotency_… is set, but no task is switched on: name celery_idem:annotation in task_annotations, or give tasks "
    "base=IdempotentTask"
)
_runtimes: WeakKeyDictionary[Celery, Runtime] = WeakKeyDictionary()
_making = threading.Lock()


def runtime_of(app: Celery) -> Runtime:
    """The app's one ``Runtime``."""
    runtime = _runtimes.get(app)
    if runtime is None:
        with _making:
            runtime = _runtimes.setdefault(app, Runtime(app))
    return runtime


def close_all() -> None:
    """Close every app's runtime in this process."""
    for runtime in list(_runtimes.values()):
        runtime.close()


def given_settings(conf: Any) -> dict[str, Any]:
    """The ``idempotency_*`` settings of a Celery configuration under their bare names, its namespace removed."""
    given, _ = given_under(PREFIX, conf)
    return given


class Runtime:
    """Settings, store, heartbeat and engines of one app, each made when first needed."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.outbox = Outbox(app)
        self.emit = Emitter(self.outbox)
        self._settings: Settings | None = None
        self._store: Store | None = None
        self._heartbeat: Heartbeat | None = None
        self._cache: LocalCache | None = None
        self._patterns: Patterns | None = None
        self._protected: dict[str, bool] = {}
        self._policies: dict[str, Policy] = {}
        self._engines: dict[str, Engine] = {}
        self._fanouts: frozenset[str] | None = None
        self._time_limits: tuple[Any, Any] | None = None
        self.whole_app = False
        """Whether a setting switches plain tasks on; ``optin`` says so."""
        self.confirming: Any = None
        """The connection that names the pool of confirming producers; ``parking`` makes it."""

    @property
    def settings(self) -> Settings:
        """The checked settings; ``ConfigurationError`` names what is wrong."""
        if self._settings is None:
            self._settings = Settings.load(given_settings(self.app.conf))
        return self._settings

    @property
    def mode(self) -> str:
        """``enforce``, ``observe`` or ``off``."""
        return str(self.settings["mode"])

    @property
    def namespace(self) -> str:
        """What separates this app's keys from another's in one store."""
        return str(self.settings["namespace"] or self.app.main or "celery")

    @property
    def store_url(self) -> str | None:
        """Where the claims are; an app of governed actions alone need not name the same database twice."""
        url = self.settings["store"] or governed_settings(self.app.conf).get("store")
        return None if url is None else str(url)

    @property
    def store(self) -> Store:
        """The claim store, unopened until its first verb."""
        if self._store is None:
            with _making:
                if self._store is None:
                    self._store = self._open_store()
        return self._store

    def _open_store(self) -> Store:
        url = self.store_url
        if not url:
            raise ConfigurationError(
                "idempotency_store is not set: name a store, such as redis://localhost/2, "
                "postgresql+psycopg2://user@host/db or sqlite:///idempotency.db"
            )
        return open_store(url, timeout=self.settings["store_timeout"], **dict(self.settings["store_options"]))

    def engine_for(self, task: Idempotent) -> Engine:
        """The engine that runs this task under its complete policy."""
        engine = self._engines.get(task.name)
        if engine is None:
            engine = self._engines.setdefault(task.name, self._engine(task))
        return engine

    def forget(self, name: str | None) -> None:
        """A task is bound under this name: what was made for one that had the name before is no more."""
        for made in (self._protected, self._policies, self._engines):
            made.pop(name, None)  # type: ignore[arg-type]

    @property
    def patterns(self) -> Patterns:
        """What ``idempotency_tasks`` says."""
        if self._patterns is None:
            self._patterns = Patterns(self.settings["tasks"])
        return self._patterns

    def protects(self, task: Idempotent) -> bool:
        """Whether the task is switched on: by its class, or by a setting that means it."""
        if self.mode == "off":
            return False
        protected = self._protected.get(task.name)
        if protected is None:
            word = self.patterns.of(task.name)
            wide = self.whole_app and not task.name.startswith("celery.")
            protected = word is not False and (task.always_idempotent or (wide and word is not None))
            self._protected[task.name] = protected
        return protected

    def policy_of(self, task: Idempotent) -> Policy:
        """The task's own policy, its gaps filled from ``idempotency_tasks``, then from the settings."""
        policy = self._policies.get(task.name)
        if policy is None:
            named = self.patterns.of(task.name) or Policy()
            policy = task.idempotency_policy.over(named).under(self.settings)
            serializer = policy.serializer or self._serializer(task)
            policy = self._policies.setdefault(task.name, Policy(serializer=serializer).over(policy))
        return policy

    def _serializer(self, task: Idempotent) -> str:
        """The task's own, or the results' where that says more: what either could say must be replayable."""
        own = str(task.serializer or self.app.conf.task_serializer)
        results = str(self.app.conf.result_serializer)
        return results if own == "json" and results in self.accept else own

    @property
    def accept(self) -> tuple[str, ...]:
        """Serializers that stored values may be read with."""
        return tuple(self.app.conf.result_accept_content or self.app.conf.accept_content)

    def _engine(self, task: Idempotent) -> Engine:
        with _making:
            if self._cache is None:
                self._cache = LocalCache(self.settings["local_cache"])
        if self._heartbeat is None:
            store = self.store
            # Under gevent the heartbeat is a thread beside the hub's, and no client may serve both.
            apart = gevent_patched() and store.name != "memory"
            if apart:
                store = self._open_store()
            with _making:
                if self._heartbeat is None:
                    self._heartbeat = Heartbeat(store, self.emit, purge=self.settings["purge"], closes=apart)
        return Engine(
            self.store,
            self.policy_of(task),
            emit=self.emit,
            heartbeat=self._heartbeat,
            cache=self._cache,
            accept=self.accept,
            dead_check=self.settings["dead_check"],
            store_timeout=self.settings["store_timeout"],
        )

    def tasks(self) -> Iterator[Idempotent]:
        """Every task the app knows that is switched on."""
        from celery_idem.task import Idempotent

        known = self.app.tasks.values()
        return (task for task in known if isinstance(task, Idempotent) and (self.mode == "off" or self.protects(task)))

    def left_out(self) -> list[str]:
        """Where a setting switches the app on: the names of the tasks that ``idempotency_tasks`` leaves out."""
        if not self.whole_app or self.mode == "off":
            return []
        on = {task.name for task in self.tasks()}
        return sorted(name for name in self.app.tasks if name not in on and not name.startswith(OWN))

    def check(self) -> list[str]:
        """Warnings about settings, policies and store; ``ConfigurationError`` where a worker must not start."""
        from celery_idem.unclaimed import unclaimed

        self.check_governed()
        if self.mode == "off":
            return ["mode is off: duplicates run"]
        self.check_tasks()
        warnings = (
            ["mode is observe: duplicates run, and the log says what would be done"] if self.mode == "observe" else []
        )
        if given_settings(self.app.conf) and not any(True for _ in self.tasks()):
            warnings.append(NOTHING_ON)
        warnings += [f"idempotency_tasks names {glob!r}, which fits no task" for glob in self.idle_globs()]
        if self.lacks_switch:
            warnings.append(
                "idempotency_tasks is set, but task_annotations does not name celery_idem:annotation: only tasks with "
                "base=IdempotentTask are switched on"
            )
        warnings += [str(one) for one in unclaimed(self)]
        early = [task.name for task in self.tasks() if acked_early(task)]
        if early:
            lost = f"{early[0]} is acked before it runs, so a crash loses it"
            if len(early) > 1:
                lost = f"{len(early)} tasks are acked before they run, {early[0]} among them, so a crash loses them"
            warnings.append(f"{lost}: set task_acks_late and task_reject_on_worker_lost")
        warnings += self.check_store()
        if not self.confirms_publishes():
            warnings.append(
                "the broker confirms no publish, so a connection that breaks may take a chain's next step with it: set "
                'broker_transport_options = {"confirm_publish": True}'
            )
        return warnings

    def check_governed(self) -> None:
        """``ConfigurationError`` where a worker must not start because of ``governed_…``; no database is asked."""
        if governed_settings(self.app.conf):
            from celery_idem.governed.chain import governance_of

            governance_of(self.app).check()

    def check_tasks(self) -> None:
        """``ConfigurationError`` where a worker must not start because of its tasks; the store is not asked."""
        from celery_idem.publish import check_task
        from celery_idem.unclaimed import check_annotations

        check_annotations(self.app.conf)
        for name, plain in self.app.tasks.items():
            if isinstance(getattr(plain, "idempotency", None), Policy):
                raise ConfigurationError(
                    f"task {name} has a Policy, but is not switched on: give it base=IdempotentTask, or name "
                    "celery_idem:annotation in task_annotations"
                )
        for task in self.tasks():
            check_task(task, self.policy_of(task))
            self._check_serializer(task)

    def check_store(self) -> list[str]:
        """Warnings of the store itself; ``ConfigurationError`` where it cannot work."""
        shares = getattr(self.store, "shares_memory_with", None)
        found = self.store.check()
        return found + [w for w in [shares and shares(self.app.conf.broker_write_url)] if w]

    def idle_globs(self) -> list[str]:
        """What ``idempotency_tasks`` names and no task fits."""
        return self.patterns.idle(self.app.tasks) if self.settings["tasks"] else []

    @property
    def lacks_switch(self) -> bool:
        """Whether ``idempotency_tasks`` is set, but nothing switches plain tasks on."""
        return bool(self.settings["tasks"]) and not self.whole_app

    def confirms_publishes(self) -> bool:
        """Whether the broker confirms what Celery publishes of a canvas; retries and parked copies always are."""
        options = self.app.conf.broker_transport_options or {}
        return bool(options.get("confirm_publish")) or self.app.connection_for_write().transport.driver_type != "amqp"

    def _check_serializer(self, task: Idempotent) -> None:
        try:
            encoded = self.engine_for(task).encode(Kind.RESULT, None)
            if encoded is not None:
                through_codec(encoded, self.accept)
        except NotKept as error:
            name = self.policy_of(task).serializer
            known: Mapping[str, str] = serializers.name_to_type
            if name not in known:
                raise ConfigurationError(
                    f"task {task.name}: kombu has no serializer {name!r}: name one of {', '.join(sorted(known))}"
                ) from error
            raise ConfigurationError(
                f"task {task.name}: results in {name!r} could not be read back ({error.__cause__ or error}): name "
                "another serializer in idempotency_serializer, or add this one to accept_content"
            ) from error

    def is_broadcast(self, delivery_info: Mapping[str, Any] | None) -> bool:
        """Whether a message came through a fanout exchange, to be run by every queue bound to it."""
        exchange = (delivery_info or {}).get("exchange")
        if not exchange:
            return False
        if self._fanouts is None:
            queues = self.app.amqp.queues.values()
            self._fanouts = frozenset(q.exchange.name for q in queues if q.exchange and q.exchange.type == "fanout")
        return exchange in self._fanouts

    @property
    def time_limits(self) -> tuple[Any, Any]:
        """Hard and soft limit of tasks that have none of their own, read once, as Celery's pool reads them."""
        if self._time_limits is None:
            self._time_limits = (self.app.conf.task_time_limit, self.app.conf.task_soft_time_limit)
        return self._time_limits

    def close(self) -> None:
        """Stop the heartbeat and give back every connection."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._store is not None:
            self._store.close()


def acked_early(task: Idempotent) -> bool:
    """Whether a crash loses the task's messages and nobody said so: a setting switched it on, and it acks first."""
    return not (task.acks_late or task.always_idempotent)


class CheckStore(bootsteps.StartStopStep):
    """Worker start: refuse to take messages with wrong settings or a store that cannot work.

    A store that merely does not answer is no reason to stay down: tasks wait and park until it does.
    """

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._app = parent.app

    def start(self, parent: Any) -> None:
        """Check, warn, and leave no connection open that a forked child would inherit."""
        from celery_idem.optin import switch_on_bound

        runtime = runtime_of(self._app)
        if getattr(parent, "task_events", False):  # -E tells it to this worker, and to nobody else
            runtime.outbox.switch_on()
        try:
            if runtime.whole_app:
                switch_on_bound(self._app)
            for warning in runtime.check():
                logger.warning("celery_idem: %s", warning)
            on = len(list(runtime.tasks()))
            said = "1 task is" if on == 1 else f"{on} tasks are"
            out = len(runtime.left_out())
            rest = f"; {out} left out by idempotency_tasks" if out else ""
            logger.info("celery_idem: %s switched on, in mode %s%s", said, runtime.mode, rest)
        except ConfigurationError:
            raise  # of a store that refuses, which is an outage only for workers that run
        except StoreUnavailable as error:
            will = "wait for it" if runtime.mode == "enforce" else "run unprotected"
            logger.warning("celery_idem: the store does not answer, tasks will %s: %s", will, error)
        finally:
            runtime.close()


def tell_if_nothing_is_on(sender: Any, **_: Any) -> None:
    """A worker whose app has our settings, and no task or setting that loaded us: it runs every duplicate."""
    app = sender.app
    if CheckStore not in app.steps["worker"] and given_settings(app.conf):
        logger.warning("celery_idem: %s", NOTHING_ON)


def ensure_installed(app: Celery) -> None:
    """Add the worker's steps and the signal handlers, once; called when an idempotent task is bound."""
    from celery_idem import signals
    from celery_idem.visibility import KeepVisible

    app.steps["worker"].add(CheckStore)
    app.steps["consumer"].add(KeepVisible)
    signals.connect()
