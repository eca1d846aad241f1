"""The operators as torch sees them: opcheck, fake tensors, torch.compile, schemas."""

import math
from typing import Any

import pytest
import torch
from helpers.devices import parameter_with

import gradstat
from gradstat._core import backends

gradstat.backends()  # loads the libraries
OPS = torch.ops.gradstat


def sample(device: str) -> list[torch.Tensor]:
    return [torch.randn(7, 3, device=device), torch.randn(40, device=device).bfloat16(), torch.zeros(0, device=device)]


COEFFICIENT = torch.tensor(0.5, dtype=torch.float64)
# Calls that return a signature use the first two: the others need a fake kernel, but only the host knows a signature.
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize(
    ("name", "arguments", "utilities"),
    [
        ("stats", (), UTILITIES),
        ("unit_stats", (), UTILITIES),
        ("measure_norm", (1.0, 2.0), UTILITIES),
        ("clip_", (0.5, 2.0), UTILITIES),
        ("clip_", (1e9, float("inf")), UTILITIES),
        ("scale_", (COEFFICIENT,), UTILITIES),
        ("scale_each_", (COEFFICIENT.repeat(3),), UTILITIES),
        ("scale_units_", (COEFFICIENT.repeat(9),), UTILITIES),
        ("check", (), UTILITIES[:2]),
        ("measure_step", (1.0, 2.0), UTILITIES[:2]),
        ("unscale_", (COEFFICIENT.float(),), UTILITIES[:2]),
    ],
)
def test_opcheck(name: str, arguments: tuple[Any, ...], utilities: tuple[str, ...], device: str) -> None:
    given = [argument.to(device) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    tensors = sample(device)[:2] if name == "clip_" else sample(device)
    torch.library.opcheck(getattr(OPS, name).default, (tensors, *given), test_utils=utilities)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_statistics_and_units_compile_without_a_break(backend: str, device: str) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = OPS.unit_stats([x, y])
        stats = gradstat.stats([x * 2, y]) + 0.0
        OPS.scale_units_([x, y], table[:, 0] + 0.5)
        return stats, table

    x, y = torch.randn(5, 3, device=device), torch.randn(9, device=device)
    stats, table, scaled = gradstat.stats([x * 2, y]), OPS.unit_stats([x, y]), [x * 0.5, y * 0.5]
    for got, expected in zip((*f(x, y), x, y), (stats, table, *scaled), strict=True):
        assert torch.equal(got, expected)


def in_halves(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    norm = gradstat.get_total_norm([parameter.grad for parameter in parameters])
    gradstat.clip_grads_with_norm_(parameters, 0.5, norm)
    return norm


CLIPS = {
    "clipped": lambda parameters: gradstat.clip_grad_norm_(parameters, 0.5),
    "unclipped": lambda parameters: gradstat.clip_grad_norm_(parameters, 1e9),
    "in halves": in_halves,
}


@pytest.mark.parametrize(("backend", "sizes"), [("eager", (7,)), ("aot_eager", (3, 70000))])
@pytest.mark.parametrize("call", CLIPS)
def test_clipping_compiles_without_a_break(backend: str, call: str, sizes: tuple[int, ...], device: str) -> None:
    torch.compiler.reset()  # a function is recompiled only a limited number of times
    parameters, expected = ([torch.nn.Parameter(torch.zeros(n, device=device)) for n in sizes] for _ in range(2))
    for a, b in zip(parameters, expected, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()

    @torch.compile(fullgraph=True, backend=backend)
    def clip() -> torch.Tensor | None:
        return CLIPS[call](parameters)

    torch.testing.assert_close(clip(), CLIPS[call](expected))
    torch.testing.assert_close([p.grad for p in parameters], [p.grad for p in expected])


NOT_INSIDE: list[dict[str, Any]] = [{"error_if_nonfinite": True}, {"norm_type": 3.0}, {"norm_type": math.inf}]
NOT_INSIDE += [{"backend": "reference"}, {"extra_groups": []}]


@pytest.mark.parametrize("options", NOT_INSIDE, ids=str)
@pytest.mark.parametrize("clips", [True, False])
def test_what_clipping_cannot_do_inside_a_graph_is_refused(options: dict[str, Any], clips: bool) -> None:
    torch.compiler.reset()
    # An infinity norm is of moduli, which the kernels do not compute.
    parameter = parameter_with(torch.tensor([3 + 4j]))

    @torch.compile(fullgraph=True, backend="eager")
    def clip() -> torch.Tensor:
        if clips:
            return gradstat.clip_grad_norm_([parameter], 1.0, **options)
        return gradstat.get_total_norm([parameter.grad], **options)

    with pytest.raises(Exception, match="call it outside of the compiled function"):
        clip()


def test_the_operators_refuse_what_they_cannot_read_in_place(device: str) -> None:
    for tensor, why in [
        (torch.ones(4, 4)[:, ::2], "not dense"),
        (torch.ones(2, dtype=torch.int32), "dtype"),
        (torch.eye(2).to_sparse(), "not strided|NotImplemented|Could not run"),
    ]:
        with pytest.raises(RuntimeError, match=why):
            OPS.stats([torch.ones(1, device=device), tensor.to(device)])
    with pytest.raises(RuntimeError, match="float64"):
        OPS.scale_([torch.ones(2, device=device)], torch.tensor(1.0, device=device))


@pytest.mark.parametrize("tensor", [torch.ones(3, 4).t(), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)])
def test_units_are_row_major_or_refused(tensor: torch.Tensor) -> None:
    """The message has the tensor's index, however many units precede it."""
    for tensors in ([torch.ones(5, 2), tensor], [torch.ones(0, 2), tensor]):
        halves = torch.full((sum(t.shape[0] for t in tensors),), 0.5, dtype=torch.float64)
        for call in (OPS.unit_stats, lambda given, halves=halves: OPS.scale_units_(given, halves)):
            with pytest.raises(RuntimeError, match="tensor 1 is not contiguous, but its units must be"):
                call(tensors)
        assert all((t == 1).all() for t in tensors)
    odd = [torch.ones(1, 3).t()[:1], torch.ones(4, 1).t(), torch.ones(3, 0), torch.ones(0, 3), torch.ones(1, 1)]
    assert OPS.unit_stats(odd)[:, gradstat.FIELDS.index("sum")].tolist() == [1, 4, 0, 0, 0, 1]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("counts", [[2**60], [2**62, 2**62], [2**24, 1]])
def test_more_units_without_elements_than_memory_has_room_for_are_refused(backend: str, counts: list[int]) -> None:
    kernels, tensors = backends.resolve(backend, "cpu"), [torch.ones(5, 2), *(torch.ones(n, 0) for n in counts)]
    halves = torch.full((5,), 0.5, dtype=torch.float64)
    for call in (kernels.unit_stats, lambda given: kernels.scale_units_(given, halves)):
        with pytest.raises(RuntimeError, match="too many units without elements: at most 16777216"):
            call(tensors)
    assert bool((tensors[0] == 1).all())
    assert len(kernels.unit_stats([torch.ones(5, 2), torch.ones(1000, 0)])) == 1005


def test_nothing_at_all_is_multiplied() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    OPS.scale_each_([], none)
    OPS.scale_units_([], none)
    assert OPS.unscale_([], torch.tensor(0.5))[0].shape == (0, len(gradstat.FIELDS))
