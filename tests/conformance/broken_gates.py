"""I4 broken: what is judged is not what is consumed, or nobody judges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_idem.conformance.bench import authorize
from celery_idem.governed import gate, records
from celery_idem.governed.sql import dispatch
from tests.conformance.broken_base import BrokenStore, Dispatching, caught_by

# --- I4 ---------------------------------------------------------------------------------------------------------------


@caught_by("I4.the_validator_runs_inside_the_dispatch")
class JudgesBefore(BrokenStore):
    """Why hold the action while somebody thinks?"""

    def begin_owner_authorized_dispatch(self, action_id: str, owner: str, **kwargs: Any) -> Any:
        validator, judged = kwargs["gate_validator"], []
        if self.get_action(action_id)["state"] == records.STATE_GATED:
            judged.append(validator(self.get_action(action_id), self.list_receipts(action_id), self.now()))
        given = {**kwargs, "gate_validator": lambda *_: judged[0]}
        return super().begin_owner_authorized_dispatch(action_id, owner, **given)


@caught_by("I4.the_validator_sees_what_is_stored")
class ShowsTheGateAlone(Dispatching):
    """A projection of its own."""

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        return validator({**action, "state": records.STATE_DISPATCHED}, receipts, now)


@caught_by("I4.a_validator_that_raises_changes_nothing")
class SwallowsTheRefusal(Dispatching):
    """The log has it."""

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        try:
            return validator(action, receipts, now)
        except Exception:
            return authorize(action, receipts, now)


@caught_by("I4.only_an_authorization_authorizes")
class TakesAnyTruth(Dispatching):
    """``if authorized:``."""

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        said_so = validator(action, receipts, now)
        taken = isinstance(said_so, records.GateAuthorization) or not said_so
        return said_so if taken else authorize(action, receipts, now)


@caught_by("I4.an_expired_authorization_authorizes_nothing")
class TakesTheExpired(Dispatching):
    """An authorization is an authorization."""

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        authorized = validator(action, receipts, now)
        return replace(authorized, expired=False) if isinstance(authorized, records.GateAuthorization) else authorized


@caught_by("I4.an_authorization_of_something_else_authorizes_nothing")
class TakesAnothers(Dispatching):
    """Does not look whose it is."""

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        authorized = validator(action, receipts, now)
        if not isinstance(authorized, records.GateAuthorization):
            return authorized
        return replace(
            authorized,
            receipt_key=expected["gate_receipt_key"],
            approval_id=expected["expected_approval_id"],
            decision_id=expected["expected_decision_id"],
        )


@caught_by("I4.every_expected_binding_is_compared")
class DispatchesWhatItHas(BrokenStore):
    """The caller will have read it before."""

    patches = ((dispatch, "_is_what_was_expected", lambda _row, _expected: None),)


@caught_by(
    "I4.the_store_looks_at_the_gate_itself",
    "I4.two_gates_never_dispatch",
    "I4.changed_evidence_is_refused",
    "I4.the_gate_covers_the_stored_payload",
    "I4.a_gate_of_another_action_is_refused",
    "I4.without_a_gate_nothing_dispatches",
)
class LeavesItToTheValidator(BrokenStore):
    """Has no eyes of its own."""

    patches = ((gate, "check_bindings", lambda *_args, **_kwargs: None),)


check_bindings = gate.check_bindings


def the_named_gate(action: Any, receipts: Any, now: float, *, gate_receipt_key: str | None = None, **kw: Any) -> Any:
    named = [receipt for receipt in receipts if receipt["receipt_key"] == gate_receipt_key]
    return check_bindings(action, named, now, gate_receipt_key=gate_receipt_key, **kw)


@caught_by("I4.two_gates_never_dispatch")
class PicksTheNamedGate(BrokenStore):
    """Two approvals are better than one."""

    patches = ((gate, "check_bindings", the_named_gate),)
