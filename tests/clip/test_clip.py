"""clip_grad_norm_ and its two halves against torch's, and where they deliberately differ."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.devices import parameters_with
from helpers.exact import REAL
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

NO_FOREACH = "foreach=True was passed, but can't use the foreach API on meta tensors"
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


@pytest.mark.parametrize(("max_norm", "bad"), [(1.3, False), (1.3, True), (math.inf, True)])
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
    torch.testing.assert_close(clip([*parameters, *parameters[:2]], 1.0, backend=backend), total.float())
    for gradient, before, times in zip(gradients, exact, (2, 2, 1), strict=True):
        torch.testing.assert_close(gradient, (before * multiplier**times).float(), rtol=1e-6, atol=0)


def test_slices_that_begin_at_one_address_are_all_clipped(where: tuple[str, str]) -> None:
    backend, device = where
    buffer = torch.arange(1.0, 25.0, device=device).reshape(4, 6)
    # They share the elements 1, 3, 7 and 9; one is listed twice.
    slices = [buffer[:, :3], buffer[:2, ::2], buffer[:, :3]]
    alone = torch.ones_like(buffer, dtype=torch.bool)
    alone[:2, ::2] = False
    before = buffer.clone()
    multiplier = 1.0 / (gradstat.get_total_norm(slices).double() + 1e-6)
    gradstat.clip_grad_norm_(parameters_with(list(slices)), 1.0, backend=backend)
    torch.testing.assert_close(buffer[:, :3][alone[:, :3]], (before[:, :3] * multiplier**2).float()[alone[:, :3]])
    torch.testing.assert_close(buffer[:2, 4], (before[:2, 4] * multiplier).float())
    assert torch.equal(buffer[:, 5], before[:, 5])
    assert (buffer[:2, ::2] < before[:2, ::2]).all()


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


norm_of, clip_with_norm = gradstat.get_total_norm, gradstat.clip_grads_with_norm_
GIVEN, META = parameters_with([torch.ones(3)]), parameters_with([torch.zeros(2, device="meta")])
PAIRS: Any = [torch.ones(1), None]


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        *(
            (
                clip,
                (GIVEN, limit),
                ValueError,
                rf"max_norm is {limit},.* every gradient (around|into NaN)",
            )
            for clip in WAYS
            for limit in (math.nan, -1.0, -1e-30, -math.inf)
        ),
        (clip_with_norm, (GIVEN, 1.0, torch.ones(1)), ValueError, r"0-d tensor for total_norm, got shape \(1,\)"),
        (clip_with_norm, (GIVEN, 1.0, torch.tensor(1j)), ValueError, "complex64"),
        (clip_with_norm, (GIVEN, 1.0, "large"), ValueError, "total_norm: expected a number"),
        (norm_of, (nn.Linear(2, 2),), TypeError, r"tensors, got Linear; pass \[p\.grad for p in module\.parameters"),
        *((norm_of, (PAIRS, order), TypeError, r"'tensors\[1\]', got None") for order in (2.0, 3.0, math.inf)),
        (partial(norm_of, foreach=True), (PAIRS,), TypeError, r"'tensors\[1\]', got None"),
        (norm_of, ([torch.ones(1).long()],), TypeError, r"tensors\[0\].*int64"),
        (partial(norm_of, backend="native"), (META, 3.0), ValueError, "meta"),
        (partial(norm_of, backend="fast"), (GIVEN, 3.0), ValueError, "unknown backend"),
        *(
            (partial(call, foreach=foreach), (META, 1.0, 1.0)[:count], error, message)
            for call, count in ((gradstat.clip_grad_norm_, 2), (norm_of, 1), (clip_with_norm, 3))
            for foreach, error, message in ((True, RuntimeError, NO_FOREACH), (False, ValueError, "^(?!foreach)"))
        ),
    ],
)
def test_bad_input_is_refused_before_anything_changes(
    function: Callable[..., object], arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(*arguments)
    assert torch.equal(GIVEN[0].grad, torch.ones(3))  # type: ignore[arg-type]


@both_ways
def test_infinite_max_norm_only_measures(where: tuple[str, str], clip: Clip) -> None:
    backend, device = where
    for bad in (1.0, math.inf, math.nan):
        gradient = torch.tensor([3.0, 4.0, bad], device=device)
        expanded = torch.ones(3, 1, device=device).expand(3, 4)  # cannot be written
        parameters = parameters_with([gradient.clone(), expanded])
        version = parameters[0].grad._version  # type: ignore[union-attr]
        norm = clip(parameters, math.inf, backend=backend)
        torch.testing.assert_close(norm, torch.cat([gradient, expanded.flatten()]).norm(), equal_nan=True)
        torch.testing.assert_close(parameters[0].grad, gradient, rtol=0, atol=0, equal_nan=True)
        assert parameters[0].grad._version == version  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("total", "dtype"),
    [
        *((total, torch.float32) for total in (3.0, 0.2, 0.0, -3.0, math.inf, math.nan)),
        *((3.0, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64)),
    ],
    ids=str,
)
def test_every_dtype_and_norm_given(dtype: torch.dtype, total: float, where: tuple[str, str]) -> None:
    backend, device = where
    gradients: list[Tensor] = [torch.randn(n, device=device).to(dtype) for n in (5, 300)]
    for norm_dtype in (torch.float32, torch.float64):
        norm = torch.tensor(total, dtype=norm_dtype, device=device)
        theirs, ours = parameters_with(clones(gradients)), parameters_with(clones(gradients))
        identities = [id(p.grad) for p in ours]
        nn.utils.clip_grads_with_norm_(theirs, 1.0, norm)
        assert gradstat.clip_grads_with_norm_(ours, 1.0, norm, backend=backend) is None  # type: ignore[func-returns-value]
        assert [id(p.grad) for p in ours] == identities
        # torch computes the multiplier in the norm's dtype, and multiplies in the gradient's.
        assert_same_gradients(ours, theirs, tolerance(norm_dtype))


def test_parameters_themselves_have_a_norm_without_a_graph() -> None:
    model = nn.Linear(4, 2)
    norm = gradstat.get_total_norm(model.parameters())
    torch.testing.assert_close(norm, nn.utils.get_total_norm(model.parameters()).detach())
    assert norm.grad_fn is None
    assert gradstat.get_total_norm(model.weight, foreach=True) <= norm
    for nothing in ([], (x for x in ())):
        assert gradstat.get_total_norm(nothing).item() == 0.0


def test_the_norm_may_be_a_number(where: tuple[str, str]) -> None:
    backend, device = where
    for total in (5.0, 5, torch.tensor(5), torch.tensor(5.0, requires_grad=True)):
        (parameter,) = parameters_with([torch.tensor([3.0, 4.0], device=device)])
        gradstat.clip_grads_with_norm_([parameter], "1.0", total, foreach=True, backend=backend)  # type: ignore[arg-type]
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8], device=device))


@pytest.mark.cuda
def test_tensors_and_norms_may_be_on_several_devices() -> None:
    for gradient_device, norm_device in (("cpu", "cuda"), ("cuda", "cpu")):
        (parameter,) = parameters_with([torch.tensor([3.0, 4.0], device=gradient_device)])
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # delays the norm
        gradstat.clip_grads_with_norm_([parameter], 1.0, torch.tensor(5.0, device=norm_device) * 1.0)
        torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8], device=gradient_device))
    late = torch.zeros(1 << 24, device="cuda")
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # delays the GPU's table
    late.fill_(1.0)
    norm = gradstat.get_total_norm([torch.full((1,), 3 * 2.0**12), late]).item()
    assert norm == pytest.approx(2.0**12 * math.sqrt(10))
    report = gradstat.check_tensors([torch.zeros(1), late])
    assert [(stats.sum, stats.device.type) for stats in report] == [(0, "cpu"), (1 << 24, "cuda")]


def test_lazily_conjugated_gradients_are_scaled(where: tuple[str, str]) -> None:
    """backward() leaves such gradients if the parameter was used conjugated."""
    backend, device = where
    parameter = nn.Parameter(torch.tensor([1 + 1j, 2j], device=device))
    (parameter.conj() * torch.tensor([3 + 4j, 12j], device=device)).sum().real.backward()
    assert parameter.grad.is_conj()
    expected = parameter.grad.resolve_conj() / 10
    assert gradstat.clip_grad_norm_([parameter], 1.3, backend=backend).item() == pytest.approx(13.0)
    torch.testing.assert_close(parameter.grad.resolve_conj(), expected)
    gradstat.clip_grads_with_norm_([parameter], 1.0, 2.0, backend=backend)
    torch.testing.assert_close(parameter.grad.resolve_conj(), expected / 2)


@pytest.mark.cuda
def test_checks_and_clips_join_a_cuda_graph_and_follow_its_gradients() -> None:
    (parameter,) = parameters_with([torch.ones(5000, device="cuda")])
    gradient = parameter.grad
    gradstat.clip_grad_norm_([parameter], 5.0, backend="native")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table = gradstat.stats([gradient], backend="native")
        norm = gradstat.clip_grad_norm_([parameter], 5.0, backend="native")
    for value in (2.0, 0.01):
        gradient.fill_(value)
        graph.replay()
        assert table[0, gradstat.FIELDS.index("max")].item() == pytest.approx(value)
        expected = value * 5000**0.5
        assert norm.item() == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(gradient, torch.full_like(gradient, value * min(1.0, 5.0 / expected)))
