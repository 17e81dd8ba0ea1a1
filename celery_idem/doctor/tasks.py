"""Rules about each idempotent task: its acks, time limits, retries and policy, against what the broker does."""

from __future__ import annotations

from collections.abc import Iterator

from celery_idem.cli_text import duration
from celery_idem.core.policy import Policy
from celery_idem.doctor.facts import Facts
from celery_idem.doctor.finding import Finding, Severity
from celery_idem.doctor.schedule import needs_its_slot
from celery_idem.doctor.settings import Rule
from celery_idem.parking import time_limits
from celery_idem.task import Idempotent
from celery_idem.unclaimed import unclaimed
from celery_idem.verifying import misfit, wanted

MARGIN = 60
"""Seconds added to what a timeout has to outlast, in the line that is proposed."""
LONG_LEASE = 600.0
"""Seconds; leases are renewed while a body runs, so none has to be as long as the body."""
LONG_WAIT = 5.0
"""Seconds; a run that has not ended by then is better waited for on the broker."""


def _of(task: Idempotent, severity: Severity, rule: str, found: str, why: str, change: str) -> Finding:
    return Finding(severity, rule, "task", found, why, change, (str(task.name),))


def _each(facts: Facts) -> Iterator[tuple[Idempotent, Policy]]:
    for task in facts.tasks:
        yield task, facts.runtime.policy_of(task)


# --- acks ------------------------------------------------------------------------------------------------------------


def _acks(facts: Facts) -> Iterator[Finding]:
    for task in facts.tasks:
        if not task.acks_late:
            yield _acked_early(facts, task)
        elif not _given_back(facts, task):
            why = "Celery acks the message of a child that was killed, so no copy ever takes over from it."
            change = "task_reject_on_worker_lost = True"
            yield _of(task, "risk", "lost-with-child", "acks_late True, reject_on_worker_lost False", why, change)


def _acked_early(facts: Facts, task: Idempotent) -> Finding:
    """A risk where a setting says so; where the task itself does, at most once may be what is meant."""
    severity: Severity = "risk"
    if facts.annotated(task, "acks_late"):
        found, change = "acks_late False in task_annotations", "take acks_late out of task_annotations"
    elif task.always_idempotent or facts.conf.task_acks_late:
        severity = "hint"
        found, change = "acks_late=False of its own", "leave acks_late out, unless at most once is what you want"
    else:
        found, change = "acks_late False", "task_acks_late = True and task_reject_on_worker_lost = True"
    why = "The message is acked before the body runs, so a crash loses it, and nothing is left to run once."
    return _of(task, severity, "acked-early", found, why, change)


def _given_back(facts: Facts, task: Idempotent) -> bool:
    """Whether a killed child's message runs again, or the task's own class says that it must not."""
    retried = facts.conf.get("task_retry_on_worker_lost", False) or getattr(task, "retry_on_worker_lost", False)
    return bool(task.reject_on_worker_lost or retried or task.always_idempotent)


def _unclaimed(facts: Facts) -> Iterator[Finding]:
    for name, found, why, change in unclaimed(facts.runtime):
        yield Finding("risk", "not-claimed", "task", found, why, change, (name,))


# --- how long a message is out ---------------------------------------------------------------------------------------


def _long_body(facts: Facts) -> Iterator[Finding]:
    out = facts.unkept
    for task in facts.tasks:
        limit = facts.limit(task)
        if out and limit and limit > out and task.acks_late:
            yield _of(
                task,
                "risk",
                "longer-than-visibility",
                f"time limit {duration(limit)}, visibility timeout {duration(out)}",
                "While the body still runs, its message is given to another worker, again and again.",
                _outlast(facts, limit),
            )


def _full_prefetch(facts: Facts) -> Iterator[Finding]:
    out, multiplier = facts.unkept, int(facts.conf.worker_prefetch_multiplier)
    if not out or multiplier == 1 or facts.conf.get("worker_disable_prefetch", False):
        return
    for task in facts.tasks:
        limit = facts.limit(task)
        if limit and limit <= out and (multiplier == 0 or multiplier * limit > out):
            held = f"{multiplier} messages per process" if multiplier else "any number of messages"
            yield _of(
                task,
                "risk",
                "prefetched-too-long",
                f"{held}, time limit {duration(limit)}, visibility timeout {duration(out)}",
                "The last prefetched message may wait longer than that, and is given to another worker meanwhile.",
                "worker_prefetch_multiplier = 1",
            )


def _long_retry(facts: Facts) -> Iterator[Finding]:
    out = facts.unkept
    for task in facts.tasks:
        delay = facts.longest_retry(task)
        if out and delay > out:
            yield _of(
                task,
                "risk",
                "retry-longer-than-visibility",
                f"retries up to {duration(delay)} later, visibility timeout {duration(out)}",
                "A retry waits for its time in a worker, and after the timeout in every worker.",
                _outlast(facts, delay),
            )


def _consumer_timeout(facts: Facts) -> Iterator[Finding]:
    if facts.broker != "amqp":
        return
    for task in facts.tasks:
        timeout, said_by = facts.consumer_timeout(task)
        limit, delay = facts.limit(task) or 0.0, facts.longest_retry(task)
        held = max(limit if task.acks_late else 0.0, delay if facts.delays_in_worker else 0.0)
        if held > timeout:
            most = int(held + MARGIN) * 1000
            known = "rabbitmqctl eval 'application:get_env(rabbit, consumer_timeout).'"
            yield _of(
                task,
                "risk" if said_by else "hint",
                "longer-than-consumer-timeout",
                f"unacked for up to {duration(held)}, {said_by or 'RabbitMQ by default'} {duration(timeout)}",
                "RabbitMQ closes the channel of a consumer that acks later, and gives its messages to others.",
                f'queue_arguments={{"x-consumer-timeout": {most}}}'
                if said_by
                else f"consumer_timeout = {most} in rabbitmq.conf, unless `{known}` shows as much",
            )


def _outlast(facts: Facts, seconds: float) -> str:
    if facts.broker == "redis":
        return "idempotency_keep_visible = True"
    return f'broker_transport_options["visibility_timeout"] = {int(seconds) + MARGIN}'


# --- time limits -----------------------------------------------------------------------------------------------------


def _limits(facts: Facts) -> Iterator[Finding]:
    for task in facts.tasks:
        hard, soft = time_limits(task)
        if hard and soft and hard <= soft:
            yield _of(
                task,
                "risk",
                "soft-limit-too-late",
                f"soft limit {duration(soft)}, hard limit {duration(hard)}",
                "The process is killed before the soft limit can raise, so each time its outcome is unknown.",
                f"time_limit={int(soft) + MARGIN}",
            )


def _soft_shutdown(facts: Facts) -> Iterator[Finding]:
    patience = float(facts.conf.get("worker_soft_shutdown_timeout", 0) or 0)
    for task, policy in _each(facts):
        limit = facts.limit(task)
        if patience and limit and limit > patience and policy.verify is None:
            yield _of(
                task,
                "hint",
                "cut-by-shutdown",
                f"time limit {duration(limit)}, worker_soft_shutdown_timeout {duration(patience)}",
                "A soft shutdown cuts a body that takes longer, and the next run is told that an outcome is unknown.",
                f"worker_soft_shutdown_timeout = {int(limit) + MARGIN}, or give the task `verify=`",
            )


# --- the policy ------------------------------------------------------------------------------------------------------


def _short_lease(facts: Facts) -> Iterator[Finding]:
    timeout = float(facts.runtime.settings["store_timeout"])
    for task, policy in _each(facts):
        if policy.lease <= 2 * timeout:
            yield _of(
                task,
                "risk",
                "lease-too-short",
                f"lease {duration(policy.lease)}, store_timeout {duration(timeout)}",
                "One renewal that gets no answer may cost a living run its lease, for the next one comes too late.",
                f"Policy(lease={6 * timeout:g}), or idempotency_store_timeout = {policy.lease / 6:.2g}",
            )


def _long_lease(facts: Facts) -> Iterator[Finding]:
    for task, policy in _each(facts):
        if policy.lease > LONG_LEASE:
            why = "The keys of a host that is lost wait for as long, and no message of theirs runs meanwhile."
            yield _of(task, "hint", "lease-long", f"lease {duration(policy.lease)}", why, "Policy(lease=60)")


def _long_wait(facts: Facts) -> Iterator[Finding]:
    for task, policy in _each(facts):
        if policy.wait_timeout > LONG_WAIT:
            why = "Each duplicate blocks a slot of its worker for as long, and then parks all the same."
            found = f"wait_timeout {duration(policy.wait_timeout)}"
            yield _of(task, "hint", "waits-in-slot", found, why, "Policy(wait_timeout=1)")


def _short_ttl(facts: Facts) -> Iterator[Finding]:
    out = facts.visibility
    for task, policy in _each(facts):
        if out and task.acks_late and 0 < policy.ttl <= out:  # what was acked before it ran does not come back
            by_message = facts.key_kind(task) == "message"
            yield _of(
                task,
                "fault" if by_message else "risk",
                "forgotten-before-redelivery",
                f"ttl {duration(policy.ttl)}, visibility timeout {duration(out)}",
                "A worker that dies between completion and ack leaves a message that comes back when its record is "
                "gone, and runs again.",
                _longer_ttl(facts, task),
            )


def _forgotten_before_retry(facts: Facts) -> Iterator[Finding]:
    for task, policy in _each(facts):
        delay = facts.longest_retry(task)
        if 0 < policy.ttl <= delay and facts.key_kind(task) != "message":
            yield _of(
                task,
                "risk",
                "forgotten-before-retry",
                f"ttl {duration(policy.ttl)}, retries up to {duration(delay)} later",
                "Another message of the key may complete while the retry waits, and be forgotten before it comes.",
                _longer_ttl(facts, task),
            )


def _longer_ttl(facts: Facts, task: Idempotent) -> str:
    """The line that outlasts both redelivery and retries, and keeps a beat task from becoming a replay by it."""
    redelivered = facts.visibility if task.acks_late else 0
    ttl = 2 * int(max(redelivered or 0, facts.longest_retry(task)))
    if needs_its_slot(facts, task, ttl):
        return f"let the key name the slot (choose-a-key.md, on beat), and only then Policy(ttl={ttl})"
    unless = ", unless the ttl is what lets the next slot run" if facts.key_kind(task) == "function" else ""
    return f"Policy(ttl={ttl}){unless}"


def _results_before_record(facts: Facts) -> Iterator[Finding]:
    expires = facts.result_expires
    for task, policy in _each(facts):
        if facts.keeps_results and expires and expires < policy.ttl and not task.ignore_result:
            yield _of(
                task,
                "hint",
                "result-before-record",
                f"result_expires {duration(expires)}, ttl {duration(policy.ttl)}",
                "In between, AsyncResult(id).get() of the first message waits for ever, while a new message of the key "
                "still gets the value.",
                f"result_expires = {int(policy.ttl)}",
            )


def _unkept_value(facts: Facts) -> Iterator[Finding]:
    for task, policy in _each(facts):
        if policy.on_replay is not None and (task.ignore_result or not facts.conf.result_backend):
            yield _of(
                task,
                "risk",
                "value-not-kept",
                "on_replay is set, the result is ignored",
                "Of a result that nobody reads no value is kept, so on_replay gets None.",
                "ignore_result=False and a result_backend, or no on_replay",
            )


def _fail_open(facts: Facts) -> Iterator[Finding]:
    for task, policy in _each(facts):
        if policy.storage_policy == "fail_open":
            why, change = "While the store is away, duplicates run.", 'Policy(storage_policy="fail_closed")'
            yield _of(task, "hint", "fail-open", "storage_policy fail_open", why, change)


def _verify(facts: Facts) -> Iterator[Finding]:
    """What a worker does not refuse: it takes the arguments, but not under the task's names."""
    for task, policy in _each(facts):
        found = "" if policy.verify is None else misfit(task, policy.verify)[1]
        if found:
            yield _of(
                task,
                "risk",
                "verify-takes-other-arguments",
                found,
                "It is called with the task's arguments as the message has them; where it cannot take them, the "
                "outcome stays unknown.",
                wanted(task),
            )


RULES: tuple[Rule, ...] = (
    _acks,
    _unclaimed,
    _long_body,
    _full_prefetch,
    _long_retry,
    _consumer_timeout,
    _limits,
    _soft_shutdown,
    _short_lease,
    _long_lease,
    _long_wait,
    _short_ttl,
    _forgotten_before_retry,
    _results_before_record,
    _unkept_value,
    _fail_open,
    _verify,
)
