"""Ids for what a message publishes when it ends, so that a replay publishes the same messages again and no others.

Celery draws the ids of links, errbacks and the inner tasks of a replacement anew each time it publishes them; two
publications of one message would be two operations downstream. Here every task and group in them gets an id derived
from the message, from what ended it, and from its place. Ids somebody froze stay; the links of a link belong to that
task's own message and are left alone, as are chain steps and chord bodies, which Celery froze before it sent them.

Everything works on copies: what is parked or retried later carries no id of ours.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from celery.canvas import Signature, _chain, chord, chunks, group
from celery.utils.functional import maybe_list

from celery_idem.core.records import RunResult, Status

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger("celery_idem")
NAMESPACE = UUID("5b0c2d6e-6c1f-5d0b-9a53-3c1f1f0e8a77")
Place = tuple[Any, ...]
"""Message, what ended it, and the way down from there: what an id is derived from."""


def derived(*place: Any) -> str:
    """The id of this place; the same on every worker and in every release."""
    return str(uuid5(NAMESPACE, json.dumps(place, default=repr)))


def ended_by(result: RunResult, generation: Any) -> Place | None:
    """What ended a delivery: the fence that completed its key, or the attempt where nothing is stored.

    None where the body ran unprotected: nothing tells that run from another, so Celery draws the ids.
    """
    decision, kept = result.decision, result.claim is not None and not result.claim.right
    if result.status is Status.UNPROTECTED:
        return None
    if decision is not None and not kept:
        if result.status is Status.REPLAYED and decision.record is not None:
            return ("fence", decision.record.fence)
        if decision.claim is not None:
            return ("fence", decision.claim.fence)
    return ("generation", generation)


def identify(app: Celery, request: Any, *place: Any) -> None:
    """Give the request's links and errbacks the ids of this place; the request gets copies."""
    request.callbacks = _identified(app, request.callbacks, (*place, "link"))
    request.errbacks = _identified(app, request.errbacks, (*place, "errback"))
    if request.chord:
        request.chord = _chord_body(app, request.chord)
    if isinstance(request.chain, list):
        request.chain = [_in_chord(app, step) for step in request.chain]


def replacement(app: Celery, sig: Any, *place: Any) -> Any:
    """A copy of a replacement with ids for every task but the last, which takes over the message's own."""
    if isinstance(sig, chunks):  # not one task that could take it over
        return sig
    gather = app.tasks["celery.accumulate"].s(index=0)
    # As Celery's replace does next: what ends in a group becomes a chord, and gets the ids of one.
    if isinstance(sig, group):
        sig = sig | gather
    elif isinstance(sig, _chain) and sig.tasks and isinstance(sig.tasks[-1], group):
        sig = _chain(*sig.tasks[:-1], sig.tasks[-1] | gather, app=app, **sig.options)
    return _named(app, sig, place, last=True)


def placed(app: Celery, sig: Any, *place: Any) -> Any:
    """The replacement once Celery has put the rest of the message's chain behind it."""
    if isinstance(sig, chord):
        _keep_group_id(sig, app, sig.tasks, place)
        if sig.body is not None:
            sig["kwargs"]["body"] = placed(app, sig.body, *place, "body")
    if isinstance(sig, _chain):
        return _chain_at(place, [placed(app, step, *place, i) for i, step in enumerate(sig.tasks)], app, sig.options)
    return sig


def tell(sig: Any, header: str, text: str) -> None:
    """Put a header on every task of a canvas, in place."""
    if isinstance(sig, (_chain, group, chord)):
        for part in getattr(sig.tasks, "tasks", sig.tasks):  # a chord's header may be a group
            tell(part, header, text)
        if isinstance(sig, chord) and sig.body is not None:
            tell(sig.body, header, text)
    else:
        sig["options"]["headers"] = {**(sig["options"].get("headers") or {}), header: text}


def _identified(app: Celery, signatures: Any, place: Place) -> list[Any] | None:
    if not signatures:
        return None
    return [_readable(app, sig, (*place, position)) for position, sig in enumerate(maybe_list(signatures))]


def _in_chord(app: Celery, step: Any) -> Any:
    body = (step.get("options") or {}).get("chord") if isinstance(step, Mapping) else None
    return {**step, "options": {**step["options"], "chord": _chord_body(app, body)}} if body else step


def _chord_body(app: Celery, body: Any) -> Any:
    """The body with ids for its errbacks, the same from every part: whoever counts the last one publishes them.

    A group's are left to Celery, which tells each member's from the group's by comparing them.
    """
    options = body.get("options") if isinstance(body, Mapping) else None
    if not options or not options.get("link_error") or body.get("subtask_type") == "group":
        return body
    errbacks = _identified(app, options["link_error"], ("chord", options.get("task_id"), "errback"))
    return {**body, "options": {**options, "link_error": errbacks}} if options.get("task_id") else body


def _readable(app: Celery, sig: Any, place: Place) -> Any:
    try:
        return _named(app, sig, place)
    except Exception:  # the effect is there: what cannot be read is Celery's to report when it publishes
        logger.exception("the ids of %r could not be derived; Celery draws them", sig)
        return sig


def _named(app: Celery, sig: Mapping[str, Any], place: Place, *, last: bool = False) -> Any:
    own = {**sig, "kwargs": dict(sig["kwargs"] or {}), "options": dict(sig["options"] or {})}
    named: Any = Signature.from_dict(own, app=app)
    named._type = getattr(sig, "_type", None)  # noqa: SLF001  as Signature.clone does
    if isinstance(named, _chain):
        end = len(named.tasks) - 1
        steps = [_named(app, step, (*place, i), last=last and i == end) for i, step in enumerate(named.tasks)]
        return _chain_at(place, steps, app, named.options)
    if isinstance(named, group):
        named.options.setdefault("task_id", derived(*place, "group"))
        named["kwargs"]["tasks"] = [_named(app, member, (*place, i)) for i, member in enumerate(named.tasks)]
    elif isinstance(named, chord):
        members = [_named(app, member, (*place, "header", i)) for i, member in enumerate(named.tasks)]
        _keep_group_id(named, app, members, place)
        if named.body is not None:
            named["kwargs"]["body"] = _named(app, named.body, (*place, "body"), last=last)
    elif not last:
        named.options.setdefault("task_id", derived(*place))
    return named


def _keep_group_id(canvas: Any, app: Celery, members: Any, place: Place) -> None:
    group_id = canvas.options.setdefault("task_id", derived(*place, "group"))
    canvas.tasks = group(members, app=app, task_id=group_id)  # a list would be frozen under an id of Celery's


class Chain(_chain):
    """A chain whose chords keep their group ids; Celery's draws them anew each time it is sent."""

    place: Place = ()

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """Like Celery's own, at the same place."""
        copy: Any = super().clone(*args, **kwargs)
        return _chain_at(self.place, copy.tasks, copy._app, copy.options)  # noqa: SLF001  as above

    def prepare_steps(self, *args: Any, **kwargs: Any) -> Any:
        """Like Celery's own; the steps come last one first."""
        steps, results = super().prepare_steps(*args, **kwargs)
        for position, step in enumerate(reversed(steps)):
            if self.place and isinstance(step, chord):
                header: Any = step
                header.options["task_id"] = derived(*self.place, "group", position)
                header.tasks.options["task_id"] = header.options["task_id"]
        return steps, results


def _chain_at(place: Place, steps: Any, app: Celery, options: Mapping[str, Any]) -> Chain:
    chain = Chain(steps, app=app, **options)
    chain.place = place
    return chain


__all__ = ["derived", "ended_by", "identify", "placed", "replacement"]
