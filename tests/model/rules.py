"""The verbs of a store on records of small numbers: the real functions of ``core/decide.py``, and each without a rule.

A ``Rec`` is a record without its times: a lease is live or lapsed, a retry due or overdue. ``Verbs`` spells it out as a
real ``Record`` at one fixed moment, asks the real function, and reads what it wrote. Nothing here decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from celery_idem.core import decide
from celery_idem.core.records import (
    GRACE,
    Answer,
    Claim,
    Delivery,
    Ended,
    Kind,
    Note,
    Operation,
    Outcome,
    Record,
    Release,
    Renewal,
    Right,
    State,
    Successor,
)
from tests.model.search import Broken

NOW, LEASE, TTL = 1_000_000.0, 60.0, 1e9
FENCE, RIGHT_FENCE = 10, 20
ABSENT = "-"


class Nt(NamedTuple):
    """A note."""

    over: int = -1
    successor: int = -1
    overdue: bool = False
    parked: tuple[int, int] = (-1, 0)
    right: int = 0
    right_lapsed: bool = False
    settled: bool = False


class Rec(NamedTuple):
    """A record; ``token`` 0 is nobody's, ``result`` the message and generation that completed it."""

    state: str = ABSENT
    token: int = 0
    lapsed: bool = False
    message: int = -1
    generation: int = -1
    unknown: bool = False
    result: tuple[int, int] = (-1, -1)
    notes: tuple[Nt, ...] = ()


Who = tuple[int, int, int]
"""Message, generation and token of a caller."""


@dataclass(frozen=True)
class Rules:
    """The functions a store is made of, and what its callers do in which order."""

    name: str = "as it is"
    claim: Callable[..., Any] = decide.decide_claim
    complete: Callable[..., Any] = decide.decide_complete
    release: Callable[..., Any] = decide.decide_release
    renew: Callable[..., Any] = decide.decide_renew
    settle: Callable[..., Any] = decide.decide_settle
    parked: Callable[..., Any] = decide.decide_parked
    tells_first: bool = True
    """Errbacks, links and chord are told of an attempt that ends without an outcome before its claim is released."""
    surplus: int = 2
    """Counts behind, at which a copy is dropped."""
    per_generation: bool = True
    """The count belongs to a generation."""
    own_notes: bool = True
    """Each message has a note of its own."""


# --- spelling ---------------------------------------------------------------------------------------------------------


def _operation(who: Who) -> Operation:
    message, generation, token = who
    return Operation("k", Delivery(f"m{message}", generation, continues=True), f"t{token}", holder=f"w{token}")


def _claim(who: Who, *, right: bool = False) -> Claim:
    return Claim(_operation(who), RIGHT_FENCE if right else FENCE, Answer.ACQUIRED, 1, LEASE, TTL, right=right)


def _note(note: Nt) -> Note:
    until = NOW - 1 if note.right_lapsed else NOW + LEASE
    due = NOW - GRACE - 1 if note.overdue else NOW + 1
    return Note(
        over=note.over,
        successor=(note.successor, due) if note.successor >= 0 else None,
        parked=note.parked if note.parked[0] >= 0 else None,
        continuing=Right(f"t{note.right}", RIGHT_FENCE, f"w{note.right}", until) if note.right else None,
        settled=note.settled,
        at=NOW,
    )


def spelled(rec: Rec) -> Record | None:
    """The record this one stands for, at the moment ``NOW``."""
    if rec.state == ABSENT:
        return None
    message, generation = rec.result
    return Record(
        key="k",
        state=State(rec.state),
        token=f"t{rec.token}" if rec.token else "",
        fence=FENCE,
        message_id=f"m{rec.message}",
        generation=rec.generation,
        attempts=1,
        unknown=rec.unknown,
        lease_expires_at=NOW - 1 if rec.lapsed else NOW + LEASE,
        expires_at=NOW + TTL,
        outcome=Outcome(Kind.RESULT) if message >= 0 else None,
        namespace=f"{message},{generation}",  # whose result it is: no verb touches it
        notes={f"m{index}": _note(note) for index, note in enumerate(rec.notes) if note != Nt()},
    )


def read(record: Record, notes: int, result: tuple[int, int]) -> Rec:
    """The record without its times."""
    claimed, completed = record.state is State.CLAIMED, record.state is State.COMPLETED
    return Rec(
        state=record.state.value,
        token=int(record.token[1:]) if claimed and record.token else 0,
        lapsed=claimed and record.lease_expires_at <= NOW,
        message=int(record.message_id[1:]),
        generation=record.generation,
        unknown=record.unknown,
        result=result if completed else (-1, -1),
        notes=tuple(_read_note(record.note(f"m{index}")) for index in range(notes)),
    )


def _read_note(note: Note) -> Nt:
    successor, right = note.successor, note.continuing
    return Nt(
        over=note.over,
        successor=successor[0] if successor else -1,
        overdue=successor is not None and successor[1] + GRACE <= NOW,
        parked=note.parked or (-1, 0),
        right=int(right.token[1:]) if right else 0,
        right_lapsed=right is not None and right.lease_expires_at <= NOW,
        settled=note.settled,
    )


# --- verbs ------------------------------------------------------------------------------------------------------------


@dataclass
class Verbs:
    """The store of one world. Every answer is remembered: a record of small numbers comes again and again."""

    rules: Rules
    messages: int
    known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for verb in ("claim", "complete", "release", "renew", "settle", "note_parked"):
            setattr(self, verb, self._remembered(verb, getattr(self, verb)))

    def _remembered(self, verb: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def asked(*args: Any) -> Any:
            key = (verb, args)
            if key not in self.known:
                self.known[key] = ask(*args)
            return self.known[key]

        return asked

    def claim(self, rec: Rec, who: Who) -> tuple[Answer, bool, Rec]:
        """The answer, whether a right came with it, and the record."""
        message, _, token = who
        decision, written = self.rules.claim(spelled(rec), _operation(who), now=NOW, lease=LEASE, ttl=TTL)
        after = self._written(rec, written, message)
        claim, answer = decision.claim, decision.answer
        note = rec.notes[message]
        if answer in (Answer.ACQUIRED, Answer.RECLAIMED):
            if rec.state == "CLAIMED" and not rec.lapsed and rec.token != token:
                raise Broken("a live lease was taken")
            if rec.state != ABSENT and claim.fence <= FENCE:
                raise Broken("a fence did not grow")
        if claim is not None and claim.right and note.right not in (0, token) and not note.right_lapsed:
            raise Broken("a live right to continue was taken")
        return answer, claim is not None and claim.right, after

    def complete(self, rec: Rec, who: Who) -> tuple[Ended, Rec]:
        """Whether the result counts, and the record."""
        message, generation, _ = who
        ended, written = self.rules.complete(spelled(rec), _claim(who), Outcome(Kind.RESULT), now=NOW)
        return ended, self._written(rec, written, message, (message, generation))

    def release(self, rec: Rec, who: Who, reason: Release) -> Rec:
        """The record after the claim was given back."""
        message, generation, _ = who
        successor = Successor(generation + 1, 1.0) if reason is Release.RETRY else None
        _, written = self.rules.release(spelled(rec), _claim(who), reason, successor, now=NOW)
        return self._written(rec, written, message)

    def renew(self, rec: Rec, who: Who, right: bool) -> tuple[Renewal, Rec]:
        """What the heartbeat is told, and the record."""
        renewal, written = self.rules.renew(spelled(rec), _claim(who, right=right), now=NOW)
        return renewal, self._written(rec, written, who[0])

    def settle(self, rec: Rec, message: int) -> Rec:
        """The record after the continuation is out."""
        return self._written(rec, self.rules.settle(spelled(rec), f"m{message}", now=NOW), message)

    def note_parked(self, rec: Rec, message: int, generation: int, count: int) -> Rec:
        """The record after a copy was parked."""
        written = self.rules.parked(spelled(rec), f"m{message}", generation, count, now=NOW)
        return self._written(rec, written, message)

    def _written(self, rec: Rec, written: Record | None, message: int, result: tuple[int, int] | None = None) -> Rec:
        if written is None:
            return rec
        after = read(written, self.messages, rec.result if result is None else result)
        if rec.state == "COMPLETED" and (after.state, after.result) != (rec.state, rec.result):
            raise Broken("a completed result changed")
        if any(was.settled and not now.settled for was, now in zip(rec.notes, after.notes, strict=True)):
            raise Broken("what was settled is not any more")
        if not self.rules.own_notes:  # one note in all: another message's write wipes it
            notes = (note if index == message else Nt() for index, note in enumerate(after.notes))
            after = after._replace(notes=tuple(notes))
        return after


# --- each rule taken out ----------------------------------------------------------------------------------------------


def _steals(record: Record | None, operation: Operation, **when: Any) -> Any:
    return decide.decide_claim(record, operation, **when, dead_fence=None if record is None else record.fence)


def _rights_for_all(record: Record | None, operation: Operation, **when: Any) -> Any:
    return decide.decide_claim(record, operation, **when, dead_fence=RIGHT_FENCE)


def _not_due_for_the_successor_either(record: Record | None, operation: Operation, **when: Any) -> Any:
    if record is None or record.state is not State.RELEASED:
        return decide.decide_claim(record, operation, **when)
    delivery = operation.delivery
    note = record.note(delivery.message_id)
    if note.successor and note.successor[0] == delivery.generation and when["now"] < note.successor[1] + GRACE:
        return decide.Decision(Answer.NOT_DUE, None, record, when["now"]), None
    return decide.decide_claim(record, operation, **when)


def _forgets_doubt(*args: Any, **when: Any) -> Any:
    ended, written = decide.decide_release(*args, **when)
    return ended, written and replace(written, unknown=False)


def _no_retry_announced(record: Any, claim: Claim, reason: Release, successor: Any, **when: Any) -> Any:
    return decide.decide_release(record, claim, reason, None if reason is Release.RETRY else successor, **when)


def _nothing_ends(record: Any, claim: Claim, reason: Release, successor: Any, **when: Any) -> Any:
    return decide.decide_release(record, claim, Release.YIELDED if reason is Release.ENDED else reason, None, **when)


def _anybody_completes(record: Record | None, claim: Claim, outcome: Outcome, **when: Any) -> Any:
    mine = record and replace(record, token=claim.token, state=State.CLAIMED)
    return decide.decide_complete(mine, claim, outcome, **when)


def _unsettled(*_: Any, **__: Any) -> None:
    return None


def _per_message(record: Record | None, message_id: str, generation: int, count: int, **when: Any) -> Any:
    before = record.note(message_id).parked if record else None
    generation = max(generation, before[0]) if before else generation
    return decide.decide_parked(record, message_id, generation, count, **when)


AS_IT_IS = Rules()
REVERTED = (
    Rules("a live lease does not stand in the way", claim=_steals),
    Rules("the right to continue is not leased", claim=_rights_for_all),
    Rules("no NOT_DUE row", release=_no_retry_announced),
    Rules("NOT_DUE for the successor too", claim=_not_due_for_the_successor_either),
    Rules("an ended attempt is not over", release=_nothing_ends),
    Rules("outcome unknown is forgotten at release", release=_forgets_doubt),
    Rules("an old token completes", complete=_anybody_completes),
    Rules("nothing is settled", settle=_unsettled),
    Rules("one note for all messages", own_notes=False),
    Rules("the claim is released before anybody was told", tells_first=False),
    Rules("a copy is dropped one count behind", surplus=1),
    Rules("counts of parked copies belong to the message", parked=_per_message, per_generation=False),
    Rules("no count of parked copies", parked=_unsettled),
)
"""Each of these must be found wanting."""
