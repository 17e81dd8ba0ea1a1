"""Promela models through spin: generate, compile, run to the end, and read what came of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("spin", "gcc", "libc6-dev")
DEEP = "-m1000000"
MEGABYTES = 1800


@dataclass(frozen=True)
class Job:
    """One run of one model.

    Args:
        flags: the -D names and sizes.
        quick: it breaks after a few steps, so that compiling it well would take longer than running it.
        minutes: where the whole search does not fit: a bitstate search that stops after so many, and says its coverage.
    """

    model: str
    flags: tuple[str, ...] = ()
    minutes: int = 0
    quick: bool = False

    @property
    def title(self) -> str:
        """The flags as they are told."""
        return " ".join(self.flags) or "as it is"


@dataclass(frozen=True)
class Checked:
    """What spin found."""

    job: Job
    states: int
    transitions: int
    depth: int
    seconds: float
    complete: bool
    """Every state was seen; of a bitstate search nobody knows."""
    broken: str
    """The promise that does not hold, and after how many steps; empty where all do."""
    coverage: str = ""


class SpinFailed(RuntimeError):
    """The model could not be generated, compiled or run."""


def install() -> None:
    """Have spin and a C compiler, by apt where they are missing."""
    if not (shutil.which("spin") and shutil.which("gcc")):
        subprocess.run([str(ROOT / "scripts/install-services"), *PACKAGES], check=True)


def check(job: Job, *, seconds: float = 900.0) -> Checked:
    """Search the model; ``SpinFailed`` where that is not possible."""
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        place = Path(folder)
        shutil.copy(HERE / f"{job.model}.pml", place)
        defined = [f"-D{flag}" for flag in job.flags]
        _run(["spin", *defined, "-a", f"{job.model}.pml"], place)
        how = ["-DBITSTATE"] if job.minutes else ["-DCOLLAPSE", f"-DMEMLIM={MEGABYTES}"]
        _run(["gcc", "-O0" if job.quick else "-O2", "-w", "-DSAFETY", *how, "-o", "pan", "pan.c"], place)
        limit = ["-w31", f"-Q{job.minutes}"] if job.minutes else []
        said = _run(["./pan", DEEP, "-n", *limit], place, seconds=seconds)
        return _read(job, said, _promise(job, defined, place))


def _run(command: list[str], place: Path, *, seconds: float = 120.0) -> str:
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=seconds)
    said = ended.stdout + ended.stderr
    if ended.returncode or re.search(r"^(spin|error):.*error", said, re.MULTILINE | re.IGNORECASE):
        raise SpinFailed(f"{' '.join(command)}: {said[-2000:]}")
    return said


def _promise(job: Job, defined: list[str], place: Path) -> str:
    """The name of the assertion that failed: the trail ends at its line."""
    if not (place / f"{job.model}.pml.trail").exists():
        return ""
    replayed = subprocess.run(
        ["spin", *defined, "-t", f"{job.model}.pml"], cwd=place, capture_output=True, text=True, timeout=120
    ).stdout
    found = re.search(r"pml:(\d+), Error: assertion violated", replayed)
    if found is None:
        return "an invalid end: something waits for ever"
    line = (place / f"{job.model}.pml").read_text().splitlines()[int(found[1]) - 1]
    named = re.search(r"assert\((\w+|.*?\))[;)]", line)
    words = line.strip() if named is None else re.sub(r"\(.*", "", named[1])
    return words.replace("_", " ").strip()


def _read(job: Job, said: str, promise: str) -> Checked:
    errors = re.search(r"depth reached (\d+), errors: (\d+)", said)
    states = re.search(r"^\s*([\d.e+]+) states, stored", said, re.MULTILINE)
    transitions = re.search(r"^\s*([\d.e+]+) transitions", said, re.MULTILINE)
    took = re.search(r"elapsed time ([\d.e+]+) seconds", said)
    if not (errors and states and transitions and took):
        raise SpinFailed(f"{job.model} {job.title}: {said[-2000:]}")
    at = re.search(r"at depth (\d+)", said)
    broken = f"{promise}, after {at[1]} steps" if int(errors[2]) and at else ""
    if int(errors[2]) and not broken:
        broken = promise or "an error without a trail"
    factor = re.search(r"hash factor: ([\d.e+]+)", said)
    part = f"part, in {job.minutes} min" if "Search not completed" in said or "time limit" in said else "whole"
    return Checked(
        job=job,
        states=int(float(states[1])),
        transitions=int(float(transitions[1])),
        depth=int(errors[1]),
        seconds=float(took[1]),
        complete=not job.minutes and "Search not completed" not in said and "max search depth too small" not in said,
        broken=broken,
        coverage=f"{part}, bitstate, hash factor {float(factor[1]):.0f}" if factor else "",
    )
