"""The user's options for the monitors of a training, validated before a monitor is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from gradstat._core.parameters import Parameters
from gradstat.adaptive._base import checked_limit
from gradstat.monitor import POLICIES, Finding, Monitor, default_rules
from gradstat.monitor.arguments import refuse_unknown
from gradstat.monitor.kinds import asked_for
from gradstat.monitor.policies import Policies, Policy, PolicyTable

COLLECTIVE_POLICIES = ("replay", "checkpoint")
"""Policies that a monitor only requests; the adapter carries them out, on all ranks together."""


class Options:
    """Arguments of `gradstat.Monitor`, except for model, optimizer and scaler, which come from ``source``.

    ``runs_steps``: the framework's own step can be run again, so a replay needs no function. ``saves``: the policy
    ``"checkpoint"`` exists. ``healthy_checkpoints``: no checkpoint is saved while a monitor is not healthy. ``caller``
    is named in errors. Raises TypeError or ValueError as `gradstat.Monitor` does.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        source: str,
        max_norm: Any = None,
        runs_steps: bool = False,
        saves: bool = False,
        healthy_checkpoints: bool = False,
        caller: Callable[..., Any] = Monitor,
    ) -> None:
        self.healthy_checkpoints = healthy_checkpoints
        for name in ("model", "optimizer", "scaler"):
            if name in arguments:
                raise TypeError(f"{name} is taken from the {source}; leave it out")
        refuse_unknown(arguments, caller, Monitor)
        self.max_norm, self.runs_steps = checked_limit(max_norm), runs_steps
        self.arguments = dict(arguments)
        self.arguments["rules"] = default_rules() if arguments.get("rules") is None else list(arguments["rules"])
        policies = (*POLICIES, "checkpoint") if saves else POLICIES
        self.table = PolicyTable(
            arguments.get("on_anomaly"), [getattr(rule, "name", "") for rule in self.arguments["rules"]], policies
        )
        self.policies = {name for name in policies if self.table.uses(name)}
        self.watch = asked_for(arguments.get("watch"))
        self.tracks_origin = bool(self.watch.get("origin"))
        # A monitor of a stand-in model raises for invalid arguments now; making the model draws no random numbers.
        model = Parameters([("weight", nn.Parameter(torch.zeros(1, device="cpu")))])
        tried = {**self.arguments, "on_anomaly": self.on_anomaly(set()), "save_to": None}
        tried["watch"] = {**self.watch, "origin": 0}
        tried.pop("replay", None)  # the function belongs to the real model
        tried.setdefault("max_norm", self.max_norm)
        Monitor(model, torch.optim.SGD(model.parameters(), lr=0.0), **tried).detach()
        if "replay" in self.policies and not runs_steps and not callable(arguments.get("replay")):
            raise TypeError("on_anomaly='replay' needs the function that runs a step: install(..., replay=step_fn)")
        self.replays = bool(arguments.get("replay")) or "replay" in self.policies

    def on_anomaly(self, requested: set[str]) -> Policies:
        """``on_anomaly`` for a monitor; `COLLECTIVE_POLICIES` become functions that add names to ``requested``."""

        def asked(policy: Policy) -> Policy:
            if isinstance(policy, str) and policy in COLLECTIVE_POLICIES:
                return partial(_request, requested, policy)
            return policy

        return {key: list(map(asked, policies)) for key, policies in self.table._by.items()}


def _request(requested: set[str], policy: str, monitor: Monitor, finding: Finding) -> None:
    if policy != "replay" or finding.step >= monitor.steps - 1:  # an older step cannot be run again
        requested.add(policy)
