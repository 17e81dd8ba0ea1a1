"""Records in Redis: every verb is one script on one key, judged by the server's clock.

The decisions are made in lua/*.lua, where nobody can come between reading and writing; this module spells their
arguments and reads their answers. Connections, repeats and driver errors are the wire's business, the hash's
layout that of rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery_idem.core.decide import kept as seconds_kept
from celery_idem.core.records import (
    Answer,
    Claim,
    Decision,
    Ended,
    Note,
    Operation,
    Outcome,
    Record,
    Release,
    Renewal,
    State,
    Successor,
)
from celery_idem.core.values import replace
from celery_idem.errors import ConfigurationError, RecordCorrupt
from celery_idem.stores.redis.checks import check_store, shares_memory
from celery_idem.stores.redis.connection import wire_for
from celery_idem.stores.redis.rows import (
    FIELDS,
    Unreadable,
    by_name,
    is_newer,
    note_of,
    pairs_of,
    record_of,
    whole_record,
)
from celery_idem.stores.redis.scripts import script
from celery_idem.stores.redis.wire import Refusal

if TYPE_CHECKING:
    import redis

PAGE = 200  # keys of one SCAN step, and of the pipelined reads that follow it
_NO_VALUE = ("0", b"", "", "", "")


class RedisStore:
    """Records in Redis 5 or newer, one hash per key under ``prefix``.

    Args:
        url: as Celery writes it (``redis://``, ``rediss://``, ``redis+socket://``, ``sentinel://…;sentinel://…``),
            or a client, whose connection settings are taken over; connections are the store's own.
        timeout: seconds no verb outlives.
        prefix: what every key begins with.
        clock: seconds since 1970, for tests; None reads the server's clock.
        client_options: for redis-py's connections; ``master_name`` and ``sentinel_kwargs`` for Sentinel.
    """

    name = "redis"

    def __init__(
        self,
        url: str | redis.Redis,
        *,
        timeout: float = 5.0,
        prefix: str = "celery_idem:",
        clock: Callable[[], float] | None = None,
        **client_options: Any,
    ) -> None:
        self.wire = wire_for(url, timeout=timeout, options=client_options)
        self._prefix = prefix
        self._clock = clock

    def claim(self, operation: Operation, *, lease: float, ttl: float, dead_fence: int | None = None) -> Decision:
        """See ``Store.claim``."""
        fourth = "" if dead_fence is None else dead_fence
        args = self._operation(operation, lease, ttl, fourth)
        reply = self._run("claim", operation.key, args)
        answer, now, how = Answer(reply[0].decode()), float(reply[1]), reply[2]
        if how == b"TAKEN":
            return _taken(operation, answer, now, lease, ttl, reply[3:])
        record = self._answered(operation, answer, reply[3])
        if record is not None and reply[4] == b"1":
            record = replace(record, others=True)
        claim = None
        if how == b"OWN" and record is not None:
            claim = Claim(operation, record.fence, record.answer, record.attempts, lease, ttl, unknown=record.unknown)
        elif how == b"RIGHT" and record is not None:
            right = record.note(operation.delivery.message_id).continuing
            fence = 0 if right is None else right.fence
            claim = Claim(operation, fence, Answer.COMPLETED, record.attempts, lease, ttl, right=True)
        return Decision(answer, claim, record, now)

    def complete(self, claim: Claim, outcome: Outcome, *, connection: Any = None) -> Ended:
        """See ``Store.complete``."""
        if connection is not None:
            raise ConfigurationError("complete(connection=) needs a SQL store; this one is redis://")
        kept, value = outcome.encoded, _NO_VALUE
        if kept is not None:
            value = ("1", kept.body, kept.content_type, kept.content_encoding, kept.checksum)
        reply = self._run("complete", claim.key, (*self._claim(claim), outcome.kind.value, *value))
        return Ended(reply.decode())

    def release(self, claim: Claim, reason: Release, *, successor: Successor | None = None) -> Ended:
        """See ``Store.release``."""
        delivery = claim.operation.delivery
        after = ("", "") if successor is None else (successor.generation, successor.delay)
        args = (
            *(self._now(), claim.token, delivery.message_id, delivery.generation),
            *(claim.ttl, reason.value, *after),
        )
        return Ended(self._run("release", claim.key, args).decode())

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, Renewal]:
        """See ``Store.renew``; BUSY also for a record that cannot be read or written now, which is no loss either."""
        if not claims:
            return {}
        calls = [(self._prefix + claim.key, (*self._claim(claim), "1" if claim.right else "0")) for claim in claims]
        replies = self.wire.run_many(script("renew"), calls)
        refused = [reply for reply in replies if isinstance(reply, Refusal)]
        if len(refused) == len(replies):
            raise refused[0].error
        return {
            claim.token: Renewal(reply.decode()) if isinstance(reply, bytes) else Renewal.BUSY
            for claim, reply in zip(claims, replies, strict=True)
        }

    def settle(self, key: str, message_id: str) -> None:
        """See ``Store.settle``."""
        self._run("settle", key, (self._now(), message_id))

    def note_parked(self, key: str, message_id: str, generation: int, count: int) -> None:
        """See ``Store.note_parked``."""
        self._run("note_parked", key, (self._now(), message_id, generation, count))

    def get(self, key: str) -> Record | None:
        """See ``Store.get``."""
        reply, now = self._read_with_time([("HGETALL", self._prefix + key)])
        if isinstance(reply[0], Refusal):
            raise self._corrupt(key, "type") if reply[0].wrong_type else reply[0].error
        record = self._whole(key, pairs_of(reply[0]))
        return None if record is None or record.expires_at <= now else record

    def find(
        self,
        *,
        task: str | None = None,
        scope: str | None = None,
        state: State | None = None,
        older_than: float | None = None,
        limit: int = 1000,
    ) -> Iterator[Record]:
        """See ``Store.find``."""
        _, now = self._read_with_time([])
        found: set[str] = set()
        unreadable: list[RecordCorrupt] = []
        for names in self.wire.scan(_literally(self._prefix) + "*", PAGE):
            keys = [name[len(self._prefix.encode()) :].decode(errors="replace") for name in names]
            for record in self._page([key for key in keys if key not in found], task, scope, state, unreadable):
                old = older_than is None or record.claimed_at <= now - older_than
                if record.expires_at <= now or not old or record.key in found:
                    continue
                if len(found) >= limit:
                    return
                found.add(record.key)
                yield record
        if unreadable:
            raise unreadable[0]

    def forget(self, key: str, fence: int | None) -> bool:
        """See ``Store.forget``."""
        return bool(self._run("forget", key, (self._now(), "" if fence is None else fence)))

    def purge(self, limit: int) -> int:  # noqa: ARG002 - the protocol's argument
        """Nothing to do: Redis drops expired records itself."""
        return 0

    def check(self) -> list[str]:
        """See ``Store.check``."""
        return check_store(self.wire, self._prefix)

    def shares_memory_with(self, broker_url: str) -> str | None:
        """A warning where the broker is this very Redis; None where it is another, or does not answer."""
        return shares_memory(self.wire, broker_url)

    def create_schema(self) -> None:
        """See ``Store.create_schema``: nothing to make."""

    def close(self) -> None:
        """See ``Store.close``."""
        self.wire.close()

    def _now(self) -> float | str:
        return "" if self._clock is None else self._clock()

    def _operation(self, operation: Operation, lease: float, ttl: float, fence: int | str) -> tuple[Any, ...]:
        delivery = operation.delivery
        return (
            *(self._now(), operation.token, delivery.message_id, delivery.generation),
            *("1" if delivery.continues else "0", lease, ttl, fence, operation.holder, operation.task),
            *(operation.namespace, operation.scope, operation.fingerprint),
        )

    def _claim(self, claim: Claim) -> tuple[Any, ...]:
        operation = self._operation(claim.operation, claim.lease, claim.ttl, claim.fence)
        return (*operation, claim.answer.value, claim.attempts, "1" if claim.unknown else "0")

    def _run(self, verb: str, key: str, args: Sequence[Any]) -> Any:
        reply = self.wire.run(script(verb), self._prefix + key, args)
        if isinstance(reply, list) and reply[0] == b"CORRUPT":
            raise self._corrupt(key, reply[1].decode(errors="replace"))
        return reply

    def _answered(self, operation: Operation, answer: Answer, values: Sequence[bytes | None]) -> Record | None:
        """The record an answer carries, with the caller's own note; a newer release's where it can be read."""
        message_id, note = operation.delivery.message_id, values[len(FIELDS)]
        try:
            notes: dict[str, Note] = {} if note is None else {message_id: note_of(message_id, note)}
            return record_of(operation.key, by_name(values), notes)
        except Unreadable as error:
            if answer is Answer.NEWER:
                return None
            raise self._corrupt(operation.key, str(error)) from error

    def _whole(self, key: str, pairs: Mapping[bytes, bytes]) -> Record | None:
        if not pairs:
            return None
        try:
            return whole_record(key, pairs)
        except Unreadable as error:
            raise self._corrupt(key, str(error), newer=is_newer(pairs.get(b"v"))) from error

    def _page(
        self,
        keys: Sequence[str],
        task: str | None,
        scope: str | None,
        state: State | None,
        unreadable: list[RecordCorrupt],
    ) -> list[Record]:
        wanted = {"task": task, "scope": scope, "state": None if state is None else state.value}
        asked = {name: value.encode() for name, value in wanted.items() if value is not None}
        if asked and keys:
            heads = self.wire.commands([("HMGET", self._prefix + key, *asked) for key in keys])
            right = list(asked.values())
            keys = [key for key, head in zip(keys, heads, strict=True) if head == right]
        records = []
        replies = self.wire.commands([("HGETALL", self._prefix + key) for key in keys]) if keys else []
        for key, reply in zip(keys, replies, strict=True):
            if isinstance(reply, Refusal):
                if reply.wrong_type:
                    unreadable.append(self._corrupt(key, "type"))
                    continue
                raise reply.error
            try:
                record = self._whole(key, pairs_of(reply))
            except RecordCorrupt as error:
                unreadable.append(error)
                continue
            if record is not None:
                records.append(record)
        return records

    def _read_with_time(self, commands: Sequence[tuple[Any, ...]]) -> tuple[list[Any], float]:
        if self._clock is not None:
            return (self.wire.commands(commands) if commands else []), self._clock()
        *replies, now = self.wire.commands([*commands, ("TIME",)])
        if isinstance(now, Refusal):
            raise now.error
        return replies, (int(now[0]) * 1_000_000 + int(now[1])) / 1_000_000

    def _corrupt(self, key: str, field: str, *, newer: bool = False) -> RecordCorrupt:
        then = f"look at it, then run `celery idem forget {key}`"
        if newer:
            then = "a newer release wrote it: upgrade this one"
        return RecordCorrupt(f"record {key} in redis cannot be read ({field}): {then}", key=key, field=field)


def _taken(
    operation: Operation, answer: Answer, now: float, lease: float, ttl: float, facts: Sequence[Any]
) -> Decision:
    """The decision of a fresh claim: everything but four facts is what the caller sent."""
    fence, attempts, unknown = int(facts[0]), int(facts[1]), facts[2] == b"1"
    message_id = operation.delivery.message_id
    notes = {} if facts[3] is None else {message_id: note_of(message_id, facts[3])}
    record = Record(
        key=operation.key,
        state=State.CLAIMED,
        token=operation.token,
        fence=fence,
        message_id=message_id,
        generation=operation.delivery.generation,
        attempts=attempts,
        answer=answer,
        unknown=unknown,
        task=operation.task,
        namespace=operation.namespace,
        scope=operation.scope,
        fingerprint=operation.fingerprint,
        holder=operation.holder,
        claimed_at=now,
        lease_expires_at=now + lease,
        expires_at=now + lease + seconds_kept(ttl),
        notes=notes,
    )
    return Decision(answer, Claim(operation, fence, answer, attempts, lease, ttl, unknown=unknown), record, now)


def _literally(prefix: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in prefix)
