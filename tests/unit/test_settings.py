"""Settings and policies: every wrong value is refused by name, and nothing is read from where it should not be."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from celery import Celery

from celery_idem import ConfigurationError, IdempotentTask, Policy
from celery_idem.app import given_settings, runtime_of
from celery_idem.core.policy import UNSET
from celery_idem.core.settings import PER_TASK, TABLE, Settings


def test_defaults_pass_their_own_checks() -> None:
    loaded = Settings.load({}, environment={})
    for setting in TABLE:
        assert setting.check(loaded[setting.name]) is None, setting.name


def test_policy_has_exactly_the_per_task_settings() -> None:
    from dataclasses import fields

    assert {f.name for f in fields(Policy)} - {"name"} == set(PER_TASK)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mode", "on"), ("store", ""), ("store_options", []), ("store_timeout", 0), ("store_timeout", True),
        ("namespace", " "), ("dead_check", 1), ("local_cache", -1), ("purge", "yes"), ("key", ""), ("key", 7),
        ("key", "no field"), ("scope", 3), ("fingerprint", "amount"), ("fingerprint", []), ("lease", 0),
        ("lease", float("nan")), ("lease", "60"), ("ttl", -1), ("wait_timeout", 61), ("on_conflict", "wait"),
        ("ttl", float("inf")), ("ttl", 10**400), ("namespace", "a\0b"), ("scope", "\ud800"),
        ("verify", "yes"), ("on_unknown", "park"), ("on_lease_lost", "kill"), ("max_deliveries", 0),
        ("max_deliveries", 2.5), ("storage_policy", "open"), ("serializer", ""), ("result_max_bytes", 0),
        ("replay_failures", ValueError), ("replay_failures", (BaseException,)), ("cacheable", True), ("on_replay", 1),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"idempotency_{name}"):
        Settings.load({name: value}, environment={})
    if name in PER_TASK:
        with pytest.raises(ConfigurationError, match=name):
            Policy(**{name: value})


@pytest.mark.parametrize("name", [5, "", " ", "a\0b", "\ud800"])
def test_a_name_no_store_could_keep_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        Policy(name=name)


def test_an_unknown_name_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ConfigurationError, match="idempotency_lease"):
        Settings.load({"leese": 5}, environment={})
    with pytest.raises(TypeError, match="Policy has no option 'leese': did you mean 'lease'"):
        Policy(leese=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"settings\.md"):
        Policy(zzz=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Policy("order:{order}")  # type: ignore[misc]


def test_the_environment_overrides_the_mode_and_is_checked() -> None:
    assert Settings.load({"mode": "enforce"}, environment={"CELERY_IDEMPOTENCY_MODE": "observe"})["mode"] == "observe"
    with pytest.raises(ConfigurationError, match="CELERY_IDEMPOTENCY_MODE"):
        Settings.load({}, environment={"CELERY_IDEMPOTENCY_MODE": "maybe"})


@pytest.mark.parametrize("namespace", ["CELERY", "SHOP", "SHOP_", "shop"])
def test_settings_are_read_from_any_namespace(namespace: str) -> None:
    prefix = namespace if namespace.endswith("_") else f"{namespace}_"
    given = {"idempotency_mode": "off", "idempotency_ttl": 5}
    names = {prefix + (name.upper() if prefix.isupper() else name): value for name, value in given.items()}
    app = Celery("a", set_as_current=False)
    app.config_from_object(type("Given", (), names), namespace=namespace)
    settings = runtime_of(app).settings
    assert (settings["mode"], settings["ttl"]) == ("off", 5)


def test_settings_are_read_from_an_app_and_from_a_namespace() -> None:
    plain = Celery("a", set_as_current=False)
    plain.conf.update(idempotency_store="memory://", idempotency_lease=30)
    assert given_settings(plain.conf) == {"store": "memory://", "lease": 30}

    class Django:
        CELERY_IDEMPOTENCY_STORE = "memory://"
        CELERY_IDEMPOTENCY_TTL = 5
        IDEMPOTENCY_LEASE = 1

    spaced = Celery("b", set_as_current=False)
    spaced.config_from_object(Django, namespace="CELERY")
    settings = runtime_of(spaced).settings
    assert (settings["store"], settings["ttl"], settings["lease"]) == ("memory://", 5, 60.0)


def test_a_policy_lies_over_its_base_and_the_settings() -> None:
    base = Policy(lease=5, ttl=7, name="stable")
    own = Policy(lease=9).over(base)
    assert (own.lease, own.ttl, own.name, own.key) == (9, 7, "stable", UNSET)
    full = own.under(Settings.load({"ttl": 1, "key": ["order"]}, environment={}))
    assert (full.lease, full.ttl, full.key, full.max_deliveries) == (9, 7, ["order"], 5)
    assert Policy(lease=9) == Policy(lease=9)


def test_no_store_is_a_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="idempotency_store is not set"):
        _ = runtime_of(Celery("c", set_as_current=False)).store


def test_an_unknown_store_scheme_is_a_clear_error() -> None:
    app = Celery("d", set_as_current=False)
    app.conf.idempotency_store = "mongodb://secret:password@host/db"
    with pytest.raises(ConfigurationError, match="no store speaks 'mongodb'") as refused:
        _ = runtime_of(app).store
    assert "password" not in str(refused.value)


def test_a_key_that_names_no_argument_stops_the_worker() -> None:
    app = Celery("e", set_as_current=False)
    app.conf.idempotency_store = "memory://"

    @app.task(base=IdempotentTask, name="pay", shared=False, key="order:{oder_id}")
    def pay(order_id: int) -> None: ...

    app.finalize()
    with pytest.raises(ConfigurationError, match="order_id"):
        runtime_of(app).check()


# -- verify ------------------------------------------------------------------------------------------------------------


def injecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that gives the first argument itself, under the wrapped function's signature."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("session", *args, **kwargs)

    return wrapper


def checked_with(verify: Any, run: Callable[..., Any], **options: Any) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.idempotency_store = "memory://"
    app.task(base=IdempotentTask, name="pay", shared=False, idempotency=Policy(verify=verify), **options)(run)
    app.finalize()
    runtime_of(app).check()


def pay(order_id: int, amount: float = 0, *, note: str = "") -> None: ...
def pay_bound(self: Any, order_id: int) -> None: ...
def pay_all(*orders: int) -> None: ...
@injecting
def pay_injected(session: str, order_id: int) -> None: ...


@pytest.mark.parametrize(
    ("verify", "run", "options", "said"),
    [
        (lambda: None, pay, {}, "too many positional arguments: let verify take (order_id, amount=0, *, note='')"),
        (lambda order_id: None, pay, {"autoretry_for": (OSError,)}, "too many positional arguments"),
        (lambda order_id, amount, **_: None, pay, {}, "missing a required argument: 'amount'"),
        (lambda order_id, amount=0: None, pay, {}, "unexpected keyword argument 'note'"),
        (lambda self, order_id: None, pay_bound, {"bind": True}, "'order_id': let verify take (order_id)"),
    ],
)
def test_a_verify_that_cannot_take_its_tasks_arguments_stops_the_worker(
    verify: Any, run: Callable[..., Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)) as refused:
        checked_with(verify, run, **options)
    assert str(refused.value).startswith("task pay: verify, called as the task may be: ")


@pytest.mark.parametrize(
    ("verify", "run"),
    [
        (lambda order_id, amount=0, note="": None, pay),
        (lambda *args, **kwargs: None, pay),
        (lambda order, amount=0, *, note="": None, pay),  # other names; ``doctor`` tells of it
        (functools.partial(lambda session, *args, **kwargs: None, "session"), pay),
        (injecting(lambda session, order_id, amount=0, note="": None), pay),
        (lambda order_id: None, pay_injected),
        (lambda order_id: None, pay_all),
        (Mock(), pay),
        (MagicMock(spec=pay), pay),
        (dict, pay),
        (min, pay),
        (operator.itemgetter(0), pay),
        (type("Odd", (), {"__call__": lambda self, *_, **__: None, "__signature__": "none"})(), pay),
    ],
)
def test_a_verify_that_may_take_them_is_never_refused(verify: Any, run: Callable[..., Any]) -> None:
    checked_with(verify, run)
