"""The other side of the campaign's refunds: a real HTTP server whose ledger counts every request it ever got.

``PUT /refunds/<action id>`` pays each time it is asked, whatever the key: paying once is the caller's business here.
``GET`` of the same address looks, and ``GET /ledger`` tells what came. It survives every worker that asks it.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.processes import LOOPBACK, Process, remove_dir, scratch_dir
from tests.support.workers import ROOT

LATE = 2
"""How many looks find nothing of a refund that was asked for in the ``late`` way."""


@dataclass
class Account:
    """What came for one action. A PUT that broke off in its body was received, and nothing was paid."""

    puts: int = 0
    refunds: int = 0
    looks: int = 0
    waiting: int = 0
    """Refunds that were asked for, and that the house has not made yet."""


class House(ThreadingHTTPServer):
    """The server with its accounts."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), Handler)
        self.lock = threading.Lock()
        self.accounts: dict[str, Account] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that was killed is nothing to speak of."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: House
    timeout = 30

    def do_PUT(self) -> None:
        """Count it, read it, pay, and say so; or be ``late``: pay when it was looked for, and say nothing."""
        with self.server.lock:
            account = self.server.accounts.setdefault(self._name, Account())
            account.puts += 1
        size = int(self.headers["Content-Length"])
        body = self.rfile.read(size)
        if len(body) < size:
            return
        if json.loads(body)["payload"]["way"] == "late":
            with self.server.lock:
                account.waiting += 1
            return
        with self.server.lock:
            account.refunds += 1
        self._completed(account)

    def do_GET(self) -> None:
        """Say whether it was paid, or tell everything."""
        if self.path == "/ledger":
            with self.server.lock:
                told = {name: asdict(account) for name, account in self.server.accounts.items()}
            self._answer(200, told)
            return
        with self.server.lock:
            account = self.server.accounts.setdefault(self._name, Account())
            account.looks += 1
            paid = account.refunds > 0
            if account.waiting and account.looks >= LATE:
                account.refunds, account.waiting = account.refunds + account.waiting, 0
        if paid:
            self._completed(account)
        else:
            self._answer(404, {"error": "no such refund"})

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    @property
    def _name(self) -> str:
        return self.path.removeprefix("/refunds/")

    def _completed(self, account: Account) -> None:
        key = self.headers["Idempotency-Key"]
        self._answer(200, {"execution_digest": key, "status": "completed", "result": {"refunds": account.refunds}})

    def _answer(self, status: int, answer: Any) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def house() -> Iterator[str]:
    """The URL of a house in a process of its own, as long as the ``with`` block lasts."""
    place = scratch_dir("house")
    argv = [sys.executable, "-m", "tests.campaigns.governed_house"]
    process = Process(argv, name="refund house", log_path=place / "log", cwd=ROOT)
    try:
        process.wait_log(" ready\n", 60)
        yield process.log.split()[0]
    finally:
        process.close()
        remove_dir(place)


def ledger(url: str) -> dict[str, Account]:
    """What the house at this URL was asked, by action."""
    with urllib.request.urlopen(f"{url}/ledger", timeout=20) as answer:
        return {name: Account(**account) for name, account in json.load(answer).items()}


if __name__ == "__main__":
    with House() as server:
        print(f"http://{LOOPBACK}:{server.server_port} is ready", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
