"""Where a case works: actions brought to any state by the store's own verbs, and refusals compared with what is stored.

It uses verbs of the contract and the harness, nothing else. Everything stored is read through a second handle, so that
what a store only remembers does not count.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from celery_idem.conformance.case import Breach, Case, adding_to, expect
from celery_idem.conformance.harness import Harness, Tamper
from celery_idem.conformance.threads import together
from celery_idem.errors import ActionStoreError
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.records import Action, GateAuthorization, Receipt
from celery_idem.governed.store import ActionStore

CASES: list[Case] = []
"""In the order their modules were imported."""
case = adding_to(CASES)

ALPHA, BETA = "alpha", "beta"
RECEIPT = (
    "action_id",
    "receipt_key",
    "kind",
    "status",
    "external_id",
    "evidence",
    "evidence_sha256",
    "observed_at",
    "created_at",
)
"""What the contract says of a receipt; a store's own fields beside these are its own."""
LEASE = 60.0
WINDOW = 600.0
LOOKS = 3

LIFE = (
    records.STATE_PROPOSED,
    records.STATE_GATED,
    records.STATE_DISPATCHED,
    records.STATE_ACCEPTED,
    records.STATE_VERIFIED,
    records.STATE_COMPLETED,
)
"""The states of an action that ends well, in order."""
LEASED = LIFE[1:-1]
"""The states in which ``Bench.at`` leaves an action leased."""


def authorize(action: Action, receipts: Sequence[Receipt], now: float) -> GateAuthorization:  # noqa: ARG001
    """Authorize whatever gate comes first, alive or not: with it, only the store itself can refuse."""
    gate = next(receipt for receipt in receipts if receipt["kind"] == records.GATE_RECEIPT_KIND)
    evidence = gate["evidence"]
    return GateAuthorization(
        shape="message_delivery",
        granted=False,
        receipt_key=gate["receipt_key"],
        evidence_sha256=gate["evidence_sha256"],
        approval_id=evidence["approval_id"],
        decision_id=evidence["decision_id"],
        revision=1,
        decided_at=evidence["decided_at_epoch"],
        expires_at=evidence["expires_at_epoch"],
        expired=False,
    )


def told(receipt: Receipt) -> dict[str, Any]:
    """What the contract says of the receipt."""
    return {name: receipt[name] for name in RECEIPT}


class Bench:
    """One case's own corner of the store."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.store, self.clock = harness, harness.store, harness.clock
        self.source = f"conformance.{uuid.uuid4().hex[:16]}"
        self._proposed = 0

    @cached_property
    def other(self) -> ActionStore:
        """A second handle to the same data."""
        return self.harness.reopen()

    @property
    def tamper(self) -> Tamper:
        """The way past the store, for cases that say they need it."""
        if self.harness.tamper is None:
            raise AssertionError("a case that did not say it tampers")
        return self.harness.tamper

    # --- actions in any state ----------------------------------------------------------------------------------------

    def proposed(self) -> str:
        """A new action's id."""
        self._proposed += 1
        action = self.harness.propose(
            idempotency_key=f"{self.source}/{self._proposed}",
            source=self.source,
            source_ref=f"order/{self._proposed}",
            action_type="conformance.refund",
            payload={"order": self._proposed, "amount": "12.50", "lines": [1, 2.5, True, None], "to": "Zoë"},
        )
        return str(action["action_id"])

    def approval(self, action_id: str, **changed: Any) -> dict[str, Any]:
        """The evidence of an approval of this action that holds for an hour."""
        drawn = uuid.uuid4().hex
        return {
            "decision": "approved",
            "authority": "owner",
            "decision_id": f"DEC-{drawn}",
            "approval_id": f"APR-{drawn}",
            "action_id": action_id,
            "action_digest": self.store.get_action(action_id)["payload_sha256"],
            "revision": 1,
            "principal": "owner@example.org",
            "decided_at_epoch": self.clock(),
            "expires_at_epoch": self.clock() + 3600.0,
            "channel": "console",
            "thread_id": "thread-1",
            "event_id": f"EVT-{drawn}",
            "event_key": f"EVT-{drawn}",
            "delivery_id": f"EVT-{drawn}",
            "delivery_message_id": f"EVT-{drawn}",
            "binding_method": "reply",
            **changed,
        }

    def at(self, state: str, *, owner: str = ALPHA, seconds: float = LEASE, **arguments: Any) -> str:
        """The id of a new action in this state, leased to the owner where that state can be leased.

        Args:
            seconds: of its last lease.
            arguments: for ``dispatch``, where it comes by there.
        """
        action_id = self.proposed()
        way = LIFE[1 : LIFE.index(state) + 1] if state in LIFE else (records.STATE_GATED, state)
        for step in way:
            self.advance_to(step, action_id, owner=owner, seconds=seconds, **arguments)
        if state in LEASED:
            self.hold(action_id, owner, seconds=seconds)
        return action_id

    def advance_to(
        self, state: str, action_id: str, *, owner: str = ALPHA, seconds: float = LEASE, **arguments: Any
    ) -> None:
        """Make the one step that leads to this state."""
        if state == records.STATE_GATED:
            self.harness.gate(action_id, self.approval(action_id))
            return
        self.hold(action_id, owner, seconds=seconds)
        if state == records.STATE_DISPATCHED:
            self.dispatch(action_id, owner, **arguments)
        elif state == records.STATE_ACCEPTED:
            self.store.accept(
                action_id, owner, "acceptance", "acceptance", {"status": "completed"}, result={"ok": True}
            )
        elif state == records.STATE_VERIFIED:
            self.store.verify(action_id, owner, "verification", {"seen": True}, qualifying_receipt_keys=["acceptance"])
        elif state == records.STATE_COMPLETED:
            self.store.complete(action_id, owner, {"ok": True})
        else:
            self.store.fail_attempt(action_id, owner, "the conformance suite says so", False)

    def hold(self, action_id: str, owner: str = ALPHA, *, seconds: float = LEASE) -> None:
        """Lease the action to the owner, unless it is."""
        action = self.store.get_action(action_id)
        if action["lease_owner"] == owner and (action["lease_expires_at"] or 0.0) > self.clock():
            return
        leased = self.lease(action_id, owner, seconds=seconds, state=action["state"])
        expect(leased is not None, f"a ready action that is {action['state']} was not leased")

    def lease(
        self,
        action_id: str,
        owner: str = ALPHA,
        *,
        seconds: float = LEASE,
        store: ActionStore | None = None,
        state: str | None = None,
    ) -> Action | None:
        """What the leasing verb for the action's state gives, asked for this action alone."""
        store = store or self.store
        state = state or store.get_action(action_id)["state"]
        scope: Any = {"source": self.source, "action_ids": [action_id]}
        if state == records.STATE_DISPATCHED:
            return store.lease_dispatched_observation(owner, lease_seconds=seconds, **scope)
        return store.lease_next(owner, lease_seconds=seconds, states=[state], **scope)

    def lease_any(self, action_id: str, owner: str = BETA) -> Action | None:
        """What either leasing verb gives, whatever state the action is in."""
        scope: Any = {"source": self.source, "action_ids": [action_id]}
        states = sorted(records.LEASABLE_STATES)
        leased = self.other.lease_next(owner, lease_seconds=LEASE, states=states, **scope)
        return leased or self.other.lease_dispatched_observation(owner, lease_seconds=LEASE, **scope)

    def lapse(self, action_id: str, *, reap: bool = True) -> None:
        """Let the action's lease lapse, and have it reaped."""
        until = self.store.get_action(action_id)["lease_expires_at"]
        self.clock.advance(max(0.0, (until or 0.0) - self.clock()) + 1.0)
        if reap:
            self.store.recover_expired_leases(source=self.source)

    # --- the one mutation --------------------------------------------------------------------------------------------

    def execution(self, action_id: str) -> str:
        """The digest of the request that is about to be sent for this action."""
        return digest_json({"conformance": action_id})

    def arguments(self, action_id: str, **changed: Any) -> dict[str, Any]:
        """What ``begin_owner_authorized_dispatch`` takes to dispatch this action as it is stored now."""
        action = self.store.get_action(action_id)
        gate = next(iter(self.receipts(action_id, records.GATE_RECEIPT_KIND)), None)
        evidence = gate["evidence"] if gate else {}
        return {
            "gate_receipt_key": gate["receipt_key"] if gate else "owner-gate",
            "expected_source": action["source"],
            "expected_source_ref": action["source_ref"],
            "expected_action_type": action["action_type"],
            "expected_payload": action["payload"],
            "expected_approval_id": evidence.get("approval_id", "APR-none"),
            "expected_decision_id": evidence.get("decision_id", "DEC-none"),
            "expected_execution_digest": self.execution(action_id),
            "observation_window_seconds": WINDOW,
            "max_observations": LOOKS,
            "gate_validator": authorize,
            **changed,
        }

    def dispatch(
        self, action_id: str, owner: str = ALPHA, *, store: ActionStore | None = None, **changed: Any
    ) -> Action:
        """Dispatch the action as it is stored now, but for what is changed."""
        arguments = self.arguments(action_id, **changed)
        return (store or self.store).begin_owner_authorized_dispatch(action_id, owner, **arguments)

    def look(self, action_id: str, owner: str = ALPHA, *, store: ActionStore | None = None) -> Receipt | None:
        """Journal one look, and return its receipt."""
        store = store or self.store
        return store.begin_dispatched_observation(action_id, owner, self.execution(action_id))[1]

    def unresolved(self, action_id: str, receipt_key: str, owner: str = ALPHA, *, delay: float = 0.0) -> Action:
        """Say that the look with this receipt found nothing certain."""
        digest = self.execution(action_id)
        return self.store.defer_dispatched_observation(action_id, owner, digest, receipt_key, "nothing yet", delay)

    # --- what is stored ----------------------------------------------------------------------------------------------

    def receipts(self, action_id: str, kind: str | None = None) -> list[Receipt]:
        """The action's receipts, of this kind or all, as far as the contract describes them."""
        return [told(receipt) for receipt in self.other.list_receipts(action_id) if kind in {None, receipt["kind"]}]

    def events(self, action_id: str) -> list[Any]:
        """The action's events, where the store tells them."""
        listed = getattr(self.other, "list_events", None)
        return [dict(event) for event in listed(action_id)] if listed else []

    def dead_letters(self, action_id: str) -> list[Any]:
        """The action's dead letters, where the store tells them."""
        listed = getattr(self.other, "list_dead_letters", None)
        found: list[Any] = []
        after = None
        while listed:
            page = list(listed(limit=500, after=after))
            found += [dict(letter) for letter in page if letter["action_id"] == action_id]
            if len(page) < 500:
                break
            after = page[-1]["action_id"]
        return found

    def stored(self, action_id: str) -> dict[str, str]:
        """Everything that is stored about the action, part by part, to be compared."""
        try:
            action: Any = {f"action.{name}": value for name, value in self.other.get_action(action_id).items()}
        except ActionStoreError as error:
            action = {"action": type(error).__name__}
        parts = {**action, "receipts": self.receipts(action_id)}
        parts |= {"events": self.events(action_id), "dead letters": self.dead_letters(action_id)}
        return {name: json.dumps(value, sort_keys=True, default=repr) for name, value in parts.items()}

    # --- what a case says --------------------------------------------------------------------------------------------

    def unchanged(self, before: Mapping[str, str], action_id: str, what: str) -> None:
        """``Breach`` if anything stored about the action differs from before."""
        after = self.stored(action_id)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        how = "; ".join(f"{name}: {before.get(name)} became {after.get(name)}"[:300] for name in changed)
        expect(not changed, f"{what} changed what is stored: {how}")

    def refused(self, what: str, action_id: str, call: Callable[[], object], *errors: type[BaseException]) -> None:
        """``Breach`` unless the call raises one of these errors (``ActionStoreError``), and nothing is written."""
        self.all_refused(action_id, {what: call}, *errors)

    def all_refused(
        self, action_id: str, calls: Mapping[str, Callable[[], object]], *errors: type[BaseException]
    ) -> None:
        """``Breach`` unless each of the calls, told by what it is, is refused and writes nothing."""
        expected = errors or (ActionStoreError,)
        before = self.stored(action_id)
        for what, call in calls.items():
            try:
                call()
            except expected:
                pass
            except Exception as error:
                names = " or ".join(kind.__name__ for kind in expected)
                raise Breach(f"{what} raised {type(error).__name__} ({error}), not {names}") from error
            else:
                raise Breach(f"{what} was not refused")
            self.unchanged(before, action_id, f"{what} was refused, and yet")

    def ambiguous(self, action_id: str, what: str) -> None:
        """``Breach`` unless the action ended without a verdict: failed, free, and with a dead letter."""
        action = self.other.get_action(action_id)
        expect(action["state"] == records.STATE_FAILED, f"{what}: the action is {action['state']}, not failed")
        expect(action["lease_owner"] is None, f"{what}: the action ended, and is still leased")
        expect(action["attempt_count"] == 1, f"{what}: attempt_count is {action['attempt_count']}, not 1")
        if hasattr(self.other, "list_dead_letters"):
            expect(len(self.dead_letters(action_id)) == 1, f"{what}: there is not one dead letter")
        expect(self.lease_any(action_id) is None, f"{what}: the action was leased again")


def seen_beside(act: Callable[[], object], torn: Callable[[], str]) -> None:
    """``Breach`` if somebody who looks again and again while ``act`` runs, or afterwards, sees something torn."""
    over = threading.Event()

    def acting() -> None:
        try:
            act()
        finally:
            over.set()

    def watching() -> str:
        seen = ""
        while not seen and not over.is_set():
            seen = torn()
        return seen or torn()

    acted, seen = together(acting, watching)
    for answer in (acted, seen):
        expect(not isinstance(answer, Exception), f"with somebody reading beside it, {answer!r} was raised")
    expect(not seen, f"another handle saw {seen}")
