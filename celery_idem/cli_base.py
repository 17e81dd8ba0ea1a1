"""What ``celery idem`` and ``celery governed`` have in common: how a command refuses, and how it says what it did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from celery import Celery

from celery_idem.cli_key import Refusal, option
from celery_idem.cli_text import Clock, as_json, one_line, scrubbed, utc
from celery_idem.core.settings import given_under
from celery_idem.errors import CeleryIdemError

_OURS = ("idempotency_", "governed_")
_WANTED = "celery_idem.json"


class Commands(click.Group):
    """Tells every refusal in one line, without a traceback and without credentials."""

    def secrets(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  the subclasses ask it
        """What the app's settings hold that nobody may read, the longest first."""
        return []

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (CeleryIdemError, Refusal) as error:
            if isinstance(error, Refusal):
                kind, shape = error.kind, error.shape
            else:
                kind, shape = type(error).__name__, error.facts
            refusal = Refusal(kind, scrubbed(one_line(error), self.secrets(ctx)), **shape)
            refusal.wants_json = wants_json(ctx)
            raise refusal from error


def chosen_app(ctx: click.Context) -> Celery:
    """The app the command is about; wrong usage where nobody named one and Celery's own has nothing set."""
    app: Celery = ctx.obj.app
    if app.main == "default" and not any(given_under(prefix, app.conf)[0] for prefix in _OURS):
        raise click.UsageError(f"no app was named: celery -A <app> {' '.join(ctx.command_path.split()[1:])}")
    return app


def wants_json(ctx: click.Context) -> bool:
    """Whether ``--json`` was given."""
    return bool(ctx.meta.get(_WANTED, False))


def _note_json(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    ctx.meta[_WANTED] = wanted


json_option = option("--json", is_flag=True, expose_value=False, is_eager=True, callback=_note_json, help="Print JSON.")


def say(ctx: click.Context, said: str, shape: Mapping[str, Any]) -> None:
    """Print the text, or with ``--json`` the one document."""
    click.echo(as_json(shape) if wants_json(ctx) else said)


def seen(clock: Clock) -> dict[str, Any]:
    """By whose clock a document's times are, and what it showed."""
    return {"clock": clock.whose, "now": utc(clock.now, "milliseconds")}
