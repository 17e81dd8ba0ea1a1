"""I5, I6 and I7 broken: a contract apart from its dispatch, a second mutation, looks without end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from celery_idem.errors import ActionTransitionError
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.sql import dispatch, leasing, lifecycle, observation
from celery_idem.governed.sql.transaction import Transaction
from tests.conformance.broken_base import WITH_DISPATCHED, BrokenStore, caught_by, words

# --- I5 ---------------------------------------------------------------------------------------------------------------

write_contract = observation.write_contract
owed: dict[str, tuple[Any, ...]] = {}


def write_nothing_yet(tx: Transaction, row: Any, digest: str, window: float, budget: int) -> Any:
    def owe(*receipt: Any) -> Any:
        owed[row["action_id"]] = receipt
        return {"evidence_sha256": digest_json(receipt[4])}, True

    return write_contract(SimpleNamespace(now=tx.now, add_receipt=owe), row, digest, window, budget)  # type: ignore[arg-type]


@caught_by("I5.state_and_contract_are_seen_together")
class WritesTheContractAfterwards(BrokenStore):
    """Two transactions, one after the other."""

    patches = ((observation, "write_contract", write_nothing_yet),)

    def begin_owner_authorized_dispatch(self, action_id: str, owner: str, **kwargs: Any) -> Any:
        action = super().begin_owner_authorized_dispatch(action_id, owner, **kwargs)
        time.sleep(0.02)
        self._ledger.run(lambda tx: tx.add_receipt(*owed.pop(action_id)))
        return action


@caught_by("I5.dispatch_leaves_one_contract")
class ContractsTwice(BrokenStore):
    """One for the records: the sums are right, and there are two."""

    def list_receipts(self, action_id: str) -> Sequence[records.Receipt]:
        found = list(super().list_receipts(action_id))
        if [receipt["kind"] for receipt in found] == [records.GATE_RECEIPT_KIND, records.RECOVERY_RECEIPT_KIND]:
            found.append({**found[-1], "receipt_key": "dispatch-recovery:copy"})
        return found


@caught_by("I5.the_contract_is_for_one_execution")
class LooksForAnything(BrokenStore):
    """A look does no harm."""

    def contracted(self, action_id: str, digest: str) -> str:
        kinds = {receipt["kind"]: receipt for receipt in self.list_receipts(action_id)}
        contract = kinds.get(records.RECOVERY_RECEIPT_KIND)
        return str(contract["external_id"]) if contract else digest

    def begin_dispatched_observation(self, action_id: str, owner: str, execution_digest: str) -> Any:
        return super().begin_dispatched_observation(action_id, owner, self.contracted(action_id, execution_digest))

    def defer_dispatched_observation(self, action_id: str, owner: str, execution_digest: str, *args: Any) -> Any:
        digest = self.contracted(action_id, execution_digest)
        return super().defer_dispatched_observation(action_id, owner, digest, *args)


@caught_by("I5.beside_a_contract_nothing_is_dispatched")
class DispatchesBesideAContract(BrokenStore):
    """What is there already need not be written."""

    patches = ((dispatch, "records", words(RECOVERY_RECEIPT_KIND="none of these")),)


@caught_by("I5.reserved_kinds_are_written_by_their_own_verbs")
class AcceptsAnyKind(BrokenStore):
    """A kind is a word."""

    patches = ((lifecycle, "_refuse_reserved", lambda _kind: None),)


@caught_by("I5.the_contract_has_bounds")
class ContractsForEver(BrokenStore):
    """The caller knows best."""

    patches = ((dispatch.Expected, "check", lambda _expected: None),)


# --- I6 ---------------------------------------------------------------------------------------------------------------

may_be_looked_for = observation.may_be_looked_for


def unless_there_is_a_contract(tx: Transaction, row: Any, actor: str) -> bool:
    if not tx.receipts(row["action_id"], records.RECOVERY_RECEIPT_KIND):
        return True
    return may_be_looked_for(tx, row, actor)


@caught_by("I6.without_a_contract_a_lapsed_dispatch_is_ambiguous")
class LooksWithoutAContract(BrokenStore):
    """No contract, no limit."""

    patches = ((observation, "may_be_looked_for", unless_there_is_a_contract),)


def whatever_it_says(tx: Transaction, row: Any) -> Any:
    for receipt in tx.receipts(row["action_id"], records.RECOVERY_RECEIPT_KIND):
        return receipt["evidence"]
    raise observation.Untrusted("no contract")


@caught_by("I6.a_changed_contract_is_none")
class BelievesTheContract(BrokenStore):
    """It is in the database, so it is true."""

    patches = ((observation, "contract_of", whatever_it_says),)


@caught_by("I6.a_dispatched_action_is_not_work")
class LeasesTheDispatched(BrokenStore):
    """Whatever state you ask for."""

    patches = ((leasing, "records", words(LEASABLE_STATES=WITH_DISPATCHED)),)


@caught_by(
    "I6.a_second_dispatch_is_refused",
    "I6.one_of_many_dispatches_wins",
    "I6.another_gate_opens_nothing",
    "I6.a_crash_after_the_dispatch_leaves_looking_only",
)
class DispatchIsIdempotent(BrokenStore):
    """Whoever comes again is told that it went well."""

    def begin_owner_authorized_dispatch(self, action_id: str, owner: str, **kwargs: Any) -> Any:
        try:
            return super().begin_owner_authorized_dispatch(action_id, owner, **kwargs)
        except ActionTransitionError:
            action = self.get_action(action_id)
            if (action["state"], action["lease_owner"]) == (records.STATE_DISPATCHED, owner):
                return action
            raise


@caught_by("I6.nothing_leads_back")
class DefersTheDispatched(BrokenStore):
    """Anything can wait."""

    patches = ((lifecycle, "records", words(LEASABLE_STATES=WITH_DISPATCHED)),)


@caught_by("I6.attempts_go_from_zero_to_one")
class CountsLooksAsAttempts(BrokenStore):
    """Tells every look as an attempt."""

    def get_action(self, action_id: str) -> records.Action:
        action = super().get_action(action_id)
        if action["state"] != records.STATE_VERIFIED:
            return action
        looks = [found for found in self.list_receipts(action_id) if found["kind"] == records.OBSERVATION_RECEIPT_KIND]
        return {**action, "attempt_count": action["attempt_count"] + len(looks)}


# --- I7 ---------------------------------------------------------------------------------------------------------------


class NotYet(Exception):
    """Takes back what was written."""


@caught_by("I7.a_look_is_journalled_before_it_is_made")
class WritesTheLookDownLater(BrokenStore):
    """A look is written down when it is known what it found."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.seen: dict[str, tuple[str, str, str]] = {}

    def begin_dispatched_observation(self, action_id: str, owner: str, execution_digest: str) -> Any:
        found: list[Any] = []

        def work(tx: Transaction) -> None:
            found.append(observation.begin(tx, action_id, owner, execution_digest))
            if found[-1][1] is not None:
                raise NotYet

        try:
            self._ledger.run(work)
        except NotYet:
            self.seen[action_id] = (owner, execution_digest, found[-1][1]["receipt_key"])
        return found[-1]

    def write_down(self, action_id: str, owner: str) -> None:
        if action_id in self.seen and self.seen[action_id][0] == owner:
            super().begin_dispatched_observation(action_id, *self.seen.pop(action_id)[:2])

    def defer_dispatched_observation(self, action_id: str, owner: str, digest: str, key: str, *args: Any) -> Any:
        if action_id in self.seen and self.seen[action_id][1:] == (digest, key):
            self.write_down(action_id, owner)
        return super().defer_dispatched_observation(action_id, owner, digest, key, *args)

    def accept(self, action_id: str, owner: str, *args: Any, **kwargs: Any) -> Any:
        self.write_down(action_id, owner)
        return super().accept(action_id, owner, *args, **kwargs)


@caught_by(
    "I7.a_used_up_budget_ends_as_ambiguous",
    "I7.an_unresolved_last_look_ends_as_ambiguous",
    "I7.crashes_use_up_the_budget",
    "I7.looks_begun_at_once_share_the_budget",
)
class LooksWithoutABudget(BrokenStore):
    """Until the deadline."""

    patches = ((observation, "_spent", lambda tx, contract, _looks: tx.now >= contract["observation_deadline"]),)


@caught_by("I7.a_passed_deadline_ends_as_ambiguous")
class LooksWithoutADeadline(BrokenStore):
    """Until the budget is used up."""

    patches = ((observation, "_spent", lambda _tx, contract, looks: looks >= contract["max_observations"]),)


@caught_by("I7.a_stale_look_defers_nothing")
class DefersWhateverItIsTold(BrokenStore):
    """The last look is meant, of course."""

    def defer_dispatched_observation(self, action_id: str, owner: str, digest: str, key: str, *args: Any) -> Any:
        looks = [found for found in self.list_receipts(action_id) if found["kind"] == records.OBSERVATION_RECEIPT_KIND]
        key = looks[-1]["receipt_key"] if looks else key
        return super().defer_dispatched_observation(action_id, owner, digest, key, *args)


@caught_by("I7.a_deferred_look_is_due_after_its_delay")
class LooksAgainAtOnce(BrokenStore):
    """Patience is no virtue."""

    def defer_dispatched_observation(self, *args: Any) -> Any:
        return super().defer_dispatched_observation(*args[:-1], 0.0)


def as_many_as_there_are(tx: Transaction, row: Any, contract: Any) -> Any:
    return tx.receipts(row["action_id"], records.OBSERVATION_RECEIPT_KIND)


@caught_by("I7.a_forged_journal_ends_as_ambiguous")
class BelievesTheJournal(BrokenStore):
    """Counts the lines."""

    patches = ((observation, "journal_of", as_many_as_there_are),)
