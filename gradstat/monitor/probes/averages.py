"""Averages of weights that are kept in 16 bits: whether they follow the weights, or what is added rounds away."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gradstat._core.host_copy import HostCopy
from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_uninitialized
from gradstat.monitor.probes.base import Pending, Probe, Run, is_plain
from gradstat.rules.weights import Average

_MOST, _SAMPLE = 16, 1024  # averages that are looked at, and elements of each
_APART = 50  # steps between two looks, at least
# An element is far from its weight by so many roundings. A decay of 0.9, with which an average follows, leaves fewer.
_FAR = 16
# An average begins near its weights, unlike other weights of the same shape: their cosine is above it.
_LIKE = 0.5


class _Pair(NamedTuple):
    """A frozen tensor of 16 bits, and the trained parameter that it is an average of, by shape and name."""

    name: str
    average: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]


class _Look(NamedTuple):
    """What was seen of an average in a step: how often it was written, some elements, and whether they began alike."""

    step: int
    version: int
    sample: Tensor
    is_like: Tensor


class Averages(Probe):
    """Compares samples of frozen parameters and buffers of 16 bits with those of the last look and of the weights."""

    watch = "parameters"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._pairs: list[_Pair] = []
        self._last, self._looks = 0, dict[str, _Look]()  # the step of the last look

    def begin(self, step: Pending, named: NamedParameters) -> None:
        self._pairs, self._looks = [], {}
        known = dict(zip(named.names(), named.parameters, strict=True))
        others = {**dict(self.run.model.named_buffers()), **known}
        halves = {name: t for name, t in others.items() if _is_half(t) and not t.requires_grad and _is_matrix(t)}
        by_shape: dict[torch.Size, list[tuple[str, Tensor]]] = {half.shape: [] for half in halves.values()}
        for name, parameter in known.items() if halves else ():
            if parameter.requires_grad and _is_matrix(parameter) and parameter.shape in by_shape:
                by_shape[parameter.shape].append((name, parameter))
        twins = ((name, half, _twin_of(name, by_shape[half.shape])) for name, half in halves.items())
        pairs = (_Pair(name, weakref.ref(half), weakref.ref(twin)) for name, half, twin in twins if twin is not None)
        self._pairs += itertools.islice(pairs, _MOST)

    @torch.no_grad()
    def take(self, step: Pending, named: NamedParameters) -> None:
        if self._looks and step.step - self._last < _APART:
            return
        before, self._last, self._looks, counts, seen = self._looks, step.step, {}, [], []
        for name, average, weight in self._pairs:
            half, twin, last = average(), weight(), before.get(name)
            if half is None or twin is None or half.requires_grad:
                continue
            now = _sample(half).clone()
            if now.device != twin.device or (last is not None and last.sample.device != now.device):
                continue
            wide = now.float()
            others = _sample(twin).to(wide)
            is_like = torch.cosine_similarity(wide, others, dim=0) > _LIKE if last is None else last.is_like
            self._looks[name] = _Look(step.step, half._version, now, is_like)
            if last is not None:
                is_far = is_like & ((others - wide).abs() > _FAR * torch.finfo(now.dtype).eps * wide.abs())
                is_same = now == last.sample
                counts.append(torch.stack([is_far.sum(), (is_far & is_same).sum(), is_same.sum()]))
                steps = step.step - last.step
                seen.append((name, now.numel(), steps, half._version - last.version >= steps))
        if counts:
            copy = HostCopy(torch.stack([count.to(counts[0].device) for count in counts]).double())
            step.late["averages"] = lambda: [
                Average(name, steps, is_written or same < numel, far / numel, still / max(far, 1))
                for (name, numel, steps, is_written), (far, still, same) in zip(seen, copy.wait().tolist(), strict=True)
            ]

    def forget(self) -> None:
        self._looks = {}


def _is_matrix(tensor: Tensor) -> bool:
    return not is_uninitialized(tensor) and tensor.dim() > 1 and is_plain(tensor) and not tensor.is_inference()


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _twin_of(name: str, weights: Iterable[tuple[str, Tensor]]) -> Tensor | None:
    """The one of ``weights`` whose name ends most like ``name``, at least with all of its last part."""
    best, longest = None, 0
    for other, weight in weights:
        pairs = zip(_reversed(name), _reversed(other), strict=False)
        alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if alike > longest and alike >= len(_reversed(other.rpartition(".")[2])):
            best, longest = weight, alike
    return best


def _reversed(name: str) -> str:
    """A name from its end, without dots and underscores: buffers of averages cannot have dots in their names."""
    return re.sub(r"\W|_", "", name)[::-1]


def _sample(tensor: Tensor) -> Tensor:
    """Some of the elements, from all over the tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-len(flat) // _SAMPLE)]
