"""The life of an action as messages: who approves first, what each step does, and what it never does twice."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult

from celery_idem.errors import (
    ActionFailed,
    ActionIdempotencyConflict,
    ActionTransitionError,
    AlreadyDecided,
    ConfigurationError,
    GateRefused,
    PayloadRefused,
    StoreUnavailable,
)
from celery_idem.governed import SQLActionStore, grant_approval, message_approval
from celery_idem.governed.catalog import Catalog
from celery_idem.governed.chain import approve, governed_chain, propose, reject
from celery_idem.governed.signing import ApprovalSigner, generate_key
from tests.governed.ledgers import Ledger
from tests.governed.refunds import REFUND, Office

pytest_plugins = ("tests.governed.refunds",)

STEPS = ("dispatch", "observe", "verify", "complete")


def evidence_for(office: Office, action_id: str, **changed: Any) -> dict[str, Any]:
    action = office.store.get_action(action_id)
    where = {"channel": "web", "thread_id": "t", "event_id": "e"}
    return {
        **message_approval(action, principal="ann", decided_at=office.clock.now, **where),
        **changed,
    }


# --- proposed, approved, rejected ------------------------------------------------------------------------------------


def test_an_approved_action_happens_once_and_ends_with_its_result(office: Office) -> None:
    action_id = office.approved()
    done = office.idem.run_all()
    assert [d.message.task.rpartition(".")[2] for d in done] == list(STEPS)
    action = office.store.get_action(action_id)
    assert (action["state"], action["result"]) == ("completed", {"paid": 50})
    assert done[-1].value == {"action_id": action_id, "state": "completed", "result": {"paid": 50}}
    assert len(office.till.puts) == 1
    assert office.happened(action_id) == [
        *("proposed", "gated", "enqueued", "leased", "dispatched", "accepted"),
        *("leased", "verified", "leased", "completed"),
    ]


def test_whoever_knows_the_chain_can_wait_for_the_result(office: Office) -> None:
    action_id = office.approved()
    last = governed_chain(action_id, office.store.get_action(action_id)["chain_id"], office.app).tasks[-1]
    office.idem.run_all()
    result = AsyncResult(last.options["task_id"], app=office.app).get(timeout=30)
    assert result == {"action_id": action_id, "state": "completed", "result": {"paid": 50}}


def test_the_same_proposal_again_is_the_same_action(office: Office) -> None:
    first, again = office.proposed("o-1"), office.proposed("o-1")
    assert first == again
    with pytest.raises(ActionIdempotencyConflict):
        office.proposed("o-1", amount=51)


def test_a_payload_that_does_not_fit_is_not_proposed(office: Office) -> None:
    with pytest.raises(PayloadRefused):
        propose(REFUND, {"order": "o-1"}, idempotency_key="k", app=office.app)
    with pytest.raises(ConfigurationError, match=r"payments\.refund"):
        propose("payments.refunds", {"order": "o-1", "amount": 1}, idempotency_key="k", app=office.app)
    assert office.store.find() == []


def test_a_proposal_says_where_it_comes_from(office: Office) -> None:
    action = office.store.get_action(office.proposed(source_ref="ticket/9"))
    assert (action["source"], action["source_ref"]) == ("shop", "ticket/9")
    assert office.store.get_action(office.proposed("o-2", source="billing"))["source"] == "billing"


def test_the_second_approver_learns_who_was_first(office: Office) -> None:
    action_id = office.approved(principal="ann")
    office.idem.take()
    with pytest.raises(AlreadyDecided, match="already approved by ann") as refused:
        approve(action_id, principal="bob", app=office.app)
    assert refused.value.by == "ann"
    assert office.idem.messages() == []
    assert office.happened(action_id) == ["proposed", "gated", "enqueued"]


def test_of_eight_clicks_at_once_one_approves(office: Office) -> None:
    action_id = office.proposed()
    start, outcomes = threading.Barrier(8), []

    def click(who: str) -> None:
        start.wait()
        try:
            approve(action_id, principal=who, app=office.app)
            outcomes.append("approved")
        except AlreadyDecided:
            outcomes.append("told")

    clicks = [threading.Thread(target=click, args=(f"owner-{n}",)) for n in range(8)]
    for thread in clicks:
        thread.start()
    for thread in clicks:
        thread.join()
    assert sorted(outcomes) == ["approved"] + ["told"] * 7
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    assert len(office.till.puts) == 1


def test_the_same_evidence_again_is_answered_and_publishes_nothing(office: Office) -> None:
    action_id = office.proposed()
    evidence = evidence_for(office, action_id)
    first = approve(action_id, evidence, app=office.app)
    assert len(office.idem.take()) == 1
    assert approve(action_id, evidence, app=office.app) == first
    assert office.idem.messages() == []


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"action_digest": "0" * 64}, "action_digest"),
        ({"expires_at_epoch": 1_999_999_000.0, "decided_at_epoch": 1_999_998_000.0}, "expired"),
        ({"decision": "rejected"}, "decision"),
        ({"extra": "field"}, "shape"),
    ],
)
def test_an_approval_that_would_not_hold_is_refused_at_once(office: Office, changed: dict[str, Any], code: str) -> None:
    action_id = office.proposed()
    with pytest.raises(GateRefused) as refused:
        approve(action_id, evidence_for(office, action_id, **changed), app=office.app)
    assert refused.value.code == code
    assert office.happened(action_id) == ["proposed"]
    assert office.store.list_receipts(action_id) == []


@pytest.mark.parametrize("evidence", [["yes"], {"decision": float("nan")}, {"decision": object()}])
def test_evidence_that_is_none_is_refused_as_such(office: Office, evidence: Any) -> None:
    action_id = office.proposed()
    with pytest.raises(GateRefused) as refused:
        approve(action_id, evidence, app=office.app)
    assert refused.value.code == "evidence"
    assert office.happened(action_id) == ["proposed"]


def test_a_grant_approves_only_what_may_be_granted(office: Office) -> None:
    action_id = office.proposed()
    grant = grant_approval(
        office.store.get_action(action_id),
        principal="ann",
        grant_id="g-1",
        source_request_id="r-1",
        grant_expires_at="unlimited",
        decided_at=office.clock.now,
    )
    with pytest.raises(GateRefused, match="not_grantable"):
        approve(action_id, grant, app=office.app)
    # Where nobody knows the type, the worker that does has the last word.
    known, office.governance.catalog = office.governance.catalog, Catalog()
    approve(action_id, grant, app=office.app)
    office.governance.catalog = known
    assert isinstance(office.next("dispatch").value, ActionFailed)
    assert "not_grantable" in office.error(action_id)
    assert office.till.puts == []


def test_where_keys_are_configured_only_a_signed_approval_counts(tmp_path: Path) -> None:
    private, public = generate_key()
    office = Office(tmp_path, governed_approval_keys={"ann-2026": public})
    action_id = office.proposed()
    with pytest.raises(GateRefused, match="unsigned"):
        approve(action_id, principal="ann", app=office.app)
    evidence = ApprovalSigner.from_pem("ann-2026", private).sign(evidence_for(office, action_id))
    approve(action_id, evidence, app=office.app)
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    forged = office.proposed("o-2")
    office.store.approve(forged, evidence_for(office, forged), chain_id="c")  # by whoever can write to the database
    governed_chain(forged, "c", office.app).apply_async()
    assert isinstance(office.next("dispatch").value, ActionFailed)
    assert "unsigned" in office.error(forged)
    assert len(office.till.puts) == 1
    office.close()


def test_approve_wants_to_know_who_approves(office: Office) -> None:
    action_id = office.proposed()
    with pytest.raises(ConfigurationError, match="principal"):
        approve(action_id, app=office.app)
    with pytest.raises(ConfigurationError, match="principal"):
        approve(action_id, evidence_for(office, action_id), principal="ann", app=office.app)
    with pytest.raises(ConfigurationError, match="evidence='ann': say who approves as principal="):
        approve(action_id, "ann", app=office.app)  # type: ignore[arg-type]
    assert office.happened(action_id) == ["proposed"]


def test_a_rejected_action_never_happens(office: Office) -> None:
    action_id = office.approved()
    reject(action_id, "wrong order", principal="bob", app=office.app)
    delivered = office.next("dispatch")
    assert isinstance(delivered.value, ActionFailed)
    assert delivered.value.reason == "rejected by bob: wrong order"
    assert (office.till.puts, office.letters(), office.idem.messages()) == ([], [], [])
    with pytest.raises(AlreadyDecided):
        reject(action_id, "again", principal="eve", app=office.app)


def test_an_approval_needs_no_claim_store(tmp_path: Path) -> None:
    office = Office(tmp_path, idempotency_store=None)
    office.idem.runtime._store = None  # as in a web process
    office.approved()
    assert len(office.idem.take()) == 1
    office.close()


# --- what a link and an errback are told -----------------------------------------------------------------------------


@pytest.fixture
def listening(office: Office) -> list[Any]:
    """What the link and the errback of an approval heard."""
    heard: list[Any] = []

    @office.app.task(name="then", shared=False)
    def then(result: Any) -> None:
        heard.append(("then", result["state"], result["result"]))

    @office.app.task(name="oh_no", shared=False)
    def oh_no(request: Any, error: Any, traceback: Any) -> None:
        heard.append(("oh no", request.task.rpartition(".")[2], type(error).__name__, error.action_id))

    return heard


def test_the_result_goes_to_the_link(office: Office, listening: list[Any]) -> None:
    office.approved(link=office.app.tasks["then"].s(), link_error=office.app.tasks["oh_no"].s())
    office.idem.run_all()
    assert listening == [("then", "completed", {"paid": 50})]


def test_the_errback_is_told_and_the_chain_stops(office: Office, listening: list[Any]) -> None:
    office.till.on_put = office.till.refuse
    action_id = office.approved(link=[office.app.tasks["then"].s()], link_error=office.app.tasks["oh_no"].s())
    done = office.idem.run_all()
    assert [d.message.task for d in done if "governed" in d.message.task] == ["celery_idem.governed.dispatch"]
    assert listening == [("oh no", "dispatch", "ActionFailed", action_id)]
    assert "the order is not paid" in office.error(action_id)
    assert office.letters() == [office.error(action_id)]


def test_a_chain_is_an_ordinary_canvas(office: Office, listening: list[Any]) -> None:
    action_id = office.approved()
    office.idem.take()  # the one that approve published
    chain_id = office.store.get_action(action_id)["chain_id"]
    (governed_chain(action_id, chain_id, office.app) | office.app.tasks["then"].s()).apply_async()
    office.idem.run_all()
    assert listening == [("then", "completed", {"paid": 50})]


# --- before the mutation ---------------------------------------------------------------------------------------------


def about(left: float, delay: float) -> bool:
    """Whether so much is left of the delay when it is looked at, soon after it began."""
    return delay - 4 < left < delay + 0.5


def test_closed_admission_defers_and_consumes_nothing(office: Office) -> None:
    action_id = office.approved(lifetime=86_400)
    office.store.set_admission(False, "month end", actor="ops")
    delays = []
    for _ in range(8):
        delivered = office.next("dispatch")
        assert delivered.state == "RETRY"
        delays.append(delivered.published[0].delay)
    assert all(map(about, delays, [1, 2, 4, 8, 16, 32, 60, 60])), delays
    action = office.store.get_action(action_id)
    assert (action["state"], action["attempt_count"], action["lease_owner"]) == ("gated", 0, None)
    assert [r["kind"] for r in office.store.list_receipts(action_id)] == ["gate"]
    assert office.store.list_events(action_id)[-1]["details"]["reason"] == "admission closed: month end"
    office.store.set_admission(True, "done", actor="ops")
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    assert len(office.till.puts) == 1


def test_an_approval_that_ended_while_it_waited_authorizes_nothing(office: Office) -> None:
    office.approved(lifetime=60)
    office.idem.advance(61)
    delivered = office.next("dispatch")
    assert isinstance(delivered.value, ActionFailed)
    assert "gate refused, expired" in delivered.value.reason
    assert (office.till.puts, len(office.letters())) == ([], 1)


def test_two_gates_are_none_and_the_action_may_be_proposed_again(office: Office) -> None:
    action_id = office.approved()
    office.store.gate(action_id, evidence_for(office, action_id), receipt_key="another-way")
    assert isinstance(office.next("dispatch").value, ActionFailed)
    assert "gate_count" in office.letters()[0]
    assert office.till.puts == []
    again = propose(REFUND, {"order": "o-1", "amount": 50}, idempotency_key="o-1/again", app=office.app)
    approve(again["action_id"], principal="ann", app=office.app)
    office.idem.run_all()
    assert office.state(again["action_id"]) == "completed"


def test_an_action_waits_for_a_worker_that_knows_its_type(office: Office) -> None:
    action_id = office.approved()
    known, office.governance.catalog = office.governance.catalog, Catalog()
    assert office.next("dispatch").state == "RETRY"
    assert office.next("dispatch").state == "RETRY"
    assert "no action type" in office.store.list_events(action_id)[-1]["details"]["reason"]
    office.governance.catalog = known
    office.idem.run_all()
    assert office.state(action_id) == "completed"


def test_a_payload_changed_in_the_database_ends_the_action(office: Office) -> None:
    action_id = office.approved()
    with closing(Ledger("sqlite", office.url)) as ledger:
        ledger.forge("UPDATE celery_idem_action SET payload = replace(payload, '50', '5000')")
    delivered = office.next("dispatch")
    assert isinstance(delivered.value, ActionFailed)
    assert office.happened(action_id)[-1] == "failed"
    assert (office.till.puts, len(office.letters())) == ([], 1)


def test_a_step_of_an_action_nobody_approved_comes_to_nothing(office: Office) -> None:
    action_id = office.proposed()
    governed_chain(action_id, "c", office.app).apply_async()
    delivered = office.next("dispatch")
    assert isinstance(delivered.value, ActionTransitionError)
    assert (office.state(action_id), office.till.puts, office.idem.messages()) == ("proposed", [], [])


# --- in doubt --------------------------------------------------------------------------------------------------------


def test_a_mutation_without_an_answer_is_found_by_looking(office: Office) -> None:
    office.till.on_put = office.till.pay_in_silence
    action_id = office.approved()
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    assert len(office.till.puts) == 1
    assert office.happened(action_id).count("observing") == 1


def test_an_answer_to_another_request_does_not_count(office: Office) -> None:
    def mislead(request: Any) -> Any:
        office.till.pay(request)
        return {"execution_digest": "0" * 64, "status": "rejected", "result": None}

    office.till.on_put = mislead
    action_id = office.approved()
    office.idem.run_all()
    assert (office.state(action_id), len(office.till.puts)) == ("completed", 1)


def test_looks_are_spaced_out_and_hold_no_slot(office: Office) -> None:
    office.till.on_put = office.till.lose
    action_id = office.approved()
    assert office.next("dispatch").state == "SUCCESS"  # dispatched; the first look found nothing
    delays = []
    for _ in range(4):
        delivered = office.next("observe")
        assert delivered.state == "RETRY"
        delays.append(delivered.published[0].delay)
    assert all(map(about, delays, [5, 10, 20, 40])), delays  # the first one only learnt when the next look is due
    office.till.done[office.till.puts[0]] = {"paid": 50}  # it arrives after all
    office.idem.run_all()
    assert (office.state(action_id), len(office.till.puts)) == ("completed", 1)


def test_an_answer_that_never_comes_ends_ambiguous_and_nothing_is_sent_again(office: Office) -> None:
    office.till.on_put, office.till.on_look = office.till.lose, office.till.look_away
    action_id = office.approved()
    done = office.idem.run_all()
    assert isinstance(done[-1].value, ActionFailed)
    assert "ambiguous" in done[-1].value.reason
    action = office.store.get_action(action_id)
    assert (action["state"], action["result"]["status"]) == ("failed", "ambiguous")
    assert len(office.till.puts) == 1
    assert len(office.till.looks) == action["result"]["observations"] <= 10
    assert len(office.letters()) == 1


def test_what_the_endpoint_rejected_in_silence_is_learnt_by_looking(office: Office) -> None:
    office.till.on_put, office.till.on_look = office.till.lose, office.till.refuse
    action_id = office.approved()
    office.idem.run_all()
    assert office.happened(action_id)[-1] == "failed"
    assert "the endpoint says rejected: the order is not paid" in office.error(action_id)


def test_what_was_accepted_must_also_be_shown(office: Office) -> None:
    action_id = office.approved()
    assert office.next("dispatch").state == "SUCCESS"
    office.till.done.clear()
    office.next("observe")
    assert office.next("verify").state == "RETRY"
    done = office.idem.run_all()
    assert isinstance(done[-1].value, ActionFailed)
    assert "verification: it was accepted, and now the endpoint says absent" in office.error(action_id)
    assert len(office.till.puts) == 1


def test_a_verification_that_comes_late_is_enough(office: Office) -> None:
    action_id = office.approved()
    office.next("dispatch")
    office.till.on_look = office.till.look_away
    office.next("observe")
    assert office.next("verify").state == "RETRY"
    office.till.on_look = office.till.show
    office.idem.run_all()
    assert office.state(action_id) == "completed"


def test_a_soft_limit_in_the_mutation_is_doubt(office: Office) -> None:
    def slow(request: Any) -> Any:
        office.till.pay(request)
        raise SoftTimeLimitExceeded

    office.till.on_put = slow
    action_id = office.approved()
    office.idem.run_all()
    assert (office.state(action_id), len(office.till.puts)) == ("completed", 1)
    assert office.happened(action_id).count("observing") == 1


# --- when the ledger does not answer ---------------------------------------------------------------------------------


class Losing(SQLActionStore):
    """Does what it is asked once, and loses the answer."""

    lost: str = ""

    def _losing(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(super(), verb)(*args, **kwargs)
        if type(self).lost == verb:
            type(self).lost = ""
            raise StoreUnavailable("the connection broke", may_have_landed=True)
        return answer

    def begin_owner_authorized_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return self._losing("begin_owner_authorized_dispatch", *args, **kwargs)

    def accept(self, *args: Any, **kwargs: Any) -> Any:
        return self._losing("accept", *args, **kwargs)

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        return self._losing("verify", *args, **kwargs)

    def complete(self, *args: Any, **kwargs: Any) -> Any:
        return self._losing("complete", *args, **kwargs)


@pytest.mark.parametrize("verb", ["accept", "verify", "complete"])
def test_a_lost_answer_of_the_ledger_makes_no_second_mutation(office: Office, verb: str) -> None:
    office.use(type("Once", (Losing,), {"lost": verb}))
    action_id = office.approved()
    office.idem.run_all()
    assert (office.state(action_id), len(office.till.puts)) == ("completed", 1)


def test_without_the_ledgers_word_nothing_is_sent(office: Office) -> None:
    office.use(type("Once", (Losing,), {"lost": "begin_owner_authorized_dispatch"}))
    action_id = office.approved()
    office.idem.run_all()
    assert office.till.puts == []
    action = office.store.get_action(action_id)
    assert (action["state"], action["result"]["status"]) == ("failed", "ambiguous")


class Suspended(SQLActionStore):
    """The machine sleeps, its own clock with it, once the gate is consumed; another worker's sweep ends the action."""

    office: Any = None

    def begin_owner_authorized_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        began = super().begin_owner_authorized_dispatch(*args, **kwargs)
        self.office.clock.advance(86_400)
        self.office.store.recover_expired_leases()
        return began


def test_a_machine_that_was_suspended_before_it_sent_sends_nothing(office: Office) -> None:
    office.use(type("Asleep", (Suspended,), {"office": office}))
    action_id = office.approved()
    office.idem.run_all()
    assert office.till.puts == []
    action = office.store.get_action(action_id)
    assert (action["state"], action["result"]["status"]) == ("failed", "ambiguous")


def test_a_clock_the_ledger_does_not_tell_holds_up_no_mutation(office: Office) -> None:
    class Mute(SQLActionStore):
        def now(self) -> float:
            raise StoreUnavailable("the connection broke")

    action_id = office.approved()
    office.use(Mute)
    office.idem.run_all()
    assert (office.state(action_id), len(office.till.puts)) == ("completed", 1)


def test_a_step_waits_for_a_ledger_that_does_not_answer(office: Office) -> None:
    action_id = office.approved()
    down = type("Down", (SQLActionStore,), {"get_action": _unavailable})
    office.use(down)
    assert [office.next("dispatch").state for _ in range(3)] == ["RETRY"] * 3
    office.use(SQLActionStore)
    office.idem.run_all()
    assert office.state(action_id) == "completed"


def test_a_soft_limit_while_the_ledger_is_asked_is_no_end(office: Office) -> None:
    action_id = office.approved()
    office.use(type("Slow", (SQLActionStore,), {"get_action": _too_slow}))
    assert office.next("dispatch").state == "RETRY"
    office.use(SQLActionStore)
    office.idem.run_all()
    assert office.state(action_id) == "completed"


def _too_slow(self: Any, action_id: str) -> Any:
    raise SoftTimeLimitExceeded


def _unavailable(self: Any, action_id: str) -> Any:
    raise StoreUnavailable("no answer")
