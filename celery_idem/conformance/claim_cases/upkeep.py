"""What get, find, forget, purge and close do besides the rules and rows: the verbs of operators, and the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_idem.conformance.case import Breach, expect, expect_is
from celery_idem.conformance.claim_cases.bench import TTL, Bench, case, outcome
from celery_idem.core.records import DAY, Answer, Release, State, Successor

# --- get, find --------------------------------------------------------------------------------------------------------


@case("find", "clock")
def what_expired_is_not_told(bench: Bench) -> None:
    """A store whose ``get`` or ``find`` tells a record that has expired."""
    claim = bench.complete()
    bench.clock.advance(TTL)
    found = [record.key for record in bench.other.find(task=claim.operation.task)]
    expect(bench.other.get(claim.key) is None, "get tells a record that has expired")
    expect(not found, "find tells a record that has expired")


@case("find", "clock")
def find_matches_every_condition(bench: Bench) -> None:
    """A store whose ``find`` leaves a condition out."""
    tenant = bench.key("tenant")
    charge, ship = (f"{task} of {bench.source}" for task in ("shop.charge", "shop.ship"))
    bench.complete(bench.op("a", task=charge, scope=tenant))
    bench.take(bench.op("b", task=charge))
    bench.store.release(bench.take(bench.op("c", task=ship, scope=tenant)), Release.ENDED)
    bench.clock.advance(100)
    bench.take(bench.op("d", task=ship))
    names = {bench.key(name): name for name in "abcd"}
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"task": charge}, "ab"),
        ({"task": ship}, "cd"),
        ({"scope": tenant}, "ac"),
        ({"task": charge, "state": State.CLAIMED}, "b"),
        ({"task": charge, "state": State.COMPLETED}, "a"),
        ({"task": ship, "state": State.RELEASED}, "c"),
        ({"task": ship, "older_than": 100}, "c"),
        ({"task": ship, "older_than": 100.25}, ""),
        ({"task": ship, "state": State.CLAIMED, "older_than": 0}, "d"),
        ({"task": charge[:-1]}, ""),
    ]
    for conditions, those in wanted:
        found = sorted(names.get(record.key, "?") for record in bench.other.find(**conditions))
        expect(found == list(those), f"find({conditions}) told {found}, not {list(those)}")


@case("find")
def find_stops_at_its_limit(bench: Bench) -> None:
    """A store whose ``find`` reads everything there is, or stops at its first page."""
    task = f"task of {bench.source}"
    for number in range(12):
        bench.take(bench.op(f"k{number}"))
    for limit, wanted in ((5, 5), (0, 0), (1000, 12)):
        found = {record.key for record in bench.other.find(task=task, limit=limit)}
        expect_is(len(found), wanted, f"find(limit={limit}) told {len(found)} of 12 records")


# --- forget, purge ----------------------------------------------------------------------------------------------------


@case("forget")
def forget_leaves_a_tombstone(bench: Bench) -> None:
    """A store that deletes what it forgets, or keeps value, doubt or rights of it."""
    bench.store.release(bench.take(bench.op(message="before")), Release.INTERRUPTED)
    claim = bench.take(bench.op(fingerprint=bench.key("a"), continues=True))
    bench.store.complete(claim, outcome())
    bench.store.note_parked(claim.key, "M", 0, 2)
    expect(bench.store.forget(claim.key, claim.fence) is True, "a record was not forgotten under its own fence")
    record = bench.stored()
    kept = (record.state, record.token, record.fingerprint, record.outcome, record.unknown, record.attempts)
    expect_is(
        kept,
        (State.RELEASED, "", "", None, False, 0),
        f"forgotten, the record is {record}",
        of="state, token, fingerprint, outcome, unknown, attempts",
    )
    note = record.note("M")
    noted = (record.fence, note.continuing, note.settled, note.parked)
    expect_is(
        noted,
        (claim.fence, None, False, (0, 2)),
        f"forgotten, the record is {record}",
        of="fence, continuing, settled, parked",
    )


@case("forget")
def forget_ends_doubt(bench: Bench) -> None:
    """A store in which an operator cannot say that an outcome is known."""
    claim = bench.take()
    bench.store.release(claim, Release.INTERRUPTED)
    bench.store.forget(claim.key, claim.fence)
    bench.answers(Answer.ACQUIRED, bench.op(message="N"), "of a forgotten key")


@case("forget")
def forget_wakes_no_copies(bench: Bench) -> None:
    """A store in which forgetting a key lets old copies of its messages run again."""
    ended = bench.take(bench.op("ended"))
    bench.store.release(ended, Release.ENDED)
    bench.store.forget(ended.key, ended.fence)
    bench.answers(Answer.OVER, bench.op("ended"), "of an ended message whose key was forgotten")
    retried = bench.take(bench.op("retried"))
    bench.store.release(retried, Release.RETRY, successor=Successor(1, 30))
    bench.store.forget(retried.key, retried.fence)
    bench.answers(Answer.NOT_DUE, bench.op("retried"), "of a retried message whose key was forgotten")


@case("forget")
def forget_needs_the_fence_it_saw(bench: Bench) -> None:
    """A store that forgets a record which changed since the operator looked."""
    expect(bench.store.forget(bench.key(), 5) is False, "a key that is not there was forgotten")
    first = bench.take()
    second = bench.take(bench.op(message="N"), dead=first.fence)
    before = bench.stored()
    for fence in (first.fence, second.fence + 1, 0, None):
        expect(bench.store.forget(first.key, fence) is False, f"under the fence {fence}, a record was forgotten")
    bench.same(before, "forgetting under another fence")


@case("purge", "clock")
def purge_deletes_expired_records_only(bench: Bench) -> None:
    """A store that purges by age, or a claim whose lease lapsed."""
    bench.complete(bench.op("expired"), lease=1, ttl=10)
    bench.take(bench.op("lapsed"), lease=1, ttl=DAY)
    bench.take(bench.op("live"), lease=DAY, ttl=1)
    bench.store.release(bench.take(bench.op("tombstone"), lease=1, ttl=0), Release.ENDED)
    bench.clock.advance(10)
    bench.store.purge(1_000_000)
    names = ("expired", "lapsed", "live", "tombstone")
    left = [name for name in names if bench.other.get(bench.key(name)) is not None]
    expect_is(left, ["lapsed", "live", "tombstone"], f"purged, what is left is {left}")


@case("purge", "clock")
def purge_stops_at_its_limit(bench: Bench) -> None:
    """A store that deletes a backlog in one go, says a number that is not so, or never finds anything to purge."""
    bench.clock.advance(DAY * 400)
    while bench.store.purge(1000):  # what other cases left
        pass
    names = [f"k{number}" for number in range(5)]
    for name in names:
        bench.complete(bench.op(name), lease=1, ttl=10)
    bench.clock.advance(10)
    by_itself = bench.harness.expires_itself or _gone(bench, names)
    purged = [bench.store.purge(2) for _ in range(4)]
    wanted = [[2, 2, 1, 0], *([[0, 0, 0, 0]] if by_itself else [])]
    told = f"of 5 expired records, purge(2) deleted {purged}, not {' or '.join(map(str, wanted))}"
    hint = "; where the place drops them by itself, say so in the harness: expires_itself = True"
    expect(purged in wanted, told + ("" if any(purged) else hint))


def _gone(bench: Bench, names: Sequence[str]) -> bool:
    """Whether nothing is stored of any of them: what has expired was dropped without a purge."""
    raw = bench.harness.raw
    return raw is not None and all(raw(bench.key(name)) == raw(bench.key("never used")) for name in names)


# --- close ------------------------------------------------------------------------------------------------------------


@case("close")
def a_closed_store_opens_again(bench: Bench) -> None:
    """A store whose handle refuses everything after ``close``, or loses what it kept."""
    bench.complete(bench.op("before"))
    for number in range(2):
        bench.store.close()
        try:
            bench.complete(bench.op(f"k{number}"))
            answer = bench.answer(bench.op("before", message="N"))
        except Exception as error:
            raise Breach(f"used again after close, the store raised {error!r}") from error
        told = f"of what was completed before close, a claim was answered {answer.value}, not COMPLETED"
        expect(answer is Answer.COMPLETED, told)
