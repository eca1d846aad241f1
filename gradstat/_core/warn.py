"""Warnings that point at the line of the user's program that led to them."""

from __future__ import annotations

import sys
import warnings

# What calls gradstat for the user: hooks, patched functions, callbacks.
_BETWEEN = {
    *("gradstat", "torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "trl", "ignite"),
    *("composer", "deepspeed", "timm", "torchtune", "contextlib"),
}


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns of ``text`` at the innermost line that is neither gradstat's, nor torch's, nor a framework's."""
    warnings.warn(text, category, stacklevel=_stack_level())


def _stack_level() -> int:
    """Where that line is, as ``warnings.warn`` counts from the caller; without one, the first outside of gradstat."""
    frame, level, outside = sys._getframe(1), 1, 0
    while True:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN:
            return level
        if package != "gradstat" and not outside:
            outside = level
        if frame.f_back is None:
            return outside or level
        frame, level = frame.f_back, level + 1
