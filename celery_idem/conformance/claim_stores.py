"""The harnesses of our own stores, and patterns for one of yours: what ``python -m celery_idem.conformance URL`` uses.

They garble records and purge what a clock of theirs says has expired, so they are for an empty place and never for one
with claims that matter. Nothing here stands between a store and its server, so answers are not lost on the way; our
tests have harnesses that lose them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from celery_idem.conformance.claim_harness import ClaimHarness
from celery_idem.conformance.clock import Clock
from celery_idem.core.records import RECORD_VERSION
from celery_idem.errors import ConfigurationError, RecordCorrupt
from celery_idem.stores.base import Store, open_store
from celery_idem.stores.memory import MemoryStore

TIMEOUT = 10.0
"""Seconds, so that a busy machine is not taken for a fault."""
NO_RELAY = "nothing stands between this command and its server that could lose an answer"
AWAY = {"lost_reply": NO_RELAY, "unreachable": NO_RELAY, "silent": NO_RELAY}
NO_SERVER = "there is no server"
ALONE = {"lost_reply": NO_SERVER, "unreachable": NO_SERVER, "silent": NO_SERVER}


class StoreHarness(ClaimHarness):
    """A store that ``open_store`` opens, on a clock of its own."""

    def __init__(self, url: str) -> None:
        self.url, self.clock = url, Clock()
        self._opened: list[Store] = []
        self.store = self.reopen()
        self.store.create_schema()

    def open(self, url: str, timeout: float = TIMEOUT) -> Store:
        """A handle to this place under this URL."""
        self._opened.append(open_store(url, timeout=timeout, clock=self.clock))
        return self._opened[-1]

    def reopen(self) -> Store:
        """See ``ClaimHarness``."""
        return self.open(self.url)

    def impatient(self) -> Store:
        """See ``ClaimHarness``."""
        return self.open(self.url, self.timeout)

    def close(self) -> None:
        """See ``ClaimHarness``."""
        for store in self._opened:
            store.close()


class MemoryHarness(ClaimHarness):
    """A store in memory, or what is made like one."""

    shared = False
    excused: Mapping[str, str] = {
        **ALONE,
        "shared": "other processes have memories of their own",
        "garble": "values in memory cannot be unreadable",
        "annotate": "there is no other release in this process",
        "locked": "it has no transactions",
    }

    def __init__(self, make: Callable[..., MemoryStore] = MemoryStore) -> None:
        self.clock = Clock()
        self.memory = make(clock=self.clock)
        self.store: Store = self.memory
        self._records = self.memory._records  # noqa: SLF001  the way past the store

    def reopen(self) -> Store:
        """See ``ClaimHarness``: there is one."""
        return self.store

    def raw(self, key: str) -> Any:
        """See ``ClaimHarness``."""
        return self._records.get(key)

    def newer(self, key: str) -> None:
        """See ``ClaimHarness``."""
        self._records[key] = replace(self._records[key], record_version=RECORD_VERSION + 1)

    def garble_body(self, key: str) -> None:
        """See ``ClaimHarness``."""
        outcome = self._records[key].outcome
        if outcome is None or outcome.encoded is None:
            raise LookupError("there is no body to garble")
        garbled = replace(outcome, encoded=replace(outcome.encoded, body=b"garbled"))
        self._records[key] = replace(self._records[key], outcome=garbled)

    def close(self) -> None:
        """See ``ClaimHarness``."""
        self.store.close()


class RedisHarness(StoreHarness):
    """A record is one hash."""

    expires_itself = True
    excused: Mapping[str, str] = {**AWAY, "locked": "Redis has no transactions that lock"}

    def __init__(self, url: str) -> None:
        from celery_idem.stores.redis.connection import wire_for

        super().__init__(url)
        self._wire = wire_for(url, timeout=TIMEOUT, options={})

    def raw(self, key: str) -> Any:
        """See ``ClaimHarness``."""
        return self._run("DUMP", key)

    def newer(self, key: str) -> None:
        """See ``ClaimHarness``."""
        self._run("HSET", key, "v", RECORD_VERSION + 1, "state", "SOMETHING_NEW")

    def garble(self, key: str) -> None:
        """See ``ClaimHarness``."""
        self._run("HSET", key, "fence", "garbage")

    def garble_body(self, key: str) -> None:
        """See ``ClaimHarness``."""
        self._run("HSET", key, "body", b"garbled")

    def annotate(self, key: str, message: str) -> None:
        """See ``ClaimHarness``."""
        note = json.loads(self._run("HGET", key, f"m:{message}") or "{}")
        self._run("HSET", key, f"m:{message}", json.dumps({**note, "flavour": {"new": [1]}}))

    def close(self) -> None:
        """See ``ClaimHarness``."""
        super().close()
        self._wire.close()

    def _run(self, command: str, key: str, *arguments: Any) -> Any:
        (reply,) = self._wire.commands([(command, f"celery_idem:{key}", *arguments)])
        return reply


class SQLHarness(StoreHarness):
    """A record is one row; the notes are one JSON column."""

    def __init__(self, url: str) -> None:
        from celery_idem.stores.sql.database import Database

        super().__init__(url)
        self._database = Database(url, 60.0, None, {})
        self.excused = dict(AWAY)
        if self._database.sqlite:
            self.excused = {**ALONE, "locked": "SQLite locks the whole file, never one record"}

    @property
    def locked(self) -> Callable[[str], AbstractContextManager[None]] | None:  # type: ignore[override]
        """See ``ClaimHarness``."""
        return None if self._database.sqlite else self._locked

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with self._database.call() as call:
                call.once(transaction)

        def transaction(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")
            connection.exec_driver_sql("SELECT 1 FROM celery_idem_record WHERE key = %s FOR UPDATE", (key,))
            held.set()
            over.wait(30)
            connection.exec_driver_sql("ROLLBACK")

        holder = threading.Thread(target=hold, daemon=True)
        holder.start()
        if not held.wait(10):
            raise TimeoutError("the record could not be locked")
        try:
            yield
        finally:
            over.set()
            holder.join(10)

    def raw(self, key: str) -> Any:
        """See ``ClaimHarness``."""
        return self._run("SELECT * FROM celery_idem_record WHERE key = ?", key)

    def newer(self, key: str) -> None:
        """See ``ClaimHarness``."""
        self._set(key, record_version=RECORD_VERSION + 1, notes="a layout of its own", answer="SOMETHING_NEW")

    def garble(self, key: str) -> None:
        """See ``ClaimHarness``."""
        self._set(key, notes="not json")

    def garble_body(self, key: str) -> None:
        """See ``ClaimHarness``."""
        self._set(key, body=b"garbled")

    def annotate(self, key: str, message: str) -> None:
        """See ``ClaimHarness``."""
        ((text,),) = self._run("SELECT notes FROM celery_idem_record WHERE key = ?", key)
        notes = json.loads(text)
        notes.setdefault(message, {})["flavour"] = {"new": [1]}
        self._set(key, notes=json.dumps(notes))

    def close(self) -> None:
        """See ``ClaimHarness``."""
        super().close()
        self._database.close()

    def _set(self, key: str, **fields: Any) -> None:
        assigned = ", ".join(f"{name} = ?" for name in fields)
        # Every write raises rev.
        self._run(f"UPDATE celery_idem_record SET rev = rev + 1, {assigned} WHERE key = ?", *fields.values(), key)  # noqa: S608

    def _run(self, statement: str, *values: Any) -> Any:
        text = statement if self._database.sqlite else statement.replace("?", "%s")

        def work(connection: Any) -> Any:
            done = connection.exec_driver_sql(text, values)
            return [tuple(row) for row in done] if done.returns_rows else []

        with self._database.call() as call:
            return call.once(work)


def harnesses(url: str) -> Callable[[], ClaimHarness]:
    """What opens a harness on the empty place that the URL names; ``ConfigurationError`` where it is not empty."""
    if url.startswith("memory:"):
        return MemoryHarness
    store = open_store(url, timeout=TIMEOUT)
    try:
        store.create_schema()
        _refuse_claims(store)
    finally:
        store.close()
    return lambda: RedisHarness(url) if store.name == "redis" else SQLHarness(url)


def _refuse_claims(store: Store) -> None:
    """``ConfigurationError`` where the place holds claims; it tells those of an earlier run from others."""
    tasks: list[str] = []
    try:
        for record in store.find():
            tasks.append(record.task)  # noqa: PERF401  what was read before one that cannot be counts
    except RecordCorrupt:
        tasks = tasks or [""]
    own = sum(re.fullmatch(r".* of [0-9a-f]{32}", task) is not None for task in tasks)
    if tasks and own == len(tasks):
        raise ConfigurationError("an earlier run left its records here: empty the place, or name another one")
    if tasks:
        raise ConfigurationError("there are claims here, and the suite garbles and purges: give it an empty place")
