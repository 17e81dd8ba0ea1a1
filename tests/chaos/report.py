"""The tables of ``make chaos``, and which of its promises a run broke."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.campaigns.report import table
from tests.chaos.house import LEASE, VISIBLE
from tests.chaos.run import Run
from tests.chaos.storm import KILLS

DONE = (
    "system",
    "seconds",
    "messages",
    "bodies",
    "kills",
    "stops",
    "restarts",
    "cuts",
    "partitions",
    "clock steps",
    "died by themselves",
)
FOUND = (
    "system",
    "lost",
    "lost by the broker's client",
    "effects doubled, explained",
    "unexplained (published twice)",
    "overlaps",
)
MORE = ("completed twice", "old holder's effects accepted", "refused", "continuations missing", "doubled")

NOTES = """
Five workers (two prefork, threads, gevent, solo) under the load and the faults of one seed: plain tasks by key and
by message, some published twice, retries, chains, links, chords, and bodies longer than the lease of LEASE s.

- *Kills* are SIGKILLs of a pool child, of a whole worker, and of its main process. *Stops* are SIGSTOPs of a worker
  for longer than a lease, every fourth until the broker has given its messages to others; *partitions* do the same
  to the network of one worker. *Restarts* SIGKILL the store or the broker, which keep what they confirmed (Redis
  appendfsync always, PostgreSQL fsync). *Cuts* refuse connections, or let requests through and lose the replies.
  *Clock steps* shift `time.time` of a worker by 15 s; what reads the clock in C, such as `datetime.now`, is not
  moved, and the store's own clock never is. *Died by themselves* are workers that Celery ended after a fault; they
  were started again. Bare Celery has no store to hurt, so the same schedule has fewer faults there.
- *Explained*: the process was killed, stopped or cut off between the effect and its completion. An *overlap* is a
  second body while the first one's lease lives; without leases, any two bodies of a key at once. An *old holder's
  effect* comes after its successor has shown a higher fence; *refused* counts those that the resource turned away
  for it.
- *Lost by the broker's client*: a copy was published, nobody acked it, and the broker would not give it away any
  more. kombu's Redis transport pops a message and notes it as unacked in two steps, and what dies between them is
  gone; so is it for bare Celery. RabbitMQ has no such gap.
- Result backend and the resource of the effects are not hurt, and are reached by Unix sockets. The Redis broker's
  visibility timeout is VISIBLE s and is swept each second; `idempotency_max_deliveries` is 100.
"""


def tables(runs: Sequence[Run], *, left_out: str) -> str:
    """What was done, and what came of it."""
    parts = [table([*DONE, "with work in flight", "idle", "bodies hit"], [_done(run) for run in runs])]
    parts.append(table([*FOUND, *MORE], [_found(run) for run in runs]))
    parts.append(NOTES.strip().replace("LEASE", f"{LEASE:g}").replace("VISIBLE", f"{VISIBLE:g}"))
    if left_out:
        parts.append(f"**No network was partitioned in this run: {left_out}.**")
    return "\n\n".join(parts)


def _done(run: Run) -> list[Any]:
    verdict, of = run.verdict, run.verdict.faults
    cuts = of["store cut before"] + of["store cut after"] + of["broker cut"]
    kills = sum(of[name] for name in KILLS)
    counts = [
        kills,
        of["stop"],
        of["store restart"] + of["broker restart"],
        cuts,
        of["partition"],
        of["clock step"],
        run.died,
    ]
    row = [run.system.title, round(run.plan.seconds), verdict.messages, verdict.bodies, *counts]
    return [*row, verdict.hit, verdict.idle, verdict.struck]


def _found(run: Run) -> list[Any]:
    verdict, fenced = run.verdict, run.system.idempotent
    effects = [verdict.explained, f"{len(verdict.unexplained)} ({verdict.twice})"]
    old = [len(verdict.stale), verdict.refused] if fenced else ["no fence", "no fence"]
    rest = [len(verdict.missing), len(verdict.doubled)]
    lost = [len(verdict.lost), len(verdict.dropped)]
    return [run.system.title, *lost, *effects, len(verdict.overlaps), len(verdict.completions), *old, *rest]


def promises(runs: Sequence[Run]) -> list[str]:
    """What celery_idem broke; the bare systems promise nothing."""
    broken = [f"{run.system.name}: {line}" for run in runs if run.system.idempotent for line in run.verdict.broken]
    idle = [run for run in runs if run.verdict.hit < run.verdict.idle]
    return broken + [f"{run.system.name}: {run.verdict.idle} faults found no work in flight" for run in idle]
