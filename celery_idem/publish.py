"""The idempotency headers of a message: written where it is published, read where it is run.

``idempotency_key``    the caller's own key, before hashing.
``idempotency_stamp``  JSON: v, task, id (the message's), key (digest of the key source), fp (fingerprint or "").
                       It travels with every copy, so a deploy changes neither key nor fingerprint of a message in
                       flight. A stamp that names another task or message was forwarded, and is derived anew.
``idempotency_replaced``  JSON: the stable names of the idempotent tasks this message's task takes the place of.
``idempotency_park``   JSON: generation, count, expires (the message's original expiry). Never copied by a retry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery_idem.core import keys
from celery_idem.core.canonical import NoCanonicalForm
from celery_idem.core.engine import new_token
from celery_idem.core.holder import current as this_process
from celery_idem.core.policy import Policy
from celery_idem.core.records import Delivery, Operation
from celery_idem.errors import ConfigurationError, KeyMissing
from celery_idem.verifying import misfit, wanted

if TYPE_CHECKING:
    from celery_idem.app import Runtime
    from celery_idem.task import Idempotent

KEY_HEADER = "idempotency_key"
STAMP_HEADER = "idempotency_stamp"
PARK_HEADER = "idempotency_park"
REPLACED_HEADER = "idempotency_replaced"
DEPTH_HEADER = "idempotency_depth"
"""Never on the wire: how deep a replacement run eagerly is, which Celery does not tell its request."""
REVOKED_HEADER = "idempotency_revoked"
"""Set by the worker that received a copy, never on the wire: "revoked" or "expired", to be judged after the claim."""
NOT_COPIED = (PARK_HEADER, REVOKED_HEADER, "redelivered", "x-death", "x-first-death-", "x-last-death-")
"""Beginnings of headers that belong to one copy: ours, kombu's Redis mark, RabbitMQ's dead-letter history."""
STAMP_VERSION = 1
_HASH = re.compile("[0-9a-f]{64}")
MOST = 2**31
"""Generations and counts stay below this; more is garbage, and no store could keep it."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which message this is, and what its key and fingerprint were when it was published."""

    task: str
    message_id: str
    key: str
    fingerprint: str

    def header(self) -> str:
        """The header's text."""
        facts = {"v": STAMP_VERSION, "task": self.task, "id": self.message_id, "key": self.key, "fp": self.fingerprint}
        return json.dumps(facts, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Parked:
    """What a parked copy knows of itself."""

    generation: int = 0
    count: int = 0
    expires: str | None = None

    def header(self) -> str:
        """The header's text."""
        facts = {"generation": self.generation, "count": self.count, "expires": self.expires}
        return json.dumps(facts, separators=(",", ":"))


_NEVER = Parked()


def copied(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The headers another message may inherit from this copy."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith(NOT_COPIED)}


def read_stamp(headers: Mapping[str, Any], task: str, message_id: str | None) -> Stamp | None:
    """The headers' stamp if it is this message's own and readable, else None.

    A newer version is read for the fields this one knows.
    """
    facts = _json(headers.get(STAMP_HEADER))
    if message_id is None or str(facts.get("task", "")) != task or str(facts.get("id", "")) != message_id:
        return None
    key, fingerprint = str(facts.get("key", "")), str(facts.get("fp", ""))
    fits = _is_hash(key) and (not fingerprint or _is_hash(fingerprint))
    return Stamp(task, message_id, key, fingerprint) if fits else None


def read_parked(headers: Mapping[str, Any]) -> Parked:
    """What the headers say about parking; garbage counts as never parked."""
    if PARK_HEADER not in headers:
        return _NEVER
    facts = _json(headers[PARK_HEADER])
    with suppress(KeyError, TypeError, ValueError, OverflowError):
        generation, count, expires = int(facts["generation"]), int(facts["count"]), facts.get("expires")
        if not (0 <= generation < MOST and 0 <= count < MOST):
            return Parked()
        with suppress(TypeError, ValueError, OverflowError):
            moment(expires)
            return Parked(generation, count, expires)
        return Parked(generation, count)
    return Parked()


def moment(expires: Any) -> datetime:
    """An expiry header as a time in UTC; ``ValueError``, ``TypeError`` or ``OverflowError`` where it is none."""
    parsed = datetime.fromisoformat(expires.replace("Z", "+00:00") if isinstance(expires, str) else expires)
    return parsed.astimezone(timezone.utc) if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)


def derive(
    task: Idempotent,
    policy: Policy,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    message_id: str,
    explicit: str | None = None,
) -> Stamp:
    """Key and fingerprint from the call itself.

    Raises:
        KeyMissing: the key source yields nothing.
        NoCanonicalForm: an argument has none, and the key or fingerprint needs it; under the message's id alone
            there is simply no fingerprint.
    """
    _storable(message_id)
    source = keys.key_source(policy.key)
    call = keys.bind(task.run, args, kwargs)
    try:
        digest = source.digest(message_id=message_id, call=call, explicit=explicit)
    except KeyMissing as missing:
        raise KeyMissing(f"{task.name}: {missing}", **missing.facts) from missing
    try:
        fingerprint = keys.fingerprint(call, policy.fingerprint)
    except NoCanonicalForm:
        if explicit is None and source.kind != "message":
            raise
        fingerprint = ""
    return Stamp(task.name, message_id, digest, fingerprint)


def stamped_headers(
    task: Idempotent,
    policy: Policy,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    message_id: str,
    headers: Mapping[str, Any] | None,
    explicit: str | None,
    place: str = "",
) -> dict[str, Any]:
    """The headers to publish: the message's own stamp kept, another's replaced, none added twice.

    A key given to a whole group reaches every member, so each gets its ``place`` behind it.
    """
    stamped = dict(headers or {})
    if explicit is None and read_stamp(stamped, task.name, message_id) is not None:
        return stamped
    if STAMP_HEADER in stamped:  # forwarded from another message, whose own key is none of ours
        for name in (KEY_HEADER, STAMP_HEADER, PARK_HEADER):
            stamped.pop(name, None)
    given = stamped.get(KEY_HEADER) if explicit is None else explicit
    if given is not None:
        stamped[KEY_HEADER] = f"{given}{place}" if isinstance(given, str) and given.strip() else given
    stamp = derive(task, policy, args, kwargs, message_id, stamped.get(KEY_HEADER))
    stamped[STAMP_HEADER] = stamp.header()
    return stamped


def place_in_canvas(options: Mapping[str, Any]) -> str:
    """Where these options of a call put it in its group or chord: ``#1``, ``#header#1``, or nothing.

    The head of a chain stands where the chain's last step does, a chord's header behind its body.
    """
    index, chain, body = (options.get(name) for name in ("group_index", "chain", "chord"))
    if index is None and chain:
        return place_in_canvas(_end_of(chain[0]))  # the next step comes last
    place = "" if index is None else f"#{index}"
    return f"{place_in_canvas(_end_of(body))}#header{place}" if body else place


def _end_of(sig: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of the task that ends this signature."""
    kwargs = sig.get("kwargs") or {}
    if sig.get("subtask_type") == "chord" and kwargs.get("body"):
        return _end_of(kwargs["body"])
    if sig.get("subtask_type") == "chain" and kwargs.get("tasks"):
        return _end_of(kwargs["tasks"][-1])
    return sig.get("options") or {}


def stamp_of(task: Idempotent, policy: Policy, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Stamp:
    """The stamp a received message carries, or the one it should have had."""
    headers = request.headers or {}
    stamp = read_stamp(headers, task.name, request.id)
    if stamp is not None:
        return stamp
    explicit = None if STAMP_HEADER in headers else headers.get(KEY_HEADER)
    return derive(task, policy, args, kwargs, request.id, explicit)


def operation_of(
    task: Idempotent, policy: Policy, runtime: Runtime, request: Any, stamp: Stamp, *, continues: bool
) -> Operation:
    """What this delivery claims, under a fresh token."""
    scope = _scope(policy, request)
    name = policy.name or task.name
    depth = _depth(request, name)
    parked = read_parked(request.headers or {})
    generation = request.retries or 0
    if type(generation) is not int or not 0 <= generation < MOST:  # True would be kept as a word of its own
        raise ConfigurationError(
            f"{task.name}[{request.id}] says retries={generation!r:.80}: send it with a count of retries"
        )
    return Operation(
        key=keys.effective_key(runtime.namespace, scope, name, depth, stamp.key),
        delivery=Delivery(
            message_id=request.id,
            generation=generation,
            continues=continues,
            parked=parked.count if parked.generation == generation else 0,
        ),
        token=new_token(),
        holder=this_process(),
        task=name,
        namespace=runtime.namespace,
        scope=keys.scope_hash(scope) if scope else "",
        fingerprint=stamp.fingerprint,
    )


def replaced_names(request: Any) -> list[str] | None:
    """Whom the request's task takes the place of; None where nobody kept count."""
    with suppress(KeyError, TypeError, ValueError, RecursionError):
        names = json.loads((request.headers or {})[REPLACED_HEADER])
        if isinstance(names, list):
            return [str(name) for name in names]
    return None


def _depth(request: Any, name: str) -> int:
    """What keeps a replacement apart from the message it replaces: 0, and one more each time, for the same task.

    Another task in a replacement is the same operation as anywhere else. Where a plain task replaced itself, after
    others that are not known, only the depth is sure to be new.
    """
    nesting = request.replaced_task_nesting or 0
    if type(nesting) is not int or not 0 <= nesting < MOST:
        raise ConfigurationError(
            f"{name}[{request.id}] says replaced_task_nesting={nesting!r:.80}: send it with a count of replacements"
        )
    names = replaced_names(request) if nesting else None
    return nesting if (nesting > 1 if names is None else name in names) else 0


def _storable(message_id: str | None) -> None:
    try:
        if message_id is None or "\0" not in message_id.encode().decode():
            return
    except UnicodeEncodeError:
        pass
    raise KeyMissing(f"task_id={message_id!r} holds a character no store can keep: use plain text")


def check_task(task: Idempotent, policy: Policy) -> None:
    """``ConfigurationError`` if the policy names arguments the task has not, or its ``verify`` cannot take them."""
    try:
        keys.KeySource.parse(policy.key).check(task.run)
        if policy.fingerprint is not None:
            keys.check_names(task.run, policy.fingerprint)
        if policy.verify is not None:
            always, found = misfit(task, policy.verify)
            if always:
                raise ConfigurationError(f"{found}: {wanted(task)}")
    except ConfigurationError as error:
        raise ConfigurationError(f"task {task.name}: {error}") from error


def _scope(policy: Policy, request: Any) -> str:
    if policy.scope is None:
        return ""
    scope = policy.scope(request) if callable(policy.scope) else policy.scope
    if not isinstance(scope, str) or not scope.strip():
        raise KeyMissing(f"idempotency_scope yielded {scope!r} for this request: it must name the tenant")
    return scope


def _json(header: Any) -> dict[str, Any]:
    if not isinstance(header, str):
        return {}
    try:
        facts = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None
