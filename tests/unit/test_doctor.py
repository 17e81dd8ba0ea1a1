"""``examine``: each rule fires on an app that has its fault, and is silent on the same app without it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.beat import BeatLazyFunc
from celery.bin.base import CLIContext
from celery.schedules import crontab, schedule
from click.testing import CliRunner, Result
from kombu import Queue

import celery_idem.doctor
from celery_idem import IdempotentTask, Policy, cli
from celery_idem.app import runtime_of
from celery_idem.cli_text import finding_text
from celery_idem.core.settings import MODE_VARIABLE
from celery_idem.doctor import Finding, examine
from celery_idem.doctor.finding import merged
from tests.docs.pages import ROOT, page

REDIS, AMQP, SQS = "redis://localhost/0", "amqp://localhost", "sqs://"
UNKEPT = {"idempotency_keep_visible": False}
CONFIRMED = {"confirm_publish": True}
ORDER = "order:{order_id}"


@dataclass(frozen=True)
class Shop:
    """An app with one task, ``shop.charge``."""

    conf: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    policy: Policy | None = None
    broker: str = REDIS
    plain: bool = False
    """Whether a setting switches the task on, and not its class."""
    taskless: bool = False


@contextmanager
def opened(shop: Shop) -> Iterator[Celery]:
    app = Celery("shop", broker=shop.broker, backend="redis://localhost/1", set_as_current=False)
    switch = {"task_annotations": ["celery_idem:annotation"]} if shop.plain else {}
    app.conf.update(idempotency_store="redis://claims/0", **switch)
    app.conf.update(shop.conf)
    options = dict(shop.options) if shop.plain else {"base": IdempotentTask, **shop.options}
    if shop.policy is not None:
        options["idempotency"] = shop.policy
    if not shop.taskless:
        app.task(name="shop.charge", shared=False, lazy=False, **options)(charge)
    try:
        yield app
    finally:
        runtime_of(app).close()


def charge(order_id: Any = 0, amount: int = 0) -> None:
    """A body."""


def examined(shop: Shop) -> list[Finding]:
    with opened(shop) as app:
        return examine(app)


def beat(schedule: Any = 60.0, **entry: Any) -> dict[str, Any]:
    return {"beat_schedule": {"nightly": {"task": "shop.charge", "schedule": schedule, "args": (7,), **entry}}}


def fixed(**how: Any) -> Shop:
    return Shop(beat(**how), policy=Policy(key="arguments"))


# --- sound apps ------------------------------------------------------------------------------------------------------

SOUND = [
    pytest.param(Shop(), id="redis"),
    pytest.param(Shop(broker="rediss://cache.example.org/0"), id="redis elsewhere"),
    pytest.param(Shop({"broker_transport_options": CONFIRMED}, broker=AMQP), id="rabbitmq"),
    pytest.param(Shop(broker=SQS), id="sqs"),
    pytest.param(Shop({"idempotency_store": "sqlite:///idem.db"}, broker="filesystem://"), id="one machine"),
    pytest.param(Shop({"task_acks_late": True, "task_reject_on_worker_lost": True}, plain=True), id="whole app"),
    pytest.param(Shop({"task_time_limit": 7200, "task_soft_time_limit": 7000}), id="long tasks on redis"),
    pytest.param(Shop({"result_backend": None}, {"ignore_result": True}), id="no results"),
    pytest.param(Shop(beat()), id="beat"),
    pytest.param(Shop(options={"autoretry_for": (OSError,), "retry_backoff": True}), id="retries"),
    pytest.param(Shop(policy=Policy(key=ORDER, ttl=0)), id="a mutex"),
    pytest.param(Shop({"governed_store": "sqlite:///actions.db"}), id="governed actions"),
    pytest.param(Shop({"idempotency_store": None}, broker=AMQP, taskless=True, plain=True), id="nothing of ours"),
]


@pytest.mark.parametrize("shop", SOUND)
def test_nothing_is_found_in_a_sound_app(shop: Shop) -> None:
    if shop.taskless:
        app = Celery("shop", broker=AMQP, set_as_current=False)
        assert examine(app) == []
    else:
        assert examined(shop) == []


# --- each rule, and the same app without its fault -------------------------------------------------------------------

LATE = {"task_acks_late": True, "task_reject_on_worker_lost": True}
ON_AMQP = {"broker_transport_options": CONFIRMED}
SENTINEL = {"idempotency_store_options": {"master_name": "claims"}}
TWICE = {"worker_deduplicate_successful_tasks": True}
RETRIES = {"autoretry_for": (OSError,), "retry_kwargs": {"countdown": 9000}}
PATTERNS = {"idempotency_tasks": ["shop.*", "mail.*"]}

RULES = [
    # rule, severity, an app with the fault, sound ones that are like it
    ("unreadable", "fault", Shop({"beat_schedule": 5}), [Shop({"beat_schedule": {}})]),
    ("unreadable", "fault", Shop({"task_time_limit": "x"}), [Shop({"task_time_limit": 1800.0})]),
    ("unreadable", "fault", Shop({"result_expires": "x"}), [Shop({"result_expires": timedelta(days=1)})]),
    ("unreadable", "fault", Shop({"accept_content": 5}), [Shop({"accept_content": ["json"]})]),
    ("refused", "fault", Shop({"idempotency_store_options": {1: 2}}), [Shop({"idempotency_store_options": {}})]),
    ("refused", "fault", Shop({"idempotency_leese": 3}), [Shop({"idempotency_lease": 30})]),
    ("refused", "fault", Shop({"idempotency_store": None}), [Shop()]),
    ("refused", "fault", Shop(policy=Policy(verify=lambda order_id, amount: None)), [Shop()]),
    ("refused", "fault", Shop({"governed_store": "redis://localhost/0"}), [Shop({"governed_store": "sqlite:///a.db"})]),
    ("refused", "fault", Shop({"governed_stor": "sqlite:///a.db"}), [Shop({"governed_lease": 30})]),
    ("refused", "fault", Shop({"idempotency_mode": "off", "governed_lease": "x"}), [Shop({"governed_lease": 30})]),
    (
        "not-claimed",
        "risk",
        Shop(LATE, {"key": "order:{order_id}"}, plain=True),
        [
            Shop(LATE, {"key": "order:{order}"}, plain=True),
            Shop(LATE, {"key": 5}, plain=True),
            Shop({}, {"key": ORDER}),
        ],
    ),
    (
        "not-claimed",
        "risk",
        Shop({}, {"Strategy": "batches:collect"}),
        [Shop({"task_annotations": [{"*": {"rate_limit": 5}}]}, {"Strategy": Task.Strategy})],
    ),
    ("refused", "fault", Shop(policy=Policy(key=["order"])), [Shop(policy=Policy(key=["order_id"]))]),
    ("mode", "hint", Shop({"idempotency_mode": "off"}), [Shop()]),
    ("mode", "hint", Shop({"idempotency_mode": "observe"}), [Shop()]),
    ("nothing-on", "risk", Shop(taskless=True), [Shop()]),
    (
        "unread-setting",
        "risk",
        Shop({"IDEMPOTENCY_TTL": 3}),
        [Shop({"idempotency_ttl": 7200}), Shop({"IDEMPOTENCY_X": 3})],
    ),
    ("idle-pattern", "risk", Shop({**LATE, **PATTERNS}, plain=True), [Shop({**LATE}, plain=True)]),
    ("no-switch", "risk", Shop({"idempotency_tasks": ["shop.*"]}), [Shop()]),
    (
        "memory-store",
        "fault",
        Shop({"idempotency_store": "memory://"}),
        [
            Shop({"idempotency_store": "memory://"}, broker="memory://"),
            Shop({"idempotency_store": "memory://", "task_always_eager": True}),
        ],
    ),
    (
        "file-store",
        "risk",
        Shop({"idempotency_store": "sqlite:///idem.db"}, broker="redis://:p@cache.example.org:6379/0"),
        [
            Shop({"idempotency_store": "sqlite:///idem.db"}),
            Shop({"idempotency_store": "sqlite:///idem.db"}, broker="redis+socket:///run/redis.sock"),
            Shop({"idempotency_store": "sqlite:///idem.db"}, broker="redis://user:p@[::1]:6379/0"),
        ],
    ),
    (
        "deduplicated-twice",
        "fault",
        Shop(TWICE),
        [Shop({**TWICE, "result_backend": "rpc://"}), Shop(TWICE, {"acks_late": False})],
    ),
    (
        "unconfirmed-publish",
        "risk",
        Shop(broker=AMQP),
        [Shop({"broker_transport_options": CONFIRMED}, broker="pyamqp://"), Shop()],
    ),
    (
        "visibility-elsewhere",
        "risk",
        Shop({"result_backend_transport_options": {"visibility_timeout": 7200}}),
        [
            Shop({f"{who}_transport_options": {"visibility_timeout": 7200} for who in ("broker", "result_backend")}),
        ],
    ),
    (
        "results-before-redelivery",
        "risk",
        Shop({"result_expires": 600}, options={"ignore_result": True}),
        [Shop({"result_expires": None}), Shop({"result_expires": timedelta(days=1)})],
    ),
    (
        "visibility-elsewhere",
        "risk",
        Shop({"visibility_timeout": 43_200}),
        [
            Shop({"visibility_timeout": 43_200, "broker_transport_options": {"visibility_timeout": 43_200}}),
            Shop({"visibility_timeout": 43_200, "broker_transport_options": CONFIRMED}, broker=AMQP),
        ],
    ),
    (
        "misspelt-option",
        "risk",
        Shop({"broker_transport_options": {"visibilty_timeout": 43_200}}),
        [Shop({"broker_transport_options": {"visibility_timeout": 43_200, "socket_timeout": 5, "my_own": 1}})],
    ),
    (
        "store-on-the-broker",
        "risk",
        Shop({"idempotency_store": "redis://127.0.0.1/2"}),
        [
            Shop({"idempotency_store": "redis://localhost:6380/0"}),
            Shop({"idempotency_store": "redis+socket:///run/claims.sock"}, broker="redis+socket:///run/redis.sock"),
            Shop({"idempotency_store": "redis://localhost/2", **ON_AMQP}, broker=AMQP),
        ],
    ),
    (
        "store-on-the-broker",
        "risk",
        Shop(
            {"idempotency_store": "redis+socket:///run/redis.sock?virtual_host=2"},
            broker="redis+socket:///run/redis.sock",
        ),
        [
            Shop(
                {"idempotency_store": "sentinel://localhost:26379/0", **SENTINEL}, broker="sentinel://localhost:26379/0"
            )
        ],
    ),
    (
        "always-eager",
        "hint",
        Shop({"task_always_eager": True}),
        [Shop({"task_always_eager": True}, broker="memory://"), Shop()],
    ),
    ("pool-not-tested", "hint", Shop({"worker_pool": "eventlet"}), [Shop({"worker_pool": "gevent"})]),
    ("acked-early", "risk", Shop(plain=True), [Shop(LATE, plain=True), Shop()]),
    (
        "acked-early",
        "risk",
        Shop({"task_annotations": {"shop.charge": {"acks_late": False}}}),
        [Shop({"task_annotations": {"shop.charge": {"rate_limit": "1/s"}, "other": {"acks_late": False}}})],
    ),
    ("acked-early", "risk", Shop({"task_annotations": [{"*": {"acks_late": False}}]}), [Shop()]),
    ("acked-early", "hint", Shop(options={"acks_late": False}), [Shop(options={"acks_late": True})]),
    ("acked-early", "hint", Shop(LATE, {"acks_late": False}, plain=True), [Shop(LATE, plain=True)]),
    (
        "lost-with-child",
        "risk",
        Shop({"task_acks_late": True}, plain=True),
        [
            Shop({"task_acks_late": True}, {"reject_on_worker_lost": True}, plain=True),
            Shop({"task_acks_late": True, "task_retry_on_worker_lost": True}, plain=True),
            Shop(options={"reject_on_worker_lost": False}),
        ],
    ),
    (
        "longer-than-visibility",
        "risk",
        Shop({**UNKEPT, "worker_prefetch_multiplier": 1}, {"time_limit": 3601}),
        [
            Shop({"worker_prefetch_multiplier": 1}, {"time_limit": 3601}),
            Shop({**UNKEPT, "worker_prefetch_multiplier": 1}, {"time_limit": 3600}),
            Shop({**UNKEPT, "worker_prefetch_multiplier": 1}, {"time_limit": 3601, "acks_late": False}),
        ],
    ),
    (
        "longer-than-visibility",
        "risk",
        Shop({"worker_prefetch_multiplier": 1}, {"soft_time_limit": 2000}, broker=SQS),
        [
            Shop({"worker_prefetch_multiplier": 1}, {"soft_time_limit": 1800}, broker=SQS),
            Shop({"broker_transport_options": {"visibility_timeout": 9000}}, {"soft_time_limit": 2000}, broker=SQS),
        ],
    ),
    (
        "prefetched-too-long",
        "risk",
        Shop(UNKEPT, {"time_limit": 1000}),
        [
            Shop(options={"time_limit": 1000}),
            Shop(UNKEPT, {"time_limit": 900}),
            Shop(UNKEPT),
            Shop({**UNKEPT, "worker_prefetch_multiplier": 1}, {"time_limit": 1000}),
        ],
    ),
    (
        "prefetched-too-long",
        "risk",
        Shop({"worker_prefetch_multiplier": 0}, {"time_limit": 10}, broker=SQS),
        [Shop({"worker_prefetch_multiplier": 0}, {"time_limit": 10})],
    ),
    (
        "retry-longer-than-visibility",
        "risk",
        Shop(UNKEPT, RETRIES),
        [
            Shop(options=RETRIES),
            Shop(UNKEPT, {**RETRIES, "max_retries": 0}),
            Shop(UNKEPT, {"autoretry_for": (OSError,), "retry_backoff": 100, "retry_backoff_max": 9000}),
        ],
    ),
    (
        "retry-longer-than-visibility",
        "risk",
        Shop(UNKEPT, {"autoretry_for": (OSError,), "retry_backoff": 1000, "retry_backoff_max": 9000}),
        [Shop(UNKEPT, {"autoretry_for": (OSError,), "retry_backoff": 1000})],  # never more than 600 s by itself
    ),
    (
        "longer-than-consumer-timeout",
        "hint",
        Shop({"broker_transport_options": CONFIRMED}, {"time_limit": 1801}, broker=AMQP),
        [
            Shop({"broker_transport_options": CONFIRMED}, {"time_limit": 1800}, broker=AMQP),
            Shop({"broker_transport_options": CONFIRMED}, {"time_limit": 1801, "acks_late": False}, broker=AMQP),
            Shop(options={"time_limit": 1801}),
        ],
    ),
    (
        "longer-than-consumer-timeout",
        "risk",
        Shop(
            {
                "broker_transport_options": CONFIRMED,
                "task_routes": {"shop.*": "slow"},
                "task_queues": [Queue("slow", queue_arguments={"x-consumer-timeout": 60_000}), Queue("celery")],
            },
            {"default_retry_delay": 61},
            broker=AMQP,
        ),
        [
            Shop(
                {
                    "broker_transport_options": CONFIRMED,
                    "task_queues": [Queue("slow", queue_arguments={"x-consumer-timeout": 60_000}), Queue("celery")],
                },
                {"default_retry_delay": 61},
                broker=AMQP,
            ),
            Shop(
                {
                    "broker_transport_options": CONFIRMED,
                    "task_queues": [
                        Queue("celery", queue_arguments={"x-consumer-timeout": 60_000, "x-queue-type": "quorum"})
                    ],
                },
                {"default_retry_delay": 61},
                broker=AMQP,
            ),
        ],
    ),
    (
        "soft-limit-too-late",
        "risk",
        Shop(options={"time_limit": 300, "soft_time_limit": 300}),
        [Shop(options={"time_limit": 330, "soft_time_limit": 300}), Shop({"task_time_limit": 300})],
    ),
    (
        "cut-by-shutdown",
        "hint",
        Shop({"worker_soft_shutdown_timeout": 10.0}, {"time_limit": 60}),
        [
            Shop(options={"time_limit": 60}),
            Shop({"worker_soft_shutdown_timeout": 90.0}, {"time_limit": 60}),
            Shop({"worker_soft_shutdown_timeout": 10.0}, {"time_limit": 60}, Policy(verify=lambda *_: None)),
        ],
    ),
    (
        "lease-too-short",
        "risk",
        Shop(policy=Policy(lease=10.0)),
        [Shop(policy=Policy(lease=11.0)), Shop({"idempotency_store_timeout": 1.0}, policy=Policy(lease=10.0))],
    ),
    ("lease-long", "hint", Shop(policy=Policy(lease=7200)), [Shop(policy=Policy(lease=600))]),
    ("waits-in-slot", "hint", Shop({"idempotency_wait_timeout": 60}), [Shop({"idempotency_wait_timeout": 5})]),
    (
        "forgotten-before-redelivery",
        "fault",
        Shop(policy=Policy(ttl=3600)),
        [
            Shop({"broker_transport_options": {"visibility_timeout": 600}}, policy=Policy(ttl=3600)),
            Shop({"broker_transport_options": CONFIRMED}, policy=Policy(ttl=3600), broker=AMQP),
            Shop(options={"acks_late": False}, policy=Policy(ttl=3600)),
        ],
    ),
    ("forgotten-before-redelivery", "risk", Shop(policy=Policy(key=ORDER, ttl=300)), [Shop(policy=Policy(key=ORDER))]),
    (
        "forgotten-before-retry",
        "risk",
        Shop(options=RETRIES, policy=Policy(key=ORDER, ttl=8000)),
        [Shop(options=RETRIES, policy=Policy(key=ORDER, ttl=10_000)), Shop(options=RETRIES, policy=Policy(ttl=8000))],
    ),
    (
        "result-before-record",
        "hint",
        Shop(policy=Policy(ttl=604_800)),
        [Shop({"result_expires": 604_800}, policy=Policy(ttl=604_800)), Shop(options={"ignore_result": True})],
    ),
    (
        "value-not-kept",
        "risk",
        Shop(options={"ignore_result": True}, policy=Policy(on_replay=lambda value, record: value)),
        [Shop(policy=Policy(on_replay=lambda value, record: value)), Shop(options={"ignore_result": True})],
    ),
    ("fail-open", "hint", Shop({"idempotency_storage_policy": "fail_open"}), [Shop()]),
    (
        "beat-key-never-changes",
        "fault",
        fixed(),
        [
            fixed(schedule=timedelta(days=2)),
            Shop(beat(), policy=Policy(key="arguments", ttl=0)),
            Shop(beat(), policy=Policy(key=lambda arguments: "this hour")),
            Shop(beat(kwargs={"amount": BeatLazyFunc(int)}), policy=Policy(key="arguments")),
            Shop(beat(), policy=Policy(key="message")),
            Shop({"beat_schedule": {"other": {"task": "not.ours", "schedule": 60.0}}}, policy=Policy(key="arguments")),
            fixed(schedule=None),
            fixed(schedule="hourly"),
        ],
    ),
    (
        "beat-key-never-changes",
        "fault",
        fixed(schedule=crontab(hour=3, minute=30)),  # the record of yesterday's run ends a moment after today's begins
        [
            fixed(schedule=crontab(hour=3, minute=30, day_of_week="mon")),
            fixed(schedule=crontab(minute=0, hour=0, day_of_month=1)),
        ],
    ),
    ("beat-key-never-changes", "fault", fixed(schedule=schedule(3600)), [fixed(schedule=schedule(90_000))]),
    (
        "beat-key-never-changes",
        "fault",
        Shop(beat(options={"task_id": "nightly"})),
        [Shop(beat(options={"queue": "x"}))],
    ),
    ("beat-key-never-changes", "fault", Shop(beat(options={"idempotency_key": "nightly"})), [Shop(beat(options={}))]),
    (
        "beat-unknown-task",
        "hint",
        Shop({"beat_schedule": {"gone": {"task": "shop.chrage", "schedule": 60.0}}}),
        [Shop(beat()), Shop({"beat_schedule": {"own": {"task": "celery.backend_cleanup", "schedule": 60.0}}})],
    ),
    ("verify-takes-other-arguments", "risk", Shop(policy=Policy(verify=lambda a=0, b=0: None)), [Shop()]),
    (
        "countdown-longer-than-visibility",
        "risk",
        Shop({**UNKEPT, **beat(options={"countdown": 4000})}),
        [Shop(beat(options={"countdown": 4000})), Shop({**UNKEPT, **beat(options={"countdown": 60})})],
    ),
]
NUMBERED = [pytest.param(*row, id=f"{row[0]} {n}") for n, row in enumerate(RULES)]


@pytest.mark.parametrize(("rule", "severity", "shop", "sound"), NUMBERED)
def test_a_rule_fires_where_it_should_and_nowhere_else(rule: str, severity: str, shop: Shop, sound: list[Shop]) -> None:
    found = examined(shop)
    assert [(one.rule, one.severity) for one in found] == [(rule, severity)]
    (finding,) = found
    assert finding.found
    assert finding.why.endswith(".")
    assert finding.change
    for like in sound:
        assert rule not in [one.rule for one in examined(like)]


def rules_in_the_code() -> set[str]:
    """The names of all rules: the second word of each ``Finding``, the third of each ``_of``."""
    found = {"store"}
    for path in Path(celery_idem.doctor.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in {"Finding", "_of"}:
                name = call.args[1 if call.func.id == "Finding" else 2]
                found |= {name.value} if isinstance(name, ast.Constant) and isinstance(name.value, str) else set()
    return found


def test_every_rule_is_tested_and_documented() -> None:
    documented = {row[0].strip("`") for row in page("docs/reference/cli.md").rows() if len(row) == 4}
    assert {row[0] for row in RULES} | {"store"} == rules_in_the_code() == documented


# --- what a finding says ---------------------------------------------------------------------------------------------


def test_numbers_names_and_the_line_to_write() -> None:
    (finding,) = examined(Shop({**UNKEPT, "task_time_limit": 5400, "worker_prefetch_multiplier": 1}, broker=SQS))
    assert finding.tasks == ("shop.charge",)
    assert finding.found == "time limit 1 h 30 min, visibility timeout 30 min"
    assert finding.change == 'broker_transport_options["visibility_timeout"] = 5460'


def test_a_longer_ttl_is_no_advice_that_turns_a_beat_task_into_replays() -> None:
    def advice(every: float, policy: Policy, **entry: Any) -> list[str]:
        shop = Shop(beat(schedule=every, **entry), policy=policy)
        return [one.change for one in examined(shop) if one.rule == "forgotten-before-redelivery"]

    slot = ["let the key name the slot (choose-a-key.md, on beat), and only then Policy(ttl=7200)"]
    hourly = Policy(key=ORDER, ttl=3000)
    assert advice(3600, hourly) == slot
    assert advice(3600, Policy(key=lambda arguments: "eu", ttl=3000)) == slot
    assert advice(7201, hourly) == ["Policy(ttl=7200)"]
    assert advice(3600, Policy(ttl=3000)) == ["Policy(ttl=7200)"], "each message is an operation of its own"
    assert advice(3600, hourly, kwargs={"amount": BeatLazyFunc(int)}) == ["Policy(ttl=7200)"]
    assert advice(7201, Policy(key=lambda arguments: "eu", ttl=3000)) == [
        "Policy(ttl=7200), unless the ttl is what lets the next slot run"
    ]


def test_one_ttl_is_proposed_that_outlasts_redelivery_and_retries() -> None:
    found = examined(Shop(options=RETRIES, policy=Policy(key=ORDER, ttl=300)))
    assert {one.rule: one.change for one in found} == {
        "forgotten-before-redelivery": "Policy(ttl=18000)",
        "forgotten-before-retry": "Policy(ttl=18000)",
    }


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
def test_a_driver_that_is_not_installed_is_what_a_worker_does_not_start_with(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)  # as if it were not there
    (finding,) = examined(Shop({"idempotency_store": f"postgresql+{driver}://shop@db/claims"}))
    assert (finding.rule, finding.severity) == ("refused", "fault")
    assert "celery-idem[postgres]" in finding.found + finding.change
    monkeypatch.undo()
    assert examined(Shop({"idempotency_store": f"postgresql+{driver}://shop@db/claims"})) == []


@pytest.mark.parametrize(("named", "meant"), [("shop.chrage", True), ("shop.renamed", False)])
def test_a_beat_task_that_is_only_misspelt_is_told_by_its_name(named: str, meant: bool) -> None:
    (finding,) = examined(Shop({"beat_schedule": {"gone": {"task": named, "schedule": 60.0}}}))
    assert finding.change.startswith("is 'shop.charge' meant? ") is meant


def test_tasks_with_the_same_finding_share_it() -> None:
    with opened(Shop({"idempotency_lease": 5.0})) as app:
        for name in "abcd":
            app.task(name=f"shop.{name}", base=IdempotentTask, shared=False, lazy=False)(charge)
        (finding,) = examine(app)
    assert finding.tasks == ("shop.a", "shop.b", "shop.c", "shop.charge", "shop.d")
    assert finding.where == "shop.a, shop.b, shop.c and 2 more"


def test_the_worst_comes_first() -> None:
    severities = ("hint", "fault", "risk", "fault")
    found = merged(Finding(severity, str(n), "", "", "", "") for n, severity in enumerate(severities))
    assert [one.rule for one in found] == ["1", "3", "2", "0"]


def test_the_text_is_as_wide_as_the_terminal_and_shows_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    said = finding_text(Finding("risk", "r", "task", "f", "word " * 30, "x = 1", ("a\x1b[31m",)))
    assert max(map(len, said.splitlines())) <= 50
    assert said.splitlines()[0] == "RISK  a\\x1b[31m  (r)"
    assert said.splitlines()[-1] == "  change  x = 1"


# --- the command -----------------------------------------------------------------------------------------------------


def run(app: Celery, *words: str, exit_code: int = 0) -> Result:
    obj = CLIContext(app=app, no_color=True, workdir=None)
    result = CliRunner().invoke(cli.idem, ["doctor", *words], obj=obj, prog_name="idem")
    assert result.exit_code == exit_code, result.output
    return result


def test_the_command_on_a_sound_app() -> None:
    with opened(Shop()) as app:
        assert run(app).stdout == "nothing found\n"
        assert json.loads(run(app, "--json").stdout) == {"faults": 0, "risks": 0, "hints": 0, "findings": []}


def test_a_fault_is_exit_code_1_and_a_risk_is_not() -> None:
    with opened(fixed(schedule=60.0)) as app:
        said = run(app, exit_code=1).stdout
        assert said.startswith("FAULT  beat_schedule['nightly']: shop.charge  (beat-key-never-changes)\n")
        assert said.endswith("\n1 fault\n")
        told = json.loads(run(app, "--json", exit_code=1).stdout)
    assert told["faults"] == 1
    assert told["findings"][0]["subject"] == "beat_schedule['nightly']"
    with opened(Shop(policy=Policy(lease=2.0))) as app:
        assert run(app).stdout.endswith("\n1 risk\n")


def test_the_store_is_asked_only_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(Shop({"idempotency_store": f"sqlite:///{tmp_path}/idem.db"}, broker="filesystem://")) as app:
        run(app)
        assert not (tmp_path / "idem.db").exists()
        store = runtime_of(app).store
        monkeypatch.setattr(type(store), "check", lambda self: ["it may forget: set appendonly yes"])
        assert "(store)\n  found   it may forget\n" in run(app, "--store").stdout
    with opened(Shop({"idempotency_store": "redis://localhost:1/0"})) as app:
        assert run(app, "--store", exit_code=1).stderr.startswith("Error: ")


def test_what_two_urls_tell_is_not_told_again_where_the_store_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, rule in (("redis://localhost/2", "store-on-the-broker"), ("redis://claims/0", "store")):
        with opened(Shop({"idempotency_store": url})) as app:
            store = runtime_of(app).store
            monkeypatch.setattr(type(store), "check", lambda self: [])
            monkeypatch.setattr(type(store), "shares_memory_with", lambda self, broker: "one process: give it its own")
            told = json.loads(run(app, "--store", "--json").stdout)
        assert [one["rule"] for one in told["findings"]] == [rule]


def test_the_mode_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "off")
    assert [one.rule for one in examined(Shop({"idempotency_store": None}))] == ["mode"]


@pytest.mark.parametrize("broker", ["filesystem://", "redis://localhost/0", "amqp://localhost"])
def test_the_example_project_is_sound(broker: str, tmp_path: Path) -> None:
    env = {**os.environ, "SHOP_DIR": str(tmp_path), "SHOP_BROKER": broker}
    argv = [sys.executable, "-m", "celery", "-A", "example_project.app", "idem", "doctor"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "nothing found\n"), done.stdout + done.stderr
