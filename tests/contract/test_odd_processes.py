"""Processes that Python knows nothing of, and verbs that are cut off in the middle: nobody gets another's answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPERATION = """
import os, sys
from celery_idem.core.codec import decode_value, encode_value
from celery_idem.core.records import Kind, Outcome
from celery_idem.stores.base import open_store
from tests.support.operations import key_for, op
"""
FORKED_IN_C = (
    OPERATION
    + """
import ctypes
store = open_store(sys.argv[1])
store.create_schema()
store.get(key_for("warm"))
child = ctypes.PyDLL(None).fork()  # as uWSGI does it: no hook of Python's runs
wrong = 0
for number in range(300):
    name = f"{'child' if child == 0 else 'parent'} {number}"
    claim = store.claim(op(name, name), lease=30, ttl=60).claim
    store.complete(claim, Outcome(Kind.RESULT, encode_value(name, "json", max_bytes=1000)))
    wrong += decode_value(store.get(key_for(name)).outcome.encoded) != name
if child == 0:
    os._exit(wrong)
sys.exit(wrong or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)
KILLED_GREENLETS = (
    "import gevent.monkey; gevent.monkey.patch_all(); import gevent\n"
    + OPERATION
    + """
store = open_store(sys.argv[1])
store.create_schema()
killed = 0
for number in range(200):
    verb = gevent.spawn(store.claim, op(f"cut {number}"), lease=30, ttl=60)
    gevent.sleep(0.0001 * (number % 40))
    killed += not verb.ready()
    verb.kill()  # a hard time limit, or a revoke with terminate
    decision = store.claim(op(f"whole {number}"), lease=30, ttl=60)
    assert (decision.record.key, decision.answer.value) == (key_for(f"whole {number}"), "ACQUIRED")
assert killed, "none was cut off in the middle"
"""
)


def run(script: str, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, url], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.redis
def test_a_process_forked_in_c_has_redis_connections_of_its_own(redis_url: str) -> None:
    run(FORKED_IN_C, redis_url)


@pytest.mark.postgres
def test_a_process_forked_in_c_has_postgresql_connections_of_its_own(postgres_url: str) -> None:
    run(FORKED_IN_C, postgres_url)


@pytest.mark.redis
def test_a_greenlet_killed_in_a_verb_leaves_redis_to_the_next(redis_url: str) -> None:
    run(KILLED_GREENLETS, redis_url)


@pytest.mark.postgres
def test_a_greenlet_killed_in_a_verb_leaves_postgresql_to_the_next(postgres_url: str) -> None:
    """By psycopg 3: psycopg2 waits in C, where no greenlet is switched."""
    run(KILLED_GREENLETS, postgres_url.replace("psycopg2", "psycopg"))
