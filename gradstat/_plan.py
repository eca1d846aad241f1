"""From what a user passes (module, optimizer, parameters) to named parameters, without walking on every step.

For a module the walk is done once and remembered, weakly. Before each use the dictionaries that hold its
parameters and submodules are compared with what they held then; a module that was changed in any way is
walked again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

_PLAIN_TYPES = {Tensor, Parameter}


class Source(NamedTuple):
    """Parameters and a way to name them.

    Attributes:
        parameters: In the order of the report.
        names: Called when names are needed; as long as ``parameters``.
    """

    parameters: Sequence[Tensor]
    names: Callable[[], Sequence[str]]


class _ModulePlan:
    """The names of a module's parameters, where to find them, and what must be unchanged for both to hold.

    Holds weak references and numbers only, so that it never keeps a model alive.
    """

    __slots__ = ("_identities", "_keys", "_modules", "_places", "names")

    def __init__(self, module: Module) -> None:
        named = list(module.named_parameters())
        self.names: tuple[str, ...] = tuple(name for name, _ in named)
        modules = list(module.modules())
        self._modules = [weakref.ref(m) for m in modules]
        self._keys, values = _contents(modules)
        self._identities = list(map(id, values))
        place = {identity: i for i, identity in enumerate(self._identities)}
        self._places = [place[id(parameter)] for _, parameter in named]

    def parameters(self) -> list[Tensor] | None:
        """The parameters as they are now, in the order of ``names``; None if the module was changed."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        keys, values = _contents(modules)
        # An address that was freed and used again passes this test. It can only be another parameter under
        # the same name in the same module, and it is the current values that are returned.
        if keys != self._keys or list(map(id, values)) != self._identities:
            return None
        return [values[i] for i in self._places]


def _contents(modules: list[Module]) -> tuple[list[str], list[Any]]:
    """Keys and values of all dictionaries that hold the parameters and submodules of ``modules``."""
    held = [m._parameters for m in modules]
    held += [m._modules for m in modules]  # type: ignore[misc]  # both are read alike
    return [key for d in held for key in d], [value for d in held for value in d.values()]


_plans: weakref.WeakKeyDictionary[Module, _ModulePlan] = weakref.WeakKeyDictionary()


def _module_source(module: Module) -> Source:
    plan = _plans.get(module)
    parameters = plan.parameters() if plan is not None else None
    if plan is None or parameters is None:
        plan = _plans[module] = _ModulePlan(module)
        parameters = plan.parameters()
        if parameters is None:
            raise RuntimeError("the module was changed by another thread while its parameters were listed")
    names = plan.names
    return Source(parameters, lambda: names)


def source_of(target: object) -> Source:
    """Named parameters of a module, an optimizer, an iterable, or a single parameter.

    Raises:
        TypeError: ``target`` is none of these, or an iterable with something else in it.
    """
    if isinstance(target, Module):
        return _module_source(target)
    if isinstance(target, Optimizer):
        return _optimizer_source(target)
    if isinstance(target, Tensor):
        return Source([target], lambda: ["parameter"])
    if isinstance(target, Mapping) or not isinstance(target, Iterable):
        raise TypeError(
            f"expected a torch.nn.Module, an Optimizer, parameters or (name, parameter) pairs, got "
            f"{type(target).__name__}"
            + ("; use check_tensors() for a mapping of tensors" * isinstance(target, Mapping))
        )
    return _iterable_source(target)


def _optimizer_source(optimizer: Optimizer) -> Source:
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]

    def names() -> list[str]:
        found: list[str] = []
        for number, group in enumerate(groups):
            given = group.get("param_names")  # present when the optimizer was made from named_parameters()
            found += given or [f"group{number}.{i}" for i in range(len(group["params"]))]
        return found

    return Source(parameters, names)


def _iterable_source(target: Iterable[Any]) -> Source:
    listed = list(target)
    if set(map(type, listed)) <= _PLAIN_TYPES:
        return Source(listed, lambda: [f"param{i}" for i in range(len(listed))])
    parameters: list[Tensor] = []
    names: list[str] = []
    for position, item in enumerate(listed):
        name, parameter = item if isinstance(item, tuple) and len(item) == 2 else (f"param{position}", item)
        if not isinstance(name, str) or not isinstance(parameter, Tensor):
            raise TypeError(
                f"item {position} is neither a parameter nor a (name, parameter) pair but {type(item).__name__}; "
                "pass model, model.parameters() or model.named_parameters()"
            )
        names.append(name)
        parameters.append(parameter)
    return Source(parameters, lambda: names)


def gradients_of(source: Source) -> tuple[list[Tensor], list[int] | None]:
    """The gradients there are, and the positions of their parameters, or None when every one has one.

    Raises:
        ValueError: No parameter has a gradient or will ever have one.
    """
    parameters = source.parameters
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if len(gradients) == len(parameters):
        return gradients, None
    if not gradients and not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(
            f"none of the {len(parameters)} tensors requires a gradient or has one; check() reads the .grad of "
            "parameters after backward(). To check tensors themselves, use check_tensors()"
        )
    return gradients, [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
