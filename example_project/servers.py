"""Processes of the demo's own: workers, the refund service, private Redis, PostgreSQL and RabbitMQ, on random ports.

Each lives in a temporary directory and ends with the demo. A server on a standard port is never touched.
"""

from __future__ import annotations

import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)  # below those the kernel gives to clients


class DemoError(Exception):
    """The demo cannot go on; the text says why, and what to do."""


class Process:
    """A child process with a session of its own, and its output in a file."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        end: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name, self.log, self._end = log.stem, log, end
        group = None if user is None else pwd.getpwnam(user).pw_gid
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                list(argv),
                env={**os.environ, **(env or {})},
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=user,
                group=group,
                extra_groups=None if user is None else [],
            )

    @property
    def alive(self) -> bool:
        """Whether the process itself still runs."""
        return self._popen.poll() is None

    def logged(self, text: str) -> bool:
        """Whether it has written this."""
        return text in self.log.read_text(errors="replace")

    def tail(self, lines: int = 25) -> str:
        """The end of its output."""
        return "\n".join(f"    {line}" for line in self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, seconds: float = 5) -> None:
        """End it in its own way, then by force, with everything it started."""
        if self.alive:
            self._popen.send_signal(self._end)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(seconds)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


def wait_until(done: Callable[[], object], seconds: float, what: str, watched: Iterable[Process] = ()) -> None:
    """Return when it is done; a DemoError with the logs' ends when it is not in time, or one of these has died."""
    deadline = time.monotonic() + seconds
    watched = tuple(watched)
    while not done():
        dead = [process.name for process in watched if not process.alive]
        if dead or time.monotonic() > deadline:
            reason = f"{' and '.join(dead)} died" if dead else f"not within {seconds:g} s"
            tails = "\n".join(f"  the end of {process.log}:\n{process.tail()}" for process in watched)
            raise DemoError(f"{reason}: {what}\n{tails}")
        time.sleep(0.02)


@contextmanager
def redis() -> Iterator[str]:
    """A Redis without persistence; its URL without a database number."""
    binary, port = _binary("redis-server", ["redis-server"]), _free_port()
    argv = [binary, "--bind", LOOPBACK, "--port", str(port), "--save", "", "--appendonly", "no"]
    with _scratch("redis") as place, _running(argv, port, log=place / "redis.log"):
        yield f"redis://{LOOPBACK}:{port}"


@contextmanager
def postgresql() -> Iterator[str]:
    """A PostgreSQL with an empty database; its SQLAlchemy URL."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version, reverse=True)
    binary, port = Path(_binary("postgresql", [*map(str, installed), "postgres"])), _free_port()
    user = "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
    with _scratch("postgresql", user) as place:
        data = str(place / "data")
        initdb = [str(binary.resolve().with_name("initdb")), "-D", data, "-U", "shop", "-A", "trust", "--no-sync"]
        making = Process([*initdb, "-E", "UTF8", "--locale=C"], log=place / "initdb.log", user=user)
        wait_until(lambda: not making.alive, 60, "initdb makes a database")
        settings = {"listen_addresses": LOOPBACK, "unix_socket_directories": "", "fsync": "off"}
        argv = [str(binary), "-D", data, "-p", str(port)]
        argv += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        log = place / "postgresql.log"
        with _running(argv, port, log=log, user=user, end=signal.SIGINT, ready="ready to accept connections"):
            yield f"postgresql+psycopg2://shop@{LOOPBACK}:{port}/postgres"


@contextmanager
def rabbitmq() -> Iterator[str]:
    """A RabbitMQ with an epmd of its own, so that nothing of Erlang stays behind; its URL."""
    # The wrapper in /usr/sbin changes user and directory, so the script behind it comes first.
    binary = _binary("rabbitmq-server", ["/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server"])
    epmd, port, epmd_port = _binary("rabbitmq-server", ["epmd"]), _free_port(), _free_port()
    with _scratch("rabbitmq") as place:
        config = [f"listeners.tcp.1 = {LOOPBACK}:{port}", "log.console = true", "log.file = false"]
        (place / "rabbitmq.conf").write_text("\n".join([*config, "disk_free_limit.absolute = 10MB", ""]))
        (place / "enabled_plugins").write_text("[].\n")
        env = {
            "HOME": str(place),
            "RABBITMQ_NODENAME": f"shop{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(_free_port()),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_MNESIA_BASE": str(place / "mnesia"),
            "RABBITMQ_LOG_BASE": str(place / "log"),
            "RABBITMQ_PID_FILE": str(place / "pid"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(place / "none"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none",
        }
        mapper = [epmd, "-port", str(epmd_port), "-address", LOOPBACK]
        with (
            _running(mapper, epmd_port, log=place / "epmd.log"),
            _running([binary], port, log=place / "rabbitmq.log", env=env, ready="startup complete"),
        ):
            yield f"amqp://guest:guest@{LOOPBACK}:{port}//"


def worker(name: str, queue: str, log: Path) -> Process:
    """One Celery worker of the shop, with two pool processes."""
    argv = [sys.executable, "-m", "celery", "-A", "example_project.app", "worker", "-Q", queue, "-n", f"{name}@%h"]
    argv += ["--pool", "prefork", "--concurrency", "2", "--loglevel", "INFO"]
    argv += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    # A killed worker leaves its temporary files, so they go where the demo cleans up.
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(log.parent)}
    # When the demo is through with a worker it has nothing to lose, and a warm shutdown would take 6 s.
    return Process(argv, log=log, env=env, end=signal.SIGKILL)


@contextmanager
def refund_service(ledger: Path) -> Iterator[str]:
    """The refund service with its ledger in this file; the URL of its refunds."""
    argv = [sys.executable, "-m", "example_project.refund_service", "--port", "0", "--ledger", str(ledger)]
    process = Process(argv, log=ledger.with_name("refund-service.log"), env={"PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: process.logged("ready"), 20, "the refund service is ready", [process])
        yield re.findall(r"http://\S+", process.log.read_text())[0]
    finally:
        process.stop()


@contextmanager
def _running(
    argv: Sequence[str],
    port: int,
    *,
    log: Path,
    ready: str = "",
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    end: signal.Signals = signal.SIGTERM,
) -> Iterator[None]:
    process = Process(argv, log=log, env=env, user=user, end=end)
    try:
        wait_until(lambda: process.logged(ready) and _listening(port), 60, f"{process.name} answers", [process])
        yield
    finally:
        process.stop()


@contextmanager
def _scratch(name: str, user: str | None = None) -> Iterator[Path]:
    # Where another user can get at it, which a directory inside the demo's own would not be.
    path = Path(tempfile.mkdtemp(prefix=f"celery-idem-demo-{name}-", dir="/tmp"))
    try:
        if user is not None:
            shutil.chown(path, user)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _binary(package: str, candidates: Iterable[str]) -> str:
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is not None:
            return found
    raise DemoError(
        f"no {package} on this machine: `sudo apt-get install --no-install-recommends {package}`, or give the URL of "
        "a running server instead of the word"
    )


def _version(path: Path) -> list[int]:
    return [int(part) for part in path.parts[-3].split(".") if part.isdigit()]


def _free_port() -> int:
    for port in random.sample(PORTS, 200):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise DemoError(f"no free port in {PORTS}")


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0
