"""Atomic file replacement: a file is written completely or not at all."""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that atomically replaces ``path`` at the end, synced to disk; on any error ``path`` stays as it is.

    Creates missing folders. A process killed meanwhile leaves a hidden ``.tmp`` file beside ``path``. Devices and pipes
    (``/dev/null``) are written to instead of replaced.
    """
    path = Path(os.path.realpath(path))  # replaces the target of a symbolic link, not the link
    if path.is_char_device() or path.is_block_device() or path.is_fifo():
        content = io.BytesIO()  # not every device supports tell and seek
        yield content
        path.write_bytes(content.getvalue())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.tmp")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # sync the directory entry, too, where the file system allows it
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
