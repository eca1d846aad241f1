"""Warnings attributed to the line of the user's program that caused them."""

from __future__ import annotations

import sys
import warnings

# Packages whose hooks, patched functions and callbacks may call gradstat on the user's behalf.
_BETWEEN = {
    *("gradstat", "torch", "lightning", "pytorch_lightning", "transformers", "accelerate", "trl", "ignite"),
    *("composer", "deepspeed", "timm", "torchtune", "contextlib"),
}


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost stack frame that belongs to neither gradstat nor torch nor a training framework."""
    frame, level, outside = sys._getframe(), 1, 0  # the level of the first frame outside gradstat, if there is no other
    while (package := str(frame.f_globals.get("__name__", "")).partition(".")[0]) in _BETWEEN:
        if package != "gradstat" and not outside:
            outside = level
        if frame.f_back is None:
            level = outside or level
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
