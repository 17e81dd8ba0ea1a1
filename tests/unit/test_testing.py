"""``celery_idem.testing.Idem``: what a test can have happen to an app, and that nothing of it stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group
from celery.backends.base import DisabledBackend
from celery.exceptions import Reject
from celery.signals import task_postrun
from kombu import pools

from celery_idem import IdempotentTask, Policy
from celery_idem.app import runtime_of
from celery_idem.core.records import State
from celery_idem.delivery import Delivering
from celery_idem.testing import POINTS, Idem
from celery_idem.testing.memory import BROKERS

ATTEMPTS = {"claim": [1], "body": [2], "completion": [1, 2], "publish": [1], "settle": [1], "ack": [1]}
"""The attempts whose body ran, by the point at which the first process was killed."""


class Shop:
    """Somebody's app, configured for servers that are not there."""

    def __init__(self, **conf: Any) -> None:
        self.app = Celery("shop", broker="redis://nowhere.invalid/0", backend="redis://nowhere.invalid/1")
        self.app.conf.update(task_always_eager=True, idempotency_store="redis://nowhere.invalid/2", **conf)
        self.attempts: list[int] = []

        @self.app.task(base=IdempotentTask, bind=True, shared=False, name="charge", key="order:{order}")
        def charge(task: Any, order: int, amount: int = 5) -> int:
            self.attempts.append(task.idempotency.attempt)
            return amount

        @self.app.task(base=IdempotentTask, bind=True, shared=False, name="flaky")
        def flaky(task: Any, times: int) -> str:
            if task.request.retries < times:
                raise task.retry(countdown=3600)
            return "at last"

        @self.app.task(base=IdempotentTask, bind=True, shared=False, name="later")
        def later(task: Any) -> None:
            raise Reject("not now", requeue=len(self.attempts) == 0)

        @self.app.task(base=IdempotentTask, shared=False, name="total")
        def total(amounts: list[int]) -> int:
            return sum(amounts)

        @self.app.task(shared=False, name="plain")
        def plain(*_: Any) -> str:
            total.delay([1])
            return "plain"

        self.charge, self.flaky, self.later, self.total, self.plain = charge, flaky, later, total, plain


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def idem(shop: Shop) -> Iterator[Idem]:
    with Idem(shop.app) as started:
        yield started


def test_a_misspelt_task_is_no_task_that_did_not_run(shop: Shop, idem: Idem) -> None:
    assert idem.runs(shop.charge) == idem.runs("charge") == 0
    with pytest.raises(ValueError, match="'chrage' is no task of this app"):
        idem.runs("chrage")


# --- deliveries -----------------------------------------------------------------------------------


def test_a_message_again(shop: Shop, idem: Idem) -> None:
    first = idem.send(shop.charge, 7, amount=50)
    again = idem.again(first)
    assert (first.state, first.value, first.event) == ("SUCCESS", 50, "NEW")
    assert (again.state, again.value, again.event) == ("SUCCESS", 50, "REPLAYED")
    assert again.message == first.message
    assert (again.message.redelivered, first.message.redelivered) == (True, False)
    assert idem.runs(shop.charge) == len(shop.attempts) == 1
    assert idem.told() == ["NEW", "REPLAYED"]
    record = idem.record(first)
    assert record is not None
    assert record.state is State.COMPLETED


def test_options_of_a_call_come_with_a_signature(shop: Shop, idem: Idem) -> None:
    first = idem.send(shop.charge.s(7).set(task_id="M", link=shop.total.si([1])))
    assert first.message.id == "M"
    assert [message.task for message in first.published] == ["total"]
    assert [done.value for done in idem.run_all()] == [1]
    assert shop.charge.AsyncResult("M").get(timeout=1) == 5


def test_a_plain_task_counts_too_and_has_no_record(shop: Shop, idem: Idem) -> None:
    first = idem.send(shop.plain)
    idem.again(first)
    assert idem.runs(shop.plain) == idem.runs("plain") == 2
    assert first.event is None
    with pytest.raises(AssertionError, match="not idempotent"):
        idem.record(first)


def test_what_is_on_the_broker_is_delivered_in_the_order_it_is_due(shop: Shop, idem: Idem) -> None:
    start = idem.clock.now
    shop.charge.apply_async((1,), countdown=60)
    shop.flaky.delay(2)
    shop.plain.delay()
    assert [message.task for message in idem.messages()] == ["charge", "flaky", "plain"]
    done = idem.run_all()
    order = ["flaky", "plain", "total", "charge", "flaky", "flaky"]
    assert [one.message.task for one in done] == order
    assert (done[-1].value, done[-1].message.retries) == ("at last", 2)
    assert 7190 < idem.clock.now - start < 7210
    assert idem.messages() == []


def test_a_message_is_due_by_when_it_was_sent_and_not_by_when_the_test_looks(idem: Idem, shop: Shop) -> None:
    began = time.monotonic()
    shop.charge.apply_async((1,), countdown=60)
    took = time.monotonic() - began
    time.sleep(0.5)  # a test on a busy machine
    (message,) = idem.messages()
    assert 60 - took <= message.delay <= 60


def test_a_chain_and_a_chord(shop: Shop, idem: Idem) -> None:
    result = chord([shop.charge.s(1), shop.charge.s(2)])(shop.total.s())
    assert [done.value for done in idem.run_all()] == [5, 5, 10]
    assert result.get(timeout=1) == 10
    chain(shop.charge.s(3), shop.plain.s())()
    assert [done.message.task for done in idem.run_all()] == ["charge", "plain", "total"]


def test_a_queue_that_never_empties_is_told(shop: Shop, idem: Idem) -> None:
    shop.flaky.delay(50)
    with pytest.raises(AssertionError, match="still queued after 2 deliveries"):
        idem.run_all(limit=2)


def test_a_call_that_is_not_one_message_is_told(shop: Shop, idem: Idem) -> None:
    with pytest.raises(AssertionError, match="published 2 messages"):
        idem.send(chord([shop.charge.s(1), shop.charge.s(2)], shop.total.s()))


def test_a_result_that_nobody_will_deliver_is_told_and_not_waited_for(shop: Shop, idem: Idem) -> None:
    sent = group(shop.charge.s(1, 50), shop.charge.s(2, 50)).delay()
    for result in (sent, sent.results[0]):
        with pytest.raises(AssertionError, match="run_all"):
            result.get()
    idem.run_all()
    assert len(sent.get()) == 2
    assert sent.results[0].get() == sent.get()[0]


def test_a_rejected_message_goes_back_only_if_it_is_to_be_requeued(shop: Shop, idem: Idem) -> None:
    first = idem.send(shop.later)
    assert first.state == "REJECTED"
    (back,) = idem.messages()
    assert back.redelivered
    shop.attempts.append(1)
    (second,) = idem.run_all()
    assert second.state == "REJECTED"
    assert idem.messages() == []


def test_a_message_comes_again_as_it_was(idem: Idem, shop: Shop) -> None:
    @shop.app.task(shared=False, name="greedy")
    def greedy(orders: list[int]) -> int:
        orders.append(len(orders))
        return len(orders)

    first = idem.send(greedy, [7])
    assert first.value == idem.again(first).value == 2


def test_a_lost_message_is_lost(shop: Shop, idem: Idem) -> None:
    shop.charge.delay(1)
    assert len(idem.take()) == 1
    assert idem.run_all() == []


# --- two at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["body", "completion"])
def test_a_second_message_arrives_while_the_first_is_in_its_body(shop: Shop, idem: Idem, before: Any) -> None:
    with idem.during(shop.charge.s(7), before=before) as first:
        second = idem.send(shop.charge, 7)
        assert (first.state, second.event) == ("RUNNING", "PARKED")
        assert len(second.published) == 1
    assert (first.state, first.event) == ("SUCCESS", "NEW")
    (parked,) = idem.run_all()
    assert (parked.message.id, parked.event, parked.value) == (second.message.id, "REPLAYED", 5)
    assert idem.runs(shop.charge) == 1


def test_a_message_is_with_two_workers(shop: Shop, idem: Idem) -> None:
    message = idem.publish(shop.charge, 7)
    with idem.during(message):
        assert idem.again(message).event == "PARKED"
    with idem.during(idem.run_all()[-1], before="publish") as third:
        pass
    assert third.event == "REPLAYED"


def test_a_running_delivery_keeps_its_lease_and_a_stalled_one_loses_it(shop: Shop, idem: Idem) -> None:
    with idem.during(shop.charge.s(7)) as first:
        idem.advance(600)
        assert idem.send(shop.charge, 7).event == "PARKED"
        idem.advance(61, stalled=True)
        assert idem.send(shop.charge, 7).event == "LEASE_RECLAIMED"
    assert (first.event, first.value) == ("REPLAYED", 5)
    assert [event.name.value for event in first.events] == ["NEW", "LEASE_RECLAIMED_LOSS", "REPLAYED"]
    assert shop.attempts == [1, 2]


def test_a_delivery_that_never_comes_to_the_point_is_told(shop: Shop, idem: Idem) -> None:
    idem.send(shop.charge, 7)
    with pytest.raises(AssertionError, match="did not come to 'body'"), idem.during(shop.charge.s(7), before="body"):
        pass
    with pytest.raises(ValueError, match="the points are claim, body"), idem.during(shop.charge.s(7), before="x"):  # type: ignore[arg-type]
        pass


# --- a process that is killed ---------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_each_point(shop: Shop, idem: Idem, point: Any) -> None:
    with idem.killed(before=point):
        first = idem.send(chain(shop.charge.s(7), shop.plain.s()))
    assert (first.state, first.value) == ("KILLED", None)
    (again, *more) = idem.run_all()
    if point in {"settle", "ack"}:  # the next step was out
        again, more = more[0] if again.message.task == "plain" else again, [again, *more]
    assert (again.message.id, again.value) == (first.message.id, 5)
    assert shop.attempts == ATTEMPTS[point]
    assert "PARKED" not in idem.told(), "a dead process must not cost a lease"
    assert idem.runs(shop.charge) == len(ATTEMPTS[point])
    assert {one.message.id for one in more if one.message.task == "plain"} == {
        first.message["chain"][-1]["options"]["task_id"]
    }


def test_the_lease_of_a_machine_that_is_gone_must_lapse(shop: Shop, idem: Idem) -> None:
    with idem.killed(before="body", machine=True):
        first = idem.send(shop.charge, 7)
    assert idem.again(first).event == "PARKED"
    idem.advance(30)
    assert idem.again(first).event == "PARKED"
    idem.advance(31)
    assert idem.again(first).event == "LEASE_RECLAIMED"
    assert [done.event for done in idem.run_all()] == ["REPLAYED", "REPLAYED"], (
        "the parked ones; what went back was taken"
    )
    assert shop.attempts == [2]


def test_a_killed_process_writes_and_tells_nothing_on_its_way_out(shop: Shop, idem: Idem) -> None:
    seen: list[Any] = []

    def postrun(**_: Any) -> None:
        seen.extend(record.state for record in idem.store.find(task="charge"))

    task_postrun.connect(postrun, weak=False)
    try:
        with idem.killed(before="completion", task=shop.charge):
            idem.send(shop.total, [1])
            killed = idem.send(shop.charge, 7)
    finally:
        task_postrun.disconnect(postrun)
    assert seen == [State.CLAIMED]
    record = idem.record(killed)
    assert record is not None
    assert (record.state, record.unknown, record.attempts) == (State.CLAIMED, False, 1)
    assert [event.name.value for event in killed.events] == ["NEW"]
    assert idem.runtime._heartbeat is not None
    assert len(idem.runtime._heartbeat) == 0


def test_a_dead_holder_is_not_seen_where_the_app_does_not_look(shop: Shop) -> None:
    with Idem(shop.app, idempotency_dead_check=False) as idem:
        with idem.killed(before="body"):
            first = idem.send(shop.charge, 7)
        assert idem.again(first).event == "PARKED"


@pytest.mark.parametrize(
    ("options", "machine", "back"),
    [
        ({"acks_late": False}, True, 0),
        ({"reject_on_worker_lost": False}, False, 0),
        ({"reject_on_worker_lost": False}, True, 1),
        ({}, False, 1),
    ],
)
def test_a_message_goes_back_where_celery_gives_it_back(shop: Shop, options: Any, machine: bool, back: int) -> None:
    @shop.app.task(base=IdempotentTask, shared=False, name="own", **options)
    def own() -> None:
        pass

    with Idem(shop.app) as idem, idem.killed(before="body", machine=machine):
        idem.send(own)
        assert len(idem.messages()) == back


def test_a_kill_nobody_comes_to_is_told(shop: Shop, idem: Idem) -> None:
    with pytest.raises(AssertionError, match="nothing was killed"), idem.killed(before="body", task="other"):
        idem.send(shop.charge, 7)


# --- time -----------------------------------------------------------------------------------------


def test_a_record_expires(shop: Shop, idem: Idem) -> None:
    first = idem.send(shop.charge, 7)
    idem.advance(86_400)
    assert idem.record(first) is None
    assert idem.send(shop.charge, 7).event == "NEW"


# --- the app --------------------------------------------------------------------------------------


def state_of(app: Any) -> dict[str, Any]:
    names = ("broker_url", "broker_read_url", "result_backend", "task_always_eager", "broker_transport_options")
    known = {name: getattr(app.conf, name) for name in names}
    pooled = len(pools.connections), len(pools.producers)
    patched = [getattr(Delivering, name) for name in ("handle", "body", "told", "over")]
    tasks = {name: dict(vars(task)) for name, task in app.tasks.items()}
    for attributes in tasks.values():
        attributes.pop("_exec_options", None)
    return {
        **known,
        "changes": dict(app.conf.changes),
        "objects": (app.backend, app.amqp, runtime_of(app), app._pool, app._local),
        "tasks": tasks,
        "more": (pooled, patched, dict(BROKERS)),
    }


def test_everything_is_put_back(shop: Shop, monkeypatch: Any) -> None:
    import os

    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://nowhere.invalid")
    before = state_of(shop.app)
    with Idem(shop.app, idempotency_mode="observe") as idem:
        assert shop.app.conf.broker_read_url.startswith("idemtest:")
        assert not shop.app.conf.task_always_eager
        assert idem.again(idem.send(shop.charge, 7)).event == "WOULD_REPLAY"
        with pytest.raises(AssertionError), idem.killed(before="ack"):
            pass
    assert os.environ["CELERY_BROKER_URL"] == "amqp://nowhere.invalid"
    assert state_of(shop.app) == before


def test_two_tests_and_two_apps_share_nothing(shop: Shop, idem: Idem) -> None:
    first = idem.send(shop.charge.s(7).set(task_id="M"))
    other = Shop()
    with Idem(other.app) as second:
        assert other.charge.AsyncResult("M").state == "PENDING"
        other.charge.delay(7)
        assert idem.messages() == []
        assert second.run_all()[0].event == "NEW"
    assert (idem.runs("charge"), idem.again(first).event) == (1, "REPLAYED")
    idem.close()
    with Idem(shop.app) as later:
        assert shop.charge.AsyncResult("M").state == "PENDING"
        assert later.send(shop.charge, 7).event == "NEW"
    idem.start()


def test_settings_under_a_prefix_or_no_results_at_all() -> None:
    app = Celery("django", set_as_current=False)
    config = {
        "CELERY_BROKER_URL": "redis://nowhere.invalid",
        "CELERY_IDEMPOTENCY_TTL": 5,
        "CELERY_TASK_IGNORE_RESULT": True,
    }
    app.config_from_object(config, namespace="CELERY")
    app.conf["CELERY_BROKER_READ_URL"] = "redis://nowhere.invalid"

    @app.task(base=IdempotentTask, shared=False, name="mail", key="mail:{to}")
    def mail(to: str) -> None:
        pass

    with Idem(app) as idem:
        assert isinstance(app.backend, DisabledBackend)
        first = idem.send(mail, "a")
        assert idem.again(first).event == "REPLAYED"
        idem.advance(6)
        assert idem.send(mail, "a").event == "NEW"
    assert app.conf.broker_url == "redis://nowhere.invalid"


def test_listeners_a_setting_and_a_task_class_of_the_users_own_are_kept(shop: Shop) -> None:
    heard: list[Any] = []
    runtime_of(shop.app).emit.listeners.append(heard.append)

    class Refund(IdempotentTask):
        name = "refund"
        max_retries = 1
        autoretry_for = (ConnectionError,)
        retry_backoff = False

        def run(self, order: int) -> str:
            if not self.request.retries:
                raise ConnectionError("gateway")
            return "refunded"

    refund = shop.app.register_task(Refund())
    with Idem(shop.app) as idem:
        idem.send(refund, 1)
        assert idem.run_all()[-1].value == "refunded"
        assert idem.runs(refund) == 2
    assert [event.name.value for event in heard] == ["NEW", "NEW"]


def test_a_policy_that_waits_really_waits(shop: Shop, idem: Idem) -> None:
    """The setting is 0 in a test; a task's own word holds, and it is answered as soon as the first one ends."""

    @shop.app.task(base=IdempotentTask, shared=False, name="patient", idempotency=Policy(key=["order"], wait_timeout=5))
    def patient(order: int) -> str:
        return "paid"

    done: list[Any] = []
    with idem.during(patient.s(7)):
        second = threading.Thread(target=lambda: done.append(idem.send(patient, 7)))
        second.start()
    second.join(10)
    assert [(one.event, one.value) for one in done] == [("REPLAYED", "paid")]


def test_a_task_without_our_base_is_delivered_by_the_tracer_alone(shop: Shop, idem: Idem) -> None:
    class Loud(Task):  # type: ignore[type-arg]
        name = "loud"

        def run(self) -> str:
            raise ValueError("no")

    failed = idem.send(shop.app.register_task(Loud()))
    assert (failed.state, str(failed.value), idem.runs("loud")) == ("FAILURE", "no", 1)
