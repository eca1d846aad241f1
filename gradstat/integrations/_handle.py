"""The handle that an integration returns, and what all adapters have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradstat.accumulation import AccumulationReport
from gradstat.adaptive import AdaptiveClip
from gradstat.clip import clip_grad_norm_
from gradstat.integrations._framework import PatchedMethod
from gradstat.integrations._options import Options
from gradstat.integrations._watch import Watch
from gradstat.integrations.loggers import scalars_of
from gradstat.monitor import Monitor
from gradstat.monitor.gaps import Gaps
from gradstat.monitor.reporting import not_replacing

if TYPE_CHECKING:
    from typing_extensions import Self

_MARK = "_gradstat_watch"  # set on the watched object, to the handle that watches it
# For an object that several handles may patch, how often they have measured.
_MEASUREMENTS: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


class Handle:
    """The base of what integrations return. A context manager; leaving it calls `remove`.

    ``shared``: the object whose backward passes are shown to several handles, if any.

    Attributes:
        watches: One `Watch` for each model or optimizer; empty before training begins.
    """

    def __init__(self, options: Options, shared: Any = None) -> None:
        self._options = options
        self._patches: list[PatchedMethod] = []
        self._owner: Any = None
        self._gaps = Gaps([])  # warns of failures of the handle itself
        self._measurements = [0] if shared is None else _MEASUREMENTS.setdefault(shared, [0])
        self._measurements_at_backward = 0  # in the last backward pass
        self.watches: Sequence[Watch] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.monitors)) or 'nothing watched yet'})"

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """The monitors, one for each model or optimizer, in the same order."""
        return tuple(watch.monitor for watch in self.watches)

    @property
    def monitor(self) -> Monitor:
        """The monitor, if there is exactly one.

        Raises:
            RuntimeError: There is none yet, or there are several.
        """
        return self._single_watch.monitor

    @property
    def micro_batch_reports(self) -> dict[int, AccumulationReport]:
        """A `gradstat.AccumulationReport` for each step in which something was found; raises as `monitor` does."""
        return self._single_watch.micro_batch_reports

    @property
    def should_stop(self) -> bool:
        """Whether the policy ``"stop"`` asks the loop to end; the same on all ranks."""
        return any(watch.should_stop for watch in self.watches)

    @property
    def _single_watch(self) -> Watch:
        if not self.watches:
            raise RuntimeError(
                "the monitor does not exist yet: it is made when training begins; use it afterwards or in a callback"
            )
        if len(self.watches) > 1:
            raise RuntimeError(f"there are {len(self.watches)} monitors; use .monitors")
        return self.watches[0]

    def scalars(self, **choice: Any) -> dict[str, float]:
        """The newest numbers, for a logger; waits for the device.

        Args:
            choice: As for `gradstat.integrations.loggers.scalars_of`. With several models, the prefix is followed by
                the index of the model.
        """
        out: dict[str, float] = {}
        prefix = choice.pop("prefix", "grad/")
        for i, watch in enumerate(self.watches):
            watch.flush()
            out |= scalars_of(watch.monitor, prefix=self._prefix(prefix, i), **choice)
        return out

    def _prefix(self, prefix: str, number: int) -> str:
        return f"{prefix}{number}/" if len(self.watches) > 1 else prefix

    def _saw_backward(self, loss: Any, is_micro_batch: bool) -> None:
        (measurements,) = self._measurements
        if measurements != self._measurements_at_backward:
            # With models that take turns, none may be given the losses of another.
            self._measurements_at_backward = measurements
            for watch in self.watches:
                watch.forget()
        for watch in self.watches:
            watch.saw_backward(loss, is_micro_batch)

    def _measure(self, watches: Iterable[Watch], divisor: int = 1) -> None:
        """Lets monitors measure the current gradients, each once per step."""
        for watch in watches:
            if not watch.measured:
                self._measurements[0] += 1
                watch.step(divisor)

    def _limit(self, asked: float, caller: str) -> float | AdaptiveClip:
        """The limit if ``caller``, the framework's clip, gets ``asked``; ValueError if ``max_norm`` conflicts."""
        own = self._options.max_norm
        asked = float(asked)
        if own is None or own == asked:
            return asked
        if asked == math.inf:
            return own
        raise ValueError(
            f"clip configured twice: install(..., max_norm={own!r}), and {caller} is called with {asked!r}. "
            f"Leave max_norm out of install(), or pass float('inf') to {caller}"
        )

    def _norm_of(self, parameters: list[Tensor], norm_type: float = 2.0) -> Tensor | None:
        """The total norm of unscaled gradients; None, after a warning, if `_torch_clip` has to clip instead."""
        norm = None
        with self._gaps.suppress_errors(0, "gradstat could not clip; torch does"):
            norm = clip_grad_norm_(parameters, math.inf, norm_type)  # only measures
        return norm  # noqa: RET504  None if an error was suppressed

    def _torch_clip(self, parameters: list[Tensor], asked: float, norm_type: float = 2.0, error: bool = False) -> Any:
        """Clips by torch: the framework's own clip would unscale the gradients, which are unscaled, once more."""
        own = self._options.max_norm
        limit = own if isinstance(own, float) else asked
        return torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type, error)

    def state_dict(self) -> dict[str, Any]:
        """The states of the monitors and of an adaptive clip, for a checkpoint. Waits for the device."""
        clip = self._options.max_norm
        return {
            "version": 1,
            "monitors": [monitor.state_dict() for monitor in self.monitors],
            "clip": clip.state_dict() if isinstance(clip, AdaptiveClip) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError: The state is from another number of models, or from a newer gradstat.
        """
        self._check_version(state)
        if len(state["monitors"]) != len(self.watches):
            raise ValueError(
                f"expected the state of {len(self.watches)} monitors, got {len(state['monitors'])}; prepare the same "
                "models before loading"
            )
        if isinstance(self._options.max_norm, AdaptiveClip) and state["clip"] is not None:
            self._options.max_norm._loaded(state["clip"])  # raises before a monitor has changed
        for watch, saved in zip(self.watches, state["monitors"], strict=True):
            watch.load_state_dict(saved)
        self._load_clip(state)

    def _check_version(self, state: Mapping[str, Any]) -> None:
        if state["version"] != 1:
            raise ValueError(f"expected a state of version 1, got {state['version']}; upgrade gradstat, or omit it")

    def _load_clip(self, state: Mapping[str, Any]) -> None:
        if isinstance(self._options.max_norm, AdaptiveClip) and state["clip"] is not None:
            self._options.max_norm.load_state_dict(state["clip"])

    def _end_origin_watch(self, owner: Any) -> None:
        """Before watches are made: removes a handle of ``owner`` that watches the origin, as a model has one such."""
        known = getattr(owner, _MARK, None)
        if known is not None and self._options.watches_origin and known._options.watches_origin:
            known.remove()

    def _mark_watched(self, owner: Any) -> None:
        """Marks ``owner`` as watched. A handle it already has, as when a notebook cell runs again, is removed."""
        known = getattr(owner, _MARK, None)
        if known is not None:
            known.remove()
        self._owner = owner
        setattr(owner, _MARK, self)

    def _patch(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._patches.append(PatchedMethod(owner, name, replacement))

    def _detach(self) -> None:
        """Restores the methods of the framework. May be called twice."""
        while self._patches:
            self._patches.pop().remove()
        if getattr(self._owner, _MARK, None) is self:
            delattr(self._owner, _MARK)

    def remove(self) -> None:
        """Ends the watch: restores the methods of the framework. The monitors stay readable."""
        self._detach()
        for watch in self.watches:
            watch.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with not_replacing(error):
            self.remove()
