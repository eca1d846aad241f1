"""Hooks that are removed with their owner, and are not copied, pickled or scripted with their module."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradstat._core.warn import warn_of_failure
from gradstat._core.wrappers import uncompiled


class Hook:
    """Calls a weakly held method with ``first`` and the hook's arguments; does nothing in a graph or a copy."""

    __torch_unserializable__ = True  # it is left out of saved tensors without a warning

    def __init__(self, method: Any = None, *first: Any) -> None:
        self.on = True  # whether it does anything now
        # The two parts of the method: a `weakref.WeakMethod` would take longer to call.
        self._owner = None if method is None else weakref.ref(method.__self__)
        self._function: Any = None if method is None else method.__func__
        self._first = first

    def __call__(self, *arguments: Any) -> Any:
        # In this order: torch.compile must not depend on whether a hook is on.
        if torch.compiler.is_compiling() or not self.on or torch._C._is_tracing():
            return None
        owner = None if self._owner is None else self._owner()
        if owner is None:
            return None
        try:
            return self._function(owner, *self._first, *arguments)
        except Exception:  # monitoring must not end the training
            self._owner = None
            where = f" of {self._first[0]!r}" if self._first else ""
            warn_of_failure(f"the hook {self._function.__qualname__}{where} failed and is not called again")
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


class _ModuleHooks(OrderedDict[int, Callable[..., Any]]):
    """A module's dictionary of hooks, which leaves out each `Hook` when it is pickled or copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        others = [(number, hook) for number, hook in self.items() if not isinstance(hook, Hook)]
        return OrderedDict, (), None, None, iter(others)

    def values(self) -> Any:
        """Read by ``torch.jit.script``, which must not compile a `Hook`; calls of the module read `items`."""
        return [hook for hook in super().values() if not isinstance(hook, Hook)]


def hook_forward(module: nn.Module, hook: Callable[..., Any], *, before: bool = False, **options: Any) -> Any:
    """Registers a forward hook, or with ``before`` a forward pre-hook; a `Hook` is not saved with the module.

    A scripted module takes no hooks and gets none.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return RemovableHandle(OrderedDict())
    place = "_forward_pre_hooks" if before else "_forward_hooks"
    with_kwargs = f"{place}_with_kwargs"
    for each in (place, with_kwargs):
        if not getattr(module, each):  # otherwise handles refer to the present dictionary
            vars(module)[each] = _ModuleHooks()  # not setattr, which Fabric's wrapper also does to the module inside
    handle = (module.register_forward_pre_hook if before else module.register_forward_hook)(hook, **options)
    if handle.id in getattr(module, with_kwargs):  # torch only asks whether the number is there
        getattr(module, with_kwargs)[handle.id] = hook  # left out of copies, as in the other dictionary
    return handle


def removed_with(owner: object, handles: list[Any]) -> Callable[[], None]:
    """A function that removes the hooks in the list; it is also called when ``owner`` is garbage-collected."""
    remove = weakref.finalize(owner, _remove, handles)
    remove.atexit = False
    return remove


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


NOT_CALLED = (
    "of a model that was never called as model(...) in train mode; hooks do not see model.forward(...), calls inside "
    "torch.func transforms, or calls that torch.compile has compiled"
)


def opaque_parts(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The outermost parts of ``model``, with modules of these ``names``, in which no hook is called, and why not."""
    modules, found = dict(model.named_modules()), dict[str, str]()
    for name in names:
        parts = ("", *itertools.accumulate(name.split("."), "{}.{}".format))
        part = next((part for part in parts if _why_no_hooks(modules.get(part))), None)
        if part is not None:
            found[part] = f"of {part or 'the model'}, which is {_why_no_hooks(modules[part])}"
    return found


def _why_no_hooks(module: nn.Module | None) -> str:
    """Why hooks of the modules in ``module`` may not be called; empty if they are."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted: TorchScript calls no hooks in it"
    if module is not None and (uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None)):
        return "compiled: torch.compile leaves hooks out of its graphs. Train it uncompiled to watch it"
    return ""
