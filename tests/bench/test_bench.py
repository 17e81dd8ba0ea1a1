"""The bench itself works: a queue is drained and counted, a store filled, the page written. Not how fast."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from celery_idem.stores.base import open_store
from tests.bench import drain, growth, page, plot, profile, rivals
from tests.campaigns.report import table
from tests.support.services import PostgresServer, RedisServer

PAGE = "<!-- {0}: written by make bench -->\n\n<!-- {0}: end -->\n"


@pytest.mark.redis
@pytest.mark.postgres
def test_a_queue_is_drained_by_each_in_turn(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    servers = drain.Servers(redis_server, postgres_server, tmp_path)
    names = ("bare, late acks", "bare + two calls, postgresql", "celery_idem, redis")
    with drain.contestants(servers, names, "threads", 2) as made:
        for contestant in made:
            contestant.done.append(contestant.run(20, 0.0))
        rows = drain.rows_of(made)
        text = drain.duplicates_table(made, 10, 0.0)
    assert [row[0] for row in rows] == list(names)
    assert all(run.main > 0 and run.wall > 0 for contestant in made for run in contestant.done)
    assert rows[0][2] == 1.0
    assert text.count("\n") == len(names), "bare + two calls knows no duplicates"


@pytest.mark.redis
@pytest.mark.postgres
def test_another_library_that_leaves_its_queue_standing_ends_no_bench_and_one_of_ours_does(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "WITHIN", 3.0)
    monkeypatch.setattr(drain, "ROUNDS", 1)
    names = ("bare, late acks", "celery_idem, redis")
    scene = drain.Scene("standing", "threads", 2, 0.0, 10)
    with drain.contestants(drain.Servers(redis_server, postgres_server, tmp_path), names, "threads", 2) as made:
        made[1].worker.pause()
        with pytest.raises(drain.Out, match="celery_idem, redis"):
            drain.measure(made, scene, 10, 0.0)
        for contestant in made:
            contestant.done.clear()
        made[1].name = "another"
        drain.measure(made, scene, 10, 0.0)
        rows = drain.rows_of(made)
        made[1].worker.resume()
    assert rows[1] == ["another", *["stalled"] * 8]
    assert drain.judged(scene, rows) == ([], [])
    text = f"**{scene.title}**\n\n1 rounds of 10 messages:\n\n{table(drain.HEADER, rows)}"
    assert "another" not in plot.shares(text)


@pytest.mark.redis
@pytest.mark.postgres
def test_a_queue_whose_tasks_fail_does_not_count_as_drained(
    redis_server: RedisServer, postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = rivals.Entry("@app.task(name='task')\ndef task(number, seconds):\n    return 1 / (number % 2)\n")
    monkeypatch.setitem(rivals.ENTRIES, "fails", failing)
    servers = drain.Servers(redis_server, postgres_server, tmp_path)
    with drain.contestants(servers, ("fails",), "threads", 2) as made:
        assert drain.counted(made[0], 10, 0.0) is None
        assert made[0].out == "failed"


def test_keys_repeat_as_often_as_they_should() -> None:
    keys = drain.keys_of(100, 0.9, first=7)
    assert len(keys) == 100
    assert len(set(keys)) == 10
    assert drain.keys_of(100, 0.9, first=7) == keys


def test_who_is_behind_breaks_a_promise() -> None:
    shares = (1, 1, 1, 0.8, 0.9, 0.5, 0.5, 0.95, 1, 0, 0)
    rows = [[name, "1", share, share] for name, share in zip(rivals.ENTRIES, shares, strict=True)]
    broken, beyond = drain.judged(drain.SCENES[1], rows)
    assert broken == [
        "prefork, 2 processes, 5 ms body: celery_idem, redis drains at 0.90 of bare Celery, not 0.95",
        "prefork, 2 processes, 5 ms body: celery_idem, redis (0.90) is behind idemkit, redis (0.95)",
        "prefork, 2 processes, 5 ms body: celery_idem, postgresql drains at 0.50, its two calls alone at 0.80",
    ]
    alone = "; its two calls alone leave 0.80"
    assert beyond == [
        f"prefork, 2 processes, 5 ms body: celery_idem, postgresql drains at 0.50 of bare Celery, not 0.85{alone}",
        f"prefork, 2 processes, 5 ms body: celery_idem, postgresql (0.50) is behind idemkit, postgresql (1.00){alone}",
    ]


@pytest.mark.parametrize("kind", growth.KINDS, ids=lambda kind: kind.name)
def test_a_store_is_filled_with_copies(kind: Any) -> None:
    with ExitStack() as stack:
        place = kind(stack)
        store = open_store(place.url)
        stack.callback(store.close)
        store.create_schema()
        (row, each), *_ = growth.grown(place, store, (100,), 4)
        assert row[0] == f"{place.name}, 100"
        assert each > 100
        assert sum(1 for _ in store.find(limit=200)) == 1 + 100 + 5


def test_the_page_the_plot_and_the_evidence_are_written(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    for name, sections in (("explanation/evidence.md", ["bench"]), ("reference/speed.md", ["speed-drain"])):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text("".join(PAGE.format(section) for section in sections))
    monkeypatch.setenv("EVIDENCE_FILE", str(tmp_path / "explanation" / "evidence.md"))
    rows = "|  | tasks/s | of bare |\n| --- | --- | --- |\n| bare | 100 | 1.00 |\n| celery_idem & co | 96 | 0.96 |\n"
    assert page.publish({"drain": f"short\n\n{page.MORE}\n\n**a scene**\n\n{rows}"}, []) == 0
    evidence, speed = (tmp_path / name for name in ("explanation/evidence.md", "reference/speed.md"))
    assert "short" in evidence.read_text()
    assert "a scene" not in evidence.read_text()
    assert rows.strip() in speed.read_text()
    drawn = ElementTree.parse(tmp_path / "reference" / "speed.svg")
    assert {"a scene", "celery_idem & co", "0.96", "1.00"} <= {element.text for element in drawn.iter()}
    said = capsys.readouterr().out.split("\n")
    assert "**a scene**" in said
    assert said[-2] == "Every promise held."


@pytest.mark.parametrize(
    ("load", "quick", "status", "last"),
    [
        (0.5, False, 1, "BROKEN: too slow"),
        (14.2, False, 0, "Not judged: load 14.2 on 2 processors before it began."),
        (0.5, True, 0, "Not judged: a quick run says whether everything runs, not how fast."),
    ],
    ids=["judged", "busy", "quick"],
)
def test_a_busy_machine_and_a_quick_run_break_nothing(
    load: float, quick: bool, status: int, last: str, capsys: Any
) -> None:
    unjudged = page.not_judged(load, 2, quick=quick)
    assert page.publish({"engine": f"short\n\n{page.MORE}\n\nlong"}, ["too slow"], unjudged) == status
    assert capsys.readouterr().out.strip().split("\n")[-1] == last


def test_a_plot_of_nothing_is_a_picture_all_the_same() -> None:
    assert ElementTree.fromstring(plot.shares("")).tag.endswith("svg")


@pytest.mark.redis
@pytest.mark.postgres
@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # Celery's, to redis-py
def test_every_layer_of_the_profile_runs_a_message(redis_server: RedisServer, postgres_url: str) -> None:
    stores = {"redis": redis_server.new_database(), "postgresql": postgres_url}
    with profile.layers_on(stores, redis_server.new_database()) as layers:
        for layer in layers:
            layer.turn(0)
    assert len(layers) == 8
    assert all(layer.wall[0] > 0 for layer in layers)
    assert len(profile.rows_of(layers)) == 8
