"""clip_grad_norm_, and its two halves in sequence, against torch's, and where they deliberately differ."""

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from helpers.exact import REAL
from helpers.gradients import parameters_with
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as torch_clip

import gradstat


def in_halves(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    listed = list(parameters)
    gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
    norm = gradstat.get_total_norm(gradients, norm_type, error_if_nonfinite, backend=backend)
    gradstat.clip_grads_with_norm_(listed, max_norm, norm, backend=backend)
    return norm


Clip = Callable[..., Tensor]
WAYS: list[Clip] = [gradstat.clip_grad_norm_, in_halves]
both_ways = pytest.mark.parametrize("clip", WAYS, ids=["at once", "in halves"])

ORDERS = [2.0, math.inf, 1.0, 0.0, 0.5, 3.0, -1.0, -math.inf]


def clones(gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [g.clone() if g is not None else None for g in gradients]


def tolerance(dtype: torch.dtype) -> float:
    """A few roundings in the dtype, to which torch rounds the norm and the multiplier."""
    return 6 * torch.finfo(dtype).eps


def assert_same_gradients(ours: list[nn.Parameter], theirs: list[nn.Parameter], slack: float) -> None:
    for a, b in zip((p.grad for p in ours), (p.grad for p in theirs), strict=True):
        assert a.stride() == b.stride()
        finest = max(slack, tolerance(a.dtype))
        torch.testing.assert_close(a, b, rtol=finest, atol=finest * 1e-3, equal_nan=True)


def assert_same_as_torch(gradients: list[Tensor], backend: str, max_norm: float, order: float) -> None:
    theirs = parameters_with(clones(gradients))
    expected = torch_clip(theirs, max_norm, order)
    # torch rounds every tensor's norm to that tensor's dtype; gradstat rounds once, at the end.
    slack = max(tolerance(g.dtype) for g in gradients)
    for clip in WAYS:
        ours = parameters_with(clones(gradients))
        identities = [id(p.grad) for p in ours]
        norm = clip(ours, max_norm, order, backend=backend)
        assert (norm.dtype, norm.device, norm.shape) == (expected.dtype, expected.device, ())
        assert not norm.requires_grad
        torch.testing.assert_close(norm, expected, rtol=slack, atol=0, equal_nan=True)
        assert [id(p.grad) for p in ours] == identities
        assert_same_gradients(ours, theirs, slack)


# torch itself overflows float16 for the orders left out.
ORDERS_AND_DTYPES = [
    (order, dtype)
    for order in ORDERS
    for dtype in [*REAL, torch.complex64, torch.complex128]
    if dtype != torch.float16 or order not in (0.5, -1.0)
]


@pytest.mark.parametrize(("order", "dtype"), ORDERS_AND_DTYPES, ids=str)
@pytest.mark.parametrize("max_norm", [0.7, 1e6], ids=["clipped", "unclipped"])
def test_every_order_and_dtype(order: float, dtype: torch.dtype, max_norm: float, where: tuple[str, str]) -> None:
    backend, device = where
    gradients = [
        (torch.randn(n, dtype=torch.complex64 if dtype.is_complex else None) + 0.1).to(dtype) for n in (5, 300)
    ]
    assert_same_as_torch([g.to(device) for g in gradients], backend, max_norm, order)


@pytest.mark.parametrize("max_norm", [1.3, math.inf])
@pytest.mark.parametrize("bad", [False, True])
@both_ways
def test_error_if_nonfinite_raises_before_anything_changes(
    bad: bool, max_norm: float, where: tuple[str, str], clip: Clip
) -> None:
    backend, device = where
    values = torch.tensor([[1.0, 2.0], [2.0, 2.0], [0.0, math.nan if bad else 12.0]], device=device)
    places = torch.tensor([[1, 1, 4]], device=device)
    sparse = torch.sparse_coo_tensor(places, values, (6, 2), check_invariants=True)
    for gradient in (values.clone(), sparse, torch.zeros(3, 8, device=device)[:, ::4].copy_(values)):
        before = gradient.to_dense().clone()
        parameters = parameters_with([gradient])
        if bad:
            with pytest.raises(RuntimeError, match="non-finite"):
                clip(parameters, max_norm, error_if_nonfinite=True, backend=backend)
        else:
            norm = clip(parameters, max_norm, error_if_nonfinite=True, backend=backend)
            torch.testing.assert_close(norm, before.norm())
            before *= min(1.0, max_norm / before.norm().item())
        torch.testing.assert_close(parameters[0].grad.to_dense(), before, equal_nan=True)  # type: ignore[union-attr]


def test_error_text_is_torchs() -> None:
    for order in (2.0, "inf", 3.0):
        messages = []
        for clip in (torch_clip, *WAYS):
            with pytest.raises(RuntimeError) as caught:
                clip(parameters_with([torch.tensor([math.inf])]), 1.0, order, error_if_nonfinite=True)
            messages.append(str(caught.value))
        assert len(set(messages)) == 1


@both_ways
def test_negative_zero_is_kept_and_zero_max_norm_gives_zeros(where: tuple[str, str], clip: Clip) -> None:
    backend, device = where
    parameters = parameters_with([torch.tensor([-0.0, 3.0, 4.0], device=device)])
    assert clip(parameters, 1.0, backend=backend) == 5.0
    assert math.copysign(1, parameters[0].grad[0].item()) == -1  # type: ignore[index]
    clip(parameters, 0.0, backend=backend)
    assert parameters[0].grad.abs().sum() == 0  # type: ignore[union-attr]


@both_ways
def test_a_gradient_listed_twice_counts_and_scales_twice(where: tuple[str, str], clip: Clip) -> None:
    """Against float64, since on a GPU torch's own clip races with itself and scales some elements only once."""
    backend, device = where
    gradients = [torch.randn(50000, device=device), torch.randn(14, device=device)[::2], torch.randn(7, device=device)]
    exact = [gradient.double() for gradient in gradients]
    total = torch.cat([*exact, *exact[:2]]).norm()
    multiplier = 1.0 / (total + 1e-6)
    parameters = parameters_with(gradients)
    norm = clip([*parameters, *parameters[:2]], 1.0, backend=backend)
    torch.testing.assert_close(norm, total.float())
    for gradient, before, times in zip(gradients, exact, (2, 2, 1), strict=True):
        torch.testing.assert_close(gradient, (before * multiplier**times).float(), rtol=1e-6, atol=0)


# Deliberate differences from torch --------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", [1e20, 3e38, 1e-25, 1e-40], ids=str)
def test_extreme_float32_norms_come_out_right(magnitude: float, where: tuple[str, str]) -> None:
    backend, device = where
    gradient = torch.full((4,), magnitude, device=device)
    exact = 2 * gradient[0].double().item()
    for clip in WAYS:
        (parameter,) = parameters_with([gradient.clone()])
        norm = clip([parameter], 1.0, backend=backend)
        assert norm.item() == pytest.approx(exact if exact < 3.4e38 else math.inf, rel=1e-6, abs=0.0)
        if clip is in_halves and exact > 3.4e38:  # a norm beyond float32 has to be passed as a Python number
            parameter.grad = gradient.clone()
            gradstat.clip_grads_with_norm_([parameter], 1.0, exact, backend=backend)
        expected = 1.0 if magnitude > 1 else exact
        assert parameter.grad.double().norm().item() == pytest.approx(expected, rel=1e-4, abs=0.0)  # type: ignore[union-attr]
        assert magnitude > 1 or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


@both_ways
def test_infinite_max_norm_only_measures(where: tuple[str, str], clip: Clip) -> None:
    backend, device = where
    for bad in (1.0, math.inf, math.nan):
        gradient = torch.tensor([3.0, 4.0, bad], device=device)
        parameters = parameters_with([gradient.clone()])
        version = parameters[0].grad._version  # type: ignore[union-attr]
        norm = clip(parameters, math.inf, backend=backend)
        torch.testing.assert_close(norm, gradient.norm(), equal_nan=True)
        torch.testing.assert_close(parameters[0].grad, gradient, rtol=0, atol=0, equal_nan=True)
        assert parameters[0].grad._version == version  # type: ignore[union-attr]


# The rest of the contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["inf", "1.0", torch.tensor(2), 2])
def test_order_and_limit_go_through_float(order: object) -> None:
    gradients: list[Tensor | None] = [torch.tensor([3.0, -4.0])]
    expected = torch_clip(parameters_with(clones(gradients)), 1.0, order)  # type: ignore[arg-type]
    norm = gradstat.clip_grad_norm_(parameters_with(gradients), "1.0", order, foreach=True)  # type: ignore[arg-type]
    torch.testing.assert_close(norm, expected)


def test_empty_gradients_have_no_infinity_norm_as_in_torch() -> None:
    gradients: list[Tensor | None] = [torch.zeros(0), torch.ones(2)]
    for clip in (torch_clip, gradstat.clip_grad_norm_):
        with pytest.raises(RuntimeError, match="identity"):
            clip(parameters_with(clones(gradients)), 1.0, math.inf)
    assert gradstat.clip_grad_norm_(parameters_with(gradients), 1.0) == pytest.approx(math.sqrt(2))


# Bad input --------------------------------------------------------------------------------------------------


def test_nan_max_norm_is_refused_before_anything_changes() -> None:
    parameters = parameters_with([torch.ones(3)])
    with pytest.raises(ValueError, match="max_norm is NaN"):
        gradstat.clip_grad_norm_(parameters, math.nan)
    assert torch.equal(parameters[0].grad, torch.ones(3))  # type: ignore[arg-type]


def test_expanded_gradients_are_measured_where_nothing_is_to_be_written() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    parameter.grad = torch.ones(3, 1).expand(3, 4)
    for clip in WAYS:
        assert clip([parameter], math.inf).item() == pytest.approx(math.sqrt(12))


def test_foreach_is_refused_where_torch_has_none() -> None:
    (parameter,) = parameters_with([torch.zeros(2, device="meta")])
    calls: list[Callable[..., object]] = [
        lambda **options: gradstat.clip_grad_norm_([parameter], 1.0, **options),
        lambda **options: gradstat.get_total_norm([parameter], **options),
        lambda **options: gradstat.clip_grads_with_norm_([parameter], 1.0, 1.0, **options),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="foreach=True was passed, but can't use the foreach API on meta tens"):
            call(foreach=True)
        with pytest.raises(ValueError, match=r"^(?!foreach)"):
            call(foreach=False)


def test_slices_that_begin_at_one_address_are_all_clipped(where: tuple[str, str]) -> None:
    backend, device = where
    buffer = torch.arange(1.0, 25.0, device=device).reshape(4, 6)
    slices = [
        buffer[:, :3],
        buffer[:2, ::2],
        buffer[:, :3],
    ]  # they share the elements 1, 3, 7 and 9; one is listed twice
    alone = torch.ones_like(buffer, dtype=torch.bool)
    alone[:2, ::2] = False
    before = buffer.clone()
    multiplier = 1.0 / (gradstat.get_total_norm(slices).double() + 1e-6)
    gradstat.clip_grad_norm_(parameters_with(list(slices)), 1.0, backend=backend)
    torch.testing.assert_close(buffer[:, :3][alone[:, :3]], (before[:, :3] * multiplier**2).float()[alone[:, :3]])
    torch.testing.assert_close(buffer[:2, 4], (before[:2, 4] * multiplier).float())
    assert torch.equal(buffer[:, 5], before[:, 5])
    assert (buffer[:2, ::2] < before[:2, ::2]).all()


@pytest.mark.cuda
def test_a_clip_joins_a_cuda_graph_and_follows_its_gradients() -> None:
    (parameter,) = parameters_with([torch.ones(5000, device="cuda")])
    gradient = parameter.grad
    assert gradient is not None
    gradstat.clip_grad_norm_([parameter], 5.0, backend="native")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = gradstat.clip_grad_norm_([parameter], 5.0, backend="native")
    for value in (2.0, 0.01):
        gradient.fill_(value)
        graph.replay()
        expected = value * 5000**0.5
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradient, torch.full_like(gradient, value * min(1.0, 5.0 / expected)))
