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
_FLOAT = "$float"  # the only key of a JSON object that stands for NaN or Inf
_DEEPEST = 100
# Deflate expands by a factor of at most 1032: a member that declares more is invalid.
_DEFLATE_RATIO = 1032


def encoded(value: Any, tagged: bool = True) -> Any:
    """``value`` as strict JSON: NaN and Inf tagged, numpy's numbers as Python's, other types as text.

    Without ``tagged``, which is for other readers, NaN and Inf are their names, and the result cannot be `decoded`.
    A recording is often saved because a run has failed, and must not be lost to one unusual value.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: json.dumps(value)} if tagged else json.dumps(value)
    if isinstance(value, Mapping):  # a key that begins with "$" gets a second "$", so that it is no tag
        escape = "$" * tagged
        keys = [escape + str(key) if str(key).startswith("$") else str(key) for key in value]
        return {key: encoded(item, tagged) for key, item in zip(keys, value.values(), strict=True)}
    if isinstance(value, (list, tuple)):
        return [encoded(item, tagged) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def decoded(value: Any, depth: int = 0) -> Any:
    """The inverse of `encoded`. ValueError if it is nested so deeply that saving it again might fail."""
    if depth > _DEEPEST:
        raise ValueError(f"its header is nested in more than {_DEEPEST} levels")
    if isinstance(value, list):
        return [decoded(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if _FLOAT in value:
            return float(value[_FLOAT])
        return {key.removeprefix("$"): decoded(item, depth + 1) for key, item in value.items()}
    return value


def texts(values: Any) -> tuple[str, ...]:
    """``values``, which must be a list of names; ValueError if not."""
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"expected a list of names, got {values!r:.80}")
    return tuple(values)


def write(file: BinaryIO, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes the archive; the same content gives the same bytes."""
    # Not `numpy.savez_compressed`, whose level takes several times as long and saves a few percent: most bytes are
    # mantissas. Members that are opened by name are dated 1980, so that bytes do not depend on the time.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as archive:
        with archive.open(HEADER, "w") as member:  # ASCII preserves any string, even lone surrogates
            member.write(json.dumps(encoded(header), allow_nan=False, separators=(",", ":")).encode())
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=array.nbytes >= 1 << 31) as member:
                np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)


class Reader:
    """Reads an untrusted archive, and checks all it declares before use; an invalid one may raise any exception."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        """``limit`` is the number of bytes that all members together may have when unpacked."""
        self._archive = zipfile.ZipFile(file)
        self._left = limit

    def header(self) -> dict[str, Any]:
        header = decoded(json.loads(self._archive.read(self._member(HEADER))))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        return header

    def array(self, name: str, dtype: str) -> npt.NDArray[Any]:
        """The array called ``name``, which must have the given dtype, as ``"<f4"``."""
        entry = self._member(f"{name}.npy")
        with self._archive.open(entry) as member:
            if np.lib.format.read_magic(member) != (1, 0):
                raise ValueError(f"{name} is not an .npy array of version 1.0")
            shape, fortran, kind = np.lib.format.read_array_header_1_0(member)
            if kind != np.dtype(dtype) or fortran:
                raise ValueError(f"{name} is {kind}; expected {np.dtype(dtype)} in row-major order")
            size = member.tell() + math.prod(shape) * kind.itemsize
            if size != entry.file_size:  # before anything of this size is unpacked
                raise ValueError(f"{name} of shape {shape} takes {size:,} bytes, its member holds {entry.file_size:,}")
            values = np.frombuffer(member.read(), dtype).reshape(shape)  # to the end, where the checksum is verified
        return values.astype(kind.newbyteorder("="))  # a copy, which can be written

    def _member(self, name: str) -> zipfile.ZipInfo:
        try:
            entry = self._archive.getinfo(name)
        except KeyError:
            raise ValueError(f"it has no {name}") from None
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed by method {entry.compress_type}, which gradstat never uses")
        if entry.file_size > _DEFLATE_RATIO * entry.compress_size + 64:
            raise ValueError(f"{name} declares {entry.file_size:,} bytes in {entry.compress_size:,} compressed ones")
        allowed = min(self._left, _HEADER_LIMIT) if name == HEADER else self._left
        if entry.file_size > allowed:
            raise ValueError(
                f"{name} is larger than the limit: {entry.file_size:,} bytes unpacked, {allowed:,} allowed"
            )
        self._left -= entry.file_size
        return entry
