"""Whether a framework is there, and new enough."""

from __future__ import annotations

import importlib
from types import ModuleType


def require(name: str, least: tuple[int, int]) -> ModuleType:
    """The imported framework.

    Raises:
        ImportError: It is missing or too old; the message says what to install.
    """
    wanted = f"{name}>={least[0]}.{least[1]}"
    remedy = f"pip install '{wanted}', or 'gradstat[{name}]'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"gradstat.integrations.{name} expected {wanted}, and found none: {remedy}") from None
    found = str(getattr(module, "__version__", "0.0"))
    if version_of(found) < least:
        raise ImportError(f"gradstat.integrations.{name} expected {wanted}, got {found}: {remedy}")
    return module


def version_of(text: str) -> tuple[int, int]:
    """Major and minor of a version, whatever follows."""
    numbers = ["".join(c for c in part if c.isdigit()) or "0" for part in (*text.split("."), "0")[:2]]
    return int(numbers[0]), int(numbers[1])
