"""What there is to test on: devices, and the backends of each. What a test module imports is never in a conftest.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from gradstat._core.backends import Kernels

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Decided when the kernels are first imported, hence before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"
# Threads that wait for each other take longer than the work, where workers share cores. Here and in child processes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

DEVICES = ["cpu", *(["cuda"] if HAS_CUDA else [])]
# Every way to compute the statistic on this machine, as (backend, device). None of them may be missing.
BACKENDS = [("reference", "cpu"), ("native", "cpu"), ("emulated", "cpu")] + (
    [("reference", "cuda"), ("native", "cuda"), ("triton", "cuda")] if HAS_CUDA else [("triton", "cpu")]
)


def kernels_on_the_cpu(request: pytest.FixtureRequest) -> Kernels:
    """Makes a fixture of the names of backends; "dispatched" is the native one, by torch's dispatcher alone."""
    from gradstat._core import backends

    if request.param == "dispatched":
        return backends.NativeKernels(None)  # type: ignore[arg-type]
    if request.param == "emulated":
        request.getfixturevalue("emulated")
    return backends.resolve(request.param, "cpu")
