"""What only Redis can get wrong: commands per verb, the script cache, expiry of keys, hashes nobody can read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_idem.core.records import (
    DAY,
    Answer,
    Claim,
    Ended,
    Kind,
    Outcome,
    Release,
    Renewal,
    State,
    Successor,
)
from celery_idem.errors import RecordCorrupt
from celery_idem.stores.redis.store import RedisStore
from tests.support.operations import key_for, op, result
from tests.support.services import RedisServer

pytestmark = pytest.mark.redis

PREFIX = "celery_idem:"
LEASE, TTL = 30.0, 100.0


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, socket_timeout=5) as client:
        yield client


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    store = RedisStore(redis_url)
    yield store
    store.close()


def take(store: RedisStore, *args: Any, **named: Any) -> Claim:
    claim = store.claim(op(*args, **named), lease=LEASE, ttl=TTL).claim
    assert claim is not None
    return claim


class Monitor:
    """The commands clients send to one database while it is open; what scripts run inside the server does not count."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, socket_timeout=5)
        self._database = url.rpartition("/")[2]

    def of(self, action: Callable[[], Any]) -> list[str]:
        """The names of the commands that ``action`` sends, in order."""
        names: list[str] = []
        with self._client.monitor() as monitor:
            action()
            self._client.echo("that was all")
            for said in monitor.listen():
                if said["client_type"] == "lua" or str(said["db"]) != self._database:
                    continue
                name = said["command"].split()[0].upper()
                if name == "ECHO":
                    return names
                if name not in {"SELECT", "AUTH", "CLIENT", "HELLO"}:
                    names.append(name)
        raise AssertionError("the monitor ended early")

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def monitor(redis_url: str) -> Iterator[Monitor]:
    monitor = Monitor(redis_url)
    yield monitor
    monitor.close()


# -- cost --------------------------------------------------------------------------------------------------------------


def warm(store: RedisStore) -> None:
    """Load every script and open the connection."""
    claim = take(store, "warm", continues=True)
    store.renew([claim])
    store.complete(claim, result())
    store.settle(claim.key, "M")
    store.note_parked(claim.key, "M", 0, 1)
    store.release(claim, Release.ENDED)
    store.forget(claim.key, claim.fence)


def test_a_first_run_is_two_commands_and_a_replay_one(store: RedisStore, monitor: Monitor) -> None:
    warm(store)
    assert monitor.of(lambda: store.complete(take(store), result())) == ["EVALSHA"] * 2
    replayed: list[Answer] = []
    sent = monitor.of(lambda: replayed.append(store.claim(op(), lease=LEASE, ttl=TTL).answer))
    assert (sent, replayed) == (["EVALSHA"], [Answer.COMPLETED])


def test_every_other_verb_is_one_command(store: RedisStore, monitor: Monitor) -> None:
    warm(store)
    claim = take(store, continues=True)
    assert monitor.of(lambda: store.release(claim, Release.ENDED)) == ["EVALSHA"]
    claim = take(store, message="N", continues=True)
    store.complete(claim, result())
    assert monitor.of(lambda: store.settle(claim.key, "N")) == ["EVALSHA"]
    assert monitor.of(lambda: store.note_parked(claim.key, "N", 0, 1)) == ["EVALSHA"]
    assert monitor.of(lambda: store.forget(claim.key, claim.fence)) == ["EVALSHA"]
    assert monitor.of(lambda: store.purge(100)) == []
    assert monitor.of(lambda: store.renew([])) == []


def test_many_leases_are_renewed_in_one_round_trip(store: RedisStore, monitor: Monitor) -> None:
    warm(store)
    claims = [take(store, f"order:{n}") for n in range(20)]
    sends: list[int] = []
    lender = store.wire._lender()  # type: ignore[attr-defined]
    lent = lender.take()
    connection = lent.connection
    real = connection.send_packed_command

    def counted(command: Any, *args: Any, **named: Any) -> Any:
        sends.append(1)
        return real(command, *args, **named)

    connection.send_packed_command = counted
    lender.give(lent)
    answers: dict[str, Renewal] = {}
    assert monitor.of(lambda: answers.update(store.renew(claims))) == ["EVALSHA"] * 20
    assert answers == {claim.token: Renewal.RENEWED for claim in claims}
    assert len(sends) == 1


# -- the script cache --------------------------------------------------------------------------------------------------


def test_a_script_the_server_forgot_is_sent_again(private_redis: RedisServer) -> None:
    store = RedisStore(private_redis.url)
    claim = take(store)
    with redis.Redis.from_url(private_redis.url) as client:

        def calls() -> tuple[int, int]:
            counted = client.info("commandstats")
            return counted["cmdstat_evalsha"]["calls"], counted["cmdstat_eval"]["calls"]

        client.script_flush()
        at_first = calls()
        store.complete(claim, result())
        assert calls() == (at_first[0] + 1, at_first[1] + 1)
        store.complete(claim, result())
        assert calls() == (at_first[0] + 2, at_first[1] + 1)
    store.close()


def test_a_batch_of_renewals_survives_a_script_flush(store: RedisStore, client: redis.Redis) -> None:
    claims = [take(store, f"order:{n}") for n in range(3)]
    store.renew(claims)
    client.script_flush()
    assert store.renew(claims) == {claim.token: Renewal.RENEWED for claim in claims}


# -- expiry ------------------------------------------------------------------------------------------------------------


def expiry(client: redis.Redis, key: str) -> tuple[float, float]:
    """Seconds the key has left, and seconds its own field says; they are one thing."""
    seconds, microseconds = client.time()
    field = float(client.hget(PREFIX + key, "expires") or 0)  # type: ignore[arg-type]
    return client.pttl(PREFIX + key) / 1000, field - seconds - microseconds / 1e6


def about(seconds: float) -> Any:
    return pytest.approx((seconds, seconds), abs=1.0)


def test_the_key_expires_when_its_record_does(store: RedisStore, client: redis.Redis) -> None:
    claim = take(store, continues=True)
    assert expiry(client, claim.key) == about(LEASE + TTL)
    client.hset(PREFIX + claim.key, "expires", str(float(client.hget(PREFIX + claim.key, "expires") or 0) - 50))
    client.pexpire(PREFIX + claim.key, 80_000)
    store.renew([claim])
    assert expiry(client, claim.key) == about(LEASE + TTL)
    store.complete(claim, result())
    assert expiry(client, claim.key) == about(TTL)
    right = store.claim(op(message="N", continues=True), lease=TTL + 500, ttl=TTL)
    assert right.claim is not None
    assert expiry(client, claim.key) == about(TTL + 500)
    store.settle(claim.key, "N")
    store.note_parked(claim.key, "N", 0, 1)
    assert expiry(client, claim.key) == about(TTL + 500)
    assert store.forget(claim.key, claim.fence)
    assert expiry(client, claim.key) == about(DAY)


def test_a_tombstone_and_a_ttl_of_zero_keep_a_day(store: RedisStore, client: redis.Redis) -> None:
    claim = take(store)
    store.release(claim, Release.YIELDED)
    assert expiry(client, claim.key) == about(DAY)
    claim = store.claim(op("b"), lease=LEASE, ttl=0).claim
    assert claim is not None
    assert expiry(client, claim.key) == about(LEASE + DAY)
    store.complete(claim, Outcome(Kind.RESULT))
    assert expiry(client, claim.key) == about(DAY)


def test_an_expired_record_is_gone_by_itself(store: RedisStore, client: redis.Redis) -> None:
    claim = store.claim(op(), lease=0.05, ttl=0.05).claim
    assert claim is not None
    time.sleep(0.12)
    assert store.get(claim.key) is None
    assert client.dbsize() == 0
    again = store.claim(op(), lease=LEASE, ttl=TTL)
    assert again.answer is Answer.ACQUIRED
    assert again.claim is not None
    assert again.claim.fence > claim.fence


# -- what cannot be read -----------------------------------------------------------------------------------------------

EVERY_FIELD = [
    *("v", "state", "token", "fence", "message", "generation", "attempts", "answer", "unknown", "task", "namespace"),
    *("scope", "fingerprint", "holder", "claimed", "lease_end", "expires", "kind"),
]
GARBAGE = [
    *(("v", "x"), ("v", "1.5"), ("state", "DONE"), ("fence", "abc"), ("fence", "0x10"), ("fence", "1e3")),
    *(("generation", ""), ("attempts", "many"), ("answer", "HELD"), ("unknown", "yes"), ("claimed", "nan")),
    *(("lease_end", "inf"), ("expires", "soon"), ("expires", "--"), ("completed", "x"), ("kind", "NEITHER")),
    *(("v", "9" * 5000), ("fence", "9" * 40), ("expires", "9" * 400), ("m:M", "[" * 5000)),
    *(("m:M", "{"), ("m:M", "[]"), ("m:M", "null"), ("m:M", '"over"'), ("m:M", '{"over":"1","at":1}')),
    *(("m:M", '{"over":1}'), ("m:M", '{"over":1,"at":1,"settled":3}'), ("m:M", '{"over":1,"at":1,"parked":[1]}')),
    *(("m:M", '{"over":1,"at":1,"successor":7}'), ("m:M", '{"over":1,"at":1,"parked":[1,1.5]}')),
    *(("m:M", '{"over":1,"at":1,"continuing":{"token":"t"}}'), ("m:M", '{"over":1,"at":NaN}'), ("m:M", "\x00\xff")),
]


def completed(store: RedisStore) -> Claim:
    claim = take(store, generation=1)
    assert store.complete(claim, result()) is Ended.COMPLETED
    return claim


def assert_unreadable(store: RedisStore, client: redis.Redis, claim: Claim) -> None:
    """Every verb says so and touches nothing; only ``forget(key, None)`` removes it."""
    before = client.dump(PREFIX + claim.key)
    verbs: list[Callable[[], Any]] = [
        lambda: store.claim(op(), lease=LEASE, ttl=TTL),
        lambda: store.complete(claim, result()),
        lambda: store.release(claim, Release.RETRY, successor=Successor(2, 1)),
        lambda: store.settle(claim.key, "M"),
        lambda: store.note_parked(claim.key, "M", 0, 3),
        lambda: store.get(claim.key),
        lambda: store.forget(claim.key, claim.fence),
        lambda: list(store.find()),
    ]
    for verb in verbs:
        with pytest.raises(RecordCorrupt, match=f"celery idem forget {claim.key}"):
            verb()
    assert store.renew([claim]) == {claim.token: Renewal.BUSY}
    assert client.dump(PREFIX + claim.key) == before
    assert store.forget(claim.key, None) is True
    assert not client.exists(PREFIX + claim.key)
    assert store.claim(op(), lease=LEASE, ttl=TTL).answer is Answer.ACQUIRED


@pytest.mark.parametrize("field", EVERY_FIELD)
def test_a_record_without_a_field_is_unreadable(store: RedisStore, client: redis.Redis, field: str) -> None:
    claim = completed(store)
    client.hdel(PREFIX + claim.key, field)
    assert_unreadable(store, client, claim)


@pytest.mark.parametrize(("field", "value"), GARBAGE, ids=lambda value: value[:20].encode("unicode_escape").decode())
def test_garbage_in_a_field_is_unreadable(store: RedisStore, client: redis.Redis, field: str, value: str) -> None:
    claim = completed(store)
    client.hset(PREFIX + claim.key, field, value.encode("latin-1"))
    assert_unreadable(store, client, claim)


@pytest.mark.parametrize("kind", ["string", "list", "hash of something else"])
def test_a_key_of_another_kind_is_unreadable(store: RedisStore, client: redis.Redis, kind: str) -> None:
    claim = completed(store)
    client.delete(PREFIX + claim.key)
    if kind == "string":
        client.set(PREFIX + claim.key, "x")
    elif kind == "list":
        client.rpush(PREFIX + claim.key, "x")
    else:
        client.hset(PREFIX + claim.key, "other", "x")
    assert_unreadable(store, client, claim)


@pytest.mark.parametrize("field", ["task", "namespace", "scope", "holder", "token", "message", "body", "type", "x"])
def test_odd_text_is_no_corruption(store: RedisStore, client: redis.Redis, field: str) -> None:
    """Names are only shown and a bad body is the codec's business: the record still proves completion."""
    claim = completed(store)
    client.hset(PREFIX + claim.key, field, b"\xff\x00\xfe")
    assert store.claim(op(message="N"), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED
    assert store.get(claim.key) is not None
    assert store.forget(claim.key, None) is False


def test_another_messages_bad_note_bars_only_whoever_reads_the_whole_record(
    store: RedisStore, client: redis.Redis
) -> None:
    claim = completed(store)
    client.hset(PREFIX + claim.key, "m:other", "garbage")
    assert store.claim(op(generation=2), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED
    with pytest.raises(RecordCorrupt):
        store.get(claim.key)
    assert store.forget(claim.key, None) is True


def test_one_unreadable_record_spoils_no_other_renewal(store: RedisStore, client: redis.Redis) -> None:
    claims = [take(store, f"order:{n}") for n in range(4)]
    client.hset(PREFIX + claims[1].key, "state", "garbage")
    client.set(PREFIX + claims[2].key, "no hash")
    answers = store.renew(claims)
    wanted = [Renewal.RENEWED, Renewal.BUSY, Renewal.BUSY, Renewal.RENEWED]
    assert [answers[claim.token] for claim in claims] == wanted


def test_a_newer_record_with_fields_nobody_knows_here_is_left_alone(store: RedisStore, client: redis.Redis) -> None:
    claim = completed(store)
    client.delete(PREFIX + claim.key)
    client.hset(PREFIX + claim.key, mapping={"v": "2", "all": "different"})
    decision = store.claim(op(), lease=LEASE, ttl=TTL)
    assert (decision.answer, decision.record, decision.claim) == (Answer.NEWER, None, None)
    assert store.complete(claim, result()) is Ended.LOST
    assert store.release(claim, Release.ENDED) is Ended.LOST
    assert store.renew([claim]) == {claim.token: Renewal.LOST}
    store.settle(claim.key, "M")
    store.note_parked(claim.key, "M", 0, 1)
    assert store.forget(claim.key, claim.fence) is False
    assert store.forget(claim.key, None) is False
    with pytest.raises(RecordCorrupt, match="newer release"):
        store.get(claim.key)
    assert client.hgetall(PREFIX + claim.key) == {b"v": b"2", b"all": b"different"}


# -- find and threads --------------------------------------------------------------------------------------------------


def test_find_pages_through_more_keys_than_one_scan_step(redis_url: str, client: redis.Redis) -> None:
    store = RedisStore(redis_url, prefix="a*[b]:")
    client.hset("a_b:" + "1" * 64, "v", "1")  # what an unescaped pattern would match
    client.hset("axxb:" + "2" * 64, "v", "1")
    for number in range(450):
        take(store, f"order:{number}", task="even" if number % 2 == 0 else "odd")
    assert len({record.key for record in store.find()}) == 450
    assert len(list(store.find(task="odd", state=State.CLAIMED, limit=1000))) == 225
    assert len(list(store.find(limit=10))) == 10
    assert list(store.find(limit=0)) == []
    assert list(store.find(older_than=60)) == []
    store.close()


def test_fifty_threads_want_one_key_and_one_gets_it(store: RedisStore) -> None:
    answers: list[Answer] = []
    start = threading.Barrier(50)

    def run() -> None:
        start.wait()
        answers.append(store.claim(op(), lease=LEASE, ttl=TTL).answer)

    threads = [threading.Thread(target=run) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted([Answer.ACQUIRED] + [Answer.HELD] * 49)


def test_a_bounded_pool_makes_threads_wait_their_turn(redis_url: str) -> None:
    store = RedisStore(redis_url, max_connections=2)
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(store.claim(op(f"k{n}"), lease=LEASE, ttl=TTL).answer))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [Answer.ACQUIRED] * 20
    store.close()


def test_the_record_is_readable_by_eye(store: RedisStore, client: redis.Redis) -> None:
    claim = take(store, generation=2, continues=True)
    store.note_parked(claim.key, "M", 2, 1)
    found = client.hgetall(PREFIX + key_for("order:1"))
    assert found[b"state"] == b"CLAIMED"
    assert found[b"fence"] == str(claim.fence).encode()
    assert found[b"m:M"].startswith(b'{"over":1,"parked":[2,1],"at":')


def test_an_answer_says_whether_it_hides_notes_of_other_messages(store: RedisStore) -> None:
    store.complete(take(store), result())
    alone = store.claim(op(message="N"), lease=LEASE, ttl=TTL).record
    store.note_parked(key_for("order:1"), "M", 0, 1)
    beside = store.claim(op(message="N"), lease=LEASE, ttl=TTL).record
    assert alone is not None
    assert beside is not None
    assert (alone.others, beside.others) == (False, True)
