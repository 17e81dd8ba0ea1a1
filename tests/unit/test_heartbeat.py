"""The renewal thread: a real one under gevent, woken in time, gone when it is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from celery_idem.core.events import Emitter
from celery_idem.core.heartbeat import Heartbeat
from celery_idem.core.records import Answer, Claim, Delivery, Kind, Operation, Outcome, Release, State
from celery_idem.core.threads import Bell, start_thread
from celery_idem.errors import StoreUnavailable
from celery_idem.stores.memory import MemoryStore
from tests.support.workers import wait_until

ROOT = Path(__file__).parents[2]


def claimed(store: Any, name: str, lease: float) -> Claim:
    operation = Operation(name * 64, Delivery("M"), name * 32)
    claim = store.claim(operation, lease=lease, ttl=60).claim
    assert claim is not None
    return claim


class Counting(MemoryStore):
    """Notes when which leases were renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.renewals: list[tuple[float, str]] = []
        self.closed = 0

    def renew(self, claims: Any) -> Any:
        self.renewals += [(time.monotonic(), claim.token[0]) for claim in claims]
        return super().renew(claims)

    def close(self) -> None:
        self.closed += 1


def test_a_short_lease_after_a_long_one_is_renewed_in_time() -> None:
    store = Counting()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat.add(claimed(store, "a", 600), lambda: None)
    time.sleep(0.05)  # the thread waits for the long one
    since = time.monotonic()
    heartbeat.add(claimed(store, "b", 0.6), lambda: None)
    wait_until(lambda: store.renewals, 30, "a renewal, 200 s before the long one's")
    assert store.renewals[0][1] == "b"
    assert store.renewals[0][0] - since >= 0.2
    heartbeat.stop()


def test_a_lease_is_due_a_third_of_its_length_after_it_was_asked_for() -> None:
    heartbeat = Heartbeat(Counting(), Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]  no thread
    heartbeat.add(claimed(heartbeat._store, "a", 60), lambda: None, since=1000.0)
    assert heartbeat._leases["a" * 32].due == 1020.0


def test_a_stopped_heartbeat_leaves_no_thread_and_begins_anew() -> None:
    store, before = Counting(), set(threading.enumerate())
    new = lambda: [thread.name for thread in set(threading.enumerate()) - before]  # noqa: E731
    heartbeat = Heartbeat(store, Emitter(), purge=False, closes=True)
    for number in range(1, 4):
        heartbeat.add(claimed(store, "abc"[number - 1], 0.15), lambda: None)
        wait_until(lambda number=number: len(store.renewals) >= number, 30, "a renewal")
        assert new() == ["celery_idem heartbeat"]
        heartbeat.stop()
        heartbeat.stop()
        assert new() == []
        assert store.closed == number
    assert len(heartbeat) == 3, "what it held lapses by itself"


def test_a_discarded_lease_is_not_renewed_and_can_be_added_again() -> None:
    store = Counting()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    kept, gone = claimed(store, "a", 0.15), claimed(store, "b", 0.15)
    with heartbeat._mutex:  # the thread may not look in between
        for claim in (kept, gone):
            heartbeat.add(claim, lambda: None)
        heartbeat.discard(gone)
    wait_until(lambda: len(store.renewals) >= 3, 30, "renewals")
    assert {name for _, name in store.renewals} == {"a"}
    assert heartbeat.held(gone.token) is None
    heartbeat.add(gone, lambda: None)
    wait_until(lambda: "b" in {name for _, name in store.renewals}, 30, "a renewal of the other again")
    heartbeat.stop()


def test_an_error_of_the_store_ends_no_heartbeat(caplog: Any) -> None:
    class Broken(Counting):
        def renew(self, claims: Any) -> Any:
            if len(self.renewals) < 2:
                self.renewals.append((0.0, ""))
                raise RuntimeError("a bug")
            return super().renew(claims)

    store = Broken()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat.add(claimed(store, "a", 0.1), lambda: None)
    wait_until(lambda: len(store.renewals) >= 4, 30, "renewals after the error")
    heartbeat.stop()
    assert "a bug" in caplog.text


# -- bells -------------------------------------------------------------------------------------------------------------


def test_a_bell_rung_before_is_heard_once() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    start = time.monotonic()
    bell.wait(60)
    assert time.monotonic() - start < 20
    start = time.monotonic()
    bell.wait(0.1)
    assert time.monotonic() - start >= 0.1


@pytest.mark.parametrize("seconds", [None, 1e12])
def test_a_bell_wakes_who_waits_long(seconds: float | None) -> None:
    bell = Bell()
    woken: list[bool] = []

    def wait() -> None:
        bell.wait(seconds)
        woken.append(True)

    join = start_thread(wait, "waits")
    time.sleep(0.05)
    assert not woken
    bell.ring()
    join()
    assert woken


# -- gevent ------------------------------------------------------------------------------------------------------------

START = """
from gevent import monkey
monkey.patch_all()
import time, gevent, psutil
from celery_idem.core.events import EventName
from celery_idem.core.records import Release, Renewal
from tests.unit.test_heartbeat import *

real_ident = monkey.get_original("_thread", "get_ident")
MAIN = real_ident()

def burn(seconds, enough=lambda: False):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not enough():
        pass
"""

RENEWS = """
class Where(Counting):
    lost = False
    def renew(self, claims):
        assert real_ident() != MAIN
        gevent.sleep(0.001)  # in the thread's own hub, as a client's socket does
        answers = super().renew(claims)
        return dict.fromkeys(answers, Renewal.LOST) if self.lost else answers
    def close(self):
        assert real_ident() != MAIN
        super().close()

told, lost = [], []
def listener(event):
    gevent.sleep(0)  # not in the hub
    told.append((event.name, real_ident()))

threads, files = psutil.Process().num_threads(), []
for round in range(1, 4):
    store = Where()
    heartbeat = Heartbeat(store, Emitter(listener), purge=False, closes=True)
    begun = time.monotonic()
    heartbeat.add(claimed(store, "a", 0.3), lambda: lost.append(real_ident()))
    burn(30, lambda: len(store.renewals) >= 6)
    assert store.renewals[5][0] - begun >= 0.59, "a third of a lease before each"
    store.lost = True
    burn(30, lambda: len(lost) == round)
    assert len(lost) == round, "the body can ask for it although it never yields"
    burn(0.1)
    assert len(told) == round - 1, "listeners wait for the hub"
    deadline = time.monotonic() + 30
    while len(told) < round:
        assert time.monotonic() < deadline, "the listener never heard"
        gevent.sleep(0.01)
    assert told[-1] == (EventName.LEASE_LOST, MAIN), told
    assert lost[-1] != MAIN
    heartbeat.stop()
    assert store.closed == 1
    deadline = time.monotonic() + 30
    while psutil.Process().num_threads() > threads:
        assert time.monotonic() < deadline, "a thread is left"
        gevent.sleep(0.01)
    files.append(psutil.Process().num_fds())
assert files[0] == files[-1], f"hubs are left: {files}"
print("ok")
"""

WATCHES = """
from celery_idem.core.threads import original
from celery_idem.stores.sql.watchdog import Watchdog
import _socket
ours, theirs = _socket.socketpair()  # as libpq waits: in C, and no greenlet runs
watchdog, start = Watchdog(), time.monotonic()
ticket = watchdog.watch(ours, start + 0.3)
assert ours.recv(1) == b""
assert 0.29 <= time.monotonic() - start < 20
watchdog.done(ticket)
print("ok")
"""

SHARES = """
store = MemoryStore()
heartbeat = Heartbeat(store, Emitter(), purge=False)

def body(number):
    for turn in range(40):
        operation = Operation(f"{number:064}", Delivery(f"{number}-{turn}"), f"{number:016}{turn:016}")
        claim = store.claim(operation, lease=0.01, ttl=60).claim
        assert claim is not None
        heartbeat.add(claim, lambda: None)
        gevent.sleep(0.01)
        heartbeat.discard(claim)
        store.release(claim, Release.YIELDED)

gevent.joinall([gevent.spawn(body, number) for number in range(30)], timeout=30, raise_error=True)
assert len(heartbeat) == 0
print("ok")
"""


@pytest.mark.parametrize("script", [RENEWS, WATCHES, SHARES], ids=["renews", "watches", "shares"])
def test_under_gevent(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "ok\n", done.stdout + done.stderr


@pytest.mark.parametrize(("published", "settled"), [(True, True), (False, False)])
def test_an_outcome_that_is_recorded_late_waits_for_the_links_of_its_message(published: bool, settled: bool) -> None:
    """Recorded and settled before Celery has published them, they would be lost with a process that dies there."""
    store, operation = MemoryStore(), Operation("c" * 64, Delivery("M", continues=True), "c" * 32)
    claim = store.claim(operation, lease=60, ttl=60).claim
    assert claim is not None
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat.complete_later(claim, Outcome(Kind.IGNORED))
    heartbeat._work([], time.monotonic())
    assert store.get(claim.key).state is State.CLAIMED  # type: ignore[union-attr]
    heartbeat.told("another token", published=True)
    heartbeat._work([], time.monotonic())
    assert store.get(claim.key).state is State.CLAIMED  # type: ignore[union-attr]
    heartbeat.told(claim.token, published=published)
    heartbeat._work([], time.monotonic())
    record = store.get(claim.key)
    assert record is not None
    assert record.state is State.COMPLETED
    assert record.note("M").settled is settled
    heartbeat.stop()


# -- what waits for a store that is back -------------------------------------------------------------------------------


class Slow(Counting):
    """Something becomes due while an outcome is being recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []
        self.meanwhile: Any = lambda: None

    def complete(self, claim: Any, outcome: Any, **more: Any) -> Any:
        self.ended.append(f"complete {claim.token[0]}")
        self.meanwhile()
        return super().complete(claim, outcome, **more)

    def release(self, claim: Any, *args: Any, **more: Any) -> Any:
        self.ended.append(f"release {claim.token[0]}")
        return super().release(claim, *args, **more)


def test_outcomes_that_wait_keep_no_lease_from_being_renewed() -> None:
    """Ended all in one go, ten thousand of them outlast the lease of a body that runs beside them."""
    store = Slow()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]  no thread: the test is in its place
    heartbeat.release_later(claimed(store, "a", 60), Release.YIELDED)
    for name in "bc":
        heartbeat.complete_later(claimed(store, name, 60), Outcome(Kind.IGNORED))
    heartbeat.add(claimed(store, "d", 60), lambda: None)
    lease = heartbeat._leases["d" * 32]
    store.meanwhile = lambda: setattr(lease, "due", 0.0)
    heartbeat._work([], time.monotonic())
    assert (store.ended, store.renewals) == (["complete b"], [])
    store.meanwhile = lambda: None
    heartbeat._work([lease], time.monotonic())
    assert [token for _, token in store.renewals] == ["d"]
    assert store.ended == ["complete b", "complete c", "release a"], "what is told before what lapses by itself"


def test_a_record_that_stays_locked_keeps_no_other_outcome_waiting() -> None:
    store = Slow()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]
    for name in "abc":
        heartbeat.complete_later(claimed(store, name, 60), Outcome(Kind.IGNORED))

    def meanwhile() -> None:
        if store.ended[-1] == "complete a" or away:
            raise StoreUnavailable("locked")

    away = False
    store.meanwhile = meanwhile
    heartbeat._work([], time.monotonic())
    assert store.ended == ["complete a", "complete b", "complete c"]
    assert [left.claim.token[0] for left in heartbeat._leftovers] == ["a"]
    for name in "de":
        heartbeat.complete_later(claimed(store, name, 60), Outcome(Kind.IGNORED))
    away = True
    heartbeat._work([], time.monotonic())
    assert store.ended[3:] == ["complete a", "complete d"], "two in a row: the store itself is away"
    away = False
    heartbeat._work([], time.monotonic())
    assert store.ended[5:] == ["complete e", "complete a", "complete d"]


def test_a_renewal_that_fails_in_an_unknown_way_is_tried_a_little_later_and_holds_nothing_up(caplog: Any) -> None:
    store = Slow()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]
    heartbeat.complete_later(claimed(store, "a", 60), Outcome(Kind.IGNORED))
    heartbeat.add(claimed(store, "b", 60), lambda: None)
    lease = heartbeat._leases["b" * 32]
    lease.due = 0.0
    store.renew = lambda claims: 1 / 0  # type: ignore[method-assign]
    heartbeat._work([lease], time.monotonic())
    assert lease.due > time.monotonic(), "or the thread would never rest"
    assert store.ended == ["complete a"]
    assert "ZeroDivisionError" in caplog.text


def test_the_end_of_a_process_records_what_waits_if_the_store_is_back() -> None:
    store = Slow()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    told, continues = claimed(store, "a", 60), Operation("b" * 64, Delivery("M", continues=True), "b" * 32)
    untold = store.claim(continues, lease=60, ttl=60).claim
    assert untold is not None
    for claim in (told, untold):
        heartbeat.complete_later(claim, Outcome(Kind.IGNORED))
    heartbeat.stop()
    for claim in (told, untold):
        record = store.get(claim.key)
        assert record is not None
        assert record.state is State.COMPLETED
    assert store.get(untold.key).note("M").settled is False  # type: ignore[union-attr]  a copy publishes its links


def test_the_end_of_a_process_says_what_was_never_recorded(caplog: Any) -> None:
    store = Slow()

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("away")

    store.complete = away  # type: ignore[method-assign]
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat.complete_later(claimed(store, "a", 60), Outcome(Kind.IGNORED))
    heartbeat.stop()
    assert f"the outcome of key {'a' * 64} was never recorded" in caplog.text
    heartbeat.complete_later(claimed(store, "b", 60), Outcome(Kind.IGNORED))
    heartbeat._leftovers[-1].until = 0.0
    heartbeat._work([], time.monotonic())
    assert f"the outcome of key {'b' * 64} was never recorded" in caplog.text
    heartbeat.stop()


def test_an_outcome_that_nothing_is_kept_of_waits_for_its_store_too() -> None:
    heartbeat = Heartbeat(MemoryStore(), Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]
    claim = heartbeat._store.claim(Operation("a" * 64, Delivery("M"), "a" * 32), lease=60, ttl=0).claim
    assert claim is not None
    heartbeat.complete_later(claim, Outcome(Kind.IGNORED))
    heartbeat._work([], time.monotonic())
    record = heartbeat._store.get(claim.key)
    assert record is not None
    assert record.state is State.COMPLETED


def asked(store: Any, name: str, message: str) -> Answer:
    """What a copy of this key hears."""
    return store.claim(Operation(name * 64, Delivery(message), message * 32), lease=60, ttl=60).answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("caught_up", [True, False])
def test_a_live_body_keeps_its_key_from_a_copy_of_its_process_when_the_store_is_back(caught_up: bool) -> None:
    """The copy asks as often as the renewal thread, and would take the key for a dead one's."""
    now = 1000.0
    store = MemoryStore(clock=lambda: now)
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]
    heartbeat.add(claimed(store, "a", 60), lambda: None, since=time.monotonic() - 61)
    heartbeat._unanswered = True
    now += 61
    if caught_up:
        heartbeat.catch_up("a" * 64, store)
    assert asked(store, "a", "N") is (Answer.HELD if caught_up else Answer.RECLAIMED)


def test_a_right_is_not_renewed_for_a_message_that_is_through() -> None:
    """The thread took it from the list while a copy was recording it: nobody else would let the right go."""
    store = Slow()
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]
    claim = store.claim(Operation("a" * 64, Delivery("M", continues=True), "a" * 32), lease=60, ttl=60).claim
    assert claim is not None
    heartbeat.complete_later(claim, Outcome(Kind.IGNORED))
    heartbeat.catch_up(claim.key, store)
    assert heartbeat.held(claim.token) is not None
    heartbeat.discard(claim)
    store.meanwhile = heartbeat._leftovers.clear
    heartbeat.catch_up(claim.key, store)
    assert store.ended == ["complete a", "complete a"]
    assert heartbeat.held(claim.token) is None


def test_an_attempt_that_was_told_over_stays_over_however_long_the_store_is_away() -> None:
    now = 1000.0
    store = MemoryStore(clock=lambda: now)
    heartbeat = Heartbeat(store, Emitter(), purge=False)
    heartbeat._wake_by = lambda moment: None  # type: ignore[method-assign]
    claim = store.claim(Operation("a" * 64, Delivery("M"), "a" * 32), lease=60, ttl=600).claim
    assert claim is not None
    heartbeat.release_later(claim, Release.ENDED)
    heartbeat.release_later(claimed(store, "b", 60), Release.YIELDED)
    kept, lapses = heartbeat._leftovers
    assert kept.until - lapses.until > 500
    now += 61
    heartbeat.catch_up("a" * 64, store)
    assert asked(store, "a", "M") is Answer.OVER
