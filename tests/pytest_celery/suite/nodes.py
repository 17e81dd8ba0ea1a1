"""pytest-celery's nodes over processes of this host, where no Docker runs.

Its containers wrap one of Docker's SDK and ask it for little; ``Handle`` answers that for a process or a server.
"""

from __future__ import annotations

import inspect
import os
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_celery
from pytest_celery import CeleryTestContainer, CeleryWorkerContainer, RabbitMQContainer, RedisContainer
from pytest_docker_tools import wrappers

from tests.support.processes import LOOPBACK, Process, wait_until
from tests.support.services import Server


def check_shape() -> None:
    """A UsageError where pytest-celery is not what these nodes were made for: better than tests that err somewhere."""
    asked = {"attrs", "exec_run", "id", "kill", "logs", "name", "ready", "reload", "restart", "status"}
    missing = {name for name in asked if not hasattr(wrappers.Container, name)}
    missing |= {name for name in ("celeryconfig", "client", "teardown") if not hasattr(CeleryTestContainer, name)}
    for name in ("redis_broker", "redis_backend", "rabbitmq_broker", "worker_container"):
        missing |= {f"default_{name}"} - set(vars(pytest_celery))
    takes = list(inspect.signature(wrappers.Container).parameters)
    if missing or takes != ["container"]:
        raise pytest.UsageError(
            f"pytest-celery {pytest_celery.__version__} lacks {sorted(missing)}, or its containers take {takes}: adapt "
            "tests/pytest_celery/suite/nodes.py"
        )


class Handle:
    """What the plugin asks of a container: who it is, where it listens, what it says."""

    def __init__(self, name: str, ports: dict[str, int]) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"{name}-{self.id[:6]}"
        self.attrs: dict[str, Any] = {
            "Config": {"Hostname": self.id[:12], "Env": []},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {
                "Networks": {"local": {"IPAddress": LOOPBACK}},
                "Ports": {port: [{"HostPort": str(here)}] for port, here in ports.items()},
            },
        }

    status = "running"

    def reload(self) -> None:
        """Nothing is cached."""

    def logs(self) -> bytes:
        """What it wrote."""
        return b""


class LocalWorker(Handle):
    """A worker in a directory of its own."""

    def __init__(self, root: Path, content: dict[str, bytes], env: dict[str, str], command: list[str]) -> None:
        super().__init__("worker", {})
        for name, data in content.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        bins = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._env = {**os.environ, **env, "PATH": bins, "PYTHONPATH": str(root), "C_FORCE_ROOT": "1"}
        self._root = root
        self._argv = [sys.executable, "-m", *(word.replace("%h", self.id[:12]) for word in command)]
        self._start()

    def _start(self) -> None:
        log = self._root / "worker.log"
        self._process = Process(self._argv, name=self.name, log_path=log, env=self._env, cwd=self._root)

    @property
    def status(self) -> str:  # type: ignore[override]
        """As Docker says it."""
        return "running" if self._process.alive else "exited"

    def logs(self) -> bytes:
        return self._process.log.encode()

    def kill(self, sig: str | int | None = None) -> None:
        """SIGKILL takes all of its processes, as it would a container's; any other signal the first one."""
        number = signal.Signals[sig] if isinstance(sig, str) else signal.Signals(sig or signal.SIGKILL)
        if number is signal.SIGKILL:
            self._process.kill_tree()
        else:
            self._process.send(number)

    def restart(self, timeout: float = 10) -> None:
        """Start it again, on the same files; what runs is stopped first."""
        if self._process.alive:
            self._process.send(signal.SIGTERM)
            self._process.wait(timeout)
        seen = self._process.log.count(READY)
        self._start()
        wait_until(lambda: self._process.log.count(READY) > seen, 30, f"{self.name} is ready again")

    def exec_run(self, command: str | list[str], **_: Any) -> tuple[int, bytes]:
        """A command beside the worker."""
        argv = shlex.split(command) if isinstance(command, str) else command
        done = subprocess.run(argv, env=self._env, cwd=self._root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout

    def remove(self) -> None:
        self._process.close()


READY = " ready."


class Local:
    """Mixed into a container of the plugin's: nothing is asked of Docker's network."""

    place: str | None = None
    """URL of a server, the same for the worker and for the test."""

    def ready(self) -> bool:
        prompt = READY if isinstance(self, CeleryWorkerContainer) else ""
        wait_until(lambda: prompt in self.logs() or self.status != "running", 30, f"{self.name} is ready")  # type: ignore[attr-defined]
        assert self.status == "running", self.logs()  # type: ignore[attr-defined]
        return True

    @property
    def url(self) -> str | None:
        return self.place

    host_url = url

    @property
    def port(self) -> int | None:
        return urlsplit(self.place or "").port


class LocalRedis(Local, RedisContainer):  # type: ignore[misc]
    """A database on the run's Redis."""


class LocalRabbit(Local, RabbitMQContainer):  # type: ignore[misc]
    """A virtual host on the run's RabbitMQ."""


class LocalWorkerContainer(Local, CeleryWorkerContainer):  # type: ignore[misc]
    """A worker process."""


def at(kind: type[Local], url: str, server: Server) -> Any:
    """A node of that kind at that place."""
    node: Any = kind(Handle(server.title.lower(), {}))  # type: ignore[call-arg]
    node.place = url
    return node
