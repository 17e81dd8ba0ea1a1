"""Rules taken out of the product, one at a time: a simulator that does not miss them would prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from celery.exceptions import Ignore, Reject

from celery_idem import continuation, delivery, task
from celery_idem.core import decide
from celery_idem.core.engine import Engine
from celery_idem.core.records import Answer, Ended, Kind, Note, Outcome, Record, Release, Renewal
from celery_idem.core.run import Ending
from celery_idem.delivery import Delivering
from celery_idem.stores.memory import MemoryStore
from tests.simulate.places import world


@dataclass(frozen=True)
class Reverted:
    """One rule less.

    Args:
        rule: what the product says.
        place: where it stands, under this ``name``.
        change: makes what stands there instead.
        scenarios: beginnings of runs in which it matters.
        kinds: choices of the scheduler that bring it out; none named is all of them.
    """

    rule: str
    place: Any
    name: str
    change: Callable[[Any], Any]
    scenarios: tuple[str, ...]
    kinds: frozenset[str]

    @contextmanager
    def gone(self) -> Iterator[None]:
        """While the rule is out of the product."""
        with patch.object(self.place, self.name, self.change(getattr(self.place, self.name))):
            yield


def _claim_in_two(_: Any) -> Any:
    def claim(store: Any, operation: Any, *, lease: float, ttl: float, dead_fence: int | None = None) -> Any:
        record = store._records.get(operation.key)
        world().point("in the middle of claim")
        now = world().clock.now
        decision, written = decide.decide_claim(record, operation, now=now, lease=lease, ttl=ttl, dead_fence=dead_fence)
        store._write(operation.key, written)
        return decision

    return claim


def _noted(change: Callable[[Record, str], Record]) -> Callable[[Any], Any]:
    """``decide_claim`` on a record that is not what it is."""

    def wrap(decide_claim: Any) -> Any:
        def claim(record: Record | None, operation: Any, **more: Any) -> Any:
            other = None if record is None else change(record, operation.delivery.message_id)
            return decide_claim(other, operation, **more)

        return claim

    return wrap


def _note(**changes: Any) -> Callable[[Record, str], Record]:
    def change(record: Record, message: str) -> Record:
        return replace(record, notes={**record.notes, message: replace(record.note(message), **changes)})

    return change


def _lapsed(record: Record, message: str) -> Record:
    return replace(record, lease_expires_at=0.0)


def _rights_lapsed(record: Record, message: str) -> Record:
    right = record.note(message).continuing
    return record if right is None else _note(continuing=replace(right, lease_expires_at=0.0))(record, message)


def _any_token(decide_verb: Any) -> Any:
    def decided(record: Record | None, claim: Any, *more: Any, **now: Any) -> Any:
        return decide_verb(None if record is None else replace(record, token=claim.token), claim, *more, **now)

    return decided


def _ended_is_yielded(decide_release: Any) -> Any:
    def release(record: Any, claim: Any, reason: Release, successor: Any, *, now: float) -> Any:
        reason = Release.YIELDED if reason is Release.ENDED else reason
        return decide_release(record, claim, reason, successor, now=now)

    return release


def _told_first(conclude: Any) -> Any:
    def early(delivering: Any, result: Any) -> Any:
        if result.claim is not None and result.claim.right:
            delivering.told()
        return conclude(delivering, result)

    return early


def _ended_first(ending: Any) -> Any:
    def early(delivering: Any, value: Any, error: BaseException | None) -> Ending:
        said: Ending = ending(delivering, value, error)
        failed = said == Ending.keep() and isinstance(error, ValueError)
        return Ending.release(Release.ENDED) if failed else said

    return early


def _dropped(stand_back: Any) -> Any:
    def drop(delivering: Any, decision: Any) -> Any:
        if decision.answer is Answer.HELD:
            raise Ignore("dropped")
        return stand_back(delivering, decision)

    return drop


def _own_value(complete: Any) -> Any:
    def ignoring(engine: Any, *args: Any, **options: Any) -> Any:
        ended = complete(engine, *args, **options)
        return Ended.COMPLETED if ended is Ended.LOST else ended

    return ignoring


def _never(answer: Any) -> Callable[[Any], Any]:
    return lambda _: lambda *args, **options: answer


def _renews_nothing(_: Any) -> Any:
    return lambda store, claims: {claim.token: Renewal.RENEWED for claim in claims}


def _parked_without(publish_parked: Any) -> Any:
    def lenient(*args: Any) -> Any:
        try:
            return publish_parked(*args)
        except Exception:
            return 1, 1.0

    return lenient


def _given_up(_: Any) -> Any:
    return lambda _task, _request, error: Reject(error, requeue=False)


def _told_of_all(_: Any) -> Any:
    return Delivering.told


def _over_forgotten(claimed: Any) -> Any:
    def forgetful(record: Record | None, operation: Any, *args: Any, **more: Any) -> Record:
        made: Record = claimed(record, operation, *args, **more)
        notes = {m: Note(**{**_fields(n), "over": -1}) for m, n in made.notes.items()}
        return replace(made, notes=notes)

    return forgetful


def _fields(note: Note) -> dict[str, Any]:
    return {name: getattr(note, name) for name in Note.__slots__}


def _completes_early(body: Any) -> Any:
    def early(delivering: Any, context: Any) -> Any:
        engine, token = delivering.engine, context.token
        held = engine.heartbeat.held(token)
        engine.store.complete(held, Outcome(Kind.RESULT, engine.encode(Kind.RESULT, None)))
        return body(delivering, context)

    return early


ONE, TWO, LINK = "one message", "two messages of one key", "a link"
FAILURE, FAILURES = "a failure with an errback", "two failures of one key"
SOON, LATER = "a retry at once, with a link", "a retry in 10 s, with a link"
LONG = "a body longer than its lease, with a link"


def _rule(
    rule: str, place: Any, name: str, change: Callable[[Any], Any], scenarios: tuple[str, ...], *kinds: str
) -> Reverted:
    return Reverted(rule, place, name, change, scenarios, frozenset(kinds))


REVERTED = (
    _rule("a claim is one atomic step", MemoryStore, "claim", _claim_in_two, (ONE, TWO)),
    _rule("a live lease is not reclaimed", decide, "decide_claim", _noted(_lapsed), (ONE, TWO)),
    _rule("complete asks for the token", decide, "decide_complete", _any_token, (TWO, ONE)),
    _rule("release asks for the token", decide, "decide_release", _any_token, (FAILURES,), "freeze"),
    _rule("a failed attempt is over", decide, "decide_release", _ended_is_yielded, (FAILURE,)),
    _rule("a later attempt ends the earlier ones", decide, "_claimed", _over_forgotten, (SOON,), "copy", "crash"),
    _rule("a copy of a retried attempt is not due", decide, "decide_claim", _noted(_note(successor=None)), (LATER,)),
    _rule("the retry is announced", Delivering, "announce", _never(None), (LATER,)),
    _rule("a copy that is held is parked, not acked", Delivering, "_stand_back", _dropped, (TWO, ONE)),
    _rule("acked after the park is published", delivery, "publish_parked", _parked_without, (TWO,), "other", "refused"),
    _rule("settled after it is published", Delivering, "_conclude", _told_first, (LINK,)),
    _rule("settled at all", decide, "decide_settle", _never(None), (LINK,)),
    _rule("one continues a message at a time", decide, "decide_claim", _noted(_rights_lapsed), (LINK,)),
    _rule("what is published again has the same ids", continuation, "identify", _never(None), (LINK,)),
    _rule("a failure is over after it is told", Delivering, "ending", _ended_first, (FAILURE,)),
    _rule("the value of a lost lease is discarded", Engine, "complete", _own_value, (TWO, ONE)),
    _rule("leases are renewed", MemoryStore, "renew", _renews_nothing, (LONG,)),
    _rule(
        "a retry that was not published is no end", task, "unpublished", _given_up, (LATER,), "refused", "unanswered"
    ),
    _rule("what was not published is not settled", Delivering, "untold", _told_of_all, (LINK,), "refused", "crash"),
    _rule("completed after the body, not before", Delivering, "body", _completes_early, (ONE,)),
)
