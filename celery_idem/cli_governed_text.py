"""How ``celery governed`` says things: actions, approvals, receipts, events and dead letters as text and JSON.

Nothing here asks a store. Whatever somebody else wrote (payloads, ids, errors, evidence) is printed without control
characters, and payloads, results and evidence only by ``show`` and ``approve``. The JSON shapes are those of
docs/reference/governed-cli.md and change only by additions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from celery_idem.cli_text import Clock, aligned, duration, printable, utc
from celery_idem.governed.records import (
    GATE_RECEIPT_KIND,
    REJECTED,
    STATE_FAILED,
    STATE_PROPOSED,
    TERMINAL_STATES,
    Action,
    DeadLetter,
    Event,
    Receipt,
)

_CELL = 60
Rows = Iterator[tuple[str, str]]


def readable_json(value: Any, *, indent: int | None = 2) -> str:
    """The value as JSON with sorted keys; what a terminal would obey instead of show is escaped."""
    try:
        said = json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return printable(repr(value))
    # Line breaks within the value are escaped already; those that are left are the indentation's.
    return "".join(letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1] for letter in said)


def payload_rows(action: Action) -> Rows:
    """What an owner must have read: the payload, and the digest that an approval of it is bound to."""
    yield from _block("payload", action["payload"])
    yield "digest", printable(action["payload_sha256"])


def _block(name: str, value: Any) -> Rows:
    for number, line in enumerate(readable_json(value).split("\n")):
        yield ("" if number else name), line


# --- one action ------------------------------------------------------------------------------------------------------


def action_shape(action: Action, clock: Clock) -> dict[str, Any]:
    """The JSON shape of an action without its payload and result."""
    return {
        "action_id": action["action_id"],
        "state": action["state"],
        "action_type": action["action_type"],
        "source": action["source"],
        "source_ref": action["source_ref"],
        "payload_sha256": action["payload_sha256"],
        "attempt_count": action["attempt_count"],
        "chain_id": action["chain_id"],
        "enqueued_at": clock.moment(action["enqueued_at"]),
        "next_attempt_at": clock.moment(action["next_attempt_at"]),
        "lease": _lease_shape(action, clock),
        "last_error": action["last_error"],
        "ambiguous": is_ambiguous(action),
        "created_at": clock.moment(action["created_at"]),
        "updated_at": clock.moment(action["updated_at"]),
        "terminal_at": clock.moment(action["terminal_at"]),
    }


def _lease_shape(action: Action, clock: Clock) -> dict[str, Any] | None:
    if action["lease_owner"] is None:
        return None
    return {"owner": action["lease_owner"], "expires_at": clock.moment(action["lease_expires_at"])}


def whole_shape(action: Action, clock: Clock) -> dict[str, Any]:
    """The JSON shape of an action, all of it."""
    own = {name: action[name] for name in ("idempotency_key", "payload", "result")}
    return {**action_shape(action, clock), **own}


def action_text(action: Action, decisions: Sequence[str], clock: Clock) -> str:
    """Everything about an action but its receipts and events.

    Args:
        decisions: what ``approvals`` and ``rejections`` made of those.
    """
    rows = [
        ("action", printable(action["action_id"])),
        ("state", _state(action)),
        ("type", printable(action["action_type"])),
        ("source", printable(action["source"]) + _with(", ref ", action["source_ref"])),
        ("key", printable(action["idempotency_key"])),
        *payload_rows(action),
        *(("decision", said) for said in decisions or ["none yet"]),
        *_work(action, clock),
        *_end(action, clock),
        ("clock", f"times are relative to the {clock.whose}'s clock, {utc(clock.now)}"),
    ]
    return aligned(rows)


def action_line(action: Action, clock: Clock) -> str:
    """An action in one line: what is decided on."""
    what = f"{printable(action['action_id'])}, {printable(action['action_type'])} of {printable(action['source'])}"
    state = "" if action["state"] == STATE_PROPOSED else f"{_state(action)}, "
    return f"{what}, {state}proposed {clock.ago(action['created_at'])}"


def _work(action: Action, clock: Clock) -> Rows:
    yield "proposed", clock.told(action["created_at"])
    yield "changed", clock.told(action["updated_at"])
    yield "attempts", f"{action['attempt_count']} of {action['max_attempts']}"
    if action["chain_id"] is not None:
        enqueued = action["enqueued_at"]
        yield "chain", printable(action["chain_id"]) + ("" if enqueued is None else f", named {clock.told(enqueued)}")
    if action["state"] not in TERMINAL_STATES:
        yield "lease", _lease(action, clock)
        if action["next_attempt_at"] > clock.now:
            yield "due", clock.told(action["next_attempt_at"])


def _lease(action: Action, clock: Clock) -> str:
    if action["lease_owner"] is None:
        return "none"
    until = action["lease_expires_at"]
    ends = "ended" if until is None or until <= clock.now else "ends"
    return f"{printable(action['lease_owner'])}, {ends} {'' if until is None else clock.told(until)}".rstrip()


def _end(action: Action, clock: Clock) -> Rows:
    if action["terminal_at"] is not None:
        yield "ended", clock.told(action["terminal_at"])
    if action["last_error"] is not None:
        yield "error", printable(action["last_error"])
    if action["result"] is not None:
        yield from _block("result", action["result"])


def _state(action: Action) -> str:
    return f"{printable(action['state'])}{', ambiguous' if is_ambiguous(action) else ''}"


def is_ambiguous(action: Action) -> bool:
    """Whether it ended without anybody knowing if its effect is there."""
    result = action["result"]
    return action["state"] == STATE_FAILED and isinstance(result, Mapping) and result.get("status") == "ambiguous"


def _with(before: str, value: Any) -> str:
    return "" if value is None else f"{before}{printable(value)}"


# --- decisions -------------------------------------------------------------------------------------------------------


def approval_shape(receipt: Receipt, clock: Clock) -> dict[str, Any]:
    """The JSON shape of a gate receipt: what it says of itself, whether or not it holds."""
    evidence = _evidence(receipt)
    signature = evidence.get("signature")
    return {
        "principal": evidence.get("principal"),
        "decided_at": _moment(evidence.get("decided_at_epoch"), clock),
        "expires_at": _moment(evidence.get("expires_at_epoch"), clock),
        "approval_id": evidence.get("approval_id"),
        "channel": evidence.get("channel"),
        "bounded_grant_id": evidence.get("bounded_grant_id"),
        "key_id": signature.get("key_id") if isinstance(signature, Mapping) else None,
        "receipt_key": receipt["receipt_key"],
        "recorded_at": clock.moment(receipt["created_at"]),
    }


def gates(receipts: Iterable[Receipt]) -> list[Receipt]:
    """The approvals among an action's receipts."""
    return [receipt for receipt in receipts if receipt["kind"] == GATE_RECEIPT_KIND]


def approvals(receipts: Iterable[Receipt], clock: Clock) -> list[str]:
    """One line per approval: by whom, where, when, until when."""
    found = [approval(receipt, clock) for receipt in gates(receipts)]
    return [*found, f"{len(found)} approvals: it is never dispatched"] if len(found) > 1 else found


def approval(receipt: Receipt, clock: Clock) -> str:
    """By whom, where, when and until when this approval says it is."""
    shape = approval_shape(receipt, clock)
    how = "".join(
        _with(before, shape[name])
        for before, name in ((" in ", "channel"), (" by grant ", "bounded_grant_id"), (", signed with ", "key_id"))
    )
    decided, expires = shape["decided_at"], shape["expires_at"]
    when = " at no readable time" if decided is None else f" {clock.told(decided['epoch'])}"
    until = "" if expires is None else _until(expires["epoch"], clock)
    return f"approved by {printable(shape['principal'])}{how}{when}{until}; {printable(shape['approval_id'])}"


def _until(at: float, clock: Clock) -> str:
    return f", {'ends' if at > clock.now else 'ended'} {clock.told(at)}"


def rejection_shapes(events: Iterable[Event], clock: Clock) -> list[dict[str, Any]]:
    """The JSON shapes of the rejections, of which there is one at most."""
    return [
        {"by": e["actor"], "reason": _details(e).get("reason"), "at": clock.moment(e["created_at"])}
        for e in events
        if e["event_type"] == REJECTED
    ]


def rejections(events: Iterable[Event], clock: Clock) -> list[str]:
    """One line per rejection."""
    return [
        f"rejected by {printable(said['by'])} {clock.told(said['at']['epoch'])}: {printable(said['reason'])}"
        for said in rejection_shapes(events, clock)
    ]


def _evidence(receipt: Receipt) -> Mapping[str, Any]:
    evidence = receipt["evidence"]
    return evidence if isinstance(evidence, Mapping) else {}


def _details(event: Event) -> Mapping[str, Any]:
    details = event["details"]
    return details if isinstance(details, Mapping) else {}


def _moment(value: Any, clock: Clock) -> dict[str, Any] | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e12
    return clock.moment(float(value)) if number else None


# --- receipts, events, dead letters ----------------------------------------------------------------------------------


def receipt_shape(receipt: Receipt, clock: Clock) -> dict[str, Any]:
    """The JSON shape of a receipt with its evidence."""
    names = ("receipt_key", "kind", "status", "external_id", "evidence", "evidence_sha256")
    times = {name: clock.moment(receipt[name]) for name in ("observed_at", "created_at")}
    return {**{name: receipt[name] for name in names}, **times}


def receipts_text(receipts: Iterable[Receipt], clock: Clock) -> str:
    """Each receipt in one line, its evidence below."""
    lines = ["receipts"]
    for receipt in receipts:
        what = f"{printable(receipt['kind'])} {printable(receipt['status'])}"
        lines.append(f"  {printable(receipt['receipt_key'])}: {what}, {clock.told(receipt['created_at'])}")
        lines += [f"    {line}" for line in readable_json(receipt["evidence"]).split("\n")]
    return "\n".join(lines if len(lines) > 1 else ["receipts", "  none"])


def event_shape(event: Event, clock: Clock) -> dict[str, Any]:
    """The JSON shape of an event."""
    names = ("event_type", "from_state", "to_state", "actor", "details")
    return {**{name: event[name] for name in names}, "created_at": clock.moment(event["created_at"])}


def events_text(events: Iterable[Event]) -> str:
    """Each event in one line, in the order they happened."""
    rows = [
        (
            utc(event["created_at"], "milliseconds") or "no date",
            printable(event["event_type"]),
            printable(event["to_state"]),
            printable(event["actor"]),
            readable_json(_details(event), indent=None) if event["details"] else "",
        )
        for event in events
    ]
    return "events\n" + "\n".join(f"  {line}" for line in columns(rows).split("\n"))


def letter_shape(letter: DeadLetter, action: Action | None, clock: Clock) -> dict[str, Any]:
    """The JSON shape of a dead letter; ``action`` is None where its payload was changed in the database."""
    return {
        "action_id": letter["action_id"],
        "action_type": None if action is None else action["action_type"],
        "state": None if action is None else action["state"],
        "ambiguous": None if action is None else is_ambiguous(action),
        "reason": letter["reason"],
        "created_at": clock.moment(letter["created_at"]),
    }


def letters_text(letters: Sequence[tuple[DeadLetter, Action | None]], clock: Clock) -> str:
    """One line per dead letter, and its reason, whole, below it."""
    lines = []
    for letter, action in letters:
        what = "unreadable" if action is None else f"{printable(action['action_type'])}, {_state(action)}"
        lines.append(f"{printable(letter['action_id'])}  {what}, {clock.told(letter['created_at'])}")
        lines.append(f"  {printable(letter['reason'])}")
    return "\n".join(lines)


# --- tables ----------------------------------------------------------------------------------------------------------


def table(actions: Sequence[Action], clock: Clock) -> str:
    """One line per action under a heading; ids are whole, to be copied."""
    rows: list[tuple[str, ...]] = [("ACTION", "STATE", "TYPE", "SOURCE", "AGE", "LEASE, DUE OR END")]
    for action in actions:
        age = duration(clock.now - action["created_at"])
        cells = (_state(action), printable(action["action_type"]), printable(action["source"]), age)
        rows.append((printable(action["action_id"]), *map(_clipped, cells), _clipped(_standing(action, clock))))
    return columns(rows)


def _standing(action: Action, clock: Clock) -> str:
    if action["last_error"] is not None:
        return printable(action["last_error"])
    if action["terminal_at"] is not None:
        return f"{action['state']} {clock.ago(action['terminal_at'])}"
    if action["lease_owner"] is not None:
        return _lease(action, clock)
    if action["next_attempt_at"] > clock.now:
        return f"due {clock.ago(action['next_attempt_at'])}"
    return ""


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """The rows with their cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _clipped(said: str) -> str:
    return said if len(said) <= _CELL else f"{said[: _CELL - 3]}..."


# --- admission -------------------------------------------------------------------------------------------------------


def admission_shape(admission: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    """The JSON shape of the switch."""
    return {
        "open": admission["open"],
        "reason": admission["reason"] or None,
        "actor": admission["actor"] or None,
        "changed_at": clock.moment(admission["changed_at"]),
    }


def admission_text(admission: Mapping[str, Any], clock: Clock) -> str:
    """Whether it is open, who changed it last, and why."""
    stands = f"admission is {'open' if admission['open'] else 'closed'}"
    if admission["changed_at"] is None:
        return f"{stands}, and was never closed"
    who, why = printable(admission["actor"]), printable(admission["reason"])
    return f"{stands}, since {clock.told(admission['changed_at'])} by {who}: {why}"
