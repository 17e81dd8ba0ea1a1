"""What mutants a file has: every change that cosmic-ray's operators can make to it, and that changes what runs."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import NodeOrLeaf

from tests.mutants.mutant import Mutant

_CLASS = "class _:\n"
"""What a method stands under while it is parsed by itself."""


@dataclass(frozen=True)
class Piece:
    """A statement of the module, or a method, parsed by itself: an operator parses all it is given each time."""

    line: int
    above: str
    text: str
    below: str
    head: str = ""
    elsewhere: tuple[range, ...] = ()
    """Lines that are pieces of their own."""

    def mutants(self, file: str) -> Iterator[Mutant]:
        """Every one."""
        whole = self.head + self.text
        seen = {_meaning(whole), None}
        for operator, occurrence, (line, column), function in sorted(_places(whole), key=lambda place: place[2]):
            place = self.line + line - 1 - self.head.count("\n"), column
            if any(place[0] in lines for lines in self.elsewhere):
                continue
            changed = mutate_code(whole, get_operator(operator)(), occurrence) or whole
            meaning = _meaning(changed)
            if meaning in seen:
                continue
            seen.add(meaning)
            text = changed.removeprefix(self.head)
            short, change = operator.removeprefix("core/"), _change(self.text, text)
            yield Mutant(file, short, *place, function, *change, self.above + text + self.below)


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Every mutant of the file, in the order of its lines.

    What does not compile is none, and neither is a change to an annotation: annotations are never evaluated here.
    """
    made = [mutant for piece in _pieces((root / file).read_text()) for mutant in piece.mutants(file)]
    return sorted(made, key=lambda mutant: (mutant.line, mutant.column))


def _pieces(source: str) -> Iterator[Piece]:
    lines = source.splitlines(keepends=True)

    def piece(node: NodeOrLeaf, head: str = "", elsewhere: tuple[range, ...] = ()) -> Piece:
        first, text = node.get_start_pos_of_prefix()[0], node.get_code()
        above = "".join(lines[: first - 1])
        return Piece(first, above, text, source[len(above) + len(text) :], head, elsewhere)

    for statement in get_ast(source).children:
        methods = list(_methods(statement))
        own = tuple(range(method.get_start_pos_of_prefix()[0], method.end_pos[0] + 1) for method in methods)
        yield piece(statement, elsewhere=own)
        for method in methods:
            yield piece(method, _CLASS)


def _methods(statement: NodeOrLeaf) -> Iterator[NodeOrLeaf]:
    made = statement.children[-1] if statement.type == "decorated" else statement
    if made.type == "classdef":
        for node in made.children[-1].children:
            if node.type in {"funcdef", "decorated"}:
                yield node


def drawn(mutants: Sequence[Mutant], seed: int) -> list[Mutant]:
    """All of them in the order of a draw: one of every place first, then a second one of each, and so on.

    What the draw says of a mutant does not hang on what else the file has.
    """

    def lot(mutant: Mutant) -> bytes:
        return hashlib.sha256(repr((seed, mutant.name)).encode()).digest()

    places: dict[tuple[int, int, str], list[Mutant]] = defaultdict(list)
    for mutant in sorted(mutants, key=lot):
        places[mutant.line, mutant.column, mutant.operator.partition("_")[0]].append(mutant)
    rounds = zip_longest(*places.values())
    return [mutant for each in rounds for mutant in each if mutant is not None]


def _places(text: str) -> Iterator[tuple[str, int, tuple[int, int], str]]:
    tree = get_ast(text)
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments():
            continue  # asks for the names of variables
        operator = operator_class()
        positions = ((node, start) for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (node, start) in enumerate(positions):
            if node.parent is None or node.parent.type != "parameters":  # the bare * there multiplies nothing
                yield name, occurrence, start, _function(node)


def _change(before: str, after: str) -> tuple[str, str]:
    old, new = before.splitlines(), after.splitlines()
    same = list(takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    old, new = old[len(same) :], new[len(same) :]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return "; ".join(map(str.strip, old)), "; ".join(map(str.strip, new))


def _function(node: NodeOrLeaf) -> str:
    return ASTQuery(node).get_definition_name() or "(module)"


def _meaning(source: str) -> str | None:
    """What Python makes of it, without annotations; None where it is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
            compile(source, "mutant", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
    return ast.dump(_WithoutAnnotations().visit(tree))


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)
