"""One governed action as a few fields and rules, to hold a ledger against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery_idem.errors import ActionLeaseConflict, ActionStoreError, ActionTransitionError
from celery_idem.governed import ALLOWED_TRANSITIONS, TERMINAL_STATES


class Refused(Exception):
    """What the model says where the ledger raises: the error's class, and of a gate the code."""

    def __init__(self, kind: type[ActionStoreError], code: str = "") -> None:
        super().__init__(kind.__name__, code)


@dataclass
class Model:
    """One action, in the model's words."""

    action_id: str
    created: float
    due: float
    updated: float
    state: str = "proposed"
    attempts: int = 0
    owner: str | None = None
    until: float | None = None
    as_proposed: Any = None
    gates: dict[str, Any] = field(default_factory=dict)
    """Receipt keys and their evidence."""
    deadline: float = 0.0
    budget: int = 0
    looks: int = 0
    events: list[str] = field(default_factory=lambda: ["proposed"])

    def now(self, clock: float) -> float:
        """The action's time, which never goes back."""
        return max(clock, self.updated)

    def held_by(self, owner: str, now: float) -> None:
        if self.owner != owner or self.until is None or self.until <= now:
            raise Refused(ActionLeaseConflict)

    def is_in(self, state: str) -> None:
        if self.state != state:
            raise Refused(ActionTransitionError)

    def become(self, event: str, now: float, state: str | None = None, **values: Any) -> None:
        if state is not None:
            assert state in ALLOWED_TRANSITIONS[self.state]
            self.state = state
        self.events.append(event)
        self.updated = now
        if self.state in TERMINAL_STATES:
            values |= {"owner": None, "until": None}
        for name, value in values.items():
            setattr(self, name, value)

    def is_free(self, clock: float) -> bool:
        return self.due <= clock and (self.owner is None or (self.until or 0) <= clock)

    def is_spent(self, now: float) -> bool:
        return self.looks >= self.budget or now >= self.deadline
