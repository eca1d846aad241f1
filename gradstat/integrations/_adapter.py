"""`Adapter`: what an integration returns, and what all of them have in common."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradstat._core.files import path_of
from gradstat._core.saved import MAPPING, require, require_version
from gradstat._core.warn import not_replacing
from gradstat._version import __version__
from gradstat.accumulation import AccumulationReport
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import state_tensor_of
from gradstat.integrations._attachment import Attachment
from gradstat.integrations._engines import engine_clips
from gradstat.integrations.loggers import scalars_of
from gradstat.monitor import POLICIES, Finding, Monitor
from gradstat.monitor.arguments import Settings, refuse_unknown
from gradstat.monitor.unwatched import Unwatched
from gradstat.patch import Layer
from gradstat.recording.kinds import asked_for
from gradstat.replay.step_state import is_replaying

if TYPE_CHECKING:
    from typing_extensions import Self

_VERSION = 1  # of states


class Adapter:
    """Attaches monitors to a training, and knows what only its framework does. A context manager; leaving it removes.

    ``arguments`` are those of `gradstat.Monitor`, except for model, optimizer and scaler. Errors name ``caller``. With
    ``healthy``, no checkpoint is saved while a monitor is not healthy. Raises TypeError or ValueError as
    `gradstat.Monitor` does.
    """

    source = "trainer"  # of model, optimizer and scaler
    runs_steps = False  # the framework's own step can be run again, so a replay needs no function
    saves = False  # the policy "checkpoint" exists

    def __init__(
        self, arguments: Mapping[str, Any], max_norm: Any = None, caller: Any = Monitor, healthy: bool = False
    ) -> None:
        for name in ("model", "optimizer", "scaler"):
            if name in arguments:
                raise TypeError(f"{name} is taken from the {self.source}; leave it out")
        refuse_unknown(arguments, caller, Monitor)
        known = (*POLICIES, "checkpoint") if self.saves else POLICIES
        # Where to save and what to replay is of the real monitor.
        checked = {name: value for name, value in arguments.items() if name not in ("save_to", "replay")}
        settings = Settings.of(**checked, max_norm=max_norm, policies=known)
        self.arguments = {**arguments, "rules": settings.rules}
        if arguments.get("save_to") is not None:  # the folder may change before there is a monitor
            self.arguments["save_to"] = path_of(arguments["save_to"], "save_to").absolute()
        self.max_norm, self.table = settings.limit, settings.policies
        self.policies = {name for name in known if self.table.uses(name)}
        self.watch = asked_for(arguments.get("watch"))
        if "replay" in self.policies and not self.runs_steps and not callable(arguments.get("replay")):
            raise TypeError("on_anomaly='replay' needs the function that runs a step: install(..., replay=step_fn)")
        self.replays = bool(arguments.get("replay")) or "replay" in self.policies
        self.healthy_checkpoints = healthy
        self.device: torch.device | None = None  # of this rank; None if it trains alone
        self.is_replicated = False  # whether DDP keeps the same parameters on all ranks
        self.turns = 0  # how many steps have been measured of models that take turns
        self.attachments: Sequence[Attachment] = ()  # one for each model or optimizer, when training begins
        self._engine_clips = False
        self._patches: list[Layer] = []
        self._unwatched = Unwatched([])  # warns of failures of the adapter itself

    def is_complete(self, attachment: Attachment) -> bool:
        """Whether the gradients of ``attachment`` are complete now, and what is about to change them concerns it."""
        return True

    def divisor(self) -> int:
        """What the sum of the losses of a step's micro-batches is divided by."""
        return 1

    def on_findings(self, findings: list[Finding]) -> None:
        """Shows new findings in the way of the framework."""

    def save_checkpoint(self) -> None:
        """Carries out the policy ``"checkpoint"``, on all ranks."""

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
        self._engine_clips = engine_clips(engine, self.policies, self.max_norm, world_size, setting)
        self.device = device if world_size > 1 else None

    def _attach(self, model: nn.Module, optimizer: Optimizer | None, scaler: Any, **more: Any) -> Attachment:
        """Adds an attachment; the arguments are those of `Attachment`."""
        made = Attachment(self, model, optimizer, scaler, **more)
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

    def state_dict(self) -> dict[str, Any]:
        """The states of the monitors and of an adaptive clip, for a checkpoint. Waits for the device."""
        clip = self.max_norm
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
        if isinstance(self.max_norm, AdaptiveClip) and state.get("clip") is not None:
            state_tensor_of(self.max_norm, state["clip"], "state['clip']")  # raises before a monitor has changed
        for attachment, saved in zip(self.attachments, state["monitors"], strict=True):
            attachment.load_state_dict(saved)
        self._load_clip(state)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        require_version(state, _VERSION)
        require(state, {"monitors": [MAPPING]})

    def _load_clip(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.max_norm, AdaptiveClip) and state.get("clip") is not None:
            self.max_norm.load_state_dict(state["clip"])

    def _patch(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replaces a method of ``owner`` alone; ``replacement`` gets the original as its first argument."""

        def unless_replaying(layer: Layer, *args: Any, **kwargs: Any) -> Any:  # a repeated step does not count as one
            below = layer.below
            return below(*args, **kwargs) if is_replaying() else replacement(below, *args, **kwargs)

        self._patches.append(Layer(owner, name, unless_replaying))

    def _detach(self) -> None:
        """Restores the methods of the framework. May be called twice."""
        while self._patches:
            self._patches.pop().remove()

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


def require_framework(name: str, minimum: tuple[int, int], extra: str = "") -> ModuleType:
    """Imports the framework ``name``; ``extra`` is gradstat's extra that installs it, by default of the same name.

    Raises ImportError, which says what to install, if it is missing or older than ``minimum``.
    """
    extra = extra or name
    wanted = f"{name}>={minimum[0]}.{minimum[1]}"
    remedy = f"pip install -U '{wanted}', or 'gradstat[{extra}]'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"gradstat.integrations.{extra} needs {wanted}, which is not installed: {remedy}") from None
    version = str(getattr(module, "__version__", "0.0"))
    if version_of(version) < minimum:
        raise ImportError(f"gradstat.integrations.{extra} needs {wanted}, found {version}: {remedy}")
    return module


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version; the rest is ignored."""
    major, minor, *_ = (*map(int, re.findall(r"\d+", text)[:2]), 0, 0)
    return major, minor
