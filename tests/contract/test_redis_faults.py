"""A Redis that stops, restarts, refuses or forks: what is raised, how fast, and what it says about the write."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cluster import RedisCluster

from celery_idem.core.records import Answer, Claim, Ended, Release, Renewal
from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.stores.redis.store import RedisStore
from tests.support.chaos_proxy import ChaosProxy
from tests.support.operations import answered, op, result
from tests.support.processes import LOOPBACK, Process, free_port, listening, wait_until
from tests.support.services import RedisServer

pytestmark = pytest.mark.redis

LEASE, TTL = 30.0, 100.0
TIMEOUT, HASTY = 5.0, 0.6  # seconds: a store's that is answered, and one's that waits in vain again and again
MARGIN = 5.0  # seconds a machine may add that is loaded, or stands still now and then; no timeout is for ever

Opener = Callable[..., RedisStore]


@pytest.fixture
def opened() -> Iterator[Opener]:
    stores: list[RedisStore] = []

    def open_one(url: Any, **options: Any) -> RedisStore:
        stores.append(RedisStore(url, **{"timeout": TIMEOUT, **options}))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def take(store: RedisStore, *args: Any, **named: Any) -> Claim:
    claim = store.claim(op(*args, **named), lease=LEASE, ttl=TTL).claim
    assert claim is not None
    return claim


def refused(action: Callable[[], Any], *, landed: bool, within: float = TIMEOUT + MARGIN) -> StoreUnavailable:
    start = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        action()
    assert time.monotonic() - start < within
    assert caught.value.may_have_landed is landed, caught.value
    return caught.value


# -- silence and absence -----------------------------------------------------------------------------------------------


def test_a_stopped_server_is_given_up_within_the_timeout(private_redis: RedisServer, opened: Opener) -> None:
    store, fresh = opened(private_redis.url, timeout=HASTY), opened(private_redis.url, timeout=HASTY)
    claim = take(opened(private_redis.url))
    wait_until(lambda: answered(lambda: store.get(claim.key)), 20, "a connection")
    private_redis.pause()
    try:
        for verb in (
            lambda: store.claim(op("b"), lease=LEASE, ttl=TTL),
            lambda: store.renew([claim]),
            lambda: store.get(claim.key),
            lambda: list(store.find()),
        ):
            # The first of them had a connection, and its command is in the server's buffer.
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                verb()
            assert time.monotonic() - start < HASTY + MARGIN
        with contextlib.suppress(StoreUnavailable):
            fresh.claim(op("c"), lease=LEASE, ttl=TTL)
    finally:
        private_redis.resume()
    wait_until(lambda: answered(lambda: store.complete(claim, result())), 20, "an answer")
    assert store.complete(claim, result()) is Ended.COMPLETED


def test_a_command_in_a_stopped_servers_buffer_may_have_landed(private_redis: RedisServer, opened: Opener) -> None:
    store = opened(private_redis.url, timeout=3)
    take(store)
    lost = op("b")
    private_redis.pause()
    refused(lambda: store.claim(lost, lease=LEASE, ttl=TTL), landed=True)
    private_redis.resume()
    wait_until(lambda: store.get(lost.key) is not None, 20, "the claim landed after all")
    again = store.claim(lost, lease=LEASE, ttl=TTL)
    assert (again.answer, again.claim is not None) == (Answer.ACQUIRED, True)


def test_an_absent_server_is_told_at_once(opened: Opener) -> None:
    store = opened(f"redis://user:s3cret@{LOOPBACK}:{free_port()}/0", timeout=30)
    error = refused(lambda: take(store), landed=False)
    assert "s3cret" not in str(error)
    refused(store.check, landed=False)
    refused(lambda: list(store.find()), landed=False)


def test_a_restart_between_the_verbs_is_hardly_noticed(private_redis: RedisServer, opened: Opener) -> None:
    """The claim is gone with the server's memory: completing writes it anew, under its token and fence."""
    store = opened(private_redis.url)
    claim, other = take(store), take(store, "other")
    private_redis.restart()
    assert store.complete(claim, result()) is Ended.COMPLETED
    assert store.renew([other]) == {other.token: Renewal.RENEWED}
    for mine in (claim, other):
        record = store.get(mine.key)
        assert record is not None
        assert (record.token, record.fence) == (mine.token, mine.fence)
    assert store.claim(op(), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED


def test_a_server_that_died_between_the_verbs(private_redis: RedisServer, opened: Opener) -> None:
    store = opened(private_redis.url)
    claim = take(store)
    private_redis.kill()
    refused(lambda: store.complete(claim, result()), landed=False)
    private_redis.start()
    assert store.complete(claim, result()) is Ended.COMPLETED


# -- connections -------------------------------------------------------------------------------------------------------


def test_a_connection_the_server_closed_costs_one_repeat(redis_url: str, opened: Opener) -> None:
    with ChaosProxy.before(redis_url) as proxy:
        store = opened(proxy.url(redis_url))
        claim = take(store)
        proxy.cut()
        assert store.complete(claim, result()) is Ended.COMPLETED


def lose_one_reply(store: RedisStore) -> None:
    """Let the next answer arrive and break the connection instead of handing it on."""
    lender = store.wire._lender()  # type: ignore[attr-defined]
    lent = lender.take()
    connection = lent.connection
    real = connection.read_response

    def lose(*args: Any, **named: Any) -> Any:
        connection.read_response = real
        with contextlib.suppress(redis.ResponseError):
            real(*args, **named)
        connection.disconnect()
        raise redis.ConnectionError("Connection reset by peer")

    connection.read_response = lose
    lender.give(lent)


def test_a_lost_reply_is_asked_for_once_more(redis_url: str, opened: Opener) -> None:
    """The server did the work and the connection broke: the repeat gets the same answer, not HELD."""
    store = opened(redis_url)
    claim = take(store, continues=True)
    lose_one_reply(store)
    assert store.claim(claim.operation, lease=LEASE, ttl=TTL).claim == claim
    lose_one_reply(store)
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    lose_one_reply(store)
    assert store.complete(claim, result()) is Ended.COMPLETED
    lose_one_reply(store)
    store.settle(claim.key, "M")
    lose_one_reply(store)
    store.note_parked(claim.key, "M", 0, 4)
    lose_one_reply(store)
    assert store.forget(claim.key, claim.fence) is True
    lose_one_reply(store)
    again = store.claim(op(message="N"), lease=LEASE, ttl=TTL)
    assert again.answer is Answer.ACQUIRED
    assert again.claim is not None
    lose_one_reply(store)
    assert store.release(again.claim, Release.ENDED) is Ended.RELEASED


def test_a_refusal_after_a_lost_reply_proves_nothing(private_redis: RedisServer, opened: Opener) -> None:
    store = opened(private_redis.url)
    store.complete(take(store, "warm"), result())
    claim = take(store)
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("maxmemory", "1")
        lose_one_reply(store)
        refused(lambda: store.complete(claim, result()), landed=True)
        client.script_flush()
        lose_one_reply(store)
        refused(lambda: store.complete(claim, result()), landed=True)
        refused(lambda: store.complete(claim, result()), landed=False)
        client.config_set("maxmemory", "0")


def test_two_lost_replies_may_have_landed(redis_url: str, opened: Opener) -> None:
    with ChaosProxy.before(redis_url) as proxy:
        store = opened(proxy.url(redis_url))
        take(store, "warm")
        # With a database to select the repeat's connection fails in its handshake; landed is the first attempt's.
        proxy.drop_replies()
        operation = op()
        refused(lambda: store.claim(operation, lease=LEASE, ttl=TTL), landed=True)
        proxy.heal()
        assert store.claim(operation, lease=LEASE, ttl=TTL).answer is Answer.ACQUIRED


def test_an_interrupted_verb_leaves_no_answer_for_the_next_one(private_redis: RedisServer, opened: Opener) -> None:
    """A time limit or a lost lease is raised in the middle of a read; its answer must not become another verb's."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    store = opened(private_redis.url)
    claim = take(store)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        private_redis.pause()
        with pytest.raises(Interrupt):  # noqa: PT012  it may strike before the verb has begun
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            store.complete(claim, result())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        private_redis.resume()
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}
    assert store.claim(op("b"), lease=LEASE, ttl=TTL).answer is Answer.ACQUIRED


def test_a_child_forked_after_first_use_talks_for_itself(redis_url: str, opened: Opener) -> None:
    store = opened(redis_url)
    claim = take(store)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            store.renew([claim])

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for number in range(5):
            child = os.fork()
            if child == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    taken = take(store, f"child:{number}")
                    code = 0 if store.complete(taken, result()) is Ended.COMPLETED else 2
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert store.claim(op(f"child:{number}"), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED
    finally:
        stop.set()
        thread.join()
    assert store.renew([claim]) == {claim.token: Renewal.RENEWED}


def test_a_closed_store_opens_again(redis_url: str, opened: Opener) -> None:
    store = opened(redis_url)
    claim = take(store)
    store.close()
    store.close()
    assert store.complete(claim, result()) is Ended.COMPLETED


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_full_memory_refuses_and_nothing_landed(private_redis: RedisServer, opened: Opener) -> None:
    store = opened(private_redis.url)
    claim = take(store)
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("maxmemory", "1")
        assert "maxmemory" in str(refused(lambda: take(store, "b"), landed=False))
        refused(lambda: store.complete(claim, result()), landed=False)
        refused(lambda: store.renew([claim]), landed=False)
        client.config_set("maxmemory", "0")
    assert store.get(op("b").key) is None
    assert store.complete(claim, result()) is Ended.COMPLETED


def test_a_demoted_primary_refuses_and_its_connection_is_given_up(private_redis: RedisServer, opened: Opener) -> None:
    store = opened(private_redis.url)
    claim = take(store)
    with redis.Redis.from_url(private_redis.url) as client:
        client.replicaof(LOOPBACK, free_port())
        assert "primary" in str(refused(lambda: take(store, "b"), landed=False))
        refused(lambda: store.renew([claim]), landed=False)
        assert any("replica" in warning for warning in store.check())
        client.replicaof("NO", "ONE")
    assert store.complete(claim, result()) is Ended.COMPLETED


def test_a_primary_cut_off_from_its_replicas_is_left_for_the_new_one(
    private_redis: RedisServer, opened: Opener
) -> None:
    with RedisServer() as new, ChaosProxy.before(private_redis.url) as proxy:
        store = opened(proxy.url(private_redis.url))
        take(store)
        with redis.Redis.from_url(private_redis.url) as client:
            client.config_set("min-replicas-to-write", "1")
        proxy._upstream_port = new.port  # its name leads there from now on, and what is open stays where it is
        assert "replicas" in str(refused(lambda: take(store, "b"), landed=False))
        assert take(store, "b")


def test_wrong_credentials_are_told_without_them(private_redis: RedisServer, opened: Opener) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "r1ght")
        client.auth("r1ght")
        for url in (private_redis.url, private_redis.url.replace("//", "//:wr0ng@")):
            store = opened(url)
            error = refused(lambda store=store: take(store), landed=False)
            assert "password" in str(error)
            assert "wr0ng" not in str(error)
            with pytest.raises(ConfigurationError, match="password") as caught:
                store.check()
            assert "wr0ng" not in str(caught.value)
        assert take(opened(private_redis.url.replace("//", "//:r1ght@")))
        client.config_set("requirepass", "")


def test_a_database_that_is_not_there_is_told_at_start_and_waited_for_at_run_time(
    private_redis: RedisServer, opened: Opener
) -> None:
    store = opened(f"{private_redis.url.rpartition('/')[0]}/99999")
    with pytest.raises(ConfigurationError, match="no database of this number: name another"):
        store.check()
    assert "no database of this number" in str(refused(lambda: take(store), landed=False))


def test_a_user_who_may_not_run_scripts_is_told_at_start(private_redis: RedisServer, opened: Opener) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "meek", "on", ">pw", "~*", "+@all", "-@scripting", "-config")
        client.execute_command("ACL", "SETUSER", "fit", "on", ">pw", "~celery_idem:*", "+@all", "-config", "-info")
    meek = opened(private_redis.url.replace("//", "//meek:pw@"))
    with pytest.raises(ConfigurationError, match="ACL"):
        meek.check()
    fit = opened(private_redis.url.replace("//", "//fit:pw@"))
    (warning,) = fit.check()
    assert "could not be checked whether redis evicts" in warning
    assert fit.complete(take(fit), result()) is Ended.COMPLETED


def test_a_loading_server_refuses(opened: Opener) -> None:
    slowly = ["--enable-debug-command", "yes", "--key-load-delay", "1000"]
    slowly += ["--loading-process-events-interval-bytes", "20000"]
    with RedisServer(options=slowly) as server:
        store = opened(server.url)
        take(store)
        with redis.Redis.from_url(server.url, socket_timeout=30) as client:
            client.execute_command("DEBUG", "POPULATE", "1500", "key", "2000")
            thread = threading.Thread(target=lambda: client.execute_command("DEBUG", "RELOAD"))
            thread.start()
            seen: set[tuple[object, bool]] = set()
            while thread.is_alive():
                try:
                    store.claim(op("b"), lease=LEASE, ttl=TTL)
                except StoreUnavailable as error:
                    seen.add((error.facts.get("code"), error.may_have_landed))
                time.sleep(0.02)
            thread.join()
        assert ("LOADING", False) in seen


# -- other roads -------------------------------------------------------------------------------------------------------


def test_over_a_unix_socket(opened: Opener) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        with RedisServer(options=["--unixsocket", str(path)]):
            store = opened(f"redis+socket://{path}?virtual_host=2", timeout=5)
            assert store.complete(take(store), result()) is Ended.COMPLETED
            with redis.Redis(unix_socket_path=str(path), db=2) as client:
                assert client.dbsize() == 1
                theirs = opened(client, timeout=5)
                assert theirs.claim(op(), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED


def test_a_client_lends_its_settings_not_its_connections(redis_url: str, opened: Opener) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True, socket_timeout=None) as client:
        store = opened(client)
        assert store.complete(take(store), result()) is Ended.COMPLETED
        record = store.get(op().key)
        assert record is not None
        assert record.outcome == result()
        store.close()
        assert client.ping()


def test_on_a_cluster(opened: Opener) -> None:
    with RedisServer(options=["--cluster-enabled", "yes", "--databases", "1"]) as server:
        with redis.Redis.from_url(server.url) as node:
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: node.cluster("info")["cluster_state"] == "ok", 10, "the cluster is whole")
        cluster = RedisCluster.from_url(server.url)
        try:
            store = opened(cluster, timeout=5)
            claims = [take(store, f"order:{n}", continues=True) for n in range(5)]
            assert set(store.renew(claims).values()) == {Renewal.RENEWED}
            assert store.complete(claims[0], result()) is Ended.COMPLETED
            store.settle(claims[0].key, "M")
            assert store.claim(op("order:0"), lease=LEASE, ttl=TTL).answer is Answer.COMPLETED
            assert store.release(claims[1], Release.ENDED) is Ended.RELEASED
            assert len(list(store.find())) == 5
            assert store.forget(claims[0].key, claims[0].fence)
            assert store.get(claims[2].key) is not None
            assert any("persists nothing" in warning for warning in store.check())
            store.close()
        finally:
            cluster.close()


def test_through_sentinels_to_the_primary(private_redis: RedisServer, opened: Opener, tmp_path: Path) -> None:
    """The first sentinel is gone and the second knows; the store finds the primary all the same."""
    port, gone = free_port(), free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"port {port}\nbind {LOOPBACK}\ndir {tmp_path}\nsentinel monitor shop {LOOPBACK} {private_redis.port} 1\n"
    )
    argv = [private_redis.binary, str(conf), "--sentinel"]
    sentinel = Process(argv, name="sentinel", log_path=tmp_path / "sentinel.log", cwd=tmp_path)
    try:
        wait_until(lambda: listening(port), 10, "the sentinel listens")
        url = f"sentinel://{LOOPBACK}:{gone}/1;sentinel://{LOOPBACK}:{port}/1"
        store = opened(url, timeout=5, master_name="shop", sentinel_kwargs={})
        assert store.complete(take(store), result()) is Ended.COMPLETED
        lost = opened(url, master_name="nobody")
        refused(lambda: take(lost), landed=False)
    finally:
        sentinel.close()


@pytest.mark.skipif(sys.platform != "linux", reason="uses /proc")
def test_no_connection_is_left_behind(redis_url: str, opened: Opener) -> None:
    program = f"""
import warnings; warnings.simplefilter("error")
from celery_idem.stores.redis.store import RedisStore
store = RedisStore({redis_url!r})
assert store.get("a" * 64) is None
store.close()
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_a_limit_there_are_as_many_connections_as_verbs_at_once(redis_url: str, opened: Opener) -> None:
    """redis-py 8 would refuse the 101st by itself, and a pool of 200 greenlets fails where nobody set a limit."""
    lender = opened(redis_url).wire._lender()
    lent = [lender.take() for _ in range(130)]
    for one in lent:
        lender.give(one)
    lender.empty()
