"""Who holds a claim, judged against real processes: only what the kernel vouches for counts as dead."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from celery_idem.core import holder
from celery_idem.core.holder import Holder

ROOT = Path(__file__).parents[2]

SAY_AND_WAIT = "import sys; from celery_idem.core import holder; print(holder.current(), flush=True); sys.stdin.read()"


def until(condition: Callable[[], object], *, within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def altered(text: str, **fields: object) -> str:
    found = holder.parse(text)
    assert found is not None
    return str(dataclasses.replace(found, **fields))


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of its own with its identity as it wrote it; killed and reaped afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", SAY_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


class TestIdentity:
    def test_it_names_this_process_readably_and_parses_back(self) -> None:
        found = holder.parse(holder.current())
        assert found is not None
        assert str(found) == holder.current()
        assert found.pid == os.getpid()
        assert "-" not in {found.boot, found.pid_namespace, found.time_namespace, found.start}

    def test_it_is_read_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = holder.current()
        monkeypatch.setattr(holder, "_read_own", lambda pid: pytest.fail("read again"))
        assert holder.current() is before

    def test_a_fork_has_an_identity_of_its_own(self) -> None:
        mine = holder.current()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writer, holder.current().encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            theirs = pipe.read()
        os.waitpid(pid, 0)
        assert holder.parse(theirs) is not None
        assert theirs != mine
        assert f" pid={pid} " in theirs

    def test_a_fork_with_the_same_pid_in_a_new_namespace_reads_again(self) -> None:
        holder.current()
        holder._Own.forget()  # what the fork hook does
        assert holder._Own.pid == 0
        assert holder.current() == str(holder._read_own(os.getpid()))

    def test_a_fork_that_python_did_not_make_is_noticed_by_its_pid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pid = os.getpid()
        holder.current()
        monkeypatch.setattr(holder.os, "getpid", lambda: pid + 1)
        assert f" pid={pid + 1} " in holder.current()

    def test_a_host_name_cannot_break_the_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(holder.socket, "gethostname", lambda: "we b=1\n" + "ü" * 300)
        found = holder._read_own(os.getpid())
        assert holder.parse(str(found)) == found
        assert found.host.startswith("we_b_1__")

    @pytest.mark.parametrize("platform", ["darwin", "win32"])
    def test_elsewhere_it_says_less_and_nobody_is_ever_dead(
        self, monkeypatch: pytest.MonkeyPatch, platform: str
    ) -> None:
        monkeypatch.setattr(holder.sys, "platform", platform)
        found = holder._read_own(2_000_000)
        assert holder.parse(str(found)) == found
        assert (found.boot, found.pid_namespace, found.time_namespace, found.start) == ("-",) * 4
        monkeypatch.setattr(holder, "current", lambda: str(found))
        monkeypatch.setattr(holder.os, "kill", lambda *_: pytest.fail("kill(pid, 0) terminates on Windows"))
        assert not holder.provably_dead(str(dataclasses.replace(found, pid=2_000_001)))

    def test_a_proc_of_another_pid_namespace_is_not_believed(self) -> None:
        assert holder._read_own(os.getpid() + 1).boot == "-"

    def test_a_kernel_without_time_namespaces_still_gives_verdicts(
        self, monkeypatch: pytest.MonkeyPatch, child: tuple[subprocess.Popen[str], str]
    ) -> None:
        real = holder._namespace

        def old_kernel(kind: str) -> str:
            if kind == "time":
                raise FileNotFoundError
            return real(kind)

        monkeypatch.setattr(holder, "_namespace", old_kernel)
        here = str(holder._read_own(os.getpid()))
        assert " timens=none " in here
        monkeypatch.setattr(holder, "current", lambda: here)
        process, text = child
        theirs = altered(text, time_namespace="none")
        assert not holder.provably_dead(theirs)
        process.kill()
        process.wait()
        assert holder.provably_dead(theirs)


class TestDead:
    def test_a_living_process_is_not(self, child: tuple[subprocess.Popen[str], str]) -> None:
        process, text = child
        assert f" pid={process.pid} " in text
        assert not holder.provably_dead(text)

    def test_a_killed_and_reaped_process_is(self, child: tuple[subprocess.Popen[str], str]) -> None:
        process, text = child
        process.kill()
        process.wait()
        assert holder.provably_dead(text)

    def test_a_killed_process_nobody_has_reaped_is(self, child: tuple[subprocess.Popen[str], str]) -> None:
        process, text = child
        process.kill()
        until(lambda: state_of(process.pid) == "Z")
        assert holder.provably_dead(text)

    def test_a_stopped_process_is_not(self, child: tuple[subprocess.Popen[str], str]) -> None:
        process, text = child
        process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(process.pid) == "T")
        assert not holder.provably_dead(text)

    def test_a_process_whose_main_thread_alone_has_ended_is_not(self) -> None:
        script = (
            "import ctypes, sys, threading\n"
            "from celery_idem.core import holder\n"
            "threading.Thread(target=sys.stdin.read).start()\n"
            "print(holder.current(), flush=True)\n"
            "ctypes.CDLL(None).pthread_exit(None)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            text = process.stdout.readline().strip()
            try:
                until(lambda: state_of(process.pid) == "Z")
                assert not holder.provably_dead(text)
            finally:
                process.kill()
        assert holder.provably_dead(text)

    def test_a_pid_in_other_hands_is(self, child: tuple[subprocess.Popen[str], str]) -> None:
        _, text = child
        found = holder.parse(text)
        assert found is not None
        assert holder.provably_dead(altered(text, start=str(int(found.start) - 1)))

    def test_this_process_is_not_but_an_earlier_one_with_its_pid_is(self) -> None:
        found = holder.parse(holder.current())
        assert found is not None
        assert not holder.provably_dead(holder.current())
        assert holder.provably_dead(altered(holder.current(), start=str(int(found.start) - 1)))

    def test_this_process_is_not_even_where_its_start_time_has_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Restored from a checkpoint, a process goes on with the identity it once read."""
        before = altered(holder.current(), start="1")
        monkeypatch.setattr(holder._Own, "text", before)
        assert not holder.provably_dead(before)

    @pytest.mark.parametrize(
        "elsewhere",
        [
            {"boot": "00000000-0000-4000-8000-000000000000"},
            {"boot": "-"},
            {"pid_namespace": "4026530000"},
            {"pid_namespace": "-"},
            {"time_namespace": "4026530000"},
            {"time_namespace": "none"},
            {"time_namespace": "-"},
            {"start": "-"},
            {"pid": 2**22 + 1},
            {"pid": 2**31},
            {"pid": 9_999_999_999},
        ],
        ids=str,
    )
    def test_what_cannot_be_compared_is_not(
        self, child: tuple[subprocess.Popen[str], str], elsewhere: dict[str, object]
    ) -> None:
        process, text = child
        process.kill()
        process.wait()
        assert holder.provably_dead(text)
        assert not holder.provably_dead(altered(text, **elsewhere))

    def test_the_host_name_proves_nothing_either_way(self, child: tuple[subprocess.Popen[str], str]) -> None:
        process, text = child
        assert not holder.provably_dead(altered(text, host="elsewhere"))
        process.kill()
        process.wait()
        assert holder.provably_dead(altered(text, host="elsewhere"))

    def test_a_process_we_may_not_signal_is_not(
        self, monkeypatch: pytest.MonkeyPatch, child: tuple[subprocess.Popen[str], str]
    ) -> None:
        def forbidden(pid: int, number: int) -> None:
            raise PermissionError

        process, text = child
        process.kill()
        until(lambda: state_of(process.pid) == "Z")
        monkeypatch.setattr(holder.os, "kill", forbidden)
        assert not holder.provably_dead(text)

    @pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, ValueError, IndexError])
    def test_a_process_we_may_not_read_is_not(
        self,
        monkeypatch: pytest.MonkeyPatch,
        child: tuple[subprocess.Popen[str], str],
        error: type[Exception],
    ) -> None:
        def hidden(pid: int) -> holder._Stat:
            raise error

        _, text = child
        other = altered(text, start="1")
        assert holder.provably_dead(other)
        monkeypatch.setattr(holder, "_stat", hidden)
        assert not holder.provably_dead(other)

    if os.getuid() == 0:  # changing the user takes root

        def test_a_process_of_another_user_is_not(self, child: tuple[subprocess.Popen[str], str]) -> None:
            _, text = child
            pid = os.fork()
            if pid == 0:
                try:
                    os.setuid(65534)
                    os._exit(int(holder.provably_dead(altered(text, start="1"))))
                finally:
                    os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class TestText:
    GOOD = "v1 boot=2dcf0e51-a3cd pidns=4026531836 timens=4026531834 pid=123 start=456 host=web-1"

    def test_every_field_is_read(self) -> None:
        assert holder.parse(self.GOOD) == Holder("2dcf0e51-a3cd", "4026531836", "4026531834", 123, "456", "web-1")

    @pytest.mark.parametrize(
        "garbage",
        [
            None,
            b"v1 boot=a",
            7,
            "",
            "v1",
            "host-a:123",
            GOOD + " ",
            GOOD + "\n",
            " " + GOOD,
            GOOD.replace("v1", "v2"),
            GOOD.replace("pid=123", "pid=0"),
            GOOD.replace("pid=123", "pid=-1"),
            GOOD.replace("pid=123", "pid=0123"),
            GOOD.replace("pid=123", "pid=١٢٣"),
            GOOD.replace("pid=123", "pid=" + "9" * 5000),
            GOOD.replace("start=456", "start=0456"),
            GOOD.replace("start=456", "start=4.56"),
            GOOD.replace("web-1", "web 1"),
            GOOD.replace("web-1", "x" * 65),
            GOOD.replace("web-1", ""),
            "\x00" * 100,
            "v1 " * 100_000,
        ],
        ids=lambda value: ascii(value)[:40],
    )
    def test_garbage_is_nobody_and_never_dead(self, garbage: object) -> None:
        assert holder.parse(garbage) is None
        assert holder.provably_dead(garbage) is False
        assert holder.describe(garbage).startswith("an unreadable holder (")
        assert holder.describe(garbage).isprintable()
        assert len(holder.describe(garbage)) < 100

    def test_people_read_pid_and_host(self) -> None:
        assert holder.describe(self.GOOD) == "pid 123 on host web-1"
        assert holder.describe(self.GOOD.replace("web-1", "-")) == "pid 123"


@pytest.mark.parametrize("name", ["plain", "a b", "a) Z 1 (b", "((", "))", "\n) X"])
def test_the_command_name_cannot_lie_about_state_or_start(name: str, tmp_path: Path) -> None:
    program = tmp_path / name
    program.symlink_to(sys.executable)
    with subprocess.Popen(
        [program, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = holder._stat(process.pid)
        raw = Path(f"/proc/{process.pid}/stat").read_text()
        process.kill()
    assert f"({name})" in raw
    assert stat.state in {"S", "R", "D"}
    assert stat.threads == 1
    assert 0 < int(stat.start) <= time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
