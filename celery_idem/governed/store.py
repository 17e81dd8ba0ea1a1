"""The contract of an action store: eleven invariants, and the verbs that keep them.

A store that has the verbs but breaks an invariant makes a second mutation, honours a dead approval or brings a
consumed one back. Each invariant has its named case in ``celery_idem.conformance.actions``; run that against a store of
your own.

I1   *Identity is immutable.* ``action_id``, ``idempotency_key``, ``source``, ``source_ref``, ``action_type``, payload,
     ``payload_sha256``, ``max_attempts`` and ``created_at`` are what they were when the action was inserted.
     ``get_action`` derives the digest from the stored payload again, and returns no action whose digest differs.
I2   *Receipts are only appended.* The same ``(action_id, receipt_key)`` with the same evidence, kind, status and
     ``external_id`` returns the first receipt; with anything else it is ``ActionIdempotencyConflict``.
I3   *One writer.* Every verb that changes an action checks in its own transaction that the caller holds its live lease;
     if not, it raises ``ActionLeaseConflict`` and writes nothing.
I4   *The gate is judged at the point of use.* ``begin_owner_authorized_dispatch`` calls the validator it is given
     inside the transaction that dispatches, with the durable action, the durable receipts read there, and the store's
     clock. A validator that raises, or returns anything but a live ``GateAuthorization`` of the expected receipt,
     approval and decision, ends the transaction: no state changed, no receipt written.
I5   *Dispatch and recovery contract are one.* The transition ``gated -> dispatched`` and the contract that allows to
     look, and only to look, for the effect of exactly this execution commit together. There is never a second contract.
I6   *One mutation, ever.* ``attempt_count`` goes from 0 to 1 there and never again. A dispatched action is leased by
     ``lease_dispatched_observation`` alone, while a valid contract has budget; without one, its lapsed lease ends it as
     ambiguous. Nothing leads back to ``gated``.
I7   *Observation is bounded.* Attempt N is journalled as a receipt before the look is made. With budget or deadline
     used up, or a journal that is not what this library writes, the action ends as ambiguous.
I8   *Life goes one way.* Only ``ALLOWED_TRANSITIONS``, checked in the transaction; an end is final; every transition
     appends an event.
I9   *Verified means witnessed.* ``verify`` wants every receipt it names to be there already, on the same action.
I10  *Failure is final and evident.* ``fail_attempt`` sets ``failed`` and the error, clears the lease and writes the
     dead letter in one transaction; ``retryable`` is noted and opens nothing again.
I11  *The store's clock judges.* Expiries, leases, deadlines and the validator's ``now`` are the store's clock, read in
     the transaction after the action is held. Times that callers bring are data.

Every refusal is an ``ActionStoreError`` and wrote nothing. ``StoreUnavailable`` is no refusal: it says in
``may_have_landed`` whether the write may be there, and only reading the action again tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from celery_idem.governed.records import Action, GateValidator, Receipt


@runtime_checkable
class ActionStore(Protocol):
    """What a store of governed actions does. ``source`` and ``source_prefix`` exclude each other everywhere."""

    def recover_expired_leases(
        self,
        *,
        source: str | None = None,
        source_prefix: str | None = None,
        action_type: str | None = None,
        action_ids: Sequence[str] | None = None,
    ) -> None:
        """Release lapsed leases, each action in one transaction.

        ``gated``, ``accepted`` and ``verified`` are free again. ``dispatched`` is free for observation only while its
        contract is valid and has budget; else it ends as ambiguous (I6, I7).
        """
        ...

    def lease_next(
        self,
        owner: str,
        *,
        lease_seconds: float,
        states: Sequence[str],
        source: str | None = None,
        source_prefix: str | None = None,
        action_type: str | None = None,
        action_ids: Sequence[str] | None = None,
    ) -> Action | None:
        """Lease one ready action in ``states`` (``gated``, ``accepted``, ``verified``), the longest ready first.

        Ready means that ``next_attempt_at`` has passed and no live lease is on it. None where nothing is.
        """
        ...

    def lease_dispatched_observation(
        self,
        owner: str,
        *,
        lease_seconds: float,
        source: str | None = None,
        source_prefix: str | None = None,
        action_type: str | None = None,
        action_ids: Sequence[str] | None = None,
    ) -> Action | None:
        """Lease one dispatched action for looking only; those that may not be looked at any more end as ambiguous."""
        ...

    def begin_owner_authorized_dispatch(
        self,
        action_id: str,
        owner: str,
        *,
        gate_receipt_key: str,
        expected_source: str,
        expected_source_ref: str | None,
        expected_action_type: str,
        expected_payload: Any,
        expected_approval_id: str,
        expected_decision_id: str,
        expected_execution_digest: str,
        observation_window_seconds: float,
        max_observations: int,
        gate_validator: GateValidator,
    ) -> Action:
        """Consume the one live gate and open the one attempt: whoever gets this back may make the mutation, once.

        Args:
            expected_execution_digest: of the request about to be sent; the contract is bound to it.
            observation_window_seconds: 1 to 3600, from now, by the store's clock.
            max_observations: 1 to 100.

        Raises:
            GateRefused: the row is not what was expected, or the gate does not cover it; ``code`` says why.
        """
        ...

    def begin_dispatched_observation(
        self, action_id: str, owner: str, execution_digest: str
    ) -> tuple[Action, Receipt | None]:
        """Journal one look before it is made; no receipt where the action ended as ambiguous instead (I7)."""
        ...

    def defer_dispatched_observation(
        self,
        action_id: str,
        owner: str,
        execution_digest: str,
        observation_receipt_key: str,
        reason: str,
        delay_seconds: float,
    ) -> Action:
        """Note that a look found nothing certain; release the lease, due again after the delay, or end as ambiguous.

        Args:
            observation_receipt_key: of the last look; an earlier one is refused.
            delay_seconds: 0 to 86,400.
        """
        ...

    def accept(
        self,
        action_id: str,
        owner: str,
        receipt_key: str,
        kind: str,
        evidence: Any,
        *,
        external_id: str | None = None,
        result: Any = None,
    ) -> tuple[Action, Receipt]:
        """Move ``dispatched -> accepted`` with what the endpoint said as a receipt."""
        ...

    def verify(
        self,
        action_id: str,
        owner: str,
        receipt_key: str,
        evidence: Any,
        *,
        qualifying_receipt_keys: Sequence[str],
    ) -> tuple[Action, Receipt]:
        """Move ``accepted -> verified``; every qualifying receipt, at least one, must be on the action (I9)."""
        ...

    def complete(self, action_id: str, owner: str, result: Any) -> Action:
        """Move ``verified -> completed`` with the result; the lease is gone."""
        ...

    def fail_attempt(self, action_id: str, owner: str, error: str, retryable: bool) -> Action:
        """Move to ``failed`` with a dead letter (I10)."""
        ...

    def defer_leased(
        self,
        action_id: str,
        owner: str,
        reason: str,
        delay_seconds: float,
        *,
        event_type: str = "deferred",
    ) -> Action:
        """Release the lease of work that is safe to do again; refused for ``dispatched`` (I6)."""
        ...

    def list_receipts(self, action_id: str) -> Sequence[Receipt]:
        """All receipts of the action, in the order they were written."""
        ...

    def get_action(self, action_id: str) -> Action:
        """The action, its digest checked (I1)."""
        ...
