"""The checker on made-up histories: good ones break nothing, and each bad one is caught by its own rule."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.chaos.aof import vanished
from tests.chaos.checker import Verdict, judge
from tests.chaos.history import Event, History, read

LEASE = 8.0


class Tale:
    """A history told by hand; ``now`` moves one second with every event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[Event] = []

    def say(self, kind: str, key: str = "", pid: int = 1, **more: Any) -> Tale:
        self.now += 1
        self.events.append(Event(self.now, kind, key, pid, "w", more))
        return self

    def published(self, key: str, followers: Sequence[str] = (), copies: int = 1) -> Tale:
        for _ in range(copies):
            self.say("sent", key, id=key)
        return self.say("published", key, heads=[key], followers=list(followers))

    def begins(self, key: str, name: str, fence: int = 1, pid: int = 1) -> Tale:
        token = f"t-{name}"
        self.say("claimed", pid=pid, token=token, fence=fence)
        return self.say("start", key, pid, id=key, attempt=name, fence=fence, token=token, record=f"r-{key}")

    def effect(self, key: str, name: str, fence: int = 1, *, accepted: bool = True) -> Tale:
        return self.say("effect", key, attempt=name, fence=fence, accepted=accepted)

    def ends(self, key: str, name: str, *, completes: bool = True) -> Tale:
        self.say("end", key, attempt=name)
        return self.say("completed", token=f"t-{name}", record=f"r-{key}") if completes else self

    def runs(self, key: str, name: str, fence: int = 1, pid: int = 1) -> Tale:
        self.begins(key, name, fence, pid).effect(key, name, fence).ends(key, name)
        return self.say("answered", key, value=f"{key} by {name}").acked(key)

    def acked(self, key: str) -> Tale:
        return self.say("acked", key, tag=f"{key}-{self.now:g}-tag")

    def fault(self, name: str, pid: int, *, deadly: bool = True) -> Tale:
        number = len(self.events)
        self.say("fault", name=name, number=number, pids=[pid], deadly=deadly or None)
        return self.say("healed", number=number)

    def judged(self, *, fenced: bool = True) -> Verdict:
        return judge(self.events, lease=LEASE, fenced=fenced)


def only(verdict: Verdict, rule: str) -> bool:
    """Exactly one broken rule, and this is it."""
    return len(verdict.broken) == 1 and verdict.broken[0].startswith(rule)


def test_a_good_run_breaks_nothing() -> None:
    tale = Tale().published("a", ["a/then"]).runs("a", "one").say("sent", "a/then").runs("a/then", "two")
    assert tale.judged().broken == []


def test_a_published_key_that_nobody_completes_is_lost() -> None:
    assert only(Tale().published("a").acked("a").judged(), "lost: a")


def test_a_completion_without_an_effect_is_a_loss() -> None:
    tale = Tale().published("a").begins("a", "one").ends("a", "one").acked("a")
    assert only(tale.judged(), "lost: a")


def test_what_the_broker_popped_and_nobody_noted_is_the_loss_of_its_client() -> None:
    verdict = Tale().published("a").say("vanished", "a", tag="1").judged()
    assert verdict.dropped == ["a"]
    assert verdict.broken == []


def test_what_the_broker_keeps_and_gives_nobody_is_too() -> None:
    assert Tale().published("a").say("left", "a", stuck=True).judged().dropped == ["a"]


def test_what_the_broker_would_still_deliver_is_not() -> None:
    assert only(Tale().published("a").say("left", "a").judged(), "lost: a")


def test_a_continuation_whose_head_came_back_and_vanished_is_the_same_loss() -> None:
    tale = Tale().published("a", ["a/then"]).runs("a", "one").say("vanished", "a", tag="1")
    assert tale.judged().dropped == ["a/then"]


def log(*commands: Sequence[str]) -> bytes:
    """An append-only file."""
    lines = []
    for words in commands:
        lines += [f"*{len(words)}", *(part for word in words for part in (f"${len(word)}", word))]
    return "".join(f"{line}\r\n" for line in lines).encode()


def message(key: str) -> str:
    body = base64.b64encode(json.dumps([[], {"key": key}, {}]).encode()).decode()
    return json.dumps({"body": body, "headers": {}, "properties": {"delivery_tag": f"tag-{key}"}})


def test_the_brokers_log_tells_what_was_popped_and_never_noted() -> None:
    text = log(
        ("SELECT", "0"),
        *(("LPUSH", "q", message(key)) for key in ("first", "second", "third", "back", "waits")),
        ("RPOP", "q"),
        ("HSET", "unacked", "tag-first", "[]"),
        ("HDEL", "unacked", "tag-first"),
        ("RPOP", "q"),
        ("RPOP", "q"),
        ("HSET", "unacked", "tag-third", ""),
        ("RPOP", "q"),
        ("LPUSH", "q", message("back")),
    )
    assert vanished(text + b"*2\r\n$4\r\nRP", "q") == [("second", "tag-second")]


def test_an_effect_done_again_after_a_kill_before_completion_is_explained() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7).effect("a", "one").fault("kill child", 7)
    verdict = tale.runs("a", "two", fence=2).judged()
    assert (verdict.broken, verdict.explained) == ([], 1)


def test_an_effect_while_the_kill_was_on_its_way_is_explained() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7).fault("kill child", 7)
    healed = tale.events.pop()
    tale.effect("a", "one")
    tale.events.append(Event(tale.now + 1, healed.kind, more=healed.more))
    tale.now += 1
    verdict = tale.runs("a", "two", fence=2).judged()
    assert (verdict.broken, verdict.explained) == ([], 1)


@pytest.mark.parametrize("why", ["nothing", "before", "another", "late", "cut"])
def test_any_other_doubled_effect_is_a_violation(why: str) -> None:
    tale = Tale().published("a")
    if why == "before":
        tale.fault("kill child", 7)
    tale.begins("a", "one", pid=7).effect("a", "one")
    if why == "another":
        tale.fault("kill child", 8)
    if why == "cut":
        tale.fault("store cut after", 7, deadly=False)
    tale.ends("a", "one", completes=why == "late")
    if why == "late":  # killed after the completion
        tale.fault("kill child", 7)
    tale.begins("a", "two", fence=2).effect("a", "two", fence=2).ends("a", "two", completes=why != "late").acked("a")
    assert only(tale.judged(), "effect doubled without a kill between effect and completion: a")


def test_two_bodies_at_once_under_a_live_lease() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7).begins("a", "two", fence=2, pid=8)
    tale.effect("a", "two", fence=2).ends("a", "two").ends("a", "one", completes=False)
    assert only(tale.judged(), "two bodies at once under a live lease: a")


def test_two_bodies_at_once_after_the_lease_lapsed_are_allowed_and_the_old_effect_is_refused() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7)
    tale.now += LEASE
    tale.begins("a", "two", fence=2, pid=8).effect("a", "two", fence=2).ends("a", "two")
    verdict = tale.effect("a", "one", accepted=False).ends("a", "one", completes=False).judged()
    assert (verdict.broken, verdict.refused) == ([], 1)


def test_a_renewal_keeps_a_lease_alive() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7)
    tale.now += LEASE - 2
    tale.say("renewed", tokens=["t-one"])
    tale.now += LEASE - 4
    tale.begins("a", "two", fence=2, pid=8).effect("a", "two", fence=2).ends("a", "two")
    tale.ends("a", "one", completes=False)
    assert only(tale.judged(), "two bodies at once under a live lease: a")


def test_a_dead_holder_overlaps_nobody() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7).fault("kill worker", 7)
    assert tale.runs("a", "two", fence=2).judged().broken == []


def test_a_holder_that_began_while_its_kill_was_on_its_way_is_dead() -> None:
    tale = Tale().published("a").say("fault", name="kill worker", number=1, pids=[7], deadly=True)
    tale.begins("a", "one", pid=7).say("healed", number=1)
    assert tale.runs("a", "two", fence=2).judged().broken == []


def test_a_holder_that_ended_by_itself_overlaps_nobody() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7).say("gone", pids=[7])
    assert tale.runs("a", "two", fence=2).judged().broken == []


def test_without_leases_any_two_bodies_at_once_count() -> None:
    tale = Tale().published("a").begins("a", "one", fence=0, pid=7)
    tale.now += 10 * LEASE
    tale.begins("a", "two", fence=0, pid=8).effect("a", "two", fence=0).ends("a", "two")
    assert only(tale.ends("a", "one", completes=False).judged(fenced=False), "two bodies at once")


def test_two_completions_by_different_tokens() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7).effect("a", "one").fault("kill child", 7)
    tale.runs("a", "two", fence=2).say("completed", token="t-one", record="r-a")
    assert any(line.startswith("completed twice: a") for line in tale.judged().broken)


def test_a_completion_the_store_remembers_otherwise() -> None:
    tale = Tale().published("a").runs("a", "one").say("record", "a", state="COMPLETED", token="t-other")
    assert only(tale.judged(), "completed twice: a")


def test_a_completion_only_the_store_knows_of_is_one() -> None:
    tale = Tale().published("a").begins("a", "one").effect("a", "one").say("end", "a", attempt="one")
    assert tale.say("record", "a", state="COMPLETED", token="t-one").judged().broken == []


def test_a_completion_by_one_whose_effect_was_refused() -> None:
    tale = Tale().published("a").begins("a", "two", fence=2, pid=8).effect("a", "two", fence=2)
    tale.ends("a", "two", completes=False).begins("a", "one", pid=7)
    verdict = tale.effect("a", "one", accepted=False).ends("a", "one").judged()
    assert only(verdict, "completed twice: a")


def test_two_answers_to_one_key() -> None:
    tale = Tale().published("a").runs("a", "one").say("answered", "a", value="another")
    assert only(tale.judged(), "completed twice: a")


def unrecorded(fault: str) -> Verdict:
    tale = Tale().published("a").begins("a", "one", pid=7).effect("a", "one")
    if fault:
        tale.fault(fault, 7, deadly=False)
        healed = tale.events.pop()
    tale.ends("a", "one", completes=False)
    if fault:
        tale.events.append(Event(tale.now + LEASE, healed.kind, more=healed.more))
    tale.now += LEASE
    tale.say("told", name="COMPLETE_FAILED", message_id="a", fence="1").say("answered", "a", value="a by one")
    return tale.acked("a").runs("a", "two", fence=2, pid=8).judged()


def test_a_completion_the_store_was_too_silent_for_is_no_loss_and_its_second_run_is_explained() -> None:
    verdict = unrecorded("partition")
    assert (verdict.broken, verdict.unrecorded, verdict.contradicted, verdict.explained) == ([], 1, 1, 1)


def test_a_completion_that_is_recorded_when_the_store_is_back_is_counted_as_late() -> None:
    tale = Tale().published("a").begins("a", "one").effect("a", "one").ends("a", "one", completes=False)
    tale.fault("partition", 1, deadly=False)
    tale.say("told", name="COMPLETE_FAILED", message_id="a", fence="1").say("answered", "a", value="a by one").acked(
        "a"
    )
    tale.say("completed", token="t-one", record="r-a").say("told", name="COMPLETED_LATE", message_id="a", fence="1")
    verdict = tale.judged()
    assert (verdict.broken, verdict.unrecorded, verdict.late) == ([], 0, 1)


def test_a_completion_that_was_not_recorded_although_the_store_was_there() -> None:
    assert any(line.startswith("completion not recorded, and the store was there: a") for line in unrecorded("").broken)


def test_an_old_fence_that_the_resource_took() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7).fault("stop", 7, deadly=False)
    tale.now += LEASE
    tale.begins("a", "two", fence=2, pid=8).effect("a", "two", fence=2).ends("a", "two")
    tale.effect("a", "one").ends("a", "one", completes=False)
    assert any(line.startswith("effect of a holder that was fenced out: a") for line in tale.judged().broken)


def test_an_effect_of_one_whose_successor_had_begun() -> None:
    tale = Tale().published("a").begins("a", "one", pid=7)
    tale.now += LEASE
    tale.begins("a", "two", fence=2, pid=8).effect("a", "one").ends("a", "one", completes=False)
    verdict = tale.say("end", "a", attempt="two").say("record", "a", state="COMPLETED", token="t-two").judged()
    assert only(verdict, "effect of a holder that was fenced out: a")


def test_a_continuation_that_never_ran() -> None:
    assert only(Tale().published("a", ["a/then"]).runs("a", "one").judged(), "continuation missing: a/then")


def test_a_continuation_of_what_was_lost_is_not_lost_twice() -> None:
    assert only(Tale().published("a", ["a/then"]).acked("a").judged(), "lost: a")


def test_a_continuation_that_ran_twice() -> None:
    tale = Tale().published("a", ["a/then"]).runs("a", "one").say("sent", "a/then").runs("a/then", "two")
    verdict = tale.begins("a/then", "three", fence=2).effect("a/then", "three", fence=2).say("end", attempt="three")
    assert only(verdict.judged(), "continuation doubled: a/then")


def test_faults_that_hit_nothing_are_idle() -> None:
    tale = Tale().published("a").fault("kill child", 9).begins("a", "one", pid=7).fault("kill child", 7)
    verdict = tale.fault("kill child", 7).runs("a", "two", fence=2).judged()
    assert (verdict.hit, verdict.idle, verdict.struck) == (1, 2, 1)


def test_half_a_line_is_not_an_event(tmp_path: Any) -> None:
    history = History(tmp_path / "history", "w")
    history.write("start", key="a", attempt="one", token=None)
    history.close()
    with (tmp_path / "history").open("a") as file:
        file.write('{"at": 1, "kind"')
    (event,) = read(tmp_path / "history")
    assert (event.kind, event.key, event.worker, event["attempt"], event["token"]) == ("start", "a", "w", "one", None)
