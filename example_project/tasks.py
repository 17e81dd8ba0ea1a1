"""The shop's tasks: one body, run by a plain Celery task and by three that charge an order once.

The three differ in one thing only: what to do where a worker died in the middle, and nobody knows whether it charged.
"""

from __future__ import annotations

import time
from typing import Any

from celery.signals import task_postrun, task_success

from celery_idem import Happened, IdempotentTask, NotHappened, Policy, current
from example_project import accidents, ledger
from example_project.app import app
from example_project.ledger import Receipt


def take_payment(order_id: str, amount: int) -> Receipt:
    """The effect: half a second at a payment provider that does not know duplicates, and a row in the ledger."""
    run = current()  # None in a plain task
    accidents.happen("before the charge", order_id)
    time.sleep(0.5)
    receipt = ledger.charge(order_id, amount, attempt=1 if run is None else run.attempt)
    accidents.happen("after the charge", order_id)
    return receipt


def find_charge(order_id: str, amount: int) -> Happened | NotHappened:  # noqa: ARG001  called like the task
    """Look whether an interrupted run charged: what it would have returned, or that running again is safe."""
    charges = ledger.charges(order_id)
    if not charges:
        return NotHappened()
    return Happened(Receipt(receipt=charges[0].receipt, order_id=order_id, amount=charges[0].amount))


@app.task
def charge_plain(order_id: str, amount: int) -> Receipt:
    """Bare Celery: one charge per delivery."""
    return take_payment(order_id, amount)


ONCE_PER_ORDER = Policy(key="order:{order_id}", fingerprint=["amount"])


@app.task(base=IdempotentTask, idempotency=ONCE_PER_ORDER)
def charge(order_id: str, amount: int) -> Receipt:
    """One charge per order. After a crash it runs again: ``current().reclaimed`` tells the body so."""
    return take_payment(order_id, amount)


@app.task(base=IdempotentTask, idempotency=Policy(on_unknown="fail").over(ONCE_PER_ORDER))
def charge_cautious(order_id: str, amount: int) -> Receipt:
    """One charge per order. After a crash it fails with OutcomeUnknown, for somebody to look."""
    return take_payment(order_id, amount)


@app.task(base=IdempotentTask, idempotency=Policy(verify=find_charge).over(ONCE_PER_ORDER))
def charge_verified(order_id: str, amount: int) -> Receipt:
    """One charge per order. After a crash it looks into the ledger, and charges only if nothing is there."""
    return take_payment(order_id, amount)


# --- for the demo: what each delivery came to, and one accident that no task body can have ----------------------------


@task_postrun.connect
def _note_delivery(task_id: str, state: str, retval: Any, **_: Any) -> None:
    told = type(retval).__name__ if isinstance(retval, BaseException) else retval
    ledger.note_delivery(task_id, state, told)


@task_success.connect
def _about_to_be_acked(sender: Any, **_: Any) -> None:
    request = sender.request
    accidents.happen("before the ack", (request.args or [request.kwargs.get("order_id", "")])[0])
