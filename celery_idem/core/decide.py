"""The decision table: what each store verb makes of a record. Pure functions; the store only reads and writes.

``decide_claim`` is the table of docs/reference/decision-table.md row by row; the others are its companions. The
memory and SQL stores call them, ``stores/redis/lua/*.lua`` is their one other spelling, held to them by generated
vectors. Every function takes the record as read (or None) and the store's clock, and returns the answer together
with the record to write, or None where nothing may be written.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    Outcome,
    Record,
    Release,
    Renewal,
    Right,
    State,
    Successor,
)
from celery_idem.core.values import replace

Written = Record | None


def kept(ttl: float) -> float:
    """Seconds a record stays after its lease or completion; ttl 0 still keeps a day."""
    return ttl if ttl > 0 else DAY


def decide_claim(
    record: Record | None,
    operation: Operation,
    *,
    now: float,
    lease: float,
    ttl: float,
    dead_fence: int | None = None,
) -> tuple[Decision, Written]:
    """Answer a claim by the first row of the table that fits.

    Args:
        record: what the store holds under the key, expired or not; None if nothing.
        operation: the caller's delivery and token.
        now: the store's clock in seconds.
        lease: seconds until another worker may reclaim.
        ttl: seconds a completion will be kept; moves the expiry of the claim too.
        dead_fence: fence of a holder the caller proved dead; that one claim or right counts as lapsed.
    """
    delivery = operation.delivery

    def take(answer: Answer, attempts: int, *, unknown: bool) -> tuple[Decision, Written]:
        taken = _claimed(record, operation, answer, attempts, unknown=unknown, now=now, lease=lease, ttl=ttl)
        return Decision(answer, claim_of(taken, operation, lease, ttl), taken, now), taken

    def stand(answer: Answer) -> tuple[Decision, Written]:
        return Decision(answer, None, record, now), None

    if record is not None and record.record_version > RECORD_VERSION:
        return stand(Answer.NEWER)
    if record is None or record.expires_at <= now:
        record = None if record is None else replace(record, notes={})
        return take(Answer.ACQUIRED, 1, unknown=False)

    note = record.note(delivery.message_id)
    right = note.continuing
    if record.state is State.CLAIMED and record.token == operation.token:
        return Decision(record.answer, claim_of(record, operation, lease, ttl), record, now), None
    if record.state is State.COMPLETED and right is not None and right.token == operation.token:
        return Decision(Answer.COMPLETED, _right_of(record, operation, right, lease, ttl), record, now), None
    if delivery.generation <= note.over:
        return stand(Answer.OVER)
    if record.state is not State.RELEASED and _differs(record, operation):
        return stand(Answer.MISMATCH)
    if record.state is State.CLAIMED:
        if record.lease_expires_at > now and dead_fence != record.fence:
            return stand(Answer.HELD)
        return take(Answer.RECLAIMED, record.attempts + 1, unknown=True)
    if record.state is State.RELEASED:
        if note.successor and note.successor[0] > delivery.generation and now < note.successor[1] + GRACE:
            return stand(Answer.NOT_DUE)
        return take(Answer.RECLAIMED if record.unknown else Answer.ACQUIRED, 1, unknown=record.unknown)
    if not delivery.continues or note.settled:
        return stand(Answer.COMPLETED)
    if right is not None and right.lease_expires_at > now and dead_fence != right.fence:
        # Other messages may be continued right now too: the answer names the one who holds this message's right.
        return Decision(Answer.HELD, None, replace(record, notes={delivery.message_id: note}), now), None
    return _grant(record, operation, now=now, lease=lease, ttl=ttl)


def decide_complete(record: Record | None, claim: Claim, outcome: Outcome, *, now: float) -> tuple[Ended, Written]:
    """CLAIMED becomes COMPLETED for the current token only; a repeat by the same token succeeds.

    A record that vanished (a failover lost it) is written anew: nobody else holds the key, and an effect that
    happened must not be forgotten.
    """
    if record is not None and record.record_version > RECORD_VERSION:
        return Ended.LOST, None
    if record is None or record.expires_at <= now:
        record = _restored(claim, now)
    if record.token != claim.token:
        return Ended.LOST, None
    if record.state is State.COMPLETED:
        return Ended.COMPLETED, None
    if record.state is not State.CLAIMED:
        return Ended.LOST, None
    message_id, notes = claim.operation.delivery.message_id, record.notes
    expires_at = now + kept(claim.ttl)
    if claim.operation.delivery.continues:
        right = Right(claim.token, claim.fence, claim.operation.holder, now + claim.lease)
        expires_at = max(expires_at, right.lease_expires_at)
        notes = _noted(notes, message_id, replace(record.note(message_id), continuing=right), now)
    return Ended.COMPLETED, replace(
        record,
        state=State.COMPLETED,
        outcome=outcome,
        attempts=0,
        unknown=False,
        lease_expires_at=now,
        completed_at=now,
        expires_at=expires_at,
        notes=notes,
    )


def decide_release(
    record: Record | None, claim: Claim, reason: Release, successor: Successor | None, *, now: float
) -> tuple[Ended, Written]:
    """CLAIMED becomes RELEASED for the current token only; a token that completed is told so."""
    if record is None or record.token != claim.token or record.record_version > RECORD_VERSION:
        return Ended.LOST, None
    if record.state is State.COMPLETED:
        return Ended.COMPLETED, None
    if record.state is State.RELEASED:
        return Ended.RELEASED, None
    delivery = claim.operation.delivery
    note, notes, stays = record.note(delivery.message_id), record.notes, max(claim.ttl, DAY)
    if reason is Release.RETRY and successor is not None:
        stays = max(stays, successor.delay + GRACE)
        note = replace(note, successor=(successor.generation, now + successor.delay))
        notes = _noted(notes, delivery.message_id, note, now)
    elif reason is Release.ENDED:
        note = replace(note, over=max(note.over, delivery.generation))
        notes = _noted(notes, delivery.message_id, note, now)
    return Ended.RELEASED, replace(
        record,
        state=State.RELEASED,
        attempts=0,
        unknown=record.unknown or reason is Release.INTERRUPTED,
        lease_expires_at=now,
        expires_at=now + stays,
        notes=notes,
    )


def decide_renew(record: Record | None, claim: Claim, *, now: float) -> tuple[Renewal, Written]:
    """Extend a claim or a right to continue; only another token in its place is a loss.

    A lapsed lease nobody took is renewed. A claim that vanished is restored with its token and fence; a right to
    continue never creates a record. A claim this token already ended is left as it is, and is no loss.
    """
    if record is not None and record.record_version > RECORD_VERSION:
        return Renewal.LOST, None
    if record is None or record.expires_at <= now:
        return (Renewal.LOST, None) if claim.right else (Renewal.RENEWED, _restored(claim, now))
    message_id = claim.operation.delivery.message_id
    note = record.note(message_id)
    if note.continuing is not None and note.continuing.token == claim.token:
        right = replace(note.continuing, lease_expires_at=now + claim.lease)
        notes = _noted(record.notes, message_id, replace(note, continuing=right), now)
        expires_at = max(record.expires_at, now + claim.lease)
        return Renewal.RENEWED, replace(record, notes=notes, expires_at=expires_at)
    if record.token != claim.token:
        return (Renewal.RENEWED if note.settled and claim.right else Renewal.LOST), None
    if record.state is not State.CLAIMED:
        taken = record.state is State.COMPLETED and claim.operation.delivery.continues and note.continuing is not None
        return (Renewal.LOST if taken else Renewal.RENEWED), None
    lease_end = now + claim.lease
    return Renewal.RENEWED, replace(record, lease_expires_at=lease_end, expires_at=lease_end + kept(claim.ttl))


def decide_settle(record: Record | None, message_id: str, *, now: float) -> Written:
    """The message's continuation was published: end the right to do it, for good."""
    if record is None or record.expires_at <= now or record.state is not State.COMPLETED:
        return None
    note = record.note(message_id)
    if record.record_version > RECORD_VERSION or note.settled:
        return None
    settled = replace(note, settled=True, continuing=None)
    return replace(record, notes=_noted(record.notes, message_id, settled, now))


def decide_parked(record: Record | None, message_id: str, generation: int, count: int, *, now: float) -> Written:
    """Keep the highest count of a published parked copy; a higher generation starts anew."""
    if record is None or record.expires_at <= now or record.record_version > RECORD_VERSION:
        return None
    note = record.note(message_id)
    if note.parked is not None and note.parked >= (generation, count):
        return None
    parked = replace(note, parked=(generation, count))
    return replace(record, notes=_noted(record.notes, message_id, parked, now))


def decide_forget(record: Record | None, fence: int, *, now: float) -> tuple[bool, Written]:
    """Leave a tombstone without value, token, rights or doubt, if the record still has the fence the caller saw.

    What is over stays over, and an announced retry stays announced: copies of an attempt that failed or was retried
    do not rise again, a new message runs.
    """
    if record is None or record.expires_at <= now or record.fence != fence:
        return False, None
    if record.record_version > RECORD_VERSION:
        return False, None
    notes = {m: Note(over=n.over, successor=n.successor, parked=n.parked, at=n.at) for m, n in record.notes.items()}
    return True, replace(
        record,
        state=State.RELEASED,
        token="",
        answer=Answer.ACQUIRED,
        fingerprint="",
        outcome=None,
        attempts=0,
        unknown=False,
        lease_expires_at=now,
        completed_at=None,
        expires_at=max(now + DAY, record.expires_at),
        notes=notes,
    )


def first_claim(operation: Operation, *, now: float, lease: float, ttl: float) -> Record:
    """What ``decide_claim`` makes of no record, without its answer."""
    return _claimed(None, operation, Answer.ACQUIRED, 1, unknown=False, now=now, lease=lease, ttl=ttl)


def claim_of(record: Record, operation: Operation, lease: float, ttl: float) -> Claim:
    """The claim that a record in state CLAIMED proves for its token."""
    return Claim(operation, record.fence, record.answer, record.attempts, lease, ttl, unknown=record.unknown)


def next_fence(previous: int, now: float) -> int:
    """A fence above every earlier one of its key, also after expiry, purge or lost writes."""
    return max(previous + 1, int(now * 1_000_000))


def _claimed(
    record: Record | None,
    operation: Operation,
    answer: Answer,
    attempts: int,
    *,
    unknown: bool,
    now: float,
    lease: float,
    ttl: float,
) -> Record:
    delivery = operation.delivery
    notes: Mapping[str, Note] = {} if record is None else record.notes
    note = notes.get(delivery.message_id) or Note()
    successor = note.successor if note.successor and note.successor[0] > delivery.generation else None
    over = max(note.over, delivery.generation - 1)
    changed = over != note.over or successor is not note.successor
    noted = replace(note, over=over, successor=successor) if changed else note
    return Record(
        key=operation.key,
        state=State.CLAIMED,
        token=operation.token,
        fence=next_fence(0 if record is None else record.fence, now),
        message_id=delivery.message_id,
        generation=delivery.generation,
        attempts=attempts,
        answer=answer,
        unknown=unknown,
        task=operation.task,
        namespace=operation.namespace,
        scope=operation.scope,
        fingerprint=operation.fingerprint,
        holder=operation.holder,
        claimed_at=now,
        lease_expires_at=now + lease,
        expires_at=now + lease + kept(ttl),
        notes=notes if noted is note else _noted(notes, delivery.message_id, noted, now),
    )


def _restored(claim: Claim, now: float) -> Record:
    taken = _claimed(
        None,
        claim.operation,
        claim.answer,
        claim.attempts,
        unknown=claim.unknown,
        now=now,
        lease=claim.lease,
        ttl=claim.ttl,
    )
    return replace(taken, fence=claim.fence)


def _grant(record: Record, operation: Operation, *, now: float, lease: float, ttl: float) -> tuple[Decision, Written]:
    message_id = operation.delivery.message_id
    note = record.note(message_id)
    previous = max(record.fence, note.continuing.fence if note.continuing else 0)
    right = Right(operation.token, next_fence(previous, now), operation.holder, now + lease)
    notes = _noted(record.notes, message_id, replace(note, continuing=right), now)
    granted = replace(record, notes=notes, expires_at=max(record.expires_at, now + lease))
    return Decision(Answer.COMPLETED, _right_of(granted, operation, right, lease, ttl), granted, now), granted


def _right_of(record: Record, operation: Operation, right: Right, lease: float, ttl: float) -> Claim:
    return Claim(operation, right.fence, Answer.COMPLETED, record.attempts, lease, ttl, right=True)


def _differs(record: Record, operation: Operation) -> bool:
    mine, theirs = operation.fingerprint, record.fingerprint
    return record.message_id != operation.delivery.message_id and bool(mine and theirs) and mine != theirs


def _noted(notes: Mapping[str, Note], message_id: str, note: Note, now: float) -> dict[str, Note]:
    """The notes with this one written, and the oldest dead ones beyond the limit dropped."""
    written = {**notes, message_id: replace(note, at=now)}
    surplus = len(written) - NOTES_KEPT
    if surplus > 0:
        oldest = sorted((n.at, m) for m, n in written.items() if m != message_id and not n.live(now))
        for _, dead in oldest[:surplus]:
            del written[dead]
    return written
