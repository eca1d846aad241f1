"""Extracts named parameters and gradients from what a user passes, without walking a module on every step.

A module is walked once, and again after a dictionary of its parameters or submodules has changed (csrc/module_plan.h).
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from gradstat._core import native
from gradstat._core.engines import Engine, engine_of, refuse_engine, refuse_in_engine
from gradstat._core.warn import warn_user

PLAIN_TYPES = {Tensor, Parameter}

Names = Callable[[], Sequence[str]]


class NamedParameters(NamedTuple):
    """Parameters in report order, and a function that returns their names."""

    parameters: list[Tensor]
    names: Names
    engine: Engine | None = None  # the engine that keeps their gradients


class _ModulePlan(NamedTuple):
    """A module's parameter names, and the compiled helper's weak references to where the parameters are stored."""

    module: weakref.ref[Module]
    names: tuple[str, ...]
    places: object


# Keyed by id, since distinct modules may compare equal. An entry is removed with its module; a lookup checks the weak
# reference, since an id may have been reused.
_plans: dict[int, _ModulePlan] = {}


def _remember(module: Module, names: tuple[str, ...], places: object) -> None:
    key = id(module)

    def forget(dead: weakref.ref[Module], plans: dict[int, _ModulePlan] = _plans) -> None:
        plan = plans.get(key)
        if plan is not None and plan.module is dead:
            del plans[key]

    _plans[key] = _ModulePlan(weakref.ref(module, forget), names, places)


def _of_module(module: Module) -> NamedParameters:
    helpers = native.helpers()
    plan = _plans.get(id(module))
    if plan is not None and plan.module() is module and helpers is not None:
        parameters = helpers.planned_parameters(plan.places)
        if parameters is not None:
            return NamedParameters(parameters, lambda: plan.names)
    named = list(module.named_parameters())
    names, parameters = tuple(name for name, _ in named), [parameter for _, parameter in named]
    if helpers is not None and _has_standard_traversal(module):
        places = helpers.make_plan([weakref.ref(m) for m in module.modules()], parameters)
        if places is not None:  # None if a parameter is not in a dictionary of one of the modules
            _remember(module, names, places)
    return NamedParameters(parameters, lambda: names)


def _has_standard_traversal(module: Module) -> bool:
    """Whether the parameters of ``module`` follow from its modules' dictionaries: no class overrides the listing."""
    ways = ("named_parameters", "_named_members", "named_modules")
    is_standard = all(getattr(getattr(module, way), "__func__", None) is getattr(Module, way) for way in ways)
    return is_standard and all(type(m).named_modules is Module.named_modules for m in module.modules())


def named_parameters_of(target: object) -> NamedParameters:
    """Named parameters of a module, an optimizer, an iterable, a mapping, or a single parameter; else TypeError.

    ValueError for a single tensor that was computed and so never gets a gradient, as a loss.
    """
    if isinstance(target, Module):
        engine = engine_of(target)
        return _of_module(target) if engine is None else _of_module(engine.module)._replace(engine=engine)
    if isinstance(target, Optimizer):
        return _of_optimizer(target)
    if isinstance(target, Tensor):
        if not (target.is_leaf or target.retains_grad):
            raise ValueError(
                f"expected parameters, got a tensor that is not a leaf: it was computed by {target.grad_fn}, so "
                "backward() leaves no gradient in it. Pass the model; check_tensors() checks the tensor's own values"
            )
        return NamedParameters([target], lambda: ["parameter"])
    if not isinstance(target, Iterable):
        raise TypeError(
            f"expected a torch.nn.Module, an Optimizer, parameters or (name, parameter) pairs, got "
            f"{type(target).__name__}"
        )
    return _of_iterable(target.items() if isinstance(target, Mapping) else target)


def _of_optimizer(optimizer: Optimizer) -> NamedParameters:
    parameters: list[Tensor] = []
    # Keeps the names, which an optimizer made from named_parameters() has, and the group sizes, but no parameter: a
    # report holds on to this function.
    named_groups = []
    for group in optimizer.param_groups:
        parameters += group["params"]
        named_groups.append((group.get("param_names"), len(group["params"])))

    def names() -> list[str]:
        listed: list[str] = []
        for number, (own_names, count) in enumerate(named_groups):
            listed += own_names or [f"group{number}.{i}" for i in range(count)]
        return listed

    return NamedParameters(parameters, names)


def named_by(module: Module, named: NamedParameters) -> NamedParameters:
    """The same parameters under their names in ``module``; parameters not in ``module`` keep their names."""
    of_module = _of_module(module)
    ids, module_ids = [id(p) for p in named.parameters], [id(p) for p in of_module.parameters]
    module_names, own_names = of_module.names, named.names

    def names() -> list[str]:
        name_by_id = dict(zip(module_ids, module_names(), strict=True))
        return [name_by_id.get(i, name) for i, name in zip(ids, own_names(), strict=True)]

    return NamedParameters(named.parameters, names)


class Parameters(Module):
    """Parameters as a module, under names that may contain dots."""

    def __init__(self, named: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__()
        self.replace(named)

    def replace(self, named: Iterable[tuple[str, Any]]) -> None:
        """Holds these parameters from now on."""
        self._parameters.clear()
        self._parameters.update(named)  # register_parameter rejects names with dots


class Trained:
    """The parameters of a model, and behind them those that its optimizer trains besides: looked up on every step.

    A parameter that the optimizer gets later (a group added, a tensor replaced) is followed. One that is not the
    model's counts from its first gradient on, since an optimizer may hold tensors that nothing uses any more. Names are
    those of the model, or of the optimizer: its own if made from ``named_parameters()``, else group and position.
    """

    def __init__(self, model: Module, optimizer: Optimizer | None) -> None:
        self.model = model  # without parameters if only the optimizer is known, all of whose parameters count then
        self.besides = Parameters()  # that are trained and not the model's
        self._optimizer = optimizer
        self._names: Sequence[str] | None = None  # of the model's parameters when they were last compared
        self._of_model: list[Tensor] = []
        self._of_optimizer_now: list[Tensor] = []  # all of the optimizer's
        self._waiting: dict[str, Tensor] = {}  # those that are not the model's and have had no gradient
        self._all_names: tuple[str, ...] = ()
        self._newest: NamedParameters | None = None  # the last result; ``_places`` tells whether it is up to date
        self._places: object = None

    def named_parameters(self) -> NamedParameters:
        """All parameters now; while nothing changes, mostly the same object, and ``names()`` returns the same one."""
        helpers = native.helpers()
        if (
            self._newest is not None
            and helpers is not None
            and helpers.planned_parameters(self._places) is not None
            and (self._optimizer is None or helpers.holds_exactly(self._optimizer.param_groups, self._of_optimizer_now))
        ):
            return self._newest
        named = self._looked_up()
        plan = _plans.get(id(self.model))
        is_kept = plan is not None and plan.module() is self.model and named.engine is None and not self._waiting
        # It holds these parameters, so no new object can have the address of one of them.
        self._newest, self._places = (named, plan.places) if plan is not None and is_kept else (None, None)
        return named

    def _looked_up(self) -> NamedParameters:
        named = named_parameters_of(self.model)
        if self._optimizer is None or named.engine is not None:
            return named
        names, groups = named.names(), self._optimizer.param_groups
        is_same_model = names is self._names or _are_same(named.parameters, self._of_model)
        has_begun = self._waiting and any(parameter.grad is not None for parameter in self._waiting.values())
        if has_begun or not (is_same_model and _hold_exactly(groups, self._of_optimizer_now)):
            self._compare(named, names)
        self._names = names
        if not self.besides._parameters:
            return named
        parameters: list[Any] = [*named.parameters, *self.besides._parameters.values()]
        return NamedParameters(parameters, lambda: self._all_names)

    def _compare(self, named: NamedParameters, names: Sequence[str]) -> None:
        assert self._optimizer is not None
        of_optimizer = _of_optimizer(self._optimizer)
        seen, taken = set(map(id, named.parameters)), set(names)
        counted = set(map(id, self.besides._parameters.values()))
        besides: dict[str, Tensor] = {}
        self._waiting = {}
        for name, parameter in zip(of_optimizer.names(), of_optimizer.parameters, strict=True):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                # Two networks may have parameters of one name.
                choices = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2)))
                unique = next(choice for choice in choices if choice not in taken)
                taken.add(unique)
                counts = not names or parameter.grad is not None or id(parameter) in counted
                (besides if counts else self._waiting)[unique] = parameter
        self.besides.replace(besides.items())
        self._of_model, self._of_optimizer_now = named.parameters, of_optimizer.parameters
        self._all_names = (*names, *besides)


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _hold_exactly(groups: list[dict[str, Any]], parameters: list[Tensor]) -> bool:
    """Whether the groups of an optimizer hold these parameters, in order; 10 ns each with the compiled helper."""
    helpers = native.helpers()
    if helpers is not None:
        return helpers.holds_exactly(groups, parameters)
    return _are_same([parameter for group in groups for parameter in group["params"]], parameters)


def _of_iterable(target: Iterable[Any]) -> NamedParameters:
    listed = list(target)
    if set(map(type, listed)) <= PLAIN_TYPES:
        count = len(listed)
        return NamedParameters(listed, lambda: [f"param{i}" for i in range(count)])
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
    return NamedParameters(parameters, lambda: names)


class Gradients(NamedTuple):
    """The existing gradients of some parameters and their positions. None means that every parameter has a gradient."""

    tensors: list[Tensor]
    positions: list[int] | None
    missing: list[int] | None  # positions of parameters that require a gradient and have none

    def name_of(self, i: int) -> str:
        """The name of the i-th gradient in the errors of clips, which know no parameter names."""
        return f"the gradient of parameters[{i if self.positions is None else self.positions[i]}]"

    def owners(self, parameters: list[Tensor]) -> list[Tensor]:
        """Those of ``parameters`` that have these gradients, in the same order."""
        return parameters if self.positions is None else [parameters[i] for i in self.positions]


def gradients_of(parameters: list[Tensor], engine: Engine | None = None) -> Gradients:
    """The gradients of ``parameters``, or the shards ``engine`` has. AttributeError if an item has no ``.grad``."""
    of_engine = None if engine is None else engine.gradients()
    if of_engine is not None:
        gradients = [of_engine.get(id(parameter)) for parameter in parameters]
    else:
        helpers = None if torch.compiler.is_compiling() else native.helpers()
        if helpers is not None:
            return Gradients(*helpers.gradients_of(parameters))
        gradients = [parameter.grad for parameter in parameters]
    tensors = [gradient for gradient in gradients if gradient is not None]
    if len(tensors) == len(parameters):
        return Gradients(tensors, None, None)
    positions = [i for i, gradient in enumerate(gradients) if gradient is not None]
    missing = [i for i, gradient in enumerate(gradients) if gradient is None and parameters[i].requires_grad]
    return Gradients(tensors, positions, missing)


class Labels(NamedTuple):
    """The names of existing and of missing gradients, looked up on demand. Holds no reference to a gradient."""

    names: Names
    missing_names: Names

    def of(self, i: int) -> str:
        """The name of the i-th existing gradient, for errors."""
        return self.names()[i]


def labels_of(named: NamedParameters, gradients: Gradients) -> Labels:
    """The names of ``gradients``, which belong to the parameters of ``named``."""
    # Which gradients are missing is recorded now, since it may change.
    missing_names = tuple if gradients.missing is None else names_at(named, gradients.missing)
    names = named.names if gradients.positions is None else names_at(named, gradients.positions)
    return Labels(names, missing_names)


def names_at(named: NamedParameters, positions: list[int]) -> Names:
    """The names at ``positions``, looked up on demand."""

    def names() -> list[str]:
        every = named.names()
        return [every[i] for i in positions]

    return names


# The arguments of torch's clipping functions, accepted as torch accepts them ---------------------------------------


_HOW_TO_PASS = {
    "parameters": "module.parameters()",
    "tensors": "[p.grad for p in module.parameters() if p.grad is not None]",
}


def as_list(tensors: Tensor | Iterable[Tensor], what: str = "parameters") -> list[Tensor]:
    """One tensor, or several, as a list. TypeError for anything else, a module in particular.

    Like torch, warns about an empty generator of parameters, since it may have been exhausted before.
    """
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, Module) or not isinstance(tensors, Iterable):
        refuse_engine(tensors)
        raise TypeError(f"expected {what}, got {type(tensors).__name__}; pass {_HOW_TO_PASS[what]}")
    listed = list(tensors)
    if not listed and what == "parameters" and isinstance(tensors, types.GeneratorType):
        warn_user("`parameters` is an empty generator, no gradient clipping will occur.")
    return listed


def gradients_to_clip(
    parameters: Tensor | Iterable[Tensor], foreach: bool | None = None
) -> tuple[list[Tensor], Gradients]:
    """The parameters of a clip as a list, and their gradients; invalid arguments are rejected as torch rejects them.

    Raises AttributeError, which names the item that is not a parameter, or TypeError if an engine keeps the gradients.
    """
    listed = as_list(parameters)
    try:
        collected = gradients_of(listed)
    except AttributeError:
        position, item = next((i, p) for i, p in enumerate(listed) if not hasattr(p, "grad"))
        raise AttributeError(
            f"item {position} of `parameters` has no .grad: it is of type {type(item).__name__}, not a parameter; "
            "pass module.parameters()"
        ) from None
    if not collected.tensors:
        refuse_in_engine(listed)
    elif foreach:
        require_foreach(collected.tensors)
    return listed, collected


def require_foreach(tensors: Sequence[Any]) -> None:
    """Raises RuntimeError, as torch does, if torch has no foreach kernels for a device of ``tensors``."""
    from torch.utils._foreach_utils import _device_has_foreach_support

    for tensor in tensors:
        # Items that are no tensors are refused, by name, when they are measured.
        if isinstance(tensor, Tensor) and not _device_has_foreach_support(tensor.device):
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {tensor.device.type} tensors"
            )
