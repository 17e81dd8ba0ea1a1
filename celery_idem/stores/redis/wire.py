"""Commands over redis-py's connections: one exchange, one deadline, every driver error translated here.

redis-py's own repeats are off, because they know nothing of the deadline. One repeat remains, for a pooled
connection the server had closed: every verb may be asked twice, its token or fence makes it the same question.
Where connections come from is connection.py's business, what the commands mean the store's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis import exceptions

from celery_idem.errors import StoreUnavailable
from celery_idem.stores.redis.lender import Lender, Lent
from celery_idem.stores.redis.scripts import Script

Command = Sequence[Any]

# The server answered that it did not do it. redis-py takes the code off the errors it has a class for.
_CODES = {
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.AuthenticationError: "NOAUTH",
    exceptions.AuthorizationError: "NOAUTH",
    exceptions.MaxConnectionsError: "POOL",
}
_REFUSED = re.compile(
    r"\b(LOADING|READONLY|OOM|MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|MOVED|ASK|TRYAGAIN|CROSSSLOT|NOAUTH|NOPERM"
    r"|WRONGPASS|BUSY|WRONGTYPE|NOPROTO)\b"
)
# What Redis gives no code of its own.
_NAMELESS = {
    "unauthenticated": "NOAUTH",  # Redis 7 reads no long command before AUTH
    "max number of clients": "CLIENTS",
    "DB index is out of range": "DB",
    "not allowed in cluster mode": "DB",
}
LASTING = frozenset({"NOAUTH", "NOPERM", "WRONGPASS", "DB"})
"""What no waiting mends."""
ELSEWHERE = frozenset({"READONLY", "NOREPLICAS", "MASTERDOWN"})
"""What a primary says that was demoted, or cut off from its replicas: there may be a new one."""
_NEXT_STEP = {
    "NOAUTH": "it refused the user or password: correct them in idempotency_store",
    "WRONGPASS": "it refused the user or password: correct them in idempotency_store",
    "NOPERM": "this user may not do it: allow it EVALSHA, EVAL and the key prefix (ACL)",
    "OOM": "its memory is full: raise maxmemory; nothing was written",
    "READONLY": "it is a replica: point idempotency_store at the primary",
    "POOL": "every connection is in use: raise max_connections",
    "DB": "it has no database of this number: name another in idempotency_store, 0 in cluster mode",
    "CLIENTS": "it has as many clients as it takes: raise its maxclients, or run fewer processes",
    "LOADING": "it is loading its data: wait, nothing was written",
    "MISCONF": "it could not save to its disk, and takes no writes: see its log for why",
    "NOREPLICAS": "too few replicas follow it: bring them back, or lower min-replicas-to-write",
    "MASTERDOWN": "it is a replica that lost its primary: point idempotency_store at the primary",
    "CLUSTERDOWN": "its cluster is not whole: see CLUSTER INFO",
    "MOVED": "it is one node of a cluster: point idempotency_store at a server that is none",
    "BUSY": "a script keeps it busy: SCRIPT KILL ends one that has written nothing",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply to one command of several."""

    error: StoreUnavailable

    @property
    def wrong_type(self) -> bool:
        """Whether the key is no hash."""
        return self.error.facts.get("code") == "WRONGTYPE"


class Wire(Protocol):
    """How the store talks to a server."""

    def run(self, script: Script, key: str, args: Sequence[Any]) -> Any:
        """The script's answer for one key; ``StoreUnavailable`` where there is none."""

    def run_many(self, script: Script, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """One answer or ``Refusal`` per (key, arguments), in one round trip where the server allows it."""

    def commands(self, commands: Sequence[Command]) -> list[Any]:
        """One answer or ``Refusal`` per command."""

    def scan(self, pattern: str, count: int) -> Iterator[list[bytes]]:
        """The keys that match, a page at a time; a key may come twice."""

    def close(self) -> None:
        """Give back every connection."""


class PooledWire:
    """Talks over connections lent by a redis-py pool, which is made anew in every process."""

    def __init__(self, new_pool: Callable[[], Any], timeout: float) -> None:
        self._new_pool = new_pool
        self._timeout = timeout
        self._patience = timeout * 0.95
        self._lenders: dict[int, Lender] = {}

    def run(self, script: Script, key: str, args: Sequence[Any]) -> Any:
        """See ``Wire.run``."""
        deadline = time.monotonic() + self._timeout
        (reply,), before = self._exchange([("EVALSHA", script.sha, 1, key, *args)], deadline)
        if isinstance(reply, exceptions.NoScriptError):
            (reply,), before = self._exchange([("EVAL", script.text, 1, key, *args)], deadline, before)
        if isinstance(reply, exceptions.ResponseError):
            raise unavailable(reply, sent=True, before=before)
        return reply

    def run_many(self, script: Script, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """See ``Wire.run_many``."""
        deadline = time.monotonic() + self._timeout
        commands = [("EVALSHA", script.sha, 1, key, *args) for key, args in calls]
        replies, before = self._exchange(commands, deadline)
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if missing:
            commands = [("EVAL", script.text, 1, calls[i][0], *calls[i][1]) for i in missing]
            again, before = self._exchange(commands, deadline, before)
            for i, reply in zip(missing, again, strict=True):
                replies[i] = reply
        return [_or_refusal(reply, before) for reply in replies]

    def commands(self, commands: Sequence[Command]) -> list[Any]:
        """See ``Wire.commands``."""
        replies, before = self._exchange(commands, time.monotonic() + self._timeout)
        return [_or_refusal(reply, before) for reply in replies]

    def scan(self, pattern: str, count: int) -> Iterator[list[bytes]]:
        """See ``Wire.scan``."""
        cursor: Any = 0
        while True:
            (reply,) = self.commands([("SCAN", cursor, "MATCH", pattern, "COUNT", count)])
            if isinstance(reply, Refusal):
                raise reply.error
            cursor, names = reply
            yield list(names)
            if int(cursor) == 0:
                return

    def close(self) -> None:
        """See ``Wire.close``."""
        lender = self._lenders.pop(os.getpid(), None)
        if lender is None:
            return
        lender.empty()
        lender.pool.disconnect()
        for sentinel in getattr(getattr(lender.pool, "sentinel_manager", None), "sentinels", ()):
            sentinel.connection_pool.disconnect()

    def _lender(self) -> Lender:
        """This process's pool. No lock: one held at a fork would stay held in the child for ever."""
        mine = os.getpid()
        lender = self._lenders.get(mine)
        if lender is None:
            lender = self._lenders.setdefault(mine, Lender(self._new_pool(), self._patience))
            for other in [pid for pid in list(self._lenders) if pid != mine]:
                self._lenders.pop(other, None)
        return lender

    def _exchange(self, commands: Sequence[Command], deadline: float, before: bool = False) -> tuple[list[Any], bool]:
        """One answer per command, ``ResponseError`` among them; all on one connection, sent at once.

        ``before`` goes in and comes out: whether an earlier attempt may have landed, so that a refusal proves nothing.
        """
        while True:
            sent = False
            lender = self._lender()
            try:
                packed = _packed(commands)
                lent = lender.take()
                try:
                    sent = True
                    replies = self._talk(lent, packed, len(commands), deadline)
                except BaseException:
                    lender.drop(lent)
                    raise
                lender.give(lent)
                return replies, before
            except (exceptions.RedisError, OSError) as error:
                failure = unavailable(error, sent=sent, before=before)
                repeat = sent and not before and _dropped(error)
                before = before or failure.may_have_landed
                if not repeat or time.monotonic() > deadline - self._timeout / 2:
                    raise failure from error

    def _talk(self, lent: Lent, packed: bytes, answers: int, deadline: float) -> list[Any]:
        connection, hurried = lent.connection, False
        connection.send_packed_command([packed])
        replies: list[Any] = []
        for _ in range(answers):
            left = deadline - time.monotonic()
            if left < self._patience:
                lent.socket.settimeout(max(left, 0.001))
                hurried = True
            try:
                replies.append(connection.read_response())
            except exceptions.ResponseError as error:
                if code_of(error) in ELSEWHERE:
                    raise  # without this connection the next verb looks up where the primary is now
                replies.append(error)
        if hurried:
            lent.socket.settimeout(self._patience)
        return replies


class ClusterWire:
    """Talks through a ``redis.cluster.RedisCluster``, which finds the node of each key; its timeouts are its own."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, script: Script, key: str, args: Sequence[Any]) -> Any:
        """See ``Wire.run``."""
        try:
            return self._client.execute_command("EVALSHA", script.sha, 1, key, *args)
        except exceptions.NoScriptError:
            (reply,) = self.commands([("EVAL", script.text, 1, key, *args)])
            if isinstance(reply, Refusal):
                raise reply.error from None
            return reply
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            raise unavailable(error, sent=True) from error

    def run_many(self, script: Script, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """See ``Wire.run_many``: one round trip each, because their nodes differ."""
        replies: list[Any] = []
        for key, args in calls:
            try:
                replies.append(self.run(script, key, args))
            except StoreUnavailable as error:
                replies.append(Refusal(error))
        return replies

    def commands(self, commands: Sequence[Command]) -> list[Any]:
        """See ``Wire.commands``."""
        replies: list[Any] = []
        for command in commands:
            try:
                replies.append(self._client.execute_command(*command))
            except exceptions.ResponseError as error:
                replies.append(Refusal(unavailable(error, sent=True)))
            except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
                raise unavailable(error, sent=True) from error
        return replies

    def scan(self, pattern: str, count: int) -> Iterator[list[bytes]]:
        """See ``Wire.scan``."""
        try:
            for name in self._client.scan_iter(match=pattern, count=count):
                yield [name]
        except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
            raise unavailable(error, sent=True) from error

    def close(self) -> None:
        """See ``Wire.close``: the client is its owner's."""


def unavailable(error: BaseException, *, sent: bool, before: bool = False) -> StoreUnavailable:
    """The driver's error in our words; the server's address may be in it, credentials never are.

    Args:
        error: what redis-py raised.
        sent: whether the command had left this process.
        before: whether an earlier copy of it may have landed, so that a refusal now proves nothing.
    """
    code = code_of(error)
    what = _NEXT_STEP.get(code or "") or f"{error}: check that it runs and that idempotency_store names it"
    landed = before or (sent and code is None)
    facts = {} if code is None else {"code": code}
    lead = "redis gave no answer" if code is None else "redis refused"
    return StoreUnavailable(f"{lead}: {what}", may_have_landed=landed, **facts)


def code_of(error: BaseException) -> str | None:
    """The code of a refusal, or None where the server may have done what it was asked."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return "WRONGPASS" if "WRONGPASS" in str(error) else code
    nameless = next((code for sign, code in _NAMELESS.items() if sign in str(error)), None)
    if nameless is None and isinstance(error, exceptions.ResponseError):
        found = _REFUSED.search(str(error))
        return None if found is None else found.group(1)
    return nameless


def _packed(commands: Sequence[Command]) -> bytes:
    """The commands as the server reads them; a word is bytes, text or a number."""
    parts: list[bytes] = []
    for words in commands:
        parts.append(b"*%d\r\n" % len(words))
        for word in words:
            kind = type(word)
            if isinstance(word, str):
                said = word.encode()
            elif isinstance(word, bytes):
                said = word
            elif kind is int or kind is float:
                said = repr(word).encode()
            else:
                raise TypeError(f"{word!r:.40} is no word of a command")
            parts.append(b"$%d\r\n%b\r\n" % (len(said), said))
    return b"".join(parts)


def _or_refusal(reply: Any, before: bool) -> Any:
    return (
        Refusal(unavailable(reply, sent=True, before=before)) if isinstance(reply, exceptions.ResponseError) else reply
    )


def _dropped(error: BaseException) -> bool:
    """Whether the connection broke, as opposed to a timeout or a refusal."""
    broken = isinstance(error, (exceptions.ConnectionError, OSError)) and not isinstance(error, TimeoutError)
    return broken and code_of(error) is None
