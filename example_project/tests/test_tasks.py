"""Every order is charged once, whatever the broker, the customer and the machine do."""

from __future__ import annotations

import pytest

from celery_idem import FingerprintMismatch, OutcomeUnknown
from celery_idem.testing import Idem, Point
from example_project import ledger
from example_project.tasks import charge, charge_cautious, charge_plain, charge_verified


def test_the_broker_gives_a_message_twice(idem: Idem) -> None:
    first = idem.send(charge, "A1", 20)
    again = idem.again(first)
    assert again.value == first.value
    assert [row.amount for row in ledger.charges("A1")] == [20]


def test_a_plain_task_charges_twice(idem: Idem) -> None:
    idem.again(idem.send(charge_plain, "A1", 20))
    assert [row.amount for row in ledger.charges("A1")] == [20, 20]


def test_the_customer_clicks_twice_and_then_changes_the_amount(idem: Idem) -> None:
    with idem.during(charge.s("A2", 20)) as first:
        idem.send(charge, "A2", 20)
    assert [done.value for done in idem.run_all()] == [first.value]
    assert isinstance(idem.send(charge, "A2", 25).value, FingerprintMismatch)
    assert len(ledger.charges("A2")) == 1


def test_a_worker_dies_after_the_charge_and_the_next_run_is_told(idem: Idem) -> None:
    with idem.killed(before="completion"):
        idem.send(charge, "A3", 20)
    idem.run_all()
    assert [row.attempt for row in ledger.charges("A3")] == [1, 2]


def test_a_worker_dies_after_the_charge_and_somebody_must_look(idem: Idem) -> None:
    with idem.killed(before="completion"):
        idem.send(charge_cautious, "A4", 20)
    (again,) = idem.run_all()
    assert isinstance(again.value, OutcomeUnknown)
    assert len(ledger.charges("A4")) == 1


@pytest.mark.parametrize(("point", "charged"), [("body", [2]), ("completion", [1])])
def test_a_worker_dies_and_the_next_run_looks_into_the_ledger(idem: Idem, point: Point, charged: list[int]) -> None:
    with idem.killed(before=point):
        idem.send(charge_verified, "A5", 20)
    (again,) = idem.run_all()
    assert [row.attempt for row in ledger.charges("A5")] == charged
    assert again.value["receipt"] == ledger.charges("A5")[0].receipt
