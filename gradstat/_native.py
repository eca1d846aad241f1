"""Loads the compiled operators, refuses a stale build, and gives the operators fake implementations.

There are two libraries: ``_C`` with the schemas and the CPU kernels, and ``_C_cuda``, which is loaded
only when torch has a CUDA device, because a CPU-only torch lacks symbols it needs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
from pathlib import Path

import torch
from torch import Tensor

from gradstat import _fields, _norms

_PACKAGE = Path(__file__).resolve().parent
_REBUILD = "Rebuild it: `pip install --no-build-isolation -e .` in a checkout, or reinstall gradstat."


class BackendUnavailableError(RuntimeError):
    """A backend was asked for that cannot run here; the message says why and what to do."""


class StaleExtensionError(BackendUnavailableError):
    """The compiled extension was built from another version of the sources."""


def library_path(name: str) -> Path | None:
    """Where the compiled library ``name`` lies in this installation, None if it was not built."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = _PACKAGE / f"{name}{suffix}"
        if path.exists():
            return path
    return None


@functools.cache
def load_cpu() -> str:
    """Loads the schemas and the CPU kernels; returns the instruction set they chose.

    Raises:
        BackendUnavailableError: There is no compiled extension, or it does not load.
        StaleExtensionError: Its fields differ from those of the Python sources.
    """
    library = _load("_C")
    _register_fakes()
    return _text(library, "gradstat_cpu_instructions")


@functools.cache
def load_cuda() -> str:
    """Loads the CUDA kernels; returns the architectures they were compiled for. Raises as `load_cpu`."""
    load_cpu()
    if library_path("_C_cuda") is None:
        raise BackendUnavailableError(
            "gradstat was built without its CUDA kernels, as nvcc was not found or GRADSTAT_CUDA=0 was "
            f"set. Install the CUDA toolkit. {_REBUILD}"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailableError("torch sees no CUDA device (torch.cuda.is_available() is False)")
    return _text(_load("_C_cuda"), "gradstat_cuda_architectures")


def check_fingerprint(built: str, path: Path) -> None:
    """Raises `StaleExtensionError` unless ``built`` names exactly the fields of `gradstat._fields`."""
    if built != _fields.FINGERPRINT:
        raise StaleExtensionError(
            f"the compiled extension {path} is stale: it was built with the fields [{built}], "
            f"but gradstat/_fields.py has [{_fields.FINGERPRINT}]. {_REBUILD}"
        )


def _load(name: str) -> ctypes.CDLL:
    path = library_path(name)
    if path is None:
        raise BackendUnavailableError(
            f"gradstat was installed without its compiled extension {name}: no C++ compiler was found at "
            f"installation. Install one (g++ or clang++). {_REBUILD}"
        )
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailableError(f"{path} does not load with torch {torch.__version__}: {error}") from error
    check_fingerprint(_text(library, "gradstat_fingerprint"), path)
    return library


def _text(library: ctypes.CDLL, symbol: str) -> str:
    function = getattr(library, symbol)
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()


def _register_fakes() -> None:
    def table_like(tensors: list[Tensor]) -> Tensor:
        return tensors[0].new_empty((len(tensors), len(_fields.NAMES)), dtype=torch.float64)

    @torch.library.register_fake("gradstat::stats")
    def _(tensors: list[Tensor]) -> Tensor:
        return table_like(tensors)

    @torch.library.register_fake("gradstat::measure")
    def _(tensors: list[Tensor], max_norm: float, norm_type: float) -> tuple[Tensor, Tensor, Tensor]:
        norm = tensors[0].new_empty((), dtype=_norms.norm_dtype(tensors))
        return table_like(tensors), norm, tensors[0].new_empty((), dtype=torch.float64)

    @torch.library.register_fake("gradstat::scale_")
    def _(tensors: list[Tensor], coefficient: Tensor) -> None:
        return None

    @torch.library.register_fake("gradstat::clip_")
    def _(tensors: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return tensors[0].new_empty((), dtype=_norms.norm_dtype(tensors))
