"""What the suite for claim stores needs to know of a store: how to open it, and what can be done to it.

A harness is written once per store. The suite asks it for a new one per case and closes it afterwards; the cases keep
to keys of their own, but purge what has expired, so all harnesses may lead to one place which holds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from celery_idem.conformance.clock import Clock
from celery_idem.stores.base import Store

__all__ = ["HOOKS", "ClaimHarness", "Clock"]

HOOKS = frozenset(
    {
        *("clock", "shared", "raw", "newer", "garble", "garble_body", "annotate"),
        *("locked", "lost_reply", "unreachable", "silent"),
    }
)
"""Members of a harness that are None where the store cannot have them."""


class ClaimHarness(Protocol):
    """One opened store; inherit from it, and the optional members have their defaults."""

    store: Store
    """Opened, its schema made; it holds no records but of this suite."""
    timeout: float = 0.4
    """Seconds no verb outlives, of the handles that ``impatient``, ``silent`` and ``unreachable`` make."""
    shared: bool = True
    """Another process sees the same records; False for a store in memory."""
    expires_itself: bool = False
    """The place drops what has expired by a clock of its own, as Redis does: ``purge`` may find nothing."""
    clock: Clock | None = None
    """The store's clock: it must read this one, in every handle ``reopen`` makes too.

    None where nobody can move the store's clock. Then leases are short and waited out, and the cases about days and
    exact times are not run.
    """
    excused: Mapping[str, str] = {}
    """What the store cannot have, with the reason: ``{"locked": "it has no transactions"}``.

    A case that needs a member which is None is told as not run, and fails the suite unless it is excused here.
    """

    # --- past the store: what is stored under a key ------------------------------------------------------------------

    raw: Callable[[str], Any] | None = None
    """Everything stored under the key, in any form that can be compared."""
    newer: Callable[[str], None] | None = None
    """Make it a record of a newer release: its record_version is one more than this release's."""
    garble: Callable[[str], None] | None = None
    """Make it a record nobody can read."""
    garble_body: Callable[[str], None] | None = None
    """Make the outcome's body ``b"garbled"``, and leave its checksum."""
    annotate: Callable[[str, str], None] | None = None
    """Give the note of this message a field that this release does not know."""

    # --- trouble -----------------------------------------------------------------------------------------------------

    locked: Callable[[str], AbstractContextManager[None]] | None = None
    """Within it somebody's transaction locks the key's record."""
    lost_reply: Callable[[], AbstractContextManager[Store]] | None = None
    """Within it a handle whose server does what it is told, and whose connection breaks before the answer comes."""
    unreachable: Callable[[], Store] | None = None
    """A handle whose server cannot be reached, so that nothing can have been written."""
    silent: Callable[[], Store] | None = None
    """A handle whose server takes everything and says nothing."""

    def reopen(self) -> Store:
        """Another handle to the same records, as another process would open it; in memory the same one."""
        ...

    def impatient(self) -> Store:
        """Another handle, whose verbs give up after ``timeout``."""
        return self.reopen()

    def close(self) -> None:
        """Close the store and every handle."""
        ...
