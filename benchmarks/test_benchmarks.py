"""Every provider on every list of the quick set as a pytest-benchmark test: ``pytest benchmarks/``; ``-k`` selects."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from cases import CASES, PROVIDERS, Case, Input, Provider, input_of, verify
from device_timing import Flush

from gradstat.bench import machine

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
GIVEN = [(device, case) for device in DEVICES for case in CASES if case.quick and device in case.devices]


@lru_cache(maxsize=1)
def input_for(device: str, case: Case) -> tuple[Input, Flush]:
    return input_of(case.shapes(), case.dtypes[0], device), Flush(torch.device(device))


@pytest.mark.parametrize(("device", "case"), GIVEN, ids=[f"{device}-{case.name}" for device, case in GIVEN])
@pytest.mark.parametrize("provider", PROVIDERS, ids=[provider.name for provider in PROVIDERS])
def test_list(benchmark: Any, device: str, case: Case, provider: Provider) -> None:
    gradients, flush = input_for(device, case)
    if not provider.supports(gradients):
        pytest.skip("does not support such gradients")
    verify(provider, gradients)

    def call() -> object:
        result = provider.run(gradients)
        machine.synchronize(gradients.device)
        return result

    def ready() -> None:
        gradients.restore()
        flush()

    benchmark.group = f"{case.name}, {device}"
    benchmark.pedantic(call, setup=ready, warmup_rounds=1, rounds=7)
    gradients.restore()  # the next test gets the same gradients
