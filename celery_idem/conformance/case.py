"""Named cases: what one is, how a module adds its own, and how it says that a store broke its word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any], None]
"""Takes the bench of its suite."""


class Breach(AssertionError):
    """The store does not keep the rule: the message says what it did."""


@dataclass(frozen=True)
class Case:
    """One check of one rule."""

    rule: str
    """``S1`` to ``S9``, ``R1`` to ``R12`` or a verb for claim stores; ``I1`` to ``I11`` for action stores."""
    name: str
    """``I4.a_validator_that_raises_changes_nothing``."""
    catches: str
    """The broken store it is about: the first sentence of the check's docstring."""
    needs: tuple[str, ...]
    """Members of the harness, or verbs outside the contract, that not every store can have."""
    check: Check


def adding_to(cases: list[Case]) -> Callable[..., Callable[[Check], Check]]:
    """The decorator ``case(rule, *needs)``: it adds the function to these cases, under the rule and its own name."""

    def case(rule: str, *needs: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            catches = " ".join((check.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
            cases.append(Case(rule, f"{rule}.{check.__name__}", catches, needs, check))
            return check

        return add

    return case


def expect(kept: object, otherwise: str) -> None:
    """``Breach`` with what the store did instead, unless it kept its word."""
    if not kept:
        raise Breach(otherwise)


def expect_is(got: object, wanted: object, told: str, *, of: str = "") -> None:
    """``Breach`` with what the store did instead, and what was wanted, unless the two are equal.

    Args:
        got: what came.
        wanted: what should have come.
        told: what the store did, in words.
        of: the names of what is compared, where it is a tuple that ``told`` does not name.
    """
    kept = got is wanted if isinstance(wanted, Enum) else got == wanted
    expect(kept, f"{told}; wanted: {f'{of} = ' if of else ''}{spelled(wanted)}")


def spelled(value: object) -> str:
    """A value as a text of a breach has it: the name of an answer, alone or in a tuple."""
    if isinstance(value, tuple):
        return f"({', '.join(map(spelled, value))})"
    return str(value.value) if isinstance(value, Enum) else str(value)
