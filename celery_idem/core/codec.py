"""Turns a task's value or exception into bytes and back, through kombu's serializer registry.

What goes in must come out: a value that cannot be encoded, is too big, or cannot be read back is ``NotKept``, and
bytes that cannot be read are ``Undecodable``, whatever they are. Pickle is read only where the app accepts it. An
exception's class is looked up among the modules already imported, never imported by its stored name, and nothing but
an Exception subclass is ever called. What to do about a value that was not kept is the engine's business.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection
from typing import Any, Literal, cast

from kombu.serialization import dumps, loads, prepare_accept_content
from kombu.serialization import registry as serializers  # type: ignore[attr-defined]  # the stubs lack it

from celery_idem.core.values import frozen
from celery_idem.errors import CeleryIdemError, ReplayedFailure

RAW_CONTENT = frozenset({"application/data", "application/text"})  # what kombu hands on as it is
MESSAGE_KEPT = 1000  # characters of an exception's text where the whole exception is too big


class NotKept(CeleryIdemError):
    """The value was not kept: return something the serializer can say, or allow more bytes."""

    reason: Literal["encoding", "size"]

    def __init__(self, message: str = "", *, reason: Literal["encoding", "size"] = "encoding", **facts: object) -> None:
        super().__init__(message, reason=reason, **facts)


class Undecodable(CeleryIdemError):
    """The stored value cannot be read: look at the record, then forget the key."""


@frozen
class Encoded:
    """A value as it is stored. ``checksum`` is the SHA-256 of the other three, 64 lowercase hex characters."""

    body: bytes
    content_type: str
    content_encoding: str
    checksum: str


def encode_value(value: object, serializer: str, *, max_bytes: int) -> Encoded:
    """Encode the value with the named kombu serializer.

    Args:
        value: what the task returned.
        serializer: a name in kombu's registry (``"json"``, ``"pickle"``, …).
        max_bytes: the largest body that is kept.

    Raises:
        NotKept: with ``reason`` "encoding" or "size"; whatever the serializer raised is its cause.
    """
    label = type(value).__qualname__
    try:
        content_type, content_encoding, payload = dumps(value, serializer=serializer)
        body = payload.encode(content_encoding) if isinstance(payload, str) else bytes(memoryview(payload))
    except Exception as error:
        raise NotKept(
            f"the serializer {serializer!r} cannot say this {label} ({error}): return something it can, "
            "or name another one in idempotency_serializer",
            reason="encoding",
        ) from error
    if len(body) > max_bytes:
        raise NotKept(
            f"this {label} is {len(body)} bytes, and idempotency_result_max_bytes is {max_bytes}: return a reference "
            "to it, or raise the setting",
            reason="size",
            size=len(body),
        )
    return Encoded(body, content_type, content_encoding, _checksum(body, content_type, content_encoding))


def decode_value(encoded: Encoded, accept: Collection[str] | None = None) -> object:
    """Decode the stored value, or raise ``Undecodable`` whatever the bytes are.

    Args:
        encoded: as stored.
        accept: serializer names or content types that may be read, as in Celery's ``accept_content``; None is JSON
            alone.

    Raises:
        Undecodable: the checksum differs, the content type is not accepted, or the serializer refuses the body.
    """
    try:
        if encoded.checksum != _checksum(encoded.body, encoded.content_type, encoded.content_encoding):
            raise Undecodable("the stored value's checksum differs: look at the record, then forget the key")
        accept = ("json",) if accept is None else accept
        # kombu's spelling of what is accepted, unless this type is plainly among it.
        plainly = encoded.content_type in accept or serializers.type_to_name.get(encoded.content_type) in accept
        accepted = (encoded.content_type,) if plainly else prepare_accept_content(accept)
        # kombu hands an empty body, and one whose content type it does not know, on as they are.
        if encoded.content_type not in RAW_CONTENT:
            if not encoded.body:
                raise Undecodable("the stored value is empty: look at the record, then forget the key")
            if encoded.content_type not in serializers.type_to_name:
                raise Undecodable(f"no serializer here reads {encoded.content_type}: register it with kombu")
        return cast("object", loads(encoded.body, encoded.content_type, encoded.content_encoding, accept=accepted))
    except Undecodable:
        raise
    except Exception as error:
        raise Undecodable(
            f"the stored {encoded.content_type} cannot be read ({type(error).__name__}: {str(error)[:200]}): put its "
            "serializer into accept_content, or forget the key"
        ) from error


def through_codec(encoded: Encoded, accept: Collection[str] | None = None) -> object:
    """Give the first run the value every replay will have.

    JSON makes a list of a tuple and text of an int key. The run that stored the value hands on the decoded value, not
    the one its body returned, so that ``AsyncResult.get()``, the next step of a chain and an eager ``apply()`` see
    one value whichever run they follow.

    Raises:
        NotKept: what was encoded cannot be read back, so it must not be stored.
    """
    try:
        return decode_value(encoded, accept)
    except Undecodable as error:
        raise NotKept(
            f"what was encoded cannot be read back, so no replay could: {error}", reason="encoding"
        ) from error


def _checksum(body: bytes, content_type: str, content_encoding: str) -> str:
    head = f"{len(content_type)}:{content_type}{len(content_encoding)}:{content_encoding}"
    return hashlib.sha256(head.encode("utf-8", "surrogatepass") + body).hexdigest()


# --- exceptions ------------------------------------------------------------------------------------------------


def encode_exception(exc: BaseException, serializer: str, *, max_bytes: int) -> Encoded:
    """Encode the exception's class by name, what rebuilds it, its text and its notes.

    What the serializer cannot say is left out: without its arguments the exception is replayed as ``ReplayedFailure``.
    So it is where the whole is too big, and there only the first ``MESSAGE_KEPT`` characters of the text are kept.

    Raises:
        NotKept: not even the name and the text can be kept.
    """
    cls = type(exc)
    attributes = exc.facts if isinstance(exc, CeleryIdemError) else getattr(exc, "__dict__", {})
    said: dict[str, Any] = {"module": cls.__module__, "type": cls.__qualname__, "message": _text_of(exc)}
    args = _arguments(exc)
    whole = {
        **said,
        "args": args if _can_say(args, serializer) else None,
        "attributes": {name: value for name, value in attributes.items() if _is_kept(name, value, serializer)},
        "notes": [note for note in _notes(exc) if isinstance(note, str)],
    }
    try:
        return encode_value(whole, serializer, max_bytes=max_bytes)
    except NotKept:
        short = {**said, "message": said["message"][:MESSAGE_KEPT], "args": None, "attributes": {}, "notes": []}
        return encode_value(short, serializer, max_bytes=max_bytes)


def decode_exception(encoded: Encoded, accept: Collection[str] | None = None) -> BaseException:
    """Rebuild the stored exception, or a ``ReplayedFailure`` with its class and text in the message.

    The original class is used where its module is imported here and calling it with the stored arguments gives an
    exception of that class, those arguments and that text.

    Raises:
        Undecodable: as ``decode_value``, or the value is not a stored exception.
    """
    stored = decode_value(encoded, accept)
    if not isinstance(stored, dict) or not all(isinstance(stored.get(k), str) for k in ("module", "type", "message")):
        raise Undecodable("the stored value is not an exception: look at the record, then forget the key")
    notes = stored.get("notes") or []
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise Undecodable("the stored exception's notes are not text: look at the record, then forget the key")
    exc = _rebuilt(stored)
    if exc is None:
        exc_type = f"{stored['module']}.{stored['type']}"
        text = f"{exc_type}: {stored['message']}" if stored["message"] else exc_type
        exc = ReplayedFailure(text, exc_type=exc_type)
    if notes:
        exc.__dict__["__notes__"] = notes  # where add_note() keeps them; 3.10 has none, a frozen dataclass refuses it
    return exc


def _rebuilt(stored: dict[str, Any]) -> Exception | None:
    args, attributes = stored.get("args"), stored.get("attributes")
    if not isinstance(args, list) or not isinstance(attributes, dict):
        return None
    try:
        cls = _class_of(stored["module"], stored["type"])
        if cls is None:
            return None
        if issubclass(cls, CeleryIdemError):
            exc: Exception = cls(stored["message"], **attributes)
        else:
            exc = cls(*args)
            for name, value in attributes.items():
                exc.__dict__.setdefault(name, value)  # not setattr(), which could run a property's code
        if type(exc) is not cls or _arguments(exc) != args or _text_of(exc) != stored["message"]:
            return None
    except Exception:  # noqa: BLE001 - a constructor may raise anything, and ReplayedFailure says it instead
        return None
    return exc


def _class_of(module: str, qualname: str) -> type[Exception] | None:
    # Like Celery's result backends, only among what is imported: a stored name must not choose code to run. Nor may
    # the walk, so it reads __dict__, where getattr() could run a module's or a metaclass's __getattr__.
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
        if not isinstance(found, type):
            return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _arguments(exc: BaseException) -> list[object]:
    """Give what calls the class again: what pickle would, as an OSError's args lack its file name."""
    try:
        reduced = exc.__reduce__()
        if isinstance(reduced, tuple) and reduced[0] is type(exc):
            return list(reduced[1])
    except Exception:  # noqa: BLE001 - a __reduce__ may raise anything; args are there all the same
        return list(exc.args)
    return list(exc.args)


def _is_kept(name: object, value: object, serializer: str) -> bool:
    return isinstance(name, str) and name[:1] != "_" and _can_say(value, serializer)


def _can_say(value: object, serializer: str) -> bool:
    try:
        content_type, content_encoding, payload = dumps(value, serializer=serializer)
        loads(payload, content_type, content_encoding, accept={content_type})  # JSON writes some things it cannot read
    except Exception:  # noqa: BLE001 - whatever the serializer raises, it cannot say the value
        return False
    return True


def _notes(exc: BaseException) -> list[object]:
    notes = getattr(exc, "__notes__", None)
    return list(notes) if isinstance(notes, (list, tuple)) else []


def _text_of(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - a __str__ may raise anything
        return f"<no text: {type(exc).__qualname__}.__str__ raised>"
