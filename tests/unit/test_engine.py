"""The engine on the memory store: every status, what becomes of the claim, and one terminal event per delivery."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idem import (
    DeliveriesExhausted,
    Engine,
    Happened,
    LeaseLost,
    NotHappened,
    OutcomeUnknown,
    Policy,
    RecordCorrupt,
    ResultUnavailable,
    StoreUnavailable,
    current,
)
from celery_idem.core.engine import new_token
from celery_idem.core.events import Emitter, Event, EventName
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.local_cache import LocalCache
from celery_idem.core.records import Ended, Kind, Outcome, Release, State, Status
from celery_idem.core.run import Ending
from celery_idem.stores.memory import MemoryStore
from tests.support.clock import ManualClock
from tests.support.operations import key_for, op
from tests.support.workers import wait_until


class Bench:
    """An engine, its store and clock, and every event it told."""

    def __init__(self, policy: Policy | None = None, *, store: Any = None, **options: Any) -> None:
        self.clock = ManualClock()
        self.store = store or MemoryStore(clock=self.clock)
        self.events: list[Event] = []
        self.emit = Emitter(self.events.append)
        self.policy = Policy(wait_timeout=0).over(Policy()) if policy is None else policy
        self.heartbeat = Heartbeat(self.store, self.emit, purge=False)
        self.engine = Engine(self.store, self.policy, emit=self.emit, heartbeat=self.heartbeat, **options)
        self.runs = 0

    def body(self, value: Any = "done") -> Callable[[Any], Any]:
        def run(_: Any) -> Any:
            self.runs += 1
            if isinstance(value, BaseException):
                raise value
            return value

        return run

    def terminal(self) -> list[str]:
        return [event.name.value for event in self.events if event.terminal]

    def names(self) -> list[str]:
        return [event.name.value for event in self.events]

    def record(self, key: str = "order:1") -> Any:
        return self.store.get(key_for(key))


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*args: Any, **kwargs: Any) -> Bench:
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.heartbeat.stop()


class Silent:
    """A store whose verbs fail as told; everything else is the memory store's."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.name = "silent"
        self.failing: dict[str, list[Exception]] = {}
        self.calls: list[str] = []

    def fail(self, verb: str, *errors: Exception) -> None:
        self.failing[verb] = list(errors)

    def __getattr__(self, verb: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(verb)
            if self.failing.get(verb):
                raise self.failing[verb].pop(0)
            return getattr(self.store, verb)(*args, **kwargs)

        return call


def down(*, landed: bool = False) -> StoreUnavailable:
    return StoreUnavailable("no answer", may_have_landed=landed)


def down_always() -> list[Exception]:
    return [down() for _ in range(1000)]


# --- run and replay -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, 0, [], "", False, {"a": [1, {"b": None}]}, "text"])
def test_the_first_run_executes_and_every_duplicate_replays_its_value(bench: Any, value: Any) -> None:
    b = bench()
    first = b.engine.run(op(message="M"), b.body(value))
    again = b.engine.run(op(message="N"), b.body("other"))
    assert (first.status, again.status) == (Status.EXECUTED, Status.REPLAYED)
    assert first.value == again.value == value
    assert type(first.value) is type(again.value)
    assert b.runs == 1
    assert b.terminal() == ["NEW", "REPLAYED"]


def test_a_token_is_128_bits_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(bytes.fromhex(token)) == 16 for token in tokens)


def test_a_first_run_hands_on_its_own_value_and_a_replay_what_json_made_of_it(bench: Any) -> None:
    b = bench()
    assert b.engine.run(op(), b.body({1: (2, 3)})).value == {1: (2, 3)}
    assert b.engine.run(op(message="N"), b.body()).value == {"1": [2, 3]}


def test_a_run_sees_its_own_context_and_nothing_outside_of_it(bench: Any) -> None:
    b, seen = bench(), []

    def body(context: Any) -> None:
        seen.append((context, current()))
        context.check()

    assert current() is None
    operation = op()
    b.engine.run(operation, body)
    context, inside = seen[0]
    assert context is inside
    assert (context.key, context.attempt, context.reclaimed, context.lost) == (operation.key, 1, False, False)
    assert context.fence == b.record().fence
    assert current() is None


def test_another_fingerprint_is_a_mismatch_and_does_not_run(bench: Any) -> None:
    b = bench()
    b.engine.run(op(fingerprint="a" * 64), b.body())
    result = b.engine.run(op(message="N", fingerprint="b" * 64), b.body())
    assert result.status is Status.MISMATCH
    assert b.runs == 1
    assert b.terminal() == ["NEW", "PAYLOAD_MISMATCH"]


def test_a_held_key_is_a_conflict_after_the_wait(bench: Any) -> None:
    b = bench(Policy(wait_timeout=0.6))  # longer than all the pauses between two looks
    held = b.store.claim(op(message="M", holder="elsewhere"), lease=60, ttl=60).claim
    result = b.engine.run(op(message="N"), b.body())
    assert result.status is Status.CONFLICT
    assert b.runs == 0
    assert b.names() == ["IN_FLIGHT_WAIT", "CONFLICT"]
    assert (b.events[0].fields["fence"], b.events[0].fields["held_by"]) == (held.fence, "elsewhere")


def test_a_waiting_duplicate_replays_as_soon_as_the_first_run_completes(bench: Any) -> None:
    b = bench(Policy(wait_timeout=30))
    inside, finish = threading.Event(), threading.Event()

    def slow(_: Any) -> str:
        inside.set()
        assert finish.wait(10)
        return "first"

    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(b.engine.run(op(message="M"), slow)))
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=lambda: results.append(b.engine.run(op(message="N"), b.body())))
    second.start()
    wait_until(lambda: "IN_FLIGHT_WAIT" in b.names(), 10, "the second copy to wait")
    finish.set()
    first.join(10)
    second.join(10)
    assert [r.value for r in results] == ["first", "first"]
    assert b.runs == 0


def test_a_body_that_raises_gives_the_key_back_and_the_next_one_runs(bench: Any) -> None:
    b = bench()
    with pytest.raises(ValueError, match="no"):
        b.engine.run(op(), b.body(ValueError("no")))
    assert b.record().state is State.RELEASED
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED
    assert b.terminal() == ["NEW", "NEW"]


def test_a_body_that_is_stopped_leaves_its_outcome_unknown(bench: Any) -> None:
    b = bench()
    with pytest.raises(SystemExit):
        b.engine.run(op(), b.body(SystemExit(1)))
    assert b.record().unknown
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED
    assert b.terminal() == ["NEW", "LEASE_RECLAIMED"]


def test_a_failure_that_is_an_outcome_is_raised_again_for_duplicates(bench: Any) -> None:
    b = bench(Policy(replay_failures=(KeyError,), wait_timeout=0))
    for message in ("M", "N"):
        with pytest.raises(KeyError, match="card"):
            b.engine.run(op(message=message), b.body(KeyError("card")))
    assert b.runs == 1
    assert b.record().outcome.kind is Kind.FAILURE


# --- values that are not kept ---------------------------------------------------------------------


def test_a_value_the_serializer_cannot_say_goes_on_once_and_never_runs_again(bench: Any) -> None:
    b = bench()
    value = object()
    first = b.engine.run(op(), b.body(value))
    assert (first.status, first.value) == (Status.ENCODE_FAILED, value)
    with pytest.raises(ResultUnavailable, match=r"the first run of shop\.charge happened"):
        b.engine.run(op(message="N"), b.body())
    assert b.runs == 1
    assert "ENCODE_FAILED" in b.names()


def test_a_value_that_is_too_big_goes_on_once_and_never_runs_again(bench: Any) -> None:
    b = bench(Policy(result_max_bytes=10, wait_timeout=0))
    assert b.engine.run(op(), b.body("x" * 100)).status is Status.ENCODE_FAILED
    with pytest.raises(ResultUnavailable):
        b.engine.run(op(message="N"), b.body())
    assert b.runs == 1


def test_a_value_nobody_reads_is_not_kept(bench: Any) -> None:
    b = bench()
    value = object()
    first = b.engine.attempt(op(), b.body(value), value_unread=True)
    assert (first.status, first.value) == (Status.EXECUTED, value)
    assert b.engine.attempt(op(message="N"), b.body(), value_unread=True).value is None
    with pytest.raises(ResultUnavailable):  # None would be taken for what the first run returned
        b.engine.run(op(message="O"), b.body())
    assert b.runs == 1


def test_a_value_the_policy_does_not_want_frees_the_key(bench: Any) -> None:
    b = bench(Policy(cacheable=lambda value: value != "pending", wait_timeout=0))
    b.engine.run(op(message="M"), b.body("pending"))
    b.engine.run(op(message="N"), b.body("paid"))
    assert b.engine.run(op(message="O"), b.body()).value == "paid"
    assert b.runs == 2


def test_a_policy_that_raises_about_a_value_stores_it(bench: Any, caplog: Any) -> None:
    b = bench(Policy(cacheable=lambda value: value.nonsense, wait_timeout=0))
    b.engine.run(op(message="M"), b.body("v"))
    assert b.engine.run(op(message="N"), b.body()).value == "v"
    assert "cacheable raised" in caplog.text


def test_ttl_zero_is_a_mutex_that_remembers_nothing(bench: Any) -> None:
    b = bench(Policy(ttl=0, wait_timeout=0))
    b.engine.run(op(message="M"), b.body())
    b.engine.run(op(message="N"), b.body())
    assert b.runs == 2


def test_a_stored_body_that_cannot_be_read_still_proves_completion(bench: Any) -> None:
    b = bench()
    b.engine.run(op(), b.body())
    record = b.record()
    from dataclasses import replace

    broken = replace(record.outcome.encoded, body=b"garbage")
    b.store._records[record.key] = replace(record, outcome=replace(record.outcome, encoded=broken))
    with pytest.raises(ResultUnavailable):
        b.engine.run(op(message="N"), b.body())
    assert b.runs == 1
    assert "CORRUPT_RECORD" in b.names()


def test_the_replay_hook_changes_what_duplicates_get(bench: Any) -> None:
    b = bench(Policy(on_replay=lambda value, record: {**value, "fence": record.fence}, wait_timeout=0))
    assert b.engine.run(op(), b.body({"paid": 1})).value == {"paid": 1}
    assert b.engine.run(op(message="N"), b.body()).value == {"paid": 1, "fence": b.record().fence}


def test_a_replay_hook_that_raises_leaves_the_stored_value(bench: Any, caplog: Any) -> None:
    b = bench(Policy(on_replay=lambda value, record: 1 / 0, wait_timeout=0))
    b.engine.run(op(), b.body("v"))
    assert b.engine.run(op(message="N"), b.body()).value == "v"
    assert "on_replay raised" in caplog.text


# --- an earlier run whose outcome nobody knows ----------------------------------------------------


def lapse(b: Bench, times: int = 1) -> None:
    for _ in range(times):
        b.store.claim(op(message="M", holder=""), lease=60, ttl=600)
        b.clock.advance(61)


def test_a_lapsed_claim_is_taken_over_and_says_so(bench: Any) -> None:
    b = bench()
    lapse(b)
    seen: list[Any] = []
    b.engine.run(op(), lambda context: seen.append((context.attempt, context.reclaimed)))
    assert seen == [(2, True)]
    assert b.terminal() == ["LEASE_RECLAIMED"]


def test_a_provably_dead_holder_costs_no_lease(bench: Any) -> None:
    import subprocess
    import sys

    b = bench()
    script = "from celery_idem.core.holder import current; print(current())"
    dead = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    b.store.claim(op(holder=dead), lease=60, ttl=600)
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED
    assert b.terminal() == ["LEASE_RECLAIMED"]


def test_the_dead_check_can_be_switched_off(bench: Any) -> None:
    import subprocess
    import sys

    b = bench(dead_check=False)
    script = "from celery_idem.core.holder import current; print(current())"
    dead = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    b.store.claim(op(holder=dead), lease=60, ttl=600)
    assert b.engine.run(op(), b.body()).status is Status.CONFLICT


def test_verify_that_finds_the_effect_completes_without_a_run(bench: Any) -> None:
    b = bench()
    lapse(b)
    result = b.engine.attempt(op(), b.body(), verify=lambda context: Happened((1, 2)))
    assert (result.status, result.value, b.runs) == (Status.EXECUTED, (1, 2), 0)
    assert b.engine.run(op(message="N"), b.body()).value == [1, 2]
    assert b.terminal() == ["REPLAYED", "REPLAYED"]


def test_verify_that_finds_the_effect_leaves_the_right_to_publish_what_follows(bench: Any) -> None:
    b = bench()
    lapse(b)
    result = b.engine.attempt(op(continues=True), b.body(), verify=lambda _: Happened("found"))
    assert (b.runs, result.value, result.claim.right) == (0, "found", True)
    assert b.heartbeat.held(result.claim.token) == result.claim
    b.engine.settle(result.claim)
    assert len(b.heartbeat) == 0


def test_verify_that_finds_nothing_runs_even_where_unknown_would_fail(bench: Any) -> None:
    b = bench(Policy(on_unknown="fail", wait_timeout=0))
    lapse(b)
    assert b.engine.attempt(op(), b.body(), verify=lambda context: NotHappened()).value == "done"
    assert b.runs == 1


@pytest.mark.parametrize("verify", [lambda context: 1 / 0, lambda context: True, lambda context: None])
def test_verify_that_does_not_know_leaves_it_to_the_policy(bench: Any, verify: Any) -> None:
    b = bench(Policy(on_unknown="fail", wait_timeout=0))
    lapse(b)
    result = b.engine.attempt(op(), b.body(), verify=verify)
    assert isinstance(result.error, OutcomeUnknown)
    assert b.runs == 0


def test_an_unknown_outcome_that_must_fail_is_stored_and_answers_every_message(bench: Any) -> None:
    b = bench(Policy(on_unknown="fail", wait_timeout=0))
    lapse(b)
    for message in ("M", "N"):
        with pytest.raises(OutcomeUnknown, match="forget"):
            b.engine.run(op(message=message), b.body())
    assert b.runs == 0
    assert b.terminal() == ["UNKNOWN_OUTCOME", "REPLAYED"]


def test_deliveries_that_all_die_are_exhausted(bench: Any) -> None:
    b = bench(Policy(max_deliveries=3, wait_timeout=0))
    lapse(b, 3)
    with pytest.raises(DeliveriesExhausted, match="3 runs") as caught:
        b.engine.run(op(), b.body())
    assert caught.value.attempts == 3
    assert b.runs == 0
    assert b.terminal() == ["EXHAUSTED"]
    assert b.record().outcome.kind is Kind.FAILURE


def test_the_last_allowed_delivery_runs(bench: Any) -> None:
    b = bench(Policy(max_deliveries=3, wait_timeout=0))
    lapse(b, 2)
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED


@pytest.mark.parametrize("cap", [2, 3])
def test_verify_is_asked_once_beyond_the_cap_and_then_no_more(bench: Any, cap: int) -> None:
    asked: list[int] = []

    def verify(context: Any) -> None:
        asked.append(context.attempt)

    for died, questions in ((cap + 1, []), (cap, [cap + 1])):
        b = bench(Policy(max_deliveries=cap, wait_timeout=0))
        lapse(b, died)
        assert isinstance(b.engine.attempt(op(), b.body(), verify=verify).error, DeliveriesExhausted)
        assert asked == questions


def test_a_lease_that_was_lost_around_a_verify_is_not_this_runs(bench: Any) -> None:
    def verify(_: Any) -> None:
        raise LeaseLost

    b = bench()
    lapse(b)
    with pytest.raises(LeaseLost):
        b.engine.attempt(op(), b.body(), verify=verify)
    assert (b.runs, b.record().state, len(b.heartbeat)) == (0, State.RELEASED, 0)


def test_a_claim_that_cannot_be_ended_is_renewed_no_more(bench: Any) -> None:
    def ending(*_: Any) -> Ending:
        raise ZeroDivisionError

    b = bench()
    with pytest.raises(ZeroDivisionError):
        b.engine.attempt(op(), b.body(), ending=ending)
    assert (b.runs, b.record().state, len(b.heartbeat)) == (1, State.CLAIMED, 0)


# --- the store does not answer --------------------------------------------------------------------


def test_fail_closed_waits_for_the_store_and_then_refuses(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store, store_timeout=0.1)
    store.fail("claim", *down_always())
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        b.engine.run(op(), b.body())
    assert time.monotonic() - began >= 0.1
    assert b.runs == 0
    assert b.terminal() == ["STORAGE_ERROR"]


def test_fail_closed_goes_on_when_the_store_answers_in_time(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store, store_timeout=30)
    store.fail("claim", down(), down())
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED


def test_fail_open_runs_unprotected_and_says_so(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(Policy(storage_policy="fail_open"), store=store)
    store.fail("claim", *down_always())
    result = b.engine.run(op(), b.body())
    assert (result.status, result.value) == (Status.UNPROTECTED, "done")
    assert b.terminal() == ["RAN_UNPROTECTED"]


def test_a_claim_that_may_have_landed_is_given_back_when_the_store_answers_again(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store, store_timeout=0.05)
    operation = op()
    store.store.claim(operation, lease=60, ttl=60)  # it landed; only the answer is lost
    store.fail("claim", *[down(landed=True) for _ in range(100)])
    with pytest.raises(StoreUnavailable):
        b.engine.run(operation, b.body())
    wait_until(lambda: store.store.get(operation.key).state is State.RELEASED, 10, "the claim to be given back")
    store.failing.clear()
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED
    assert b.terminal()[-1] == "NEW"


def test_a_completion_without_an_answer_is_asked_for_again(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store)
    store.fail("complete", down(landed=True), down())
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED
    assert store.get(key_for("order:1")).state is State.COMPLETED


def test_a_completion_that_never_gets_an_answer_keeps_the_claim_and_returns_the_value(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.2), store=store)
    store.fail("complete", *down_always())
    result = b.engine.run(op(), b.body())
    assert (result.status, result.value) == (Status.EXECUTED, "done")
    assert "COMPLETE_FAILED" in b.names()
    assert store.get(key_for("order:1")).state is State.CLAIMED
    assert len(b.heartbeat) == 0


def test_a_completion_without_an_answer_counts_for_nothing_once_the_key_is_known_to_be_anothers(bench: Any) -> None:
    """The renewal thread hears LOST while the completion is still asked for: the other run's answer is the answer."""
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.6, wait_timeout=0), store=store)

    def no_answer(*_: Any) -> None:
        wait_until(lambda: "LEASE_LOST" in b.names(), 20, "the renewal thread to hear of it")
        raise down()

    store.complete = no_answer

    def body(_: Any) -> str:
        steal(b.store)
        return "late"

    result = b.engine.run(op(), body)
    assert (result.status, result.value) == (Status.LEASE_LOST, None)
    assert {"LEASE_LOST", "COMPLETE_FAILED"} <= set(b.names())


def test_a_completion_without_an_answer_is_recorded_when_the_store_answers_again(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.2), store=store)
    store.fail("complete", *down_always())
    b.engine.run(op(), b.body())
    store.failing.clear()
    wait_until(
        lambda: store.get(key_for("order:1")).state is State.COMPLETED, 10, "the outcome to be recorded after all"
    )
    assert b.engine.run(op(message="N"), b.body()).value == "done"
    assert b.runs == 1
    assert b.terminal()[-1] == "REPLAYED"
    assert "COMPLETED_LATE" in b.names()


def test_a_copy_of_the_same_process_gets_an_outcome_whose_links_are_still_on_their_way(bench: Any) -> None:
    """The store is back before Celery has published them: the body must not run again for that."""
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.2), store=store)
    store.fail("complete", *down_always())
    first = op(continues=True)
    assert b.engine.attempt(first, b.body()).value == "done"
    store.failing.clear()
    assert b.engine.run(op(message="N"), b.body()).value == "done"
    assert b.runs == 1
    right = b.engine.heartbeat.held(first.token)
    assert right is not None
    assert right.right, "kept until the links are told of: a copy of the first message elsewhere waits for them"
    b.engine.heartbeat.told(first.token, published=True)
    wait_until(lambda: store.get(first.key).note("M").settled, 10, "the first message to be settled")
    wait_until(lambda: b.engine.heartbeat.held(first.token) is None, 10, "its right to end")


def test_a_completion_that_comes_too_late_changes_nothing_and_says_so(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.2), store=store)
    store.fail("complete", *down_always())
    b.engine.run(op(), b.body("mine"))
    time.sleep(0.3)  # its lease lapses
    theirs = store.claim(op(message="N"), lease=60, ttl=600).claim
    store.failing.clear()
    wait_until(lambda: b.names()[-1] == "LEASE_RECLAIMED_LOSS", 10, "the late completion to be refused")
    assert store.get(key_for("order:1")).token == theirs.token


def test_a_late_outcome_of_a_message_that_continues_is_settled_too_where_no_celery_tells(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.2), store=store)
    store.fail("complete", *down_always())
    b.engine.run(op(continues=True), b.body())
    store.failing.clear()
    wait_until(lambda: "COMPLETED_LATE" in b.names(), 10, "the outcome to be recorded after all")
    assert store.get(key_for("order:1")).note("M").settled


def test_an_exception_of_a_run_that_was_cut_off_and_lost_its_key_is_told_to_nobody(bench: Any) -> None:
    """Renewals that get no answer confirm nothing, however lately they were tried."""
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.4, wait_timeout=0), store=store)
    store.fail("renew", *down_always())

    def cut_off(_: Any) -> None:
        time.sleep(0.6)
        assert store.claim(op(message="N"), lease=60, ttl=600).claim is not None
        store.failing.clear()
        raise ValueError("declined")

    result = b.engine.attempt(op(), cut_off, ending=lambda *_: Ending.keep())
    assert (result.status, result.error) == (Status.LEASE_LOST, None)


class Slow(MemoryStore):
    """Its answer to a claim takes as long as a lease."""

    def claim(self, *args: Any, **options: Any) -> Any:
        decision = super().claim(*args, **options)
        time.sleep(0.3)
        return decision


def test_a_lease_is_renewed_from_when_it_was_asked_for(bench: Any) -> None:
    """A process that stood still between the claim and its answer has less of the lease left than it might think."""
    b = bench(Policy(lease=60), store=Slow())

    def body(context: Any) -> float:
        lease = b.heartbeat._leases[context.token]
        return float(lease.due - time.monotonic())

    assert b.engine.run(op(), body).value < 19.75, "a third of it, and 0.3 s of that are over"


def test_a_copy_of_the_same_process_waits_for_no_heartbeat_to_learn_what_it_did(bench: Any) -> None:
    """The store is back: whoever knows the outcome says it before anybody here asks for the key."""
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.2, wait_timeout=0), store=store)
    store.fail("complete", *down_always())
    b.engine.run(op(), b.body())
    time.sleep(0.25)
    store.failing.clear()
    assert b.engine.run(op(message="N"), b.body("other")).value == "done"
    assert b.runs == 1


class StallsOnce(MemoryStore):
    """Its first completion takes longer than the lease and fails; another message has its say meanwhile."""

    stalled = False

    def complete(self, claim: Any, outcome: Any, **options: Any) -> Any:
        if self.stalled:
            return super().complete(claim, outcome, **options)
        self.stalled = True
        self._clock.advance(claim.lease + 1)  # type: ignore[attr-defined]
        other = self.claim(op(message="N"), lease=60, ttl=60).claim
        assert other is not None
        super().complete(other, outcome)
        time.sleep(claim.lease + 0.1)
        raise down()


def test_a_completion_cut_off_by_a_stall_longer_than_the_lease_is_tried_once_more(bench: Any) -> None:
    b = bench(Policy(lease=0.2, wait_timeout=0), store=StallsOnce(clock=ManualClock()))
    assert b.engine.run(op(), b.body()).status is Status.LEASE_LOST
    assert "COMPLETE_FAILED" not in b.names()


def test_an_exception_of_a_run_that_stood_still_and_lost_its_key_is_told_to_nobody(bench: Any) -> None:
    """Else Celery would hear of a failure that another copy of the message knows nothing of."""
    store = MemoryStore(clock=ManualClock())
    b = bench(Policy(lease=60.0, wait_timeout=0), store=store)

    def stands_still(context: Any) -> None:
        store._clock.advance(61)  # type: ignore[attr-defined]
        assert store.claim(op(message="N"), lease=60, ttl=600).claim is not None
        b.heartbeat._leases[context.token].since -= 61  # as long as the process stood still, nothing was renewed
        raise ValueError("declined")

    result = b.engine.attempt(op(), stands_still, ending=lambda *_: Ending.keep())
    assert (result.status, result.error) == (Status.LEASE_LOST, None)
    assert b.names() == ["NEW", "LEASE_RECLAIMED_LOSS"]


def test_a_record_that_cannot_be_read_is_told_and_does_not_run(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store)
    store.fail("claim", RecordCorrupt("garbage"))
    with pytest.raises(RecordCorrupt):
        b.engine.run(op(), b.body())
    assert b.names() == ["CORRUPT_RECORD", "STORAGE_ERROR"]
    assert b.runs == 0


# --- the lease ------------------------------------------------------------------------------------


def test_a_body_longer_than_its_lease_keeps_it(bench: Any) -> None:
    b = bench(Policy(lease=0.3), store=MemoryStore())
    began = threading.Event()
    renewed: list[float] = []

    def body(_: Any) -> None:
        began.set()
        first = b.store.get(key_for("order:1")).lease_expires_at
        wait_until(
            lambda: b.store.get(key_for("order:1")).lease_expires_at > first + 0.3, 10, "the lease to be renewed"
        )
        renewed.append(first)

    assert b.engine.run(op(), body).status is Status.EXECUTED
    assert renewed
    assert "LEASE_LOST" not in b.names()


def steal(store: Any) -> None:
    record = store.get(key_for("order:1"))
    store.claim(op(message="thief"), lease=60, ttl=60, dead_fence=record.fence)


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_a_body_that_lost_its_lease_is_stopped_and_nothing_of_it_counts(bench: Any, in_main_thread: bool) -> None:
    b = bench(Policy(lease=0.3, wait_timeout=0), store=MemoryStore())
    ended: list[Any] = []

    def body(_: Any) -> None:
        steal(b.store)
        try:
            wait_until(lambda: False, 20, "LeaseLost")
        except LeaseLost:
            ended.append("stopped")
            raise

    results: list[Any] = []
    if in_main_thread:
        results.append(b.engine.run(op(), body))
    else:
        thread = threading.Thread(target=lambda: results.append(b.engine.run(op(), body)))
        thread.start()
        thread.join(30)
    assert results[0].status is Status.LEASE_LOST
    assert ended == ["stopped"]
    assert b.store.get(key_for("order:1")).message_id == "thief"
    assert b.names() == ["NEW", "LEASE_LOST"]


def test_a_body_may_be_left_to_finish_for_nothing(bench: Any) -> None:
    b = bench(Policy(lease=0.3, on_lease_lost="continue"), store=MemoryStore())
    seen: list[bool] = []

    def body(context: Any) -> str:
        steal(b.store)
        wait_until(lambda: context.lost, 10, "the loss to be known")
        with pytest.raises(LeaseLost):
            context.check()
        seen.append(True)
        return "late"

    assert b.engine.run(op(), body).status is Status.LEASE_LOST
    assert seen == [True]


def test_a_completion_that_is_fenced_out_discards_the_value(bench: Any) -> None:
    b = bench(store=MemoryStore())

    def body(_: Any) -> str:
        steal(b.store)
        return "late"

    result = b.engine.run(op(), body)
    assert (result.status, result.value) == (Status.LEASE_LOST, None)
    assert b.names() == ["NEW", "LEASE_RECLAIMED_LOSS"]


def test_a_mutex_that_another_took_meanwhile_discards_the_value(bench: Any) -> None:
    b = bench(Policy(ttl=0, wait_timeout=0))

    def body(_: Any) -> str:
        b.clock.advance(1000)
        assert b.store.claim(op(message="N"), lease=60, ttl=60).claim is not None
        return "late"

    result = b.engine.run(op(message="M"), body)
    assert (result.status, result.value) == (Status.LEASE_LOST, None)
    assert b.names()[-1] == "LEASE_RECLAIMED_LOSS"


def test_renewals_without_an_answer_stop_nobody(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(Policy(lease=0.3), store=store)
    store.fail("renew", *down_always())

    def body(_: Any) -> str:
        wait_until(lambda: b.names().count("RENEW_FAILED") >= 3, 10, "three failed renewals")
        return "done"

    assert b.engine.run(op(), body).value == "done"


def test_a_lost_lease_ends_only_its_own_body(bench: Any) -> None:
    b = bench(Policy(lease=0.3, wait_timeout=0), store=MemoryStore())

    def outer(_: Any) -> str:
        def inner(_: Any) -> None:
            steal(b.store)  # the outer body's key
            wait_until(lambda: False, 20, "LeaseLost")

        b.engine.run(op(key="order:2"), inner)
        return "not reached"

    assert b.engine.run(op(), outer).status is Status.LEASE_LOST
    assert b.store.get(key_for("order:2")).state is State.RELEASED


def test_after_the_completion_only_a_right_to_continue_is_renewed(bench: Any) -> None:
    b = bench()
    b.engine.attempt(op(message="M"), b.body())
    assert len(b.heartbeat) == 0
    b.engine.attempt(op(key="order:2", message="M", continues=True), b.body())
    assert len(b.heartbeat) == 1
    claim = b.store.claim(op(key="order:3", continues=True), lease=60, ttl=60).claim
    b.heartbeat.add(claim, lambda: None)
    b.clock.advance(10_000)
    b.store.claim(op(key="order:3", message="N"), lease=60, ttl=60)
    assert b.engine.complete(claim, Outcome(Kind.RESULT)) is Ended.LOST
    assert b.heartbeat.held(claim.token) is None


def test_a_silent_store_takes_no_key_away(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store)
    claim = store.claim(op(), lease=60, ttl=60).claim
    assert not b.engine.lapsed(claim)
    monkeypatch.setattr(b.heartbeat, "overdue", lambda _: True)
    assert not b.engine.lapsed(claim)
    store.fail("renew", down())
    assert not b.engine.lapsed(claim)
    assert store.calls == ["claim", "renew", "renew"]


# --- observe, local cache, open claims ------------------------------------------------------------


def test_observe_runs_whatever_the_answer_and_says_what_enforcing_would_do(bench: Any) -> None:
    b = bench()
    assert b.engine.attempt(op(message="M"), b.body(object()), observe=True).status is Status.ENCODE_FAILED
    b.engine.attempt(op(message="N"), b.body(), observe=True)
    b.store.claim(op(key="order:2", message="M", fingerprint="a" * 64), lease=60, ttl=60)
    b.engine.attempt(op(key="order:2", message="N", fingerprint="a" * 64), b.body(), observe=True)
    b.engine.attempt(op(key="order:2", message="N", fingerprint="b" * 64), b.body(), observe=True)
    assert b.runs == 4
    assert b.terminal() == ["NEW", "WOULD_REPLAY", "WOULD_PARK", "WOULD_MISMATCH"]


def test_observe_hands_on_the_value_untouched(bench: Any) -> None:
    b = bench()
    assert b.engine.attempt(op(), b.body((1, 2)), observe=True).value == (1, 2)


def test_the_local_cache_replays_without_the_store(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store, cache=LocalCache(10))
    b.engine.run(op(message="M"), b.body("v"))
    b.engine.run(op(message="N"), b.body())
    asked = len(store.calls)
    assert b.engine.run(op(message="O"), b.body()).value == "v"
    assert len(store.calls) == asked
    assert b.runs == 1
    replays = [event.fields for event in b.events if event.name is EventName.REPLAYED]
    assert [fields.get("local") for fields in replays] == [None, True]


def test_the_local_cache_never_answers_a_message_that_continues(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store, cache=LocalCache(10))
    b.engine.run(op(message="M"), b.body("v"))
    b.engine.run(op(message="N"), b.body())
    asked = len(store.calls)
    result = b.engine.attempt(op(message="O", continues=True), b.body())
    assert len(store.calls) > asked
    assert result.claim is not None
    b.engine.settle(result.claim)


def test_the_local_cache_keeps_no_record_that_hides_notes(bench: Any) -> None:
    from dataclasses import replace

    store = Silent(MemoryStore())
    b = bench(store=store, cache=LocalCache(10))
    b.engine.run(op(message="M"), b.body("v"))
    record = store.store.get(key_for("order:1"))
    store.store._records[record.key] = replace(record, others=True)
    b.engine.run(op(message="N"), b.body())
    asked = len(store.calls)
    b.engine.run(op(message="O"), b.body())
    assert len(store.calls) > asked


def test_verify_sees_its_run(bench: Any) -> None:
    b, seen = bench(), []
    lapse(b)
    b.engine.attempt(op(), b.body(), verify=lambda context: seen.append((current(), context)) or NotHappened())
    assert seen[0][0] is seen[0][1]
    assert current() is None


def test_a_record_that_a_transaction_holds_for_a_moment_is_waited_for(bench: Any) -> None:
    from celery_idem.core.records import Answer, Decision

    store = Silent(MemoryStore())
    b = bench(Policy(wait_timeout=30), store=store)
    real, answers = store.store.claim, [Decision(Answer.HELD), Decision(Answer.HELD)]
    store.store.claim = lambda *a, **k: answers.pop() if answers else real(*a, **k)
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED
    assert b.names() == ["IN_FLIGHT_WAIT", "NEW"]
    assert not {"fence", "held_by"} & set(b.events[0].fields)


def test_one_claim_that_cannot_be_given_back_holds_up_no_other(bench: Any) -> None:
    store = Silent(MemoryStore())
    b = bench(store=store)
    claims = [store.store.claim(op(key=f"order:{n}"), lease=60, ttl=60).claim for n in (1, 2)]
    store.fail("release", RecordCorrupt("garbage"))
    for claim in claims:
        b.heartbeat.release_later(claim, Release.YIELDED)
    wait_until(lambda: store.store.get(key_for("order:2")).state is State.RELEASED, 10, "the other claim to be free")


def test_the_local_cache_leaves_a_mismatch_to_the_store(bench: Any) -> None:
    b = bench(cache=LocalCache(10))
    b.engine.run(op(message="M", fingerprint="a" * 64), b.body("v"))
    b.engine.run(op(message="N", fingerprint="a" * 64), b.body("v"))
    assert b.engine.run(op(message="O", fingerprint="b" * 64), b.body()).status is Status.MISMATCH


def test_a_claim_kept_open_stays_alive_until_it_is_released(bench: Any) -> None:
    b = bench()
    result = b.engine.attempt(op(), b.body(ValueError("no")), ending=lambda value, error: Ending.keep())
    assert isinstance(result.error, ValueError)
    assert len(b.heartbeat) == 1
    assert b.record().state is State.CLAIMED
    b.engine.release(result.claim, Release.ENDED)
    assert len(b.heartbeat) == 0
    assert b.engine.run(op(), b.body()).status is Status.CONFLICT  # a copy of the attempt that ended
    assert b.terminal() == ["NEW", "OVER"]
    assert b.engine.run(op(message="N"), b.body()).status is Status.EXECUTED


def test_a_completed_message_that_continues_keeps_its_right_until_settled(bench: Any) -> None:
    b = bench()
    first = b.engine.attempt(op(continues=True), b.body("v"))
    assert first.claim is not None
    assert b.engine.attempt(op(continues=True), b.body()).status is Status.CONFLICT
    b.engine.settle(first.claim)
    again = b.engine.attempt(op(continues=True), b.body())
    assert (again.status, again.value, again.claim) == (Status.REPLAYED, "v", None)
    assert b.runs == 1


def test_a_replay_may_publish_what_a_dead_first_run_did_not(bench: Any) -> None:
    b = bench()
    first = b.engine.attempt(op(continues=True), b.body("v"))
    b.engine.abandon(first.claim)
    b.clock.advance(61)
    again = b.engine.attempt(op(continues=True), b.body())
    assert (again.status, again.value) == (Status.REPLAYED, "v")
    assert again.claim is not None
    b.engine.settle(again.claim)


def test_a_listener_that_raises_changes_nothing(bench: Any, caplog: Any) -> None:
    b = bench()

    def broken(_: Event) -> None:
        raise RuntimeError("metrics are down")

    b.emit.listeners.insert(0, broken)
    assert b.engine.run(op(), b.body()).status is Status.EXECUTED
    assert b.events[0].name is EventName.NEW
    assert "listener raised" in caplog.text
