"""What mutants a file has: every change that cosmic-ray's operators can make to it, and that changes what runs."""

from __future__ import annotations

import ast
import difflib
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutants.mutant import Mutant


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Every mutant of the file, in the order of its lines.

    What does not compile is none, and neither is a change to an annotation: annotations are never evaluated here.
    """
    source = (root / file).read_text()
    made = []
    # One statement of the module at a time: an operator parses all it is given anew for each of its mutants.
    for statement in get_ast(source).children:
        start, text = statement.get_start_pos_of_prefix(), statement.get_code()
        above = "".join(source.splitlines(keepends=True)[: start[0] - 1])
        below = source[len(above) + len(text) :]
        seen = {_meaning(text), None}
        for operator, occurrence, (line, column), function in sorted(_places(text), key=lambda place: place[2]):
            changed = mutate_code(text, get_operator(operator)(), occurrence) or text
            meaning = _meaning(changed)
            if meaning in seen:
                continue
            seen.add(meaning)
            before, after = _change(text, changed)
            short = operator.removeprefix("core/")
            place = start[0] + line - 1, column
            made.append(Mutant(file, short, *place, function, before, after, above + changed + below))
    return made


def drawn(mutants: Sequence[Mutant], seed: int) -> list[Mutant]:
    """All of them in the order of a draw: one of every place first, then a second one of each, and so on."""
    draw = random.Random(seed)
    places: dict[tuple[int, int, str], list[Mutant]] = defaultdict(list)
    for mutant in draw.sample(mutants, len(mutants)):
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
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    gone, come = ("; ".join(line[2:].strip() for line in lines if line[:2] == mark) for mark in ("- ", "+ "))
    return gone, come


def _function(node: parso.tree.NodeOrLeaf) -> str:
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
