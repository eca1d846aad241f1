"""The container of recordings: numpy's ``.npz``, a zip of arrays, with a JSON header; validated when it is read."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

HEADER = "header.json"
_HEADER_LIMIT = 64 << 20
_MOST_VALUES = 4 << 20  # of the header, each of which takes about 100 bytes
_DEEPEST = 100


def encoded(value: Any, strict: bool = False, depth: int = 0) -> Any:
    """``value`` for json: numpy's numbers as Python's, other types as text, if ``strict`` also NaN and Inf.

    A recording is often saved because a run has failed, and must not be lost to one unusual value. ValueError if it is
    nested so deeply that reading it again might fail.
    """
    if depth > _DEEPEST:
        raise ValueError(f"it is nested in more than {_DEEPEST} levels")
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): encoded(item, strict, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(item, strict, depth + 1) for item in value]
    if strict and isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def write(file: BinaryIO, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes the archive; the same content gives the same bytes."""
    # Not `numpy.savez_compressed`, whose level takes several times as long and saves a few percent: most bytes are
    # mantissas. Members that are opened by name are dated 1980, so that bytes do not depend on the time.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
        with archive.open(HEADER, "w") as member:  # ASCII preserves any string, even lone surrogates
            member.write(json.dumps(encoded(header), separators=(",", ":")).encode())
        for name, array in arrays.items():
            little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
            with archive.open(f"{name}.npy", "w", force_zip64=array.nbytes >= 1 << 31) as member:
                np.lib.format.write_array(member, little_endian, version=(1, 0), allow_pickle=False)


class Reader:
    """Reads an untrusted archive, and checks all it declares before use; an invalid one may raise any exception."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        """``limit`` is the number of bytes that all members together may have when unpacked."""
        self._archive = zipfile.ZipFile(file)
        self._left = limit

    def header(self) -> Any:
        text = self._archive.read(self._member(HEADER))
        marks = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
        is_outside = ~np.logical_xor.accumulate(marks == ord('"'))  # of strings
        values = sum(np.count_nonzero(is_outside & (marks == mark)) for mark in b",:[{")
        if values > _MOST_VALUES:
            raise ValueError(f"{HEADER} has {values:,} values, more than the limit of {_MOST_VALUES:,}")
        return json.loads(text.decode("ascii"))

    def array(self, name: str, dtype: str) -> npt.NDArray[Any]:
        """The array called ``name``, which must have the given dtype, as ``"<f4"``."""
        entry = self._member(f"{name}.npy")
        with self._archive.open(entry) as member:
            np.lib.format.read_magic(member)
            shape, fortran, kind = np.lib.format.read_array_header_1_0(member)
            size = member.tell() + math.prod(shape) * kind.itemsize
            # Before anything of this size is unpacked.
            if kind != np.dtype(dtype) or fortran or size != entry.file_size:
                raise ValueError(f"{name}: expected {entry.file_size:,} bytes of {dtype}, got {kind} of shape {shape}")
            values = np.frombuffer(member.read(), dtype).reshape(shape)  # to the end, where the checksum is verified
        return values.astype(kind.newbyteorder("="))  # a copy, which can be written

    def _member(self, name: str) -> zipfile.ZipInfo:
        entry = self._archive.getinfo(name)
        # Of these methods, zipfile unpacks no more than the declared size.
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed by method {entry.compress_type}, which gradstat never uses")
        allowed = min(self._left, _HEADER_LIMIT) if name == HEADER else self._left
        if entry.file_size > allowed:
            raise ValueError(f"{name} is larger than the limit: {entry.file_size:,} bytes unpacked, not {allowed:,}")
        self._left -= entry.file_size
        return entry
