"""What a Redis must be like to keep claims: recent enough, no eviction, something persisted, not the broker.

Each finding is one sentence that ends with the next step and shows no credentials. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_idem.errors import ConfigurationError, StoreUnavailable
from celery_idem.stores.redis.connection import wire_for
from celery_idem.stores.redis.rows import pairs_of
from celery_idem.stores.redis.scripts import script
from celery_idem.stores.redis.wire import LASTING, Refusal, Wire

OLDEST = (5, 0)
"""Before 5.0 a script may not write after it read the clock."""

BROKERS = frozenset({"redis", "rediss", "socket", "unix"})


def check_store(wire: Wire, prefix: str) -> list[str]:
    """Warnings about the server; ``ConfigurationError`` where it cannot keep claims at all."""
    try:
        info = _info(wire)
        _recent_enough(info)
        wire.run(script("settle"), f"{prefix}check", ("", ""))  # reads a key that is not there: may we at all?
        settings = _settings(wire)
    except StoreUnavailable as error:
        if error.facts.get("code") in LASTING:
            raise ConfigurationError(str(error)) from error
        raise
    found = []
    if info.get("role") == "slave":
        found.append("this redis is a replica and refuses writes: point idempotency_store at the primary")
    policy, memory = settings.get("maxmemory-policy"), settings.get("maxmemory")
    found += _evicts(policy or info.get("maxmemory_policy"), memory or info.get("maxmemory"))
    if "appendonly" in settings:
        return found + _persists(settings["appendonly"], settings.get("save"))
    if info.get("aof_enabled") == "1":
        return found
    known = "maxmemory_policy" in info
    unseen = "persists its data" if known else "evicts records or persists its data"
    wanted = "appendonly is yes" if known else "maxmemory-policy is noeviction and appendonly is yes"
    warning = f"CONFIG is not allowed here, so it could not be checked whether redis {unseen}: see that {wanted}"
    return [*found, warning]


def shares_memory(wire: Wire, broker_url: str) -> str | None:
    """A warning where the broker is the same Redis process as the store; None where it is not, or none answers.

    Args:
        wire: to the store.
        broker_url: as Celery has it; brokers that are no single Redis are not asked.
    """
    if not broker_url or broker_url.partition(":")[0].partition("+")[0].lower() not in BROKERS:
        return None
    try:
        broker = wire_for(broker_url.partition(";")[0], timeout=2.0, options={})
    except ConfigurationError:
        return None
    try:
        ours, theirs = (_info(each).get("run_id") for each in (wire, broker))
    except StoreUnavailable:
        return None
    finally:
        broker.close()
    if not ours or ours != theirs:
        return None
    return (
        "broker and idempotency store are the same redis process: a full queue takes the records' memory, and one "
        "outage takes both; give the store a redis of its own"
    )


def _info(wire: Wire) -> dict[str, str]:
    """What the server says of itself; nothing where this user may not ask."""
    (reply,) = wire.commands([("INFO",)])
    if isinstance(reply, Refusal):
        if reply.error.facts.get("code") == "NOPERM":
            return {}
        raise reply.error
    if isinstance(reply, dict):  # a cluster client reads it for us
        return {str(name): str(value) for name, value in reply.items()}
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _settings(wire: Wire) -> dict[str, str]:
    """The settings that matter; nothing where CONFIG is forbidden or gone."""
    names = ("maxmemory-policy", "maxmemory", "appendonly", "save")
    found: dict[str, str] = {}
    for reply in wire.commands([("CONFIG", "GET", name) for name in names]):
        if isinstance(reply, Refusal):
            return {}
        pairs: Mapping[Any, Any] = pairs_of(reply)
        found.update({_text(name): _text(value) for name, value in pairs.items()})
    return found


def _recent_enough(info: Mapping[str, str]) -> None:
    version = info.get("redis_version", "")
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return
    if numbers < OLDEST:
        raise ConfigurationError(f"redis {version} is too old to keep claims: use 5.0 or newer")


def _evicts(policy: str | None, maxmemory: str | None) -> list[str]:
    if policy in (None, "noeviction") or maxmemory in (None, "", "0"):
        return []
    warning = f"redis may evict records when its memory is full (maxmemory-policy {policy}), and a task whose record "
    return [warning + "is gone runs again: set maxmemory-policy noeviction"]


def _persists(appendonly: str | None, save: str | None) -> list[str]:
    if appendonly == "yes":
        return []
    if save:
        return ["redis keeps snapshots only, and a restart forgets the claims since the last one: set appendonly yes"]
    return ["redis persists nothing, and after a restart every task may run again: set appendonly yes"]


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
