"""The shop with and without celery_idem, side by side, while things go wrong: ``python -m example_project.demo``.

Its second part, refunds that an owner approves, is governed_demo.py. Needs no server: messages, results, claims and
ledgers are files in a temporary directory. The workers are real.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery_idem import ConfigurationError, StoreError, open_store
from celery_idem.governed import SQLActionStore
from example_project import ledger, servers
from example_project.app import app
from example_project.governed_demo import GovernedDemo
from example_project.scenarios import SCENARIOS, WHOLE_WORKER, Scenario, Seen, Side
from example_project.servers import DemoError, Process, wait_until
from example_project.table import ROOMY, Cell, Clock, Colour, draw, mark, verdict, width
from example_project.tasks import charge_plain

REDELIVERING = ("redis:", "rediss:", "amqp:", "amqps:", "pyamqp:")
"""Brokers that give the messages of a dead worker to another one."""
EMBEDDED = ("filesystem", "sqlite")
PRIVATE = {"redis": servers.redis, "rabbitmq": servers.rabbitmq, "postgresql": servers.postgresql}
EMBEDDED_LIMIT = """\
Not shown: the whole worker killed, as by a power cut. The filesystem and SQLite brokers forget a message once a worker
has taken it, so it is lost, whatever celery_idem does. `make demo ARGS="--broker redis"` shows that case, and so does
rabbitmq in its place."""
RUNS_AGAIN = """\
on_unknown="run" is the default: after a crash in the middle nobody knows whether the effect happened, so the task runs
again, and its body can ask `current().reclaimed`. Give it `verify=`, or hand `current().key` to a payment provider that
knows duplicates, and there is one charge; or choose on_unknown="fail"."""


def main() -> int:
    """Run the demo; 0 if every row came out as promised, 1 if not, 2 if it could not run."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = _options()
    try:
        with ExitStack() as stack:
            try:
                return Demo(stack, keep=options.keep).run(options.broker, options.store)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # no second Ctrl-C may cut the cleaning up short
    except (DemoError, ConfigurationError, StoreError, OSError) as error:
        print(f"\nthe demo could not go on: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped, and everything it had started", file=sys.stderr)
        return 130


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m example_project.demo", description=(__doc__ or "").split("\n")[0])
    private = "starts a private server for the demo"
    parser.add_argument("--broker", default="filesystem", help=f"filesystem; redis or rabbitmq {private}; or a URL")
    parser.add_argument("--store", default="sqlite", help=f"sqlite; redis or postgresql {private}; or a URL")
    parser.add_argument("--keep", action="store_true", help="keep the directory with ledger, claims and worker logs")
    options = parser.parse_args()
    for name, words in (("broker", ("filesystem", "redis", "rabbitmq")), ("store", ("sqlite", "redis", "postgresql"))):
        given = getattr(options, name)
        if ":" not in given and given not in words:
            parser.error(f"--{name} {given}: it is one of {', '.join(words)}, or a URL")
    return options


class Demo:
    """One showing: a directory, the servers asked for, two workers, the scenarios, the table."""

    def __init__(self, stack: ExitStack, *, keep: bool) -> None:
        self._stack = stack
        self._clock = Clock()
        self._folder = Path(tempfile.mkdtemp(prefix="celery-idem-demo-"))
        self._workers: list[Process] = []
        self._generation = 0
        stack.callback(self._leave, keep=keep)

    def run(self, broker: str, store: str) -> int:
        """Show everything; the exit code."""
        self._open_shop(broker, store)
        self._start_workers()
        self._clock.say("two workers are ready, with two processes each: one for bare Celery, one for celery_idem")
        redelivers = app.conf.broker_url.startswith(REDELIVERING)
        shown = [*SCENARIOS, *(WHOLE_WORKER if redelivers else ())]
        played = [(scenario, *self._play(number, scenario)) for number, scenario in enumerate(shown, start=1)]
        broken = self._tell(played)
        for text in (RUNS_AGAIN,) if redelivers else (RUNS_AGAIN, EMBEDDED_LIMIT):
            print(f"\n{textwrap.fill(text, width())}")
        self._stop_workers()
        print("\nAnd now what must not happen because a message arrived: refunds that an owner approves.\n")
        broken |= GovernedDemo(self._stack, self._folder, self._clock).run()
        return 1 if broken else 0

    # --- setting up ------------------------------------------------------------------------------------------------

    def _open_shop(self, broker: str, store: str) -> None:
        os.environ.update(SHOP_DIR=str(self._folder), SHOP_NAME=f"shop-{uuid4().hex[:8]}")
        private: dict[str, str] = {}
        for word, variable in ((broker, "SHOP_BROKER"), (store, "SHOP_STORE")):
            if word in PRIVATE and word not in private:
                self._clock.say(f"starting a private {word}")
                private[word] = self._stack.enter_context(PRIVATE[word]())
            if word not in EMBEDDED:
                os.environ[variable] = private.get(word, word)
        if os.environ.get("SHOP_STORE", "").startswith("postgresql"):
            os.environ["SHOP_ACTIONS"] = os.environ["SHOP_STORE"]
        # The environment is complete, so from here on the settings may be read.
        claims = open_store(app.conf.idempotency_store)
        claims.create_schema()
        claims.close()
        actions = SQLActionStore(app.conf.governed_store)
        actions.create_schema()
        actions.close()
        app.backend.get_state("")  # makes the result tables, before two workers do it at once
        self._stack.callback(clean_broker)
        self._stack.callback(self._stop_workers)
        self._clock.say(f"the shop is open: broker {broker}, claim store {store}, files in {self._folder}")

    def _start_workers(self) -> None:
        self._generation += 1
        for name, queue in queue_names().items():
            self._workers.append(servers.worker(name, queue, self._folder / f"worker-{name}-{self._generation}.log"))
        wait_until(lambda: all(worker.logged(" ready.") for worker in self._workers), 30, "ready", self._workers)

    def _stop_workers(self) -> None:
        while self._workers:
            self._workers.pop().stop()

    def _leave(self, *, keep: bool) -> None:
        failed = self._generation > 0 and isinstance(sys.exc_info()[1], DemoError)
        if keep or failed:  # what went wrong is in the workers' logs
            print(f"kept: {self._folder}")
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- the show --------------------------------------------------------------------------------------------------

    def _play(self, number: int, scenario: Scenario) -> tuple[Side, Side]:
        """Play one scenario on both sides at the same time, and return when every message is answered."""
        sides = bare, idem = scenario.sides(number)
        for batch in scenario.batches:
            for side in sides:
                scenario.send(batch, side)
            if scenario.kills_worker:
                self._lose_workers()
            what = f"scenario {number} ({scenario.title}): every message is answered"
            wait_until(lambda: all(side.answered for side in sides), 60, what, self._workers)
        counts = f"bare {len(ledger.charges(bare.order_id))}, celery_idem {len(ledger.charges(idem.order_id))}"
        self._clock.say(f"{number}. {scenario.title}: {counts}")
        return bare, idem

    def _lose_workers(self) -> None:
        wait_until(lambda: not any(worker.alive for worker in self._workers), 20, "both workers are killed")
        self._stop_workers()
        give_back_unacked()
        self._start_workers()
        self._clock.say("both workers were killed, two new ones are ready")

    def _tell(self, played: Sequence[tuple[Scenario, Side, Side]]) -> bool:
        """Print the table; whether a row is not as promised."""
        rows, broken = [], []
        for number, (scenario, bare, idem) in enumerate(played, start=1):
            without, within = bare.seen(), idem.seen()
            kept = scenario.promise_kept(within) and len(without.charges) == scenario.bare
            if not kept:
                broken.append(f"{number}. without celery_idem: {without}\n   with celery_idem: {within}")
            rows.append(_row(number, scenario, without, within, kept=kept))
        header = ["", "scenario", "what was sent", "bare Celery", "celery_idem", "promised", "ok"]
        if width() < ROOMY:
            header, rows = header[:2] + header[3:], [row[:2] + row[3:] for row in rows]
        print(f"\n{draw(header, rows, flexible=(1, len(header) - 2))}\n")
        print(verdict(len(rows), broken, self._clock.seconds))
        if broken:
            print("\n".join(f"the end of {worker.log}:\n{worker.tail(60)}" for worker in self._workers))
        return bool(broken)


def _row(number: int, scenario: Scenario, without: Seen, within: Seen, *, kept: bool) -> list[Cell]:
    def count(seen: Seen, colour: Colour) -> Cell:
        charges = len(seen.charges)
        return Cell(f"{charges} charge{'' if charges == 1 else 's'}", colour)

    right: Colour = "green" if scenario.charges == 1 else ""
    return [
        Cell(str(number)),
        Cell(scenario.title),
        Cell(scenario.sent),
        count(without, "red"),
        count(within, right if kept else "red"),
        Cell(scenario.promised),
        mark(kept),
    ]


def give_back_unacked() -> None:
    """Have Redis give the dead workers' messages to others now, not after its visibility timeout of an hour.

    RabbitMQ has done so when their connections broke.
    """
    if app.conf.broker_url.startswith(("redis:", "rediss:")):
        options = {**app.conf.broker_transport_options, "visibility_timeout": 0}
        with app.connection_for_write(transport_options=options) as connection:
            channel: Any = connection.default_channel
            client, unacked = channel.client, channel.unacked_key
            client.delete(channel.unacked_mutex_key)  # who was killed while it looked keeps it for five minutes
            held = set(client.hkeys(unacked))

            def given_back() -> bool:
                channel.qos.restore_visible(interval=1)
                return held.isdisjoint(client.hkeys(unacked))

            wait_until(given_back, 20, "Redis gives the dead workers' messages back")


def clean_broker() -> None:
    """Delete the demo's queues, which a broker that was there before would keep."""
    with suppress(Exception), app.connection_for_write() as connection:
        channel: Any = connection.default_channel
        for name in queue_names().values():
            queue = app.amqp.queues[name](channel)
            queue.declare()  # on Redis only what this process has declared is deleted completely
            queue.delete()
            queue.exchange.delete()


def queue_names() -> dict[str, str]:
    """Each worker's queue, by the worker's name."""
    return {"bare": app.conf.task_routes[charge_plain.name]["queue"], "celery_idem": app.conf.task_default_queue}


if __name__ == "__main__":
    sys.exit(main())
