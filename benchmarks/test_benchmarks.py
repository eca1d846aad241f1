"""The benchmarks as pytest-benchmark tests: ``pytest benchmarks/``, with its options and statistics.

They are the quick set: every provider on every list of gradients, every variant of a training step, and every provider
of optimizer steps; ``-k`` selects. Results are verified before they are timed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import step_providers
import torch
from caches import Flush
from cases import CASES, PROVIDERS, Input, Provider, input_of, verify
from models import TRAININGS
from optimizer_steps import QUICK_CASE, SETTINGS, Setting, StepInput
from step_providers import StepProvider

from gradstat.bench import machine, steps

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LISTS = [
    pytest.param(device, case.name, dtype, provider, id=f"{device}-{case.name}-{str(dtype)[6:]}-{provider.name}")
    for device in DEVICES
    for case in CASES
    if case.quick and device in case.devices
    for dtype in case.dtypes
    for provider in PROVIDERS
]
VARIANTS = [
    pytest.param(device, training.name, variant.name, id=f"{device}-{training.name}-{variant.name}")
    for device in DEVICES
    for training in TRAININGS
    if training.quick and device in training.devices
    for variant in steps.variants(torch.device(device))
]

OPTIMIZER_STEPS = [
    pytest.param(device, setting, provider, id=f"{device}-{setting.name}-{provider.name}")
    for device in DEVICES
    for setting in SETTINGS
    for provider in step_providers.PROVIDERS
]


@lru_cache(maxsize=1)
def given(device: str, name: str, dtype: torch.dtype) -> tuple[Input, Flush]:
    shapes = next(case.shapes() for case in CASES if case.name == name)
    return input_of(shapes, dtype, device), Flush(torch.device(device))


@lru_cache(maxsize=1)
def step_of(device: str, name: str) -> steps.Step:
    step = next(training.make(torch.device(device)) for training in TRAININGS if training.name == name)
    steps.verify(step)
    return step


@lru_cache(maxsize=1)
def step_input_of(device: str, setting: Setting) -> tuple[StepInput, Flush]:
    return StepInput(QUICK_CASE.shapes(), setting, device), Flush(torch.device(device))


@pytest.mark.parametrize(("device", "name", "dtype", "provider"), LISTS)
def test_list(benchmark: Any, device: str, name: str, dtype: torch.dtype, provider: Provider) -> None:
    gradients, flush = given(device, name, dtype)
    if not provider.supports(gradients):
        pytest.skip("does not support such gradients")
    verify(provider, gradients)

    def call() -> object:
        result = provider.run(gradients)
        machine.synchronize(gradients.device)
        return result

    def ready() -> None:
        if provider.changes:
            gradients.restore()
        flush()

    benchmark.group = f"{name}, {dtype}, {device}"
    benchmark.extra_info["bytes"] = gradients.bytes
    benchmark.pedantic(call, setup=ready, warmup_rounds=1, rounds=7)
    if provider.changes:
        gradients.restore()  # the next test gets the same gradients


@pytest.mark.parametrize(("device", "name", "variant"), VARIANTS)
def test_step(benchmark: Any, device: str, name: str, variant: str) -> None:
    step = step_of(device, name)
    chosen = next(each for each in steps.variants(step.device) if each.name == variant)

    def call() -> None:
        chosen.run(step)
        machine.synchronize(step.device)

    benchmark.group = f"training step, {name}, {device}"
    benchmark.pedantic(call, warmup_rounds=1, rounds=7)


@pytest.mark.parametrize(("device", "setting", "provider"), OPTIMIZER_STEPS)
def test_optimizer_step(benchmark: Any, device: str, setting: Setting, provider: StepProvider) -> None:
    given, flush = step_input_of(device, setting)
    if not provider.supports(given):
        pytest.skip("does not support this input")
    step_providers.verify(provider, given)

    def call() -> None:
        provider.run(given)
        machine.synchronize(given.device)

    def ready() -> None:
        given.restore()
        flush()

    benchmark.group = f"optimizer step, {setting.name}, {device}"
    benchmark.extra_info["bytes moved"] = provider.passes(given) * given.bytes
    benchmark.pedantic(call, setup=ready, warmup_rounds=1, rounds=7)
