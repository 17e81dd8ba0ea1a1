"""Who takes part in the drain: each contestant's task as its own documentation has one write it.

*Bare + two calls* is a bare task that sends what our stores send, and looks at no answer: the least that asking costs.
The others are dependencies of the extra ``bench`` alone; what is not installed does not take part.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from celery_idem.stores.base import open_store

_TASK = """
import time
IMPORTS

@app.task(name="task"OPTIONS)
DECORATORdef task(number, seconds):
    if seconds:
        time.sleep(seconds)
    return number
"""
_LATE = ", acks_late=True, reject_on_worker_lost=True"
_ONCE = """from celery_once import QueueOnce
app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": "STORE", "default_timeout": 3600}}"""


def _task(options: str = "", imports: str = "", decorator: str = "") -> str:
    return _TASK.replace("IMPORTS", imports).replace("OPTIONS", options).replace("DECORATOR", decorator)


def _asks() -> str:
    return _task(_LATE, "from tests.bench.floors import asked_around", '@asked_around("STORE")\n')


def _idemkit(backend: str) -> str:
    imports = f"from idemkit import MethodConfig, {backend}, idempotent_sync"
    config = 'MethodConfig(key_fields=["number"])'
    return _task(_LATE, imports, f'@idempotent_sync(backend={backend}.from_url("STORE"), config={config})\n')


def _prepare_ours(url: str) -> str:
    store = open_store(url)
    store.create_schema()
    store.close()
    return url


def _prepare_idemkit(url: str) -> str:
    plain = url.replace("+psycopg2", "")
    subprocess.run([sys.executable, "-m", "idemkit.cli", "init-pg", plain], check=True, capture_output=True)
    return plain


@dataclass(frozen=True)
class Entry:
    """One contestant: its module's source, where STORE is the store's URL, and what it needs."""

    source: str
    store: str = ""
    """redis, postgresql, sqlite, or nothing."""
    needs: tuple[str, ...] = ()
    setting: str = ""
    """The setting that names the store."""
    prepare: Callable[[str], str] = str
    """Makes what the store needs to have; answers the URL as the contestant writes it."""

    def settings(self, url: str) -> dict[str, Any]:
        """What its app is configured with."""
        return {self.setting: url} if self.setting else {}


def _ours(store: str) -> Entry:
    source = _task(', base=IdempotentTask, key=["number"]', "from celery_idem import IdempotentTask")
    return Entry(source, store, setting="idempotency_store", prepare=_prepare_ours)


ENTRIES = {
    "bare, default acks": Entry(_task()),
    "bare, late acks": Entry(_task(_LATE)),
    "bare + two calls, redis": Entry(_asks(), "redis", prepare=_prepare_ours),
    "bare + two calls, postgresql": Entry(_asks(), "postgresql", prepare=_prepare_ours),
    "celery_idem, redis": _ours("redis"),
    "celery_idem, postgresql": _ours("postgresql"),
    "celery_idem, sqlite": _ours("sqlite"),
    "idemkit, redis": Entry(_idemkit("RedisBackend"), "redis", ("idemkit",)),
    "idemkit, postgresql": Entry(
        _idemkit("PostgresBackend"), "postgresql", ("idemkit", "asyncpg"), prepare=_prepare_idemkit
    ),
    "celery-once": Entry(
        _task(f', base=QueueOnce, once={{"graceful": True, "keys": ["number"]}}{_LATE}', _ONCE),
        "redis",
        ("celery-once",),
    ),
    "celery-singleton": Entry(
        _task(
            f', base=Singleton, unique_on=["number"], lock_expiry=3600{_LATE}', "from celery_singleton import Singleton"
        ),
        "redis",
        ("celery-singleton",),
        "singleton_backend_url",
    ),
}
OURS = tuple(name for name, entry in ENTRIES.items() if not entry.needs)
LEAST = {f"celery_idem, {store}": f"bare + two calls, {store}" for store in ("redis", "postgresql")}
"""Ours, and a bare task that asks the same store as often."""
COMPARABLE = (
    ("celery_idem, redis", "idemkit, redis"),
    ("celery_idem, postgresql", "idemkit, postgresql"),
    ("celery_idem, redis", "celery-once"),
    ("celery_idem, redis", "celery-singleton"),
)
"""Ours, and whom it must be ahead of."""
WHEN_SENT = ("celery-once", "celery-singleton")
"""Who does the work where a message is sent: compared by sending and draining together."""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed() -> tuple[str, ...]:
    """Everybody whose packages are here."""
    return tuple(name for name, entry in ENTRIES.items() if all(_version(package) for package in entry.needs))


def versions() -> str:
    """What the others are, or that they are missing."""
    packages = sorted({package for entry in ENTRIES.values() for package in entry.needs})
    found = [f"{package} {_version(package) or 'not installed'}" for package in packages]
    return f"Beside it: {', '.join(found)}."
