"""I7: every look is journalled before it is made, and there is an end to looking."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery_idem.conformance.bench import ALPHA, BETA, Bench, case, told
from celery_idem.conformance.case import expect
from celery_idem.conformance.threads import together
from celery_idem.errors import ActionStoreError
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.records import Receipt

LONG = 86_400.0
"""A lease that outlives every contract."""


def looked(bench: Bench, action_id: str, owner: str = ALPHA) -> Receipt:
    """The receipt of a look that must be granted."""
    receipt = bench.look(action_id, owner)
    expect(receipt is not None, "a look within budget and deadline was refused")
    return receipt or {}


@case("I7")
def a_look_is_journalled_before_it_is_made(bench: Bench) -> None:
    """A store that grants a look and writes it down later, or writes nothing, or the same line again."""
    action_id = bench.at(records.STATE_DISPATCHED)
    keys: list[str] = []
    for _ in range(3):
        receipt = looked(bench, action_id)
        journal = bench.receipts(action_id, records.OBSERVATION_RECEIPT_KIND)
        keys.append(receipt["receipt_key"])
        lines = [line["receipt_key"] for line in journal]
        expect(
            lines == keys, f"after {len(keys)} looks another handle reads the journal as {lines}, granted were {keys}"
        )
        expect(journal[-1] == told(receipt), "the receipt that was returned is not the one in the journal")
    expect(len(set(keys)) == 3, f"three looks have the keys {keys}")
    found = bench.other.get_action(action_id)
    expect((found["state"], found["attempt_count"]) == (records.STATE_DISPATCHED, 1), "a look changed the state")


@case("I7")
def a_used_up_budget_ends_as_ambiguous(bench: Bench) -> None:
    """A store that goes on granting looks when ``max_observations`` have been made."""
    action_id = bench.at(records.STATE_DISPATCHED, max_observations=2)
    for _ in range(2):
        looked(bench, action_id)
    action, receipt = bench.store.begin_dispatched_observation(action_id, ALPHA, bench.execution(action_id))
    expect(receipt is None, "a third look was granted where the contract allows two")
    expect(action["state"] == records.STATE_FAILED, f"the refused look returned an action that is {action['state']}")
    expect(len(bench.receipts(action_id, records.OBSERVATION_RECEIPT_KIND)) == 2, "the refused look was journalled")
    bench.ambiguous(action_id, "after the last look")


@case("I7")
def an_unresolved_last_look_ends_as_ambiguous(bench: Bench) -> None:
    """A store that defers once more after the last look that the contract allows."""
    action_id = bench.at(records.STATE_DISPATCHED, max_observations=2)
    first = bench.unresolved(action_id, looked(bench, action_id)["receipt_key"], delay=5.0)
    expect(first["state"] == records.STATE_DISPATCHED, f"after one look of two the action is {first['state']}")
    bench.clock.advance(6.0)
    bench.hold(action_id)
    bench.unresolved(action_id, looked(bench, action_id)["receipt_key"], delay=5.0)
    bench.ambiguous(action_id, "after the last look found nothing certain")


@case("I7")
def a_passed_deadline_ends_as_ambiguous(bench: Bench) -> None:
    """A store that goes on looking when the observation window is over, by whichever verb one asks."""
    ways: dict[str, Callable[[str], object]] = {
        "begin_dispatched_observation": lambda action_id: expect(
            bench.look(action_id) is None, "a look was granted after the deadline"
        ),
        "defer_dispatched_observation": lambda action_id: bench.unresolved(
            action_id, bench.receipts(action_id, records.OBSERVATION_RECEIPT_KIND)[-1]["receipt_key"]
        ),
        "recover_expired_leases": lambda _: bench.store.recover_expired_leases(source=bench.source),
        "lease_dispatched_observation": lambda action_id: expect(
            bench.lease(action_id, BETA) is None, "an action was leased for looking after the deadline"
        ),
    }
    for name, way in ways.items():
        leased = name in {"begin_dispatched_observation", "defer_dispatched_observation"}
        seconds = LONG if leased else 5.0
        action_id = bench.at(records.STATE_DISPATCHED, seconds=seconds, observation_window_seconds=30.0)
        if name == "defer_dispatched_observation":
            looked(bench, action_id)
        bench.clock.advance(31.0)
        way(action_id)
        bench.ambiguous(action_id, f"{name} after the deadline")


@case("I7")
def crashes_use_up_the_budget(bench: Bench) -> None:
    """A store that forgets looks whose maker died, so that a worker which dies at every look never ends."""
    action_id = bench.at(records.STATE_DISPATCHED, max_observations=3)
    granted = 0
    for _ in range(6):
        if bench.other.get_action(action_id)["state"] != records.STATE_DISPATCHED:
            break
        bench.hold(action_id)
        granted += bench.look(action_id) is not None
        bench.lapse(action_id)
    expect(granted == 3, f"{granted} looks were granted to makers who died, where the contract allows 3")
    bench.ambiguous(action_id, "after the last maker of a look died")


@case("I7")
def a_stale_look_defers_nothing(bench: Bench) -> None:
    """A store that lets a caller defer over a look which was begun after its own."""
    action_id = bench.at(records.STATE_DISPATCHED)
    bench.refused("a deferral before any look", action_id, partial(bench.unresolved, action_id, "no-look"))
    first = looked(bench, action_id)["receipt_key"]
    second = looked(bench, action_id)["receipt_key"]
    contract = bench.receipts(action_id, records.RECOVERY_RECEIPT_KIND)[0]["receipt_key"]
    stale = {
        f"a deferral of {key!r}, which is not the last look": partial(bench.unresolved, action_id, key)
        for key in (first, contract, "owner-gate", "no-look", "")
    }
    bench.all_refused(action_id, stale)
    action = bench.unresolved(action_id, second)
    expect(action["state"] == records.STATE_DISPATCHED, f"a deferral within budget left the action {action['state']}")


@case("I7")
def a_deferred_look_is_due_after_its_delay(bench: Bench) -> None:
    """A store that keeps the lease, or gives the action out for the next look before its time."""
    action_id = bench.at(records.STATE_DISPATCHED)
    action = bench.unresolved(action_id, looked(bench, action_id)["receipt_key"], delay=20.0)
    expect(action["lease_owner"] is None, "a deferred look kept its lease")
    bench.clock.advance(19.0)
    expect(bench.lease(action_id, BETA) is None, "a deferred look was leased a second before it was due")
    bench.clock.advance(2.0)
    expect(bench.lease(action_id, BETA) is not None, "a deferred look was not leased when it was due")


@case("I7")
def looks_begun_at_once_share_the_budget(bench: Bench) -> None:
    """A store that counts the journal and writes to it in two steps."""
    action_id = bench.at(records.STATE_DISPATCHED, max_observations=3)
    answers = together(*(partial(_look_or_refusal, bench, action_id, number) for number in range(6)))
    wrong = [answer for answer in answers if isinstance(answer, Exception)]
    expect(not wrong, f"a look begun beside others was told {wrong}")
    granted = [answer["receipt_key"] for answer in answers if answer is not None]
    expect(len(granted) == len(set(granted)) == 3, f"of a budget of 3 looks these were granted: {sorted(granted)}")
    journal = bench.receipts(action_id, records.OBSERVATION_RECEIPT_KIND)
    expect(len(journal) == 3, f"the journal has {len(journal)} lines, and the budget was 3")
    bench.ambiguous(action_id, "after more looks were asked for than the budget has")


def _look_or_refusal(bench: Bench, action_id: str, number: int) -> Any:
    try:
        return bench.look(action_id, store=(bench.store, bench.other)[number % 2])
    except ActionStoreError:  # the action had ended by then
        return None


FORGERIES: dict[str, Callable[[Bench, str, list[Receipt]], None]] = {
    "a line was changed": lambda bench, action_id, lines: bench.tamper.change_receipt(
        action_id, lines[0]["receipt_key"], evidence={**lines[0]["evidence"], "started_at": 0.0}
    ),
    "a line was taken out": lambda bench, action_id, lines: bench.tamper.remove_receipt(
        action_id, lines[0]["receipt_key"]
    ),
    "a line was written twice": lambda bench, _, lines: bench.tamper.add_receipt(
        {**lines[1], "receipt_key": "dispatch-observation:copied"}
    ),
    "a line was made up": lambda bench, _, lines: bench.tamper.add_receipt(
        {
            **lines[1],
            "receipt_key": "dispatch-observation:forged",
            "evidence": {"forged": True},
            "evidence_sha256": digest_json({"forged": True}),
        }
    ),
    "a line is of another action": lambda bench, action_id, lines: bench.tamper.change_receipt(
        action_id, lines[1]["receipt_key"], **_of_another(bench)
    ),
}


def _of_another(bench: Bench) -> dict[str, Any]:
    other_id = bench.at(records.STATE_DISPATCHED)
    line = looked(bench, other_id)
    return {name: line[name] for name in ("evidence", "evidence_sha256", "external_id", "status")}


@case("I7", "tamper")
def a_forged_journal_ends_as_ambiguous(bench: Bench) -> None:
    """A store that grants more looks on a journal which is not the one it wrote."""
    for what, forge in FORGERIES.items():
        for leased in (True, False):
            action_id = bench.at(records.STATE_DISPATCHED, max_observations=10)
            lines = [looked(bench, action_id), looked(bench, action_id)]
            forge(bench, action_id, lines)
            if leased:
                expect(bench.look(action_id) is None, f"a look was granted although {what}")
            else:
                bench.lapse(action_id, reap=False)
                expect(bench.lease(action_id, BETA) is None, f"the action was leased for looking although {what}")
            bench.ambiguous(action_id, f"where {what}")
