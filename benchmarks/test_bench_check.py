"""`make bench`: what a check and a clip cost next to torch's clip, the naive loop and a plain read.

Before anything is timed the report is held against float64, so that no wrong answer is ever called fast.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import PROVIDERS, SHAPES, parameters_of

import gradstat

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_bench(benchmark: Any, provider: str, case: str, device: str) -> None:
    parameters = parameters_of(case, device=device)
    report = gradstat.check(parameters)
    squares = sum(p.grad.double().square().sum() for p in parameters if p.grad is not None)
    assert report.total_norm == pytest.approx(math.sqrt(float(squares)), rel=1e-7)

    def call() -> object:
        result = PROVIDERS[provider](parameters)
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    benchmark.group = f"{case}, {device}"
    benchmark.pedantic(call, warmup_rounds=2, rounds=15)
