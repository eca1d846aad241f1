"""Backward passes whose gradients are measured afterwards, or in hooks, in groups that are still in the cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

import gradstat
from gradstat.bench.steps import Step

GROUP = "in backward"
_GROUP_MIB = (1, 8, 32)


class Backward:
    """A step's backward pass in all variants; `ready`, called before each, makes the loss and installs its hooks."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._hooks = ExitStack()
        self._group: list[Tensor] = []
        self._tables: list[Tensor] = []
        self._install: dict[str, Callable[[], object]] = {
            "backward": lambda: None,
            "backward, gradstat.check": lambda: None,
        }
        for size in _GROUP_MIB:
            self._install[f"hooks, gradstat.stats of {size} MiB"] = partial(self._hook_groups, size << 20)
        self.calls = {name: partial(self._run, name) for name in self._install}

    def ready(self, name: str) -> None:
        self._hooks.close()
        self._step.optimizer.zero_grad()
        self._install[name]()
        self._loss = self._step.loss()

    def _run(self, name: str) -> None:
        self._loss.backward()
        if name.endswith("check"):
            gradstat.check(self._step.model)
        if name.startswith("hooks"):
            self._measure_group()
            torch.cat(self._tables).cpu()  # the transfer that a check needs
            self._tables = []

    def _hook_groups(self, size: int) -> None:
        def see(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._group.append(parameter.grad)
            if sum(gradient.nbytes for gradient in self._group) >= size:
                self._measure_group()

        for parameter in self._step.model.parameters():
            self._hooks.callback(parameter.register_post_accumulate_grad_hook(see).remove)

    def _measure_group(self) -> None:
        if self._group:
            self._tables.append(gradstat.stats(self._group))
            self._group = []
