"""Named cases: what one is, how a module adds its own, and how it says that a store broke its word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from celery_idem.conformance.bench import Bench

Check: TypeAlias = "Callable[[Bench], None]"


class Breach(AssertionError):
    """The store does not keep the invariant: the message says what it did."""


@dataclass(frozen=True)
class Case:
    """One check of one invariant."""

    invariant: str
    """``I1`` to ``I11``."""
    name: str
    """``I4.a_validator_that_raises_changes_nothing``."""
    catches: str
    """The broken store it is about: the first sentence of the check's docstring."""
    needs: tuple[str, ...]
    """Of ``tamper``, ``list_events`` and ``list_dead_letters``."""
    check: Check


CASES: list[Case] = []
"""In the order their modules were imported."""


def case(invariant: str, *needs: str) -> Callable[[Check], Check]:
    """Add the function to the cases, under the invariant and its own name."""

    def add(check: Check) -> Check:
        catches = " ".join((check.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
        CASES.append(Case(invariant, f"{invariant}.{check.__name__}", catches, needs, check))
        return check

    return add


def expect(kept: object, otherwise: str) -> None:
    """``Breach`` with what the store did instead, unless it kept its word."""
    if not kept:
        raise Breach(otherwise)
