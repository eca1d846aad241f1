"""The handle that an integration returns, and what all adapters have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradstat._core.saved import MAPPING, require, require_version
from gradstat._version import __version__
from gradstat.accumulation import AccumulationReport
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import Limit
from gradstat.integrations._attachment import Attachment
from gradstat.integrations._engines import engine_clips
from gradstat.integrations._options import Options
from gradstat.integrations.loggers import scalars_of
from gradstat.monitor import Monitor
from gradstat.monitor.replay.step_state import is_replaying
from gradstat.monitor.reporting import not_replacing
from gradstat.monitor.unwatched import Unwatched
from gradstat.patch import Layer, lock

if TYPE_CHECKING:
    from typing_extensions import Self

_VERSION = 1  # of states
_MARK = "_gradstat_handle"  # the attribute of a watched object that holds its handle


class Handle:
    """The base of what integrations return. A context manager; leaving it calls `remove`.

    Attributes:
        attachments: One `Attachment` for each model or optimizer; empty before training begins.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._patches: list[Layer] = []
        self._owner: Any = None
        self._unwatched = Unwatched([])  # warns of failures of the handle itself
        self._turns = [0]  # how many steps have been measured of models that take turns
        self._engine_clips = False
        self._device: torch.device | None = None  # of this rank; None if it trains alone
        self._is_replicated = False  # whether DDP keeps the same parameters on all ranks
        self.attachments: Sequence[Attachment] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.monitors)) or 'nothing watched yet'})"

    @property
    def monitors(self) -> tuple[Monitor, ...]:
        """The monitors, one for each model or optimizer, in the same order."""
        return tuple(attachment.monitor for attachment in self.attachments)

    @property
    def monitor(self) -> Monitor:
        """The monitor, if there is exactly one.

        Raises:
            RuntimeError: There is none yet, or there are several.
        """
        return self._single.monitor

    @property
    def micro_batch_reports(self) -> dict[int, AccumulationReport]:
        """A `gradstat.AccumulationReport` for each step in which something was found.

        Raises:
            RuntimeError: There is no monitor yet, or there are several.
        """
        return self._single.micro_batch_reports

    @property
    def should_stop(self) -> bool:
        """Whether the policy ``"stop"`` asks the loop to end; the same on all ranks."""
        return any(attachment.should_stop for attachment in self.attachments)

    def _prepare(self, engine: str | None, world_size: int, device: torch.device, setting: str) -> None:
        """Raises what `engine_clips` raises; afterwards attachments can be made."""
        self._engine_clips = engine_clips(engine, self._options, world_size, setting)
        self._device = device if world_size > 1 else None

    def _attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: Any,
        limit: Limit | None = None,
        step_fn: Callable[..., Any] | None = None,
    ) -> Attachment:
        """Adds an attachment; the arguments are those of `Attachment`."""
        place = self._device, len(self.attachments), self._is_replicated
        made = Attachment(model, optimizer, scaler, self._options, limit, step_fn, *place)
        made.turns = self._turns
        self.attachments = [*self.attachments, made]
        return made

    @property
    def _single(self) -> Attachment:
        if not self.attachments:
            raise RuntimeError(
                "the monitor does not exist yet: it is made when training begins; use it afterwards or in a callback"
            )
        if len(self.attachments) > 1:
            raise RuntimeError(f"there are {len(self.attachments)} monitors; use .monitors")
        return self.attachments[0]

    def scalars(self, **choice: Any) -> dict[str, float]:
        """The newest numbers, for a logger; waits for the device.

        Args:
            choice: As for `gradstat.integrations.loggers.scalars_of`. With several models, the prefix is followed by
                the index of the model.
        """
        out: dict[str, float] = {}
        prefix = choice.pop("prefix", "grad/")
        for i, attachment in enumerate(self.attachments):
            attachment.flush()
            out |= scalars_of(attachment.monitor, prefix=self._prefix(prefix, i), **choice)
        return out

    def _prefix(self, prefix: str, number: int) -> str:
        return f"{prefix}{number}/" if len(self.attachments) > 1 else prefix

    def _saw_backward(self, loss: Any, is_micro_batch: bool) -> None:
        for attachment in self.attachments:
            attachment.saw_backward(loss, is_micro_batch)

    def _in_engine_step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        for attachment in self.attachments:
            attachment.measure()
        return original(*args, **kwargs)

    def _refuse_another_limit(self, asked: Any, caller: str) -> None:
        """ValueError if ``caller``, the framework's clip, clips to another limit than ``max_norm``."""
        max_norm = self._options.max_norm
        if max_norm is not None and asked is not None and float(asked) not in (max_norm, math.inf):
            raise ValueError(
                f"clip configured twice: install(..., max_norm={max_norm!r}), and {caller} is called with "
                f"{float(asked)!r}. Leave max_norm out of install(), or pass float('inf') to {caller}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The states of the monitors and of an adaptive clip, for a checkpoint. Waits for the device."""
        clip = self._options.max_norm
        return {
            "version": _VERSION,
            "gradstat": __version__,
            "monitors": [monitor.state_dict() for monitor in self.monitors],
            "clip": clip.state_dict() if isinstance(clip, AdaptiveClip) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError: The state is from another number of models, or in another version.
        """
        self._check_state(state)
        if len(state["monitors"]) != len(self.attachments):
            raise ValueError(
                f"expected the state of {len(self.attachments)} monitors, got {len(state['monitors'])}; prepare the "
                "same models before loading"
            )
        if isinstance(self._options.max_norm, AdaptiveClip) and state.get("clip") is not None:
            self._options.max_norm._loaded(state["clip"], "state['clip']")  # raises before a monitor has changed
        for attachment, saved in zip(self.attachments, state["monitors"], strict=True):
            attachment.load_state_dict(saved)
        self._load_clip(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        require_version(state, _VERSION)
        require(state, {"monitors": [MAPPING]})

    def _load_clip(self, state: Mapping[str, Any]) -> None:
        if isinstance(self._options.max_norm, AdaptiveClip) and state.get("clip") is not None:
            self._options.max_norm.load_state_dict(state["clip"])

    def _end_origin_tracking(self, owner: Any) -> None:
        """Removes an earlier handle of ``owner`` that tracks origins, since a model has only one tracker."""
        earlier = getattr(owner, _MARK, None)
        if earlier is not None and self._options.tracks_origin and earlier._options.tracks_origin:
            earlier.remove()

    def _mark_watched(self, owner: Any) -> None:
        """Marks ``owner`` as watched. An earlier handle is removed, as of a notebook cell that runs again."""
        earlier = getattr(owner, _MARK, None)
        if earlier is not None:
            earlier.remove()
        self._owner = owner
        setattr(owner, _MARK, self)

    def _patch(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replaces a method of ``owner`` alone; ``replacement`` gets the original as its first argument."""

        def unless_replaying(layer: Layer, *args: Any, **kwargs: Any) -> Any:  # a repeated step does not count as one
            below = layer.below
            return below(*args, **kwargs) if is_replaying() else replacement(below, *args, **kwargs)

        with lock:
            self._patches.append(Layer(owner, name, unless_replaying))

    def _detach(self) -> None:
        """Restores the methods of the framework. May be called twice."""
        while self._patches:
            with lock:
                self._patches.pop().remove()
        if getattr(self._owner, _MARK, None) is self:
            delattr(self._owner, _MARK)

    def remove(self) -> None:
        """Ends the watching: restores the methods of the framework. The monitors stay readable."""
        self._detach()
        for attachment in self.attachments:
            attachment.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with not_replacing(error):
            self.remove()
