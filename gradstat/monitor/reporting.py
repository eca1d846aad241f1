"""How a monitor speaks to people: warnings at the user's line, and a logger where these are silenced."""

from __future__ import annotations

import logging
import traceback
import warnings
from typing import Any

from gradstat._core.warn import warn_user

_logger = logging.getLogger("gradstat")


class AnomalyWarning(UserWarning):
    """A finding of a monitor."""


def warn(text: str, category: type[Warning] = AnomalyWarning, *, insist: bool = False) -> None:
    """Warns at the user's line; to ``insist`` is to log an error where a filter, not of `AnomalyWarning`, hides it."""
    text = f"gradstat: {text}"
    if insist:
        filters: list[Any] = list(warnings.filters)
        for action, pattern, kind, module, _ in filters:
            if issubclass(category, kind) and module is None and (pattern is None or pattern.match(text)):
                if action == "ignore" and not issubclass(kind, AnomalyWarning):
                    _logger.error(text)
                break
    warn_user(text, category)


def warn_of_failure(what: str) -> None:
    """Tells ``what`` has failed and is not watched for it, with the error that is being handled."""
    warn_user(f"gradstat: {what}; training goes on:\n{traceback.format_exc()}", RuntimeWarning)
