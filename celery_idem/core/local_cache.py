"""Completed records one process may replay without asking the store: a saving, never a source of truth.

Only for messages that continue nothing (what they would publish must be asked), and for a minute at most, so that a
forgotten key is forgotten everywhere soon.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from celery_idem.core.records import Operation, Record

LIFE = 60.0
"""Seconds an entry serves at most, counted from when it was read."""


class LocalCache:
    """The last ``entries`` completed records this process saw; 0 entries keeps none."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[Record, float]] = OrderedDict()

    def get(self, operation: Operation) -> Record | None:
        """The completed record that certainly answers this delivery, or None: ask the store."""
        if not self._entries or operation.delivery.continues:
            return None
        with self._lock:
            record, until = self._kept.get(operation.key, (None, 0.0))
            if record is None or until <= time.monotonic():
                self._kept.pop(operation.key, None)
                return None
            self._kept.move_to_end(operation.key)
        differs = operation.fingerprint and record.fingerprint and operation.fingerprint != record.fingerprint
        same = record.message_id == operation.delivery.message_id
        noted = operation.delivery.message_id in record.notes
        stale = same and operation.delivery.generation < record.generation
        return None if stale or noted or (differs and not same) else record

    def put(self, record: Record, now: float) -> None:
        """Keep a completed record read at ``now`` by the store's clock; an entry's life is never prolonged.

        A record that does not show every note is not kept: a message whose attempt ended must not be answered by it.
        """
        if not self._entries or record.others:
            return
        until = time.monotonic() + min(LIFE, max(0.0, record.expires_at - now))
        with self._lock:
            known = self._kept.get(record.key)
            if known is not None and known[0].fence == record.fence:
                return
            self._kept[record.key] = (record, until)
            self._kept.move_to_end(record.key)
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)

    def drop(self, key: str) -> None:
        """Forget the key: its record changed."""
        if self._entries:
            with self._lock:
                self._kept.pop(key, None)
