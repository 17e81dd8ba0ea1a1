"""The decision table row by row on the pure functions: answers, precedence, boundaries, and what is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from celery_idem.core.decide import (
    decide_claim,
    decide_complete,
    decide_forget,
    decide_parked,
    decide_release,
    decide_renew,
    decide_settle,
    first_claim,
    kept,
    next_fence,
)
from celery_idem.core.records import (
    DAY,
    GRACE,
    NOTES_KEPT,
    RECORD_VERSION,
    Answer,
    Claim,
    Decision,
    Ended,
    Note,
    Operation,
    Record,
    Release,
    Renewal,
    Right,
    State,
    Successor,
)
from tests.support.clock import START
from tests.support.operations import fingerprint, op, result, token_for

NOW = START
LEASE, TTL = 60.0, 3600.0
SOON = 1 / 1024  # a step that a float of this size can say exactly
FENCE = int(NOW * 1_000_000) - 5_000_000


def record(state: State = State.CLAIMED, note: Note | None = None, **changes: Any) -> Record:
    """A record of message M, generation 0, held by another token and alive at NOW."""
    base = Record(
        key=op().key,
        state=state,
        token=token_for("another"),
        fence=FENCE,
        message_id="M",
        generation=0,
        attempts=1 if state is State.CLAIMED else 0,
        task="shop.charge",
        namespace="shop",
        holder="another holder",
        claimed_at=NOW - 5,
        lease_expires_at=NOW + 55 if state is State.CLAIMED else NOW - 1,
        completed_at=NOW - 1 if state is State.COMPLETED else None,
        expires_at=NOW + TTL,
        outcome=result() if state is State.COMPLETED else None,
        notes={} if note is None else {"M": note},
    )
    return replace(base, **changes)


def ask(
    stored: Record | None, operation: Operation, *, now: float = NOW, dead_fence: int | None = None
) -> tuple[Decision, Record | None]:
    return decide_claim(stored, operation, now=now, lease=LEASE, ttl=TTL, dead_fence=dead_fence)


def right(name: str = "another", *, until: float = NOW + 30, fence: int = FENCE + 7) -> Right:
    return Right(token_for(name), fence, f"{name} holder", until)


def held(name: str = "mine", **more: Any) -> tuple[Claim, Record]:
    """A fresh claim by a named token, with the record it wrote."""
    decision, written = ask(None, op(token=name, **more))
    assert decision.claim is not None
    assert written is not None
    return decision.claim, written


# -- the rows ----------------------------------------------------------------------------------------------------------


def test_row_01_a_newer_record_is_left_alone() -> None:
    stored = record(record_version=RECORD_VERSION + 1)
    decision, written = ask(stored, op())
    assert (decision.answer, decision.claim, decision.record, written) == (Answer.NEWER, None, stored, None)


def test_row_02_nothing_there_is_acquired() -> None:
    mine = op(token="mine", fingerprint=fingerprint("a"), scope="s", generation=2)
    decision, written = ask(None, mine)
    assert (
        written
        == decision.record
        == Record(
            key=mine.key,
            state=State.CLAIMED,
            token=mine.token,
            fence=int(NOW * 1_000_000),
            message_id="M",
            generation=2,
            attempts=1,
            answer=Answer.ACQUIRED,
            unknown=False,
            task="shop.charge",
            namespace="shop",
            scope="s",
            fingerprint=fingerprint("a"),
            holder="holder of M",
            claimed_at=NOW,
            lease_expires_at=NOW + LEASE,
            expires_at=NOW + LEASE + TTL,
            notes={"M": Note(over=1, at=NOW)},
        )
    )
    assert decision.claim == Claim(mine, written.fence, Answer.ACQUIRED, 1, LEASE, TTL)
    assert (decision.answer, decision.now) == (Answer.ACQUIRED, NOW)


def test_row_02_an_expired_record_leaves_only_its_fence() -> None:
    stored = record(note=Note(over=3, settled=True), attempts=4, unknown=True, expires_at=NOW, fence=FENCE * 2)
    decision, written = ask(stored, op())
    assert decision.answer is Answer.ACQUIRED
    assert written is not None
    assert (written.attempts, written.unknown, written.notes, written.outcome) == (1, False, {}, None)
    assert written.fence == FENCE * 2 + 1


@pytest.mark.parametrize("until", [NOW + 30, NOW - 1], ids=["leased", "lapsed"])
@pytest.mark.parametrize("answer", [Answer.ACQUIRED, Answer.RECLAIMED])
def test_row_03_the_claims_own_token_gets_the_same_answer(answer: Answer, until: float) -> None:
    mine = op(token="another")
    stored = record(answer=answer, attempts=3, unknown=True, lease_expires_at=until)
    decision, written = ask(stored, mine)
    assert written is None
    assert (decision.answer, decision.record) == (answer, stored)
    assert decision.claim == Claim(mine, FENCE, answer, 3, LEASE, TTL, unknown=True)


@pytest.mark.parametrize("until", [NOW + 30, NOW - 1], ids=["leased", "lapsed"])
def test_row_03_the_rights_own_token_gets_the_same_answer(until: float) -> None:
    mine = op(token="mine", continues=True)
    stored = record(State.COMPLETED, Note(continuing=right("mine", until=until)))
    decision, written = ask(stored, mine)
    assert written is None
    assert decision.answer is Answer.COMPLETED
    assert decision.claim == Claim(mine, FENCE + 7, Answer.COMPLETED, 0, LEASE, TTL, right=True)


def test_row_03_a_token_that_ended_is_a_stranger() -> None:
    completed, _ = ask(record(State.COMPLETED, token=token_for("mine")), op(token="mine"))
    assert (completed.answer, completed.claim) == (Answer.COMPLETED, None)
    released, _ = ask(record(State.RELEASED, token=token_for("mine")), op(token="mine"))
    assert released.answer is Answer.ACQUIRED
    assert released.claim is not None
    assert released.claim.fence > FENCE


@pytest.mark.parametrize("state", list(State))
def test_row_04_what_is_over_stays_over(state: State) -> None:
    stored = record(state, Note(over=1))
    for generation in (0, 1):
        decision, written = ask(stored, op(generation=generation))
        assert (decision.answer, decision.claim, written) == (Answer.OVER, None, None)
    assert ask(stored, op(generation=2))[0].answer is not Answer.OVER
    assert ask(stored, op(message="N"))[0].answer is not Answer.OVER


@pytest.mark.parametrize("state", [State.CLAIMED, State.COMPLETED])
def test_row_05_another_message_with_another_fingerprint_is_a_mismatch(state: State) -> None:
    stored = record(state, fingerprint=fingerprint("a"))
    decision, written = ask(stored, op(message="N", fingerprint=fingerprint("b")))
    assert (decision.answer, decision.claim, decision.record, written) == (Answer.MISMATCH, None, stored, None)


@pytest.mark.parametrize(
    ("message", "theirs", "mine"),
    [("N", "a", "a"), ("N", "", "b"), ("N", "a", ""), ("M", "a", "b")],
    ids=["equal", "record has none", "caller has none", "own message"],
)
def test_row_05_compares_two_messages_that_both_have_one(message: str, theirs: str, mine: str) -> None:
    stored = record(fingerprint=fingerprint(theirs) if theirs else "")
    decision, _ = ask(stored, op(message=message, fingerprint=fingerprint(mine) if mine else ""))
    assert decision.answer is Answer.HELD


def test_row_05_does_not_compare_with_a_released_record() -> None:
    stored = record(State.RELEASED, fingerprint=fingerprint("a"))
    decision, written = ask(stored, op(message="N", fingerprint=fingerprint("b")))
    assert decision.answer is Answer.ACQUIRED
    assert written is not None
    assert written.fingerprint == fingerprint("b")


@pytest.mark.parametrize(("message", "generation"), [("M", 0), ("M", 3), ("N", 0)])
def test_row_06_a_live_lease_holds_against_everybody(message: str, generation: int) -> None:
    stored = record()
    decision, written = ask(stored, op(message=message, generation=generation))
    assert (decision.answer, decision.claim, written) == (Answer.HELD, None, None)
    assert decision.held_by == (FENCE, "another holder", NOW + 55)


@pytest.mark.parametrize("dead_fence", [FENCE - 1, FENCE + 1, 0])
def test_row_06_another_fence_proves_nothing(dead_fence: int) -> None:
    assert ask(record(), op(), dead_fence=dead_fence)[0].answer is Answer.HELD


@pytest.mark.parametrize("dead", [False, True], ids=["lapsed", "proved dead"])
@pytest.mark.parametrize("message", ["M", "N"])
def test_row_07_a_lapsed_or_dead_claim_is_reclaimed(message: str, dead: bool) -> None:
    stored = record(attempts=2, lease_expires_at=NOW + 55 if dead else NOW)
    mine = op(message=message)
    # As many as the fence, and read apart from it: what a store answered before is no object of the record's.
    decision, written = ask(stored, mine, dead_fence=int(str(FENCE)) if dead else None)
    assert written == decision.record
    assert written is not None
    assert (written.state, written.token, written.message_id) == (State.CLAIMED, mine.token, message)
    assert (written.attempts, written.unknown, written.answer) == (3, True, Answer.RECLAIMED)
    assert decision.claim == Claim(mine, written.fence, Answer.RECLAIMED, 3, LEASE, TTL, unknown=True)
    assert written.fence > FENCE


def test_row_08_a_copy_of_the_predecessor_waits_for_the_announced_retry() -> None:
    stored = record(State.RELEASED, Note(successor=(1, NOW + 10)))
    decision, written = ask(stored, op(generation=0))
    assert (decision.answer, decision.claim, decision.record, written) == (Answer.NOT_DUE, None, stored, None)


@pytest.mark.parametrize(("message", "generation"), [("M", 1), ("M", 2), ("N", 0)])
def test_row_08_does_not_stop_the_successor_itself_or_another_message(message: str, generation: int) -> None:
    stored = record(State.RELEASED, Note(successor=(1, NOW + 10)))
    assert ask(stored, op(message=message, generation=generation))[0].answer is Answer.ACQUIRED


@pytest.mark.parametrize("unknown", [False, True])
def test_row_09_a_released_key_is_free_and_remembers_doubt(unknown: bool) -> None:
    stored = record(State.RELEASED, attempts=7, unknown=unknown)
    decision, written = ask(stored, op(message="N"))
    assert decision.answer is (Answer.RECLAIMED if unknown else Answer.ACQUIRED)
    assert written is not None
    assert (written.attempts, written.unknown, written.answer) == (1, unknown, decision.answer)
    assert decision.claim is not None
    assert decision.claim.unknown is unknown


@pytest.mark.parametrize(
    ("continues", "note"),
    [(False, None), (False, Note(settled=True)), (True, Note(settled=True)), (False, Note(continuing=right()))],
)
def test_row_10_completed_without_anything_to_continue(continues: bool, note: Note | None) -> None:
    stored = record(State.COMPLETED, note)
    decision, written = ask(stored, op(continues=continues))
    assert (decision.answer, decision.claim, decision.record, written) == (Answer.COMPLETED, None, stored, None)


def test_row_11_another_copy_is_continuing_this_message() -> None:
    stored = record(State.COMPLETED, Note(continuing=right()))
    decision, written = ask(stored, op(continues=True))
    assert (decision.answer, decision.claim, written) == (Answer.HELD, None, None)
    assert decision.held_by == (FENCE + 7, "another holder", NOW + 30)
    assert ask(stored, op(continues=True), dead_fence=FENCE)[0].answer is Answer.HELD


def test_row_11_names_the_holder_of_this_messages_right() -> None:
    notes = {"N": Note(continuing=right("other", fence=FENCE + 9)), "M": Note(continuing=right())}
    decision, _ = ask(record(State.COMPLETED, notes=notes), op(continues=True))
    assert decision.held_by == (FENCE + 7, "another holder", NOW + 30)


@pytest.mark.parametrize("case", ["nobody's", "lapsed", "proved dead", "another message's"])
def test_row_12_the_right_to_continue_is_leased_to_one_copy(case: str) -> None:
    note = {
        "nobody's": None,
        "lapsed": Note(continuing=right(until=NOW)),
        "proved dead": Note(continuing=right()),
        "another message's": None,
    }[case]
    stored = record(State.COMPLETED, note)
    if case == "another message's":
        stored = replace(stored, notes={"N": Note(continuing=right())})
    mine = op(token="mine", continues=True)
    decision, written = ask(stored, mine, dead_fence=FENCE + 7 if case == "proved dead" else None)
    assert decision.answer is Answer.COMPLETED
    assert decision.claim is not None
    assert decision.claim.right
    granted = Right(mine.token, decision.claim.fence, mine.holder, NOW + LEASE)
    assert written == replace(stored, notes={**stored.notes, "M": Note(continuing=granted, at=NOW)})
    assert granted.fence == int(NOW * 1_000_000)


def test_row_12_a_rights_fence_is_above_the_last_rights_and_the_records() -> None:
    later = int(NOW * 1_000_000) + 50
    for fence, last in ((FENCE, later), (later, FENCE + 7)):
        stored = record(State.COMPLETED, Note(continuing=right(until=NOW, fence=last)), fence=fence)
        decision, _ = ask(stored, op(continues=True))
        assert decision.claim is not None
        assert decision.claim.fence == later + 1


def test_row_12_a_right_outlives_the_records_expiry() -> None:
    _, written = ask(record(State.COMPLETED, expires_at=NOW + 1), op(continues=True))
    assert written is not None
    assert written.expires_at == NOW + LEASE


# -- the whole table: the first fitting row answers --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    stored: Record
    operation: Operation
    dead_fence: int | None = None

    @property
    def note(self) -> Note:
        return self.stored.note("M")

    @property
    def generation(self) -> int:
        return self.operation.delivery.generation


GENERATION = 1


def cases() -> Iterator[Case]:
    """Every combination of the facts the table looks at."""
    versions, expiries = (RECORD_VERSION, RECORD_VERSION + 1), (NOW + 1, NOW)
    prints = (("a", "a"), ("a", "b"), ("", "b"))
    common = itertools.product(versions, expiries, (0, 1, 2), ("M", "N"), prints)
    for version, expires, over, holder_message, (theirs, mine) in common:
        facts: dict[str, Any] = {
            "record_version": version,
            "expires_at": expires,
            "message_id": holder_message,
            "fingerprint": theirs and fingerprint(theirs),
        }
        wanted: dict[str, Any] = {"generation": GENERATION, "fingerprint": fingerprint(mine), "token": "mine"}
        for token, lease, dead, unknown in itertools.product(
            ("mine", "another"), (NOW + 1, NOW), (None, FENCE), (False, True)
        ):
            stored = record(note=Note(over=over), token=token_for(token), lease_expires_at=lease, **facts)
            yield Case(replace(stored, unknown=unknown), op(**wanted), dead)
        successors = (None, (2, NOW), (2, NOW - GRACE), (GENERATION, NOW), (0, NOW))
        for token, unknown, successor in itertools.product(("mine", "another"), (False, True), successors):
            stored = record(State.RELEASED, Note(over=over, successor=successor), token=token_for(token), **facts)
            yield Case(replace(stored, unknown=unknown), op(**wanted))
        rights = (None, right(), right(until=NOW), right("mine"), right("mine", until=NOW))
        for continues, settled, continuing, dead in itertools.product(
            (False, True), (False, True), rights, (None, FENCE, FENCE + 7)
        ):
            note = Note(over=over, settled=settled, continuing=continuing)
            yield Case(record(State.COMPLETED, note, **facts), op(continues=continues, **wanted), dead)


def fits_row_3(case: Case) -> bool:
    stored, mine = case.stored, case.operation.token
    if stored.state is State.CLAIMED:
        return stored.token == mine
    return stored.state is State.COMPLETED and case.note.continuing is not None and case.note.continuing.token == mine


def fits_row_5(case: Case) -> bool:
    theirs, mine = case.stored.fingerprint, case.operation.fingerprint
    if case.stored.state is State.RELEASED or case.stored.message_id == "M":
        return False
    return bool(theirs and mine) and theirs != mine


def fits_row_6(case: Case) -> bool:
    claimed = case.stored.state is State.CLAIMED
    return claimed and case.stored.lease_expires_at > NOW and case.dead_fence != case.stored.fence


def fits_row_8(case: Case) -> bool:
    successor = case.note.successor
    if case.stored.state is not State.RELEASED or successor is None:
        return False
    return successor[0] > case.generation and successor[1] + 60 > NOW


def fits_row_11(case: Case) -> bool:
    other = case.note.continuing
    if case.stored.state is not State.COMPLETED or other is None or other.token == case.operation.token:
        return False
    return other.lease_expires_at > NOW and case.dead_fence != other.fence


ROWS: dict[int, Callable[[Case], bool]] = {
    1: lambda case: case.stored.record_version > RECORD_VERSION,
    2: lambda case: case.stored.expires_at <= NOW,
    3: fits_row_3,
    4: lambda case: case.generation <= case.note.over,
    5: fits_row_5,
    6: fits_row_6,
    7: lambda case: case.stored.state is State.CLAIMED,
    8: fits_row_8,
    9: lambda case: case.stored.state is State.RELEASED,
    10: lambda case: (
        case.stored.state is State.COMPLETED and (not case.operation.delivery.continues or case.note.settled)
    ),
    11: fits_row_11,
    12: lambda case: case.stored.state is State.COMPLETED,
}

ONLY_IN = {3: "CD", 5: "CD", 6: "C", 7: "C", 8: "R", 9: "R", 10: "D", 11: "D", 12: "D"}
"""States a row needs: claimed, completed (done), released."""

PAIRS = [
    (first, second)
    for first, second in itertools.combinations(ROWS, 2)
    if set(ONLY_IN.get(first, "CDR")) & set(ONLY_IN.get(second, "CDR"))
    and (first, second) != (3, 11)  # one note holds one right: it is ours or another's
]


def answers_row(case: Case, decision: Decision, written: Record | None) -> int:
    """The row whose answer this is."""
    stored, answer = case.stored, decision.answer
    fixed = {Answer.NEWER: 1, Answer.OVER: 4, Answer.MISMATCH: 5, Answer.NOT_DUE: 8}
    if answer in fixed:
        return fixed[answer]
    if answer is Answer.HELD:
        return 6 if stored.state is State.CLAIMED else 11
    if decision.claim is not None and written is None:
        return 3
    if answer is Answer.COMPLETED:
        return 10 if decision.claim is None else 12
    assert written is not None
    if stored.expires_at <= NOW:
        assert (answer, written.attempts, written.unknown) == (Answer.ACQUIRED, 1, False)
        return 2
    if stored.state is State.RELEASED:
        assert answer is (Answer.RECLAIMED if stored.unknown else Answer.ACQUIRED)
        assert (written.attempts, written.unknown) == (1, stored.unknown)
        return 9
    assert (answer, written.attempts, written.unknown) == (Answer.RECLAIMED, stored.attempts + 1, True)
    return 7


def test_the_first_fitting_row_answers_in_every_combination_of_facts() -> None:
    met: dict[int, int] = dict.fromkeys(ROWS, 0)
    for case in cases():
        row = answers_row(case, *ask(case.stored, case.operation, dead_fence=case.dead_fence))
        assert row == next(number for number, fits in ROWS.items() if fits(case)), case
        met[row] += 1
    assert all(met.values()), met


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=[f"{a}-before-{b}" for a, b in PAIRS])
def test_precedence(first: int, second: int) -> None:
    earlier = [ROWS[number] for number in ROWS if number < first]
    both = [
        case
        for case in ALL_CASES
        if ROWS[first](case) and ROWS[second](case) and not any(fits(case) for fits in earlier)
    ]
    assert both, "no combination of facts shows it"
    for case in both:
        assert answers_row(case, *ask(case.stored, case.operation, dead_fence=case.dead_fence)) == first


def test_precedence_covers_every_pair_that_can_meet() -> None:
    assert len(PAIRS) == 45


ALL_CASES = list(cases())


# -- boundary times ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "answer"), [(NOW - SOON, Answer.HELD), (NOW, Answer.RECLAIMED), (NOW + SOON, Answer.RECLAIMED)]
)
def test_a_lease_ends_at_its_end(now: float, answer: Answer) -> None:
    assert ask(record(lease_expires_at=NOW), op(), now=now)[0].answer is answer


@pytest.mark.parametrize(("now", "answer"), [(NOW - SOON, Answer.HELD), (NOW, Answer.COMPLETED)])
def test_a_right_ends_at_its_end(now: float, answer: Answer) -> None:
    stored = record(State.COMPLETED, Note(continuing=right(until=NOW)))
    assert ask(stored, op(continues=True), now=now)[0].answer is answer


@pytest.mark.parametrize(("now", "answer"), [(NOW + 60 - SOON, Answer.NOT_DUE), (NOW + 60, Answer.ACQUIRED)])
def test_a_stale_copy_waits_sixty_seconds_beyond_the_due_time(now: float, answer: Answer) -> None:
    stored = record(State.RELEASED, Note(successor=(1, NOW)))
    assert ask(stored, op(), now=now)[0].answer is answer


@pytest.mark.parametrize("state", list(State))
def test_a_record_expires_at_its_expiry(state: State) -> None:
    stored = record(state, Note(over=0), expires_at=NOW)
    assert ask(stored, op(), now=NOW - SOON)[0].answer is Answer.OVER
    assert ask(stored, op(), now=NOW)[0].answer is Answer.ACQUIRED


@pytest.mark.parametrize(("ttl", "keeps"), [(0.0, DAY), (5.0, 5.0), (DAY * 3, DAY * 3)])
def test_ttl_zero_still_keeps_a_day(ttl: float, keeps: float) -> None:
    assert kept(ttl) == keeps


# -- fences, notes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "now", "fence"),
    [(0, 1.5, 1_500_000), (2_000_000, 1.5, 2_000_001), (1_500_000, 1.5, 1_500_001), (1_499_999, 1.5, 1_500_000)],
)
def test_a_fence_is_the_clock_or_one_more(previous: int, now: float, fence: int) -> None:
    assert next_fence(previous, now) == fence


def test_a_claim_sets_over_below_itself_and_never_lowers_it() -> None:
    _, first = ask(record(State.RELEASED), op(generation=4))
    assert first is not None
    assert first.note("M").over == 3
    _, second = ask(record(State.RELEASED, Note(over=1)), op(generation=2))
    assert second is not None
    assert second.note("M").over == 1


@pytest.mark.parametrize(
    ("successor", "left"), [((1, NOW - 90), None), ((2, NOW - 90), None), ((3, NOW - 90), (3, NOW - 90))]
)
def test_a_claim_clears_the_successor_it_is_or_passed(
    successor: tuple[int, float], left: tuple[int, float] | None
) -> None:
    _, written = ask(record(State.RELEASED, Note(successor=successor)), op(generation=2))
    assert written is not None
    assert written.note("M").successor == left


def test_a_claim_leaves_the_notes_of_other_messages() -> None:
    notes = {"N": Note(over=2, successor=(3, NOW + 5), parked=(2, 9), at=NOW - 9)}
    _, written = ask(record(State.RELEASED, notes=notes), op())
    assert written is not None
    assert written.notes == notes


def test_a_first_generation_without_history_needs_no_note() -> None:
    assert held()[1].notes == {}


def crowd(count: int, note: Note) -> dict[str, Note]:
    return {f"m{n:03}": replace(note, at=NOW - 1000 + n) for n in range(count)}


def test_the_sixty_four_youngest_notes_stay() -> None:
    stored = record(notes=crowd(NOTES_KEPT + 3, Note(over=0)))
    written = decide_parked(stored, "M", 0, 1, now=NOW)
    assert written is not None
    assert len(written.notes) == NOTES_KEPT
    assert set(stored.notes) - set(written.notes) == {"m000", "m001", "m002", "m003"}
    assert written.note("M") == Note(parked=(0, 1), at=NOW)


@pytest.mark.parametrize(
    "living",
    [Note(successor=(1, NOW - GRACE + SOON)), Note(continuing=right(until=NOW + SOON))],
    ids=["retry", "right"],
)
def test_a_live_note_stays_beyond_the_limit(living: Note) -> None:
    crowded = {**crowd(NOTES_KEPT, Note(over=0)), "old": replace(living, at=NOW - 5000)}
    written = decide_parked(record(notes=crowded), "M", 0, 1, now=NOW)
    assert written is not None
    assert "old" in written.notes
    assert len(written.notes) == NOTES_KEPT
    all_live = decide_parked(record(notes=crowd(NOTES_KEPT + 5, living)), "M", 0, 1, now=NOW)
    assert all_live is not None
    assert len(all_live.notes) == NOTES_KEPT + 6


@pytest.mark.parametrize(
    "dead", [Note(successor=(1, NOW - GRACE)), Note(continuing=right(until=NOW)), Note(settled=True)]
)
def test_a_note_is_dead_at_its_end(dead: Note) -> None:
    crowded = {**crowd(NOTES_KEPT, Note(over=0)), "old": replace(dead, at=NOW - 5000)}
    written = decide_parked(record(notes=crowded), "M", 0, 1, now=NOW)
    assert written is not None
    assert "old" not in written.notes


# -- complete ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [1.0, LEASE, LEASE + 500], ids=["leased", "at its end", "lapsed"])
def test_complete_records_the_outcome(later: float) -> None:
    claim, stored = held()
    ended, written = decide_complete(replace(stored, unknown=True), claim, result(), now=NOW + later)
    assert ended is Ended.COMPLETED
    assert written == replace(
        stored,
        state=State.COMPLETED,
        outcome=result(),
        attempts=0,
        unknown=False,
        lease_expires_at=NOW + later,
        completed_at=NOW + later,
        expires_at=NOW + later + TTL,
    )


def test_complete_keeps_the_right_to_continue() -> None:
    claim, stored = held(continues=True)
    _, written = decide_complete(stored, claim, result(), now=NOW + 1)
    assert written is not None
    assert written.note("M").continuing == Right(claim.token, claim.fence, "holder of M", NOW + 1 + LEASE)
    assert ask(written, op(continues=True), now=NOW + 2)[0].answer is Answer.HELD
    again, _ = ask(written, claim.operation, now=NOW + 2)
    assert again.claim is not None
    assert again.claim.right


def test_a_live_right_outlives_a_short_ttl() -> None:
    claim, stored = held(continues=True)
    _, written = decide_complete(stored, replace(claim, ttl=1.0), result(), now=NOW)
    assert written is not None
    assert written.expires_at == NOW + LEASE


def test_complete_again_by_the_same_token_succeeds_and_changes_nothing() -> None:
    claim, stored = held()
    _, written = decide_complete(stored, claim, result(), now=NOW + 1)
    assert decide_complete(written, claim, result(b"other"), now=NOW + 2) == (Ended.COMPLETED, None)


@pytest.mark.parametrize("left", [None, *(record(state, expires_at=NOW) for state in State)])
@pytest.mark.parametrize("later", [0, 1])
def test_complete_of_a_vanished_record_is_remembered(left: Record | None, later: int) -> None:
    claim, _ = held(generation=2)
    ended, written = decide_complete(left, claim, result(), now=NOW + later)
    assert ended is Ended.COMPLETED
    assert written is not None
    assert (written.fence, written.token, written.note("M").over) == (claim.fence, claim.token, 1)
    assert written.outcome == result()


@pytest.mark.parametrize(
    "stored",
    [
        record(),
        record(State.COMPLETED),
        record(State.RELEASED),
        record(State.RELEASED, token=token_for("mine")),
        record(token=token_for("mine"), record_version=RECORD_VERSION + 1),
        record(token=token_for("mine"), record_version=RECORD_VERSION + 1, expires_at=NOW),
    ],
    ids=["claimed", "completed", "released", "released by itself", "newer", "newer and expired"],
)
def test_complete_is_lost_where_the_claim_is_gone(stored: Record) -> None:
    claim, _ = held()
    assert decide_complete(stored, claim, result(), now=NOW + 1) == (Ended.LOST, None)


# -- release -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", list(Release))
def test_release_leaves_a_tombstone(reason: Release) -> None:
    claim, stored = held(generation=1)
    successor = Successor(2, 30) if reason is Release.RETRY else None
    ended, written = decide_release(replace(stored, attempts=3), claim, reason, successor, now=NOW + 1)
    note = {
        Release.RETRY: Note(over=0, successor=(2, NOW + 31), at=NOW + 1),
        Release.ENDED: Note(over=1, at=NOW + 1),
    }.get(reason, Note(over=0, at=NOW))
    assert ended is Ended.RELEASED
    assert written == replace(
        stored,
        state=State.RELEASED,
        attempts=0,
        unknown=reason is Release.INTERRUPTED,
        lease_expires_at=NOW + 1,
        expires_at=NOW + 1 + DAY,
        notes={"M": note},
    )


@pytest.mark.parametrize("reason", list(Release))
def test_release_never_clears_doubt(reason: Release) -> None:
    claim, stored = held()
    _, written = decide_release(replace(stored, unknown=True), claim, reason, None, now=NOW + 1)
    assert written is not None
    assert written.unknown


def test_a_tombstone_stays_as_long_as_a_completion_would() -> None:
    claim, stored = held()
    _, written = decide_release(stored, replace(claim, ttl=DAY * 9), Release.ENDED, None, now=NOW)
    assert written is not None
    assert written.expires_at == NOW + DAY * 9


def test_an_announced_retry_is_kept_until_it_is_due_however_late() -> None:
    claim, stored = held()
    _, written = decide_release(stored, claim, Release.RETRY, Successor(1, 3 * DAY), now=NOW)
    assert written is not None
    assert written.expires_at == NOW + 3 * DAY + GRACE


@pytest.mark.parametrize("reason", list(Release))
def test_release_tells_what_this_token_did_before(reason: Release) -> None:
    claim, stored = held()
    _, completed = decide_complete(stored, claim, result(), now=NOW + 1)
    assert decide_release(completed, claim, reason, None, now=NOW + 2) == (Ended.COMPLETED, None)
    _, released = decide_release(stored, claim, reason, None, now=NOW + 1)
    assert decide_release(released, claim, reason, None, now=NOW + 2) == (Ended.RELEASED, None)


@pytest.mark.parametrize(
    "stored",
    [record(), record(State.COMPLETED), record(State.RELEASED), record(token=token_for("mine"), record_version=9)],
    ids=["claimed", "completed", "released", "newer"],
)
def test_release_is_lost_where_the_claim_is_gone(stored: Record) -> None:
    claim, _ = held()
    assert decide_release(stored, claim, Release.ENDED, None, now=NOW) == (Ended.LOST, None)


# -- renew -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [20.0, LEASE, LEASE + TTL - 1], ids=["leased", "at its end", "lapsed"])
def test_renew_moves_lease_and_expiry(later: float) -> None:
    claim, stored = held()
    now = NOW + later
    renewed = replace(stored, lease_expires_at=now + LEASE, expires_at=now + LEASE + TTL)
    assert decide_renew(stored, claim, now=now) == (Renewal.RENEWED, renewed)


@pytest.mark.parametrize("gone", [None, record(expires_at=NOW)], ids=["vanished", "expired"])
def test_renew_restores_a_claim_that_vanished(gone: Record | None) -> None:
    claim, _ = held(generation=1)
    answer, written = decide_renew(gone, claim, now=NOW + 30)
    assert answer is Renewal.RENEWED
    assert written is not None
    assert (written.token, written.fence, written.attempts) == (claim.token, claim.fence, 1)
    assert (written.lease_expires_at, written.note("M").over) == (NOW + 30 + LEASE, 0)


def test_renew_restores_no_right() -> None:
    decision, _ = ask(record(State.COMPLETED), op(continues=True))
    assert decision.claim is not None
    assert decide_renew(None, decision.claim, now=NOW) == (Renewal.LOST, None)


def test_renew_extends_a_right_and_keeps_the_record_beyond_it() -> None:
    decision, stored = ask(record(State.COMPLETED, expires_at=NOW + 61), op(continues=True))
    assert decision.claim is not None
    assert stored is not None
    answer, written = decide_renew(stored, decision.claim, now=NOW + 50)
    assert answer is Renewal.RENEWED
    assert written is not None
    continuing = written.note("M").continuing
    assert continuing is not None
    assert continuing.lease_expires_at == written.expires_at == NOW + 50 + LEASE


def test_renew_of_a_lapsed_right_nobody_took() -> None:
    decision, stored = ask(record(State.COMPLETED), op(continues=True))
    assert decision.claim is not None
    assert decide_renew(stored, decision.claim, now=NOW + LEASE * 3)[0] is Renewal.RENEWED


@pytest.mark.parametrize(
    "stored",
    [
        record(),
        record(State.COMPLETED),
        record(State.RELEASED),
        record(token=token_for("mine"), record_version=9),
        record(token=token_for("mine"), record_version=9, expires_at=NOW),
    ],
    ids=["claimed", "completed", "released", "newer", "newer and expired"],
)
def test_renew_is_lost_where_another_token_is(stored: Record) -> None:
    claim, _ = held()
    assert decide_renew(stored, claim, now=NOW) == (Renewal.LOST, None)


def test_renew_is_lost_where_another_copy_took_the_right() -> None:
    first, stored = ask(record(State.COMPLETED), op(continues=True))
    _, taken = ask(stored, op(continues=True), now=NOW + LEASE)
    assert first.claim is not None
    assert decide_renew(taken, first.claim, now=NOW + LEASE) == (Renewal.LOST, None)


def test_renew_is_lost_where_another_copy_took_the_completers_right() -> None:
    claim, stored = held(continues=True)
    _, completed = decide_complete(stored, claim, result(), now=NOW)
    assert decide_renew(completed, claim, now=NOW)[0] is Renewal.RENEWED
    granted, taken = ask(completed, op(continues=True), now=NOW + LEASE)
    assert granted.claim is not None
    assert granted.claim.right
    assert decide_renew(taken, claim, now=NOW + LEASE) == (Renewal.LOST, None)
    settled = decide_settle(taken, "M", now=NOW + LEASE)
    assert decide_renew(settled, claim, now=NOW + LEASE) == (Renewal.RENEWED, None)


def test_renew_of_what_this_token_ended_is_no_loss() -> None:
    claim, stored = held()
    _, completed = decide_complete(stored, claim, result(), now=NOW)
    _, released = decide_release(stored, claim, Release.ENDED, None, now=NOW)
    granted, with_right = ask(record(State.COMPLETED), op(continues=True))
    settled = decide_settle(with_right, "M", now=NOW)
    assert granted.claim is not None
    assert decide_renew(completed, claim, now=NOW) == (Renewal.RENEWED, None)
    assert decide_renew(released, claim, now=NOW) == (Renewal.RENEWED, None)
    assert decide_renew(settled, granted.claim, now=NOW) == (Renewal.RENEWED, None)


# -- settle, note_parked, forget ---------------------------------------------------------------------------------------


def test_settle_ends_the_right_for_good() -> None:
    stored = record(State.COMPLETED, Note(over=1, continuing=right()))
    settled = decide_settle(stored, "M", now=NOW)
    assert settled == replace(stored, notes={"M": Note(over=1, settled=True, at=NOW)})
    assert ask(settled, op(generation=2, continues=True))[0].answer is Answer.COMPLETED
    assert ask(settled, op(generation=2, continues=True))[0].claim is None
    assert decide_settle(settled, "M", now=NOW + 1) is None


@pytest.mark.parametrize(
    "stored",
    [None, record(), record(State.RELEASED), record(State.COMPLETED, expires_at=NOW), record(record_version=9)],
    ids=["absent", "claimed", "released", "expired", "newer"],
)
def test_settle_needs_a_completion(stored: Record | None) -> None:
    assert decide_settle(stored, "M", now=NOW) is None


@pytest.mark.parametrize(
    ("before", "noted", "after"),
    [
        (None, (0, 1), (0, 1)),
        ((0, 1), (0, 2), (0, 2)),
        ((0, 2), (0, 1), None),
        ((0, 2), (0, 2), None),
        ((0, 9), (1, 1), (1, 1)),
        ((1, 1), (0, 9), None),
    ],
)
def test_note_parked_keeps_the_highest(
    before: tuple[int, int] | None, noted: tuple[int, int], after: tuple[int, int] | None
) -> None:
    written = decide_parked(record(note=Note(over=0, parked=before)), "M", *noted, now=NOW)
    if after is None:
        assert written is None
    else:
        assert written is not None
        assert written.note("M") == Note(over=0, parked=after, at=NOW)


@pytest.mark.parametrize(
    "stored", [None, record(expires_at=NOW), record(record_version=9)], ids=["absent", "expired", "newer"]
)
def test_note_parked_makes_no_record(stored: Record | None) -> None:
    assert decide_parked(stored, "M", 0, 1, now=NOW) is None


@pytest.mark.parametrize("state", list(State))
def test_forget_leaves_a_tombstone_without_value_or_doubt(state: State) -> None:
    note = Note(over=0, successor=(1, NOW + 5), parked=(0, 3), continuing=right(), settled=True, at=NOW - 7)
    stored = record(state, note, unknown=True, fingerprint=fingerprint("a"), attempts=3)
    forgotten, written = decide_forget(stored, FENCE, now=NOW)
    assert forgotten
    assert written == replace(
        stored,
        state=State.RELEASED,
        token="",
        fingerprint="",
        outcome=None,
        attempts=0,
        unknown=False,
        lease_expires_at=NOW,
        completed_at=None,
        expires_at=NOW + DAY,
        notes={"M": Note(over=0, successor=(1, NOW + 5), parked=(0, 3), at=NOW - 7)},
    )
    assert ask(written, op())[0].answer is Answer.OVER
    fresh, _ = ask(written, op(message="N"))
    assert fresh.answer is Answer.ACQUIRED
    assert fresh.claim is not None
    assert fresh.claim.fence > FENCE


@pytest.mark.parametrize(
    ("stored", "fence"),
    [(None, FENCE), (record(), FENCE - 1), (record(expires_at=NOW), FENCE), (record(record_version=9), FENCE)],
    ids=["absent", "another fence", "expired", "newer"],
)
def test_forget_needs_the_record_it_saw(stored: Record | None, fence: int) -> None:
    assert decide_forget(stored, fence, now=NOW) == (False, None)


def test_forget_keeps_an_announced_retry_announced() -> None:
    _, written = decide_forget(record(State.RELEASED, Note(successor=(1, NOW + 5))), FENCE, now=NOW)
    assert ask(written, op(generation=0))[0].answer is Answer.NOT_DUE
    assert ask(written, op(generation=1))[0].answer is Answer.ACQUIRED


def test_forget_keeps_a_longer_expiry() -> None:
    _, written = decide_forget(record(expires_at=NOW + DAY * 5), FENCE, now=NOW)
    assert written is not None
    assert written.expires_at == NOW + DAY * 5


def test_a_forgotten_holder_has_lost_its_claim() -> None:
    claim, stored = held()
    _, tombstone = decide_forget(stored, claim.fence, now=NOW)
    assert decide_renew(tombstone, claim, now=NOW)[0] is Renewal.LOST
    assert decide_complete(tombstone, claim, result(), now=NOW)[0] is Ended.LOST
    assert decide_release(tombstone, claim, Release.ENDED, None, now=NOW)[0] is Ended.LOST


# -- identity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["0" * 32, "f" * 32], ids=["before", "after"])
def test_another_token_is_another_wherever_it_sorts(other: str) -> None:
    claim, stored = held(continues=True)
    theirs = replace(stored, token=other)
    assert ask(theirs, claim.operation)[0].answer is Answer.HELD
    assert decide_complete(theirs, claim, result(), now=NOW + 1) == (Ended.LOST, None)
    assert decide_release(theirs, claim, Release.ENDED, None, now=NOW + 1) == (Ended.LOST, None)
    assert decide_renew(theirs, claim, now=NOW + 1) == (Renewal.LOST, None)
    _, completed = decide_complete(stored, claim, result(), now=NOW + 1)
    assert completed is not None
    taken = replace(completed, notes={"M": Note(continuing=Right(other, FENCE, "another", NOW + 60))})
    assert ask(taken, claim.operation)[0].answer is Answer.HELD
    assert decide_renew(taken, claim, now=NOW + 1) == (Renewal.LOST, None)


@pytest.mark.parametrize("message", ["A", "Z"], ids=["before", "after"])
@pytest.mark.parametrize("theirs", ["0" * 64, "f" * 64], ids=["before", "after"])
def test_another_fingerprint_is_another_wherever_it_sorts(message: str, theirs: str) -> None:
    stored = record(fingerprint=theirs)
    assert ask(stored, op(message=message, fingerprint=fingerprint("a")))[0].answer is Answer.MISMATCH
    assert ask(stored, op(fingerprint=fingerprint("a")))[0].answer is Answer.HELD
    assert ask(stored, op(message=message, fingerprint=theirs))[0].answer is Answer.HELD


@pytest.mark.parametrize("fence", [FENCE - 1, FENCE + 1])
def test_another_fence_is_another(fence: int) -> None:
    assert ask(record(), op(token="mine"), dead_fence=fence)[0].answer is Answer.HELD
    assert decide_forget(record(), fence, now=NOW) == (False, None)
    completed = record(State.COMPLETED, Note(continuing=right(fence=FENCE + 7)))
    assert ask(completed, op(continues=True), dead_fence=fence + 7)[0].answer is Answer.HELD


def test_a_record_of_an_older_version_is_changed_like_our_own() -> None:
    claim, stored = held(continues=True)
    older = replace(stored, record_version=RECORD_VERSION - 1)
    assert ask(older, op())[0].answer is Answer.HELD
    assert decide_renew(older, claim, now=NOW)[0] is Renewal.RENEWED
    assert decide_release(older, claim, Release.ENDED, None, now=NOW)[0] is Ended.RELEASED
    assert decide_parked(older, "M", 0, 1, now=NOW) is not None
    assert decide_forget(older, older.fence, now=NOW)[0]
    ended, completed = decide_complete(older, claim, result(), now=NOW)
    assert ended is Ended.COMPLETED
    assert decide_settle(completed, "M", now=NOW) is not None


def test_a_first_claim_is_what_a_claim_of_nothing_writes() -> None:
    mine = op(token="mine", generation=2, continues=True, fingerprint=fingerprint("a"))
    assert first_claim(mine, now=NOW, lease=LEASE, ttl=TTL) == ask(None, mine)[1]
