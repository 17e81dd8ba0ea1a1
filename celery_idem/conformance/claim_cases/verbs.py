"""What complete, release, renew, settle, note_parked, find, forget and purge do besides the rules and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_idem.conformance.case import Breach, expect
from celery_idem.conformance.claim_cases.bench import LEASE, TTL, Bench, case, close, outcome
from celery_idem.core.records import DAY, NOTES_KEPT, Answer, Ended, Release, Renewal, State, Successor

BATCH = 500
"""Claims of one renewal; a worker renews all that its threads hold."""

# --- complete ---------------------------------------------------------------------------------------------------------


@case("complete")
def a_completion_by_the_same_token_may_be_repeated(bench: Bench) -> None:
    """A store that calls a repeated completion lost, or lets it change the value."""
    claim = bench.complete()
    before = bench.stored()
    ended = bench.store.complete(claim, outcome(b"another"))
    expect(ended is Ended.COMPLETED, f"repeated by the same token, a completion was answered {ended.value}")
    bench.same(before, "a repeated completion")


@case("complete")
def a_completion_makes_the_record_whole(bench: Bench) -> None:
    """A store that leaves doubt or attempts on what is completed."""
    dead = bench.take()
    claim = bench.take(bench.op(message="N"), dead=dead.fence)
    bench.store.complete(claim, outcome())
    record = bench.stored()
    kept = (record.state, record.unknown, record.attempts, record.completed_at is not None)
    expect(kept == (State.COMPLETED, False, 0, True), f"completed, the record is {record}")


@case("complete")
def a_lapsed_claim_nobody_took_completes(bench: Bench) -> None:
    """A store that throws away the outcome of a body which took longer than its lease."""
    claim = bench.take(lease=bench.short)
    bench.lapse()
    ended = bench.store.complete(claim, outcome())
    expect(ended is Ended.COMPLETED, f"after its lease, which nobody took, a completion was answered {ended.value}")
    expect(bench.stored().state is State.COMPLETED, f"the record is {bench.stored()}")


@case("complete", "clock")
def a_vanished_claim_completes(bench: Bench) -> None:
    """A store that forgets an effect because a failover lost its claim."""
    claim = bench.take(lease=10, ttl=10)
    bench.clock.advance(DAY)
    bench.store.purge(1_000_000)
    ended = bench.store.complete(claim, outcome())
    expect(ended is Ended.COMPLETED, f"of a claim whose record vanished, a completion was answered {ended.value}")
    record = bench.stored()
    kept = (record.token, record.fence, record.outcome)
    expect(kept == (claim.token, claim.fence, outcome()), f"the record is {record}")


@case("complete")
def who_completes_may_continue(bench: Bench) -> None:
    """A store that gives the right to publish links to whoever asks first after the completion."""
    claim = bench.complete(bench.op(continues=True))
    right = bench.stored().note("M").continuing
    expect(right is not None and (right.token, right.fence) == (claim.token, claim.fence), f"the right is {right}")
    bench.complete(bench.op("plain"))
    right = bench.stored("plain").note("M").continuing
    expect(right is None, f"a message that continues nothing has the right {right}")


# --- release ----------------------------------------------------------------------------------------------------------


@case("release")
def a_release_keeps_what_its_reason_says(bench: Bench) -> None:
    """A store that takes every release for the same."""
    for reason in Release:
        name = reason.value
        claim = bench.take(bench.op(name, generation=1))
        after = Successor(2, 30) if reason is Release.RETRY else None
        ended = bench.store.release(claim, reason, successor=after)
        expect(ended is Ended.RELEASED, f"the release of a live claim was answered {ended.value}")
        record = bench.stored(name)
        note = record.note("M")
        kept = (record.state, record.unknown, note.over, note.successor and note.successor[0])
        over, announced = (1 if reason is Release.ENDED else 0), (2 if after else None)
        wanted = (State.RELEASED, reason is Release.INTERRUPTED, over, announced)
        expect(kept == wanted, f"released as {name}, state, doubt, over and successor are {kept}, not {wanted}")


@case("release", "clock")
def a_retry_is_announced_for_when_it_is_due(bench: Bench) -> None:
    """A store that counts a retry's delay from the claim."""
    claim = bench.take()
    bench.clock.advance(20)
    bench.store.release(claim, Release.RETRY, successor=Successor(1, 30))
    successor = bench.stored().note("M").successor
    due = successor[1] if successor else None
    expect(close(due, bench.clock() + 30), f"at {bench.clock()} a retry in 30 s was announced, it is due at {due}")


@case("release")
def a_release_tells_what_its_token_did_before(bench: Bench) -> None:
    """A store that takes back a completion, or calls a repeated release lost."""
    completed = bench.complete()
    before = bench.stored()
    ended = bench.store.release(completed, Release.INTERRUPTED)
    expect(ended is Ended.COMPLETED, f"a token that had completed was answered {ended.value}")
    bench.same(before, "the release of a completed claim")
    released = bench.take(bench.op("released"))
    bench.store.release(released, Release.YIELDED)
    ended = bench.store.release(released, Release.YIELDED)
    expect(ended is Ended.RELEASED, f"a token that had released was answered {ended.value}")


@case("release")
def a_lapsed_claim_nobody_took_is_released(bench: Bench) -> None:
    """A store that forgets why a long body gave its key back."""
    claim = bench.take(lease=bench.short)
    bench.lapse()
    ended = bench.store.release(claim, Release.ENDED)
    expect(ended is Ended.RELEASED, f"after its lease, which nobody took, a release was answered {ended.value}")
    over = bench.stored().note("M").over
    expect(over == 0, f"the attempt that ended is not over: {over}")


# --- renew ------------------------------------------------------------------------------------------------------------


@case("renew")
def a_lapsed_lease_nobody_took_is_renewed(bench: Bench) -> None:
    """A store that stops a body because its renewal came late."""
    claim = bench.take(lease=bench.short)
    bench.lapse()
    renewed = bench.store.renew([claim])[claim.token]
    expect(renewed is Renewal.RENEWED, f"after its lease, which nobody took, a renewal was answered {renewed.value}")
    bench.answers(Answer.HELD, bench.op(message="N"), "of a lease that was renewed late")


@case("renew", "clock")
def a_renewal_counts_from_now(bench: Bench) -> None:
    """A store that answers RENEWED and leaves the lease as it was, or adds to it."""
    claims = [bench.take(bench.op(f"k{number}")) for number in range(5)]
    bench.clock.advance(20)
    bench.store.renew(claims)
    for number in range(5):
        until = bench.stored(f"k{number}").lease_expires_at
        expect(close(until, bench.clock() + LEASE), f"renewed for {LEASE} s at {bench.clock()}, it ends at {until}")


@case("renew", "clock")
def a_vanished_claim_is_restored(bench: Bench) -> None:
    """A store in which a failover that lost a claim lets a second body start."""
    first = bench.take(bench.op(generation=3), lease=1, ttl=1)
    claim = bench.take(bench.op(generation=3), dead=first.fence, lease=1, ttl=1)
    bench.clock.advance(DAY)
    bench.store.purge(1_000_000)
    renewed = bench.store.renew([claim])[claim.token]
    expect(renewed is Renewal.RENEWED, f"a claim whose record vanished was answered {renewed.value}")
    record = bench.stored()
    kept = (record.token, record.fence, record.attempts, record.unknown, record.answer, record.note("M").over)
    wanted = (claim.token, claim.fence, 2, True, Answer.RECLAIMED, 2)
    expect(kept == wanted, f"restored, token, fence, attempts, doubt, answer and over are {kept}, not {wanted}")


@case("renew", "clock")
def a_right_never_makes_a_record(bench: Bench) -> None:
    """A store in which renewing a right makes a claim of a record that is gone."""
    bench.complete()
    right = bench.right(bench.op(message="N", continues=True))
    bench.clock.advance(DAY)
    bench.store.purge(1_000_000)
    renewed = bench.store.renew([right])[right.token]
    expect(renewed is Renewal.LOST, f"a right whose record vanished was answered {renewed.value}")
    expect(bench.other.get(right.key) is None, "renewing a right made a record")


@case("renew", "clock")
def a_right_is_renewed(bench: Bench) -> None:
    """A store whose rights to continue lapse while their holder lives."""
    bench.complete()
    right = bench.right(bench.op(message="N", continues=True))
    bench.clock.advance(20)
    renewed = bench.store.renew([right])[right.token]
    expect(renewed is Renewal.RENEWED, f"a live right was answered {renewed.value}")
    kept = bench.stored().note("N").continuing
    until = kept.lease_expires_at if kept else None
    expect(close(until, bench.clock() + LEASE), f"renewed for {LEASE} s at {bench.clock()}, the right ends at {until}")


@case("renew")
def a_renewal_tells_whose_right_was_taken(bench: Bench) -> None:
    """A store that lets two believe that they continue a message."""
    completer = bench.complete(bench.op(continues=True))
    second = bench.right(bench.op(continues=True), dead=completer.fence)
    answers = bench.store.renew([completer, second])
    told = (answers[completer.token], answers[second.token])
    expect(told == (Renewal.LOST, Renewal.RENEWED), f"the completer and who took its right were answered {told}")


@case("renew")
def an_ended_claim_is_not_lost(bench: Bench) -> None:
    """A store that stops a body for losing a claim which it has ended itself."""
    completed, released = bench.complete(bench.op("completed")), bench.take(bench.op("released"))
    bench.store.release(released, Release.YIELDED)
    before = (bench.stored("completed"), bench.stored("released"))
    answers = bench.store.renew([completed, released])
    told = (answers[completed.token], answers[released.token])
    expect(told == (Renewal.RENEWED, Renewal.RENEWED), f"claims that were ended were answered {told}")
    bench.same(before[0], "renewing a completed claim", "completed")
    bench.same(before[1], "renewing a released claim", "released")


@case("renew")
def a_large_batch_is_renewed_whole(bench: Bench) -> None:
    """A store that renews as many claims as fit into one statement, and leaves the others out."""
    claims = [bench.take(bench.op(f"k{number}")) for number in range(BATCH)]
    some = [f"k{number}" for number in (*range(0, BATCH, 50), BATCH - 1)]
    before = [bench.stored(name).lease_expires_at for name in some]
    bench.wait(bench.short * 0.05)
    answers = bench.store.renew(claims)
    renewed = sum(answers.get(claim.token) is Renewal.RENEWED for claim in claims)
    expect(renewed == BATCH, f"of {BATCH} claims renewed at once, {renewed} were answered RENEWED, not {BATCH}")
    after = [bench.stored(name).lease_expires_at for name in some]
    left = [name for name, was, now in zip(some, before, after, strict=True) if now <= was]
    expect(not left, f"of {BATCH} claims renewed at once, {left} were answered RENEWED and have the lease they had")


@case("renew")
def of_nothing_nothing_is_renewed(bench: Bench) -> None:
    """A store that cannot renew an empty batch."""
    answers = dict(bench.store.renew([]))
    expect(answers == {}, f"the renewal of no claims was answered {answers}")


# --- settle, note_parked, the notes -----------------------------------------------------------------------------------


@case("settle")
def settling_ends_the_right_for_good(bench: Bench) -> None:
    """A store that keeps the right of a message whose links are out, or ends another's."""
    claim = bench.complete(bench.op(continues=True))
    bench.right(bench.op(message="N", continues=True))
    bench.store.settle(claim.key, "M")
    before = bench.stored()
    kept = (before.note("M").settled, before.note("M").continuing, before.note("N").continuing is not None)
    expect(kept == (True, None, True), f"settled, M's note is {before.note('M')} and N's {before.note('N')}")
    bench.store.settle(claim.key, "M")
    bench.same(before, "settling twice")


@case("settle")
def settling_needs_a_completion(bench: Bench) -> None:
    """A store that settles what did not run yet, so that its links are never published."""
    bench.store.settle(bench.key("never seen"), "M")
    expect(bench.other.get(bench.key("never seen")) is None, "settling made a record")
    claim = bench.take(bench.op(continues=True))
    for state in ("claimed", "released"):
        if state == "released":
            bench.store.release(claim, Release.YIELDED)
        before = bench.stored()
        bench.store.settle(claim.key, "M")
        bench.same(before, f"settling a {state} key")


@case("note_parked")
def the_highest_count_of_the_highest_generation_stays(bench: Bench) -> None:
    """A store that writes whatever count comes last."""
    claim = bench.take()
    best = (-1, 0)
    for told in [(0, 1), (0, 3), (0, 2), (1, 1), (0, 9), (1, 12), (1, 3)]:
        bench.store.note_parked(claim.key, "M", *told)
        best = max(best, told)
        parked = bench.stored().note("M").parked
        expect(parked == best, f"of generation and count, {told} was noted last, kept is {parked} and not {best}")


@case("note_parked")
def noting_a_park_makes_no_record(bench: Bench) -> None:
    """A store in which a note about a key that is gone takes its place."""
    bench.store.note_parked(bench.key(), "M", 0, 1)
    expect(bench.other.get(bench.key()) is None, "noting a park made a record")
    bench.answers(Answer.ACQUIRED, bench.op(), "after a park of a key that is not there was noted")


@case("note_parked", "clock")
def the_youngest_notes_stay_and_live_ones_beyond(bench: Bench) -> None:
    """A store whose records grow with every message, or which drops a note that still matters."""
    claim = bench.take(bench.op(message="retried", generation=1))
    bench.store.release(claim, Release.RETRY, successor=Successor(2, DAY / 2))
    for number in range(NOTES_KEPT + 8):
        bench.clock.advance(1)
        bench.store.note_parked(claim.key, f"m{number}", 0, 1)
    notes = set(bench.stored().notes)
    wanted = {"retried", *(f"m{number}" for number in range(9, NOTES_KEPT + 8))}
    expect(notes == wanted, f"too many: {sorted(notes - wanted)}, missing: {sorted(wanted - notes)}")


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
        expect(len(found) == wanted, f"find(limit={limit}) told {len(found)} of 12 records")


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
    expect(kept == (State.RELEASED, "", "", None, False, 0), f"forgotten, the record is {record}")
    note = record.note("M")
    noted = (record.fence, note.continuing, note.settled, note.parked)
    expect(noted == (claim.fence, None, False, (0, 2)), f"forgotten, the record is {record}")


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
    expect(left == ["lapsed", "live", "tombstone"], f"purged, what is left is {left}")


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
