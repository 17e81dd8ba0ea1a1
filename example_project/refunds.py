"""The shop's refunds: proposed by the shop, approved by an owner, made once by the provider's refund service.

A refund is no Celery task of ours. celery_idem runs the chain that brings an approved one to the provider, and looks
there where nobody knows whether it arrived.
"""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict, Field

from celery_idem.governed import ExecutionRequest, HTTPEndpoint, action, approve, propose
from celery_idem.governed.records import Action
from example_project.app import app


class RefundPayload(BaseModel):
    """What the owner approves: this order, this amount, nothing else."""

    model_config = ConfigDict(extra="forbid")

    order_id: str = Field(min_length=1, max_length=40)
    amount: int = Field(gt=0)


@action("shop.refund", payload=RefundPayload, observation_window=60, max_observations=3, observe_delay=0.5)
class Refund(HTTPEndpoint):
    """PUT makes the refund, GET looks for it. The numbers are small because the demo waits for them."""

    url = os.environ.get("SHOP_REFUNDS", "http://127.0.0.1:8099/refunds")
    allow_http = True  # it is on this machine
    timeout = 1.5

    def headers(self, request: ExecutionRequest) -> dict[str, str]:  # noqa: ARG002  the same for every request
        """Who asks, so that the demo knows whom to kill. Here a real shop puts its credentials."""
        return {"Worker": str(os.getpid())}


def ask_for_refund(order_id: str, amount: int) -> Action:
    """Propose a refund of an order; asked again for the same, it is the same proposal."""
    payload = {"order_id": order_id, "amount": amount}
    return propose("shop.refund", payload, idempotency_key=f"refund:{order_id}", app=app)


def allow_refund(action_id: str, owner: str, lifetime: float = 3600.0) -> Action:
    """Approve a proposed refund in the owner's name, for so many seconds, and have it made."""
    return approve(action_id, principal=owner, lifetime=lifetime, channel="demo", app=app)
