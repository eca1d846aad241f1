"""An exact account of tensors, from Python's arbitrary precision: the judge of every backend."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from gradstat import _fields

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
REAL = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]

EXACT = tuple(name for name in _fields.NAMES if name not in ("sum", "sq_sum", "sq_sum_large", "sq_sum_small"))
"""The fields that nothing rounds."""


def memory_order(tensor: Tensor) -> Tensor:
    """The elements as they lie in memory, for a dense tensor; in row-major order for any other."""
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.reshape(-1)


def is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return tensor.numel() <= 1
            expected *= size
    return True


def parts_of(tensor: Tensor) -> list[tuple[float, ...]]:
    """Each element as the tuple of its real parts, as Python floats."""
    flat = memory_order(tensor).cpu()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    if flat.dtype in FLOAT8:
        flat = flat.float()
    return [tuple(p) if isinstance(p, list) else (p,) for p in flat.to(torch.float64).tolist()]


def square_root(total: Fraction) -> float:
    """The square root of an exact fraction, correctly scaled whatever its size."""
    if total == 0:
        return 0.0
    shift = (total.numerator.bit_length() - total.denominator.bit_length()) // 2
    scaled = total / Fraction(4) ** shift
    try:
        return math.ldexp(math.sqrt(float(scaled)), shift)
    except OverflowError:
        return math.inf


def rounded_sum(values: list[float]) -> float:
    """The exact sum, rounded once; infinite where float64 has no number for it."""
    try:
        return math.fsum(values)
    except OverflowError:  # on the way at least
        total = sum(map(Fraction, values), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


class Exact:
    """What a report must say about one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        elements = parts_of(tensor)
        bad = [any(not math.isfinite(p) for p in e) for e in elements]
        self.numel = len(elements)
        self.nan_count = sum(any(math.isnan(p) for p in e) for e in elements)
        self.inf_count = sum(bad) - self.nan_count
        self.zero_count = sum(all(p == 0 for p in e) for e in elements)
        self.first_nonfinite = bad.index(True) if any(bad) else math.inf
        finite = [p for e, b in zip(elements, bad, strict=True) if not b for p in e]
        self.values = len(finite)
        self.min = min(finite, default=math.inf)
        self.max = max(finite, default=-math.inf)
        self.sum = rounded_sum(finite)
        self.magnitudes = rounded_sum([abs(value) for value in finite])
        if tensor.dtype in (torch.float64, torch.complex128):
            self.squares = sum((Fraction(p) ** 2 for p in finite if p), Fraction(0))
        else:  # squares of narrower types are exact in float64, and their sum is rounded once
            self.squares = Fraction(math.fsum(p * p for p in finite))

    @property
    def l2_norm(self) -> float:
        return square_root(self.squares)


def rounded_product(values: Tensor, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch makes of real numbers times coefficients: formed in float64 for float64, else in float32; rounded."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    multiplied = values.to(wide) * coefficients.to(wide)
    if dtype == torch.float8_e4m3fn:  # where torch 2.10 makes NaN of what is too large
        multiplied = multiplied.clamp(-448.0, 448.0)
    return multiplied.to(dtype)


def real_dtype(tensors: list[Tensor]) -> torch.dtype:
    """What torch promotes the gradients' real dtypes to."""
    promoted = tensors[0].dtype.to_real()
    for tensor in tensors[1:]:
        promoted = torch.promote_types(promoted, tensor.dtype.to_real())
    return promoted
