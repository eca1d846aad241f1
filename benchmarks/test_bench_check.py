"""The comparisons of `quick.py` through pytest-benchmark: ``pytest benchmarks/``, with its options and statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import PROVIDERS, SHAPES, checked_norm, parameters_of

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_bench(benchmark: Any, provider: str, case: str, device: str) -> None:
    parameters = parameters_of(case, device=device)
    norm = checked_norm(parameters)

    def call() -> object:
        result = PROVIDERS[provider](parameters, norm)
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    benchmark.group = f"{case}, {device}"
    benchmark.pedantic(call, warmup_rounds=2, rounds=15)
