"""S3 and S4: what an old token cannot do, and what is done about a record that is damaged or from the future."""

from __future__ import annotations

from dataclasses import replace

from celery_idem.conformance.case import expect, expect_is
from celery_idem.conformance.claim_cases.bench import Bench, case, every_verb, outcome
from celery_idem.core.records import Answer, Claim, Ended, Release, Renewal, Successor

AFTERWARDS = ("claimed", "completed", "released", "forgotten")


def taken_over(bench: Bench, how: str) -> list[Claim]:
    """Claims whose key another took, and then ended in this way: the old one, and the same under the new fence."""
    old = bench.take(bench.op(how, continues=True))
    new = bench.take(bench.op(how, "N", continues=True), dead=old.fence)
    if how == "completed":
        bench.store.complete(new, outcome(b"new"))
    elif how == "released":
        bench.store.release(new, Release.YIELDED)
    elif how == "forgotten":
        bench.store.forget(new.key, new.fence)
    return [old, replace(old, fence=new.fence)]


# --- S3 ---------------------------------------------------------------------------------------------------------------


@case("S3")
def an_old_token_completes_nothing(bench: Bench) -> None:
    """A store that takes a completion from whoever brings one."""
    for how in AFTERWARDS:
        for claim in taken_over(bench, how):
            before = bench.stored(how)
            ended = bench.store.complete(claim, outcome(b"old"))
            expect_is(ended, Ended.LOST, f"of a key that another {how}, an old token's completion was {ended.value}")
            bench.same(before, "an old token's completion", how)


@case("S3")
def an_old_token_releases_nothing(bench: Bench) -> None:
    """A store in which a late worker frees the key of the one that took over."""
    for how in AFTERWARDS:
        for claim in taken_over(bench, how):
            before = bench.stored(how)
            for reason in Release:
                ended = bench.store.release(claim, reason, successor=Successor(1, 5))
                expect_is(ended, Ended.LOST, f"of a key that another {how}, an old token's release was {ended.value}")
            bench.same(before, "an old token's release", how)


@case("S3")
def an_old_token_renews_nothing(bench: Bench) -> None:
    """A store that does not tell a body that its claim is gone."""
    for how in AFTERWARDS:
        for claim in taken_over(bench, how):
            before = bench.stored(how)
            renewed = bench.store.renew([claim])[claim.token]
            expect_is(renewed, Renewal.LOST, f"of a key that another {how}, an old token's renewal was {renewed.value}")
            bench.same(before, "an old token's renewal", how)


@case("S3")
def an_old_token_disturbs_nobody_in_its_batch(bench: Bench) -> None:
    """A store in which one lost lease loses the others that are renewed with it."""
    old, _ = taken_over(bench, "claimed")
    others = [bench.take(bench.op(f"k{number}")) for number in range(5)]
    answers = bench.store.renew([*others[:3], old, *others[3:]])
    expect_is(answers[old.token], Renewal.LOST, f"the lost lease was answered {answers[old.token].value}")
    wrong = [answers.get(claim.token) for claim in others if answers.get(claim.token) is not Renewal.RENEWED]
    expect(not wrong, f"leases renewed together with a lost one were answered {wrong}, not RENEWED")


# --- S4 ---------------------------------------------------------------------------------------------------------------


@case("S4", "garble_body")
def a_garbled_body_still_proves_completion(bench: Bench) -> None:
    """A store that runs a body again because its first result cannot be read."""
    claim = bench.complete()
    bench.hook("garble_body")(claim.key)
    for operation in (bench.op(), bench.op(message="N")):
        record = bench.answers(Answer.COMPLETED, operation, "of a completion whose body is garbled").record
        encoded = record.outcome.encoded if record and record.outcome else None
        expect_is(encoded and encoded.body, b"garbled", f"the body is garbled, the answer has {encoded}")


@case("S4", "newer", "raw")
def no_verb_touches_a_newer_record(bench: Bench) -> None:
    """A store of this release that destroys what the next one wrote."""
    claim = bench.take(bench.op(continues=True))
    bench.hook("newer")(claim.key)
    raw = bench.hook("raw")
    before = raw(claim.key)
    for name, verb in every_verb(bench, bench.store, claim).items():
        if name not in {"claim", "get", "find"}:
            verb()
            expect(raw(claim.key) == before, f"{name} changed a record of a newer release")
    expect(bench.store.forget(claim.key, None) is False, "a record of a newer release was taken for unreadable")
    expect(raw(claim.key) == before, "forget without a fence changed a record of a newer release")


@case("S4", "newer")
def a_newer_record_is_nobodys_claim(bench: Bench) -> None:
    """A store that tells a caller that it ended or renewed a record which the next release has written since."""
    claim = bench.take()
    bench.hook("newer")(claim.key)
    ended = (bench.store.complete(claim, outcome()), bench.store.release(claim, Release.ENDED))
    expect_is(ended, (Ended.LOST, Ended.LOST), f"complete and release were answered {ended}")
    renewed = bench.store.renew([claim])[claim.token]
    expect_is(renewed, Renewal.LOST, f"renew was answered {renewed.value}")
    expect(bench.store.forget(claim.key, claim.fence) is False, "forget says that it forgot it")
