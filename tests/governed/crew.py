"""What a worker process does with a ledger: all there is to do, its mutation one line appended to a file."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery_idem.errors import ActionStoreError
from celery_idem.governed import SQLActionStore
from tests.governed.ledgers import LEASABLE, accept, dispatch, look, unresolved, verify
from tests.support.processes import wait_until

PATIENCE = 90.0
AT_WORK = (*LEASABLE, "dispatched")


def effects(path: Path) -> list[str]:
    """The ids of the actions whose mutation was made, once for each time."""
    return path.read_text().splitlines()


class Worker:
    """One worker of the crew, under a name of its own."""

    def __init__(self, store: SQLActionStore, path: Path, lease_seconds: float) -> None:
        self.store, self.path, self.seconds = store, path, lease_seconds
        self.owner = f"{os.getpid()}-{uuid.uuid4().hex}"

    def next(self) -> Mapping[str, Any] | bool | None:
        """An action that is leased now; True where none is left, None where others are still at work."""
        self.store.recover_expired_leases()
        action = self.store.lease_next(self.owner, lease_seconds=self.seconds, states=LEASABLE)
        action = action or self.store.lease_dispatched_observation(self.owner, lease_seconds=self.seconds)
        return action or (None if any(self.store.find(state, limit=1) for state in AT_WORK) else True)

    def run(self) -> None:
        """Work till nothing is left; a refusal means that somebody else has the action now."""
        while (action := wait_until(self.next, PATIENCE, "there is work, or none is left")) is not True:
            assert isinstance(action, Mapping)
            try:
                self.work(action["action_id"], action["state"])
            except ActionStoreError:
                continue

    def work(self, action_id: str, state: str) -> None:
        """Go as far as possible."""
        if state == "dispatched" and not self.found(action_id):
            return
        if state == "gated":
            dispatch(self.store, action_id, self.owner)
            self.mutate(action_id)
        if state in {"gated", "dispatched"}:
            accept(self.store, action_id, self.owner)
        if state != "verified":
            verify(self.store, action_id, self.owner)
        self.store.complete(action_id, self.owner, {"ok": True})

    def mutate(self, action_id: str) -> None:
        """The one effect, which cannot be taken back."""
        line = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(line, f"{action_id}\n".encode())
        os.close(line)

    def found(self, action_id: str) -> bool:
        """Look for the effect; where it is not there, say so."""
        _, receipt = look(self.store, action_id, self.owner)
        if receipt is None:
            return False
        if action_id in effects(self.path):
            return True
        unresolved(self.store, action_id, receipt["receipt_key"], 0.2, self.owner)
        return False


def work(url: str, path: str, lease_seconds: float) -> None:
    """What one process of the crew runs."""
    with SQLActionStore(url, timeout=30) as store:
        Worker(store, Path(path), lease_seconds).run()
