"""`Handle`: what an integration returns. It watches the models that a framework trains."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._core.engines import engine_of
from gradstat._core.files import path_of
from gradstat._core.saved import MAPPING, require, require_version
from gradstat._core.warn import not_replacing
from gradstat._core.wrappers import without_ddp
from gradstat._version import __version__
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import Limit, state_tensor_of
from gradstat.integrations._engines import engine_clips
from gradstat.integrations.loggers import scalars_of
from gradstat.monitor import POLICIES, Finding, Monitor
from gradstat.monitor.arguments import Settings, refuse_unknown
from gradstat.monitor.listener import StepListener
from gradstat.monitor.source import StepSource
from gradstat.monitor.unwatched import Unwatched
from gradstat.patch import Layer
from gradstat.recording.kinds import asked_for
from gradstat.replay.step_state import is_replaying

if TYPE_CHECKING:
    from typing_extensions import Self

_VERSION = 1  # of states
# Every how many steps replicas are compared, unless ``watch`` says otherwise.
_COMPARE_EVERY = 100
# The attribute of a model with names of parameters that DDP leaves different on each rank.
_OWN = "_ddp_params_and_buffers_to_ignore"


class Watched(StepSource):
    """One watched model: its steps under a framework, which announces each backward pass and its unscaled loss.

    Attributes:
        model, optimizer: As the framework has them.
        monitor, listener: Its monitor, and who takes the monitor's steps.
    """

    is_loop, tells_backward = False, True
    monitor: Monitor
    listener: StepListener

    def __init__(self, handle: Handle, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().__init__(model, handle.device)
        self._handle, self.model, self.optimizer = handle, model, optimizer
        self.runs_steps, self.saves, self.outermost = handle.runs_steps, handle.saves, handle.outermost
        self._losses: list[Tensor] = []
        self._turn = 0  # in the last backward pass

    def begin(self, monitor: Monitor, limit: Limit | None, alone: bool) -> None:
        """Begins to take the steps of ``monitor``.

        ``limit``: what gradstat clips to. ``alone``: no other optimizer takes the steps of this one.
        """
        self.monitor, self.listener = monitor, StepListener(monitor, self.optimizer, limit, alone)
        self.has_engine = monitor.settings.engine is not None  # whose optimizer announces nothing
        if not self.has_engine:
            self.listener.listen()

    def is_complete(self) -> bool:
        return not is_replaying() and self._handle.is_complete(self)

    def loss(self, heard: Sequence[Any]) -> Any:
        """The loss of the step that is taken now; announcements know less about it than the framework."""
        self._handle.turns += 1
        losses, self._losses = self._losses, []
        total = super().loss(losses)
        divisor = self._handle.divisor() if losses else 1
        return total if divisor == 1 else total / divisor

    def why_nothing(self) -> str:
        return f"no step of an optimizer of {type(self.model).__name__} has been seen"

    def show(self, findings: list[Finding]) -> None:
        self._handle.on_findings(findings)

    def save_checkpoint(self) -> None:
        self._handle.save_checkpoint()

    def saw_backward(self, loss: Any) -> None:
        """Notes a backward pass from the unscaled ``loss``, which counts if it is a single number."""
        self.listener.saw_backward()
        with self.monitor.unwatched.suppress_errors(self.monitor.steps, "a loss could not be recorded"):
            if self._turn != self._handle.turns:  # what has not been measured belongs to the step of another model
                self._turn, self._losses = self._handle.turns, []
            if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
                self.monitor.recorder.saw_loss([loss])
                self._losses.append(loss.detach().reshape(()))

    def measure(self) -> None:
        """Takes the step, unless it has been taken, before a change that nothing announces."""
        if not is_replaying():
            self.listener.measure()

    def end(self) -> None:
        """Reads all pending numbers when training has ended or paused, on all ranks together; raises as a step does."""
        self.monitor.flush()
        self.monitor.responder.agree(self.monitor, wait=True)

    def remove(self, error: BaseException | None = None) -> None:
        """Ends the watching and saves the recording; ``error`` is the exception that ended the training, if any."""
        self.listener.remove()
        self.monitor.__exit__(None if error is None else type(error), error, None)


class Handle:
    """Watches the models that a framework trains. A context manager; leaving it removes.

    ``arguments`` are those of `gradstat.Monitor`, except for model, optimizer and scaler. Errors name ``caller``. With
    ``healthy``, no checkpoint is saved while a monitor is not healthy. Raises TypeError or ValueError as
    `gradstat.Monitor` does.
    """

    source: str = "trainer"  # of model, optimizer and scaler
    runs_steps: bool = False  # the framework's own step can be run again, so a replay needs no function
    saves = False  # the policy "checkpoint" exists

    def __init__(
        self, arguments: Mapping[str, Any], max_norm: Any = None, caller: Any = Monitor, healthy: bool = False
    ) -> None:
        for name in ("model", "optimizer", "scaler"):
            if name in arguments:
                raise TypeError(f"{name} is taken from the {self.source}; leave it out")
        refuse_unknown(arguments, caller, Monitor)
        # Where to save and what to replay is of the real monitor.
        checked = {name: value for name, value in arguments.items() if name not in ("save_to", "replay")}
        settings = Settings.of(**checked, max_norm=max_norm, saves=self.saves)
        self.arguments = {**arguments, "rules": settings.rules}
        if arguments.get("save_to") is not None:  # the folder may change before there is a monitor
            self.arguments["save_to"] = path_of(arguments["save_to"], "save_to").absolute()
        self.max_norm = settings.limit
        self.policies = {name for name in (*POLICIES, "checkpoint") if settings.policies.uses(name)}
        self.watch = asked_for(arguments.get("watch"))
        if "replay" in self.policies and not self.runs_steps and not callable(arguments.get("replay")):
            raise TypeError(
                "on_anomaly='replay' needs replay=step_fn, a function that runs forward and backward of a step once "
                "more: def step_fn(batch): loss = ...; loss.backward()"
            )
        self.replays = bool(arguments.get("replay")) or "replay" in self.policies
        self.healthy_checkpoints = healthy
        self.device: torch.device | None = None  # of this rank; None if it trains alone
        self.is_replicated = False  # whether DDP keeps the same parameters on all ranks
        self.outermost: CodeType | None = None  # as of a `StepSource`
        self.turns = 0  # how many steps have been measured of models that take turns
        self.watched: Sequence[Watched] = ()  # one for each model or optimizer, when training begins
        self._engine_clips = False
        self._patches: list[Layer] = []
        self._unwatched = Unwatched([])  # warns of failures of the adapter itself

    def is_complete(self, watched: Watched) -> bool:
        """Whether the gradients of ``watched`` are complete now, and what is about to change them concerns it."""
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
        return tuple(one.monitor for one in self.watched)

    @property
    def monitor(self) -> Monitor:
        """The monitor, if there is exactly one.

        Raises:
            RuntimeError: There is none yet, or there are several.
        """
        return self._single.monitor

    @property
    def should_stop(self) -> bool:
        """Whether the policy ``"stop"`` asks the loop to end; the same on all ranks."""
        return any(monitor.should_stop for monitor in self.monitors)

    def _prepare(self, engine: str | None, world_size: int, device: torch.device, setting: str) -> None:
        """Raises what `engine_clips` raises; afterwards models can be watched."""
        self._engine_clips = engine_clips(engine, self.policies, self.max_norm, world_size, setting)
        self.device = device if world_size > 1 else None

    def _attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: Any,
        limit: Limit | None = None,
        step_fn: Callable[..., Any] | None = None,
        steps_itself: bool = False,
    ) -> Watched:
        """Watches ``model``, with a monitor of its own. Raises as `gradstat.Monitor`.

        ``limit`` is the framework's own clip, if it has one: ``max_norm`` then clips nothing. ``step_fn`` runs a step
        again if the user gave no function for that. ``steps_itself``: no other optimizer does for this one. Parameters
        that DDP keeps the same on all ranks are compared from time to time.
        """
        arguments, number = dict(self.arguments), len(self.watched)
        arguments["rules"] = copy.deepcopy(arguments["rules"])  # rules have state
        if number:  # the first monitor uses the user's own guard
            arguments["guard"] = copy.deepcopy(arguments.get("guard"))
        if self.device is not None and self.is_replicated and not getattr(without_ddp(model), _OWN, ()):
            arguments["watch"] = {"replicas": _COMPARE_EVERY} | self.watch
        if self.replays and not callable(arguments.get("replay")):
            arguments["replay"] = step_fn or arguments.get("replay", False)
        if number and arguments.get("save_to") is not None:
            base = Path(arguments["save_to"])
            arguments["save_to"] = base.with_name(f"{base.stem}-{number}{base.suffix}")
        watched = Watched(self, model, optimizer)
        given = optimizer if engine_of(model) is None else None  # an engine has its own, which announces nothing
        max_norm = self.max_norm if limit is None else limit
        monitor = Monitor(model, given, scaler, max_norm=max_norm, source=watched, **arguments)
        watched.begin(monitor, self.max_norm if limit is None else None, steps_itself)
        self.watched = [*self.watched, watched]
        return watched

    @property
    def _single(self) -> Watched:
        if not self.watched:
            raise RuntimeError(
                "the monitor does not exist yet: it is made when training begins; use it afterwards or in a callback"
            )
        if len(self.watched) > 1:
            raise RuntimeError(f"there are {len(self.watched)} monitors; use .monitors")
        return self.watched[0]

    def scalars(self, **choice: Any) -> dict[str, float]:
        """The newest numbers, for a logger; waits for the device.

        Args:
            choice: As for `gradstat.integrations.loggers.scalars_of`. With several models, the prefix is followed by
                the index of the model.
        """
        out: dict[str, float] = {}
        prefix = choice.pop("prefix", "grad/")
        for i, monitor in enumerate(self.monitors):
            monitor.flush()
            out |= scalars_of(monitor, prefix=self._prefix(prefix, i), **choice)
        return out

    def _prefix(self, prefix: str, number: int) -> str:
        return f"{prefix}{number}/" if len(self.watched) > 1 else prefix

    def _saw_backward(self, loss: Any) -> None:
        for one in self.watched:
            one.saw_backward(loss)

    def _withholds_checkpoint(self) -> bool:
        """Whether any monitor withholds a checkpoint that is due (`Responder.withholds_checkpoint`)."""
        return any(m.responder.withholds_checkpoint(m, self.healthy_checkpoints) for m in self.monitors)

    def state_dict(self) -> dict[str, Any]:
        """The states of the monitors and of an adaptive clip, for a checkpoint. Waits for the device."""
        clip = self.max_norm
        return {
            "version": _VERSION,
            "gradstat": __version__,
            "monitors": [monitor.state_dict() for monitor in self.monitors],
            "clip": clip.state_dict() if isinstance(clip, AdaptiveClip) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, expect_restored: bool = True) -> None:
        """The inverse of `state_dict`.

        Args:
            state: What `state_dict` returned.
            expect_restored: As for `gradstat.Monitor.load_state_dict`.

        Raises:
            ValueError: The state is from another number of models, or in another version.
        """
        self._check_state(state)
        if len(state["monitors"]) != len(self.watched):
            raise ValueError(
                f"expected the state of {len(self.watched)} monitors, got {len(state['monitors'])}; prepare the "
                "same models before loading"
            )
        if isinstance(self.max_norm, AdaptiveClip) and state.get("clip") is not None:
            state_tensor_of(self.max_norm, state["clip"], "state['clip']")  # raises before a monitor has changed
        for monitor, saved in zip(self.monitors, state["monitors"], strict=True):
            monitor.load_state_dict(saved, expect_restored=expect_restored)
            monitor.should_stop = False  # it has stopped, and goes on
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

    def _remove(self) -> None:
        """Restores the methods of the framework. May be called twice."""
        while self._patches:
            self._patches.pop().remove()

    def remove(self) -> None:
        """Ends the watching: restores the methods of the framework. The monitors stay readable."""
        self._remove()
        for one in self.watched:
            one.remove()

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


def sizes_of(loader: Any) -> tuple[int, int]:
    """How many batches and samples ``loader`` has in an epoch; 0 for what it does not know, as of a stream."""
    sizes = [0, 0]
    for i, sized in enumerate((loader, getattr(loader, "dataset", None))):
        with contextlib.suppress(TypeError, NotImplementedError):
            sizes[i] = len(sized)
    return sizes[0], sizes[1]


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version; the rest is ignored."""
    major, minor, *_ = (*map(int, re.findall(r"\d+", text)[:2]), 0, 0)
    return major, minor
