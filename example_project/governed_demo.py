"""The demo's second part: refunds that an owner must approve, while things go wrong.

One worker, the refund service in a process of its own, and the count of what really arrived there.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from celery_idem.governed import TERMINAL_STATES, SQLActionStore
from example_project import servers
from example_project.app import app
from example_project.governed_scenarios import SCENARIOS, Scenario, Seen, Stage
from example_project.refund_ledger import RefundLedger
from example_project.servers import Process, wait_until
from example_project.table import ROOMY, Cell, Clock, Colour, draw, mark, verdict, width

DEADLINE = 40.0
"""Seconds one scenario may take."""
LOOKED = """\
To look is a GET: celery_idem asks the provider what became of the refund, and never sends it again. The last row is the
price of that: the money went back, nobody could know, and a person must look. `governed dead-letters` lists it."""


class GovernedDemo:
    """One showing: the refund service, a worker, the scenarios one after the other, the table."""

    def __init__(self, stack: ExitStack, folder: Path, clock: Clock) -> None:
        self._clock, self._folder = clock, folder
        ledger = folder / "refunds.db"
        os.environ["SHOP_REFUNDS"] = stack.enter_context(servers.refund_service(ledger))
        store = SQLActionStore(app.conf.governed_store)
        stack.callback(store.close)
        stack.callback(self._stop_worker)
        self._worker: Process | None = None
        self._generation = 0
        self._stage = Stage(store, RefundLedger(ledger), self._wait, self._lose_worker)

    def run(self) -> bool:
        """Show everything; whether a row is not as promised."""
        self._start_worker()
        self._clock.say("governed actions: the refund service and one worker are ready")
        return self._tell([(scenario, self._play(number, scenario)) for number, scenario in enumerate(SCENARIOS, 1)])

    # --- processes ---------------------------------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self._generation += 1
        log = self._folder / f"worker-governed-{self._generation}.log"
        self._worker = servers.worker("governed", app.conf.task_default_queue, log)
        self._wait(lambda: self._worker is not None and self._worker.logged(" ready."), "the worker is ready")

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _lose_worker(self) -> None:
        self._stop_worker()
        self._start_worker()

    def _wait(self, done: Callable[[], object], what: str) -> None:
        wait_until(done, DEADLINE, what, [self._worker] if self._worker else ())

    # --- the show ----------------------------------------------------------------------------------------------------

    def _play(self, number: int, scenario: Scenario) -> Seen:
        stage, played = self._stage, scenario.play(self._stage)
        what = f"governed scenario {number} ({scenario.title}) comes to an end"
        self._wait(lambda: stage.store.get_action(played.action_id)["state"] in TERMINAL_STATES, what)
        seen = stage.seen(played)
        self._clock.say(f"{number}. {scenario.title}: PUTs {seen.puts}, refunds {seen.refunds}, {seen.end}")
        return seen

    def _tell(self, played: Sequence[tuple[Scenario, Seen]]) -> bool:
        """Print the table; whether a row is not as promised."""
        rows, broken = [], []
        for number, (scenario, seen) in enumerate(played, start=1):
            kept = scenario.promise_kept(seen)
            if not kept:
                broken.append(f"{number}. {seen}")
            rows.append(_row(number, scenario, seen, kept=kept))
        header = ["", "scenario", "what was done", "PUTs", "refunds", "end", "promised", "ok"]
        if width() < ROOMY:
            header, rows = header[:2] + header[3:], [row[:2] + row[3:] for row in rows]
        last = len(header) - 2
        print(f"\n{draw(header, rows, flexible=(*range(1, last - 3), last - 1, last))}\n")
        print(verdict(len(rows), broken, self._clock.seconds))
        if broken and self._worker is not None:
            print(f"the end of {self._worker.log}:\n{self._worker.tail(60)}")
        print(f"\n{textwrap.fill(LOOKED, width())}")
        return bool(broken)


def _row(number: int, scenario: Scenario, seen: Seen, *, kept: bool) -> list[Cell]:
    colour: Colour = "" if kept else "red"
    return [
        Cell(str(number)),
        Cell(scenario.title),
        Cell(scenario.done),
        Cell(str(seen.puts), colour),
        Cell(str(seen.refunds), colour),
        Cell(seen.end, colour),
        Cell(scenario.promised),
        mark(kept),
    ]
