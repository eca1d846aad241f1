"""Files that are there whole or not at all."""

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
    """A file that becomes ``path`` at the end, at once and on the disk; if anything fails, ``path`` stays as it is.

    Missing folders are made. A process killed meanwhile leaves a hidden ``.tmp`` file beside ``path``. What is no file
    but a device or a pipe (``/dev/null``) is written to, and not replaced.
    """
    path = Path(os.path.realpath(path))  # through a link, not in its place
    if path.is_char_device() or path.is_block_device() or path.is_fifo():
        content = io.BytesIO()  # not every device knows where in it one is
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
    with suppress(OSError):  # that the new name is on the disk, too: where folders can be synchronized
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
