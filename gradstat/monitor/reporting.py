"""A monitor's messages: warnings that point at the user's line, and a logger for when they are filtered out."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradstat._core.warn import warn_user

_logger = logging.getLogger("gradstat")

QUIET = 20
"""For this many steps after an incident, another is not measured, written or replayed again."""


class AnomalyWarning(UserWarning):
    """Warns of a finding of a monitor."""


def warn(text: str, category: type[Warning] = AnomalyWarning, *, log_if_ignored: bool = False) -> None:
    """Warns at the user's line. ``log_if_ignored`` logs the text if a filter for other warnings hides it."""
    text = f"gradstat: {text}"
    if log_if_ignored:
        filters: list[Any] = list(warnings.filters)
        for action, pattern, kind, module, _ in filters:
            if issubclass(category, kind) and module is None and (pattern is None or pattern.match(text)):
                if action == "ignore" and not issubclass(kind, AnomalyWarning):
                    _logger.error(text)
                break
    warn_user(text, category)


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
