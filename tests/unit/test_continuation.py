"""What a message's end publishes, across replays: same ids, once, and only for its own canvas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from celery import VERSION, Task, _state, chain, chord, group
from celery.canvas import StampingVisitor
from celery.exceptions import Ignore, ImproperlyConfigured
from kombu.utils.imports import symbol_by_name

from celery_idem import Policy, ReplayImpossible, StoreUnavailable, continuation
from celery_idem.core.records import Kind, State
from tests.support.delivery import Shop
from tests.support.workers import wait_until


@pytest.fixture
def make_shop() -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []
    before = _state._tls.current_app

    def make(**conf: Any) -> Shop:
        made.append(Shop(**conf))
        # As in a worker: a chord's body that begins with one of Celery's own tasks is sent by the current app, which
        # else is Celery's default one, with the broker on the standard port.
        made[-1].app.set_current()
        return made[-1]

    yield make
    for shop in made:
        shop.close()
    _state._set_current_app(before)


@pytest.fixture
def shop(make_shop: Any) -> Shop:
    return make_shop()


def charge_task(shop: Shop, policy: Policy | None = None, body: Any = None, **options: Any) -> Any:
    """A task that counts its runs and does what ``body`` says."""
    runs: list[Any] = []

    @shop.task(bind=True, name="charge", idempotency=policy or Policy(), **options)
    def charge(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(self.idempotency)
        return body(self, *args, **kwargs) if body else 50

    charge.runs = runs
    return charge


def plain_task(shop: Shop, name: str = "plain") -> Any:
    @shop.task(base=Task, name=name)
    def plain(*args: Any) -> Any:
        return args

    return plain


def step_task(shop: Shop) -> Any:
    @shop.task(name="step")
    def step(*args: Any) -> Any:
        return args

    return step


def tell_task(shop: Shop, name: str = "tell") -> Any:
    """An errback Celery publishes: it takes the failed task's id alone."""

    @shop.task(base=Task, name=name)
    def tell(failed: str) -> None: ...

    return tell


def refuse(*_: Any) -> Any:
    raise ValueError("declined")


def parts(messages: list[Any]) -> list[Any]:
    """Published messages but for the id of the group that Celery itself draws around several links."""
    drawn = {m["group"] for m in messages if m["group"] and UUID(m["group"]).version == 4}
    text = json.dumps(messages, sort_keys=True)
    for group_id in drawn:
        text = text.replace(group_id, "drawn by Celery")
    return list(json.loads(text))


def killed_before(shop: Shop, point: Any, message: Any) -> list[Any]:
    """What the message publishes until its process is killed at the point."""
    with shop.idem.killed(before=point):
        shop.deliver(message)
    return shop.messages()


def record_of(shop: Shop, task: Any) -> Any:
    return shop.store.get(task.runs[-1].key)


# --- ids of links and errbacks --------------------------------------------------------------------

CANVASES: dict[str, Callable[[Any, Any], Any]] = {
    "task": lambda a, b: a.s(),
    "two tasks": lambda a, b: [a.s(), b.s()],
    "the same task twice": lambda a, b: [a.s(), a.s(1)],
    "group": lambda a, b: group(a.s(), b.s()),
    "group in a group": lambda a, b: group(group(a.s(), a.s()), a.s()),
    "chain": lambda a, b: chain(a.s(), b.s(), a.s()),
    "chain that ends in a group": lambda a, b: chain(a.s(), group(b.s(), a.s())),
    "chain through a group": lambda a, b: chain(a.s(), group(b.s(), a.s()), a.s()),
    "chain that begins with a group": lambda a, b: chain(group(a.s(), b.s()), a.s(), b.s()),
    "group of chains": lambda a, b: group(chain(a.s(), b.s()), chain(b.s(), a.s())),
    "chord": lambda a, b: chord([a.s(), b.s()], a.s()),
    "chord of chains": lambda a, b: chord([chain(a.s(), b.s()), a.s()], chain(a.s(), b.s())),
    "chord with a group for a body": lambda a, b: chord([a.s(), a.s()], group(a.s(), b.s())),
    "chords in a chain": lambda a, b: chain(a.s(), chord([a.s(), b.s()], a.s()), chord([b.s(), b.s()], b.s()), a.s()),
    "chord in a chain in a group": lambda a, b: group(chain(a.s(), chord([a.s(), a.s()], b.s())), b.s()),
    "chord in a chain in a chord": lambda a, b: chord([chain(a.s(), chord([a.s(), a.s()], b.s())), b.s()], b.s()),
    "everything": lambda a, b: [group(a.s(), b.s()), chain(a.s(), group(a.s(), a.s())), a.s()],
}


@pytest.mark.guarantee("delivery: a replay publishes links with the ids of the first time")
@pytest.mark.parametrize("canvas", CANVASES.values(), ids=CANVASES)
def test_a_replay_publishes_links_with_the_ids_of_the_first_time(shop: Shop, canvas: Any) -> None:
    charge, plain = charge_task(shop), plain_task(shop)
    message = shop.send(charge, 1, link=canvas(charge, plain))
    first = killed_before(shop, "settle", message)
    assert shop.deliver(message).value == 50
    again = shop.messages()
    assert first
    assert parts(first) == parts(again)
    assert len({m["id"] for m in first}) == len(first)
    assert len(charge.runs) == 1
    shop.deliver(message)
    assert shop.messages() == [], "settled: nothing is published a third time"


ERRBACKS: dict[str, Callable[[Any], Any]] = {
    "task": lambda tell: tell.s(),
    "the same task twice": lambda tell: [tell.s(), tell.s().set(shadow="again")],
    "group": lambda tell: group(tell.s(), tell.s()),
    "group in a group": lambda tell: group(group(tell.s(), tell.s()), tell.s()),
}
"""Celery calls other canvases in place, and fails: the exception is among the arguments it would send."""


@pytest.mark.parametrize("canvas", ERRBACKS.values(), ids=ERRBACKS)
def test_errbacks_have_the_same_ids_if_the_body_has_to_fail_again(shop: Shop, canvas: Any) -> None:
    charge = charge_task(shop, body=refuse)
    message = shop.send(charge, 1, link_error=canvas(tell_task(shop)))
    first = killed_before(shop, "settle", message)
    assert shop.deliver(message).state == "FAILURE"
    again = shop.messages()
    assert first
    assert parts(first) == parts(again)
    shop.deliver(message)
    assert shop.messages() == []


def test_a_message_that_is_sent_again_after_its_record_expired_has_links_of_its_own(shop: Shop) -> None:
    charge, plain = charge_task(shop, Policy(ttl=60)), plain_task(shop)
    message = shop.send(charge, 1, link=plain.s())
    shop.deliver(message)
    (first,) = shop.messages()
    shop.idem.advance(61)
    shop.deliver(message)
    (second,) = shop.messages()
    assert len(charge.runs) == 2
    assert first["id"] != second["id"]


def test_an_id_somebody_froze_stays(shop: Shop) -> None:
    charge, plain = charge_task(shop), plain_task(shop)
    links = [plain.s().set(task_id="mine"), group(plain.s(), plain.s()).set(task_id="ours")]
    shop.deliver(shop.send(charge, 1, link=links))
    sent = shop.messages()
    assert "mine" in {m["id"] for m in sent}
    assert [m["group"] for m in sent].count("ours") == 2


def test_links_of_a_link_are_left_to_the_link(shop: Shop) -> None:
    charge, plain = charge_task(shop), plain_task(shop)
    inner = plain.s()
    inner.link(plain.s())
    shop.deliver(shop.send(charge, 1, link=inner))
    (sent,) = shop.messages()
    assert "task_id" not in sent["callbacks"][0]["options"]


def test_two_messages_of_one_key_continue_their_own_canvas_once_each(shop: Shop) -> None:
    charge, plain = charge_task(shop, Policy(key="arguments")), plain_task(shop)
    messages = [shop.send(charge, 1, link=plain.s(i)) for i in range(2)]
    for message in messages * 2:
        assert shop.deliver(message).value == 50
    sent = shop.messages()
    assert [m["args"] for m in sent] == [[50, 0], [50, 1]]
    assert len({m["id"] for m in sent}) == 2
    assert len(charge.runs) == 1


def test_a_retry_and_a_parked_copy_carry_no_ids_of_ours(shop: Shop) -> None:
    def body(self: Any, *_: Any) -> Any:
        raise self.retry(countdown=1)

    charge, plain = charge_task(shop, body=body), plain_task(shop)
    message = shop.send(charge, 1, link=plain.s(), link_error=plain.s())
    shop.deliver(message)
    (successor,) = shop.messages()
    shop.deliver(message)
    (parked,) = shop.messages()
    for copy in (successor, parked):
        assert "task_id" not in copy["callbacks"][0]["options"]
        assert "task_id" not in copy["errbacks"][0]["options"]


def test_each_attempt_that_fails_tells_errbacks_of_its_own(shop: Shop) -> None:
    charge = charge_task(shop, body=refuse)
    message = shop.send(charge, 1, link_error=tell_task(shop).s())
    shop.deliver(message)
    shop.deliver(message, retries=1)
    first, second = shop.messages()
    assert first["id"] != second["id"]


@pytest.mark.guarantee("delivery: a stored failure calls the errbacks of every message of the key once")
def test_a_stored_failure_calls_the_errbacks_of_each_message_once(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments", replay_failures=(ValueError,)), refuse)
    tell = tell_task(shop)
    messages = [shop.send(charge, 1, link_error=tell.s().set(shadow=f"of {i}")) for i in range(2)]
    for message in messages * 2:
        assert shop.deliver(message).state == "FAILURE"
    sent = shop.messages()
    assert [m["args"] for m in sent] == [[m["id"]] for m in messages]
    assert len({m["id"] for m in sent}) == 2
    assert len(charge.runs) == 1


def test_a_value_that_is_not_stored_publishes_the_same_links_if_the_body_has_to_run_again(shop: Shop) -> None:
    charge, plain = charge_task(shop, Policy(ttl=0)), plain_task(shop)
    message = shop.send(charge, 1, link=plain.s())
    (first,) = killed_before(shop, "settle", message)
    shop.deliver(message)
    (again,) = shop.messages()
    assert len(charge.runs) == 2
    assert first["id"] == again["id"]


def test_an_unreadable_link_is_left_to_celery(shop: Shop, caplog: Any) -> None:
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    message["errbacks"] = [{"task": "plain"}]
    assert shop.deliver(message).value == 50
    assert "could not be derived" in caplog.text


def test_observe_leaves_ids_to_celery(make_shop: Any) -> None:
    shop = make_shop(idempotency_mode="observe")
    charge, plain = charge_task(shop), plain_task(shop)
    message = shop.send(charge, 1, link=plain.s())
    shop.deliver(message)
    shop.deliver(message)
    first, second = shop.messages()
    assert first["id"] != second["id"]


def test_the_result_knows_the_links_it_published(shop: Shop) -> None:
    charge, plain = charge_task(shop), plain_task(shop)
    message = shop.send(charge, 1, link=[plain.s(), plain.s()])
    shop.deliver(message)
    sent = {m["id"] for m in shop.messages()}
    shop.deliver(message)  # a settled replay publishes nothing, and takes nothing away
    (children,) = charge.AsyncResult(message["id"]).children
    assert {child.id for child in children} == sent


def test_a_task_errback_is_called_in_place_and_once(shop: Shop) -> None:
    heard: list[Any] = []

    @shop.task(name="hear")
    def hear(request: Any, exc: Any, traceback: Any) -> None:
        heard.append((request.id, str(exc)))

    charge = charge_task(shop, body=refuse)
    message = shop.send(charge, 1, link_error=hear.s())
    for _ in range(3):
        shop.deliver(message)
    assert heard == [(message["id"], "declined")]
    assert shop.messages() == []


def test_a_failed_chain_marks_the_steps_that_never_come(shop: Shop) -> None:
    charge, plain = charge_task(shop, body=refuse), plain_task(shop)
    last = chain(charge.s(1), plain.s(), plain.s()).apply_async()
    (message,) = shop.messages()
    for _ in range(2):
        shop.deliver(message)
    assert (last.state, last.parent.state) == ("FAILURE", "FAILURE")
    assert shop.messages() == []


# --- windows, with a kill in each -----------------------------------------------------------------


@pytest.mark.guarantee("delivery: a kill at any point continues chain, link and chord once")
@pytest.mark.parametrize("point", ["claim", "body", "completion", "publish", "settle", "ack"])
def test_a_kill_at_any_point_continues_chain_link_and_chord_once(shop: Shop, point: Any) -> None:
    charge = charge_task(shop, body=lambda self, *a: a[-1])

    @shop.task(name="last")
    def last(values: Any, *_: Any) -> Any:
        return values

    header = [chain(charge.s(1), last.s()), charge.s(2).set(link=last.s("link"))]
    result = chord(header, last.s("body")).apply_async()
    with shop.idem.killed(before=point, task=charge):
        shop.idem.run_all()
    assert [d for d in shop.idem.run_all() if d.state not in {"SUCCESS", "IGNORED"}] == []
    assert result.get(timeout=1) == [1, 2]
    assert shop.idem.runs(last) == 3
    assert shop.idem.runs(charge) == (3 if point == "completion" else 2)


def test_a_backend_that_only_counts_counts_a_part_twice(make_shop: Any) -> None:
    """As bare Celery: docs/explanation/canvas.md says so, and which backends these are."""
    shop = make_shop(result_chord_join_timeout=0.1)
    charge, plain = charge_task(shop), plain_task(shop)
    result = chord([charge.s(1), charge.s(2)], plain.s()).apply_async()
    first, second = shop.messages()
    killed_before(shop, "settle", first)
    shop.deliver(first)
    assert result.state == "FAILURE"
    assert shop.deliver(second).value == 50


@pytest.mark.parametrize(
    ("policy", "options", "in_chord", "counts", "back"),
    [
        ({}, {}, True, False, True),
        ({}, {}, False, False, False),
        ({}, {}, True, True, False),
        ({}, {"acks_late": False}, True, False, False),
        ({}, {"reject_on_worker_lost": False}, True, False, False),
        ({"ttl": 0}, {}, True, False, False),
        ({"cacheable": bool}, {}, True, False, False),
    ],
)
def test_which_messages_come_back_when_a_child_died_after_its_result_was_stored(
    shop: Shop, monkeypatch: Any, policy: Any, options: Any, in_chord: bool, counts: bool, back: bool
) -> None:
    """In the worker's main process; tests/integration kills such children."""
    charge = charge_task(shop, Policy(**policy), **options)
    monkeypatch.setattr(type(charge.backend), "implements_incr", counts)
    call = chord([charge.s(1)], charge.s()) if in_chord else charge.s(1)
    call.apply_async()
    with shop.app.connection_for_read() as connection, connection.channel() as channel:
        raw = channel.basic_get(shop.app.conf.task_default_queue, no_ack=True)
        request = symbol_by_name(charge.Request)(raw, app=shop.app, task=charge)
        assert request._comes_back() is back


# --- replace --------------------------------------------------------------------------------------


def replacing(with_what: Callable[[Any], Any], until: int = 1) -> Callable[..., Any]:
    def body(self: Any, *args: Any) -> Any:
        if (self.request.replaced_task_nesting or 0) < until:
            return self.replace(with_what(self))
        return ["replaced", *args]

    return body


@pytest.mark.guarantee("delivery: replace completes; copies of the replaced message are ignored")
def test_replace_completes_and_the_replacement_runs_under_the_same_id(shop: Shop) -> None:
    charge, plain = charge_task(shop, body=replacing(lambda self: self.si(2))), plain_task(shop)
    message = shop.send(charge, 1, link=plain.s())
    assert shop.deliver(message).state == "IGNORED"
    record = record_of(shop, charge)
    assert (record.state, record.outcome.kind) == (State.COMPLETED, Kind.REPLACED)
    assert record.note(message["id"]).settled, "its links went to the replacement"
    (replacement,) = shop.messages()
    assert (replacement["id"], replacement["replaced_task_nesting"]) == (message["id"], 1)
    assert shop.deliver(message).state == "IGNORED"
    assert shop.messages() == []
    assert shop.deliver(replacement).value == ["replaced", 2]
    (link,) = shop.messages()
    assert (link["task"], link["args"]) == ("plain", [["replaced", 2]])
    assert shop.deliver(replacement).value == ["replaced", 2]
    assert shop.messages() == []
    assert len(charge.runs) == 2
    assert charge.AsyncResult(message["id"]).get(timeout=1) == ["replaced", 2]


REPLACEMENTS: dict[str, Callable[[Any, Any], Any]] = {
    **CANVASES,
    "chain that ends in a chord": lambda a, b: chain(a.s(), chord([a.s(), b.s()], b.s())),
}
for several in ("two tasks", "the same task twice", "everything"):
    del REPLACEMENTS[several]


WHOLE = {name: canvas for name, canvas in REPLACEMENTS.items() if name != "chord with a group for a body"}
"""Celery itself cannot link to that one."""


@pytest.mark.parametrize(
    ("canvas", "chained"),
    [
        *(pytest.param(canvas, False, id=name) for name, canvas in REPLACEMENTS.items()),
        *(pytest.param(canvas, True, id=f"{name}, in a chain") for name, canvas in WHOLE.items()),
    ],
)
@pytest.mark.guarantee("delivery: a replacing body that runs again publishes the same ids")
def test_a_replacing_body_that_runs_again_publishes_the_same_ids(shop: Shop, canvas: Any, chained: bool) -> None:
    plain, step = plain_task(shop), step_task(shop)
    charge = charge_task(shop, body=replacing(lambda self: canvas(step, plain)))
    call = chain(charge.s(1), plain.s(), chord([plain.s(), plain.s()], plain.s())) if chained else charge.s(1)
    call.apply_async()
    (message,) = shop.messages()
    first = killed_before(shop, "completion", message)
    assert shop.deliver(message).state == "IGNORED"
    again = shop.messages()
    assert first
    assert parts(first) == parts(again)
    assert {m["replaced_task_nesting"] for m in first} == {1}
    assert len({m["id"] for m in first}) == len(first)


@pytest.mark.parametrize("canvas", WHOLE.values(), ids=WHOLE)
def test_a_replacement_of_any_shape_ends_the_original_result(shop: Shop, canvas: Any) -> None:
    plain, step, after = plain_task(shop), step_task(shop), plain_task(shop, "after")
    charge = charge_task(shop, body=replacing(lambda self: canvas(step, plain)))
    links = [after.s("link")] if VERSION >= (5, 7) else []  # earlier ones put it where a chord does not take it
    result = chain(charge.s(1).set(link=links), after.s("next")).apply_async()
    for message in shop.messages():
        shop.deliver(message)
        shop.idem.queued.append(message.copy())
    shop.idem.run_all()
    assert result.get(timeout=1)[-1] == "next"
    assert result.parent.state == "SUCCESS"
    assert shop.idem.runs(after) == 1 + len(links)


def test_two_replacements_of_one_constant_signature_share_nothing(shop: Shop) -> None:
    plain = plain_task(shop)
    constant = chain(plain.si(1), chord([plain.si(2), plain.si(3)], plain.si(4)))
    charge = charge_task(shop, body=replacing(lambda self: constant.clone()))
    for n in range(2):
        charge.delay(n)
    for message in shop.messages():
        shop.deliver(message)
    one, other = shop.messages()
    ids = [{step["options"]["task_id"] for step in m["chain"]} | {m["id"]} for m in (one, other)]
    assert not ids[0] & ids[1]


def test_a_step_machine_under_one_key_takes_every_step(shop: Shop) -> None:
    steps: list[int] = []

    @shop.task(bind=True, name="ship", idempotency=Policy(key="order:{order}"))
    def ship(self: Any, order: int, step: int) -> Any:
        steps.append(step)
        return self.replace(ship.si(order, step + 1)) if step < 3 else "shipped"

    result = ship.delay(1, 1)
    shop.idem.run_all()
    assert result.get(timeout=1) == "shipped"
    assert steps == [1, 2, 3]


@pytest.mark.parametrize("base", ["plain", "idempotent"])
def test_a_task_in_a_replacement_is_the_same_operation_as_anywhere_else(shop: Shop, base: str) -> None:
    """Who pays an order through a dispatcher must not pay it again directly."""
    charge = charge_task(shop, Policy(key="arguments"))
    options = {"base": Task} if base == "plain" else {}

    @shop.task(bind=True, name="dispatch", **options)
    def dispatch(self: Any, order: int) -> Any:
        return self.replace(chain(charge.si(order), charge.si(order + 1)))

    charge.delay(7)
    chain(dispatch.s(7), charge.si(9)).apply_async()
    charge.delay(8)
    charge.delay(9)
    shop.idem.run_all()
    assert len(charge.runs) == 3


def test_a_task_that_comes_back_after_others_is_a_new_operation(shop: Shop) -> None:
    """Also where a plain task stood between, which hands on nothing of what was replaced before it."""
    trace: list[str] = []

    @shop.task(bind=True, name="there", idempotency=Policy(key="order:{order}"))
    def there(self: Any, order: int, step: int) -> Any:
        trace.append(f"there {step}")
        return self.replace(back.si(order, step + 1)) if step < 4 else "done"

    @shop.task(bind=True, name="back", base=Task)
    def back(self: Any, order: int, step: int) -> Any:
        trace.append(f"back {step}")
        return self.replace(there.si(order, step + 1))

    result = there.delay(1, 0)
    shop.idem.run_all()
    assert result.get(timeout=1) == "done"
    assert trace == ["there 0", "back 1", "there 2", "back 3", "there 4"]


def test_another_message_of_a_replaced_key_fails_instead_of_hanging_its_chord(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments"), replacing(lambda self: self.si(1)))
    plain = plain_task(shop)
    result = chord([charge.s(1), charge.s(1)], plain.s()).apply_async()
    delivered = shop.idem.run_all()
    assert sorted(d.state for d in delivered) == ["FAILURE", "IGNORED", "SUCCESS"]
    assert result.state == "FAILURE"
    assert "ReplayImpossible" in repr(result.result)


@pytest.mark.guarantee("delivery: another message of a replaced key fails, or is ignored where nobody waits")
@pytest.mark.parametrize("waits", [True, False])
def test_another_message_of_a_replaced_key(shop: Shop, waits: bool) -> None:
    charge = charge_task(shop, Policy(key="arguments"), replacing(lambda self: self.si(1)), ignore_result=not waits)
    first, second = shop.send(charge, 1), shop.send(charge, 1)
    shop.deliver(first)
    other = shop.deliver(second)
    assert other.state == ("FAILURE" if waits else "IGNORED")
    if waits:
        assert isinstance(other.value, ReplayImpossible)
    assert len(charge.runs) == 1


def test_under_protocol_1_the_replacement_is_not_taken_for_a_copy(shop: Shop) -> None:
    """Its messages carry no depth, so the replacement looks like the message it replaces."""
    charge = charge_task(shop, body=lambda self, n: self.replace(self.si(n + 1)) if n < 2 else n)
    message = shop.send(charge, 1)
    shop.app.conf.task_protocol = 1
    assert shop.deliver(message).state == "IGNORED"
    assert record_of(shop, charge).state is State.RELEASED
    (replacement,) = shop.messages()
    assert shop.deliver(replacement, replaced_task_nesting=0).value == 2


def test_a_replacement_with_no_last_task_is_refused_as_ever(shop: Shop) -> None:
    charge = charge_task(shop, body=lambda self, n: self.replace(chain()))
    delivered = shop.deliver(shop.send(charge, 1))
    assert delivered.state == "FAILURE"
    assert isinstance(delivered.value, ImproperlyConfigured)


def test_an_eager_replace_returns_the_replacements_value(shop: Shop) -> None:
    charge = charge_task(shop, body=lambda self, n: self.replace(self.si(n + 1)) if n < 3 else n)
    assert charge.apply((1,)).get() == 3


def test_a_bases_on_replace_is_asked(shop: Shop) -> None:
    asked: list[Any] = []

    class Telling(Task):
        abstract = True

        def on_replace(self, sig: Any) -> Any:
            asked.append(sig.task)
            return super().on_replace(sig)

    from celery_idem import IdempotentTask

    class Base(IdempotentTask, Telling):
        abstract = True

    charge = charge_task(shop, body=replacing(lambda self: self.si(2)), base=Base)
    assert shop.deliver(shop.send(charge, 1)).state == "IGNORED"
    assert asked == ["charge"]
    assert record_of(shop, charge).outcome.kind is Kind.REPLACED


def test_a_run_that_lost_its_key_replaces_nothing(shop: Shop) -> None:
    def body(self: Any, *_: Any) -> Any:
        self.idempotency._lost = lambda: True
        return self.replace(self.si(2))

    charge = charge_task(shop, body=body)
    message = shop.send(charge, 1)
    from celery_idem.errors import LeaseLost

    with pytest.raises(LeaseLost, match="send nothing"):
        shop.deliver(message)
    assert shop.messages() == []


def test_the_replacement_of_a_confirming_producer(shop: Shop, monkeypatch: Any) -> None:
    """What takes the place of a message that is acked for it must be on the broker."""
    from contextlib import contextmanager

    from celery_idem import parking, task

    asked: list[str] = []

    @contextmanager
    def confirming(app: Any) -> Any:
        asked.append("producer")
        with parking.confirmed_producer(app) as producer:
            yield producer

    monkeypatch.setattr(task, "confirmed_producer", confirming)
    plain, step = plain_task(shop), step_task(shop)
    made = iter([plain.si(2), step.si(2), chain(step.si(3), plain.si(4))])
    charge = charge_task(shop, body=lambda self, n: self.replace(next(made)))
    for n in range(3):
        charge.delay(n)
    for expected, message in enumerate(shop.messages(), 1):
        shop.deliver(message)
        assert len(asked) == expected
    assert [m["task"] for m in shop.messages()] == ["plain", "step", "step"]


# --- Ignore ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("delivery: Ignore settles at once, as Celery publishes nothing after it")
def test_ignore_settles_at_once(shop: Shop) -> None:
    def body(*_: Any) -> Any:
        raise Ignore

    charge, plain = charge_task(shop, body=body), plain_task(shop)
    message = shop.send(charge, 1, link=plain.s())
    assert shop.deliver(message).state == "IGNORED"
    note = record_of(shop, charge).note(message["id"])
    assert (note.settled, note.continuing) == (True, None)
    assert shop.deliver(message).state == "IGNORED"
    assert shop.messages() == []


# --- explicit keys on canvases --------------------------------------------------------------------


def keys_of(shop: Shop) -> list[Any]:
    return [message.get("idempotency_key") for message in shop.messages()]


@pytest.mark.parametrize(
    ("canvas", "expected"),
    [
        (lambda a: group(a.s(1), a.s(1)), ["k#0", "k#1"]),
        (lambda a: group(chain(a.s(1), a.s()), chain(a.s(1), a.s())), ["k#0", "k#1"]),
        (lambda a: chain(a.s(1), a.s(), a.s()), ["k"]),
        (lambda a: chord([a.s(1), a.s(1)], a.s()), ["k#header#0", "k#header#1"]),
        (lambda a: chord([chain(a.s(1), a.s()), a.s(1)], a.s()), ["k#header#0", "k#header#1"]),
        (
            lambda a: group(chord([a.s(1), a.s(1)], a.s()), chord([a.s(1), a.s(1)], chain(a.s(), a.s()))),
            ["k#0#header#0", "k#0#header#1", "k#1#header#0", "k#1#header#1"],
        ),
        (lambda a: chain(group(a.s(1), a.s(1)), a.s()), ["k#header#0", "k#header#1"]),
    ],
)
def test_an_explicit_key_names_every_member_apart(shop: Shop, canvas: Any, expected: Any) -> None:
    canvas(charge_task(shop)).apply_async(idempotency_key="k")
    assert keys_of(shop) == expected


def test_a_members_own_key_gets_its_place_as_well(shop: Shop) -> None:
    charge = charge_task(shop)
    group(charge.s(1).set(idempotency_key="mine"), charge.s(1)).apply_async()
    assert keys_of(shop) == ["mine#0", None]
    group(charge.s(1), charge.s(1)).apply_async(headers={"idempotency_key": "h"})
    assert keys_of(shop) == ["h#0", "h#1"]


@pytest.mark.parametrize("body", [lambda a: a.s(), lambda a: group(a.s(), a.s()), lambda a: chain(a.s(), a.s())])
def test_a_chord_with_an_explicit_key_runs_every_task(shop: Shop, body: Any) -> None:
    charge = charge_task(shop, Policy(fingerprint=["args"]), body=lambda self, *a: 1)
    chord([charge.s(1), charge.s(1)], body(charge)).apply_async(idempotency_key="k")
    delivered = shop.idem.run_all()
    assert {d.state for d in delivered} == {"SUCCESS"}
    assert shop.idem.runs(charge) == len(delivered)
    assert shop.idem.told() == ["NEW"] * len(delivered)


def test_a_group_sent_again_under_its_key_is_replayed(shop: Shop) -> None:
    charge = charge_task(shop)
    for _ in range(2):
        group(charge.s(1), charge.s(1)).apply_async(idempotency_key="k")
        shop.idem.run_all()
    assert len(charge.runs) == 2


def test_a_member_that_retries_keeps_its_key(shop: Shop) -> None:
    def body(self: Any, *_: Any) -> Any:
        raise self.retry(countdown=1)

    charge = charge_task(shop, body=body)
    group(charge.s(1), charge.s(2)).apply_async(idempotency_key="k")
    before = shop.messages()
    for message in before:
        shop.deliver(message)
    after = shop.messages()
    assert [(m["idempotency_key"], m["idempotency_stamp"]) for m in after] == [
        (m["idempotency_key"], m["idempotency_stamp"]) for m in before
    ]


# --- stamped headers ------------------------------------------------------------------------------


class Stamping(StampingVisitor):
    def on_signature(self, sig: Any, **_: Any) -> Any:
        return {"tenant": "acme", "stamped_headers": ["tenant"]}


@pytest.mark.parametrize("stamp", [lambda sig: sig.stamp(tenant="acme"), lambda sig: sig.stamp(Stamping())])
def test_stamps_survive_retry_park_and_replay_and_reach_links_and_steps(shop: Shop, stamp: Any) -> None:
    seen: list[Any] = []

    def body(self: Any, *_: Any) -> Any:
        seen.append(self.request.stamps)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return 50

    charge, plain = charge_task(shop, body=body), plain_task(shop)
    call = chain(charge.s(1).set(link=plain.s("link")), plain.s("next"))
    stamp(call)
    call.apply_async()
    (message,) = shop.messages()
    shop.deliver(message)
    (successor,) = shop.messages()
    shop.deliver(message)
    (parked,) = shop.messages()
    first = killed_before(shop, "settle", successor)
    shop.deliver(successor)
    again = shop.messages()
    assert len(first) == len(again) == 2
    for copy in (message, successor, parked, *first, *again):
        assert copy["stamps"]["tenant"] in ("acme", ["acme"])
        assert copy["stamped_headers"] == ["tenant"]
    assert [s["tenant"] for s in seen] == [["acme"], ["acme"]] or [s["tenant"] for s in seen] == ["acme", "acme"]


def test_an_id_is_the_same_on_every_worker_and_in_every_release() -> None:
    assert continuation.derived("charge", "M", 0, "fence", 7, "link", 0) == "cf7beaeb-67be-57ce-b158-eb567f9b4c6a"


# --- chords that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("chained", [False, True])
def test_a_chords_errbacks_run_once_if_the_part_that_told_them_is_killed_before_it_is_over(
    shop: Shop, chained: bool
) -> None:
    charge, step = charge_task(shop, body=refuse), step_task(shop)
    told: list[str] = []

    @shop.task(name="told")
    def hear(failed: str) -> None:
        told.append(failed)

    part = charge.s(1) | step.s() if chained else charge.s(1)
    body = step.s().on_error(hear.s())
    with shop.idem.killed(before="settle", task=charge):
        chord([part, step.s(2)], body).apply_async(task_id="body")
        shop.idem.run_all()
    shop.idem.run_all()
    assert (len(charge.runs), told) == (2, ["body"])


def test_an_outcome_recorded_late_is_settled_once_its_links_are_out(
    make_shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away at the completion; Celery went on, and the copies that come afterwards publish nothing."""
    shop = make_shop()
    charge, plain = charge_task(shop, Policy(lease=0.2)), plain_task(shop)
    message = shop.send(charge, link=plain.s())

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("complete: no answer", may_have_landed=False)

    with monkeypatch.context() as patched:
        patched.setattr(shop.store, "complete", away)
        assert shop.deliver(message).value == 50
    assert len(shop.messages()) == 1, "the link"
    key = charge.runs[-1].key
    wait_until(lambda: shop.store.get(key).state is State.COMPLETED, 10, "the outcome to be recorded after all")
    assert shop.deliver(message).value == 50
    assert shop.messages() == []
    assert len(charge.runs) == 1
