"""Real threads and real locks, also where gevent made greenlets of those in ``threading``.

A body that computes without a pause starves every greenlet of its thread. What must go on meanwhile, a renewal or the
deadline of a statement, needs a thread of the operating system. That thread has a hub of its own, so nothing in which
one waits, a store's client with its sockets and pools, may serve both sides: they share only locks that are C all
through and held for microseconds. Eventlet is unknown here: under it these threads are greenlets.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

Lock = Any
"""What ``real_lock`` makes; its class has no name in Python before 3.13."""


def gevent_patched() -> bool:
    """Whether what ``threading`` calls a thread is a greenlet of gevent's."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def original(module: str, name: str) -> Any:
    """What the standard library has under this name, whatever gevent put in its place."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None:
        return getattr(import_module(module), name)
    return monkey.get_original(module, name)


def real_lock() -> Lock:
    """A lock between threads; a greenlet that has it must not yield."""
    return original("_thread", "allocate_lock")()


class Bell:
    """Wakes the one thread that waits for it, or that will wait for it next."""

    def __init__(self) -> None:
        self._silent = real_lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the thread; rung twice it wakes once."""
        with suppress(RuntimeError):  # it rings already
            self._silent.release()

    def wait(self, seconds: float | None) -> None:
        """Return when it rings, at the latest after so many seconds (None: never before)."""
        self._silent.acquire(timeout=-1 if seconds is None else min(max(0.0, seconds), threading.TIMEOUT_MAX))


def start_thread(target: Callable[[], None], name: str) -> Callable[[], object]:
    """Run ``target`` in a daemon thread, a real one; what is returned waits for its end."""
    if not gevent_patched():
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread.join
    over = real_lock()
    over.acquire()

    def run() -> None:
        try:
            target()
        finally:
            sys.modules["gevent"].get_hub().destroy(destroy_loop=True)
            over.release()

    def join() -> None:
        with over:
            pass

    original("_thread", "start_new_thread")(run, ())
    return join


def way_back() -> Callable[[Callable[[], object]], None]:
    """How another thread runs a call of the application's: under gevent in a greenlet of this one, else by itself.

    A listener's lock or a log handler's that a greenlet holds would stop a real thread for as long as bodies compute.
    """
    if not gevent_patched():
        return _at_once
    hub, greenlet = sys.modules["gevent"].get_hub(), sys.modules["greenlet"].greenlet

    def begin(call: Callable[[], object]) -> None:
        greenlet(call, hub).switch()  # at once: one of gevent's own could begin after what is called back later

    def back(call: Callable[[], object]) -> None:
        with suppress(Exception):  # the hub is gone: the process ends
            hub.loop.run_callback_threadsafe(begin, call)

    return back


def _at_once(call: Callable[[], object]) -> None:
    call()
