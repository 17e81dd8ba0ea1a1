"""The renewal thread: one per process and store, for all leases in one batch.

A lease is due a third of its length after its last confirmed renewal, so a task shorter than that costs nothing.
Only the answer LOST takes a lease away; no answer means trying again, for the fence still guards. Between beats, and
never past the next one, the thread ends claims whose completion or release got no answer, and deletes expired records,
off every task's path. After a fork the child starts with a thread of its own. Under gevent it is a real thread all the
same, beside the hub.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

from celery_idem.core.decide import kept
from celery_idem.core.events import Emitter, EventName
from celery_idem.core.records import Claim, Ended, Operation, Outcome, Release, Renewal, Successor
from celery_idem.core.threads import Bell, original, start_thread, way_back
from celery_idem.core.values import replace
from celery_idem.errors import StoreError, StoreUnavailable
from celery_idem.interrupt import soft_limit_held
from celery_idem.stores.base import Store

logger = logging.getLogger("celery_idem")

PURGE_EVERY = 60.0
"""Seconds between two purges of one process, give or take a third."""
PURGE_LIMIT = 500
"""Records one purge deletes at most."""
RETRY_AFTER = 1.0
"""Seconds between renewals while the store does not answer."""


@dataclass(slots=True)
class _Lease:
    claim: Claim
    on_lost: Callable[[], None]
    due: float
    since: float
    """When it was last confirmed: what got no answer moves only ``due``."""

    def overdue(self) -> bool:
        """Whether nobody has confirmed it for its whole length, so that it may have lapsed."""
        return time.monotonic() > self.since + self.claim.lease


@dataclass(slots=True, eq=False)
class _Leftover:
    """A claim whose end got no answer."""

    claim: Claim
    say: Callable[[Store], Ended]
    """Its end, said to a store."""
    until: float
    outcome: Outcome | None = None
    told: bool = True
    """Whether what it waits for has been: an outcome, for the message's links to be published."""


class Heartbeat:
    """Keeps claims and rights to continue alive until they are discarded or lost.

    Args:
        store: only the thread uses it. Under gevent it must be nobody else's, memory:// excepted.
        emit: called where the application's code runs.
        purge: whether to delete expired records.
        closes: whether the thread closes the store at its end.
    """

    def __init__(self, store: Store, emit: Emitter, *, purge: bool = True, closes: bool = False) -> None:
        self._store = store
        self._emit = emit
        self._purge = purge
        self._closes = closes
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._leases: dict[str, _Lease] = {}
        self._leftovers: list[_Leftover] = []
        # C all through, so a signal's exception cannot leave it taken, as it could inside a condition's own __exit__.
        self._mutex = original("_thread", "RLock")()
        self._bell = Bell()
        self._join: Callable[[], object] | None = None
        self._back = way_back()
        self._wakes_at = float("inf")
        self._unanswered = False
        """Whether the last renewals got no answer."""
        self._nap = float("inf")
        self._stopping = False
        self._purges_at = time.monotonic() + random.uniform(PURGE_EVERY / 3, PURGE_EVERY)  # noqa: S311

    def add(self, claim: Claim, on_lost: Callable[[], None], since: float | None = None) -> None:
        """Renew this claim from now on; ``on_lost`` is called once, on the renewal thread, if another took it.

        Its lease began when it was asked for, at ``since`` by the monotonic clock, or now.
        """
        if self._pid != os.getpid():
            self._reset()
        third = claim.lease / 3
        since = time.monotonic() if since is None else since
        lease = _Lease(claim, on_lost, since + third, since)
        with self._mutex:
            self._leases[claim.token] = lease
            self._nap = min(self._nap, third)
            self._wake_by(lease.due)

    def release_later(self, claim: Claim, reason: Release, successor: Successor | None = None) -> None:
        """Give this claim back when the store answers again, or let it lapse within its lease.

        What a copy has to know, that this attempt has ended, does not lapse with the lease.
        """
        say: Callable[[Store], Ended] = methodcaller("release", claim, reason, successor=successor)
        ended = reason in {Release.ENDED, Release.RETRY}
        self._later(_Leftover(claim, say, time.monotonic() + (kept(claim.ttl) if ended else claim.lease)))

    def complete_later(self, claim: Claim, outcome: Outcome) -> None:
        """Record this outcome when the store answers again, unless another has the key by then.

        Where the message continues, not before ``told``.
        """
        say: Callable[[Store], Ended] = methodcaller("complete", claim, outcome)
        waits = claim.operation.delivery.continues
        self._later(_Leftover(claim, say, time.monotonic() + kept(claim.ttl), outcome, told=not waits))

    def catch_up(self, key: str, store: Store) -> None:
        """Say to the store, for a copy that asks now, what this process knows of the key and could not say yet."""
        if self._pid != os.getpid() or not (self._leftovers or self._unanswered or self._wakes_at < time.monotonic()):
            return
        with self._mutex:
            left = [left for left in self._leftovers if left.claim.key == key]
            live = [lease for lease in self._leases.values() if lease.claim.key == key and lease.overdue()]
        for each in left:
            ended = each.say(store)
            if ended is Ended.COMPLETED and each.claim.operation.delivery.continues:
                with self._mutex:  # whoever takes it from the list lets its right go, and would have done so already
                    if each in self._leftovers:
                        self.add(replace(each.claim, right=True), lambda: None)  # until its links are told of
        if live:  # or the copy would take it from a body that is alive
            store.renew([lease.claim for lease in live])

    def told(self, token: str, *, published: bool) -> None:
        """What became of the links of a message whose outcome is still to be recorded."""
        if not self._leftovers or self._pid != os.getpid():
            return
        with self._mutex:
            for left in self._leftovers:
                if left.claim.token == token and not left.told:
                    left.told = True
                    if published:
                        left.say = partial(_said_and_settled, left.say, left.claim)

    def _later(self, leftover: _Leftover) -> None:
        if self._pid != os.getpid():
            self._reset()
        with self._mutex:
            self._leases.pop(leftover.claim.token, None)
            self._leftovers.append(leftover)
            self._wake_by(time.monotonic() + RETRY_AFTER)

    def _wake_by(self, moment: float) -> None:
        if self._join is None:
            with soft_limit_held():  # a thread that is known must also run
                self._stopping = False
                self._join = start_thread(self._run, "celery_idem heartbeat")
        elif moment < self._wakes_at:
            self._bell.ring()

    def discard(self, claim: Claim) -> None:
        """Stop renewing; the lease lapses unless it is ended."""
        if self._pid == os.getpid():
            with self._mutex:
                self._leases.pop(claim.token, None)

    def overdue(self, token: str) -> bool:
        """Whether nobody has confirmed this lease for its whole length, so that it may have lapsed."""
        lease = self._leases.get(token) if self._pid == os.getpid() else None
        return lease is not None and lease.overdue()

    def held(self, token: str) -> Claim | None:
        """The claim or right this process keeps alive under the token, if any."""
        lease = self._leases.get(token) if self._pid == os.getpid() else None
        return None if lease is None else lease.claim

    def __len__(self) -> int:
        return len(self._leases) if self._pid == os.getpid() else 0

    def stop(self) -> None:
        """End the thread and wait for it; leases still held lapse by themselves. ``add`` starts another."""
        join = self._join
        if join is None or self._pid != os.getpid():
            return
        self._stopping = True
        self._bell.ring()
        join()
        with self._mutex:
            self._join = None

    def _run(self) -> None:
        while not self._stopping:
            with self._mutex:
                now = time.monotonic()
                # While claims come and go the thread looks when one of them would be due, instead of being woken for
                # each; where none came since it looked last, it sleeps on.
                dues = (lease.due for lease in self._leases.values())
                self._wakes_at = min([self._purges_at, now + self._nap, *dues])
                self._nap = float("inf")
                if self._leftovers:
                    self._wakes_at = min(self._wakes_at, now + RETRY_AFTER)
            self._bell.wait(self._wakes_at - now)
            with self._mutex:
                self._wakes_at = float("-inf")
                now = time.monotonic()
                due = [lease for lease in self._leases.values() if lease.due <= now]
            if not self._stopping:
                self._work(due, now)
        if self._leftovers:
            self._try(partial(self._give_back, last=True))
            self._say_dropped(self._leftovers)
        if self._closes:
            self._store.close()

    def _work(self, due: list[_Lease], now: float) -> None:
        if due:
            self._try(partial(self.beat, due))
        if self._leftovers:
            self._try(self._give_back)
        if now >= self._purges_at:
            self._purges_at = now + PURGE_EVERY * random.uniform(0.67, 1.33)  # noqa: S311
            if self._purge:
                self._try(partial(self._store.purge, PURGE_LIMIT))

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except StoreError as error:
            self._back(partial(logger.info, "celery_idem background work: %s", error))
        except Exception as error:  # noqa: BLE001  logged, where the log's own locks are
            self._back(partial(logger.error, "the celery_idem heartbeat goes on after an error", exc_info=error))

    def _tell(self, name: EventName, operation: Operation, **more: Any) -> None:
        self._back(partial(self._emit, name, operation, **more))

    def beat(self, due: list[_Lease]) -> None:
        """Renew these leases in one round trip and act on the answers."""
        sent = time.monotonic()
        try:
            answers = self._store.renew([lease.claim for lease in due])
        except Exception as error:
            for lease in due:
                lease.due = time.monotonic() + min(RETRY_AFTER, lease.claim.lease / 6)
                self._tell(EventName.RENEW_FAILED, lease.claim.operation, fence=lease.claim.fence, error=str(error))
            self._unanswered = True
            if isinstance(error, StoreError):
                return
            raise
        self._unanswered = False
        for lease in due:
            answer = answers.get(lease.claim.token, Renewal.BUSY)
            if answer is Renewal.LOST:
                self._lose(lease)
            else:
                lease.due = sent + lease.claim.lease / 3
                if answer is Renewal.BUSY:
                    lease.due = sent + min(RETRY_AFTER, lease.claim.lease / 6)
                else:
                    lease.since = sent

    def _give_back(self, *, last: bool = False) -> None:
        """End what waits, until a renewal is due: outcomes before releases, which lapse by themselves.

        At the ``last``, the end of the process, whatever waits for links to be published waits in vain.
        """
        with self._mutex:
            now = time.monotonic()
            self._say_dropped([left for left in self._leftovers if left.until <= now])
            self._leftovers = [left for left in self._leftovers if left.until > now]
            ready = [left for left in self._leftovers if last or left.told]
        silent: StoreUnavailable | None = None
        for left in sorted(ready, key=lambda left: left.outcome is None):
            if not last and self._renewal_due():
                return
            try:
                ended = left.say(self._store)
            except StoreUnavailable as error:  # it alone where its row is locked; all of them where two in a row are
                with self._mutex:
                    self._leftovers.remove(left)
                    self._leftovers.append(left)
                if silent is not None:
                    raise
                silent = error
                continue
            except Exception as error:  # noqa: BLE001  this one alone cannot be ended
                self._back(partial(logger.warning, "a claim of %s was not ended: %s", left.claim.key, error))
            else:
                if left.outcome is not None:
                    self._say_late(left.claim, ended)
            silent = None
            with self._mutex:
                self._leftovers.remove(left)
            self.discard(left.claim)  # the right that came with an outcome recorded meanwhile: see ``catch_up``
        if silent is not None:
            raise silent

    def _renewal_due(self) -> bool:
        with self._mutex:
            now = time.monotonic()
            return any(lease.due <= now for lease in self._leases.values())

    def _say_dropped(self, dropped: Sequence[_Leftover]) -> None:
        for left in dropped:
            if left.outcome is not None:
                text = "the outcome of key %s was never recorded, and a later duplicate runs again: the store is away"
                self._back(partial(logger.warning, text, left.claim.key))

    def _say_late(self, claim: Claim, ended: Ended) -> None:
        if ended is Ended.COMPLETED:
            self._tell(EventName.COMPLETED_LATE, claim.operation, fence=claim.fence)
        else:
            self._tell(EventName.LEASE_RECLAIMED_LOSS, claim.operation, fence=claim.fence)

    def _lose(self, lease: _Lease) -> None:
        with self._mutex:
            if self._leases.pop(lease.claim.token, None) is None:
                return  # it ended while the answer was on its way
        if not lease.claim.right:
            self._tell(EventName.LEASE_LOST, lease.claim.operation, fence=lease.claim.fence)
        lease.on_lost()


def _said_and_settled(say: Callable[[Store], Ended], claim: Claim, store: Store) -> Ended:
    ended = say(store)
    if ended is Ended.COMPLETED:
        store.settle(claim.key, claim.operation.delivery.message_id)
    return ended
