"""How ``celery idem`` says things: records as text, table and JSON; times, durations and URLs for people.

Nothing here asks a store. Whatever came out of a message (task names, ids) is printed without control characters, and
no URL with its credentials. The JSON shapes are those of docs/reference/cli.md and change only by additions.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from celery_idem.core import holder
from celery_idem.core.records import RECORD_VERSION, Kind, Note, Record, Right, State

if TYPE_CHECKING:
    from celery_idem.doctor.finding import Finding

UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
KEY_SHOWN = 12
"""Characters of a key in a table; any 8 of its first ones name it."""
_CELL = 40
_SECRET = re.compile(r"pass|secret|token|credential", re.IGNORECASE)
_ASKED_SECRET = re.compile(r"([?&][^=&?]*(?:pass|secret|token|credential)[^=&]*=)([^&]*)", re.IGNORECASE)
_NEXT_HOST = re.compile(r";(?=[a-z+]+://)")


@dataclass(frozen=True, slots=True)
class Clock:
    """What time it is, in seconds since 1970, and by whose clock: ``store`` or ``host``."""

    now: float
    whose: str

    def ago(self, at: float) -> str:
        """``in 3 h 12 min`` or ``5 s ago``."""
        rest = at - self.now
        return f"in {duration(rest)}" if rest > 0 else f"{duration(-rest)} ago"

    def told(self, at: float) -> str:
        """The relative and the absolute time."""
        return f"{self.ago(at)} ({utc(at) or 'no date'})"

    def moment(self, at: float | None) -> dict[str, Any] | None:
        """The JSON shape of a time."""
        return None if at is None else {"utc": utc(at, "milliseconds"), "epoch": at, "in_seconds": at - self.now}


def duration(seconds: float) -> str:
    """The two largest units: ``3 h 12 min``; below ten seconds one decimal."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    rest, parts = round(seconds), []
    for unit, size in UNITS:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}")
        elif parts:
            break
    return " ".join(parts[:2])


def utc(at: float, timespec: str = "seconds") -> str | None:
    """ISO 8601 with a ``Z``; None for a number that is no date."""
    try:
        return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec=timespec).replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None


def printable(text: object) -> str:
    """The text on one line, whatever a message smuggled into it."""
    said = str(text)
    return said if said.isprintable() else said.encode("unicode_escape").decode("ascii")


def one_line(error: BaseException) -> str:
    """An error's text without its line breaks."""
    return printable(" ".join(str(error).split()))


def as_json(shape: Mapping[str, Any]) -> str:
    """The document that ``--json`` prints."""
    return json.dumps(shape, indent=2)


# --- credentials -----------------------------------------------------------------------------------------------------


def shown_url(url: str) -> str:
    """The URL with ``**`` for each password, those of several Sentinels and in the query too; rather more than less."""
    parts = (f"{front}{':**' if password else ''}{rest}" for front, password, rest in _hosts(url))
    return _ASKED_SECRET.sub(r"\1**", ";".join(parts))


def secrets_of(url: str, options: Mapping[str, Any]) -> list[str]:
    """Every password in a store's URL and client options, as written and unquoted, the longest first."""
    found = [password for _, password, _ in _hosts(url)]
    found += [value for _, value in _ASKED_SECRET.findall(url)]
    found += [value for name, value in options.items() if isinstance(value, str) and _SECRET.search(str(name))]
    given = [secret for secret in found if secret]
    return sorted({*given, *map(unquote, given)}, key=len, reverse=True)


def _hosts(url: str) -> Iterator[tuple[str, str, str]]:
    """What stands before, in and after each password; one that was not quoted may hold any of ``/ ? # ; : @``."""
    for part in _NEXT_HOST.split(url):
        scheme, slashes, rest = part.partition("://")
        info, at, host = rest.rpartition("@")
        user, _, password = info.partition(":")
        yield scheme + slashes + user, password, at + host


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """The text without any of these."""
    for secret in secrets:
        text = text.replace(secret, "**")
    return text


# --- what the doctor found -------------------------------------------------------------------------------------------


def finding_text(finding: Finding) -> str:
    """A finding in a few lines, as wide as the terminal."""
    width = max(40, min(120, shutil.get_terminal_size().columns))
    lines = [f"{finding.severity.upper()}  {printable(finding.where)}  ({finding.rule})"]
    for name in ("found", "why", "change"):
        said = f"  {name:<8}{printable(getattr(finding, name))}"
        lines += textwrap.wrap(said, width, subsequent_indent=" " * 10, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


# --- records as JSON -------------------------------------------------------------------------------------------------


def record_shape(record: Record, clock: Clock, **value: Any) -> dict[str, Any]:
    """The JSON shape of a record; ``value`` and ``value_error`` join its outcome."""
    outcome, encoded = record.outcome, None if record.outcome is None else record.outcome.encoded
    return {
        "key": record.key,
        "state": record.state.value,
        "task": record.task,
        "namespace": record.namespace,
        "scope": record.scope or None,
        "fingerprint": record.fingerprint or None,
        "message_id": record.message_id,
        "generation": record.generation,
        "attempts": record.attempts,
        "fence": record.fence,
        "unknown": record.unknown,
        "holder": _holder_shape(record.holder, asked=record.state is State.CLAIMED),
        "claimed_at": clock.moment(record.claimed_at),
        "lease_expires_at": clock.moment(record.lease_expires_at),
        "completed_at": clock.moment(record.completed_at),
        "expires_at": clock.moment(record.expires_at),
        "outcome": None
        if outcome is None
        else {
            "kind": outcome.kind.value,
            "bytes": None if encoded is None else len(encoded.body),
            "content_type": None if encoded is None else encoded.content_type,
            "content_encoding": None if encoded is None else encoded.content_encoding,
            **value,
        },
        "notes": {message_id: _note_shape(note, clock) for message_id, note in record.notes.items()},
        "record_version": record.record_version,
    }


def _holder_shape(text: str, *, asked: bool = True) -> dict[str, Any] | None:
    if not text:
        return None
    parsed = holder.parse(text)
    return {
        "pid": None if parsed is None else parsed.pid,
        "host": None if parsed is None else parsed.host,
        "provably_dead": holder.provably_dead(text) if asked else None,
    }


def _note_shape(note: Note, clock: Clock) -> dict[str, Any]:
    successor, parked, right = note.successor, note.parked, note.continuing
    return {
        "over": None if note.over < 0 else note.over,
        "successor": None if successor is None else {"generation": successor[0], "due": clock.moment(successor[1])},
        "parked": None if parked is None else {"generation": parked[0], "count": parked[1]},
        "continuing": None
        if right is None
        else {
            "fence": right.fence,
            "holder": _holder_shape(right.holder),
            "lease_expires_at": clock.moment(right.lease_expires_at),
        },
        "settled": note.settled,
        "at": clock.moment(note.at),
    }


# --- records as text -------------------------------------------------------------------------------------------------


def aligned(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they say, in two columns."""
    listed = list(rows)
    width = max((len(name) for name, _ in listed), default=0)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in listed)


def is_newer(record: Record) -> bool:
    """Whether a newer release wrote it, so that everything but key, fence and expiry is a guess."""
    return record.record_version > RECORD_VERSION


def _state(record: Record) -> str:
    if is_newer(record):
        return "NEWER"
    outcome = record.outcome
    told = "" if outcome is None or outcome.kind is Kind.RESULT else f" {outcome.kind.value}"
    return f"{record.state.value}{told}"


def record_text(record: Record, clock: Clock, value: str | None = None) -> str:
    """Everything about a record but its stored value, which the caller gives if it is wanted."""
    if is_newer(record):
        rows = [("key", record.key), ("state", f"{_state(record)}: only the release that wrote it can read it")]
        return aligned([*rows, ("expires", clock.told(record.expires_at))])
    rows = [*_facts(record), *_times(record, clock)]
    if record.outcome is not None:
        encoded = record.outcome.encoded
        kept = f"{len(encoded.body)} bytes of {printable(encoded.content_type)}" if encoded else "no value kept"
        rows.append(("outcome", f"{record.outcome.kind.value}, {kept}"))
    if value is not None:
        rows.append(("value", value))
    for message_id, note in record.notes.items():
        rows.append(("note", f"{printable(message_id)}: {_note_text(note, clock)}"))
    rows.append(("clock", f"times are relative to the {clock.whose}'s clock, {utc(clock.now)}"))
    return aligned(rows)


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    yield "key", record.key
    yield "state", record.state.value
    yield "task", printable(record.task)
    yield "namespace", printable(record.namespace)
    yield "scope", f"{record.scope} (hash)" if record.scope else "none"
    yield "message", f"{printable(record.message_id)}, generation {record.generation}"
    yield "attempts", str(record.attempts)
    yield "fence", str(record.fence)
    yield "unknown", "yes: an attempt began whose outcome nobody knows" if record.unknown else "no"


def _times(record: Record, clock: Clock) -> Iterator[tuple[str, str]]:
    if record.state is State.CLAIMED:
        yield "held by", holder_text(record.holder)
        yield "held since", clock.told(record.claimed_at)
        ends = "ends" if clock.now < record.lease_expires_at else "ended"
        yield "lease", f"{ends} {clock.told(record.lease_expires_at)}"
    else:
        yield "last run by", holder.describe(record.holder)
        yield "claimed", clock.told(record.claimed_at)
    if record.completed_at is not None:
        yield "completed", clock.told(record.completed_at)
    elif record.state is State.RELEASED:
        yield "released", clock.told(record.lease_expires_at)
    yield "expires", clock.told(record.expires_at)


def holder_text(text: str) -> str:
    """Who it is, and whether the kernel says that it is dead."""
    dead = holder.provably_dead(text)
    return f"{holder.describe(text)}, {'provably dead' if dead else 'not provably dead from here'}"


def _note_text(note: Note, clock: Clock) -> str:
    said = [f"over up to generation {note.over}"] if note.over >= 0 else []
    if note.successor is not None:
        said.append(f"retry of generation {note.successor[0]} due {clock.told(note.successor[1])}")
    if note.parked is not None:
        said.append(f"parked copy {note.parked[1]} of generation {note.parked[0]}")
    if note.continuing is not None:
        said.append(_right_text(note.continuing, clock))
    if note.settled:
        said.append("settled")
    return "; ".join(said) or "nothing more"


def _right_text(right: Right, clock: Clock) -> str:
    lasts = "lasts until" if clock.now < right.lease_expires_at else "lapsed"
    return f"right to continue of {holder_text(right.holder)}, {lasts} {clock.told(right.lease_expires_at)}"


def record_line(record: Record, clock: Clock) -> str:
    """A record in one line: what an operator must see before forgetting it."""
    what = f"{record.state.value} {printable(record.task)} {record.key[:KEY_SHOWN]}"
    doubt = ", outcome unknown" if record.unknown else ""
    return f"{what}, message {printable(record.message_id)}, {_standing(record, clock)}{doubt}"


def _standing(record: Record, clock: Clock) -> str:
    if is_newer(record):
        return "of a newer release"
    if record.state is State.CLAIMED:
        dead = " (dead)" if holder.provably_dead(record.holder) else ""
        lapsed = " (lapsed)" if record.lease_expires_at <= clock.now else ""
        return f"{holder.describe(record.holder)}{dead}{lapsed}"
    if record.completed_at is not None:
        return f"completed {clock.ago(record.completed_at)}"
    return f"released {clock.ago(record.lease_expires_at)}"


def table(records: Sequence[Record], clock: Clock) -> str:
    """One line per record under a heading."""
    rows: list[tuple[str, ...]] = [("KEY", "STATE", "TASK", "AGE", "ATTEMPTS", "HOLDER OR END", "MESSAGE")]
    for record in records:
        age = "" if is_newer(record) else duration(clock.now - record.claimed_at)
        cells = (record.key[:KEY_SHOWN], _state(record), record.task, age, str(record.attempts))
        rows.append((*map(_clipped, cells), _standing(record, clock), _clipped(record.message_id)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _clipped(text: str) -> str:
    shown = printable(text)
    return shown if len(shown) <= _CELL else f"{shown[: _CELL - 3]}..."
