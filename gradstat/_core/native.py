"""Loads the compiled extension, rejects a stale build, and registers fake implementations of its operators.

``_C`` has the schemas, the CPU kernels and the host-path helpers; ``_C_cuda`` is loaded only when torch has a CUDA
device. Both register operators, and both are Python modules whose functions take lists of ordinary tensors directly.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from gradstat import _fields
from gradstat._core import norms
from gradstat._core.tensors import unit_count

_PACKAGE = Path(__file__).resolve().parent.parent
_REBUILD = "Rebuild it: `pip install --no-build-isolation -e .` in a checkout, or reinstall gradstat."


class BackendUnavailableError(RuntimeError):
    """The requested backend cannot run here. The message says why and what to do."""


class StaleExtensionError(BackendUnavailableError):
    """The compiled extension was built from another version of the sources."""


# Of a copy to the host: returns a buffer, for which it waits if True; else None until it has arrived. Once the function
# is dropped, its pinned memory serves another copy.
Receive: TypeAlias = Callable[[bool], Any]


class DeviceModule(Protocol):
    """The functions that both libraries have (csrc/python_ops.h), with the arguments of the schemas in csrc/ops_impl.h.

    Unless all tensors are ordinary and on one device of the library's type, a function returns None and does nothing.
    """

    check: Callable[[list[Tensor]], tuple[Tensor, int] | None]  # table and signature
    # `check` that also begins the copy of the table to the host; None on the CPU, and where there is no such function.
    check_to_host: Callable[[list[Tensor]], tuple[Tensor, int, Receive | None] | None] | None
    clip_: Callable[[list[Tensor], float, float], Tensor | None]  # the norm before clipping
    measure_norm: Callable[[list[Tensor], float, float], tuple[Tensor, Tensor] | None]  # the second is for `scale_`
    # Table, signature, norm, [multiplier, norm] as float64, verdict (csrc/entry.h).
    measure_step: Callable[..., tuple[Tensor, int, Tensor, Tensor, Tensor] | None]
    scale_: Callable[[list[Tensor], Tensor], bool | None]  # by the first element of a float64 tensor
    scale_each_: Callable[[list[Tensor], Tensor], bool | None]  # each tensor by its own element
    unscale_: Callable[[list[Tensor], Tensor], tuple[Tensor, int] | None]  # table and signature of the products


class CpuModule(DeviceModule, Protocol):
    """``_C``: also the instruction set chosen for this machine, and helpers for `gradstat._core.parameters`."""

    instructions: Callable[[], str]
    make_plan: Callable[[list[Any], list[Tensor]], object | None]  # of weak references to modules, and parameters
    planned_parameters: Callable[[object], list[Tensor] | None]
    holds_exactly: Callable[[list[dict[str, Any]], list[Tensor]], bool]
    gradients_of: Callable[[list[Tensor]], tuple[list[Tensor], list[int] | None, list[int] | None]]
    # Entries of kernels/_table.py, signature, kind of the norm; None if the tensors are not ordinary.
    describe_cpu: Callable[[list[Tensor]], tuple[bytes, int, int] | None]
    describe_cuda: Callable[[list[Tensor]], tuple[bytes, int, int] | None]


class CudaModule(DeviceModule, Protocol):
    """``_C_cuda``: also the architectures it was compiled for, whether a device can run it, and copies to the host."""

    architectures: Callable[[], str]
    load_kernels: Callable[[int], None]  # RuntimeError, with CUDA's reason, if the device with this index cannot
    to_host: Callable[[Tensor], Receive | None]  # begins a copy, except during graph capture


def library_path(name: str, package: Path = _PACKAGE) -> Path | None:
    """The path of the compiled library ``name`` in this installation, None if it was not built."""
    paths = (package / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next((path for path in paths if path.exists()), None)


@functools.cache
def load_cpu() -> CpuModule:
    """Loads the schemas, the CPU kernels and the helpers, or raises `BackendUnavailableError`."""
    module: CpuModule = _load("_C")
    module.check_to_host = None
    _register_fakes()
    return module


@functools.cache
def load_cuda() -> CudaModule:
    """Loads the CUDA kernels. Raises as `load_cpu`."""
    load_cpu()
    path = library_path("_C_cuda")
    if not torch.cuda.is_available():
        compiled = "" if path is None else f"; the kernels here are for {_architectures_in(path)}"
        raise BackendUnavailableError(f"torch sees no CUDA device (torch.cuda.is_available() is False){compiled}")
    if path is None:
        raise BackendUnavailableError(
            "gradstat was built without its CUDA kernels, as no GPU or no nvcc was found, or GRADSTAT_CUDA=0 was set. "
            f"Install the CUDA toolkit. {_REBUILD}"
        )
    module: CudaModule = _load("_C_cuda")
    try:
        module.load_kernels(torch.cuda.current_device())
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"the CUDA kernels, compiled for {module.architectures()}, do not run on {torch.cuda.get_device_name()} "
            f"with this driver: {error}. Update the driver, or rebuild gradstat here with a CUDA toolkit that "
            "supports it"
        ) from error
    return module


def _architectures_in(library: Path) -> str:
    """The architectures that a library is compiled for, which is not loaded."""
    found = re.search(rb"\0(sm_[0-9a-z_ ]+)\0", library.read_bytes())
    return "unknown GPUs" if found is None else found[1].decode()


def operators(device: torch.device) -> Any:
    """``torch.ops.gradstat`` inside torch.compile; loads the library, as a program's first call may be traced."""
    _is_loaded(device.type)
    return torch.ops.gradstat


def _is_loaded(device_type: str) -> bool:
    load_cuda() if device_type == "cuda" else load_cpu()
    return True


# Evaluated at trace time. torch.compiler.assume_constant_result sets the same attribute, but takes seconds to import.
_is_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def cuda_copies() -> CudaModule | None:
    """``_C_cuda`` for its copies to the host, which plain torch makes in more calls; None if it does not load."""
    try:
        return load_cuda()
    except BackendUnavailableError:
        return None


@functools.cache
def helpers() -> CpuModule | None:
    """``_C`` for its helpers, which have slower equivalents in Python; None if it does not load."""
    try:
        return load_cpu()
    except BackendUnavailableError:
        return None


def check_fingerprint(built: str, path: Path) -> None:
    """Raises `StaleExtensionError` unless ``built`` equals the fingerprint of `gradstat._fields`."""
    if built != _fields.FINGERPRINT:
        raise StaleExtensionError(
            f"the compiled extension {path} is stale: it was built with the fields [{built}], "
            f"but gradstat/_fields.py has [{_fields.FINGERPRINT}]. {_REBUILD}"
        )


def _load(name: str) -> Any:
    path = library_path(name)
    if path is None:
        # A clone's folder comes before installed packages on the path of programs that are started in it.
        paths = (library_path(name, Path(folder) / "gradstat") for folder in sys.path)
        elsewhere = next(filter(None, paths), None)
        if elsewhere is not None:
            raise BackendUnavailableError(
                f"the sources in {_PACKAGE} were imported, which are not compiled, instead of the compiled gradstat in "
                f"{elsewhere.parent.absolute()}. Run the program outside of {_PACKAGE.parent}, or compile the sources: "
                f"`pip install --no-build-isolation -e {_PACKAGE.parent}`"
            )
        raise BackendUnavailableError(
            f"gradstat was installed without its compiled extension {name}: no C++ compiler was found at installation, "
            f"no Python headers, or GRADSTAT_COMPILE=0 was set. Install both (g++ or clang++, python3-dev). {_REBUILD}"
        )
    try:
        module = importlib.import_module(f"gradstat.{name}")
    except ImportError as error:
        raise BackendUnavailableError(f"{path} does not load with torch {torch.__version__}: {error}") from error
    check_fingerprint(module.fingerprint(), path)
    exchange_tensors(module)
    return module


def exchange_tensors(module: Any) -> None:
    """Lets the functions of a library take Python tensors directly. With older torch all calls are dispatched."""
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is not None:
        predicates = (Tensor.is_conj, Tensor.is_neg, operator.attrgetter("is_sparse"))
        one = torch.empty(0)
        module.use_exchange(exchange, Tensor, Parameter, *predicates, one, one._cdata, Tensor.__basicsize__)


def _register_fakes() -> None:
    # Operators that return a signature have no fake implementation: it is a host number that depends on real tensors.
    def table(tensors: list[Tensor], rows: int) -> Tensor:
        return tensors[0].new_empty((rows, _fields.COUNT), dtype=torch.float64)

    def norm(tensors: list[Tensor], *_: object, **__: object) -> Tensor:
        return tensors[0].new_empty((), dtype=norms.norm_dtype(tensors))

    def norm_and_multiplier(tensors: list[Tensor], *_: object) -> tuple[Tensor, Tensor]:
        return norm(tensors), tensors[0].new_empty(1 + len(tensors) * _fields.COUNT, dtype=torch.float64)

    fakes: dict[str, Callable[..., object]] = {
        "stats": lambda tensors: table(tensors, len(tensors)),
        "unit_stats": lambda tensors: table(tensors, sum(map(unit_count, tensors))),
        "measure_norm": norm_and_multiplier,
        "clip_": norm,
        **dict.fromkeys(("scale_", "scale_each_", "scale_units_"), lambda tensors, multipliers: None),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"gradstat::{name}", fake)
