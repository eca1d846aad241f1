"""Helpers shared by the adapters: version checks, and patching methods of one object."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from gradstat.monitor.replay.step_state import is_replaying


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


class PatchedMethod:
    """Replaces a method of one instance by ``replacement``, whose first argument is the original. The class is intact.

    During a replay calls go to the original, so that the repeated step does not count as one.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._had = vars(owner).get(name)
        self._original = getattr(owner, name)
        self._active = True

        def method(_owner: Any, *args: Any, **kwargs: Any) -> Any:
            is_used = self._active and not is_replaying()
            return replacement(self._original, *args, **kwargs) if is_used else self._original(*args, **kwargs)

        # A bound method, because torch's schedulers expect an optimizer's `step` to be one.
        self._method = MethodType(method, owner)
        setattr(owner, name, self._method)

    def remove(self) -> None:
        """Restores the original. If another patch has been put on top, this one stays and only forwards calls."""
        self._active = False
        if vars(self._owner).get(self._name) is self._method:
            if self._had is None:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._had)
