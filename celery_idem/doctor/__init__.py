"""``celery -A app idem doctor``: what in an app's configuration does not go together, and the line that mends it.

``examine(app)`` looks at Celery's settings, ours, each idempotent task under its effective policy, and the beat
schedule. It imports the store's driver and opens no connection. What only the store can tell is ``celery idem
check``'s business; what a worker refuses to start with is told here as a fault, by the worker's own words. Each rule
is a function in ``settings``, ``tasks`` or ``beat``, and is silent where it does not know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_idem.app import runtime_of
from celery_idem.doctor import beat, settings, tasks
from celery_idem.doctor.facts import Facts
from celery_idem.doctor.finding import Finding, merged
from celery_idem.errors import ConfigurationError

if TYPE_CHECKING:
    from celery import Celery

RULES = (*settings.RULES, *tasks.RULES, *beat.RULES)


def examine(app: Celery) -> list[Finding]:
    """What does not go together in this app's configuration, the worst first; nothing where all of it does.

    Imports the modules the app names in ``imports`` and ``include``, as a worker does, and whatever they raise comes
    out. Changes nothing and asks nobody.
    """
    app.loader.import_default_modules()
    wrong = list(settings.unreadable(app.conf))
    if wrong:
        return wrong
    runtime = runtime_of(app)
    try:
        runtime.check_governed()
        if runtime.mode == "off":
            return [settings.switched_off()]
        runtime.check_tasks()
        if any(True for _ in runtime.tasks()):
            settings.check_driver(runtime)
    except ConfigurationError as error:
        return [settings.refused(error)]
    facts = Facts(runtime)
    return merged(found for rule in RULES for found in rule(facts))


__all__ = ["Finding", "examine"]
