"""I4: the gate is judged where it is consumed, on what is stored, in the transaction that dispatches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery_idem.conformance.bench import ALPHA, Bench, authorize, case, told
from celery_idem.conformance.case import Breach, expect
from celery_idem.conformance.threads import PATIENCE
from celery_idem.errors import ActionStoreError, GateRefused
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.records import Action, GateAuthorization, GateValidator, Receipt

HEAD_START = 0.5
"""Real seconds a rival has to get through while the validator runs."""


@case("I4")
def the_validator_runs_inside_the_dispatch(bench: Bench) -> None:
    """A store that asks the validator first and dispatches afterwards: in between, the action is anybody's.

    While the validator runs, a rival with the same lease tries to defer the action and to lease it anew. It may wait,
    or it may win and the dispatch be refused; both going through means that they were not one after the other.
    """
    action_id = bench.at(records.STATE_GATED)
    entered, through = threading.Event(), threading.Event()

    def rival() -> None:
        entered.set()
        with suppress(Exception):  # it may lose in any way
            bench.other.defer_leased(action_id, ALPHA, "not now", 0.0)
            if bench.lease(action_id, ALPHA, store=bench.other) is not None:
                through.set()

    thread = threading.Thread(target=rival, daemon=True)
    passed_before_dispatch = []

    def validator(action: Action, receipts: Sequence[Receipt], now: float) -> GateAuthorization:
        if not thread.ident:
            thread.start()
            entered.wait(PATIENCE)
        passed_before_dispatch.append(through.wait(HEAD_START))
        return authorize(action, receipts, now)

    try:
        bench.dispatch(action_id, gate_validator=validator)
        dispatched = True
    except ActionStoreError:
        dispatched = False
    expect(passed_before_dispatch, "the validator was never called")
    thread.join(PATIENCE)
    expect(
        not (dispatched and any(passed_before_dispatch)),
        "while the validator ran, the action was deferred and leased again, and the dispatch went through all the same",
    )


@case("I4")
def the_validator_sees_what_is_stored(bench: Bench) -> None:
    """A store that hands the validator the caller's memory, a projection of its own, or receipts read earlier."""
    action_id = bench.at(records.STATE_GATED)
    arguments = bench.arguments(action_id)
    action, receipts = dict(bench.other.get_action(action_id)), bench.receipts(action_id)
    seen: list[tuple[Any, Any]] = []

    def validator(action: Action, receipts: Sequence[Receipt], now: float) -> GateAuthorization:
        seen.append((dict(action), [told(receipt) for receipt in receipts]))
        return authorize(action, receipts, now)

    bench.store.begin_owner_authorized_dispatch(action_id, ALPHA, **{**arguments, "gate_validator": validator})
    expect(seen, "the validator was never called")
    for seen_action, seen_receipts in seen:
        differs = [name for name in action if seen_action.get(name) != action[name]]
        expect(not differs, f"the validator was shown an action whose {differs} are not as stored")
        expect(
            seen_receipts == receipts, f"the validator was shown the receipts {seen_receipts}, stored are {receipts}"
        )


@case("I4")
def a_validator_that_raises_changes_nothing(bench: Bench) -> None:
    """A store that goes on where the validator refused, or keeps half of what it had begun."""
    action_id = bench.at(records.STATE_GATED)
    errors = (GateRefused("not this one", code="conformance"), ValueError("no"), RuntimeError("no"), KeyError("no"))
    raising = {f"a dispatch whose validator raised {type(error).__name__}": _raising(error) for error in errors}
    bench.all_refused(action_id, _dispatches(bench, action_id, raising), Exception)
    expect(bench.dispatch(action_id)["state"] == records.STATE_DISPATCHED, "after the refusals no dispatch is possible")


def _raising(error: Exception) -> GateValidator:
    def validator(_action: Action, _receipts: Sequence[Receipt], _now: float) -> GateAuthorization:
        raise error

    return validator


@case("I4")
def only_an_authorization_authorizes(bench: Bench) -> None:
    """A store that takes any true value, or anything that looks like an authorization, for one."""
    action_id = bench.at(records.STATE_GATED)
    real = _authorized(bench, action_id)
    fields = {name: getattr(real, name) for name in GateAuthorization.__dataclass_fields__}
    garbage = (None, True, "approved", fields, SimpleNamespace(**fields), [real], GateAuthorization)
    returning = {f"a dispatch whose validator returned a {type(one).__name__}": _returning(one) for one in garbage}
    bench.all_refused(action_id, _dispatches(bench, action_id, returning))


def _dispatches(bench: Bench, action_id: str, validators: Mapping[str, Any]) -> dict[str, Callable[[], object]]:
    begin, arguments = bench.store.begin_owner_authorized_dispatch, bench.arguments(action_id)
    return {
        what: partial(begin, action_id, ALPHA, **{**arguments, "gate_validator": validator})
        for what, validator in validators.items()
    }


@case("I4")
def an_expired_authorization_authorizes_nothing(bench: Bench) -> None:
    """A store that does not look whether the authorization it was given has expired."""
    action_id = bench.at(records.STATE_GATED)
    expired = replace(_authorized(bench, action_id), expired=True)
    bench.refused(
        "a dispatch on an expired authorization",
        action_id,
        partial(bench.dispatch, action_id, gate_validator=_returning(expired)),
    )


@case("I4")
def an_authorization_of_something_else_authorizes_nothing(bench: Bench) -> None:
    """A store that does not compare receipt, approval and decision of the authorization with what was expected."""
    action_id = bench.at(records.STATE_GATED)
    for name in ("receipt_key", "approval_id", "decision_id"):
        other = _saying_another(name, _authorized(bench, action_id))
        bench.refused(
            f"a dispatch on an authorization with another {name}",
            action_id,
            partial(bench.dispatch, action_id, gate_validator=_returning(other)),
        )


def _authorized(bench: Bench, action_id: str) -> GateAuthorization:
    return authorize(bench.other.get_action(action_id), bench.receipts(action_id), bench.clock())


def _saying_another(name: str, authorized: GateAuthorization) -> GateAuthorization:
    changed: Any = {name: "another"}
    return replace(authorized, **changed)


def _returning(value: Any) -> Callable[..., Any]:
    return lambda _action, _receipts, _now: value


@case("I4")
def every_expected_binding_is_compared(bench: Bench) -> None:
    """A store that dispatches what it has, whatever the caller was shown and authorized."""
    action_id = bench.at(records.STATE_GATED)
    payload = dict(bench.other.get_action(action_id)["payload"])
    wrong: dict[str, Sequence[Any]] = {
        "gate_receipt_key": ("another-gate", ""),
        "expected_source": ("conformance.elsewhere", ""),
        "expected_source_ref": ("order/0", None),
        "expected_action_type": ("conformance.payout",),
        "expected_payload": (
            {**payload, "amount": "12.51"},
            {**payload, "more": None},
            {**payload, "lines": [1, 2.5, 1, None]},  # 1 is True to Python, and not the same bytes
            {**payload, "lines": [1.0, 2.5, True, None]},
            {name: value for name, value in payload.items() if name != "to"},
            None,
        ),
        "expected_approval_id": ("APR-another", ""),
        "expected_decision_id": ("DEC-another", ""),
    }
    begin, arguments = bench.store.begin_owner_authorized_dispatch, bench.arguments(action_id)
    changed = {
        f"a dispatch with {name}={value!r}": partial(begin, action_id, ALPHA, **{**arguments, name: value})
        for name, values in wrong.items()
        for value in values
    }
    bench.all_refused(action_id, changed)


@case("I4")
def the_store_looks_at_the_gate_itself(bench: Bench) -> None:
    """A store that believes a validator which says what the caller wants to hear."""
    action_id = bench.at(records.STATE_GATED)
    real = _authorized(bench, action_id)
    for name, argument in (
        ("receipt_key", "gate_receipt_key"),
        ("approval_id", "expected_approval_id"),
        ("decision_id", "expected_decision_id"),
    ):
        lie = _saying_another(name, real)
        wrong: dict[str, Any] = {argument: "another", "gate_validator": _returning(lie)}
        bench.refused(
            f"a dispatch whose validator vouches for another {name}",
            action_id,
            partial(bench.dispatch, action_id, **wrong),
        )


@case("I4")
def two_gates_never_dispatch(bench: Bench) -> None:
    """A store that picks one of two approvals, though nobody can say which the owner meant."""
    for late in (False, True):
        action_id = bench.proposed()
        bench.harness.gate(action_id, bench.approval(action_id))
        arguments = bench.arguments(action_id)
        if late:
            bench.hold(action_id)
        try:
            bench.harness.gate(action_id, bench.approval(action_id), receipt_key="second-gate")
        except ActionStoreError:
            if len(bench.receipts(action_id, records.GATE_RECEIPT_KIND)) == 1:
                continue  # a store that takes no second gate cannot have two
            raise
        bench.hold(action_id)
        for key in ("owner-gate", "second-gate"):
            receipt = next(found for found in bench.receipts(action_id) if found["receipt_key"] == key)
            chosen = authorize(bench.other.get_action(action_id), [receipt], bench.clock())
            wanted = {
                "gate_receipt_key": key,
                "expected_approval_id": chosen.approval_id,
                "expected_decision_id": chosen.decision_id,
                "gate_validator": _returning(chosen),
            }
            bench.refused(
                f"a dispatch on {key}, one of two gates",
                action_id,
                partial(bench.store.begin_owner_authorized_dispatch, action_id, ALPHA, **{**arguments, **wanted}),
            )


@case("I4", "tamper")
def changed_evidence_is_refused(bench: Bench) -> None:
    """A store that does not derive the digest of the gate's evidence again."""
    action_id = bench.at(records.STATE_GATED)
    evidence = bench.receipts(action_id)[0]["evidence"]
    arguments = bench.arguments(action_id)
    bench.tamper.change_receipt(action_id, "owner-gate", evidence={**evidence, "principal": "intruder@example.org"})
    bench.refused(
        "a dispatch on evidence that was changed in the database",
        action_id,
        partial(bench.store.begin_owner_authorized_dispatch, action_id, ALPHA, **arguments),
    )


@case("I4", "tamper")
def the_gate_covers_the_stored_payload(bench: Bench) -> None:
    """A store that does not compare the digest the owner approved with the payload it has.

    Payload and digest were both changed in the database, the caller read them back, and the validator is permissive.
    """
    action_id = bench.at(records.STATE_GATED)
    payload = {"order": 1, "amount": "99999.00"}
    bench.tamper.change_action(action_id, payload=payload, payload_sha256=digest_json(payload))
    bench.refused("a dispatch of a payload nobody approved", action_id, partial(bench.dispatch, action_id))


@case("I4", "tamper")
def a_gate_of_another_action_is_refused(bench: Bench) -> None:
    """A store that does not compare the action the owner approved with the one it is about to dispatch."""
    action_id, other_id = bench.at(records.STATE_GATED), bench.at(records.STATE_GATED)
    (theirs,) = bench.receipts(other_id)
    evidence = {**theirs["evidence"], "action_digest": bench.other.get_action(action_id)["payload_sha256"]}
    bench.tamper.change_receipt(
        action_id,
        "owner-gate",
        evidence=evidence,
        evidence_sha256=digest_json(evidence),
        external_id=theirs["external_id"],
    )
    bench.refused("a dispatch on another action's approval", action_id, partial(bench.dispatch, action_id))


@case("I4", "tamper")
def without_a_gate_nothing_dispatches(bench: Bench) -> None:
    """A store that goes by the state ``gated`` and not by the gate."""
    action_id = bench.at(records.STATE_GATED)
    authorized, arguments = _authorized(bench, action_id), bench.arguments(action_id)
    bench.tamper.remove_receipt(action_id, "owner-gate")
    arguments["gate_validator"] = _returning(authorized)
    bench.refused(
        "a dispatch without a gate",
        action_id,
        partial(bench.store.begin_owner_authorized_dispatch, action_id, ALPHA, **arguments),
    )
    if bench.receipts(action_id):
        raise Breach("the gate that was removed is still there")
