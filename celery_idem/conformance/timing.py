"""I11: the time is what the store's clock says, once the action is held."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from celery_idem.conformance.bench import ALPHA, Bench, authorize, case
from celery_idem.conformance.case import expect
from celery_idem.conformance.threads import PATIENCE
from celery_idem.errors import GateRefused
from celery_idem.governed import records
from celery_idem.governed.records import Action, GateAuthorization, Receipt

EXACT = 1e-3
"""Seconds that a store's way of keeping times may lose."""
HEAD_START = 0.5
"""Real seconds a waiting dispatch has to come to where it waits."""


def close(one: Any, other: float) -> bool:
    """Whether it is this time."""
    return isinstance(one, (int, float)) and abs(one - other) <= EXACT


@case("I11")
def the_validator_is_told_the_stores_time(bench: Bench) -> None:
    """A store that hands the validator the host's time, or the time of the lease."""
    action_id = bench.at(records.STATE_GATED)
    bench.clock.advance(17.0)
    told: list[float] = []

    def validator(action: Action, receipts: Sequence[Receipt], now: float) -> GateAuthorization:
        told.append(now)
        return authorize(action, receipts, now)

    bench.dispatch(action_id, gate_validator=validator)
    expect(told, "the validator was never called")
    expect(
        all(close(now, bench.clock()) for now in told), f"the validator was told {told}, the clock says {bench.clock()}"
    )


@case("I11")
def an_approval_ends_by_the_stores_time(bench: Bench) -> None:
    """A store under whose time a dead approval is alive."""
    action_id = bench.proposed()
    bench.harness.gate(action_id, bench.approval(action_id, expires_at_epoch=bench.clock() + 30.0))
    bench.hold(action_id)
    bench.clock.advance(31.0)
    bench.refused(
        "a dispatch on an approval that ended a second ago",
        action_id,
        lambda: bench.dispatch(action_id, gate_validator=_while_it_lasts),
    )


def _while_it_lasts(action: Action, receipts: Sequence[Receipt], now: float) -> GateAuthorization:
    authorized = authorize(action, receipts, now)
    if now >= authorized.expires_at:
        raise GateRefused("the approval has ended", code="expired")
    return authorized


@case("I11")
def who_waited_is_judged_by_the_time_after(bench: Bench) -> None:
    """A store that reads its clock, and then waits for the action: an approval that ended meanwhile looks alive.

    One dispatch holds the action in its validator while another waits; then time passes, and the first one is refused.
    """
    action_id = bench.proposed()
    bench.harness.gate(action_id, bench.approval(action_id, expires_at_epoch=bench.clock() + 30.0))
    bench.hold(action_id)
    arguments = bench.arguments(action_id)
    told: list[tuple[float, float]] = []

    def second(action: Action, receipts: Sequence[Receipt], now: float) -> GateAuthorization:
        told.append((now, bench.clock()))
        return _while_it_lasts(action, receipts, now)

    entered, came_back = threading.Event(), threading.Event()

    def rival() -> None:
        entered.set()
        with suppress(Exception):  # it may be refused in any way
            given = {**arguments, "gate_validator": second}
            bench.other.begin_owner_authorized_dispatch(action_id, ALPHA, **given)
        came_back.set()

    thread = threading.Thread(target=rival, daemon=True)

    def first(_action: Action, _receipts: Sequence[Receipt], _now: float) -> GateAuthorization:
        if not thread.ident:
            thread.start()
            entered.wait(PATIENCE)
        if not came_back.wait(HEAD_START):
            bench.clock.advance(31.0)
        raise GateRefused("this one is refused", code="conformance")

    with suppress(GateRefused):
        bench.store.begin_owner_authorized_dispatch(action_id, ALPHA, **{**arguments, "gate_validator": first})
    thread.join(PATIENCE)
    wrong = [(now, clock) for now, clock in told if not close(now, clock)]
    expect(not wrong, f"a dispatch that had waited judged by the times before it waited: {wrong}")


@case("I11")
def leases_and_delays_count_from_the_stores_time(bench: Bench) -> None:
    """A store that counts a lease or a delay from the host's time, or from when the action was made."""
    action_id = bench.at(records.STATE_GATED)
    bench.clock.advance(7.0)
    bench.store.defer_leased(action_id, ALPHA, "not now", 20.0)
    due = bench.other.get_action(action_id)["next_attempt_at"]
    expect(close(due, bench.clock() + 20.0), f"deferred for 20 s at {bench.clock()}, the action is due at {due}")
    bench.clock.advance(21.0)
    leased = bench.lease(action_id, seconds=45.0)
    until = leased["lease_expires_at"] if leased else None
    expect(close(until, bench.clock() + 45.0), f"leased for 45 s at {bench.clock()}, the lease ends at {until}")


@case("I11")
def what_is_written_bears_the_stores_time(bench: Bench) -> None:
    """A store that dates actions, receipts or events by the host, or by what the caller brought along."""
    action_id = bench.proposed()
    created = bench.other.get_action(action_id)["created_at"]
    expect(close(created, bench.clock()), f"proposed at {bench.clock()}, created_at is {created}")
    dates = _Dates(bench, action_id)
    bench.clock.advance(5.0)
    bench.harness.gate(action_id, bench.approval(action_id, decided_at_epoch=bench.clock() - 3.0))
    dates.check("the gate")
    bench.advance_to(records.STATE_DISPATCHED, action_id)
    dates.check("the dispatch")
    bench.clock.advance(5.0)
    bench.look(action_id)
    dates.check("the look")
    bench.clock.advance(5.0)
    bench.hold(action_id)
    evidence = {"status": "completed", "observed_at": 1.0, "created_at": 1.0}
    bench.store.accept(action_id, ALPHA, "acceptance", "acceptance", evidence)
    dates.check("the acceptance")
    for state in (records.STATE_VERIFIED, records.STATE_COMPLETED):
        bench.clock.advance(5.0)
        bench.advance_to(state, action_id)
        dates.check(state)
        changed = bench.other.get_action(action_id)["updated_at"]
        expect(close(changed, bench.clock()), f"{state} at {bench.clock()}, updated_at is {changed}")
    ended = bench.other.get_action(action_id)["terminal_at"]
    expect(close(ended, bench.clock()), f"completed at {bench.clock()}, terminal_at is {ended}")


class _Dates:
    """Looks at the dates of what was appended since it last looked."""

    def __init__(self, bench: Bench, action_id: str) -> None:
        self._bench, self._action_id = bench, action_id
        self._seen = {"receipts": 0, "events": 0}
        self.check("the proposal")

    def check(self, what: str) -> None:
        """``Breach`` if one of them is not the clock's."""
        now = self._bench.clock()
        for name in self._seen:
            dates = [one["created_at"] for one in getattr(self._bench, name)(self._action_id)]
            wrong = [at for at in dates[self._seen[name] :] if not close(at, now)]
            expect(not wrong, f"{what} came at {now}, and its {name} are dated {wrong}")
            self._seen[name] = len(dates)
