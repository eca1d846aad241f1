"""A short set of calls that reaches every path of the CUDA and Triton kernels, for compute-sanitizer.

Needs a GPU; run by `make gpu`. Results are compared with the reference, so it also fails on wrong numbers.
"""

import math

import torch

import gradstat
from gradstat._core import backends

FIELDS = [
    gradstat.FIELDS.index(name) for name in ("nan_count", "inf_count", "zero_count", "min", "max", "first_nonfinite")
]


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors that are aligned, misaligned, empty, of one element, of several tiles, or have special values."""
    wide = torch.complex64 if dtype.is_complex else torch.float32
    base = torch.randn(70001, dtype=wide, device="cuda").to(dtype)
    special = base.clone()
    special[5] = math.nan
    special[-1] = math.inf
    return [base, base[1:], base[3:40], base[:0], base[:1], special, torch.zeros_like(base), base * 0 + 1e-30]


def main() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]
    groups = [tensors(dtype) for dtype in dtypes]
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(7)[1:]
    groups += [[codes.view(torch.float8_e4m3fn), codes.view(torch.float8_e5m2)]]
    groups += [[tensor for group in groups for tensor in group]]
    groups += [[torch.randn(1 + i % 9, device="cuda") for i in range(2500)]]
    for group in groups:
        native = gradstat.stats(group, backend="native")
        reference = gradstat.stats(group, backend="reference")
        assert torch.equal(native[:, FIELDS], reference[:, FIELDS])
        assert torch.equal(gradstat.stats(group, backend="triton")[:, FIELDS], reference[:, FIELDS])
    for group in groups[:4]:
        clones = [tensor.clone() for tensor in group if bool(tensor.isfinite().all())]
        parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in clones]
        for parameter, clone in zip(parameters, clones, strict=True):
            parameter.grad = clone
        norm = gradstat.clip_grad_norm_(parameters, 1e9)
        assert torch.equal(norm, gradstat.clip_grad_norm_(parameters, 0.5))
    native, triton, reference = (backends.resolve(name, "cuda") for name in ("native", "triton", "reference"))
    for group in groups:
        if all(tensor.element_size() > 1 for tensor in group):
            triton.scale_each_([tensor.clone() for tensor in group], torch.arange(len(group), device="cuda").double())
        scaled = [tensor.clone() for tensor in group]
        assert torch.equal(native.unscale_(scaled, torch.tensor(0.3, device="cuda")), native.check(scaled)[0])
        native.scale_each_(scaled, torch.arange(len(group), device="cuda").double() / 2)
    matrix = torch.randn(3000, 33, device="cuda")
    units = native.unit_stats([matrix, matrix[0]])
    assert torch.equal(units[:, FIELDS], reference.unit_stats([matrix, matrix[0]])[:, FIELDS])
    twin = matrix.clone()
    native.scale_units_([matrix], units[:-1, 3].contiguous())
    reference.scale_units_([twin], units[:-1, 3].contiguous())
    assert torch.equal(matrix, twin)
    torch.cuda.synchronize()
    print("short set: done")


if __name__ == "__main__":
    main()
