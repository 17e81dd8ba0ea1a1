"""Idempotent kombu consumers over kombu's memory transport: what is acked, kept, requeued and given up, and when."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue

from celery_idem import (
    ConfigurationError,
    FingerprintMismatch,
    Happened,
    KeyMissing,
    OutcomeUnknown,
    Policy,
    StoreUnavailable,
    current,
)
from celery_idem.consumer import BREATH, KEPT_AT_MOST, KEY_HEADER, LONGEST, IdempotentConsumer
from celery_idem.core.events import Event
from celery_idem.core.keys import scope_hash
from celery_idem.core.records import Release
from celery_idem.publish import KEY_HEADER as OF_TASKS
from celery_idem.stores.memory import MemoryStore
from tests.support.clock import ManualClock

ROOT = Path(__file__).parents[2]
ORDER = Policy(name="charge", key="order:{order}", fingerprint=["amount"])


class Bench:
    """A queue, a consumer of it, and everything that came of its messages."""

    def __init__(self, policy: Policy = ORDER, handler: Any = None, **options: Any) -> None:
        self.clock = ManualClock()
        self.store = Flaky(MemoryStore(clock=self.clock))
        self.events: list[Event] = []
        self.runs: list[Any] = []
        self.dead: list[tuple[Any, Any]] = []
        self.errors: list[Exception] = []
        self.queue = Queue(uuid.uuid4().hex)
        self.connection = Connection("memory://", transport_options={"polling_interval": 0.001})
        self.idem = self.consumer()
        options.setdefault("dead_letter", lambda body, _, error: self.dead.append((body, error)))
        self.arguments = self.idem.handles(handler or self.charge, policy, **options)
        self.consuming = Consumer(self.connection.channel(), [self.queue], accept=["json"], **self.arguments)
        self.idem.on_iteration()
        self.consuming.consume()

    def consumer(self) -> IdempotentConsumer:
        made = IdempotentConsumer(self.store, clock=self.clock)  # type: ignore[arg-type]
        made.emit.listeners.append(self.events.append)
        return made

    def charge(self, body: Any, message: Any) -> None:
        self.runs.append(body)
        if self.errors:
            raise self.errors.pop(0)

    def send(self, body: Any = None, message_id: str | None = "M", **options: Any) -> None:
        body = {"order": 1, "amount": 50} if body is None else body
        properties = {} if message_id is None else {"message_id": message_id}
        with self.connection.Producer(serializer="json") as producer:
            producer.publish(body, routing_key=self.queue.name, declare=[self.queue], **properties, **options)

    def drain(self) -> None:
        """Deliver what the queue holds."""
        while self.waiting():
            self.connection.drain_events(timeout=1)

    def later(self, seconds: float = LONGEST * 1.25) -> None:
        """So much later, the loop comes round."""
        self.clock.advance(seconds)
        self.idem.on_iteration()

    def waiting(self) -> int:
        """Messages in the queue."""
        return int(self.queue(self.connection.default_channel).queue_declare(passive=True).message_count)

    def unacked(self) -> int:
        qos = self.consuming.channel.qos
        return len(set(qos._delivered) - qos._dirty)

    def names(self) -> list[str]:
        return [event.name.value for event in self.events]

    def close(self) -> None:
        self.connection.release()
        self.idem.close()


class Flaky:
    """The memory store, but for verbs that shall get no answer."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.down = store, set[str]()

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if verb in self.down:
                raise StoreUnavailable("no answer", may_have_landed=False)
            return getattr(self.store, verb)(*args, **kwargs)

        return call if callable(getattr(self.store, verb)) else getattr(self.store, verb)


def _with(**more: Any) -> Policy:
    return Policy(**more).over(ORDER)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


# --- once -----------------------------------------------------------------------------------------


def test_a_message_that_comes_again_runs_once_and_both_copies_are_acked(bench: Any) -> None:
    shop = bench()
    shop.send()
    shop.send()
    shop.drain()
    assert shop.runs == [{"order": 1, "amount": 50}]
    assert shop.names() == ["NEW", "REPLAYED"]
    assert shop.unacked() == 0


def test_another_message_for_the_same_order_runs_once(bench: Any) -> None:
    shop = bench()
    shop.send()
    shop.send({"order": 1, "amount": 50, "note": "again"}, "N")
    shop.send({"order": 2, "amount": 50}, "O")
    shop.drain()
    assert [run["order"] for run in shop.runs] == [1, 2]


def test_the_default_key_is_the_message_id(bench: Any) -> None:
    shop = bench(Policy(name="charge"))
    for message_id in ("M", "N", "M"):
        shop.send(message_id=message_id)
    shop.drain()
    assert len(shop.runs) == 2


def test_a_key_in_the_header_wins(bench: Any) -> None:
    shop = bench(Policy(name="charge", key="order:{order}"))
    shop.send(message_id=None, headers={KEY_HEADER: "client-1"})
    shop.send(message_id=None, headers={KEY_HEADER: "client-1"})
    shop.send(message_id=None, headers={KEY_HEADER: "client-2"})
    shop.drain()
    assert len(shop.runs) == 2


def test_a_body_that_is_no_mapping_is_called_body(bench: Any) -> None:
    shop = bench(Policy(name="charge", key="{body}"))
    for body in ("a", "a", "b"):
        shop.send(body, None)
    shop.drain()
    assert shop.runs == ["a", "b"]


def test_a_callable_makes_the_key_of_the_fields(bench: Any) -> None:
    shop = bench(Policy(name="charge", key=lambda fields: fields["order"] % 2, fingerprint=["amount"]))
    for order in (1, 2, 3):
        shop.send({"order": order, "amount": 50}, str(order))
    shop.drain()
    assert [run["order"] for run in shop.runs] == [1, 2]


def test_the_scope_is_asked_of_the_message(bench: Any) -> None:
    shop = bench(Policy(name="charge", key="order:{order}", scope=lambda message: message.properties["app_id"]))
    for tenant in ("north", "south", "north"):
        shop.send(message_id=None, app_id=tenant)
    shop.drain()
    assert len(shop.runs) == 2
    assert len(list(shop.store.find(scope=scope_hash("north")))) == 1


def test_the_handler_sees_its_run(bench: Any) -> None:
    seen: list[Any] = []
    shop = bench(handler=lambda body, message: seen.append(current()))
    shop.send()
    shop.drain()
    assert (len(seen[0].key), seen[0].attempt) == (64, 1)
    assert seen[0].fence > 0


def test_what_the_handler_returns_is_nobodys_business(bench: Any) -> None:
    shop = bench(handler=lambda body, message: object())
    shop.send()
    shop.send()
    shop.drain()
    assert (shop.names(), shop.unacked()) == (["NEW", "REPLAYED"], 0)


def test_a_body_without_a_canonical_form_has_no_fingerprint_and_needs_none(bench: Any) -> None:
    shop = bench(Policy(name="charge"))
    shop.send({"amount": float("nan")})
    shop.drain()
    assert len(shop.runs) == 1


def test_nothing_is_remembered_under_ttl_0_but_a_copy_does_not_run(bench: Any) -> None:
    shop = bench(Policy(name="charge", key="order:{order}", ttl=0))
    for message_id in ("M", "M", "N"):
        shop.send(message_id=message_id)
        shop.drain()
    assert len(shop.runs) == 2
    assert shop.names() == ["NEW", "OVER", "NEW"]
    assert shop.unacked() == 0


def test_the_header_is_the_one_of_tasks() -> None:
    assert KEY_HEADER == OF_TASKS


# --- held -----------------------------------------------------------------------------------------


def hold(shop: Bench) -> Callable[[], None]:
    """Hold order 1 as another process would; the returned function gives it back."""
    other = shop.consumer()
    handling = other.handles(shop.charge, ORDER)["callbacks"][0].__self__
    with shop.connection.Producer() as producer:
        queue = Queue(uuid.uuid4().hex)
        producer.publish({"order": 1, "amount": 50}, routing_key=queue.name, declare=[queue], message_id="H")
        message = queue(shop.connection.default_channel).get(no_ack=True)
    claim = shop.store.claim(handling.operation(message.decode(), message), lease=20, ttl=60).claim
    return lambda: shop.store.release(claim, Release.YIELDED)


def test_a_held_message_is_kept_while_others_run_and_runs_when_it_can(bench: Any) -> None:
    shop = bench()
    give_back = hold(shop)
    shop.send()
    shop.send({"order": 2, "amount": 50}, "N")
    shop.drain()
    assert [run["order"] for run in shop.runs] == [2]
    assert (shop.names(), shop.unacked()) == (["CONFLICT", "NEW"], 1)
    give_back()
    shop.later()
    assert [run["order"] for run in shop.runs] == [2, 1]
    assert shop.unacked() == 0


def test_a_held_message_is_tried_again_when_the_lease_ends(bench: Any) -> None:
    shop = bench()
    hold(shop)
    shop.clock.advance(19.5)
    shop.send()
    shop.drain()
    assert not shop.runs
    shop.later(0.6)
    assert len(shop.runs) == 1
    assert shop.names() == ["CONFLICT", "LEASE_RECLAIMED"]


def test_a_held_message_goes_back_to_the_broker_where_it_was_kept_for_long(bench: Any) -> None:
    shop = bench()
    hold(shop)
    shop.send()
    shop.drain()
    shop.clock.advance(KEPT_AT_MOST)
    hold(shop)
    shop.idem.on_iteration()
    assert (shop.waiting(), shop.unacked()) == (1, 0)


def test_a_message_is_kept_for_a_third_of_the_visibility_timeout(bench: Any) -> None:
    shop = bench()
    shop.consuming.channel.visibility_timeout = 30
    hold(shop)
    shop.send()
    shop.drain()
    shop.later(10)
    assert (shop.waiting(), shop.unacked()) == (1, 0)


def test_what_was_kept_of_a_channel_that_is_gone_is_dropped(bench: Any) -> None:
    shop = bench()
    give_back = hold(shop)
    shop.send()
    shop.drain()
    shop.consuming.channel.close()
    give_back()
    shop.later()
    assert shop.runs == []


def test_a_thread_that_never_comes_round_is_told_so_at_its_first_message(bench: Any) -> None:
    shop = bench()
    shop.send()
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            shop.drain()
        except ConfigurationError as error:
            raised.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    thread.join()
    assert "on_iteration" in str(raised[0])
    assert shop.unacked() == 1


def test_one_round_of_tries_is_short(bench: Any) -> None:
    shop = bench(handler=lambda body, message: shop.clock.advance(BREATH))
    give_back = hold(shop)
    for number in range(3):
        shop.send({"order": 1, "amount": 50}, str(number))
    shop.drain()
    give_back()
    shop.later()
    assert shop.unacked() == 2


def test_a_run_that_lost_its_key_meanwhile_does_not_count(bench: Any) -> None:
    def slow(body: Any, message: Any) -> None:
        shop.runs.append(body)
        if len(shop.runs) == 1:
            shop.clock.advance(61)
            hold(shop)

    shop = bench(handler=slow)
    shop.send()
    shop.drain()
    assert (len(shop.runs), shop.unacked()) == (1, 1)
    shop.later(21)
    assert (len(shop.runs), shop.unacked()) == (2, 0)


# --- exceptions -----------------------------------------------------------------------------------


def test_an_exception_is_tried_again_later_and_later(bench: Any) -> None:
    shop = bench()
    shop.errors = [ValueError("declined"), ValueError("declined")]
    shop.send()
    shop.drain()
    shop.later(1.4)
    assert len(shop.runs) == 1
    shop.later(1.2)
    assert len(shop.runs) == 2
    shop.later(2.6)
    assert len(shop.runs) == 2
    shop.later(2.5)
    assert len(shop.runs) == 3
    assert (shop.dead, shop.unacked()) == ([], 0)


def test_exceptions_are_counted_across_processes_and_the_last_one_gives_the_message_up(bench: Any) -> None:
    shop = bench(max_attempts=3)
    shop.errors = [ValueError(str(n)) for n in range(9)]
    for _ in range(2):
        shop.send()
        shop.drain()  # each copy is in another process' hands: none is tried again here
    assert not shop.dead
    shop.send()
    shop.drain()
    ((body, error),) = shop.dead
    assert (body, str(error)) == ({"order": 1, "amount": 50}, "2")
    assert shop.unacked() == 2


def test_a_dead_letter_that_is_sent_again_begins_anew(bench: Any) -> None:
    shop = bench(max_attempts=2)
    shop.errors = [ValueError(str(n)) for n in range(3)]
    shop.send()
    shop.drain()
    shop.later()
    assert [str(error) for _, error in shop.dead] == ["1"]
    shop.send()
    shop.drain()
    shop.later()
    assert (len(shop.runs), len(shop.dead), shop.unacked()) == (4, 1, 0)


def test_a_body_the_handler_changed_is_the_messages_own_again(bench: Any) -> None:
    def broken(body: Any, message: Any) -> None:
        shop.runs.append(dict(body))
        body["order"] = 99
        if len(shop.runs) == 1:
            raise ValueError

    shop = bench(handler=broken)
    shop.send()
    shop.drain()
    shop.later()
    assert shop.runs == [{"order": 1, "amount": 50}] * 2


def test_a_message_is_not_gone_before_somebody_has_it(bench: Any) -> None:
    def unreachable(*_: Any) -> None:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("no broker")

    calls: list[int] = []
    shop = bench(max_attempts=1, dead_letter=unreachable)
    shop.errors = [ValueError("declined")] * 3
    shop.send()
    shop.drain()
    shop.later()
    assert shop.unacked() == 1
    shop.later()
    assert (len(calls), shop.unacked()) == (3, 0)


def test_without_a_hook_the_message_is_rejected_and_not_requeued(bench: Any) -> None:
    shop = bench(max_attempts=1, dead_letter=None)
    shop.errors = [ValueError("declined")]
    shop.send()
    shop.drain()
    assert (shop.waiting(), shop.unacked()) == (0, 0)


def test_a_hook_may_reject_by_itself(bench: Any) -> None:
    shop = bench(max_attempts=1, dead_letter=lambda body, message, error: message.reject())
    shop.errors = [ValueError("declined")]
    shop.send()
    shop.drain()
    assert shop.unacked() == 0


def test_a_handler_that_acked_and_failed_does_not_end_the_consumer(bench: Any) -> None:
    def acks(_: Any, message: Any) -> None:
        message.ack()
        raise ValueError("declined")

    shop = bench(handler=acks, max_attempts=1, dead_letter=None)
    shop.send()
    shop.drain()
    assert shop.unacked() == 0


def test_a_failure_that_is_an_outcome_is_given_up_at_once_and_so_is_its_duplicate(bench: Any) -> None:
    shop = bench(Policy(name="charge", key="order:{order}", replay_failures=(ValueError,)))
    shop.errors = [ValueError("declined")]
    shop.send()
    shop.send(message_id="N")
    shop.drain()
    assert (len(shop.runs), [str(error) for _, error in shop.dead]) == (1, ["declined"] * 2)


def test_an_exit_ends_the_consumer_and_leaves_the_message_to_the_broker(bench: Any) -> None:
    shop = bench()
    shop.errors = [SystemExit(1)]  # type: ignore[list-item]
    shop.send()
    with pytest.raises(SystemExit):
        shop.drain()
    assert shop.unacked() == 1


def test_an_unknown_outcome_is_verified_with_body_and_message(bench: Any) -> None:
    asked: list[Any] = []

    def verify(body: Any, message: Any) -> Any:
        asked.append((body, message.properties["message_id"]))
        return Happened()

    shop = bench(_with(verify=verify))
    hold(shop)
    shop.clock.advance(21)
    shop.send()
    shop.drain()
    assert (asked, shop.runs, shop.unacked()) == ([({"order": 1, "amount": 50}, "M")], [], 0)


def test_an_unknown_outcome_that_must_fail_is_given_up(bench: Any) -> None:
    shop = bench(_with(on_unknown="fail"))
    hold(shop)
    shop.clock.advance(21)
    shop.send()
    shop.drain()
    assert isinstance(shop.dead[0][1], OutcomeUnknown)
    assert (shop.runs, shop.unacked()) == ([], 0)


# --- poison ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "body", "message_id"),
    [
        (Policy(name="charge"), {"order": 1}, None),
        (Policy(name="charge"), {"order": 1}, "\0"),
        (ORDER, {"amount": 50}, "M"),
        (ORDER, "no mapping", "M"),
        (Policy(name="charge", key=lambda fields: fields["nothing"]), {"order": 1}, "M"),
        (Policy(name="charge", key="order:{order}", scope=lambda message: message.nothing), {"order": 1}, "M"),
        (Policy(name="charge", key="order:{order}", scope=lambda message: ""), {"order": 1}, "M"),
    ],
)
def test_a_message_without_a_key_is_given_up(bench: Any, policy: Policy, body: Any, message_id: str | None) -> None:
    shop = bench(policy)
    shop.send(body, message_id)
    shop.drain()
    ((given, error),) = shop.dead
    assert (given, type(error)) == (body, KeyMissing)
    assert str(error)
    assert (shop.runs, shop.unacked()) == ([], 0)


@pytest.mark.parametrize("content_type", ["application/json", "application/x-unheard-of"])
def test_a_message_that_cannot_be_decoded_is_given_up(bench: Any, content_type: str) -> None:
    shop = bench()
    shop.send("{", content_type=content_type, content_encoding="utf-8")
    shop.drain()
    ((body, error),) = shop.dead
    assert body is None
    assert isinstance(error, Exception)
    assert (shop.runs, shop.unacked()) == ([], 0)


@pytest.mark.parametrize("ids", [("M", "N"), (None, None)])
def test_another_body_under_the_same_key_is_given_up(bench: Any, ids: tuple[str | None, str | None]) -> None:
    shop = bench()
    shop.send(message_id=ids[0])
    shop.send({"order": 1, "amount": 80}, ids[1])
    shop.drain()
    assert isinstance(shop.dead[0][1], FingerprintMismatch)
    assert (len(shop.runs), shop.unacked()) == (1, 0)


# --- the store is down ----------------------------------------------------------------------------


def test_with_the_store_down_messages_are_kept_and_nothing_runs(bench: Any) -> None:
    shop = bench()
    shop.store.down = {"claim"}
    shop.send()
    shop.drain()
    shop.later()
    assert (shop.runs, shop.unacked(), shop.names()) == ([], 1, ["STORAGE_ERROR"] * 2)
    shop.store.down = set()
    shop.later()
    assert (len(shop.runs), shop.unacked()) == (1, 0)


def test_with_the_store_down_fail_open_runs_and_an_exception_still_keeps_the_message(bench: Any) -> None:
    shop = bench(_with(storage_policy="fail_open"))
    shop.store.down = {"claim"}
    shop.errors = [ValueError("declined")]
    shop.send()
    shop.drain()
    assert (len(shop.runs), shop.unacked()) == (1, 1)
    shop.later()
    assert (len(shop.runs), shop.unacked()) == (2, 0)


def test_an_exception_that_cannot_be_counted_keeps_the_message(bench: Any) -> None:
    shop = bench(max_attempts=2)
    shop.store.down = {"note_parked"}
    shop.errors = [ValueError("declined")] * 2
    shop.send()
    shop.drain()
    shop.later()
    assert (shop.dead, shop.unacked()) == ([], 1)
    shop.later()
    assert (len(shop.runs), shop.unacked()) == (3, 0)


# --- set up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "more", "word"),
    [
        (Policy(), {}, "name"),
        (Policy(name="a", on_conflict="fail"), {}, "on_conflict"),
        (Policy(name="a", on_replay=lambda value, record: value), {}, "on_replay"),
        (Policy(name="a", serializer="json"), {}, "serializer"),
        (Policy(name="a", result_max_bytes=1), {}, "result_max_bytes"),
        (Policy(name="a"), {"max_attempts": 0}, "max_attempts"),
    ],
)
def test_what_means_nothing_here_is_refused_by_name(policy: Policy, more: Any, word: str) -> None:
    consumer = IdempotentConsumer("memory://")
    with pytest.raises(ConfigurationError, match=word):
        consumer.handles(print, policy, **more)


def test_a_consumer_without_acks_is_refused(bench: Any) -> None:
    shop = bench()
    with pytest.raises(TypeError, match="no_ack"):
        Consumer(shop.connection.channel(), [shop.queue], no_ack=True, **shop.arguments)


def test_celery_is_not_needed() -> None:
    script = """
        import sys
        sys.modules["celery"] = None
        import celery_idem.consumer
        consumer = celery_idem.consumer.IdempotentConsumer("memory://")
        consumer.close()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd="/")
