"""What follows a body, and the broker does not take: a retry, a link, an errback, a chain's next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from celery import Task, chain
from celery.exceptions import Reject
from kombu.exceptions import OperationalError

from celery_idem import ParkFailed, Policy
from celery_idem.core.records import State
from tests.support.delivery import Shop

Refusal = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.close()


@pytest.fixture
def refused(monkeypatch: Any) -> Refusal:
    """Inside of ``with refused():`` the broker takes no message."""
    monkeypatch.setattr("celery_idem.parking.GIVE_BACK_AFTER", 0)

    def refuses(*_: Any, **__: Any) -> Any:
        raise OperationalError("the broker is full")

    @contextmanager
    def refusing() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr("kombu.transport.memory.Channel._put", refuses)
            yield

    return refusing


def retries_task(shop: Shop, **options: Any) -> Any:
    runs: list[int] = []
    throw = options.pop("throw", True)

    @shop.task(bind=True, name="retries", **options)
    def retries(self: Any, countdown: float | None) -> Any:
        runs.append(self.request.retries)
        if self.request.retries == 0:
            self.retry(countdown=countdown, throw=throw)
        return "second"

    retries.runs = runs
    return retries


def pay_task(shop: Shop, **options: Any) -> Any:
    @shop.task(name="pay", **options)
    def pay(fails: bool = False) -> str:
        if fails:
            raise ValueError("declined")
        return "paid"

    return pay


def record_of(shop: Shop) -> Any:
    (record,) = shop.store.find()
    return record


# --- a retry --------------------------------------------------------------------------------------


@pytest.mark.guarantee("delivery: a retry that was not published leaves its message on the broker")
@pytest.mark.parametrize(("countdown", "due"), [(30.0, 30.0), (0.0, 0.0), (None, 180.0)])
@pytest.mark.parametrize("throw", [True, False])
def test_a_retry_that_is_not_published_gives_its_message_back(
    shop: Shop, refused: Refusal, throw: bool, countdown: float | None, due: float
) -> None:
    retries = retries_task(shop, throw=throw)
    message = shop.send(retries, countdown)
    with refused():
        delivered = shop.deliver(message)
    assert delivered.state == "REJECTED"
    assert isinstance(delivered.value, Reject)
    assert delivered.value.requeue is True
    record = record_of(shop)
    assert record.state is State.RELEASED
    assert record.note(message["id"]).successor == (1, shop.clock.now + due)


def test_the_message_waits_for_that_retry_and_then_takes_its_place(shop: Shop, refused: Refusal) -> None:
    retries = retries_task(shop)
    message = shop.send(retries, 30.0)
    with refused():
        shop.deliver(message)
    assert shop.deliver(message).state == "IGNORED"
    (parked,) = shop.messages()
    assert parked["retries"] == 0
    shop.clock.advance(91)
    assert shop.deliver(parked).state == "RETRY"
    (successor,) = shop.messages()
    assert shop.deliver(successor).value == "second"
    assert retries.runs == [0, 0, 1]


def test_a_retry_whose_publish_got_no_answer_runs_once(shop: Shop, refused: Refusal, monkeypatch: Any) -> None:
    """The broker has it, and nobody knows: the message that was given back finds that it ran."""
    from kombu.transport.memory import Channel

    put = Channel._put

    def silent(channel: Any, queue: str, message: Any, **more: Any) -> Any:
        put(channel, queue, message, **more)
        if message["headers"]["retries"] == 1:
            raise OperationalError("the broker does not answer")

    retries = retries_task(shop)
    message = shop.send(retries, 30.0)
    with refused(), monkeypatch.context() as patched:
        patched.setattr(Channel, "_put", silent)
        assert shop.deliver(message).state == "REJECTED"
    successor = next(sent for sent in shop.messages() if sent["retries"] == 1)
    assert shop.deliver(successor).value == "second"
    assert shop.deliver(message).state in {"IGNORED", "SUCCESS"}
    assert retries.runs == [0, 1]


def test_acked_early_it_fails_loudly(shop: Shop, refused: Refusal) -> None:
    """Nothing is on the broker any more, so a message given back would be a message lost."""
    retries = retries_task(shop, acks_late=False)
    message = shop.send(retries, 30.0)
    with refused():
        delivered = shop.deliver(message)
    assert delivered.state == "FAILURE"
    assert isinstance(delivered.value, ParkFailed)
    assert "acks_late=True" in str(delivered.value)
    assert shop.deliver(message).state == "IGNORED", "the failure was told: its copies are over"


@pytest.mark.parametrize("how", ["instance", "class"])
def test_exhausted_retries_that_end_in_a_reject_of_the_bodys_own_give_nothing_back(shop: Shop, how: str) -> None:
    """A known way to a dead letter: Celery raises what ``exc`` says once there is no retry left."""

    @shop.task(bind=True, name="exhausted", max_retries=0)
    def exhausted(self: Any) -> None:
        raise self.retry(exc=Reject("to the dead letters", requeue=False) if how == "instance" else Reject)

    message = shop.send(exhausted)
    delivered = shop.deliver(message)
    assert delivered.state == "REJECTED"
    assert delivered.value.requeue is False
    assert record_of(shop).note(message["id"]).successor is None
    assert shop.messages() == []


def test_observed_it_is_celerys_own_affair(refused: Refusal) -> None:
    observed = Shop(idempotency_mode="observe")
    try:
        message = observed.send(retries_task(observed), 30.0)
        with refused():
            delivered = observed.deliver(message)
        assert delivered.state == "REJECTED"
        assert delivered.value.requeue is False
    finally:
        observed.close()


# --- what follows a body that is through ----------------------------------------------------------


@pytest.mark.guarantee("delivery: what was not published is not settled")
@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")  # Celery's word before 5.7
@pytest.mark.parametrize("canvas", ["link", "chain"])
def test_what_was_not_published_is_published_by_the_next_copy(shop: Shop, refused: Refusal, canvas: str) -> None:
    """Celery tells a failure, as it does of a bare task; a copy that comes all the same has not been robbed."""
    pay, ran = pay_task(shop), []

    @shop.task(base=Task, name="after")
    def after(value: str) -> None:
        ran.append(value)

    if canvas == "link":
        message = shop.send(pay, link=after.s())
    else:
        chain(pay.s(), after.s(), app=shop.app).apply_async()
        (message,) = shop.messages()
    with refused():
        shop.deliver(message)
    assert shop.app.AsyncResult(message["id"]).state == "FAILURE"
    record = record_of(shop)
    assert record.state is State.COMPLETED
    assert not record.note(message["id"]).settled
    shop.clock.advance(61)  # the right to publish lapses
    assert shop.deliver(message).value == "paid"
    (followed,) = shop.messages()
    shop.deliver(followed)
    assert ran == ["paid"]
    assert shop.idem.runs(pay) == 1
    assert record_of(shop).note(message["id"]).settled


def test_a_body_that_fails_by_the_brokers_error_is_over(shop: Shop) -> None:
    """Its errbacks are told of it, so no copy runs it again: only what failed behind a value may come again."""

    @shop.task(name="sends")
    def sends() -> None:
        raise OperationalError("a publish of the body's own")

    message = shop.send(sends)
    assert shop.deliver(message).state == "FAILURE"
    assert shop.deliver(message).state == "IGNORED"
    assert shop.idem.runs(sends) == 1


def test_a_replayed_failure_by_the_brokers_error_is_settled(shop: Shop) -> None:
    @shop.task(name="sends", idempotency=Policy(replay_failures=(OperationalError,)))
    def sends() -> None:
        raise OperationalError("a publish of the body's own")

    @shop.task(base=Task, name="tell")
    def tell(failed: str) -> None: ...

    message = shop.send(sends, link_error=tell.s())
    assert shop.deliver(message).state == "FAILURE"
    assert record_of(shop).note(message["id"]).settled


@pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")
def test_an_errback_that_is_not_published_leaves_the_attempt_open(shop: Shop, refused: Refusal) -> None:
    """Nobody was told by a message, so another copy may run the attempt again, and tell."""
    pay = pay_task(shop)

    @shop.task(base=Task, name="tell")
    def tell(failed: str) -> None: ...

    message = shop.send(pay, kwargs={"fails": True}, link_error=tell.s())
    with refused(), pytest.raises(OperationalError):  # which a worker reports as an internal error
        shop.deliver(message)
    assert shop.app.AsyncResult(message["id"]).state == "FAILURE"
    assert shop.deliver(message).state == "FAILURE"
    assert shop.idem.runs(pay) == 2
    assert len(shop.messages()) == 1, "the errback"
    assert shop.deliver(message).state == "IGNORED", "told, and over"
