"""Why a surviving mutant may survive: ``judged.txt``, one entry per mutant, and a few kinds that need no entry each.

An entry is what the run prints for the mutant, without its line number, and a line ``= why it changes nothing``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.mutant import Mutant, Name

PAGE = Path(__file__).with_name("judged.txt")

KINDS = (
    (
        r"ReplaceTrueWithFalse",
        r"^@dataclass\(.*slots=False\)$",
        "slots save memory, and nobody gives such an object another attribute",
    ),
    (
        r"NumberReplacer|ReplaceUnaryOperator_\w+",
        r"^(PAUSES = |POLLS = (?!.*-))|(PAUSES|POLLS)\[",
        "how long to pause between two asks is a choice, and no promise hangs on it",
    ),
    (
        r"NumberReplacer",
        r"^((store_)?timeout: float|limit: int) = [\d.]+,$",
        "how long a verb lasts, and how many records it yields, where nobody says is a choice",
    ),
    (
        r"NumberReplacer",
        r"_number\(values\[\d+\], +(6[24]|3[02])\)",
        "from how many bits on a number counts as damage; no number of a record comes near",
    ),
    (
        r"ReplaceComparisonOperator_Is(Not)?_(Not)?Eq",
        r"(==|!=) (State|Answer|Release|Kind|Ended|Renewal)\.[A-Z_]+",
        "only members of that enumeration stand on the left, and each equals itself alone",
    ),
)
"""Operator and changed line, as regular expressions, and why."""


def judgement(mutant: Mutant, judged: dict[Name, str]) -> str | None:
    """Why it may survive; None where nobody said so."""
    for operator, after, why in KINDS:
        if re.fullmatch(operator, mutant.operator) and re.search(after, mutant.after):
            return why
    return judged.get(mutant.name)


def read(text: str) -> dict[Name, str]:
    """The entries of the page; ``ValueError`` at one that is not whole."""
    entries: dict[Name, str] = {}
    for block in filter(None, map(str.strip, re.split(r"\n\s*\n", text))):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if not lines:
            continue
        head = re.fullmatch(r"(\S+) in (\S+), (\S+):", lines[0])
        parts = {mark: " ".join(_after(lines[1:], mark)) for mark in "-+="}
        if head is None or not parts["-"] or not parts["="]:
            raise ValueError(f"not a judged mutant:\n{block}")
        entries[head[1], head[2], head[3], parts["-"], parts["+"]] = parts["="]
    return entries


def _after(lines: Iterable[str], mark: str) -> list[str]:
    return [line.strip()[2:] for line in lines if line.strip().startswith(f"{mark} ")]
