"""The refund service makes one refund per key, counts every PUT, and keeps silent where the demo wants it to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from example_project.refund_ledger import RefundLedger
from example_project.servers import refund_service


@dataclass
class Provider:
    """The service as its callers see it, and its ledger."""

    url: str
    ledger: RefundLedger

    def put(self, key: str, amount: int = 20, *, timeout: float = 30) -> httpx.Response:
        body = {"payload": {"order_id": "A1", "amount": amount}}
        headers = {"Idempotency-Key": key, "Worker": "77"}
        return httpx.put(f"{self.url}/ACT-1", json=body, headers=headers, timeout=timeout)

    def get(self, key: str, *, timeout: float = 30) -> httpx.Response:
        return httpx.get(f"{self.url}/ACT-1", headers={"Idempotency-Key": key}, timeout=timeout)

    @property
    def puts(self) -> int:
        return len(self.ledger.requests("ACT-1", "PUT"))

    @property
    def amounts(self) -> list[int]:
        return [refund.amount for refund in self.ledger.refunds("ACT-1")]


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[Provider]:
    with refund_service(tmp_path / "refunds.db") as url:
        yield Provider(url, RefundLedger(tmp_path / "refunds.db"))


def test_a_put_makes_a_refund_bound_to_its_key(provider: Provider) -> None:
    answer = provider.put("k1")
    assert answer.status_code == 201
    assert answer.json() == {"execution_digest": "k1", "status": "completed", "result": {"refund": 1}}
    assert provider.amounts == [20]
    assert [(request.key, request.worker) for request in provider.ledger.requests("ACT-1", "PUT")] == [("k1", "77")]


def test_a_second_put_moves_no_money_and_is_counted(provider: Provider) -> None:
    provider.put("k1")
    assert provider.put("k1").status_code == 200
    assert (provider.puts, provider.amounts) == (2, [20])


def test_a_put_under_another_key_is_another_refund(provider: Provider) -> None:
    provider.put("k1")
    provider.put("k2")
    assert (provider.puts, provider.amounts) == (2, [20, 20])


def test_a_key_is_for_one_refund_only(provider: Provider) -> None:
    provider.put("k1")
    answer = provider.put("k1", amount=2000)
    assert (answer.status_code, answer.json()["status"]) == (422, "rejected")
    assert (provider.puts, provider.amounts) == (2, [20])


def test_looking_changes_nothing(provider: Provider) -> None:
    assert provider.get("k1").status_code == 404
    made = provider.put("k1").json()
    assert provider.get("k1").json() == made
    assert provider.get("k2").status_code == 404
    assert (provider.puts, provider.amounts) == (1, [20])
    assert len(provider.ledger.requests("ACT-1", "GET")) == 3


def test_what_is_no_refund_is_refused_and_counted(provider: Provider) -> None:
    for answer in (
        httpx.put(f"{provider.url}/ACT-1", content=b"{", headers={"Idempotency-Key": "k1"}),
        provider.put(""),
    ):
        assert answer.status_code == 400
    assert (provider.puts, provider.amounts) == (2, [])


def test_a_held_answer_never_comes_though_the_refund_is_made(provider: Provider) -> None:
    provider.ledger.plan("ACT-1", "hold")
    with pytest.raises(httpx.ReadTimeout):
        provider.put("k1", timeout=1)
    assert provider.get("k1").json()["status"] == "completed"
    assert (provider.puts, provider.amounts) == (1, [20])


def test_a_silent_service_answers_nobody(provider: Provider) -> None:
    provider.ledger.plan("ACT-1", "silent")
    with pytest.raises(httpx.ReadTimeout):
        provider.put("k1", timeout=1)
    with pytest.raises(httpx.ReadTimeout):
        provider.get("k1", timeout=1)
    assert (provider.puts, provider.amounts) == (1, [20])


def test_garbage_is_an_answer_to_something_else(provider: Provider) -> None:
    provider.ledger.plan("ACT-1", "garbage")
    assert provider.put("k1").json()["execution_digest"] == "0" * 64
    assert provider.get("k1").json()["execution_digest"] == "k1"


def test_a_refusal_refunds_nothing(provider: Provider) -> None:
    provider.ledger.plan("ACT-1", "refuse")
    answer = provider.put("k1")
    assert (answer.status_code, answer.json()["status"]) == (422, "rejected")
    assert (provider.puts, provider.amounts) == (1, [])
