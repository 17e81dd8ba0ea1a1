"""Kombu's filesystem broker, except that a message appears whole.

Kombu writes a message under its final name, so a worker that looks too early reads half of it and dies (kombu issue
1551). Here it is written under another name first.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """Puts messages atomically."""

    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]  # the stubs disagree
        folder = Path(self.data_folder_out)
        name = f"{time.monotonic_ns() // 1_000_000}_{uuid4()}.{queue}.msg"  # workers read them in this order
        part = folder / f"{name}.part"
        part.write_text(dumps(payload))
        part.rename(folder / name)


class Transport(filesystem.Transport):
    """What ``filesystem://`` means in the shop."""

    Channel = Channel
