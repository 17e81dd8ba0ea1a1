"""S6: answers that never come, servers that are silent or away, records that are locked or unreadable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from celery_idem.conformance.case import Breach, expect, expect_is
from celery_idem.conformance.claim_cases.bench import LEASE, TTL, Bench, case, every_verb, outcome
from celery_idem.core.records import Answer, Ended, Release, Renewal, State, Successor
from celery_idem.errors import RecordCorrupt, StoreUnavailable
from celery_idem.stores.base import Store

MARGIN = 4.0
"""Seconds that a machine may add to a timeout which is busy, or stands still now and then."""
AT_ONCE = 0.5
"""Seconds for what waits for nobody."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """``Breach`` if the block takes longer than this and the margin."""
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    expect(took < seconds + MARGIN, f"{what} took {took:.2f} s, not {seconds:g}")


def unavailable(what: str, verb: Callable[[], Any]) -> StoreUnavailable:
    """The ``StoreUnavailable`` that the verb raises; ``Breach`` if it does not."""
    try:
        answered = verb()
    except StoreUnavailable as error:
        return error
    except Exception as error:
        raise Breach(f"{what} raised {type(error).__name__} ({error}), not StoreUnavailable") from error
    raise Breach(f"{what} was answered {answered}")


# --- answers that never come ------------------------------------------------------------------------------------------


@case("S6", "lost_reply")
def a_claim_whose_reply_was_lost_may_have_landed(bench: Bench) -> None:
    """A store that says of a write it had sent that it certainly did not happen."""
    mine = bench.op()
    with bench.hook("lost_reply")() as cut:
        lost = unavailable("a claim without a reply", lambda: bench.ask(mine, store=cut))
    landed = bench.other.get(mine.key) is not None
    expect(lost.may_have_landed or not landed, "a claim that is stored is said not to have happened")
    claim = bench.answers(Answer.ACQUIRED, mine, "asked again after the reply was lost").claim
    expect_is(claim and claim.attempts, 1, f"asked again after the reply was lost, it is {claim}")


@case("S6", "lost_reply")
def a_completion_whose_reply_was_lost_may_be_repeated(bench: Bench) -> None:
    """A store that calls its own completion lost, so that a body which ran runs again."""
    claim = bench.take()
    with bench.hook("lost_reply")() as cut:
        lost = unavailable("a completion without a reply", lambda: cut.complete(claim, outcome()))
    landed = bench.stored().state is State.COMPLETED
    expect(lost.may_have_landed or not landed, "a completion that is stored is said not to have happened")
    ended = bench.store.complete(claim, outcome())
    expect_is(ended, Ended.COMPLETED, f"repeated after the reply was lost, the completion was answered {ended.value}")
    expect_is(bench.stored().outcome, outcome(), f"the outcome became {bench.stored().outcome}")


@case("S6", "lost_reply")
def a_release_whose_reply_was_lost_may_be_repeated(bench: Bench) -> None:
    """A store that calls its own release lost."""
    claim, after = bench.take(), Successor(1, 50)
    with bench.hook("lost_reply")() as cut:
        lost = unavailable("a release without a reply", lambda: cut.release(claim, Release.RETRY, successor=after))
    landed = bench.stored().state is State.RELEASED
    expect(lost.may_have_landed or not landed, "a release that is stored is said not to have happened")
    ended = bench.store.release(claim, Release.RETRY, successor=after)
    expect_is(ended, Ended.RELEASED, f"repeated after the reply was lost, the release was answered {ended.value}")


@case("S6", "unreachable")
def nothing_lands_where_nobody_listens(bench: Bench) -> None:
    """A store that leaves the caller in doubt although it never reached its server."""
    claim = bench.take()
    away = bench.hook("unreachable")()
    for name, verb in every_verb(bench, away, claim).items():
        with within(bench.harness.timeout, f"{name} without a server"):
            error = unavailable(f"{name} without a server", verb)
        expect(not error.may_have_landed, f"{name} is said to have perhaps happened on a server that is not there")


@case("S6", "silent")
def no_verb_outlives_its_timeout(bench: Bench) -> None:
    """A store that waits for a server which says nothing."""
    claim = bench.take()
    for name in every_verb(bench, bench.store, claim):
        deaf = bench.hook("silent")()
        with within(bench.harness.timeout, f"{name} on a silent server"):
            unavailable(f"{name} on a silent server", every_verb(bench, deaf, claim)[name])
    expect(bench.stored().token == claim.token, "a server that said nothing has changed the record")


# --- locked records ---------------------------------------------------------------------------------------------------


@case("S6", "locked")
def a_locked_record_is_held(bench: Bench) -> None:
    """A store that tells a record in somebody's transaction as an outage, or takes it."""
    claim = bench.take()
    with bench.hook("locked")(claim.key):
        for dead in (None, claim.fence):
            with within(bench.harness.timeout, "a claim of a locked record"):
                bench.answers(Answer.HELD, bench.op(message="N"), "of a locked record", dead=dead)


@case("S6", "locked")
def a_locked_completion_is_replayed(bench: Bench) -> None:
    """A store that takes a lock to read."""
    claim = bench.complete()
    with bench.hook("locked")(claim.key), within(bench.harness.timeout, "a replay of a locked record"):
        record = bench.answers(Answer.COMPLETED, bench.op(message="N"), "of a locked completion").record
    expect_is(record and record.outcome, outcome(), f"a locked completion is replayed as {record}")


@case("S6", "locked")
def a_locked_lease_is_busy_and_not_lost(bench: Bench) -> None:
    """A store that stops a body because its own transaction locks its record."""
    claim = bench.take()
    with bench.hook("locked")(claim.key), within(bench.harness.timeout, "a renewal of a locked record"):
        renewed = bench.store.renew([claim])[claim.token]
    expect_is(renewed, Renewal.BUSY, f"a locked lease was answered {renewed.value}")
    expect(bench.store.renew([claim])[claim.token] is Renewal.RENEWED, "once free, it was not renewed")


@case("S6", "locked")
def ending_a_locked_claim_ends_in_time(bench: Bench) -> None:
    """A store that waits for a lock longer than its timeout, or forgets what it did not write."""
    ends: dict[str, Callable[[Store, Any], Any]] = {
        "complete": lambda store, claim: store.complete(claim, outcome()),
        "release": lambda store, claim: store.release(claim, Release.ENDED),
        "note_parked": lambda store, claim: store.note_parked(claim.key, "M", 0, 1),
    }
    hasty = bench.harness.impatient()
    for name, verb in ends.items():
        claim = bench.take(bench.op(name))
        with bench.hook("locked")(claim.key), within(bench.harness.timeout, f"{name} of a locked record"):
            unavailable(f"{name} of a locked record", partial(verb, hasty, claim))
        verb(bench.store, claim)
    kept = (bench.stored("complete").state, bench.stored("release").state, bench.stored("note_parked").note("M").parked)
    expect_is(
        kept,
        (State.COMPLETED, State.RELEASED, (0, 1)),
        f"repeated once the records were free, they are {kept}",
        of="state, state, parked",
    )


# --- unreadable records -----------------------------------------------------------------------------------------------


@case("S6", "garble")
def an_unreadable_record_is_corrupt(bench: Bench) -> None:
    """A store that takes what it cannot read for nothing, and runs the body again."""
    claim = bench.take(bench.op(generation=1))
    bench.hook("garble")(claim.key)
    verbs: dict[str, Callable[[], Any]] = {
        "claim": lambda: bench.answer(bench.op(message="N")),
        "claim with its own token": lambda: bench.other.claim(claim.operation, lease=LEASE, ttl=TTL),
        "claim of the dead": lambda: bench.answer(bench.op(generation=2), dead=claim.fence),
        "get": lambda: bench.other.get(claim.key),
        "forget with a fence": lambda: bench.other.forget(claim.key, claim.fence),
    }
    for name, verb in verbs.items():
        try:
            answered = verb()
        except RecordCorrupt:
            continue
        raise Breach(f"{name} of a record that cannot be read was answered {answered}")


@case("S6", "garble", "raw")
def an_unreadable_record_is_left_alone(bench: Bench) -> None:
    """A store that repairs what it cannot read, or purges it."""
    claim = bench.take(bench.op(generation=1))
    bench.hook("garble")(claim.key)
    raw = bench.hook("raw")
    before = raw(claim.key)
    for name, verb in every_verb(bench, bench.other, claim).items():
        if name not in {"complete", "renew"}:
            with suppress(RecordCorrupt):
                verb()
            expect(raw(claim.key) == before, f"{name} changed a record that cannot be read")
    bench.other.purge(1_000_000)
    expect(raw(claim.key) == before, "purge deleted a record that cannot be read")


@case("S6", "garble")
def an_unreadable_record_hides_no_other(bench: Bench) -> None:
    """A store whose list ends where one record cannot be read."""
    names = [f"k{number}" for number in range(6)]
    claims = {name: bench.take(bench.op(name)) for name in names}
    bench.hook("garble")(claims["k2"].key)
    found: set[str] = set()
    with suppress(RecordCorrupt):
        found.update(record.key for record in bench.other.find(task=claims["k2"].operation.task))
    missing = [name for name in names if name != "k2" and bench.key(name) not in found]
    expect(not missing, f"with k2 unreadable, find does not tell {missing}")
    healthy = claims["k3"]
    with suppress(RecordCorrupt):
        renewed = bench.other.renew([claims["k2"], healthy])[healthy.token]
        expect_is(renewed, Renewal.RENEWED, f"renewed together with an unreadable one, a lease was {renewed.value}")


@case("S6", "garble")
def forget_removes_what_cannot_be_read_and_only_that(bench: Bench) -> None:
    """A store in which an unreadable record blocks its key for ever, or whose cure kills healthy ones."""
    claim = bench.take()
    expect(bench.store.forget(claim.key, None) is False, "a healthy record was forgotten without its fence")
    bench.hook("garble")(claim.key)
    expect(bench.other.forget(claim.key, None) is True, "an unreadable record was not forgotten")
    expect(bench.other.forget(claim.key, None) is False, "what had been forgotten was forgotten again")
    bench.answers(Answer.ACQUIRED, bench.op(message="N"), "of a key whose unreadable record was forgotten")
