"""Runs gradstat's Triton kernels from the PTX that Triton generates for an NVIDIA GPU: the backend "triton" on the CPU.

Import it before anything that imports Triton's kernels, and without TRITON_INTERPRET, under which none can be compiled.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import triton
from ptx.device import BUILD, Device, Kernel, Span
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradstat._core import backends
from gradstat.kernels import _table, scale, stats

os.environ.setdefault("TRITON_CACHE_DIR", str(BUILD / "triton"))

TYPES = {torch.int64: "*i64", torch.int32: "*i32", torch.float64: "*fp64"}


class TritonDevice(Device):
    """Takes over all launches of Triton kernels."""

    def __init__(self, architecture: int) -> None:
        taken = (stats.stats_kernel, scale.scale_kernel)
        super().__init__(architecture, [kernel.__name__ for kernel in taken])
        self.compiled: dict[object, tuple[Kernel, int]] = {}
        for kernel in taken:
            kernel.run = functools.partial(self._run, kernel)
        kernels = backends.Kernels(stats.stats, scale.scale_)
        backends.REGISTRY["triton"] = backends.REGISTRY["triton"]._replace(load=lambda _: kernels)

    def _run(self, kernel: Any, *arguments: Any, grid: tuple[int], warmup: bool, **options: Any) -> None:
        """Runs ``kernel[grid](*arguments, **options)``."""
        signature, attributes = {}, {}
        for i, (parameter, argument) in enumerate(zip(kernel.params, arguments, strict=True)):
            if isinstance(argument, torch.Tensor):
                signature[parameter.name] = TYPES[argument.dtype]
                if argument.data_ptr() % _table.ALIGNMENT == 0 and not parameter.do_not_specialize_on_alignment:
                    attributes[(i,)] = [["tt.divisibility", _table.ALIGNMENT]]
            else:
                assert parameter.do_not_specialize, f"{parameter.name} would be compiled for its value"
                signature[parameter.name] = "i32"
        key = (kernel, *signature.items(), *attributes)
        if key not in self.compiled:
            source = ASTSource(kernel, signature, attrs=attributes)
            made = triton.compile(source, target=GPUTarget("cuda", self.architecture, 32), options=options)
            self.compiled[key] = Kernel(made.asm["ptx"], made.name, made.metadata.shared), 32 * made.metadata.num_warps
        translated, threads = self.compiled[key]
        named = dict(zip(kernel.arg_names, arguments, strict=True))
        packed = bytearray(translated.argument_bytes)  # the last two are scratch memory, which none of these uses
        for argument, (at, size) in zip(arguments, translated.translation.parameters, strict=False):
            number = argument.data_ptr() if isinstance(argument, torch.Tensor) else int(argument)
            packed[at : at + size] = number.to_bytes(size, "little")
        pointers = [(t.data_ptr(), t.nbytes) for t in arguments if isinstance(t, torch.Tensor)]
        self.launch(translated, *grid, threads, bytes(packed), [*pointers, *memory_of(named)])
        self.check()


def memory_of(arguments: dict[str, Any]) -> Iterator[Span]:
    """The tensors whose addresses a launch passes in a table."""
    width = _table.ENTRY_WIDTH.value
    entries = arguments["table"][: arguments["tensors"] * width].view(-1, width).tolist()
    for entry in entries:
        address, values, kind = entry[_table.ADDRESS.value], entry[_table.VALUES.value], entry[_table.KIND.value]
        yield address, values * int(_table._REAL_BYTES[kind % _table.PAIR.value])
