"""Checksums of the bits of tensors, on their devices: equal bits give equal checksums, different bits almost never.

The bits are read as words of at most 32 bits. Each word is multiplied by a 64-bit weight that belongs to its position,
and the products are added modulo 2**64. Two tensors whose words differ by d collide if ``sum(d[i] * weight[i])`` is
zero modulo 2**64. No d is a multiple of 2**32, so for random weights the probability is at most 2**-33 whatever was
changed: one bit, every sign, the order. This is why the words are not wider: with 64-bit words, two flipped sign bits
would cancel in half of the cases. (Multiply-shift, M. Dietzfelbinger et al., A Reliable Randomized Algorithm for the
Closest-Pair Problem, J. Algorithms 25(1), 1997.) Each row of words gives a sum, whose halves are the words of the next
level, with other weights, until one sum is left; each level adds a probability of the same size.

``torch.hash_tensor`` is not suitable: it ignores the order of the elements, converts to float64, which changes the
payload of a NaN, and does not support complex and float8 dtypes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradstat._core.tensors import by_device, to_device

_ROW = 4096
# Products take 8 bytes per word, so they are computed for a block of rows at a time, in scratch that stays in cache.
_ROWS_AT_ONCE = {"cpu": 16}
_ROWS_AT_ONCE_ELSEWHERE = 1024
# Every level divides the number of words by 2048, so four levels are enough for 2**44 words.
_LEVELS = 4
_OF_TENSORS, _OF_LISTS = 0, _LEVELS  # index of the first weights for tensors and for lists of checksums


def comparable(tensor: Tensor, name: str) -> Tensor:
    """``tensor``; TypeError, with its ``name``, if it has no bits that can be compared."""
    if tensor.is_meta:
        raise TypeError(f"{name!r} is on the meta device and holds no data to compare")
    if tensor.layout not in (torch.strided, torch.sparse_coo) or tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"{name!r} has a layout that cannot be compared ({tensor.layout})")
    return tensor


def checksums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The checksum of each tensor's bits in row-major order, whatever its strides: ``[n]`` int64 on ``device``.

    No sync, except for sparse tensors on a GPU, and for checksums that have to move from a GPU to the CPU.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    groups = by_device(tensors)
    parts = [torch.stack([_checksum(tensors[i]) for i in positions]) for positions in groups.values()]
    joined = torch.cat([to_device(part, device) for part in parts])
    if len(groups) == 1:
        return joined
    order = torch.tensor([i for positions in groups.values() for i in positions], device="cpu")
    return joined[to_device(order.argsort(), device)]


def combined(numbers: Tensor) -> Tensor:
    """One checksum, 0-d int64, of the checksums ``numbers``, ``[n]`` int64, and their order."""
    return _folded(numbers.view(torch.int32), _OF_LISTS)


def of_text(text: str) -> int:
    """A signed 64-bit checksum of a text, which unlike Python's own hash is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _checksum(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.sparse_coo:
        coalesced = tensor.coalesce()
        return combined(torch.stack([_checksum(coalesced.indices()), _checksum(coalesced.values())]))
    return _folded(_words(tensor), _OF_TENSORS)


def _words(tensor: Tensor) -> Tensor:
    """The bits, in row-major order, as the widest integers, at most 32 bits, that divide their size."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    size = flat.numel() * flat.element_size()
    word = torch.int32 if size % 4 == 0 else torch.int16 if size % 2 == 0 else torch.int8
    # The word size must not depend on the tensor's offset in its storage, which may differ between ranks.
    aligned = flat if flat.storage_offset() * flat.element_size() % word.itemsize == 0 else flat.clone()
    return aligned.view(word)


def _folded(words: Tensor, level: int) -> Tensor:
    sums = _sums_of_rows(words, _weights(words.device)[level])
    while len(sums) > 1:
        level += 1
        sums = _sums_of_rows(sums.view(torch.int32), _weights(words.device)[level])
    return sums[0]


def _sums_of_rows(words: Tensor, weights: Tensor) -> Tensor:
    """``[max(1, ceil(n / row))]`` int64 from ``[n]`` words; the last row may be shorter, or empty if there are none."""
    count = len(words) // _ROW
    at_once = _ROWS_AT_ONCE.get(words.device.type, _ROWS_AT_ONCE_ELSEWHERE)
    blocks = words[: count * _ROW].view(count, _ROW).split(at_once) if count else ()
    scratch = torch.empty(min(count, at_once), _ROW, dtype=torch.int64, device=words.device)
    sums = [torch.mul(block, weights, out=scratch[: len(block)]).sum(1) for block in blocks]
    rest = words[count * _ROW :]
    if len(rest) or not count:
        sums.append((rest * weights[: len(rest)]).sum(0, keepdim=True))
    return torch.cat(sums)


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    # PCG64's raw output is the same in every version of numpy and on every machine.
    numbers = np.random.PCG64(0).random_raw(2 * _LEVELS * _ROW).astype(np.int64)
    return torch.from_numpy(numbers).view(2 * _LEVELS, _ROW).to(device)
