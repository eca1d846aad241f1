"""`save` and `load`: a `Recording` as one file, written atomically and read without pickle."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradstat._core.files import replacing
from gradstat._core.importing import UsageError
from gradstat._core.text import printable
from gradstat._version import __version__
from gradstat.monitor.findings import Finding
from gradstat.monitor.recording import archive
from gradstat.monitor.recording.recording import COLUMNS, Recording, Series, check, scalar_rows

_T = TypeVar("_T")

SUFFIX = ".gradstat"
FORMAT = "gradstat recording"
VERSION = (1, 0)
"""Major: changes that an older gradstat would misread. Minor: additions that it can ignore."""
LIMIT = 4 << 30
"""Unpacked size in bytes above which `load` refuses a file."""


class RecordingFileError(UsageError):
    """A file is not a recording, is damaged, or is from a newer gradstat. The message names it and the remedy."""


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
    check(recording)
    header = {
        "columns": list(COLUMNS),
        "scalars": list(recording.scalars),
        "tables": [{"kind": kind, "names": list(series.names)} for kind, series in recording.tables.items()],
        "findings": [finding.to_dict() for finding in recording.findings],
        "backward_order": list(recording.backward_order),
        "meta": recording.meta,
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        "steps": np.asarray(recording.steps, "<i8"),
        "scalars": scalar_rows(recording, recording.scalars).astype("<f8", copy=False),
    }
    for i, series in enumerate(recording.tables.values()):
        arrays[f"tables/{i}/numel"] = np.asarray(series.numel, "<i8")
        arrays[f"tables/{i}/steps"] = np.asarray(series.steps, "<i8")
        # A tensor's field is contiguous over the steps: consecutive values are similar, and compress well.
        arrays[f"tables/{i}/values"] = np.ascontiguousarray(series.values.transpose(2, 1, 0), "<f4")
    return write(path, FORMAT, VERSION, header, arrays)


def load(path: str | os.PathLike[str], *, limit: int = LIMIT) -> Recording:
    """Reads what `save` wrote, bit for bit.

    The file may be untrusted: nothing in it is executed, and sizes are checked before memory is allocated.

    Args:
        path: The file.
        limit: Unpacked size in bytes above which it is refused.

    Raises:
        RecordingFileError: The file is not a recording, is damaged, exceeds ``limit``, or a newer gradstat wrote it.
        OSError: The file cannot be opened.
    """
    return opened(path, FORMAT, "gradstat.monitor.recording.save", VERSION, limit, _read)


def write(
    path: str | os.PathLike[str],
    form: str,
    version: tuple[int, int],
    header: Mapping[str, Any],
    arrays: Mapping[str, npt.NDArray[Any]],
) -> Path:
    """Writes a file of the given form, for `opened`; raises as `save`."""
    versions = {"format": form, "version": list(version), "gradstat": __version__}
    with replacing(path) as file:
        archive.write(file, {**versions, **header}, arrays)
    return Path(path)


def opened(
    path: str | os.PathLike[str],
    form: str,
    writer: str,
    version: tuple[int, int],
    limit: int,
    read: Callable[[archive.Reader, dict[str, Any]], _T],
) -> _T:
    """Checks the header of the file and returns what ``read`` makes of it; raises as `load`."""
    target = printable(os.fspath(path))
    with open(path, "rb") as file:
        try:
            reader = archive.Reader(file, limit)
            return read(reader, _header(reader, form, version))
        except RecordingFileError as error:
            raise RecordingFileError(f"{target}: {error}") from None
        except Exception as error:
            # Hostile bytes may raise any exception in zipfile, zlib, json, ast and numpy; callers get one kind.
            reason = str(error) or type(error).__name__
            raise RecordingFileError(
                f"{target} is not a {form}, or is damaged: {reason}. Expected a file written by "
                f"{writer}; if it was copied, copy it again"
            ) from error


def _header(reader: archive.Reader, form: str, version: tuple[int, int]) -> dict[str, Any]:
    header = reader.header()
    if header.get("format") != form:
        raise ValueError(f"its header does not say {form!r}")
    major, minor = map(int, header["version"])
    if major != version[0]:
        raise RecordingFileError(
            f"written by gradstat {header.get('gradstat', 'unknown')!s:.40} in version {major}.{minor} of the format; "
            f"this is gradstat {__version__}, which reads version {version[0]}. "
            "Upgrade gradstat: pip install -U gradstat"
        )
    return header


def _read(reader: archive.Reader, header: dict[str, Any]) -> Recording:
    columns = [str(name) for name in header["columns"]]
    order = [columns.index(name) for name in COLUMNS]
    scalars, tables = archive.texts(header["scalars"]), dict[str, Series]()
    if not isinstance(header["tables"], list):
        raise ValueError("its tables are not a list")
    steps, rows = reader.array("steps", "<i8"), reader.array("scalars", "<f8")
    for i, table in enumerate(header["tables"]):
        kind, names = *archive.texts([table["kind"]]), archive.texts(table["names"])
        numel, when = reader.array(f"tables/{i}/numel", "<i8"), reader.array(f"tables/{i}/steps", "<i8")
        values = reader.array(f"tables/{i}/values", "<f4")
        if len(values) != len(columns):
            raise ValueError(f"the values of its {kind} have {len(values)} columns, and it names {len(columns)}")
        restored = np.ascontiguousarray(values[order].transpose(2, 1, 0))
        tables[kind] = Series(names, numel, when, restored)
    recording = Recording(
        steps,
        # Copies: a view of a row would keep the whole array alive, and share changes with it.
        {name: row.copy() for name, row in zip(scalars, rows, strict=True)},
        tables,
        tuple(map(Finding.from_dict, header["findings"])),
        archive.texts(header["backward_order"]),
        dict(header["meta"]),
    )
    if len(recording.scalars) != len(scalars) or len(tables) != len(header["tables"]):
        raise ValueError("two of its series or tables have the same name")
    check(recording)
    return recording
