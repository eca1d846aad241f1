"""`GradstatCallback`: gradient statistics, findings, clipping and policies for Lightning, as one callback."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradstat._core.files import path_of
from gradstat._core.parameters import Parameters
from gradstat._step.loss_scale import require_scale
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._engines import engine_name_of
from gradstat.integrations._handle import Handle, Watched, require_framework, sizes_of
from gradstat.integrations.loggers import AGGREGATES, Choice, log_scalars, scalars_of
from gradstat.monitor import Finding
from gradstat.monitor.probes.optimizer import ids_of
from gradstat.patch import Layer
from gradstat.replay import RngState

__all__ = ["GradstatCallback"]

_PACKAGES = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}


def _callback_classes() -> list[Any]:
    """The callback base class of every Lightning package already imported, else of the first one installed."""
    names = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    names = names or [name for name, root in _PACKAGES.items() if importlib.util.find_spec(root) is not None][:1]
    if not names:
        raise ImportError(
            "gradstat.integrations.lightning needs Lightning, and neither lightning nor pytorch_lightning is "
            "installed; pip install 'gradstat[lightning]'"
        )
    for name in names:
        require_framework(_PACKAGES[name], (2, 4), "lightning")
    return [importlib.import_module(name).Callback for name in names]


class GradstatCallback(Handle, *_callback_classes()):  # type: ignore[misc]
    """Watches a Lightning training with a `gradstat.Monitor`. ::

        Trainer(callbacks=[GradstatCallback(max_norm=1.0)])

    Gradients are measured when they are complete: accumulated, reduced over ranks, before Lightning clips them, and
    with the loss scale divided out. No host sync on a GPU, except for policies that need one (as for the monitor).
    docs/integrations.md compares the trainers.

    If both ``lightning`` and ``pytorch_lightning`` are installed, import the one you use before this module.

    Args:
        max_norm: A number or an adaptive clip, applied before each step in place of ``Trainer(gradient_clip_val=...)``.
            None leaves clipping to Lightning, and the weights keep their bits.
        on_anomaly: As for `gradstat.Monitor`. In addition, ``"checkpoint"`` saves a checkpoint of the trainer.
            ``"stop"`` sets ``trainer.should_stop``; ``"replay"`` runs the training step again. If a policy applies on
            one rank, all ranks carry it out.
        log_every: Interval of logging in steps; None for the trainer's ``log_every_n_steps``, 0 for never.
        aggregates, per_tensor, top, prefix, norms: What to log, as for `gradstat.integrations.loggers.log_report`.
        save_dir: Where ``"checkpoint"`` saves; None for the trainer's folder of checkpoints.
        healthy_checkpoints: Whether ``ModelCheckpoint`` saves nothing while `gradstat.Monitor.is_healthy` is False, so
            that no checkpoint with NaN or Inf replaces the last healthy one.
        options: Further arguments of the monitor: ``rules``, ``watch``, ``save_to``, ``options`` and so on.

    Attributes:
        monitors: One for each optimizer. With several, each watches the parameters of its optimizer only.
        checkpoints: Files that ``"checkpoint"`` saved.

    Raises:
        TypeError, ValueError: An argument is invalid. Settings of the trainer that conflict with those here are
            refused before training starts.
    """

    runs_steps = saves = True

    def __init__(
        self,
        max_norm: float | AdaptiveClip | None = None,
        on_anomaly: Any = None,
        *,
        log_every: int | None = None,
        aggregates: Sequence[str] = AGGREGATES,
        per_tensor: Sequence[str] = (),
        top: int | None = 20,
        prefix: str = "grad/",
        norms: Sequence[str] = (),
        save_dir: str | Path | None = None,
        healthy_checkpoints: bool = False,
        **options: Any,
    ) -> None:
        if log_every is not None and (type(log_every) is not int or log_every < 0):
            raise ValueError(f"log_every is {log_every!r}; expected a number of steps, 0 for never, or None")
        super().__init__({"on_anomaly": on_anomaly, **options}, max_norm, GradstatCallback, healthy_checkpoints)
        self._choice = Choice(aggregates, per_tensor, top, prefix, norms).check()
        self._log_every = log_every
        self._save_dir = None if save_dir is None else path_of(save_dir, "save_dir").absolute()
        self.checkpoints: list[Path] = []
        self._trainer: Any = None
        self._runs_steps = self.replays and not callable(self.arguments.get("replay"))
        self._step_replay: StepReplay | None = None
        self._loaded: tuple[dict[str, Any], bool] | None = None
        self._loss: Tensor | None = None
        self._logged_at: dict[tuple[int, int], int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses conflicting settings."""
        if stage != "fit":
            return
        self._trainer = trainer
        self._refuse(trainer, pl_module)
        remedy = "let Lightning pass Trainer(gradient_clip_val=...) to DeepSpeed, or use FSDP 2 (ModelParallelStrategy)"
        self._prepare(engine_name_of(trainer.strategy), trainer.world_size, trainer.strategy.root_device, remedy)
        for callback in trainer.checkpoint_callbacks:
            for name in ("_save_topk_checkpoint", "_save_last_checkpoint"):  # they also delete old files
                if hasattr(callback, name):
                    self._patch(callback, name, self._in_save)
        self._step_replay = StepReplay(trainer, pl_module) if self._runs_steps else None

    def _in_save(self, original: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces the saving methods of ``ModelCheckpoint``: saves nothing while a checkpoint is withheld."""
        if not self._withholds_checkpoint():
            original(*args, **kwargs)

    def _refuse(self, trainer: Any, module: Any) -> None:
        """Raises, before training starts, for settings that conflict."""
        same = [callback for callback in trainer.callbacks if isinstance(callback, GradstatCallback)]
        if len(same) > 1:
            raise RuntimeError(
                f"expected one GradstatCallback in Trainer(callbacks=...), found {len(same)}; each would measure, clip "
                "and log. Remove all but one (configure_callbacks() of the module may add one, too)"
            )
        if self.max_norm is not None and _clips(trainer):
            how = "norm" if _is_norm(trainer.gradient_clip_algorithm) else "value"
            raise ValueError(
                f"clip configured twice: GradstatCallback(max_norm={self.max_norm!r}) and "
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val!r}), by {how}. Set only one of them"
            )
        if self._runs_steps and not module.automatic_optimization:
            raise ValueError(
                "replay needs a function that runs the step under manual optimization: give the callback "
                "replay=your_function, or call gradstat.monitor.find_culprit(module, your_function)"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the monitors, now that the optimizers exist."""
        self.watched = []
        self.is_replicated: bool = isinstance(trainer.strategy.model, DistributedDataParallel)
        # The last micro-batch runs inside of the optimizer's step.
        closures = sys.modules[type(trainer.fit_loop.epoch_loop.automatic_optimization).__module__]
        self.outermost = inspect.unwrap(closures.Closure.closure).__code__
        for optimizer in trainer.optimizers:
            watched = self._watch(trainer, pl_module, optimizer)
            watched.planned_steps = max(trainer.max_steps, 0)
            watched.batches, watched.samples = sizes_of(trainer.train_dataloader)
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded[0]["monitors"]:
            super().load_state_dict(loaded[0], expect_restored=loaded[1])

    def _watch(self, trainer: Any, module: Any, optimizer: Optimizer) -> Watched:
        model: nn.Module = module
        if len(trainer.optimizers) > 1:
            trained = ids_of(optimizer)
            model = Parameters((name, p) for name, p in module.named_parameters() if id(p) in trained)
        elif self.watch.get("origin") or engine_name_of(trainer.strategy) == "DeepSpeed":
            model = trainer.strategy.model  # the DDP module, or the engine
        by_norm = _clips(trainer) and _is_norm(trainer.gradient_clip_algorithm)
        limit = float(trainer.gradient_clip_val) if by_norm else None
        return self._attach(model, optimizer, _scaler_of(trainer), limit=limit, step_fn=self._step_replay)

    def divisor(self) -> int:
        """The number of micro-batches."""
        return int(self._trainer.accumulate_grad_batches)

    def on_findings(self, findings: Sequence[Finding]) -> None:
        """Shows the newest finding among the progress bar's metrics."""
        serious = [finding for finding in findings if finding.severity != "info"]
        if serious and self._trainer.progress_bar_callback is not None:
            text = f"step {serious[-1].step}: {serious[-1].text or serious[-1].rule}"
            self._trainer.progress_bar_metrics["gradstat"] = text

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Reads all pending numbers."""
        for one in self.watched:
            one.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the watching: Lightning does not call ``teardown`` after an exception."""
        self._end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends the watching, and restores the methods of Lightning."""
        if stage == "fit":
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        self._remove()
        self._step_replay = self._loss = None
        self._logged_at = {}
        for one in self.watched:
            one.remove(error)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Shows the batch to the monitor, and keeps it if a replay may need it."""
        if self._step_replay is not None:
            with self._unwatched.suppress_errors(0, "a batch could not be kept for a replay"):
                self._step_replay.note(batch, batch_idx)
        for monitor in self.monitors[:1]:
            monitor.check_batch(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Notes the loss, undoing the division by the number of micro-batches and the loss scale."""
        scaler = _scaler_of(trainer)
        self._loss = None
        with torch.no_grad(), self._unwatched.suppress_errors(0, "a loss could not be recorded"):
            for monitor in self.monitors:
                monitor.recorder.saw_loss([loss])
            several = trainer.accumulate_grad_batches
            self._loss = loss.detach() * several if several > 1 else loss.detach()
            if scaler is not None and scaler.is_enabled():
                self._loss = self._loss / require_scale(scaler, "gradstat").to(loss.device)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Notes that a backward pass has added to the gradients."""
        self._saw_backward(self._loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Measures the complete gradients, carries out policies in the same way on every rank, and logs."""
        watched = next((one for one in self.watched if one.optimizer is optimizer), None)
        if watched is None:  # one that has replaced the watched one is told of by its monitor
            ids = ids_of(optimizer)
            of_same = (one for one in self.watched if one.optimizer is not None and ids & ids_of(one.optimizer))
            watched = next(of_same, None)
        watched = watched or self._watch(trainer, pl_module, optimizer)
        watched.measure()  # does nothing if a scaler has announced that it unscales
        loop = getattr(trainer.fit_loop, "epoch_loop", None)  # knows the step at which Lightning would log now
        now = int(getattr(loop, "_batches_that_stepped", trainer.global_step))
        self._logged_at[id(watched), watched.monitor.steps - 1] = now
        while len(self._logged_at) > 8 * len(self.watched):  # older steps have been read
            self._logged_at.pop(next(iter(self._logged_at)))
        if watched.monitor.should_stop:
            trainer.should_stop = True
        with self._unwatched.suppress_errors(0, "statistics could not be logged"):
            self._log(trainer, watched)
        if self._step_replay is not None:
            self._step_replay.forget()

    def _log(self, trainer: Any, watched: Watched) -> None:
        every = trainer.log_every_n_steps if self._log_every is None else self._log_every
        newest = watched.monitor.latest() if every and trainer.loggers and trainer.is_global_zero else None
        if newest is None or (newest.step + 1) % every:
            return
        at = self._logged_at.pop((id(watched), newest.step), None)
        if at is not None:
            prefix = self._prefix(self._choice.prefix, self.watched.index(watched))
            choice = self._choice._replace(prefix=prefix)._asdict()
            log_scalars(trainer.loggers, scalars_of(watched.monitor, **choice), at)

    def save_checkpoint(self) -> None:
        """Saves a checkpoint of the trainer."""
        trainer = self._trainer
        folder = self._save_dir or getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = Path(folder) / f"gradstat-step{trainer.global_step}.ckpt"
        if path not in self.checkpoints:
            self.checkpoints.append(path)
            trainer.save_checkpoint(path)

    def load_state_dict(self, state: Mapping[str, Any], *, expect_restored: bool = True) -> None:
        """The inverse of `state_dict`; the monitors load their states when training starts."""
        self._check_state(state)
        self._load_clip(state)
        self._loaded = {**state, "clip": None}, expect_restored


def _clips(trainer: Any) -> bool:
    """Whether the trainer's own settings clip. Lightning does not clip to numbers that are not positive."""
    return (trainer.gradient_clip_val or 0.0) > 0


def _is_norm(algorithm: Any) -> bool:
    """Whether a trainer's ``gradient_clip_algorithm`` is the norm, as it is by default."""
    return algorithm is None or getattr(algorithm, "value", algorithm) == "norm"


def _scaler_of(trainer: Any) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


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
        scaler = _scaler_of(self._trainer)
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
