"""The raw floors: what a store sends, sent by the bare driver.

One run of the store is recorded as the server gets it. The floor sends the same scripts with the same arguments through
a bare redis-py client, and the same SQL with the same parameters through a bare cursor in autocommit mode, for a fresh
key and token each time. The floor of the store in memory is a dictionary and a lock. ``asked_around`` puts the two
calls of a first run around a body: such a bare task is the least a library can cost that asks a store.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import psycopg
import psycopg2
import redis

from celery_idem.core.engine import new_token
from celery_idem.core.records import Claim
from celery_idem.stores.base import open_store
from celery_idem.stores.redis.scripts import script
from celery_idem.stores.sql.call import Call
from tests.bench.steps import store_first
from tests.support.operations import key_for

Sent = list[tuple[Any, Any]]


def floor_of(url: str, store: Any) -> Floor:
    """The floor of a store, of which one claim and completion are recorded now."""
    if store.name == "memory":
        return RawMemory()
    if store.name == "redis":
        return RawRedis(url, store)
    return RawSQLite(url, store) if store.name == "sqlite" else RawPostgres(url, store)


class Floor:
    """What a first run, a replay and a renewal of many claims cost at least."""

    def first(self, key: str, token: str) -> None:
        """Claim and complete."""
        raise NotImplementedError

    def replay(self, key: str, token: str) -> None:
        """Claim what is completed."""
        raise NotImplementedError

    def renewal(self, store: Any, claims: Sequence[Claim]) -> Callable[[], None]:
        """What renews these claims; the store does it once, to be recorded."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the connection back."""


class InHalves(Protocol):
    """A floor whose first run is two calls, with room for a body between them."""

    def claim(self, key: str, token: str) -> Any:
        """Claim; what it returns is for ``complete``."""

    def complete(self, held: Any) -> None:
        """Complete."""


def asked_around(url: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a task's body: the store's two calls around it, by the bare driver; its first argument is the key."""
    mine, one_records = threading.local(), threading.Lock()

    def decorated(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def asking(number: int, *args: Any) -> Any:
            if not hasattr(mine, "floor"):
                with one_records, contextlib.closing(open_store(url)) as store:
                    mine.floor = floor_of(url, store)
            held = mine.floor.claim(key_for(f"asked {number}"), new_token())
            value = body(number, *args)
            mine.floor.complete(held)
            return value

        return asking

    return decorated


class RawMemory(Floor):
    """Two writes or one reading of a dictionary, under a lock."""

    def __init__(self) -> None:
        self._lock, self._records = threading.Lock(), {"": ""}

    def first(self, key: str, token: str) -> None:
        for state in ("CLAIMED", "COMPLETED"):
            with self._lock:
                self._records[key] = state + token

    def replay(self, key: str, token: str) -> None:
        with self._lock:
            assert self._records[key].startswith("COMPLETED")

    def renewal(self, store: Any, claims: Sequence[Claim]) -> Callable[[], None]:
        def renew() -> None:
            with self._lock:
                self._records.update({claim.key: claim.token for claim in claims})

        return renew


class RawRedis(Floor):
    """The scripts, by EVALSHA through a bare client."""

    def __init__(self, url: str, store: Any) -> None:
        self._client = redis.Redis.from_url(url, socket_timeout=5)
        self._prefix = store._prefix
        sent: list[tuple[Any, str, Sequence[Any]]] = []
        run = store.wire.run
        store.wire.run = lambda name, key, args: sent.append((name, key, args)) or run(name, key, args)
        one(store)
        del store.wire.run
        (self._claim, _, self._claim_args), (self._complete, _, self._complete_args) = sent
        assert self._claim == script("claim")

    def first(self, key: str, token: str) -> None:
        self.complete(self.claim(key, token))

    def claim(self, key: str, token: str) -> Any:
        """See ``InHalves``."""
        reply = self._client.evalsha(self._claim.sha, 1, self._prefix + key, *_with(self._claim_args, key, token))
        return key, token, reply[3]

    def complete(self, held: Any) -> None:
        """See ``InHalves``."""
        key, token, fence = held
        args = _with(self._complete_args, key, token)
        args[7] = fence
        assert self._client.evalsha(self._complete.sha, 1, self._prefix + key, *args) == b"COMPLETED"

    def replay(self, key: str, token: str) -> None:
        reply = self._client.evalsha(self._claim.sha, 1, self._prefix + key, *_with(self._claim_args, key, token))
        assert reply[0] == b"COMPLETED"

    def renewal(self, store: Any, claims: Sequence[Claim]) -> Callable[[], None]:
        sent: Sent = []
        run = store.wire.run_many
        store.wire.run_many = lambda name, calls: sent.append((name, calls)) or run(name, calls)
        store.renew(claims)
        del store.wire.run_many
        ((name, calls),) = sent

        def renew() -> None:
            pipeline = self._client.pipeline(transaction=False)
            for key, args in calls:
                pipeline.evalsha(name.sha, 1, key, *args)
            assert set(pipeline.execute()) == {b"RENEWED"}

        return renew

    def close(self) -> None:
        self._client.close()


def _with(args: Sequence[Any], key: str, token: str) -> list[Any]:
    changed = list(args)
    changed[1], changed[2] = token, key[:36]
    return changed


class RawPostgres(Floor):
    """The statements, through a bare cursor of psycopg2 or psycopg."""

    def __init__(self, url: str, store: Any) -> None:
        plain = urlunsplit(urlsplit(url)._replace(scheme="postgresql"))
        self._connection: Any
        if "+psycopg:" in url:
            self._connection = psycopg.connect(plain, autocommit=True, prepare_threshold=None)
        else:
            self._connection = psycopg2.connect(plain)
            self._connection.autocommit = True
        self._cursor = self._connection.cursor()
        (self._claim, self._claim_params), (self._end, self._end_params) = recorded(store, lambda: one(store))

    def _claimed(self, key: str, token: str) -> Any:
        params = {**self._claim_params, "key": key, "new_key": key, "new_token": token, "new_message_id": key[:36]}
        self._cursor.execute(self._claim, params)
        (row,) = self._cursor.fetchall()
        return row

    def first(self, key: str, token: str) -> None:
        self.complete(self.claim(key, token))

    def claim(self, key: str, token: str) -> Any:
        """See ``InHalves``."""
        row = self._claimed(key, token)  # of a row it inserted the statement answers the clock, which is its rev
        return key, token, int(row[-2] * 1_000_000)

    def complete(self, held: Any) -> None:
        """See ``InHalves``."""
        key, token, rev = held
        self._cursor.execute(self._end, {**self._end_params, "key": key, "seen_rev": rev, "seen_token": token})
        assert len(self._cursor.fetchall()) == 1

    def replay(self, key: str, token: str) -> None:
        assert self._claimed(key, token)[2] == "COMPLETED"

    def renewal(self, store: Any, claims: Sequence[Claim]) -> Callable[[], None]:
        ((text, params),) = recorded(store, lambda: store.renew(claims))

        def renew() -> None:
            self._cursor.execute(text, params)
            assert len(self._cursor.fetchall()) == len(claims)

        return renew

    def close(self) -> None:
        self._connection.close()


class RawSQLite(Floor):
    """The statements, through a bare connection of the standard library's driver."""

    def __init__(self, url: str, store: Any) -> None:
        self._connection = sqlite3.connect(urlsplit(url).path[1:], isolation_level=None)
        self._connection.execute("PRAGMA synchronous=FULL")
        self._sent = recorded(store, lambda: one(store))
        self._read, self._read_params = self._sent[0]

    def first(self, key: str, token: str) -> None:
        named = {"key": key, "new_key": key, "new_token": token, "seen_token": token, "new_message_id": key[:36]}
        for text, params in self._sent:
            self._connection.execute(text, {**params, **named}).fetchall()

    def replay(self, key: str, token: str) -> None:
        (row,) = self._connection.execute(self._read, {**self._read_params, "key": key}).fetchall()
        assert row[2] == "COMPLETED"

    def renewal(self, store: Any, claims: Sequence[Claim]) -> Callable[[], None]:
        sent = recorded(store, lambda: store.renew(claims))
        times = 0

        def renew() -> None:
            nonlocal times
            times += 1
            for text, params in sent:
                moved = {name: params[name] + times for name in ("seen_rev", "new_rev") if name in params}
                self._connection.execute(text, {**params, **moved}).fetchall()

        return renew

    def close(self) -> None:
        self._connection.close()


def one(store: Any) -> None:
    """A claim and its completion."""
    store_first(store)(key_for(f"recorded {new_token()}"), new_token())


def recorded(store: Any, work: Callable[[], object]) -> Sent:
    """The statements and parameters that this work sends."""
    sent: Sent = []
    execute = Call.execute

    def noting(call: Call, name: str, params: dict[str, Any]) -> Any:
        found = execute(call, name, params)
        sent.append((store._database.statements[name].text, dict(params)))
        return found

    Call.execute = noting  # type: ignore[method-assign]
    try:
        work()
    finally:
        Call.execute = execute  # type: ignore[method-assign]
    return sent
