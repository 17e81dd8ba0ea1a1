"""What each step of a governed action does, decided from the ledger's row alone: dispatch, observe, verify, complete.

A step is over once the action has durably left the step's source state. Until then it says when to look again, and it
may be begun again at any instruction, by anybody: the row, the lease and the recovery contract hold whatever the
messages do. ``execute`` is called in one place, where ``begin_owner_authorized_dispatch`` has returned; from then on
the endpoint is only looked at.

Not here: messages, retries and claims (``chain``).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from celery_idem.errors import (
    ActionFailed,
    ActionLeaseConflict,
    ActionNotFound,
    ActionStoreError,
    ActionTransitionError,
    AdmissionClosed,
    CeleryIdemError,
    GateRefused,
    PayloadRefused,
    StoreUnavailable,
)
from celery_idem.governed.canonical import same
from celery_idem.governed.endpoint import (
    COMPLETED,
    PENDING,
    REJECTED,
    Answer,
    Endpoint,
    ExecutionRequest,
    execution_request,
    judged,
)
from celery_idem.governed.gate import owner_gate_validator, validate_owner_gate
from celery_idem.governed.records import (
    ACCEPTANCE,
    GATE_RECEIPT_KIND,
    LEASABLE_STATES,
    RECOVERY_RECEIPT_KIND,
    STATE_ACCEPTED,
    STATE_COMPLETED,
    STATE_DISPATCHED,
    STATE_FAILED,
    STATE_GATED,
    STATE_PROPOSED,
    STATE_VERIFIED,
    VERIFICATION,
    Action,
    Receipt,
)
from celery_idem.governed.refusals import epoch, refused

if TYPE_CHECKING:
    from celery_idem.governed.catalog import ActionType, Catalog
    from celery_idem.governed.signing import ApprovalKeys
    from celery_idem.governed.sql.store import SQLActionStore

logger = logging.getLogger("celery_idem")

SHORTEST, LONGEST = 1.0, 60.0
"""Seconds between two looks at an action that is where it was."""
WAITED_FOR = 86_400.0
"""Seconds an accepted action waits for a worker that can look at it, before it ends."""
ACCEPTANCE_SCHEMA = "celery_idem.acceptance.v1"
VERIFICATION_SCHEMA = "celery_idem.verification.v1"

_LIFE = (STATE_PROPOSED, STATE_GATED, STATE_DISPATCHED, STATE_ACCEPTED, STATE_VERIFIED, STATE_COMPLETED)


class Later(Exception):
    """The action is where it was: look again after ``delay`` seconds."""

    def __init__(self, why: str, delay: float = SHORTEST) -> None:
        super().__init__(why)
        self.why = why
        self.delay = min(max(delay, SHORTEST), LONGEST)


class Step(ABC):
    """One try of one step on one action.

    Args:
        owner: of the lease this try takes; nobody else's, ever.
        chain_id: of the chain this try belongs to.
        tries: how many there were before.
    """

    source: ClassVar[str]
    """The state the action leaves by this step."""

    def __init__(
        self,
        ledger: SQLActionStore,
        catalog: Catalog,
        keys: ApprovalKeys | None,
        *,
        lease: float,
        owner: str,
        action_id: str,
        chain_id: str,
        tries: int = 0,
    ) -> None:
        self.ledger, self.catalog, self.keys = ledger, catalog, keys
        self.lease_seconds, self.owner = lease, owner
        self.action_id, self.chain_id, self.tries = action_id, chain_id, tries
        self.endpoint: Endpoint
        self.stale = False
        """Whether another chain was named in place of this one: then there is no second try."""

    def run(self) -> Action:
        """The action, once it has left the source state.

        Raises:
            ActionFailed: it ended without its effect, or nobody knows.
            Later: it has not.
        """
        try:
            action = self._read()
            self.stale = action["chain_id"] != self.chain_id
            if action["state"] == self.source:
                action = self._moved(action)
        except (StoreUnavailable, ActionLeaseConflict, ActionTransitionError) as error:
            raise Later(str(error), self.pause()) from error
        if action["state"] == STATE_FAILED:
            raise self._failed(action["last_error"] or "no reason was given")
        if _LIFE.index(action["state"]) <= _LIFE.index(self.source):
            raise ActionTransitionError(
                f"action {self.action_id} is {action['state']}, and this step begins when it is {self.source}: "
                "approve it, and let its chain run from the start"
            )
        return action

    def _read(self) -> Action:
        try:
            return self.ledger.get_action(self.action_id)
        except ActionNotFound:
            raise
        except ActionStoreError as error:  # its payload was changed in the database: who would lease it, ends it
            self.lease()
            raise self._failed(str(error)) from error

    def _moved(self, action: Action) -> Action:
        self.prepare(action)
        leased = self.lease()
        if leased is None:
            action = self._read()
            if action["state"] == self.source:
                busy = max(action["next_attempt_at"], action["lease_expires_at"] or 0.0) - self.ledger.now()
                raise Later("somebody else has it, or it is not due", busy)
            return action
        try:
            action = self.work(leased)
        except Later as later:
            if self.source in LEASABLE_STATES:
                self.ledger.defer_leased(self.action_id, self.owner, later.why, later.delay)
            raise
        except (ActionLeaseConflict, ActionTransitionError):
            raise
        except ActionStoreError as error:
            action = self._refused(error)
        if action["state"] == self.source:
            raise Later("nothing certain yet", action["next_attempt_at"] - action["updated_at"])
        return action

    def _refused(self, error: ActionStoreError) -> Action:
        """What would be refused again at every try ends; a dispatched action's contract sees to its end."""
        if self._read()["state"] not in LEASABLE_STATES:
            raise Later(str(error), self.pause()) from error
        return self.fail(str(error))

    def prepare(self, action: Action) -> None:  # noqa: B027  most steps find out with the lease in hand
        """Raise ``Later`` where it would be of no use to take the lease."""

    def lease(self) -> Action | None:
        """The action, leased; None where it is not to be had now."""
        return self.ledger.lease_next(
            self.owner, lease_seconds=self.lease_seconds, states=[self.source], action_ids=[self.action_id]
        )

    @abstractmethod
    def work(self, action: Action) -> Action:
        """Move the leased action on, and return it as it is then.

        Raises:
            Later: not now; the lease is given back for work that is safe to do again.
        """

    # --- what several steps do ---------------------------------------------------------------------------------------

    def pause(self) -> float:
        """Seconds until the next try where nothing says when: 1, 2, 4 … 60."""
        return min(SHORTEST * 2.0 ** min(self.tries, 10), LONGEST)

    def kind_of(self, action: Action) -> ActionType:
        """The action's type, with its endpoint made; ``Later`` where this worker has none: it may wait for a deploy."""
        try:
            kind = self.catalog.get(action["action_type"])
            self.endpoint = kind.endpoint
        except Exception as error:
            logger.warning("action %s waits for a worker that can do it: %s", self.action_id, _word(error))
            raise Later(f"a worker cannot do it: {_word(error)}", self.pause()) from error
        return kind

    def request_of(self, kind: ActionType, action: Action, receipts: Sequence[Receipt]) -> ExecutionRequest:
        """The request that was sent, built again from the gate its contract is bound to."""
        contracts = [r["evidence"] for r in receipts if r["kind"] == RECOVERY_RECEIPT_KIND]
        for gate in (r for r in receipts if r["kind"] == GATE_RECEIPT_KIND):
            with suppress(Exception):  # what somebody changed in the database may have any form
                request = execution_request(action, gate, type=kind)
                if any(same(contract["execution_digest"], request.execution_digest) for contract in contracts):
                    return request
        raise ActionTransitionError(
            f"no gate of action {self.action_id} makes the request its contract is for: look who changed the database"
        )

    def seen(self, request: ExecutionRequest) -> Answer:
        """What the endpoint says when it is looked at; ``pending`` where that is no certain word."""
        try:
            return judged(request, self.endpoint.observe(request))
        except Exception as error:  # noqa: BLE001  whatever it is, it says nothing about the mutation
            logger.warning("a look at action %s told nothing: %s", self.action_id, _word(error))
            return request.pending(_word(error))

    def look(self, kind: ActionType, request: ExecutionRequest) -> Action:
        """Journal a look, make it, and record what it found; ``dispatched`` still where that is nothing certain."""
        digest = request.execution_digest
        action, receipt = self.ledger.begin_dispatched_observation(self.action_id, self.owner, digest)
        if receipt is None:
            return action
        answer = self.seen(request)
        if answer.status in {COMPLETED, REJECTED}:
            return self.conclude(request, answer, "observe")
        delay = min(kind.observe_delay * 2.0 ** (receipt["evidence"]["attempt"] - 1), LONGEST)
        return self.ledger.defer_dispatched_observation(
            self.action_id, self.owner, digest, receipt["receipt_key"], _told(answer), delay
        )

    def conclude(self, request: ExecutionRequest, answer: Answer, verb: str) -> Action:
        """Record the endpoint's last word on a dispatched action."""
        if answer.status == REJECTED:
            return self.fail(f"the endpoint {_told(answer)}")
        evidence = {
            "schema": ACCEPTANCE_SCHEMA,
            "execution_digest": request.execution_digest,
            "verb": verb,
            "status": answer.status,
            "result": answer.result,
        }
        action, _ = self.ledger.accept(
            self.action_id, self.owner, ACCEPTANCE, ACCEPTANCE, evidence, result=answer.result, keep_lease=False
        )
        return action

    def fail(self, error: str) -> Action:
        """End the action with a dead letter."""
        return self.ledger.fail_attempt(self.action_id, self.owner, error, retryable=False)

    def _failed(self, reason: str) -> ActionFailed:
        return ActionFailed(
            f"action {self.action_id} has failed: {reason} (nothing was sent again; look at its history and, if it has "
            "one, its dead letter)",
            action_id=self.action_id,
            reason=reason,
        )


class Dispatch(Step):
    """Consume the gate, make the one mutation, and look for it at once where its answer is in doubt."""

    source = STATE_GATED

    def work(self, action: Action) -> Action:
        """See ``Step``."""
        began = time.monotonic()
        try:
            kind = self.kind_of(action)
            request = self._begin(kind, action)
        except Later:
            if self._is_too_late(action):
                return self.fail(str(refused("expired", "no worker could do it before the approval ended")))
            raise
        except AdmissionClosed as closed:
            raise Later(f"admission closed: {closed.reason}", self.pause()) from closed
        except (GateRefused, PayloadRefused) as error:
            return self.fail(str(error))
        if self._was_held(action, request, began):
            logger.warning(
                "action %s was held for too long before it was sent, so it is only looked for", self.action_id
            )
            return self.look(kind, request)
        try:
            answer = judged(request, self.endpoint.execute(request))
        except Exception as error:  # noqa: BLE001  whatever it is, the mutation may have happened
            logger.warning(
                "nobody knows whether action %s happened, so it is looked for: %s", self.action_id, _word(error)
            )
        else:
            if answer.status in {COMPLETED, REJECTED}:
                return self.conclude(request, answer, "execute")
        return self.look(kind, request)

    def _was_held(self, action: Action, request: ExecutionRequest, began: float) -> bool:
        """Whether lease or approval may be over: who wakes so late is taken for dead, and may send nothing any more.

        By the store's clock the lease began at ``updated_at``. A process that was stopped learns of it from its own
        clock, a machine that was suspended, clock and all, from the store's.
        """
        since: float = action["updated_at"]
        passed = 0.0
        with suppress(StoreUnavailable):  # then its own clock has to do
            passed = self.ledger.now() - since
        return max(passed, time.monotonic() - began) >= min(self.lease_seconds, request.expires_at - since)

    def _is_too_late(self, action: Action) -> bool:
        gates = [r["evidence"] for r in self.ledger.list_receipts(self.action_id) if r["kind"] == GATE_RECEIPT_KIND]
        ends = [epoch(gate.get("expires_at_epoch")) for gate in gates if isinstance(gate, Mapping)]
        return any(end is not None and end <= action["updated_at"] for end in ends)

    def _begin(self, kind: ActionType, action: Action) -> ExecutionRequest:
        """The request, once it may be sent: whatever is raised here, it may not."""
        receipts = self.ledger.list_receipts(self.action_id)
        leased_at = action["updated_at"]  # by the store's clock; the judgement that counts is the transaction's
        authorization = validate_owner_gate(action, receipts, now=leased_at, grantable=kind.grantable, keys=self.keys)
        request = execution_request(action, authorization, type=kind)
        self.ledger.begin_owner_authorized_dispatch(
            self.action_id,
            self.owner,
            gate_receipt_key=authorization.receipt_key,
            expected_source=action["source"],
            expected_source_ref=action["source_ref"],
            expected_action_type=kind.name,
            expected_payload=action["payload"],
            expected_approval_id=authorization.approval_id,
            expected_decision_id=authorization.decision_id,
            expected_execution_digest=request.execution_digest,
            observation_window_seconds=kind.observation_window,
            max_observations=kind.max_observations,
            gate_validator=owner_gate_validator(grantable=kind.grantable, keys=self.keys),
        )
        return request


class Observe(Step):
    """Look for the effect of a mutation nobody knows the answer of, within the budget of its contract."""

    source = STATE_DISPATCHED

    def prepare(self, action: Action) -> None:
        """A dispatched action is given back only by a look, so whoever cannot look does not take it."""
        self.kind_of(action)

    def lease(self) -> Action | None:
        """See ``Step``; actions nobody may look for any more end here."""
        return self.ledger.lease_dispatched_observation(
            self.owner, lease_seconds=self.lease_seconds, action_ids=[self.action_id]
        )

    def work(self, action: Action) -> Action:
        """See ``Step``."""
        kind = self.kind_of(action)
        return self.look(kind, self.request_of(kind, action, self.ledger.list_receipts(self.action_id)))


class Verify(Step):
    """Ask the endpoint once more whether it is done: what it accepted it must also show."""

    source = STATE_ACCEPTED

    def work(self, action: Action) -> Action:
        """See ``Step``."""
        receipts = self.ledger.list_receipts(self.action_id)
        acceptance = _written(receipts, ACCEPTANCE, "accepted")
        if acceptance is None:
            return self.fail("verification: there is no receipt of its acceptance")
        try:
            kind = self.kind_of(action)
        except Later as later:
            if action["updated_at"] >= acceptance["created_at"] + WAITED_FOR:
                return self.fail(f"verification: {later.why}")
            raise
        try:
            request = self.request_of(kind, action, receipts)
            answer = self.seen(request)
            if answer.status == COMPLETED:
                return self._verified(request, answer, acceptance)
            why = f"verification: it was accepted, and now the endpoint {_told(answer)}"
        except ActionLeaseConflict:
            raise
        except ActionTransitionError as error:  # a receipt is not what was written
            why = f"verification: {error}"
        if action["updated_at"] >= acceptance["created_at"] + kind.observation_window:
            return self.fail(why)
        raise Later(why, kind.observe_delay * 2.0 ** min(self.tries, 10))

    def _verified(self, request: ExecutionRequest, answer: Answer, acceptance: Receipt) -> Action:
        evidence = {
            "schema": VERIFICATION_SCHEMA,
            "execution_digest": request.execution_digest,
            "acceptance_sha256": acceptance["evidence_sha256"],
            "status": answer.status,
            "result": answer.result,
        }
        verified, _ = self.ledger.verify(
            self.action_id, self.owner, VERIFICATION, evidence, qualifying_receipt_keys=[ACCEPTANCE], keep_lease=False
        )
        return verified


class Complete(Step):
    """End it well, with the result that was accepted."""

    source = STATE_VERIFIED

    def work(self, action: Action) -> Action:
        """See ``Step``; states can be written, so what led here is looked for once more."""
        receipts = self.ledger.list_receipts(self.action_id)
        acceptance = _written(receipts, ACCEPTANCE, "accepted")
        verification = _written(receipts, VERIFICATION, "verified")
        contracts = [r["external_id"] for r in receipts if r["kind"] == RECOVERY_RECEIPT_KIND]
        witnessed = (
            acceptance is not None
            and verification is not None
            and isinstance(verification["evidence"], Mapping)
            and same(verification["evidence"].get("acceptance_sha256"), acceptance["evidence_sha256"])
            and [verification["evidence"].get("execution_digest")] == contracts
        )
        if not witnessed:
            return self.fail(
                "completion: its receipts do not show that it was dispatched, accepted and verified; the mutation may "
                "have happened: look at the endpoint, and who wrote into the ledger"
            )
        return self.ledger.complete(self.action_id, self.owner, action["result"])


def _written(receipts: Sequence[Receipt], key: str, status: str) -> Receipt | None:
    """The receipt that a step writes under this key, if it is there."""
    return next((r for r in receipts if (r["receipt_key"], r["kind"], r["status"]) == (key, key, status)), None)


def _told(answer: Answer) -> str:
    told = "gave no certain answer" if answer.status == PENDING else f"says {answer.status}"
    return told + (f": {answer.reason}" if answer.reason else "")


def _word(error: BaseException) -> str:
    """What may be written down of an error: of a foreign one only its kind, for its text may quote the payload."""
    name = type(error).__name__
    said = f"{name}: {error}" if isinstance(error, CeleryIdemError) else name
    return " ".join(said.split())[:500]
