"""One digest for one execution, and an answer that counts only where it is bound to it."""

from __future__ import annotations

import dataclasses
import pickle
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from celery_idem.errors import CeleryIdemError, ConfigurationError, PayloadRefused
from celery_idem.governed import catalog as module
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.catalog import ActionType, action
from celery_idem.governed.endpoint import (
    EXECUTION_SCHEMA,
    Answer,
    EndpointDoubt,
    ExecutionRequest,
    execution_request,
    judged,
)
from celery_idem.governed.records import GateAuthorization

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

DIGEST = "ab" * 32


class Refund(BaseModel):
    order_id: int
    amount: str = "1"


class Service:
    def execute(self, request: ExecutionRequest) -> Answer:
        return request.completed()

    def observe(self, request: ExecutionRequest) -> Answer:
        return request.absent()


REFUND = ActionType("payments.refund", Refund, Service)


def row(**given: Any) -> dict[str, Any]:
    payload = given.pop("payload", {"amount": "1", "order_id": 7})
    return {
        "action_id": "a-1",
        "action_type": "payments.refund",
        "source": "shop",
        "source_ref": None,
        "payload": payload,
        "payload_sha256": digest_json(payload),
        "state": "gated",
        **given,
    }


EVIDENCE = {
    "approval_id": "APR-1",
    "decision_id": "DEC-1",
    "decided_at_epoch": 2_000_000_000,
    "expires_at_epoch": 2_000_003_600,
}
GATE = {
    "action_id": "a-1",
    "receipt_key": "owner-gate",
    "kind": "gate",
    "evidence": EVIDENCE,
    "evidence_sha256": digest_json(EVIDENCE),
}


def authorization(**given: Any) -> GateAuthorization:
    facts: dict[str, Any] = {
        "shape": "message_delivery",
        "granted": False,
        "receipt_key": "owner-gate",
        "evidence_sha256": GATE["evidence_sha256"],
        "approval_id": "APR-1",
        "decision_id": "DEC-1",
        "revision": 1,
        "decided_at": 2_000_000_000.0,
        "expires_at": 2_000_003_600.0,
        "expired": False,
    }
    return GateAuthorization(**facts | given)


def built(approval: Any = None, **given: Any) -> ExecutionRequest:
    return execution_request(row(**given), approval or authorization(), type=REFUND)


class TestRequest:
    def test_its_digest_is_that_of_what_it_says_and_of_the_evidence(self) -> None:
        assert built().execution_digest == digest_json(
            {
                "schema": EXECUTION_SCHEMA,
                "action_id": "a-1",
                "action_type": "payments.refund",
                "source": "shop",
                "payload_sha256": digest_json({"order_id": 7, "amount": "1"}),
                "approval_id": "APR-1",
                "decision_id": "DEC-1",
                "evidence_sha256": GATE["evidence_sha256"],
                "expires_at": 2_000_003_600.0,
            }
        )

    def test_built_again_from_receipt_or_a_later_judgement_it_is_the_same(self) -> None:
        first = built()
        assert built(GATE, state="dispatched", attempt_count=1, lease_owner="somebody") == first
        assert built(authorization(expired=True, key_id="k2", expires_at=2_000_003_600), state="dispatched") == first

    @pytest.mark.parametrize(
        "other",
        [
            {"action_id": "a-2"},
            {"source": "other"},
            {"payload": {"order_id": 7, "amount": "2"}},
            {"approval": authorization(approval_id="APR-2")},
            {"approval": authorization(decision_id="DEC-2")},
            {"approval": authorization(evidence_sha256=DIGEST)},
            {"approval": authorization(expires_at=2_000_003_601.0)},
        ],
        ids=str,
    )
    def test_whatever_it_binds_changes_the_digest(self, other: dict[str, Any]) -> None:
        assert built(**other).execution_digest != built().execution_digest

    def test_another_type_of_the_same_payload_has_another_digest(self) -> None:
        other = ActionType("payments.charge", Refund, Service)
        found = execution_request(row(action_type="payments.charge"), authorization(), type=other)
        assert found.execution_digest != built().execution_digest

    def test_the_payload_is_there_plain_and_as_its_model(self) -> None:
        request = built()
        assert request.payload == {"order_id": 7, "amount": "1"}
        assert request.model == Refund(order_id=7, amount="1")
        assert request.model is request.model

    def test_changing_its_payload_leaves_the_action_alone(self) -> None:
        action_row = row()
        request = execution_request(action_row, authorization(), type=REFUND)
        request.payload["amount"] = "1000"  # type: ignore[index]
        assert action_row["payload"]["amount"] == "1"

    def test_it_shows_no_payload_where_it_is_printed(self) -> None:
        assert "order_id" not in repr(built())
        assert DIGEST not in repr(built())
        assert built().execution_digest in repr(built())
        assert hash(built()) == hash(built())

    def test_without_a_type_it_takes_the_default_catalogs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.catalog, "_types", {})
        with pytest.raises(ConfigurationError, match=r"payments.refund.* is registered here"):
            execution_request(row(), authorization())
        action("payments.refund", payload=Refund)(Service)
        assert execution_request(row(), authorization()) == built()

    def test_another_type_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"type= is 'payments.refund', and action a-1 is a 'mail.send'"):
            execution_request(row(action_type="mail.send"), authorization(), type=REFUND)

    @pytest.mark.parametrize("wrong", [{"kind": "acceptance"}, {"action_id": "a-2"}])
    def test_another_receipt_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(
            ConfigurationError, match=r"authorization= is the receipt .*give the gate receipt of action a-1"
        ):
            built(GATE | wrong)

    def test_a_payload_that_was_changed_in_the_store_is_refused(self) -> None:
        with pytest.raises(PayloadRefused, match="action a-1 has another digest"):
            built(payload_sha256=DIGEST)

    @pytest.mark.parametrize("state", ["proposed", "gated"])
    def test_before_dispatch_the_payload_must_still_fit_its_model(self, state: str) -> None:
        with pytest.raises(PayloadRefused, match=r"does not fit Refund: order_id \(missing\)"):
            built(payload={"order": 7}, state=state)
        with pytest.raises(PayloadRefused, match="come back as it was"):
            built(payload={"order_id": 7}, state=state)

    def test_after_dispatch_it_can_be_looked_for_all_the_same(self) -> None:
        request = built(payload={"order": 7}, state="dispatched")
        assert request.payload == {"order": 7}
        with pytest.raises(PayloadRefused, match="does not fit Refund"):
            _ = request.model

    def test_one_made_by_hand_has_no_model(self) -> None:
        request = dataclasses.replace(built(), declared=None)
        assert request == built()
        with pytest.raises(ConfigurationError, match="declared="):
            _ = request.model


class TestAnswers:
    def test_those_of_the_request_count(self) -> None:
        request = built()
        answers = [
            request.completed({"id": 1}),
            request.rejected("no such order"),
            request.pending("soon"),
            request.absent(),
        ]
        assert [judged(request, answer) for answer in answers] == answers
        assert [answer.status for answer in answers] == ["completed", "rejected", "pending", "absent"]
        assert {answer.execution_digest for answer in answers} == {request.execution_digest}

    def test_a_mapping_counts_like_an_answer(self) -> None:
        request = built()
        said = {"execution_digest": request.execution_digest, "status": "completed", "result": [1], "more": "ignored"}
        assert judged(request, said) == request.completed([1])

    def test_a_result_is_what_json_makes_of_it(self) -> None:
        assert judged(built(), built().completed({"b": (1, 2), "a": None})).result == {"a": None, "b": [1, 2]}

    @pytest.mark.parametrize("answer", [None, True, "completed", 200, [], object(), built])
    def test_what_is_no_answer_is_doubt(self, answer: object) -> None:
        with pytest.raises(EndpointDoubt, match=r"action a-1 is .*: return request.completed"):
            judged(built(), answer)

    @pytest.mark.parametrize("digest", [None, "", DIGEST, 7, b"x", "\ud800", ["a"]])
    def test_an_answer_to_something_else_is_doubt(self, digest: Any) -> None:
        for answer in (Answer(digest, "completed"), {"execution_digest": digest, "status": "completed"}):
            with pytest.raises(EndpointDoubt, match="not bound to its execution_digest"):
                judged(built(), answer)

    def test_a_digest_in_capitals_is_another(self) -> None:
        with pytest.raises(EndpointDoubt, match="not bound"):
            judged(built(), Answer(built().execution_digest.upper(), "completed"))

    @pytest.mark.parametrize("status", [None, "", "COMPLETED", "done", 1, True, ["completed"]])
    def test_a_status_that_is_none_is_doubt(self, status: Any) -> None:
        with pytest.raises(EndpointDoubt, match="status other than completed, rejected, pending, absent: look"):
            judged(built(), Answer(built().execution_digest, status))

    @pytest.mark.parametrize(
        ("result", "problem"),
        [
            ("x" * 16_383, "result has 16385 bytes"),
            ({"a": {1, 2}}, "result.a is a set"),
            (float("inf"), "result is inf"),
            ("a\0", "no database can keep"),
            ([[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]], "nests too deep"),
        ],
        ids=["large", "set", "inf", "nul", "deep"],
    )
    def test_a_result_that_cannot_be_kept_is_doubt(self, result: Any, problem: str) -> None:
        with pytest.raises(EndpointDoubt, match=problem) as caught:
            judged(built(), built().completed(result))
        assert str(caught.value).endswith("have it answer with plain JSON, and less of it")

    def test_the_largest_result_is_kept(self) -> None:
        assert judged(built(), built().completed("x" * 16_382)).result == "x" * 16_382

    @pytest.mark.parametrize(
        ("reason", "kept"), [("x" * 600, "x" * 500), ("a\0b\nc\ud800", "a b c "), (None, ""), ({"why": 1}, ""), (7, "")]
    )
    def test_a_reason_never_makes_an_answer_doubtful(self, reason: Any, kept: str) -> None:
        answer = judged(built(), Answer(built().execution_digest, "rejected", reason=reason))
        assert answer.reason == kept

    @settings(any_speed, max_examples=150)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(string.printable), inner),
        ),
        st.sampled_from(["completed", "rejected", "other", None]),
        st.booleans(),
    )
    def test_nothing_comes_out_but_a_bound_answer_or_doubt(self, result: Any, status: Any, bound: bool) -> None:
        request = built()
        said = {"execution_digest": request.execution_digest if bound else DIGEST, "status": status, "result": result}
        for answer in (said, result):
            try:
                found = judged(request, answer)
            except EndpointDoubt:
                continue
            assert answer is said
            assert bound
            assert found.execution_digest == request.execution_digest
            assert found.status == status


def test_doubt_is_an_error_of_this_library_that_pickles() -> None:
    with pytest.raises(CeleryIdemError) as caught:
        judged(built(), None)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is EndpointDoubt
    assert (str(again), again.problem) == (str(caught.value), "is nothing")
