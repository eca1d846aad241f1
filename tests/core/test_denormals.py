"""Subnormal numbers count, whatever ``torch.set_flush_denormal`` says in the threads that work."""

import pytest
from helpers.processes import Forks

# Prints a digest of everything that the compiled library returns or writes, for tensors of subnormal numbers. The mode
# is set before the library is loaded; the tensors are made of bits, as torch's own arithmetic follows the mode.
PROGRAM = """
    import hashlib, itertools, sys
    import torch

    flushes = sys.argv[1] == "flushing"
    assert torch.set_flush_denormal(flushes)
    import gradstat

    ops = gradstat.backends() and torch.ops.gradstat
    float64, float32 = torch.float64, torch.float32

    def show(*named):
        for i, tensor in enumerate(named[1:]):
            bits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            print(named[0], i, hashlib.sha256(bits).hexdigest()[:16])

    def subnormal(dtype, count, mantissa):
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        bits = (torch.arange(1, count + 1) * 2654435761 % 2**min(mantissa, 40)).to(integer)
        bits[::3] |= torch.iinfo(integer).min  # the sign
        bits[bits == torch.iinfo(integer).min] = 1  # some formats use the code of -0 for NaN
        return bits.view(dtype)

    DTYPES = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, torch.float64: 52, torch.float8_e4m3fn: 3}
    DTYPES |= {torch.float8_e5m2: 2, torch.float8_e4m3fnuz: 3, torch.float8_e5m2fnuz: 2}
    for threads, (dtype, mantissa) in itertools.product(map(int, sys.argv[2:]), DTYPES.items()):
        torch.set_num_threads(threads)
        for count in (1, 7, 301, 70_001, *([3_000_000] if dtype is float32 else [])):
            what, held = f"{dtype} {count}", subnormal(dtype, count, mantissa)
            tensors = [held, held[: count // 2 + 1]]
            show(what + " rows", gradstat.stats(tensors), ops.unit_stats([held[:24].clone()]))
            show(what + " norms", gradstat.get_total_norm(tensors), gradstat.get_total_norm(tensors, "inf"))
            for order in (2.0, "inf"):
                parameter = torch.nn.Parameter(torch.zeros(count, dtype=dtype), requires_grad=False)
                parameter.grad = held.clone()
                norm = ops.measure_step([held], 1.0, float(order))[3][1].item()
                limit = 0.3 * norm if dtype is not float64 else 1e-310
                show(what + f" clipped by {order}", gradstat.clip_grad_norm_([parameter], limit, order), parameter.grad)
            scaled = [held.clone(), held.clone()]
            ops.scale_each_(scaled, torch.tensor([0.5, 3.25], dtype=float64))
            show(what + " scaled", *scaled)
            show(what + " unscaled", ops.unscale_(scaled, torch.tensor(0.75))[0], *scaled)
            for complexes in [torch.complex32, torch.complex64, torch.complex128]:
                if complexes.to_real() == dtype and count > 1:
                    pairs = held[: count // 2 * 2].view(complexes)
                    show(what + " pairs", gradstat.stats([pairs]), gradstat.get_total_norm([pairs]))
    tiny = torch.tensor([3], dtype=torch.int64).view(float64)[0]
    for rule in range(3):
        state = torch.zeros(6 + 4 + 3 * (rule == 2), dtype=float64)
        for norm in (tiny, tiny.view(torch.int64).add(9).view(float64)):
            given = [1e-322, 0.9, 1.0, 0.0, 1e-322] if rule else [1e-322]
            show(f"rule {rule}", ops.decide_clip_(rule, given, state, 4, norm), state)
    for dtype in (torch.float16, float32, float64):
        state, numbers = torch.zeros(9 + 2 * 8, dtype=float64), torch.ones(2, dtype=float64)
        for _ in range(12):
            loss = subnormal(dtype, 1, 9)[0]
            show("guard", ops.guard_([0, 6, 2, 10, 0, 1e-322, 9], state, 8, numbers, torch.zeros(3), loss), state)
    assert ((torch.tensor(1e-30) * torch.tensor(1e-10)).item() == 0) == flushes, "the caller's mode has changed"
"""


@pytest.mark.parametrize("instructions", ["", "baseline"], ids=["best", "baseline"])
def test_no_bit_depends_on_whether_torch_flushes_subnormal_numbers(instructions: str, forks: Forks) -> None:
    expected = forks.output_of(PROGRAM, "keeping", 1, 1, GRADSTAT_CPU_INSTRUCTIONS=instructions).splitlines()
    got = forks.output_of(PROGRAM, "flushing", 1, 2, GRADSTAT_CPU_INSTRUCTIONS=instructions).splitlines()
    assert len(set(expected)) > 300
    assert [(a, b) for a, b in zip(expected, got, strict=True) if a != b] == []
