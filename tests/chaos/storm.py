"""The storm: which fault strikes when is drawn from the seed alone; whom it strikes, from where work is in flight then.

Every fault is written into the history just before it is done, with the processes it hits.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.campaigns.report import progress
from tests.chaos.history import History
from tests.chaos.house import LEASE, VISIBLE, House, Hurt, Slot

WEIGHTS: Mapping[str, int] = {
    "kill child": 40,
    "kill worker": 12,
    "kill main": 6,
    "stop": 7,
    "store restart": 6,
    "broker restart": 3,
    "store cut before": 8,
    "store cut after": 8,
    "broker cut": 5,
    "clock step": 5,
    "partition": 3,
}
"""Of a hundred faults."""
KILLS = ("kill child", "kill worker", "kill main")
STOPPED = LEASE + 2
"""Seconds a worker is stopped or cut off: longer than a lease."""
STOPPED_LONG = VISIBLE + 5
"""Seconds every fourth of them lasts: until the broker has given its messages away."""
CUT = (0.3, 1.2)
"""Seconds connections are refused, or replies lost."""
STEP = 15.0
"""Seconds a wall clock is wrong by, forwards or backwards, for as long as a worker is stopped."""


@dataclass(frozen=True)
class Tick:
    """One fault to come."""

    at: float
    """Seconds after the storm began."""
    name: str
    seed: float


def schedule(seed: int, lasting: float, every: float, weights: Mapping[str, int]) -> list[Tick]:
    """The faults of a run in their order, on average one each ``every`` seconds."""
    dice = random.Random(f"faults {seed}")
    count, whole = int(lasting / every), sum(weights.values())
    # As a deck of cards, so that also a short storm has its share of each.
    deck = [name for name, weight in weights.items() for _ in range(max(1, round(count * weight / whole)))]
    dice.shuffle(deck)
    return [Tick(every * (n + dice.uniform(0.5, 1.5)), name, dice.random()) for n, name in enumerate(deck[:count])]


def last_words(log: str) -> str:
    """What a worker that ended by itself said; the one fault of Celery's that storms bring out by its name."""
    if "'NoneType' object has no attribute 'hostname'" in log:
        return "(Celery's own fault on a refused connection; it is started again)"
    return f"and is started again; the end of its log: {log}"


class Bodies:
    """Which bodies run now, followed in the history as it is written."""

    def __init__(self, history: History) -> None:
        self._history, self._offset, self._rest = history, 0, b""
        self.open: dict[str, int] = {}
        """Process by attempt."""
        self.started, self.ended, self.last = 0, 0, time.monotonic()
        self.pids: dict[str, set[int]] = {}
        """Processes in which bodies ran, by worker."""
        self.completed: set[str] = set()
        self.records: dict[str, str] = {}

    def look(self) -> None:
        """Read what is new."""
        import json

        with self._history.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        self._offset += len(text)
        lines = (self._rest + text).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            said = json.loads(line)
            kind = said["kind"]
            if kind not in {"fault", "healed", "renewed", "gone"}:
                self.last = max(self.last, said["at"])
            if kind == "start":
                self.open[said["attempt"]] = said["pid"]
                self.pids.setdefault(said["worker"], set()).add(said["pid"])
                if "record" in said:
                    self.records[said["record"]] = said["key"]
            elif kind == "end":
                self.open.pop(said["attempt"], None)
            elif kind == "fault" and said.get("deadly"):
                self.open = {attempt: pid for attempt, pid in self.open.items() if pid not in said["pids"]}
            elif kind == "answered":
                self.completed.add(said["key"])

    def busy(self) -> set[int]:
        """Processes with a running body."""
        return set(self.open.values())


class Storm:
    """Does what the schedule says to one house."""

    def __init__(self, house: House, ticks: list[Tick]) -> None:
        self.house, self.ticks = house, ticks
        self.bodies = Bodies(house.history)
        self.without_target: list[str] = []
        self.died = 0
        """Workers that ended by themselves, and were started again."""
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._threads: list[threading.Thread] = []
        self._swept = 0.0

    def run(self) -> None:
        """From the first fault to the last; what lasts longer goes on until :meth:`calm`."""
        began = time.monotonic()
        for tick in self.ticks:
            self.until(began + tick.at)
            self.bodies.look()
            done = getattr(self, "_" + tick.name.replace(" ", "_"))(random.Random(tick.seed))
            if not done:
                self.without_target.append(tick.name)

    def until(self, moment: float) -> None:
        """Go on with what is under way until then: heal, sweep, replace workers that died."""
        while (left := moment - time.monotonic()) > 0:
            self._housekeeping()
            time.sleep(min(0.1, left))

    def calm(self) -> None:
        """End every fault now, and have a whole fleet."""
        for thread in self._threads:
            thread.join(120)
        for hurt in filter(None, (self.house.broker, self.house.store)):
            if hurt.restarting:
                raise AssertionError(f"{hurt.server.describe} did not come back:\n{hurt.server.log[-2000:]}")
        while self._later:
            heapq.heappop(self._later)[2]()
        self._housekeeping()
        for slot in self.house.slots:
            with contextlib.suppress(AssertionError):
                slot.worker.wait_ready()

    def _housekeeping(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        if now - self._swept > 1:
            self._swept = now
            with contextlib.suppress(Exception):  # the broker may be away
                self.house.sweep()
            self.bodies.look()
        for slot in self.house.slots:
            if not slot.busy and not slot.worker.alive:
                self.died += 1
                progress(f"{slot.name} ended by itself {last_words(slot.worker.log_tail(3))}")
                pids = self.bodies.pids.get(slot.worker.name, set())
                self.house.history.write("gone", pids=[slot.worker.pid, *pids])
                slot.start()

    # --- faults on workers -------------------------------------------------------------------------------------------

    def _slot(self, dice: random.Random, fits: Callable[[Slot], bool] = lambda _: True) -> Slot | None:
        """A worker to strike, one with running bodies if there is any."""
        able = [slot for slot in self.house.slots if not slot.busy and slot.worker.alive and fits(slot)]
        busy = self.bodies.busy()
        working = [slot for slot in able if busy & set(slot.pids())]
        return dice.choice(working or able) if able else None

    def _note(self, name: str, pids: list[int] | None = None, *, deadly: bool = False) -> int:
        number = next(self._numbers)
        self.house.history.write("fault", name=name, number=number, pids=pids, deadly=deadly or None)
        return number

    def _kill_child(self, dice: random.Random) -> bool:
        slot = self._slot(dice, lambda slot: slot.pool == "prefork" and bool(slot.worker.children()))
        if slot is None:
            return False
        children = slot.worker.children()
        child = dice.choice([pid for pid in children if pid in self.bodies.busy()] or children)
        number = self._note("kill child", [child], deadly=True)
        with contextlib.suppress(ProcessLookupError):
            slot.worker.kill_child(child)
        self.house.history.write("healed", number=number)
        return True

    def _kill_worker(self, dice: random.Random, name: str = "kill worker") -> bool:
        slot = self._slot(dice)
        if slot is None:
            return False
        number = self._note(name, slot.pids(), deadly=True)
        if name == "kill main":
            slot.worker.kill_main()
        slot.worker.kill()
        self.house.history.write("healed", number=number)
        slot.start()
        return True

    def _kill_main(self, dice: random.Random) -> bool:
        return self._kill_worker(dice, "kill main")

    def _stop(self, dice: random.Random) -> bool:
        return self._for_a_while("stop", self._slot(dice), dice, Slot.pause, Slot.resume)

    def _clock_step(self, dice: random.Random) -> bool:
        seconds = dice.choice((-STEP, STEP))
        return self._for_a_while(
            "clock step", self._slot(dice), dice, lambda slot: slot.step_clock(seconds), lambda slot: slot.step_clock(0)
        )

    def _partition(self, dice: random.Random) -> bool:
        space = self.house.space
        slot = self._slot(dice, lambda slot: slot.space is not None) if space is not None else None
        if space is None:
            return False
        return self._for_a_while("partition", slot, dice, lambda _: space.cut(), lambda _: space.heal())

    def _for_a_while(
        self,
        name: str,
        slot: Slot | None,
        dice: random.Random,
        begin: Callable[[Slot], None],
        end: Callable[[Slot], None],
    ) -> bool:
        if slot is None:
            return False
        lasting = STOPPED_LONG if dice.random() < 0.25 else STOPPED
        number = self._note(name, slot.pids())
        slot.busy = True
        begin(slot)

        def heal() -> None:
            end(slot)
            self.house.history.write("healed", number=number)
            slot.busy = False

        self._heal_after(lasting, heal)
        return True

    def _heal_after(self, seconds: float, heal: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), heal))

    # --- faults on servers -------------------------------------------------------------------------------------------

    def _store_restart(self, dice: random.Random) -> bool:
        return self._restart("store restart", self.house.store)

    def _broker_restart(self, dice: random.Random) -> bool:
        return self._restart("broker restart", self.house.broker)

    def _restart(self, name: str, hurt: Hurt | None) -> bool:
        if hurt is None or hurt.busy:
            return False
        hurt.busy = hurt.restarting = True
        number = self._note(name)

        def killed() -> None:
            hurt.server.kill()
            hurt.server.start()
            self.house.history.write("healed", number=number)
            hurt.busy = hurt.restarting = False

        thread = threading.Thread(target=killed, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)
        return True

    def _store_cut_before(self, dice: random.Random) -> bool:
        return self._cut("store cut before", self.house.store, dice)

    def _store_cut_after(self, dice: random.Random) -> bool:
        return self._cut("store cut after", self.house.store, dice)

    def _broker_cut(self, dice: random.Random) -> bool:
        return self._cut("broker cut", self.house.broker, dice)

    def _cut(self, name: str, hurt: Hurt | None, dice: random.Random) -> bool:
        """Cut and refuse connections, so no request reaches the server; or let requests through and lose replies."""
        if hurt is None or hurt.busy:
            return False
        hurt.busy = True
        number = self._note(name)
        for proxy in hurt.proxies:
            if name.endswith("after"):
                proxy.drop_replies()
            else:
                proxy.refuse = True
                proxy.cut()

        def heal() -> None:
            for proxy in hurt.proxies:
                proxy.heal()
            self.house.history.write("healed", number=number)
            hurt.busy = False

        self._heal_after(dice.uniform(*CUT), heal)
        return True
