"""Private Redis, PostgreSQL and RabbitMQ servers on random loopback ports, as root or as an ordinary user.

A server comes from ``TEST_REDIS_URL``, ``TEST_POSTGRES_URL`` or ``TEST_AMQP_URL`` when that is set (and must then
answer), else from a binary of this machine, else the run stops with the line that installs it. Nothing is ever skipped,
and a server that happens to listen on a standard port is never used.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.support.processes import (
    LOOPBACK,
    Process,
    free_port,
    listening,
    remove_dir,
    scratch_dir,
    wait_until,
)

if TYPE_CHECKING:
    from typing_extensions import Self

INSTALL_LINE = "sudo scripts/install-services"
USED: list[Server] = []
"""Every server handed out in this run, in order; the terminal summary names them."""


class Server(ABC):
    """One server process with its data: start, stop, kill, pause, resume, restart on the same data, close."""

    title: ClassVar[str]
    env_url: ClassVar[str]
    env_binary: ClassVar[str]
    ready_within: ClassVar[float] = 60

    def __init__(self, *, url: str | None = None) -> None:
        self._given_url = url
        self._process: Process | None = None
        self._closed = False
        self._owner = os.getpid()
        self._version = ""
        self.port = 0 if url is not None else free_port()
        self.binary = "" if url is not None else find_binary(self.title, self.env_binary, self._candidates())
        self.dir = Path() if url is not None else scratch_dir(self.title.lower(), user=self._user)
        USED.append(self)
        atexit.register(self.close)

    @classmethod
    def resolve(cls) -> Self:
        """Return a started server: the one its environment variable names, else a private one."""
        url = os.environ.get(cls.env_url)
        server = cls(url=url) if url else cls()
        return server.start()

    # -- what each kind of server says about itself ---------------------------------------------------------------

    @classmethod
    @abstractmethod
    def _candidates(cls) -> Iterable[str]:
        """Paths and names the binary may have, best first."""

    @property
    def _user(self) -> str | None:
        """The user to run as, None for the current one."""
        return None

    @abstractmethod
    def _launch(self) -> Process:
        """Start the process on ``self.port`` and ``self.dir``."""

    @abstractmethod
    def _spawned_url(self) -> str:
        """The URL of the private server."""

    @abstractmethod
    def _check(self) -> str:
        """Ask the server behind ``self.url`` for its version; any exception means it does not answer."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    # -- what the tests use ---------------------------------------------------------------------------------------

    @property
    def private(self) -> bool:
        """Whether this process started it, so that it may be killed, paused and restarted."""
        return self._given_url is None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self._given_url or self._spawned_url()

    @property
    def pid(self) -> int:
        """The server's main process."""
        return self._running.pid

    @property
    def log(self) -> str:
        """What the server wrote so far."""
        return self._process.log if self._process is not None else ""

    @property
    def describe(self) -> str:
        """Name the server for the report: where it came from, its version, its port."""
        if self._given_url is not None:
            parts = urlsplit(self._given_url)
            return f"{self.title}: {self.env_url}, {parts.hostname}:{parts.port} {self._version}".rstrip()
        return f"{self.title}: spawned {self.binary} {self._version} :{self.port}"

    def start(self) -> Self:
        """Start it and return when it answers; a given URL that does not answer fails the run."""
        if self._given_url is not None:
            try:
                self._version = self._check()
            except Exception as exc:
                raise pytest.UsageError(f"{self.env_url} is set but does not answer: {exc}") from exc
            return self
        if self._closed:
            raise AssertionError(f"{self.title} was closed; make a new one")
        if self._process is None or not self._process.alive:
            self._process = self._launch()
            self._await_ready(self._process)
        return self

    def stop(self, timeout: float = 30) -> None:
        """Stop it in an orderly way; its data stay for the next :meth:`start`."""
        process = self._running
        process.send_tree(signal.SIGCONT)
        self._send_stop(process)
        process.wait(timeout)
        process.close()

    def kill(self) -> None:
        """SIGKILL every process of the server at once; its data stay for the next :meth:`start`."""
        self._running.close()

    def pause(self) -> None:
        """SIGSTOP every process: connections stay open and nobody answers."""
        self._running.send_tree(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after :meth:`pause`."""
        self._running.send_tree(signal.SIGCONT)

    def restart(self) -> Self:
        """Stop in an orderly way if it runs, then start on the same port and data."""
        if self._process is not None and self._process.alive:
            self.stop()
        return self.start()

    def close(self) -> None:
        """End it for good and remove its data; safe to call twice, and nothing in a forked child."""
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._process is not None:
            self._process.close()
        if self.private:
            remove_dir(self.dir)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- shared plumbing ------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Process:
        if self._process is None:
            reason = "is not started" if self.private else f"is not ours ({self.env_url}); use a private one"
            raise AssertionError(f"{self.title} {reason}")
        return self._process

    def _send_stop(self, process: Process) -> None:
        process.send(self.stop_signal)

    def _await_ready(self, process: Process) -> None:
        def answers() -> bool:
            if not process.alive:
                raise AssertionError(f"{self.title} ended with {process.returncode}:\n{process.log_tail()}")
            if not listening(self.port):
                return False
            with contextlib.suppress(Exception):
                self._version = self._check()
                return True
            return False

        wait_until(answers, self.ready_within, f"{self.title} on port {self.port} answers")


def find_binary(title: str, env_name: str, candidates: Iterable[str]) -> str:
    """Return the path of a server binary; a UsageError with the line that installs it when there is none."""
    chosen = os.environ.get(env_name)
    for name in [chosen] if chosen else candidates:
        found = shutil.which(name)
        if found is not None:
            return found
    looked = f"${env_name}={chosen}" if chosen else f"${env_name}, PATH and the distribution's directories"
    raise pytest.UsageError(f"no {title} server here (looked at {looked}); install it: {INSTALL_LINE}")


class RedisServer(Server):
    """Redis without persistence; every :meth:`new_database` is a database number of its own, emptied."""

    title = "Redis"
    env_url = "TEST_REDIS_URL"
    env_binary = "REDIS_SERVER"
    DATABASES: ClassVar[int] = 4096

    def __init__(self, *, url: str | None = None, options: Iterable[str] = ()) -> None:
        super().__init__(url=url)
        self._options = list(options)
        self._numbers = itertools.count(1)

    @classmethod
    def _candidates(cls) -> Iterable[str]:
        return ("redis-server", "/usr/bin/redis-server")

    def _launch(self) -> Process:
        argv = [self.binary, "--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.dir)]
        argv += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--databases", str(self.DATABASES)]
        argv += self._options
        return Process(argv, name="redis-server", log_path=self.dir / "server.log", cwd=self.dir)

    def _spawned_url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def _check(self) -> str:
        import redis

        with redis.Redis.from_url(self.url, socket_timeout=20) as client:
            return str(client.info("server")["redis_version"])

    def new_database(self) -> str:
        """Return the URL of an empty database nobody else in this run uses.

        On a server given by ``TEST_REDIS_URL`` the numbers go round, and each is flushed when it is handed out.
        """
        import redis

        with redis.Redis.from_url(self.url, socket_timeout=20) as client:
            total = self.DATABASES if self.private else int(client.config_get("databases")["databases"])
        number = 1 + (next(self._numbers) - 1) % (total - 1)
        parts = urlsplit(self.url)
        url = urlunsplit(parts._replace(path=f"/{number}"))
        with redis.Redis.from_url(url, socket_timeout=20) as client:
            client.flushdb()
        return url


class PostgresServer(Server):
    """PostgreSQL with fsync off: commits survive a SIGKILL of the server, not a power cut; ``durable`` leaves it on."""

    title = "PostgreSQL"
    env_url = "TEST_POSTGRES_URL"
    env_binary = "POSTGRES_SERVER"
    stop_signal = signal.SIGINT

    def __init__(self, *, url: str | None = None, durable: bool = False, options: Iterable[str] = ()) -> None:
        super().__init__(url=url)
        self.durable = durable
        self._options = list(options)

    @classmethod
    def _candidates(cls) -> Iterable[str]:
        def version(path: Path) -> float:
            return float(path.parts[-3]) if re.fullmatch(r"\d+(\.\d+)?", path.parts[-3]) else 0

        installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=version, reverse=True)
        return ["postgres", *map(str, installed)] if not installed else [*map(str, installed), "postgres"]

    @property
    def _user(self) -> str | None:
        return "nobody" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root

    def _launch(self) -> Process:
        data = self.dir / "data"
        if not data.exists():
            self._initdb(data)
        argv = [self.binary, "-D", str(data), "-p", str(self.port)]
        settings = {
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "fsync": "on" if self.durable else "off",
            "max_connections": "200",
            "dynamic_shared_memory_type": "mmap",  # dies with its directory, whoever kills the server
            "timezone": "UTC",
        }
        for name, value in settings.items():
            argv += ["-c", f"{name}={value}"]
        argv += self._options
        return Process(argv, name="postgres", log_path=self.dir / "server.log", cwd=self.dir, user=self._user)

    def _initdb(self, data: Path) -> None:
        initdb = Path(self.binary).resolve().with_name("initdb")
        argv = [str(initdb), "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C"]
        log = self.dir / "initdb.log"
        process = Process(argv, name="initdb", log_path=log, cwd=self.dir, user=self._user)
        code = process.wait(60)
        process.close()
        if code != 0:
            raise AssertionError(f"initdb ended with {code}:\n{process.log_tail()}")

    def _spawned_url(self) -> str:
        return f"postgresql+psycopg2://postgres@{LOOPBACK}:{self.port}/postgres"

    def _dsn(self) -> str:
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(scheme="postgresql"))

    def _check(self) -> str:
        return self.execute("SHOW server_version").split()[0]

    def execute(self, statement: str) -> str:
        """Run one statement outside any transaction and return its first value as text, empty if it has none."""
        import psycopg2

        connection = psycopg2.connect(self._dsn(), connect_timeout=20)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement)
                row = cursor.fetchone() if cursor.description else None
                return "" if row is None else str(row[0])
        finally:
            connection.close()

    def create_database(self, name: str | None = None) -> str:
        """Create an empty database and return its SQLAlchemy URL; the name is drawn when none is given."""
        name = name or f"t_{uuid.uuid4().hex[:12]}"
        copying = " STRATEGY file_copy" if int(self._version.split(".")[0]) >= 15 else ""  # 0.06 s, not 0.25 s
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE template0{copying}')
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(scheme="postgresql+psycopg2", path=f"/{name}"))

    def drop_database(self, url: str) -> None:
        """Drop a database made by :meth:`create_database`, whoever is still connected."""
        name = urlsplit(url).path.lstrip("/")
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


class RabbitServer(Server):
    """RabbitMQ without plugins, on an epmd of its own so that nothing of Erlang outlives the run."""

    title = "RabbitMQ"
    env_url = "TEST_AMQP_URL"
    env_binary = "RABBITMQ_SERVER"
    ready_within = 90

    def __init__(self, *, url: str | None = None) -> None:
        super().__init__(url=url)
        self._epmd: Process | None = None
        self._dist_port = free_port()
        self._epmd_port = free_port()
        self.node = f"t{self.port}@localhost"

    @classmethod
    def _candidates(cls) -> Iterable[str]:
        # The wrapper in /usr/sbin changes user and directory, so the script behind it comes first.
        return ("/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server")

    def _env(self) -> dict[str, str]:
        return {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))},
            "HOME": str(self.dir),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_MNESIA_BASE": str(self.dir / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.dir / "log"),
            "RABBITMQ_PID_FILE": str(self.dir / "pid"),
            "RABBITMQ_CONFIG_FILE": str(self.dir / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.dir / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(self.dir / "none"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 2:2 +sbwt none",
        }

    def _launch(self) -> Process:
        config = [f"listeners.tcp.1 = {LOOPBACK}:{self.port}", "log.console = true", "log.console.level = warning"]
        config += ["log.file = false", "disk_free_limit.absolute = 10MB", "vm_memory_high_watermark.relative = 0.8"]
        (self.dir / "rabbitmq.conf").write_text("\n".join(config) + "\n")
        (self.dir / "enabled_plugins").write_text("[].\n")
        env = self._env()
        if self._epmd is None or not self._epmd.alive:
            argv = [find_binary("Erlang", "EPMD", ["epmd"]), "-port", str(self._epmd_port), "-address", LOOPBACK]
            self._epmd = Process(argv, name="epmd", log_path=self.dir / "epmd.log", cwd=self.dir)
            wait_until(lambda: listening(self._epmd_port), 30, "epmd listens")
        return Process([self.binary], name="rabbitmq", log_path=self.dir / "server.log", env=env, cwd=self.dir)

    @property
    def pid(self) -> int:
        """The Erlang machine; the launcher that started it is only a shell."""
        return int((self.dir / "pid").read_text())

    def _spawned_url(self) -> str:
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}//"

    def _check(self) -> str:
        from kombu import Connection

        with Connection(self.url, connect_timeout=20) as connection:
            connection.ensure_connection(max_retries=1)
            return str(connection.connection.server_properties["version"])

    def create_vhost(self, name: str | None = None) -> str:
        """Create a virtual host and return its URL (0.2 s, by one Erlang call to the private node).

        A server given by ``TEST_AMQP_URL`` keeps its one virtual host: its URL comes back unchanged, and tests stay
        apart by the queue names they draw.
        """
        if not self.private:
            return self.url
        name = name or f"t_{uuid.uuid4().hex[:12]}"
        by, every = '<<"tests">>', '<<".*">>'
        self._erlang(
            f'ok = rpc:call(N, rabbit_vhost, add, [<<"{name}">>, {by}]), '
            f"ok = rpc:call(N, rabbit_auth_backend_internal, set_permissions, "
            f'[<<"guest">>, <<"{name}">>, {every}, {every}, {every}, {by}])'
        )
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/{name}"

    def _erlang(self, expression: str) -> None:
        """Evaluate an Erlang expression next to the node ``N``; what does not match ends in an AssertionError."""
        argv = [find_binary("Erlang", "ERL", ["erl"]), "-noinput", "-hidden", "-start_epmd", "false"]
        argv += ["-kernel", "inet_dist_use_interface", "{127,0,0,1}", "-sname", f"c{uuid.uuid4().hex[:8]}@localhost"]
        argv += ["-eval", f"N = '{self.node}', {expression}, halt(0)."]
        done = subprocess.run(argv, env=self._env(), cwd=self.dir, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise AssertionError(f"the broker refused: {expression}\n{done.stdout}{done.stderr}")

    def close(self) -> None:
        """End the broker and its epmd for good and remove their data."""
        super().close()
        if self._epmd is not None and self._owner == os.getpid():
            self._epmd.close()
            self._epmd = None


def main() -> None:
    """Start all three, say where they are, and end them when stdin does: a way to try something by hand."""
    with contextlib.ExitStack() as stack:
        for kind in (RedisServer, PostgresServer, RabbitServer):
            server = stack.enter_context(kind())
            sys.stdout.write(f"{server.describe}\n  {server.url}\n")
            sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
