"""Replaces torch's clipping functions by gradstat's, and restores them."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable
from types import MethodType, ModuleType
from typing import Any, final

import torch.nn.utils.clip_grad
from torch import Tensor

from gradstat._core.parameters import PLAIN_TYPES, as_list, gradients_of
from gradstat._core.tensors import is_distributed
from gradstat._core.warn import warn_user
from gradstat.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

_Function = Callable[..., Any]
_Tensors = Tensor | Iterable[Tensor]

# Layers are added and removed, also from the middle of a stack, under this lock.
lock = threading.RLock()
_layers: weakref.WeakSet[Layer] = weakref.WeakSet()  # each is alive as long as its function is in place


@final
class TorchPatch:
    """The replacements made by `patch_torch`: undone by ``remove()``, or at the end of a ``with`` block."""

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers

    def remove(self) -> None:
        """Restores the functions from before this patch. Patches may be removed in any order. Later calls do nothing.

        References to this patch's functions that are still held somewhere call torch's originals from now on.

        Warns:
            UserWarning: Other code has replaced a function since. It is left in place. The message names it.
        """
        layers, self._layers = self._layers, []
        replaced = [layer.place for layer in layers if not layer.remove()]
        if replaced:
            warn_user(
                f"replaced by other code after gradstat.patch_torch(), and not restored: {', '.join(replaced)}. The "
                "replacement may still call gradstat's function, which from now on calls torch's"
            )

    def __repr__(self) -> str:
        return f"TorchPatch({', '.join(layer.place for layer in self._layers) or 'removed'})"

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def patch_torch() -> TorchPatch:
    """Replaces torch's own clipping functions by gradstat's, so that a program can try them without edits.

    ``clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` are replaced in ``torch.nn.utils`` and in
    ``torch.nn.utils.clip_grad``, where torch looks them up itself. The previous functions still handle three cases:
    gradients of Tensor subclasses other than DTensor, norms of DTensors of orders other than 2 and infinity, and
    functions under ``torch.compile``, which compiles torch's own into its graph. Norms of DTensors are DTensors, as
    torch's are. ::

        patch = gradstat.patch_torch()
        train()  # its torch.nn.utils.clip_grad_norm_(...) is gradstat's
        patch.remove()

        with gradstat.patch_torch():
            train()

    **A name bound before the patch keeps its function**: after ``from torch.nn.utils import clip_grad_norm_`` a module
    calls torch's. That function looks up its two halves on every call, so only these are gradstat's. Patch before such
    modules are imported, or rebind the name (``module.clip_grad_norm_ = gradstat.clip_grad_norm_``). A name bound while
    the patch is active calls torch's once the patch is removed.

    Patches may be nested and removed in any order, from several threads. Removing the last one restores exactly the
    state before the first one. Calls in progress in other threads are not interrupted.
    """
    modules = torch.nn.utils, torch.nn.utils.clip_grad
    places = ((module, name) for module in modules for name in _REPLACEMENTS)
    return TorchPatch([Layer(module, name, _REPLACEMENTS[name]) for module, name in places if hasattr(module, name)])


class Layer:
    """A function installed in place of another one, which may itself be a layer of an earlier patch.

    Once it is removed, references to it that are still held somewhere call the function below it.
    """

    def __init__(self, owner: Any, name: str, replacement: _Function) -> None:
        """``owner``: a module, a class, or an object whose method is replaced for it alone.

        ``replacement`` gets the layer as its first argument.
        """
        self._owner, self.name, self._removed = owner, name, False

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.below(*args, **kwargs) if self._removed else replacement(self, *args, **kwargs)

        with lock:
            self.below: _Function = getattr(owner, name)
            self._hides = name not in vars(owner)  # the method of an object's class
            self._function: Any = functools.update_wrapper(function, self.below)
            if not isinstance(owner, ModuleType | type):
                # A bound method, because torch's schedulers expect an optimizer's `step` to be one.
                self._function = MethodType(lambda _owner, *args, **kwargs: function(*args, **kwargs), owner)
            setattr(owner, name, self._function)
            _layers.add(self)

    @property
    def place(self) -> str:
        return f"{getattr(self._owner, '__name__', type(self._owner).__name__)}.{self.name}"

    def remove(self) -> bool:
        """Undoes the replacement. Returns False, and leaves it, if other code has put its own function on top."""
        with lock:
            _layers.remove(self)
            self._removed = True
            above = next((layer for layer in _layers if layer.below is self._function), None)
            if above is not None:
                above.below, above._hides = self.below, self._hides
            elif getattr(self._owner, self.name) is not self._function:
                return False
            elif self._hides:
                delattr(self._owner, self.name)
            else:
                setattr(self._owner, self.name, self.below)
            return True

    def choose(self, ours: _Function, tensors: Iterable[object], norm_type: object = 2.0) -> _Function:
        """The function to call for ``tensors``: ours, or the one below."""
        kinds = {type(tensor): tensor for tensor in tensors}
        over_ranks = norm_type in (2.0, math.inf, "inf")
        is_supported = all(kind in PLAIN_TYPES or (over_ranks and is_distributed([t])) for kind, t in kinds.items())
        return ours if is_supported and not torch.compiler.is_compiling() else self.below


def _as_torchs(norm: Tensor, tensors: list[Tensor]) -> Tensor:
    """The norm in torch's form: for distributed tensors a DTensor, replicated over their mesh."""
    if not is_distributed(tensors) or is_distributed([norm]):
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    made: Tensor = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return made


# The replacements convert their argument to a list, since a generator can be iterated only once.


def _norm_clip(
    layer: Layer, parameters: _Tensors, max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
) -> Any:
    listed = as_list(parameters)
    gradients = gradients_of(listed).tensors
    # Without gradients, ours may reject what torch accepts: parameters of an engine that clips by itself.
    function = layer.choose(clip_grad_norm_, gradients, norm_type) if gradients else layer.below
    return _as_torchs(function(listed, max_norm, norm_type, *args, **kwargs), gradients)


def _total_norm(layer: Layer, tensors: _Tensors, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
    listed = as_list(tensors, "tensors")
    function = layer.choose(get_total_norm, listed, norm_type)
    return _as_torchs(function(listed, norm_type, *args, **kwargs), listed)


def _clip_with_norm(
    layer: Layer, parameters: _Tensors, max_norm: float, total_norm: Tensor | float, *args: Any, **kwargs: Any
) -> Any:
    listed = as_list(parameters)
    gradients = gradients_of(listed).tensors
    tensors = [*gradients, *([total_norm] if isinstance(total_norm, Tensor) else [])]
    function = layer.choose(clip_grads_with_norm_, tensors) if gradients else layer.below
    return function(listed, max_norm, total_norm, *args, **kwargs)


# torch looks the functions up by name in both modules, in the second by private names, which may differ in other
# versions of torch.
_REPLACEMENTS: dict[str, _Function] = {
    "clip_grad_norm_": _norm_clip,
    **dict.fromkeys(("get_total_norm", "_get_total_norm"), _total_norm),
    **dict.fromkeys(("clip_grads_with_norm_", "_clip_grads_with_norm_"), _clip_with_norm),
}
