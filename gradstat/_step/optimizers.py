"""How torch's optimizers act on a verdict from the device, and the pitfalls.

The fused ones divide gradients by ``optimizer.grad_scale``, and do nothing at all if ``optimizer.found_inf`` is 1. Both
are 0-d float32 tensors on the device. torch's own loss scaling uses the same interface.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from gradstat._core.engines import refuse_engine
from gradstat._core.parameters import Gradients
from gradstat._core.tensors import NameOf, TensorInfo, is_dense, shard_of, strides_of


def original_step(kind: Any) -> Any:
    # torch wraps each class's `step` to call hooks. A subclass with a step of its own has a different original.
    return inspect.unwrap(kind.step)


def require_steppable(optimizer: object) -> None:
    """Raises TypeError unless it is a torch optimizer, RuntimeError if other code has set a verdict on it.

    That code's scale would be lost, or applied twice.
    """
    if not isinstance(optimizer, Optimizer):
        refuse_engine(optimizer)
        hint = "; pass the optimizer that it wraps" if held_by(optimizer) is not optimizer else ""
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}{hint}")
    for name in ("grad_scale", "found_inf"):
        if getattr(optimizer, name, None) is not None:
            raise RuntimeError(
                f"the optimizer already has the attribute {name!r}, set by other code or left behind by a step that "
                f"failed; gradstat sets it itself. Remove it: `del optimizer.{name}`"
            )


def in_order(model: Any, optimizer: Any) -> tuple[Module | None, Any]:
    """``(model, optimizer)``, given in either order; the model may be left out.

    Raises TypeError if what is beside an optimizer is no module.
    """
    if isinstance(model, Optimizer) or isinstance(optimizer, Module) or optimizer is None:
        model, optimizer = optimizer, model
    if isinstance(optimizer, Optimizer) and not isinstance(model, Module | None):
        raise TypeError(
            f"expected one optimizer and one torch.nn.Module, got {type(model).__name__} beside the optimizer"
        )
    return model, optimizer


def held_by(wrapper: Any) -> Any:
    """The only torch optimizer among the attributes of ``wrapper``, unless it is one, or a module; else ``wrapper``."""
    if isinstance(wrapper, Optimizer | Module):
        return wrapper
    held = {id(value): value for value in getattr(wrapper, "__dict__", {}).values() if isinstance(value, Optimizer)}
    return next(iter(held.values())) if len(held) == 1 else wrapper


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of those that wrap it and never were initialised as optimizers, so have no hooks.

    Accelerate's, Fabric's and Opacus' are such wrappers.
    """
    while "_optimizer_step_pre_hooks" not in vars(optimizer):  # not hasattr, as Fabric's has those of the inner one
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "original_optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


_WITH_FUSED_STEP = {original_step(kind) for kind in (Adam, AdamW, Adagrad, SGD)}


class Traits(NamedTuple):
    """Properties of the ``step`` of a class of optimizers."""

    has_fused_step: bool
    is_sgd: bool
    accepts_scaler: bool  # as an argument of step, the older of torch's two interfaces
    needs_closure: bool
    # May evaluate its closure more than once, or not first of all. True for LBFGS, and for optimizers from
    # outside torch, about which nothing is known.
    repeats_closure: bool


def _traits(kind: type[Optimizer]) -> Traits:
    step = original_step(kind)
    repeats = step is original_step(LBFGS)
    accepts_scaler = "grad_scaler" in inspect.signature(kind.step).parameters
    is_foreign = not step.__module__.startswith("torch.optim")
    return Traits(step in _WITH_FUSED_STEP, step is original_step(SGD), accepts_scaler, repeats, repeats or is_foreign)


traits_of: Callable[..., Traits] = functools.cache(_traits)


def honors_found_inf(optimizer: Optimizer) -> bool:
    """Whether ``step`` honours ``grad_scale`` and ``found_inf``. Others raise, or silently ignore them."""
    traits = traits_of(type(optimizer))
    if traits.has_fused_step:
        # Not the flag below, which reflects the defaults, while a group may differ, and which pickling loses.
        for group in optimizer.param_groups:  # noqa: SIM110 - a generator takes longer, in every step
            if not group.get("fused"):
                return False
        return True
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not traits.accepts_scaler


# By optimizer, of gradients whose layout its fused step takes: the metadata in a measurement, one object while no
# gradient's layout changes.
_known_layouts: weakref.WeakKeyDictionary[Optimizer, Sequence[TensorInfo]] = weakref.WeakKeyDictionary()


def require_fused_layout(
    optimizer: Optimizer, parameters: list[Tensor], gradients: Gradients, infos: Sequence[TensorInfo], name_of: NameOf
) -> None:
    """Raises RuntimeError, by name, for a gradient that torch's fused step would take for another.

    Those kernels read, and with a divisor write, as many elements of each gradient as its parameter has, in the order
    in memory, whatever the strides. ``infos`` are those of the ``gradients`` of ``parameters``, as measured.
    """
    if _known_layouts.get(optimizer) is infos or not traits_of(type(optimizer)).has_fused_step:
        return
    for i, pair in enumerate(zip(gradients.owners(parameters), gradients.tensors, strict=True)):
        parameter, gradient = map(shard_of, pair)
        if gradient.layout is torch.strided and not (is_dense(gradient) and _are_alike(parameter, gradient)):
            raise RuntimeError(
                f"the gradient of {name_of(i)!r} has strides {gradient.stride()}, its parameter of shape "
                f"{tuple(parameter.shape)} has {parameter.stride()}, and torch's fused step ignores both; assign "
                "p.grad = torch.empty_like(p).copy_(p.grad), or make the optimizer without fused=True"
            )
    _known_layouts[optimizer] = infos


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors of one shape have their elements in the same order in memory."""
    return one.stride() == other.stride() or strides_of(one) == strides_of(other)


@contextlib.contextmanager
def with_verdict(optimizer: Optimizer, found_inf: Tensor | None, divisor: Tensor | None) -> Iterator[None]:
    """Sets the optimizer's two attributes, and removes them afterwards whatever happens."""
    try:
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        yield
    finally:
        # An interrupt (Ctrl-C) may arrive after any call.
        try:
            optimizer.__dict__.pop("found_inf", None)
        finally:
            optimizer.__dict__.pop("grad_scale", None)


def first_momentum_is_at_risk(optimizer: Optimizer) -> bool:
    """Whether skipping the coming step of a fused SGD would leave uninitialised memory in its momentum.

    Its first step allocates the buffers without filling them (``torch/optim/sgd.py``, ``_fused_sgd``); if the device
    skips that step, they stay unfilled. Without dampening, zeros are equivalent, and are stored here beforehand.
    """
    if not traits_of(type(optimizer)).is_sgd:
        return False
    at_risk = False
    for group in optimizer.param_groups:
        having = (parameter for parameter in group["params"] if parameter.grad is not None)
        first = next(having, None)
        # torch has buffers for all parameters of a group or for none, so checking the first one is enough.
        if not group["momentum"] or first is None or _momentum_of(optimizer, first) is not None:
            continue
        if group["dampening"]:
            at_risk = True
            continue
        for parameter in (first, *having):
            if _momentum_of(optimizer, parameter) is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
    return at_risk


def _momentum_of(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    # Not [], since the state is a defaultdict, to which that would add an entry.
    buffer: Tensor | None = optimizer.state.get(parameter, {}).get("momentum_buffer")
    return buffer
