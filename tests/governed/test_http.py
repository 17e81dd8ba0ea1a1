"""HTTPEndpoint against real servers on real sockets: what it sends, what counts, and what it must not do."""

from __future__ import annotations

import dataclasses
import gzip
import ipaddress
import json
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from celery_idem.errors import ConfigurationError
from celery_idem.governed.canonical import MAX_BYTES, canonical_json, digest_of
from celery_idem.governed.endpoint import EndpointDoubt, ExecutionRequest
from celery_idem.governed.http import HTTPEndpoint
from tests.support.processes import LOOPBACK, free_port, wait_until

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-very-secret"
PAYLOAD = {"order_id": 7, "note": "für Sie"}
REQUEST = ExecutionRequest(
    action_id="a-1",
    action_type="payments.refund",
    source="shop",
    payload=PAYLOAD,
    payload_sha256=digest_of(canonical_json(PAYLOAD)),
    approval_id="APR-1",
    decision_id="DEC-1",
    expires_at=2_000_003_600.0,
    execution_digest="ab" * 32,
)
DONE = {"execution_digest": REQUEST.execution_digest, "status": "completed", "result": {"refund": 1}}
REFUSED = {"execution_digest": REQUEST.execution_digest, "status": "rejected", "reason": "no such order"}


@dataclasses.dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    peer: tuple[str, int]


Answering = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Keeps what it was asked, and answers with ``answering``."""

    daemon_threads = False

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.seen: list[Seen] = []
        self.answering: Answering = said(200, DONE)
        self.ended = threading.Event()
        super().__init__((LOOPBACK, 0), Handler)
        self.port = self.server_address[1]
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is what some of these tests are about."""

    def methods(self) -> list[str]:
        return [seen.method for seen in self.seen]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def handle_method(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append(Seen(self.command, self.path, headers, body, self.client_address))
        self.server.answering(self)

    do_PUT = do_GET = handle_method

    def log_request(self, *args: Any) -> None:
        pass


def raw(status: int, body: bytes, **headers: str) -> Answering:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def said(status: int, body: Any, **headers: str) -> Answering:
    return raw(status, json.dumps(body).encode(), **headers)


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[Server]:
    with Server(context) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


def endpoint(server: Server | None = None, **given: Any) -> HTTPEndpoint:
    given = {"url": f"http://{LOOPBACK}:{server.port}/actions" if server else "", "allow_http": True} | given
    return type("RefundEndpoint", (HTTPEndpoint,), given)()


def doubt(asked: Callable[[ExecutionRequest], Any], request: ExecutionRequest = REQUEST) -> str:
    with pytest.raises(EndpointDoubt) as caught:
        asked(request)
    assert caught.value.__context__ is None
    return str(caught.value)


class TestWhatIsSent:
    def test_execute_puts_the_request_under_its_digest(self, server: Server) -> None:
        answer = endpoint(server).execute(REQUEST)
        assert answer == REQUEST.completed({"refund": 1})
        (put,) = server.seen
        assert (put.method, put.path) == ("PUT", "/actions/a-1")
        assert put.headers["idempotency-key"] == REQUEST.execution_digest
        assert put.headers["content-type"] == "application/json"
        body = json.loads(put.body)
        assert body == {
            "schema": "celery_idem.execution.v1",
            "action_id": "a-1",
            "action_type": "payments.refund",
            "payload": PAYLOAD,
            "payload_sha256": REQUEST.payload_sha256,
            "approval_id": "APR-1",
            "decision_id": "DEC-1",
            "expires_at": 2_000_003_600.0,
            "execution_digest": REQUEST.execution_digest,
        }
        assert digest_of(canonical_json(body["payload"])) == body["payload_sha256"]

    def test_observe_gets_the_same_place_without_a_body(self, server: Server) -> None:
        assert endpoint(server, url=f"http://{LOOPBACK}:{server.port}/actions/").observe(REQUEST).status == "completed"
        (get,) = server.seen
        assert (get.method, get.path, get.body) == ("GET", "/actions/a-1", b"")
        assert get.headers["idempotency-key"] == REQUEST.execution_digest
        assert "content-length" not in get.headers

    def test_an_id_cannot_leave_its_place_in_the_path(self, server: Server) -> None:
        endpoint(server).observe(dataclasses.replace(REQUEST, action_id="../x/y?z#ü%2F.."))
        assert server.seen[0].path == "/actions/..%2Fx%2Fy%3Fz%23%C3%BC%252F.."

    @pytest.mark.parametrize("action_id", ["", ".", ".."])
    def test_an_id_that_is_no_place_is_not_sent(self, server: Server, action_id: str) -> None:
        assert "nothing was sent" in doubt(endpoint(server).execute, dataclasses.replace(REQUEST, action_id=action_id))
        assert server.seen == []

    def test_headers_go_along_and_cannot_replace_the_key(self, server: Server) -> None:
        def headers(self: HTTPEndpoint, request: ExecutionRequest) -> dict[str, str]:
            return {"Authorization": f"Bearer {SECRET}", "idempotency-key": "mine", "X-Type": request.action_type}

        endpoint(server, headers=headers).execute(REQUEST)
        sent = server.seen[0].headers
        assert (sent["authorization"], sent["x-type"]) == (f"Bearer {SECRET}", "payments.refund")
        assert sent["idempotency-key"] == REQUEST.execution_digest

    def test_the_largest_payload_fits(self, server: Server) -> None:
        text = "x" * (MAX_BYTES - len(canonical_json({"text": ""})))
        request = dataclasses.replace(REQUEST, payload={"text": text})
        assert endpoint(server).execute(request).status == "completed"
        assert json.loads(server.seen[0].body)["payload"]["text"] == text

    def test_nothing_of_the_environment_has_a_say(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        netrc = tmp_path / "netrc"
        netrc.write_text(f"machine {LOOPBACK} login me password {SECRET}\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{LOOPBACK}:{free_port()}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        endpoint(server).execute(REQUEST)
        assert "authorization" not in server.seen[0].headers

    def test_a_proxy_that_the_class_names_is_used(self, server: Server) -> None:
        found = endpoint(url="http://refunds.invalid/actions", proxy=f"http://{LOOPBACK}:{server.port}")
        assert found.execute(REQUEST).status == "completed"
        assert [seen.path for seen in server.seen] == ["http://refunds.invalid/actions/a-1"]

    def test_no_cookie_comes_back(self, server: Server) -> None:
        server.answering = said(200, DONE, Set_Cookie="session=1; Path=/")
        found = endpoint(server)
        found.execute(REQUEST)
        found.observe(REQUEST)
        assert ["cookie" in seen.headers for seen in server.seen] == [False, False]


class TestWhatCounts:
    @pytest.mark.parametrize("status", [200, 201])
    def test_a_bound_answer_to_a_put_counts(self, server: Server, status: int) -> None:
        server.answering = said(status, DONE)
        assert endpoint(server).execute(REQUEST) == REQUEST.completed({"refund": 1})

    @pytest.mark.parametrize("status", [200, 400, 403, 404, 409, 410, 422])
    def test_a_bound_refusal_of_a_put_counts(self, server: Server, status: int) -> None:
        server.answering = said(status, REFUSED)
        assert endpoint(server).execute(REQUEST) == REQUEST.rejected("no such order")

    @pytest.mark.parametrize("status", ["completed", "rejected", "pending", "absent"])
    def test_a_bound_answer_to_a_get_counts(self, server: Server, status: str) -> None:
        server.answering = said(200, DONE | {"status": status})
        assert endpoint(server).observe(REQUEST).status == status

    def test_a_get_that_finds_nothing_says_absent(self, server: Server) -> None:
        server.answering = raw(404, b"<h1>Not Found</h1>")
        assert endpoint(server).observe(REQUEST) == REQUEST.absent()

    @pytest.mark.parametrize("status", [202, 204, 300, 400, 401, 409, 429, 500, 503])
    def test_any_other_status_of_a_get_is_doubt(self, server: Server, status: int) -> None:
        server.answering = raw(status, b"") if status == 204 else said(status, REFUSED)
        assert doubt(endpoint(server).observe) == f"GET of action a-1: status {status}: look again"

    @pytest.mark.parametrize("status", [202, 203, 300, 500, 502, 503])
    def test_any_other_status_of_a_put_is_doubt_whatever_it_says(self, server: Server, status: int) -> None:
        for body in (DONE, REFUSED):
            server.answering = said(status, body)
            text = doubt(endpoint(server).execute)
            assert text == f"PUT of action a-1: status {status}: look for it, and do not send it again"

    @pytest.mark.parametrize("status", [400, 401, 404, 409, 422, 429])
    def test_a_refusal_that_is_not_bound_is_doubt(self, server: Server, status: int) -> None:
        found = endpoint(server)
        for body, problem in [
            (REFUSED | {"execution_digest": "cd" * 32}, "the answer is not bound to its execution_digest"),
            ({"error": "no"}, "the answer is not bound to its execution_digest"),
            ([REFUSED], "the answer is no JSON object"),
            (DONE, "and yet 'completed'"),
            (REFUSED | {"status": "absent"}, "and yet 'absent'"),
        ]:
            server.answering = said(status, body)
            text = doubt(found.execute)
            assert f"status {status}, and" in text
            assert problem in text

    @pytest.mark.parametrize("asked", ["execute", "observe"])
    def test_an_answer_to_another_execution_is_doubt(self, server: Server, asked: str) -> None:
        server.answering = said(200, DONE | {"execution_digest": "cd" * 32})
        assert "status 200, and the answer is not bound to its execution_digest" in doubt(
            getattr(endpoint(server), asked)
        )

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"OK",
            b"null",
            b'"completed"',
            b"[" * 100_000,
            b'{"status": "completed"',
            json.dumps(DONE).encode("utf-16"),
            b'\xff{"status": "completed"}',
            json.dumps(DONE).replace("{", '{"status": "rejected", ', 1).encode(),
            b"9" * 10_000,
        ],
        ids=lambda body: repr(body[:24]),
    )
    @pytest.mark.parametrize("asked", ["execute", "observe"])
    def test_garbage_is_doubt(self, server: Server, asked: str, body: bytes) -> None:
        server.answering = raw(200, body)
        text = doubt(getattr(endpoint(server, max_bytes=200_000), asked))
        assert "status 200, and the answer is no JSON object" in text

    def test_a_result_that_is_too_large_to_keep_is_doubt(self, server: Server) -> None:
        server.answering = said(200, DONE | {"result": "x" * 17_000})
        assert "cannot be kept: result has 17002 bytes" in doubt(endpoint(server, max_bytes=20_000).execute)


class TestOnce:
    @pytest.mark.parametrize("asked", ["execute", "observe"])
    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_no_redirect_is_followed(self, server: Server, status: int, asked: str) -> None:
        server.answering = said(status, DONE, Location="/elsewhere")
        assert f"status {status}" in doubt(getattr(endpoint(server), asked))
        assert [seen.path for seen in server.seen] == ["/actions/a-1"]

    def test_a_connection_closed_without_an_answer_is_doubt_and_not_tried_again(self, server: Server) -> None:
        def hang_up(handler: BaseHTTPRequestHandler) -> None:
            handler.close_connection = True

        server.answering = hang_up
        text = doubt(endpoint(server).execute)
        assert "the exchange ended in RemoteProtocolError" in text
        assert server.methods() == ["PUT"]

    def test_a_connection_closed_within_the_answer_is_doubt_and_not_tried_again(self, server: Server) -> None:
        server.answering = said(200, DONE, Content_Length="5000", Connection="close")
        assert "the exchange ended in" in doubt(endpoint(server).execute)
        assert server.methods() == ["PUT"]

    def test_a_connection_reset_after_the_request_is_doubt_and_not_tried_again(self, server: Server) -> None:
        def reset(handler: BaseHTTPRequestHandler) -> None:
            linger = b"\x01\0\0\0" + b"\0" * 4  # on, for no time: close() sends RST
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.connection.close()
            handler.close_connection = True

        server.answering = reset
        assert "the exchange ended in" in doubt(endpoint(server).execute)
        assert server.methods() == ["PUT"]

    def test_every_request_has_a_connection_of_its_own(self, server: Server) -> None:
        server.answering = said(200, DONE, Connection="keep-alive")
        found = endpoint(server)
        for _ in range(3):
            found.execute(REQUEST)
        assert len({seen.peer for seen in server.seen}) == 3
        assert {seen.headers["connection"] for seen in server.seen} == {"close"}

    def test_a_server_that_is_not_there_was_sent_nothing(self) -> None:
        text = doubt(endpoint(url=f"http://{LOOPBACK}:{free_port()}/").execute)
        assert "there is no connection, and nothing was sent: " in text
        assert "refused" in text

    def test_a_name_that_does_not_resolve_was_sent_nothing(self) -> None:
        text = doubt(endpoint(url="http://no-such-host.invalid/").execute)
        assert "there is no connection, and nothing was sent: " in text

    def test_many_threads_share_one_endpoint(self, server: Server) -> None:
        found = endpoint(server)
        answers: list[str] = []
        threads = [threading.Thread(target=lambda: answers.append(found.execute(REQUEST).status)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == ["completed"] * 8
        assert server.methods() == ["PUT"] * 8


def trickling(head: bytes, piece: bytes) -> Answering:
    """The head at once, then a piece every 20 ms, until the client hangs up: each of them in time by itself."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(head)
        while not handler.server.ended.wait(0.02):  # type: ignore[attr-defined]
            handler.wfile.write(piece)

    return answer


class TestBounds:
    @pytest.mark.parametrize(
        "answering",
        [
            trickling(b"", b"H"),
            trickling(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
            trickling(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
            trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n", b" "),
            trickling(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
            trickling(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
            trickling(b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        ],
        ids=["status", "headers", "informational", "body", "chunk head", "chunks", "until closed"],
    )
    @pytest.mark.parametrize("asked", ["execute", "observe"])
    def test_a_server_that_trickles_ends_with_the_timeout(
        self, server: Server, answering: Answering, asked: str
    ) -> None:
        server.answering = answering
        started = time.monotonic()
        text = doubt(getattr(endpoint(server, timeout=0.3), asked))
        assert 0.3 <= time.monotonic() - started < 5
        assert "no complete answer within timeout=0.3 s" in text
        assert len(server.seen) == 1

    def test_a_server_that_does_not_read_ends_with_the_timeout(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            found = endpoint(url=f"http://{LOOPBACK}:{listener.getsockname()[1]}/", timeout=0.3)
            started = time.monotonic()
            text = doubt(found.execute, dataclasses.replace(REQUEST, payload={"text": "x" * 60_000}))
            assert time.monotonic() - started < 5
            assert "no complete answer within timeout=0.3 s" in text

    def test_all_addresses_of_a_name_share_the_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A listener with a full queue lets nobody in, and refuses nobody either."""
        with (
            socket.create_server(("0.0.0.0", 0), backlog=0) as listener,
            socket.socket() as first,
            socket.socket() as second,
        ):
            place = (LOOPBACK, listener.getsockname()[1])
            for filling in (first, second):
                filling.setblocking(False)
                filling.connect_ex(place)
            resolve = socket.getaddrinfo

            def many(host: str, *args: Any, **kwargs: Any) -> Any:
                if host != "refunds.invalid":
                    return resolve(host, *args, **kwargs)
                return [entry for n in range(1, 5) for entry in resolve(f"127.0.0.{n}", *args, **kwargs)] * 6

            monkeypatch.setattr(socket, "getaddrinfo", many)
            found = endpoint(url=f"http://refunds.invalid:{place[1]}/", timeout=0.5)
            started = time.monotonic()
            doubt(found.execute)
            assert time.monotonic() - started < 6, "each for itself would have taken 12 s"

    def test_headers_that_take_all_the_time_leave_none_to_send(self, server: Server) -> None:
        def slow(self: HTTPEndpoint, request: ExecutionRequest) -> dict[str, str]:
            until = time.monotonic() + 0.06
            wait_until(lambda: time.monotonic() > until, 5, "the time is over")
            return {}

        text = doubt(endpoint(server, timeout=0.05, headers=slow).execute)
        assert "headers() took all of timeout=0.05 s, and nothing was sent" in text
        assert server.seen == []

    def test_what_a_process_does_once_takes_nothing_from_the_timeout(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reading the certificate authorities takes a busy machine longer than a short timeout."""
        found, transport = endpoint(server, timeout=3), HTTPEndpoint._transport

        def slow(self: HTTPEndpoint) -> Any:
            until = time.monotonic() + 3.1
            wait_until(lambda: time.monotonic() > until, 20, "the authorities are read")
            return transport(self)

        monkeypatch.setattr(HTTPEndpoint, "_transport", slow)
        assert found.execute(REQUEST).status == "completed"

    def test_a_huge_answer_is_not_read_to_its_end(self, server: Server) -> None:
        written = []

        def endless(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not handler.server.ended.is_set():  # type: ignore[attr-defined]
                handler.wfile.write(b" " * 65_536)
                written.append(65_536)

        server.answering = endless
        text = doubt(endpoint(server).execute)
        assert "status 200, and an answer of more than max_bytes=16384" in text
        assert sum(written) < 100_000_000

    def test_the_largest_answer_is_read(self, server: Server) -> None:
        room = 16_384 - len(json.dumps(DONE | {"result": ""}))
        server.answering = said(200, DONE | {"result": "x" * room})
        assert endpoint(server).execute(REQUEST).result == "x" * room
        server.answering = said(200, DONE | {"result": "x" * (room + 1)})
        assert "more than max_bytes=16384" in doubt(endpoint(server).execute)

    def test_a_compressed_answer_is_not_unpacked(self, server: Server) -> None:
        bomb = gzip.compress(json.dumps(DONE).encode() + b" " * 10_000_000)
        server.answering = raw(200, bomb, Content_Encoding="gzip")
        assert "compressed, and identity was asked for" in doubt(endpoint(server).execute)
        assert server.seen[0].headers["accept-encoding"] == "identity"


class TestTLS:
    @pytest.fixture
    def certificate(self, tmp_path: Path) -> Path:
        return self_signed(tmp_path / "server.pem", LOOPBACK)

    @pytest.fixture
    def secure(self, certificate: Path) -> Iterator[Server]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        with serving(context) as found:
            yield found

    def place(self, server: Server, host: str = LOOPBACK) -> str:
        return f"https://{host}:{server.port}/actions"

    def test_an_unknown_authority_is_sent_nothing(self, secure: Server) -> None:
        text = doubt(endpoint(url=self.place(secure)).execute)
        assert "nothing was sent: [SSL: CERTIFICATE_VERIFY_FAILED]" in text
        assert secure.seen == []

    def test_the_path_of_its_certificate_makes_it_known(self, secure: Server, certificate: Path) -> None:
        found = endpoint(url=self.place(secure), verify=str(certificate), allow_http=False)
        assert found.execute(REQUEST).status == "completed"

    def test_a_context_makes_it_known(self, secure: Server, certificate: Path) -> None:
        found = endpoint(url=self.place(secure), verify=ssl.create_default_context(cafile=certificate))
        assert found.observe(REQUEST).status == "completed"

    def test_a_certificate_for_another_name_is_sent_nothing(self, secure: Server, certificate: Path) -> None:
        text = doubt(endpoint(url=self.place(secure, "localhost"), verify=str(certificate)).execute)
        assert "nothing was sent" in text
        assert "Hostname mismatch" in text
        assert secure.seen == []

    def test_the_environment_cannot_add_an_authority(
        self, secure: Server, certificate: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "CERTIFICATE_VERIFY_FAILED" in doubt(endpoint(url=self.place(secure)).execute)

    def test_a_handshake_that_never_ends_ends_with_the_timeout(self, server: Server) -> None:
        with socket.create_server((LOOPBACK, 0)) as silent:
            started = time.monotonic()
            text = doubt(endpoint(url=f"https://{LOOPBACK}:{silent.getsockname()[1]}/", timeout=0.3).execute)
            assert time.monotonic() - started < 5
            assert "no complete answer within timeout=0.3 s" in text

    def test_a_trickling_answer_over_tls_ends_with_the_timeout(self, secure: Server, certificate: Path) -> None:
        secure.answering = trickling(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n")
        started = time.monotonic()
        text = doubt(endpoint(url=self.place(secure), verify=str(certificate), timeout=0.5).execute)
        assert time.monotonic() - started < 5
        assert "no complete answer within timeout=0.5 s" in text

    @pytest.mark.parametrize("verify", [False, None, 0, 1, b"ca.pem"])
    def test_verification_cannot_be_switched_off(self, verify: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"RefundEndpoint.verify is .*always verified: give the path"):
            endpoint(url="https://refunds.invalid/", verify=verify)

    @pytest.mark.parametrize("mode", [ssl.CERT_NONE, ssl.CERT_REQUIRED])
    def test_a_context_that_does_not_verify_is_refused(self, mode: ssl.VerifyMode) -> None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = mode
        with pytest.raises(ConfigurationError, match="SSLContext that does not verify: require certificate and name"):
            endpoint(url="https://refunds.invalid/", verify=context)

    def test_a_file_that_holds_no_certificate_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "empty.pem").write_text("")
        for name in ("empty.pem", "missing.pem"):
            with pytest.raises(ConfigurationError, match=rf"{name}' cannot be read .*: give the path of a PEM file"):
                endpoint(url="https://refunds.invalid/", verify=str(tmp_path / name))


class TestSecrets:
    def test_headers_are_in_no_log_message_repr_or_traceback(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        found = endpoint(server, headers=lambda self, request: {"Authorization": SECRET})
        assert found.execute(REQUEST).status == "completed"
        for answering in (raw(500, b""), said(200, []), raw(200, b"x", Content_Length="9", Connection="close")):
            server.answering = answering
            with pytest.raises(EndpointDoubt) as caught:
                found.execute(REQUEST)
            told = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            assert SECRET not in "".join(told.format())
            assert SECRET not in repr(caught.value.facts)
        assert server.methods() == ["PUT"] * 4
        assert {seen.headers["authorization"] for seen in server.seen} == {SECRET}
        assert SECRET not in caplog.text
        assert SECRET not in repr(found)

    @pytest.mark.parametrize(
        "value", [f"{SECRET}\r\nX-Other: 1", f"{SECRET}\n", f"ü{SECRET}", f"{SECRET}\ud800", SECRET.encode(), 7, None]
    )
    def test_a_header_that_cannot_be_sent_is_not_quoted(
        self, server: Server, caplog: pytest.LogCaptureFixture, value: Any
    ) -> None:
        caplog.set_level(logging.DEBUG)
        text = doubt(endpoint(server, headers=lambda self, request: {"Authorization": value}).execute)
        assert "the header 'Authorization' is no plain printable text, and nothing was sent" in text
        assert SECRET not in text + caplog.text
        assert server.seen == []

    @pytest.mark.parametrize("name", ["", "X Y", "X:", "X\n", "Ü", b"X", 7])
    def test_a_header_name_that_cannot_be_sent_is_refused(self, server: Server, name: Any) -> None:
        text = doubt(endpoint(server, headers=lambda self, request: {name: "a"}).execute)
        assert "is no plain printable text, and nothing was sent" in text
        assert server.seen == []

    @pytest.mark.parametrize("given", [None, 7, [("a",)]])
    def test_headers_that_are_no_mapping_are_sent_nowhere(self, server: Server, given: Any) -> None:
        text = doubt(endpoint(server, headers=lambda self, request: given).execute)
        assert "headers() raised" in text
        assert server.seen == []

    def test_what_headers_raises_is_not_quoted(self, server: Server) -> None:
        def failing(self: HTTPEndpoint, request: ExecutionRequest) -> dict[str, str]:
            raise LookupError(SECRET)

        text = doubt(endpoint(server, headers=failing).execute)
        assert text.startswith("PUT of action a-1: headers() raised LookupError, and nothing was sent: look")
        assert server.seen == []


class TestDeclaring:
    @pytest.mark.parametrize("url", ["", "refunds.example", "/actions", "ftp://refunds.example/", "https://", None, 7])
    def test_what_is_no_url_is_refused(self, url: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"RefundEndpoint.url is no URL: give one like 'https://"):
            endpoint(url=url)

    @pytest.mark.parametrize("more", ["me:{}@{}/", "{1}/?key={0}", "{1}/#{0}"])
    def test_a_url_with_a_secret_in_it_is_refused_and_not_shown(self, more: str) -> None:
        with pytest.raises(
            ConfigurationError, match=r"more than host and path: return credentials from headers"
        ) as caught:
            endpoint(url="https://" + more.format(SECRET, "refunds.example"))
        assert SECRET not in str(caught.value)

    def test_without_tls_it_has_to_say_so(self) -> None:
        with pytest.raises(ConfigurationError, match="is not https: use TLS, or set allow_http = True"):
            endpoint(url="http://refunds.example/", allow_http=False)

    def test_a_url_that_changes_is_checked_where_it_is_used(self, server: Server) -> None:
        found = endpoint(url="https://refunds.example/", allow_http=False)
        found.url = f"http://{LOOPBACK}:{server.port}/"
        with pytest.raises(ConfigurationError, match="is not https"):
            found.execute(REQUEST)
        assert server.seen == []

    @pytest.mark.parametrize(
        ("argument", "wrong"),
        [
            *(("timeout", wrong) for wrong in (0, -1, 3601, float("nan"), float("inf"), None, "20", True)),
            *(("max_bytes", wrong) for wrong in (0, 1_048_577, 1.5, None)),
        ],
    )
    def test_a_bound_that_bounds_nothing_is_refused(self, argument: str, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match=rf"RefundEndpoint.{argument} is .*: give a number above 0"):
            endpoint(url="https://refunds.example/", **{argument: wrong})

    @pytest.mark.parametrize("proxy", ["proxy.example", "socks5://proxy.example:1", 7])
    def test_a_proxy_that_is_no_http_url_is_refused(self, proxy: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"RefundEndpoint.proxy is no URL"):
            endpoint(url="https://refunds.example/", proxy=proxy)

    def test_a_url_known_at_run_time_is_set_before_the_rest(self, server: Server) -> None:
        class Configured(HTTPEndpoint):
            allow_http = True

            def __init__(self) -> None:
                self.url = f"http://{LOOPBACK}:{server.port}/actions"
                super().__init__()

        assert Configured().execute(REQUEST).status == "completed"

    def test_importing_it_imports_no_client(self) -> None:
        script = "import sys, celery_idem.governed.http, celery_idem.governed.catalog; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        assert not {"httpx", "httpcore", "pydantic", "celery", "sqlalchemy"} & set(done.stdout.split())

    def test_where_httpx_is_missing_it_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "httpx", None)
        with pytest.raises(ConfigurationError, match=r'RefundEndpoint needs httpx: pip install "celery-idem\[http\]"'):
            endpoint(url="https://refunds.example/")


def self_signed(path: Path, address: str) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "refunds")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path
