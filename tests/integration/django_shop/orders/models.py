from django.db import models


class Entry(models.Model):
    """One line of the ledger: what a task did."""

    what = models.CharField(max_length=20)
    order = models.IntegerField()
