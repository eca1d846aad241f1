"""Warnings attributed to the line of the user's program that caused them."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_logger = logging.getLogger("gradstat")
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


QUIET = 20  # for so many steps after an incident, another is not measured, written or replayed again


class AnomalyWarning(UserWarning):
    """Warns of a finding of a monitor."""


def warn(text: str, category: type[Warning] = AnomalyWarning) -> None:
    """Warns at the user's line."""
    warn_user(f"gradstat: {text}", category)


def show_finding(text: str, severity: str, warns: bool) -> None:
    """Sends a finding to the logger ``gradstat``, if logging is set up, and ``warns`` as well.

    Without logging, an error goes to the logger if a filter for other warnings hides it.
    """
    text = f"gradstat: {text}"
    if _logger.hasHandlers() or (warns and severity == "error" and _is_hidden(text)):
        _logger.log(getattr(logging, severity.upper()), text)
    if warns:
        warn_user(text, AnomalyWarning)


def _is_hidden(text: str) -> bool:
    """Whether a filter that does not name `AnomalyWarning` hides such a warning."""
    filters: list[Any] = list(warnings.filters)
    for action, pattern, kind, module, _ in filters:
        if issubclass(AnomalyWarning, kind) and module is None and (pattern is None or pattern.match(text)):
            return action == "ignore" and not issubclass(kind, AnomalyWarning)
    return False


def warn_of_failure(what: str) -> None:
    """Warns that ``what`` failed and is not watched, with the traceback of the current exception."""
    warn_user(f"gradstat: {what}; training goes on:\n{traceback.format_exc()}", RuntimeWarning)


@contextmanager
def warning_of_failure(what: str) -> Iterator[None]:
    """Calls `warn_of_failure` if the code inside raises."""
    try:
        yield
    except Exception:
        warn_of_failure(what)


@contextmanager
def not_replacing(error: BaseException | None) -> Iterator[None]:
    """At the end of a ``with`` block that ``error`` has ended: warns of an exception inside instead of raising it."""
    try:
        yield
    except Exception as found:
        if error is None:
            raise
        warn(str(found) or type(found).__name__)
