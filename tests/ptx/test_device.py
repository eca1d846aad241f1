"""The imagined GPU of tools/ptx, in small kernels: what instructions compute, and what it complains about."""

import math
import struct

import numpy as np
import pytest
from ptx.device import Device, Kernel, PtxError
from ptx.translate import UnknownError

THREADS = 64


def kernel(body: str) -> Kernel:
    """A kernel with 256 bytes of shared memory; %rd1: its argument, %r1: the thread, %r2: 4 times that."""
    text = f"""
.visible .entry small(.param .u64 small_param_0)
{{
  .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .f64 %fd<9>;
  .shared .align 16 .b8 memory[256];
  ld.param.u64 %rd1, [small_param_0];
  mov.u32 %r1, %tid.x;
  shl.b32 %r2, %r1, 2;
  {body}
  ret;
}}
"""
    return Kernel(text, "small")


def run(body: str, memory: np.ndarray, blocks: int = 1, threads: int = THREADS) -> None:
    device = Device()
    memory_of_kernel = [(memory.ctypes.data, memory.nbytes)]
    device.launch(kernel(body), blocks, threads, struct.pack("Q", memory.ctypes.data), memory_of_kernel)
    device.check()


def bits(number: float) -> int:
    """Of a float32."""
    return int(np.float32(number).view(np.uint32))


def wide(number: float) -> int:
    """Of a float64."""
    return int(np.float64(number).view(np.uint64))


NAN, INF = bits(math.nan), bits(math.inf)
# Instructions from registers 3 and 4 to 5, and for pairs of bits in these the bits expected.
EXACT = {
    "min.f32 %f5, %f3, %f4": [(0, 1 << 31, 1 << 31), (NAN, bits(2), bits(2)), (NAN, NAN, 0x7FFFFFFF), (INF, 0, 0)],
    "min.f32 %f5, %f3, %f4, 0f40000000": [
        (bits(3), bits(4), bits(2)),
        (bits(3), bits(1), bits(1)),
        (NAN, NAN, bits(2)),
    ],
    "max.f32 %f5, %f3, %f4, 0f40000000": [(bits(3), bits(4), bits(4)), (0, NAN, bits(2)), (bits(3), NAN, bits(3))],
    "max.f64 %fd5, %fd3, %fd4": [(0, 1 << 63, 0), (wide(math.nan), wide(2), wide(2)), (wide(-3), wide(-4), wide(-3))],
    "add.f32 %f5, %f3, %f4": [(INF, bits(-math.inf), 0x7FFFFFFF), (bits(1), bits(2**-24), bits(1))],
    "add.f64 %fd5, %fd3, %fd4": [(0x7FF8_0000_0000_0001, 0x7FF8_0000_0000_0002, 0x7FFF_FFFF_FFFF_FFFF)],
    "fma.rn.f32 %f5, %f3, %f3, %f4": [(bits(1 + 2**-23), bits(-1), bits(2**-22 + 2**-46))],
    "fma.rn.f32.f16 %f5, %h3, %h4, %f4": [(0x3C01, 0x3C01, bits((1025 / 1024) ** 2))],
    "fma.rn.f32.bf16 %f5, %h3, %h3, %f4": [(0x3F81, bits(2), bits(2 + 129**2 / 128**2)), (0x7FC1, 0, 0x7FFFFFFF)],
    "add.rn.f32.f16 %f5, %h3, %f4": [(0x0001, bits(1), bits(1 + 2**-24)), (0x7C00, bits(1), INF)],
    "fma.rn.f32x2 %rd5, %rd3, %rd3, %rd4": [(0x40000000_3F800000, 0x3F800000_40400000, 0x40A00000_40800000)],
    "min.f16x2 %r5, %r3, %r4": [(0x7E003C00, 0xFE008000, 0x7FFF8000), (0x80007C00, 0x0000FC00, 0x8000FC00)],
    "max.bf16x2 %r5, %r3, %r4": [(0x7FC03F80, 0x3F80FF80, 0x3F803F80)],
    "cvt.rn.f16x2.f32 %r5, %f3, %f4": [(bits(65520), bits(65519), 0x7C007BFF), (bits(2**-25), NAN, 0x00007FFF)],
    "cvt.rn.f16x2.e4m3x2 %r5, %h3": [(0x01C5, 0, 0x1800C280), (0x7EFF, 0, 0x5F007FFF)],
    "cvt.rn.bf16x2.f32 %r5, %f3, %f4": [
        (0x3F808000, 0x3F818000, 0x3F803F82),
        (bits(-1e-45), INF, 0x80007F80),
        (NAN, 0xFFFFFFFF, 0x7FFF7FFF),
    ],
    "set.eq.u32.f16x2 %r5, %r3, %r4": [(0x80003C00, 0x00003C01, 0xFFFF0000), (0x7E007C00, 0x7E007C00, 0xFFFF)],
    "prmt.b32 %r5, %r3, %r4, 0xF720": [(0x80112233, 0x44556677, 0x00441133)],
    "bfe.u32 %r5, %r3, 4, 8": [(0xABCD, 0, 0xBC)],
    "bfi.b64 %rd5, %rd3, %rd4, 4, 8": [(0xFF12, 0xAAAAA, 0xAA12A)],
    "shr.s32 %r5, %r3, %r4": [(1 << 31, 40, 0xFFFFFFFF), (64, 3, 8)],
    "shl.b32 %r5, %r3, %r4": [(1, 32, 0), (1, 31, 1 << 31)],
    "mul.hi.s32 %r5, %r3, %r4": [(0xFFFFFFFF, 7, 0xFFFFFFFF)],
    "mad.wide.s32 %rd5, %r3, %r4, 5": [(0xFFFFFFFF, 7, (1 << 64) - 2)],
    "cvt.rzi.s64.f64 %rd5, %fd3": [
        (wide(-2.9), 0, (1 << 64) - 2),
        (wide(math.nan), 0, 1 << 63),
        (wide(1e300), 0, (1 << 63) - 1),
    ],
    "setp.ltu.f32 %p1, %f3, %f4; selp.u32 %r5, 1, 0, %p1": [(NAN, 0, 1), (0, 1 << 31, 0), (0, INF, 1)],
    "setp.ne.f32 %p1, %f3, %f4; selp.u32 %r5, 1, 0, %p1": [(NAN, 0, 0), (bits(1), 0, 1)],
}


def results(instruction: str, pairs: list[tuple[int, int]]) -> list[int]:
    memory = np.zeros((32, 3), np.uint64)
    memory[: len(pairs), :2] = pairs
    to_rd5 = {"%rd5": "", "%fd5": "mov.b64 %rd5, %fd5;", "%r5": "cvt.u64.u32 %rd5, %r5;"}
    to_rd5["%f5"] = f"mov.b32 %r5, %f5; {to_rd5['%r5']}"
    result = next(text for target, text in to_rd5.items() if target in instruction)
    body = f"""mad.wide.u32 %rd2, %r1, 24, %rd1; ld.global.b64 %rd3, [%rd2]; ld.global.b64 %rd4, [%rd2+8];
      mov.b64 {{%r3, _}}, %rd3; mov.b64 {{%r4, _}}, %rd4; mov.b32 %f3, %r3; mov.b32 %f4, %r4;
      mov.b32 {{%h3, _}}, %r3; mov.b32 {{%h4, _}}, %r4;
      mov.b64 %fd3, %rd3; mov.b64 %fd4, %rd4; {instruction}; {result} st.global.b64 [%rd2+16], %rd5;"""
    run(body, memory, threads=32)
    return [int(number) for number in memory[: len(pairs), 2]]


@pytest.mark.parametrize("instruction", EXACT)
def test_what_instructions_compute(instruction: str) -> None:
    cases = EXACT[instruction]
    assert results(instruction, [(a, b) for a, b, _ in cases]) == [expected for *_, expected in cases]


# A thread writes its word of shared memory, and reads that of the next thread of its warp.
EXCHANGE = """mov.u32 %r3, memory; add.s32 %r4, %r3, %r2; st.shared.u32 [%r4], %r1;
  {}
  add.s32 %r4, %r2, 4; and.b32 %r4, %r4, 124; and.b32 %r5, %r2, 128; add.s32 %r4, %r4, %r5;
  add.s32 %r4, %r4, %r3; ld.shared.u32 %r6, [%r4];"""


@pytest.mark.parametrize("order", ["bar.sync 0;", "bar.warp.sync -1;"])
def test_a_barrier_orders_accesses(order: str) -> None:
    run(EXCHANGE.format(order), np.zeros(1, np.uint32))


@pytest.mark.parametrize(
    "order",
    ["", "shfl.sync.bfly.b32 %r7|%p1, %r1, 1, 31, -1;", "vote.sync.any.pred %p1, %p1, -1;", "bar.warp.sync 0xFFFF;"],
)
def test_shuffles_votes_and_barriers_of_others_do_not(order: str) -> None:
    if "0xFFFF" in order:
        order = f"setp.lt.u32 %p2, %r1, 16; @%p2 {order}"
    with pytest.raises(PtxError, match=r"race: thread .* and nothing orders the two"):
        run(EXCHANGE.format(order), np.zeros(1, np.uint32), threads=32)


# The first thread of a block writes its word of global memory, then arrives; the last block reads all of them.
PASS_ON = """mov.u32 %r3, %ctaid.x; mul.wide.u32 %rd3, %r3, 4; add.s64 %rd3, %rd1, %rd3;
  setp.ne.u32 %p1, %r1, 0; @%p1 bra $done; st.global.u32 [%rd3+4], %r3;
  atom{order}.gpu.global.inc.u32 %r4, [%rd1], 3;
  setp.ne.u32 %p1, %r4, 3; @%p1 bra $done;
  ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd1+16]; ld.global.u32 %r5, [%rd1+4];
$done:"""


def pass_on(order: str) -> None:
    memory = np.zeros(12, np.uint32)
    aligned = memory[(-memory.ctypes.data // 4) % 4 :][:8]
    run(PASS_ON.format(order=order), aligned, blocks=4, threads=32)


def test_atomics_order_accesses() -> None:
    pass_on(".acq_rel")


@pytest.mark.parametrize("order", ["", ".relaxed", ".acquire", ".release"])
def test_weaker_atomics_do_not(order: str) -> None:
    with pytest.raises(PtxError, match=r"race: thread 0 of block . reads"):
        pass_on(order)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("ld.global.u32 %r3, [%rd1+256];", "reads 4 bytes out of bounds"),
        ("ld.global.u32 %r3, [%rd1+-4];", "reads 4 bytes out of bounds"),
        ("ld.shared.u32 %r3, [memory+256];", "reads 4 bytes out of bounds"),
        ("ld.global.u32 %r3, [%rd1+2];", "not aligned"),
        ("ld.param.u64 %rd3, [small_param_0+8];", "reads 8 bytes out of bounds: byte 8 of 8 in parameters"),
        ("setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 0;", "waits for threads that never arrive: .*32 more|31 more"),
        ("setp.lt.u32 %p1, %r1, 7; @%p1 bar.warp.sync -1;", "waits for threads that never arrive"),
        ("setp.lt.u32 %p1, %r1, 7; @%p1 bar.sync 0;\n@!%p1 bar.sync 0;", "a warp are at different barriers"),
        ("shfl.sync.bfly.b32 %r3, %r1, 16, 31, 0xFFFF;", "not in its own mask"),
        ("setp.lt.u32 %p1, %r1, 16; @%p1 shfl.sync.bfly.b32 %r3, %r1, 16, 31, 0xFFFF;", "lane that is not in the mask"),
        ("atom.relaxed.gpu.global.add.u32 %r3, [%rd1], 1;", "leaves 64 in a ticket"),
        ("div.u32 %r3, %r1, 0;", "divides an integer by zero"),
        ("st.global.u32 [%rd1], %r1;", "race: thread . of block 0 writes|race: thread .. of block 0 writes"),
    ],
)
def test_what_is_complained_about(body: str, complaint: str) -> None:
    with pytest.raises(PtxError, match=complaint):
        run(body, np.zeros(64, np.uint32))


@pytest.mark.parametrize(
    "statement",
    ["sin.approx.f32 %f3, %f4;", "add.sat.s32 %r3, %r3, %r4;", "ld.global.nc.u32 %r3, [%rd1];", "mov.u32 %r3, %clock;"]
    + ["atom.relaxed.cta.global.add.u32 %r3, [%rd1], 1;", "bar.sync 0, 32;", ".local .align 4 .b8 depot[8];"],
)
def test_what_is_not_known_is_named(statement: str) -> None:
    name = statement.split()[0] if "clock" not in statement else "%clock"
    with pytest.raises(UnknownError, match=f"line 9: .*{name.lstrip('.').split('.')[0]}"):
        kernel(statement)
