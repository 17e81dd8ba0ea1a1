"""``check``: what it warns of at worker start, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from celery_idem.errors import ConfigurationError
from celery_idem.stores.redis import checks
from celery_idem.stores.redis.store import RedisStore
from tests.support.processes import LOOPBACK, free_port
from tests.support.services import RedisServer

pytestmark = pytest.mark.redis


@pytest.fixture
def store(private_redis: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(private_redis.url)
    yield store
    store.close()


@pytest.fixture
def client(private_redis: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(private_redis.url) as client:
        yield client


def test_nothing_persisted(store: RedisStore, client: redis.Redis) -> None:
    (warning,) = store.check()
    assert warning.startswith("redis persists nothing")
    client.config_set("save", "3600 1")
    (warning,) = store.check()
    assert warning.startswith("redis keeps snapshots only")
    client.config_set("appendonly", "yes")
    assert store.check() == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru", "allkeys-random"])
def test_records_may_be_evicted(store: RedisStore, client: redis.Redis, policy: str) -> None:
    client.config_set("appendonly", "yes")
    client.config_set("maxmemory-policy", policy)
    assert store.check() == []  # without a limit nothing is evicted
    client.config_set("maxmemory", "100mb")
    (warning,) = store.check()
    assert policy in warning
    assert warning.endswith("set maxmemory-policy noeviction")
    client.config_set("maxmemory-policy", "noeviction")
    assert store.check() == []


def test_where_config_is_forbidden_info_says_what_it_can(private_redis: RedisServer, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "managed", "on", ">pw", "~*", "+@all", "-config")
    store = RedisStore(private_redis.url.replace("//", "//managed:pw@"))
    (warning,) = store.check()
    assert "could not be checked whether redis persists" in warning
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", "100mb")
    assert ["evict" in warning for warning in store.check()] == [True, False]
    client.config_set("appendonly", "yes")
    (warning,) = store.check()
    assert "evict" in warning
    store.close()


def test_an_old_server_is_refused(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "OLDEST", (99, 0))
    with pytest.raises(ConfigurationError, match=r"redis \d.*too old"):
        store.check()


def test_check_leaves_no_key(store: RedisStore, client: redis.Redis) -> None:
    store.check()
    store.create_schema()
    assert client.dbsize() == 0


def test_broker_and_store_are_one_process(private_redis: RedisServer, redis_url: str, store: RedisStore) -> None:
    """Another database or another spelling is the same memory; another server is not."""
    same = f"redis://user:s3cret@localhost:{private_redis.port}/7"
    assert store.shares_memory_with(same.replace("user:s3cret@", "")) is not None
    warning = store.shares_memory_with(private_redis.url)
    assert warning is not None
    assert "same redis process" in warning
    assert store.shares_memory_with(redis_url) is None
    for other in ("amqp://localhost", "", "memory://", "sentinel://h:1", "redis://h:port", "redis://h/x"):
        assert store.shares_memory_with(other) is None
    assert store.shares_memory_with(f"redis://{LOOPBACK}:{free_port()}") is None
    assert store.shares_memory_with(same) is None  # it does not let us in, so nothing is known
