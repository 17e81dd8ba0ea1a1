"""What the demo does to the shop: each scenario with what it sends, what goes wrong, and what is promised.

Every scenario happens twice, to an order of the plain task and to one of a task on celery_idem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from example_project import accidents, ledger
from example_project.ledger import Charge, Delivery
from example_project.tasks import charge, charge_cautious, charge_plain, charge_verified


@dataclass(frozen=True)
class Seen:
    """What one side came to."""

    charges: list[Charge]
    deliveries: list[Delivery]
    results: list[tuple[str, Any]]
    """State and value of each message, as its sender gets them; an exception by its name."""

    @property
    def one_receipt(self) -> bool:
        """Every message and every copy of it succeeded with the receipt of the first charge."""
        told = [*self.results, *((copy.state, copy.told) for copy in self.deliveries if copy.state != "IGNORED")]
        return all(state == "SUCCESS" and value["receipt"] == self.charges[0].receipt for state, value in told)


@dataclass
class Side:
    """One scenario on one side: an order, and the messages sent for it."""

    task: Any
    order_id: str
    task_ids: list[str] = field(default_factory=list)

    def send(self, amount: int, task_id: str) -> None:
        """Publish one message."""
        self.task.apply_async((self.order_id, amount), task_id=task_id)
        self.task_ids.append(task_id)

    @property
    def answered(self) -> bool:
        """Every message sent came to a success or a failure; parked copies are still on their way."""
        return len([d for d in self._deliveries() if d.state in {"SUCCESS", "FAILURE"}]) >= len(self.task_ids)

    def seen(self) -> Seen:
        """What became of it, by the ledger and by the result backend."""
        return Seen(ledger.charges(self.order_id), self._deliveries(), [self._result(i) for i in self._messages])

    @property
    def _messages(self) -> list[str]:
        return list(dict.fromkeys(self.task_ids))

    def _deliveries(self) -> list[Delivery]:
        return [delivery for task_id in self._messages for delivery in ledger.deliveries(task_id)]

    def _result(self, task_id: str) -> tuple[str, Any]:
        result = self.task.AsyncResult(task_id)
        value = result.result
        return result.state, type(value).__name__ if isinstance(value, BaseException) else value


@dataclass(frozen=True)
class Scenario:
    """One row of the table."""

    title: str
    sent: str
    task: Any
    """The one on celery_idem."""
    bare: int
    """Charges without celery_idem."""
    charges: int
    """Charges with it."""
    promised: str
    kept: Callable[[Seen], bool]
    """Whether the rest of the promise holds too."""
    batches: tuple[tuple[int, ...], ...] = ((100,),)
    """Amounts of the messages; a batch is sent when the one before is answered."""
    same_message: bool = False
    accident: tuple[accidents.Moment, accidents.Kind] | None = None

    @property
    def kills_worker(self) -> bool:
        """The worker dies and has to be started again."""
        return self.accident is not None and self.accident[1] == "worker killed"

    def sides(self, number: int) -> tuple[Side, Side]:
        """The plain side and the other, with the accident planned for both."""
        sides = Side(charge_plain, f"{number}-bare"), Side(self.task, f"{number}-once")
        for side in sides:
            if self.accident is not None:
                accidents.plan(side.order_id, *self.accident)
        return sides

    def send(self, batch: tuple[int, ...], side: Side) -> None:
        """Publish one batch for one side."""
        task_id = str(uuid4())
        for amount in batch:
            side.send(amount, task_id if self.same_message else str(uuid4()))

    def promise_kept(self, seen: Seen) -> bool:
        """Whether celery_idem did what the row says."""
        return len(seen.charges) == self.charges and self.kept(seen)


def _told_of_the_first(seen: Seen) -> bool:
    return [row.attempt for row in seen.charges] == [1, 2] and seen.results[0][0] == "SUCCESS"


def _parked(seen: Seen) -> bool:
    return seen.one_receipt and any(delivery.state == "IGNORED" for delivery in seen.deliveries)


def _mismatch(seen: Seen) -> bool:
    first, second = seen.results
    return first[0] == "SUCCESS" and first[1]["amount"] == 100 and second == ("FAILURE", "FingerprintMismatch")


SCENARIOS = (
    Scenario(
        title="the same message three times",
        sent="1 message, 3 times",
        task=charge,
        batches=((100, 100, 100),),
        same_message=True,
        bare=3,
        charges=1,
        promised="one charge, and one receipt for all three",
        kept=lambda seen: seen.one_receipt,
    ),
    Scenario(
        title="two processes race for one order",
        sent="2 messages at once",
        task=charge,
        batches=((100, 100),),
        bare=2,
        charges=1,
        promised="one charge; the other waits for its receipt",
        kept=lambda seen: seen.one_receipt,
    ),
    Scenario(
        title="a duplicate while the first still runs",
        sent="2 messages at once",
        task=charge,
        batches=((100, 100),),
        accident=("before the charge", "slow"),
        bare=2,
        charges=1,
        promised="one charge; the duplicate is parked, then gets the receipt",
        kept=_parked,
    ),
    Scenario(
        title="the same order with another amount",
        sent="100, then 150",
        task=charge,
        batches=((100,), (150,)),
        bare=2,
        charges=1,
        promised="one charge of 100; the second is a FingerprintMismatch",
        kept=_mismatch,
    ),
    Scenario(
        title='process killed after charging, on_unknown="run"',
        sent="1 message",
        task=charge,
        accident=("after the charge", "child killed"),
        bare=2,
        charges=2,
        promised="may charge twice: nothing is lost, the second run is told",
        kept=_told_of_the_first,
    ),
    Scenario(
        title='process killed after charging, on_unknown="fail"',
        sent="1 message",
        task=charge_cautious,
        accident=("after the charge", "child killed"),
        bare=2,
        charges=1,
        promised="one charge; the task fails with OutcomeUnknown",
        kept=lambda seen: seen.results == [("FAILURE", "OutcomeUnknown")],
    ),
    Scenario(
        title="process killed after charging, verify=find_charge",
        sent="1 message",
        task=charge_verified,
        accident=("after the charge", "child killed"),
        bare=2,
        charges=1,
        promised="one charge, found in the ledger; its receipt is delivered",
        kept=lambda seen: seen.one_receipt,
    ),
)
"""On any broker."""

WHOLE_WORKER = (
    Scenario(
        title="worker killed after the task, before the ack",
        sent="1 message",
        task=charge,
        accident=("before the ack", "worker killed"),
        bare=2,
        charges=1,
        promised="one charge; a new worker delivers its receipt",
        kept=lambda seen: seen.one_receipt,
    ),
    Scenario(
        title="worker killed after charging, verify=find_charge",
        sent="1 message",
        task=charge_verified,
        accident=("after the charge", "worker killed"),
        bare=2,
        charges=1,
        promised="one charge, found in the ledger; its receipt is delivered",
        kept=lambda seen: seen.one_receipt,
    ),
)
"""On brokers that give a dead worker's messages to another."""
