"""`Activations`; and what probes of forward passes share: which module is called, and rows merged over passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradstat import _fields
from gradstat._core.hooks import Hook, hook_forward
from gradstat._core.host_copy import peek_interpreter_stack
from gradstat._core.measurement import Measurement
from gradstat._core.nested import tensors_in
from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import TensorInfo
from gradstat.check import stats
from gradstat.monitor.probes.base import HookedProbe, Pending, Run, measurable
from gradstat.monitor.segments import PendingRows, Segment


def called(model: nn.Module) -> nn.Module:
    """The module that a program calls: ``model``, or if it has no forward pass its only child that is trained, if any.

    So it is for a LightningModule whose ``training_step`` calls a child, and for what only holds a model. Of several
    children none is chosen: one may end in an activation because another one follows.
    """
    while not _has_forward(model):
        trained = [child for child in model.children() if any(p.requires_grad for p in child.parameters())]
        if len(trained) != 1:
            break
        (model,) = trained
    return model


def _has_forward(module: nn.Module) -> bool:
    """Whether a module or its class defines a forward pass, other than the one of Lightning that raises."""
    forward = getattr(type(module), "forward", None)
    is_missing = forward is nn.Module.forward or getattr(forward, "__qualname__", "") == "LightningModule.forward"
    return not is_missing or "forward" in vars(module)


class PassRows:
    """Rows of tensors by name, each merged over the passes of a step in which it was measured."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Tensor, TensorInfo]] = {}

    def add(self, name: str, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Adds the rows of the ``tensors`` that one pass had under this name."""
        info, numel = TensorInfo.of(tensors[0]), sum(tensor.numel() for tensor in tensors)
        earlier = self.seen.get(name)
        if earlier is not None and earlier[0].device == rows.device:
            rows, numel = torch.cat([earlier[0], rows]), earlier[1].shape.numel() + numel
        if len(rows) > 1:
            rows = _fields.merge(torch, rows)[None]
            rows[:, _fields.INDEX["first_nonfinite"]] = torch.inf  # it would not say in which of them
            info = TensorInfo(torch.Size([numel]), info.dtype, info.device, None)
        self.seen[name] = rows, info

    def take(self, place: Callable[[str], int] | None = None) -> tuple[tuple[str, ...], Measurement]:
        """The names, sorted by ``place``, and their rows since the last call."""
        seen, self.seen = self.seen, {}
        names = tuple(sorted(seen, key=place))
        return names, Measurement.joined([seen[name][0] for name in names], [seen[name][1] for name in names])


class Activations(HookedProbe):
    """The outputs of modules without children, measured in forward hooks, which keep rows only."""

    watch = "activations"

    def __init__(self, run: Run) -> None:
        modules = list(run.model.named_modules())
        self._hooked = {name: one for name, one in modules if name and next(one.children(), None) is None}
        hooks = {Hook(self.measure, name): one for name, one in self._hooked.items()}
        super().__init__(run, {hook: hook_forward(module, hook) for hook, module in hooks.items()})
        self._rows = PassRows()
        self._order = {name: i for i, (name, _) in enumerate(modules)}

    def measure(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [t for _, t in tensors_in(output, "") if measurable(t) and t.numel()]
        if not tensors or peek_interpreter_stack() is not None:  # a transform's tensors are not kept
            return
        with torch.no_grad():
            self._rows.add(
                name, stats([tensor.detach() for tensor in tensors], backend=self.run.settings.options.backend), tensors
            )

    def take(self, step: Pending, named: NamedParameters) -> None:
        names, measured = self._rows.take(self._order.__getitem__)
        self.tell_unseen(names, self._hooked)
        if measured.tables:
            step.numbers.append(PendingRows.of([Segment("activation", names)], measured))
