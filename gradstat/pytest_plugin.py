"""A pytest plugin with two fixtures: ``pytest_plugins = ["gradstat.pytest_plugin"]`` in a conftest.

It is not registered automatically, so that installing gradstat does not make every test session import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from gradstat.monitor.testing import assert_golden as _assert_golden
from gradstat.monitor.testing import assert_healthy as _assert_healthy

__all__ = ["assert_golden", "assert_healthy"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--rewrite-golden``."""
    parser.getgroup("gradstat").addoption(
        "--rewrite-golden", action="store_true", help="make the files of golden runs anew before tests use them"
    )


@pytest.fixture
def assert_healthy() -> Callable[..., Any]:
    """`gradstat.monitor.assert_healthy`."""
    return _assert_healthy


@pytest.fixture
def assert_golden(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`gradstat.monitor.assert_golden`; with ``--rewrite-golden`` it makes the file first.

    Args:
        request: pytest's request of the test.
    """
    return functools.partial(_assert_golden, rewrite=request.config.getoption("--rewrite-golden"))
