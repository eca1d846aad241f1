"""Methods of one object replaced by others, and put back even if somebody else has replaced them since."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any


class Replaced:
    """A method replaced on an instance; its class and other instances stay as they are.

    Args:
        owner: The instance.
        name: Of the method.
        make: Makes the new one of what was there.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        self._owner, self._name = owner, name
        self._had = vars(owner).get(name)
        self._below = getattr(owner, name)
        made = make(self._below)
        self._active = True

        def layer(_owner: Any, *args: Any, **kwargs: Any) -> Any:
            return made(*args, **kwargs) if self._active else self._below(*args, **kwargs)

        # A bound method, as torch's schedulers expect `step` of an optimizer to be.
        self._layer = MethodType(layer, owner)
        setattr(owner, name, self._layer)

    def remove(self) -> None:
        """Puts back what was there. If another replacement lies on top this one stays, and only hands calls on."""
        self._active = False
        if vars(self._owner).get(self._name) is self._layer:
            if self._had is None:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._had)
