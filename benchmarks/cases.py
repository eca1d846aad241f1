"""The axes of the benchmarks: providers, lists of shapes and dtypes; and the verification of providers' results.

Everything that measures lists of gradients runs over `PROVIDERS` x `CASES` x their dtypes.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from models import resnet
from torch import Tensor, nn

import gradstat
from gradstat.bench.steps import WrongAnswerError, naive_loop
from gradstat.demo.model import GPT, GPT2

Shape = tuple[int, ...]

Dtypes = torch.dtype | tuple[torch.dtype, ...]  # of a list of gradients: one, or several that alternate

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ANYWHERE = frozenset({"cpu", "cuda"})


@dataclass(frozen=True, slots=True)
class Case:
    """A list of gradients.

    Attributes:
        name: The displayed name; says what was made smaller than the original.
        shapes: The shapes of the gradients.
        dtypes: The dtypes to measure in.
        devices: The types of device to measure on.
        quick: Part of the quick set.
        full: Part of the full set.
    """

    name: str
    shapes: Callable[[], list[Shape]]
    dtypes: tuple[Dtypes, ...] = (torch.float32,)
    devices: frozenset[str] = ANYWHERE
    quick: bool = False
    full: bool = True


def shapes_of(model: Callable[[], nn.Module]) -> list[Shape]:
    """The shapes of a model's parameters."""
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in model().parameters()]


def llama_shapes() -> list[Shape]:
    """The parameters of Llama 7B, 291 tensors: 6.7 G elements."""
    w, inner = 4096, 11008
    layer: list[Shape] = [(w, w)] * 4 + [(inner, w), (inner, w), (w, inner), (w,), (w,)]
    return [(32000, w), *(layer * 32), (w,), (32000, w)]


def mixed_shapes() -> list[Shape]:
    """500 matrices of 225 M elements in total, from 10 x 10 to 2,978 x 2,978, some of odd sizes, in random order.

    The exact mix behind the published figure is unknown; number of tensors, elements and dtypes are as published.
    """
    sides = [10] * 354 + [31] * 24 + [99] * 24 + [316] * 49 + [346] * 24 + [2_978] * 24
    shapes: list[Shape] = [(side, side) for side in sides]
    shapes.append(((225_000_000 - sum(side * side for side in sides)) // 8, 8))
    random.Random(0).shuffle(shapes)
    return shapes


# Cases for GPUs only come first, since the time on a GPU may run out.
CASES = (
    Case("one tensor of 256 M", lambda: [(1 << 28,)], DTYPES, frozenset({"cuda"})),
    Case("one tensor of 1.536 G", lambda: [(1_536_000_000,)], (torch.bfloat16,), frozenset({"cuda"})),
    Case("500 mixed matrices of 225 M", mixed_shapes, ((torch.float32, torch.bfloat16),), frozenset({"cuda"})),
    Case("Llama 7B, 291 tensors", llama_shapes, (torch.bfloat16,), frozenset({"cuda"})),
    Case("10,000 tensors of 64", lambda: [(64,)] * 10_000, quick=True),
    Case("5,000 tensors of small experts", lambda: [(256, 128), (256,), (128, 256), (128,)] * 1250),
    Case("ResNet-50, 161 tensors", lambda: shapes_of(lambda: resnet(50)), quick=True),
    Case("GPT-2 small, 148 tensors", lambda: shapes_of(lambda: GPT(GPT2))),
    Case("one tensor of 16 M", lambda: [(1 << 24,)], DTYPES, quick=True, full=False),
    Case("one tensor of 64 M", lambda: [(1 << 26,)], DTYPES, frozenset({"cpu"})),
)


class Facts(NamedTuple):
    """True statistics of a list of gradients, computed in float64 independently of the providers.

    Attributes:
        norm: L2 norm of all gradients together.
        low, high: Smallest and largest element.
        nonfinite: Number of gradients with a NaN or Inf.
    """

    norm: float
    low: float
    high: float
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a provider.

    Attributes:
        parameters: Parameters with gradients; their own data takes no memory.
        gradients: The gradients of the parameters, in order.
        facts: The gradients' true statistics.
        buffer: One contiguous float32 tensor of as many bytes as the gradients, for plain reads.
        restore: Restores the gradients after they were clipped.
    """

    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    facts: Facts
    buffer: Tensor
    restore: Callable[[], None] = lambda: None

    @property
    def bytes(self) -> int:
        return sum(g.numel() * g.element_size() for g in self.gradients)

    @property
    def dtype(self) -> Dtypes:
        """The dtype of the gradients, or several if they alternate."""
        found = tuple(dict.fromkeys(gradient.dtype for gradient in self.gradients))
        return found[0] if len(found) == 1 else found

    @property
    def widest(self) -> torch.dtype:
        """The dtype that torch promotes the gradients' dtypes to."""
        found = self.dtype
        return found if isinstance(found, torch.dtype) else functools.reduce(torch.promote_types, found)

    @property
    def device(self) -> torch.device:
        return self.gradients[0].device


_SPREAD = 0.05
_BLOCK = 1 << 22
_CHUNK = 1 << 26


def parameter_of(gradient: Tensor) -> nn.Parameter:
    """A parameter with that gradient; its data is one element, expanded."""
    data = torch.zeros(1, dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.grad = gradient
    return parameter


def input_of(shapes: list[Shape], dtype: Dtypes = torch.float32, device: str = "cpu") -> Input:
    """Random gradients of these shapes, each in its own allocation; several dtypes alternate."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    block = (_SPREAD * torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))).to(device)
    blocks = {each: block.to(each) for each in dtypes[: len(shapes)]}
    gradients = [torch.empty(shape, dtype=dtypes[i % len(dtypes)], device=device) for i, shape in enumerate(shapes)]
    pieces = [
        _pieces([gradient for gradient in gradients if gradient.dtype == each], filling)
        for each, filling in blocks.items()
    ]

    def restore() -> None:
        for targets, sources in pieces:
            torch._foreach_copy_(targets, sources)

    restore()
    size = sum(g.numel() * g.element_size() for g in gradients)
    one_piece = len(gradients) == 1 and size % 4 == 0
    buffer = gradients[0].view(-1).view(torch.float32) if one_piece else torch.ones(size // 4, device=device)
    return Input([parameter_of(g) for g in gradients], gradients, facts_of(gradients), buffer, restore)


def bytes_of(shapes: list[Shape], dtype: Dtypes) -> int:
    """The total bytes of gradients that `input_of` would make."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    return sum(torch.Size(shape).numel() * dtypes[i % len(dtypes)].itemsize for i, shape in enumerate(shapes))


def _pieces(gradients: list[Tensor], block: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Pieces of the gradients, and those of repetitions of ``block`` that fill them."""
    start, targets, sources = 0, [], []
    for gradient in gradients:
        flat, at = gradient.view(-1), 0
        while at < flat.numel():
            count = min(flat.numel() - at, len(block) - start)
            targets.append(flat[at : at + count])
            sources.append(block[start : start + count])
            at, start = at + count, (start + count) % len(block)
    return targets, sources


def facts_of(gradients: list[Tensor]) -> Facts:
    """The true statistics of finite gradients."""
    squares, low, high = 0.0, math.inf, -math.inf
    for gradient in gradients:
        for chunk in gradient.view(-1).split(_CHUNK):
            wide = chunk.double()
            squares += float(wide.square().sum())
            low, high = min(low, float(wide.min())), max(high, float(wide.max()))
    return Facts(math.sqrt(squares), low, high)


# torch's float32 norm on a CPU is wrong by 4 % for one tensor of 256 M elements. It is timed nevertheless, and the
# errors of all providers are recorded as rows.
TORCH_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class Provider:
    """A way to compute statistics of gradients, or to clip them.

    Attributes:
        name: The displayed name.
        run: The timed call.
        answer: Extracts statistics, by the names of `Facts`, from the result of ``run``.
        tolerance: Relative error allowed for the norm.
        rounded: Whether the norm is in the gradients' own dtype, whose rounding error is then allowed, too.
        factor: What ``run`` multiplies gradients by; None if it does not clip. If it is not 1, gradients are restored,
            untimed, before each call.
        supports: Whether the provider runs on an input.
    """

    name: str
    run: Callable[[Input], Any]
    answer: Callable[[Any], Mapping[str, float]] = lambda result: {}
    tolerance: float = 1e-6
    rounded: bool = False
    factor: float | None = None
    supports: Callable[[Input], bool] = lambda given: True

    @property
    def changes(self) -> bool:
        """Whether ``run`` changes the gradients."""
        return self.factor not in (None, 1.0)


LIMIT = "plain read"
CHECK = "gradstat.check"
STATS, STATS_TRITON = "gradstat.stats", "gradstat.stats, triton"
QUANTIZED = "gradstat.quantization_stats"
CLIP, CLIPPED = "gradstat clip, unclipped", "gradstat clip, clipped"
TORCH_CLIP, TORCH_CLIPPED = "torch clip, unclipped", "torch clip, clipped"
FOREACH_NORM = "torch._foreach_norm"
NAIVE = "naive .item() loop"


def _read_report(report: gradstat.Report) -> dict[str, float]:
    low, high = min(entry.min for entry in report), max(entry.max for entry in report)
    return {"norm": report.total_norm, "low": low, "high": high, "nonfinite": len(report.nonfinite)}


def _read_table(table: Tensor) -> dict[str, float]:
    column = dict(zip(gradstat.FIELDS, table.T, strict=True))
    return {
        "norm": math.sqrt(float(column["sq_sum"].sum())),
        "low": float(column["min"].min()),
        "high": float(column["max"].max()),
        "nonfinite": int(((column["nan_count"] + column["inf_count"]) > 0).sum()),
    }


def _quantization(format: str) -> Provider:
    """What a format would lose, on GPUs, and of one tensor: of each a kernel is launched, or two."""

    def run(given: Input) -> Tensor:
        return gradstat.quantization_stats(given.gradients, format)

    def read(table: Tensor) -> dict[str, float]:
        column = dict(zip(gradstat.QUANTIZATION_FIELDS, table.T, strict=True))
        return {"norm": math.sqrt(float(column["sq_sum"].sum())), "nonfinite": int((column["nonfinite"] > 0).sum())}

    def supports(given: Input) -> bool:
        return given.device.type == "cuda" and len(given.gradients) == 1

    return Provider(f"{QUANTIZED}, {format}", run, read, supports=supports)


def _check(given: Input) -> gradstat.Report:
    report = gradstat.check(given.parameters)
    _ = report.ok
    return report


def _loop_supports(given: Input) -> bool:
    # On a GPU, loops over thousands of gradients would take up the time of the whole run.
    return given.device.type == "cpu" or len(given.gradients) <= 1000


def _clip(name: str, share: float, clip: Callable[[list[nn.Parameter], float], Tensor], **options: Any) -> Provider:
    """A clip to ``share`` times the gradients' norm."""

    def run(given: Input) -> Tensor:
        return clip(given.parameters, share * given.facts.norm)

    def read(norm: Tensor) -> dict[str, float]:
        return {"norm": float(norm)}

    return Provider(name, run, read, factor=min(share, 1.0), **options)


PROVIDERS = (
    Provider(CHECK, _check, _read_report),
    Provider(STATS, lambda given: gradstat.stats(given.gradients), _read_table),
    Provider(
        STATS_TRITON,
        lambda given: gradstat.stats(given.gradients, backend="triton"),
        _read_table,
        supports=lambda given: given.device.type == "cuda",
    ),
    *map(_quantization, ("e4m3", "mxfp8", "nvfp4")),
    Provider(
        FOREACH_NORM,
        lambda given: torch._foreach_norm(given.gradients),
        lambda norms: {"norm": float(torch.stack([norm.double() for norm in norms]).norm())},
        TORCH_ERROR,
    ),
    Provider(
        NAIVE,
        lambda given: naive_loop(given.gradients),
        lambda result: dict(zip(("nonfinite", "norm", "low", "high"), result, strict=True)),
        TORCH_ERROR,
        supports=_loop_supports,
    ),
    _clip(CLIP, 2.0, gradstat.clip_grad_norm_, rounded=True),
    _clip(TORCH_CLIP, 2.0, nn.utils.clip_grad_norm_, tolerance=TORCH_ERROR),
    _clip(CLIPPED, 0.5, gradstat.clip_grad_norm_, rounded=True),
    _clip(TORCH_CLIPPED, 0.5, nn.utils.clip_grad_norm_, tolerance=TORCH_ERROR),
    # The minimum work of any provider: read every byte once. Which reduction is fastest differs by machine, so the
    # limit is the fastest of these. Results of dtypes reinterpreted as float32 are meaningless, and are not checked.
    Provider(f"{LIMIT} (sum)", lambda given: given.buffer.view(given.widest).sum()),
    Provider(f"{LIMIT} (sum as float32)", lambda given: given.buffer.sum()),
    Provider(f"{LIMIT} (max as float32)", lambda given: given.buffer.amax()),
)


def providers_for(given: Input) -> list[Provider]:
    """The providers that run on this input."""
    return [provider for provider in PROVIDERS if provider.supports(given)]


_COPIED_AT_MOST = 2 << 30


def _joined(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """All elements of the tensors of a dtype; one tensor is not copied."""
    flat = [tensor.view(-1) for tensor in tensors if tensor.dtype == dtype]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def verify(provider: Provider, given: Input) -> float | None:
    """Checks what ``provider`` computes and does, so that no time of a wrong result is reported.

    Its statistics must be right, a provider that counts nonfinite gradients must find a NaN in the last element, and a
    clip must scale all gradients by its factor (on inputs of up to 2 GB, since that needs a copy).

    Returns:
        The relative error of its norm, None if it computes none.

    Raises:
        WrongAnswerError: A check failed.
    """
    tolerance = provider.tolerance + torch.finfo(given.widest).eps * provider.rounded
    if provider.factor is not None and given.bytes <= _COPIED_AT_MOST:
        copies = [gradient.clone() for gradient in given.gradients]
        provider.run(Input([parameter_of(g) for g in copies], copies, given.facts, given.buffer))
        for dtype in {gradient.dtype for gradient in copies}:
            before, after = _joined(given.gradients, dtype), _joined(copies, dtype)
            expected = before * provider.factor if provider.factor != 1 else before
            rounding = torch.finfo(dtype).eps
            if not torch.allclose(after, expected, rtol=provider.tolerance + 2 * rounding, atol=1e-6):
                raise WrongAnswerError(f"{provider.name} did not multiply the gradients by {provider.factor}")
    answer = provider.answer(provider.run(given))
    if provider.changes:
        given.restore()
    for name, value in answer.items():
        truth = getattr(given.facts, name)
        if not math.isclose(value, truth, rel_tol=tolerance, abs_tol=0.0):
            raise WrongAnswerError(f"{provider.name} returned {name} {value}, expected {truth}")
    if "nonfinite" in answer:
        last = given.gradients[-1].view(-1)[-1:]
        kept = last.clone()
        last.copy_(torch.full_like(last.float(), math.nan))
        found = provider.answer(provider.run(given))["nonfinite"]
        last.copy_(kept)
        if found != 1:
            raise WrongAnswerError(f"{provider.name} found {found} nonfinite gradients, expected 1")
    return abs(answer["norm"] / given.facts.norm - 1) if "norm" in answer else None
