"""Real Celery workers in their own processes, and the app they run.

``TaskApp`` writes a task module into a temporary directory and imports it here too, so the test publishes what the
worker runs. ``WorkerProc`` is one ``celery worker``: it is started, watched, wounded and always reaped.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import textwrap
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil

from tests.support.processes import Process, remove_dir, scratch_dir, wait_until

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Self

__all__ = ["ROOT", "TaskApp", "WorkerProc", "wait_until"]

ROOT = Path(__file__).resolve().parents[2]

#: Every app of the suite starts from these; ``settings=`` overrides them one by one.
DEFAULTS: dict[str, Any] = {
    "broker_connection_retry_on_startup": True,
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "worker_lost_wait": 0.5,  # seconds; the default of 10 makes a killed child cost 12 s
    "worker_prefetch_multiplier": 1,
    "worker_hijack_root_logger": True,
}

#: Start-up chatter between workers: a second of waiting, and nothing the suite looks at.
QUIET = ("--without-gossip", "--without-mingle")

_HEADER = """\
from functools import partial

from celery import Celery

app = Celery({name!r}, broker={broker!r}, backend={backend!r}, set_as_current=False)
app.conf.update({settings!r})
app.task = partial(app.task, shared=False)  # by default every other app of the test process would have them too
"""

#: Kombu's filesystem broker writes a message under its final name, so a worker that looks too early reads half of it
#: and dies (kombu issue 1551); this one renames it into place.
_WHOLE_FILES = """\
import time, uuid
from pathlib import Path
from kombu.transport import filesystem
from kombu.utils.json import dumps

def _put(self, queue, payload, **_):
    name = f"{time.monotonic_ns() // 1_000_000}_{uuid.uuid4()}.{queue}.msg"
    part = Path(self.data_folder_out) / f"{name}.part"
    part.write_text(dumps(payload))
    part.rename(part.with_suffix(""))

filesystem.Channel._put = _put
"""

_POOL_CHECK = """\
from celery.concurrency.asynpool import AsynPool

AsynPool.timers = property(lambda self: {{self.maintain_pool: {seconds!r}}})
"""


class WorkerProc:
    """One ``celery worker`` process with its pool.

    Args:
        app: what ``-A`` names, ``module:attribute``.
        cwd: where it runs; the module is imported from here.
        env: added to this process's environment; PYTHONPATH gets ``cwd`` and the repository in front.
        pool: ``prefork``, ``solo``, ``threads``, ``gevent``…
        queues: names to consume, None for the app's default queue.
        extra: more command-line words, after :data:`QUIET`.
        ready_within: seconds until the log must say it is ready.
    """

    def __init__(
        self,
        app: str,
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        pool: str = "prefork",
        concurrency: int = 1,
        queues: Sequence[str] | None = None,
        extra: Sequence[str] = (),
        loglevel: str = "INFO",
        ready_within: float = 60,
    ) -> None:
        self.name = f"w{uuid.uuid4().hex[:8]}"
        self.ready_within = ready_within
        argv = [sys.executable, "-m", "celery", "-A", app, "worker", "--pool", pool]
        argv += ["--concurrency", str(concurrency), "--loglevel", loglevel, "--hostname", f"{self.name}@localhost"]
        if queues is not None:
            argv += ["--queues", ",".join(queues)]
        self.argv = [*argv, *QUIET, *extra]
        self._cwd = cwd
        self._env = {**os.environ, **(env or {})}
        path = [str(cwd), str(ROOT), self._env.get("PYTHONPATH", "")]
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self._env.setdefault("C_FORCE_ROOT", "1")
        self._env["TMPDIR"] = str(cwd)  # a killed worker leaves its multiprocessing folder behind
        self._process: Process | None = None

    def start(self, *, wait: bool = True) -> Self:
        """Start it and, unless told otherwise, return when it is ready to take tasks."""
        log = self._cwd / f"{self.name}.log"
        self._process = Process(self.argv, name=f"worker {self.name}", log_path=log, env=self._env, cwd=self._cwd)
        return self.wait_ready() if wait else self

    def wait_ready(self) -> Self:
        """Return once the log says "ready."; an AssertionError with the log's end when it never does."""
        self._running.wait_log(" ready.", self.ready_within)
        return self

    @property
    def pid(self) -> int:
        """The main process."""
        return self._running.pid

    @property
    def alive(self) -> bool:
        """Whether the main process runs."""
        return self._process is not None and self._process.alive

    @property
    def log(self) -> str:
        """Everything the worker and its children wrote so far."""
        return "" if self._process is None else self._process.log

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.splitlines()[-lines:])

    def wait_log(self, text: str, timeout: float = 30) -> None:
        """Return when ``text`` is in the log; an AssertionError with the log's end if it never comes."""
        self._running.wait_log(text, timeout)

    def children(self) -> list[int]:
        """List the pids of the pool's living children; empty for solo and thread pools."""
        return [p.pid for p in self._running.tree()[1:]] if self.alive else []

    def term(self, timeout: float = 30) -> int:
        """Warm shutdown: SIGTERM, the running tasks end; returns the exit code."""
        return self._signal_and_wait(signal.SIGTERM, timeout)

    def quit(self, timeout: float = 30) -> int:
        """Cold shutdown: SIGQUIT, unacknowledged tasks go back; returns the exit code."""
        return self._signal_and_wait(signal.SIGQUIT, timeout)

    def kill(self) -> None:
        """SIGKILL the main process and all children at once, and reap them."""
        self._running.kill_tree()

    def kill_main(self) -> None:
        """SIGKILL the main process alone, and reap it; the children find out by themselves."""
        self._running.send(signal.SIGKILL)
        self._running.wait(30)

    def kill_child(self, pid: int | None = None) -> int:
        """SIGKILL one pool child, the first unless told which, wait until it is gone, and return its pid."""
        if pid is None:
            pid = wait_until(self.children, 30, f"{self.name} has a pool child")[0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in self.children(), 30, f"child {pid} is gone")
        return pid

    def pause(self) -> None:
        """SIGSTOP the main process and all children, as a frozen machine would."""
        self._running.send_tree(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after :meth:`pause`."""
        self._running.send_tree(signal.SIGCONT)

    def stop(self) -> None:
        """End it: warm for a few seconds, then by force; nothing is left, and a worker that is gone is no error."""
        if self._process is None:
            return
        if self._process.alive:
            self._process.send_tree(signal.SIGCONT)
            self._process.send(signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                self._process.wait(3)
        self._process.close()

    def __enter__(self) -> Self:
        return self if self.alive else self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()

    @property
    def _running(self) -> Process:
        if self._process is None:
            raise AssertionError(f"worker {self.name} is not started")
        return self._process

    def _signal_and_wait(self, number: signal.Signals, timeout: float) -> int:
        self._running.send(number)
        code = self._running.wait(timeout)
        self._running.kill_tree()
        return code


class TaskApp:
    """A Celery app in a module of its own, importable by workers and by the test.

    Args:
        source: the tasks; ``app`` is defined above it, ``from celery import …`` is the source's own business.
        broker: any broker URL; ``filesystem://`` gets its folders here.
        backend: any result backend URL, ``db+sqlite:///…`` included; None is a SQLite file of this app's own.
        settings: literals only, over :data:`DEFAULTS`; what is not a literal is set by the source.
        env: for every worker of this app.
        pool_check: seconds between a prefork worker's looks for lost children; None is Celery's own 5, with which a
            killed child costs up to 5 s more and nothing else differs.

    Unless the settings say otherwise the default queue has a name of its own, so apps on one broker never mix.
    """

    def __init__(
        self,
        source: str,
        *,
        broker: str,
        backend: str | None = None,
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        pool_check: float | None = 0.2,
    ) -> None:
        self.dir = scratch_dir("app")
        self.name = f"tasks_{uuid.uuid4().hex[:10]}"
        self.queue = f"q_{uuid.uuid4().hex[:10]}"
        self.broker = broker
        self.backend = backend if backend is not None else f"db+sqlite:///{self.dir / 'results.db'}"
        self._env = dict(env or {})
        self._module: ModuleType | None = None
        self._workers: list[WorkerProc] = []
        conf = {**DEFAULTS, "task_default_queue": self.queue, **self._broker_settings(), **(settings or {})}
        self.queue = conf["task_default_queue"]
        header = _HEADER.format(name=self.name, broker=self.broker, backend=self.backend, settings=conf)
        if self.broker.startswith("filesystem:"):
            header += _WHOLE_FILES
        if pool_check is not None:
            header += _POOL_CHECK.format(seconds=pool_check)
        (self.dir / f"{self.name}.py").write_text(header + "\n\n" + textwrap.dedent(source))

    @property
    def module(self) -> ModuleType:
        """The task module, imported into this process: ``tasks.module.add.delay(1, 2)``."""
        if self._module is None:
            sys.path.insert(0, str(self.dir))
            try:
                importlib.invalidate_caches()
                self._module = importlib.import_module(self.name)
            finally:
                sys.path.remove(str(self.dir))
        return self._module

    @property
    def app(self) -> Celery:
        """The app, for publishing and for reading results here."""
        app: Celery = self.module.app
        return app

    def worker(self, **options: Any) -> WorkerProc:
        """Return a worker of this app, not started: ``with tasks.worker(concurrency=2) as w:`` starts and reaps it.

        Args:
            options: as for :class:`WorkerProc`; ``env`` is added to the app's own.
        """
        env = {**self._env, **options.pop("env", {})}
        worker = WorkerProc(f"{self.name}:app", cwd=self.dir, env=env, **options)
        self._workers.append(worker)
        return worker

    def path(self, name: str) -> Path:
        """Return a path in the app's directory, which is also the workers' working directory."""
        return self.dir / name

    def close(self) -> None:
        """Reap every worker, close every connection made here, forget the module and remove the directory."""
        for worker in self._workers:
            worker.__exit__()
        if self._module is not None:
            _disconnect(self._module.app)
            sys.modules.pop(self.name, None)
            self._module = None
        remove_dir(self.dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _broker_settings(self) -> dict[str, Any]:
        if not self.broker.startswith("filesystem:"):
            return {}
        folders = {name: self.dir / name for name in ("messages", "control")}
        for folder in folders.values():
            folder.mkdir()
        messages, control = map(str, folders.values())
        # One folder for both directions: worker and publisher share it, and the queue is in the file's name.
        options: dict[str, Any] = {"data_folder_in": messages, "data_folder_out": messages, "control_folder": control}
        options["polling_interval"] = 0.1  # seconds; 1 by default
        return {"broker_transport_options": options}


def _disconnect(app: Celery) -> None:
    """Close what publishing and reading results opened, so that no socket is left for the garbage collector."""
    backend: Any = app.backend
    pool: Any = app.pool
    consumer = getattr(backend, "result_consumer", None)
    with contextlib.suppress(Exception):
        if consumer is not None:
            consumer.stop()
    with contextlib.suppress(Exception):
        if "client" in vars(backend):  # Redis makes its client when it is first asked for
            backend.client.connection_pool.disconnect()
    for engine in vars(getattr(backend, "session_manager", backend)).get("_engines", {}).values():
        engine.dispose()
    with contextlib.suppress(Exception):
        pool.force_close_all()
    app.close()


def pids_named(text: str) -> list[int]:
    """List the processes whose command line contains ``text``: for tests that nothing was left behind."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE and text in " ".join(process.info["cmdline"] or ())
    ]
