"""Measures errors of norms: 100,000 ordinary and adversarial vectors for each dtype and backend, and torch and numpy.

Every norm is compared with one in extended precision (64 bits or more of mantissa, 15 of exponent). All squares are
positive, so its own relative error stays below 1e-17 (a test compares it with rational arithmetic).

``python benchmarks/numerics.py`` prints tables, ``--record`` appends rows to
``benchmarks/results/<device>/numerics.jsonl``, from which ``render.py --write`` updates ``docs/numerics.md``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tables
import torch
from rows import Row, append, parser_of, row
from torch import Tensor

import gradstat
from gradstat._core.norms import l2_norms
from gradstat.bench.timing import progress_bar

GROUP = "numerics"
Norms = npt.NDArray[np.longdouble]
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.complex32, torch.complex128,
]  # fmt: skip
LENGTHS = (1, 8192)  # range of the lengths of most vectors, log-uniform
LONG = 1 << 20  # length of the few long vectors of every family
LONG_VECTORS = 4
BATCHES = 20  # at most, of every family; all vectors of a batch have the same length
# Most vectors of a batch, and their greatest length, for Triton's interpreter and the reference on a GPU.
FEW = (2, 2048)
Values = npt.NDArray[np.float64]


class Draw:
    """Random numbers for one batch: ``count`` vectors of ``length`` elements of ``dtype``, which is real."""

    def __init__(self, seed: Sequence[int], count: int, length: int, dtype: torch.dtype) -> None:
        self.random = np.random.default_rng(seed)
        self.shape = (count, length)
        self.dtype = dtype
        limits = torch.finfo(dtype)
        self.max, self.tiny, self.eps = limits.max, limits.smallest_normal, limits.eps

    def normal(self) -> Values:
        return self.random.standard_normal(self.shape)

    def between(self, low: float, high: float, per_vector: bool = False) -> Values:
        return self.random.uniform(low, high, (self.shape[0], 1) if per_vector else self.shape)

    def signs(self) -> Values:
        return self.random.integers(0, 2, self.shape) * 2.0 - 1


def _heavy(draw: Draw) -> Values:
    return draw.normal() * np.exp(2 * draw.normal())


def _bits(draw: Draw) -> Values:
    size = torch.finfo(draw.dtype).bits // 8
    raw = torch.from_numpy(draw.random.integers(0, 256, (*draw.shape, size), dtype=np.uint8))
    return raw.view(draw.dtype).squeeze(-1).double().nan_to_num(0.0, 0.0, 0.0).numpy()


def _overflow(draw: Draw) -> Values:
    return draw.signs() * draw.between(0.5, 0.9) * (draw.max / np.sqrt(draw.shape[1]))


def _underflow(draw: Draw) -> Values:
    return draw.normal() * draw.tiny


def _one_large(draw: Draw) -> Values:
    values = draw.between(0.5, 0.99) * np.sqrt(draw.eps / 2)
    values[:, 0] = 1.0
    return values


def _rounded_down(draw: Draw) -> Values:
    wide = np.float64 if draw.dtype == torch.float64 else np.float32
    pool = torch.from_numpy(draw.random.uniform(1, 2, 1 << 15)).to(draw.dtype).double().numpy()
    exact = np.square(pool.astype(np.longdouble))
    error = (np.square(pool.astype(wide)).astype(np.longdouble) - exact) / exact
    return draw.random.choice(pool[np.argsort(error)[:64]], draw.shape)


ORDINARY: dict[str, Callable[[Draw], Values]] = {
    "normal": lambda draw: draw.normal() * np.exp2(draw.between(-6, 6, per_vector=True)),  # of any magnitude
    "heavy-tailed": _heavy,  # mostly small values and a few a thousand times larger, as in gradients
    "sparse": lambda draw: draw.normal() * (draw.between(0, 1) < 0.01),  # 99 % zeros
}
ADVERSARIAL: dict[str, Callable[[Draw], Values]] = {
    "any bits": _bits,  # that are a finite number
    "all magnitudes": lambda draw: draw.signs() * np.exp2(draw.between(np.log2(draw.tiny), np.log2(draw.max))),
    # Values so large that their squares overflow, while their norm is still finite in the dtype.
    "squares overflow": _overflow,
    "squares underflow": _underflow,  # around the smallest normal number
    "huge and tiny": lambda draw: np.where(draw.between(0, 1) < 0.5, _overflow(draw), _underflow(draw)),
    # The square of any element but the first, added to that of the first, would be rounded away.
    "one large": _one_large,
    # Roundings of a running sum go in one direction for long stretches.
    "constant": lambda draw: np.broadcast_to(draw.between(1, 2, per_vector=True), draw.shape).copy(),
    "rising": lambda draw: np.sort(np.abs(_heavy(draw)), axis=1),
    "falling": lambda draw: -np.sort(-np.abs(_heavy(draw)), axis=1),
    # All squares round down by nearly half a unit in the precision of the sum.
    "squares round down": _rounded_down,
}
KINDS = {"ordinary": ORDINARY, "adversarial": ADVERSARIAL}


@dataclass(frozen=True, slots=True)
class Batch:
    """Vectors of one family: the rows of ``vectors``, [count, length] of the dtype."""

    kind: str
    family: str
    vectors: Tensor


def batches(dtype: torch.dtype, vectors: int, seed: int) -> Iterator[Batch]:
    """At least ``vectors`` vectors of ``dtype``, equally many of every family, of all lengths."""
    real = dtype.to_real()
    families = [(kind, name, make) for kind, members in KINDS.items() for name, make in members.items()]
    plan = _lengths(-(-vectors // len(families)), np.random.default_rng(seed))
    for place, (kind, name, make) in enumerate(families):
        for number, (rows, length) in enumerate(plan):
            width = length * (2 if dtype.is_complex else 1)
            values = make(Draw((seed, place, number), rows, width, real))
            limit = torch.finfo(real).max
            tensor = torch.from_numpy(np.clip(values, -limit, limit)).to(real)
            yield Batch(kind, name, torch.view_as_complex(tensor.view(rows, length, 2)) if dtype.is_complex else tensor)


def _lengths(vectors: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """The batches of a family of ``vectors`` vectors: the number of vectors and their length, for each batch."""
    number = min(BATCHES, vectors)
    lengths = np.exp(random.uniform(*np.log(LENGTHS), number))
    plan = [(-(-vectors // number), round(length)) for length in lengths]
    return [*plan, (LONG_VECTORS, LONG)] if vectors > 100 * LONG_VECTORS else plan


def judge(vectors: Tensor) -> Norms:
    """The norm of every row, with a relative error below 1e-17.

    Raises:
        RuntimeError: numpy has no extended precision on this machine.
    """
    if np.finfo(np.longdouble).nmant < 63:
        raise RuntimeError(
            "numpy's longdouble is no wider than float64 on this machine, so exact norms cannot be computed"
        )
    real = torch.view_as_real(vectors).flatten(1) if vectors.is_complex() else vectors
    return np.sqrt(np.square(real.double().numpy().astype(np.longdouble)).sum(axis=1))


@dataclass(frozen=True, slots=True)
class Provider:
    """A way to compute norms.

    Attributes:
        name: The displayed name.
        norms: Computes the norms of the rows of its argument.
        result: The dtype of the norms, for a dtype of vectors.
        supports: Whether it takes vectors of a dtype.
        sample: The most vectors of a batch, and the greatest length, that it is given; None for no limit.
    """

    name: str
    norms: Callable[[Tensor], Tensor]
    result: Callable[[torch.dtype], torch.dtype] = lambda dtype: torch.float64
    supports: Callable[[torch.dtype], bool] = lambda dtype: True
    sample: tuple[int, int] | None = None


def _numpy(vectors: Tensor) -> Tensor:
    exact = vectors.float() if vectors.dtype == torch.bfloat16 else vectors
    with np.errstate(over="ignore", under="ignore"):
        return torch.tensor([np.linalg.norm(vector) for vector in exact.numpy()], dtype=torch.float64)


def total_norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return gradstat.get_total_norm([torch.ones(1, dtype=torch.float32).to(dtype)]).dtype


def providers(device: torch.device, kernels_on_host: ctypes.CDLL | None = None) -> list[Provider]:
    """All providers of norms on ``device``; ``kernels_on_host`` are the CUDA kernels compiled for the CPU."""
    float8 = [dtype for dtype in DTYPES if "float8" in str(dtype)]
    on_gpu = device.type == "cuda"

    def of_backend(name: str, sample: tuple[int, int] | None = None) -> Provider:
        def norms(vectors: Tensor) -> Tensor:
            return l2_norms(gradstat.stats(list(vectors.to(device)), backend=name))

        return Provider(f"gradstat {name}", norms, sample=sample)

    found = [
        of_backend("native"),
        of_backend("reference", FEW if on_gpu else None),  # 55 launches per vector
        of_backend("triton", None if on_gpu else FEW),
    ]
    if kernels_on_host is not None:
        from helpers.cuda_on_cpu import EmulatedKernels

        kernels = EmulatedKernels(kernels_on_host)

        def norms(vectors: Tensor) -> Tensor:
            return l2_norms(kernels.check(list(vectors))[0])

        found.append(Provider("gradstat CUDA kernels, on the CPU", norms))
    return [
        *found,
        Provider(
            "gradstat clip's norm",
            lambda vectors: torch.stack([gradstat.get_total_norm([vector]) for vector in vectors.to(device)]),
            total_norm_dtype,
        ),
        Provider(
            "torch._foreach_norm",
            lambda vectors: torch.stack(torch._foreach_norm(list(vectors.to(device)))),
            torch.dtype.to_real,
            lambda dtype: dtype not in float8,
        ),
        Provider(
            "numpy.linalg.norm",
            _numpy,
            lambda dtype: torch.float32 if dtype == torch.bfloat16 else dtype.to_real(),
            lambda dtype: dtype not in (*float8, torch.complex32),
        ),
    ]


@dataclass(slots=True)
class Errors:
    """Accumulated relative errors of norms; ``lost`` counts norms that wrongly came out as 0, Inf or NaN."""

    worst: float = 0.0
    total: float = 0.0
    vectors: int = 0
    lost: int = 0

    def add(self, got: Values, exact: Norms, result: torch.dtype) -> None:
        limits = torch.finfo(result)
        # Norms out of the range of the result's dtype are left out: Inf or 0 is the right answer there.
        there = (exact <= limits.max) & (exact >= limits.smallest_normal)
        got, exact = got[there], exact[there]
        lost = ~np.isfinite(got) | (got == 0)
        errors = np.abs(got[~lost].astype(np.longdouble) - exact[~lost]) / exact[~lost]
        self.vectors += got.size
        self.lost += int(lost.sum())
        self.total += float(errors.sum())
        self.worst = max(self.worst, float(errors.max(initial=0.0)))


Key = tuple[torch.dtype, str, str]


def measure(
    dtypes: Sequence[torch.dtype], vectors: int, seed: int, known: Sequence[Provider], progress: Any
) -> dict[Key, Errors]:
    """Errors by dtype, kind of vectors and provider. Every provider sees the same vectors."""
    errors: dict[Key, Errors] = {}
    for dtype in dtypes:
        supported = [provider for provider in known if provider.supports(dtype)]
        for batch in batches(dtype, vectors, seed):
            progress.set_description(f"{dtype}, {batch.family}".removeprefix("torch."), refresh=False)
            exact = judge(batch.vectors)
            for provider in supported:
                count, length = provider.sample or (len(exact), LONG)
                if batch.vectors.shape[1] <= length:
                    got = provider.norms(batch.vectors[:count]).double().cpu().numpy()
                    about = errors.setdefault((dtype, batch.kind, provider.name), Errors())
                    about.add(got, exact[:count], provider.result(dtype))
            progress.update(1)
    return errors


def as_rows(errors: dict[Key, Errors], device: torch.device) -> list[Row]:
    """Errors as rows: the worst, the mean, the number of lost norms, and the number of vectors."""
    found = []
    for (dtype, kind, name), each in errors.items():
        kept = max(1, each.vectors - each.lost)
        for metric, value in (
            ("worst error", each.worst),
            ("mean error", each.total / kept),
            ("norms lost", each.lost),
            ("vectors", each.vectors),
        ):
            found.append(row(GROUP, kind, name, metric, "", float(value), device, dtype=dtype))
    return found


def main() -> int:
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    parser = parser_of(__doc__)
    parser.add_argument("--vectors", type=int, default=100_000, help="vectors of each dtype (default: 100,000)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    options = parser.parse_args()
    families = sum(map(len, KINDS.values()))
    steps = families * len(_lengths(-(-options.vectors // families), np.random.default_rng()))
    with tempfile.TemporaryDirectory() as folder, progress_bar(steps * len(DTYPES), "measuring") as progress:
        kernels = None
        if options.device.type == "cpu":
            from helpers.cuda_on_cpu_build import build

            kernels = build(Path(folder))
        made: list[Row] = []
        for dtype in DTYPES:
            errors = measure([dtype], options.vectors, 0, providers(options.device, kernels), progress)
            made += as_rows(errors, options.device)
            if options.record:
                append(as_rows(errors, options.device), GROUP, options.results)
    print(tables.norm_errors(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
