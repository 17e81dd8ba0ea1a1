"""What is published at the beginning of a run, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import chain, chord
from celery.canvas import Signature

from tests.simulate.house import House
from tests.simulate.world import Schedule, World


@dataclass(frozen=True)
class Scenario:
    """One beginning.

    Args:
        expected: message and task of each continuation that must be published.
        bound: how many decisions of the scheduler may differ from the default, where all such schedules are walked.
    """

    name: str
    publish: Callable[[Any], None]
    expected: tuple[tuple[str, str], ...] = ()
    workers: int = 2
    sqlite: bool = False
    bound: int = 1


def _sig(app: Any, name: str, message: str, **options: Any) -> Signature[Any]:
    kwargs = options.pop("kwargs", {})
    signature: Signature[Any] = app.signature(name, kwargs=kwargs)
    return signature.set(task_id=message, **options)


def _plain(app: Any) -> None:
    _sig(app, "charge", "m1").apply_async()


def _two(app: Any) -> None:
    _sig(app, "charge", "m1").apply_async()
    _sig(app, "charge", "m2").apply_async()


def _linked(app: Any) -> None:
    _sig(app, "charge", "m1").apply_async(link=app.signature("note"))


def _two_linked(app: Any) -> None:
    _sig(app, "charge", "m1").apply_async(link=app.signature("note"))
    _sig(app, "charge", "m2").apply_async(link=app.signature("note"))


def _chain(app: Any) -> None:
    chain(_sig(app, "charge", "m1"), _sig(app, "note", "m2"), _sig(app, "note", "m3"), app=app).apply_async()


def _chord(app: Any) -> None:
    members = [_sig(app, "charge", "m1"), _sig(app, "charge", "m2", kwargs={"order": 2})]
    chord(members, app=app, task_id="g1")(_sig(app, "note", "m3"))


def _failing(app: Any) -> None:
    _sig(app, "fail", "m1").apply_async(link_error=app.signature("note", immutable=True))


def _failing_two(app: Any) -> None:
    _sig(app, "fail", "m1").apply_async(link_error=app.signature("note", immutable=True))
    _sig(app, "fail", "m2").apply_async()


def _again(countdown: float) -> Callable[[Any], None]:
    def publish(app: Any) -> None:
        _sig(app, "again", "m1", kwargs={"countdown": countdown}).apply_async(link=app.signature("note"))

    return publish


def _again_failing(app: Any) -> None:
    kwargs = {"countdown": 10, "fails": True}
    _sig(app, "again", "m1", kwargs=kwargs).apply_async(link_error=app.signature("note", immutable=True))


def _checked(app: Any) -> None:
    _sig(app, "checked", "m1").apply_async(link=app.signature("note"))
    _sig(app, "checked", "m2").apply_async()


def _again_two(app: Any) -> None:
    _sig(app, "again", "m1", kwargs={"countdown": 10, "times": 2}).apply_async()
    _sig(app, "charge", "m2").apply_async()


def _swap(app: Any) -> None:
    _sig(app, "swap", "m1").apply_async(link=app.signature("note"))


def _given_back(app: Any) -> None:
    _sig(app, "later", "m1").apply_async(link=app.signature("note"))
    _sig(app, "charge", "m2").apply_async()


def _long(app: Any) -> None:
    _sig(app, "long", "m1").apply_async(link=app.signature("note"))


def _crowd(app: Any) -> None:
    _sig(app, "again", "m1", kwargs={"countdown": 10}).apply_async(link=app.signature("note"))
    _sig(app, "charge", "m2").apply_async(link=app.signature("note"))
    _sig(app, "long", "m3", kwargs={"order": 2}).apply_async()
    _sig(app, "fail", "m4", kwargs={"order": 2}).apply_async()


NOTE = ("m1", "note")
SCENARIOS = (
    Scenario("one message", _plain, bound=2),
    Scenario("two messages of one key", _two, bound=2),
    Scenario("a link", _linked, (NOTE,), bound=2),
    Scenario("two messages of one key, with links", _two_linked, (NOTE, ("m2", "note"))),
    Scenario("a chain of three", _chain, (NOTE, ("m2", "note"))),
    Scenario("a chord of two", _chord),
    Scenario("a failure with an errback", _failing, (NOTE,)),
    Scenario("two failures of one key", _failing_two, (NOTE,)),
    Scenario("a retry at once, with a link", _again(0), (NOTE,)),
    Scenario("a retry in 10 s, with a link", _again(10), (NOTE,)),
    Scenario("a retry in 10 s that fails", _again_failing, (NOTE,)),
    Scenario("two retries, and another message of the key", _again_two),
    Scenario("a replacement, with a link", _swap),
    Scenario("a message given back, with a link, and another of the key", _given_back, (NOTE,)),
    Scenario("two messages of one key, whose effect can be looked up", _checked, (NOTE,)),
    Scenario("a body longer than its lease, with a link", _long, (NOTE,)),
    Scenario("two messages of one key on SQLite", _two, sqlite=True),
    Scenario("a retry in 10 s, with a link, on SQLite", _again(10), (NOTE,), sqlite=True),
    Scenario("three workers, two keys, four messages", _crowd, (NOTE, ("m2", "note")), workers=3),
)


def run(house: House, scenario: Scenario, schedule: Schedule) -> World:
    """One run of the scenario under this schedule."""
    world = house.world(schedule, workers=scenario.workers, sqlite=scenario.sqlite)
    world.expected = list(scenario.expected)
    house.publisher.set_current()
    scenario.publish(house.publisher)
    world.run()
    return world
