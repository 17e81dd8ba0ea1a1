"""Eight worker processes on two hundred actions: each mutated once, however many workers are killed on the way."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from celery_idem.governed import SQLActionStore
from tests.governed import crew
from tests.governed.crew import PATIENCE, effects
from tests.governed.ledgers import Ledger, gated, happened, letters, on_each_database
from tests.support.processes import wait_until

pytest_plugins = ("tests.governed.ledgers",)

WORKERS, ACTIONS, KILLS = 8, 200, 16


class Crew:
    """The processes at work on one ledger."""

    def __init__(self, ledger: Ledger, path: Path, lease_seconds: float) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([crew.__name__, "celery_idem.governed.gate"])
        self._arguments = (ledger.url, str(path), lease_seconds)
        self.running: list[BaseProcess] = []
        self.killed: list[BaseProcess] = []

    def add(self) -> None:
        process = self._context.Process(target=crew.work, args=self._arguments, daemon=True)
        process.start()
        self.running.append(process)

    def kill(self, process: BaseProcess) -> None:
        """SIGKILL one, and let another take its place."""
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(10)
        self.running.remove(process)
        self.killed.append(process)
        self.add()

    def join(self) -> None:
        """Wait till all of them have found nothing more to do."""
        for process in self.running:
            process.join(PATIENCE)
        assert [process.exitcode for process in self.running] == [0] * len(self.running)

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.join(10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "effects"
    file.touch()
    return file


@pytest.fixture
def actions(real_store: SQLActionStore) -> list[str]:
    return [gated(real_store) for _ in range(ACTIONS)]


@pytest.fixture
def slow(ledger: Ledger, path: Path) -> Iterator[Crew]:
    """A crew whose leases outlive the test."""
    crew = Crew(ledger, path, 300.0)
    yield crew
    crew.close()


@pytest.fixture
def hasty(ledger: Ledger, path: Path) -> Iterator[Crew]:
    """A crew whose leases lapse soon."""
    crew = Crew(ledger, path, 3.0)
    yield crew
    crew.close()


@on_each_database
def test_eight_workers_mutate_each_action_exactly_once(
    real_store: SQLActionStore, actions: list[str], slow: Crew, path: Path
) -> None:
    for _ in range(WORKERS):
        slow.add()
    slow.join()
    assert Counter(effects(path)) == Counter(actions)
    owners = set()
    for action_id in actions:
        action = real_store.get_action(action_id)
        assert (action["state"], action["attempt_count"], action["lease_owner"]) == ("completed", 1, None)
        events = real_store.list_events(action_id)
        wanted = ["proposed", "gated", "leased", "dispatched", "accepted", "verified", "completed"]
        assert [event["event_type"] for event in events] == wanted
        owners.add(events[-1]["actor"])
    assert len(owners) > 1


@pytest.mark.crash
@on_each_database
def test_workers_killed_at_any_moment_leave_each_action_mutated_at_most_once_and_ended(
    real_store: SQLActionStore, actions: list[str], hasty: Crew, path: Path
) -> None:
    chance = random.Random("the same moments each time, as far as the machine lets them be")
    for _ in range(WORKERS):
        hasty.add()
    for moment in sorted(chance.sample(range(2, ACTIONS - 10), KILLS)):
        wait_until(lambda moment=moment: len(effects(path)) >= moment, PATIENCE, f"{moment} mutations", interval=0.001)
        hasty.kill(chance.choice(hasty.running))
    hasty.join()
    assert len(hasty.killed) == KILLS
    made = Counter(effects(path))
    assert set(made) <= set(actions)
    assert set(made.values()) == {1}
    ends = Counter()
    for action_id in actions:
        action, history = real_store.get_action(action_id), happened(real_store, action_id)
        ends[history[-1]] += 1
        assert history.count("dispatched") == action["attempt_count"] == 1
        if history[-1] == "completed":
            assert action["state"] == "completed"
            assert made[action_id] == 1
        else:
            assert (history[-1], action["state"]) == ("ambiguous", "failed")
            assert action["result"]["status"] == "ambiguous"
            assert letters(real_store, action_id)
    assert ends["completed"] + ends["ambiguous"] == ACTIONS
    assert ends["completed"] > ACTIONS // 2
