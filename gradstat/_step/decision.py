"""Decides whether the coming step of an optimizer is skipped: the one place that all requests go to.

A monitor requests it once it has measured the gradients. `guarded_step` takes the requests into its own verdict; any
other step carries them out itself, in hooks of torch's optimizers: a fused optimizer gets the flag on the device
(``found_inf``, as from a loss scaler), without a sync; for any other the flag is read, one host sync, and the gradients
are set to None if the step is to be skipped.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradstat._core import announce, norms
from gradstat._core.backends import resolve
from gradstat._core.host_copy import streams_of
from gradstat._core.tensors import to_device
from gradstat._step import optimizers
from gradstat.guard import SpikeGuard, begin, decide


class SkipRequest(NamedTuple):
    flag: Tensor  # 0-d float32 on the device: 1 to skip, else 0
    guard: SpikeGuard | None = None  # the guard that has judged the step, if one has
    reason: Tensor | None = None  # and why, as in `norms.REASON`


class _Step:
    """What is known about the coming or running step of one optimizer."""

    def __init__(self) -> None:
        # By requester: a later request of the same one replaces the earlier.
        self.requests: weakref.WeakKeyDictionary[object, SkipRequest] = weakref.WeakKeyDictionary()
        self.is_taken = False  # `guarded_step` carries out the requests
        self.found_inf: list[Tensor | None] = []  # what the attribute was before the flag of a request replaced it


_steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()


def request(optimizer: Optimizer, by: object, wish: SkipRequest | None) -> None:
    """Asks for the coming step to be skipped, or (None) withdraws what ``by`` has asked for.

    A request made within the closure of a step, which computes the gradients, is carried out after it.
    """
    optimizer = optimizers.unwrapped(optimizer)  # the one that torch's hooks get
    step = _step_of(optimizer)
    if wish is None:
        step.requests.pop(by, None)
    else:
        step.requests[by] = wish


@torch.no_grad()
def judged(
    guard: SpikeGuard, optimizer: Optimizer, norm: Tensor, flag: Tensor, loss: Any, backend: str | None
) -> SkipRequest:
    """What ``guard`` asks for a step whose gradients have this norm, 0-d; ``flag`` is as in `SkipRequest`. No sync."""
    if loss is not None and not isinstance(loss, Tensor):
        loss = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    given = norms.Decision.unclipped(norm, flag)
    kernels = resolve(backend, flag.device.type)
    begin(guard, optimizer)
    verdict = decide(guard, kernels, given.scaling, given.verdict, loss, None, streams_of([flag]))
    return SkipRequest(verdict[norms.SKIP], guard, verdict[norms.REASON])


@contextlib.contextmanager
def taking(optimizer: Optimizer) -> Iterator[None]:
    """A context in which the caller takes the requests, also those made while ``optimizer.step`` runs."""
    step = _step_of(optimizers.unwrapped(optimizer))
    step.is_taken = True
    try:
        yield
    finally:
        step.is_taken = False


def _step_of(optimizer: Optimizer) -> _Step:
    install_hooks()
    return _steps.setdefault(optimizer, _Step())


def take(optimizer: Optimizer, guard: SpikeGuard | None = None) -> SkipRequest | None:
    """All requests for the coming step as one, which the caller now has to carry out; None if there is none.

    RuntimeError if two guards have judged the same step, or another than ``guard`` has.
    """
    step = _steps.get(optimizers.unwrapped(optimizer)) if _steps else None
    if step is None or not step.requests:
        return None
    requests = list(step.requests.values())
    step.requests.clear()
    guards = {one.guard: one for one in requests if one.guard is not None}
    judges = dict.fromkeys(one for one in (*guards, guard) if one is not None)
    if len(judges) > 1:
        raise RuntimeError(
            f"two guards judge one step of this optimizer: {' and '.join(map(repr, judges))}; use one of them, or pass "
            "the same guard to the monitor and to guarded_step"
        )
    judged = next(iter(guards.values()), requests[0])
    home = judged.flag.device
    flags = [to_device(one.flag, home) for one in requests]
    return judged._replace(flag=flags[0] if len(flags) == 1 else torch.stack(flags).amax())


def carry_out(optimizer: Optimizer) -> None:
    """Skips the step of an optimizer that is about to begin, or whose closure has just computed the gradients.

    It is also called before a clip of that step, so that no skipped step is clipped. Does nothing without a request.
    """
    step = _steps.get(optimizer)
    wish = None if step is None or step.is_taken else take(optimizer)
    if step is None or wish is None:
        return
    if optimizers.honors_found_inf(optimizer) and not optimizers.first_momentum_is_at_risk(optimizer):
        of_scaler: Tensor | None = getattr(optimizer, "found_inf", None)  # of a loss scaler
        step.found_inf.append(of_scaler)
        flag = wish.flag if of_scaler is None else torch.maximum(to_device(of_scaler, wish.flag.device), wish.flag)
        optimizer.found_inf = flag  # type: ignore[attr-defined]
    elif wish.flag.item():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Announces the step, so that its watchers may make requests, and carries these out."""
    if torch.compiler.is_compiling():
        return None
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)  # torch passes the optimizer itself first
    closure = given if callable(given) else None
    failed = _steps.get(optimizer)
    if failed is not None:
        _restore(optimizer, failed)
    chosen = announce.step_begins(optimizer, closure)
    carry_out(optimizer)
    if chosen is not None and optimizer in _steps:
        evaluate = chosen

        def evaluated() -> Any:
            loss = evaluate()
            carry_out(optimizer)
            return loss

        chosen = evaluated
    if chosen is closure:
        return None
    if "closure" in kwargs:
        return args, {**kwargs, "closure": chosen}
    return (args[0], chosen, *args[2:]), kwargs


def _end(optimizer: Optimizer, *_: object) -> None:
    step = _steps.get(optimizer)
    if step is not None:
        _restore(optimizer, step)
    announce.step_ended(optimizer)


def _restore(optimizer: Optimizer, step: _Step) -> None:
    if step.found_inf:
        of_scaler = step.found_inf[0]
        step.found_inf.clear()
        optimizer.__dict__.pop("found_inf", None)
        if of_scaler is not None:
            optimizer.found_inf = of_scaler  # type: ignore[attr-defined]


@functools.cache
def install_hooks() -> None:
    """Installs torch's global hooks, once per process: hooks of one optimizer would be copied and pickled with it."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
