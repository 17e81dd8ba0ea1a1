"""Put an app on memory broker, backend and store, and put everything back."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from typing import Any

import celery._state
from celery import Celery
from kombu import pools

from celery_idem import app as seam
from celery_idem.app import Runtime, runtime_of
from celery_idem.governed.settings import given_settings as governed_settings
from celery_idem.testing.memory import BACKEND, BROKERS, SCHEME, Broker, Store, forget_results

VARIABLES = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL", "CELERY_RESULT_BACKEND")
"""Environment variables that win over an app's configuration."""
PLACES = (
    *("broker_read_url", "broker_write_url", "broker_transport", "broker_use_ssl", "broker_login_method"),
    *("broker_user", "broker_password", "broker_vhost", "broker_port"),
)
_state: Any = celery._state  # noqa: SLF001  the current app has no public way back
CACHED = ("_pool", "_backend_cache", "_local", "backend_cls")
"""Attributes in which the app keeps what it once made of its settings."""


def _governances() -> Any:
    """What each app has for its governed actions, where anybody has asked for it."""
    chain = sys.modules.get("celery_idem.governed.chain")
    return {} if chain is None else chain._governances  # noqa: SLF001


class Swap:
    """One app's stay in memory, from ``enter`` to ``leave``; what it was configured for is not touched meanwhile."""

    def __init__(self, app: Celery, settings: Mapping[str, Any]) -> None:
        self.app: Any = app
        self.broker = Broker()
        self._vhost = uuid.uuid4().hex
        self._given = settings
        self._ledger: str | None = None
        """Where the actions of an app that has some are meanwhile."""

    def enter(self, store: Store) -> Runtime:
        """Swap everything; the app's runtime for the test, on ``store``."""
        app = self.app
        results = app.backend_cls or app.conf.result_backend
        conf = app.conf  # only now: asking for a setting loads the configuration and replaces app.conf
        self._environment = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
        self._changes = dict(conf.changes)
        self._cached = {name: getattr(app, name) for name in CACHED}
        self._amqp = app.__dict__.pop("amqp", None)
        self._runtime = runtime_of(app)
        options = conf.broker_transport_options or {}
        ours: dict[str, Any] = dict.fromkeys(PLACES)
        ours |= {
            "broker_url": f"{SCHEME}://localhost/{self._vhost}",
            # It bounds how long a message may be parked.
            "broker_transport_options": {n: v for n, v in options.items() if n == "visibility_timeout"},
            "task_always_eager": False,
            "task_protocol": 2,
            "worker_send_task_events": False,
            "idempotency_wait_timeout": 0,
            "idempotency_local_cache": 0,
        }
        if results not in (None, "disabled", "disabled://"):
            ours["result_backend"] = BACKEND
        if governed_settings(conf).get("store") is not None:
            self._ledger = tempfile.mkdtemp(prefix="celery-idem-")
            ours["governed_store"] = f"sqlite:///{self._ledger}/actions.db"
        ours |= self._given
        self._governance = _governances().pop(app, None)
        bare = {str(key).lower().removeprefix("celery_"): key for key in conf.changes}
        for name in ours.keys() & bare.keys():
            del conf.changes[bare[name]]  # under another spelling it would win
        for name, value in ours.items():
            conf[name] = value
            if conf.prefix:  # with one, Celery 5.5 looks for it everywhere first
                conf[conf.prefix + (name.upper() if conf.prefix.isupper() else name)] = value
        app._pool, app._backend_cache, app.backend_cls, app._local = None, None, None, threading.local()  # noqa: SLF001
        forget_results(app)
        BROKERS[self._vhost] = self.broker
        # As in a worker: a canvas that begins with one of Celery's own tasks is published by the current app.
        self._current = _state._tls.current_app  # noqa: SLF001  asking the public way would make a default app
        app.set_current()
        return self._new_runtime(store)

    def leave(self) -> None:
        """Put everything back."""
        app = self.app
        _state._set_current_app(self._current)  # noqa: SLF001
        runtime_of(app).close()
        self._forget_pools()
        ours = _governances().pop(app, None)
        if ours is not None:
            ours.close()
        if self._governance is not None:
            _governances()[app] = self._governance
        if self._ledger is not None:
            shutil.rmtree(self._ledger, ignore_errors=True)
            self._ledger = None
        seam._runtimes[app] = self._runtime  # noqa: SLF001
        app.conf.changes.clear()
        app.conf.changes.update(self._changes)
        for name, value in self._cached.items():
            setattr(app, name, value)
        app.__dict__.pop("amqp", None)
        if self._amqp is not None:
            app.__dict__["amqp"] = self._amqp
        os.environ.update(self._environment)
        del BROKERS[self._vhost]

    def _new_runtime(self, store: Store) -> Runtime:
        before, runtime = self._runtime, Runtime(self.app)
        runtime.whole_app = before.whole_app
        runtime.emit.listeners += before.emit.listeners[1:]  # the first is the runtime's own outbox
        runtime._store = store  # noqa: SLF001  no URL names this one
        seam._runtimes[self.app] = runtime  # noqa: SLF001
        return runtime

    def _forget_pools(self) -> None:
        """Kombu keeps a pool for every broker it has ever seen."""
        for group in (pools.producers, pools.connections):
            for key in [key for key in group if self._vhost in key]:  # keys are lists of a connection's parameters
                group.pop(key).force_close_all()
