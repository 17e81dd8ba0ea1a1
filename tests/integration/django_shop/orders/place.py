"""What a web process does, as a script: prints one JSON object."""

import json

import django

django.setup()

from celery import current_app  # noqa: E402
from celery.contrib.django.task import DjangoTask  # noqa: E402
from django.db import transaction  # noqa: E402

from orders import tasks  # noqa: E402

TASKS = [tasks.charge, tasks.remind, tasks.refund]


class Undone(Exception):
    pass


def waiting() -> int:
    with current_app.connection_for_read() as connection:
        return connection.default_channel.queue_declare("celery").message_count


def main() -> None:
    told = {"is_django": [isinstance(task, DjangoTask) for task in TASKS], "app_task": str(current_app.task_cls)}
    for task in TASKS:
        try:
            with transaction.atomic():
                task.delay_on_commit(1)
                raise Undone
        except Undone:
            pass
    told["sent_after_rollback"] = waiting()
    with transaction.atomic():
        for task in TASKS:
            task.apply_async_on_commit((2,), task_id=f"{task.name}-2")
        told["sent_before_commit"] = waiting()
    told["sent_after_commit"] = waiting()
    for task in TASKS:
        task.apply_async((2,), task_id=f"{task.name}-2")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
