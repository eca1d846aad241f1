"""Watches training with the Trainer of Hugging Face transformers: `install`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradstat._files import replacing
from gradstat._wrappers import without_ddp
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._accelerator import AcceleratorWatch
from gradstat.integrations._refusals import checked_limit, refuse_impossible, refuse_second
from gradstat.integrations._replaced import Replaced
from gradstat.integrations._requirements import require
from gradstat.integrations._watched import Options, Watched, unwrapped
from gradstat.monitor import AnomalyWarning, Finding, Monitor, MonitorOptions
from gradstat.monitor.policies import find_stack_level
from gradstat.monitor.replay.step_state import is_replaying

require("transformers", (4, 57))
require("accelerate", (1, 0))

from transformers import Trainer  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402

from gradstat.integrations._callback import GradstatCallback  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradstat.monitor.policies import Policies

__all__ = ["Handle", "install"]

STATE_FILE = "gradstat_monitor.pt"
"""The monitor's state, in the folder of each checkpoint."""

_LOGS = (False, True, "parameters")


def install(
    trainer: Any,
    *,
    on_anomaly: Policies = None,
    max_norm: float | AdaptiveClip | None = None,
    watch: Mapping[str, int] | Sequence[str] | None = None,
    log: bool | str = True,
    micro_batches: bool = True,
    **monitor_options: Any,
) -> Handle:
    """Puts a `gradstat.Monitor` on what ``trainer`` trains. ::

        trainer = Trainer(model, args, train_dataset=dataset)
        handle = gradstat.integrations.transformers.install(trainer, on_anomaly="skip")
        trainer.train()
        print(handle.monitor.diagnose())

    Every step of the optimizer is measured: complete gradients, without loss scale, before they are clipped. The
    Trainer clips as before, to its ``max_grad_norm``, and logs its ``grad_norm``. docs/integrations-transformers.md
    tells the order of events.

    Args:
        trainer: A ``transformers.Trainer``, or an instance of a subclass, before ``train()``.
        on_anomaly: As for `gradstat.Monitor`. ``"replay"`` needs no function here: the Trainer's ``training_step`` is
            called again, on the inputs of the step.
        max_norm: What to clip to, where ``max_grad_norm`` is 0: an adaptive clip, or a number. None leaves it to the
            Trainer.
        watch: As for `gradstat.Monitor`.
        log: Whether to add numbers (``gradstat/...``) to the Trainer's logs; ``"parameters"`` adds each norm.
        micro_batches: Whether to check gradients after every micro-batch of an accumulated step, too, so that the one
            that brought NaN is named: one more read for each.
        monitor_options: Further arguments of `gradstat.Monitor`.

    Returns:
        A handle with the monitor.

    Raises:
        TypeError: ``trainer`` is no Trainer, or an option is not the user's to give.
        ValueError: An option makes no sense, clipping is configured twice, or the engine does not allow it.
        RuntimeError: gradstat is installed already.
        NotImplementedError: The engine (Megatron-LM, XLA) shows no gradients that could be measured.
    """
    if not isinstance(trainer, Trainer):
        what = f"the class {trainer.__name__}" if isinstance(trainer, type) else type(trainer).__name__
        hint = "; build it first: install(Trainer(model, args, ...))"
        raise TypeError(f"expected a transformers.Trainer, got {what}{hint}")
    if not any(log is known for known in _LOGS) and log != "parameters":
        raise ValueError(f"log is {log!r}; expected True, False or 'parameters'")
    refuse_second(trainer.accelerator)
    if MonitorOptions.of(monitor_options.get("options")).keep_batch:
        raise TypeError("keep_batch is for loops; a replay here runs the Trainer's step on inputs that are kept anyway")
    options = Options({"on_anomaly": on_anomaly, "watch": watch, **monitor_options}, "trainer")
    max_norm = checked_limit(max_norm)
    own = float(trainer.args.max_grad_norm or 0.0)
    if max_norm is not None and own > 0 and max_norm != own:
        raise ValueError(
            f"clip configured twice: max_norm={max_norm!r}, and the Trainer's max_grad_norm={own:g} (1.0 is its "
            "default). Set one: TrainingArguments(max_grad_norm=...) and no max_norm here, or "
            "TrainingArguments(max_grad_norm=0) for max_norm to clip"
        )
    refuse_impossible(trainer.accelerator, options, max_norm)
    return Handle(trainer, options, max_norm, log, micro_batches)


class Handle:
    """What `install` returns. A context manager; leaving it is `remove`.

    Attributes:
        trainer: The Trainer.
    """

    def __init__(
        self, trainer: Any, options: Options, max_norm: float | AdaptiveClip | None, log: bool | str, parts: bool
    ) -> None:
        """Made by `install`."""
        self.trainer = trainer
        self._options, self._max_norm, self._log, self._parts = options, max_norm, log, parts
        self._watched: Watched | None = None
        self._resume: Any = None
        self._inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._told_of_filter = self._told_of_bypass = self._told_of_stop = False
        self._watch = self._attach()
        if not self._is_later():
            trainer.create_optimizer()
            self._watched = self._make()
            self._watch.watched = [self._watched]
        self._callback = GradstatCallback(self)
        trainer.add_callback(self._callback)
        self._replaced = [
            Replaced(trainer, "train", lambda below: self._made_train(below)),
            Replaced(trainer, "log", lambda below: self._made_log(below)),
            Replaced(trainer, "training_step", lambda below: self._made_training_step(below)),
        ]

    # The monitor -----------------------------------------------------------------------------------------

    @property
    def monitor(self) -> Monitor:
        """The monitor.

        Raises:
            RuntimeError: There is none yet, because model or optimizer are only made in ``train()``.
        """
        if self._watched is None:
            raise RuntimeError(
                "the monitor is made when training begins, because model or optimizer are (model_init, FSDP, "
                "DeepSpeed, or watch='origin'); look at it after trainer.train(), or in a callback"
            )
        return self._watched.monitor

    @property
    def should_stop(self) -> bool:
        """Whether the policy ``"stop"`` has been met; the same on all ranks."""
        return self._watched is not None and self._watched.should_stop

    @property
    def attributions(self) -> dict[int, Any]:
        """By step, the `gradstat.AccumulationReport` of those in which something was found."""
        return {} if self._watched is None else self._watched.attributions

    def _is_later(self) -> bool:
        """Whether what is trained is only made in ``train()``."""
        trainer = self.trainer
        engines = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        return bool(trainer.model_init is not None or engines or self._options.wraps)

    def _attach(self) -> AcceleratorWatch:
        args = self.trainer.args
        return AcceleratorWatch(
            self.trainer.accelerator, [], self._max_norm, lambda: args.gradient_accumulation_steps if self._parts else 1
        )

    def _make(self) -> Watched:
        trainer = self.trainer
        model = trainer.model_wrapped if self._options.wraps or trainer.is_fsdp_enabled else trainer.model
        own = float(trainer.args.max_grad_norm or 0.0)
        made = Watched(
            model,
            unwrapped(trainer.optimizer),
            trainer.accelerator.scaler,
            self._options,
            own if own > 0 else self._max_norm,
            self._again,
            trainer.accelerator.num_processes > 1,
        )
        made.on_findings = self._look_at
        return made

    def begin(self, state: Any) -> None:
        """Training begins: makes sure that what is watched is what will be trained, and loads what was saved."""
        trainer = self.trainer
        if self._watch.accelerator is not trainer.accelerator:  # a search for hyperparameters has made another
            self._watch.remove()
            self._watch = self._attach()
        known = self._watched
        model = trainer.model_wrapped if self._options.wraps or trainer.is_fsdp_enabled else trainer.model
        if known is None or known.model is not model or known.optimizer is not unwrapped(trainer.optimizer):
            if known is not None:
                known.remove()
            self._watched = self._make()
        assert self._watched is not None
        self._watch.watched = [self._watched]
        self._load(state)

    def end(self) -> None:
        """Training is over: reads what is left."""
        self._inputs = []
        if self._watched is not None:
            self._watched.flush()

    # A step ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The first micro-batch comes next."""
        self._inputs = []

    def before_optimizer(self) -> None:
        """Measures the step if the Trainer has called no clip, as some versions do not for ``max_grad_norm=0``."""
        trainer, watched = self.trainer, self._watched
        if watched is None or watched.measured:
            return
        if not (trainer.args.max_grad_norm or 0.0) > 0:
            trainer.accelerator.clip_grad_norm_(trainer.model_wrapped.parameters(), float("inf"))
            return
        if not self._told_of_bypass and not self._watch.clips_itself:
            self._told_of_bypass = True
            warnings.warn(
                "gradstat: this Trainer clips without accelerator.clip_grad_norm_ (gradients on mixed meshes, apex, or "
                "a subclass), so statistics are those of clipped gradients",
                UserWarning,
                stacklevel=find_stack_level(),
            )
        self._watch.measure([watched])

    def after_optimizer(self) -> None:
        """The next gradients are another step's."""
        if self._watched is not None:
            self._watched.measured = False

    def stops(self, state: Any) -> bool:
        """Whether to stop behind this step; says so once."""
        if not self.should_stop:
            return False
        if not self._told_of_stop:
            self._told_of_stop = True
            warnings.warn(
                f"gradstat: the Trainer stops behind step {state.global_step} and saves a checkpoint, as the policy "
                "'stop' says (it is also that of the rule 'lost-loss', unless on_anomaly has another for it)",
                AnomalyWarning,
                stacklevel=find_stack_level(),
            )
        return True

    def _look_at(self, findings: list[Finding]) -> None:
        filtered = self.trainer.args.logging_nan_inf_filter
        lost = next((f for f in findings if f.rule == "nonfinite-loss"), None)
        if lost is not None and filtered and not self._told_of_filter:
            self._told_of_filter = True
            warnings.warn(
                f"gradstat: the Trainer's log hides the loss of step {lost.step}, which was not finite: "
                "logging_nan_inf_filter=True puts the average before it in its place. gradstat/loss shows it; or pass "
                "TrainingArguments(logging_nan_inf_filter=False)",
                AnomalyWarning,
                stacklevel=find_stack_level(),
            )

    def _again(self) -> list[Any]:
        """Does the newest step again, on this rank alone."""
        step = self.trainer.training_step
        return [step(without_ddp(args[0]), *args[1:], **kwargs) for args, kwargs in self._inputs]

    # What is replaced ------------------------------------------------------------------------------------

    def _made_training_step(self, below: Any) -> Callable[..., Any]:
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if not is_replaying():
                if self._options.replays:
                    self._inputs.append((args, kwargs))
                if self._watched is not None:
                    self._watched.saw_batch(args[1] if len(args) > 1 else kwargs.get("inputs"))
            return below(*args, **kwargs)

        return training_step

    def _made_train(self, below: Any) -> Callable[..., Any]:
        def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resume = resume_from_checkpoint
            return below(resume_from_checkpoint, *args, **kwargs)

        return train

    def _made_log(self, below: Any) -> Callable[..., Any]:
        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
            if self._log and self._watched is not None and "loss" in logs:
                self._watched.flush()
                latest = self._watched.latest
                logs = {**logs, **latest.summary("gradstat/", self._log == "parameters")}
                if "norm" in latest.scalars and not self._watch.clips_itself:
                    logs.setdefault("grad_norm", latest.scalars["norm"])
            return below(logs, *args, **kwargs)

        return log

    # Checkpoints -----------------------------------------------------------------------------------------

    def save(self, state: Any) -> None:
        """Writes the monitor's state into the newest checkpoint, on the rank that writes checkpoints."""
        folder = Path(self.trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if self._watched is None or not self.trainer.args.should_save or not folder.is_dir():
            return
        try:
            with replacing(folder / STATE_FILE) as file:
                torch.save(self._watched.monitor.state_dict(), file)
        except OSError as error:  # a full disk must not end what is watched
            warnings.warn(f"gradstat: {folder / STATE_FILE} could not be saved: {error}", RuntimeWarning, stacklevel=2)

    def _load(self, state: Any) -> None:
        watched, self_resume, self._resume = self._watched, self._resume, None
        assert watched is not None
        if not state.global_step:
            return
        if self_resume is True:
            self_resume = get_last_checkpoint(self.trainer.args.output_dir)
        saved = Path(str(self_resume)) / STATE_FILE
        if self_resume and saved.is_file():
            watched.load_state_dict(_loaded(saved))
        elif not watched.monitor.steps:
            watched.monitor.steps = int(state.global_step)  # so that findings name the Trainer's steps

    def remove(self) -> None:
        """Ends the watch: gives the Trainer and its accelerator their methods back. The monitor stays readable."""
        for replaced in reversed(self._replaced):
            replaced.remove()
        self._watch.remove()
        if self._callback in self.trainer.callback_handler.callbacks:
            self.trainer.remove_callback(self._callback)
        self._inputs = []
        if self._watched is not None:
            self._watched.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _loaded(saved: Path) -> Any:
    """The monitor's state from a checkpoint: tensors and plain values, nothing that would be executed."""
    try:
        return torch.load(saved, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise whatever they like
        raise RuntimeError(
            f"{saved} is damaged, or not the state of a monitor. Delete it to resume with a new monitor"
        ) from error
