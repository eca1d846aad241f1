"""What commands share: their expected error, and the import of functions given as ``module:attribute``."""

from __future__ import annotations

import argparse
import importlib
import operator
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from gradstat._core.text import printable


class UsageError(ValueError):
    """A command cannot do what the user asked for. The message gives the reason and is printed without a traceback."""


class Parser(argparse.ArgumentParser):
    """The parser of a command, whose errors repeat arguments in printable form."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def attribute_of(where: str, expected: str) -> Callable[..., Any]:
    """The function ``"module:attribute"`` from a module in the current folder or the environment.

    Raises `UsageError`; if ``where`` has another form, the message says what was ``expected``.
    """
    module_name, colon, attribute = where.partition(":")
    if not colon or not module_name or not attribute:
        raise UsageError(f"expected {expected}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"no module {error.name!r} in the current folder or the environment") from error
        raise UsageError(f"importing {module_name} failed: {error}") from error
    except Exception as error:
        raise UsageError(f"importing {module_name} raised\n{trace_of(error, __file__)}") from error
    try:
        function = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise UsageError(f"{module_name} has no {attribute}") from error
    if not callable(function):
        raise UsageError(f"{attribute} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def trace_of(error: Exception, without: str) -> str:
    """The traceback without the frames of the file ``without``, which are of no use to a user."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != without]
    return "".join(["".join(traceback.format_list(frames)), *traceback.format_exception_only(error)]).rstrip()
