"""``celery governed`` on a ledger file: what each command says, in text and JSON, and how it refuses."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_idem import cli_governed
from celery_idem.app import runtime_of
from celery_idem.cli_governed_text import readable_json
from celery_idem.governed import generate_key
from celery_idem.governed.chain import governance_of
from celery_idem.governed.records import ACTION_STATES
from tests.governed.ledgers import OWNER, Ledger, approval, at, dispatched, gated, lease, look, proposed, unresolved
from tests.governed.refunds import REFUND, SECRET, Office

pytest_plugins = ("tests.governed.refunds",)

NASTY = "\x1b[2J\x9b1m\u202egpj\x7f"
"""What clears a screen, colours it, and writes from right to left."""
UNSAFE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


class Shell:
    """``celery -A app governed`` on an app."""

    def __init__(self, app: Celery) -> None:
        self.app = app

    def __call__(self, *words: str, exit_code: int = 0, answer: str | None = None) -> Result:
        obj = CLIContext(app=self.app, no_color=True, workdir=None)
        result = CliRunner().invoke(cli_governed.governed, words, obj=obj, input=answer, prog_name="governed")
        assert result.exit_code == exit_code, result.output
        assert not UNSAFE.search(result.output), ascii(result.output)
        if exit_code == 1:
            told = result.stdout if "--json" in words else result.stderr
            assert told, "a refusal says why"
            assert "--json" in words or re.fullmatch(r"\n?Error: .*\n", result.stderr)
        return result

    def json(self, *words: str, exit_code: int = 0) -> Any:
        return json.loads(self(*words, "--json", exit_code=exit_code).stdout)

    def lines(self, *words: str) -> dict[str, str]:
        """What is told by name."""
        return dict(line.split(None, 1) for line in self(*words).stdout.splitlines() if not line.startswith(" "))


@pytest.fixture
def shell(office: Office) -> Shell:
    return Shell(office.app)


@pytest.fixture
def place(office: Office) -> Iterator[Ledger]:
    """The office's ledger, for those who write past the store."""
    ledger = Ledger("sqlite", office.url)
    office.store.create_schema()
    yield ledger
    ledger.close()


def refused(shell: Shell, kind: str, told: str, *words: str) -> Any:
    """Both the line and the document say so."""
    assert told in shell(*words, exit_code=1).stderr
    shape = shell.json(*words, exit_code=1)
    assert shape["error"]["type"] == kind
    assert told in shape["error"]["message"]
    return shape


# --- init and settings -----------------------------------------------------------------------------------------------


def test_init_makes_the_schema_and_doing_it_again_changes_nothing(shell: Shell, office: Office) -> None:
    for _ in range(2):
        assert shell("init").stdout == f"action store {office.url}: the schema is in place\n"
    assert shell.json("init") == {"url": office.url}
    with closing(Ledger("sqlite", office.url)) as ledger:
        assert ledger.count("celery_idem_action") == 0


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ({}, "governed_store is not set"),
        ({"governed_store": "sqlite:///x.db", "governed_lease": -1}, "governed_lease = -1"),
        ({"governed_store": "sqlite:///x.db", "governed_stoer": "y"}, "did you mean governed_store?"),
        ({"governed_store": "mysql://me:hunter2@h/db"}, "governed_store"),
        ({"governed_store": "postgresql+psycopg2://me:hunter2@127.0.0.1:1/db", "governed_store_timeout": 0.5}, "127"),
    ],
)
def test_wrong_settings_are_told_in_one_line_without_the_password(conf: dict[str, Any], told: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    shell = Shell(app)
    words = ("list",), ("init",), ("show", "x"), ("approve", "x", "--as", "ann", "--yes"), ("sweep",), ("admission",)
    for command in words:
        result = shell(*command, exit_code=1)
        assert told in result.stderr
        assert "hunter2" not in result.output
        assert "hunter2" not in str(shell.json(*command, exit_code=1))


# --- list ------------------------------------------------------------------------------------------------------------


def test_list_tells_of_every_action_and_of_no_payload(shell: Shell, office: Office) -> None:
    assert shell("list").stdout == "no action\n"
    ids = sorted(office.proposed(f"o-{n}") for n in range(3))  # of one moment, so by id
    office.clock.advance(90)
    heading, *rows, count = shell("list").stdout.splitlines()
    assert heading.split() == ["ACTION", "STATE", "TYPE", "SOURCE", "AGE", "LEASE,", "DUE", "OR", "END"]
    assert [row.split() for row in rows] == [[i, "proposed", REFUND, "shop", "1", "min", "30", "s"] for i in ids]
    assert count == "3 actions"
    shape = shell.json("list")
    assert set(shape) == {"clock", "now", "actions", "more"}
    assert shape["clock"] == "store"
    assert shape["more"] is False
    assert list(shape["actions"][0]) == [
        *("action_id", "state", "action_type", "source", "source_ref", "payload_sha256", "attempt_count", "chain_id"),
        *("enqueued_at", "next_attempt_at", "lease", "last_error", "ambiguous", "created_at", "updated_at"),
        "terminal_at",
    ]
    assert shape["actions"][0]["created_at"]["in_seconds"] == -90.0
    assert SECRET not in shell("list").stdout + json.dumps(shape, ensure_ascii=False)


def test_list_chooses_by_state_source_and_type(shell: Shell, office: Office) -> None:
    one = office.proposed("o-1")
    other = office.approved("o-2", principal="ann")
    third = office.proposed("o-3", source="billing")

    def listed(*words: str) -> set[str]:
        return {action["action_id"] for action in shell.json("list", *words)["actions"]}

    assert listed("--state", "GATED") == {other}
    assert listed("--source", "billing") == {third}
    assert listed("--type", REFUND) == {one, other, third}
    assert listed("--type", "payments.refun") == set()
    assert listed("--state", "proposed", "--source", "shop") == {one}


def test_list_says_where_there_are_more(shell: Shell, office: Office) -> None:
    ids = [office.proposed(f"o-{n}") for n in range(3)]
    assert shell("list", "--limit", "2").stdout.splitlines()[-1] == "2 actions, and more: raise --limit"
    shape = shell.json("list", "--limit", "2")
    assert shape["more"] is True
    assert [action["action_id"] for action in shape["actions"]] == sorted(ids)[:2]
    assert shell("list", "--limit", "3").stdout.splitlines()[-1] == "3 actions"


def test_list_says_who_holds_what_is_due_and_how_it_ended(shell: Shell, office: Office) -> None:
    held, waits, ended = (gated(office.store) for _ in range(3))
    lease(office.store, held)
    lease(office.store, waits)
    office.store.defer_leased(waits, OWNER, "admission closed", 30.0)
    lease(office.store, ended)
    office.store.fail_attempt(ended, OWNER, "no luck " * 20, retryable=False)
    rows = {line.split()[0]: line for line in shell("list").stdout.splitlines()[1:-1]}
    assert f"{OWNER}, ends in 1 min (" in rows[held]
    assert rows[waits].endswith("due in 30 s")
    assert rows[ended].endswith("...")
    assert "no luck" in rows[ended]


# --- show ------------------------------------------------------------------------------------------------------------


def test_show_tells_everything_about_a_proposal(shell: Shell, office: Office) -> None:
    action_id = office.proposed(source_ref="order/7")
    office.clock.advance(5)
    shown = shell("show", action_id).stdout
    lines = shell.lines("show", action_id)
    assert lines["action"] == action_id
    assert lines["state"] == "proposed"
    assert lines["type"] == REFUND
    assert lines["source"] == "shop, ref order/7"
    assert lines["key"] == "o-1"
    assert lines["digest"] == office.store.get_action(action_id)["payload_sha256"]
    assert lines["decision"] == "none yet"
    assert lines["proposed"].startswith("5.0 s ago (2033-05-18T03:33:20Z)")
    assert lines["attempts"] == "0 of 1"
    assert lines["lease"] == "none"
    assert "store's clock" in lines["clock"]
    (payload,) = re.findall(r"^payload(.*?)^digest", shown, re.DOTALL | re.MULTILINE)
    assert json.loads(payload) == office.store.get_action(action_id)["payload"]
    assert "Zoë" in payload


def test_show_says_who_approved_where_until_when_and_which_chain_works_on_it(shell: Shell, office: Office) -> None:
    action_id = office.approved(principal="ann@example.org", channel="web", lifetime=600)
    office.clock.advance(60)
    lines = shell.lines("show", action_id)
    told = r"approved by ann@example.org in web 1 min ago \(\S+Z\), ends in 9 min \(\S+Z\); APR-.*"
    assert re.fullmatch(told, lines["decision"])
    assert lines["chain"].startswith(f"{office.store.get_action(action_id)['chain_id']}, named 1 min ago (")
    office.clock.advance(600)
    assert ", ended 1 min ago (" in shell.lines("show", action_id)["decision"]
    shape = shell.json("show", action_id)
    assert set(shape) == {"clock", "now", "action", "approvals", "rejection"}
    assert shape["rejection"] is None
    (said,) = shape["approvals"]
    assert set(said) == {
        *("principal", "decided_at", "expires_at", "approval_id", "channel", "bounded_grant_id", "key_id"),
        *("receipt_key", "recorded_at"),
    }
    assert (said["principal"], said["channel"], said["key_id"]) == ("ann@example.org", "web", None)
    assert said["expires_at"]["in_seconds"] == -60.0
    action = shape["action"]
    assert action["payload"] == {"order": "o-1", "amount": 50, "note": SECRET}
    assert {"idempotency_key", "result"} < set(action)


def test_show_of_a_completed_action_has_its_result(shell: Shell, office: Office) -> None:
    action_id = office.approved()
    office.idem.run_all()
    lines = shell.lines("show", action_id)
    assert lines["state"] == "completed"
    assert lines["attempts"] == "1 of 1"
    assert lines["ended"].startswith("0.0 s ago (")
    assert "lease" not in lines
    assert '"paid": 50' in shell("show", action_id).stdout
    assert shell.json("show", action_id)["action"]["result"] == {"paid": 50}


def test_show_adds_receipts_and_events_where_they_are_asked_for(shell: Shell, office: Office) -> None:
    action_id = office.approved()
    office.idem.run_all()
    shown = shell("show", action_id, "--receipts", "--events").stdout
    receipts, events = shown.partition("\nreceipts\n")[2].split("\nevents\n")
    assert "  owner-gate: gate passed, 0.0 s ago (" in receipts
    assert '    "principal": "ann",' in receipts
    assert "  acceptance: acceptance accepted, " in receipts
    happened = office.happened(action_id)
    assert [line.split()[1] for line in events.splitlines()] == happened
    assert events.startswith("  2033-05-18T03:33:20.000Z  proposed ")
    assert "dispatched  dispatched" in events
    shape = shell.json("show", action_id, "--receipts", "--events")
    assert [event["event_type"] for event in shape["events"]] == happened
    assert set(shape["events"][0]) == {"event_type", "from_state", "to_state", "actor", "details", "created_at"}
    assert [receipt["receipt_key"] for receipt in shape["receipts"]] == [
        r["receipt_key"] for r in office.store.list_receipts(action_id)
    ]
    assert {"kind", "status", "external_id", "evidence", "evidence_sha256", "observed_at"} < set(shape["receipts"][0])
    assert "receipts\n  none\nevents\n" in shell("show", office.proposed("o-2"), "--receipts", "--events").stdout
    plain = shell("show", action_id).stdout
    assert "receipts" not in plain
    assert "events" not in plain


def test_show_tells_of_a_rejection_and_of_two_approvals(shell: Shell, office: Office) -> None:
    rejected, doubled = office.proposed("o-1"), office.approved("o-2")
    office.clock.advance(1)
    shell("reject", rejected, "--as", "bob", "--reason", "wrong order", "--yes")
    told = shell.lines("show", rejected)
    assert re.fullmatch(r"rejected by bob 0\.0 s ago \(\S+\): wrong order", told["decision"])
    assert told["state"] == "failed"
    assert told["error"] == "rejected by bob: wrong order"
    said = shell.json("show", rejected)["rejection"]
    assert (said["by"], said["reason"], said["at"]["in_seconds"]) == ("bob", "wrong order", 0.0)
    office.store.gate(doubled, approval(office.store, doubled, principal="eve"), receipt_key="second")
    shown = shell("show", doubled).stdout
    assert "decision  approved by ann in direct" in shown
    assert "decision  approved by ann@example.org" not in shown
    assert "decision  approved by eve in web" in shown
    assert "decision  2 approvals: it is never dispatched" in shown
    assert [said["principal"] for said in shell.json("show", doubled)["approvals"]] == ["ann", "eve"]


@pytest.mark.parametrize("state", sorted(ACTION_STATES))
def test_show_and_list_know_every_state(shell: Shell, office: Office, state: str) -> None:
    action_id = at(office.store, state)
    assert shell.lines("show", action_id)["state"] == state
    assert f"  {state}  " in shell("list", "--state", state).stdout
    leased = shell.json("show", action_id)["action"]["lease"]
    assert (leased is None) == (state in {"proposed", "completed", "failed"})
    if leased is not None:
        assert leased["owner"] == OWNER
        assert shell.lines("show", action_id)["lease"].startswith(f"{OWNER}, ends in 1 min (")
        office.clock.advance(61)
        assert shell.lines("show", action_id)["lease"].startswith(f"{OWNER}, ended 1.0 s ago (")


def test_show_finds_an_action_by_the_beginning_of_its_id(
    shell: Shell, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_governed, "PAGE", 2)
    for action_id in ("refund-1", "refund-2", "refund-20", "other"):
        proposed(office.store, action_id=action_id)
    assert shell.lines("show", "refund-20")["action"] == "refund-20"
    assert shell.lines("show", "refund-2")["action"] == "refund-2"
    assert shell.json("show", "refund-1")["action"]["action_id"] == "refund-1"
    several = refused(shell, "Ambiguous", "begin with refund-: refund-1, refund-2, refund-20", "show", "refund-")
    assert several["actions"] == ["refund-1", "refund-2", "refund-20"]
    refused(shell, "ActionNotFound", "no action 'refund-3', nor one that begins so", "show", "refund-3")
    refused(shell, "ActionNotFound", "no action 'other-'", "show", "other-")
    refused(shell, "ActionNotFound", "no action 'othe'", "show", "othe")
    assert shell.lines("show", "other")["action"] == "other"


def test_a_payload_that_was_changed_in_the_database_is_neither_shown_nor_approved(
    shell: Shell, office: Office, place: Ledger
) -> None:
    action_id = office.proposed()
    place.forge("UPDATE celery_idem_action SET payload = ? WHERE action_id = ?", '{"amount":5000}', action_id)
    for words in (("show", action_id), ("approve", action_id, "--as", "ann", "--yes")):
        shape = refused(shell, "ActionStoreError", "somebody changed it", *words)
        assert "5000" not in str(shape)
    assert shell("list").stdout == "no action\n"
    assert office.happened(action_id) == ["proposed"]


# --- what a payload smuggles -----------------------------------------------------------------------------------------


def test_no_command_gives_the_terminal_what_a_payload_smuggles(shell: Shell, office: Office, place: Ledger) -> None:
    payload = {"order": NASTY, f"key {NASTY}": ["a\nb", {"deep": NASTY}]}
    action_id = proposed(office.store, payload=payload)
    shown = shell("show", action_id).stdout
    assert r"\u001b[2J\u009b1m\u202egpj\u007f" in shown
    (written,) = re.findall(r"^payload(.*?)^digest", shown, re.DOTALL | re.MULTILINE)
    assert json.loads(written) == payload
    said = shell("approve", action_id, "--as", "ann", "--yes").stdout
    assert r"\u001b[2J" in said
    assert shell.json("show", action_id)["action"]["payload"] == payload
    # Written by somebody who needs no verb of the store, which would refuse such words.
    hurt, worse = "hurt", f"id-{NASTY}"
    copied = (
        "INSERT INTO celery_idem_action (action_id, idempotency_key, source, action_type, payload, payload_sha256,"
        " state, attempt_count, max_attempts, next_attempt_at, lease_owner, lease_expires_at, last_error, created_at,"
        " updated_at, chain_id) SELECT ?, ?, ?, ?, payload, payload_sha256, 'proposed', 0, 1, 1, ?, 1, ?, 1, 1, ?"
        " FROM celery_idem_action WHERE action_id = ?"
    )
    for name in (hurt, worse):
        words = (f"{what} {NASTY}" for what in (f"{name} key", "source", "type", "owner", "error", "chain"))
        place.run(copied, name, *words, action_id)
    evidence = {"principal": NASTY, "channel": NASTY, "approval_id": [NASTY], "decided_at_epoch": "soon", "x": NASTY}
    place.insert_receipt(hurt, f"gate {NASTY}", "gate", evidence, status=NASTY)
    place.insert_receipt(hurt, "bare", "gate", f"no JSON {NASTY}")
    place.insert_event(hurt, f"odd {NASTY}", actor=NASTY, details=json.dumps({"x": NASTY}))
    place.insert_event(hurt, "rejected", actor=NASTY, details="7")
    for name in (hurt, worse):
        letter = "INSERT INTO celery_idem_action_dead_letter (action_id, reason, created_at) VALUES (?, ?, 1)"
        place.run(letter, name, NASTY)
    escaped = r"\x1b[2J\x9b1m\u202egpj\x7f"
    assert f"id-{escaped}" in shell("list").stdout
    told = shell("show", hurt, "--events", "--receipts").stdout
    for what in ("key ", "source ", "type ", "owner ", "error ", "chain ", "gate ", "odd ", "approved by "):
        assert what + escaped in told, what
    assert "at no readable time" in told
    assert shell.json("show", hurt)["approvals"][0]["decided_at"] is None
    letters = shell("dead-letters").stdout
    assert f"id-{escaped}" in letters
    assert f"  {escaped}\n" in letters
    said = shell("approve", hurt, "--as", f"ann {NASTY}", answer="n\n", exit_code=1).output
    assert f"type {escaped} of source {escaped}" in said
    for words in (("show",), ("approve", "--as", "a", "--yes"), ("reject", "--as", "a", "--reason", "b", "--yes")):
        shell(*words, worse, exit_code=1)
    shell("admission", "close", "--as", NASTY, "--reason", "x", exit_code=1)


def test_what_is_printed_as_json_can_be_read_as_json() -> None:
    for value in ({"a": NASTY}, "\ud800", "a\u2028b", "\U000e0001", [1.5, None, True], "Zoë", {}):
        assert json.loads(readable_json(value)) == value
        assert not UNSAFE.search(readable_json(value))
    assert readable_json("Zoë €") == '"Zoë €"'
    assert readable_json(object()).startswith("<object")


# --- approve ---------------------------------------------------------------------------------------------------------


def test_approve_shows_the_payload_asks_and_has_the_action_done(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    office.clock.advance(7)
    said = shell("approve", action_id, "--as", "ann@example.org", answer="y\n").stdout
    assert f"action   {action_id}, {REFUND} of shop, proposed 7.0 s ago\n" in said
    assert '"amount": 50' in said
    assert f"digest   {office.store.get_action(action_id)['payload_sha256']}\n" in said
    assert "Approve it as ann@example.org? [y/N]: y\n" in said
    assert re.search(
        r"^approved by ann@example.org in cli 0\.0 s ago \(\S+\), ends in 1 h \(\S+\); APR-", said, re.MULTILINE
    )
    assert f"its chain is {office.store.get_action(action_id)['chain_id']}\n" in said
    (gate,) = office.store.list_receipts(action_id)
    evidence = gate["evidence"]
    assert (evidence["channel"], evidence["principal"]) == ("cli", "ann@example.org")
    assert evidence["thread_id"]
    assert evidence["expires_at_epoch"] == evidence["decided_at_epoch"] + 3600 == office.clock.now + 3600
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    assert len(office.till.puts) == 1


def test_approve_for_a_time_and_as_json(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    shape = shell.json("approve", action_id, "--as", "ann", "--expires-in", "10m", "--yes")
    assert set(shape) == {"clock", "now", "action", "approval"}
    assert shape["action"]["state"] == "gated"
    assert shape["action"]["payload"]["amount"] == 50
    assert shape["approval"]["principal"] == "ann"
    assert shape["approval"]["expires_at"]["in_seconds"] == 600.0
    assert shape["approval"]["receipt_key"] == "owner-gate"


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_whoever_does_not_say_yes_decides_nothing(shell: Shell, office: Office, answer: str) -> None:
    action_id = office.proposed()
    for words in (("approve", action_id), ("reject", action_id, "--reason", "no")):
        result = shell(*words, "--as", "ann", answer=answer, exit_code=1)
        assert result.stderr.endswith("Error: nothing was decided\n")
    assert office.happened(action_id) == ["proposed"]
    assert office.idem.messages() == []


def test_the_second_approver_is_told_who_was_first_and_nothing_changes(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    shell("approve", action_id, "--as", "ann", "--yes")
    before = (office.store.get_action(action_id), office.happened(action_id), len(office.idem.messages()))
    words = ("approve", action_id, "--as", "bob", "--yes")
    told = r"Error: action \S+ was already approved by ann at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: nothing was changed\n"
    assert re.fullmatch(told, shell(*words, exit_code=1).stderr)
    result = shell("approve", action_id, "--as", "bob", answer="y\n", exit_code=1)
    assert result.stdout == ""  # nothing is left to ask
    shape = refused(shell, "AlreadyDecided", "already approved by ann at", *words)
    assert (shape["decision"], shape["by"], shape["at"]) == ("approved", "ann", office.clock.now)
    assert (office.store.get_action(action_id), office.happened(action_id), len(office.idem.messages())) == before
    assert len(office.store.list_receipts(action_id)) == 1


def test_an_approval_while_the_question_is_open_wins(
    shell: Shell, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    action_id = office.proposed()

    def confirm(_question: str) -> bool:
        shell("approve", action_id, "--as", "bob", "--yes")
        return True

    monkeypatch.setattr(cli_governed.click, "confirm", confirm)
    result = shell("approve", action_id, "--as", "ann", exit_code=1)
    assert "already approved by bob at" in result.stderr
    assert len(office.store.list_receipts(action_id)) == 1


def test_a_rejected_action_is_not_approved(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    shell("reject", action_id, "--as", "bob", "--reason", "no", "--yes")
    shape = refused(shell, "AlreadyDecided", "already rejected by bob", "approve", action_id, "--as", "ann", "--yes")
    assert (shape["decision"], shape["by"]) == ("rejected", "bob")


def test_approve_with_the_digest_that_was_seen(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    digest = office.store.get_action(action_id)["payload_sha256"]
    other = "0" * 8 if digest[0] != "0" else "1" * 8
    words = ("approve", action_id, "--as", "ann", "--yes", "--digest")
    refused(shell, "OtherDigest", f"the payload's digest is {digest}", *words, other)
    assert office.happened(action_id) == ["proposed"]
    shell(*words, digest[:8].upper())
    assert office.state(action_id) == "gated"


def test_approve_needs_the_whole_id(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    for words in (("approve", action_id[:-1]), ("reject", action_id[:-1], "--reason", "no")):
        refused(shell, "ActionNotFound", f"no action '{action_id[:-1]}'", *words, "--as", "ann", "--yes")
    assert office.state(action_id) == "proposed"


def test_approve_with_a_name_that_is_none_is_refused(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    shape = refused(shell, "GateRefused", "gate refused, field", "approve", action_id, "--as", " ", "--yes")
    assert shape["code"] == "field"
    assert office.happened(action_id) == ["proposed"]


# --- signed approvals ------------------------------------------------------------------------------------------------


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[Callable[[], tuple[Office, str]]]:
    """An office where approvals must be signed by ann's key, and the file that key is in."""
    pem, public = generate_key()
    (tmp_path / "ann.pem").write_text(pem)
    other, _ = generate_key()
    (tmp_path / "eve.pem").write_text(other)
    office = Office(tmp_path, governed_approval_keys={"ann-1": public})
    yield lambda: (office, str(tmp_path / "ann.pem"))
    office.close()


def test_a_signed_approval_counts_where_keys_are_configured(signed: Callable[[], tuple[Office, str]]) -> None:
    office, key = signed()
    shell, action_id = Shell(office.app), office.proposed()
    said = shell("approve", action_id, "--as", "ann", "--sign-with", key, "--key-id", "ann-1", "--yes").stdout
    assert ", signed with ann-1 " in said
    office.idem.run_all()
    assert office.state(action_id) == "completed"
    assert shell.json("show", action_id)["approvals"][0]["key_id"] == "ann-1"


def test_an_approval_that_is_not_signed_rightly_is_refused_and_writes_nothing(
    signed: Callable[[], tuple[Office, str]], tmp_path: Path
) -> None:
    office, key = signed()
    shell, action_id = Shell(office.app), office.proposed()
    (tmp_path / "no.pem").write_text("hunter2")
    words = ("approve", action_id, "--as", "ann")
    result = shell(*words, answer="y\n", exit_code=1)
    assert "approvals must be signed here: give --sign-with" in result.stderr
    assert result.stdout == ""
    eve = str(tmp_path / "eve.pem")
    for code, more in {
        "unsigned": (),
        "unknown_key": ("--sign-with", key, "--key-id", "ann-2"),
        "signature": ("--sign-with", eve, "--key-id", "ann-1"),
    }.items():
        assert refused(shell, "GateRefused", f"gate refused, {code}", *words, "--yes", *more)["code"] == code
    more = ("--sign-with", str(tmp_path / "no.pem"), "--key-id", "ann-1")
    shape = refused(shell, "ConfigurationError", "no private key in PEM", *words, "--yes", *more)
    assert "hunter2" not in str(shape)
    assert office.happened(action_id) == ["proposed"]


# --- reject ----------------------------------------------------------------------------------------------------------


def test_reject_asks_without_showing_the_payload_and_ends_the_action(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    said = shell("reject", action_id, "--as", "bob", "--reason", "wrong order", answer="y\n").stdout
    assert said == (
        f"{action_id}, {REFUND} of shop, proposed 0.0 s ago\nReject it as bob? [y/N]: y\nrejected by bob: wrong order\n"
    )
    assert office.state(action_id) == "failed"
    assert office.letters() == []
    again = refused(
        shell, "AlreadyDecided", "already rejected by bob", "reject", action_id, "--as", "x", "--reason", "y", "--yes"
    )
    assert again["decision"] == "rejected"


def test_an_approved_action_may_be_rejected_until_it_is_dispatched(shell: Shell, office: Office) -> None:
    waiting, sent = office.approved(), dispatched(office.store)
    shape = shell.json("reject", waiting, "--as", "bob", "--reason", "too late?", "--yes")
    assert set(shape) == {"clock", "now", "action"}
    assert shape["action"]["state"] == "failed"
    assert "payload" not in shape["action"]
    words = ("reject", sent, "--as", "bob", "--reason", "no", "--yes")
    refused(shell, "ActionTransitionError", "is dispatched, so it cannot be rejected", *words)
    office.idem.run_all()
    assert office.till.puts == []


def test_a_reason_that_is_none_is_refused(shell: Shell, office: Office) -> None:
    action_id = office.proposed()
    refused(shell, "ActionStoreError", "reason = ''", "reject", action_id, "--as", "bob", "--reason", "", "--yes")
    assert office.state(action_id) == "proposed"


# --- admission -------------------------------------------------------------------------------------------------------


def test_admission_is_shown_closed_and_opened(shell: Shell, office: Office) -> None:
    assert shell("admission").stdout == "admission is open, and was never closed\n"
    assert shell.json("admission", "show")["admission"] == {
        "open": True, "reason": None, "actor": None, "changed_at": None
    }  # fmt: skip
    said = shell("admission", "close", "--as", "ann", "--reason", "bank holiday").stdout
    assert re.fullmatch(r"admission is closed, since 0\.0 s ago \(\S+\) by ann: bank holiday\n", said)
    office.clock.advance(60)
    assert shell("admission").stdout.startswith("admission is closed, since 1 min ago (")
    action_id = office.approved()
    office.next("dispatch")
    assert office.state(action_id) == "gated"
    assert "due in " in shell("list").stdout
    shape = shell.json("admission", "open", "--as", "bob", "--reason", "over")
    assert set(shape) == {"clock", "now", "admission"}
    assert shape["admission"]["open"] is True
    assert (shape["admission"]["actor"], shape["admission"]["reason"]) == ("bob", "over")
    assert shape["admission"]["changed_at"]["in_seconds"] == 0.0
    office.idem.run_all()
    assert office.state(action_id) == "completed"


# --- sweep -----------------------------------------------------------------------------------------------------------


def test_sweep_tells_what_it_did(shell: Shell, office: Office) -> None:
    assert shell("sweep").stdout == "no lapsed lease released, no action ended, no action enqueued again\n"
    lapsed, spent = gated(office.store), dispatched(office.store, max_observations=1)
    lease(office.store, lapsed)
    look(office.store, spent)
    action_id = office.approved()
    office.idem.take()
    office.clock.advance(1000)
    assert shell.json("sweep") == {"released": 1, "ended": 1, "enqueued": 1, "unpublished": 0}
    assert [m.task for m in office.idem.take()] == ["celery_idem.governed.dispatch"]
    office.clock.advance(1000)
    assert shell("sweep").stdout == "no lapsed lease released, no action ended, 2 actions enqueued again\n"
    assert office.state(action_id) == "gated"


def test_a_sweep_whose_messages_the_broker_did_not_take_ends_with_1(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"released": 0, "ended": 0, "enqueued": 1, "unpublished": 2}
    monkeypatch.setattr(cli_governed.recovery, "sweep", lambda _app: counts)
    shape = refused(shell, "Unpublished", "1 action enqueued again; the broker took no message for 2 more", "sweep")
    assert {name: shape[name] for name in counts} == counts


# --- dead letters ----------------------------------------------------------------------------------------------------


def ambiguous(office: Office) -> str:
    """The id of an action that ended in doubt."""
    action_id = dispatched(office.store, max_observations=1)
    _, receipt = look(office.store, action_id)
    unresolved(office.store, action_id, receipt["receipt_key"])
    assert office.state(action_id) == "failed"
    return action_id


def test_dead_letters_tell_why_which_and_since_when_the_last_first(
    shell: Shell, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_governed, "PAGE", 2)
    assert shell("dead-letters").stdout == "no dead letter\n"
    failed = at(office.store, "failed")
    office.clock.advance(10)
    doubtful = ambiguous(office)
    office.clock.advance(20)
    rejected = office.proposed()
    shell("reject", rejected, "--as", "bob", "--reason", "no", "--yes")
    lines = shell("dead-letters").stdout.splitlines()
    assert lines[0].startswith(f"{doubtful}  {REFUND}, failed, ambiguous, 20 s ago (")
    assert lines[1].startswith("  ambiguous: the mutation may have happened, and 1 look found nothing certain")
    assert lines[2].startswith(f"{failed}  {REFUND}, failed, 30 s ago (")
    assert lines[3:] == ["  no luck", "2 dead letters"]
    assert shell("dead-letters", "--limit", "1").stdout.endswith("1 dead letter, and older ones: raise --limit\n")
    shape = shell.json("dead-letters", "--limit", "1")
    assert set(shape) == {"clock", "now", "dead_letters", "more"}
    assert shape["more"] is True
    (letter,) = shape["dead_letters"]
    assert set(letter) == {"action_id", "action_type", "state", "ambiguous", "reason", "created_at"}
    assert (letter["action_id"], letter["state"], letter["ambiguous"]) == (doubtful, "failed", True)
    assert letter["created_at"]["in_seconds"] == -20.0
    at(office.store, "failed")
    assert len(shell.json("dead-letters")["dead_letters"]) == 3
    assert shell.lines("show", doubtful)["state"] == "failed, ambiguous"


def test_a_dead_letter_of_an_action_that_was_changed_in_the_database_is_still_told(
    shell: Shell, office: Office, place: Ledger
) -> None:
    action_id = at(office.store, "failed")
    place.forge("UPDATE celery_idem_action SET payload = '{}' WHERE action_id = ?", action_id)
    assert f"{action_id}  unreadable, " in shell("dead-letters").stdout
    (letter,) = shell.json("dead-letters")["dead_letters"]
    assert (letter["action_type"], letter["state"], letter["reason"]) == (None, None, "no luck")


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("list --state done", "--state"),
        ("list --limit 0", "--limit"),
        ("dead-letters --limit 0", "--limit"),
        ("show", "ID"),
        ("approve x", "--as"),
        ("approve --as ann", "ID"),
        ("approve x --as ann --json", "--json asks nothing: give --yes too"),
        ("approve x --as ann --yes --expires-in soon", "is no duration"),
        ("approve x --as ann --yes --expires-in 0", "give more than 0"),
        ("approve x --as ann --yes --digest 1234567", "at least the first 8"),
        ("approve x --as ann --yes --digest wxyzwxyz", "no digest"),
        ("approve x --as ann --yes --key-id k", "belong together"),
        ("approve x --as ann --yes --sign-with {here}", "belong together"),
        ("approve x --as ann --yes --key-id k --sign-with /no/such/file", "--sign-with"),
        ("reject x --as ann", "--reason"),
        ("reject x --reason no", "--as"),
        ("reject x --as ann --reason no --json", "give --yes too"),
        ("admission close", "give --as and --reason"),
        ("admission open --as ann", "give --as and --reason"),
        ("admission show --as ann", "are for open and close"),
        ("admission shut", "shut"),
        ("nothing", "No such command"),
    ],
)
def test_wrong_usage_ends_with_2(shell: Shell, words: str, told: str) -> None:
    assert told in shell(*words.replace("{here}", __file__).split(), exit_code=2).stderr


@pytest.mark.parametrize("command", sorted(cli_governed.governed.commands))
def test_every_command_explains_itself(shell: Shell, command: str) -> None:
    said = shell(command, "--help").stdout
    assert "--json" in said
    assert len(said) < 3000


# --- on PostgreSQL ---------------------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_an_action_is_looked_after_on_postgresql(postgres_url: str) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(governed_store=postgres_url, task_default_queue=postgres_url.rpartition("/")[2])
    shell, governance = Shell(app), governance_of(app)
    assert "run `celery -A <app> governed init`" in shell("list", exit_code=1).stderr
    assert "the schema is in place" in shell("init").stdout
    ids = [proposed(governance.store) for _ in range(3)]
    assert len(shell.json("list")["actions"]) == 3
    assert "approved by ann in cli" in shell("approve", ids[0], "--as", "ann", "--yes").stdout
    assert shell.json("approve", ids[0], "--as", "bob", "--yes", exit_code=1)["by"] == "ann"
    shell("reject", ids[1], "--as", "ann", "--reason", "no", "--yes")
    assert shell.lines("show", ids[0])["state"] == "gated"
    assert shell.lines("show", ids[1][:12])["error"] == "rejected by ann: no"
    assert "Z  rejected  failed    ann       " in shell("show", ids[1], "--events").stdout
    assert shell.json("admission", "close", "--as", "ann", "--reason", "x")["admission"]["open"] is False
    assert shell.json("sweep")["enqueued"] == 0
    assert shell("dead-letters").stdout == "no dead letter\n"
    governance.close()


def test_a_broker_that_is_away_loses_no_approval(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("shop", broker="amqp://me:hunter2@127.0.0.1:1//", set_as_current=False)
    app.conf.update(governed_store=f"sqlite:///{tmp_path / 'actions.db'}", task_publish_retry=False)
    shell, governance = Shell(app), governance_of(app)
    action_id = proposed(governance.store)
    said = shell.json("approve", action_id, "--as", "ann", "--yes")
    assert said["action"]["state"] == "gated"
    assert f"action {action_id} is approved, and its message was not published" in caplog.text
    assert "hunter2" not in caplog.text
    governance.close()


def test_init_makes_the_claims_tables_too_where_there_is_one_database_for_both(tmp_path: Path) -> None:
    app = Celery("both", set_as_current=False)
    app.conf.governed_store = f"sqlite:///{tmp_path / 'both.db'}"
    assert runtime_of(app).store_url == app.conf.governed_store
    Shell(app)("init")
    with closing(sqlite3.connect(tmp_path / "both.db")) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert {"celery_idem_action", "celery_idem_record"} <= tables
