"""Words that reports, findings and errors share, and functions that make text of unknown origin safe to print."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def printable(text: str) -> str:
    """``text`` in one line, with Python's escape sequences in place of characters that are not printable.

    Names of parameters, files and series may contain line breaks, terminal escapes, characters that change the
    direction of text, or lone surrogates. None of these is printable.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def expect(name: str, value: object, kinds: Any, expected: str) -> None:
    """Raises TypeError, which says what was ``expected`` as the argument ``name``, unless it is of one of ``kinds``."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")


def as_number(name: str, value: Any) -> float:
    """The argument ``name`` as a float; the error for anything else, of Python's type, names it."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        if hasattr(value, "__float__"):
            raise  # its own words
        raise type(error)(f"{name}: expected a number, got {value!r:.50}") from None


def count_of(count: int, word: str, ending: str = "s") -> str:
    """``1 step`` or ``3 steps``."""
    return f"{count:,} {word}{ending * (count != 1)}"


def steps_in_words(extent: tuple[int, int] | None) -> str:
    """``steps 3 to 5``, ``step 3``, or ``no steps`` for None."""
    if extent is None:
        return "no steps"
    first, last = extent
    return f"step {first}" if first == last else f"steps {first} to {last}"


def nan_and_inf(nan: int, inf: int) -> str:
    """``3 NaN and 1 Inf``; a count of 0 is left out."""
    return " and ".join(f"{count:,} {kind}" for count, kind in ((nan, "NaN"), (inf, "Inf")) if count)


def and_more(more: int, text: str = " and {} more") -> str:
    """``text`` with the number of things that are not shown; empty if there are none."""
    return text.format(f"{more:,}") if more > 0 else ""


def listed(names: Sequence[str], limit: int) -> str:
    """``a, b and 3 more``: at most ``limit`` of the names, made printable."""
    return ", ".join(map(printable, names[:limit])) + and_more(len(names) - limit)


def lines_of(items: Sequence[_T], limit: int, line: Callable[[_T], str], rest: str = "  and {} more") -> list[str]:
    """A ``line`` for each of at most ``limit`` items, then ``rest`` if there are more."""
    more = and_more(len(items) - limit, rest)
    return [*map(line, items[:limit]), *([more] if more else [])]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def wrapped(line: str, indent: int | None = None) -> str:
    """``line`` in lines of up to 100 columns; all but the first have an ``indent``, by default two more than it has."""
    hanging = " " * (len(line) - len(line.lstrip(" ")) + 2 if indent is None else indent)
    return textwrap.fill(line, 100, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)


def plain_fields(made: Any) -> dict[str, Any]:
    """The fields of the dataclass ``made`` by name, for JSON: tuples become lists, and ``to_dict`` is called."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return list(map(plain, value))
        return value.to_dict() if hasattr(value, "to_dict") else value

    return {field.name: plain(getattr(made, field.name)) for field in fields(made)}
