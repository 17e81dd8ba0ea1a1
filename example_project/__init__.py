"""A small shop on Celery that charges every order once: tasks, ledger, and a demo that breaks things on purpose."""

from os import environ
from pathlib import Path


def folder() -> Path:
    """Where the shop's files are: ``SHOP_DIR``, or ``.demo`` here."""
    path = Path(environ.get("SHOP_DIR", ".demo")).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path
