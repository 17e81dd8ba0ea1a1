"""Driver errors in the library's words, and hashes as records."""

from __future__ import annotations

from typing import Any

import pytest
from redis import exceptions

from celery_idem.core.records import DAY, GRACE, NOTES_KEPT, Answer, Kind, Note, Right, State
from celery_idem.stores.redis.rows import FIELDS, Unreadable, note_of, pairs_of, whole_record
from celery_idem.stores.redis.scripts import VERBS, script
from celery_idem.stores.redis.wire import code_of, unavailable

REFUSALS = [
    (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "LOADING"),
    (exceptions.ReadOnlyError("You can't write against a read only replica."), "READONLY"),
    (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "OOM"),
    (exceptions.NoPermissionError("this user has no permissions to run the 'evalsha' command"), "NOPERM"),
    (exceptions.AuthenticationError("Authentication required."), "NOAUTH"),
    (exceptions.AuthenticationError("WRONGPASS invalid username-password pair"), "WRONGPASS"),
    (exceptions.ResponseError("WRONGPASS invalid username-password pair"), "WRONGPASS"),
    (exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "MISCONF"),
    (exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."), "NOREPLICAS"),
    (exceptions.ResponseError("BUSY Redis is busy running a script."), "BUSY"),
    (exceptions.ResponseError("CLUSTERDOWN Hash slot not served"), "CLUSTERDOWN"),
    (exceptions.ResponseError("Error running script (call to f_ab): @user_script:9: -READONLY You can't"), "READONLY"),
    (exceptions.ResponseError("Error running script: @user_script: 9: -OOM command not allowed"), "OOM"),
    (exceptions.ResponseError("Protocol error: unauthenticated multibulk length"), "NOAUTH"),
    (exceptions.ResponseError("MASTERDOWN Link with MASTER is down"), "MASTERDOWN"),
    (exceptions.ResponseError("MOVED 3999 127.0.0.1:6381"), "MOVED"),
    (exceptions.MaxConnectionsError("Too many connections"), "POOL"),
    (exceptions.ConnectionError("max number of clients reached"), "CLIENTS"),
    (exceptions.ResponseError("DB index is out of range"), "DB"),
    (exceptions.ResponseError("SELECT is not allowed in cluster mode"), "DB"),
]


@pytest.mark.parametrize(("error", "code"), REFUSALS, ids=[code for _, code in REFUSALS])
def test_what_the_server_refused_has_not_landed(error: Exception, code: str) -> None:
    assert code_of(error) == code
    assert unavailable(error, sent=True).may_have_landed is False
    assert unavailable(error, sent=True, before=True).may_have_landed is True
    said = str(unavailable(error, sent=True))
    assert said.startswith("redis refused: ")
    assert said.count(": ") == 2  # who, what, and the next step
    assert "check that it runs" not in said


@pytest.mark.parametrize(
    "error",
    [
        exceptions.TimeoutError("Timeout reading from socket"),
        exceptions.ConnectionError("Connection closed by server."),
        exceptions.ResponseError("ERR user_script:3: something this release got wrong"),
        exceptions.InvalidResponse("Protocol Error: b'?'"),
        ConnectionResetError(104, "Connection reset by peer"),
    ],
)
def test_what_was_sent_and_not_answered_may_have_landed(error: Exception) -> None:
    assert unavailable(error, sent=True).may_have_landed is True
    assert unavailable(error, sent=False).may_have_landed is False
    assert "check that it runs" in str(unavailable(error, sent=True))


def test_the_scripts_share_their_constants_with_the_records() -> None:
    for verb in VERBS:
        first = script(verb).text.split(b"\n", 1)[0].decode()
        assert first == f"local VERSION, DAY, GRACE, KEPT = 1, {DAY:.0f}, {GRACE:.0f}, {NOTES_KEPT}"
        assert len(script(verb).sha) == 40
        assert script(verb) is script(verb)
    common = script("claim").text.decode()
    listed = common.split("local FIELDS = {", 1)[1].split("}", 1)[0]
    assert tuple(name.strip(" '\n") for name in listed.split(",") if name.strip()) == FIELDS


def stored(**changes: bytes | None) -> dict[bytes, bytes]:
    fields: dict[str, bytes | None] = dict.fromkeys(FIELDS[:17], b"1")
    fields |= {"state": b"COMPLETED", "answer": b"RECLAIMED", "kind": b"RESULT", "unknown": b"0", **changes}
    return {name.encode(): value for name, value in fields.items() if value is not None}


def test_a_hash_becomes_a_record() -> None:
    note = b'{"over":3,"successor":[4,17.25],"parked":[3,2],"continuing":{"token":"t","fence":1796016092905847,'
    note += b'"holder":"h/\\u00e9","until":1796016122.905847},"settled":true,"at":9,"unknown to us":[]}'
    pairs = {**stored(fence=b"1796016092905847", claimed=b"1.5e3", body=b"\xff"), b"m:\xc3\xbc": note, b"new": b"x"}
    record = whole_record("k", pairs)
    assert (record.state, record.answer, record.fence, record.claimed_at) == (
        *(State.COMPLETED, Answer.RECLAIMED, 1796016092905847, 1500.0),
    )
    assert record.outcome is not None
    assert (record.outcome.kind, record.outcome.encoded.body) == (Kind.RESULT, b"\xff")  # type: ignore[union-attr]
    right = Right("t", 1796016092905847, "h/é", 1796016122.905847)
    assert record.notes == {"ü": Note(3, (4, 17.25), (3, 2), right, settled=True, at=9.0)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fence", b"1.0"),
        ("attempts", b" 1"),
        ("claimed", b"1_0"),
        ("expires", b"1e999"),
        ("kind", None),
        ("token", None),
    ],
)
def test_odd_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(Unreadable, match=field):
        whole_record("k", stored(**{field: value}))


def test_notes_are_read_strictly() -> None:
    assert note_of("m", b'{"over":1.0,"at":1}') == Note(over=1, at=1.0)
    for text in (b'{"over":true,"at":1}', b'{"over":1,"at":Infinity}', b"\xff", b"[" * 100_000):
        with pytest.raises(Unreadable):
            note_of("m", text)


def test_answers_of_both_protocols_read_alike() -> None:
    assert pairs_of([b"a", b"1", b"b", b"2"]) == pairs_of({b"a": b"1", b"b": b"2"}) == {b"a": b"1", b"b": b"2"}
