"""`Restored`: what a run holds when its state is saved, and again in the first step after that state was loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradstat import _fields
from gradstat._core.hooks import Hook
from gradstat._core.host_copy import HostRows
from gradstat._core.measure import measure
from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_distributed
from gradstat._core.wrappers import rank_and_size
from gradstat._step.optimizers import unwrapped
from gradstat.monitor.probes.base import Pending, Probe, Run, is_plain
from gradstat.monitor.probes.optimizer import ids_of
from gradstat.monitor.probes.state import every_state_of
from gradstat.rules.contents import Contents
from gradstat.tensor_stats import l2_norm_of

_MEASURED = [_fields.INDEX[name] for name in ("sum", "min", "max")]


class Restored(Probe):
    """Measures what the run holds: when its state is saved, and in the first step after it was loaded.

    These are the parameters that are trained, and the states that their optimizer keeps. Not buffers, which a forward
    pass changes. Nothing that is sharded, which another rank may load, or another number of ranks.
    """

    lost = "parameters and optimizer states could not be compared with those of the loaded state"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.period = 0
        self._expected: tuple[int, Contents] | None = None
        self._stepped: set[int] = set()  # ids of the parameters that an optimizer has changed since then

    def expect(self, step: int, contents: Contents) -> None:
        """In ``step``, the next one, the run should hold these ``contents``."""
        self._expected = step, contents
        # The optimizer of another model may step before, as that of a GAN's discriminator.
        self.handles.append(register_optimizer_step_post_hook(Hook(self._has_stepped)))

    def _has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped |= ids_of(optimizer)

    def is_due(self, step: int) -> bool:
        return self._expected is not None and step == self._expected[0]

    def take(self, step: Pending, named: NamedParameters) -> None:
        if self._expected is not None:
            (_, before), now = self._expected, self.measure(named)
            step.late["restored"] = lambda: (before, now())
            self.forget()

    def measure(self, named: NamedParameters) -> Callable[[], Contents]:
        """Measures the contents now; returns what waits for them."""
        kinds, names, tensors = [], [], []
        for kind, name, tensor in self._held(named):
            if is_plain(tensor):
                kinds.append(kind)
                names.append(name)
                tensors.append(tensor.detach())
        rows = HostRows(measure(tensors, names.__getitem__, self.run.settings.options.backend))
        precision = [torch.finfo(tensor.dtype) for tensor in tensors]
        of_dtypes = [(t.numel(), p.eps, p.eps * p.smallest_normal) for t, p in zip(tensors, precision, strict=True)]
        optimizer = self.run.settings.optimizer
        maker = "" if optimizer is None else type(unwrapped(optimizer)).__name__
        rank, ranks = rank_and_size()

        def contents() -> Contents:
            table = rows.table()
            columns = np.array(of_dtypes).reshape(len(names), 3), l2_norm_of(table)[:, None], table[:, _MEASURED]
            return Contents(tuple(kinds), tuple(names), np.hstack(columns), maker, rank, ranks)

        return contents

    def _held(self, named: NamedParameters) -> Iterator[tuple[str, str, Tensor]]:
        """Kind, name and tensor of what is trained; nothing if it is sharded."""
        optimizer = self.run.settings.optimizer
        trained = set(map(id, named.parameters)) if optimizer is None else ids_of(optimizer)
        if named.engine is not None or is_distributed(named.parameters):
            return

        def is_trained(parameter: Tensor) -> bool:
            return parameter.requires_grad and id(parameter) in trained and id(parameter) not in self._stepped

        for name, parameter in zip(named.names(), named.parameters, strict=True):
            if is_trained(parameter):
                yield "parameter", name, parameter
        for key, name, parameter, state in () if optimizer is None else every_state_of(optimizer, named):
            if is_trained(parameter):
                yield key, name, state

    def forget(self) -> None:
        self._expected, self._stepped = None, set()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
