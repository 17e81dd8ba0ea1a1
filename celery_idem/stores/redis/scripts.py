"""The Lua scripts as the server gets them: constants from core/records.py, the shared prelude, the verb.

Which script a verb sends and what its answer means is the store's business; this module only reads the files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from celery_idem.core.records import DAY, GRACE, NOTES_KEPT, RECORD_VERSION

VERBS = ("claim", "complete", "release", "renew", "settle", "note_parked", "forget")


@dataclass(frozen=True, slots=True)
class Script:
    """One verb's text and the name the server knows it by."""

    verb: str
    text: bytes
    sha: bytes
    """SHA-1 of the text, 40 hex characters: what EVALSHA takes."""


@cache
def script(verb: str) -> Script:
    """The verb's script, read once per process."""
    lua = files("celery_idem.stores.redis") / "lua"
    constants = f"local VERSION, DAY, GRACE, KEPT = {RECORD_VERSION}, {DAY:.0f}, {GRACE:.0f}, {NOTES_KEPT}\n"
    parts = (lua / f"{name}.lua" for name in ("common", verb))
    text = (constants + "\n".join(part.read_text("utf-8") for part in parts)).encode()
    # SHA-1 is EVALSHA's name for a script, no protection.
    return Script(verb, text, hashlib.sha1(text, usedforsecurity=False).hexdigest().encode())
