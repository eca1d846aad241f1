"""The rules of adaptive clips in every backend, and in a block of the CUDA kernel, against plain Python and torch."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.cuda_counts import Operations
from helpers.devices import DECIDING
from torch import Tensor

import gradstat
from gradstat import AGC, AdaGC, AutoClip, FixedClip, ZClip
from gradstat._core import backends
from gradstat._core.backends import Kernels
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import decide

BY_KERNELS = [where for where in DECIDING if where[0] != "reference"]
NUMBERS = (0.0, 0.5, 2.0, -1.0, 1e300, -1e300, 2.0**63, math.nan, math.inf, -math.inf, -16.0, -17.0, 17.5, 2.0**52 + 1)
AROUND = 64  # elements of memory on both sides of a tensor, which nothing may write


def assert_same_state(ours: AdaptiveClip, theirs: AdaptiveClip) -> None:
    own, expected = (clip.state_dict()["tensors"] for clip in (ours, theirs))
    torch.testing.assert_close(own, expected, rtol=1e-11, atol=0, equal_nan=True)


def norms(steps: int) -> list[float]:
    """Norms with spikes, repetitions, a change of level, zeros, NaN, Inf, and values near the limits of float64."""
    random = np.random.default_rng(steps)
    drawn = np.exp(random.normal(0, 0.3, steps))
    drawn[random.random(steps) < 0.1] = 1.0
    drawn[steps // 2 :] *= 8
    for value, share in ((30.0, 0.03), (0.0, 0.03), (math.nan, 0.03), (math.inf, 0.03), (1e-300, 0.01), (1e300, 0.01)):
        drawn[random.random(steps) < share] = value
    return cast(list[float], drawn.tolist())


def fixed(norms: list[float], max_norm: float) -> list[float]:
    return [min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else 1.0 for norm in norms]


def autoclip(norms: list[float], percentile: float, window: int) -> list[float]:
    multipliers, history = [], []
    for norm in norms:
        if not 0 < norm < math.inf:
            multipliers.append(1.0)
            continue
        history.append(norm)
        multipliers.append(min(1.0, float(np.percentile(history[-window:], percentile)) / norm))
    return multipliers


def zclip(norms: list[float], z_threshold: float, alpha: float, warmup: int, to: str, max_norm: float) -> list[float]:
    multipliers, first, in_a_row = [], [], 0
    mean = variance = 0.0
    for norm in norms:
        if not 0 < norm < math.inf:
            multipliers.append(1.0)
            continue
        target = norm
        is_outlier = len(first) == warmup and norm - mean > z_threshold * math.sqrt(variance)
        if is_outlier and in_a_row == 25:
            first, is_outlier = [], False
        in_a_row = in_a_row + 1 if is_outlier else 0
        if len(first) < warmup:
            first.append(norm)
            mean, variance = float(np.mean(first)), float(np.var(first))
        else:
            if is_outlier:
                share = z_threshold * math.sqrt(variance) / (norm - mean)
                z_target = {"reciprocal": z_threshold * share, "threshold": z_threshold, "mean": 0.0}[to]
                target = mean + z_target * math.sqrt(variance)
            mean = alpha * mean + (1 - alpha) * target
            variance = alpha * variance + (1 - alpha) * (target - mean) ** 2
        multipliers.append(min(1.0, min(target, max_norm) / norm))
    return multipliers


NORM_CLIPS: list[tuple[Any, Any, int]] = [
    (lambda: FixedClip(1.2, window=3), lambda norms: fixed(norms, 1.2), 100),
    (lambda: FixedClip(1e-9), lambda norms: fixed(norms, 1e-9), 100),
    (lambda: AutoClip(95.5, window=7), lambda norms: autoclip(norms, 95.5, 7), 120),
    (lambda: AutoClip(10, window=256), lambda norms: autoclip(norms, 10, 256), 300),  # as many as a block has threads
    (lambda: AutoClip(37.21, window=257), lambda norms: autoclip(norms, 37.21, 257), 300),
    (lambda: AutoClip(0, window=2), lambda norms: autoclip(norms, 0, 2), 100),
    (lambda: AutoClip(100), lambda norms: [1.0] * len(norms), 100),
    (lambda: ZClip(), lambda norms: zclip(norms, 2.5, 0.97, 25, "reciprocal", math.inf), 300),
    (lambda: ZClip(1.5, 0.9, 5, "threshold"), lambda norms: zclip(norms, 1.5, 0.9, 5, "threshold", math.inf), 100),
    (lambda: ZClip(1.0, 0.5, 2, "mean", 1.1), lambda norms: zclip(norms, 1.0, 0.5, 2, "mean", 1.1), 100),
]


@pytest.mark.parametrize(("make", "rule", "steps"), NORM_CLIPS, ids=[repr(make()) for make, *_ in NORM_CLIPS])
@pytest.mark.parametrize("where", DECIDING, indirect=True, ids="-".join)
def test_multipliers_follow_the_formula(
    make: Any, rule: Any, steps: int, kernels: Kernels, where: tuple[str, str]
) -> None:
    """A step that is skipped never was, and all backends keep the same state."""
    ours, theirs, reference = make(), make(), backends.resolve("reference", where[1])
    given, multipliers = norms(steps), []
    for step, norm in enumerate(given):
        value = torch.tensor(norm, dtype=torch.float64, device=where[1])
        if step % 11 == 5:
            given[step] = math.nan  # which the formulas leave out
        skip = torch.tensor(float(step % 11 == 5), device=where[1])
        multipliers.append(decide(ours, kernels, value, skip=skip)[0].item())
        if step % 11 != 5 or not math.isfinite(norm):  # that is counted
            decide(theirs, reference, value)
    assert multipliers == pytest.approx(rule(given), rel=1e-9)
    assert sum(multiplier < 1 for multiplier in multipliers) > 10 or "percentile=100" in repr(ours)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("where", DECIDING, indirect=True, ids="-".join)
def test_a_percentile_of_more_norms_than_a_block_has_threads(kernels: Kernels, where: tuple[str, str]) -> None:
    """Against numpy.percentile, for a window that has wrapped around."""
    window, clip = 2500, AutoClip(90, 2500)
    decide(clip, kernels, torch.tensor(1.0, dtype=torch.float64, device=where[1]))
    held = [norm for norm in norms(6000) if math.isfinite(norm)][: window + 700]
    state = clip.state_dict()
    state["tensors"]["norms"].copy_(torch.tensor(held[-700:] + held[700:window], dtype=torch.float64))
    state["tensors"]["totals"][0] = window + 700
    clip.load_state_dict(state)
    expected = np.percentile([*held[-700:], 1e9, *held[701:window]], 90)
    multiplier = decide(clip, kernels, torch.tensor(1e9, dtype=torch.float64, device=where[1]))[0]
    assert multiplier.item() == pytest.approx(expected / 1e9, rel=1e-12)


@pytest.mark.parametrize("where", BY_KERNELS, indirect=True, ids="-".join)
@pytest.mark.parametrize("factor", [None, 0.25])
@pytest.mark.parametrize("count", [1, 40, 700])
@pytest.mark.parametrize("make", [lambda: AdaGC(warmup=3, absolute=20.0), lambda: AdaGC(warmup=0), lambda: AGC(0.3)])
def test_the_same_rows_give_the_same_decisions(
    make: Any, count: int, factor: float | None, kernels: Kernels, where: tuple[str, str]
) -> None:
    ours, theirs, reference = make(), make(), backends.resolve("reference", where[1])
    by = None if factor is None else torch.tensor(factor, device=where[1])
    has_clipped = False
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(3, generator=generator) * (1 + step % 3) for _ in range(count)]
        gradients[step % count][:] = [0.0, math.nan, 1.0, math.inf][step % 4]
        table = gradstat.stats(gradients).to(where[1])
        weights = None
        if isinstance(ours, AGC):
            weights = gradstat.stats([torch.randn(4, generator=generator) for _ in range(count)]).to(where[1])
        skip = torch.tensor(float(step == 6), device=where[1])
        own = decide(ours, kernels, table, weights, by, skip)
        expected = decide(theirs, reference, table, weights, by, skip)
        torch.testing.assert_close(own, expected, rtol=1e-11, atol=0, equal_nan=True, msg=lambda m, s=step: f"{s}: {m}")
        has_clipped |= bool((own < 1).any())
    assert has_clipped
    assert_same_state(ours, theirs)


def without_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


STATE, ROWS = torch.zeros(16, dtype=torch.float64), torch.zeros(2, 10, dtype=torch.float64)
NORM, HELD = torch.ones((), dtype=torch.float64), torch.zeros(25, dtype=torch.float64)
GUARDED = [0.0, 6.0, 2.0, 10.0, 0.0, math.inf, math.inf], HELD, 8, NORM.expand(2).clone()


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("clip", (0, [1.0], STATE, 11, NORM), "state must have 17 contiguous numbers, got 16"),
        ("clip", (0, [1.0], STATE.float(), 10, NORM), "state must be float64"),
        ("clip", (0, [1.0], STATE, 10, NORM.float()), "measured must be float64"),
        ("clip", (0, [1.0], STATE, 10, NORM, None, NORM), "factor must be float32"),
        ("clip", (0, [1.0] * 6, STATE, 10, NORM), "at most 5 options, got 6"),
        ("clip", (4, [1.0], STATE, 10, ROWS), "required for units and only for units"),
        ("clip", (5, [1.0], STATE, 10, NORM), "unknown clip method 5"),
        ("clip", (3, [1.0], STATE, 10, NORM), "measured must be a table of rows"),
        ("clip", (3, [1.0], STATE, 10, ROWS[:, 1:]), "a table of rows for this method, of 10 columns"),
        ("clip", (1, [100.1], STATE, 10, NORM), r"options\[0\], the percentile, must be from 0 to 100, got 100.1"),
        ("clip", (0, [1.0], STATE, 0, NORM), "window must be from 1 to 281474976710656, got 0"),
        ("clip", (0, [1.0], STATE, 2**64 // 3 + 1, NORM), "window must be from 1 to .*, got 614891469123651"),
        ("clip", (0, [1.0], without_memory(STATE.clone()), 10, NORM), "state has no memory"),
        ("clip", (0, [1.0], torch.full_like(STATE, -7.0), 10, NORM), "whole numbers of recorded values, got -7"),
        ("guard", (GUARDED[0][1:], *GUARDED[1:], torch.zeros(3)), "expected 7 options, got 6"),
        ("guard", (*GUARDED[:2], 0, GUARDED[3], torch.zeros(3)), "window must be from 1 to 281474976710656, got 0"),
        ("guard", (*GUARDED[:3], NORM, torch.zeros(3)), "scaling must have 2 contiguous numbers, got 1"),
        ("guard", (*GUARDED, torch.zeros(2)), "verdict must have 3 contiguous numbers, got 2"),
        ("guard", (*GUARDED, torch.zeros(3), torch.ones(1, dtype=torch.int64)), "loss must be"),
        ("guard", (*GUARDED, torch.zeros(3), None, torch.zeros(3)), "counters must be int64"),
        ("guard", (GUARDED[0], GUARDED[1] - 7, *GUARDED[2:], torch.zeros(3)), "expected whole numbers"),
    ],
)
def test_the_operators_refuse_what_does_not_fit(operator: str, arguments: tuple[Any, ...], message: str) -> None:
    kernels = backends.resolve("native", "cpu")
    operate: Any = kernels.decide_clip_ if operator == "clip" else kernels.guard_
    with pytest.raises(RuntimeError, match=message):
        operate(*arguments, *[None] * ((8 if operator == "clip" else 7) - len(arguments)))
    assert not STATE.any()
    assert not GUARDED[1].any()


def test_a_gpus_state_with_impossible_counters_leads_nowhere_else(emulated: Kernels) -> None:
    """They cannot be checked without waiting for the GPU, so places computed from them are kept in range."""
    window = 16
    norm, numbers = torch.tensor(3.0, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for number in NUMBERS:
        for rule in ("fixed", "percentile", "z-score", "guard", "guard by sigmas"):
            count = 9 + 2 * window if "guard" in rule else 6 + window + 3
            memory = torch.full((count + 2 * AROUND,), 77.0, dtype=torch.float64)
            state = memory[AROUND : AROUND + count].zero_()
            for _ in range(3):
                if "guard" in rule:
                    state[7:9] = number
                    options = (float("sigmas" in rule), 6.0, math.nan, 1.0, 0.0, math.inf, math.inf)
                    given = (torch.zeros(3), torch.tensor(2.0), None)
                    decided = emulated.guard_(options, state, window, numbers, *given)
                else:
                    state[0] = number
                    code = ("fixed", "percentile", "z-score").index(rule)
                    options = ((1.0,), (95.0,), (2.5, 0.9, 3.0, 0.0, math.inf))[code]
                    held = state if code == 2 else state[:-3]
                    decided = emulated.decide_clip_(code, options, held, window, norm, None, None, None)
            assert not decided.isnan().any()
            assert (memory[:AROUND] == 77).all()
            assert (memory[AROUND + count :] == 77).all()


@pytest.mark.parametrize("make", [lambda: FixedClip(1.0), AutoClip, ZClip, AdaGC, AGC])
def test_a_clip_takes_few_operations(make: Any) -> None:
    clip = make()
    parameters = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = torch.ones(4, 3)
    clip.clip_(parameters)
    with Operations() as counted:
        clip.clip_(parameters)
    assert sum("empty" not in name for name in counted.names) <= 8
