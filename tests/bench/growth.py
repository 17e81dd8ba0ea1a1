"""What a store that fills up costs: time of a call from a thousand records to ten million, and bytes per record.

The records are copies of one that the library itself completed, under other keys, made in bulk by each store's own
means. A size that would take more than three minutes to make, or a quarter of the free memory or disk, is left out, and
the table says so. Beside it: how long a waiter waits for what is there already, and what a live claim takes in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import random
import shutil
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import redis

from celery_idem.core.engine import Engine, new_token
from celery_idem.core.heartbeat import PURGE_LIMIT, Heartbeat
from celery_idem.core.policy import Policy
from celery_idem.core.records import Status
from celery_idem.stores.base import Store, open_store
from tests.bench.engine import timed
from tests.bench.page import MORE
from tests.bench.steps import VALUE, operation, store_first, store_replay
from tests.campaigns.report import percentile, progress, table
from tests.support.operations import key_for
from tests.support.processes import remove_dir, scratch_dir
from tests.support.services import PostgresServer, RedisServer

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
QUICK = SIZES[:2]
LONGEST = 200.0
"""Seconds the filling of one size may take, judged by the one before."""
CALLS = 400
MODEL = key_for("the record that is copied")
PREFIX = "celery_idem:"


def copy_key(number: int) -> str:
    """The key of the copy of this number: as random as a real one, and the same in every store."""
    one = hashlib.sha1(b"%d" % number, usedforsecurity=False).hexdigest()
    return one + hashlib.sha1(one.encode(), usedforsecurity=False).hexdigest()[:24]


class InRedis:
    """A private Redis, its memory is its size."""

    name = "redis"
    options: tuple[str, ...] = ()
    _FILL = """
        local fields = redis.call('HGETALL', KEYS[1])
        for number = tonumber(ARGV[2]), tonumber(ARGV[3]) do
            local one = redis.sha1hex(tostring(number))
            local key = ARGV[1] .. one .. string.sub(redis.sha1hex(one), 1, 24)
            redis.call('HSET', key, unpack(fields))
            redis.call('PEXPIRE', key, 86400000)
        end"""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.url = stack.enter_context(RedisServer(options=self.options)).url
        self._client = redis.Redis.from_url(self.url)
        stack.callback(self._client.close)
        self._script = self._client.register_script(self._FILL)

    def fill(self, first: int, last: int) -> None:
        """Make the copies of these numbers, the last one left out."""
        for start in range(first, last, 5_000):
            end = min(start + 5_000, last) - 1
            self._script(keys=[PREFIX + MODEL], args=[PREFIX, start, end])

    def size(self) -> int:
        """Bytes it takes."""
        return int(self._client.info("memory")["used_memory"])

    def room(self) -> int:
        """Bytes there are for more."""
        return psutil.virtual_memory().available // 4


class InRedisPacked(InRedis):
    """The same with one setting of the server's that keeps small hashes in one piece."""

    name = "redis, packed"
    options = ("--hash-max-listpack-value", "1024")


class InPostgres:
    """A private PostgreSQL; its size is that of the table with its indexes."""

    name = "postgresql"

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._server = stack.enter_context(PostgresServer(durable=True, options=["-c", "max_wal_size=4GB"]))
        self.url = self._server.url

    def fill(self, first: int, last: int) -> None:
        """As in Redis."""
        execute = self._server.execute
        names = execute(
            "SELECT string_agg(column_name, ',') FROM information_schema.columns "
            "WHERE table_name = 'celery_idem_record' AND column_name <> 'key'"
        )
        sha = "encode(sha256(number::text::bytea), 'hex')"
        execute(
            f"INSERT INTO celery_idem_record (key, {names}) SELECT {sha}, {names} FROM celery_idem_record, "
            f"generate_series({first}, {last - 1}) AS number WHERE key = '{MODEL}'"
        )
        execute("ANALYZE celery_idem_record")
        execute("CHECKPOINT")

    def size(self) -> int:
        """As in Redis."""
        return int(self._server.execute("SELECT pg_total_relation_size('celery_idem_record')"))

    def room(self) -> int:
        """As in Redis."""
        return shutil.disk_usage(self._server.dir).free // 4


class InSqlite:
    """A file; its size is its size."""

    name = "sqlite"

    def __init__(self, stack: contextlib.ExitStack) -> None:
        directory = scratch_dir("bench")
        stack.callback(remove_dir, directory)
        self._path = Path(directory) / "records.db"
        self.url = f"sqlite:///{self._path}"

    def fill(self, first: int, last: int) -> None:
        """As in Redis."""
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            connection.execute("PRAGMA synchronous=OFF")  # of this connection alone
            connection.execute("PRAGMA cache_size=-1000000")
            cursor = connection.execute("SELECT * FROM celery_idem_record WHERE key = ?", (MODEL,))
            names = [column[0] for column in cursor.description]
            row = dict(zip(names, cursor.fetchone(), strict=True))
            del row["key"]
            marks = ", ".join("?" * len(row))
            sql = f"INSERT INTO celery_idem_record ({', '.join(row)}, key) VALUES ({marks}, ?)"
            rest = tuple(row.values())
            for start in range(first, last, 100_000):
                numbers = range(start, min(start + 100_000, last))
                connection.executemany(sql, [(*rest, copy_key(number)) for number in numbers])
                connection.commit()
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def size(self) -> int:
        """As in Redis."""
        return self._path.stat().st_size

    def room(self) -> int:
        """As in Redis."""
        return shutil.disk_usage(self._path.parent).free // 4


KINDS: tuple[Callable[[contextlib.ExitStack], Any], ...] = (InRedis, InRedisPacked, InPostgres, InSqlite)


def grown(place: Any, store: Store, sizes: tuple[int, ...], calls: int) -> Iterator[tuple[list[Any], float]]:
    """A line of the table for each size, and bytes per record there; the last line may say why there are no more."""
    store_first(store)(MODEL, new_token())
    empty, there, pace = place.size(), 0, 0.0
    each = 4_000.0  # bytes, before anything was measured
    for size in sizes:
        title, more = f"{place.name}, {size:,}", size - there
        if more * each > place.room() or more * pace > LONGEST:
            yield [title, *["left out"] * 4, f"{size * each / 1e9:.1f} GB", ""], each
            return
        began = time.monotonic()
        place.fill(there, size)
        took, there = time.monotonic() - began, size
        pace = took / more
        each = (place.size() - empty) / size
        progress(f"growth: {title} records, made in {took:.1f} s")
        firsts, replays = asked(store, f"{size}", calls)
        micro = [f"{1e6 * percentile(taken, at):.0f}" for taken in (firsts, replays) for at in (0.5, 0.95)]
        yield [title, *micro, f"{each:.0f}", f"{took:.1f}"], each


def asked(store: Store, name: str, calls: int) -> tuple[list[float], list[float]]:
    """Seconds of first runs, and of replays of them."""
    first, replay = store_first(store), store_replay(store)
    keys = [key_for(f"{name} {number}") for number in range(-calls // 4, calls)]
    gc.collect()
    firsts = [timed(first, key, new_token()) for key in keys]
    random.Random(name).shuffle(keys)
    replays = [timed(replay, key, new_token()) for key in keys]
    return firsts[calls // 4 :], replays[calls // 4 :]


# --- waiting --------------------------------------------------------------------------------------------------------

TOGETHER = 4


def waits(store: Store, times: int) -> list[float]:
    """Seconds from a completion to the return of a duplicate that waited for it."""
    engine = Engine(store, Policy(wait_timeout=30.0))
    found: list[float] = []

    def pair(number: int) -> None:
        key, body = key_for(f"waited for {number}"), random.Random(number).uniform(0.05, 0.8)
        began, ended = threading.Event(), [0.0]

        def first() -> None:
            def slow(_: Any) -> Any:
                began.set()
                time.sleep(body)
                return VALUE

            engine.run(operation(key, new_token()), slow)
            ended[0] = time.monotonic()

        runner = threading.Thread(target=first)
        runner.start()
        assert began.wait(30)
        result = engine.run(operation(key, new_token()), lambda _: None)
        now = time.monotonic()
        runner.join()
        assert result.status is Status.REPLAYED
        found.append(max(0.0, now - ended[0]))

    try:
        for start in range(0, times, TOGETHER):
            threads = [threading.Thread(target=pair, args=(start + i,)) for i in range(min(TOGETHER, times - start))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        engine.heartbeat.stop()
    return found


def memory_per_claim(store: Store, claims: int = 2_000) -> float:
    """Bytes a held claim takes in its worker's process, its heartbeat's entry included."""
    engine = Engine(store, Policy(), heartbeat=Heartbeat(store, Engine(store).emit, purge=False))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(claims):
            claim = store.claim(operation(key_for(f"held {number}"), new_token()), lease=3600.0, ttl=60.0).claim
            assert claim is not None
            engine.heartbeat.add(claim, lambda: None)
        del claim
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / claims
    finally:
        tracemalloc.stop()
        engine.heartbeat.stop()


# --- all of it ------------------------------------------------------------------------------------------------------

HEADER = ("records", "first run p50 µs", "p95", "replay p50 µs", "p95", "bytes per record", "made in s")
A_DAY = 1_000_000


def run(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    """Every store at every size, the rule to size one, and what a waiter waits."""
    sizes, calls, times = (QUICK, 40, 8) if arguments.quick else (SIZES, CALLS, 60)
    rows: list[list[Any]] = []
    sizing: list[list[Any]] = []
    waiting: list[list[Any]] = []
    held = 0.0
    for kind in KINDS:
        with contextlib.ExitStack() as stack:
            place = kind(stack)
            store = open_store(place.url)
            stack.callback(store.close)
            store.create_schema()
            progress(f"growth: {place.name}, up to {sizes[-1]:,} records")
            lines = list(grown(place, store, sizes, calls))
            rows += [line for line, _ in lines]
            each = lines[-1][1]
            gigabytes = [f"{A_DAY * days * each / 1e9:.1f}" for days in (1, 7, 30)]
            sizing.append([place.name, f"{each:.0f}", *gigabytes])
            seconds = waits(store, times)
            milli = [f"{1e3 * value:.0f}" for value in (*(percentile(seconds, at) for at in (0.5, 0.95)), max(seconds))]
            waiting.append([place.name, *milli])
            held = held or memory_per_claim(store)
    short = table(HEADER, rows)
    rule = table((f"{A_DAY:,} messages a day", "bytes per record", "ttl 1 day: GB", "7 days", "30 days"), sizing)
    wait = table(("waiter: completion to replay", "p50 ms", "p95 ms", "longest ms"), waiting)
    text = (
        "A store holds **messages a day x ttl in days x bytes per record**; here results have 200 bytes. Bigger "
        "results, and keys that many messages share, change the last factor. Expired records stay until they are "
        f"purged, {PURGE_LIMIT} a minute at most by each worker process (Redis drops them itself). *Packed* is Redis 7 "
        f"with `hash-max-listpack-value 1024` (`hash-max-ziplist-value` before it).\n\n{rule}\n\n"
        f"A duplicate that waits in its slot looks after 20, 40, 80, 160 and then every 200 ms.\n\n{wait}\n\n"
        f"A held claim takes {held / 1000:.1f} kB in its worker's process."
    )
    return f"{short}\n\n{MORE}\n\n{text}", []
