"""The container format of recordings: a zip of a JSON header and ``.npy`` arrays, validated when it is read."""

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
_PAIRS = "$pairs"  # the only key of one that stands for a mapping with one of these two keys
_DEEPEST = 100
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# Deflate expands by a factor of at most 1032: a member that declares more is invalid.
_DEFLATE_RATIO = 1032


def encoded(value: Any) -> Any:
    """``value`` as strict JSON: NaN and Inf tagged, numpy's numbers as Python's, other types as text.

    A recording is often saved because a run has failed, and must not be lost to one unusual value.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {_FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        pairs = [(key if isinstance(key, str) else str(key), encoded(item)) for key, item in value.items()]
        if any(key in (_FLOAT, _PAIRS) for key, _ in pairs):
            return {_PAIRS: [list(pair) for pair in pairs]}
        return dict(pairs)
    if isinstance(value, (list, tuple)):
        return [encoded(item) for item in value]
    return str(value)


def decoded(value: Any, depth: int = 0) -> Any:
    """The inverse of `encoded`. ValueError if it is nested so deeply that saving it again might fail."""
    if depth > _DEEPEST:
        raise ValueError(f"its header is nested in more than {_DEEPEST} levels")
    if isinstance(value, list):
        return [decoded(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if len(value) == 1 and _FLOAT in value:
            return _NONFINITE[value[_FLOAT]]
        if len(value) == 1 and _PAIRS in value:
            return {key: decoded(item, depth + 1) for key, item in value[_PAIRS]}
        return {key: decoded(item, depth + 1) for key, item in value.items()}
    return value


def write(file: BinaryIO, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Writes the archive; the same content gives the same bytes."""
    # ASCII preserves any string, even lone surrogates.
    text = json.dumps(encoded(header), allow_nan=False, separators=(",", ":"))
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_entry(HEADER), text)
        for name, array in arrays.items():
            with archive.open(_entry(f"{name}.npy"), "w", force_zip64=array.nbytes >= 1 << 31) as member:
                little = array.astype(array.dtype.newbyteorder("<"), copy=False)
                np.lib.format.write_array(member, np.ascontiguousarray(little), version=(1, 0), allow_pickle=False)


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # dated 1980, so that bytes do not depend on the time
    entry.compress_type = zipfile.ZIP_DEFLATED
    # Higher levels take several times as long and save a few percent, since most bytes are mantissas.
    entry._compresslevel = 3  # type: ignore[attr-defined]  # `open` has no argument for it
    entry.external_attr = 0o600 << 16
    return entry


class Reader:
    """Reads an untrusted archive, and checks all it declares before use; an invalid one may raise any exception."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        """``limit`` is the number of bytes that all members together may have when unpacked."""
        self._archive = zipfile.ZipFile(file)
        self._left = limit

    def header(self) -> dict[str, Any]:
        member = self._member(HEADER)
        if member.file_size > _HEADER_LIMIT:
            raise ValueError(f"its header declares {member.file_size:,} bytes, more than the {_HEADER_LIMIT:,} allowed")
        header = decoded(json.loads(self._archive.read(member)))
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        return header

    def array(self, name: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The array called ``name``, which must have the given dtype (as ``"<f4"``) and shape."""
        entry = self._member(f"{name}.npy")
        with self._archive.open(entry) as member:
            if np.lib.format.read_magic(member) != (1, 0):
                raise ValueError(f"{name} is not an .npy array of version 1.0")
            there, fortran, kind = np.lib.format.read_array_header_1_0(member)
            if kind != np.dtype(dtype) or there != shape or fortran:
                raise ValueError(f"{name} is {kind} of shape {there}; expected {np.dtype(dtype)} of shape {shape}")
            size = math.prod(shape) * kind.itemsize
            if member.tell() + size != entry.file_size:  # before anything is allocated
                raise ValueError(f"{name} declares {size:,} bytes, its member holds {entry.file_size:,}")
            data = member.read()  # to the end, where zipfile verifies the checksum
        if len(data) != size:
            raise ValueError(f"{name} ends early")
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape).astype(kind.newbyteorder("="), copy=False)

    def _member(self, name: str) -> zipfile.ZipInfo:
        try:
            entry = self._archive.getinfo(name)
        except KeyError:
            raise ValueError(f"it has no {name}") from None
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name} is compressed by method {entry.compress_type}, which gradstat never uses")
        if entry.file_size > _DEFLATE_RATIO * entry.compress_size + 64:
            raise ValueError(f"{name} declares {entry.file_size:,} bytes in {entry.compress_size:,} compressed ones")
        self._left -= entry.file_size
        if self._left < 0:
            raise ValueError(f"unpacked it is larger than the limit by {-self._left:,} bytes or more")
        return entry
