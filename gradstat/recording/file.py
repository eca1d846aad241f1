"""`save` and `load`: a `Recording` as one file, written atomically and read without pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gradstat._core.files import is_device, path_of, replacing
from gradstat._core.importing import UsageError
from gradstat._core.saved import exactly, require, require_version
from gradstat._core.text import expect, printable
from gradstat._version import __version__
from gradstat.recording import archive
from gradstat.recording.recording import Recording, from_parts, parts_of

_T = TypeVar("_T")

SUFFIX = ".gradstat"
FORMAT = "gradstat recording"
VERSION = 1
"""Of the format. A file of another version is refused."""
LIMIT = 4 << 30
"""Unpacked size in bytes above which `load` refuses a file."""


class RecordingFileError(UsageError):
    """A file is not a recording, is damaged, or is in another version of the format. The message says which."""


def save(recording: Recording, path: str | os.PathLike[str]) -> Path:
    """Writes ``recording`` as one file, by convention named ``*.gradstat``.

    The file is replaced atomically: after a failure, ``path`` is as it was before.

    Args:
        recording: What to save. Values of ``meta`` and of evidence that JSON cannot represent are saved as text.
        path: The file. Missing folders are made, an existing file is replaced.

    Returns:
        ``path``.

    Raises:
        ValueError: The arrays of ``recording`` do not fit together; nothing is written.
        OSError: The file cannot be written; nothing is left behind.
    """
    header, arrays = parts_of(recording)
    return write(path, FORMAT, header, arrays)


def load(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Recording:
    """Reads what `gradstat.recording.save` wrote, bit for bit.

    The file may be untrusted: nothing in it is executed, and sizes are checked before memory is allocated.

    Args:
        path: The file.
        limit: Unpacked size in bytes above which it is refused.

    Raises:
        RecordingFileError: The file is not a recording, is damaged, exceeds ``limit``, or has another version.
        OSError: The file cannot be opened.
    """
    return opened(path, FORMAT, lambda reader, header: from_parts(header, reader.array, archive.HEADER), limit)


def write(path: str | os.PathLike[str], form: str, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Path:
    """Writes a file of the given form, for `opened`; raises as `save`."""
    with replacing(path) as file:
        archive.write(file, {"format": form, "version": VERSION, "gradstat": __version__, **header}, arrays)
    return Path(path)


def opened(
    path: str | os.PathLike[str], form: str, read: Callable[[archive.Reader, dict[str, Any]], _T], limit: int = LIMIT
) -> _T:
    """What ``read`` makes of the file and its header, of which form and version are checked; raises as `load`."""
    expect("limit", limit, int, "a number of bytes")
    target = printable(str(path_of(path)))
    if is_device(Path(path)):
        raise RecordingFileError(f"{target} is a pipe or a device; expected a regular file, such as a copy of it")
    with open(path, "rb") as file:
        try:
            reader = archive.Reader(file, limit)
            header = reader.header()
            if (found := str(header.get("format"))) != form and found.startswith("gradstat "):
                raise ValueError(f"it is a {found}; `gradstat golden make` makes a golden file of recordings")
            require(header, {"format": exactly(form)}, archive.HEADER)
            require_version(header, VERSION, archive.HEADER)
            return read(reader, header)
        except Exception as error:
            # Hostile bytes may raise any exception in zipfile, zlib, json, ast and numpy; callers get one kind.
            reason = f"{printable(str(error) or type(error).__name__):.500}"
            raise RecordingFileError(f"{target} cannot be read as a {form}: {reason}") from error
