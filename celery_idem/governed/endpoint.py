"""What an endpoint is asked, and which of its answers count.

The request binds action, payload, approval, decision and expiry under one digest; whoever builds it again from the same
action and gate, after a crash say, gets the same digest. An answer counts only where it names that digest and is small
enough to keep; everything else is doubt, and doubt is looked into and never acted upon.

Not here: declaring types (``catalog``), sending (``http``, or an endpoint of one's own), and what follows from an
answer (``chain``).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from celery_idem.errors import CeleryIdemError, ConfigurationError, PayloadRefused
from celery_idem.governed.canonical import MAX_DEPTH, canonical_json, digest_json, digest_of, same
from celery_idem.governed.records import (
    GATE_RECEIPT_KIND,
    STATE_GATED,
    STATE_PROPOSED,
    Action,
    GateAuthorization,
    Receipt,
)

if TYPE_CHECKING:
    from celery_idem.governed.catalog import ActionType

T = TypeVar("T")

EXECUTION_SCHEMA = "celery_idem.execution.v1"
MAX_RESULT_BYTES = 16_384
"""Of a result, as canonical JSON."""
MAX_REASON = 500
"""Characters of a reason that are kept."""

COMPLETED = "completed"
REJECTED = "rejected"
PENDING = "pending"
ABSENT = "absent"
STATUSES = (COMPLETED, REJECTED, PENDING, ABSENT)
"""Done; not done, and it never will be; not known yet; not seen, which a mutation still on its way is not either."""


class EndpointDoubt(CeleryIdemError):
    """Nobody can tell from this whether the action happened: look for it, and never send it again."""

    problem: str = ""


@dataclass(frozen=True)
class Answer:
    """What an endpoint says about one execution: made with the request's own ``completed()``, ``rejected()``, …."""

    execution_digest: str
    status: str
    result: Any = None
    """JSON, at most 16 KiB and 15 levels deep."""
    reason: str = ""
    """For people; the first 500 characters are kept."""


@dataclass(frozen=True)
class ExecutionRequest:
    """The one execution an approval allows."""

    action_id: str
    action_type: str
    source: str
    payload: Mapping[str, Any] = field(repr=False, hash=False)
    """Plain JSON, as it was approved."""
    payload_sha256: str
    approval_id: str
    decision_id: str
    expires_at: float
    """When the approval ends, in seconds since 1970."""
    execution_digest: str
    """64 lowercase hex characters: the key under which the other side must do this at most once."""
    declared: ActionType | None = field(default=None, repr=False, compare=False)
    """The type ``model`` is made by."""

    @cached_property
    def model(self) -> Any:
        """The payload as an instance of its type's model.

        Raises:
            PayloadRefused: the model has changed since, and no longer makes the approved payload of it.
        """
        if self.declared is None:
            raise ConfigurationError("this ExecutionRequest was built without declared=: give it, or use payload")
        return self.declared.model_of(self.payload)

    def completed(self, result: Any = None) -> Answer:
        """The action happened."""
        return Answer(self.execution_digest, COMPLETED, result)

    def rejected(self, reason: str) -> Answer:
        """The action did not happen, and under this digest it never will."""
        return Answer(self.execution_digest, REJECTED, reason=reason)

    def pending(self, reason: str = "") -> Answer:
        """It is not certain yet: ask again."""
        return Answer(self.execution_digest, PENDING, reason=reason)

    def absent(self) -> Answer:
        """Nothing is known of it over there, so far."""
        return Answer(self.execution_digest, ABSENT)


class Endpoint(Protocol):
    """What the class of an action type has."""

    def execute(self, request: ExecutionRequest) -> Answer | Mapping[str, Any]:
        """Make the one mutation. An exception is doubt."""
        ...

    def observe(self, request: ExecutionRequest) -> Answer | Mapping[str, Any]:
        """Look whether it happened, and change nothing."""
        ...


def execution_request(
    action: Action,
    authorization: GateAuthorization | Receipt,
    *,
    type: ActionType | None = None,  # noqa: A002
) -> ExecutionRequest:
    """The request for this action under this approval; the same digest whenever it is built.

    An action that has not been dispatched must still fit its type's model, to the byte. One that has is only looked
    for, and a model that changed since must not stand in the way of that.

    Args:
        authorization: the gate as it was judged, or the gate's receipt, which outlives its expiry and its signing key.
        type: None takes the one of that name from the default catalog.

    Raises:
        PayloadRefused: the payload is not the one of ``payload_sha256``, or no longer fits its model.
        ConfigurationError: there is no such type, ``type`` is another one, or the receipt is no gate of this action.
    """
    declared = _declared(action, type)
    text = canonical_json(action["payload"])
    if not same(digest_of(text), action["payload_sha256"]):
        raise PayloadRefused(f"the payload of action {action['action_id']} has another digest: somebody changed it")
    if action.get("state") in {STATE_PROPOSED, STATE_GATED}:
        declared.model_of(action["payload"])
    approval = _approval_of(action, authorization)
    bound = {name: action[name] for name in ("action_id", "action_type", "source", "payload_sha256")} | approval
    digest = digest_json({"schema": EXECUTION_SCHEMA, **bound}, where="execution request")
    del bound["evidence_sha256"]  # bound by the digest, and of no use to an endpoint
    return ExecutionRequest(payload=json.loads(text), execution_digest=digest, declared=declared, **bound)


def judged(request: ExecutionRequest, answer: object) -> Answer:
    """The answer, where it is one to this request.

    Args:
        answer: an ``Answer``, or a mapping with ``execution_digest``, ``status``, ``result`` and ``reason``.

    Raises:
        EndpointDoubt: it is neither, names another execution or no known status, or its result is too large or no JSON.
    """
    if isinstance(answer, Answer):
        answer = {name: getattr(answer, name) for name in ("execution_digest", "status", "result", "reason")}
    if not isinstance(answer, Mapping):
        kind = "nothing" if answer is None else f"a {type(answer).__qualname__}"
        raise _doubt(request, f"is {kind}", "return request.completed(…), rejected(…), pending() or absent()")
    if not same(answer.get("execution_digest"), request.execution_digest):
        raise _doubt(request, "is not bound to its execution_digest", "look for the action again")
    status = next((status for status in STATUSES if same(answer.get("status"), status)), None)
    if status is None:
        raise _doubt(request, f"has a status other than {', '.join(STATUSES)}", "look for the action again")
    try:
        result = json.loads(
            canonical_json(answer.get("result"), where="result", max_bytes=MAX_RESULT_BYTES, max_depth=MAX_DEPTH - 1)
        )
    except PayloadRefused as error:
        raise _doubt(request, f"cannot be kept: {error}", "have it answer with plain JSON, and less of it") from None
    return Answer(request.execution_digest, status, result, _readable(answer.get("reason")))


class PerProcess(Generic[T]):
    """Makes something once in every process that asks for it; a fork makes its own, whatever its parent was doing."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._places: dict[int, _Place[T]] = {}

    def get(self) -> T:
        """It; what making it raises is raised to everybody who asks."""
        # A lock for each pid: one inherited by a fork may be held there by a thread that does not exist any more.
        place = self._places.setdefault(os.getpid(), _Place())
        with place.lock:
            if not place.made:
                place.made.append(self._make())
            return place.made[0]


class _Place(Generic[T]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.made: list[T] = []


def _declared(action: Action, declared: ActionType | None) -> ActionType:
    if declared is None:
        from celery_idem.governed.catalog import catalog

        declared = catalog.get(action["action_type"])
    if declared.name != action["action_type"]:
        raise ConfigurationError(
            f"type= is {declared.name!r}, and action {action['action_id']} is a {action['action_type']!r}: "
            "give the type of its action_type"
        )
    return declared


def _approval_of(action: Action, authorization: GateAuthorization | Receipt) -> dict[str, Any]:
    if isinstance(authorization, GateAuthorization):
        found = {name: getattr(authorization, name) for name in ("approval_id", "decision_id", "evidence_sha256")}
        return found | {"expires_at": float(authorization.expires_at)}
    if (authorization["kind"], authorization["action_id"]) != (GATE_RECEIPT_KIND, action["action_id"]):
        raise ConfigurationError(
            f"authorization= is the receipt {authorization['receipt_key']!r}, {authorization['kind']!r}, of action "
            f"{authorization['action_id']}: give the gate receipt of action {action['action_id']}"
        )
    evidence = authorization["evidence"]
    return {
        "approval_id": evidence["approval_id"],
        "decision_id": evidence["decision_id"],
        "evidence_sha256": authorization["evidence_sha256"],
        "expires_at": float(evidence["expires_at_epoch"]),
    }


def _doubt(request: ExecutionRequest, problem: str, following: str) -> EndpointDoubt:
    return EndpointDoubt(
        f"the endpoint's answer for action {request.action_id} {problem}: {following}", problem=problem
    )


def _readable(reason: object) -> str:
    """A reason never makes a certain answer doubtful, so what cannot be kept of it is left out."""
    if not isinstance(reason, str):
        return ""
    return "".join(letter if letter.isprintable() else " " for letter in reason[:MAX_REASON])
