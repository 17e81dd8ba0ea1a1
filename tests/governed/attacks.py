"""Ways to write past the store into the ledger's tables, and workers who know nothing of it.

What only needs the database's password runs while the triggers are there (``action``, ``copied``, ``inserted_…``,
``dead_letter``); the rest is what somebody can do who may take them away for a moment.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from celery_idem.errors import ActionStoreError
from celery_idem.governed import SQLActionStore
from celery_idem.governed.canonical import canonical_json, digest_of
from celery_idem.testing import ManualClock
from tests.governed.ledgers import (
    LEASABLE,
    OWNER,
    Ledger,
    accept,
    dispatch,
    execution_of,
    look,
    unresolved,
    verify,
)

ACTION = "UPDATE celery_idem_action SET {} WHERE action_id = ?"
RECEIPTS = "celery_idem_action_receipt"
EVENTS = "celery_idem_action_event"
Attack = Callable[[Ledger, str], None]


class Workers:
    """Workers who know nothing of any attack, and what they did to the world."""

    def __init__(self, store: SQLActionStore, clock: ManualClock) -> None:
        self.store, self.clock = store, clock
        self.mutated: Counter[str] = Counter()
        self.looks: Counter[str] = Counter()
        self.refusals: defaultdict[str, list[str]] = defaultdict(list)

    def run(self, rounds: int = 5) -> None:
        """Do all there is to do, for ten minutes; any error but a refusal is a fault."""
        for _ in range(rounds):
            self.store.recover_expired_leases()
            self.store.stranded(0.0)
            while action := self.store.lease_next(OWNER, lease_seconds=60, states=LEASABLE):
                self.step(action)
            while action := self.store.lease_dispatched_observation(OWNER, lease_seconds=60):
                self.observe(action["action_id"])
            self.clock.advance(120)

    def step(self, action: Any) -> None:
        action_id, state = action["action_id"], action["state"]
        try:
            if state == "gated":
                dispatch(self.store, action_id)
                self.mutated[action_id] += 1
                accept(self.store, action_id, keep_lease=False)
            elif state == "accepted":
                verify(self.store, action_id, keep_lease=False)
            else:
                self.store.complete(action_id, OWNER, {"ok": True})
        except ActionStoreError as error:
            self.refusals[action_id].append(str(error))
            try:
                self.store.fail_attempt(action_id, OWNER, str(error), retryable=False)
            except ActionStoreError as worse:  # then its lease lapses
                self.refusals[action_id].append(str(worse))

    def observe(self, action_id: str) -> None:
        try:
            _, receipt = look(self.store, action_id)
            if receipt is not None:
                self.looks[action_id] += 1
                unresolved(self.store, action_id, receipt["receipt_key"], 30.0)
        except ActionStoreError as error:
            self.refusals[action_id].append(str(error))


def state_of(ledger: Ledger, action_id: str) -> tuple[str, int]:
    """State and attempts, as the table has them."""
    ((state, attempts),) = ledger.run(
        "SELECT state, attempt_count FROM celery_idem_action WHERE action_id = ?", action_id
    )
    return state, attempts


def honest_comes_through(ledger: Ledger, workers: Workers, honest: str) -> None:
    assert state_of(ledger, honest) == ("completed", 1)
    assert workers.mutated[honest] == 1


# --- ways to write past the store ----------------------------------------------------------------------------------


def action(change: str, *values: Any) -> Attack:
    """Change the action with the password alone."""
    return lambda ledger, action_id: ledger.run(ACTION.format(change), *values, action_id) and None


def forged_action(change: str, *values: Any) -> Attack:
    """Change the action with the triggers away."""
    return lambda ledger, action_id: ledger.forge(ACTION.format(change), *values, action_id)


def receipt(kind: str, change: str, *values: Any) -> Attack:
    """Change the action's receipts of a kind, with the triggers away."""
    statement = f"UPDATE {RECEIPTS} SET {change} WHERE kind = '{kind}' AND action_id = ?"
    return lambda ledger, action_id: ledger.forge(statement, *values, action_id)


def evidence(kind: str, seal: bool = True, key: str = "%", **changed: Any) -> Attack:
    """Change what receipts say, with the triggers away; ``seal`` makes the digest fit again."""

    def attack(ledger: Ledger, action_id: str) -> None:
        found = ledger.run(
            f"SELECT receipt_id, evidence FROM {RECEIPTS} WHERE kind = ? AND action_id = ? AND receipt_key LIKE ?",
            *(kind, action_id, key),
        )
        assert found
        for receipt_id, text in found:
            written = canonical_json({**json.loads(text), **changed})
            ledger.forge(f"UPDATE {RECEIPTS} SET evidence = ? WHERE receipt_id = ?", written, receipt_id)
            if seal:
                ledger.forge(
                    f"UPDATE {RECEIPTS} SET evidence_sha256 = ? WHERE receipt_id = ?", digest_of(written), receipt_id
                )

    return attack


def unreadable(kind: str, text: str) -> Attack:
    """Evidence nobody can read, with a digest that fits, with the triggers away."""
    return receipt(kind, "evidence = ?, evidence_sha256 = ?", text, digest_of(text))


def deleted(table: str, condition: str) -> Attack:
    """Delete something of the action's, with the triggers away."""
    return lambda ledger, action_id: ledger.forge(f"DELETE FROM {table} WHERE {condition} AND action_id = ?", action_id)


def event(change: str, event_type: str) -> Attack:
    """Change the action's events of a type, with the triggers away."""
    statement = f"UPDATE {EVENTS} SET {change} WHERE event_type = '{event_type}' AND action_id = ?"
    return lambda ledger, action_id: ledger.forge(statement, action_id)


def inserted_event(event_type: str, **changed: Any) -> Attack:
    return lambda ledger, action_id: ledger.insert_event(action_id, event_type, **changed)


def copied(kind: str, **changed: Any) -> Attack:
    """Insert a second receipt like the one that is there, under a key of its own."""

    def attack(ledger: Ledger, action_id: str) -> None:
        names = "action_id, receipt_key, kind, status, external_id, evidence, evidence_sha256, observed_at, created_at"
        values = names.replace("receipt_key", "'another'")
        ledger.run(
            f"INSERT INTO {RECEIPTS} ({names}) SELECT {values} FROM {RECEIPTS} WHERE kind = ? AND action_id = ?",
            *(kind, action_id),
        )

    return attack


def contract_inserted(ledger: Ledger, action_id: str, **changed: Any) -> None:
    """A contract written past the store, with whatever in it."""
    digest = execution_of(action_id)
    ((payload_digest,),) = ledger.run("SELECT payload_sha256 FROM celery_idem_action WHERE action_id = ?", action_id)
    said = {
        "schema": "celery_idem.dispatch_recovery.v1",
        "action_id": action_id,
        "action_digest": payload_digest,
        "execution_digest": digest,
        "issued_at": 2e9,
        "observation_deadline": 2e9 + 3600,
        "max_observations": 100,
        **changed,
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    more = {"status": "observation_only", "external_id": digest, "created_at": 2e9}
    ledger.insert_receipt(action_id, f"dispatch-recovery:{digest}", "dispatch_recovery", text, **more)


def look_inserted(number: int, *, told: bool = False, **changed: Any) -> Attack:
    """A look written past the store, with its event where ``told``."""

    def attack(ledger: Ledger, action_id: str) -> None:
        digest = execution_of(action_id)
        ((payload_digest,),) = ledger.run(
            "SELECT payload_sha256 FROM celery_idem_action WHERE action_id = ?", action_id
        )
        ((now,),) = ledger.run("SELECT updated_at FROM celery_idem_action WHERE action_id = ?", action_id)
        said = {
            "schema": "celery_idem.dispatch_observation.v1",
            "action_id": action_id,
            "action_digest": payload_digest,
            "execution_digest": digest,
            "attempt": number,
            "started_at": now,
            **changed,
        }
        text = json.dumps(said, sort_keys=True, separators=(",", ":"))
        more = {"status": "started", "external_id": digest, "created_at": now}
        key = f"dispatch-observation:{digest}:{number:03d}"
        ledger.insert_receipt(action_id, key, "dispatch_observation", text, **more)
        if told:
            ledger.insert_event(action_id, "observing")

    return attack


def dead_letter(ledger: Ledger, action_id: str) -> None:
    """A dead letter nobody of ours wrote."""
    statement = "INSERT INTO celery_idem_action_dead_letter (action_id, reason, created_at) VALUES (?, 'mallory', 1)"
    ledger.run(statement, action_id)


def both(*attacks: Attack) -> Attack:
    def attack(ledger: Ledger, action_id: str) -> None:
        for each in attacks:
            each(ledger, action_id)

    return attack


OTHER = canonical_json({"order": 7, "amount": "9999.00"})
PAYLOAD = forged_action("payload = ?", OTHER)
BOTH = forged_action("payload = ?, payload_sha256 = ?", OTHER, digest_of(OTHER))
DEEP = "[" * 50_000
