"""What tells how many different samples a training gets: one number for each sample, the same for equal ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradstat._core.parameters import PLAIN_TYPES

# So many samples of a batch are enough. Of each all elements are read up to so many, of more a sample of 512, since
# those of images are mostly alike; and so many tell how much samples differ.
_SAMPLES, _ELEMENTS, _OF_MORE, _COMPARED = 32, 1024, 512, 128
# What triangular numbers leave when divided varies: batches of a fixed order are not always met at the same place.
_DISTANCES = [i * (i + 1) // 2 for i in range(11)]
_EARLY = frozenset(start + distance for start in (0, 200) for distance in _DISTANCES)


def is_look(step: int, period: int) -> bool:
    """Whether samples are looked at: in a step of each ``period``, and in more of the first 56 and from 200 to 255."""
    number, at = divmod(step, period)
    return at == number * (number + 1) // 2 % period or step in _EARLY


def is_known(tensor: Tensor) -> bool:
    """Whether `numbers_of` can read a tensor."""
    is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and tensor.numel() > 0
    return is_plain and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.is_complex())


@torch.no_grad()
def numbers_of(tensors: Sequence[Tensor]) -> Tensor:
    """How much samples differ in bits, at most; then a number for each sample, in all tensors together, float64.

    Samples are along the first dimension, or along the second where another tensor has as many along its first, as the
    lengths of sequences. A tensor without this dimension, such as edges or places, belongs to all samples.
    """
    device = max((tensor.device for tensor in tensors), key=lambda device: device.type != "cpu")
    shapes = [tensor.shape for tensor in tensors]
    sizes = (size for size in shapes[0][:2] if all(size in shape[:2] for shape in shapes))
    count = next(sizes, shapes[0][0])
    # Digits of sines, since plainer weights would give some different samples the same number.
    places = torch.arange(1.0, 1 + _ELEMENTS + _OF_MORE, device=device, dtype=torch.float64)
    hashes = places.mul_(12.9898).sin_().mul_(43758.5453).frac_()
    numbers, bits = hashes.new_zeros(1), hashes.new_zeros(1)
    for i, tensor in enumerate(tensors):
        is_shared = count not in tensor.shape[:2]
        samples = tensor if tensor.shape[0] == count or is_shared else tensor.transpose(0, 1)
        rows = samples.detach()[:_SAMPLES].to(device, non_blocking=True)
        rows = rows.reshape(1 if is_shared else len(rows), -1)
        if rows.shape[1] > _ELEMENTS:
            rows = rows.index_select(1, (hashes[_ELEMENTS:].abs() * rows.shape[1]).long())
        width = rows.shape[1]
        # What is padded to the longest of a batch ends alike, so that the length does not count.
        first = i % _OF_MORE
        weights, of_end = hashes[first : first + width], hashes[-2 - first : -1 - first]
        numbers = numbers + (rows * weights).sum(1) + rows[:, -1] * (of_end - weights.sum())
        if not is_shared:
            # Of a single sample, its elements are compared with each other.
            some = rows[:, :: 1 + width // _COMPARED].to(torch.float32)
            bits = bits + (some - some.roll(1, 0 if len(rows) > 1 else 1)).abs_().log1p_().sum(1)
    return torch.cat([bits.amax()[None] / math.log(2), numbers])
