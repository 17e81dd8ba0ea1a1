"""I8 to I11 broken: other ways through life, no witnesses, failures nobody sees, another clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from celery_idem.errors import ActionStoreError
from celery_idem.governed import gate, records
from celery_idem.governed.sql import lifecycle, schema, transaction
from celery_idem.governed.sql.transaction import Transaction
from tests.conformance.broken_base import BrokenStore, Dispatching, caught_by, words

# --- I8 ---------------------------------------------------------------------------------------------------------------

append = Transaction.append


def forgetting(tx: Transaction, action_id: str, event_type: str, *args: Any) -> None:
    if event_type not in {records.VERIFIED, records.AMBIGUOUS}:
        append(tx, action_id, event_type, *args)


@caught_by("I8.every_verb_is_refused_in_every_other_state")
class DoesNotLookAtTheState(BrokenStore):
    """Whoever holds the lease will know what comes next."""

    patches = (
        (lifecycle, "expects", lambda _row, _state, _verb: None),
        (
            transaction,
            "records",
            words(ALLOWED_TRANSITIONS=dict.fromkeys(records.ACTION_STATES, records.ACTION_STATES)),
        ),
        (schema, "_sqlite_triggers", list),
    )


@caught_by("I8.every_transition_appends_an_event", "I8.an_ambiguous_end_is_an_event_too")
class ForgetsToTell(BrokenStore):
    """Two transitions leave no trace."""

    patches = ((Transaction, "append", forgetting),)


@caught_by("I8.an_end_is_final")
class TakesALateGate(BrokenStore):
    """More evidence cannot hurt."""

    def gate(self, action_id: str, evidence: Any, *, receipt_key: str = "owner-gate", **kwargs: Any) -> Any:
        if self.get_action(action_id)["state"] not in records.TERMINAL_STATES:
            return super().gate(action_id, evidence, receipt_key=receipt_key, **kwargs)
        kind, external_id = records.GATE_RECEIPT_KIND, evidence["approval_id"]
        args = (action_id, receipt_key, kind, "passed", evidence, external_id)
        return self.get_action(action_id), self._ledger.run(lambda tx: tx.add_receipt(*args))[0]


@caught_by("I8.the_way_is_the_one_way")
class ForgetsWhenItEnded(BrokenStore):
    """Completes without a time of its end."""

    def complete(self, action_id: str, owner: str, result: Any) -> Any:
        action = super().complete(action_id, owner, result)
        self.past.change_action(action_id, result={"status": "done"})
        return action


@caught_by("I8.a_verb_of_no_action_is_refused")
class DefersWhatIsNotThere(BrokenStore):
    """Nothing to defer is nothing to complain about."""

    def defer_leased(self, action_id: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().defer_leased(action_id, *args, **kwargs)
        except ActionStoreError as error:
            if "no action" in str(error):
                return {}
            raise


# --- I9 ---------------------------------------------------------------------------------------------------------------


class Verifying(BrokenStore):
    """Takes other witnesses than it is told."""

    def witnesses(self, action_id: str, keys: Sequence[str]) -> Sequence[str]:
        return keys

    def verify(self, action_id: str, *args: Any, qualifying_receipt_keys: Sequence[str], **kwargs: Any) -> Any:
        there = {receipt["receipt_key"] for receipt in self.list_receipts(action_id)}
        if there:
            qualifying_receipt_keys = self.witnesses(action_id, qualifying_receipt_keys)
        return super().verify(action_id, *args, qualifying_receipt_keys=qualifying_receipt_keys, **kwargs)


@caught_by("I9.a_missing_witness_is_no_witness")
class OneWitnessWillDo(Verifying):
    """Any of them, and not all."""

    def witnesses(self, action_id: str, keys: Sequence[str]) -> Sequence[str]:
        there = {receipt["receipt_key"] for receipt in self.list_receipts(action_id)}
        return [key for key in keys if key in there] or keys


@caught_by("I9.no_witness_at_all_is_refused")
class NoWitnessWillDo(Verifying):
    """``all([])``."""

    def witnesses(self, action_id: str, keys: Sequence[str]) -> Sequence[str]:
        return keys or ["owner-gate"]


@caught_by("I9.a_witness_of_another_action_does_not_count")
class AnybodysWitnessWillDo(Verifying):
    """Looks for the key alone."""

    def witnesses(self, action_id: str, keys: Sequence[str]) -> Sequence[str]:
        source = self.get_action(action_id)["source"]
        anywhere = {
            receipt["receipt_key"]
            for action in self.find(source=source)
            if action["action_id"] != action_id
            for receipt in self.list_receipts(action["action_id"])
        }
        return ["owner-gate" if key in anywhere else key for key in keys]


# --- I10 --------------------------------------------------------------------------------------------------------------

fail = lifecycle.fail


def fail_quietly(tx: Transaction, *args: Any) -> Any:
    tx.bury = lambda *_: None  # type: ignore[method-assign]
    return fail(tx, *args)


@caught_by("I10.failure_leaves_a_dead_letter")
class FailsInSilence(BrokenStore):
    """Who looks at dead letters?"""

    patches = ((lifecycle, "fail", fail_quietly),)


@caught_by("I10.failure_and_dead_letter_are_seen_together")
class BuriesAfterwards(BrokenStore):
    """Two transactions, one after the other."""

    patches = ((lifecycle, "fail", fail_quietly),)

    def fail_attempt(self, action_id: str, owner: str, error: str, retryable: bool) -> Any:
        action = super().fail_attempt(action_id, owner, error, retryable)
        time.sleep(0.02)
        self._ledger.run(lambda tx: tx.bury(action_id, error))
        return action


@caught_by("I10.failure_tells_why_and_frees_the_action")
class KeepsTheLease(BrokenStore):
    """Whoever failed may want to look again."""

    def fail_attempt(self, action_id: str, owner: str, *args: Any) -> Any:
        action = super().fail_attempt(action_id, owner, *args)
        self.past.change_action(action_id, lease_owner=owner, lease_expires_at=self.now() + 1e9)
        return action


@caught_by("I10.retryable_opens_nothing")
class TriesAgain(BrokenStore):
    """What is retryable is tried again, where nothing was sent."""

    def fail_attempt(self, action_id: str, owner: str, error: str, retryable: bool) -> Any:
        if retryable and self.get_action(action_id)["state"] in records.LEASABLE_STATES:
            return self.defer_leased(action_id, owner, error, 30.0)
        return super().fail_attempt(action_id, owner, error, retryable)


add_receipt = Transaction.add_receipt


# --- I11 --------------------------------------------------------------------------------------------------------------


@caught_by("I11.the_validator_is_told_the_stores_time")
class TellsTheHostsTime(Dispatching):
    """``time.time()``."""

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        return validator(action, receipts, time.time())


@caught_by("I11.an_approval_ends_by_the_stores_time")
class JudgesByTheProposal(Dispatching):
    """An approval that was alive when the lease began will do."""

    patches = ((gate, "_check_times", lambda _evidence, _now: None),)

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        leased_at = action["lease_expires_at"] - 60.0
        return validator(action, receipts, now if leased_at == now else leased_at)


@caught_by("I11.who_waited_is_judged_by_the_time_after")
class ReadsTheClockAndWaits(BrokenStore):
    """Knows what time it is before it holds the action."""

    def __init__(self, url: str, *, clock: Callable[[], float], **options: Any) -> None:
        self.read_at: float | None = None
        self.real = clock
        super().__init__(url, clock=lambda: clock() if self.read_at is None else self.read_at, **options)

    def begin_owner_authorized_dispatch(self, action_id: str, owner: str, **kwargs: Any) -> Any:
        self.read_at = self.real()
        try:
            return super().begin_owner_authorized_dispatch(action_id, owner, **kwargs)
        finally:
            self.read_at = None


def since_it_was_made(tx: Transaction, row: Any, owner: str, reason: str, delay: float, event_type: str) -> Any:
    free = {"lease_owner": None, "lease_expires_at": None, "next_attempt_at": row["created_at"] + delay}
    return tx.change(row, event_type, owner, {"reason": reason}, **free)


@caught_by("I11.leases_and_delays_count_from_the_stores_time")
class CountsFromTheBeginning(BrokenStore):
    """A delay since the action was made."""

    patches = ((Transaction, "release", since_it_was_made),)


def dated_by_the_caller(tx: Transaction, *receipt: Any) -> Any:
    evidence, now = receipt[4], tx.now
    tx._now = evidence.get("decided_at_epoch", now) if isinstance(evidence, dict) else now
    try:
        return add_receipt(tx, *receipt)
    finally:
        tx._now = now


@caught_by("I11.what_is_written_bears_the_stores_time")
class DatesByTheEvidence(BrokenStore):
    """The owner decided then, so it was then."""

    patches = ((Transaction, "add_receipt", dated_by_the_caller),)
