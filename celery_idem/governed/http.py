"""An endpoint behind HTTP: PUT makes the mutation, once; GET of the same address looks.

Each request has a connection of its own, one deadline from resolving the name to the last byte, and is sent at most
once: no redirect is followed, nothing is tried again, no connection is reused that the other side may just be closing.
Nothing is taken from the environment (proxies, ``.netrc``, certificates), no cookie is kept, TLS is verified. What
``headers()`` returns stays out of logs, messages, and the frames of a traceback.

Not here: whether an answer counts (``endpoint``), and what follows from it (``chain``).
"""

from __future__ import annotations

import json
import math
import re
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from celery_idem.errors import ConfigurationError
from celery_idem.governed.canonical import MAX_BYTES, MAX_DEPTH, canonical_json
from celery_idem.governed.endpoint import (
    EXECUTION_SCHEMA,
    REJECTED,
    Answer,
    EndpointDoubt,
    ExecutionRequest,
    PerProcess,
    judged,
)

if TYPE_CHECKING:
    import httpx

LONGEST_TIMEOUT = 3600.0
MOST_BYTES = 1_048_576
_WRAPPING = 16_384
"""Bytes of a request's body beside its payload."""
_PIECE = 8_192
"""Bytes written between two looks at the clock."""
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)
_SENT = (
    "action_id",
    "action_type",
    "payload",
    "payload_sha256",
    "approval_id",
    "decision_id",
    "expires_at",
    "execution_digest",
)


class HTTPEndpoint:
    """Subclass it, say where, and put ``@action(…)`` above. Set attributes in the class, or before ``__init__``.

    Args:
        url: of the collection of actions, ``https://refunds.example/actions``; the action's id is appended to its path.
        timeout: seconds (up to 3600) for one request as a whole; ``governed_lease`` is more than twice that. Only the
            resolver may take longer, and nothing is sent once they are over.
        max_bytes: of an answer's body, at most 1 MiB.
        verify: True for the certificate authorities that httpx ships, the path of a file of others, or an
            ``SSLContext`` that verifies, which may hold a client certificate.
        allow_http: without TLS, where the network itself is trusted.
        proxy: URL of an ``http://`` proxy.

    Raises:
        ConfigurationError: one of them is not that, or httpx is missing.
    """

    url: str = ""
    timeout: float = 20.0
    max_bytes: int = 16_384
    verify: bool | str | ssl.SSLContext = True
    allow_http: bool = False
    proxy: str | None = None

    def __init__(self) -> None:
        name = type(self).__name__
        try:
            import httpx  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(f'{name} needs httpx: pip install "celery-idem[http]"') from error
        _check_number(name, "timeout", self.timeout, (int, float), LONGEST_TIMEOUT)
        _check_number(name, "max_bytes", self.max_bytes, int, MOST_BYTES)
        if self.proxy is not None:
            _url(f"{name}.proxy", self.proxy)
        self._base()
        self._tls()

    def headers(self, request: ExecutionRequest) -> Mapping[str, str]:  # noqa: ARG002
        """What to send besides, such as ``Authorization``: printable ASCII, asked for anew with every request."""
        return {}

    def execute(self, request: ExecutionRequest) -> Answer:
        """PUT the action; completed or rejected where the answer says so and is bound to this execution.

        Raises:
            EndpointDoubt: anything else happened.
        """
        body = {"schema": EXECUTION_SCHEMA} | {name: getattr(request, name) for name in _SENT}
        text = canonical_json(body, where="request", max_bytes=MAX_BYTES + _WRAPPING, max_depth=MAX_DEPTH + 1)
        reply = self._reply("PUT", request, text.encode())
        if reply.status not in {200, 201} and not 400 <= reply.status < 500:
            raise _doubt("PUT", request, f"status {reply.status}")
        answer = _judged("PUT", request, reply)
        if reply.status >= 400 and answer.status != REJECTED:
            raise _doubt("PUT", request, f"status {reply.status}, and yet {answer.status!r}")
        return answer

    def observe(self, request: ExecutionRequest) -> Answer:
        """GET the action; absent where it is not found.

        Raises:
            EndpointDoubt: the answer is neither that nor bound to this execution.
        """
        reply = self._reply("GET", request, None)
        if reply.status == 404:
            return request.absent()
        if reply.status not in {200, 201}:
            raise _doubt("GET", request, f"status {reply.status}")
        return _judged("GET", request, reply)

    # --- one request -----------------------------------------------------------------------------------------------

    def _reply(self, method: str, request: ExecutionRequest, body: bytes | None) -> _Reply:
        reply = self._exchange(method, request, body)
        if isinstance(reply, str):
            # Here, where neither the headers nor an error that may quote them are within reach of a traceback.
            raise _doubt(method, request, reply)
        return reply

    def _exchange(self, method: str, request: ExecutionRequest, body: bytes | None) -> _Reply | str:
        """The reply, or in words why there is none."""
        import httpx

        place, transport = self._place(request), self._connections.get()
        deadline = time.monotonic() + self.timeout  # not before: a process's first transport reads the authorities
        try:
            given = dict(self.headers(request))
        except Exception as error:  # noqa: BLE001  the application's, and it may quote a secret
            return f"headers() raised {type(error).__qualname__}, and nothing was sent"
        # Not left to the client, which would write a value that it refuses into its log.
        wrong = next((name for name, value in given.items() if not _can_be_sent(name, value)), None)
        if wrong is not None:
            return f"the header {wrong!r:.60} is no plain printable text, and nothing was sent"
        headers = httpx.Headers(given)
        headers.update(
            {
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "Connection": "close",
                "Idempotency-Key": request.execution_digest,
            }
        )
        if body is not None:
            headers["Content-Type"] = "application/json"
        left = deadline - time.monotonic()
        if left <= 0:
            return f"headers() took all of timeout={self.timeout:g} s, and nothing was sent"
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), left)
        try:
            sent = httpx.Request(method, place, headers=headers, content=body)
            sent.extensions["timeout"] = timeouts
            with closing(transport.handle_request(sent)) as answer:
                return self._bounded(answer)
        except Exception as error:  # noqa: BLE001  whatever it is, whether the action happened is in doubt
            return self._told(error)

    def _bounded(self, answer: httpx.Response) -> _Reply | str:
        coding = answer.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            return "the answer is compressed, and identity was asked for"
        body = bytearray()
        for piece in answer.iter_raw():
            body += piece
            if len(body) > self.max_bytes:
                return f"status {answer.status_code}, and an answer of more than max_bytes={self.max_bytes}"
        return _Reply(answer.status_code, bytes(body))

    def _told(self, error: Exception) -> str:
        import httpx

        if isinstance(error, (httpx.TimeoutException, TimeoutError)):
            return f"no complete answer within timeout={self.timeout:g} s"
        if isinstance(error, (httpx.ConnectError, socket.gaierror)):
            # The system's own words, of addresses and certificates: the one error whose text holds nothing sent.
            return f"there is no connection, and nothing was sent: {str(error)[:300]}"
        return f"the exchange ended in {type(error).__qualname__}"

    # --- where, and over what --------------------------------------------------------------------------------------

    @cached_property
    def _connections(self) -> PerProcess[httpx.HTTPTransport]:
        return PerProcess(self._transport)

    def _place(self, request: ExecutionRequest) -> httpx.URL:
        import httpx

        if request.action_id in {"", ".", ".."}:
            raise EndpointDoubt(
                f"action id {request.action_id!r} cannot stand in a URL, and nothing was sent: give another"
            )
        return httpx.URL(f"{self._base().rstrip('/')}/{quote(request.action_id, safe='')}")

    def _base(self) -> str:
        name = type(self).__name__
        url = _url(f"{name}.url", self.url)
        if url.userinfo or url.query or url.fragment:
            raise ConfigurationError(
                f"{name}.url has more than host and path: return credentials from headers(), which are never shown"
            )
        if url.scheme != "https" and self.allow_http is not True:
            raise ConfigurationError(
                f"{name}.url is not https: use TLS, or set allow_http = True in a network you trust"
            )
        return self.url

    def _tls(self) -> bool | ssl.SSLContext:
        name, verify = type(self).__name__, self.verify
        if isinstance(verify, str):
            try:
                return ssl.create_default_context(cafile=verify)
            except OSError as error:
                raise ConfigurationError(
                    f"{name}.verify: {verify!r} cannot be read ({error}): give the path of a PEM file of certificates"
                ) from error
        if isinstance(verify, ssl.SSLContext):
            if verify.verify_mode != ssl.CERT_REQUIRED or not verify.check_hostname:
                raise ConfigurationError(
                    f"{name}.verify is an SSLContext that does not verify: require certificate and name"
                )
        elif verify is not True:
            raise ConfigurationError(
                f"{name}.verify is {verify!r:.80}, and certificates are always verified: give the path of your own "
                "authority's certificate"
            )
        return verify

    def _transport(self) -> httpx.HTTPTransport:
        import httpx

        transport = httpx.HTTPTransport(
            verify=self._tls(),
            trust_env=False,
            retries=0,
            limits=httpx.Limits(max_connections=None),
            proxy=self.proxy,
        )
        pool: Any = transport._pool  # noqa: SLF001  httpx has no other way to give its timeouts a sum
        pool._network_backend = _Punctual(pool._network_backend)  # noqa: SLF001
        return transport


class _Reply(NamedTuple):
    status: int
    body: bytes


class _Punctual:
    """Connections that have one deadline for all they do: httpx bounds each step, and a slow server makes many."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def connect_tcp(self, host: str, port: int, timeout: float, **options: Any) -> _PunctualStream:
        import httpcore

        deadline = time.monotonic() + timeout
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(info[4][0] for info in found))
        for tried, address in enumerate(addresses, start=1):
            # One after the other here, for given the name the socket module would take the whole time for each.
            share = _left(deadline) / (len(addresses) - tried + 1)
            try:
                stream = self._backend.connect_tcp(address, port, timeout=share, **options)
                break
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if tried == len(addresses):
                    raise
        return _PunctualStream(stream, deadline)


class _PunctualStream:
    def __init__(self, stream: Any, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002
        found: bytes = self._stream.read(max_bytes, timeout=_left(self._deadline))
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002
        for start in range(0, len(buffer), _PIECE):
            self._stream.write(buffer[start : start + _PIECE], timeout=_left(self._deadline))

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002
    ) -> _PunctualStream:
        try:
            left = _left(self._deadline)
        except TimeoutError:
            self.close()  # as a handshake that fails does
            raise
        stream = self._stream.start_tls(ssl_context, server_hostname=server_hostname, timeout=left)
        return _PunctualStream(stream, self._deadline)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _doubt(method: str, request: ExecutionRequest, problem: str) -> EndpointDoubt:
    following = "look for it, and do not send it again" if method == "PUT" else "look again"
    return EndpointDoubt(f"{method} of action {request.action_id}: {problem}: {following}", problem=problem)


def _judged(method: str, request: ExecutionRequest, reply: _Reply) -> Answer:
    said = _read(reply.body)
    if not isinstance(said, dict):
        raise _doubt(method, request, f"status {reply.status}, and the answer is no JSON object")
    try:
        return judged(request, said)
    except EndpointDoubt as doubt:
        problem = f"status {reply.status}, and the answer {doubt.problem}"
    raise _doubt(method, request, problem)


def _read(body: bytes) -> object:
    """What the body says, or None where it is no JSON that can be read in one way only."""
    try:
        return json.loads(body.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return None


def _can_be_sent(name: object, value: object) -> bool:
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return _NAME.fullmatch(name) is not None and value.isascii() and value.isprintable() and value == value.strip()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _url(argument: str, value: object) -> httpx.URL:
    import httpx

    if isinstance(value, str):
        with suppress(httpx.InvalidURL):
            url = httpx.URL(value)
            if url.scheme in {"http", "https"} and url.host:
                return url
    # What it is is not shown: it may have a password in it.
    raise ConfigurationError(f"{argument} is no URL: give one like 'https://refunds.example/actions'")


def _check_number(name: str, argument: str, value: Any, kind: Any, most: float) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not math.isfinite(value) or not 0 < value <= most:
        raise ConfigurationError(f"{name}.{argument} is {value!r:.80}: give a number above 0, at most {most:g}")
