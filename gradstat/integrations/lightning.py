"""`GradStatCallback`: gradient statistics, findings, clipping and policies in a Lightning training, by one line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat.accumulation import AccumulationReport, MicroBatches
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations import _lightning_checks as checks
from gradstat.integrations._lightning_actions import Actions
from gradstat.integrations._lightning_base import Part, callback_classes, leave, try_out
from gradstat.integrations._lightning_clip import Clip
from gradstat.integrations._lightning_replay import StepAgain
from gradstat.integrations._policies import names_in, translated
from gradstat.integrations.loggers import Choice, log_scalars
from gradstat.monitor import AnomalyWarning, Finding, Monitor, MonitorOptions
from gradstat.monitor.kinds import periods
from gradstat.report import NonFiniteGradientError

__all__ = ["GradStatCallback"]

# The callback gives these to a monitor itself.
_OWN = ("model", "optimizer", "scaler", "on_anomaly", "max_norm", "replay")


class GradStatCallback(*callback_classes()):  # type: ignore[misc]
    """Watches a Lightning training with a `gradstat.Monitor`. ::

        Trainer(callbacks=[GradStatCallback(max_norm=1.0)])

    Gradients are measured when they are complete: accumulated, reduced over ranks, before Lightning clips them, and
    told without a loss scale. No host sync on a GPU, but for policies that need one (as for the monitor).
    docs/integrations-lightning.md says what happens when.

    If both ``lightning`` and ``pytorch_lightning`` are installed, import the one you use before this module.

    Args:
        max_norm: What to clip to, in place of ``Trainer(gradient_clip_val=...)``: a number, or an adaptive clip. None
            takes over a ``gradient_clip_val`` that is a norm, if there is one.
        on_anomaly: As for `gradstat.Monitor`; besides, ``"checkpoint"`` saves a checkpoint of the trainer. ``"stop"``
            sets ``trainer.should_stop``; ``"replay"`` runs the training step again. On several ranks all do what one
            of them wants to.
        log_every: Log every so many steps; None for the trainer's ``log_every_n_steps``, 0 for never.
        aggregates, per_tensor, top, prefix: What to log, as for `gradstat.integrations.loggers.log_report`.
        micro_batches: Under gradient accumulation, check after each micro-batch, and name the one that brought NaN or
            Inf. One more read of the gradients for each.
        save_dir: Where ``"checkpoint"`` saves; None for the trainer's folder of checkpoints.
        options: For the monitor: ``rules``, ``watch``, ``save_to``, ``options`` and so on.

    Attributes:
        monitor: The monitor, since training began; None before. With several optimizers, the first one's.
        monitors: One for each optimizer. With several, each watches the parameters of its optimizer only.
        micro_batch_reports: By step in which one was asked for, which micro-batch brought what.
        checkpoints: Files that ``"checkpoint"`` saved.

    Raises:
        TypeError, ValueError: An argument makes no sense. Settings of the trainer that do not go together with those
        here are refused before training starts.
    """

    def __init__(
        self,
        max_norm: float | AdaptiveClip | None = None,
        on_anomaly: Any = None,
        *,
        log_every: int | None = None,
        aggregates: Sequence[str] = Choice().aggregates,
        per_tensor: Sequence[str] = (),
        top: int | None = 20,
        prefix: str = "grad/",
        micro_batches: bool = True,
        save_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        own = [name for name in _OWN if name in options]
        own += ["keep_batch"] * MonitorOptions.of(options.get("options")).keep_batch
        if own:
            raise TypeError(f"{own[0]} is not for the monitor's options: the callback gives it to its monitor itself")
        if max_norm is not None and not isinstance(max_norm, AdaptiveClip) and not float(max_norm) > 0:
            raise ValueError(f"max_norm is {max_norm!r}; expected a number above 0, an adaptive clip, or None")
        if log_every is not None and (type(log_every) is not int or log_every < 0):
            raise ValueError(f"log_every is {log_every!r}; expected a number of steps, 0 for never, or None")
        self._policies = names_in(on_anomaly)
        try_out(max_norm, on_anomaly, options)
        self._max_norm, self._on_anomaly, self._options = max_norm, on_anomaly, options
        self._log_every, self._prefix = log_every, prefix
        self._choice = Choice(tuple(aggregates), tuple(per_tensor), top, prefix).check()
        self._wants_micro_batches = micro_batches
        self._actions = Actions(save_dir)
        self.monitors: list[Monitor] = []
        self.micro_batch_reports: dict[int, AccumulationReport] = {}
        self._by_optimizer: dict[int, Monitor] = {}
        self._clip: Clip | None = None
        self._again: StepAgain | None = None
        self._loaded: list[dict[str, Any]] = []
        self._loss: Tensor | None = None
        self._micro: MicroBatches | None = None
        self._micro_of: dict[tuple[int, int], MicroBatches] = {}
        self._logged_at: dict[tuple[int, int], int] = {}
        self._is_watching = False

    @property
    def monitor(self) -> Monitor | None:
        return self.monitors[0] if self.monitors else None

    @property
    def checkpoints(self) -> list[Path]:
        return self._actions.checkpoints

    # Beginning and end -----------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses what does not go together, and takes over the clip."""
        if stage != "fit":
            return
        same = [callback for callback in trainer.callbacks if isinstance(callback, GradStatCallback)]
        checks.check(trainer, pl_module, self._max_norm, self._policies, same)
        self._again = StepAgain(trainer, pl_module) if "replay" in self._policies else None
        if not checks.is_kind_of(trainer.strategy, "DeepSpeedStrategy"):  # its engine clips
            self._clip = Clip(trainer, self._max_norm)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes the monitors, now that there are optimizers."""
        rules = checks.warn_of_hidden_gradients(trainer.strategy, self._options.get("rules"))
        self._options = self._options if rules is None else {**self._options, "rules": rules}
        self._actions.begin(trainer.world_size)
        self.monitors, self._by_optimizer, self._is_watching = [], {}, True
        for optimizer in trainer.optimizers:
            self._watch(trainer, pl_module, optimizer)
        loaded, self._loaded = self._loaded, []
        for monitor, state in zip(self.monitors, loaded, strict=False):
            monitor.load_state_dict(state)
            monitor.should_stop = False  # who resumes a training that was stopped wants it to run

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Reads what has not been read yet."""
        for monitor in self.monitors:
            monitor.flush()
        self._actions.take(trainer, self.monitors, None)
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning calls no ``teardown`` after an exception."""
        self._end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Gives Lightning its clip back."""
        if stage == "fit":
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        if self._clip is not None:
            self._clip.remove()
        if error is None:  # else the other ranks are not here
            self._actions.end()
        self._clip = self._again = self._loss = self._micro = None
        self._micro_of, self._logged_at = {}, {}
        watching, self._is_watching = self._is_watching, False
        for monitor in self.monitors if watching else ():
            leave(monitor, error)

    def _watch(self, trainer: Any, module: Any, optimizer: Optimizer) -> Monitor:
        options = dict(self._options)
        model: nn.Module = module
        if len(trainer.optimizers) > 1:
            model = Part(module, optimizer)
            options["rules"] = copy.deepcopy(options.get("rules"))  # they remember what they saw
            if self.monitors and options.get("save_to") is not None:
                base = Path(options["save_to"])
                options["save_to"] = base.with_name(f"{base.stem}-{len(self.monitors)}{base.suffix}")
        elif periods(options.get("watch"))["origin"]:
            model = trainer.strategy.model  # DDP's
        if self._again is not None:
            # Later, the next step would have overwritten what a replay needs.
            options["options"] = replace(MonitorOptions.of(options.get("options")), lag=0)
        monitor = Monitor(
            model,
            optimizer,
            getattr(trainer.precision_plugin, "scaler", None),
            on_anomaly=translated(self._on_anomaly, self._actions.noted),
            max_norm=None if self._clip is None else self._clip.limit,
            replay=self._again if self._again is not None else False,
            **options,
        )
        self.monitors.append(monitor)
        self._by_optimizer[id(optimizer)] = monitor
        return monitor

    # A step ----------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Shows the batch to the monitor, and keeps it if a replay may need it."""
        if self._again is not None:
            self._again.note(batch, batch_idx)
        if self.monitors:
            self.monitors[0].batch(batch)
            if trainer.world_size == 1:
                self._actions.take(trainer, self.monitors, None)  # at once: the loss may fail on this batch

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Adds up the loss of the step, which comes divided by the micro-batches, and scaled."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        with torch.no_grad():
            value = loss.detach()
            if scaler is not None and scaler.is_enabled():
                value = value / scaler._scale.to(value.device)
            self._loss = value if self._loss is None else self._loss + value

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Checks a micro-batch, without a sync."""
        if self._wants_micro_batches and trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
            if self._micro is None:
                self._micro = MicroBatches(pl_module, backend=self._options.get("backend"))
            self._micro.check()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Measures the complete gradients, does what policies say, and logs; all on every rank alike."""
        monitor = self._by_optimizer.get(id(optimizer)) or self._watch(trainer, pl_module, optimizer)
        key = (id(monitor), monitor.steps)
        if self._micro is not None:
            self._micro_of[key], self._micro = self._micro, None
        self._logged_at[key] = _logging_step(trainer)
        for held in (self._micro_of, self._logged_at):
            while len(held) > 8:  # older steps have been read
                held.pop(next(iter(held)))
        loss, self._loss = self._loss, None
        known = len(monitor.findings)
        monitor.step(loss)
        found = monitor.findings[known:]
        self._blame_micro_batches(monitor, found)
        self._show(trainer, found)
        self._actions.take(trainer, self.monitors, monitor)
        self._log(trainer, monitor)
        if self._again is not None:
            self._again.forget()
        if not pl_module.automatic_optimization and self._clip is not None:
            self._clip.now(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Takes back what an optimizer was told for a step that it did not take."""
        if self._clip is not None:
            self._clip.forget()

    # What is told about it -------------------------------------------------------------------------------

    def _blame_micro_batches(self, monitor: Monitor, found: Sequence[Finding]) -> None:
        for finding in found:
            held = self._micro_of.pop((id(monitor), finding.step), None)
            if held is None or finding.severity != "error":
                continue
            report = held.result()
            self.micro_batch_reports[finding.step] = report
            try:
                report.raise_if_nonfinite()
            except NonFiniteGradientError as error:
                warnings.warn(f"gradstat: step {finding.step}, on this rank: {error}", AnomalyWarning, stacklevel=2)

    def _show(self, trainer: Any, found: Sequence[Finding]) -> None:
        """The newest finding beside the metrics of the progress bar."""
        serious = [finding for finding in found if finding.severity != "info"]
        if serious and trainer.progress_bar_callback is not None:
            trainer.progress_bar_metrics["gradstat"] = (
                f"step {serious[-1].step}: {serious[-1].text or serious[-1].rule}"
            )

    def _log(self, trainer: Any, monitor: Monitor) -> None:
        every = trainer.log_every_n_steps if self._log_every is None else self._log_every
        if not every or not trainer.loggers or not trainer.is_global_zero:
            return
        newest = monitor.latest()
        if newest is None or (newest.step + 1) % every:
            return
        at = self._logged_at.pop((id(monitor), newest.step), None)
        if at is None:
            return
        prefix = self._prefix if len(self.monitors) == 1 else f"{self._prefix}{self.monitors.index(monitor)}/"
        values = self._choice._replace(prefix=prefix).of(newest.report)
        values[f"{prefix}findings"] = float(len(monitor.findings))
        log_scalars(trainer.loggers, values, at)

    # What a checkpoint keeps -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of the monitors and of an adaptive clip. Waits for the device."""
        clip = self._max_norm.state_dict() if isinstance(self._max_norm, AdaptiveClip) else None
        return {"version": 1, "monitors": [monitor.state_dict() for monitor in self.monitors], "clip": clip}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse; the monitors take theirs when training starts."""
        if state_dict.get("version") != 1:
            raise ValueError(
                f"the checkpoint's state of GradStatCallback has version {state_dict.get('version')}, this gradstat "
                "knows 1; upgrade gradstat, or resume without this callback"
            )
        self._loaded = list(state_dict["monitors"])
        if isinstance(self._max_norm, AdaptiveClip) and state_dict["clip"] is not None:
            self._max_norm.load_state_dict(state_dict["clip"])


def _logging_step(trainer: Any) -> int:
    """The step at which Lightning itself would log now."""
    loop = getattr(trainer.fit_loop, "epoch_loop", None)
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step))
