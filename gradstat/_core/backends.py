"""The backends, which of them run on this machine (determined on first use), and which one serves a call."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradstat import _fields
from gradstat._core import native, norms
from gradstat._core.native import BackendUnavailableError, DeviceModule
from gradstat._core.tensors import contiguous_for_update, units_of
from gradstat._core.text import count_of
from gradstat._core.warn import warn_user

ENVIRONMENT_VARIABLE = "GRADSTAT_BACKEND"
# Device types that have compiled kernels.
COMPILED_FOR = frozenset({"cpu", "cuda"})


class _NotCompiled:
    """Stands where a backend has no functions for ordinary tensors: as if no list were ordinary."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*_: object) -> None:
    return None


NOT_COMPILED = cast(DeviceModule, _NotCompiled())


class Kernels:
    """The operations of a backend on one device type, on tensors as `gradstat._core.tensors.readable` returns them.

    A backend supplies two functions, whose contracts are those of `gradstat._core.reference`: fill a table, and scale
    tensors. This class composes the rest from them, in more passes than dedicated kernels need; it makes one view per
    unit, which costs microseconds of host time each.
    """

    direct: DeviceModule = NOT_COMPILED  # for lists of ordinary tensors, which do not need `readable`
    decide_clip_: Callable[..., Tensor] | None = None  # csrc/decide.h; if None, adaptive clips use plain torch
    guard_: Callable[..., Tensor] | None = None  # csrc/decide.h; if None, guards use plain torch
    quantization_rows: Callable[..., Tensor] | None = None  # its contract: gradstat/lowprecision/_reference.py

    def __init__(self, stats: Callable[[list[Tensor]], Tensor], scale_: Callable[[list[Tensor], Tensor], None]) -> None:
        self._stats, self.scale_ = stats, scale_

    def check(self, tensors: list[Tensor]) -> tuple[Tensor, int | None]:
        """The table, and a signature that is equal for equal sizes, strides, dtypes and devices, or None."""
        return self._stats(tensors), None

    def scale_each_(self, tensors: list[Tensor], multipliers: Tensor) -> None:
        """Multiplies ``tensors[i]`` in place by ``multipliers[i]``: contiguous float64 on their device, else an error.

        A tensor listed twice is multiplied by both of its multipliers.
        """
        _require_multipliers(multipliers, len(tensors), tensors[0].device)
        self.scale_(tensors, multipliers.reshape(-1))

    def unit_stats(self, tensors: list[Tensor]) -> Tensor:
        """The table of all units in order. Tensors that are not row-major are copied first."""
        units = units_of([tensor.contiguous() for tensor in tensors])
        return self._stats(units) if units else tensors[0].new_empty((0, _fields.COUNT), dtype=torch.float64)

    def scale_units_(self, tensors: list[Tensor], multipliers: Tensor) -> None:
        """Multiplies each unit, in the order of `unit_stats`, by its element of ``multipliers``; see `scale_each_`."""
        with contiguous_for_update(tensors, Tensor.is_contiguous) as targets:
            units = units_of(targets)
            if units:
                self.scale_each_(units, multipliers)


class NativeKernels(Kernels):
    """The compiled kernels: through torch's dispatcher, and for ordinary tensors past it."""

    def __init__(self, direct: DeviceModule) -> None:
        operators = torch.ops.gradstat
        super().__init__(operators.stats.default, operators.scale_.default)
        self.direct = direct
        self.decide_clip_, self.guard_ = self._directly("decide_clip_"), self._directly("guard_")

    def _directly(self, name: str) -> Callable[..., Tensor]:
        """The operator ``name`` past the dispatcher, or through it if the tensors are not ordinary."""
        operator = getattr(torch.ops.gradstat, name).default

        def call(*arguments: Any) -> Tensor:
            result: Tensor | None = getattr(self.direct, name)(*arguments)
            return operator(*arguments) if result is None else result

        return call

    def check(self, tensors: list[Tensor]) -> tuple[Tensor, int | None]:
        table, signature = torch.ops.gradstat.check.default(tensors)
        return table, signature

    def scale_each_(self, tensors: list[Tensor], multipliers: Tensor) -> None:
        torch.ops.gradstat.scale_each_.default(tensors, multipliers)

    def unit_stats(self, tensors: list[Tensor]) -> Tensor:
        table: Tensor = torch.ops.gradstat.unit_stats.default([tensor.contiguous() for tensor in tensors])
        return table

    def scale_units_(self, tensors: list[Tensor], multipliers: Tensor) -> None:
        with contiguous_for_update(tensors, Tensor.is_contiguous) as targets:
            torch.ops.gradstat.scale_units_.default(targets, multipliers)


class TritonModule:
    """The Triton kernels for lists that ``describe`` of ``_C`` finds ordinary; else functions return None."""

    check_to_host = None

    def __init__(self, describe: Callable[[list[Tensor]], tuple[bytes, int, int] | None]) -> None:
        from gradstat.kernels import _table, scale, stats

        self._describe, self._dtypes = describe, _table.DTYPES
        self._stats, self._norm, self._scale_ = stats.stats, stats.norm, scale.scale_

    def _measured(self, tensors: list[Tensor]) -> tuple[Tensor, int, torch.dtype] | None:
        described = self._describe(tensors)
        if described is None:
            return None
        return self._stats(tensors, described[0]), described[1], self._dtypes[described[2]]

    def check(self, tensors: list[Tensor]) -> tuple[Tensor, int] | None:
        measured = self._measured(tensors)
        return measured and measured[:2]

    def measure_norm(self, tensors: list[Tensor], max_norm: float, norm_type: float) -> tuple[Tensor, Tensor] | None:
        measured = self._measured(tensors)
        if measured is None:
            return None
        decided = self._norm(measured[0], max_norm, norm_type)
        return decided[1].to(measured[2]), decided

    def clip_(self, tensors: list[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        measured = self.measure_norm(tensors, max_norm, norm_type)
        if measured is not None and max_norm != math.inf:
            self.scale_(tensors, measured[1])
        return measured and measured[0]

    def measure_step(self, tensors: list[Tensor], max_norm: float, _: float, *rest: Any) -> tuple[Any, ...] | None:
        measured = self._measured(tensors)
        if measured is None:
            return None
        decided = norms.decide(measured[0], norms.StepRequest(max_norm, *rest))
        return *measured[:2], decided.norm.to(measured[2]), decided.scaling, decided.verdict

    def scale_(self, tensors: list[Tensor], multiplier: Tensor) -> bool:
        return self.scale_each_(tensors, multiplier.reshape(-1)[0])

    def scale_each_(self, tensors: list[Tensor], multipliers: Tensor) -> bool:
        described = self._describe(tensors)
        if described is not None:
            self._scale_(tensors, multipliers, described[0])
        return described is not None

    def unscale_(self, tensors: list[Tensor], factor: Tensor) -> tuple[Tensor, int] | None:
        return self.check(tensors) if self.scale_(tensors, factor.to(torch.float64)) else None


def _require_multipliers(multipliers: Tensor, count: int, device: torch.device) -> None:
    if multipliers.dtype != torch.float64:
        raise RuntimeError(f"multipliers must be torch.float64, got {multipliers.dtype}")
    if multipliers.numel() != count or not multipliers.is_contiguous():
        raise RuntimeError(f"expected {count} contiguous multipliers, got {multipliers.numel()}")
    if multipliers.device != device:
        raise RuntimeError(f"multipliers must be on the tensors' device, {device}, got {multipliers.device}")


def _require_device(device_type: str) -> None:
    if device_type in ("cuda", "xpu") and not torch.get_device_module(device_type).is_available():
        raise BackendUnavailableError(f"torch sees no {device_type} device")


def _load_native(device_type: str) -> Kernels:
    if device_type == "cuda":
        return NativeKernels(native.load_cuda())
    kernels = NativeKernels(native.load_cpu())
    kernels.quantization_rows = _quantization_rows
    return kernels


def _quantization_rows(tensors: list[Tensor], shapes: Sequence[Sequence[int]], *rest: Any) -> Tensor:
    flat = [number for shape in shapes for number in shape]
    table: Tensor = torch.ops.gradstat.quantization_rows.default(tensors, flat, *rest)
    return table


def _load_triton(device_type: str) -> Kernels:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu" and not interpreted:
        raise BackendUnavailableError(
            "Triton compiles for GPUs only. Set TRITON_INTERPRET=1 before the first use to run its kernels "
            "through the interpreter on the CPU, for testing."
        )
    _require_device(device_type)
    try:
        import gradstat.kernels.quantization as quantization_module
        import gradstat.kernels.scale as scale_module
        import gradstat.kernels.stats as stats_module
    except ImportError as error:
        raise BackendUnavailableError(f"Triton cannot be imported ({error}). `pip install triton`.") from error
    kernels, helpers = Kernels(stats_module.stats, scale_module.scale_), native.helpers()
    kernels.quantization_rows = quantization_module.rows
    if helpers is not None and device_type != "xpu":
        kernels.direct = TritonModule(getattr(helpers, f"describe_{device_type}"))  # type: ignore[assignment]
    return kernels


def _load_reference(device_type: str) -> Kernels:
    if device_type == "mps":
        raise BackendUnavailableError("mps devices lack float64, which tables need; check copies on the CPU")
    _require_device(device_type)
    from gradstat._core import reference

    return Kernels(reference.stats, reference.scale_)


class Backend(NamedTuple):
    """An entry of the registry. None instead of a set of device types means every type."""

    automatic: frozenset[str] | None  # device types it serves without being requested, if it is the first that loads
    forceable: frozenset[str] | None  # device types it can be requested for
    load: Callable[[str], Kernels]  # raises `BackendUnavailableError` with the reason


REGISTRY: dict[str, Backend] = {
    "native": Backend(frozenset({"cpu", "cuda"}), frozenset({"cpu", "cuda"}), _load_native),
    "triton": Backend(frozenset({"cuda", "xpu"}), frozenset({"cpu", "cuda", "xpu"}), _load_triton),
    "reference": Backend(None, None, _load_reference),
}
"""Backends by the name used in ``backend=`` and GRADSTAT_BACKEND, fastest first."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a backend can serve a device type here.

    Attributes:
        name: The backend's name.
        device: The device type, such as ``"cpu"`` or ``"cuda"``.
        available: Whether it loads.
        chosen: Whether it serves this device type when no ``backend=`` is given.
        detail: How it runs, or why it does not.
    """

    name: str
    device: str
    available: bool
    chosen: bool
    detail: str


@functools.cache
def _load(name: str, device_type: str) -> Kernels:
    forceable = REGISTRY[name].forceable
    if forceable is not None and device_type not in forceable:
        raise BackendUnavailableError(
            f"it has no kernels for devices of type {device_type!r}, only for {', '.join(sorted(forceable))}"
        )
    return REGISTRY[name].load(device_type)


@functools.cache
def known_name(requested: str | None) -> str | None:
    """The backend requested by the caller, or else by GRADSTAT_BACKEND (read once). ValueError for an unknown one."""
    if requested is None:
        name = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
        if name not in ("", "auto", *REGISTRY):
            raise ValueError(f"unknown backend {name!r} in {ENVIRONMENT_VARIABLE}; known: auto, {', '.join(REGISTRY)}")
        return name if name in REGISTRY else None
    if requested not in REGISTRY:
        raise ValueError(f"unknown backend {requested!r}; known: {', '.join(REGISTRY)}")
    return requested


@functools.cache
def resolve(requested: str | None, device_type: str, quantizes: bool = False) -> Kernels:
    """The kernels of the backend ``requested``; for None, of GRADSTAT_BACKEND if set, else of the first that loads.

    With ``quantizes`` they have `Kernels.quantization_rows`, or are the reference, which has none of them here.
    A requested backend is never replaced by another one. A stale extension raises even if no backend was requested:
    silently running the slow reference would hide a broken installation. If only the reference is left, a warning
    says why.
    """
    name = known_name(requested)
    reasons = []
    for each, backend in REGISTRY.items():
        if each != name and (name is not None or device_type not in (backend.automatic or (device_type,))):
            continue
        try:
            kernels = _load(each, device_type)
            if quantizes and kernels.quantization_rows is None and each != "reference":
                raise BackendUnavailableError(f"it does not quantize on devices of type {device_type!r}")
        except BackendUnavailableError as error:
            if isinstance(error, native.StaleExtensionError):
                raise
            if name is not None:
                raise BackendUnavailableError(f"backend {name!r} is not available: {error}") from error
            reasons.append(f"{each}: {error}")
        else:
            if each == "reference" and reasons:
                warn_user(f"gradstat uses its slow reference backend for {device_type} tensors. {' '.join(reasons)}")
            return kernels
    raise BackendUnavailableError(f"no backend serves devices of type {device_type!r}: {' '.join(reasons)}")


def backends() -> list[BackendStatus]:
    """Every backend for every device type: whether it runs on this machine, and if not, why.

    ``python -m gradstat info`` prints this. It loads libraries but launches no kernel.
    """
    return [
        _status(name, device_type)
        for device_type in ("cpu", "cuda", *(["xpu"] if torch.xpu.is_available() else []))
        for name, backend in REGISTRY.items()
        if backend.forceable is None or device_type in backend.forceable
    ]


def _status(name: str, device_type: str) -> BackendStatus:
    try:
        kernels = _load(name, device_type)
    except BackendUnavailableError as error:
        return BackendStatus(name, device_type, False, False, str(error))
    chosen = False
    with contextlib.suppress(BackendUnavailableError, ValueError):
        chosen = resolve(None, device_type) is kernels
    return BackendStatus(name, device_type, True, chosen, _how(name, device_type))


def _how(name: str, device_type: str) -> str:
    if name == "native":
        if device_type == "cpu":
            threads = count_of(torch.get_num_threads(), "thread")
            return f"compiled C++, {native.load_cpu().instructions()} instructions, {threads}"
        return f"compiled CUDA for {native.load_cuda().architectures()}"
    if name == "triton":
        import triton

        how = "interpreted, for testing only" if os.environ.get("TRITON_INTERPRET") == "1" else "compiled on use"
        return f"Triton {triton.__version__}, {how}"
    return "plain torch in float64: the specification, slow"
