"""What a Redis broker's own log says: which messages it popped for a worker that never noted them as unacked.

kombu pops a message with BRPOP and notes it in ``unacked`` in a second step. Where the worker or the connection dies
between the two, the message is in neither place, and no Celery of any kind gets to see it.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path


def commands(text: bytes) -> Iterator[list[bytes]]:
    """The commands of an append-only file; one that was not written to its end is left out."""
    at = 0
    while at < len(text):
        end = text.find(b"\r\n", at)
        if end < 0 or text[at : at + 1] != b"*":
            return
        count, at, words = int(text[at + 1 : end]), end + 2, []
        for _ in range(count):
            end = text.find(b"\r\n", at)
            length = int(text[at + 1 : end]) if end >= 0 else len(text)
            words.append(text[end + 2 : end + 2 + length])
            at = end + 2 + length + 2
        if at > len(text):
            return
        yield words


def vanished(text: bytes, queue: str) -> list[tuple[str, str]]:
    """Key and delivery tag of every message that was popped last and noted nowhere since."""
    line: deque[bytes] = deque()
    popped: dict[str, str] = {}
    for verb, *words in commands(text):
        name, place = verb.upper(), words[0] if words else b""
        if place == queue.encode():
            if name == b"LPUSH":
                line.extendleft(words[1:])
            elif name == b"RPUSH":
                line.extend(words[1:])
            elif name in {b"RPOP", b"LPOP"} and line:
                key, tag = _named(line.pop() if name == b"RPOP" else line.popleft())
                popped[tag] = key
        elif place == b"unacked" and name == b"HSET":
            popped.pop(words[1].decode(), None)
    waiting = {_named(message)[1] for message in line}
    return [(key, tag) for tag, key in popped.items() if tag not in waiting]


def read(directory: Path) -> bytes:
    """The append-only file of the server that keeps it there."""
    return b"".join(path.read_bytes() for path in sorted((directory / "appendonlydir").glob("*.incr.aof")))


def _named(message: bytes) -> tuple[str, str]:
    said = json.loads(message)
    _, kwargs, _ = json.loads(base64.b64decode(said["body"]))
    return str(kwargs.get("key")), str(said["properties"]["delivery_tag"])
