"""I1 and I2 broken: what an action is, and what was received for it, does not stay what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from celery_idem.conformance.sql import without_triggers
from celery_idem.errors import ActionIdempotencyConflict
from celery_idem.governed import records
from celery_idem.governed.canonical import canonical_json, digest_json
from celery_idem.governed.sql import schema, transaction
from celery_idem.governed.sql.store import SQLActionStore
from celery_idem.governed.sql.transaction import Transaction
from tests.conformance.broken_base import BrokenStore, caught_by

# --- I1 ---------------------------------------------------------------------------------------------------------------


@caught_by("I1.a_changed_payload_is_never_returned", "I1.a_changed_digest_is_never_returned")
class BelievesTheDigest(BrokenStore):
    """Reads what is there."""

    patches = ((transaction, "intact", lambda _row: True),)


@caught_by("I1.identity_survives_the_whole_life")
class NotesTheEndpointInTheSource(BrokenStore):
    """Acceptance tells where the action went, in a column that was free."""

    def accept(self, action_id: str, *args: Any, **kwargs: Any) -> Any:
        answer = super().accept(action_id, *args, **kwargs)
        self.past.change_action(action_id, source_ref="endpoint-7")
        return answer


@caught_by("I1.identity_survives_deferral_observation_and_failure")
class BornAgainWhenDeferred(BrokenStore):
    """A deferred look begins the action's time anew."""

    def defer_dispatched_observation(self, action_id: str, *args: Any, **kwargs: Any) -> Any:
        action = super().defer_dispatched_observation(action_id, *args, **kwargs)
        self.past.change_action(action_id, created_at=action["updated_at"] + 1.0)
        return action


@caught_by("I1.payload_and_digest_are_what_was_proposed")
class EverythingIsText(BrokenStore):
    """Keeps whole numbers at the top of a payload as text."""

    def propose(self, idempotency_key: str, source: str, action_type: str, payload: Any, **kwargs: Any) -> Any:
        if isinstance(payload, dict):
            payload = {name: str(value) if type(value) is int else value for name, value in payload.items()}
        return super().propose(idempotency_key, source, action_type, payload, **kwargs)


@caught_by("I1.what_was_handed_out_is_a_copy")
class HandsOutItsOwnPayload(BrokenStore):
    """Reads a payload once, and hands out that one object."""

    payloads: ClassVar[dict[str, Any]] = {}

    def get_action(self, action_id: str) -> records.Action:
        action = super().get_action(action_id)
        payload = action["payload"]
        return {**action, "payload": self.payloads.setdefault(action["payload_sha256"] + action_id, payload)}


# --- I2 ---------------------------------------------------------------------------------------------------------------

add_receipt = Transaction.add_receipt


def overwriting(
    tx: Transaction,
    action_id: str,
    receipt_key: str,
    kind: str,
    status: str,
    evidence: Any,
    external_id: str | None,
    observed_at: float | None = None,
) -> Any:
    try:
        return add_receipt(tx, action_id, receipt_key, kind, status, evidence, external_id, observed_at)
    except ActionIdempotencyConflict:
        c = schema.receipt.c
        change = {"kind": kind, "status": status, "evidence": canonical_json(evidence), "external_id": external_id}
        change["evidence_sha256"] = digest_json(evidence)
        where = (c.action_id == action_id, c.receipt_key == receipt_key)
        restore = without_triggers(tx, schema.receipt.name)
        tx.run(schema.receipt.update().where(*where).values(**change))
        for command in restore:
            tx.connection.exec_driver_sql(command)
        return add_receipt(tx, action_id, receipt_key, kind, status, evidence, external_id, observed_at)


def passing_over(tx: Transaction, action_id: str, receipt_key: str, *args: Any) -> Any:
    try:
        return add_receipt(tx, action_id, receipt_key, *args)
    except ActionIdempotencyConflict:
        there = next(found for found in tx.receipts(action_id) if found["receipt_key"] == receipt_key)
        return there, False


@caught_by("I2.a_key_in_use_takes_no_other_evidence", "I2.acceptance_and_verification_take_no_key_in_use")
class OverwritesReceipts(BrokenStore):
    """An upsert."""

    patches = ((Transaction, "add_receipt", overwriting),)


@caught_by("I2.a_key_in_use_takes_no_other_evidence", "I2.acceptance_and_verification_take_no_key_in_use")
class PassesOverReceipts(BrokenStore):
    """ON CONFLICT DO NOTHING."""

    patches = ((Transaction, "add_receipt", passing_over),)


@caught_by("I2.receipts_are_only_appended")
class StampsTheGate(BrokenStore):
    """Marks the gate as consumed, on the gate."""

    def accept(self, action_id: str, *args: Any, **kwargs: Any) -> Any:
        answer = super().accept(action_id, *args, **kwargs)
        self.past.change_receipt(action_id, "owner-gate", status="consumed")
        return answer


@caught_by("I2.every_digest_is_of_its_evidence")
class DigestsTheKeyToo(BrokenStore):
    """Acceptance is pinned by a digest of more than its evidence."""

    def verify(self, action_id: str, *args: Any, **kwargs: Any) -> Any:
        answer = super().verify(action_id, *args, **kwargs)
        receipt = self.list_receipts(action_id)[-1]
        digest = digest_json([receipt["receipt_key"], receipt["evidence"]])
        self.past.change_receipt(action_id, receipt["receipt_key"], evidence_sha256=digest)
        return answer


@caught_by("I2.the_same_receipt_again_is_the_first")
class DatesReceiptsAnew(BrokenStore):
    """A gate that comes again is given the time it came again."""

    def gate(self, action_id: str, *args: Any, **kwargs: Any) -> Any:
        action, receipt = super().gate(action_id, *args, **kwargs)
        self.past.change_receipt(action_id, receipt["receipt_key"], created_at=self.now())
        return action, {**receipt, "created_at": self.now()}


@caught_by("I2.receipts_belong_to_one_action")
class ListsReceiptsByKey(BrokenStore):
    """A join too many: acceptances of every action of the source."""

    def list_receipts(self, action_id: str) -> Sequence[records.Receipt]:
        found = list(super().list_receipts(action_id))
        if not any(receipt["kind"] == "acceptance" for receipt in found):
            return found
        siblings = self.find(state=records.STATE_ACCEPTED, source=self.get_action(action_id)["source"])
        theirs = [SQLActionStore.list_receipts(self, sibling["action_id"])[-1] for sibling in siblings]
        return found + [receipt for receipt in theirs if receipt["action_id"] != action_id]


@caught_by("I2.evidence_handed_out_is_a_copy")
class HandsOutItsOwnEvidence(BrokenStore):
    """Reads the evidence of a gate once, and hands out that one object."""

    evidences: ClassVar[dict[str, Any]] = {}

    def list_receipts(self, action_id: str) -> Sequence[records.Receipt]:
        return [
            {**receipt, "evidence": self.evidences.setdefault(receipt["evidence_sha256"], receipt["evidence"])}
            if receipt["kind"] == records.GATE_RECEIPT_KIND
            else receipt
            for receipt in super().list_receipts(action_id)
        ]
