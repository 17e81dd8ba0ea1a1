"""Every verb that changes an action, the states it belongs to, and one right call of it.

A right call by a caller who holds the lease succeeds; the cases make everything right but one thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count

from celery_idem.conformance.bench import ALPHA, Bench
from celery_idem.governed import records
from celery_idem.governed.store import ActionStore

_numbers = count(1)


@dataclass(frozen=True)
class Verb:
    """One verb; ``call`` takes bench, store, action id and owner."""

    name: str
    states: tuple[str, ...]
    call: Callable[[Bench, ActionStore, str, str], object]


def ready(bench: Bench, state: str, *, owner: str = ALPHA) -> str:
    """An action in this state, leased to the owner, with all that the state's verbs need."""
    action_id = bench.at(state, owner=owner)
    if state == records.STATE_DISPATCHED:
        bench.look(action_id, owner)
    return action_id


def calls(
    bench: Bench, store: ActionStore, action_id: str, owner: str, of: str, verbs: Iterable[Verb]
) -> dict[str, Callable[[], object]]:
    """A call of each verb by the owner, under what it is a call of."""
    return {f"{verb.name} of {of}": partial(verb.call, bench, store, action_id, owner) for verb in verbs}


def belonging_to(state: str) -> list[Verb]:
    """The verbs that a holder may use in this state."""
    return [verb for verb in VERBS if state in verb.states]


def _observed(bench: Bench, store: ActionStore, action_id: str, owner: str) -> object:
    return store.begin_dispatched_observation(action_id, owner, bench.execution(action_id))


def _unresolved(bench: Bench, store: ActionStore, action_id: str, owner: str) -> object:
    looks = bench.receipts(action_id, records.OBSERVATION_RECEIPT_KIND)
    key = looks[-1]["receipt_key"] if looks else "no-look"
    return store.defer_dispatched_observation(action_id, owner, bench.execution(action_id), key, "nothing yet", 0.0)


def _accepted(_bench: Bench, store: ActionStore, action_id: str, owner: str) -> object:
    key = f"acceptance-{next(_numbers)}"
    return store.accept(action_id, owner, key, "acceptance", {"status": "completed"}, result={"ok": True})


def _verified(bench: Bench, store: ActionStore, action_id: str, owner: str) -> object:
    there = [receipt["receipt_key"] for receipt in bench.receipts(action_id)][-1:] or ["none"]
    key = f"verification-{next(_numbers)}"
    return store.verify(action_id, owner, key, {"seen": True}, qualifying_receipt_keys=there)


AT_WORK = (records.STATE_GATED, records.STATE_DISPATCHED, records.STATE_ACCEPTED, records.STATE_VERIFIED)
VERBS = (
    Verb(
        "begin_owner_authorized_dispatch",
        (records.STATE_GATED,),
        lambda bench, store, action_id, owner: bench.dispatch(action_id, owner, store=store),
    ),
    Verb("begin_dispatched_observation", (records.STATE_DISPATCHED,), _observed),
    Verb("defer_dispatched_observation", (records.STATE_DISPATCHED,), _unresolved),
    Verb("accept", (records.STATE_DISPATCHED,), _accepted),
    Verb("verify", (records.STATE_ACCEPTED,), _verified),
    Verb(
        "complete",
        (records.STATE_VERIFIED,),
        lambda _bench, store, action_id, owner: store.complete(action_id, owner, {"ok": True}),
    ),
    Verb(
        "fail_attempt",
        AT_WORK,
        lambda _bench, store, action_id, owner: store.fail_attempt(action_id, owner, "it was refused", True),
    ),
    Verb(
        "defer_leased",
        (records.STATE_GATED, records.STATE_ACCEPTED, records.STATE_VERIFIED),
        lambda _bench, store, action_id, owner: store.defer_leased(action_id, owner, "later", 0.0),
    ),
)
