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

from celery_idem.core.codec import NotKept
from celery_idem.core.engine import Engine
from celery_idem.core.events import Emitter
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.local_cache import LocalCache
from celery_idem.core.policy import Policy
from celery_idem.core.records import Kind
from celery_idem.core.settings import PREFIX, Settings
from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.outbox import Outbox
from celery_idem.stores.base import Store, open_store

if TYPE_CHECKING:
    from celery_idem.task import IdempotentTask

logger = logging.getLogger("celery_idem")
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
    """The ``idempotency_*`` settings of a Celery configuration under their bare names, Django's namespace removed."""
    names = {str(key).lower().removeprefix("celery_") for key in conf}
    missing = object()
    found = {name.removeprefix(PREFIX): conf.get(name, missing) for name in names if name.startswith(PREFIX)}
    return {name: value for name, value in found.items() if value is not missing}


class Runtime:
    """Settings, store, heartbeat and engines of one app, each made when first needed."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.emit = Emitter(Outbox(app))
        self._settings: Settings | None = None
        self._store: Store | None = None
        self._heartbeat: Heartbeat | None = None
        self._cache: LocalCache | None = None
        self._policies: dict[str, Policy] = {}
        self._engines: dict[str, Engine] = {}
        self._fanouts: frozenset[str] | None = None
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
    def store(self) -> Store:
        """The claim store, unopened until its first verb."""
        if self._store is None:
            url = self.settings["store"]
            if not url:
                raise ConfigurationError(
                    "idempotency_store is not set: name a store, such as redis://localhost/2, "
                    "postgresql+psycopg2://user@host/db or sqlite:///idempotency.db"
                )
            with _making:
                if self._store is None:
                    options = dict(self.settings["store_options"])
                    self._store = open_store(url, timeout=self.settings["store_timeout"], **options)
        return self._store

    def engine_for(self, task: IdempotentTask) -> Engine:
        """The engine that runs this task under its complete policy."""
        engine = self._engines.get(task.name)
        if engine is None:
            engine = self._engines.setdefault(task.name, self._engine(task))
        return engine

    def policy_of(self, task: IdempotentTask) -> Policy:
        """The task's policy with every gap filled from the settings, checked against the task's signature."""
        policy = self._policies.get(task.name)
        if policy is None:
            policy = task.idempotency_policy.under(self.settings)
            serializer = policy.serializer or task.serializer or self.app.conf.task_serializer
            policy = self._policies.setdefault(task.name, Policy(serializer=serializer).over(policy))
        return policy

    def _engine(self, task: IdempotentTask) -> Engine:
        with _making:
            if self._cache is None:
                self._cache = LocalCache(self.settings["local_cache"])
        if self._heartbeat is None:
            store = self.store
            with _making:
                if self._heartbeat is None:
                    self._heartbeat = Heartbeat(store, self.emit, purge=self.settings["purge"])
        return Engine(
            self.store,
            self.policy_of(task),
            emit=self.emit,
            heartbeat=self._heartbeat,
            cache=self._cache,
            accept=self.app.conf.result_accept_content or self.app.conf.accept_content,
            dead_check=self.settings["dead_check"],
            store_timeout=self.settings["store_timeout"],
        )

    def tasks(self) -> Iterator[IdempotentTask]:
        """Every idempotent task the app knows."""
        from celery_idem.task import IdempotentTask

        return (task for task in self.app.tasks.values() if isinstance(task, IdempotentTask))

    def check(self) -> list[str]:
        """Warnings about settings, policies and store; ``ConfigurationError`` where a worker must not start."""
        from celery_idem.publish import check_task

        if self.mode == "off":
            return ["mode is off: duplicates run"]
        for name, plain in self.app.tasks.items():
            if isinstance(getattr(plain, "idempotency", None), Policy):
                raise ConfigurationError(f"task {name} has a Policy, but not base=IdempotentTask: add it")
        for task in self.tasks():
            check_task(task, self.policy_of(task))
            self._check_serializer(task)
        warnings = (
            ["mode is observe: duplicates run, and the log says what would be done"] if self.mode == "observe" else []
        )
        warnings += self.store.check()
        shares = getattr(self.store, "shares_memory_with", None)
        if shares is not None:
            warnings += [w for w in [shares(self.app.conf.broker_write_url)] if w]
        return warnings

    def _check_serializer(self, task: IdempotentTask) -> None:
        try:
            self.engine_for(task).encode(Kind.RESULT, None)
        except NotKept as error:
            name = self.policy_of(task).serializer
            raise ConfigurationError(
                f"task {task.name}: results in {name!r} could not be read back: name another serializer in "
                f"idempotency_serializer, or add this one to accept_content ({error})"
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

    def close(self) -> None:
        """Stop the heartbeat and give back every connection."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        if self._store is not None:
            self._store.close()


class CheckStore(bootsteps.StartStopStep):
    """Worker start: refuse to take messages with wrong settings or a store that cannot work.

    A store that merely does not answer is no reason to stay down: tasks wait and park until it does.
    """

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._app = parent.app

    def start(self, parent: Any) -> None:  # noqa: ARG002  Celery's signature
        """Check, warn, and leave no connection open that a forked child would inherit."""
        runtime = runtime_of(self._app)
        try:
            for warning in runtime.check():
                logger.warning("celery_idem: %s", warning)
        except StoreUnavailable as error:
            logger.warning("celery_idem: the store does not answer, tasks will wait for it: %s", error)
        finally:
            runtime.close()


def ensure_installed(app: Celery) -> None:
    """Add the worker's check and the signal handlers, once; called when an idempotent task is bound."""
    from celery_idem import signals

    app.steps["worker"].add(CheckStore)
    signals.connect()
