"""`OptimizerSteps`: which gradients an optimizer steps with, and whether it has the parameters that a model has."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradstat._core.hooks import Hook
from gradstat._core.parameters import NamedParameters
from gradstat._step.optimizers import unwrapped
from gradstat.monitor.probes.base import Pending, Probe, Run
from gradstat.monitor.probes.gradients import FollowedGradient

# References to all optimizers that are watched, or have stepped beside one that is, since several may share a model. A
# set of them, unlike a WeakSet, can be listed while another thread adds one.
_optimizers: set[weakref.ref[Optimizer]] = set()

_ASKED = 3  # steps after each look


class OptimizerSteps(Probe):
    """Hears the steps of an optimizer, and compares it with the watched parameters.

    It notes the scalar ``"not_zeroed"`` if the optimizer steps with gradients that contain those of its last step.

    Attributes:
        has_other_optimizer: Whether an optimizer has stepped that has none of the watched parameters.
    """

    watch = "optimizer"
    early = frozenset({1})  # when each optimizer of a model has stepped once

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        assert run.settings.optimizer is not None
        self._optimizer = run.settings.optimizer
        _optimizers.add(weakref.ref(self._optimizer, _optimizers.discard))
        self._gradient = FollowedGradient()
        self.has_other_optimizer = False
        self._steps = 0
        self._all_steps, self._age, self._asks_age = 0, math.inf, 0
        self._is_restored = False  # the state, by a rollback or a resumption
        self._momentum: weakref.ref[Tensor] | None = None  # of the followed parameter
        self._renewals = 0
        self._is_alone = True  # no other optimizer has stepped
        self._stepping = unwrapped(self._optimizer)  # the one that hooks get
        self._watched, self._trained = set[int](), set[int]()
        self._steps_beside, self._beside = 0, ""  # steps of another optimizer of the same parameters, and its class
        self._trainable = {id(p) for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad}
        self.handles += register_optimizer_step_post_hook(Hook(self._has_stepped)), self._gradient

    @classmethod
    def of(cls, run: Run) -> OptimizerSteps | None:
        return None if run.settings.optimizer is None else cls(run)

    # Steps -----------------------------------------------------------------------------------------------

    def _has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer is not self._stepping:
            self._is_alone = False
            if weakref.ref(optimizer) not in _optimizers:
                _optimizers.add(weakref.ref(optimizer, _optimizers.discard))
            group = optimizer.param_groups[0]
            first = id(next(iter(group["params"]), None))  # enough, and not a loop over all in each step
            if self._watched and group["params"] and first not in self._watched:
                self.has_other_optimizer = True
            # A wrapper, as of Lookahead, has the same groups.
            elif first in self._trained and group is not self._stepping.param_groups[0]:
                self._steps_beside, self._beside = self._steps_beside + 1, type(optimizer).__name__
            return
        self._steps += 1
        self._all_steps += 1
        parameter = self._gradient.parameter
        if self._asks_age and parameter is not None:
            self._ask_age(optimizer.state.get(parameter, {}))
        self.run.noted.pop("not_zeroed", None)
        if self._gradient.use():
            self.run.noted["not_zeroed"] = 1.0

    def _ask_age(self, state: Mapping[str, Any]) -> None:
        """Notes how many steps a parameter's ``state`` counts: one, if three steps in a row made its momentum anew.

        SGD has no counter, but keeps the tensor.
        """
        self._asks_age -= 1
        momentum = state.get("momentum_buffer") if type(self._stepping) is optim.SGD else None
        if isinstance(momentum, Tensor):
            self._renewals = 0 if self._momentum is not None and self._momentum() is momentum else self._renewals + 1
            self._momentum = weakref.ref(momentum)
            self._age = 1.0 if self._renewals >= _ASKED else math.inf
        else:
            self._age, self._asks_age = _age_of(state), 0

    # Coverage --------------------------------------------------------------------------------------------

    def begin(self, step: Pending, named: NamedParameters) -> None:
        # Gradients of the last parameters are usually complete first, before others of the same bucket change.
        self._watched, self._trained = set(map(id, named.parameters)), ids_of(self._optimizer)
        if hasattr(self._stepping, "_optimizer_step_post_hooks"):  # else it has not called torch's __init__
            self._gradient.follow([p for p in named.parameters[::-1] if id(p) in self._trained])
        if self.period:
            self.take(step, named)

    def take(self, step: Pending, named: NamedParameters) -> None:
        changes = self._gradient.changes()
        if self.run.source.is_loop and self._is_alone and self._all_steps:
            self._gradient.observe_unused(step)
        coverage = self._coverage(named)
        # Before its first step, others, which may have the rest, have not stepped either.
        is_known = self._all_steps > 0 or step.step >= self.period
        coverage = coverage._replace(
            left_out=coverage.left_out if is_known else [],
            steps=self._steps, changes=changes, age=self._age, all_steps=self._all_steps,
            steps_beside=self._steps_beside, beside=self._beside,
        )  # fmt: skip
        self._steps, self._steps_beside, self._asks_age = 0, 0, _ASKED
        step.observe("coverage", coverage)

    def _coverage(self, named: NamedParameters) -> Coverage:
        """Compares the optimizer with the watched parameters."""
        groups, pairs = self._optimizer.param_groups, list(zip(named.names(), named.parameters, strict=True))
        trained, watched = ids_of(self._optimizer), set(map(id, named.parameters))
        untrained = [(name, id(p)) for name, p in pairs if not p.requires_grad]
        frozen = [(name, key) for name, key in untrained if key in trained]
        anywhere = trained if watched <= trained else trained | ids_of_all()
        lacking = [(name, p) for name, p in pairs if p.requires_grad and id(p) not in anywhere]
        besides = list(self.run.trained.besides._parameters)
        if besides and next(self.run.trained.model.parameters(), None) is None:
            besides = []  # nothing is besides the model if there is none
        return Coverage(
            left_out=[name for name, parameter in lacking if parameter.grad is not None],
            unused=[name for name, parameter in lacking if parameter.grad is None],
            frozen=[name for name, _ in frozen],
            frozen_since=[name for name, key in frozen if key in self._trainable],
            asleep=[name for name, key in untrained if key not in trained],
            unknown=[
                f"param_groups[{g}]['params'][{i}]"
                for g, group in enumerate(groups if not trained <= watched else ())
                for i, parameter in enumerate(group["params"])
                if id(parameter) not in watched and parameter.grad is None
            ],
            besides=besides,
        )

    def settings(self) -> dict[str, float]:
        """Settings of its groups by name, and how many steps its state counts, 0 if it was cleared.

        A state that was restored counts other steps than before, so it is left out once.
        """
        settings = {
            f"{name} of group {i}": float(value)
            for i, group in enumerate(self._optimizer.param_groups)
            for name in ("weight_decay", "eps", "momentum", "beta1", "beta2")
            if isinstance(value := _setting(group, name), int | float)
        }
        if self._all_steps and not self._is_restored:
            # The most, since a parameter may rest, or be added later: 0.8 ms for 1,000 of them, once per review.
            age = max(map(_age_of, self._stepping.state.values()), default=0)
            settings |= {"step counter in the optimizer's state": age} if math.isfinite(age) else {}
        self._is_restored = False
        return settings

    def forget(self) -> None:
        self._is_restored = True


class Coverage(NamedTuple):
    """Names of parameters for which model and optimizer do not agree."""

    left_out: list[str]  # with a gradient, but in no optimizer
    unused: list[str]  # without a gradient and in no optimizer, such as a target network's
    frozen: list[str]  # frozen, but in the optimizer
    unknown: list[str]  # in the optimizer, not watched, and without a gradient
    besides: list[str]  # in the optimizer and watched, but not the model's
    frozen_since: Sequence[str] = ()  # of the frozen ones, those that were trainable when the monitor was made
    steps: int = 0  # that the optimizer has taken since the last look, as far as known
    changes: int = 0  # in place since then, of one of its parameters
    steps_beside: int = 0  # steps since then of another optimizer of the same parameters
    beside: str = ""  # its class
    age: float = math.inf  # the steps that its states count, right after the last look; infinity if not known
    all_steps: int = 0  # that it has taken since the monitor was made
    asleep: Sequence[str] = ()  # frozen, and not in the optimizer


def _age_of(state: Any) -> float:
    """How many steps a parameter's state counts, if it does so on the host, where reading it waits for nothing."""
    steps = state.get("step") if isinstance(state, Mapping) else None
    if isinstance(steps, Tensor):
        steps = float(steps) if steps.is_cpu and steps.numel() == 1 else None
    return float(steps) if isinstance(steps, int | float) else math.inf


def ids_of(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer has."""
    return set().union(*(map(id, group["params"]) for group in optimizer.param_groups))


def ids_of_all() -> set[int]:
    """The ids of the parameters that any watched optimizer has."""
    return set().union(*(ids_of(one) for known in list(_optimizers) if (one := known()) is not None))


# Settings --------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    """A setting of a parameter group as a number; 0 if it is none."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


_STEP_SIZES = (
    ((optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adagrad), "rate"),
    (optim.SGD, "gradient"),
)


def _setting(group: Mapping[str, Any], name: str) -> Any:
    """A setting of a group of an optimizer; None if it has none of this ``name``."""
    if name.startswith("beta"):
        return dict(zip(("beta1", "beta2"), _betas(group), strict=False)).get(name)
    return group.get(name)


def _betas(group: Mapping[str, Any]) -> Sequence[Any]:
    betas = group.get("betas")
    return betas if isinstance(betas, tuple | list) else ()


def optimizer_settings(optimizer: Optimizer | None) -> dict[str, Any]:
    """The fields of `RunSettings` that describe an optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    makers = [kind.__module__ for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    is_torchs = bool(makers) and makers[0].startswith("torch.")
    momenta, given = [0.0], list[Any]()
    for group in groups:
        first, *others = _betas(group) or (group.get("momentum"), None)
        momenta.append(_number(first))
        given += [group.get("alpha", group.get("rho")) if other is None else other for other in others]
    decays = list(map(_number, given))
    sizes = [size for kinds, size in _STEP_SIZES if is_torchs and isinstance(optimizer, kinds)]
    if sizes == ["rate"] and any(_number(group.get("momentum")) for group in groups):
        sizes = []  # RMSprop's, whose momentum is of steps, and not of gradients
    are_added = sizes == ["rate"] and not any(group.get("decoupled_weight_decay") for group in groups)
    return {
        "optimizer_eps": _number(groups[0].get("eps")) if groups else 0.0,
        "momentum": max(momenta),
        # Per step (beta2), the smallest of all groups; 0 if one is not known.
        "second_moment_decay": min(decays) if is_torchs and decays and all(0 < decay < 1 for decay in decays) else 0.0,
        "least_decay": min((float(one) for one in given if is_torchs and isinstance(one, int | float)), default=1.0),
        "step_size": sizes[0] if sizes else "",
        "added_decay": max((_number(group.get("weight_decay")) for group in groups if are_added), default=0.0),
        "maximizes": any(group.get("maximize") is True for group in groups),
        "initial_lrs": tuple(_number(group.get("max_lr", group.get("initial_lr"))) for group in groups),
    }
