"""Runs a Lightning training step again, from kept batches and random states, the way Lightning calls it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradstat.monitor.replay import RngState
from gradstat.patch import Layer


class StepReplay:
    """Runs ``training_step`` and the backward pass of the newest step again, accumulated micro-batches included.

    This rank runs alone, outside of DDP: a NaN of another rank is found by the replay there. Nothing is logged
    meanwhile; metrics that ``training_step`` updates are updated once more.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._noted: list[tuple[Any, int, RngState]] = []
        parameters = inspect.signature(module.training_step).parameters
        if "dataloader_iter" in parameters:
            raise ValueError(
                "on_anomaly='replay' needs training_step(batch, batch_idx); this module's takes dataloader_iter, which "
                "cannot be rewound"
            )
        positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._takes_index = len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())

    def note(self, batch: Any, batch_idx: int) -> None:
        """Keeps a micro-batch that is about to run."""
        self._noted.append((batch, batch_idx, RngState.capture()))

    def forget(self) -> None:
        """Drops the kept micro-batches, as the step is over."""
        self._noted = []

    def __call__(self) -> list[Any]:
        """Runs the step again; returns its scaled losses."""
        module, plugin, strategy = self._module, self._trainer.precision_plugin, self._trainer.strategy
        run = module.training_step
        if strategy.model is not module:
            # Lightning calls training_step of a wrapped module through forward(), so that hooks run; do the same here.
            run = functools.partial(strategy._forward_redirection, module, module, "training_step")
        scaler = getattr(plugin, "scaler", None)
        losses = []
        with contextlib.ExitStack() as afterwards:
            for name in ("log", "log_dict"):
                afterwards.callback(Layer(module, name, lambda *_, **__: None).remove)
            for batch, batch_idx, rng in self._noted:
                rng.restore()
                with plugin.train_step_context():
                    output = run(*((batch, batch_idx) if self._takes_index else (batch,)))
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    continue  # training_step skipped this micro-batch
                loss = loss / self._trainer.accumulate_grad_batches
                if scaler is not None:
                    loss = scaler.scale(loss)
                losses.append(loss)
                module.backward(loss)
        return losses
