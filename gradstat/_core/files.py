"""Atomic file replacement: a file is written completely or not at all."""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from gradstat._core.text import expect


def path_of(path: object, name: str = "path") -> Path:
    """The argument ``name`` as a path; TypeError for anything else."""
    expect(name, path, str | os.PathLike, "a path")
    return Path(cast(Any, path))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that atomically replaces ``path`` at the end, synced to disk; on any error ``path`` stays as it is.

    Creates missing folders, and keeps the permissions of a file that it replaces. A process killed meanwhile leaves a
    hidden ``.tmp`` file beside ``path``. Devices and pipes (``/dev/null``) are written to instead of replaced.
    """
    given = path_of(path)
    if is_device(given):
        content = io.BytesIO()  # not every device supports tell and seek
        yield content
        given.write_bytes(content.getvalue())
        return
    path = Path(os.path.realpath(given))  # replaces the target of a symbolic link, not the link
    with _beside(path, given) as (file, unfinished):
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(unfinished, path)
    with suppress(OSError):  # sync the directory entry, too, where the file system allows it
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def try_replacing(path: str | os.PathLike[str]) -> None:
    """Raises OSError if `replacing` could not even begin; creates missing folders, and leaves no file."""
    given, path = Path(path), Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(given))
    if not is_device(given):
        with _beside(path, given) as (_, unfinished):
            unfinished.unlink()


def is_device(path: Path) -> bool:
    """Whether it is a device or a pipe, of which nothing can be read or written twice."""
    return path.is_char_device() or path.is_block_device() or path.is_fifo()


@contextmanager
def _beside(path: Path, given: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file in the folder of ``path``, with the permissions of ``path`` if it exists; removed on an error.

    An error names the path as it was ``given``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mode: int | None = None
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode & 0o777
    unfinished = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.tmp")
    opener = partial(os.open, mode=0o666 if mode is None else mode)  # the umask applies, as to any new file
    try:
        with open(unfinished, "xb", opener=opener) as file:
            if mode is not None:
                with suppress(OSError):  # some file systems have no permissions
                    os.chmod(unfinished, mode)
            yield file, unfinished
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(unfinished)):
            raise type(error)(error.errno, error.strerror, str(given)) from None
        raise
