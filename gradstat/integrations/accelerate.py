"""Watches training loops written with Hugging Face Accelerate: `install`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._accelerator import AcceleratorWatch
from gradstat.integrations._refusals import checked_limit, refuse_impossible, refuse_second
from gradstat.integrations._replaced import Replaced
from gradstat.integrations._requirements import require
from gradstat.integrations._watched import Options, Watched, unwrapped
from gradstat.monitor import Monitor
from gradstat.monitor.replay.step_state import is_replaying

require("accelerate", (1, 0))

from accelerate import Accelerator  # noqa: E402

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradstat.monitor.policies import Policies

__all__ = ["Handle", "install"]

_SOURCE = "accelerator"


def install(
    accelerator: Any,
    *,
    on_anomaly: Policies = None,
    max_norm: float | AdaptiveClip | None = None,
    watch: Mapping[str, int] | Sequence[str] | None = None,
    micro_batches: bool = True,
    **monitor_options: Any,
) -> Handle:
    """Puts a `gradstat.Monitor` on every model that ``accelerator`` has prepared. ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        handle = gradstat.integrations.accelerate.install(accelerator, on_anomaly="skip")

    The loop stays as it is. ``accelerator.clip_grad_norm_`` then measures what it is about to clip, once in each step
    of the optimizer; without clipping that happens just before the optimizer steps. ``accelerator.backward`` notes the
    loss. Two reads of the gradients, and no host sync on a GPU besides those of `gradstat.Monitor`.

    Args:
        accelerator: An ``accelerate.Accelerator``, after ``prepare``.
        on_anomaly: As for `gradstat.Monitor`.
        max_norm: What to clip to, if the loop does not clip, or to infinity only: a number, or an adaptive clip.
        watch: As for `gradstat.Monitor`.
        micro_batches: Whether to check gradients after every micro-batch of an accumulated step, too, so that the one
            that brought NaN is named: one more read for each.
        monitor_options: Further arguments of `gradstat.Monitor`.

    Returns:
        A handle with the monitors.

    Raises:
        TypeError: ``accelerator`` is something else, or an option is not the user's to give.
        RuntimeError: Nothing has been prepared yet, or gradstat is installed already.
        ValueError: An option makes no sense, or asks for what the engine does not allow.
        NotImplementedError: The engine (Megatron-LM, XLA) shows no gradients that could be measured.
    """
    _require_accelerator(accelerator)
    refuse_second(accelerator)
    if not accelerator._models or not accelerator._optimizers:
        lacking = "model" if not accelerator._models else "optimizer"
        raise RuntimeError(
            f"expected an accelerator that has prepared model and optimizer, got one without {lacking}; call install() "
            "after accelerator.prepare(model, optimizer, ...)"
        )
    options = Options({"on_anomaly": on_anomaly, "watch": watch, **monitor_options}, _SOURCE)
    max_norm = checked_limit(max_norm)
    if options.replays and not callable(monitor_options.get("replay")) and monitor_options.get("replay") is not True:
        raise TypeError("on_anomaly='replay' needs the function that does a step: install(..., replay=step_fn)")
    if isinstance(max_norm, AdaptiveClip) and len(accelerator._models) > 1:
        raise ValueError(
            f"expected a number as max_norm for {len(accelerator._models)} models, got {type(max_norm).__name__}, "
            "which has one history; clip each model by a clip of its own"
        )
    refuse_impossible(accelerator, options, max_norm)
    return Handle(accelerator, options, max_norm, micro_batches)


class Handle:
    """What `install` returns. A context manager; leaving it is `remove`."""

    def __init__(
        self, accelerator: Any, options: Options, max_norm: float | AdaptiveClip | None, micro_batches: bool
    ) -> None:
        """Made by `install`."""
        self._accelerator = accelerator
        several = accelerator.num_processes > 1
        pairs = [(model, _optimizer_of(model, accelerator._optimizers, options)) for model in accelerator._models]
        _refuse_shared([wrapper for _, wrapper in pairs if wrapper is not None], options)
        if not len(pairs) == len({id(wrapper) for _, wrapper in pairs}) == len(accelerator._optimizers):
            # Which optimizer has which parameters is no longer for one model to say.
            options.rules = [rule for rule in options.rules if rule.name != "optimizer-coverage"]
        watched = [
            Watched(model, None if wrapper is None else unwrapped(wrapper), accelerator.scaler, options, max_norm,
                    several=several)
            for model, wrapper in pairs
        ]  # fmt: skip
        self._watch = AcceleratorWatch(
            accelerator, watched, max_norm, lambda: accelerator.gradient_accumulation_steps if micro_batches else 1
        )
        self._steps = [
            Replaced(wrapper, "step", lambda below, one=one: self._made_step(one, below))  # type: ignore[misc]
            for one, (_, wrapper) in zip(watched, pairs, strict=True)
            if wrapper is not None
        ]

    def _made_step(self, one: Watched, below: Any) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if is_replaying() or not self._accelerator.sync_gradients:
                return below(*args, **kwargs)
            if not one.measured:  # the loop does not clip
                if self._watch.max_norm is not None and not self._watch.clips_itself:
                    self._accelerator.clip_grad_norm_(one.model.parameters(), math.inf)
                else:
                    self._watch.measure([one])
            one.measured = False
            return below(*args, **kwargs)

        return step

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """The monitor of each model, in the order in which they were prepared."""
        return tuple(one.monitor for one in self._watch.watched)

    @property
    def monitor(self) -> Monitor:
        """The monitor, of the only model.

        Raises:
            RuntimeError: There are several.
        """
        if len(self.monitors) != 1:
            raise RuntimeError(f"there are {len(self.monitors)} models with a monitor each: handle.monitors")
        return self.monitors[0]

    @property
    def should_stop(self) -> bool:
        """Whether the policy ``"stop"`` has been met, for the loop to look at; the same on all ranks."""
        return any(one.should_stop for one in self._watch.watched)

    def attributions(self, model: int = 0) -> dict[int, Any]:
        """By step, the `gradstat.AccumulationReport` of those in which something was found.

        Args:
            model: Which of the prepared models, in the order in which they were prepared.
        """
        return self._watch.watched[model].attributions

    def scalars(self, prefix: str = "gradstat/", *, parameters: bool = False) -> dict[str, float]:
        """The newest numbers for ``accelerator.log``; waits for them.

        Args:
            prefix: Of every name. With several models their number follows it.
            parameters: Whether to add the norm of each gradient.
        """
        out: dict[str, float] = {}
        for i, one in enumerate(self._watch.watched):
            one.flush()
            out |= one.latest.summary(f"{prefix}{i}/" if len(self._watch.watched) > 1 else prefix, parameters)
        return out

    def state_dict(self) -> dict[str, Any]:
        """The monitors' states: ``accelerator.register_for_checkpointing(handle)`` saves them beside checkpoints."""
        return {"monitors": [monitor.state_dict() for monitor in self.monitors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError: It is of another number of models.
        """
        if len(state["monitors"]) != len(self._watch.watched):
            raise ValueError(
                f"expected the state of {len(self._watch.watched)} monitors, got {len(state['monitors'])}; prepare the "
                "same models before loading"
            )
        for one, saved in zip(self._watch.watched, state["monitors"], strict=True):
            one.load_state_dict(saved)

    def remove(self) -> None:
        """Ends the watch: gives the accelerator and its optimizers their methods back. The monitors stay readable."""
        for replaced in reversed(self._steps):
            replaced.remove()
        self._watch.remove()
        for one in self._watch.watched:
            one.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _optimizer_of(model: nn.Module, optimizers: Sequence[Any], options: Options) -> Any:
    """The prepared optimizer of a model; None if it has none.

    Raises:
        ValueError: It has several, and steps have to be skipped.
    """
    ids = {id(parameter) for parameter in model.parameters()}
    those = [
        wrapper
        for wrapper in optimizers
        if any(id(p) in ids for group in unwrapped(wrapper).param_groups for p in group["params"])
    ]
    if len(those) > 1 and options.policies.uses("skip"):
        raise ValueError(
            f"expected one optimizer for {type(model).__name__} to skip steps of, got {len(those)}; use another policy "
            "than 'skip', or gradstat.guarded_step on each"
        )
    return those[0] if those else None


def _refuse_shared(wrappers: Sequence[Any], options: Options) -> None:
    """Raises ValueError if an optimizer serves several models, of which each would tell it whether to skip."""
    if options.policies.uses("skip") and len({id(wrapper) for wrapper in wrappers}) < len(wrappers):
        raise ValueError(
            f"expected an optimizer for each of {len(wrappers)} models to skip steps of, got one for several; put the "
            "models into one torch.nn.ModuleList and prepare that, or use another policy than 'skip'"
        )


def _require_accelerator(accelerator: object) -> None:
    """Raises TypeError unless it is an instance of ``Accelerator``."""
    if not isinstance(accelerator, Accelerator):
        what = f"the class {accelerator.__name__}" if isinstance(accelerator, type) else type(accelerator).__name__
        hint = "; pass an instance, not the class" if isinstance(accelerator, type) else ""
        raise TypeError(f"expected an accelerate.Accelerator, got {what}{hint}")
