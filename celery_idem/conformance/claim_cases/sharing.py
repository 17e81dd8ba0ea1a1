"""S7 to S9: children forked in use, many threads on one key, and the release before or after this one."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery_idem.conformance.case import Breach, expect, expect_is
from celery_idem.conformance.claim_cases.bench import Bench, case, outcome
from celery_idem.conformance.claim_cases.trouble import AT_ONCE, within
from celery_idem.conformance.threads import PATIENCE, together
from celery_idem.core.codec import Encoded
from celery_idem.core.records import Answer, Decision, Ended, Kind, Operation, Outcome, Release, Renewal, Successor
from celery_idem.stores.base import Store

CLAIMANTS = 12
ROUNDS = 6
FORK_PATIENCE = 10.0
"""Real seconds a forked child may take."""
LARGE = 262_144
"""Bytes of the largest value that is kept unless a setting says otherwise: ``result_max_bytes``."""
WHOLE = "ACQUIRED COMPLETED COMPLETED"
"""What a run of its own says of a key that nobody used."""


def whole_run(bench: Bench, store: Store, operation: Operation) -> str:
    """Claim, complete and be answered, in words."""
    decision = bench.ask(operation, store=store)
    if decision.claim is None:
        return decision.answer.value
    ended = store.complete(decision.claim, outcome())
    return f"{decision.answer.value} {ended.value} {bench.answer(operation, store=store).value}"


def in_child(act: Callable[[], str]) -> str:
    """What the act said in a child forked here, or how it failed; empty where nothing came in time."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads is the point
        pid = os.fork()
    if pid == 0:
        try:
            said = act()
        except BaseException:  # noqa: BLE001  the parent tells it
            said = traceback.format_exc()
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    timer = threading.Timer(FORK_PATIENCE, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    timer.cancel()
    os.waitpid(pid, 0)
    return said


def whole(said: str, where: str, hint: str = "") -> None:
    """``Breach`` unless a child said that its claim, completion and claim went as they should."""
    hangs = "it hangs on a lock or on library state that it inherited (SQLite's own mutexes are such)"
    expect(said, f"{where}, the child answered nothing within {FORK_PATIENCE:g} s: {hangs}{hint}")
    expect_is(said, WHOLE, f"{where}, claim, complete and claim were answered {said}{hint}")


# --- S7 ---------------------------------------------------------------------------------------------------------------


@case("S7")
def a_forked_child_uses_the_store(bench: Bench) -> None:
    """A store that only works in the process which opened it."""
    bench.complete(bench.op("warm"))
    said = in_child(lambda: whole_run(bench, bench.store, bench.op()))
    whole(said, "in a forked child")


@case("S7", "shared")
def what_a_child_did_is_seen_by_its_parent(bench: Bench) -> None:
    """A store that gives a forked child a copy of its own."""
    bench.complete(bench.op("warm"))
    in_child(lambda: whole_run(bench, bench.store, bench.op()))
    bench.answers(Answer.COMPLETED, bench.op(message="N"), "of a key that a forked child completed")


@case("S7")
def the_parent_goes_on_after_a_fork(bench: Bench) -> None:
    """A store whose child closes, or speaks on, the connection of its parent."""
    for number in range(3):
        bench.complete(bench.op(f"before {number}"))
        in_child(lambda number=number: whole_run(bench, bench.store, bench.op(f"child {number}")))  # type: ignore[misc]
        try:
            said = whole_run(bench, bench.store, bench.op(f"parent {number}"))
        except Exception as error:
            raise Breach(f"after a fork, the parent's own claim raised {error!r}") from error
        expect_is(said, WHOLE, f"after a fork, the parent's claim, complete and claim were answered {said}")


@case("S7")
def a_child_forked_in_the_middle_of_a_verb_is_not_stuck(bench: Bench) -> None:
    """A store whose lock, or connection, a child inherits in use."""
    bench.complete(bench.op("busy"))
    stop = threading.Event()

    def busy() -> None:
        with suppress(Exception):  # what it does to the child is the question
            while not stop.is_set():
                bench.store.get(bench.key("busy"))

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            act = partial(whole_run, bench, bench.store, bench.op(f"child {number}"))
            said = in_child(act)
            whole(said, "in a child forked while the store was in use", "; by chance, so another run may pass")
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)


# --- S8 ---------------------------------------------------------------------------------------------------------------


def decisions_of(answers: Sequence[Any]) -> list[Decision]:
    """The answers; ``Breach`` where a claim raised."""
    for answer in answers:
        expect(isinstance(answer, Decision), f"one of many claims at once raised {answer!r}")
    return list(answers)


def race(bench: Bench, name: str, *, dead: int | None = None, continues: bool = False) -> Counter[str]:
    """What many claims of this key at one instant were answered, half of them through another handle."""
    calls = []
    for number in range(CLAIMANTS):
        operation = bench.op(name, "M" if continues else f"m{number}", continues=continues)
        calls.append(partial(bench.ask, operation, store=bench.other if number % 2 else bench.store, dead=dead))
    return Counter(decision.answer.value for decision in decisions_of(together(*calls)))


def one_winner(seen: Counter[str], won: Answer, what: str) -> None:
    """``Breach`` unless one had this answer, and all the others HELD."""
    wanted = {won.value: 1, Answer.HELD.value: CLAIMANTS - 1}
    expect_is(seen, wanted, f"{CLAIMANTS} claims of {what} at once were answered {dict(seen)}")


@case("S8")
def one_of_many_claimants_gets_the_key(bench: Bench) -> None:
    """A store that looks whether a key is free, and then takes it."""
    for number in range(ROUNDS):
        one_winner(race(bench, f"k{number}"), Answer.ACQUIRED, "a new key")


@case("S8")
def one_of_many_reclaims_from_the_dead(bench: Bench) -> None:
    """A store in which two who saw the same death both take over."""
    for number in range(ROUNDS):
        dead = bench.take(bench.op(f"k{number}"))
        one_winner(race(bench, f"k{number}", dead=dead.fence), Answer.RECLAIMED, "a dead holder's key")
        attempts = bench.stored(f"k{number}").attempts
        expect_is(attempts, 2, f"taken over once, the record counts {attempts} attempts")


@case("S8")
def one_of_many_continues_a_message(bench: Bench) -> None:
    """A store that reads who may continue, and then writes that the caller does."""
    for number in range(ROUNDS):
        dead = bench.complete(bench.op(f"k{number}", continues=True))
        seen = race(bench, f"k{number}", dead=dead.fence, continues=True)
        one_winner(seen, Answer.COMPLETED, "a dead completer's right")


@case("S8")
def one_token_many_times_at_once_is_one_claim(bench: Bench) -> None:
    """A store in which a client that repeats itself is held up by itself."""
    mine = bench.op()
    decisions = decisions_of(together(*[partial(bench.ask, mine) for _ in range(CLAIMANTS)]))
    claims = {decision.claim.fence if decision.claim else None for decision in decisions}
    expect(len(claims) == 1 and None not in claims, f"one token asking at once has the fences {claims}, not one")
    expect_is(bench.stored().attempts, 1, f"one token asking at once made {bench.stored().attempts} attempts")


@case("S8")
def a_renewal_and_a_thief_do_not_both_win(bench: Bench) -> None:
    """A store that renews a lease which somebody takes at the same instant."""
    for number in range(ROUNDS):
        claim = bench.take(bench.op(f"k{number}"))
        thief = bench.op(f"k{number}", "N")
        calls = (partial(bench.store.renew, [claim]), partial(bench.ask, thief, store=bench.other, dead=claim.fence))
        renewal, decision = together(*calls)
        decisions_of([decision])
        expect(not isinstance(renewal, Exception), f"a renewal beside a thief raised {renewal!r}")
        owner = bench.stored(f"k{number}").token
        held = bench.store.renew([claim])[claim.token]
        stolen = decision.answer is Answer.RECLAIMED
        expect(owner == (thief.token if stolen else claim.token), "the record is neither's who was told to have it")
        wanted = Renewal.LOST if stolen else Renewal.RENEWED
        expect_is(held, wanted, f"the thief was answered {decision.answer.value}, the holder {held.value}")


@case("S8")
def a_completion_and_a_thief_do_not_both_win(bench: Bench) -> None:
    """A store in which a key is both completed and taken."""
    for number in range(ROUNDS):
        claim = bench.take(bench.op(f"k{number}"))
        thief = bench.op(f"k{number}", "N")
        done = partial(bench.store.complete, claim, outcome())
        ended, decision = together(done, partial(bench.ask, thief, store=bench.other, dead=claim.fence))
        decisions_of([decision])
        stolen = decision.answer is Answer.RECLAIMED
        told = f"the holder was answered {ended}, the thief {decision.answer.value}"
        expect_is(ended, Ended.LOST if stolen else Ended.COMPLETED, told)
        owner = bench.stored(f"k{number}").token
        expect(owner == (thief.token if stolen else claim.token), f"{told}, and the record is not the winner's")


@case("S8")
def what_many_note_at_once_is_all_there(bench: Bench) -> None:
    """A store that writes back a record which somebody changed since it was read."""
    claim = bench.take(bench.op(continues=True))
    calls: list[Callable[[], Any]] = []
    for number in range(CLAIMANTS):
        store = bench.other if number % 2 else bench.store
        calls.append(partial(store.note_parked, claim.key, f"m{number}", 0, number + 1))
    calls += [partial(bench.store.renew, [claim]), partial(bench.other.complete, claim, outcome())]
    raised = [answer for answer in together(*calls) if isinstance(answer, Exception)]
    expect(not raised, f"of many verbs on one record at once, some raised {raised}")
    record = bench.stored()
    parked = {message: note.parked for message, note in record.notes.items() if message != "M"}
    wanted = {f"m{number}": (0, number + 1) for number in range(CLAIMANTS)}
    expect_is(parked, wanted, f"{len(wanted)} parks were noted at once, kept are {parked}")
    expect_is(record.outcome, outcome(), f"completed at the same time, the record has the outcome {record.outcome}")


@case("S8")
def many_threads_run_keys_of_their_own(bench: Bench) -> None:
    """A store whose handle mixes up the answers of two threads."""
    calls = [partial(whole_run, bench, bench.store, bench.op(f"k{number}")) for number in range(CLAIMANTS)]
    wrong = [answer for answer in together(*calls) if answer != WHOLE]
    expect(not wrong, f"on keys of their own, threads were answered {wrong}, not {WHOLE}")
    operations = [bench.op(f"another {number}") for number in range(CLAIMANTS)]
    decisions = decisions_of(together(*[partial(bench.ask, operation) for operation in operations]))
    given = [decision.claim and decision.claim.operation for decision in decisions]
    mixed = [seen for seen, mine in zip(given, operations, strict=True) if seen != mine]
    expect(not mixed, f"of {CLAIMANTS} threads on keys of their own, {len(mixed)} were given a claim of another's")


@case("S8", "locked")
def one_locked_record_delays_no_other(bench: Bench) -> None:
    """A store that renews, lists or purges behind a lock."""
    claims = [bench.take(bench.op(f"k{number}")) for number in range(8)]
    locked = claims[3]
    with bench.hook("locked")(locked.key):
        with within(AT_ONCE, "a renewal beside a locked record"):
            answers = bench.store.renew(claims)
        wrong = [answers[c.token].value for c in claims if c is not locked and answers[c.token] is not Renewal.RENEWED]
        expect(not wrong, f"beside one locked record, leases were answered {wrong}, not RENEWED")
        with within(AT_ONCE, "claim, complete, find and purge beside a locked record"):
            said = whole_run(bench, bench.store, bench.op("fresh"))
            found = len(list(bench.store.find(task=locked.operation.task)))
            bench.store.purge(10)
    expect_is(said, WHOLE, f"beside a locked record, claim, complete and claim were answered {said}")
    expect(found == len(claims) + 1, f"beside a locked record, find told {found} of {len(claims) + 1}")


# --- S9 ---------------------------------------------------------------------------------------------------------------


@case("S9")
def two_handles_take_turns_on_one_key(bench: Bench) -> None:
    """A store whose handle believes what it remembers of a record."""
    for turn in range(4):
        mine, theirs = (bench.store, bench.other) if turn % 2 else (bench.other, bench.store)
        decision = bench.ask(bench.op(message=f"m{turn}"), store=mine)
        if decision.claim is None:
            raise Breach(f"a free key was answered {decision.answer.value}")
        seen = bench.answer(bench.op(message="x"), store=theirs)
        expect_is(seen, Answer.HELD, f"the other handle was answered {seen.value} of a held key")
        mine.release(decision.claim, Release.RETRY, successor=Successor(1, 50))
        seen = bench.answer(bench.op(message=f"m{turn}"), store=theirs)
        expect_is(seen, Answer.NOT_DUE, f"the other handle was answered {seen.value} of an announced retry")
        expect(mine.get(bench.key()) == theirs.get(bench.key()), "two handles tell one record differently")


@case("S9")
def what_one_handle_completed_another_replays(bench: Bench) -> None:
    """A store that changes a byte of what it keeps."""
    values = [
        Outcome(Kind.FAILURE, Encoded(bytes(range(256)), "application/x-python-serialize", "binary", "f" * 64)),
        Outcome(Kind.RESULT, Encoded(b"", "application/json", "utf-8", "0" * 64)),
        Outcome(Kind.RESULT, Encoded(b"0e1", "text/plain", "utf-8", "0" * 64)),
        *(Outcome(kind) for kind in Kind),
    ]
    for number, value in enumerate(values):
        bench.complete(bench.op(f"k{number}"), value)
        record = bench.ask(bench.op(f"k{number}"), store=bench.other).record
        got = record.outcome if record else None
        expect(got == value, f"completed with {value}, another handle was told {got}")


@case("S9")
def a_large_value_comes_back_whole(bench: Bench) -> None:
    """A store whose column holds less than ``result_max_bytes`` lets through, and cuts the rest off."""
    body = b"0123456789abcdef" * (LARGE // 16)
    bench.complete(value=outcome(body))
    record = bench.ask(bench.op(), store=bench.other).record
    encoded = record.outcome.encoded if record and record.outcome else None
    kept = encoded.body if encoded else b""
    expect(len(kept) == LARGE, f"completed with a value of {LARGE} bytes, another handle was told {len(kept)} of them")
    expect(kept == body, f"completed with a value of {LARGE} bytes, another handle was told as many, but not the same")


@case("S9", "annotate")
def what_the_next_release_notes_does_not_stop_this_one(bench: Bench) -> None:
    """A store that cannot read a note with a field it does not know."""
    claim = bench.take(bench.op(generation=1))
    bench.store.note_parked(claim.key, "M", 1, 2)
    bench.hook("annotate")(claim.key, "M")
    note = bench.stored().note("M")
    expect_is((note.over, note.parked), (0, (1, 2)), f"with a new field, the note is read as {note}", of="over, parked")
    bench.answers(Answer.HELD, bench.op(generation=1), "of a record with a new field in a note")
    bench.store.note_parked(claim.key, "M", 1, 3)
    ended = bench.store.complete(claim, outcome())
    expect_is(ended, Ended.COMPLETED, f"the completion of such a record was answered {ended.value}")
    parked = bench.stored().note("M").parked
    expect_is(parked, (1, 3), f"the note says {parked} after (1, 3) was noted")
