"""`Activations`: the outputs of modules without children, measured in forward hooks, which keep rows only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradstat._core.hooks import Hook, hook_forward
from gradstat._core.nested import tensors_in
from gradstat._core.parameters import NamedParameters
from gradstat.check import stats
from gradstat.monitor.probes.base import HookedProbe, Part, Pending, Watched, measurable
from gradstat.monitor.probes.passes import PassRows
from gradstat.monitor.segments import PendingRows, Segment


class Activations(HookedProbe):
    watch = "activations"

    def __init__(self, watched: Watched) -> None:
        modules = list(watched.model.named_modules())
        hooks = {Hook(self.measure, name): one for name, one in modules if name and next(one.children(), None) is None}
        super().__init__(watched, {hook: hook_forward(module, hook) for hook, module in hooks.items()})
        self._backend, self._rows = watched.settings.options.backend, PassRows()
        self._order = {name: i for i, (name, _) in enumerate(modules)}

    def measure(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [t for _, t in tensors_in(output, "") if measurable(t) and t.numel()]
        if not tensors:
            return
        with torch.no_grad():
            self._rows.add(name, stats([tensor.detach() for tensor in tensors], backend=self._backend), tensors)

    def take(self, step: Pending, named: NamedParameters) -> Iterable[Part]:
        names, measured = self._rows.take(self._order.__getitem__)
        if measured.tables:
            step.numbers.append(PendingRows([Segment("activation", names)], measured))
        return ()
