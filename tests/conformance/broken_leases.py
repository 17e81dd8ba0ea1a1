"""I3 broken: somebody changes an action without holding its live lease, or with another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from celery_idem.errors import ActionLeaseConflict
from celery_idem.governed import records
from celery_idem.governed.sql import schema
from celery_idem.governed.sql.transaction import Transaction, projected
from tests.conformance.broken_base import BrokenStore, caught_by

# --- I3 ---------------------------------------------------------------------------------------------------------------


def owner_alone(tx: Transaction, row: Any, owner: str) -> None:
    if row["lease_owner"] != owner:
        raise ActionLeaseConflict("another holds it")


def time_alone(tx: Transaction, row: Any, owner: str) -> None:
    if row["lease_owner"] is None or row["lease_expires_at"] <= tx.now:
        raise ActionLeaseConflict("nobody holds it")


def unless_it_is_held(tx: Transaction, row: Any, owner: str) -> None:
    if row["lease_owner"] not in {None, owner}:
        raise ActionLeaseConflict("another holds it")


@caught_by("I3.with_a_lapsed_lease_every_verb_is_refused")
class LapsedIsGoodEnough(BrokenStore):
    """Compares the owner, and not the time."""

    patches = ((Transaction, "leased_to", owner_alone),)


@caught_by("I3.with_anothers_lease_every_verb_is_refused", "I3.a_stolen_lease_is_gone")
class AnyonesLeaseWillDo(BrokenStore):
    """Asks whether it is leased."""

    patches = ((Transaction, "leased_to", time_alone),)


@caught_by("I3.without_a_lease_every_verb_is_refused")
class CompletesWithoutALease(BrokenStore):
    """One verb has forgotten."""

    def complete(self, action_id: str, owner: str, result: Any) -> Any:
        action = self.get_action(action_id)
        if action["state"] == records.STATE_VERIFIED and action["lease_owner"] is None:
            self._ledger.run(lambda tx: tx.lease(tx.hold(action_id), owner, 5.0, mode="work"))
        return super().complete(action_id, owner, result)


@caught_by("I3.one_of_many_claimants_gets_the_lease", "I3.many_claimants_never_share")
class ClaimsInTwoSteps(BrokenStore):
    """Looks, and then takes."""

    def lease_next(
        self, owner: str, *, lease_seconds: float, states: Sequence[str], **kwargs: Any
    ) -> records.Action | None:
        if not frozenset(states) <= records.LEASABLE_STATES:
            return super().lease_next(owner, lease_seconds=lease_seconds, states=states, **kwargs)
        c, ids = schema.action.c, kwargs.get("action_ids")
        conditions = [c.source == kwargs["source"], *([c.action_id.in_(ids)] if ids else [])]
        found = self._ledger.read(lambda tx: tx.row(tx.ready(sorted(states)).where(*conditions)))
        if found is None:
            return None
        time.sleep(0.01)
        return self._ledger.run(
            lambda tx: projected(tx.lease(tx.hold(found["action_id"]), owner, lease_seconds, mode="work"))
        )


@caught_by("I3.a_live_lease_is_not_given_away")
class TakesEarly(BrokenStore):
    """Reaps with half a minute to spare."""

    def recover_expired_leases(self, **kwargs: Any) -> None:
        super().recover_expired_leases(**kwargs)
        for state in sorted(records.LEASABLE_STATES):
            for action in self.find(state=state, source=kwargs.get("source")):
                if action["lease_owner"] and action["lease_expires_at"] < self.now() + 30.0:
                    self.past.change_action(action["action_id"], lease_owner=None, lease_expires_at=None)
