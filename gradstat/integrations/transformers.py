"""Watches training with the Trainer of Hugging Face transformers: `install`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gradstat._core.files import replacing
from gradstat._core.wrappers import without_ddp
from gradstat._step.optimizers import unwrapped
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._handle import require_framework, sizes_of
from gradstat.integrations.accelerate import AccelerateHandle
from gradstat.monitor import AnomalyWarning, Finding
from gradstat.monitor.policies import Policies

require_framework("transformers", (4, 57))

from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402

__all__ = ["GradstatCallback", "install"]

STATE_FILE = "gradstat_monitor.pt"  # the monitor's state, in the folder of each checkpoint


def install(
    trainer: Any,
    *,
    on_anomaly: Policies = None,
    max_norm: float | AdaptiveClip | None = None,
    watch: Mapping[str, int] | Sequence[str] | None = None,
    log: bool | str = True,
    healthy_checkpoints: bool = False,
    **monitor_options: Any,
) -> GradstatCallback:
    """Attaches a `gradstat.Monitor` to the model that ``trainer`` trains. ::

        trainer = Trainer(model, args, train_dataset=dataset)
        handle = gradstat.integrations.transformers.install(trainer, on_anomaly="skip")
        trainer.train()
        print(handle.monitor.diagnose())

    Every optimizer step is measured: complete gradients, unscaled, before they are clipped. The Trainer clips as
    before, to its ``max_grad_norm``, and its weights keep their bits, unless a policy or ``max_norm`` changes a step.
    docs/integrations.md compares the trainers.

    Args:
        trainer: A ``transformers.Trainer``, or an instance of a subclass, before ``train()``.
        on_anomaly, watch, monitor_options: As for `gradstat.Monitor`. ``"replay"`` needs no function here: the
            Trainer's ``training_step`` is called again, on the inputs of the step.
        max_norm: A number or an adaptive clip, applied if ``max_grad_norm`` is 0. None leaves clipping to the Trainer.
        log: Whether to add numbers (``grad/...``) to the Trainer's logs; ``"findings"`` adds only the number of
            findings and of steps that were not finite, ``"parameters"`` also the norm of each parameter's gradient.
        healthy_checkpoints: Whether the Trainer saves nothing while `gradstat.Monitor.is_healthy` is False, so that a
            checkpoint with NaN or Inf does not replace the last healthy one.

    Returns:
        A handle with the monitor. A second call removes the handle of the first.

    Raises:
        TypeError: ``trainer`` is not a Trainer, or an option must not be given.
        ValueError: An option is invalid, or clipping is configured twice.
        NotImplementedError: The engine's gradients cannot be measured (Megatron-LM, XLA), or it does not allow what an
            option asks for.
    """
    if not isinstance(trainer, Trainer):
        what = f"the class {trainer.__name__}" if isinstance(trainer, type) else type(trainer).__name__
        raise TypeError(f"expected a transformers.Trainer, got {what}; build it first: install(Trainer(model, ...))")
    if not isinstance(log, bool) and log not in ("findings", "parameters"):
        raise ValueError(f"log is {log!r}; expected True, False, 'findings' or 'parameters'")
    arguments = {"on_anomaly": on_anomaly, "watch": watch, **monitor_options}
    return GradstatCallback(trainer, log, arguments, max_norm, install, healthy_checkpoints)


class GradstatCallback(AccelerateHandle, TrainerCallback):
    """What ``install()`` returns, a callback of the Trainer. A context manager; leaving it calls ``remove()``.

    Attributes:
        trainer: The Trainer.
    """

    source, runs_steps = "trainer", True

    def __init__(self, trainer: Any = None, log: bool | str = True, *arguments: Any) -> None:
        """Made by `install`; RuntimeError if made otherwise."""
        if trainer is None or not arguments:
            raise RuntimeError(
                "a callback alone cannot watch gradients: no event of the Trainer has them complete and unclipped, "
                "and callbacks get neither trainer nor accelerator. Build the Trainer without it, then call "
                "gradstat.integrations.transformers.install(trainer), which adds it"
            )
        self.trainer: Any = trainer
        self._log = log
        self._resume: Any = None
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        super().__init__(trainer.accelerator, *arguments)
        trainer.add_callback(self)

    def _attach_models(self) -> None:
        """Watches the model, unless train() makes the model; ValueError if clipping is configured twice."""
        trainer = self.trainer
        max_grad_norm = float(trainer.args.max_grad_norm or 0.0)
        if self.max_norm is not None and max_grad_norm > 0 and self.max_norm != max_grad_norm:
            raise ValueError(
                f"clip configured twice: max_norm={self.max_norm!r}, and the Trainer's max_grad_norm={max_grad_norm:g} "
                "(1.0 is its default). Set one: TrainingArguments(max_grad_norm=...) and no max_norm here, or "
                "TrainingArguments(max_grad_norm=0) for max_norm to clip"
            )
        if trainer.model_init is None and not self._is_wrapped():
            trainer.create_optimizer()
            self._watch()

    def _patch_framework(self) -> None:
        super()._patch_framework()
        self._patch(self.trainer, "train", self._in_train)
        self._patch(self.trainer, "log", self._in_log)
        self._patch(self.trainer, "training_step", self._in_training_step)

    def _is_wrapped(self) -> bool:
        """Whether the monitor gets the model as train() wraps it."""
        trainer = self.trainer
        return bool(self.watch.get("origin") or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)

    def _model(self) -> Any:
        return self.trainer.model_wrapped if self._is_wrapped() else self.trainer.model

    def _watch(self) -> None:
        trainer = self.trainer
        limit = float(trainer.args.max_grad_norm or 0.0)  # the Trainer clips if it is positive
        optimizer, scaler = unwrapped(trainer.optimizer), trainer.accelerator.scaler
        self.watched = []
        self._attach(self._model(), optimizer, scaler, limit=limit if limit > 0 else None, step_fn=self._replay_step)

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        """Makes sure that the watched model is the one to be trained, and loads the state of a checkpoint."""
        trainer = self.trainer
        if self._accelerator is not trainer.accelerator:  # a hyperparameter search has made another
            self._remove()
            self._check(trainer.accelerator)
            self._patch_framework()
        earlier = self.watched[0] if self.watched else None
        optimizer = unwrapped(trainer.optimizer)
        if earlier is None or earlier.model is not self._model() or earlier.optimizer is not optimizer:
            if earlier is not None:
                earlier.remove()
            self._watch()
        self._single.planned_steps = state.max_steps
        self._single.batches, self._single.samples = sizes_of(train_dataloader)
        resume, self._resume = self._resume, None
        if not state.global_step:
            return
        if resume is True:
            resume = get_last_checkpoint(args.output_dir)
        saved = Path(str(resume)) / STATE_FILE
        if resume and saved.is_file():
            try:
                loaded = torch.load(saved, map_location="cpu", weights_only=True)  # executes no pickled code
            except Exception as error:  # damaged bytes may raise anything
                raise RuntimeError(
                    f"{saved} is damaged, or not the state of a monitor. Delete it to resume with a new monitor"
                ) from error
            self.load_state_dict(loaded)
        elif not self.monitor.steps:
            self.monitor.steps = int(state.global_step)  # so that findings count steps as the Trainer does

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reads all pending numbers."""
        self._inputs = []
        self._single.end()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drops the kept inputs of the last step."""
        self._inputs = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Warns if the Trainer has clipped without an announcement."""
        if (args.max_grad_norm or 0.0) > 0 and not self._engine_clips and not self._single.listener.is_measured():
            self._warn_once(
                "bypass",
                "this Trainer clips neither by the accelerator nor by torch (apex, or a subclass), so gradients are "
                "measured after clipping",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops if the policy ``"stop"`` applies, after a checkpoint if the Trainer saves any and none is withheld."""
        is_withheld = self._withholds(args, control)
        if not self.should_stop:
            return
        control.should_training_stop = True
        if not is_withheld and args.save_strategy != "no":
            control.should_save = True
        how = "without saving a checkpoint (Monitor.is_healthy is False)" if is_withheld else "with finite parameters"
        self._warn_once(
            "stop",
            f"the Trainer stops after step {state.global_step}, {how}, because of the policy 'stop'",
            AnomalyWarning,
        )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Withholds a checkpoint with NaN or Inf: an epoch that was stopped early may end with one, too."""
        self._withholds(args, control)

    def _withholds(self, args: Any, control: Any) -> bool:
        """Cancels a checkpoint that is due but must not be saved. Returns whether it canceled one."""
        saves_best = args.save_strategy == "best" and control.should_evaluate  # saves after the evaluation
        if not (self.should_stop or control.should_save or saves_best) or not self._withholds_checkpoint():
            return False
        control.should_save = False
        if saves_best or self.should_stop:
            control.should_evaluate = False
        return True

    def on_findings(self, findings: list[Finding]) -> None:
        """Warns if the Trainer's logs hide a loss that was not finite."""
        lost = next((f for f in findings if f.rule == "nonfinite-loss"), None)
        if lost is not None and self.trainer.args.logging_nan_inf_filter:
            self._warn_once(
                "filter",
                f"the Trainer does not log the loss of step {lost.step}, which was not finite: "
                "logging_nan_inf_filter=True replaces it by the average of earlier losses. See grad/loss, or pass "
                "TrainingArguments(logging_nan_inf_filter=False)",
                AnomalyWarning,
            )

    def _replay_step(self) -> list[Any]:
        """Runs the newest step again, on this rank alone."""
        step = self.trainer.training_step
        return [step(without_ddp(args[0]), *args[1:], **kwargs) for args, kwargs in self._inputs]

    def _in_training_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.replays:
            self._inputs.append((args, kwargs))
        for monitor in self.monitors:
            monitor.check_batch(args[1] if len(args) > 1 else kwargs.get("inputs"))
        return original(*args, **kwargs)

    def _in_train(self, original: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._resume = resume_from_checkpoint
        return original(resume_from_checkpoint, *args, **kwargs)

    def _in_log(self, original: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if self._log and self.watched and "loss" in logs:
            self.monitor.flush()  # may raise, depending on policies
            with self._unwatched.suppress_errors(0, "statistics could not be logged"):
                values = self.scalars(per_tensor=("l2_norm",) if self._log == "parameters" else (), top=None)
                shown = ("findings", "nonfinite_steps") if self._log == "findings" else ("",)
                logs = {**logs, **{name: value for name, value in values.items() if name.endswith(shown)}}
                if "grad/total_norm" in values and not self._engine_clips:
                    logs.setdefault("grad_norm", values["grad/total_norm"])
        return original(logs, *args, **kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Writes the monitor's state into the newest checkpoint, on the rank that writes checkpoints."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not args.should_save or not folder.is_dir():
            return
        saved = folder / STATE_FILE
        self.monitor.flush()
        with self._unwatched.suppress_errors(0, f"{saved} could not be saved"), replacing(saved) as file:
            torch.save(self.state_dict(), file)

    def remove(self) -> None:
        """Ends the watching: restores the methods of the Trainer and its accelerator. The monitor stays readable."""
        super().remove()
        if self in self.trainer.callback_handler.callbacks:
            self.trainer.remove_callback(self)
        self._inputs = []
