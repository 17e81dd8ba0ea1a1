"""``celery -A app governed …``: what governed actions there are, and an owner's word on them.

Each command asks the app's own settings and action store, prints text or (``--json``) one document, and ends with 0,
with 1 where it refused or the store gave no answer, or with 2 for wrong usage. How things are said is the business of
``cli_governed_text``, what may be done that of ``governed``; docs/reference/governed-cli.md describes the commands.
"""

from __future__ import annotations

import functools
import socket
import uuid
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_idem import cli_governed_text as text
from celery_idem.app import runtime_of
from celery_idem.cli_base import Commands, chosen_app, json_option, say, seen, wants_json
from celery_idem.cli_key import LISTED, Duration, Refusal, Unlisted, option
from celery_idem.cli_text import Clock, aligned, printable, secrets_of, shown_url
from celery_idem.errors import ActionNotFound, ActionStoreError, GateRefused
from celery_idem.governed import chain, recovery
from celery_idem.governed.chain import Governance, governance_of
from celery_idem.governed.gate import message_approval
from celery_idem.governed.records import ALLOWED_TRANSITIONS, STATE_PROPOSED, Action, DeadLetter
from celery_idem.governed.settings import given_settings
from celery_idem.governed.signing import ApprovalSigner

if TYPE_CHECKING:
    from celery_idem.governed.sql.store import SQLActionStore

SHORTEST = 6
"""Characters a prefix of an id has at least."""
PAGE = 500
"""Rows read at a time where the whole table has to be."""


class Governed(Commands):
    """The group of these commands."""

    def secrets(self, ctx: click.Context) -> list[str]:
        """Of the store's URL and options."""
        url = given_settings(ctx.obj.app.conf).get("store")
        return secrets_of(url if isinstance(url, str) else "", {})


@click.group(cls=Governed)
@click.pass_context
@handle_preload_options
def governed(_ctx: click.Context, **_preload: Any) -> None:
    """Look after actions that happen only when an owner approves them.

    Exit codes: 0 done, 1 refused, not found or no answer from the store, 2 wrong usage.
    """


_command = functools.partial(governed.command, cls=CeleryCommand)
_yes = option("--yes", is_flag=True, help="Do not ask.")
_as = option("--as", "principal", metavar="NAME", required=True, help="Who decides; it is recorded for ever.")


def _governance(ctx: click.Context) -> Governance:
    governance = governance_of(chosen_app(ctx))
    ctx.call_on_close(governance.close)
    return governance


def _store(ctx: click.Context) -> SQLActionStore:
    return _governance(ctx).store


def _clock(store: SQLActionStore) -> Clock:
    return Clock(store.now(), "store")


def _plural(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 or not count else 's'}"


# --- what there is ---------------------------------------------------------------------------------------------------


@_command("init")
@json_option
@click.pass_context
def init(ctx: click.Context) -> None:
    """Make the tables of governed actions.

    Their indexes and triggers too, and the claim store's where it is the same database. Doing it again changes nothing.
    """
    governance = _governance(ctx)
    governance.store.create_schema()
    runtime = runtime_of(governance.app)
    if runtime.store_url == governance.settings["store"]:
        runtime.store.create_schema()
        runtime.close()
    url = shown_url(governance.settings["store"])
    say(ctx, f"action store {url}: the schema is in place", {"url": url})


@_command("list")
@option("--state", type=click.Choice(list(ALLOWED_TRANSITIONS), case_sensitive=False), help="Only these.")
@option("--source", metavar="TEXT", help="Only what this source proposed.")
@option("--type", "action_type", metavar="NAME", help="Only this type.")
@option("--limit", type=click.IntRange(min=1), default=100, help="At most so many [100].")
@json_option
@click.pass_context
def list_(ctx: click.Context, state: str | None, source: str | None, action_type: str | None, limit: int) -> None:
    """List actions, without their payloads.

    The oldest come first.
    """
    store = _store(ctx)
    found = store.find(state, source, action_type, limit=limit + 1)
    more, actions = len(found) > limit, found[:limit]
    clock = _clock(store)
    lines = [text.table(actions, clock)] if actions else []
    lines.append(f"{_plural(len(actions), 'action')}{', and more: raise --limit' if more else ''}")
    shapes = [text.action_shape(action, clock) for action in actions]
    say(ctx, "\n".join(lines), {**seen(clock), "actions": shapes, "more": more})


@_command("show")
@click.argument("action_id", cls=Unlisted, metavar="ID")
@option("--events", "wants_events", is_flag=True, help="Its history too.")
@option("--receipts", "wants_receipts", is_flag=True, help="The evidence of every step too.")
@json_option
@click.pass_context
def show(ctx: click.Context, action_id: str, wants_events: bool, wants_receipts: bool) -> None:
    """Show one action, all of it.

    Its payload, who decided, who works on it, how it ended. ID is its id, or at least the first 6 characters of it.
    """
    store = _store(ctx)
    action = _chosen(store, action_id)
    receipts, events = store.list_receipts(action["action_id"]), store.list_events(action["action_id"])
    clock = _clock(store)
    shape = {
        **seen(clock),
        "action": text.whole_shape(action, clock),
        "approvals": [text.approval_shape(receipt, clock) for receipt in text.gates(receipts)],
        "rejection": next(iter(text.rejection_shapes(events, clock)), None),
    }
    decisions = [*text.approvals(receipts, clock), *text.rejections(events, clock)]
    parts = [text.action_text(action, decisions, clock)]
    if wants_receipts:
        shape["receipts"] = [text.receipt_shape(receipt, clock) for receipt in receipts]
        parts.append(text.receipts_text(receipts, clock))
    if wants_events:
        shape["events"] = [text.event_shape(event, clock) for event in events]
        parts.append(text.events_text(events))
    say(ctx, "\n".join(parts), shape)


def _chosen(store: SQLActionStore, given: str) -> Action:
    """The action of this id, or the only one whose id begins so."""
    try:
        return store.get_action(given)
    except ActionNotFound:
        if len(given) < SHORTEST:
            raise
    found = list(islice((a for a in _every(store) if a["action_id"].startswith(given)), LISTED + 1))
    if not found:
        raise Refusal(
            "ActionNotFound",
            f"no action {given!r:.80}, nor one that begins so: check the id, and that governed_store names the right "
            "database",
        )
    if len(found) > 1:
        ids = [action["action_id"] for action in found[:LISTED]]
        listed = ", ".join(ids) + (", ..." if len(found) > LISTED else "")
        raise Refusal("Ambiguous", f"several actions begin with {given}: {listed}", actions=ids)
    return found[0]


def _every(store: SQLActionStore) -> Iterator[Action]:
    after = None
    while page := store.find(limit=PAGE, after=after):
        yield from page
        after = page[-1]["action_id"]


# --- an owner's word -------------------------------------------------------------------------------------------------


def _checked_digest(_ctx: click.Context, _param: click.Parameter, given: str | None) -> str | None:
    if given is None:
        return None
    digest = given.lower()
    if not 8 <= len(digest) <= 64 or set(digest) - set("0123456789abcdef"):
        raise click.BadParameter(f"{given!r} is no digest: give at least the first 8 of its 64 hex characters")
    return digest


def _checked_lifetime(_ctx: click.Context, _param: click.Parameter, given: float) -> float:
    if given <= 0:
        raise click.BadParameter("an approval that lasts no time approves nothing: give more than 0")
    return given


@_command("approve")
@click.argument("action_id", cls=Unlisted, metavar="ID")
@_as
@option("--expires-in", type=Duration(), default=3600.0, callback=_checked_lifetime, metavar="DURATION",
        help="Until when the mutation must have begun: 600, 10m, 2h [1h].")  # fmt: skip
@option("--digest", callback=_checked_digest, metavar="HEX", help="Refuse unless the payload's digest begins so.")
@option("--sign-with", type=click.File("rb"), metavar="FILE", help="Sign with this Ed25519 private key, a PEM file.")
@option("--key-id", metavar="NAME", help="What governed_approval_keys calls that key.")
@_yes
@json_option
@click.pass_context
def approve(
    ctx: click.Context,
    action_id: str,
    principal: str,
    expires_in: float,
    digest: str | None,
    sign_with: IO[bytes] | None,
    key_id: str | None,
    yes: bool,
) -> None:
    """Approve an action.

    Shows its payload and asks before. ID is the whole id. The first to approve wins, and whoever comes later is told
    who that was.
    """
    _must_be_able_to_ask(ctx, yes)
    if (sign_with is None) != (key_id is None):
        raise click.UsageError("--sign-with and --key-id belong together: give both or none")
    governance = _governance(ctx)
    signer = None if sign_with is None or key_id is None else ApprovalSigner.from_pem(key_id, sign_with.read())
    store = governance.store
    action = store.get_action(action_id)
    if digest is not None and not action["payload_sha256"].startswith(digest):
        raise Refusal("OtherDigest", f"the payload's digest is {action['payload_sha256']}: look at it again")
    if action["state"] == STATE_PROPOSED:  # else nothing is left to ask, and the store knows who was first
        if governance.keys is not None and signer is None:
            told = "gate refused, unsigned: approvals must be signed here: give --sign-with and --key-id"
            raise GateRefused(told, code="unsigned")
        _ask(ctx, f"Approve it as {printable(principal)}?", yes, aligned(_at_stake(action, _clock(store))))
    evidence = message_approval(
        action,
        principal=principal,
        channel="cli",
        thread_id=socket.gethostname(),
        event_id=str(uuid.uuid4()),
        decided_at=store.now(),
        lifetime=expires_in,
    )
    approved = chain.approve(action_id, evidence if signer is None else signer.sign(evidence), app=ctx.obj.app)
    clock = _clock(store)
    (gate,) = (gate for gate in text.gates(store.list_receipts(action_id)) if gate["receipt_key"] == chain.GATE_KEY)
    said = f"{text.approval(gate, clock)}\nits chain is {printable(approved['chain_id'])}"
    shape = {"action": text.whole_shape(approved, clock), "approval": text.approval_shape(gate, clock)}
    say(ctx, said, {**seen(clock), **shape})


def _must_be_able_to_ask(ctx: click.Context, yes: bool) -> None:
    if wants_json(ctx) and not yes:
        raise click.UsageError("--json asks nothing: give --yes too")


def _at_stake(action: Action, clock: Clock) -> Iterator[tuple[str, str]]:
    yield "action", text.action_line(action, clock)
    yield from text.payload_rows(action)


def _ask(ctx: click.Context, question: str, yes: bool, about: str) -> None:
    if wants_json(ctx):
        return
    click.echo(about)
    try:
        sure = yes or click.confirm(question)
    except click.Abort:  # no answer can be had
        click.echo(err=True)
        sure = False
    if not sure:
        raise Refusal("NotConfirmed", "nothing was decided")


@_command("reject")
@click.argument("action_id", cls=Unlisted, metavar="ID")
@_as
@option("--reason", required=True, metavar="TEXT", help="Why; it is recorded for ever.")
@_yes
@json_option
@click.pass_context
def reject(ctx: click.Context, action_id: str, principal: str, reason: str, yes: bool) -> None:
    """Reject an action.

    An approved one can be rejected too, until it is dispatched. ID is the whole id.
    """
    _must_be_able_to_ask(ctx, yes)
    store = _store(ctx)
    action = store.get_action(action_id)
    if action["terminal_at"] is None:
        _ask(ctx, f"Reject it as {printable(principal)}?", yes, text.action_line(action, _clock(store)))
    rejected = chain.reject(action_id, reason, principal=principal, app=ctx.obj.app)
    clock = _clock(store)
    said = f"rejected by {printable(principal)}: {printable(reason)}"
    say(ctx, said, {**seen(clock), "action": text.action_shape(rejected, clock)})


# --- keeping order ---------------------------------------------------------------------------------------------------


@_command("admission")
@click.argument("what", cls=Unlisted, type=click.Choice(["show", "open", "close"]), default="show")
@option("--as", "actor", metavar="NAME", help="Who opens or closes it.")
@option("--reason", metavar="TEXT", help="Why.")
@json_option
@click.pass_context
def admission(ctx: click.Context, what: str, actor: str | None, reason: str | None) -> None:
    """Show, open or close the switch.

    Every mutation asks it before it begins. Closed, no approval is consumed, and approved actions wait. What was
    dispatched before is observed all the same.
    """
    changes = what != "show"
    if changes and (actor is None or reason is None):
        raise click.UsageError(f"to {what} it, give --as and --reason")
    if not changes and (actor is not None or reason is not None):
        raise click.UsageError("--as and --reason are for open and close")
    store = _store(ctx)
    stands = store.set_admission(what == "open", str(reason), actor=str(actor)) if changes else store.admission()
    clock = _clock(store)
    say(ctx, text.admission_text(stands, clock), {**seen(clock), "admission": text.admission_shape(stands, clock)})


@_command("sweep")
@json_option
@click.pass_context
def sweep(ctx: click.Context) -> None:
    """Look for actions that lost their worker.

    Or their message. Looks once; workers do so too, every governed_sweep_interval.
    """
    _governance(ctx)
    counts = recovery.sweep(ctx.obj.app)
    said = (
        f"{_plural(counts['released'], 'lapsed lease')} released, {_plural(counts['ended'], 'action')} ended, "
        f"{_plural(counts['enqueued'], 'action')} enqueued again"
    )
    if counts["unpublished"]:
        lost = f"the broker took no message for {counts['unpublished']} more: check it, the next sweep tries again"
        raise Refusal("Unpublished", f"{said}; {lost}", **counts)
    say(ctx, said, counts)


@_command("dead-letters")
@option("--limit", type=click.IntRange(min=1), default=100, help="At most so many [100].")
@json_option
@click.pass_context
def dead_letters(ctx: click.Context, limit: int) -> None:
    """List actions a person should look at.

    They ended without their effect, or nobody knows. The last to end come first.
    """
    store = _store(ctx)
    last = _last_letters(store, limit + 1)
    letters = [(letter, _action_of(store, letter)) for letter in last[:limit]]
    more, clock = len(last) > limit, _clock(store)
    lines = [text.letters_text(letters, clock)] if letters else []
    lines.append(f"{_plural(len(letters), 'dead letter')}{', and older ones: raise --limit' if more else ''}")
    shapes = [text.letter_shape(letter, action, clock) for letter, action in letters]
    say(ctx, "\n".join(lines), {**seen(clock), "dead_letters": shapes, "more": more})


def _last_letters(store: SQLActionStore, count: int) -> list[DeadLetter]:
    last: deque[DeadLetter] = deque(maxlen=count)
    page = store.list_dead_letters(limit=PAGE)
    last.extend(page)
    while len(page) == PAGE:
        page = store.list_dead_letters(limit=PAGE, after=page[-1]["action_id"])
        last.extend(page)
    return list(reversed(last))


def _action_of(store: SQLActionStore, letter: DeadLetter) -> Action | None:
    """The action; None where its payload was changed in the database."""
    try:
        return store.get_action(letter["action_id"])
    except ActionStoreError:
        return None
