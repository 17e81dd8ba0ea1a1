"""A network namespace for one worker, joined to the host by a pair of virtual links that can be taken down.

Needs root and iproute2. Where either is missing, or the kernel refuses, :func:`unavailable` says why, and so does the
run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence

from typing_extensions import Self


def unavailable() -> str:
    """Why there can be no namespace here; empty if there can."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None:
        return "no iproute2"
    try:
        with Namespace():
            return ""
    except subprocess.CalledProcessError as error:
        return f"the kernel refuses: {error.stderr.strip()}"


class Namespace:
    """One namespace and its link; gone when closed, or with this process at its exit."""

    made = 0

    def __init__(self) -> None:
        Namespace.made += 1
        number = os.getpid() % 10_000 * 10 + Namespace.made % 10
        self.name = f"chaos{number}"
        self._host, self._inner = f"ch{number}", f"cw{number}"
        net = f"10.{100 + number % 100}.{number // 100 % 250}"
        self.host_address = f"{net}.1"
        self._closed = False
        atexit.register(self.close)
        try:
            _ip("netns", "add", self.name)
            _ip("link", "add", self._host, "type", "veth", "peer", "name", self._inner, "netns", self.name)
            _ip("addr", "add", f"{net}.1/30", "dev", self._host)
            _ip("link", "set", self._host, "up")
            _ip("-n", self.name, "addr", "add", f"{net}.2/30", "dev", self._inner)
            _ip("-n", self.name, "link", "set", self._inner, "up")
            _ip("-n", self.name, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs this one inside."""
        return ["ip", "netns", "exec", self.name, *argv]

    def cut(self) -> None:
        """Partition it from the host: packets vanish, connections stay open."""
        _ip("link", "set", self._host, "down")

    def heal(self) -> None:
        """Let packets through again."""
        _ip("link", "set", self._host, "up")

    def close(self) -> None:
        """Remove it; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for words in (("link", "del", self._host), ("netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
