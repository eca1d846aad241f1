"""What commands share: their expected error, and their parser."""

from __future__ import annotations

import argparse
from typing import NoReturn

from gradstat._core.text import printable


class UsageError(ValueError):
    """A command cannot do what the user asked for. The message gives the reason and is printed without a traceback."""


class Parser(argparse.ArgumentParser):
    """The parser of a command, whose errors repeat arguments in printable form."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))
