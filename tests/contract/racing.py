"""Callers that start at the same instant, as threads of this process and of other processes.

Other processes share nothing with this one, are started once per run and take jobs over a pipe; a job names its start
on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from celery_idem.core.records import Answer, Claim, Decision, Ended, Kind, Operation, Outcome
from celery_idem.stores.base import Store, open_store
from tests.support.clock import ManualClock
from tests.support.processes import wait_until

PROCESSES, THREADS = 5, 10
PATIENCE = 30.0  # seconds any caller may take


@dataclass(frozen=True)
class Raised:
    """The answer of a call that raised."""

    trace: str


Call = tuple[Any, ...]
Verb = Callable[..., Any]


@dataclass(frozen=True)
class Job:
    """What one process does: the verb once per call, each on a thread of its own."""

    url: str
    now: float | None
    verb: Verb
    calls: Sequence[Call]
    start: float

    @property
    def place(self) -> tuple[str, bool]:
        """What one open store can serve: the URL, and whether it goes by its own clock."""
        return self.url, self.now is None


def start_together(store: Store, verb: Verb, calls: Sequence[Call], start: float) -> list[Any]:
    """Run every call on a thread of its own and return the answers in order; what raised is a ``Raised``."""

    def one(call: Call) -> Any:
        time.sleep(max(0.0, start - time.monotonic()))
        try:
            return verb(store, *call)
        except BaseException:
            return Raised(traceback.format_exc())

    if not calls:
        return []
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls, timeout=PATIENCE))


def work(jobs: Connection) -> None:
    """Take jobs until the other end closes; the store stays open while its URL stays the same."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place, store, clock = None, None, ManualClock()
    with contextlib.suppress(EOFError):
        while True:
            job: Job = jobs.recv()
            if job.now is not None:
                clock.set(job.now)
            if store is None or place != job.place:
                if store is not None:
                    store.close()
                options: dict[str, Any] = {} if job.now is None else {"clock": clock}
                place, store = job.place, open_store(job.url, timeout=PATIENCE, **options)
            jobs.send(start_together(store, job.verb, job.calls, job.start))
    if store is not None:
        store.close()


class Racers:
    """The other processes of a run."""

    def __init__(self, count: int = PROCESSES) -> None:
        context = multiprocessing.get_context("forkserver")  # forked from one that imported it all and did no more
        context.set_forkserver_preload([__name__, "celery_idem.stores.sql.store", "celery_idem.stores.redis.store"])
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, url: str, verb: Verb, calls: Sequence[Call], *, now: float | None = None) -> list[Any]:
        """Deal the calls out to the processes, start them together, and return the answers in the calls' order."""
        start = time.monotonic() + 0.15
        shares = [calls[number :: len(self._pipes)] for number in range(len(self._pipes))]
        for pipe, share in zip(self._pipes, shares, strict=True):
            pipe.send(Job(url, now, verb, share, start))
        answers: list[Any] = [None] * len(calls)
        for number, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE):
                raise AssertionError(f"process {number} did not answer within {PATIENCE:g} s")
            answers[number :: len(self._pipes)] = pipe.recv()
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)
            process.close()


# -- what racers do ----------------------------------------------------------------------------------------------------


def claim_once(store: Store, operation: Operation, dead_fence: int | None = None) -> Decision:
    """Claim once."""
    return store.claim(operation, lease=60, ttl=3600, dead_fence=dead_fence)


def claim_and_finish(store: Store, operation: Operation, outcome: Outcome) -> tuple[bool, Outcome | None]:
    """Complete the key if it is ours, else ask until somebody has: whether we did, and the outcome."""
    decision = claim_once(store, operation)
    if decision.claim is not None:
        return store.complete(decision.claim, outcome) is Ended.COMPLETED, outcome

    def completed() -> Decision | None:
        again = claim_once(store, operation)
        assert again.answer in {Answer.HELD, Answer.COMPLETED}, again
        return again if again.answer is Answer.COMPLETED else None

    found = wait_until(completed, PATIENCE, "somebody completed the key")
    assert found is not None
    assert found.record is not None
    return False, found.record.outcome


def renew_or_claim(store: Store, verb: str, argument: Any) -> Any:
    """Renew these claims, or claim with this operation."""
    return store.renew(argument) if verb == "renew" else claim_once(store, argument)


def complete_or_steal(store: Store, claim: Claim, thief: Operation | None) -> Any:
    """Complete the claim, or believe its holder dead."""
    if thief is None:
        return store.complete(claim, Outcome(Kind.RESULT))
    return claim_once(store, thief, claim.fence)


def run_verb(store: Store, name: str, *args: Any) -> Any:
    """Call any verb by its name."""
    return getattr(store, name)(*args)


def fork_in_use(store: Store, operations: Sequence[Operation], forks: int) -> dict[str, list[str]]:
    """Fork while another thread is inside the store; child and parent both claim, complete and read.

    Returns:
        under "child" and "parent" the answers of each, "ACQUIRED COMPLETED COMPLETED" each if all is well.
    """
    stop = threading.Event()
    failures: list[str] = []

    def busy() -> None:
        while not stop.is_set():
            try:
                store.get(operations[0].key)
            except Exception:
                failures.append(traceback.format_exc())
                return

    said: dict[str, list[str]] = {"child": [], "parent": [], "busy": failures}
    for operation in operations[: forks * 2]:
        claim_once(store, operation)  # every connection the parent may lend its child is in use before the fork
        store.forget(operation.key, (store.get(operation.key) or raise_missing()).fence)
    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(forks):
            said["child"].append(_in_child(lambda number=number: _whole_run(store, operations[2 * number])))
            said["parent"].append(_whole_run(store, operations[2 * number + 1]))
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    return said


def raise_missing() -> Any:
    """Fail where a record should be."""
    raise AssertionError("no record")


def _whole_run(store: Store, operation: Operation) -> str:
    decision = claim_once(store, operation)
    if decision.claim is None:
        return decision.answer.value
    ended = store.complete(decision.claim, Outcome(Kind.RESULT))
    return f"{decision.answer.value} {ended.value} {claim_once(store, operation).answer.value}"


def _in_child(act: Callable[[], str]) -> str:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = act()
        except BaseException:
            said = traceback.format_exc()
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    timer = threading.Timer(PATIENCE / 2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    timer.cancel()
    os.waitpid(pid, 0)
    return said or "the child hung and was killed"


def threads_of(store: Store) -> Callable[..., list[Any]]:
    """Race on threads of this process alone: what a store in memory allows."""

    def run(verb: Verb, calls: Sequence[Call]) -> list[Any]:
        return start_together(store, verb, calls, time.monotonic() + 0.02)

    return run
