"""Tasks of both doors: plain ones, for the setting, and one that names its base."""

from celery import shared_task

from celery_idem import Policy
from celery_idem.contrib.django import DjangoTask
from orders.models import Entry


@shared_task
def charge(order):
    Entry.objects.create(what="charge", order=order)
    return f"charged {order}"


@shared_task
def remind(order):
    Entry.objects.create(what="remind", order=order)
    return f"reminded {order}"


@shared_task(base=DjangoTask, bind=True, idempotency=Policy(key="order:{order}"))
def refund(self, order):
    Entry.objects.create(what="refund", order=order)
    return f"refunded {order} {self.idempotency.key != ''}"
