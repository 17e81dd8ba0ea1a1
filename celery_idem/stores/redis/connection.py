"""From a URL as Celery writes it, or a redis-py client, to the wire the store talks over.

Nothing here connects. Every connection gets the store's timeout: a quarter of it for each step of getting
connected, and what is left for the answer. No message from here shows a URL, a user or a password.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from celery_idem.errors import ConfigurationError

try:
    import redis

    if int(redis.__version__.partition(".")[0]) < 5:
        raise ImportError(f"redis-py {redis.__version__} is too old")
    from redis.backoff import NoBackoff
    from redis.connection import URL_QUERY_ARGUMENT_PARSERS, AbstractConnection
    from redis.retry import Retry
    from redis.sentinel import (
        Sentinel,
        SentinelConnectionPool,
        SentinelManagedConnection,
        SentinelManagedSSLConnection,
    )

    from celery_idem.stores.redis.wire import ClusterWire, PooledWire, Wire
except ImportError as error:  # pragma: no cover - a wheel without the extra
    raise ConfigurationError(
        f'idempotency_store names redis, which takes redis-py 5 or newer ({error}): pip install "celery-idem[redis]"'
    ) from error

REDIS_PORT, SENTINEL_PORT = 6379, 26379

_CERT_REQS = {
    "none": "none",
    "optional": "optional",
    "required": "required",
    "cert_none": "none",
    "cert_optional": "optional",
    "cert_required": "required",
    "0": "none",
    "1": "optional",
    "2": "required",
}
_OF_ITS_OWNER = {"connection_pool", "event_dispatcher", "himport_registry"}  # parts of a client that stay with it
_OF_ITS_OWNER |= {"cache", "cache_config", "cache_factory"}
_NOT_FOR_US = ("maint", "oss_", "orig_")

Settings = dict[str, Any]

# redis-py's types differ by release, and some are missing.
_sentinel: Any = Sentinel
_sentinel_pool: Any = SentinelConnectionPool
_blocking_pool: Any = redis.BlockingConnectionPool
_readers: Mapping[str, Any] = URL_QUERY_ARGUMENT_PARSERS


UNBOUNDED = 2**31
"""As many connections as there are verbs at once; redis-py 8 would refuse the 101st by itself."""


def wire_for(url: Any, *, timeout: float, options: Mapping[str, Any]) -> Wire:
    """The wire to the server that a URL or client names, unopened; ``ConfigurationError`` where it cannot be one."""
    if not timeout > 0:
        raise ConfigurationError(f"idempotency_store_timeout must be more than 0 seconds, not {timeout!r}")
    if isinstance(url, redis.RedisCluster):
        return ClusterWire(url)
    if isinstance(url, redis.Redis):
        new_pool = _from_client(url, timeout, dict(options))
    elif isinstance(url, str):
        new_pool = _from_url(url, timeout, dict(options))
    else:
        raise ConfigurationError(
            f"idempotency_store must be a redis URL or a redis.Redis client, not a {type(url).__name__}"
        )
    _try(new_pool)
    return PooledWire(new_pool, timeout)


def _from_url(url: str, timeout: float, options: Settings) -> Callable[[], Any]:
    if url.partition(":")[0].lower() == "sentinel":
        return _from_sentinels(url, timeout, options)
    settings = {**settings_of(url), **options}
    kind = settings.pop("connection_class", None)
    if settings.pop("ssl", False):
        kind = redis.SSLConnection
    return _pool_of(redis.ConnectionPool, kind or redis.Connection, settings, timeout)


def _from_client(client: redis.Redis, timeout: float, options: Settings) -> Callable[[], Any]:
    theirs = client.connection_pool
    settings = {
        name: value
        for name, value in theirs.connection_kwargs.items()
        if name not in _OF_ITS_OWNER and not name.startswith(_NOT_FOR_US)
    }
    settings.update(options)
    if not isinstance(theirs, SentinelConnectionPool):
        return _pool_of(redis.ConnectionPool, theirs.connection_class, settings, timeout)

    def make(**kwargs: Any) -> Any:
        return _sentinel_pool(theirs.service_name, theirs.sentinel_manager, **kwargs)

    return _pool_of(make, theirs.connection_class, settings, timeout)


def _from_sentinels(url: str, timeout: float, options: Settings) -> Callable[[], Any]:
    master, names = options.pop("master_name", None), ("min_other_sentinels", "sentinel_kwargs")
    others, theirs = (options.pop(name, None) for name in names)
    if not master:
        raise ConfigurationError(
            "a sentinel:// store needs the name of its primary: set master_name in idempotency_store_options"
        )
    parts = [settings_of(part) for part in url.split(";") if part.strip()]
    hosts = [(part["host"], part["port"]) for part in parts]
    settings = {name: value for name, value in parts[0].items() if name not in ("host", "port")}
    settings.update(options)
    kind = SentinelManagedSSLConnection if settings.pop("ssl", False) else SentinelManagedConnection
    asking = dict(theirs or {})

    def make(**kwargs: Any) -> Any:
        # Every sentinel may be asked in turn, so each gets its share of one step.
        asked = _prompt(asking, timeout / len(hosts))
        manager = _sentinel(hosts, min_other_sentinels=others or 0, sentinel_kwargs=asked)
        return _sentinel_pool(master, manager, **kwargs)

    return _pool_of(make, kind, settings, timeout)


def _pool_of(make: Callable[..., Any], kind: Any, settings: Settings, timeout: float) -> Callable[[], Any]:
    _verify_as_named(settings)
    provider = settings.get("credential_provider")
    if isinstance(provider, str):
        settings["credential_provider"] = _imported(provider)
    if settings.get("credential_provider") is not None:
        settings.pop("username", None)
        settings.pop("password", None)
    most = settings.pop("max_connections", None)

    def new_pool() -> Any:
        kwargs = _prompt(settings, timeout)
        if most is not None and make is redis.ConnectionPool:
            # Beyond the limit a verb waits its turn for a step's time; a plain pool would fail at once.
            return _blocking_pool(most, timeout / 4, connection_class=kind, **kwargs)
        kwargs["max_connections"] = UNBOUNDED if most is None else most
        return make(connection_class=kind, **kwargs)

    return new_pool


def _prompt(settings: Mapping[str, Any], timeout: float) -> Settings:
    """The settings with every step bounded, redis-py's repeats off and answers as bytes."""
    kwargs = {name: value for name, value in settings.items() if name not in ("retry_on_timeout", "retry_on_error")}
    step = timeout / 4
    for name in ("socket_timeout", "socket_connect_timeout"):
        kwargs[name] = min(float(kwargs.get(name) or step), step)
    kwargs.update(retry=Retry(NoBackoff(), 0), decode_responses=False, protocol=2)
    # Two handshake steps less: the driver's name and version.
    if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters:
        kwargs.setdefault("driver_info", None)
        kwargs.pop("lib_name", None)
        kwargs.pop("lib_version", None)
    else:
        kwargs.setdefault("lib_name", None)
        kwargs.setdefault("lib_version", None)
    return kwargs


def settings_of(url: str) -> Settings:
    """redis-py's connection arguments for one URL; ``ConfigurationError`` names what is wrong, never the URL."""
    scheme, _, rest = url.strip().partition("://")
    scheme = scheme.lower()
    try:
        parts = urlsplit("http://" + rest)
        port = parts.port
    except ValueError:
        raise ConfigurationError(
            "idempotency_store: the redis URL cannot be read: write its port as a number up to 65535, and "
            "percent-encode special characters in its password"
        ) from None
    settings: Settings = {}
    for name, value in (("username", parts.username), ("password", parts.password)):
        if value:
            settings[name] = unquote(value)
    query = dict(parse_qsl(parts.query))
    database = query.pop("virtual_host", None) or query.pop("db", None)
    if scheme in ("redis+socket", "socket", "unix"):
        settings.update(connection_class=redis.UnixDomainSocketConnection, path=unquote(parts.path))
    else:
        settings.update(host=unquote(parts.hostname or "localhost"), port=port or _port_of(scheme))
        database = database or parts.path
        _secured(scheme, settings, query, parts)
    settings["db"] = _database(database)
    settings.update(_read(query))
    return settings


def _port_of(scheme: str) -> int:
    return SENTINEL_PORT if scheme == "sentinel" else REDIS_PORT


def _secured(scheme: str, settings: Settings, query: Mapping[str, str], parts: SplitResult) -> None:
    if scheme not in ("redis", "rediss", "sentinel"):
        # The scheme itself is not shown: without "://" it is the whole URL.
        raise ConfigurationError(
            "idempotency_store: the redis URL must begin with redis://, rediss://, redis+socket:// or sentinel://"
        )
    if scheme == "rediss":
        settings["connection_class"] = redis.SSLConnection
    elif scheme == "redis" and any(name.startswith("ssl_") for name in query):
        raise ConfigurationError("idempotency_store: ssl_ parameters need rediss://, not redis://")
    if "@" in unquote(parts.path) or "#" in parts.netloc or parts.fragment:
        raise ConfigurationError(
            "idempotency_store: the redis URL cannot be read; percent-encode special characters in its password"
        )


def _database(text: str | None) -> int:
    try:
        return int((text or "0").strip("/") or 0)
    except ValueError:
        raise ConfigurationError("idempotency_store: a redis database is a number, redis://host:port/0") from None


def _read(query: Mapping[str, str]) -> Settings:
    settings: Settings = {}
    for name, value in query.items():
        reader = _readers.get(name)
        try:
            settings[name] = value if reader is None or name == "ssl_cert_reqs" else reader(value)
        except ValueError:
            raise ConfigurationError(f"idempotency_store: {name} in the redis URL cannot be read") from None
    return settings


def _verify_as_named(settings: Settings) -> None:
    """``ssl_cert_reqs`` in the one spelling every redis-py takes."""
    if "ssl_cert_reqs" not in settings:
        return
    given = settings["ssl_cert_reqs"]
    # ssl.CERT_NONE prints differently in every Python, its number does not.
    spelled = "none" if given is None else str(int(given)) if isinstance(given, int) else str(given)
    wanted = _CERT_REQS.get(spelled.lower())
    if wanted is None:
        raise ConfigurationError("idempotency_store: ssl_cert_reqs must be none, optional or required")
    settings["ssl_cert_reqs"] = wanted
    if wanted == "none":
        settings.setdefault("ssl_check_hostname", False)


def _imported(path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        return getattr(import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"idempotency_store: credential_provider {path!r} cannot be imported") from error


def _try(new_pool: Callable[[], Any]) -> None:
    """Make one connection object, without connecting, so that a wrong option is told at start."""
    try:
        pool = new_pool()
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, ValueError, redis.RedisError) as error:
        raise ConfigurationError(
            f"idempotency_store_options: redis-py {redis.__version__} does not take them ({error}): correct or remove "
            "what it names"
        ) from None
