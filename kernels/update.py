"""Update statistics in Triton: sums over gradient, weight and optimizer state of many tensors (see csrc/update.h).

Tensors with the same formula and dtype share two launches. Each program reads one chunk of one tensor and stores its
sums; a second kernel adds up the chunks of each tensor in order. Vectors are summed in float32 per lane and promoted. A
chunk whose sums cannot be trusted is read again in float64, as are incomplete steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gradstat import _fields
from gradstat.kernels import _table
from gradstat.kernels.stats import _widen

WARPS = 4
LANES = tl.constexpr(32 * WARPS)
CHUNK = tl.constexpr(16384)  # elements

# The int64 columns of a place: the addresses of five operands, followed by these.
NUMEL, ROW, FIRST_CHUNK = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
WIDTH = tl.constexpr(8)

OPERANDS = tl.constexpr(_fields.UPDATE_OPERANDS)
SUMS = tl.constexpr(len(_fields.UPDATE_SUMS))
COEFFICIENTS = tl.constexpr(len(_fields.UPDATE_COEFFICIENTS))
WEIGHT_DECAY, EPS = (tl.constexpr(_fields.UPDATE_COEFFICIENTS.index(name)) for name in ("weight_decay", "eps"))
ADAM, AMSGRAD, ADAMAX = (tl.constexpr(_fields.UPDATE_FORMULAS.index(name)) for name in ("adam", "amsgrad", "adamax"))
SAFE_LOW, SAFE_HIGH, MIN_EPS = tl.constexpr(2.0**-90), tl.constexpr(2.0**120), tl.constexpr(2.0**-50)
MERGED = tl.constexpr(128)

_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ELEMENTS[torch.float64] = tl.float64


@triton.jit
def _add_update(x, by, FORMULA: tl.constexpr):
    """add_update of csrc/update_element.h, elementwise: the contribution of each element to every sum."""
    gradient_scale, weight_decay, momentum_decay, momentum_gain, second_decay, second_gain = (
        by[0], by[1], by[2], by[3], by[4], by[5]
    )  # fmt: skip
    from_gradient, from_momentum, root_scale, eps, is_adaptive = by[6], by[7], by[8], by[9], by[10]
    weight, momentum, second, maximum = x[1], x[2], x[3], x[4]
    gradient = x[0] * gradient_scale
    gradient = tl.where(weight_decay != 0, gradient + weight * weight_decay, gradient)
    new_momentum = gradient * momentum_gain + momentum * momentum_decay
    update = gradient * from_gradient + new_momentum * from_momentum
    scaled = tl.zeros_like(gradient)
    if FORMULA >= ADAM:
        if FORMULA == ADAMAX:
            divisor = tl.maximum(second * second_decay, tl.abs(gradient) + eps)
        else:
            divisor = second * second_decay + gradient * gradient * second_gain
            if FORMULA == AMSGRAD:
                divisor = tl.maximum(divisor, maximum)
            divisor = tl.sqrt(divisor) * root_scale + eps
        inverse = 1.0 / divisor
        scaled = gradient * inverse
        update = tl.where(is_adaptive != 0, update * inverse, update)
    squares = (update * update, weight * weight, scaled * scaled)
    return squares + (gradient * momentum, gradient * gradient, momentum * momentum, second + maximum)


@triton.jit
def _operands(
    place, offsets, mask, REAL: tl.constexpr, FORMULA: tl.constexpr, ELEMENT: tl.constexpr, WHOLE: tl.constexpr
):
    """The operands at `offsets`; zeros for those the formula does not have. WHOLE: no mask, aligned vectors."""
    operands = ()
    for k in tl.static_range(5):
        if k < OPERANDS[FORMULA]:
            pointer = tl.load(place + k).to(tl.pointer_type(ELEMENT))
            if WHOLE:
                x = tl.load(tl.multiple_of(pointer, 16) + offsets)
            else:
                x = tl.load(pointer + offsets, mask=mask, other=0)
            operands = operands + (_widen(x, 0).to(REAL),)
        else:
            operands = operands + (tl.zeros(offsets.shape, REAL),)
    return operands


@triton.jit
def _is_safe_square(total):
    return (total >= SAFE_LOW) & (total <= SAFE_HIGH)


@triton.jit
def _is_zero(x):
    return tl.max(tl.abs(x), axis=1) == 0


@triton.jit
def _is_safe(sums, x, weight_decay, FORMULA: tl.constexpr):
    """is_safe of csrc/update.h, per lane."""
    no_gradient = _is_zero(x[0]) & _is_zero(x[1] * weight_decay)
    no_momentum = _is_zero(x[2])
    good = (no_gradient | _is_safe_square(sums[4])) & (no_momentum | _is_safe_square(sums[5]))
    good = good & (_is_zero(x[1]) | _is_safe_square(sums[1])) & (sums[6] <= SAFE_HIGH)
    if FORMULA >= ADAM:
        good = good & (no_gradient | _is_safe_square(sums[2]))
    return good & ((no_gradient & no_momentum) | _is_safe_square(sums[0]))


@triton.jit(do_not_specialize=["tensors"])
def update_kernel(
    places, coefficients, rows, tensors, FORMULA: tl.constexpr, ELEMENT: tl.constexpr, USE_VECTORS: tl.constexpr
):
    """One program per chunk; `places` ends with the tensor index of each chunk. rows: [chunks, sums]."""
    VECTOR: tl.constexpr = 128 // ELEMENT.primitive_bitwidth
    STEP: tl.constexpr = LANES * VECTOR
    program = tl.program_id(0)
    place = places + tl.load(places + tensors.to(tl.int64) * WIDTH + program) * WIDTH
    begin = (program - tl.load(place + FIRST_CHUNK)) * CHUNK
    end = tl.minimum(begin + CHUNK, tl.load(place + NUMEL))
    by = coefficients + tl.load(place + ROW) * COEFFICIENTS
    weight_decay = tl.load(by + WEIGHT_DECAY).to(tl.float32)
    eps = tl.load(by + EPS)
    narrow = ()
    for i in tl.static_range(COEFFICIENTS):
        narrow = narrow + (tl.load(by + i).to(tl.float32),)
    offsets = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    totals = ()
    for _ in tl.static_range(SUMS):
        totals = totals + (tl.zeros((LANES,), tl.float64),)

    at = begin
    if USE_VECTORS:
        fits = eps >= MIN_EPS
        if FORMULA < ADAM or FORMULA == ADAMAX:
            fits = eps == eps
        good = tl.full((LANES,), 1, tl.int1)
        if fits:
            while at + STEP <= end:
                x = _operands(place, at + offsets, offsets >= 0, tl.float32, FORMULA, ELEMENT, True)
                each = _add_update(x, narrow, FORMULA)
                sums = ()
                added = ()
                for i in tl.static_range(SUMS):
                    sums = sums + (tl.sum(each[i], axis=1),)
                    added = added + (totals[i] + sums[i].to(tl.float64),)
                good = good & _is_safe(sums, x, weight_decay, FORMULA)
                totals = added
                at += STEP
        if tl.min(good.to(tl.int32)) == 0:
            at = begin
            again = ()
            for _ in tl.static_range(SUMS):
                again = again + (tl.zeros((LANES,), tl.float64),)
            totals = again
    # The loop in float64 must not need more registers than the one above. So it takes two elements per lane, and loads
    # its coefficients again. Naming the default cache operator keeps Triton from reusing those of the loop above.
    wide = ()
    for i in tl.static_range(COEFFICIENTS):
        wide = wide + (tl.load(by + i, cache_modifier=".ca"),)
    pairs = tl.arange(0, LANES)[:, None] * 2 + tl.arange(0, 2)[None, :]
    while at < end:
        mask = at + pairs < end
        x = _operands(place, at + pairs, mask, tl.float64, FORMULA, ELEMENT, False)
        each = _add_update(x, wide, FORMULA)
        added = ()
        for i in tl.static_range(SUMS):
            added = added + (totals[i] + tl.sum(tl.where(mask, each[i], 0.0), axis=1),)
        totals = added
        at += 2 * LANES
    for i in tl.static_range(SUMS):
        tl.store(rows + program.to(tl.int64) * SUMS + i, tl.sum(totals[i]))


@triton.jit(do_not_specialize=["tensors"])
def merge_kernel(places, rows, table, tensors):
    """One program per tensor."""
    place = places + tl.program_id(0).to(tl.int64) * WIDTH
    first = tl.load(place + FIRST_CHUNK)
    chunks = (tl.load(place + NUMEL) + CHUNK - 1) // CHUNK
    chunk = tl.arange(0, MERGED)[:, None]
    column = tl.arange(0, 8)[None, :]
    total = tl.zeros((MERGED, 8), tl.float64)
    start = chunks * 0
    while start < chunks:
        mask = (start + chunk < chunks) & (column < SUMS)
        total += tl.load(rows + (first + start + chunk) * SUMS + column, mask=mask, other=0.0)
        start += MERGED
    target = table + tl.load(place + ROW) * SUMS + tl.arange(0, 8)
    tl.store(target, tl.sum(total, axis=0), mask=tl.arange(0, 8) < SUMS)


def update_sums(operands: list[torch.Tensor], formulas: list[int], coefficients: torch.Tensor) -> torch.Tensor:
    """As `gradstat._core.reference.update_sums`. Operands of mixed dtypes are converted first."""
    device, rest = operands[0].device, iter(operands)
    groups: dict[tuple[int, torch.dtype, bool], list[list[int]]] = {}
    converted = []
    for row, formula in enumerate(formulas):
        inputs = [next(rest) for _ in range(_fields.UPDATE_OPERANDS[formula])]
        types = {tensor.dtype for tensor in inputs}
        if len(types) > 1 or not types <= _ELEMENTS.keys():
            dtype = torch.float64 if torch.float64 in types else torch.float32
            inputs = [tensor.to(dtype) for tensor in inputs]
            converted += inputs
        addresses = [tensor.data_ptr() for tensor in inputs]
        use_vectors = inputs[0].dtype != torch.float64 and not any(address % 16 for address in addresses)
        group = groups.setdefault((formula, inputs[0].dtype, use_vectors), [])
        group.append([*addresses, *[0] * (5 - len(inputs)), inputs[0].numel(), row])
    table = torch.empty((len(formulas), len(_fields.UPDATE_SUMS)), dtype=torch.float64, device=device)
    with _table.on_device(device):
        for (formula, dtype, use_vectors), group in groups.items():
            words, tensors, chunks = [], [], 0
            for i, place in enumerate(group):
                count = -(-place[NUMEL.value] // CHUNK.value)
                words += [*place, chunks]
                tensors += [i] * count
                chunks += count
            source = torch.tensor(words + tensors, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")
            places = _table.upload(source, device)
            rows = torch.empty((max(chunks, 1), len(_fields.UPDATE_SUMS)), dtype=torch.float64, device=device)
            options = {"num_warps": WARPS, "enable_fp_fusion": _table.FUSE}
            if chunks:
                element = _ELEMENTS[dtype]
                update_kernel[(chunks,)](
                    places, coefficients, rows, len(group), formula, element, use_vectors, **options
                )
            merge_kernel[(len(group),)](places, rows, table, len(group), **options)
    return table
