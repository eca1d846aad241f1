"""Checks the arguments of a monitor before anything is changed: each by itself, and those that exclude each other."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from gradstat._core.engines import Engine, engine_of
from gradstat._core.text import expect
from gradstat._step.loss_scale import inner_scaler
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import Limit, checked_limit
from gradstat.guard import SpikeGuard
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.policies import POLICIES, Policies, PolicyTable
from gradstat.recording.kinds import asked_for, periods
from gradstat.replay.rerun import takes_batch
from gradstat.rules import default_rules
from gradstat.rules.base import Rule


class Settings(NamedTuple):
    """What a monitor's arguments say: `of` checks them before there is a model, `with_model` with it."""

    rules: list[Rule]
    policies: PolicyTable
    periods: dict[str, int]
    asked: frozenset[str]  # the keys that ``watch`` names itself
    limit: Limit | None
    num_classes: int | Mapping[str, int] | None
    guard: SpikeGuard | None
    options: MonitorOptions
    engine: Engine | None = None
    optimizer: Optimizer | None = None  # the engine's, if there is one

    @classmethod
    def of(
        cls,
        *,
        on_anomaly: Policies = None,
        watch: Mapping[str, int] | Sequence[str] | None = None,
        rules: Iterable[Rule] | None = None,
        max_norm: float | AdaptiveClip | None = None,
        num_classes: int | Mapping[str, int] | None = None,
        guard: SpikeGuard | None = None,
        options: MonitorOptions | Mapping[str, Any] | None = None,
        saves: bool = False,
    ) -> Settings:
        """Checks arguments of `gradstat.Monitor`; ``saves`` says that the policy ``"checkpoint"`` exists.

        Raises TypeError or ValueError as `gradstat.Monitor` does.
        """
        expect("rules", rules, Iterable | None, "a list of rules or None")
        listed: list[Any] = default_rules() if rules is None else list(rules)
        for rule in listed:
            if not isinstance(rule, Rule):
                hint = "; that is a class, make an instance of it" if isinstance(rule, type) else ""
                raise TypeError(f"rules: expected instances of gradstat.monitor.Rule, got {rule!r}{hint}")
        expect("guard", guard, SpikeGuard | None, "a gradstat.SpikeGuard")
        if guard is not None and guard.scales:
            raise ValueError("a monitor can skip steps but not scale them down; make the guard without scale=")
        counts: list[Any] = (
            [*num_classes.values()] if isinstance(num_classes, Mapping) else [num_classes] * (num_classes is not None)
        )
        if any(type(number) is not int or number < 1 for number in counts):
            raise ValueError(
                f"num_classes is {num_classes!r}; expected an integer of at least 1, or a dict of them by path"
            )
        table = PolicyTable(on_anomaly, [rule.name for rule in listed], (*POLICIES, *["checkpoint"] * saves))
        limit = checked_limit(max_norm)
        chosen = periods(watch)
        asked = frozenset(name for name, period in asked_for(watch).items() if period)
        return cls(listed, table, chosen, asked, limit, num_classes, guard, MonitorOptions.of(options))

    def with_model(
        self, model: nn.Module, optimizer: Optimizer | None, scaler: Any, replay: object, runs_steps: bool
    ) -> Settings:
        """The settings for this model and optimizer; ``runs_steps``: steps can be replayed without a function.

        Raises TypeError, ValueError or NotImplementedError if they do not go together.
        """
        expect("model", model, nn.Module, "a torch.nn.Module")
        expect("optimizer", optimizer, Optimizer | None, "a torch.optim.Optimizer or None")
        engine, watched = engine_of(model), self.periods
        if engine is not None:
            check_engine_options(engine, optimizer, self.guard, self.policies, replay, watched)
            optimizer, watched = engine.optimizer, {**watched, "optimizer": 0}  # its states are sharded as well
        check_guard(self.guard, optimizer, scaler)
        check_policies(self.policies, optimizer, replay, runs_steps)
        return self._replace(periods=watched, engine=engine, optimizer=optimizer)

    @property
    def skipped_by(self) -> str:
        """What of the monitor skips steps with gradients that are not finite, in words; empty if nothing does."""
        skips = self.policies.uses("skip") or self.guard is not None
        return "" if not skips else "the policy 'skip'" if self.guard is None else "the guard"

    @property
    def remedies(self) -> set[str]:
        """Those of `gradstat.rules.advice` that are in use already."""
        used = [policy for policy in ("replay", "rollback") if self.policies.uses(policy)]
        return {*used, *["activations"] * bool(self.periods["activations"]), *["clip"] * (self.limit is not None)}


def refuse_unknown(names: Iterable[str], caller: Callable[..., Any], monitor: Callable[..., Any]) -> None:
    """Raises TypeError for an argument that neither ``caller`` nor the monitor it makes takes."""
    parameters = [p for made in (caller, monitor) for p in inspect.signature(made).parameters.values()]
    known = list(dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD))
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise TypeError(f"{caller.__name__}() has no argument {name!r}; {hint}")


def check_guard(guard: SpikeGuard | None, optimizer: object, scaler: Any) -> None:
    """Raises TypeError or ValueError if ``guard`` cannot be used with the optimizer and the scaler."""
    if guard is None:
        return
    if optimizer is None:
        raise TypeError("a guard needs the optimizer: gradstat.Monitor(model, optimizer, guard=...)")
    scaler = inner_scaler(scaler)
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "a monitor's guard cannot be used with a loss scaler, which skips steps by itself; use "
            "gradstat.guarded_step(optimizer, scaler=scaler, loss=loss, guard=guard)"
        )


def check_policies(policies: PolicyTable, optimizer: object, replay: object, runs_steps: bool) -> None:
    """Raises TypeError if a policy lacks what it acts with."""
    if policies.uses("skip") and optimizer is None:
        raise TypeError("on_anomaly='skip' needs the optimizer: gradstat.Monitor(model, optimizer, ...)")
    if policies.uses("replay") and not callable(replay) and not runs_steps:
        raise TypeError(
            "on_anomaly='replay' needs replay=step_fn, a function that runs forward and backward of a step once more: "
            "def step_fn(batch): loss = ...; loss.backward()"
        )
    if callable(replay):
        takes_batch(replay)


def check_engine_options(
    engine: Engine, optimizer: object, guard: object, policies: PolicyTable, replay: object, watch: Mapping[str, int]
) -> None:
    """Refuses what an engine does by itself: TypeError for an optimizer, NotImplementedError for other options."""
    chosen = [policy for policy in ("skip", "rollback", "replay") if policies.uses(policy)]
    chosen += ["replay"] * bool(replay) + ["guard"] * (guard is not None)
    if chosen:
        raise NotImplementedError(
            f"{chosen[0]!r} is not supported with {engine.name}, which clips, skips and steps by itself; use "
            "'warn', 'raise', 'stop' or 'snapshot'"
        )
    if watch["updates"]:
        raise NotImplementedError(f"watch={{'updates': ...}} is not supported with {engine.name}, which may shard them")
    if optimizer is not None:
        raise TypeError(
            f"optimizer: expected None with {engine.name}, whose optimizer is used: gradstat.Monitor(model)"
        )
