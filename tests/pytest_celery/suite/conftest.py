"""pytest-celery's fixtures as a user would set them up; where there is no Docker, over processes of this host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shop_tasks

from tests.support.services import RabbitServer, RedisServer

ROOT = Path(__file__).resolve().parents[3]
LOCAL = os.environ["TEST_CONTAINERS"] == "local"


def pytest_report_header() -> str:
    return f"pytest-celery nodes: {'processes of this host' if LOCAL else 'Docker'}"


@pytest.fixture(params=["celery_redis_broker", "celery_rabbitmq_broker"])
def celery_broker(request: pytest.FixtureRequest) -> Iterator[Any]:
    broker = request.getfixturevalue(request.param)
    yield broker
    broker.teardown()


@pytest.fixture
def default_worker_tasks(default_worker_tasks: set[Any]) -> set[Any]:
    return default_worker_tasks | {shop_tasks}


@pytest.fixture
def default_worker_command(default_worker_command: list[str]) -> list[str]:
    return [*default_worker_command, "--concurrency", "2", "--without-gossip", "--without-mingle"]


@pytest.fixture
def default_worker_app(default_worker_app: Any, celery_backend_cluster_config: dict[str, Any]) -> Any:
    """The claims are kept beside the results."""
    default_worker_app.conf.update(
        idempotency_store=celery_backend_cluster_config["urls"][0],
        broker_connection_retry_on_startup=True,
        worker_prefetch_multiplier=1,
    )
    if default_worker_app.conf.broker_url.startswith("redis"):
        default_worker_app.conf.broker_transport_options = {"visibility_timeout": 1}
    return default_worker_app


if LOCAL:
    from tests.pytest_celery.suite.nodes import (
        LocalRabbit,
        LocalRedis,
        LocalWorker,
        LocalWorkerContainer,
        at,
        check_shape,
    )

    check_shape()

    @pytest.fixture
    def default_redis_broker(redis_server: RedisServer) -> Any:
        return at(LocalRedis, redis_server.new_database(), redis_server)

    @pytest.fixture
    def default_redis_backend(redis_server: RedisServer) -> Any:
        return at(LocalRedis, redis_server.new_database(), redis_server)

    @pytest.fixture
    def default_rabbitmq_broker(rabbit_server: RabbitServer) -> Any:
        return at(LocalRabbit, rabbit_server.create_vhost(), rabbit_server)

    @pytest.fixture
    def default_worker_container(
        tmp_path: Path,
        default_worker_initial_content: dict[str, bytes],
        default_worker_env: dict[str, str],
        default_worker_command: list[str],
    ) -> Iterator[Any]:
        worker = LocalWorker(tmp_path, default_worker_initial_content, default_worker_env, default_worker_command)
        yield LocalWorkerContainer(worker)
        worker.remove()

else:
    from pytest_docker_tools import build

    celery_base_worker_image = build(
        path=str(ROOT), dockerfile="tests/pytest_celery/Dockerfile", tag="celery-idem/worker:test"
    )
