"""The shop's Celery settings, from environment variables; without any of them everything is a file under ``.demo/``.

SHOP_DIR      where the files are: ledger, and unless said otherwise messages, results, claims and actions
SHOP_NAME     prefix of queues and of claims, so that shops can share servers
SHOP_BROKER, SHOP_RESULTS, SHOP_STORE, SHOP_ACTIONS    URLs
"""

from __future__ import annotations

from os import environ
from typing import Any

from kombu.transport import TRANSPORT_ALIASES

from example_project import folder

DIR = folder()
NAME = environ.get("SHOP_NAME", "shop")
BARE_QUEUE = f"{NAME}-bare"
TRANSPORT_ALIASES["filesystem"] = "example_project.files:Transport"


def transport_options(broker: str) -> dict[str, Any]:
    """Keep this shop's messages apart from everybody else's on the same broker."""
    if broker.startswith("filesystem:"):
        messages, control, read = (DIR / name for name in ("messages", "control", "read"))
        for place in (messages, control, read):
            place.mkdir(exist_ok=True)
        # One folder for both directions: worker and publisher share it, and the queue is in the file's name.
        places = {"data_folder_in": messages, "data_folder_out": messages, "control_folder": control}
        options = {name: str(place) for name, place in places.items()}
        return {**options, "store_processed": True, "processed_folder": str(read), "polling_interval": 0.1}
    if broker.startswith(("redis:", "rediss:")):
        return {"global_keyprefix": f"{NAME}:"}
    if broker.startswith(("amqp:", "amqps:", "pyamqp:")):
        return {"confirm_publish": True}
    return {}


broker_url = environ.get("SHOP_BROKER", "filesystem://")
broker_transport_options = transport_options(broker_url)
broker_connection_retry_on_startup = True
result_backend = environ.get("SHOP_RESULTS", f"db+sqlite:///{DIR / 'results.db'}")
task_default_queue = NAME
task_routes = {"example_project.tasks.charge_plain": {"queue": BARE_QUEUE}}

# A message is acked when its task is done, and goes back when the process that ran it dies. IdempotentTask would set
# both by itself; here the plain task gets them too, for a fair comparison.
task_acks_late = True
task_reject_on_worker_lost = True
worker_prefetch_multiplier = 1
worker_lost_wait = 0.5  # seconds; Celery's 10 would only make the demo longer
worker_enable_remote_control = False

idempotency_store = environ.get("SHOP_STORE", f"sqlite:///{DIR / 'claims.db'}")
idempotency_namespace = NAME
# Seconds a receipt is kept for duplicates, a day unless you say otherwise; longer than a broker's visibility timeout.
idempotency_ttl = 7200

governed_store = environ.get("SHOP_ACTIONS", f"sqlite:///{DIR / 'actions.db'}")
# Seconds, all of them short because the demo waits for them; the defaults are 60, 30 and 120.
governed_lease = 3
governed_sweep_interval = 1
governed_sweep_grace = 2
