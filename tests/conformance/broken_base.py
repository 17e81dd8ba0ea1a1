"""What a broken action store is: ``SQLActionStore`` with one thing wrong, as somebody might write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from celery_idem.conformance.sql import SQLTamper
from celery_idem.governed import records
from celery_idem.governed.sql.store import SQLActionStore

BROKEN: list[type[BrokenStore]] = []


class BrokenStore(SQLActionStore):
    """One thing is wrong with it."""

    caught_by: ClassVar[frozenset[str]] = frozenset()
    """Cases that must fail; others of the same invariant may."""
    patches: ClassVar[Sequence[tuple[Any, str, Any]]] = ()
    """What is replaced while it is checked."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.past = SQLTamper(url)

    def close(self) -> None:
        super().close()
        self.past.close()


def caught_by(*cases: str) -> Callable[[type[BrokenStore]], type[BrokenStore]]:
    def add(store: type[BrokenStore]) -> type[BrokenStore]:
        store.caught_by = frozenset(cases)
        BROKEN.append(store)
        return store

    return add


def words(**changed: Any) -> SimpleNamespace:
    """The module ``records``, as one module may see it."""
    return SimpleNamespace(**{**vars(records), **changed})


WITH_DISPATCHED = records.LEASABLE_STATES | {records.STATE_DISPATCHED}


class Dispatching(BrokenStore):
    """Something stands between the store and the validator."""

    def judge(self, validator: Any, expected: Any, action: Any, receipts: Any, now: float) -> Any:
        return validator(action, receipts, now)

    def begin_owner_authorized_dispatch(self, action_id: str, owner: str, **kwargs: Any) -> Any:
        validator = kwargs["gate_validator"]
        given = {**kwargs, "gate_validator": lambda *seen: self.judge(validator, kwargs, *seen)}
        return super().begin_owner_authorized_dispatch(action_id, owner, **given)
