"""The tables of ``make chaos``, and which of its promises a run broke."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.campaigns.report import table
from tests.chaos.house import LEASE, VISIBLE
from tests.chaos.run import Run
from tests.chaos.storm import KILLS

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
- *Completions not recorded*: the store was silent for a whole lease after the body had ended, as under a partition.
  The value went on to Celery all the same (event `COMPLETE_FAILED`). As long as its process lives, the worker then
  records it in the background when the store is back (`COMPLETED_LATE`), and these are *recorded late*. What is not
  recorded lost its process first, or was overtaken: a later duplicate would run, or did.
- *Lost*: published, and not completed when nothing has moved for 45 s and no fault is left; also what a living worker
  holds and does not run.
- *Lost by the broker's client*: by Redis's own log (its append-only file) the broker popped the message for a worker
  that never noted it as unacked. kombu's Redis transport does the two in two steps, and what a dead worker or a cut
  connection leaves between them is gone, with any Celery; RabbitMQ has no such gap.
- Result backend and the resource of the effects are not hurt, and are reached by Unix sockets. The Redis broker's
  visibility timeout is VISIBLE s and is swept each second; `idempotency_max_deliveries` is 100.
"""


def tables(runs: Sequence[Run], *, left_out: str) -> str:
    """What was done and what came of it, a column for each system."""
    header = ["", *(run.system.title for run in runs)]
    parts = [table(header, _lines(runs, _done)), table(header, _lines(runs, _found))]
    parts.append(NOTES.strip().replace("LEASE", f"{LEASE:g}").replace("VISIBLE", f"{VISIBLE:g}"))
    if left_out:
        parts.append(f"**No network was partitioned in this run: {left_out}.**")
    return "\n\n".join(parts)


def _lines(runs: Sequence[Run], counts: Callable[[Run], dict[str, Any]]) -> list[list[Any]]:
    columns = [counts(run) for run in runs]
    return [[name, *(column[name] for column in columns)] for name in (columns[0] if columns else ())]


def _done(run: Run) -> dict[str, Any]:
    verdict, of = run.verdict, run.verdict.faults
    return {
        "seconds of storm": round(run.plan.seconds),
        "messages published": verdict.messages,
        "bodies begun": verdict.bodies,
        "kills": sum(of[name] for name in KILLS),
        "stops": of["stop"],
        "restarts of store, of broker": f"{of['store restart']}, {of['broker restart']}",
        "cuts of store, of broker": f"{of['store cut before'] + of['store cut after']}, {of['broker cut']}",
        "partitions": of["partition"],
        "clock steps": of["clock step"],
        "workers that died by themselves": run.died,
        "faults with work in flight, idle": f"{verdict.hit}, {verdict.idle}",
        "bodies running when and where a fault struck": verdict.struck,
    }


def _found(run: Run) -> dict[str, Any]:
    verdict, fenced = run.verdict, run.system.idempotent
    return {
        "lost": len(verdict.lost),
        "lost by the broker's client": len(verdict.dropped),
        "effects doubled, explained": verdict.explained,
        "effects doubled, not explained": len(verdict.unexplained),
        "of these, published twice": verdict.twice,
        "overlaps": len(verdict.overlaps),
        "completed twice": len(verdict.completions),
        "completions not recorded": verdict.unrecorded if fenced else "no store",
        "of these, completed by another run": verdict.contradicted if fenced else "no store",
        "completions recorded late": verdict.late if fenced else "no store",
        "old holder's effects accepted": len(verdict.stale) if fenced else "no fence",
        "old holder's effects refused": verdict.refused if fenced else "no fence",
        "continuations missing": len(verdict.missing),
        "continuations doubled": len(verdict.doubled),
        "answered from the record": verdict.replayed if fenced else "no store",
    }


def promises(runs: Sequence[Run]) -> list[str]:
    """What celery_idem broke; the bare systems promise nothing."""
    return [f"{run.system.name}: {line}" for run in runs if run.system.idempotent for line in run.verdict.broken]


def weak_storms(runs: Sequence[Run]) -> list[str]:
    """Which storms mostly struck where no body ran, so that they showed little; no promise is broken by that."""
    found = []
    for run in runs:
        hit, idle = run.verdict.hit, run.verdict.idle
        if hit < idle:
            text = f"{idle} of {hit + idle} faults met no work in flight; give it more --seconds or --rate"
            found.append(f"WEAK STORM: {run.system.name}: {text}")
    return found
