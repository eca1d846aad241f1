"""Names and other text of unknown origin, made safe to print."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` in one line, with all that is not printable as Python's escape sequences.

    Not printable are line breaks, terminal escapes, characters that change the direction of text, lone surrogates and
    the like, which names of parameters, files and series may contain.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
