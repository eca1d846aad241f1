"""The update that a torch optimizer is about to make: its operands, its coefficients, and the sums over both.

The specification is the ``_single_tensor_*`` functions of ``torch/optim`` (2.13). csrc/update.h defines a step's effect
on one element; everything else that it depends on, above all the step count, becomes coefficients here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

from gradstat import _fields
from gradstat._core.measure import resolve_for
from gradstat._core.measurement import Measurement
from gradstat._core.parameters import PLAIN_TYPES
from gradstat._core.tensors import NameOf, is_distributed, readable, shard_of, to_device
from gradstat._step.optimizers import original_step, require_optimizer

Numbers: TypeAlias = Mapping[str, Tensor]
_GRADIENT, _MOMENTUM, _ADAM, _AMSGRAD, _ADAMAX = range(len(_fields.UPDATE_FORMULAS))
_LR, _GRADIENT_SCALE = map(_fields.UPDATE_COEFFICIENTS.index, ("lr", "gradient_scale"))
_UPDATE, _SCALED = map(_fields.UPDATE_SUMS.index, ("update", "scaled_gradient"))
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Counts kept in the state, with their initial values.
_COUNTED = {"step": 0.0, "mu_product": 1.0}
# Defaults for coefficients that a formula does not set; all others default to 0.
_DEFAULT_COEFFICIENTS = {"root_scale": 1.0, "is_adaptive": 1.0}


def _corrected(by: Numbers, step: Tensor) -> dict[str, Tensor]:
    """Adam's bias corrections of both moments."""
    return {"from_momentum": 1 / (1 - by["beta1"] ** step), "root_scale": (1 - by["beta2"] ** step).rsqrt()}


def _nadam(by: Numbers, step: Tensor) -> dict[str, Tensor]:
    def weight(of: Tensor) -> Tensor:
        return by["beta1"] * (1.0 - 0.5 * 0.96 ** (of * by["momentum_decay"]))

    now, coming = weight(step), weight(step + 1)
    product = by["mu_product"] * now
    from_both = {"from_gradient": (1 - now) / (1 - product), "from_momentum": coming / (1 - product * coming)}
    return _corrected(by, step) | from_both


def _radam(by: Numbers, step: Tensor) -> dict[str, Tensor]:
    corrected = _corrected(by, step)
    limit = 2 / (1 - by["beta2"]) - 1
    length = limit - 2 * step * by["beta2"] ** step / (1 - by["beta2"] ** step)
    rectified = ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)).sqrt()
    is_adaptive = length > 5.0
    corrected["from_momentum"] = corrected["from_momentum"] * torch.where(is_adaptive, rectified, 1.0)
    # RAdam adds eps before the bias correction of the second moment, so eps is scaled as well.
    return corrected | {"eps": by["eps"] * corrected["root_scale"], "is_adaptive": is_adaptive}


def _adamax(by: Numbers, step: Tensor) -> dict[str, Tensor]:
    return {"from_momentum": _corrected(by, step)["from_momentum"]}


def _sgd(by: Numbers, _: Tensor) -> dict[str, Tensor]:
    # Without momentum, or without a buffer yet, the new momentum is the gradient.
    return {
        "momentum_decay": by["momentum"],
        "momentum_gain": 1 - by["has_momentum"] * by["dampening"],
        "from_gradient": by["nesterov"],
        "from_momentum": 1 + by["nesterov"] * (by["momentum"] - 1),
    }


class _Kind(NamedTuple):
    """Properties of a class of optimizers."""

    name: str
    states: tuple[str, ...]  # names of its operands besides gradient and weight
    settings: tuple[str, ...]  # names of a group's numeric options
    coefficients: Callable[[Numbers, Tensor], dict[str, Tensor]]  # from the options and the number of the coming step
    formula: int = _ADAM


_KINDS = {
    original_step(SGD): _Kind("SGD", ("momentum_buffer",), ("momentum", "dampening", "nesterov"), _sgd, _MOMENTUM),
    original_step(Adam): _Kind("Adam, AdamW", _MOMENTS, ("eps",), _corrected),
    original_step(NAdam): _Kind("NAdam", _MOMENTS, ("eps", "momentum_decay"), _nadam),
    original_step(RAdam): _Kind("RAdam", _MOMENTS, ("eps",), _radam),
    original_step(Adamax): _Kind("Adamax", ("exp_avg", "exp_inf"), ("eps",), _adamax, _ADAMAX),
}
assert original_step(AdamW) is original_step(Adam)


def is_known(optimizer: object) -> bool:
    """Whether `update_sums` supports the optimizer."""
    return isinstance(optimizer, Optimizer) and original_step(type(optimizer)) in _KINDS


def kind_of(optimizer: object) -> _Kind:
    names = ", ".join(kind.name for kind in _KINDS.values())
    require_optimizer(optimizer, f"optimizer: expected one of torch's {names}")
    kind = _KINDS.get(original_step(type(optimizer)))
    if kind is None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise NotImplementedError(f"{name} is not supported; supported are torch's {names}")
    return kind


class _Batch(NamedTuple):
    """Parameters of one group, on one device, with the same formula."""

    group: Mapping[str, Any]
    formula: int
    positions: list[int]  # among all parameters of the optimizer
    operands: list[Tensor]
    states: list[Mapping[str, Any]]


class Updates(NamedTuple):
    """Sums over an optimizer's upcoming update. Keeps none of its tensors alive."""

    positions: list[int]  # of the parameters with a gradient, among all of the optimizer's
    sizes: list[int]  # the number of values of each; a complex element counts as two
    sums: Tensor  # [len(positions), len(UPDATE_SUMS)] float64 on the first one's device, learning rate included


@torch.no_grad()
def update_sums(optimizer: Optimizer, name_of: NameOf, backend: str | None, loss_scale: Tensor | None) -> Updates:
    """Reads gradients, weights and states once, one launch per device. No host sync. Errors as in `update_stats`."""
    kind = kind_of(optimizer)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    positions = [position for position, parameter in enumerate(every) if parameter.grad is not None]
    parameters = [every[position] for position in positions]
    try:
        sums = _local_sums(kind, optimizer, name_of, backend, loss_scale)
    except Exception:
        _over_shards(parameters, None)  # the other ranks wait for this one, and get NaN
        raise
    sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
    return Updates(positions, sizes, _over_shards(parameters, sums))


def _over_shards(parameters: list[Tensor], sums: Tensor | None) -> Tensor:
    """Rows of the whole parameters, from the rows of this rank's shards; NaN on all ranks if one rank failed."""
    if sums is None:
        home = shard_of(parameters[0]).device if parameters else "cpu"
        sums = torch.full((len(parameters), len(_fields.UPDATE_SUMS)), torch.nan, dtype=torch.float64, device=home)
    if is_distributed(parameters):
        from gradstat._core.sharded import sum_over_shards_

        sum_over_shards_(sums, parameters)
    return sums


def _local_sums(
    kind: _Kind, optimizer: Optimizer, name_of: NameOf, backend: str | None, loss_scale: Tensor | None
) -> Tensor:
    batches: dict[torch.device, list[_Batch]] = {}
    for batch in _batches_of(kind, optimizer, name_of):
        batches.setdefault(batch.operands[0].device, []).append(batch)
    tables: list[Tensor] = []
    order: list[int] = []
    for device, of_device in batches.items():
        kernels = resolve_for(backend, device.type, name_of, of_device[0].positions[0])
        coefficients = torch.cat([to_device(_coefficients_of(kind, batch), device) for batch in of_device])
        if loss_scale is not None:
            coefficients[:, _GRADIENT_SCALE] /= to_device(loss_scale, device)
        formulas = [batch.formula for batch in of_device for _ in batch.positions]
        table = kernels.update_sums([t for batch in of_device for t in batch.operands], formulas, coefficients)
        table[:, _UPDATE] *= coefficients[:, _LR].square()
        if len(kind.states) < len(_MOMENTS):
            table[:, _SCALED] = torch.nan
        tables.append(table)
        order += [position for batch in of_device for position in batch.positions]
    if not tables:
        return torch.zeros(0, len(_fields.UPDATE_SUMS), dtype=torch.float64, device="cpu")
    return Measurement(tables, None if order == sorted(order) else order, ()).table()


def _batches_of(kind: _Kind, optimizer: Optimizer, name_of: NameOf) -> list[_Batch]:
    batches: dict[tuple[Any, ...], _Batch] = {}
    zeros: dict[tuple[Any, ...], Tensor] = {}
    position = -1
    for number, group in enumerate(optimizer.param_groups):
        is_amsgrad = bool(group.get("amsgrad"))
        for parameter in group["params"]:
            position += 1
            gradient = parameter.grad
            if gradient is None:
                continue
            _refuse_gradient(parameter, gradient, name_of, position)
            state = optimizer.state.get(parameter) or {}  # not [], which would add an entry to the defaultdict
            formula = _AMSGRAD if is_amsgrad else kind.formula
            keys = (*kind.states, "max_exp_avg_sq") if is_amsgrad else kind.states
            if formula == _MOMENTUM and not (group["momentum"] and state.get("momentum_buffer") is not None):
                formula, keys = _GRADIENT, ()
            states = [_state_of(parameter, state, key, name_of, position) for key in keys] if state else []
            operands = _alike([gradient, parameter, *states], name_of, position)
            if not state:  # the step would create zeros
                operands += [_zeros_like(operands[0], zeros, optimizer)] * len(keys)
            batch = batches.setdefault((number, formula, operands[0].device), _Batch(group, formula, [], [], []))
            batch.positions.append(position)
            batch.operands.extend(operands)
            batch.states.append(state)
    return list(batches.values())


def _refuse_gradient(parameter: Tensor, gradient: Tensor, name_of: NameOf, i: int) -> None:
    if gradient.layout is not torch.strided:
        raise NotImplementedError(
            f"the gradient of {name_of(i)!r} has the layout {gradient.layout}; expected a dense gradient: make the "
            "module with sparse=False"
        )
    if is_distributed([parameter]) and getattr(gradient, "placements", None) != parameter.placements:  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{name_of(i)!r} and its gradient have different placements; redistribute the gradient first"
        )


def _state_of(parameter: Tensor, state: Mapping[str, Any], key: str, name_of: NameOf, i: int) -> Tensor:
    value = state.get(key)
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        described = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"the optimizer's {key!r} of {name_of(i)!r} is {described}, expected a tensor of shape "
            f"{tuple(parameter.shape)}; its step would fail as well"
        )
    return value


def _alike(tensors: list[Tensor], name_of: NameOf, i: int) -> list[Tensor]:
    """The tensors as plain real tensors that all have the same memory order."""
    if all(type(tensor) in PLAIN_TYPES and tensor.is_contiguous() and not tensor.is_complex() for tensor in tensors):
        return tensors
    plain = readable(tensors, lambda _: name_of(i))
    plain = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in plain]
    return plain if len({tensor.stride() for tensor in plain}) == 1 else [tensor.contiguous() for tensor in plain]


def _zeros_like(tensor: Tensor, zeros: dict[tuple[Any, ...], Tensor], optimizer: Optimizer) -> Tensor:
    """Zeros with the shape and strides of ``tensor``, in memory that all such tensors share."""
    key = (tensor.device, tensor.dtype)
    if key not in zeros:
        most = max(
            shard_of(p).numel() * (1 + p.is_complex()) for group in optimizer.param_groups for p in group["params"]
        )
        zeros[key] = tensor.new_zeros(most)
    return zeros[key].as_strided(tensor.shape, tensor.stride())


def _coefficients_of(kind: _Kind, batch: _Batch) -> Tensor:
    """``[n, len(UPDATE_COEFFICIENTS)]`` float64, on the CPU unless one of the inputs is on a device."""
    group = batch.group
    settings = {name: group[name] for name in ("lr", "weight_decay", *kind.settings)}
    settings["beta1"], settings["beta2"] = group.get("betas", (0.0, 0.0))
    settings["has_momentum"] = batch.formula == _MOMENTUM
    shared = _vector(list(settings.values()))
    counted = _vector([state.get(key, start) for key, start in _COUNTED.items() for state in batch.states])
    home = shared.device if counted.device.type == "cpu" else counted.device
    by = dict(zip(settings, to_device(shared, home).unbind(), strict=True))
    by |= dict(zip(_COUNTED, to_device(counted, home).reshape(len(_COUNTED), -1).unbind(), strict=True))
    of_rule: dict[str, Tensor | float] = {
        "gradient_scale": -1.0 if group["maximize"] else 1.0,
        "weight_decay": 0.0 if group.get("decoupled_weight_decay") else by["weight_decay"],
        "momentum_decay": by["beta1"],
        "momentum_gain": 1 - by["beta1"],
        "second_decay": by["beta2"],
        "second_gain": 1 - by["beta2"],
        "eps": by.get("eps", 0.0),
        "lr": by["lr"],
        **kind.coefficients(by, by["step"] + 1),
    }
    made = torch.empty(len(batch.states), len(_fields.UPDATE_COEFFICIENTS), dtype=torch.float64, device=home)
    for column, name in enumerate(_fields.UPDATE_COEFFICIENTS):
        made[:, column] = of_rule.get(name, _DEFAULT_COEFFICIENTS.get(name, 0.0))
    return made


def _vector(numbers: list[Any]) -> Tensor:
    """Numbers and one-element tensors as one float64 tensor: on a device if any of them is there, without waiting."""
    on_device = [number for number in numbers if isinstance(number, Tensor) and number.device.type != "cpu"]
    if not on_device:
        return torch.tensor([float(number) for number in numbers], dtype=torch.float64, device="cpu")
    if len(on_device) < len(numbers) or len({(number.device, number.dtype) for number in on_device}) > 1:
        home = on_device[0].device
        on_device = [to_device(torch.as_tensor(number, dtype=torch.float64), home) for number in numbers]
    return torch.stack([number.reshape(()) for number in on_device]).to(torch.float64)
