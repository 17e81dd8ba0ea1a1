"""A refund desk for the chain's tests: an app whose messages the test delivers by hand, a ledger file that goes by the
same clock, and the other side, which counts what it was asked.

PYTEST_DONT_REWRITE: the modules import it before pytest does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from celery_idem.governed import SQLActionStore
from celery_idem.governed.catalog import ActionType, Catalog
from celery_idem.governed.chain import approve, governance_of, propose
from celery_idem.testing import Delivered
from tests.support.delivery import Shop

REFUND = "payments.refund"
SECRET = "to Zoë Quux, 12 Privet Drive"


class Refund(BaseModel):
    order: str
    amount: int
    note: str = SECRET


class Till:
    """The other side: what it did, how often it was asked to, and how often it was looked at."""

    def __init__(self) -> None:
        self.puts: list[str] = []
        self.looks: list[str] = []
        self.done: dict[str, Any] = {}
        self.on_put = self.pay
        self.on_look = self.show

    # what it may do when it is asked to pay

    def pay(self, request: Any) -> Any:
        self.done[request.execution_digest] = {"paid": request.payload["amount"]}
        return request.completed(self.done[request.execution_digest])

    def pay_in_silence(self, request: Any) -> Any:
        self.pay(request)
        raise TimeoutError(f"no answer about {request.payload}")

    def lose(self, request: Any) -> Any:
        raise ConnectionError("the request never arrived")

    def refuse(self, request: Any) -> Any:
        return request.rejected("the order is not paid")

    def die(self, request: Any) -> Any:
        self.pay(request)
        raise SystemExit(1)

    # what it may say when it is looked at

    def show(self, request: Any) -> Any:
        if request.execution_digest in self.done:
            return request.completed(self.done[request.execution_digest])
        return request.absent()

    def look_away(self, request: Any) -> Any:
        raise TimeoutError


class Office:
    """One app with its till; ``idem`` delivers."""

    def __init__(self, folder: Path, *, kind: dict[str, Any] | None = None, **conf: Any) -> None:
        self.url = f"sqlite:///{folder / 'actions.db'}"
        self.shop = Shop(governed_store=self.url, **conf)
        self.app, self.idem, self.clock = self.shop.app, self.shop.idem, self.shop.clock
        self.till = till = Till()

        class Desk:
            def execute(self, request: Any) -> Any:
                till.puts.append(request.execution_digest)
                return till.on_put(request)

            def observe(self, request: Any) -> Any:
                till.looks.append(request.execution_digest)
                return till.on_look(request)

        self.desk = ActionType(REFUND, Refund, Desk, **(kind or {}))
        self.governance = governance_of(self.app)
        self.governance.catalog = Catalog()
        self.governance.catalog.register(self.desk)
        self.opened: list[SQLActionStore] = []
        self.governance.open_store = self.open  # type: ignore[method-assign]
        self.store = self.governance.store

    def open(self, kind: type[SQLActionStore] = SQLActionStore) -> SQLActionStore:
        """A store on the ledger that goes by the test's clock, and tells."""
        store = kind(self.url, clock=self.clock)
        store.listener = self.governance.tell
        self.opened.append(store)
        return store

    def use(self, kind: type[SQLActionStore]) -> None:
        """Let the steps work on a store of this class."""
        self.governance._store = self.open(kind)

    def close(self) -> None:
        for store in self.opened:
            store.close()
        self.shop.close()

    # --- a life ------------------------------------------------------------------------------------------------------

    def proposed(self, order: str = "o-1", amount: int = 50, **more: Any) -> str:
        action = propose(REFUND, {"order": order, "amount": amount}, idempotency_key=order, app=self.app, **more)
        return str(action["action_id"])

    def approved(self, order: str = "o-1", **more: Any) -> str:
        """The id of an action whose chain is on the broker."""
        action_id = self.proposed(order)
        approve(action_id, app=self.app, **{"principal": "ann", **more})
        return action_id

    def state(self, action_id: str) -> str:
        return str(self.store.get_action(action_id)["state"])

    def error(self, action_id: str) -> str:
        return str(self.store.get_action(action_id)["last_error"])

    def happened(self, action_id: str) -> list[str]:
        return [event["event_type"] for event in self.store.list_events(action_id)]

    def letters(self) -> list[str]:
        return [letter["reason"] for letter in self.store.list_dead_letters()]

    def next(self, step: str | None = None) -> Delivered:
        """Deliver the one message on the broker, its time come."""
        (message,) = self.idem.messages()
        assert step is None or message.task == f"celery_idem.governed.{step}", message
        self.idem.advance(max(0.0, message.due - self.clock.now))
        return self.idem.deliver(message)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    """An office with nothing to do yet."""
    place = Office(tmp_path)
    yield place
    place.close()
