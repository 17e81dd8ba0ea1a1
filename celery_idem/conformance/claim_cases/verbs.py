"""What complete, release, renew, settle and note_parked do besides the rules and rows."""

from __future__ import annotations

from celery_idem.conformance.case import expect, expect_is
from celery_idem.conformance.claim_cases.bench import LEASE, Bench, case, expect_close, outcome
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
    expect_is(ended, Ended.COMPLETED, f"repeated by the same token, a completion was answered {ended.value}")
    bench.same(before, "a repeated completion")


@case("complete")
def a_completion_makes_the_record_whole(bench: Bench) -> None:
    """A store that leaves doubt or attempts on what is completed."""
    dead = bench.take()
    claim = bench.take(bench.op(message="N"), dead=dead.fence)
    bench.store.complete(claim, outcome())
    record = bench.stored()
    kept = (record.state, record.unknown, record.attempts, record.completed_at is not None)
    expect_is(kept, (State.COMPLETED, False, 0, True), f"completed, state, doubt, attempts, a time are {kept}")


@case("complete")
def a_lapsed_claim_nobody_took_completes(bench: Bench) -> None:
    """A store that throws away the outcome of a body which took longer than its lease."""
    claim = bench.take(lease=bench.short)
    bench.lapse()
    ended = bench.store.complete(claim, outcome())
    expect_is(ended, Ended.COMPLETED, f"after its lease, which nobody took, a completion was answered {ended.value}")
    expect_is(bench.stored().state, State.COMPLETED, f"the record is {bench.stored()}")


@case("complete", "clock")
def a_vanished_claim_completes(bench: Bench) -> None:
    """A store that forgets an effect because a failover lost its claim."""
    claim = bench.take(lease=10, ttl=10)
    bench.clock.advance(DAY)
    bench.store.purge(1_000_000)
    ended = bench.store.complete(claim, outcome())
    expect_is(ended, Ended.COMPLETED, f"of a claim whose record vanished, a completion was answered {ended.value}")
    record = bench.stored()
    kept = (record.token, record.fence, record.outcome)
    expect_is(kept, (claim.token, claim.fence, outcome()), f"the record is {record}", of="token, fence, outcome")


@case("complete")
def who_completes_may_continue(bench: Bench) -> None:
    """A store that gives the right to publish links to whoever asks first after the completion."""
    claim = bench.complete(bench.op(continues=True))
    right = bench.stored().note("M").continuing
    expect_is(
        right and (right.token, right.fence), (claim.token, claim.fence), f"the right is {right}", of="token, fence"
    )
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
        expect_is(ended, Ended.RELEASED, f"the release of a live claim was answered {ended.value}")
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
    expect_close(due, bench.clock() + 30, f"at {bench.clock()} a retry in 30 s was announced, it is due at {due}")


@case("release")
def a_release_tells_what_its_token_did_before(bench: Bench) -> None:
    """A store that takes back a completion, or calls a repeated release lost."""
    completed = bench.complete()
    before = bench.stored()
    ended = bench.store.release(completed, Release.INTERRUPTED)
    expect_is(ended, Ended.COMPLETED, f"a token that had completed was answered {ended.value}")
    bench.same(before, "the release of a completed claim")
    released = bench.take(bench.op("released"))
    bench.store.release(released, Release.YIELDED)
    ended = bench.store.release(released, Release.YIELDED)
    expect_is(ended, Ended.RELEASED, f"a token that had released was answered {ended.value}")


@case("release")
def a_lapsed_claim_nobody_took_is_released(bench: Bench) -> None:
    """A store that forgets why a long body gave its key back."""
    claim = bench.take(lease=bench.short)
    bench.lapse()
    ended = bench.store.release(claim, Release.ENDED)
    expect_is(ended, Ended.RELEASED, f"after its lease, which nobody took, a release was answered {ended.value}")
    over = bench.stored().note("M").over
    expect_is(over, 0, f"the attempt that ended is not over: {over}")


# --- renew ------------------------------------------------------------------------------------------------------------


@case("renew")
def a_lapsed_lease_nobody_took_is_renewed(bench: Bench) -> None:
    """A store that stops a body because its renewal came late."""
    claim = bench.take(lease=bench.short)
    bench.lapse()
    renewed = bench.store.renew([claim])[claim.token]
    expect_is(renewed, Renewal.RENEWED, f"after its lease, which nobody took, a renewal was answered {renewed.value}")
    bench.answers(Answer.HELD, bench.op(message="N"), "of a lease that was renewed late")


@case("renew", "clock")
def a_renewal_counts_from_now(bench: Bench) -> None:
    """A store that answers RENEWED and leaves the lease as it was, or adds to it."""
    claims = [bench.take(bench.op(f"k{number}")) for number in range(5)]
    bench.clock.advance(20)
    bench.store.renew(claims)
    for number in range(5):
        until = bench.stored(f"k{number}").lease_expires_at
        expect_close(until, bench.clock() + LEASE, f"renewed for {LEASE} s at {bench.clock()}, it ends at {until}")


@case("renew", "clock")
def a_vanished_claim_is_restored(bench: Bench) -> None:
    """A store in which a failover that lost a claim lets a second body start."""
    first = bench.take(bench.op(generation=3), lease=1, ttl=1)
    claim = bench.take(bench.op(generation=3), dead=first.fence, lease=1, ttl=1)
    bench.clock.advance(DAY)
    bench.store.purge(1_000_000)
    renewed = bench.store.renew([claim])[claim.token]
    expect_is(renewed, Renewal.RENEWED, f"a claim whose record vanished was answered {renewed.value}")
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
    expect_is(renewed, Renewal.LOST, f"a right whose record vanished was answered {renewed.value}")
    expect(bench.other.get(right.key) is None, "renewing a right made a record")


@case("renew", "clock")
def a_right_is_renewed(bench: Bench) -> None:
    """A store whose rights to continue lapse while their holder lives."""
    bench.complete()
    right = bench.right(bench.op(message="N", continues=True))
    bench.clock.advance(20)
    renewed = bench.store.renew([right])[right.token]
    expect_is(renewed, Renewal.RENEWED, f"a live right was answered {renewed.value}")
    kept = bench.stored().note("N").continuing
    until = kept.lease_expires_at if kept else None
    expect_close(until, bench.clock() + LEASE, f"renewed for {LEASE} s at {bench.clock()}, the right ends at {until}")


@case("renew")
def a_renewal_tells_whose_right_was_taken(bench: Bench) -> None:
    """A store that lets two believe that they continue a message."""
    completer = bench.complete(bench.op(continues=True))
    second = bench.right(bench.op(continues=True), dead=completer.fence)
    answers = bench.store.renew([completer, second])
    told = (answers[completer.token], answers[second.token])
    expect_is(told, (Renewal.LOST, Renewal.RENEWED), f"the completer and who took its right were answered {told}")


@case("renew")
def an_ended_claim_is_not_lost(bench: Bench) -> None:
    """A store that stops a body for losing a claim which it has ended itself."""
    completed, released = bench.complete(bench.op("completed")), bench.take(bench.op("released"))
    bench.store.release(released, Release.YIELDED)
    before = (bench.stored("completed"), bench.stored("released"))
    answers = bench.store.renew([completed, released])
    told = (answers[completed.token], answers[released.token])
    expect_is(told, (Renewal.RENEWED, Renewal.RENEWED), f"claims that were ended were answered {told}")
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
    expect_is(answers, {}, f"the renewal of no claims was answered {answers}")


# --- settle, note_parked, the notes -----------------------------------------------------------------------------------


@case("settle")
def settling_ends_the_right_for_good(bench: Bench) -> None:
    """A store that keeps the right of a message whose links are out, or ends another's."""
    claim = bench.complete(bench.op(continues=True))
    bench.right(bench.op(message="N", continues=True))
    bench.store.settle(claim.key, "M")
    before = bench.stored()
    kept = (before.note("M").settled, before.note("M").continuing, before.note("N").continuing is not None)
    expect_is(kept, (True, None, True), f"settled, M's settled, M's right, whether N has one: {kept}")
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
