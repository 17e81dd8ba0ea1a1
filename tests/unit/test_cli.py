"""``celery idem`` on a memory store: what each command says, in text and JSON, and how it refuses."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_idem import ConfigurationError, IdempotentTask, Policy, RecordCorrupt, StoreUnavailable, cli, cli_text
from celery_idem.app import Runtime, runtime_of
from celery_idem.cli_key import Duration
from celery_idem.core import holder, keys
from celery_idem.core.codec import Encoded
from celery_idem.core.engine import new_token
from celery_idem.core.records import Claim, Delivery, Kind, Operation, Outcome, Record, Release, State, Successor
from celery_idem.stores.memory import MemoryStore
from tests.support.clock import ManualClock

DEAD = str(replace(holder.parse(holder.current()), start="1"))  # type: ignore[type-var]


@dataclass
class Shell:
    """An app of the test's own, and ``celery -A app idem`` on it."""

    app: Celery
    clock: ManualClock

    @property
    def runtime(self) -> Runtime:
        return runtime_of(self.app)

    @property
    def store(self) -> MemoryStore:
        store = self.runtime.store
        assert isinstance(store, MemoryStore)
        return store

    def __call__(self, *words: str, exit_code: int = 0, answer: str | None = None) -> Result:
        obj = CLIContext(app=self.app, no_color=True, workdir=None)
        result = CliRunner().invoke(cli.idem, words, obj=obj, input=answer, prog_name="idem")
        assert result.exit_code == exit_code, result.output
        if exit_code == 1 and "--json" not in words and words[0] not in {"check", "forget"}:
            assert result.stdout == ""
        return result

    def json(self, *words: str, exit_code: int = 0) -> Any:
        return json.loads(self(*words, "--json", exit_code=exit_code).stdout)

    def claim(self, key: str = "a" * 64, *, message: str = "M", by: str = DEAD, **changes: Any) -> Claim:
        facts: dict[str, Any] = {"task": "shop.charge", "namespace": "shop", "holder": by, **changes}
        continues = facts.pop("continues", False)
        operation = Operation(key=key, delivery=Delivery(message, continues=continues), token=new_token(), **facts)
        claim = self.store.claim(operation, lease=60.0, ttl=3600.0).claim
        assert claim is not None
        return claim

    def complete(self, key: str = "a" * 64, **how: Any) -> Claim:
        claim = self.claim(key, **how)
        self.store.complete(claim, Outcome(Kind.RESULT, Encoded(b'"secret"', "application/json", "utf-8", "0" * 64)))
        return claim

    def state(self, key: str = "a" * 64) -> State:
        record = self.store.get(key)
        assert record is not None
        return record.state


@pytest.fixture
def make_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Shell]]:
    made = []

    def make(**conf: Any) -> Shell:
        app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
        clock = ManualClock()
        app.conf.update(
            **{
                "task_always_eager": True,
                "idempotency_store": "memory://",
                "idempotency_store_options": {"clock": clock},
                **conf,
            }
        )

        def task(name: str, body: Any, **options: Any) -> None:
            app.task(name=name, base=IdempotentTask, shared=False, **options)(body)

        task("shop.charge", charge, idempotency=Policy(key="order:{order_id}", fingerprint=["amount"], ttl=3600.0))
        task("shop.mail", mail)
        task("shop.refund", refund, idempotency=Policy(key="arguments", scope="t1", replay_failures=(ValueError,)))
        task("shop.tenant", mail, idempotency=Policy(name="old", key=["to"], scope=lambda request: "x"))
        app.task(name="shop.plain", shared=False)(mail)
        made.append(app)
        monkeypatch.setattr(cli, "time", SimpleNamespace(time=clock))
        return Shell(app, clock)

    yield make
    for app in made:
        runtime_of(app).close()


@pytest.fixture
def shell(make_shell: Callable[..., Shell]) -> Shell:
    return make_shell()


def charge(order_id: Any, amount: int = 0) -> Any:
    return {"order": str(order_id), "paid": amount}


def mail(to: str) -> str:
    return to


def refund(order_id: int) -> None:
    raise ValueError(f"no order {order_id}")


# --- check, as a worker checks ---


def test_check_lists_what_a_whole_app_leaves_out(make_shell: Callable[..., Shell]) -> None:
    shell = make_shell(task_annotations=["celery_idem:annotation"], idempotency_tasks={"shop.charge": True})
    shell.app.finalize()
    assert "left out by idempotency_tasks\n  shop.plain\n" in shell("check").stdout
    assert shell.json("check")["left_out"] == ["shop.plain"]
    assert make_shell().json("check")["left_out"] == []


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"governed_store": "redis://localhost/0"}, "governed_store: no SQL store on redis"),
        ({"governed_stor": "sqlite:///a.db"}, "did you mean governed_store?"),
        ({"governed_lease": "x", "idempotency_mode": "off"}, "governed_lease = 'x': must be a number"),
    ],
)
def test_check_refuses_settings_of_governed_actions_as_a_worker_does(
    make_shell: Callable[..., Shell], conf: dict[str, Any], said: str
) -> None:
    assert said in make_shell(**conf)("check", exit_code=1).stderr


# --- init, purge -----------------------------------------------------------------------------------------------------


def test_init(shell: Shell) -> None:
    assert shell("init").stdout == "memory store memory://: needs no schema\n"
    assert shell.json("init") == {"store": "memory", "url": "memory://", "schema": False}


def test_purge_deletes_what_expired(shell: Shell) -> None:
    for n in range(5):
        shell.complete(f"{n}" * 64)
    assert shell("purge").stdout == "0 expired records deleted\n"
    shell.clock.advance(10_000)
    assert shell("purge", "--limit", "1").stdout == "1 expired record deleted, and there may be more: use --all\n"
    assert shell.json("purge", "--limit", "1") == {"purged": 1, "more": True}
    assert shell.json("purge", "--limit", "2", "--all") == {"purged": 3, "more": False}


# --- check -----------------------------------------------------------------------------------------------------------


def test_check_shows_settings_tasks_and_warnings(shell: Shell) -> None:
    shown = shell("check").stdout.splitlines()
    assert "  store             memory://" in shown
    assert "  namespace         shop" in shown
    assert "  store_options     clock" in shown
    assert "  shop.charge  key order:{order_id}; fingerprint amount; ttl 3600" in shown
    assert "  shop.mail    key message" in shown
    assert "  shop.refund  key arguments; scope t1; replay_failures builtins.ValueError" in shown
    assert not any("shop.plain" in line for line in shown)
    assert shown[-2] == "warnings"
    assert "one process only" in shown[-1]


def test_check_as_json(shell: Shell) -> None:
    shape = shell.json("check")
    assert set(shape) == {"settings", "tasks", "left_out", "warnings"}
    assert shape["settings"]["lease"] == 60.0
    assert shape["tasks"]["shop.refund"]["replay_failures"] == ["builtins.ValueError"]
    assert shape["tasks"]["shop.charge"]["key"] == "order:{order_id}"
    assert shape["tasks"]["shop.tenant"]["name"] == "old"
    assert len(shape["warnings"]) == 1


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ({"idempotency_store": None}, "idempotency_store is not set"),
        ({"idempotency_lease": -1}, "idempotency_lease = -1: must be above 0"),
        ({"idempotency_stoer": "x"}, "did you mean idempotency_store?"),
        ({"idempotency_store": "mysql://me:hunter2@h/db"}, "no store speaks 'mysql'"),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(make_shell: Any, conf: dict[str, Any], told: str) -> None:
    shell = make_shell(**conf, **({} if "idempotency_store" in conf else {"idempotency_store": "memory://"}))
    for command in ("check", "list"):
        result = shell(command, exit_code=1)
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
        assert told in result.stderr
        assert "hunter2" not in result.output
    assert shell.json("check", exit_code=1)["error"]["type"] == "ConfigurationError"


@pytest.mark.parametrize("command", ["check", "doctor", "list"])
def test_a_command_without_an_app_asks_for_one(command: str) -> None:
    nobodys = Celery("default", set_as_current=False)  # what the celery command takes where -A names none
    obj = CLIContext(app=nobodys, no_color=True, workdir=None)
    result = CliRunner().invoke(cli.idem, [command], obj=obj, prog_name="celery idem")
    assert result.exit_code == 2
    assert f"no app was named: celery -A <app> idem {command}" in result.stderr
    with_help = CliRunner().invoke(cli.idem, [command, "--help"], obj=obj, prog_name="celery idem")
    assert with_help.exit_code == 0


def test_check_tells_of_a_task_whose_key_names_no_argument(shell: Shell) -> None:
    shell.app.task(name="shop.wrong", base=IdempotentTask, shared=False, key="{nothing}")(mail)
    result = shell("check", exit_code=1)
    assert "shop.wrong   key {nothing}" in result.stdout
    assert result.stderr.startswith("Error: task shop.wrong: key names 'nothing'")
    shape = shell.json("check", exit_code=1)
    assert shape["error"]["type"] == "ConfigurationError"
    assert "shop.wrong" in shape["tasks"]


def test_check_tells_of_a_store_that_gives_no_answer(make_shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def down() -> list[str]:
        raise StoreUnavailable("no answer:\n  hunter2 refused\n")

    shell = make_shell(idempotency_store_options={"password": "hunter2"})
    monkeypatch.setattr("celery_idem.app.open_store", lambda *_, **__: MemoryStore())
    monkeypatch.setattr(shell.store, "check", down)
    result = shell("check", exit_code=1)
    assert result.stderr == "Error: no answer: ** refused\n"
    assert "hunter2" not in result.output
    assert shell.json("check", exit_code=1)["error"] == {"type": "StoreUnavailable", "message": "no answer: ** refused"}


def test_check_with_the_mode_off(make_shell: Any) -> None:
    assert "mode is off" in make_shell(idempotency_mode="off", idempotency_store=None)("check").stdout


def test_a_task_module_that_cannot_be_imported_is_told(shell: Shell) -> None:
    shell.app.conf.imports = ["no_such_module_of_the_shop"]
    assert "No module named 'no_such_module_of_the_shop'" in shell("check", exit_code=1).stderr


# --- show ------------------------------------------------------------------------------------------------------------


def test_show_a_completed_record_by_arguments_explicit_key_and_hash(shell: Shell) -> None:
    shell.app.tasks["shop.charge"].apply_async((7, 20), task_id="M1")
    shell.app.tasks["shop.charge"].apply_async((8, 20), task_id="M2", idempotency_key="mine")
    by_arguments = shell.json("show", "--task", "shop.charge", "--args", "[7, 99]")["record"]
    by_keyword = shell.json("show", "--task", "shop.charge", "--kwargs", '{"order_id": 7}')["record"]
    by_key = shell.json("show", "--task", "shop.charge", "--key", "mine")["record"]
    by_hash = shell.json("show", by_key["key"])["record"]
    by_prefix = shell.json("show", by_key["key"][:8].upper())["record"]
    assert by_arguments == by_keyword
    assert by_arguments["message_id"] == "M1"
    assert by_key == by_hash == by_prefix
    assert by_key["message_id"] == "M2"


def test_show_by_message_id_and_by_stable_name(shell: Shell) -> None:
    shell.app.tasks["shop.mail"].apply_async(("x",), task_id="M1")
    shell.app.tasks["shop.tenant"].apply_async(("x",), task_id="M2")
    assert "M1, generation 0" in shell("show", "--task", "shop.mail", "--id", "M1").stdout
    for name in ("old", "shop.tenant"):
        assert "M2, generation 0" in shell("show", "--task", name, "--args", '["x"]', "--scope", "x").stdout


def test_typed_arguments_are_written_as_kombu_writes_them(shell: Shell) -> None:
    order = uuid.UUID(int=7)
    shell.app.tasks["shop.charge"].apply_async((order,), task_id="M1")
    typed = json.dumps([{"__type__": "uuid", "__value__": {"hex": order.hex}}])
    assert shell.json("show", "--task", "shop.charge", "--args", typed)["record"]["message_id"] == "M1"


def test_show_at_a_replacement_depth(shell: Shell) -> None:
    digest = keys.KeySource.parse("message").digest(message_id="M1")
    shell.complete(keys.effective_key("shop", "", "shop.mail", 2, digest), message="M1")
    shell("show", "--task", "shop.mail", "--id", "M1", exit_code=1)
    assert shell.json("show", "--task", "shop.mail", "--id", "M1", "--depth", "2")["record"]["state"] == "COMPLETED"


def test_show_says_everything_about_a_completed_record(shell: Shell) -> None:
    claim = shell.complete(scope="5" * 32)
    shell.clock.advance(192)
    shown = shell("show", "a" * 64).stdout
    lines = dict(line.split(None, 1) for line in shown.splitlines() if not line.startswith("last run by"))
    assert lines["state"] == "COMPLETED"
    assert lines["fence"] == str(claim.fence)
    assert lines["unknown"] == "no"
    assert lines["scope"] == "5" * 32 + " (hash)"
    assert lines["completed"].startswith("3 min 12 s ago (")
    assert lines["expires"].startswith("in 56 min 48 s (")
    assert lines["outcome"] == "RESULT, 8 bytes of application/json"
    assert "host's clock" in lines["clock"]
    assert "secret" not in shown
    assert claim.token not in shown


def test_the_shape_of_a_record_is_stable(shell: Shell) -> None:
    claim = shell.complete(continues=True)
    shell.clock.advance(10)
    shape = shell.json("show", "a" * 64)
    assert set(shape) == {"clock", "now", "record"}
    assert shape["clock"] == "host"
    record = shape["record"]
    assert list(record) == [
        *("key", "state", "task", "namespace", "scope", "fingerprint", "message_id", "generation", "attempts", "fence"),
        *("unknown", "holder", "claimed_at", "lease_expires_at", "completed_at", "expires_at", "outcome", "notes"),
        "record_version",
    ]
    at = record["completed_at"]
    assert at == {"utc": at["utc"], "epoch": shell.clock() - 10, "in_seconds": -10.0}
    assert at["utc"].endswith("Z")
    assert record["holder"] == {"pid": at_pid(), "host": holder.parse(DEAD).host, "provably_dead": None}  # type: ignore[union-attr]
    assert record["outcome"] == {
        "kind": "RESULT", "bytes": 8, "content_type": "application/json", "content_encoding": "utf-8"
    }  # fmt: skip
    note = record["notes"]["M"]
    assert set(note) == {"over", "successor", "parked", "continuing", "settled", "at"}
    assert note["continuing"]["fence"] == claim.fence
    assert note["continuing"]["holder"]["provably_dead"] is True
    assert note["continuing"]["lease_expires_at"]["in_seconds"] == 50.0


def at_pid() -> int:
    parsed = holder.parse(DEAD)
    assert parsed is not None
    return parsed.pid


@pytest.mark.parametrize(
    ("by", "told"),
    [(holder.current(), "not provably dead from here"), (DEAD, "provably dead"), ("?", "an unreadable holder ('?')")],
    ids=["living", "dead", "unreadable"],
)
def test_show_says_who_holds_a_claim(shell: Shell, by: str, told: str) -> None:
    shell.claim(by=by)
    shell.clock.advance(12)
    shown = shell("show", "a" * 64).stdout
    held = next(line for line in shown.splitlines() if line.startswith("held by"))
    assert told in held
    assert "held since  12 s ago (" in shown
    assert "lease       ends in 48 s (" in shown
    shell.clock.advance(60)
    assert "lease       ended 12 s ago (" in shell("show", "a" * 64).stdout
    assert shell.json("show", "a" * 64)["record"]["holder"]["provably_dead"] is (by == DEAD)


def test_show_tells_the_notes(shell: Shell) -> None:
    shell.store.release(shell.claim(message="A\x1b[2J"), Release.RETRY, successor=Successor(1, 30.0))
    shell.store.note_parked("a" * 64, "B", 0, 3)
    shell.store.release(shell.claim(message="C"), Release.INTERRUPTED)
    shown = shell("show", "a" * 64).stdout
    assert "A\\x1b[2J: retry of generation 1 due in 30 s (" in shown
    assert "B: parked copy 3 of generation 0" in shown
    assert "released     0.0 s ago (" in shown
    assert "yes: an attempt began whose outcome nobody knows" in shown
    assert "\x1b" not in shown
    claim = shell.complete(message="D", continues=True)
    assert (
        f"D: right to continue of {holder.describe(claim.operation.holder)}, provably dead, lasts until"
        in shell("show", "a" * 64).stdout
    )
    shell.store.settle("a" * 64, "D")
    assert "D: settled" in shell("show", "a" * 64).stdout


def test_show_prints_the_value_only_where_it_is_asked_for(shell: Shell) -> None:
    shell.app.tasks["shop.charge"].apply_async((7, 20))
    words = ("show", "--task", "shop.charge", "--args", "[7]")
    assert '"order"' not in shell(*words).stdout
    assert '{"order": "7", "paid": 20}' in shell(*words, "--value").stdout
    outcome = shell.json(*words, "--value")["record"]["outcome"]
    assert outcome["value"] == {"order": "7", "paid": 20}
    assert outcome["value_error"] is None
    assert "value" not in shell.json(*words)["record"]["outcome"]


def test_show_prints_a_stored_failure(shell: Shell) -> None:
    shell.app.tasks["shop.refund"].apply_async((7,))
    words = ("show", "--task", "shop.refund", "--args", "[7]", "--value")
    assert '{"type": "builtins.ValueError", "message": "no order 7"}' in shell(*words).stdout
    outcome = shell.json(*words)["record"]["outcome"]
    assert outcome["kind"] == "FAILURE"
    assert outcome["value"] == {"type": "builtins.ValueError", "message": "no order 7"}


def test_show_says_why_a_value_cannot_be_read(shell: Shell) -> None:
    shell.complete()
    assert "value        not readable: the stored value's checksum differs" in shell("show", "a" * 64, "--value").stdout
    shell.store.complete(shell.claim("b" * 64), Outcome(Kind.RESULT))
    assert "not readable: no value was kept" in shell("show", "b" * 64, "--value").stdout
    shell.claim("c" * 64)
    assert "value" not in shell("show", "c" * 64, "--value").stdout


def test_show_refuses_what_it_cannot_find(shell: Shell) -> None:
    shell.complete("abcdef01" + "0" * 56)
    shell.complete("abcdef01" + "1" * 56)
    assert shell.json("show", "9" * 64, exit_code=1)["error"]["type"] == "NotFound"
    assert "no record whose key begins with 99999999" in shell("show", "9" * 8, exit_code=1).stderr
    ambiguous = shell.json("show", "abcdef01", exit_code=1)
    assert ambiguous["error"]["type"] == "Ambiguous"
    assert ambiguous["keys"] == ["abcdef01" + "0" * 56, "abcdef01" + "1" * 56]
    shell.clock.advance(10_000)
    assert "it expired" in shell("show", "abcdef01" + "0" * 56, exit_code=1).stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "name a record"),
        ("--key x", "name a record"),
        ("aaaaaaaa --task shop.charge", "not both"),
        ("aaaaaaaa --depth 1", "not both"),
        ("aaaaaaa", "at least the first 8"),
        ("aaaaaaag", "no hash"),
        ("--task shop.charge", "give --args and --kwargs"),
        ("--task shop.charge --id x", "give --args and --kwargs"),
        ("--task shop.mail", "give --id"),
        ("--task shop.mail --args [1]", "give --id"),
        ("--task shop.charge --args [1] --key x", "give one of --key"),
        ("--task shop.charge --args [1,2,3]", "takes no such arguments"),
        ("--task shop.charge --args 7", "is not a JSON array"),
        ("--task shop.charge --args {", "is not JSON"),
        ("--task shop.charge --kwargs []", "is not a JSON object"),
        ("--task shop.charg --key x", "did you mean shop.charge?"),
        ("--task shop.plain --key x", "no idempotent task"),
        ("--task shop.tenant --key x", "give --scope"),
        ("--task shop.mail --id x --depth -1", "--depth"),
    ],
)
@pytest.mark.parametrize("command", ["show", "forget"])
def test_wrong_usage_ends_with_2(shell: Shell, command: str, words: str, told: str) -> None:
    assert told in shell(command, *words.split(), exit_code=2).stderr


def test_arguments_without_a_key_are_refused_as_the_worker_would(shell: Shell) -> None:
    refused = shell.json("show", "--task", "shop.charge", "--args", "[null]", exit_code=1)
    assert refused["error"]["type"] == "KeyMissing"
    assert "'order_id' is None" in refused["error"]["message"]


def test_arguments_the_key_does_not_name_may_be_left_out(shell: Shell) -> None:
    def ship(order_id: int, amount: int, *, note: str, **more: Any) -> None: ...

    shell.app.task(name="shop.ship", base=IdempotentTask, shared=False, key=["order_id", "sku"])(ship)
    shell.app.tasks["shop.ship"].apply_async((7, 20), {"note": "x", "sku": "s"})
    for words in (["--args", "[7]", "--kwargs", '{"sku": "s"}'], ["--kwargs", '{"sku": "s", "order_id": 7}']):
        assert shell.json("show", "--task", "shop.ship", *words)["record"]["state"] == "COMPLETED"
    for words in (["--args", "[7]"], ["--kwargs", '{"sku": "s", "amount": 1}']):
        assert shell.json("show", "--task", "shop.ship", *words, exit_code=1)["error"]["type"] == "KeyMissing"


# --- list ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(shell: Shell) -> Shell:
    """Three records: one released and gone, one completed, one held."""
    shell.store.release(shell.claim("a" * 64, task="shop.mail", scope=keys.scope_hash("t1")), Release.ENDED)
    shell.clock.advance(600)
    shell.complete("b" * 64, message="\n" + "x" * 100)
    shell.clock.advance(60)
    shell.claim("c" * 64, by=holder.current())
    shell.clock.advance(5)
    return shell


def test_list_is_a_table_the_longest_claimed_first(full: Shell) -> None:
    head, first, second, third, footer = full("list").stdout.splitlines()
    assert head.split() == ["KEY", "STATE", "TASK", "AGE", "ATTEMPTS", "HOLDER", "OR", "END", "MESSAGE"]
    told = "RELEASED shop.mail 11 min 5 s 0 released 11 min 5 s ago M"
    assert first.split() == ["aaaaaaaaaaaa", *told.split()]
    assert "completed 1 min 5 s ago" in second
    assert second.endswith("\\n" + "x" * 35 + "...")
    assert third.split()[:6] == ["cccccccccccc", "CLAIMED", "shop.charge", "5.0", "s", "1"]
    assert holder.describe(holder.current()) in third
    assert footer == "3 records"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", "abc"),
        ("--task shop.charge", "bc"),
        ("--task gone.from.the.app", ""),
        ("--scope t1", "a"),
        ("--scope t2", ""),
        ("--state claimed", "c"),
        ("--state COMPLETED", "b"),
        ("--older-than 1m", "ab"),
        ("--older-than 10m", "a"),
        ("--older-than 65", "ab"),
        ("--limit 3", "abc"),
        ("--state released --task shop.mail --scope t1 --older-than 1m", "a"),
    ],
)
def test_list_filters(full: Shell, words: str, found: str) -> None:
    shape = full.json("list", *words.split())
    assert "".join(record["key"][0] for record in shape["records"]) == found
    assert shape["more"] is False
    assert full("list", *words.split()).stdout.splitlines()[-1] == {0: "no record", 1: "1 record"}.get(
        len(found), f"{len(found)} records"
    )


def test_list_says_that_there_are_more(full: Shell) -> None:
    assert full("list", "--limit", "2").stdout.endswith("2 records, and more: raise --limit\n")
    assert full.json("list", "--limit", "2")["more"] is True


def test_list_names_a_renamed_task_as_its_records_do(shell: Shell) -> None:
    shell.app.tasks["shop.tenant"].apply_async(("x",))
    assert len(shell.json("list", "--task", "shop.tenant")["records"]) == 1
    assert len(shell.json("list", "--task", "old")["records"]) == 1


def test_records_that_cannot_be_read_do_not_hide_the_others(full: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    find = full.store.find

    def with_a_bad_one(**how: Any) -> Iterator[Record]:
        yield from find(**how)
        raise RecordCorrupt("record ddd cannot be read (state)", key="ddd")

    monkeypatch.setattr(full.store, "find", with_a_bad_one)
    assert full("list").stdout.endswith("3 records\nwarning: record ddd cannot be read (state)\n")
    assert full.json("list")["warnings"] == ["record ddd cannot be read (state)"]
    assert full.json("show", "bbbbbbbb")["record"]["key"] == "b" * 64


@pytest.mark.parametrize("words", ["--older-than soon", "--older-than 1x", "--state held", "--limit 0"])
def test_list_refuses_wrong_options(shell: Shell, words: str) -> None:
    shell("list", *words.split(), exit_code=2)


# --- forget ----------------------------------------------------------------------------------------------------------


def test_forget_asks_and_the_next_message_runs(shell: Shell) -> None:
    task = shell.app.tasks["shop.charge"]
    task.apply_async((7, 20))
    words = ("forget", "--task", "shop.charge", "--args", "[7]")
    result = shell(*words, answer="y\n")
    assert result.stdout.startswith("COMPLETED shop.charge ")
    assert "Forget it? [y/N]: y" in result.stdout
    assert result.stdout.endswith("forgotten: the next message of this key runs; copies of a failed attempt do not\n")
    assert task.apply_async((7, 30)).get() == {"order": "7", "paid": 30}


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_forget_unconfirmed_changes_nothing(shell: Shell, answer: str) -> None:
    shell.complete()
    assert shell("forget", "a" * 64, exit_code=1, answer=answer).stderr.strip() == "Error: nothing was forgotten"
    assert shell.state() is State.COMPLETED


def test_forget_as_json_asks_beside_the_document(shell: Shell) -> None:
    shell.complete()
    result = shell("forget", "aaaaaaaa", "--json", answer="y\n")
    assert "Forget it?" in result.stderr
    shape = json.loads(result.stdout)
    assert shape["forgotten"] is True
    assert shape["was"]["state"] == "COMPLETED"
    assert shell.json("forget", "aaaaaaaa", "--yes")["was"]["state"] == "RELEASED"
    refused = json.loads(shell("forget", "aaaaaaaa", "--json", answer="", exit_code=1).stdout)
    assert refused["error"]["type"] == "NotConfirmed"


def test_forget_refuses_a_record_that_changed_meanwhile(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.store.release(shell.claim(), Release.YIELDED)

    def answers_late(wants_json: bool) -> bool:
        shell.claim()
        return True

    monkeypatch.setattr(cli, "_confirmed", answers_late)
    assert "changed meanwhile" in shell("forget", "a" * 64, exit_code=1).stderr
    assert shell.state() is State.CLAIMED


def test_forget_refuses_a_living_holder_unless_forced(shell: Shell) -> None:
    claim = shell.claim(by=holder.current())
    result = shell("forget", "a" * 64, "--yes", exit_code=1)
    assert "holds it and its body may be running; its lease ends in 1 min (" in result.stderr
    assert shell.state() is State.CLAIMED
    assert "its completion is shut out" in shell("forget", "a" * 64, "--yes", "--force").stdout
    assert shell.state() is State.RELEASED
    assert shell.store.complete(claim, Outcome(Kind.RESULT)).value == "LOST"


def test_forget_takes_a_dead_or_lapsed_claim_without_force(shell: Shell) -> None:
    shell.claim(by=DEAD)
    assert "(dead)" in shell("forget", "a" * 64, "--yes").stdout
    shell.claim("b" * 64, by=holder.current())
    shell.clock.advance(60)
    assert "(lapsed)" in shell("forget", "b" * 64, "--yes").stdout


def test_forget_refuses_while_a_continuation_is_published(shell: Shell) -> None:
    shell.complete(by=holder.current(), continues=True)
    assert "may be publishing what follows message M" in shell("forget", "a" * 64, "--yes", exit_code=1).stderr
    shell.store.settle("a" * 64, "M")
    shell("forget", "a" * 64, "--yes")
    shell.complete("b" * 64, by=DEAD, continues=True)
    shell("forget", "b" * 64, "--yes")


def test_forget_removes_a_record_that_cannot_be_read(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def corrupt(key: str) -> Record | None:
        raise RecordCorrupt(f"record {key} cannot be read (state)")

    def forget(key: str, fence: int | None) -> bool:
        asked.append((key, fence))
        return len(asked) == 1

    monkeypatch.setattr(shell.store, "get", corrupt)
    monkeypatch.setattr(shell.store, "forget", forget)
    assert "cannot be read (state)" in shell("show", "a" * 64, exit_code=1).stderr
    assert "cannot be read (state)" in shell("forget", "a" * 64, answer="y\n").stdout
    assert asked == [("a" * 64, None)]
    assert shell.json("forget", "a" * 64, "--yes", exit_code=1)["error"]["type"] == "Changed"


def test_forget_leaves_a_newer_releases_record_alone(shell: Shell) -> None:
    shell.complete()
    shell.store._records["a" * 64] = replace(shell.store._records["a" * 64], record_version=2)
    assert "newer release" in shell("forget", "a" * 64, "--yes", exit_code=1).stderr
    assert "NEWER: only the release that wrote it" in shell("show", "a" * 64).stdout
    assert "NEWER" in shell("list").stdout
    assert shell.json("show", "a" * 64)["record"]["record_version"] == 2


def test_forget_says_that_a_local_cache_remembers(make_shell: Any) -> None:
    shell = make_shell(idempotency_local_cache=10)
    shell.complete()
    assert "local cache may replay" in shell("forget", "a" * 64, "--yes").stdout


# --- the clock, words, secrets ---------------------------------------------------------------------------------------


def test_a_store_that_tells_the_time_is_believed(shell: Shell) -> None:
    shell.complete()
    now = shell.clock() + 100
    shell.store.now = lambda: now  # type: ignore[attr-defined]
    assert shell.json("show", "a" * 64)["clock"] == "store"
    assert "completed    1 min 40 s ago" in shell("show", "a" * 64).stdout


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0.0 s"), (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (59.6, "1 min"), (60, "1 min"),
        (3_600, "1 h"), (3_605, "1 h"), (11_520, "3 h 12 min"), (86_399.6, "1 d"), (90_061, "1 d 1 h"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds: float, text: str) -> None:
    assert cli_text.duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400), ("1h30m", 5400)],
)
def test_durations_as_given(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


def test_a_number_that_is_no_date_is_still_shown() -> None:
    clock = cli_text.Clock(0.0, "store")
    assert clock.moment(1e18) == {"utc": None, "epoch": 1e18, "in_seconds": 1e18}
    assert "no date" in clock.told(1e18)


@pytest.mark.parametrize(
    ("url", "shown", "secrets"),
    [
        ("memory://", "memory://", []),
        ("sqlite:////var/x.db", "sqlite:////var/x.db", []),
        ("redis://h:6379/1", "redis://h:6379/1", []),
        ("redis://:pw@h/1", "redis://:**@h/1", ["pw"]),
        ("rediss://h/1?password=pw&ssl_cert_reqs=none", "rediss://h/1?password=**&ssl_cert_reqs=none", ["pw"]),
        ("sentinel://:p1@a:1;sentinel://:p22@b:2", "sentinel://:**@a:1;sentinel://:**@b:2", ["p22", "p1"]),
        ("postgresql+psycopg2://u:p%40w@h/db", "postgresql+psycopg2://u:**@h/db", ["p%40w", "p@w"]),
        ("postgresql://u:p/w?#@h/db", "postgresql://u:**@h/db", ["p/w?#"]),
        ("postgresql:///db?host=/tmp&user=a@b", "postgresql:///db?host=/tmp&user=a@b", []),
        ("postgresql://h/db?sslpassword=pw&user=a@b", "postgresql://h/db?sslpassword=**&user=a@b", ["pw"]),
    ],
)
def test_urls_without_their_passwords(url: str, shown: str, secrets: list[str]) -> None:
    assert cli_text.shown_url(url) == shown
    assert cli_text.secrets_of(url, {}) == secrets


def test_errors_of_the_store_are_scrubbed(make_shell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = make_shell(idempotency_store="redis://:hunter2@127.0.0.1/0", idempotency_store_options={})

    def told(*_: Any, **__: Any) -> Any:
        raise ConfigurationError("cannot parse redis://:hunter2@127.0.0.1/0")

    monkeypatch.setattr("celery_idem.app.open_store", told)
    assert shell("list", exit_code=1).stderr == "Error: cannot parse redis://:**@127.0.0.1/0\n"
    assert shell.json("check", exit_code=1)["settings"]["store"] == "redis://:**@127.0.0.1/0"
