"""How a monitor speaks to people: warnings where gradstat was called from, and a logger where these are silenced."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from typing import Any

_logger = logging.getLogger("gradstat")


class AnomalyWarning(UserWarning):
    """A finding of a monitor."""


def warn(text: str, category: type[Warning] = AnomalyWarning, *, insist: bool = False) -> None:
    """Warns where gradstat was called from; to ``insist`` is to log an error if a filter hides the warning.

    Not if that filter is for `AnomalyWarning` itself: then gradstat is meant.
    """
    text = f"gradstat: {text}"
    if insist:
        filters: list[Any] = list(warnings.filters)
        for action, pattern, kind, module, _ in filters:
            if issubclass(category, kind) and module is None and (pattern is None or pattern.match(text)):
                if action == "ignore" and not issubclass(kind, AnomalyWarning):
                    _logger.error(text)
                break
    warnings.warn(text, category, stacklevel=find_stack_level())


def warn_of_failure(what: str) -> None:
    """Tells ``what`` has failed and is not watched for it, with the error that is being handled."""
    text = f"gradstat: {what}; training goes on:\n{traceback.format_exc()}"
    warnings.warn(text, RuntimeWarning, stacklevel=find_stack_level())


def find_stack_level() -> int:
    """The stack level of the first frame outside of gradstat, as ``warnings.warn`` counts from the caller."""
    level, frame = 1, sys._getframe(1)
    while str(frame.f_globals.get("__name__", "")).startswith("gradstat."):
        level += 1
        if frame.f_back is None:
            break
        frame = frame.f_back
    return level
