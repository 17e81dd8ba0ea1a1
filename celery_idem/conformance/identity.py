"""I1 and I2: what an action is, and what was received for it, stays what it was."""

from __future__ import annotations

from typing import Any

from celery_idem.conformance.bench import ALPHA, LIFE, Bench, case, told
from celery_idem.conformance.case import Breach, expect
from celery_idem.errors import ActionIdempotencyConflict, ActionStoreError
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json, same
from celery_idem.governed.store import ActionStore

IDENTITY = (
    "action_id",
    "idempotency_key",
    "source",
    "source_ref",
    "action_type",
    "payload",
    "payload_sha256",
    "max_attempts",
    "created_at",
)


def identity(store: ActionStore, action_id: str) -> dict[str, Any]:
    """What may never change of the action."""
    action = store.get_action(action_id)
    return {name: action[name] for name in IDENTITY}


# --- I1 ---------------------------------------------------------------------------------------------------------------


@case("I1")
def identity_survives_the_whole_life(bench: Bench) -> None:
    """A store that rewrites an identity field in some verb: a new source, another payload, a later created_at."""
    action_id = bench.proposed()
    first = identity(bench.other, action_id)
    for state in LIFE[1:]:
        bench.clock.advance(5.0)
        bench.advance_to(state, action_id)
        expect(identity(bench.other, action_id) == first, f"on the way to {state} the identity changed: {first}")


@case("I1")
def identity_survives_deferral_observation_and_failure(bench: Bench) -> None:
    """A store that rewrites an identity field on the way to no good end."""
    action_id = bench.at(records.STATE_GATED)
    first = identity(bench.other, action_id)
    bench.store.defer_leased(action_id, ALPHA, "later", 5.0)
    bench.clock.advance(6.0)
    bench.advance_to(records.STATE_DISPATCHED, action_id)
    look = bench.look(action_id)
    expect(look is not None, "the first look was refused")
    bench.unresolved(action_id, look["receipt_key"] if look else "")
    bench.hold(action_id)
    bench.lapse(action_id)
    bench.hold(action_id)
    bench.store.fail_attempt(action_id, ALPHA, "no", False)
    expect(identity(bench.other, action_id) == first, f"the identity changed from {first}")


@case("I1")
def payload_and_digest_are_what_was_proposed(bench: Bench) -> None:
    """A store whose payload comes back as something else than went in, so that its digest means nothing."""
    payload = {"text": 'Zoë "quoted"\n', "number": 1, "exact": 2.5, "yes": True, "none": None, "deep": [{"a": []}]}
    given = {"idempotency_key": f"{bench.source}/exact", "source": bench.source, "source_ref": None}
    action = bench.harness.propose(**given, action_type="conformance.exact", payload=payload)  # type: ignore[arg-type]
    stored = bench.other.get_action(action["action_id"])
    expect(stored["payload"] == payload, f"the payload came back as {stored['payload']!r}")
    expect(repr(stored["payload"]["number"]) == "1", "a whole number came back as another type")
    expect(
        same(stored["payload_sha256"], digest_json(payload)), "payload_sha256 is not of the payload's canonical JSON"
    )
    expect(stored["state"] == records.STATE_PROPOSED, f"a new action is {stored['state']}")
    expect((stored["attempt_count"], stored["max_attempts"]) == (0, 1), "a new action has not 0 of 1 attempts")


@case("I1")
def what_was_handed_out_is_a_copy(bench: Bench) -> None:
    """A store in memory that hands out, or keeps, the very payload a caller can change afterwards."""
    payload: dict[str, Any] = {"amount": "1.00"}
    given = {"idempotency_key": f"{bench.source}/copy", "source": bench.source, "source_ref": None}
    action = bench.harness.propose(**given, action_type="conformance.copy", payload=payload)  # type: ignore[arg-type]
    payload["amount"] = "100.00"
    for handed in (action, bench.store.get_action(action["action_id"])):
        if isinstance(handed["payload"], dict):
            handed["payload"]["amount"] = "999.00"
    for store in (bench.store, bench.other):
        stored = store.get_action(action["action_id"])["payload"]
        expect(stored == {"amount": "1.00"}, f"a caller changed the stored payload to {stored!r}")


@case("I1", "tamper")
def a_changed_payload_is_never_returned(bench: Bench) -> None:
    """A store whose ``get_action`` believes the stored digest and does not derive it again."""
    action_id = bench.at(records.STATE_GATED)
    bench.tamper.change_action(action_id, payload={"order": 1, "amount": "99999.00"})
    for store in (bench.store, bench.other):
        _not_returned(store, action_id, "a payload that was changed in the database")


@case("I1", "tamper")
def a_changed_digest_is_never_returned(bench: Bench) -> None:
    """A store whose ``get_action`` does not compare the digest with the payload."""
    action_id = bench.at(records.STATE_ACCEPTED)
    bench.tamper.change_action(action_id, payload_sha256="0" * 64)
    _not_returned(bench.store, action_id, "a digest that was changed in the database")


def _not_returned(store: ActionStore, action_id: str, what: str) -> None:
    try:
        store.get_action(action_id)
    except ActionStoreError:
        return
    raise Breach(f"get_action returned {what}")


# --- I2 ---------------------------------------------------------------------------------------------------------------


@case("I2")
def receipts_are_only_appended(bench: Bench) -> None:
    """A store that updates, replaces, reorders or drops a receipt in a later verb."""
    action_id = bench.proposed()
    seen: list[Any] = []
    for state in LIFE[1:]:
        bench.clock.advance(5.0)
        bench.advance_to(state, action_id)
        if state == records.STATE_DISPATCHED:
            bench.look(action_id)
        now = bench.receipts(action_id)
        expect(now[: len(seen)] == seen, f"on the way to {state} an earlier receipt changed: {seen} became {now}")
        seen = now
    keys = [receipt["receipt_key"] for receipt in seen]
    expect(len(keys) == len(set(keys)), f"two receipts have one key: {keys}")
    kinds = [receipt["kind"] for receipt in seen]
    expect(len(kinds) == 5, f"gate, contract, look, acceptance and verification left these receipts: {kinds}")


@case("I2")
def every_digest_is_of_its_evidence(bench: Bench) -> None:
    """A store that pins a receipt to a digest of something else than its evidence."""
    action_id = bench.at(records.STATE_DISPATCHED)
    bench.look(action_id)
    for state in (records.STATE_ACCEPTED, records.STATE_VERIFIED):
        bench.advance_to(state, action_id)
    for receipt in bench.receipts(action_id):
        derived = digest_json(receipt["evidence"])
        expect(same(receipt["evidence_sha256"], derived), f"{receipt['receipt_key']}: the digest is not its evidence's")


@case("I2")
def the_same_receipt_again_is_the_first(bench: Bench) -> None:
    """A store that writes a second receipt, or a new time, where one comes again with the same content."""
    action_id = bench.proposed()
    evidence = bench.approval(action_id)
    first = told(bench.harness.gate(action_id, evidence))
    before = bench.receipts(action_id)
    bench.clock.advance(5.0)
    again = told(bench.harness.gate(action_id, dict(reversed(list(evidence.items())))))
    expect(again == first, f"the same gate again gave {again}, and the first was {first}")
    expect(bench.receipts(action_id) == before, "the same gate again changed the receipts")


@case("I2")
def a_key_in_use_takes_no_other_evidence(bench: Bench) -> None:
    """A store that overwrites a receipt, or passes over it in silence, where its key comes with other content."""
    action_id = bench.at(records.STATE_GATED)
    other = bench.approval(action_id, principal="somebody.else@example.org")
    bench.refused(
        "a gate under the first one's key",
        action_id,
        lambda: bench.harness.gate(action_id, other),
        ActionIdempotencyConflict,
    )


@case("I2")
def acceptance_and_verification_take_no_key_in_use(bench: Bench) -> None:
    """A store whose ``accept`` or ``verify`` writes over a receipt that has the key they were given."""
    action_id = bench.at(records.STATE_DISPATCHED)
    bench.refused(
        "accept under the gate's key",
        action_id,
        lambda: bench.store.accept(action_id, ALPHA, "owner-gate", "acceptance", {"status": "completed"}),
        ActionIdempotencyConflict,
    )
    bench.advance_to(records.STATE_ACCEPTED, action_id)
    bench.hold(action_id)
    bench.refused(
        "verify under the acceptance's key",
        action_id,
        lambda: bench.store.verify(
            action_id, ALPHA, "acceptance", {"seen": True}, qualifying_receipt_keys=["acceptance"]
        ),
        ActionIdempotencyConflict,
    )


@case("I2")
def receipts_belong_to_one_action(bench: Bench) -> None:
    """A store whose receipt keys are unique over all actions, or whose lists mix actions."""
    one, two = bench.at(records.STATE_ACCEPTED), bench.at(records.STATE_ACCEPTED)
    for action_id in (one, two):
        found = {receipt["action_id"] for receipt in bench.receipts(action_id)}
        expect(found == {action_id}, f"list_receipts({action_id!r}) gave receipts of {found}")
        expect(len(bench.receipts(action_id)) == 3, "gate, contract and acceptance are not three receipts")


@case("I2")
def evidence_handed_out_is_a_copy(bench: Bench) -> None:
    """A store in memory that hands out, or keeps, the very evidence a caller can change afterwards."""
    action_id = bench.proposed()
    evidence = bench.approval(action_id)
    receipt = bench.harness.gate(action_id, evidence)
    evidence["principal"] = "the caller"
    for handed in (receipt, *bench.store.list_receipts(action_id)):
        if isinstance(handed["evidence"], dict):
            handed["evidence"]["principal"] = "the reader"
    for found in bench.receipts(action_id):
        expect(found["evidence"]["principal"] == "owner@example.org", "a caller changed the stored evidence")
