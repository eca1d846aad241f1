"""A pytest plugin with a fixture: ``pytest_plugins = ["gradstat.pytest_plugin"]`` in a conftest.

It is not registered automatically, so that installing gradstat does not make every test session import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradstat.monitor.testing import assert_healthy as _assert_healthy

__all__ = ["assert_healthy"]


@pytest.fixture
def assert_healthy() -> Callable[..., Any]:
    """`gradstat.monitor.assert_healthy`."""
    return _assert_healthy
