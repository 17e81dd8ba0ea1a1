"""Who holds a claim, and is that process provably dead.

Every claim carries its holder's identity as one line of text, so that a worker on the same machine which meets the
claim of a killed process can take the key over at once instead of waiting out the lease. A wrong "dead" would run
two bodies at the same time, so the only verdicts given are those the kernel itself vouches for; whatever cannot be
read, compared or understood counts as alive, and the lease decides.

Not decided here: whether the check is wanted (``idempotency_dead_check``), and taking the claim over (the engine
claims with ``dead_fence``, so a second judge of the same dead holder steals nothing).
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_UNKNOWN = "-"
_NO_SUCH_KIND = "none"  # a kernel without time namespaces (before 5.6) cannot shift anybody's clock
_PID_LIMIT = 1 << 22  # Linux never hands out more
_LONGEST = 512
_TEXT = re.compile(
    r"v1 boot=(?P<boot>[0-9a-f-]{1,64}) pidns=(?P<pidns>[0-9]{1,20}|-) timens=(?P<timens>[0-9]{1,20}|none|-)"
    r" pid=(?P<pid>[1-9][0-9]{0,9}) start=(?P<start>0|[1-9][0-9]{0,19}|-) host=(?P<host>[A-Za-z0-9._-]{1,64})",
    re.ASCII,
)


@dataclass(frozen=True)
class Holder:
    """One process on one boot of one kernel; a field this system would not tell is ``-``.

    ``start`` is in clock ticks since boot, as ``/proc/<pid>/stat`` has it. ``host`` is for people: names repeat.
    """

    boot: str
    pid_namespace: str
    time_namespace: str
    pid: int
    start: str
    host: str

    def __str__(self) -> str:
        return (
            f"v1 boot={self.boot} pidns={self.pid_namespace} timens={self.time_namespace}"
            f" pid={self.pid} start={self.start} host={self.host}"
        )


class _Own:
    """This process's identity, read once; a fork makes it somebody else's."""

    pid = 0
    text = ""

    @classmethod
    def forget(cls) -> None:
        cls.pid = 0


if hasattr(os, "register_at_fork"):
    # Besides the pid check in current(): a child in a new pid namespace may have its parent's very pid.
    os.register_at_fork(after_in_child=_Own.forget)


def current() -> str:
    """This process, as stored in records: ``v1 boot=… pidns=… timens=… pid=… start=… host=…``.

    Read from ``/proc`` once per process, forks included. Where that is impossible (no Linux, ``/proc`` hidden or
    belonging to another pid namespace) the fields say ``-``, and nobody will ever prove this process dead.
    """
    pid = os.getpid()
    if _Own.pid != pid:
        _Own.text = str(_read_own(pid))
        _Own.pid = pid
    return _Own.text


def parse(text: object) -> Holder | None:
    """The holder a record names, or None where the text is not one that ``current`` writes."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        return None
    found = _TEXT.fullmatch(text)
    if found is None:
        return None
    return Holder(found["boot"], found["pidns"], found["timens"], int(found["pid"]), found["start"], found["host"])


def provably_dead(text: object) -> bool:
    """True only if the kernel we share with this holder says that its process no longer runs.

    That takes the same boot, pid namespace and time namespace as ours, and then a pid nobody has, a zombie without
    a living thread, or a process that started at another time. Everything else, garbage included, is False.

    Source: proc_pid_stat(5), kill(2), pid_namespaces(7), time_namespaces(7).
    """
    holder, here = parse(text), parse(current())
    if holder is None or here is None or not _comparable(holder, here):
        return False
    if holder.pid == here.pid and holder.start == here.start:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # EPERM and the like: somebody has this pid, and we may not know who
    return _ended(holder)


def describe(text: object) -> str:
    """The holder in words for people, never an error: ``pid 123 on host web-1``."""
    holder = parse(text)
    if holder is not None:
        return f"pid {holder.pid} on host {holder.host}" if holder.host != _UNKNOWN else f"pid {holder.pid}"
    return f"an unreadable holder ({ascii(text)[:64]})"


def _read_own(pid: int) -> Holder:
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:64] or _UNKNOWN
    nobody = Holder(_UNKNOWN, _UNKNOWN, _UNKNOWN, pid, _UNKNOWN, host)
    if not sys.platform.startswith("linux"):
        return nobody
    try:
        # A /proc mounted for another pid namespace shows other processes under our numbers.
        if str(Path("/proc/self").readlink()) != str(pid):
            return nobody
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = _stat(pid)
        found = Holder(boot, _namespace("pid"), _time_namespace(), pid, stat.start, host)
    except (OSError, ValueError, IndexError):
        return nobody
    return found if parse(str(found)) == found else nobody


def _namespace(kind: str) -> str:
    return str(Path("/proc/self/ns", kind).stat().st_ino)


def _time_namespace() -> str:
    try:
        return _namespace("time")
    except FileNotFoundError:
        return _NO_SUCH_KIND


def _comparable(holder: Holder, here: Holder) -> bool:
    if _UNKNOWN in {holder.boot, holder.pid_namespace, holder.time_namespace, holder.start} or holder.pid > _PID_LIMIT:
        return False
    # Namespace inodes are reused once a namespace is gone, but then so is every process that was in it. The time
    # namespace matters because it shifts the start times a reader is shown.
    return (holder.boot, holder.pid_namespace, holder.time_namespace) == (
        here.boot,
        here.pid_namespace,
        here.time_namespace,
    )


@dataclass(frozen=True)
class _Stat:
    state: str
    threads: int
    start: str


def _stat(pid: int) -> _Stat:
    raw = Path("/proc", str(pid), "stat").read_bytes()
    # The command name stands in parentheses and may itself hold spaces and parentheses; the last one closes it.
    fields = raw[raw.rindex(b")") + 1 :].decode("ascii").split()
    return _Stat(state=fields[0], threads=int(fields[17]), start=str(int(fields[19])))


def _ended(holder: Holder) -> bool:
    """Whether the process that has the holder's pid now is another one, or dead and merely not reaped."""
    try:
        stat = _stat(holder.pid)
    except (OSError, ValueError, IndexError):
        return False  # hidden by hidepid, or gone this instant: the next look will tell
    if stat.start != holder.start:
        return True
    # A main thread that ended before the others is shown as a zombie too, while its process still works.
    return stat.state in {"Z", "X", "x"} and stat.threads <= 1
