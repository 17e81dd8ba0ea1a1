"""Whether ``verify=`` can be called as its task is: with the arguments of a message."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from celery_idem.core.keys import signature_of


def misfit(task: Any, verify: Callable[..., Any]) -> tuple[bool, str]:
    """What Python says to a call that the task takes and ``verify`` does not; an empty text where none is known.

    The first value is whether every message of that shape meets it; else only one that names all arguments does.
    """
    run = getattr(task, "_orig_run", task.run)  # what autoretry_for put in front takes anything
    try:
        signature, parameters = _own_signature(verify), list(_own_signature(run).parameters.values())
    except Exception:  # noqa: BLE001  builtins have none, and a callable may answer with anything
        return False, ""
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return False, ""  # what it is called with is not to be seen
    placed = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    only_placed = [p for p in placed if p.kind is p.POSITIONAL_ONLY]
    calls = [
        (True, placed, named),
        (True, _required(placed), _required(named)),
        (False, only_placed, [p for p in parameters if p not in only_placed]),
    ]
    for always, args, kwargs in calls:
        try:
            signature.bind(*args, **{p.name: None for p in kwargs})
        except TypeError as error:
            return always, f"verify, called as the task may be: {error}"
    return False, ""


def wanted(task: Any) -> str:
    """The next step."""
    signature = _own_signature(getattr(task, "_orig_run", task.run))
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return f"let verify take {inspect.Signature(bare)}"


def _own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Not that of what it wraps: a decorator may add arguments."""
    return signature_of(function, follow_wrapped=False)


def _required(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.default is p.empty]
