"""A small project: one application, one database, Celery under its namespace."""

import os

SECRET_KEY = "test"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["orders"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SHOP_DATABASE"], "OPTIONS": {"timeout": 20}}
}

CELERY_BROKER_URL = os.environ["SHOP_BROKER"]
CELERY_RESULT_BACKEND = os.environ["SHOP_BROKER"]
CELERY_TASK_ACKS_LATE = True
CELERY_IDEMPOTENCY_STORE = os.environ["SHOP_STORE"]
CELERY_IDEMPOTENCY_TTL = 3600
if os.environ["SHOP_DOOR"] == "setting":
    CELERY_TASK_ANNOTATIONS = ("celery_idem:annotation",)
    CELERY_IDEMPOTENCY_TASKS = {"orders.tasks.remind": False, "orders.*": {"max_deliveries": 3}}
