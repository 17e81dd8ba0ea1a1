"""R1 to R12, the rows of the decision table one by one, and their order: the first row that fits answers."""

from __future__ import annotations

from celery_idem.conformance.case import expect, expect_is
from celery_idem.conformance.claim_cases.bench import LEASE, Bench, case, expect_close, outcome
from celery_idem.core.records import DAY, GRACE, Answer, Release, State, Successor

STEP = 0.25
"""Seconds short of the end of something."""


@case("R1", "newer")
def a_newer_record_is_not_understood(bench: Bench) -> None:
    """A store that answers for a record whose layout it does not know."""
    claim = bench.take()
    bench.hook("newer")(claim.key)
    for operation in (bench.op(), claim.operation, bench.op(message="N", generation=3)):
        bench.answers(Answer.NEWER, operation, "of a record of a newer release", dead=claim.fence)


@case("R1", "newer", "clock")
def a_newer_record_is_newer_after_it_expired(bench: Bench) -> None:
    """A store that takes the place of a newer record as soon as it seems to have expired."""
    claim = bench.take(lease=1, ttl=1)
    bench.hook("newer")(claim.key)
    bench.clock.advance(DAY)
    bench.answers(Answer.NEWER, bench.op(), "of an expired record of a newer release")


@case("R2")
def a_key_nobody_used_is_acquired(bench: Bench) -> None:
    """A store whose first claim says or keeps something else than it was told."""
    mine = bench.op(fingerprint=bench.key("print"), scope=bench.key("tenant"), generation=2)
    claim = bench.answers(Answer.ACQUIRED, mine, "of a new key").claim
    expect_is(
        claim and (claim.attempts, claim.unknown, claim.right),
        (1, False, False),
        f"it is {claim}",
        of="attempts, unknown, right",
    )
    record = bench.stored()
    told = (mine.token, "M", 2, mine.task, "shop", mine.scope, mine.fingerprint, "holder of M")
    message = (record.token, record.message_id, record.generation, record.task, record.namespace)
    kept = (*message, record.scope, record.fingerprint, record.holder)
    expect(kept == told, f"told {told}, the store keeps {kept}")
    expect_is((record.state, record.attempts), (State.CLAIMED, 1), f"the record is {record}", of="state, attempts")


@case("R2", "clock")
def an_expired_record_is_as_good_as_none(bench: Bench) -> None:
    """A store that keeps notes, doubt or attempts of a record beyond its expiry."""
    bench.store.release(bench.take(bench.op(generation=2)), Release.INTERRUPTED)
    bench.clock.advance(DAY)
    claim = bench.answers(Answer.ACQUIRED, bench.op(generation=0), "of an expired record").claim
    expect_is(claim and (claim.attempts, claim.unknown), (1, False), f"it is {claim}", of="attempts, unknown")
    expect(not bench.stored().notes, f"notes of an expired record are still there: {bench.stored().notes}")


@case("R3")
def ones_own_claim_is_answered_again(bench: Bench) -> None:
    """A store that answers HELD to the caller whose reply was lost."""
    mine = bench.op()
    first = bench.take(mine)
    before = bench.stored()
    again = bench.answers(Answer.ACQUIRED, mine, "asked again with the token that has it").claim
    expect(again == first, f"the claim was {first}, and asked for again {again}")
    bench.same(before, "asking again")


@case("R3")
def ones_own_reclaim_is_told_as_one(bench: Bench) -> None:
    """A store that answers ACQUIRED where the lost reply said RECLAIMED: nobody asks what the first attempt did."""
    dead = bench.take()
    mine = bench.op(message="N")
    first = bench.ask(mine, dead=dead.fence).claim
    again = bench.answers(Answer.RECLAIMED, mine, "asked again with the token that reclaimed").claim
    expect(again == first, f"the claim was {first}, and asked for again {again}")


@case("R3", "clock")
def ones_own_lapsed_claim_is_answered_again(bench: Bench) -> None:
    """A store that lets a token take over from itself."""
    mine = bench.op()
    first = bench.take(mine)
    bench.clock.advance(LEASE)
    expect(bench.ask(mine).claim == first, "asked again after its lease, a token got another claim")


@case("R3")
def ones_own_right_is_answered_again(bench: Bench) -> None:
    """A store that answers HELD to the caller whose right to continue was granted in a lost reply."""
    completer = bench.complete(bench.op(continues=True))
    again = bench.right(completer.operation)
    expect(again.fence == completer.fence, f"the completer's right has the fence {again.fence}, not {completer.fence}")
    other = bench.op(message="N", continues=True)
    first = bench.right(other)
    expect(bench.right(other) == first, "asked again with the token that has it, another right was granted")


@case("R4")
def what_is_over_stays_over(bench: Bench) -> None:
    """A store in which a copy of an ended attempt runs again."""
    bench.store.release(bench.take(bench.op(generation=2)), Release.ENDED)
    before = bench.stored()
    for generation in range(3):
        bench.answers(Answer.OVER, bench.op(generation=generation), f"generation {generation} of 2 that ended")
    bench.same(before, "a copy of what is over")
    bench.answers(Answer.ACQUIRED, bench.op(generation=3), "generation 3 after 2 ended")


@case("R4")
def a_claim_ends_the_generations_before_it(bench: Bench) -> None:
    """A store in which a copy of the attempt before this one may still run."""
    bench.take(bench.op(generation=2))
    bench.answers(Answer.OVER, bench.op(generation=1), "generation 1 while 2 runs")
    expect(bench.stored().note("M").over == 1, f"over is {bench.stored().note('M').over}, not 1")


@case("R4")
def over_is_one_messages_affair(bench: Bench) -> None:
    """A store that lets one message end another's attempts."""
    bench.store.release(bench.take(bench.op(message="M", generation=3)), Release.ENDED)
    bench.answers(Answer.ACQUIRED, bench.op(message="N", generation=0), "another message, after one ended,")


@case("R5")
def another_message_with_another_fingerprint_is_a_mismatch(bench: Bench) -> None:
    """A store that lets an amount of 80 run, or be answered, for an amount of 50."""
    for name in ("claimed", "completed"):
        claim = bench.take(bench.op(name, fingerprint=bench.key("a")))
        if name == "completed":
            bench.store.complete(claim, outcome())
        before = bench.stored(name)
        other = bench.op(name, "N", fingerprint=bench.key("b"))
        bench.answers(Answer.MISMATCH, other, f"with another fingerprint than the one that {name}")
        bench.same(before, "a mismatch", name)


@case("R5")
def fingerprints_are_compared_where_both_have_one(bench: Bench) -> None:
    """A store that compares an empty fingerprint, or a message with itself."""
    bench.take(bench.op("with", fingerprint=bench.key("a")))
    bench.take(bench.op("without"))
    bench.answers(Answer.HELD, bench.op("with", "N", fingerprint=bench.key("a")), "with the same fingerprint")
    bench.answers(Answer.HELD, bench.op("with", "N"), "without a fingerprint")
    bench.answers(Answer.HELD, bench.op("with", "M", fingerprint=bench.key("b")), "by the same message")
    bench.answers(
        Answer.HELD, bench.op("without", "N", fingerprint=bench.key("b")), "of a record without a fingerprint"
    )


@case("R5")
def a_released_key_takes_another_fingerprint(bench: Bench) -> None:
    """A store that holds what was given back to its old arguments."""
    bench.store.release(bench.take(bench.op(fingerprint=bench.key("a"))), Release.YIELDED)
    bench.answers(Answer.ACQUIRED, bench.op(message="N", fingerprint=bench.key("b")), "of a released key")
    expect(bench.stored().fingerprint == bench.key("b"), "the record keeps the old fingerprint")


@case("R6")
def a_live_lease_holds_against_everybody(bench: Bench) -> None:
    """A store that gives a held key to a higher generation, or to another message."""
    claim = bench.take()
    before = bench.stored()
    for operation in (bench.op(), bench.op(generation=4), bench.op(message="N"), bench.op(message="N", continues=True)):
        decision = bench.answers(Answer.HELD, operation, "of a held key")
        held_by = decision.held_by
        expect_is(held_by and held_by[:2], (claim.fence, "holder of M"), f"HELD names {held_by} as the holder")
        bench.same(before, "a claim that was answered HELD")


@case("R6")
def another_fence_proves_nobody_dead(bench: Bench) -> None:
    """A store that lets any proof of death free any claim."""
    claim = bench.take()
    for fence in (0, claim.fence - 1, claim.fence + 1):
        bench.answers(Answer.HELD, bench.op(message="N"), "with proof that somebody else is dead", dead=fence)


@case("R7")
def a_claim_proved_dead_is_reclaimed_at_once(bench: Bench) -> None:
    """A store that waits out the lease of a holder which is known to be dead."""
    claim = bench.take()
    mine = bench.op(message="N")
    taken = bench.answers(Answer.RECLAIMED, mine, "of a dead holder's key", dead=claim.fence).claim
    expect_is(taken and (taken.attempts, taken.unknown), (2, True), f"it is {taken}", of="attempts, unknown")
    record = bench.stored()
    kept = (record.token, record.message_id, record.holder)
    expect_is(kept, (mine.token, "N", "holder of N"), f"the record is {record}", of="token, message_id, holder")


@case("R7")
def a_lapsed_claim_is_reclaimed(bench: Bench) -> None:
    """A store in which a crashed worker keeps its key."""
    bench.take(lease=bench.short)
    bench.lapse()
    bench.answers(Answer.RECLAIMED, bench.op(message="N"), "after the lease")


@case("R7")
def attempts_are_counted_and_doubt_is_kept(bench: Bench) -> None:
    """A store that forgets how often a key was reclaimed, or that an outcome is unknown."""
    claim = bench.take()
    for attempts in (2, 3, 4):
        taken = bench.take(bench.op(message=f"m{attempts}"), dead=claim.fence)
        expect_is(
            (taken.attempts, taken.unknown),
            (attempts, True),
            f"reclaim number {attempts - 1} is {taken}",
            of="attempts, unknown",
        )
        record = bench.stored()
        expect_is(
            (record.attempts, record.unknown), (attempts, True), f"the record says {record}", of="attempts, unknown"
        )
        claim = taken


@case("R8")
def a_stale_copy_waits_for_the_announced_retry(bench: Bench) -> None:
    """A store in which a copy of the retried attempt runs before its retry."""
    bench.store.release(bench.take(), Release.RETRY, successor=Successor(1, 30))
    before = bench.stored()
    bench.answers(Answer.NOT_DUE, bench.op(), "of a copy whose retry was announced")
    bench.same(before, "a claim that was answered NOT_DUE")


@case("R8", "clock")
def a_retry_that_never_came_is_not_waited_for_for_ever(bench: Bench) -> None:
    """A store that lets a lost retry block its message, or gives it less than a minute."""
    bench.store.release(bench.take(), Release.RETRY, successor=Successor(1, 30))
    bench.clock.advance(30 + GRACE - STEP)
    bench.answers(Answer.NOT_DUE, bench.op(), "less than a minute after the retry was due")
    bench.clock.advance(STEP)
    bench.answers(Answer.ACQUIRED, bench.op(), "a minute after the retry was due")


@case("R8")
def the_retry_and_other_messages_wait_for_nothing(bench: Bench) -> None:
    """A store in which an announced retry stops itself, or another message."""
    for number, (message, generation) in enumerate([("M", 1), ("M", 2), ("N", 0)]):
        name = f"order {number}"
        bench.store.release(bench.take(bench.op(name)), Release.RETRY, successor=Successor(1, 30))
        which = f"generation {generation} of {'the' if message == 'M' else 'another'} message"
        bench.answers(Answer.ACQUIRED, bench.op(name, message, generation), f"of {which} after a retry was announced")


@case("R8")
def the_retry_clears_its_announcement(bench: Bench) -> None:
    """A store that still waits for a retry that is running."""
    bench.store.release(bench.take(), Release.RETRY, successor=Successor(1, 30))
    bench.take(bench.op(generation=1))
    successor = bench.stored().note("M").successor
    expect(successor is None, f"with the retry running, {successor} is still announced")


@case("R9")
def a_released_key_is_free(bench: Bench) -> None:
    """A store in which a key that was given back is still held, or still counts its attempts."""
    dead = bench.take()
    bench.store.release(bench.take(bench.op(message="N"), dead=dead.fence), Release.YIELDED)
    expect_is(bench.stored().attempts, 0, f"a released record counts {bench.stored().attempts} attempts")
    claim = bench.take(bench.op(message="P"))
    expect_is(claim.attempts, 1, f"the first attempt after a release is number {claim.attempts}")


@case("R9")
def doubt_outlives_a_release(bench: Bench) -> None:
    """A store in which an interrupted run is forgotten by the next release."""
    bench.store.release(bench.take(), Release.INTERRUPTED)
    for reason in (Release.YIELDED, Release.RETRY, Release.ENDED):
        mine = bench.op(message=reason.value)
        claim = bench.answers(Answer.RECLAIMED, mine, "of a key whose last run was interrupted").claim
        expect_is(claim and (claim.attempts, claim.unknown), (1, True), f"it is {claim}", of="attempts, unknown")
        if claim is not None:
            bench.store.release(claim, reason, successor=Successor(1, 0) if reason is Release.RETRY else None)


@case("R10")
def completed_answers_with_the_outcome(bench: Bench) -> None:
    """A store that runs a completed key again, or answers it without its value."""
    completer = bench.complete()
    before = bench.stored()
    for operation in (bench.op(), bench.op(generation=3), bench.op(message="N")):
        decision = bench.answers(Answer.COMPLETED, operation, "of a completed key", dead=completer.fence)
        expect(decision.claim is None, f"a message that continues nothing was given {decision.claim}")
        got = decision.record.outcome if decision.record else None
        expect(got == outcome(), f"completed with {outcome()}, the answer says {got}")
    bench.same(before, "a replay")


@case("R10")
def a_settled_message_is_not_continued_again(bench: Bench) -> None:
    """A store in which links that were published are published again."""
    claim = bench.complete(bench.op(continues=True))
    bench.store.settle(claim.key, "M")
    decision = bench.answers(Answer.COMPLETED, bench.op(continues=True), "of a settled message", dead=claim.fence)
    expect(decision.claim is None, f"a settled message was given {decision.claim}")


@case("R11")
def one_copy_continues_a_message_at_a_time(bench: Bench) -> None:
    """A store that lets two copies publish the same links."""
    completer = bench.complete(bench.op(continues=True))
    before = bench.stored()
    decision = bench.answers(Answer.HELD, bench.op(continues=True), "while a copy continues the message")
    held_by = decision.held_by
    expect_is(held_by and held_by[:2], (completer.fence, "holder of M"), f"HELD names {held_by} as the holder")
    bench.answers(Answer.HELD, bench.op(continues=True), "with proof of another's death", dead=completer.fence + 1)
    bench.same(before, "a claim that was answered HELD")


@case("R11")
def held_names_the_holder_of_this_messages_right(bench: Bench) -> None:
    """A store that names somebody who continues another message."""
    bench.complete(bench.op(continues=True))
    rights = {message: bench.right(bench.op(message=message, continues=True)) for message in ("N", "P")}
    for message, right in rights.items():
        held_by = bench.answers(Answer.HELD, bench.op(message=message, continues=True), "of a held right").held_by
        named = held_by and held_by[:2]
        expect_is(named, (right.fence, f"holder of {message}"), f"{named} is named as the holder of {message}")


@case("R12")
def another_message_gets_a_right_of_its_own(bench: Bench) -> None:
    """A store in which only the first message's links are ever published."""
    completer = bench.complete(bench.op(continues=True))
    mine = bench.op(message="N", continues=True)
    bench.right(mine)
    record = bench.stored()
    kept = (record.state, record.token, record.fence)
    expect_is(
        kept,
        (State.COMPLETED, completer.token, completer.fence),
        f"a granted right made of the record {record}",
        of="state, token, fence",
    )
    right = record.note("N").continuing
    expect_is(
        right and (right.token, right.holder), (mine.token, "holder of N"), f"it is kept as {right}", of="token, holder"
    )


@case("R12")
def a_right_passes_on_from_the_dead(bench: Bench) -> None:
    """A store in which links are lost with the worker that was to publish them."""
    completer = bench.complete(bench.op(continues=True))
    second = bench.right(bench.op(continues=True), dead=completer.fence)
    expect(bench.right(bench.op(continues=True), dead=second.fence).right, "a second death passed on no right")


@case("R12")
def a_lapsed_right_is_granted_again(bench: Bench) -> None:
    """A store in which a right to continue is never given up."""
    bench.complete(bench.op(continues=True), lease=bench.short)
    bench.lapse()
    bench.right(bench.op(continues=True))


@case("R12", "clock")
def a_right_outlives_its_record(bench: Bench) -> None:
    """A store in which a record expires while its links are being published."""
    bench.complete(ttl=10)
    bench.right(bench.op(message="N", continues=True), ttl=10)
    bench.clock.advance(LEASE - STEP)
    expires_at = bench.stored().expires_at
    expect_close(expires_at, bench.clock() + STEP, f"the right ends in {STEP} s, the record at {expires_at}")


@case("order")
def over_comes_before_mismatch(bench: Bench) -> None:
    """A store in which a stale copy, whose arguments were others, fails where it should be dropped."""
    bench.store.release(bench.take(bench.op(generation=1)), Release.ENDED)
    bench.complete(bench.op(message="N", fingerprint=bench.key("b")))
    stale = bench.op(generation=1, fingerprint=bench.key("a"))
    bench.answers(Answer.OVER, stale, "of an ended message with other arguments than the one that completed")


@case("order")
def mismatch_comes_before_reclaim(bench: Bench) -> None:
    """A store that runs an amount of 80 over an amount of 50 that may have been charged."""
    claim = bench.take(bench.op(fingerprint=bench.key("50")))
    other = bench.op(message="N", fingerprint=bench.key("80"))
    bench.answers(Answer.MISMATCH, other, "with other arguments than a dead holder's", dead=claim.fence)


@case("order")
def any_message_id_has_a_note_of_its_own(bench: Bench) -> None:
    """A store that reads something into a message id."""
    messages = ["", "with spaces", "m:1", "m", 'quote"\\', "ünïcödé ☃", "x" * 255, "null", "%s", ":now"]
    for number, message in enumerate(messages):
        claim = bench.take(bench.op(message=message, holder="høst:1 ☃"))
        bench.store.note_parked(claim.key, message, 0, number + 1)
        bench.store.release(claim, Release.ENDED)
    record = bench.stored()
    expect_is(record.holder, "høst:1 ☃", f"the holder høst:1 ☃ is kept as {record.holder}")
    expect_is(set(record.notes), set(messages), f"notes of {messages} are kept as those of {list(record.notes)}")
    for number, message in enumerate(messages):
        parked = record.note(message).parked
        expect_is(parked, (0, number + 1), f"the note of {message!r} says {parked}")
        bench.answers(Answer.OVER, bench.op(message=message), f"of {message!r}, which ended,")


@case("order")
def an_answer_carries_the_callers_note(bench: Bench) -> None:
    """A store whose HELD does not say how far the caller's own parking went."""
    claim = bench.take(bench.op(message="N"))
    for message, count in (("M", 2), ("N", 5)):
        bench.store.note_parked(claim.key, message, 1, count)
    record = bench.answers(Answer.HELD, bench.op(generation=1), "of a held key").record
    parked = record.note("M").parked if record else None
    expect_is(parked, (1, 2), f"the caller's copies were parked (1, 2), the answer says {parked}")
