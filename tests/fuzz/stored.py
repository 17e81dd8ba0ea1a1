"""Stored records: a field of a Redis hash, of a row or of one in memory becomes garbage, then every verb.

What is looked for: an error that is not ``RecordCorrupt``, a record that cannot be read and is written to all the same,
a value that is not the one that was stored, and a key that nobody can free.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis
from hypothesis import strategies as st

from celery_idem.core.codec import Undecodable, decode_exception, decode_value, encode_value
from celery_idem.core.records import Answer, Claim, Kind, Note, Outcome, Record, Release, Right, State, Successor
from celery_idem.errors import RecordCorrupt
from celery_idem.stores.base import Store, open_store
from celery_idem.stores.redis.rows import FIELDS
from celery_idem.stores.sql.schema import COLUMNS
from celery_idem.testing import ManualClock
from celery_idem.testing.clock import START
from tests.fuzz.target import Draw, Target, worded
from tests.fuzz.values import json_like
from tests.support.operations import fingerprint, key_for, op

LEASE, TTL = 60.0, 3600.0
KEY = key_for("k")
numbers = st.integers(-2, 2) | st.sampled_from(
    [2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 1e308, float("inf"), float("-inf"), float("nan"), 10**17, -1e300]
)
words = st.sampled_from(
    ("", " ", "0", "1", "-1", "1e309", "1e-400", "nan", "0x10", "1_0", "٣", "CLAIMED", "COMPLETED", "RELEASED", "OVER")
) | st.sampled_from(
    ("ACQUIRED", "RECLAIMED", "{", "{}", "[]", "null", "[" * 50_000, '{"over":1e400,"at":0}', '{"M":0}', "\0", "é")
)
words |= st.text(max_size=5)
versions = st.sampled_from(["2", "1", "0", "99999999999999999", "999999999999999999", "1.0", "+1", "1 "])
texts = words | versions | numbers.map(str)
notes = st.fixed_dictionaries(
    {},
    optional={
        "over": numbers | json_like,
        "at": numbers | json_like,
        "successor": st.lists(numbers, max_size=3) | json_like | st.fixed_dictionaries({"generation": numbers}),
        "parked": st.lists(numbers, max_size=3) | json_like,
        "continuing": json_like
        | st.fixed_dictionaries(
            {"token": words | numbers, "fence": numbers, "holder": words | st.none(), "until": numbers | words}
        ),
        "settled": st.booleans() | json_like,
    },
)


def note_text(draw: Draw) -> str:
    """A note as JSON, most of the time one that is nearly right."""
    note = draw(notes)
    if draw(st.booleans()):
        note = {"over": -1, "at": 0, **note}
    return json.dumps(note)


# --- three places ----------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """A store by a clock of ours, and a way past it."""

    store: Store
    clock: ManualClock
    kept: list[str] = field(default_factory=list)

    def empty(self) -> None:
        """Nothing is stored any more."""
        raise NotImplementedError

    def raw(self) -> Any:
        """What is stored under the key, as stored."""
        raise NotImplementedError

    def garble(self, draw: Draw) -> str:
        """Replace something about the record; says what."""
        raise NotImplementedError


@dataclass
class RedisPlace(Place):
    """One hash."""

    client: Any = None

    def empty(self) -> None:
        self.client.flushdb()

    def raw(self) -> Any:
        return self.client.dump(f"celery_idem:{KEY}")

    def garble(self, draw: Draw) -> str:
        name = f"celery_idem:{KEY}"
        what = draw(st.sampled_from([*FIELDS, "m:M", "m:N", "m:M", "other", "type"]))
        if what == "type" or self.client.type(name) not in {b"hash", b"none"}:
            self.client.delete(name)
            self.client.rpush(name, "a list") if draw(st.booleans()) else self.client.set(name, "text")
        elif what == "other":
            self.client.hset(name, draw(st.binary(min_size=1, max_size=4)), draw(st.binary(max_size=4)))
        elif draw(st.integers(0, 3)) == 0:
            self.client.hdel(name, what)
        else:
            text = note_text(draw) if what[:2] == "m:" and draw(st.booleans()) else draw(texts | st.binary(max_size=4))
            self.client.hset(name, what, text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        return what


@dataclass
class SQLitePlace(Place):
    """One row, whose columns take a value of any type."""

    line: Any = None

    def empty(self) -> None:
        self.line.execute("DELETE FROM celery_idem_record")

    def raw(self) -> Any:
        return self.line.execute("SELECT * FROM celery_idem_record").fetchall()

    def garble(self, draw: Draw) -> str:
        what = draw(st.sampled_from(["notes", *(name for name in COLUMNS if name != "key")]))
        value: Any = draw(texts | numbers | st.binary(max_size=4) | st.none())
        if what == "notes" and draw(st.integers(0, 3)):
            value = f'{{"M":{note_text(draw)},"N":{note_text(draw)}}}'
        try:
            # As a database's own tools would: every change of a row that readers guard against moves its rev.
            self.line.execute(
                f"UPDATE celery_idem_record SET rev = rev + 1, {what} = ?"
                if what != "rev"
                else "UPDATE celery_idem_record SET rev = ?",
                (value,),
            )
        except (sqlite3.Error, OverflowError, UnicodeEncodeError):
            return "refused"
        return what


@dataclass
class MemoryPlace(Place):
    """One frozen record, whose fields keep their types."""

    @property
    def _records(self) -> dict[str, Record]:
        return self.store._records  # type: ignore[attr-defined,no-any-return]

    def empty(self) -> None:
        self._records.clear()

    def raw(self) -> Any:
        return repr(self._records.get(KEY))

    def garble(self, draw: Draw) -> str:
        record = self._records.get(KEY)
        if record is None:
            return "refused"
        what = draw(st.sampled_from(["outcome", "notes", "fence", "generation", "attempts", "record_version", "times"]))
        whole, real = st.integers(-2, 2**63), st.floats(allow_nan=False)
        if what == "outcome":
            encoded = record.outcome.encoded if record.outcome else None
            if encoded is not None:
                name = draw(st.sampled_from(["body", "content_type", "content_encoding", "checksum"]))
                value = draw(st.binary(max_size=4)) if name == "body" else draw(st.text(max_size=3))
                encoded = replace(encoded, **{name: value})
            self._records[KEY] = replace(record, outcome=Outcome(draw(st.sampled_from(Kind)), encoded))
        elif what == "notes":
            right = Right(draw(words), draw(whole), draw(words), draw(real)) if draw(st.booleans()) else None
            note = Note(draw(whole), (draw(whole), draw(real)), (draw(whole), draw(whole)), right, draw(st.booleans()))
            self._records[KEY] = replace(record, notes={**record.notes, draw(st.sampled_from("MN")): note})
        elif what == "times":
            name = draw(st.sampled_from(["claimed_at", "lease_expires_at", "expires_at", "completed_at"]))
            self._records[KEY] = replace(record, **{name: draw(real)})
        else:
            self._records[KEY] = replace(record, **{what: draw(whole)})
        return what


@contextmanager
def on_redis(redis_url: Callable[[], str]) -> Iterator[Place]:
    """A place on a Redis server."""
    url, clock = redis_url(), ManualClock()
    with redis.Redis.from_url(url) as client, contextlib.closing(open_store(url, clock=clock)) as store:
        yield RedisPlace(store, clock, client=client)


@contextmanager
def on_sqlite(_: Callable[[], str]) -> Iterator[Place]:
    """A place in a file."""
    clock = ManualClock()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.db"
        with contextlib.closing(open_store(f"sqlite:///{file}", clock=clock)) as store:
            store.create_schema()
            with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as line:
                line.execute("PRAGMA synchronous = OFF")
                yield SQLitePlace(store, clock, line=line)


@contextmanager
def in_memory(_: Callable[[], str]) -> Iterator[Place]:
    """A place in this process."""
    clock = ManualClock()
    yield MemoryPlace(open_store("memory://", clock=clock), clock)


# --- what happens to a record ---------------------------------------------------------------------------------------


def _operation(draw: Draw) -> Any:
    message, generation = draw(st.sampled_from("MN")), draw(st.integers(0, 2))
    mark = draw(st.sampled_from(["", fingerprint("one"), fingerprint("other")]))
    return op("k", message, generation, continues=draw(st.booleans()), fingerprint=mark)


def _outcome(draw: Draw, place: Place) -> Outcome:
    if draw(st.integers(0, 4)) == 0:
        return Outcome(draw(st.sampled_from([Kind.IGNORED, Kind.REPLACED])))
    encoded = encode_value(draw(json_like), "json", max_bytes=10**6)
    place.kept.append(repr(decode_value(encoded)))
    return Outcome(Kind.RESULT, encoded)


def _step(draw: Draw, place: Place, claims: list[Claim]) -> None:
    """One verb of the store's, whatever comes of it."""
    store, verb = (
        place.store,
        draw(st.sampled_from(["claim", "complete", "release", "renew", "settle", "note", "look"])),
    )
    claim = claims[draw(st.integers(0, len(claims) - 1))] if claims else None
    if verb == "claim" or (claim is None and verb in {"complete", "release", "renew"}):
        decision = store.claim(_operation(draw), lease=LEASE, ttl=TTL, dead_fence=draw(st.none() | st.integers(0, 3)))
        assert decision.answer in Answer
        if decision.claim is not None:
            claims.append(decision.claim)
        if decision.answer is Answer.COMPLETED:
            _replayed(decision.record, place)
    elif verb == "complete":
        store.complete(claim, _outcome(draw, place))
    elif verb == "release":
        reason = draw(st.sampled_from(Release))
        after = Successor(draw(st.integers(1, 3)), draw(st.floats(0, 100))) if reason is Release.RETRY else None
        store.release(claim, reason, successor=after)
    elif verb == "renew":
        store.renew([claim])
    elif verb == "settle":
        store.settle(KEY, draw(st.sampled_from("MN")))
    elif verb == "note":
        store.note_parked(KEY, draw(st.sampled_from("MN")), draw(st.integers(0, 2)), draw(st.integers(0, 9)))
    elif draw(st.booleans()):
        _replayed(store.get(KEY), place)
    else:
        for record in store.find(limit=10):
            _replayed(record, place)
    if draw(st.integers(0, 3)) == 0:
        place.clock.advance(draw(st.sampled_from([1.0, 61.0, 4000.0])))


def _replayed(record: Record | None, place: Place) -> None:
    """What a replay of this record would hand on must be what was stored, or refused."""
    encoded = record.outcome.encoded if record is not None and record.outcome is not None else None
    if encoded is None:
        return
    with contextlib.suppress(Undecodable):
        decode_exception(encoded)
    try:
        value = decode_value(encoded)
    except Undecodable:
        return
    assert repr(value) in place.kept, f"{value!r} was never stored"


def play(draw: Draw, place: Place) -> str:
    """A record lives, is garbled, and lives on; then an operator frees its key."""
    place.empty()
    place.clock.set(START)  # the same garbage must mean the same when hypothesis comes back to it
    place.kept.clear()
    claims: list[Claim] = []
    for _ in range(draw(st.integers(1, 4))):
        _step(draw, place, claims)
    for _ in range(draw(st.integers(1, 2))):
        place.garble(draw)
    refused = 0
    for _ in range(draw(st.integers(1, 3))):
        before = place.raw()
        try:
            _step(draw, place, claims)
        except RecordCorrupt as refusal:
            worded(refusal)
            assert place.raw() == before, "what cannot be read was written to"
            refused += 1
    return f"{'refused' if refused else 'read'}, {_freed(place)}"


def _freed(place: Place) -> str:
    """The key can be used again once an operator has forgotten it, unless a newer release wrote the record."""
    fresh = op("k", "P")
    record = None
    try:
        record = place.store.get(KEY)
    except RecordCorrupt:
        if not place.store.forget(KEY, None):
            assert place.store.claim(fresh, lease=LEASE, ttl=TTL).answer is Answer.NEWER
            return "newer"
    else:
        if record is not None and record.record_version > 1:
            return "newer"
        if record is not None and not place.store.forget(KEY, record.fence):
            return "not forgotten"
    decision = place.store.claim(fresh, lease=LEASE, ttl=TTL)
    if decision.answer is Answer.NEWER:  # expired, and left for whoever can read it
        assert record is None
        return "newer"
    assert decision.answer is Answer.ACQUIRED, decision
    assert place.store.get(KEY).state is State.CLAIMED  # type: ignore[union-attr]
    return "freed"


PROMISE = "RecordCorrupt and nothing written, or a consistent answer; a value is the stored one; the key can be freed"
TARGETS = [
    Target("records: redis", PROMISE, play, on_redis, redis=True),
    Target("records: sqlite", PROMISE, play, on_sqlite),
    Target("records: memory", PROMISE, play, in_memory),
]
