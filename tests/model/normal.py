"""One state for all that differ in names alone: tokens, tags, counts of parked copies, which worker is which."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.model.deliveries import St


def normal(state: St, *, calm: bool) -> St:
    """The state under its own names. Unless all is ``calm``, only whether something was told at all still counts."""
    state = _counts(state)
    workers = [w if not w.heard or w.at in ("body", "held") else w._replace(heard="") for w in state.workers]
    first, second = sorted(workers)
    tags, tokens = {0: 0}, {0: 0}

    def tag(number: int) -> int:
        return tags.setdefault(number, len(tags))

    def token(number: int) -> int:
        return tokens.setdefault(number, len(tokens))

    rec = state.rec
    if rec.token != token(rec.token):
        rec = rec._replace(token=token(rec.token))
    if any(note.right != token(note.right) for note in rec.notes):
        rec = rec._replace(notes=tuple(note._replace(right=token(note.right)) for note in rec.notes))
    first, second = (
        w if (tag(w.tag), token(w.token)) == (w.tag, w.token) else w._replace(tag=tag(w.tag), token=token(w.token))
        for w in (first, second)
    )
    unacked = sorted(state.unacked, key=lambda c: (tags.get(c.tag, 99), c[:3]))
    unacked = [c if c.tag == tag(c.tag) else c._replace(tag=tag(c.tag)) for c in unacked]
    queue = sorted(state.queue, key=lambda c: (c.message, c.generation, tags.get(c.tag, 99), c.parked))
    queue = [c if c.tag == tag(c.tag) else c._replace(tag=tag(c.tag)) for c in queue]
    said, runs = state.said, state.runs
    if not calm:
        said, runs = tuple(min(count, 1) for count in said), (0,) * len(runs)
    return state._replace(
        rec=rec,
        workers=(first, second),
        unacked=tuple(sorted(unacked)),
        queue=tuple(sorted(queue)),
        said=said,
        runs=runs,
    )


def _counts(state: St) -> St:
    """Of the counts of a message's parked copies only the distances matter, and those up to three."""
    for message in range(len(state.rec.notes)):
        if max(counts := _counts_of(state, message), default=0) == 0:
            continue
        names = _shorter(counts)
        if any(count != name for count, name in names.items()):
            state = _renamed(state, message, names)
    return state


def _counts_of(state: St, message: int) -> list[int]:
    copies = [copy.parked for copy in (*state.queue, *state.unacked) if copy.message == message]
    busy = [worker for worker in state.workers if worker.message == message and worker.at != "idle"]
    noted = state.rec.notes[message].parked[1]
    counts = [*copies, *(worker.parked for worker in busy), *(worker.count for worker in busy if worker.count)]
    return [*counts, *([noted] if noted else [])]


def _shorter(counts: list[int]) -> dict[int, int]:
    names, ordered = {0: 0}, sorted({*counts, 0})
    for lower, upper in itertools.pairwise(ordered):
        names[upper] = names[lower] + min(upper - lower, 3)
    if len(ordered) > 1 and 0 not in counts:  # the lowest is one
        beyond = names[ordered[1]] - 1
        names = {count: name - beyond if count else 0 for count, name in names.items()}
    return names


def _renamed(state: St, message: int, names: dict[int, int]) -> St:
    def copies(all_copies: tuple) -> tuple:  # type: ignore[type-arg]
        return tuple(c._replace(parked=names[c.parked]) if c.message == message else c for c in all_copies)

    workers = tuple(
        w._replace(parked=names[w.parked], count=names.get(w.count, 0))
        if w.message == message and w.at != "idle"
        else w
        for w in state.workers
    )
    notes = list(state.rec.notes)
    generation, count = notes[message].parked
    notes[message] = notes[message]._replace(parked=(generation, names.get(count, count)))
    return state._replace(
        rec=state.rec._replace(notes=tuple(notes)),
        workers=workers,  # type: ignore[arg-type]
        queue=copies(state.queue),
        unacked=copies(state.unacked),
    )
