"""The shop's Celery app. Nothing in it knows of celery_idem: see settings.py for the store and tasks.py for the tasks."""

from __future__ import annotations

from celery import Celery

app = Celery("shop", include=["example_project.tasks"])
app.config_from_object("example_project.settings")  # read when the first setting is needed, not here
