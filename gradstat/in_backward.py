"""`measure_in_backward`: large gradients measured as backward makes them, while a cache still has them."""

from __future__ import annotations

import os
from typing import Any, final

import torch
from torch import Tensor

from gradstat._core import native
from gradstat._core.backends import NativeKernels, resolve
from gradstat._core.compiling import never_traced
from gradstat._core.parameters import source_of

# Bytes of the matrices that are measured. A hook takes what it saves on fewer; of more, the first are no longer in a
# cache when the last are written. Nor are gradients of convolutions when torch hands them over.
_FEWEST, _MOST = 256 << 10, 16 << 20
_USUAL_CACHE = 32 << 20


def measure_in_backward(target: Any) -> BackwardMeasure:
    """Has gradients of ``target`` measured in ``backward()``, where that can be cheaper than to read them afterwards.

    Hooks read the gradients of large matrices as soon as these are accumulated. `check`, `clip_grad_norm_`,
    `guarded_step`, `Monitor.step` and all that measures gradients on the CPU then find their rows, read only the
    others, and give the same bits as without. ::

        with gradstat.measure_in_backward(model):
            for inputs, targets in batches:
                loss_of(model(inputs), targets).backward()
                gradstat.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    A row holds for one tensor and its memory, up to the next operation of torch that changes it in place (its
    ``_version``), and only while 16 of its values, from all over it, are what they were: what writes past versions, as
    ``.data``, numpy, a pointer and torch's ``GradScaler`` on the CPU do, is noticed only if it changes one of these in
    some large gradient. Then all are read again.

    The gain is small, and where torch's threads have to share their cores with other work each hook waits for them and
    all are far dearer than one read afterwards: measure your own steps.

    It does nothing, and `BackwardMeasure.reason` says why, if gradients are not on the CPU, if they fit into its last
    cache, where they are found after ``backward()`` as well, if there are no large matrices, or if there are several
    ranks, which reduce gradients after the hooks.

    Args:
        target: As for `check`. Parameters that are added or unfrozen later are not measured in ``backward()``.

    Raises:
        TypeError: As `check`.
    """
    return BackwardMeasure(target)


@final
class BackwardMeasure:
    """The hooks of `measure_in_backward`: a context manager, at whose end they are removed.

    Attributes:
        enabled: Whether hooks measure. With gradients accumulated over several ``backward()``, each of them would
            measure: set it to False for all but the last.
        reason: Why nothing is measured in ``backward()``, in words; None if something is.
    """

    def __init__(self, target: Any) -> None:
        source = source_of(target)
        trained = [parameter for parameter in source.parameters if parameter.requires_grad]
        self.enabled = True
        self.reason = "an engine keeps the gradients" if source.engine is not None else _why_not(trained)
        self._hooks: list[Any] = []
        if self.reason is None:
            chosen = {id(parameter): parameter for parameter in trained if _pays(parameter)}
            # What a hook refers to is not seen by the garbage collector: it has no parameters.
            self._hooks = [p.register_post_accumulate_grad_hook(self._see) for p in chosen.values()]

    def remove(self) -> None:
        """Takes the hooks away and forgets what they have measured."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            native.load_cpu().forget()
        self._hooks = []

    def __enter__(self) -> BackwardMeasure:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @never_traced
    def _see(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if self.enabled and gradient is not None and not _has_ranks():
            native.load_cpu().remember([gradient])


def _why_not(parameters: list[Tensor]) -> str | None:
    here = [parameter for parameter in parameters if parameter.device.type == "cpu"]
    if not here:
        return "no gradients are on the CPU, and elsewhere launches would take what caches save"
    if not isinstance(resolve(None, "cpu"), NativeKernels):
        return "the compiled kernels for the CPU are not what measures here"
    if _has_ranks():
        return "there are several ranks, which reduce gradients after the hooks"
    cache = _last_cache()
    if sum(map(_bytes, here)) <= cache:
        return f"the gradients fit into a cache of {cache >> 20} MiB, where they are found after backward() as well"
    if not any(map(_pays, here)):
        return f"there is no matrix of {_FEWEST >> 10} KiB to {_MOST >> 20} MiB; others are not cheaper to read early"
    return None


def _pays(parameter: Tensor) -> bool:
    return parameter.device.type == "cpu" and parameter.dim() == 2 and _FEWEST <= _bytes(parameter) <= _MOST


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _last_cache() -> int:
    """Bytes of the processor's last cache, as far as the system tells."""
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or _USUAL_CACHE
    except (ValueError, OSError):
        return _USUAL_CACHE


def _has_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
