"""The worlds that ``make model`` searches, and for each rule the one in which its absence shows."""

from __future__ import annotations

from typing import Any

from tests.model.deliveries import Deliveries
from tests.model.rules import AS_IT_IS, REVERTED, Rules

WORLDS: dict[str, dict[str, Any]] = {
    "a value": {"generations": 1, "crashes": 1, "restores": 1, "lapses": 1},
    "a value, killed twice": {"generations": 1, "crashes": 2},
    "a value, the dead wait for their lease": {"generations": 1, "crashes": 1, "dead_check": False},
    "a retry": {"ends": ("value", "retry"), "restores": 1},
    "a failure": {"generations": 1, "ends": ("value", "fail"), "crashes": 1, "restores": 1},
    "an exit": {"generations": 1, "ends": ("value", "exit"), "restores": 1},
    "a broker that forgets": {"generations": 1, "crashes": 1, "restores": 1, "losses": 1},
    "a retry, a broker that forgets": {"ends": ("value", "retry"), "restores": 1, "losses": 1},
    "two messages": {"messages": 2, "generations": 1, "restores": 1},
    "two messages, a failure": {"messages": 2, "generations": 1, "ends": ("value", "fail"), "restores": 1},
    "two messages, a kill": {"messages": 2, "generations": 1, "crashes": 1},
    "a body that never ends": {"generations": 1, "ends": (), "restores": 5, "crowded": True},
}
LARGER: dict[str, dict[str, Any]] = {
    "a retry, a kill": {"ends": ("value", "retry"), "crashes": 1, "restores": 1},
    "two messages, a retry": {"messages": 2, "ends": ("value", "retry")},
    "two messages, a broker that forgets": {"messages": 2, "generations": 1, "losses": 1},
}
"""Minutes each: ``make model ARGS=--larger``."""
SHORTEST = {
    "a live lease does not stand in the way": "a value",
    "the right to continue is not leased": "a value",
    "no NOT_DUE row": "a retry",
    "NOT_DUE for the successor too": "a retry",
    "an ended attempt is not over": "a failure",
    "outcome unknown is forgotten at release": "an exit",
    "an old token completes": "a value",
    "nothing is settled": "a value",
    "one note for all messages": "two messages",
    "the claim is released before anybody was told": "a failure",
    "a copy is dropped one count behind": "a retry, a broker that forgets",
    "counts of parked copies belong to the message": "a retry",
    "no count of parked copies": "a body that never ends",
}
"""In which world the absence of a rule is soonest found."""


def world(name: str, rules: Rules = AS_IT_IS) -> Deliveries:
    """The world of this name, under these rules."""
    return Deliveries(name, rules, **{**WORLDS, **LARGER}[name])


def reverted() -> list[Deliveries]:
    """A world for every rule taken out."""
    return [world(SHORTEST[rules.name], rules) for rules in REVERTED]
