"""Raise LeaseLost in the body that lost its lease, and in no other.

``Guard`` stands around one body. Its contract is exact: where ``interrupt()`` answers True, LeaseLost comes out of
the ``with`` statement, again at its end if the body swallowed it; where it answers False, none strikes the body (one
not begun yet does not begin); and once the statement is left, nothing of it is left pending in the thread.

A thread is struck by an asynchronous exception, at its next bytecode. The main thread (prefork, solo) is woken from
its system call as well, by SIGURG: ignored by default and harmless to whoever gets one too many, so the soft time
limit's SIGUSR1 and its handler are never touched. A gevent body is struck when it yields. Where none of this is
possible ``interrupt()`` is False, and ``lost`` still tells.
"""

from __future__ import annotations

import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from celery_idem.errors import LeaseLost

try:
    # What signal.getsignal asks, and then looks for an enum member that no handler is: a hundred times the cost.
    from _signal import getsignal  # type: ignore[import-not-found]
except ImportError:  # pragma: no cover  not CPython
    from signal import getsignal

_LEFT = object()
_STRIKE_TIMEOUT = 5.0  # seconds to wait for another thread's two calls: only a fork between them loses that thread


class Guard:
    """Stands around one body; ``interrupt()`` raises LeaseLost inside it, or nowhere.

    Good for several ``with`` statements, one after the other. Of nested guards in one thread (an eager task called by
    a task) only the outermost can be interrupted, which ends them all; for an inner one ``interrupt()`` is False. So
    a LeaseLost caught around a guard whose ``enclosing_lost`` is true belongs further out: raise it on.
    """

    def __init__(self) -> None:
        self._lost = False
        self._target: _Target | None = None
        self._outer: _Target | None = None

    @property
    def lost(self) -> bool:
        """``interrupt()`` was called at some time, whether or not the body could be stopped."""
        return self._lost

    @property
    def enclosing_lost(self) -> bool:
        """The LeaseLost that comes out of this guard was raised for a guard around it."""
        return self._outer is not None and self._outer.struck

    def __enter__(self) -> Guard:
        """Open the body to ``interrupt()``; where the lease is lost already, raise LeaseLost instead."""
        try:
            self._look_around()
            aim = _take_aim() if self._outer is None else None
            if aim is not None:
                target = _Target(aim)
                _here.target = weakref.ref(target)
                self._target = target  # from here on interrupt() strikes
            if self._lost:  # written before interrupt() looks for a target, so one of the two sees the other
                raise LeaseLost
        except BaseException:
            self.close()  # __exit__ will not be called
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        self.close()
        # What the body ended with is replaced, SystemExit and its like excepted: those end more than this body.
        if self._target is not None and self._target.struck and (kind is None or issubclass(kind, Exception)):
            raise LeaseLost

    def close(self) -> None:
        """Let nothing strike any more, and take back what has not struck yet.

        The ``with`` statement does it. Call it again, as often as you like, in the ``finally`` behind that
        statement: a signal handler that raises (a soft limit) may have cut ``__exit__`` off before its first line.
        Then a strike already under way may still come out of this call, as LeaseLost, but not later.
        """
        if self._target is not None:
            self._target.leave()

    def interrupt(self) -> bool:
        """Raise LeaseLost in the body, from another thread. False: the body is over, or cannot be interrupted.

        Another call wakes the main thread once more, should the first have come a moment before a system call.
        """
        self._lost = True
        return self._target is not None and self._target.strike()

    def _look_around(self) -> None:
        """Note the target that is open around this guard in the same thread."""
        self._outer = None
        outer = _here.target() if _here.target is not None else None
        if outer is None or outer.left:
            return
        self._outer = outer
        if outer.struck:
            # Either its LeaseLost is still on its way, and strikes here, or the body around us has swallowed it,
            # or it came out of the other guard's own __exit__ and that one is not around us at all.
            outer.aim.settle()
            self._outer = None


class _Target:
    """One body that can be struck, until somebody strikes it or it is left: whichever comes first, and only once.

    Whoever first writes ``by`` decides. ``dict.setdefault`` is atomic, so neither thread needs a lock, and no
    exception can strike the body's thread while it holds one.
    """

    def __init__(self, aim: _Aim) -> None:
        self.aim = aim
        self._end: dict[str, object] = {}
        self._settled = False

    @property
    def left(self) -> bool:
        return self._end.get("by") is _LEFT

    @property
    def struck(self) -> bool:
        return self._end.get("by", _LEFT) is not _LEFT

    def strike(self) -> bool:
        mine = object()
        by = self._end.setdefault("by", mine)
        if by is mine:
            self.aim.strike()
        elif by is not _LEFT and not self._settled:
            self.aim.wake()
        return by is not _LEFT

    def leave(self) -> None:
        if self._settled:
            return
        if self._end.setdefault("by", _LEFT) is not _LEFT:
            self.aim.withdraw()
        self._settled = True


class _Aim(Protocol):
    """How to reach one body. ``settle`` and ``withdraw`` are called by the body's own thread."""

    def strike(self) -> None: ...
    def wake(self) -> None: ...
    def settle(self) -> None: ...
    def withdraw(self) -> None: ...


class _Here(threading.local):
    # Weak, so that a target whose __exit__ was cut off does not seem to be around whatever this thread runs later.
    target: weakref.ref[_Target] | None = None


_here = _Here()


def _take_aim() -> _Aim | None:
    """What can strike the code that calls this, or None where nothing can."""
    if _is_green():
        return _GreenletAim.take()
    if _set_async_exc is None:
        return None
    return _ThreadAim(threading.get_ident(), wakeable=_wakeable())


def _is_green() -> bool:
    """Whether several bodies share this thread, so that what strikes the thread may strike another body."""
    if not isinstance(threading.get_ident, types.BuiltinFunctionType):
        return True  # monkey-patched: what is called a thread is a greenlet
    greenlet = sys.modules.get("greenlet")
    return greenlet is not None and greenlet.getcurrent().parent is not None


class _ThreadAim:
    """A body that has a thread to itself."""

    def __init__(self, ident: int, *, wakeable: bool) -> None:
        self._ident = ident
        self._wakeable = wakeable
        self._sent = False
        # A bare lock to wait by: an exception that strikes inside threading.Event leaves that in disorder.
        self._sending = threading.Lock()
        self._sending.acquire()

    def strike(self) -> None:
        try:
            _throw_in(self._ident, LeaseLost)
            self.wake()
        finally:
            self._sent = True
            self._sending.release()

    def wake(self) -> None:
        if self._wakeable:
            with suppress(OSError):  # a platform that will not: the exception still waits at the next bytecode
                signal.pthread_kill(self._ident, signal.SIGURG)

    def settle(self) -> None:
        if not self._sent:
            self._sending.acquire(timeout=_STRIKE_TIMEOUT)

    def withdraw(self) -> None:
        self.settle()
        _throw_in(self._ident, None)
        if sys.version_info < (3, 13):
            _calm(self._ident)


class _GreenletAim:
    """A body in a gevent greenlet, reached through the hub of its thread whenever it yields."""

    def __init__(self, greenlet: Any, loop: Any) -> None:
        self._greenlet = greenlet
        self._loop = loop
        self._withdrawn = False

    @classmethod
    def take(cls) -> _GreenletAim | None:
        gevent = sys.modules.get("gevent")
        if gevent is None:
            return None
        greenlet, hub = gevent.getcurrent(), gevent.get_hub()
        if greenlet.parent is not hub or not hasattr(hub.loop, "run_callback_threadsafe"):
            return None
        return cls(greenlet, hub.loop)

    def strike(self) -> None:
        self._loop.run_callback_threadsafe(self._throw)

    def _throw(self) -> None:
        # Runs in the hub, so the body stands still in a yield, or is over and has said so.
        if not self._withdrawn:
            self._withdrawn = True
            self._greenlet.throw(LeaseLost)

    def wake(self) -> None:
        """Nothing to do: a greenlet that yields is awake."""

    def settle(self) -> None:
        if not self._withdrawn:
            self._withdrawn = True
            raise LeaseLost

    def withdraw(self) -> None:
        self._withdrawn = True


def _find_set_async_exc() -> Callable[[int, Any], int] | None:
    try:
        import ctypes

        declare = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)
        call = declare(("PyThreadState_SetAsyncExc", ctypes.pythonapi))
        nothing = ctypes.py_object()
    except (ImportError, AttributeError):  # not CPython, or built without ctypes
        return None
    return lambda ident, error: call(ident, nothing if error is None else error)


_set_async_exc = _find_set_async_exc()


def _throw_in(ident: int, error: type[BaseException] | None) -> None:
    """Have the thread raise ``error`` at its next bytecode, or take back one it has not raised yet (None)."""
    if _set_async_exc is not None:
        _set_async_exc(ident, error)


class _Calm(BaseException):
    """Strikes the thread that threw it, and never leaves ``_calm``."""


def _calm(ident: int) -> None:
    """End the alert that an exception taken back leaves behind; called by the thread itself.

    Before Python 3.13 the interpreter goes on looking for it: every check for signals takes the long way, and a frame
    under a trace function (a debugger, a coverage run) spins for ever. One that strikes ends the alert.
    """
    other: BaseException | None = None
    with suppress(_Calm), soft_limit_held():
        while True:
            try:
                _throw_in(ident, _Calm)
                for _ in range(1000):  # it strikes at the first turn
                    pass
                break
            except _Calm:
                break
            except BaseException as error:  # noqa: BLE001  somebody's signal handler; ours is still on its way
                other = error
    if other is not None:
        raise other


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _wakeable() -> bool:
    """Whether SIGURG ends a system call of the calling thread, now that a handler for it is sure to be there."""
    if not (_in_main_thread() and hasattr(signal, "SIGURG") and hasattr(signal, "pthread_kill")):
        return False
    handler = getsignal(signal.SIGURG)
    if handler in (signal.SIG_DFL, signal.SIG_IGN):
        try:
            signal.signal(signal.SIGURG, _woken)
        except ValueError:  # the main thread, but of a subinterpreter
            return False
        return True
    return isinstance(handler, types.FunctionType | types.MethodType)  # the application's own does as well


def _woken(_signum: int, _frame: object) -> None:
    """End the system call: a pending LeaseLost strikes when this begins, and a handler that raises is not resumed."""


class soft_limit_held:  # noqa: N801  reads as the statement it makes
    """Keep the soft time limit (SIGUSR1) from raising inside the block; it does so right after it.

    With ``discard`` it is dropped, however the block ends: a limit on the effect is moot once the effect is recorded
    or the message handed on. A block for which that is so only if it succeeds sets ``held.discard`` itself, at its
    end. Only the main thread has a soft limit; elsewhere, and under gevent or eventlet, this does nothing.

    A gate stands in front of the handler rather than the signal being blocked: the pool signals the process, so with
    SIGUSR1 blocked in the main thread the kernel gives it to any other, the heartbeat's say, and Python runs the
    handler all the same.
    """

    __slots__ = ("__weakref__", "_gate", "discard", "fired")

    def __init__(self, *, discard: bool = False) -> None:
        self.discard = discard
        self.fired = False
        self._gate = _soft_limit_gate()

    def __enter__(self) -> soft_limit_held:
        if self._gate is not None:
            self._gate.held_by.append(weakref.ref(self))
        return self

    def __exit__(self, *_: object) -> None:
        if self._gate is not None:
            self._gate.let_go(self)
            if self.fired and not self.discard:
                signal.raise_signal(signal.SIGUSR1)


class _Gate:
    """Stands in front of the soft limit's own handler from its first use on, and notes what comes while it is held.

    The blocks that hold it are known weakly: one whose ``__enter__`` or ``__exit__`` another signal's exception cut off
    holds nothing any more.
    """

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.held_by: list[weakref.ref[soft_limit_held]] = []

    def __call__(self, signum: int, frame: object) -> None:
        held = next((held for block in reversed(self.held_by) if (held := block()) is not None), None)
        if held is None:
            self.handler(signum, frame)
        else:
            held.fired = True

    def let_go(self, ended: soft_limit_held) -> None:
        """Forget this block, and those that are no more."""
        self.held_by = [block for block in self.held_by if block() not in {None, ended}]


def _soft_limit_gate() -> _Gate | None:
    if not (hasattr(signal, "SIGUSR1") and _in_main_thread()) or _is_green():
        return None
    handler = getsignal(signal.SIGUSR1)
    if isinstance(handler, _Gate):
        return handler
    if not callable(handler):  # no soft limit here
        return None
    gate = _Gate(handler)
    try:
        signal.signal(signal.SIGUSR1, gate)
    except ValueError:  # the main thread, but of a subinterpreter
        return None
    return gate
