"""An application of every kind of task behaves the same with the whole app switched on by a setting.

``mixed_app`` and ``CALLS`` are plain Celery. One worker runs all of it with the setting absent, one with it, one in
observe mode, and one each of the first two on a database backend; then what observers saw is compared.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.beat import Scheduler

from celery_idem.stores.base import open_store
from tests.integration.mixed_seen import Mixed, NoResult, State
from tests.support.services import PostgresServer, RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.postgres]

SOURCE = Path(__file__).with_name("mixed_app.py").read_text("utf-8")
ON = {"task_annotations": ("celery_idem:annotation",)}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "redis": ON,
    "observe": {**ON, "idempotency_mode": "observe"},
    "plain, database": {},
    "postgresql": ON,
}
SAME = [("plain", "redis"), ("plain", "observe"), ("plain, database", "postgresql")]


def stamped(sig: Any, **stamps: Any) -> Any:
    sig.stamp(**stamps)
    return sig


def beat(m: Any) -> Any:
    scheduler = Scheduler(m.app, lazy=True)
    entry = scheduler._maybe_entry("every-day", m.app.conf.beat_schedule["every-day"])
    return scheduler.apply_async(entry, advance=False)


def broadcast(m: Any) -> Any:
    exchange = m.app.amqp.queues[f"{m.main}.news"].exchange
    return m.news.apply_async(declare=[exchange])  # on Redis a publisher knows of no exchange it did not declare


def past() -> datetime:
    return datetime.now(timezone.utc) - timedelta(hours=1)


Send = Callable[[Any], Any]
CALLS: dict[str, tuple[Send, Any]] = {
    "a task": (lambda m: m.add.delay(1, 2), 3),
    "a shared task": (lambda m: m.app.tasks[f"{m.app.main}.shared"].delay(4), 8),
    "a task class": (lambda m: m.pay.delay(50), "paid 50"),
    "a base with its own call": (lambda m: m.audited.delay(5), 5),
    "a base whose call skips super": (lambda m: m.tagged.delay(6), ["tagged", 6]),
    "a base with its own apply_async": (lambda m: m.defaulting.delay("x"), "x own-x-0"),
    "models": (lambda m: m.model.delay({"number": 1}), {"number": 2}),
    "a decorated function": (lambda m: m.decorated.delay(3), 6),
    "a name by hand": (lambda m: m.named.delay(9), 9),
    "made late": (lambda m: m.late.delay(), "late"),
    "made lazily": (lambda m: m.app.tasks["mixed.lazily"].delay(), "lazily"),
    "autodiscovered": (lambda m: m.app.send_task("mixed.part", (1,)), 1),
    "send_task": (lambda m: m.app.send_task("billing.named-by-hand", kwargs={"x": 7}), 7),
    "autoretry": (lambda m: m.flaky.delay(), "up"),
    "hooks": (lambda m: m.hooked.delay(5), 2.0),
    "hooks of a failure": (lambda m: m.hooked.delay(0), State("FAILURE")),
    "track_started": (lambda m: m.tracked.delay(), "STARTED"),
    "an ignored result": (lambda m: m.ignored.delay(), NoResult("SUCCESS")),
    "a value nothing can say": (lambda m: m.unsayable.delay(), NoResult("SUCCESS")),
    "late acks": (lambda m: m.late_ack.delay(), "late"),
    "early acks": (lambda m: m.early_ack.delay(), "early"),
    "throws": (lambda m: m.throwing.delay(), State("FAILURE")),
    "limits and priority": (lambda m: m.limited.apply_async(priority=5, expires=3600), "limited"),
    "a soft time limit": (lambda m: m.slow.delay(), "cut short"),
    "expired": (lambda m: m.add.apply_async((3, 3), expires=past()), State("REVOKED")),
    "a countdown": (lambda m: m.add.apply_async((4, 3), countdown=1), 7),
    "annotations of its own": (lambda m: m.annotated.delay(), "500/m 7"),
    "a retry with other arguments": (lambda m: m.retry_changed.delay(0), 2),
    "a retry that does not raise": (lambda m: m.retry_quietly.delay(), str),
    "a retry too many": (lambda m: m.retry_too_often.delay(), State("FAILURE")),
    "replaced by a task": (lambda m: m.replaced.delay("task"), 5),
    "replaced by a chain": (lambda m: m.replaced.delay("chain"), 7),
    "replaced by a group": (lambda m: m.replaced.delay("group"), [2, 2]),
    "a chain": (lambda m: chain(m.add.s(1, 1), m.add.s(10), m.audited.s())(), 12),
    "a chord": (lambda m: chord([m.add.si(1, 1)] * 2)(m.total.s()), 4),
    "a chord that fails": (lambda m: chord([m.failing.si("part"), m.add.si(9, 2)])(m.total.s()), State("FAILURE")),
    "a group": (lambda m: group(m.add.s(n, n) for n in range(3))(), [0, 2, 4]),
    "a chain through a group": (lambda m: chain(m.add.s(0, 1), group(m.add.s(1), m.add.s(1)), m.total.s())(), 4),
    "links": (lambda m: m.add.apply_async((5, 5), link=[m.audited.s(), chain(m.add.s(1), m.add.s(2))]), 10),
    "link_error": (
        lambda m: m.failing.apply_async(("why",), link_error=[m.errback.s(), m.old_errback.s()]),
        State("FAILURE"),
    ),
    "add_to_chord": (lambda m: chord([m.growing.si()])(m.total.s()), 40),
    "map": (lambda m: m.total.map([[1, 2], [3]]).delay(), [3, 3]),
    "starmap": (lambda m: m.add.starmap([(1, 2), (3, 4)]).delay(), [3, 7]),
    "chunks": (lambda m: m.add.chunks([(n, n) for n in range(4)], 2)(), [[0, 2], [4, 6]]),
    "tasks started in a body": (lambda m: m.spawning.delay(), list),
    "a task called in a body": (lambda m: m.nesting.delay(3), 10),
    "the request": (lambda m: m.whoami.apply_async((1,), {"y": 3}, headers={"tenant": "acme"}), dict),
    "stamps": (lambda m: stamped(m.whoami.s(2), batch="b1").apply_async(headers={"tenant": "globex"}), dict),
    "a state of its own": (lambda m: m.progressing.delay(), ["HALF", "{'done': 50}"]),
    "Ignore": (lambda m: m.ignoring.delay(), NoResult("IGNORED")),
    "Reject": (lambda m: m.rejecting.delay(), NoResult("REJECTED")),
    "Reject, requeued": (lambda m: m.giving_back.delay(), "taken again"),
    "a broadcast": (broadcast, "heard"),
    "a task of Celery's": (lambda m: m.app.tasks["celery.accumulate"].delay(1, 2, index=1), 2),
    "a beat entry": (beat, 42),
}
NOT_ON = {"plain, database": {"add_to_chord"}, "postgresql": {"add_to_chord"}}


@pytest.fixture(scope="module")
def run_in(redis_server: RedisServer, postgres_server: PostgresServer) -> Iterator[Callable[[str], Mixed]]:
    made: dict[str, Mixed] = {}
    postgres = postgres_server.create_database()
    with contextlib.closing(open_store(postgres, timeout=30)) as store:
        store.create_schema()

    def run(mode: str) -> Mixed:
        if mode not in made:
            settings = dict(MODES[mode])
            if settings:
                settings["idempotency_store"] = postgres if mode == "postgresql" else redis_server.new_database()
            database = mode in NOT_ON
            backend = None if database else redis_server.new_database()
            made[mode] = Mixed(SOURCE, redis_server.new_database(), backend, settings)
            made[mode].start({name: call[0] for name, call in CALLS.items() if name not in NOT_ON.get(mode, ())})
        return made[mode]

    yield run
    for mixed in made.values():
        mixed.close()
    postgres_server.drop_database(postgres)


def calls(modes: list[Any]) -> list[Any]:
    """Every mode, or pair of modes, with every call it can do."""
    return [
        pytest.param(mode, name, id=f"{mode if isinstance(mode, str) else mode[1]}: {name}")
        for mode in modes
        for name in CALLS
        if name not in NOT_ON.get(mode if isinstance(mode, str) else mode[1], ())
    ]


# --- the application's own tests ------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "name"), calls(list(MODES)))
def test_the_call_comes_to_what_it_says(run_in: Any, mode: str, name: str) -> None:
    mixed, expected = run_in(mode), CALLS[name][1]
    result = mixed.results[name]
    if isinstance(expected, NoResult):
        assert mixed.last_state(result.id) == expected.state
    elif isinstance(expected, State):
        result.get(timeout=30, propagate=False)
        assert result.state == expected.name
    else:
        value = result.get(timeout=30)
        assert isinstance(value, expected) if isinstance(expected, type) else value == expected


@pytest.mark.parametrize("mode", MODES)
def test_results_of_a_group_come_one_by_one(run_in: Any, mode: str) -> None:
    result = run_in(mode).results["a group"]
    native = [meta["result"] for _, meta in result.iter_native()] if mode not in NOT_ON else [4, 2, 0]
    assert sorted(native) == [child.get(timeout=30) for child in result] == [0, 2, 4]


@pytest.mark.parametrize("mode", MODES)
def test_eager_calls(run_in: Any, mode: str) -> None:
    m = run_in(mode).module
    assert m.add.apply((1, 2)).get() == 3
    assert m.retry_changed.apply((0,)).get() == 2
    assert m.hooked.apply((0,)).state == "FAILURE"
    m.app.conf.task_always_eager = True
    try:
        assert m.add.delay(1, 2).get() == 3
        assert chain(m.add.s(1, 1), m.add.s(5))().get() == 7
    finally:
        m.app.conf.task_always_eager = False
    assert m.add(2, 2) == 4
    assert m.nesting(3) == 10


# --- what observers see ---------------------------------------------------------------------------


@pytest.mark.parametrize(("modes", "name"), calls(SAME))
def test_observers_see_the_same(run_in: Any, modes: tuple[str, str], name: str) -> None:
    """Bodies, signals, hooks, requests, messages, worker events, log lines, and what the backend keeps."""
    plain, other = (run_in(mode).observed(name) for mode in modes)
    assert plain, "nothing was seen at all"
    gone, new = sorted(plain - other), sorted(other - plain)
    assert gone + new == [], "\n".join(["no longer seen:", *gone, "seen in its place:", *new])


# --- and that it was on ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_protected_run_claims_its_key(run_in: Any, mode: str) -> None:
    mixed = run_in(mode)
    claimed = {event["message_id"] for event in mixed.idem_events if event["type"] == "idem-new"}
    ran = {
        r["id"] for r in mixed.seen() if r["kind"] == "prerun" and not r["task"].startswith(("celery.", "mixed.news"))
    }
    assert claimed == (ran if MODES[mode] else set())


@pytest.mark.parametrize("mode", ["redis", "observe", "postgresql", "plain"])
def test_a_second_copy_of_every_message(run_in: Any, mode: str) -> None:
    """Last, for it disturbs what the others look at: every message of the script arrives once more."""
    mixed = run_in(mode)
    before = Counter(mixed.bodies())
    copies = mixed.send_all_again()
    mixed.wait_for(copies)
    again = Counter(mixed.bodies()) - before
    if mode in {"plain", "observe"}:
        assert sum(again.values()) >= sum(before.values()) * 0.8, "without protection nearly all run again"
    else:
        assert {task for task, _ in again} <= UNPROTECTED
    assert (mode == "observe") == any(event["type"] == "idem-would-replay" for event in mixed.idem_events)


UNPROTECTED = {"rejecting"}
"""Its body said that it did nothing."""
