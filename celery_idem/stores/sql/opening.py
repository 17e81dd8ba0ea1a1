"""Opening a database: what a URL means, and a driver connection within a deadline."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from celery_idem.core.forking import connect_gate
from celery_idem.errors import ConfigurationError


def parsed(url: str) -> URL:
    """Return the URL in parts, or a ``ConfigurationError`` that quotes none of it: it may hold a password."""
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "idempotency_store is no SQLAlchemy URL: write postgresql+psycopg2://user:password@host/database or "
            "sqlite:///path, with special characters quoted"
        ) from None


def with_driver(url: URL) -> URL:
    """``postgresql://`` means psycopg 3 to SQLAlchemy 2.1 and psycopg2 to 2.0: take what is installed."""
    if url.drivername == "postgresql":
        found = importlib.util.find_spec("psycopg2") is not None
        return url.set(drivername="postgresql+psycopg2" if found else "postgresql+psycopg")
    return url


def in_memory(url: URL) -> bool:
    """Whether a SQLite URL names no file: every connection would have a database of its own."""
    return not url.database or ":memory:" in url.database or url.query.get("mode") == "memory"


class Attempt:
    """A driver connection being made in a thread; one that comes too late is closed there."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._connection: Any = None
        self._error: BaseException | None = None
        self._abandoned = False
        threading.Thread(target=self._run, name="celery_idem connect", daemon=True).start()

    def _run(self) -> None:
        connect_gate.enter()
        try:
            connection = self._connect()
        except BaseException as error:  # noqa: BLE001  raised where the connection was asked for
            self._error = error
        else:
            with self._lock:
                self._connection = connection
                abandoned = self._abandoned
            if abandoned:
                with contextlib.suppress(Exception):
                    connection.close()
        finally:
            connect_gate.leave()
        self._over.set()

    def result(self, deadline: float) -> Any:
        """Return the connection, or raise what went wrong, at the latest at ``deadline``."""
        self._over.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._abandoned = self._connection is None
        if self._error is not None:
            raise self._error
        if self._abandoned:
            raise TimeoutError("no connection in time")
        return self._connection
