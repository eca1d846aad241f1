"""Tensors of random bits in random layouts; fuzz_operations.py checks operations on them against exact statistics.

A `Recipe` describes one tensor: dtype, sizes, strides, offset, and the bits that fill it. A `Batch` consists of tensors
over memory that it owns, so that it also detects writes outside of the tensors. A seed draws the
same recipes on every machine (`drawn_recipe`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from helpers.exact import ExactStats, Floats
from torch import Tensor

Bits = npt.NDArray[np.unsignedinteger]


class Format(NamedTuple):
    """The encoding of real numbers: a sign bit, `exponent` and `mantissa` bits."""

    exponent: int
    mantissa: int
    bias: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def unsigned(self) -> type[np.unsignedinteger]:
        return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[self.bits]


class Kind(NamedTuple):
    """An element type: the format of its parts, of which complex elements have two."""

    dtype: torch.dtype
    format: Format
    parts: int = 1


_FLOAT64, _FLOAT32, _FLOAT16 = Format(11, 52, 1023), Format(8, 23, 127), Format(5, 10, 15)
KINDS = (
    Kind(torch.float32, _FLOAT32),
    Kind(torch.bfloat16, Format(8, 7, 127)),
    Kind(torch.float16, _FLOAT16),
    Kind(torch.float64, _FLOAT64),
    Kind(torch.complex32, _FLOAT16, 2),
    Kind(torch.complex64, _FLOAT32, 2),
    Kind(torch.complex128, _FLOAT64, 2),
    Kind(torch.float8_e4m3fn, Format(4, 3, 7)),
    Kind(torch.float8_e5m2, Format(5, 2, 15)),
    Kind(torch.float8_e4m3fnuz, Format(4, 3, 8)),
    Kind(torch.float8_e5m2fnuz, Format(5, 2, 16)),
)
KIND_OF = {kind.dtype: kind for kind in KINDS}
FLOAT8 = frozenset(kind.dtype for kind in KINDS if kind.format.bits == 8)


def special_bits(format: Format) -> list[int]:
    """Both signs of: zero, the ends of the subnormal and the normal range, one, Inf, NaN with several payloads."""
    unit, top = 1 << format.mantissa, ((1 << format.exponent) - 1) << format.mantissa
    positive = [0, 1, unit - 1, unit, unit + 1, format.bias << format.mantissa, top - 1, top]
    positive += [top + 1, top + unit // 2, top + unit - 1]
    sign = 1 << (format.bits - 1)
    return [*positive, *(sign | bits for bits in positive)]


def _any_bits(format: Format, rng: np.random.Generator, count: int) -> Bits:
    return np.frombuffer(rng.bytes(count * format.bits // 8), dtype=format.unsigned).copy()


def _special(format: Format, rng: np.random.Generator, count: int) -> Bits:
    return rng.choice(np.array(special_bits(format), dtype=format.unsigned), count)


def _of_exponents(format: Format, rng: np.random.Generator, count: int, first: int, number: int) -> Bits:
    bits = _any_bits(format, rng, count)
    keep = format.unsigned(1 << (format.bits - 1) | ((1 << format.mantissa) - 1))
    exponents = rng.integers(first, first + number, count).astype(format.unsigned)
    return (bits & keep) | (exponents << format.unsigned(format.mantissa))


def _similar_magnitudes(format: Format, rng: np.random.Generator, count: int) -> Bits:
    """Random significands and signs at adjacent exponents, anywhere in the range."""
    number = int(rng.integers(1, 4))
    return _of_exponents(format, rng, count, int(rng.integers(0, (1 << format.exponent) - number)), number)


def _near_square_limits(format: Format, rng: np.random.Generator, count: int) -> Bits:
    """Numbers near the limits beyond which squares overflow, become subnormal, or underflow to zero."""
    edges = [-511, -487, 486, 511, 485] if format.bits == 64 else [-75, -63, -43, 60, 63]
    first = min(max(edges[rng.integers(5)] + format.bias - 1, 0), (1 << format.exponent) - 4)
    return _of_exponents(format, rng, count, first, 3)


def _zeros(format: Format, rng: np.random.Generator, count: int) -> Bits:
    return rng.integers(0, 2, count).astype(format.unsigned) << format.unsigned(format.bits - 1)


def _ordinary(format: Format, rng: np.random.Generator, count: int) -> Bits:
    """Magnitudes between 2**-6 and 2, as is common for gradients."""
    return _of_exponents(format, rng, count, format.bias - 6, 7)


def _with_few(fill: Callable[[Format, np.random.Generator, int], Bits]) -> Callable[..., Bits]:
    """Ordinary numbers with a few others among them."""

    def filled(format: Format, rng: np.random.Generator, count: int) -> Bits:
        bits = _ordinary(format, rng, count)
        if count:
            number = int(rng.integers(1, 4))
            bits[rng.integers(0, count, number)] = fill(format, rng, number)
        return bits

    return filled


FILLS: dict[str, Callable[[Format, np.random.Generator, int], Bits]] = {
    "ordinary": _ordinary,
    "any bits": _any_bits,
    "special": _special,
    "same": lambda format, rng, count: np.repeat(_any_bits(format, rng, 1), count),
    "similar magnitudes": _similar_magnitudes,
    "near square limits": _near_square_limits,
    "subnormal": lambda format, rng, count: _of_exponents(format, rng, count, 0, 1),
    # NaN with all payloads, in most formats.
    "top exponent": lambda format, rng, count: _of_exponents(format, rng, count, (1 << format.exponent) - 1, 1),
    "zeros": _zeros,
    "few special": _with_few(_special),
    "few of any bits": _with_few(_any_bits),
    "few zeros": _with_few(_zeros),
}


class Recipe(NamedTuple):
    """Describes one tensor. `skip`: elements of memory before it; `fill`: a name in `FILLS`, or bits to repeat."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    skip: int
    fill: str | tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements of memory from the first to the last element."""
        if not self.numel:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_expanded(self) -> bool:
        """Whether several elements share a memory location."""
        dimensions = zip(self.shape, self.strides, strict=True)
        return self.numel > 0 and any(stride == 0 and size > 1 for size, stride in dimensions)

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a contiguous range of memory, in any order of the dimensions."""
        return self.numel <= 1 or (not self.is_expanded and self.extent == self.numel)


def strides_for(
    shape: Sequence[int], order: Sequence[int], gaps: Sequence[int], expanded: Sequence[bool], odd: Sequence[int]
) -> tuple[int, ...]:
    """Strides without overlap, for dimensions in the memory order ``order``, fastest first.

    The elements of a dimension are ``1 + gap`` times as far apart as necessary; those of expanded dimensions share a
    location. Dimensions of size 1 have the ``odd`` stride, which has no effect.
    """
    strides, next_stride = [0] * len(shape), 1
    for dim in order:
        if expanded[dim]:
            continue
        strides[dim] = next_stride * (1 + gaps[dim])
        next_stride = strides[dim] * max(shape[dim], 1)
    return tuple(odd[dim] if shape[dim] == 1 else strides[dim] for dim in range(len(shape)))


Memory = list[npt.NDArray[np.uint8]]  # of each tensor


class Batch:
    """Tensors over memory owned by the batch, on ``device``, and their exact statistics.

    Each tensor has an allocation of its own, in which memory that must not be written follows it. If ``apart``, the
    allocation ends with the tensor, so that AddressSanitizer detects accesses behind it.
    """

    def __init__(self, recipes: Sequence[Recipe], seed: int, device: str = "cpu", apart: bool = False) -> None:
        self.recipes = list(recipes)
        self.seed = seed
        self.apart = apart
        self.tensors: list[Tensor] = []
        self._memory: list[Tensor] = []
        rng = np.random.default_rng(seed)
        for recipe in self.recipes:
            kind, count = KIND_OF[recipe.dtype], recipe.skip + recipe.extent + (0 if apart else 9)
            memory = np.full(max(count, 1) * recipe.dtype.itemsize, 0xA5, np.uint8)
            begin, count = recipe.skip * kind.parts, recipe.extent * kind.parts
            memory.view(kind.format.unsigned)[begin : begin + count] = _filled(recipe.fill, kind.format, rng, count)
            self._memory.append(torch.from_numpy(memory).to(device))
            flat = self._memory[-1].view(recipe.dtype)
            self.tensors.append(flat.as_strided(recipe.shape, recipe.strides, recipe.skip))

    @classmethod
    def drawn(
        cls, seed: int, tensors: int, device: str = "cpu", apart: bool = False, largest: int | None = None
    ) -> Batch:
        """A batch of ``tensors`` tensors, each a `drawn_recipe`."""
        source = random.Random(seed)
        return cls([drawn_recipe(source, largest) for _ in range(tensors)], seed, device, apart)

    def only(self, takes: Callable[[Recipe], bool]) -> list[int]:
        """The positions of the recipes for which ``takes`` is true."""
        return [i for i, recipe in enumerate(self.recipes) if takes(recipe)]

    def current(self) -> Memory:
        """The memory as it is, on the CPU; there it is not a copy."""
        return [memory.cpu().numpy() for memory in self._memory]

    def memory(self) -> Memory:
        """A copy of the current memory."""
        return [memory.copy() for memory in self.current()]

    def restore(self, memory: Memory) -> None:
        """Restores a copy that `memory` returned."""
        for there, copied in zip(self._memory, memory, strict=True):
            there.copy_(torch.from_numpy(copied))

    def elements(self) -> list[Floats]:
        """``[elements, parts]`` of each tensor: in memory order if it is dense, else in row-major order."""
        found = []
        for recipe, memory in zip(self.recipes, self.current(), strict=True):
            decoded = decoded_from(recipe.dtype, memory)
            in_order = decoded[recipe.skip :][: recipe.numel] if recipe.is_dense else view_of(decoded, recipe)
            found.append(in_order.reshape(-1, decoded.shape[1]))
        return found

    def exact_stats(self) -> list[ExactStats]:
        """The exact statistics of each tensor."""
        return [ExactStats(elements) for elements in self.elements()]

    def __repr__(self) -> str:
        return f"Batch({self.recipes!r}, seed={self.seed}, apart={self.apart})"


def _filled(fill: str | tuple[int, ...], format: Format, rng: np.random.Generator, count: int) -> Bits:
    if isinstance(fill, str):
        return FILLS[fill](format, rng, count)
    return np.resize(np.array([bits % (1 << format.bits) for bits in fill], dtype=format.unsigned), count)


def decoded_from(dtype: torch.dtype, memory: npt.NDArray[np.uint8]) -> Floats:
    """Decodes memory of ``dtype`` to ``[elements, parts]``."""
    kind = KIND_OF[dtype]
    values: Floats = torch.from_numpy(memory).view(dtype.to_real() if dtype.is_complex else dtype).double().numpy()
    return values.reshape(-1, kind.parts)


def view_of(elements: npt.NDArray[Any], recipe: Recipe) -> npt.NDArray[Any]:
    """The elements of the tensor, of ``[elements, parts]`` of its memory: its shape, then parts."""
    strides = [stride * elements.strides[0] for stride in recipe.strides]
    parts = elements.shape[1], elements.itemsize
    shape, steps = (*recipe.shape, parts[0]), (*strides, parts[1])
    return np.lib.stride_tricks.as_strided(elements[recipe.skip :], shape, steps)


_SIZES = ((0, 0), (1, 1), (2, 40), (2, 40), (2, 40), (2, 70), (41, 600), (41, 600), (41, 600), (600, 9000))


def drawn_recipe(source: random.Random, largest: int | None = None) -> Recipe:
    """Mostly small tensors, half of them plain; rarely, and never above ``largest``, one of several chunks."""
    dtype = source.choice(KINDS).dtype
    low, high = (60_000, 200_000) if source.random() < 0.001 else source.choice(_SIZES)
    numel = source.randint(low, high) if largest is None else min(source.randint(low, high), largest)
    skip = source.choice((0, 0, 0, source.randint(1, 17)))
    fill: str | tuple[int, ...] = source.choice(list(FILLS))
    if source.random() < 0.1:
        fill = tuple(source.getrandbits(KIND_OF[dtype].format.bits) for _ in range(source.randint(1, 40)))
    if source.random() < 0.5:
        return Recipe(dtype, (numel,), (1,), skip, fill)
    shape, rest = [], numel
    for _ in range(source.randint(0 if numel == 1 else 1, 4)):
        size = source.choice((1, 2, 3, 8, source.randint(1, max(rest, 1)), rest))
        shape.append(min(size, rest))
        rest //= max(size, 1)
    source.shuffle(shape)
    dims = len(shape)
    order = source.choice((list(range(dims))[::-1], source.sample(range(dims), dims)))
    is_plain = source.random() < 0.5
    gaps = [0 if is_plain else source.choice((0, 0, 0, 1, 2)) for _ in range(dims)]
    expanded = [not is_plain and source.random() < 0.1 for _ in range(dims)]
    odd = [source.choice((0, 1, 7, 1000)) for _ in range(dims)]
    return Recipe(dtype, tuple(shape), strides_for(shape, order, gaps, expanded, odd), skip, fill)
