"""URLs as Celery writes them, and options, become connection settings; nothing here connects."""

from __future__ import annotations

import ssl
import subprocess
import sys
from typing import Any

import pytest
import redis
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from celery_idem.errors import ConfigurationError
from celery_idem.stores.base import open_store
from celery_idem.stores.redis.store import RedisStore


def pool_of(url: Any, **options: Any) -> Any:
    """The pool a store on this URL would use, unconnected."""
    store = RedisStore(url, **{"timeout": 4.0, **options})
    return store.wire._lender().pool  # type: ignore[attr-defined]


def settings_of(url: Any, **options: Any) -> dict[str, Any]:
    settings = dict(pool_of(url, **options).connection_kwargs)
    settings.pop("himport_registry", None)  # redis-py's own, one per pool
    return settings


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("redis://", {"host": "localhost", "port": 6379, "db": 0}),
        ("redis://h", {"host": "h", "port": 6379, "db": 0}),
        ("redis://h:1/", {"host": "h", "port": 1, "db": 0}),
        ("redis://h:1/7", {"host": "h", "port": 1, "db": 7}),
        ("REDIS://h/3", {"host": "h", "db": 3}),
        ("redis://h?db=5", {"db": 5}),
        ("redis://h?virtual_host=5", {"db": 5}),
        ("redis://[::1]:7/1", {"host": "::1", "port": 7, "db": 1}),
        ("redis://:pw@h/1", {"password": "pw", "host": "h"}),
        ("redis://me:pw@h/1", {"username": "me", "password": "pw"}),
        ("redis://me:p%40%2F%3A%23%25+%C3%BC@h/1", {"password": "p@/:#%+ü"}),
        ("redis://h?health_check_interval=9&socket_keepalive=true", {"health_check_interval": 9}),
        ("redis://h?client_name=shop", {"client_name": "shop"}),
        ("rediss://h:2/1", {"host": "h", "port": 2, "db": 1}),
        ("redis+socket:///run/redis.sock", {"path": "/run/redis.sock", "db": 0}),
        ("redis+socket:///run/redis.sock?virtual_host=2", {"path": "/run/redis.sock", "db": 2}),
        ("redis+socket://me:pw@/run/redis.sock?virtual_host=/2", {"path": "/run/redis.sock", "password": "pw"}),
        ("redis+socket:///a%20b.sock", {"path": "/a b.sock"}),
    ],
)
def test_urls(url: str, wanted: dict[str, Any]) -> None:
    settings = settings_of(url)
    assert {name: settings.get(name) for name in wanted} == wanted


def test_what_each_scheme_connects_with() -> None:
    assert pool_of("redis://h").connection_class is redis.Connection
    assert pool_of("rediss://h").connection_class is redis.SSLConnection
    assert pool_of("redis+socket:///s").connection_class is redis.UnixDomainSocketConnection
    assert pool_of("redis://h", ssl=True, ssl_cert_reqs="none").connection_class is redis.SSLConnection


@pytest.mark.parametrize(
    ("spelled", "wanted"),
    [
        *(("none", "none"), ("optional", "optional"), ("required", "required")),
        *(("CERT_NONE", "none"), ("CERT_OPTIONAL", "optional"), ("CERT_REQUIRED", "required")),
        *((ssl.CERT_NONE, "none"), (ssl.CERT_OPTIONAL, "optional"), (ssl.CERT_REQUIRED, "required"), (None, "none")),
    ],
)
def test_ssl_cert_reqs_in_every_spelling(spelled: Any, wanted: str) -> None:
    settings = settings_of("rediss://h", ssl_cert_reqs=spelled)
    assert settings["ssl_cert_reqs"] == wanted
    assert settings.get("ssl_check_hostname", "as redis-py has it") == (
        False if wanted == "none" else "as redis-py has it"
    )
    if isinstance(spelled, str):
        from_url = settings_of(f"rediss://h?ssl_cert_reqs={spelled}")
        assert {**from_url, "retry": None} == {**settings, "retry": None}


def test_ssl_files_and_the_default() -> None:
    settings = settings_of("rediss://h?ssl_ca_certs=%2Fetc%2Fca.pem&ssl_certfile=/c&ssl_keyfile=/k")
    assert [settings[f"ssl_{name}"] for name in ("ca_certs", "certfile", "keyfile")] == ["/etc/ca.pem", "/c", "/k"]
    assert "ssl_cert_reqs" not in settings  # redis-py verifies by default


def test_sentinels() -> None:
    pool = pool_of(
        "sentinel://me:pw@a:1/3;sentinel://b/3;sentinel://c:9",
        master_name="shop",
        sentinel_kwargs={"password": "other"},
        min_other_sentinels=1,
    )
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.connection_class is SentinelManagedConnection
    assert pool.service_name == "shop"
    settings = pool.connection_kwargs
    assert [settings[name] for name in ("username", "password", "db")] == ["me", "pw", 3]
    manager = pool.sentinel_manager
    asked = [client.connection_pool.connection_kwargs for client in manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 1), ("b", 26379), ("c", 9)]
    assert {each["password"] for each in asked} == {"other"}
    assert manager.min_other_sentinels == 1
    # One after the other they fit into one step of the store's timeout.
    assert sum(each["socket_timeout"] for each in asked) == pytest.approx(1.0)
    assert {each["retry"]._retries for each in asked} == {0}


def test_a_sentinel_with_tls_and_one_without_a_name() -> None:
    assert pool_of("sentinel://a", master_name="m", ssl=True).connection_class is SentinelManagedSSLConnection
    with pytest.raises(ConfigurationError, match="master_name"):
        RedisStore("sentinel://a:1")


def test_every_step_is_bounded_and_nothing_repeats_by_itself() -> None:
    given: dict[str, Any] = {"socket_timeout": 60, "socket_connect_timeout": 0.1, "decode_responses": True}
    ours = settings_of("redis://h", retry_on_timeout=True, **given)
    for settings in (ours, settings_of(redis.Redis(host="h", **given))):
        assert settings["socket_timeout"] == 1.0
        assert settings["socket_connect_timeout"] == 0.1
        assert settings["retry"]._retries == 0
        assert settings["decode_responses"] is False
        assert "retry_on_timeout" not in settings


def test_a_client_lends_its_settings() -> None:
    client = redis.Redis(host="h", port=3, db=4, username="me", password="pw", client_name="shop")
    pool = pool_of(client)
    assert pool is not client.connection_pool
    wanted = {"host": "h", "port": 3, "db": 4, "username": "me", "password": "pw", "client_name": "shop"}
    assert {name: pool.connection_kwargs[name] for name in wanted} == wanted
    secure = pool_of(redis.Redis(host="h", ssl=True, ssl_ca_certs="/ca.pem"))
    assert secure.connection_class is redis.SSLConnection
    assert secure.connection_kwargs["ssl_ca_certs"] == "/ca.pem"


def test_a_sentinel_client_lends_its_sentinels() -> None:
    client = redis.sentinel.Sentinel([("a", 1)]).master_for("shop", db=2)
    pool = pool_of(client)
    assert isinstance(pool, SentinelConnectionPool)
    assert pool is not client.connection_pool
    assert (pool.service_name, pool.connection_kwargs["db"]) == ("shop", 2)


def test_a_credential_provider_replaces_user_and_password() -> None:
    provider = redis.UsernamePasswordCredentialProvider("me", "pw")
    settings = settings_of("redis://old:older@h", credential_provider=provider)
    assert settings["credential_provider"] is provider
    assert not {"username", "password"} & set(settings)
    named = settings_of("redis://h?credential_provider=redis.UsernamePasswordCredentialProvider")
    assert isinstance(named["credential_provider"], redis.UsernamePasswordCredentialProvider)
    with pytest.raises(ConfigurationError, match="imported"):
        RedisStore("redis://h", credential_provider="no.such.Provider")


def test_a_limit_on_connections_makes_verbs_wait() -> None:
    for pool in (pool_of("redis://h?max_connections=3"), pool_of("redis://h", max_connections=3)):
        assert isinstance(pool, redis.BlockingConnectionPool)
        assert (pool.max_connections, pool.timeout) == (3, 1.0)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://u:s3cret@h:port/0", "redis://u:s3cret@h/db", "redis://u:s3/cret@h/0", "redis://u:s3#cret@h/0"),
        *("redis://u:s3cret@h?ssl_cert_reqs=none", "rediss://u:s3cret@h?ssl_cert_reqs=maybe"),
        *("redis://u:s3cret@h?socket_timeout=soon", "http://u:s3cret@h", "redis://u:s3cret@h?nonsense=1"),
        *("redis://u:s3cret@[::1/0", "sentinel://u:s3cret@h:1;http://h"),
        *("sentinel://h:1;u:s3cret@h:2", "u:s3cret@h"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_without_its_secret(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisStore(url, **({"master_name": "m"} if url.startswith("sentinel") else {}))
    assert "cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_wrong_options_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"visibility_timeout.*: correct or remove"):
        RedisStore("redis://h", visibility_timeout=3600)
    with pytest.raises(ConfigurationError, match="timeout must be more than 0"):
        RedisStore("redis://h", timeout=0)
    with pytest.raises(ConfigurationError, match="not a dict"):
        RedisStore({})  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "redis+socket:///s", "sentinel://h"])
def test_open_store_knows_the_schemes(url: str) -> None:
    options = {"master_name": "m"} if url.startswith("sentinel") else {}
    assert open_store(url, timeout=1, **options).name == "redis"


@pytest.mark.parametrize(
    ("module", "found"), [("None", "import of redis halted"), ("NS(__version__='4.6.0')", "redis-py 4.6.0 is too old")]
)
def test_without_a_redis_py_that_serves_the_extra_is_named(module: str, found: str) -> None:
    """celery[redis] 5.5 is content with redis-py 4.5, which knows nothing of ``protocol=``."""
    script = (
        "import sys; from types import SimpleNamespace as NS\n"
        f"sys.modules['redis'] = {module}\n"
        "from celery_idem.stores.base import open_store\n"
        "try: open_store('redis://h')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith("ConfigurationError idempotency_store names redis, which takes redis-py 5 or newer (")
    assert found in said
    assert said.endswith('): pip install "celery-idem[redis]"\n')
