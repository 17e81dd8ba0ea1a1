"""A loopback TCP proxy that breaks connections on purpose, for Redis, PostgreSQL and AMQP alike.

It forwards bytes and knows no protocol, so the faults are those a network has: refuse, cut, delay, swallow, and the
one that matters most to an idempotency store: the server did the work and the reply is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tests.support.processes import LOOPBACK

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_CHUNK = 65_536


class ChaosProxy:
    """A proxy in front of one port, on a thread of its own.

    Attributes:
        refuse: while true, new connections are reset at once; open ones go on.
        delay: seconds every chunk waits, in each direction.
        blackhole: while true, nothing is forwarded in any direction and connections stay open.
        connections: how many connections were accepted so far.
        dropped: how many replies were lost so far.
    """

    def __init__(self, upstream_port: int, host: str = LOOPBACK, *, listen: str = LOOPBACK) -> None:
        self.refuse = False
        self.delay = 0.0
        self.blackhole = False
        self.connections = 0
        self.dropped = 0
        self._upstream_port = upstream_port
        self._host = host
        self._replies_left: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-proxy", daemon=True)
        self._thread.start()
        self._listen = listen
        self._server = self._call(asyncio.start_server(self._accept, listen, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @classmethod
    def before(cls, url: str, *, listen: str = LOOPBACK) -> Self:
        """Return a proxy in front of the server a URL names; :meth:`url` gives the way through it."""
        parts = urlsplit(url)
        if parts.port is None:
            raise ValueError(f"no port in {url!r}; name one")
        return cls(parts.port, parts.hostname or LOOPBACK, listen=listen)

    def url(self, url: str) -> str:
        """Return the same URL with the proxy's address in place of the server's."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}{self._listen}:{self.port}"))

    def drop_replies(self, after: int = 0) -> None:
        """Lose a reply: the server does the work, the client's connection breaks before it hears of it.

        Args:
            after: how many chunks from the server still pass, counted from now over all connections. Every later one
                is swallowed and its connection cut, until :meth:`heal`.
        """
        self._replies_left = after

    def cut(self) -> None:
        """Reset every open connection now; new ones are accepted as before."""
        self._call(self._abort_all())

    def heal(self) -> None:
        """End every fault; what was held back by ``blackhole`` goes on."""
        self.refuse = self.blackhole = False
        self.delay = 0.0
        self._replies_left = None

    @property
    def open_connections(self) -> int:
        """How many client connections are open now."""
        return len(self._writers) // 2

    def close(self) -> None:
        """Cut everything and end the thread; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- on the proxy's own thread --------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuse:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection(self._host, self._upstream_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, up_writer}
        self._writers |= pair
        pumps = [
            asyncio.ensure_future(self._pump(reader, up_writer, from_server=False)),
            asyncio.ensure_future(self._pump(up_reader, writer, from_server=True)),
        ]
        self._pumps.update(pumps)
        try:
            # One side gone means the other goes too, or a half-open connection would outlive the client.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._pumps.difference_update(pumps)
            self._writers -= pair
            for one in pair:
                one.transport.abort() if self._closed else one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                while self.blackhole:
                    await asyncio.sleep(0.005)
                if self.delay:
                    await asyncio.sleep(self.delay)
                if from_server and self._lose_reply():
                    writer.transport.abort()
                    return
                writer.write(data)
                await writer.drain()

    def _lose_reply(self) -> bool:
        if self._replies_left is None:
            return False
        if self._replies_left > 0:
            self._replies_left -= 1
            return False
        self.dropped += 1
        return True

    async def _abort_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _shut_down(self) -> None:
        self._server.close()
        await self._abort_all()
        for pump in list(self._pumps):
            pump.cancel()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
