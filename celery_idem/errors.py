"""Every error celery_idem raises, in one tree.

    CeleryIdemError
    ├── ConfigurationError          a setting, argument or schema is wrong; nothing ran
    ├── KeyMissing                  no idempotency key could be derived; nothing was published or run
    ├── ClaimConflict               another message holds the key (``on_conflict="fail"``)
    ├── FingerprintMismatch         the key was used before with other arguments
    ├── DeliveriesExhausted         every delivery died without an outcome
    ├── OutcomeUnknown              an earlier run may have had its effect (``on_unknown="fail"``)
    ├── ResultUnavailable           the first run happened, but its value was not kept
    ├── ReplayImpossible            the first run handed over to another task; this message cannot follow
    ├── ReplayedFailure             stands in for a stored exception whose class cannot be rebuilt
    ├── ParkFailed                  the message could be neither run, parked nor given back
    ├── StoreError
    │   ├── StoreUnavailable        no answer; ``may_have_landed`` says whether the write may exist
    │   └── RecordCorrupt           the stored record cannot be read
    ├── ActionStoreError            the action store refused, and wrote nothing
    │   ├── ActionNotFound          there is no such action or receipt
    │   ├── ActionIdempotencyConflict   a key was used before for other content
    │   ├── ActionLeaseConflict     the caller holds no live lease on the action
    │   └── ActionTransitionError   the action's state, or what it is bound to, does not allow it
    │       ├── GateRefused         the owner's approval does not cover this; ``code`` says which binding
    │       ├── AdmissionClosed     the switch is off; nothing was consumed
    │       └── AlreadyDecided      somebody approved or rejected the action before
    ├── PayloadRefused              the payload does not fit its action type, or is too large or too deep
    └── ActionFailed                the governed action ended without its effect, or nobody knows whether it had one
    LeaseLost (BaseException)       raised in a body whose claim went to somebody else

Each carries its facts as attributes, pickles, and can be rebuilt from its message alone, which is all a JSON
result backend keeps.
"""

from __future__ import annotations


class CeleryIdemError(Exception):
    """Something celery_idem refused or could not do; the message ends with the next step."""

    def __init__(self, message: str = "", **facts: object) -> None:
        super().__init__(message or (type(self).__doc__ or "").split("\n", maxsplit=1)[0])
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args[0], self.facts))


def _rebuild(cls: type[CeleryIdemError], message: str, facts: dict[str, object]) -> CeleryIdemError:
    return cls(message, **facts)


class ConfigurationError(CeleryIdemError):
    """A setting, an argument or the store's schema is wrong."""


class KeyMissing(CeleryIdemError):
    """No idempotency key could be derived for this call: give every key source a value."""


class ClaimConflict(CeleryIdemError):
    """Another message holds this key: wait for it, or use on_conflict="park"."""

    key: str
    answer: str
    held_by: str | None


class FingerprintMismatch(CeleryIdemError):
    """This key was used before with other arguments: use a new key for a new operation."""

    key: str


class DeliveriesExhausted(CeleryIdemError):
    """Every delivery died without an outcome: find out why, then forget the key to run again."""

    key: str
    attempts: int


class OutcomeUnknown(CeleryIdemError):
    """An earlier run may have had its effect: look, then forget the key to run again."""

    key: str


class ResultUnavailable(CeleryIdemError):
    """The first run happened, but its value was not kept: return something the serializer can say."""

    key: str


class ReplayImpossible(CeleryIdemError):
    """The first run handed over to another task: send this message with a key of its own."""

    key: str


class ReplayedFailure(CeleryIdemError):
    """The stored exception, whose class could not be imported or rebuilt here."""

    exc_type: str


class ParkFailed(CeleryIdemError):
    """The message could neither be run now nor published again: check the broker, then send it again."""


class StoreError(CeleryIdemError):
    """The store did not do its part."""


class StoreUnavailable(StoreError):
    """The store gave no answer: check that it runs and that idempotency_store names it."""

    may_have_landed: bool = False


class RecordCorrupt(StoreError):
    """The stored record cannot be read: look at it, then forget the key."""


class ActionStoreError(CeleryIdemError):
    """The action store refused, and wrote nothing."""


class ActionNotFound(ActionStoreError):
    """There is no such action or receipt: check the id, and that governed_store names the right database."""


class ActionIdempotencyConflict(ActionStoreError):
    """An idempotency or receipt key was used before for other content: use a new key for new content."""


class ActionLeaseConflict(ActionStoreError):
    """The caller holds no live lease on this action: lease it again, and look at its state first."""


class ActionTransitionError(ActionStoreError):
    """The action's state, or what it is bound to, does not allow this: read the action again."""


class GateRefused(ActionTransitionError):
    """The owner's approval does not cover this action: propose it again and have it approved."""

    code: str


class AdmissionClosed(ActionTransitionError):
    """Admission is closed, so no approval is consumed: open it with ``governed admission open``."""

    reason: str


class AlreadyDecided(ActionTransitionError):
    """Somebody approved or rejected this action before."""

    decision: str
    by: str
    at: float


class PayloadRefused(CeleryIdemError):
    """The payload does not fit its action type, or is too large or too deep; nothing was proposed."""


class ActionFailed(CeleryIdemError):
    """The governed action ended without its effect, or nobody knows whether it had one: read its dead letter."""

    action_id: str
    reason: str


class LeaseLost(BaseException):
    """Another worker holds this task's key now: stop, nothing this run does counts any more.

    A BaseException, so that neither ``except Exception`` nor ``autoretry_for`` takes it for the task's own error.
    """
