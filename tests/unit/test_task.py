"""The delivery table row by row: real tracer, real messages on a memory broker, a clock the test moves."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Task, chain
from celery.exceptions import Ignore, Reject

from celery_idem import (
    ClaimConflict,
    ConfigurationError,
    FingerprintMismatch,
    Happened,
    IdempotentTask,
    KeyMissing,
    Policy,
    RecordCorrupt,
    ResultUnavailable,
    StoreUnavailable,
    current,
)
from celery_idem.app import runtime_of
from celery_idem.core.records import State
from tests.support.delivery import Shop


@pytest.fixture
def make_shop() -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(**conf: Any) -> Shop:
        made.append(Shop(**conf))
        return made[-1]

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def shop(make_shop: Any) -> Shop:
    return make_shop()


def charge_task(shop: Shop, policy: Policy | None = None, body: Any = None, **options: Any) -> Any:
    """A task that counts its runs in ``runs`` and does what ``body`` says."""
    runs: list[Any] = []

    @shop.task(bind=True, name="charge", idempotency=policy or Policy(), **options)
    def charge(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(self.idempotency)
        return body(self, *args, **kwargs) if body else {"paid": list(args)}

    charge.runs = runs
    return charge


def raising(error: BaseException) -> Callable[..., Any]:
    def body(*_: Any, **__: Any) -> Any:
        raise error

    return body


def key_of(task: Any) -> str:
    return str(task.runs[-1].key)


def hold(shop: Shop, task: Any, message: dict[str, Any], **changes: Any) -> None:
    """Another worker claims the message's key and goes on living."""
    from celery_idem import publish
    from celery_idem.core.holder import current as this_process

    runtime = runtime_of(shop.app)
    policy = runtime.policy_of(task)
    facts = {"retries": 0, "replaced_task_nesting": 0, **message, **changes}
    request = type("Request", (), {**facts, "headers": facts})
    stamp = publish.derive(task, policy, message["args"], message["kwargs"], request.id)  # type: ignore[attr-defined]
    operation = publish.operation_of(task, policy, runtime, request, stamp, continues=False)
    assert operation.holder == this_process()
    decision = shop.store.claim(operation, lease=60, ttl=600)
    assert decision.claim is not None


# --- one claim and its ends -----------------------------------------------------------------------


@pytest.mark.guarantee("delivery: a value completes and is replayed")
def test_a_value_completes_and_a_copy_replays_it(shop: Shop) -> None:
    charge = charge_task(shop)
    message = shop.send(charge, 50)
    first, again = shop.deliver(message), shop.deliver(message)
    assert (first.state, again.state) == ("SUCCESS", "SUCCESS")
    assert first.value == again.value == {"paid": [50]}
    assert len(charge.runs) == 1
    assert shop.terminal() == ["NEW", "REPLAYED"]
    assert shop.store.get(key_of(charge)).state is State.COMPLETED


@pytest.mark.guarantee("delivery: an exception keeps the claim until errbacks and chord were told")
def test_an_exception_ends_the_attempt_after_celery_told_everybody(shop: Shop) -> None:
    charge = charge_task(shop, body=raising(ValueError("declined")))
    message = shop.send(charge, 50)
    states: list[Any] = []
    from celery.signals import task_failure

    def told(**_: Any) -> None:
        states.append(shop.store.get(key_of(charge)).state)

    # Connected after ours, so it only sees what ours left; on_failure comes before the signal.
    charge.on_failure = lambda *a: states.append(shop.store.get(key_of(charge)).state)  # type: ignore[method-assign]
    task_failure.connect(told, weak=False)
    try:
        assert shop.deliver(message).state == "FAILURE"
    finally:
        task_failure.disconnect(told)
    assert states == [State.CLAIMED, State.RELEASED]
    assert shop.deliver(message).state == "IGNORED"
    assert len(charge.runs) == 1
    assert shop.terminal() == ["NEW", "OVER"]


def test_a_failed_task_sent_again_runs(shop: Shop) -> None:
    outcomes = iter([ValueError("declined"), None])

    def body(self: Any, order: int) -> str:
        error = next(outcomes)
        if error:
            raise error
        return "paid"

    charge = charge_task(shop, Policy(key="arguments"), body)
    assert shop.deliver(shop.send(charge, 1)).state == "FAILURE"
    assert shop.deliver(shop.send(charge, 1)).value == "paid"


@pytest.mark.guarantee("delivery: replay_failures stores the exception and raises it for duplicates")
def test_a_failure_that_is_an_outcome_is_raised_for_duplicates(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments", replay_failures=(ValueError,)), raising(ValueError("declined")))
    first, other = shop.deliver(shop.send(charge, 1)), shop.deliver(shop.send(charge, 1))
    assert (first.state, other.state) == ("FAILURE", "FAILURE")
    assert isinstance(other.value, ValueError)
    assert str(other.value) == "declined"
    assert len(charge.runs) == 1


@pytest.mark.guarantee("delivery: cacheable says no, or ttl 0: the claim is kept until task_success, then released")
@pytest.mark.parametrize("policy", [{"ttl": 0}, {"cacheable": lambda value: False}])
def test_a_value_that_is_not_stored_frees_the_key_after_success(shop: Shop, policy: Any) -> None:
    charge = charge_task(shop, Policy(key="arguments", **policy))
    seen: list[Any] = []
    charge.__class__.on_success = lambda *a: seen.append(shop.store.get(key_of(charge)).state)
    message = shop.send(charge, 1)
    assert shop.deliver(message).state == "SUCCESS"
    assert seen == [State.CLAIMED]
    assert shop.deliver(message).state == "IGNORED"  # a copy of an attempt everybody heard about
    assert shop.deliver(shop.send(charge, 1)).state == "SUCCESS"
    assert len(charge.runs) == 2


@pytest.mark.guarantee("delivery: Ignore completes and is replayed as Ignore")
def test_ignore_completes(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments"), raising(Ignore()))
    assert shop.deliver(shop.send(charge, 1)).state == "IGNORED"
    assert shop.deliver(shop.send(charge, 1)).state == "IGNORED"
    assert len(charge.runs) == 1
    assert shop.terminal() == ["NEW", "REPLAYED"]


@pytest.mark.guarantee("delivery: Reject gives the key back and remembers nothing")
def test_reject_yields(shop: Shop) -> None:
    charge = charge_task(shop, body=raising(Reject("later", requeue=True)))
    message = shop.send(charge, 1)
    assert shop.deliver(message).state == "REJECTED"
    record = shop.store.get(key_of(charge))
    assert (record.state, record.unknown) == (State.RELEASED, False)
    assert shop.deliver(message).state == "REJECTED"
    assert len(charge.runs) == 2
    assert shop.terminal() == ["NEW", "NEW"]


@pytest.mark.guarantee("delivery: SystemExit releases at once, outcome unknown")
def test_system_exit_releases_at_once_with_unknown_outcome(shop: Shop) -> None:
    charge = charge_task(shop, body=raising(SystemExit(0)))
    message = shop.send(charge, 1)
    with pytest.raises(SystemExit):
        shop.deliver(message)
    record = shop.store.get(key_of(charge))
    assert (record.state, record.unknown) == (State.RELEASED, True)
    with pytest.raises(SystemExit):
        shop.deliver(message)
    assert charge.runs[-1].reclaimed
    assert shop.terminal() == ["NEW", "LEASE_RECLAIMED"]


@pytest.mark.guarantee("delivery: a value that cannot be kept goes on once; duplicates raise ResultUnavailable")
def test_a_value_that_cannot_be_kept(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments", result_max_bytes=20), lambda self, n: "x" * n)
    assert shop.deliver(shop.send(charge, 100)).value == "x" * 100
    other = shop.deliver(shop.send(charge, 100))
    assert other.state == "FAILURE"
    assert isinstance(other.value, ResultUnavailable)
    assert len(charge.runs) == 1


@pytest.mark.guarantee("delivery: a value nobody reads is not kept; replay returns None")
def test_an_ignored_result_no_serializer_can_say(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments"), lambda self, n: object(), ignore_result=True)
    assert shop.deliver(shop.send(charge, 1)).state == "SUCCESS"
    assert shop.deliver(shop.send(charge, 1)).value is None
    assert "ENCODE_FAILED" not in shop.names()
    assert len(charge.runs) == 1


@pytest.mark.guarantee("delivery: a duplicate whose value is read is never given None for one that was not kept")
@pytest.mark.parametrize("value", [50, None])
def test_a_value_that_only_a_duplicate_reads(make_shop: Any, value: Any) -> None:
    shop = make_shop(idempotency_local_cache=10)
    handed_on: list[Any] = []

    @shop.task(name="ship")
    def ship(value: Any) -> None:
        handed_on.append(value)

    charge = charge_task(shop, Policy(key="arguments"), lambda self, n: value, ignore_result=True)
    shop.deliver(shop.send(charge, 1))
    shop.deliver(shop.send(charge, 1))  # nobody reads it either
    chain(charge.s(1), ship.s()).apply_async()
    states = [delivered.state for delivered in shop.idem.run_all()]
    read = shop.deliver(shop.send(charge, 1, ignore_result=False))
    assert len(charge.runs) == 1
    if value is None:
        assert (states, handed_on, read.value) == (["SUCCESS", "SUCCESS"], [None], None)
    else:
        assert (states, handed_on) == (["FAILURE"], [])
        assert isinstance(read.value, ResultUnavailable)


# --- retries --------------------------------------------------------------------------------------


def retrying(self: Any, *args: Any, **options: Any) -> Any:
    if self.request.retries == 0:
        raise self.retry(countdown=30, **options)
    return "second"


@pytest.mark.guarantee("delivery: Retry releases and names the successor")
def test_a_retry_runs_as_the_next_generation_and_the_stale_first_copy_does_not(shop: Shop) -> None:
    charge = charge_task(shop, body=retrying)
    message = shop.send(charge, 1)
    assert shop.deliver(message).state == "RETRY"
    (successor,) = shop.messages()
    assert successor["retries"] == 1
    assert shop.store.get(key_of(charge)).note(message["id"]).successor == (1, shop.clock.now + 30)
    assert shop.deliver(successor).value == "second"
    assert shop.deliver(message).state == "IGNORED"
    assert len(charge.runs) == 2
    assert shop.terminal() == ["NEW", "NEW", "OVER"]


@pytest.mark.parametrize(
    ("countdown", "died", "state"),
    [(30, False, State.RELEASED), (0, False, State.CLAIMED), (30, True, State.CLAIMED)],
)
def test_a_retry_gives_the_key_back_at_once_unless_it_might_overtake_its_own_announcement(
    shop: Shop, countdown: int, died: bool, state: State, monkeypatch: Any
) -> None:
    """Of an attempt whose first run died the retry may be out already, and due."""

    def retry(self: Any, *_: Any) -> None:
        raise self.retry(countdown=countdown)

    charge = charge_task(shop, body=retry)
    seen, store_retry = [], charge.backend.mark_as_retry

    def mark_as_retry(*args: Any, **kwargs: Any) -> Any:
        record = shop.store.get(key_of(charge))
        seen.append(None if record is None else record.state)
        return store_retry(*args, **kwargs)

    monkeypatch.setattr(charge.backend, "mark_as_retry", mark_as_retry)
    message = shop.send(charge, 1)
    if died:
        with shop.idem.killed(before="completion"):
            shop.deliver(message)
    shop.deliver(message)
    assert seen == [state]
    record = shop.store.get(key_of(charge))
    assert record is not None
    assert record.state is State.RELEASED


@pytest.mark.guarantee("delivery: NOT_DUE parks until the retry is due, then with the usual delays for 60 s")
def test_a_stale_copy_of_a_retried_attempt_is_parked_until_the_retry_is_due_and_then_takes_its_place(
    shop: Shop,
) -> None:
    until_due = countdowns(shop)
    charge = charge_task(shop, body=retrying)
    message = shop.send(charge, 1)
    shop.deliver(message)
    shop.messages()  # the successor never reaches the broker
    assert shop.deliver(message).state == "IGNORED"
    (parked,) = shop.messages()
    assert parked["retries"] == 0
    waits = [until_due(parked)]
    shop.clock.advance(32)
    while (state := shop.deliver(parked).state) == "IGNORED":
        (parked,) = shop.messages()
        waits.append(until_due(parked))
        shop.clock.advance(waits[-1])
    assert state == "RETRY"
    assert 31 < waits[0] < 33, "until it is due, and a moment"
    assert 4 <= len(waits[1:]) <= 9
    assert 58 < sum(waits) - 30 < 62, "the copy took the retry's place 60 s after it was due"
    assert max(waits[1:]) < 16
    assert set(shop.terminal()) == {"NEW", "PARKED"}


def countdowns(shop: Shop) -> Callable[[dict[str, Any]], float]:
    """Let the app's countdowns begin at the shop's clock; the function that tells what is left of a message's."""
    shop.app.now = lambda: datetime.fromtimestamp(shop.clock.now, timezone.utc)

    def left(message: dict[str, Any]) -> float:
        return datetime.fromisoformat(message["eta"]).timestamp() - shop.clock.now

    return left


@pytest.mark.guarantee("delivery: returned after retry(throw=False) releases to the successor")
def test_retry_without_throw_leaves_the_word_to_the_next_attempt(shop: Shop) -> None:
    def body(self: Any, n: int) -> str:
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
            return "first"
        return "second"

    charge = charge_task(shop, body=body)
    message = shop.send(charge, 1)
    assert shop.deliver(message).value == "first"
    (successor,) = shop.messages()
    assert shop.deliver(successor).value == "second"
    assert len(charge.runs) == 2


def test_a_retry_with_other_arguments_keeps_its_key_and_changes_its_fingerprint(shop: Shop) -> None:
    def body(self: Any, order: int, amount: int) -> str:
        if self.request.retries == 0:
            raise self.retry(args=(order + 1, amount + 1), countdown=0)
        return "second"

    charge = charge_task(shop, Policy(key=["order"]), body)

    @shop.task(name="named", bind=True, idempotency=Policy(key=["order"]))
    def named(self: Any, order: int, amount: int) -> Any:
        charge.runs.append(self.idempotency)
        return body(self, order, amount)

    message = shop.send(named, 1, 5)
    shop.deliver(message)
    (successor,) = shop.messages()
    before, after = json.loads(message["idempotency_stamp"]), json.loads(successor["idempotency_stamp"])
    assert before["key"] == after["key"]
    assert before["fp"] != after["fp"]
    assert shop.deliver(successor).value == "second"
    assert charge.runs[0].key == charge.runs[1].key


def test_exhausted_retries_fail_as_they_do_without_us(shop: Shop) -> None:
    charge = charge_task(shop, body=lambda self, n: self.retry(exc=ValueError("declined"), countdown=0), max_retries=2)
    message = shop.send(charge, 1)
    for _ in range(2):
        assert shop.deliver(message).state == "RETRY"
        (message,) = shop.messages()
    assert shop.deliver(message).state == "FAILURE"
    assert shop.messages() == []
    assert len(charge.runs) == 3


def test_autoretry_works_through_the_engine(shop: Shop) -> None:
    charge = charge_task(
        shop,
        body=raising(ConnectionError("gateway")),
        autoretry_for=(ConnectionError,),
        retry_backoff=False,
        max_retries=1,
    )
    message = shop.send(charge, 1)
    assert shop.deliver(message).state == "RETRY"
    (successor,) = shop.messages()
    assert shop.deliver(successor).state == "FAILURE"


# --- held: wait, park, fail, skip -----------------------------------------------------------------


@pytest.mark.guarantee("delivery: HELD, a copy of the holder's own message is parked")
@pytest.mark.parametrize("on_conflict", ["park", "fail", "skip"])
def test_a_copy_of_the_holders_own_message_is_parked_whatever_the_policy(shop: Shop, on_conflict: Any) -> None:
    until_due = countdowns(shop)
    charge = charge_task(shop, Policy(key="arguments", on_conflict=on_conflict))
    message = shop.send(charge, 1, priority=3)
    hold(shop, charge, message)
    assert shop.deliver(message).state == "IGNORED"
    (parked,) = shop.messages()
    same = ("id", "task", "args", "kwargs", "retries", "root_id", "idempotency_stamp")
    assert {k: parked[k] for k in same} == {k: message[k] for k in same}
    assert json.loads(parked["idempotency_park"]) == {"generation": 0, "count": 1, "expires": None}
    assert 0.5 <= until_due(parked) < 1.5
    assert shop.terminal() == ["PARKED"]
    assert charge.runs == []


@pytest.mark.guarantee("delivery: HELD by another message, on_conflict")
def test_another_message_is_parked_failed_or_skipped(make_shop: Any) -> None:
    for on_conflict, state, published in (("park", "IGNORED", 1), ("fail", "FAILURE", 0), ("skip", "IGNORED", 0)):
        shop = make_shop()
        charge = charge_task(shop, Policy(key="arguments", on_conflict=on_conflict))
        hold(shop, charge, shop.send(charge, 1))
        delivered = shop.deliver(shop.send(charge, 1))
        assert delivered.state == state
        assert len(shop.messages()) == published
        if on_conflict == "fail":
            assert isinstance(delivered.value, ClaimConflict)
        assert shop.terminal() == ["PARKED" if on_conflict == "park" else "CONFLICT"]
        assert charge.runs == []


def test_skip_never_drops_a_message_that_continues(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments", on_conflict="skip"))
    hold(shop, charge, shop.send(charge, 1))
    message = shop.send(charge, 1, link=charge.si(2))
    assert shop.deliver(message).state == "IGNORED"
    (parked,) = shop.messages()
    assert parked["callbacks"]


@pytest.mark.guarantee("delivery: copies of a parked message stay bounded")
def test_a_copy_is_dropped_once_two_later_parked_copies_are_known(shop: Shop) -> None:
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    hold(shop, charge, message)
    shop.deliver(message)
    (first,) = shop.messages()
    assert shop.deliver(message).state == "IGNORED"  # noted 1, own 0: published again
    (second,) = shop.messages()
    counts = [json.loads(m["idempotency_park"])["count"] for m in (first, second)]
    assert counts == [1, 2]
    assert shop.deliver(message).state == "IGNORED"  # noted 2, own 0: dropped
    assert shop.messages() == []
    shop.deliver(first)  # noted 2, own 1: published as 3
    assert [json.loads(m["idempotency_park"])["count"] for m in shop.messages()] == [3]


def test_restored_copies_of_one_message_stay_at_most_three(shop: Shop) -> None:
    """Every copy the broker ever had is delivered again and again; never more than three live ones result."""
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    hold(shop, charge, message)
    seen, live = [message], [message]
    for _ in range(12):
        published: list[Any] = []
        for copy in [*live, *live]:
            shop.deliver(copy)
            published += shop.messages()
        seen += published
        live = published
        assert len(live) <= 3
        assert live, "the last copy was dropped"


@pytest.mark.guarantee("delivery: the park is published, then noted, then acked")
def test_a_park_that_cannot_be_published_gives_the_message_back(shop: Shop, monkeypatch: Any) -> None:
    monkeypatch.setattr("celery_idem.parking.GIVE_BACK_AFTER", 0)
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    hold(shop, charge, message)
    monkeypatch.setattr(charge, "signature_of_copy", raising(OSError("broker is gone")))
    assert shop.deliver(message).state == "REJECTED"
    assert shop.terminal() == ["PARK_FAILED"]


def test_an_early_acked_message_that_cannot_be_parked_fails_loudly(shop: Shop, monkeypatch: Any) -> None:
    from celery_idem import ParkFailed

    monkeypatch.setattr("celery_idem.parking.GIVE_BACK_AFTER", 0)
    charge = charge_task(shop, acks_late=False)
    message = shop.send(charge, 1)
    hold(shop, charge, message)

    def gone(*_: Any, **__: Any) -> Any:
        class Signature:
            apply_async = staticmethod(raising(OSError("broker is gone")))

        return Signature

    monkeypatch.setattr(charge, "signature_of_copy", gone)
    delivered = shop.deliver(message)
    assert delivered.state == "FAILURE"
    assert isinstance(delivered.value, ParkFailed)


@pytest.mark.guarantee("delivery: a soft limit before the body parks")
def test_a_soft_limit_that_fires_while_waiting_parks(shop: Shop, monkeypatch: Any) -> None:
    from celery.exceptions import SoftTimeLimitExceeded

    charge = charge_task(shop, Policy(wait_timeout=5))
    message = shop.send(charge, 1)
    hold(shop, charge, message)
    monkeypatch.setattr("celery_idem.core.engine.time.sleep", raising(SoftTimeLimitExceeded()))
    assert shop.deliver(message).state == "IGNORED"
    assert len(shop.messages()) == 1
    assert shop.events[-1].fields["cause"] == "soft_limit"


def test_an_expired_parked_copy_is_revoked_after_the_claim_and_a_running_original_is_not(shop: Shop) -> None:
    charge = charge_task(shop)
    message = shop.send(charge, 1, expires=datetime.now(timezone.utc) + timedelta(seconds=30))
    hold(shop, charge, message)
    shop.deliver(message)
    (parked,) = shop.messages()
    assert parked["expires"] is None
    park = json.loads(parked["idempotency_park"])
    assert datetime.fromisoformat(park["expires"]) > datetime.now(timezone.utc)
    past = json.dumps({**park, "expires": "2020-01-01T00:00:00+00:00"})
    assert shop.deliver(parked, idempotency_park=past).state == "IGNORED"  # held: not judged
    assert charge.AsyncResult(message["id"]).state == "PENDING"
    shop.messages()
    shop.store.forget(next(shop.store.find()).key, next(shop.store.find()).fence)
    assert shop.deliver(parked, idempotency_park=past).state == "IGNORED"
    assert charge.AsyncResult(message["id"]).state == "REVOKED"
    assert charge.runs == []


# --- mismatch, outage, newer records --------------------------------------------------------------


@pytest.mark.guarantee("delivery: MISMATCH fails and names the arguments covered")
def test_another_payload_under_the_same_key_fails(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="order:{order}", fingerprint=["amount"]), lambda self, order, amount: "paid")

    @shop.task(name="pay", idempotency=Policy(key="order:{order}", fingerprint=["amount"]))
    def pay(order: int, amount: int, note: str = "") -> str:
        return f"paid {amount}"

    assert charge is not None
    assert shop.deliver(shop.send(pay, 1, 50)).value == "paid 50"
    delivered = shop.deliver(shop.send(pay, 1, 80))
    assert delivered.state == "FAILURE"
    assert isinstance(delivered.value, FingerprintMismatch)
    assert "amount" in str(delivered.value)
    assert shop.deliver(shop.send(pay, 1, 50, "a note")).value == "paid 50"


class Down:
    """A memory store that is out."""

    name = "down"

    def close(self) -> None: ...

    def __getattr__(self, verb: str) -> Any:
        return raising(StoreUnavailable("no answer"))


@pytest.mark.guarantee("delivery: store down, fail_closed holds the slot and then parks")
def test_store_down_parks_with_the_outage_delay(make_shop: Any) -> None:
    shop = make_shop(idempotency_store_timeout=0.05)
    until_due = countdowns(shop)
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    runtime_of(shop.app)._store = Down()  # type: ignore[assignment]
    assert shop.deliver(message).state == "IGNORED"
    (parked,) = shop.messages()
    assert 4 < until_due(parked) < 6
    assert shop.terminal() == ["PARKED"]
    assert charge.runs == []


@pytest.mark.parametrize("cause", ["store_down", "corrupt_record", "newer_record", "held"])
def test_a_park_that_somebody_has_to_look_at_is_told_to_a_worker_that_logs_warnings(
    shop: Shop, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    from dataclasses import replace

    charge = charge_task(shop)
    message = shop.send(charge, 1)
    if cause == "store_down":
        runtime_of(shop.app)._store = Down()  # type: ignore[assignment]
    elif cause == "held":
        hold(shop, charge, message)
    else:
        shop.deliver(message)
        record = shop.store.get(key_of(charge))
        shop.store._records[record.key] = replace(record, record_version=99)
        if cause == "corrupt_record":
            shop.store.claim = raising(RecordCorrupt("garbage"))
    caplog.set_level(logging.WARNING, logger="celery_idem")
    assert shop.deliver(message).state == "IGNORED"
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("PARKED ")]
    assert [f"cause={cause} " in one for one in said] == ([] if cause == "held" else [True])


@pytest.mark.guarantee("delivery: store down, fail_open runs unprotected")
def test_store_down_runs_unprotected_where_the_policy_says_so(make_shop: Any) -> None:
    shop = make_shop(idempotency_storage_policy="fail_open")
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    runtime_of(shop.app)._store = Down()  # type: ignore[assignment]
    assert shop.deliver(message).value == {"paid": [1]}
    assert shop.terminal() == ["RAN_UNPROTECTED"]


@pytest.mark.guarantee("delivery: NEWER parks and touches nothing")
def test_a_newer_record_parks_and_stays_as_it_is(shop: Shop) -> None:
    from dataclasses import replace

    charge = charge_task(shop)
    message = shop.send(charge, 1)
    shop.deliver(message)
    newer = replace(shop.store.get(key_of(charge)), record_version=99)
    shop.store._records[newer.key] = newer
    assert shop.deliver(message).state == "IGNORED"
    assert len(shop.messages()) == 1
    assert shop.store._records[newer.key] == newer
    assert shop.names()[-2:] == ["NEWER_RECORD", "PARKED"]


# --- unknown outcome ------------------------------------------------------------------------------


@pytest.mark.guarantee("delivery: RECLAIMED asks verify, then the cap, then on_unknown")
def test_verify_gets_the_bodys_arguments(shop: Shop) -> None:
    asked: list[Any] = []

    def verify(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return Happened({"paid": "found"})

    charge = charge_task(shop, Policy(verify=verify))
    message = shop.send(charge, 1)
    hold(shop, charge, message)
    shop.clock.advance(61)
    assert shop.deliver(message).value == {"paid": "found"}
    assert asked == [((1,), {})]
    assert charge.runs == []


@pytest.mark.parametrize(
    ("policy", "error"), [({"on_unknown": "fail"}, "OutcomeUnknown"), ({"max_deliveries": 1}, "DeliveriesExhausted")]
)
def test_unknown_and_exhausted_fail_and_tell_errbacks(shop: Shop, policy: Any, error: str) -> None:
    charge = charge_task(shop, Policy(**policy))
    told: list[Any] = []
    charge.on_failure = lambda exc, *a: told.append(type(exc).__name__)
    message = shop.send(charge, 1)
    hold(shop, charge, message)
    shop.clock.advance(61)
    assert shop.deliver(message).state == "FAILURE"
    assert shop.deliver(message).state == "FAILURE"
    assert told == [error, error]
    assert charge.runs == []


# --- lease lost -----------------------------------------------------------------------------------


@pytest.mark.guarantee("delivery: completion answered lost is delivered anew")
def test_a_run_that_was_overtaken_hands_on_the_other_runs_value(shop: Shop) -> None:
    from celery_idem.core.codec import encode_value
    from celery_idem.core.records import Kind, Outcome

    def body(self: Any, n: int) -> str:
        from dataclasses import replace

        record = shop.store.get(self.idempotency.key)
        other = replace(
            record,
            token="f" * 32,
            state=State.COMPLETED,
            outcome=Outcome(Kind.RESULT, encode_value("theirs", "json", max_bytes=100)),
        )
        shop.store._records[record.key] = other
        return "mine"

    charge = charge_task(shop, body=body)
    assert shop.deliver(shop.send(charge, 1)).value == "theirs"
    assert shop.names() == ["NEW", "LEASE_RECLAIMED_LOSS", "REPLAYED"]


def overtaken(shop: Shop, key: str) -> None:
    """Another worker takes the key from the running body, and dies."""
    from dataclasses import replace

    record = shop.store.get(key)
    assert record is not None
    shop.store._records[key] = replace(record, token="f" * 32, fence=record.fence + 1, lease_expires_at=0.0)


def test_a_body_that_changes_its_arguments_changes_no_later_delivery(shop: Shop) -> None:
    amounts: list[int] = []

    def body(self: Any, order: dict[str, int]) -> str:
        amounts.append(order["amount"])
        order["amount"] += 10
        if len(amounts) == 1:
            overtaken(shop, self.idempotency.key)
        return "paid"

    charge = charge_task(shop, body=body)
    assert shop.deliver(shop.send(charge, {"amount": 50})).value == "paid"
    assert amounts == [50, 50]


def test_a_retry_of_a_body_that_changed_its_arguments_stays_the_same_operation(shop: Shop) -> None:
    @shop.task(name="pay", bind=True, idempotency=Policy(key=["order.id"]))
    def pay(self: Any, order: dict[str, Any]) -> str:
        order["id"] = f"normalised {order['id']}"
        self.request.args[0]["id"] = order["id"]
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "paid"

    bare = {k: v for k, v in shop.send(pay, {"id": 7}).items() if not k.startswith("idempotency_")}
    assert shop.deliver(bare).state == "RETRY"
    (successor,) = shop.messages()
    shop.deliver(successor)
    (record,) = shop.store.find()
    assert record.generation == 1


def test_a_soft_limit_after_a_lost_lease_parks(shop: Shop, monkeypatch: Any) -> None:
    from celery.exceptions import SoftTimeLimitExceeded

    def body(self: Any, n: int) -> str:
        from dataclasses import replace

        record = shop.store.get(self.idempotency.key)
        assert record is not None
        shop.store._records[record.key] = replace(record, token="f" * 32, fence=record.fence + 1)
        monkeypatch.setattr("celery_idem.core.engine.time.sleep", raising(SoftTimeLimitExceeded()))
        return "mine"

    charge = charge_task(shop, Policy(wait_timeout=5), body)
    assert shop.deliver(shop.send(charge, 1)).state == "IGNORED"
    assert shop.terminal() == ["NEW", "PARKED"]


def test_a_parked_message_keeps_its_expiry_when_it_retries(shop: Shop) -> None:
    charge = charge_task(shop, body=retrying)
    message = shop.send(charge, 1, expires=datetime.now(timezone.utc) + timedelta(seconds=300))
    hold(shop, charge, message)
    shop.deliver(message)
    (parked,) = shop.messages()
    shop.clock.advance(61)
    assert shop.deliver(parked).state == "RETRY"
    (successor,) = shop.messages()
    assert datetime.fromisoformat(successor["expires"]) == datetime.fromisoformat(message["expires"])


def test_a_copy_that_will_be_dropped_does_not_wait_for_it(make_shop: Any, monkeypatch: Any) -> None:
    shop = make_shop()
    charge = charge_task(shop, Policy(wait_timeout=30))
    message = shop.send(charge, 1)
    hold(shop, charge, message)
    shop.store.note_parked(next(shop.store.find()).key, message["id"], 0, 2)
    monkeypatch.setattr("celery_idem.core.engine.time.sleep", raising(AssertionError("it waited")))
    assert shop.deliver(message).state == "IGNORED"
    assert shop.terminal() == ["OVER"]


@pytest.mark.parametrize("retries", [-1, 2**31, 10**17, "1", 1.5, True])
def test_a_garbage_count_of_retries_fails_the_message_and_leaves_the_key_alone(shop: Shop, retries: Any) -> None:
    charge = charge_task(shop)
    delivered = shop.deliver(shop.send(charge, 1), retries=retries)
    assert isinstance(delivered.value, ConfigurationError)
    assert list(shop.store.find()) == []


@pytest.mark.parametrize("nesting", [-1, 2**31, "1", 1.5, [1], True])
def test_a_garbage_count_of_replacements_fails_the_message_and_leaves_the_key_alone(shop: Shop, nesting: Any) -> None:
    charge = charge_task(shop)
    delivered = shop.deliver(shop.send(charge, 1), replaced_task_nesting=nesting)
    assert isinstance(delivered.value, ConfigurationError)
    assert list(shop.store.find()) == []


@pytest.mark.parametrize("task_id", ["a\0b", "a\ud800b"])
def test_a_task_id_no_store_can_keep_is_refused_before_publishing(shop: Shop, task_id: str) -> None:
    with pytest.raises(KeyMissing, match="task_id"):
        charge_task(shop).apply_async((1,), task_id=task_id)


@pytest.mark.parametrize("expires", ["garbage", "", 7, None, []])
def test_a_garbage_expiry_of_a_parked_copy_counts_as_none(shop: Shop, expires: Any) -> None:
    charge = charge_task(shop)
    park = json.dumps({"generation": 0, "count": 1, "expires": expires})
    assert shop.deliver(shop.send(charge, 1), idempotency_park=park).state == "SUCCESS"


def test_started_that_cannot_be_stored_stops_no_body(make_shop: Any, monkeypatch: Any) -> None:
    shop = make_shop(task_track_started=True)
    charge = charge_task(shop)
    shop.deliver(shop.send(charge, 1))
    real = charge.backend.store_result

    def broken(task_id: str, result: Any, state: str, **more: Any) -> Any:
        if state == "STARTED":
            raise OSError("backend is gone")
        return real(task_id, result, state, **more)

    monkeypatch.setattr(charge.backend, "store_result", broken)
    assert shop.deliver(shop.send(charge, 2)).state == "SUCCESS"


def test_an_unreadable_record_is_parked_under_fail_open_and_run_in_observe(make_shop: Any) -> None:
    from celery_idem import RecordCorrupt

    class Corrupt(Down):
        def __getattr__(self, verb: str) -> Any:
            return raising(RecordCorrupt("garbage"))

    for settings, state in (
        ({"idempotency_storage_policy": "fail_open"}, "IGNORED"),
        ({"idempotency_mode": "observe"}, "SUCCESS"),
    ):
        shop = make_shop(**settings)
        charge = charge_task(shop)
        message = shop.send(charge, 1)
        runtime_of(shop.app)._store = Corrupt()  # type: ignore[assignment]
        assert shop.deliver(message).state == state
        assert shop.terminal() == ["PARKED" if state == "IGNORED" else "RAN_UNPROTECTED"]


def test_an_eager_call_takes_an_explicit_key(make_shop: Any) -> None:
    shop = make_shop(task_always_eager=True)
    charge = charge_task(shop)
    charge.apply((1,), idempotency_key="order:7")
    charge.apply_async((2,), idempotency_key="order:7")
    assert len(charge.runs) == 1


# --- modes, direct calls, eager -------------------------------------------------------------------


def test_mode_off_runs_every_copy_and_the_body_still_has_a_context(make_shop: Any) -> None:
    shop = make_shop(idempotency_mode="off")
    charge = charge_task(shop, Policy(key="arguments"))
    message = shop.send(charge, 1)
    assert "idempotency_stamp" not in message
    for _ in range(2):
        assert shop.deliver(message).state == "SUCCESS"
    assert [(run.fence, run.attempt, len(run.key)) for run in charge.runs] == [(0, 1, 64)] * 2
    assert shop.events == []


def test_the_environment_overrides_the_mode(make_shop: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("CELERY_IDEMPOTENCY_MODE", "off")
    shop = make_shop(idempotency_mode="enforce")
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    shop.deliver(message)
    shop.deliver(message)
    assert len(charge.runs) == 2


def test_observe_runs_every_copy_and_says_what_it_would_do(make_shop: Any) -> None:
    shop = make_shop(idempotency_mode="observe")
    charge = charge_task(shop, body=lambda self, n: (n,))
    message = shop.send(charge, 1)
    assert shop.deliver(message).value == (1,)
    assert shop.deliver(message).value == (1,)
    assert len(charge.runs) == 2
    assert shop.terminal() == ["NEW", "WOULD_REPLAY"]
    assert shop.messages() == []


@pytest.mark.parametrize("ignored", [False, True])
def test_a_coroutine_that_nobody_awaits_fails_and_is_recorded_as_nothing(make_shop: Any, ignored: bool) -> None:
    """It did not run. A record that says otherwise would replay, for a day, what never happened."""
    shop = make_shop()

    async def charge() -> str:
        raise AssertionError("nobody runs this")

    task = shop.task(name="charge", key="arguments", ignore_result=ignored)(charge)
    for _ in range(2):
        delivered = shop.deliver(shop.send(task))
        assert isinstance(delivered.value, ConfigurationError)
        assert "task charge is async" in str(delivered.value)
        assert shop.store.get(delivered.key).state is State.RELEASED
    assert shop.terminal() == ["NEW", "NEW"]


def test_observe_leaves_a_coroutine_to_whoever_awaits_it(make_shop: Any) -> None:
    shop = make_shop(idempotency_mode="observe")

    async def charge() -> str:
        return "paid"

    task = shop.task(name="charge", ignore_result=True)(charge)
    delivered = shop.deliver(shop.send(task))
    assert delivered.state == "SUCCESS"
    assert inspect.iscoroutine(delivered.value)
    delivered.value.close()  # nobody awaits it here, which Python would say in the middle of another test


def test_a_direct_call_runs_and_has_a_real_context(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments"))
    assert charge(1) == {"paid": [1]}
    assert charge(1) == {"paid": [1]}
    context = charge.runs[0]
    assert (context.fence, context.attempt, context.reclaimed) == (0, 1, False)
    message = shop.send(charge, 1)
    shop.deliver(message)
    assert context.key == charge.runs[-1].key
    assert current() is None


def test_eager_calls_replay_and_raise_where_they_cannot_park(make_shop: Any) -> None:
    shop = make_shop(task_always_eager=True)
    charge = charge_task(shop, Policy(key="arguments"))
    assert charge.delay(1).get() == charge.apply((1,)).get() == {"paid": [1]}
    assert len(charge.runs) == 1
    message = {"id": "other", "args": [2], "kwargs": {}}
    hold(shop, charge, message)
    with pytest.raises(ClaimConflict):
        charge.apply((2,), throw=True)
    assert shop.terminal()[-1] == "CONFLICT"


def test_eager_retries_recurse_and_run(make_shop: Any) -> None:
    shop = make_shop(task_always_eager=True)
    charge = charge_task(shop, body=retrying)
    assert charge.delay(1).get() == "second"
    assert len(charge.runs) == 2


def test_a_broadcast_message_runs_in_every_queue(shop: Shop) -> None:
    from kombu.common import Broadcast

    shop.app.conf.task_queues = (*shop.app.amqp.queues.values(), Broadcast("everywhere"))
    shop.app.amqp.flush_routes()
    del shop.app.amqp.queues
    charge = charge_task(shop)
    shop.app.finalize()
    message = {"id": "M", "task": "charge", "args": [1], "kwargs": {}}
    info = {"exchange": "everywhere", "routing_key": "", "priority": 0, "redelivered": False}
    assert [shop.deliver(message, delivery_info=info).state for _ in range(2)] == ["SUCCESS", "SUCCESS"]
    assert len(charge.runs) == 2
    assert shop.events == []


# --- publishing -----------------------------------------------------------------------------------


def test_an_explicit_key_wins_and_travels(shop: Shop) -> None:
    charge = charge_task(shop)
    one = shop.send(charge, 1, idempotency_key="order:7")
    other = shop.send(charge, 2, idempotency_key="order:8")
    again = shop.send(charge, 1, idempotency_key="order:7")
    for message in (one, other, again):
        shop.deliver(message)
    assert len(charge.runs) == 2
    assert one["idempotency_key"] == "order:7"


@pytest.mark.parametrize("blank", ["", "   "])
def test_a_blank_explicit_key_is_refused_before_publishing(shop: Shop, blank: str) -> None:
    charge = charge_task(shop)
    with pytest.raises(KeyMissing, match="idempotency_key"):
        charge.apply_async((1,), idempotency_key=blank)
    assert shop.messages() == []


def test_a_key_without_a_value_is_refused_before_publishing(shop: Shop) -> None:
    @shop.task(name="pay", key="order:{order}")
    def pay(order: Any) -> None: ...

    with pytest.raises(KeyMissing, match="order"):
        pay.delay(None)
    assert shop.messages() == []


def test_forwarded_headers_do_not_make_a_child_a_duplicate(shop: Shop) -> None:
    charge = charge_task(shop)
    parent = shop.send(charge, 1, idempotency_key="order:7")
    forwarded = {k: v for k, v in parent.items() if k.startswith("idempotency_")}
    child = shop.send(charge, 2, headers={**forwarded, "idempotency_park": '{"generation":0,"count":9}'})
    assert "idempotency_key" not in child
    assert "idempotency_park" not in child
    shop.deliver(parent)
    shop.deliver(child)
    assert len(charge.runs) == 2


def test_a_message_without_a_stamp_is_derived_on_the_worker(shop: Shop) -> None:
    charge = charge_task(shop, Policy(key="arguments"))
    stamped = shop.send(charge, 1)
    bare = {k: v for k, v in shop.send(charge, 1).items() if not k.startswith("idempotency_")}
    shop.deliver(bare)
    shop.deliver(stamped)
    assert len(charge.runs) == 1


def test_a_deploy_does_not_turn_a_redelivery_into_a_mismatch_or_a_second_run(shop: Shop) -> None:
    @shop.task(name="pay", idempotency=Policy(key="arguments"))
    def pay(order: int) -> str:
        return "v1"

    message = shop.send(pay, 1)
    assert shop.deliver(message).value == "v1"
    del shop.app.tasks["pay"]

    @shop.task(name="pay", idempotency=Policy(key="arguments"))
    def pay_v2(order: int, currency: str = "EUR") -> str:
        return "v2"

    assert shop.deliver(message).value == "v1"
    assert shop.deliver(shop.send(pay_v2, 1)).value == "v1"
    assert shop.deliver(shop.send(pay_v2, 1, "USD")).value == "v2"


def test_a_stamp_of_a_newer_version_is_read_for_what_is_known(shop: Shop) -> None:
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    facts = {**json.loads(message["idempotency_stamp"]), "v": 2, "more": [1]}
    shop.deliver(message)
    assert shop.deliver({**message, "idempotency_stamp": json.dumps(facts)}).value == {"paid": [1]}
    assert len(charge.runs) == 1


@pytest.mark.parametrize(
    "garbage", ["", "{", "[]", "null", '{"key": 1}', "[" * 100_000, '{"id":"M","task":"charge"}', 7, b"x"]
)
def test_garbage_in_our_headers_is_derived_anew(shop: Shop, garbage: Any) -> None:
    charge = charge_task(shop)
    message = shop.send(charge, 1)
    assert shop.deliver(message).state == "SUCCESS"
    spoiled = {**message, "idempotency_stamp": garbage, "idempotency_park": garbage}
    assert shop.deliver(spoiled).value == {"paid": [1]}
    assert len(charge.runs) == 1


def test_scopes_separate_tenants_and_a_scope_that_yields_nothing_fails_closed(shop: Shop) -> None:
    policy = Policy(key="arguments", scope=lambda request: request.tenant)
    charge = charge_task(shop, policy)
    message = shop.send(charge, 1)
    shop.deliver(message, tenant="a")
    shop.deliver(message, tenant="b")
    shop.deliver(message, tenant="a")
    assert len(charge.runs) == 2
    delivered = shop.deliver(message, tenant="")
    assert isinstance(delivered.value, KeyMissing)


def test_values_without_canonical_form_only_cost_the_fingerprint_under_message_keys(make_shop: Any) -> None:
    shop = make_shop(task_serializer="pickle", accept_content=["pickle", "json"])

    @shop.task(name="pay")
    def pay(thing: Any) -> None: ...

    @shop.task(name="keyed", key="arguments")
    def keyed(thing: Any) -> None: ...

    pay.delay(complex(1, 2))
    with pytest.raises(TypeError, match="thing"):
        keyed.delay(complex(1, 2))


def test_a_serializer_nobody_could_read_back_stops_the_worker(make_shop: Any) -> None:
    shop = make_shop(idempotency_serializer="pickle")
    charge_task(shop)
    shop.app.finalize()
    with pytest.raises(ConfigurationError, match="accept_content"):
        runtime_of(shop.app).check()


def test_a_serializer_kombu_does_not_know_stops_the_worker_and_the_known_ones_are_told(make_shop: Any) -> None:
    shop = make_shop(idempotency_serializer="jsn")
    charge_task(shop)
    shop.app.finalize()
    with pytest.raises(ConfigurationError, match=r"task .*: kombu has no serializer 'jsn': name one of json, "):
        runtime_of(shop.app).check()


# --- the class ------------------------------------------------------------------------------------


def test_policies_of_base_classes_lie_under_the_tasks_own(shop: Shop) -> None:
    class Billing(IdempotentTask):
        abstract = True
        idempotency = Policy(ttl=5, lease=7)

    @shop.task(base=Billing, name="pay", idempotency=Policy(key=["order"], lease=9))
    def pay(order: int) -> None: ...

    policy = runtime_of(shop.app).policy_of(pay)
    assert (policy.key, policy.ttl, policy.lease, policy.max_deliveries) == (["order"], 5, 9, 5)


def test_something_else_than_a_policy_is_refused(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="Policy"):

        @shop.task(name="pay", idempotency={"key": "arguments"}, lazy=False)
        def pay() -> None: ...


def test_acks_late_unless_the_task_says_otherwise(make_shop: Any) -> None:
    shop = make_shop(task_acks_late=False)

    @shop.task(name="late")
    def late() -> None: ...

    @shop.task(name="early", acks_late=False, reject_on_worker_lost=False)
    def early() -> None: ...

    assert (late.acks_late, late.reject_on_worker_lost) == (True, True)
    assert (early.acks_late, early.reject_on_worker_lost) == (False, False)


def test_a_base_of_the_users_that_overrides_call_runs_inside(shop: Shop) -> None:
    order: list[str] = []

    class Tenant(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            order.append("tenant")
            return self.run(*args, **kwargs)

    class Both(IdempotentTask, Tenant):
        abstract = True

    @shop.task(base=Both, name="pay")
    def pay() -> str:
        order.append("body")
        return "paid"

    message = shop.send(pay)
    assert shop.deliver(message).value == shop.deliver(message).value == "paid"
    assert order == ["tenant", "body"]


def test_started_is_written_after_the_claim_and_never_over_a_final_state(make_shop: Any) -> None:
    shop = make_shop(task_track_started=True)
    seen: list[str] = []
    charge = charge_task(shop, body=lambda self, n: seen.append(self.AsyncResult(self.request.id).state))
    message = shop.send(charge, 1)
    shop.deliver(message)
    assert seen == ["STARTED"]
    failing = shop.send(charge, 2)
    hold(shop, charge, failing)
    shop.deliver(failing)
    assert charge.AsyncResult(failing["id"]).state == "PENDING"


def test_the_right_to_continue_is_settled_when_celery_has_published(shop: Shop) -> None:
    charge = charge_task(shop)

    @shop.task(base=Task, name="plain")
    def plain(value: Any) -> None: ...

    message = shop.send(charge, 1, link=plain.s())
    assert shop.deliver(message).state == "SUCCESS"
    assert [m["task"] for m in shop.messages()] == ["plain"]
    assert shop.store.get(key_of(charge)).note(message["id"]).settled
    assert shop.deliver(message).state == "SUCCESS"
    assert shop.messages() == []
    assert len(charge.runs) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"fingerprint": ["amount"]},
        {"on_unknown": "fail"},
        {"idempotency_key": "o:{order}"},
        {"idempotency_leese": 3},
        {"once": {}},
        {"unique_on": ["n"]},
    ],
)
def test_a_policys_word_outside_of_the_policy_is_refused(shop: Shop, options: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):

        @shop.task(name="pay", lazy=False, **options)
        def pay(order: int, amount: int) -> None: ...


def test_two_keys_are_refused(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="keep one"):

        @shop.task(name="pay", lazy=False, key="a:{order}", idempotency=Policy(key="b:{order}"))
        def pay(order: int) -> None: ...


def test_a_policy_without_the_base_class_stops_the_worker(shop: Shop) -> None:
    charge_task(shop)

    @shop.task(base=Task, name="plain", idempotency=Policy())
    def plain() -> None: ...

    shop.app.finalize()
    with pytest.raises(ConfigurationError, match="base=IdempotentTask"):
        runtime_of(shop.app).check()


def test_observe_announces_itself(make_shop: Any) -> None:
    shop = make_shop(idempotency_mode="observe")
    shop.app.finalize()
    assert any("observe" in warning for warning in runtime_of(shop.app).check())


def test_a_call_that_does_not_fit_is_celerys_own_type_error(shop: Shop) -> None:
    @shop.task(name="pay", key="order:{order}")
    def pay(order: int, amount: int) -> None: ...

    with pytest.raises(TypeError, match="amount"):
        pay.delay(1)
    with pytest.raises(KeyMissing, match=r"pay: .*order"):
        pay.delay(None, 1)
