"""Version checks of the frameworks, shared by the adapters."""

from __future__ import annotations

import importlib
import re
from types import ModuleType


def require(name: str, minimum: tuple[int, int], extra: str = "") -> ModuleType:
    """Imports the framework ``name``; ``extra`` is gradstat's extra that installs it, by default of the same name.

    Raises ImportError, which says what to install, if it is missing or older than ``minimum``.
    """
    extra = extra or name
    wanted = f"{name}>={minimum[0]}.{minimum[1]}"
    remedy = f"pip install -U '{wanted}', or 'gradstat[{extra}]'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"gradstat.integrations.{extra} needs {wanted}, which is not installed: {remedy}") from None
    version = str(getattr(module, "__version__", "0.0"))
    if version_of(version) < minimum:
        raise ImportError(f"gradstat.integrations.{extra} needs {wanted}, found {version}: {remedy}")
    return module


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version; the rest is ignored."""
    major, minor, *_ = (*map(int, re.findall(r"\d+", text)[:2]), 0, 0)
    return major, minor
