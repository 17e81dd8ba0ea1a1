"""The local nodes say so where the plugin has changed under them."""

from __future__ import annotations

import pytest
from pytest_docker_tools import wrappers

from tests.pytest_celery.suite.nodes import check_shape


def test_a_plugin_of_another_shape_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check_shape()
    monkeypatch.delattr(wrappers.Container, "kill")
    with pytest.raises(pytest.UsageError, match="kill"):
        check_shape()
