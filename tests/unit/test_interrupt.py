"""LeaseLost strikes the body that lost its lease, or nothing at all: raced thousands of times, in every kind of thread.

Set ``INTERRUPT_RACES`` to race longer.
"""

# ruff: noqa: PT012  the blocks are the bodies under test

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from celery_idem import interrupt
from celery_idem.errors import LeaseLost
from celery_idem.interrupt import Guard, soft_limit_held

ROOT = Path(__file__).parents[2]
RACES = int(os.environ.get("INTERRUPT_RACES", "4000"))
DEADLINE = 30.0
AT_ONCE = 10.0  # seconds: far from both, a machine that stands still for a moment and what waits to its end


class SoftLimit(Exception):
    """What the pool's handler raises."""


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    numbers = (signal.SIGUSR1, signal.SIGURG)
    before = [signal.getsignal(number) for number in numbers]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or the threads would hardly ever meet
    yield
    sys.setswitchinterval(interval)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def spin_until(until: float) -> None:
    """Run until the time, or until something strikes; a call of its own, so that the caller's ``except`` covers it."""
    while time.monotonic() < until:
        pass


def spin(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number
    return total


def in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns or raises in a thread of its own."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert results, "the thread did not end in time"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def directly(work: Callable[[], Any]) -> Any:
    return work()


anywhere = pytest.mark.parametrize("where", [directly, in_thread], ids=["main thread", "worker thread"])


@contextmanager
def striker() -> Iterator[tuple[Callable[[Guard], None], Callable[[], bool]]]:
    """A thread that interrupts the guards it is given, each after a short random while, and tells the answers."""
    guards: SimpleQueue[Guard | None] = SimpleQueue()
    answers: SimpleQueue[bool] = SimpleQueue()
    rng = random.Random(1)

    def run() -> None:
        while (guard := guards.get(timeout=DEADLINE)) is not None:
            spin(rng.randrange(60))
            answers.put(guard.interrupt())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield guards.put, lambda: answers.get(timeout=DEADLINE)
    finally:
        guards.put(None)
        thread.join(DEADLINE)
        assert not thread.is_alive()


@contextmanager
def struck_after(seconds: float, guard: Guard) -> Iterator[list[float]]:
    """Interrupt the guard from another thread, so long after its body began; the list gets the moment it was done."""
    done: list[float] = []

    def strike() -> None:
        deadline = time.monotonic() + DEADLINE
        while guard._target is None and time.monotonic() < deadline:
            time.sleep(0.001)  # the body has not begun
        time.sleep(seconds)
        done.append(time.monotonic())
        assert guard.interrupt()

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        thread.join(DEADLINE)


# -- the contract, raced -----------------------------------------------------------------------------------------------


class Pace:
    """Bodies of a length that is cut off about as often as not, so that most rounds are decided at the very end."""

    def __init__(self, seed: int) -> None:
        self.struck = self.ended = 0
        self._rng = random.Random(seed)
        self._length = 20.0

    def body(self) -> None:
        spin(int(self._length * self._rng.uniform(0.7, 1.3)))

    def note(self, *, struck: bool) -> None:
        self.struck += struck
        self.ended += not struck
        self._length = max(1.0, self._length * (0.97 if struck else 1.03) + (0 if struck else 0.1))

    def assert_raced(self) -> None:
        rounds = self.struck + self.ended
        assert min(self.struck, self.ended) > rounds // 20, f"no race: struck {self.struck}, ended {self.ended}"


def race(rounds: int, seed: int) -> None:
    """End bodies while they are interrupted; the answer must be the truth, and nothing may strike afterwards."""
    pace = Pace(seed)
    with striker() as (strike, answer):
        for number in range(rounds):
            came_out = False
            guard = Guard()
            try:
                with guard:
                    strike(guard)
                    pace.body()
            except LeaseLost:
                came_out = True
            try:
                told = answer()
                spin(20)
            except LeaseLost:
                pytest.fail(f"struck after the guard was left, in round {number}")
            assert told is came_out, f"round {number}: interrupt() said {told}"
            assert guard.lost
            pace.note(struck=came_out)
    pace.assert_raced()


def test_race_in_the_main_thread() -> None:
    race(RACES, seed=2)


def test_race_in_worker_threads() -> None:
    results: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(seed: int) -> None:
        try:
            race(RACES // 2, seed)
            results.put(None)
        except BaseException as error:
            results.put(error)

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        outcome = results.get(timeout=120)
        if outcome is not None:
            raise outcome


@anywhere
def test_race_with_a_body_that_fails(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        pace = Pace(5)
        with striker() as (strike, answer):
            for _ in range(RACES // 2):
                came_out: type[BaseException] | None = None
                try:
                    with Guard() as guard:
                        strike(guard)
                        pace.body()
                        raise KeyError
                except (LeaseLost, KeyError) as error:
                    came_out = type(error)
                assert came_out is (LeaseLost if answer() else KeyError)
                pace.note(struck=came_out is LeaseLost)
        pace.assert_raced()

    where(run)


@anywhere
def test_race_with_a_body_that_swallows_everything(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        pace = Pace(6)
        with striker() as (strike, answer):
            for _ in range(RACES // 2):
                came_out = False
                try:
                    with Guard() as guard:
                        strike(guard)
                        with suppress(BaseException):
                            pace.body()
                except LeaseLost:
                    came_out = True
                assert came_out is answer()
                pace.note(struck=came_out)
        pace.assert_raced()

    where(run)


@anywhere
def test_race_with_the_start_of_the_body(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        rng = random.Random(7)
        with striker() as (strike, answer):
            for _ in range(RACES // 2):
                begun = came_out = False
                guard = Guard()
                strike(guard)
                spin(rng.randrange(60))
                try:
                    with guard:
                        begun = True
                        spin(rng.randrange(60))
                except LeaseLost:
                    came_out = True
                told = answer()
                assert came_out or not told
                assert not (begun and came_out) or told

    where(run)


@anywhere
def test_race_with_nested_guards(where: Callable[[Callable[[], Any]], Any]) -> None:
    """The outer one is struck while inner ones come and go, as are the inner ones, which are never stopped alone."""

    def run() -> None:
        rng = random.Random(8)
        with striker() as (strike_outer, answer_outer), striker() as (strike_inner, answer_inner):
            for _ in range(RACES // 4):
                through_inner = came_out = False
                asked_inner = 0
                outer = Guard()
                try:
                    with outer:
                        strike_outer(outer)
                        for _ in range(rng.randrange(4)):
                            inner = Guard()
                            try:
                                with inner:
                                    asked_inner += 1
                                    strike_inner(inner)
                                    spin(rng.randrange(40))
                            except LeaseLost:
                                assert inner.enclosing_lost
                                through_inner = True
                                raise
                except LeaseLost:
                    came_out = True
                    assert not outer.enclosing_lost
                assert came_out is answer_outer()
                assert came_out or not through_inner
                assert [answer_inner() for _ in range(asked_inner)] == [False] * asked_inner or came_out

    where(run)


def test_race_with_a_soft_limit() -> None:
    """A handler that raises anywhere, __enter__ and __exit__ included, leaves nothing that strikes later."""
    armed = False

    def limit(_signum: int, _frame: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise SoftLimit

    def shoot() -> None:
        while not stop.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.0001)

    def one_round(guard: Guard) -> None:
        nonlocal armed
        try:
            armed = True
            with guard:
                spin(rng.randrange(200))
            armed = False
        finally:
            guard.close()

    signal.signal(signal.SIGUSR1, limit)
    stop = threading.Event()
    shooting = threading.Thread(target=shoot, daemon=True)
    shooting.start()
    outcomes = dict.fromkeys(("ended", "LeaseLost", "SoftLimit"), 0)
    rng = random.Random(11)
    try:
        with striker() as (strike, answer):
            for _ in range(RACES):
                guard = Guard()
                strike(guard)
                outcome = "ended"
                try:
                    try:
                        one_round(guard)
                    except (LeaseLost, SoftLimit) as error:
                        outcome = type(error).__name__
                except SoftLimit:
                    outcome = "SoftLimit"
                armed = False
                guard.close()  # a soft limit may have cut off the other one as well
                told = answer()
                spin(20)
                assert not (told and outcome == "ended")
                outcomes[outcome] += 1
                with Guard() as after:
                    assert after._target is not None, "the guard that was left still seems to be around this one"
    finally:
        armed = False
        stop.set()
        shooting.join(DEADLINE)
    assert min(outcomes.values()) > 0, outcomes


# -- where it strikes --------------------------------------------------------------------------------------------------


def sleeping() -> None:
    time.sleep(DEADLINE)


def waiting_for_a_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire(timeout=DEADLINE)


def reading_a_socket() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(DEADLINE)
        here.recv(1)


def waiting_for_a_child() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({DEADLINE})"]) as child:
        try:
            child.wait()
        finally:
            child.kill()


def computing() -> None:
    while True:
        pass


@pytest.mark.parametrize("body", [sleeping, waiting_for_a_lock, reading_a_socket, waiting_for_a_child, computing])
def test_the_main_thread_is_stopped_at_once(body: Callable[[], None]) -> None:
    guard = Guard()
    with struck_after(0.1, guard) as struck, pytest.raises(LeaseLost), guard:
        body()
    assert time.monotonic() - struck[0] < AT_ONCE
    assert guard.lost


def test_the_main_thread_is_woken_every_time() -> None:
    for _ in range(20):
        guard = Guard()
        with struck_after(0.02, guard) as struck, pytest.raises(LeaseLost), guard:
            time.sleep(DEADLINE)
        assert time.monotonic() - struck[0] < AT_ONCE


def test_a_worker_thread_is_stopped_at_its_next_bytecode() -> None:
    guard = Guard()

    def work() -> None:
        with guard:
            while True:
                time.sleep(0.01)

    with struck_after(0.1, guard), pytest.raises(LeaseLost):
        in_thread(work)


def test_threads_beside_the_struck_one_are_left_alone() -> None:
    stop = threading.Event()

    def neighbour() -> int:
        with Guard():
            while not stop.is_set():
                spin(10)
        return 1

    results: list[int] = []
    others = [threading.Thread(target=lambda: results.append(neighbour()), daemon=True) for _ in range(2)]
    for other in others:
        other.start()
    guard = Guard()
    with struck_after(0.05, guard), pytest.raises(LeaseLost), guard:
        sleeping()
    stop.set()
    for other in others:
        other.join(DEADLINE)
    assert results == [1, 1]


def test_asyncio_in_the_body_is_stopped_too() -> None:
    import asyncio

    guard = Guard()

    async def body() -> None:
        threading.Timer(0.05, guard.interrupt).start()
        await asyncio.sleep(DEADLINE)

    begun = time.monotonic()
    with pytest.raises(LeaseLost), guard:
        asyncio.run(body())
    assert time.monotonic() - begun < DEADLINE / 2


# -- answers -----------------------------------------------------------------------------------------------------------


@anywhere
def test_a_body_that_was_left_cannot_be_struck(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        with Guard() as guard:
            pass
        assert not guard.lost
        assert guard.interrupt() is False
        assert guard.lost
        spin(100)

    where(run)


@anywhere
def test_a_guard_may_stand_around_one_body_after_another(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        guard = Guard()
        for _ in range(3):
            with guard:
                spin(10)
        with pytest.raises(LeaseLost), guard:
            assert guard.interrupt()
        with pytest.raises(LeaseLost), guard:
            pytest.fail("the next body began")
        guard = Guard()
        with guard:
            pass
        assert not guard.interrupt()
        with pytest.raises(LeaseLost), guard:
            pytest.fail("lost between two bodies, and the second began")

    where(run)


@anywhere
def test_a_body_does_not_begin_once_its_lease_is_lost(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        guard = Guard()
        assert guard.interrupt() is False
        with pytest.raises(LeaseLost), guard:
            pytest.fail("the body began")
        assert not guard.enclosing_lost
        assert guard.interrupt() is False

    where(run)


def test_a_second_interrupt_wakes_and_does_not_strike_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setattr(interrupt, "_throw_in", lambda _ident, error: sent.append(error))
    monkeypatch.setattr(interrupt, "_calm", lambda _ident: None)
    monkeypatch.setattr(interrupt.signal, "pthread_kill", lambda _ident, number: sent.append(number))
    guard = Guard()
    with pytest.raises(LeaseLost), guard:
        assert guard.interrupt() is True
        assert guard.interrupt() is True
    assert sent == [LeaseLost, signal.SIGURG, signal.SIGURG, None]
    assert guard.interrupt() is True
    guard.close()
    assert len(sent) == 4


@anywhere
def test_an_exception_that_has_not_struck_is_withdrawn(
    where: Callable[[Callable[[], Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left between the verdict and the strike: leaving waits for the other thread's calls, then takes them back."""
    reached, go = threading.Event(), threading.Event()
    real = interrupt._throw_in

    def slow(ident: int, error: type[BaseException] | None) -> None:
        if error is not None:
            reached.set()
            go.wait(DEADLINE)
        real(ident, error)

    monkeypatch.setattr(interrupt, "_throw_in", slow)

    def run() -> None:
        guard = Guard()
        thread = threading.Thread(target=guard.interrupt, daemon=True)
        opener = threading.Timer(0.1, go.set)
        with pytest.raises(LeaseLost), guard:
            thread.start()
            assert reached.wait(DEADLINE)
            opener.start()
        thread.join(DEADLINE)
        opener.join(DEADLINE)
        spin(100)

    where(run)


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_ends_more_than_the_body_goes_first(ending: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_throw_in", lambda *_: None)
    with pytest.raises(ending), Guard() as guard:
        assert guard.interrupt()
        raise ending


def test_the_bodys_own_error_is_the_context_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_throw_in", lambda *_: None)
    with pytest.raises(LeaseLost) as caught, Guard() as guard:
        guard.interrupt()
        raise KeyError("order")
    assert isinstance(caught.value.__context__, KeyError)


@pytest.mark.parametrize("missing", ["ctypes", "greenlets"])
def test_where_nothing_can_strike_the_guard_still_tells(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "ctypes":
        monkeypatch.setattr(interrupt, "_set_async_exc", None)
    else:
        monkeypatch.setattr(threading, "get_ident", lambda: 1)  # as eventlet patches it
        monkeypatch.delitem(sys.modules, "gevent", raising=False)
    with Guard() as guard:
        assert guard.interrupt() is False
        assert guard.lost
        spin(100)


def test_a_greenlet_that_shares_its_thread_is_not_struck_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(getcurrent=lambda: types.SimpleNamespace(parent=object()))
    monkeypatch.setitem(sys.modules, "greenlet", module)
    monkeypatch.delitem(sys.modules, "gevent", raising=False)
    with Guard() as guard:
        assert guard.interrupt() is False


# -- nested ------------------------------------------------------------------------------------------------------------


@anywhere
def test_the_outer_loss_goes_out_through_the_inner_guard(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        outer, inner = Guard(), Guard()
        with striker() as (strike, answer), pytest.raises(LeaseLost), outer:
            with pytest.raises(LeaseLost) as caught, inner:
                strike(outer)
                while True:
                    spin(10)
            assert inner.enclosing_lost
            assert not inner.lost
            assert answer()
            raise caught.value
        assert not outer.enclosing_lost

    where(run)


def test_an_inner_loss_stops_nobody() -> None:
    with Guard() as outer, Guard() as inner:
        assert inner.interrupt() is False
        assert inner.lost
    assert not outer.lost


@anywhere
def test_a_guard_after_a_struck_one_is_not_nested_in_it(where: Callable[[Callable[[], Any]], Any]) -> None:
    def run() -> None:
        for _ in range(3):
            guard = Guard()
            with pytest.raises(LeaseLost), guard:
                assert guard.interrupt()
            assert not guard.enclosing_lost

    where(run)


def test_a_body_that_swallowed_its_loss_can_still_run_others() -> None:
    outer = Guard()
    with pytest.raises(LeaseLost), outer:
        with suppress(LeaseLost):
            outer.interrupt()
        inner = Guard()
        with pytest.raises(LeaseLost), inner:
            inner.interrupt()
        assert not inner.enclosing_lost


def test_a_guard_whose_exit_was_cut_off_is_around_nobody() -> None:
    guard = Guard()
    guard.__enter__()  # and no __exit__: a soft limit struck its first line
    with Guard() as nested:
        assert nested.interrupt() is False
    guard.close()
    with pytest.raises(LeaseLost), Guard() as next_one:
        assert next_one.interrupt()

    guard = Guard()
    guard.__enter__()
    del guard
    gc.collect()
    with pytest.raises(LeaseLost), Guard() as next_one:
        assert next_one.interrupt()


# -- signals -----------------------------------------------------------------------------------------------------------


def raise_soft_limit(_signum: int, _frame: object) -> None:
    raise SoftLimit


def answering() -> Any:
    """What a soft limit meets now."""
    handler = signal.getsignal(signal.SIGUSR1)
    if not isinstance(handler, interrupt._Gate):
        return handler
    return handler.handler if not any(block() for block in handler.held_by) else handler


def test_a_soft_limit_in_the_body_is_untouched() -> None:
    signal.signal(signal.SIGUSR1, raise_soft_limit)
    with pytest.raises(SoftLimit), Guard() as guard:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        time.sleep(DEADLINE)
    assert not guard.lost
    assert answering() is raise_soft_limit


def test_a_struck_body_never_meets_the_soft_limits_handler() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: pytest.fail("that was no soft limit"))
    guard = Guard()
    with struck_after(0.05, guard), pytest.raises(LeaseLost), guard:
        time.sleep(DEADLINE)


def test_the_handler_is_put_back_when_somebody_reset_it() -> None:
    for reset in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGURG, reset)
        guard = Guard()
        with struck_after(0.05, guard) as struck, pytest.raises(LeaseLost), guard:
            time.sleep(DEADLINE)
        assert time.monotonic() - struck[0] < AT_ONCE
        assert signal.getsignal(signal.SIGURG) is interrupt._woken


def test_the_applications_own_handler_stays_and_serves() -> None:
    calls: list[int] = []
    mine = calls.append

    def handler(signum: int, _frame: object) -> None:
        mine(signum)

    signal.signal(signal.SIGURG, handler)
    guard = Guard()
    with struck_after(0.05, guard) as struck, pytest.raises(LeaseLost), guard:
        time.sleep(DEADLINE)
    assert time.monotonic() - struck[0] < AT_ONCE
    assert signal.getsignal(signal.SIGURG) is handler
    signal.raise_signal(signal.SIGURG)
    assert calls[-1] == signal.SIGURG


def test_a_stray_wake_up_does_nothing() -> None:
    with Guard():
        pass
    signal.raise_signal(signal.SIGURG)
    time.sleep(0)


# -- the soft limit, held ----------------------------------------------------------------------------------------------


@pytest.fixture
def _soft_limit() -> None:
    signal.signal(signal.SIGUSR1, raise_soft_limit)


def fire() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)  # to the process, as the pool does


@pytest.fixture
def _other_thread() -> Iterator[None]:
    """A thread that takes SIGUSR1 whenever the main thread does not, as the heartbeat's would."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, args=(DEADLINE,), daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(DEADLINE)


@pytest.mark.usefixtures("_soft_limit", "_other_thread")
class TestHeld:
    def test_it_is_raised_right_after_the_block(self) -> None:
        passed = False
        with pytest.raises(SoftLimit), soft_limit_held() as held:
            fire()
            spin(100)
            passed = True
        assert passed
        assert held.fired
        assert answering() is raise_soft_limit

    def test_it_is_dropped_on_request(self) -> None:
        with soft_limit_held(discard=True) as held:
            fire()
            spin(100)
        assert held.fired
        with pytest.raises(SoftLimit):
            fire()
            time.sleep(DEADLINE)

    def test_the_block_may_decide(self) -> None:
        with soft_limit_held() as held:
            fire()
            spin(100)
            held.discard = True
        with pytest.raises(SoftLimit), soft_limit_held(discard=True) as held:
            fire()
            spin(100)
            held.discard = False

    def test_a_block_that_fails_is_answered_alike(self) -> None:
        with pytest.raises(SoftLimit) as caught, soft_limit_held():
            fire()
            spin(100)
            raise KeyError
        assert isinstance(caught.value.__context__, KeyError)
        with pytest.raises(KeyError), soft_limit_held(discard=True):
            fire()
            spin(100)
            raise KeyError
        with pytest.raises(KeyError), soft_limit_held():
            raise KeyError
        assert answering() is raise_soft_limit

    def test_nested_blocks_raise_at_the_outer_end(self) -> None:
        inner_passed = False
        with pytest.raises(SoftLimit), soft_limit_held() as outer:
            with soft_limit_held() as inner:
                fire()
                spin(100)
            inner_passed = True
        assert inner_passed
        assert inner.fired
        assert outer.fired

    def test_nothing_is_ever_lost_or_raised_inside(self) -> None:
        """Fire at random moments around the block: each time it raises exactly once, and never inside."""
        for number in range(RACES // 4):
            rng = random.Random(number)
            # A plain list: what threading offers is Python code, which a signal's exception may leave half done.
            started: list[int] = []

            def shoot(started: list[int] = started, rounds: int = rng.randrange(400)) -> None:
                while not started:
                    pass
                spin(rounds)
                fire()

            thread = threading.Thread(target=shoot, daemon=True)
            thread.start()
            inside = raised = False
            until = time.monotonic() + DEADLINE
            try:
                started.append(1)
                spin(rng.randrange(100))
                with soft_limit_held():
                    inside = True
                    spin(rng.randrange(400))
                    inside = False
                spin_until(until)  # until it raises, which the kernel may put off past the shot
            except SoftLimit:
                raised = True
            thread.join(DEADLINE)
            assert raised
            assert not inside
            assert answering() is raise_soft_limit

    def test_a_lost_lease_still_strikes_inside(self) -> None:
        guard = Guard()
        with struck_after(0.05, guard), pytest.raises(LeaseLost), guard, soft_limit_held(discard=True):
            time.sleep(DEADLINE)
        assert answering() is raise_soft_limit

    def test_another_handler_that_raises_on_the_way_in_or_out_leaves_nothing_held(self) -> None:
        for number in range(100):
            left = number

            def strike(frame: Any, event: str, _: Any) -> Any:
                nonlocal left
                if frame.f_code.co_filename != interrupt.__file__:
                    return None
                left -= event in {"call", "line"}
                if left < 0:
                    sys.settrace(None)
                    raise SystemExit  # as SIGTERM's handler does, from wherever it interrupts
                return strike

            sys.settrace(strike)
            try:
                with soft_limit_held():
                    pass
            except SystemExit:
                pass
            finally:
                sys.settrace(None)
            assert answering() is raise_soft_limit
            with pytest.raises(SoftLimit):
                fire()
                time.sleep(DEADLINE)
            if left >= 0:
                break
            with soft_limit_held():
                pass
        assert 5 < number < 99

    def test_other_threads_have_no_soft_limit_to_hold(self) -> None:
        def work() -> None:
            with soft_limit_held(discard=True) as held:
                assert answering() is raise_soft_limit
            assert not held.fired

        in_thread(work)


def test_an_ignored_soft_limit_stays_ignored() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with soft_limit_held():
        fire()
        spin(100)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


# -- gevent ------------------------------------------------------------------------------------------------------------

GEVENT = """
from gevent import monkey
monkey.patch_all()
import random
import gevent
from celery_idem.errors import LeaseLost
from celery_idem.interrupt import Guard, soft_limit_held

start = monkey.get_original("_thread", "start_new_thread")
sleep = monkey.get_original("time", "sleep")
escaped, outcomes, answers = [], [], []

def body(number):
    rng = random.Random(number)
    came_out = begun = False
    guard = Guard()
    done = []
    def strike():
        sleep(rng.random() / 50)
        done.append(guard.interrupt())
    try:
        with guard:
            begun = True
            start(strike, ())
            gevent.sleep(rng.random() / 50)
    except LeaseLost:
        came_out = True
    try:
        while not done:
            gevent.sleep(0.005)
        gevent.sleep(0.01)
        with soft_limit_held():
            pass
    except LeaseLost:
        escaped.append(number)
    outcomes.append((done[0], came_out))

def swallowing():
    guard = Guard()
    try:
        with guard:
            guard.interrupt()
            with Guard() as inner:
                try:
                    gevent.sleep(5)
                finally:
                    assert inner.enclosing_lost or guard._target.struck
    except LeaseLost:
        return True

jobs = [gevent.spawn(body, number) for number in range(600)]
gevent.joinall(jobs, timeout=60, raise_error=True)
assert len(outcomes) == 600, len(outcomes)
assert not escaped, escaped
assert all(told == came_out for told, came_out in outcomes)
assert {told for told, _ in outcomes} == {True, False}
assert gevent.spawn(swallowing).get(timeout=10)
with Guard() as root:
    assert root.interrupt() is False
print("ok", sum(told for told, _ in outcomes))
"""


def test_a_greenlet_is_stopped_when_it_yields_and_no_other_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GEVENT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.startswith("ok"), done.stdout + done.stderr


# -- the pool's own child ----------------------------------------------------------------------------------------------


def guarded_sleep(first: str) -> tuple[str, int]:
    """Runs in the pool's child: what came out of a guarded sleep, and in which process."""
    from billiard.exceptions import SoftTimeLimitExceeded

    guard = Guard()
    try:
        with guard:
            threading.Timer(0.1, guard.interrupt if first == "LeaseLost" else fire).start()
            time.sleep(DEADLINE)
    except (LeaseLost, SoftTimeLimitExceeded) as error:
        return type(error).__name__, os.getpid()
    return "ended", os.getpid()


def held_sleep(discard: bool) -> tuple[str, int]:
    """Runs in the pool's child: a soft limit that fires while a completion is stored, beside a second thread."""
    from billiard.exceptions import SoftTimeLimitExceeded

    stored = False
    try:
        with soft_limit_held(discard=discard) as held:
            threading.Timer(0.1, fire).start()
            deadline = time.monotonic() + DEADLINE
            while not held.fired and time.monotonic() < deadline:
                time.sleep(0.01)
            stored = True
    except SoftTimeLimitExceeded:
        return f"raised, stored={stored}", os.getpid()
    return f"passed, fired={held.fired}", os.getpid()


def test_in_a_child_of_the_real_pool() -> None:
    """With the handler that the pool itself installed, and the signal sent to the process, as the pool sends it."""
    expected = ["LeaseLost", "SoftTimeLimitExceeded"] * 2
    pool = pytest.importorskip("billiard.pool").Pool(processes=1)
    try:
        results = [pool.apply_async(guarded_sleep, (first,)).get(timeout=DEADLINE) for first in expected]
        held = [pool.apply_async(held_sleep, (discard,)).get(timeout=DEADLINE) for discard in (True, False)]
    finally:
        pool.terminate()
        pool.join()
    assert [outcome for outcome, _ in results] == expected
    assert [outcome for outcome, _ in held] == ["passed, fired=True", "raised, stored=True"]
    assert len({pid for _, pid in results + held}) == 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_strike_taken_back_leaves_a_thread_that_can_be_traced(thread: str) -> None:
    """Before Python 3.13 the interpreter stayed on the alert, and a traced frame span for ever."""
    done: list[str] = []

    def traced() -> None:
        done.append("ran")

    def work() -> None:
        with pytest.raises(LeaseLost), Guard() as guard:
            striker = threading.Thread(target=guard.interrupt)
            striker.start()
            while True:
                time.sleep(0.01)
        striker.join()
        before = sys.gettrace()
        sys.settrace(lambda *_: None)
        try:
            traced()
        finally:
            sys.settrace(before)

    if thread == "main":
        work()
    else:
        other = threading.Thread(target=work)
        other.start()
        other.join(10)
    assert done == ["ran"]
