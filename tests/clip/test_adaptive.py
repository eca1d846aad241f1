"""Adaptive clips: those of tensors and units against their formulas, their state, and that no step syncs."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.cuda_counts import NoSync
from helpers.exact import REAL
from torch import Tensor, nn

import gradstat
from gradstat import AGC, AdaGC, AutoClip, FixedClip, ZClip
from gradstat._core import backends, multiply
from gradstat.adaptive import AdaptiveClip, NormClip, tensor_clips

# Two rules in plain Python; test_decide.py has those of norms -------------------------------------------------


def adagc(
    steps: list[list[float]], relative: float, beta: float, warmup: int, absolute: float
) -> tuple[list[list[float | None]], list[float | None]]:
    """Takes and returns a list for each step, with None where nothing is decided; also returns the final means."""
    multipliers: list[list[float | None]] = []
    means: list[float | None] = [None] * len(steps[0])
    finite_steps = 0
    for norms in steps:
        total = math.sqrt(sum(norm**2 for norm in norms))
        is_finite = math.isfinite(total)
        in_warmup = finite_steps < warmup
        finite_steps += is_finite
        row: list[float | None] = []
        for i, norm in enumerate(norms):
            mean = means[i]
            if not math.isfinite(norm) or norm == 0 or (in_warmup and not is_finite):
                row.append(None)
            elif in_warmup:
                multiplier = min(1.0, absolute / total)
                means[i] = min(math.inf if mean is None else mean, multiplier * norm)
                row.append(multiplier)
            elif mean is None:
                means[i] = norm
                row.append(1.0)
            else:
                multiplier = min(1.0, relative * mean / norm)
                means[i] = beta * mean + (1 - beta) * multiplier * norm
                row.append(multiplier)
        multipliers.append(row)
    return multipliers, means


def agc(parameter: Tensor, gradient: Tensor, clipping: float, eps: float) -> Tensor:
    """The clipped gradient, in float64."""
    weights, units = parameter.detach().double(), gradient.double()
    if gradient.dim() < 2:
        weights, units = weights[None], units[None]
    clipped = []
    for weight, unit in zip(weights, units, strict=True):
        limit = clipping * max(weight.norm().item(), eps)
        norm = unit.norm().item()
        clipped.append(unit * (limit / norm) if math.isfinite(norm) and norm > limit else unit)
    return torch.stack(clipped).reshape(gradient.shape)


CLIPS: dict[str, Callable[[], AdaptiveClip]] = {
    "FixedClip": lambda: FixedClip(1.0),
    "AutoClip": AutoClip,
    "ZClip": lambda: ZClip(warmup=3),
    "AdaGC": lambda: AdaGC(warmup=3),
    "AGC": lambda: AGC(0.1),
}
every_clip = pytest.mark.parametrize("make", CLIPS.values(), ids=CLIPS)


def decide(clip: NormClip, norms: list[float]) -> list[float]:
    return [clip.multiplier(torch.tensor(norm, dtype=torch.float64)).item() for norm in norms]


@pytest.mark.parametrize("make", [AutoClip, ZClip, lambda: ZClip(1.5, 0.9, 5, "threshold"), lambda: ZClip(to="mean")])
@pytest.mark.parametrize("quiet", [[0.0], [1e-12], [1.0], [0.0, 1e-9], [0.0, 2.0]])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_quiet_steps_do_not_limit_all_that_follow(
    make: Callable[[], NormClip], quiet: list[float], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked losses, advantages of zero, an idle warm-up, norms without any spread."""
    monkeypatch.setattr("gradstat.adaptive._base.resolve", lambda _, kind: backends.resolve(backend, kind))
    norms = [quiet[i % len(quiet)] if i < 60 else 2 + i % 7 / 10 for i in range(660)]
    decided = decide(make(), norms)
    assert decided[-7:] == pytest.approx([1.0] * 7, abs=0.25)
    assert decided[:60] == [1.0] * 60 or quiet != [0.0]


def parameters_on(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of different shapes; the last one is all zeros."""
    shapes = [(), (5,), (4, 7), (3, 2, 2, 2), (9, 3), (2, 2)]
    made = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    nn.init.zeros_(made[-1])
    return made


def give_gradients(parameters: list[nn.Parameter], size: float = 1.0) -> list[Tensor]:
    """Sets new gradients; returns copies of them."""
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, device=parameter.device) * size).to(parameter.dtype)
    return [parameter.grad.clone() for parameter in parameters]


def assert_scaled(parameter: nn.Parameter, expected: Tensor) -> None:
    """Within two roundings of the gradient's dtype."""
    info = torch.finfo(parameter.dtype)
    slack = 2 * max(info.eps, 1e-7)  # norms are good to 1e-7
    found, tolerance = parameter.grad.double(), {"rtol": slack, "atol": info.tiny * slack}
    torch.testing.assert_close(found, expected.double(), **tolerance, equal_nan=True)


def test_a_step_that_is_not_kept_is_not_recorded() -> None:
    clip = AutoClip(10)
    decide(clip, [1.0, 2.0, 3.0])
    before = clip.state_dict()["tensors"]
    assert clip.multiplier(torch.tensor(9.0, dtype=torch.float64), keep=torch.tensor(False)) == 1
    torch.testing.assert_close(clip.state_dict()["tensors"], before, equal_nan=True, rtol=0, atol=0)


def test_zclip_does_not_depend_on_the_scale_of_the_norms_nor_needs_any_spread() -> None:
    norms = torch.randn(200).div(4).exp().tolist()
    for scale in (1e-30, 1e250):
        assert decide(ZClip(), [norm * scale for norm in norms]) == pytest.approx(decide(ZClip(), norms), rel=1e-9)
    assert decide(ZClip(warmup=5), [2.0] * 10 + [4.0, 2.0, 1.0]) == [1.0] * 10 + [0.5, 1.0, 1.0]


ADAGC: list[dict[str, Any]] = [{"warmup": 3, "absolute": 20.0}, {"relative": 1.5, "beta": 0.5, "warmup": 0}]
ADAGC += [{"relative": 0.9, "beta": 0.9, "warmup": 6, "absolute": 1.0}]


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("options", ADAGC, ids=str)
def test_adagc_follows_its_formula(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    clip = AdaGC(**options)
    defaults = {"relative": 1.05, "beta": 0.98, "warmup": 100, "absolute": 1.0}
    parameters = parameters_on(device, dtype)
    norms: list[list[float]] = []
    for step in range(10):
        before = give_gradients(parameters, 0.5 + step % 3)
        # One gradient is 0 in the first five steps, one is NaN in a step of each phase, and one is Inf in step 8.
        for i, bad_steps, value in ((1, range(5), 0.0), (2, (1, 7), math.nan), (3, (8,), math.inf)):
            if step in bad_steps:
                before[i].view(-1)[0 if value else slice(None)] = value
                parameters[i].grad.copy_(before[i])
        norms.append([gradient.double().norm().item() for gradient in before])
        clip.clip_(parameters)
        multipliers, means = adagc(norms, **{**defaults, **options})
        for parameter, gradient, multiplier in zip(parameters, before, multipliers[-1], strict=True):
            assert_scaled(parameter, gradient.double() * (1.0 if multiplier is None else multiplier))
    assert clip.state_dict()["tensors"]["means"].tolist() == pytest.approx(means, rel=1e-6)
    decided = [multiplier for row in multipliers for multiplier in row if multiplier is not None]
    assert f" of {len(decided)} tensors (" in str(clip.summary())
    assert clip.summary().clipped == sum(multiplier < 1 for multiplier in decided)


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("options", [{}, {"clipping": 0.3, "eps": 0.5}], ids=str)
def test_agc_follows_its_formula(options: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    clip = AGC(**options)
    parameters = parameters_on(device, dtype)
    parameters.append(nn.Parameter(torch.randn(3, 4, 2, 2, device=device).to(dtype, memory_format=torch.channels_last)))
    parameters.append(nn.Parameter(torch.randn(6, 4, device=device).to(dtype)[:, ::2]))
    for size in (1.0, 0.02):
        before = give_gradients(parameters, size)
        parameters[-2].grad = before[-2].to(memory_format=torch.channels_last)
        parameters[-1].grad = torch.zeros(2, 12, device=device, dtype=dtype).t()[::2].copy_(before[-1])
        parameters[2].grad[1, 3] = math.nan
        parameters[3].grad[2, 0, 0, 0] = -math.inf
        before = [parameter.grad.clone() for parameter in parameters]
        assert math.isnan(clip.clip_(parameters))
        for parameter, gradient in zip(parameters, before, strict=True):
            assert_scaled(parameter, agc(parameter, gradient, **{"clipping": 0.01, "eps": 1e-3, **options}))
    units = 1 + 1 + 4 + 3 + 9 + 2 + 3 + 6
    assert clip.summary().decided == 2 * (units - 2)
    assert f" of {2 * (units - 2)} units (" in str(clip.summary())


@pytest.mark.parametrize("make", [CLIPS["AdaGC"], CLIPS["AGC"]])
def test_each_device_has_its_own_kernels(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two gradients is taken for one on a GPU; what cannot be resolved is told before a write."""
    parameters = parameters_on("cpu")[2:4]
    give_gradients(parameters, 100.0)
    first, before = parameters[0].grad, parameters[0].grad.clone()
    known = {"cpu": backends.resolve("reference", "cpu")}

    def resolve(_: object, device_type: str) -> backends.Kernels:
        if device_type not in known:
            raise backends.BackendUnavailableError("no kernels")
        return known[device_type]

    monkeypatch.setattr(backends, "resolve", resolve)
    groups = {torch.device("cpu"): [0], torch.device("cuda"): [1]}
    for module in (tensor_clips, multiply):
        monkeypatch.setattr(module, "by_device", lambda _: groups)
        monkeypatch.setattr(module, "to_device", lambda tensor, _: tensor)
    with pytest.raises(backends.BackendUnavailableError, match=r"no kernels \('the gradient of parameters\[1\]'"):
        make().clip_(parameters)
    assert torch.equal(first, before)
    known["cuda"] = copy.copy(known["cpu"])
    written = []
    for kernels in known.values():
        for name in ("scale_each_", "scale_units_"):
            monkeypatch.setattr(kernels, name, lambda tensors, _, kernels=kernels: written.append((kernels, *tensors)))
    make().clip_(parameters)
    assert [(kernels, id(tensor)) for kernels, tensor in written] == [
        (known[device.type], id(parameters[i].grad)) for device, (i,) in groups.items()
    ]


def test_without_gradients_there_is_no_step() -> None:
    for clip in (make() for make in CLIPS.values()):
        for parameters in ([], [nn.Parameter(torch.zeros(3))]):
            clip.clip_(parameters)
        summary = clip.summary()
        assert summary.steps == summary.clipped == summary.recent == 0
        assert math.isnan(summary.clipped_fraction)
        assert math.isnan(summary.suggested_max_norm)
        assert str(summary) == f"{clip!r}: 0 steps, 0 of them with a norm that is not finite"


def test_a_changed_list_is_refused_by_adagc() -> None:
    clip = AdaGC()
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    give_gradients(parameters)
    clip.clip_(parameters)
    parameters[0].grad = None
    before = clip.state_dict()["tensors"]
    with pytest.raises(ValueError, match=r"each of 3 parameters.*a different list, of 2.*set_to_none=False"):
        clip.clip_(parameters)
    clip.clip_([nn.Parameter(torch.zeros(3))])  # without a gradient this is an empty list
    parameters[0].grad = torch.ones(3)
    with pytest.raises(ValueError, match="a different list, of 3"):
        clip.clip_(parameters[::-1])
    torch.testing.assert_close(clip.state_dict()["tensors"], before, equal_nan=True)
    clip.clip_(parameters)
    copies = copy.deepcopy(parameters)
    for copied in (copy.deepcopy(clip), pickle.loads(pickle.dumps(clip))):
        give_gradients(copies)
        copied.clip_(copies)


@every_clip
def test_a_saved_clip_continues_identically_and_its_state_stays_where_it_is(
    make: Any, device: str, tmp_path: Path
) -> None:
    """A captured graph writes to the memory it was captured with; loading and stepping must not replace it."""
    first, second, parameters = make(), make(), parameters_on(device)

    def run(clip: AdaptiveClip, steps: range) -> list[Tensor]:
        clipped = []
        for step in steps:
            torch.manual_seed(step)
            give_gradients(parameters, 5.0 if step % 4 == 3 else 1.0)
            clip.clip_(parameters)
            clipped += [parameter.grad.clone() for parameter in parameters]
        return clipped

    run(first, range(10))
    addresses = {name: tensor.data_ptr() for name, tensor in first._state.items()}
    assert all(tensor.device.type == device for tensor in first._state.values())
    state = first.state_dict()
    expected, summary = run(first, range(10, 20)), str(first.summary())
    torch.save(state, tmp_path / "clip.pt")
    stored = torch.load(tmp_path / "clip.pt", weights_only=True)
    stored["tensors"] = dict(reversed(stored["tensors"].items()))  # they are found by name
    for clip, loaded in ((second, stored), (first, state)):
        clip.load_state_dict(loaded)
        assert clip.summary().steps == 10
        assert all(map(torch.equal, run(clip, range(10, 20)), expected))
        assert str(clip.summary()) == summary
    held = (clip.state_dict()["tensors"] for clip in (first, second))
    torch.testing.assert_close(*held, equal_nan=True, rtol=0, atol=0)
    assert {name: tensor.data_ptr() for name, tensor in first._state.items()} == addresses
    first.load_state_dict(make().state_dict())
    assert first.summary().steps == 0


@every_clip
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_no_step_reads_a_value(make: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = make()
    parameters = parameters_on("cpu")
    refused = Mock(side_effect=AssertionError("a step waited for the device"))
    for name in ("tolist", "numpy", "cpu"):
        monkeypatch.setattr(Tensor, name, refused)
    for step in range(8):
        give_gradients(parameters, 1.0 + step)
        if step % 2:
            parameters[2].grad = parameters[2].grad.t().contiguous().t()
        with NoSync():
            clip.clip_(parameters, backend=backend)
            if isinstance(clip, NormClip):
                clip.multiplier(torch.ones((), dtype=torch.float64), keep=torch.tensor(True))
            clip.state_dict()
    with pytest.raises(AssertionError, match="waited"):
        clip.summary()


LEAST = {
    AutoClip: {"percentile": 0.0},
    ZClip: {"z_threshold": 0.0, "alpha": 0.0, "warmup": 1},
    AdaGC: {"relative": 0.0, "beta": 0.0, "warmup": 0, "absolute": 0.0},
    AGC: {"clipping": 0.0, "eps": 0.0},
}
MOST = {AutoClip: {"percentile": 100.0}, ZClip: {"alpha": 1.0}, AdaGC: {"beta": 1.0}}


@pytest.mark.parametrize("clip", LEAST)
def test_options_out_of_range_are_refused(clip: Any) -> None:
    for name, least in LEAST[clip].items():
        clip(**{name: least})
        for value in [least - 1] if isinstance(least, int) else [-0.01, math.nan]:
            with pytest.raises(ValueError, match=rf"{name} is {value}; expected a .*number from {least}"):
                clip(**{name: value})
    for name, most in MOST.get(clip, {}).items():
        with pytest.raises(ValueError, match=rf"{name} is {most + 0.5}; expected a number from 0\.0 to {most}"):
            clip(**{name: most + 0.5})
    with pytest.raises(TypeError):
        clip(**LEAST[clip], **{"window": 10.5})
    for option, wrong in (("window", True), ("window", 2.5), ("percentile", "10"), ("percentile", None)):
        with pytest.raises(TypeError, match=rf"{option}: expected a (whole )?number, got {type(wrong).__name__}"):
            AutoClip(**{option: wrong})
    with pytest.raises(ValueError, match="to is 'median'; expected one of reciprocal, threshold, mean"):
        ZClip(to="median")  # type: ignore[arg-type]


def test_the_summary_says_what_was_done() -> None:
    clip = FixedClip(1.2, window=100)
    norms = [*torch.randn(495).div(4).exp().tolist(), math.nan, *[math.inf] * 4]
    multipliers = decide(clip, norms)
    summary = clip.summary()
    finite = [norm for norm in norms if math.isfinite(norm)]
    below_one = [multiplier for multiplier in multipliers if multiplier < 1]
    assert (summary.steps, summary.nonfinite, summary.recent) == (500, 5, 100)
    assert (summary.decided, summary.clipped) == (len(finite), len(below_one))
    assert summary.clipped_fraction == len(below_one) / len(finite)
    assert summary.mean_multiplier == pytest.approx(np.mean(below_one))
    assert summary.smallest_multiplier == min(below_one)
    for percentile in (5, 25, 50, 75, 95, 99):
        assert summary.norm_percentiles[percentile] == pytest.approx(np.percentile(finite[-100:], percentile))
    assert sum(norm > summary.suggested_max_norm for norm in finite[-100:]) == 10
    text = str(summary)
    assert text.startswith("FixedClip(max_norm=1.2, window=100): 500 steps, ")
    assert f"clipped: {len(below_one)} of {len(finite)} steps" in text
    assert f"suggested max_norm: {summary.suggested_max_norm:.3g}, the 90th percentile" in text


def test_advice_is_given_on_clipping_always_or_never_once_there_is_enough_to_go_by() -> None:
    ordinary = [1.0 + 0.001 * i for i in range(100)]
    for max_norm, advice in (
        (0.5, "more than half of the steps are clipped: max_norm"),
        (9.0, "nothing was ever clipped"),
    ):
        clip = FixedClip(max_norm)
        decide(clip, ordinary[:99])
        assert clip.summary().advice == ""
        decide(clip, ordinary[99:])
        assert clip.summary().advice.startswith(advice)
        assert "advice: " + advice in str(clip.summary())
    clip = FixedClip(1.06)
    decide(clip, ordinary)
    assert clip.summary().advice == ""
    autoclip = AutoClip(10)
    decide(autoclip, torch.randn(200).exp().tolist())
    assert "percentile=10 is meant to clip about 90 %" in autoclip.summary().advice


def test_an_adaptive_clip_in_place_of_a_number_says_how_it_is_used() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for function in (gradstat.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        with pytest.raises(TypeError, match=r"got ZClip\(.*clips by itself: call its clip_\(parameters\)"):
            function(parameters, gradstat.ZClip())
    assert all((parameter.grad == 1).all() for parameter in parameters)
