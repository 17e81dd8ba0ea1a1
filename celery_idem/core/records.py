"""The words the engine and the stores speak: one delivery, one record, and what each verb answers.

Everything here is a frozen value. Times are seconds since 1970 by the *store's* clock; a fence is an integer that
only grows, drawn from that clock in microseconds. Keys, scopes and fingerprints arrive as hashes and stay hashes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from celery_idem.core.codec import Encoded
from celery_idem.core.values import field, frozen, replace

RECORD_VERSION = 1
"""Version of the record layout this release writes; a record of a higher one is never touched."""

DAY = 86_400.0
"""Seconds a tombstone, and a record under ttl 0, stays at least."""

GRACE = 60.0
"""Seconds after a retry is due before a stale copy of its predecessor may take its place."""

NOTES_KEPT = 64
"""Notes of the youngest messages that a record keeps; live ones stay beyond it."""


class State(str, enum.Enum):
    """Where a record stands; RELEASED is a tombstone that remembers what must not run again."""

    CLAIMED = "CLAIMED"
    COMPLETED = "COMPLETED"
    RELEASED = "RELEASED"


class Answer(str, enum.Enum):
    """What ``Store.claim`` says; the first fitting row of the decision table."""

    ACQUIRED = "ACQUIRED"
    RECLAIMED = "RECLAIMED"
    HELD = "HELD"
    COMPLETED = "COMPLETED"
    OVER = "OVER"
    NOT_DUE = "NOT_DUE"
    MISMATCH = "MISMATCH"
    NEWER = "NEWER"


class Ended(str, enum.Enum):
    """What ``complete`` and ``release`` found: done as asked, done earlier by this token, or not ours any more."""

    COMPLETED = "COMPLETED"
    RELEASED = "RELEASED"
    LOST = "LOST"


class Renewal(str, enum.Enum):
    """What became of one lease in a batch; BUSY is a row somebody's transaction holds, which is not a loss."""

    RENEWED = "RENEWED"
    BUSY = "BUSY"
    LOST = "LOST"


class Release(str, enum.Enum):
    """Why a claim is given back without an outcome."""

    RETRY = "RETRY"
    """A successor was published; copies of this generation wait for it."""
    ENDED = "ENDED"
    """The attempt ended and Celery was told; no copy of it may run again."""
    INTERRUPTED = "INTERRUPTED"
    """The body was stopped from outside; its outcome is unknown."""
    YIELDED = "YIELDED"
    """The body gave the message back; nothing is remembered."""


class Kind(str, enum.Enum):
    """What a completed run left behind."""

    RESULT = "RESULT"
    FAILURE = "FAILURE"
    IGNORED = "IGNORED"
    REPLACED = "REPLACED"


@frozen
class Delivery:
    """One copy of one message as it reached a worker."""

    message_id: str
    """Task id; with the task name and replacement depth, which are part of the key, it names the message."""
    generation: int = 0
    """Celery's ``request.retries``; redeliveries of one attempt share it."""
    continues: bool = False
    """The message has a link, errback, chain or chord, so one copy of it must publish them."""
    parked: int = 0
    """How often this copy was parked."""


@frozen
class Operation:
    """What is claimed, for whom and by whom."""

    key: str
    """Effective key: 64 lowercase hex characters."""
    delivery: Delivery
    token: str
    """128 random bits in hex, drawn by the caller for one claim and repeated only to ask for the same answer."""
    holder: str = ""
    """Text identity of the claiming process (``core.holder``)."""
    task: str = ""
    namespace: str = ""
    scope: str = ""
    """Hash of the tenant scope, or empty."""
    fingerprint: str = ""
    """64 hex characters over the covered arguments, or empty where nothing is compared."""


@frozen
class Outcome:
    """How a run ended. ``encoded`` is None where no value was kept."""

    kind: Kind
    encoded: Encoded | None = None


@frozen
class Right:
    """The leased right to publish one message's links, chain and chord part."""

    token: str
    fence: int
    holder: str
    lease_expires_at: float


@frozen
class Note:
    """What a record remembers about one message."""

    over: int = -1
    """Highest generation no copy of which may run again."""
    successor: tuple[int, float] | None = None
    """Generation of the announced retry, and when it is due."""
    parked: tuple[int, int] | None = None
    """Generation, and the highest count of a parked copy known to be published."""
    continuing: Right | None = None
    settled: bool = False
    """The message's continuation was published."""
    at: float = 0.0
    """When this note was last written; the oldest are dropped first."""

    def live(self, now: float) -> bool:
        """Whether dropping this note could lose or double work right now."""
        leased = self.continuing is not None and self.continuing.lease_expires_at > now
        return leased or (self.successor is not None and self.successor[1] + GRACE > now)


@frozen
class Record:
    """One key as the store holds it."""

    key: str
    state: State
    token: str
    fence: int
    message_id: str
    generation: int
    attempts: int
    answer: Answer = Answer.ACQUIRED
    """The answer given to ``token``."""
    unknown: bool = False
    """An attempt began whose outcome nobody knows."""
    task: str = ""
    namespace: str = ""
    scope: str = ""
    fingerprint: str = ""
    holder: str = ""
    claimed_at: float = 0.0
    lease_expires_at: float = 0.0
    completed_at: float | None = None
    expires_at: float = 0.0
    outcome: Outcome | None = None
    notes: Mapping[str, Note] = field(default_factory=dict)
    """Per message id. An answer of ``claim`` may carry only the caller's own note."""
    record_version: int = RECORD_VERSION
    others: bool = field(default=False, compare=False)
    """Other messages may have notes that this copy of the record does not show."""

    def note(self, message_id: str) -> Note:
        """The message's note, or the blank one."""
        return self.notes.get(message_id) or Note()


@frozen
class Claim:
    """Proof of holding a key, or of the right to continue one message (``right``)."""

    operation: Operation
    fence: int
    answer: Answer
    attempts: int
    lease: float
    """Seconds."""
    ttl: float
    """Seconds a completion is kept; 0 remembers no result."""
    unknown: bool = False
    right: bool = False
    seen: Any = field(default=None, compare=False, repr=False)
    """Whatever lets the store end this claim in one step; meaningless to everybody else."""

    @property
    def key(self) -> str:
        """Effective key."""
        return self.operation.key

    @property
    def token(self) -> str:
        """The claiming token."""
        return self.operation.token


@frozen
class Successor:
    """A published retry: its generation, and in how many seconds it is due."""

    generation: int
    delay: float


@frozen
class Decision:
    """One answer of ``claim``."""

    answer: Answer
    claim: Claim | None = None
    """With ACQUIRED and RECLAIMED; with COMPLETED where the right to continue was granted."""
    record: Record | None = None
    """The record as it stands after the decision; None only where the answer needs none."""
    now: float = 0.0
    """The store's clock when it decided."""

    @property
    def held_by(self) -> tuple[int, str, float] | None:
        """Fence, holder and lease end of whoever stands in the way of a HELD answer."""
        record = self.record
        if self.answer is not Answer.HELD or record is None:
            return None
        if record.state is State.CLAIMED:
            return record.fence, record.holder, record.lease_expires_at
        for note in record.notes.values():
            if note.continuing is not None and note.continuing.lease_expires_at > self.now:
                right = note.continuing
                return right.fence, right.holder, right.lease_expires_at
        return None


class Status(str, enum.Enum):
    """How one ``Engine.run`` ended."""

    EXECUTED = "EXECUTED"
    REPLAYED = "REPLAYED"
    MISMATCH = "MISMATCH"
    CONFLICT = "CONFLICT"
    """Held by another, or a retry not due, or superseded, or written by a newer release: see ``decision.answer``."""
    UNPROTECTED = "UNPROTECTED"
    """The store was down and ``fail_open`` let the body run once without protection."""
    LEASE_LOST = "LEASE_LOST"
    """Somebody else took the key; whatever the body did or returned does not count."""
    ENCODE_FAILED = "ENCODE_FAILED"
    """The body ran and is completed, but its value could not be kept; duplicates cannot get it."""


@frozen
class RunResult:
    """What ``Engine.run`` hands back: the status, the value that goes on, and the facts behind it."""

    status: Status
    value: Any = None
    decision: Decision | None = None
    claim: Claim | None = None
    """Still open: the caller ends it with ``Engine.release``, ``Engine.settle`` or ``Engine.abandon``."""
    error: BaseException | None = None
    """What the body raised, or what its first run raised and this one replays."""


@frozen
class Happened:
    """A ``verify`` answer: the effect is there, and this is the value it would have returned."""

    value: Any = None


@frozen
class NotHappened:
    """A ``verify`` answer: the effect is certainly not there, running again is safe."""


__all__ = [
    "DAY",
    "GRACE",
    "NOTES_KEPT",
    "RECORD_VERSION",
    "Answer",
    "Claim",
    "Decision",
    "Delivery",
    "Ended",
    "Happened",
    "Kind",
    "NotHappened",
    "Note",
    "Operation",
    "Outcome",
    "Record",
    "Release",
    "Renewal",
    "Right",
    "RunResult",
    "State",
    "Status",
    "Successor",
    "replace",
]
