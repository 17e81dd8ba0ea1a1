"""An action store written from the contract alone: dictionaries under one lock, and not a line of SQL.

It shows that the suite asks for the contract and not for our own store's ways.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from celery_idem.conformance.harness import Clock, Harness
from celery_idem.errors import (
    ActionIdempotencyConflict,
    ActionLeaseConflict,
    ActionNotFound,
    ActionStoreError,
    ActionTransitionError,
    GateRefused,
)
from celery_idem.governed import records
from celery_idem.governed.canonical import canonical_json, digest_json, digest_of
from celery_idem.governed.records import GateAuthorization


@dataclass
class Life:
    """All there is about one action; the payload is kept as text."""

    action: dict[str, Any]
    payload: str
    receipts: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    letters: list[dict[str, Any]] = field(default_factory=list)


class Shelf:
    """What all handles share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.lives: dict[str, Life] = {}


class PlainStore:
    """One handle."""

    def __init__(self, shelf: Shelf, clock: Callable[[], float]) -> None:
        self.shelf, self.clock = shelf, clock

    @contextmanager
    def held(self, action_id: str, owner: str | None = None, *states: str) -> Iterator[Life]:
        with self.shelf.lock:
            if action_id not in self.shelf.lives:
                raise ActionNotFound(action_id)
            life = deepcopy(self.shelf.lives[action_id])
            if owner is not None:
                a = life.action
                if a["lease_owner"] != owner or a["lease_expires_at"] <= self.clock():
                    raise ActionLeaseConflict(f"{owner} holds no lease")
                if states and a["state"] not in states:
                    raise ActionTransitionError(f"it is {a['state']}")
            yield life
            self.shelf.lives[action_id] = life

    def change(self, life: Life, event_type: str, state: str | None = None, **values: Any) -> None:
        before, now = life.action["state"], self.clock()
        if state is not None:
            if state not in records.ALLOWED_TRANSITIONS[before]:
                raise ActionTransitionError(f"{before} does not become {state}")
            values["state"] = state
            if state in records.TERMINAL_STATES:
                values |= {"terminal_at": now, "lease_owner": None, "lease_expires_at": None}
        life.action.update(values, updated_at=now)
        moved = {"from_state": before, "to_state": life.action["state"]}
        life.events.append({"event_type": event_type, **moved, "created_at": now})

    def write(self, life: Life, key: str, kind: str, status: str, evidence: Any, external_id: str | None) -> Any:
        content = {"kind": kind, "status": status, "evidence": json.loads(canonical_json(evidence))}
        content["external_id"] = external_id
        for there in life.receipts:
            if there["receipt_key"] == key:
                if any(there[name] != value for name, value in content.items()):
                    raise ActionIdempotencyConflict(key)
                return deepcopy(there)
        times = {"observed_at": self.clock(), "created_at": self.clock()}
        named = {"action_id": life.action["action_id"], "receipt_key": key}
        life.receipts.append({**named, **content, **times, "evidence_sha256": digest_json(evidence)})
        return deepcopy(life.receipts[-1])

    def told(self, life: Life) -> dict[str, Any]:
        if digest_of(life.payload) != life.action["payload_sha256"]:
            raise ActionStoreError("the payload was changed")
        return {**deepcopy(life.action), "payload": json.loads(life.payload)}

    # --- ingress -----------------------------------------------------------------------------------------------------

    def propose(self, action_id: str, source: str, source_ref: str | None, action_type: str, payload: Any) -> Any:
        with self.shelf.lock:
            text, now = canonical_json(payload), self.clock()
            given = {"action_id": action_id, "idempotency_key": action_id, "source": source, "source_ref": source_ref}
            counted = {"attempt_count": 0, "max_attempts": 1, "state": records.STATE_PROPOSED}
            times = {"created_at": now, "updated_at": now, "next_attempt_at": now, "terminal_at": None}
            free = {"lease_owner": None, "lease_expires_at": None, "last_error": None, "result": None}
            pinned = {"action_type": action_type, "payload_sha256": digest_of(text)}
            self.shelf.lives[action_id] = Life({**given, **counted, **times, **free, **pinned}, text)
            return self.get_action(action_id)

    def gate(self, action_id: str, evidence: Mapping[str, Any], key: str) -> Any:
        with self.held(action_id) as life:
            count, state = len(life.receipts), life.action["state"]
            receipt = self.write(life, key, records.GATE_RECEIPT_KIND, "passed", evidence, evidence["approval_id"])
            if len(life.receipts) > count:
                if state not in {records.STATE_PROPOSED, records.STATE_GATED}:
                    raise ActionTransitionError(f"it is {state}")
                self.change(life, "gated", records.STATE_GATED if state == records.STATE_PROPOSED else None)
            return receipt

    # --- leases ------------------------------------------------------------------------------------------------------

    def scoped(self, source: str | None, action_ids: Sequence[str] | None) -> list[str]:
        return [
            action_id
            for action_id, life in self.shelf.lives.items()
            if source in {None, life.action["source"]} and (action_ids is None or action_id in action_ids)
        ]

    def recover_expired_leases(self, *, source: Any = None, action_ids: Any = None, **_: Any) -> None:
        with self.shelf.lock:
            for action_id in self.scoped(source, action_ids):
                with self.held(action_id) as life:
                    until = life.action["lease_expires_at"]
                    if until is None or until > self.clock():
                        continue
                    if life.action["state"] != records.STATE_DISPATCHED or self.may_be_looked_for(life):
                        self.change(life, "lease_expired", lease_owner=None, lease_expires_at=None)

    def lease_next(
        self, owner: str, *, lease_seconds: float, states: Any, source: Any = None, action_ids: Any = None, **_: Any
    ) -> Any:
        if not set(states) <= records.LEASABLE_STATES:
            raise ActionStoreError("not to be leased")
        return self.lease(owner, lease_seconds, states, source, action_ids)

    def lease_dispatched_observation(
        self, owner: str, *, lease_seconds: float, source: Any = None, action_ids: Any = None, **_: Any
    ) -> Any:
        return self.lease(owner, lease_seconds, [records.STATE_DISPATCHED], source, action_ids)

    def lease(self, owner: str, seconds: float, states: Any, source: Any, action_ids: Any) -> Any:
        with self.shelf.lock:
            for action_id in self.scoped(source, action_ids):
                with self.held(action_id) as life:
                    a, now = life.action, self.clock()
                    taken = a["lease_expires_at"] is not None and a["lease_expires_at"] > now
                    if a["state"] not in states or taken or a["next_attempt_at"] > now:
                        continue
                    if a["state"] == records.STATE_DISPATCHED and not self.may_be_looked_for(life):
                        continue
                    self.change(life, "leased", lease_owner=owner, lease_expires_at=now + seconds)
                    return self.told(life)
        return None

    def defer_leased(
        self, action_id: str, owner: str, reason: str, delay_seconds: float, *, event_type: str = "deferred"
    ) -> Any:
        with self.held(action_id, owner, *records.LEASABLE_STATES) as life:
            self.release(life, event_type, delay_seconds)
            return self.told(life)

    def release(self, life: Life, event_type: str, delay: float) -> None:
        due = self.clock() + delay
        self.change(life, event_type, lease_owner=None, lease_expires_at=None, next_attempt_at=due)

    # --- the mutation, and looking for it ----------------------------------------------------------------------------

    def begin_owner_authorized_dispatch(
        self,
        action_id: str,
        owner: str,
        *,
        expected_execution_digest: str,
        observation_window_seconds: float,
        max_observations: int,
        gate_validator: Any,
        **expected: Any,
    ) -> Any:
        if not 1 <= observation_window_seconds <= 3600 or not 1 <= max_observations <= 100:
            raise ActionStoreError("out of bounds")
        with self.held(action_id, owner, records.STATE_GATED) as life:
            action = self.told(life)
            self.bindings(life, **expected)
            authorized = gate_validator(action, deepcopy(life.receipts), self.clock())
            if not isinstance(authorized, GateAuthorization) or authorized.expired:
                raise GateRefused("no authorization", code="validator")
            said = (authorized.receipt_key, authorized.approval_id, authorized.decision_id)
            names = ("gate_receipt_key", "expected_approval_id", "expected_decision_id")
            if said != tuple(expected[name] for name in names):
                raise GateRefused("another one was authorized", code="validator")
            contract = {
                "execution": expected_execution_digest,
                "until": self.clock() + observation_window_seconds,
                "looks": max_observations,
            }
            if self.of_kind(life, records.RECOVERY_RECEIPT_KIND):
                raise GateRefused("there is a contract", code="contract_exists")
            self.write(life, "contract", records.RECOVERY_RECEIPT_KIND, "open", contract, None)
            self.change(life, "dispatched", records.STATE_DISPATCHED, attempt_count=1)
            return self.told(life)

    def bindings(
        self,
        life: Life,
        *,
        gate_receipt_key: str,
        expected_source: str,
        expected_source_ref: str | None,
        expected_action_type: str,
        expected_payload: Any,
        expected_approval_id: str,
        expected_decision_id: str,
    ) -> None:
        a, gates = life.action, self.of_kind(life, records.GATE_RECEIPT_KIND)
        expected = (expected_source, expected_source_ref, expected_action_type, canonical_json(expected_payload))
        if (a["source"], a["source_ref"], a["action_type"], life.payload) != expected:
            raise GateRefused("not the action that was expected", code="payload")
        if len(gates) != 1:
            raise GateRefused(f"{len(gates)} gates", code="gate_count")
        (gate,) = gates
        evidence = gate["evidence"]
        found = (gate["receipt_key"], evidence["approval_id"], evidence["decision_id"], evidence["action_id"])
        if found != (gate_receipt_key, expected_approval_id, expected_decision_id, a["action_id"]):
            raise GateRefused("not the gate that was expected", code="gate_key")
        pins = (evidence["action_digest"], gate["evidence_sha256"])
        if pins != (a["payload_sha256"], digest_json(evidence)) or evidence["expires_at_epoch"] <= self.clock():
            raise GateRefused("the gate does not cover this", code="action_digest")

    def of_kind(self, life: Life, kind: str) -> list[dict[str, Any]]:
        return [receipt for receipt in life.receipts if receipt["kind"] == kind]

    def contract(self, life: Life) -> dict[str, Any] | None:
        """The contract, with the looks made under it, where both are what this store wrote."""
        contracts, looks = (
            self.of_kind(life, kind) for kind in (records.RECOVERY_RECEIPT_KIND, records.OBSERVATION_RECEIPT_KIND)
        )
        if len(contracts) != 1 or any(r["evidence_sha256"] != digest_json(r["evidence"]) for r in contracts + looks):
            return None
        written = [{"action": life.action["action_id"], "look": number} for number in range(1, len(looks) + 1)]
        return {**contracts[0]["evidence"], "made": len(looks)} if [r["evidence"] for r in looks] == written else None

    def may_be_looked_for(self, life: Life) -> bool:
        contract = self.contract(life)
        if contract and contract["made"] < contract["looks"] and self.clock() < contract["until"]:
            return True
        self.end(life, "ambiguous", "nobody may look any more")
        return False

    def end(self, life: Life, event_type: str, why: str) -> None:
        self.change(life, event_type, records.STATE_FAILED, last_error=why)
        named = {"action_id": life.action["action_id"], "reason": why}
        life.letters.append({**named, "created_at": self.clock()})

    def begin_dispatched_observation(self, action_id: str, owner: str, execution_digest: str) -> Any:
        with self.held(action_id, owner, records.STATE_DISPATCHED) as life:
            contract = self.contract(life)
            if contract and contract["execution"] != execution_digest:
                raise ActionTransitionError("another execution")
            if not self.may_be_looked_for(life):
                return self.told(life), None
            number = contract["made"] + 1 if contract else 1
            evidence = {"action": action_id, "look": number}
            receipt = self.write(life, f"look-{number}", records.OBSERVATION_RECEIPT_KIND, "started", evidence, None)
            self.change(life, "observing")
            return self.told(life), receipt

    def defer_dispatched_observation(
        self, action_id: str, owner: str, execution_digest: str, observation_receipt_key: str, reason: str, delay: float
    ) -> Any:
        with self.held(action_id, owner, records.STATE_DISPATCHED) as life:
            contract = self.contract(life)
            if contract and contract["execution"] != execution_digest:
                raise ActionTransitionError("another execution")
            looks = self.of_kind(life, records.OBSERVATION_RECEIPT_KIND)
            if not looks or looks[-1]["receipt_key"] != observation_receipt_key:
                raise ActionTransitionError("not the last look")
            if self.may_be_looked_for(life):
                self.release(life, "unresolved", delay)
            return self.told(life)

    # --- after the mutation ------------------------------------------------------------------------------------------

    def accept(
        self,
        action_id: str,
        owner: str,
        receipt_key: str,
        kind: str,
        evidence: Any,
        *,
        external_id: Any = None,
        result: Any = None,
    ) -> Any:
        with self.held(action_id, owner, records.STATE_DISPATCHED) as life:
            if kind in records.RESERVED_RECEIPT_KINDS:
                raise ActionStoreError("reserved")
            receipt = self.write(life, receipt_key, kind, "accepted", evidence, external_id)
            self.change(life, "accepted", records.STATE_ACCEPTED, result=result)
            return self.told(life), receipt

    def verify(
        self, action_id: str, owner: str, receipt_key: str, evidence: Any, *, qualifying_receipt_keys: Sequence[str]
    ) -> Any:
        with self.held(action_id, owner, records.STATE_ACCEPTED) as life:
            there = {receipt["receipt_key"] for receipt in life.receipts}
            if not qualifying_receipt_keys or not there.issuperset(qualifying_receipt_keys):
                raise ActionTransitionError("no witness")
            receipt = self.write(life, receipt_key, "verification", "verified", evidence, None)
            self.change(life, "verified", records.STATE_VERIFIED, lease_owner=None, lease_expires_at=None)
            return self.told(life), receipt

    def complete(self, action_id: str, owner: str, result: Any) -> Any:
        with self.held(action_id, owner, records.STATE_VERIFIED) as life:
            self.change(life, "completed", records.STATE_COMPLETED, result=result)
            return self.told(life)

    def fail_attempt(self, action_id: str, owner: str, error: str, retryable: bool) -> Any:
        with self.held(action_id, owner) as life:
            self.end(life, "failed", error)
            return self.told(life)

    # --- reading -----------------------------------------------------------------------------------------------------

    def get_action(self, action_id: str) -> Any:
        with self.held(action_id) as life:
            return self.told(life)

    def list_receipts(self, action_id: str) -> Any:
        with self.held(action_id) as life:
            return deepcopy(life.receipts)

    def list_events(self, action_id: str) -> Any:
        with self.held(action_id) as life:
            return deepcopy(life.events)

    def list_dead_letters(self, *, limit: int = 100, after: str | None = None) -> Any:
        with self.shelf.lock:
            letters = [letter for life in self.shelf.lives.values() for letter in life.letters]
        begin = next((n + 1 for n, letter in enumerate(letters) if letter["action_id"] == after), 0)
        return deepcopy(letters[begin : begin + limit])


class PlainHarness(Harness):
    """Its own shelf for every case."""

    def __init__(self) -> None:
        self.shelf, self.clock = Shelf(), Clock()
        self.store: Any = self.reopen()
        self.tamper = PlainTamper(self.shelf)

    def propose(
        self, *, idempotency_key: str, source: str, source_ref: str | None, action_type: str, payload: Any
    ) -> Any:
        return self.store.propose(idempotency_key, source, source_ref, action_type, payload)

    def gate(self, action_id: str, evidence: Mapping[str, Any], *, receipt_key: str = "owner-gate") -> Any:
        return self.store.gate(action_id, evidence, receipt_key)

    def reopen(self) -> Any:
        return PlainStore(self.shelf, self.clock)

    def close(self) -> None:
        self.shelf.lives.clear()


class PlainTamper:
    """Reaches into the shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self.lives = shelf.lives

    def change_action(self, action_id: str, **fields: Any) -> None:
        life = self.lives[action_id]
        if "payload" in fields:
            life.payload = canonical_json(fields.pop("payload"))
        life.action.update(fields)

    def change_receipt(self, action_id: str, receipt_key: str, **fields: Any) -> None:
        (receipt,) = [found for found in self.lives[action_id].receipts if found["receipt_key"] == receipt_key]
        receipt.update(deepcopy(fields))

    def add_receipt(self, receipt: Mapping[str, Any]) -> None:
        self.lives[receipt["action_id"]].receipts.append(dict(deepcopy(receipt)))

    def remove_receipt(self, action_id: str, receipt_key: str) -> None:
        receipts = self.lives[action_id].receipts
        receipts[:] = [found for found in receipts if found["receipt_key"] != receipt_key]
