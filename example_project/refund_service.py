"""A payment provider's refunds, as a process of its own: ``python -m example_project.refund_service --ledger FILE``.

``PUT /refunds/<action id>`` makes one refund per ``Idempotency-Key``, and ``GET`` on the same path looks for it. Every
answer repeats the key it was asked under. Knows nothing of Celery or of celery_idem: only HTTP and JSON.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from example_project.refund_ledger import Fault, Refund, RefundLedger

MAX_BODY = 65_536
PATIENCE = 60.0
"""Seconds a held answer is held at most."""


class Service(ThreadingHTTPServer):
    """The server with its ledger."""

    daemon_threads = True

    def __init__(self, port: int, ledger: RefundLedger) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.ledger = ledger


class Handler(BaseHTTPRequestHandler):
    """One request. It is written down before anything else happens."""

    server: Service
    timeout = PATIENCE

    def do_PUT(self) -> None:
        """Make the refund, or say that it was made under this key before."""
        asked, fault = self._received()
        if asked is None or not self._key:
            self._answer(
                400, {"error": "a PUT needs an Idempotency-Key, and JSON with a payload of order_id and amount"}
            )
        elif fault == "refuse":
            self._refuse("the order was never paid")
        else:
            refund, new = self.server.ledger.refund(self._action_id, self._key, *asked)
            if (refund.order_id, refund.amount) != asked:
                self._refuse("this key was used for another refund")
            else:
                self._answer_or_not(201 if new else 200, refund, fault, hold=new)

    def do_GET(self) -> None:
        """Say whether the refund is there; look, and change nothing."""
        _, fault = self._received()
        refund = self.server.ledger.find(self._action_id, self._key)
        if refund is None:
            self._answer(404, {"error": "no such refund"})
        else:
            self._answer_or_not(200, refund, fault, hold=False)

    @property
    def _action_id(self) -> str:
        return self.path.removeprefix("/refunds/")

    @property
    def _key(self) -> str:
        return str(self.headers.get("Idempotency-Key", ""))

    def _received(self) -> tuple[tuple[str, int] | None, Fault | None]:
        """Write the request down; order and amount where it names them, and what is to go wrong with it."""
        ledger = self.server.ledger
        ledger.note(self.command, self._action_id, self._key, self.headers.get("Worker", ""))
        asked = None
        with suppress(ValueError, TypeError, KeyError):
            size = min(int(self.headers.get("Content-Length", 0)), MAX_BODY)
            payload = json.loads(self.rfile.read(size))["payload"]
            asked = str(payload["order_id"]), int(payload["amount"])
        return asked, ledger.fault(self._action_id)

    def _refuse(self, reason: str) -> None:
        self._answer(422, {"execution_digest": self._key, "status": "rejected", "reason": reason})

    def _answer_or_not(self, status: int, refund: Refund, fault: Fault | None, *, hold: bool) -> None:
        answer = {"execution_digest": refund.key, "status": "completed", "result": {"refund": refund.number}}
        if fault == "silent" or (fault == "hold" and hold):
            self._wait_until_the_caller_has_gone()
        elif fault == "garbage" and hold:
            self._answer(status, {**answer, "execution_digest": "0" * 64})
        else:
            self._answer(status, answer)

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _wait_until_the_caller_has_gone(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.recv(1)  # nothing more is sent on it, so this is the end of the connection


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(prog="python -m example_project.refund_service", description=__doc__)
    parser.add_argument("--port", type=int, default=8099, help="on 127.0.0.1; 0 takes a free one (default 8099)")
    parser.add_argument("--ledger", type=Path, required=True, help="the SQLite file")
    options = parser.parse_args()
    with Service(options.port, RefundLedger(options.ledger)) as service:
        print(f"refunds at http://127.0.0.1:{service.server_port}/refunds are ready", flush=True)
        with suppress(KeyboardInterrupt):
            service.serve_forever()


if __name__ == "__main__":
    main()
