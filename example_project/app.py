"""The shop's Celery app; settings.py names its broker and stores, tasks.py has the tasks, refunds.py the actions."""

from __future__ import annotations

from celery import Celery

app = Celery("shop", include=["example_project.tasks", "example_project.refunds"])
app.config_from_object("example_project.settings")  # read when the first setting is needed, not here
