"""The shop with and without celery_idem, side by side, while things go wrong: ``python -m example_project.demo``.

Needs no server: messages, results, claims and the ledger are files in a temporary directory. The workers are real.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from uuid import uuid4

from celery_idem import ConfigurationError, StoreError, open_store
from example_project import ledger, servers
from example_project.app import app
from example_project.scenarios import SCENARIOS, WHOLE_WORKER, Scenario, Side
from example_project.servers import DemoError, Process, wait_until
from example_project.table import Cell, draw, painted, says

ROOT = Path(__file__).resolve().parents[1]
REDELIVERING = ("redis:", "rediss:", "amqp:", "amqps:", "pyamqp:")
"""Brokers that give the messages of a dead worker to another one."""
PRIVATE = {"redis": servers.redis, "rabbitmq": servers.rabbitmq, "postgresql": servers.postgresql}
EMBEDDED_LIMIT = """\
Not shown: the whole worker killed, as by a power cut. The filesystem and SQLite brokers forget a message once a worker
has taken it, so it is lost, whatever celery_idem does. `--broker redis` and `--broker rabbitmq` show that case."""
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
        self._started = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="celery-idem-demo-"))
        self._keep = keep
        self._workers: list[Process] = []
        stack.callback(self._leave)

    def run(self, broker: str, store: str) -> int:
        """Show everything; the exit code."""
        self._open_shop(broker, store)
        self._start_workers()
        redelivers = app.conf.broker_url.startswith(REDELIVERING)
        shown = [*SCENARIOS, *(WHOLE_WORKER if redelivers else ())]
        played = [(scenario, *self._play(number, scenario)) for number, scenario in enumerate(shown, start=1)]
        return self._tell(played, redelivers=redelivers)

    # --- setting up ------------------------------------------------------------------------------------------------

    def _open_shop(self, broker: str, store: str) -> None:
        name = f"shop-{uuid4().hex[:8]}"
        os.environ.update(SHOP_DIR=str(self._folder), SHOP_NAME=name)
        for word, variable in ((broker, "SHOP_BROKER"), (store, "SHOP_STORE")):
            if word in PRIVATE:
                self._say(f"starting a private {word} ...")
                os.environ[variable] = self._private(word)
            elif ":" in word:
                os.environ[variable] = word
        # From here on the settings may be read.
        claims = open_store(app.conf.idempotency_store)
        claims.create_schema()
        claims.close()
        with ledger.opened():
            pass  # makes the tables
        app.backend.get_state("none")  # and those of the result backend, before two workers do it at once
        self._stack.callback(_clean_broker)
        self._say(f"the shop is open: broker {broker}, claim store {store}, files in {self._folder}")

    def _private(self, word: str) -> str:
        if word not in self._servers:
            self._servers[word] = self._stack.enter_context(PRIVATE[word]())
        return self._servers[word]

    def _start_workers(self) -> None:
        names = {"bare": app.conf.task_routes["example_project.tasks.charge_plain"]["queue"]}
        names["celery_idem"] = app.conf.task_default_queue
        self._workers = [self._worker(name, queue) for name, queue in names.items()]
        for worker in self._workers:
            wait_until(lambda w=worker: w.logged(" ready."), 30, f"worker {worker.name} is ready", self._workers)
        self._say("two workers are ready, each with two processes: one runs bare Celery, the other celery_idem")
