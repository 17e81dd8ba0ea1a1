"""Rules about the app's settings: what is on, where claims are kept, what broker and results do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from celery_idem.app import Runtime, given_settings
from celery_idem.cli_text import duration, one_line
from celery_idem.core.settings import BY_NAME, PREFIX, given_under
from celery_idem.doctor.facts import Facts
from celery_idem.doctor.finding import Finding
from celery_idem.errors import ConfigurationError

Rule = Callable[[Facts], Iterable[Finding]]


_NUMBER = (int, float, type(None))
_READ = {
    "accept_content": (list, tuple, set, frozenset),
    "beat_schedule": (Mapping,),
    "broker_transport_options": (Mapping,),
    "result_backend_transport_options": (Mapping,),
    "result_expires": (*_NUMBER, timedelta),
    "task_soft_time_limit": _NUMBER,
    "task_time_limit": _NUMBER,
}
"""Celery's settings that the rules count with, and what they may be."""


def unreadable(conf: Any) -> Iterator[Finding]:
    """Celery's own settings that are not what Celery takes."""
    for name, kinds in _READ.items():
        value = conf.get(name)
        if not isinstance(value, kinds):
            known = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
            why = "Celery fails where it needs it, and nothing else can be said of this configuration."
            yield Finding("fault", "unreadable", name, f"{value!r:.80}", why, f"{name} = …, a value of type {known}")


def refused(error: ConfigurationError) -> Finding:
    """What a worker does not start with."""
    found, _, change = one_line(error).rpartition(": ")
    return Finding("fault", "refused", "settings", found or change, "A worker refuses to start.", change)


def check_driver(runtime: Runtime) -> None:
    """``ConfigurationError`` where the store's library is not installed; imports it, and connects to nothing."""
    if runtime.store.name not in {"sqlite", "postgresql"}:
        return  # the others are imported where the store is made
    from celery_idem.stores.sql.failures import connecting
    from celery_idem.stores.sql.opening import parsed, with_driver

    try:
        with_driver(parsed(runtime.store_url or "")).get_dialect().import_dbapi()
    except Exception as error:
        raise connecting(error, runtime.store.name, landed=False) from error


def store_findings(runtime: Runtime, found: Iterable[Finding]) -> list[Finding]:
    """What the store says of itself, in the worker's words, but for what was found without asking."""
    if runtime.mode == "off":
        return []
    shared = any(one.rule == "store-on-the-broker" for one in found)
    try:
        warnings = runtime.store.check() if shared else runtime.check_store()
    except ConfigurationError as error:
        return [replace(refused(error), subject="idempotency_store")]
    return [
        Finding("risk", "store", "idempotency_store", found, "It may forget claims or completions.", change or found)
        for found, _, change in (one.partition(": ") for one in warnings)
    ]


def switched_off() -> Finding:
    """The mode that makes all other rules idle."""
    why = "Nothing is claimed, and every duplicate runs."
    return Finding("hint", "mode", "idempotency_mode", "off", why, 'idempotency_mode = "enforce"')


def _mode(facts: Facts) -> Iterator[Finding]:
    if facts.runtime.mode == "observe":
        why = "Every duplicate runs, and the log says what would have been done."
        yield Finding("hint", "mode", "idempotency_mode", "observe", why, 'idempotency_mode = "enforce"')


def _nothing_on(facts: Facts) -> Iterator[Finding]:
    if facts.nothing_on and given_settings(facts.conf):
        yield Finding(
            "risk",
            "nothing-on",
            "task_annotations",
            "no idempotent task",
            "Every duplicate runs: no task that this app imports is switched on.",
            'task_annotations = ("celery_idem:annotation",), or base=IdempotentTask; name task modules in `imports`',
        )


def _unread(facts: Facts) -> Iterator[Finding]:
    for name in sorted(given_under(PREFIX, facts.conf)[1]):
        if name in BY_NAME:
            yield Finding(
                "risk",
                "unread-setting",
                PREFIX + name,
                f"{(PREFIX + name).upper()}, without the prefix that this configuration has",
                "Celery does not read it under that name, so the setting has its default.",
                f"{PREFIX}{name} in small letters, or CELERY_{(PREFIX + name).upper()} under namespace='CELERY'",
            )


def _patterns(facts: Facts) -> Iterator[Finding]:
    for glob in facts.runtime.idle_globs():
        why = "It fits no task, so whatever was meant has other options or none."
        yield Finding("risk", "idle-pattern", "idempotency_tasks", repr(glob), why, f"correct or remove {glob!r}")
    if facts.runtime.lacks_switch:
        yield Finding(
            "risk",
            "no-switch",
            "task_annotations",
            "idempotency_tasks is set, celery_idem:annotation is not named",
            "Only tasks with base=IdempotentTask are switched on.",
            'task_annotations = ("celery_idem:annotation",)',
        )


def _memory_store(facts: Facts) -> Iterator[Finding]:
    url = facts.runtime.store_url or ""
    if url.startswith("memory:") and facts.broker != "memory" and not facts.conf.task_always_eager:
        yield Finding(
            "fault",
            "memory-store",
            "idempotency_store",
            f"memory://, broker {facts.broker}",
            "Each process remembers its own records only, so a duplicate in another process runs.",
            'idempotency_store = "redis://localhost/2"',
        )


def _file_store(facts: Facts) -> Iterator[Finding]:
    if (facts.runtime.store_url or "").startswith("sqlite:") and facts.broker_is_remote:
        yield Finding(
            "risk",
            "file-store",
            "idempotency_store",
            f"a SQLite file, and {facts.broker} on another machine as broker",
            "Workers on two machines have two files, and a duplicate on the other machine runs.",
            'idempotency_store = "postgresql+psycopg2://user@host/db", unless all workers are on one machine',
        )


def _deduplicates_twice(facts: Facts) -> Iterator[Finding]:
    late = any(task.acks_late for task in facts.tasks)
    if facts.conf.worker_deduplicate_successful_tasks and facts.keeps_results and late:
        yield Finding(
            "fault",
            "deduplicated-twice",
            "worker_deduplicate_successful_tasks",
            "True",
            "Celery drops a redelivered message from its result backend before celery_idem is asked, so a chord part "
            "whose worker died is never counted.",
            "worker_deduplicate_successful_tasks = False",
        )


def _unconfirmed(facts: Facts) -> Iterator[Finding]:
    if facts.broker == "amqp" and facts.tasks and not facts.runtime.confirms_publishes():
        yield Finding(
            "risk",
            "unconfirmed-publish",
            "broker_transport_options",
            "no confirm_publish, broker amqp",
            "A connection that breaks may take a chain's next step with it, and nobody is told.",
            'broker_transport_options["confirm_publish"] = True',
        )


def _visibility_elsewhere(facts: Facts) -> Iterator[Finding]:
    elsewhere = {
        "visibility_timeout": facts.conf.get("visibility_timeout"),
        "result_backend_transport_options": (facts.conf.result_backend_transport_options or {}).get(
            "visibility_timeout"
        ),
    }
    for where, said in elsewhere.items():
        if isinstance(said, (int, float)) and facts.visibility is not None and float(said) != facts.visibility:
            yield Finding(
                "risk",
                "visibility-elsewhere",
                where,
                f"visibility_timeout {duration(float(said))} there, {duration(facts.visibility)} for the broker",
                "Messages are given to other workers by what broker_transport_options say; this does nothing.",
                f'broker_transport_options["visibility_timeout"] = {said}',
            )


TRANSPORT_OPTIONS = frozenset(
    """
    ack_emulation client_name confirm_publish connect_retries_timeout connect_timeout failover_strategy fanout_patterns
    fanout_prefix global_keyprefix health_check_interval heartbeat interval_max interval_start interval_step
    login_method master_name max_connections max_retries min_other_sentinels polling_interval predefined_queues
    priority_steps queue_name_prefix queue_order_strategy read_timeout region retry_on_timeout retry_policy sep
    sentinel_kwargs socket_connect_timeout socket_keepalive socket_keepalive_options socket_timeout unacked_index_key
    unacked_key unacked_mutex_expire unacked_mutex_key unacked_restore_interval unacked_restore_limit
    unacked_restore_throttle visibility_timeout wait_time_seconds write_timeout
    """.split()  # noqa: SIM905  one a line would be a page
)
"""What kombu's transports are told most. Another word is told only where it looks like one of these."""


def _misspelt_option(facts: Facts) -> Iterator[Finding]:
    for option in facts.options:
        near = get_close_matches(str(option), TRANSPORT_OPTIONS, n=1, cutoff=0.85)
        if near and option not in TRANSPORT_OPTIONS:
            why = "A transport leaves what it does not know aside, so the option has its default."
            change = f"broker_transport_options[{near[0]!r}] = {facts.options[option]!r}"
            yield Finding("risk", "misspelt-option", "broker_transport_options", repr(option), why, change)


def _store_on_the_broker(facts: Facts) -> Iterator[Finding]:
    if facts.shared_redis:
        yield Finding(
            "risk",
            "store-on-the-broker",
            "idempotency_store",
            f"{facts.shared_redis}, where the broker is as well",
            "A full queue takes the memory of the records, and one outage takes both.",
            'idempotency_store = "redis://a-redis-of-its-own/0"',
        )


def _eager(facts: Facts) -> Iterator[Finding]:
    if facts.conf.task_always_eager and facts.broker != "memory":
        why = "Every call runs where it is made, in the publisher; no worker ever gets a message."
        yield Finding("hint", "always-eager", "task_always_eager", "True", why, "task_always_eager = False")


def _pool(facts: Facts) -> Iterator[Finding]:
    if str(facts.conf.worker_pool) == "eventlet":
        why = "It is not tested: renewals stop while a body computes, and no lost lease ends it."
        yield Finding("hint", "pool-not-tested", "worker_pool", "eventlet", why, 'worker_pool = "gevent", or "threads"')


def _results_before_redelivery(facts: Facts) -> Iterator[Finding]:
    expires, visibility = facts.result_expires, facts.visibility
    if facts.keeps_results and expires and visibility and expires < visibility and facts.tasks:
        yield Finding(
            "risk",
            "results-before-redelivery",
            "result_expires",
            f"{duration(expires)}, visibility timeout {duration(visibility)}",
            "When a killed worker's message comes back, the results its chord waits for are gone.",
            f"result_expires = {int(visibility) * 2}",
        )


RULES: tuple[Rule, ...] = (
    _mode,
    _nothing_on,
    _unread,
    _patterns,
    _memory_store,
    _file_store,
    _deduplicates_twice,
    _unconfirmed,
    _visibility_elsewhere,
    _misspelt_option,
    _store_on_the_broker,
    _eager,
    _pool,
    _results_before_redelivery,
)
