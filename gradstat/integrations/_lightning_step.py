"""A Lightning training step, kept so that it can run again: batches, random states, and how Lightning calls it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from gradstat.monitor.replay import RngState


class _MicroBatch(NamedTuple):
    batch: Any
    batch_idx: int
    rng: RngState


class StepAgain:
    """Runs ``training_step`` and the backward pass of the newest step again, accumulated micro-batches included.

    The module runs on this rank alone, outside of DDP: the gradients are this rank's, so a NaN that came from another
    rank is found by the replay there. Nothing is logged meanwhile. Metrics that ``training_step`` updates are updated
    once more.

    Args:
        trainer, module: Lightning's.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._held: list[_MicroBatch] = []
        parameters = inspect.signature(module.training_step).parameters
        if "dataloader_iter" in parameters:
            raise ValueError(
                "on_anomaly='replay' needs training_step(batch, batch_idx); this module's takes dataloader_iter, which "
                "cannot be gone back in"
            )
        positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._takes_index = len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())

    def note(self, batch: Any, batch_idx: int) -> None:
        """A micro-batch is about to run."""
        self._held.append(_MicroBatch(batch, batch_idx, RngState.capture()))

    def forget(self) -> None:
        """The step is over."""
        self._held = []

    def __call__(self) -> list[Any]:
        """The step once more; the losses, with the loss scale."""
        module, plugin = self._module, self._trainer.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        losses = []
        with _silent(module):
            for one in self._held:
                one.rng.restore()
                with plugin.train_step_context():
                    output = self._call(one)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    continue  # a micro-batch that training_step passed over
                loss = loss / self._trainer.accumulate_grad_batches
                if scaler is not None:
                    loss = scaler.scale(loss)
                losses.append(loss)
                module.backward(loss)
        return losses

    def _call(self, one: _MicroBatch) -> Any:
        module = self._module
        arguments = (one.batch, one.batch_idx) if self._takes_index else (one.batch,)
        if self._trainer.strategy.model is module:
            return module.training_step(*arguments)
        # A wrapped module is entered through its forward, which hooks on it have seen; so they see it here.
        held = {name: module.__dict__[name] for name in ("forward",) if name in module.__dict__}

        def leave() -> None:
            module.__dict__.pop("forward", None)
            module.__dict__.update(held)

        def entered(*args: Any) -> Any:
            leave()
            return module.training_step(*args)

        module.__dict__["forward"] = entered
        try:
            return module(*arguments)
        finally:
            leave()


@contextlib.contextmanager
def _silent(module: Any) -> Iterator[None]:
    """What the module logs goes nowhere."""
    names = ("log", "log_dict")
    for name in names:
        module.__dict__[name] = _nothing
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)


def _nothing(*_: Any, **__: Any) -> None:
    return None
