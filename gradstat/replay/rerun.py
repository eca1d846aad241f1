"""`find_culprit`: runs a step again and names the first place that produced a NaN or Inf."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradstat._core.nested import tensors_in
from gradstat._core.parameters import named_parameters_of
from gradstat._core.text import expect
from gradstat._core.warn import QUIET, warn
from gradstat._step.loss_scale import inner_scaler
from gradstat.replay.culprit import Culprit, Phase
from gradstat.replay.nonfinite_mode import LeafHooks, ModuleTracker, NonfiniteMode
from gradstat.replay.step_state import StepState, StepStateKeeper, in_backward, is_evaluation, replays
from gradstat.replay.taint import Origin, first, is_nonfinite, looks_like_mask
from gradstat.replay.undo import Undo

CLEAN = (
    "the same step gave finite values this time. The fault depends on state that was not restored (an iterator, other "
    "state of your own), or is not a bug in the program: hardware, or a race"
)
_NO_SAVED_STATE = (
    "no state of the step was saved, so the replay used the current parameters, buffers and random state and may miss "
    "the cause; gradstat.Monitor(..., replay=True) saves it"
)


def find_culprit(
    model: Module,
    step_fn: Callable[..., Any],
    *,
    state: StepState | Sequence[StepState] | None = None,
    batch: Any = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    scaler: GradScaler | None = None,
) -> Culprit | None:
    """Runs a step again, restores all state, and names the first place that produced a NaN or Inf.

    This place is the origin of a nonfinite loss, or else of the first nonfinite gradient in the order in which
    gradients were complete. Infinities written on purpose (a mask of -Inf) count only if an operation turns them into
    NaN, or if there is no other origin. A replay is many times slower than a step.

    While it runs, optimizers and learning-rate schedulers do not step, gradients begin as None and compiled models
    run eagerly. Afterwards parameters, gradients, buffers, optimizers, the scaler, training flags and random states
    are as before, whatever ``step_fn`` does or raises. Other changes it makes are not undone.

    Args:
        model: The model whose modules and parameters are named.
        step_fn: Forward and backward, or a whole training step. Called with ``batch`` if there is one.
        state: `StepStateKeeper.states`, or one state. Each forward pass of ``model`` begins with its own state. None
            means the current state.
        batch: The argument of ``step_fn``. Its tensors are named if they are not finite.
        optimizer: The optimizer, or several. Other optimizers do step, and are restored afterwards.
        scaler: The loss scaler.

    Returns:
        The culprit. None if everything was finite this time: the fault is sporadic, in hardware or a race, or depends
        on something that was not restored.

    Raises:
        TypeError: ``model`` is not a module, ``step_fn`` is not callable, or ``state`` is not that of a keeper.
        RuntimeError: A backward pass is running.
        Exception: What ``step_fn`` raised, unless there is a culprit: a step may well raise at a NaN loss.
    """
    expect("model", model, Module, "a torch.nn.Module, whose modules can be named")
    expect("step_fn", step_fn, Callable, "a function that runs the step")
    if in_backward():
        raise RuntimeError("find_culprit() cannot run in a hook of a backward pass; call it after backward()")
    states = _states_of(state)
    expect("optimizer", optimizer, Optimizer | Iterable | None, "an optimizer, several, or None")
    scaler = inner_scaler(scaler)
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    named = _all_parameters(model, optimizers)
    inputs = [] if batch is None else list(tensors_in(batch, "batch"))
    returned: Any = None
    failure: Exception | None = None
    with contextlib.ExitStack() as afterwards:
        undo = Undo()
        afterwards.callback(undo.restore)
        undo.rng()
        undo.model(model)
        undo.parameters(p for _, p in named)
        undo.inputs(tensor for _, tensor in inputs)
        undo.no_steps(optimizers)
        if scaler is not None:
            undo.scaler(scaler)
        modules = ModuleTracker(model)
        afterwards.callback(modules.detach)
        watch = NonfiniteMode(modules, {id(p): name for name, p in named}, undo.before_write)
        afterwards.callback(watch.forget)
        leaves = LeafHooks(watch, named)
        afterwards.callback(leaves.detach)
        with contextlib.ExitStack() as context:
            context.callback(_restoring_states(model, states, watch).remove)
            context.enter_context(_replaying())
            _mark(watch, "input", inputs, may_be_masks=True)
            _mark(watch, "parameter", named)
            _mark(watch, "parameter", model.named_buffers(), may_be_masks=True)
            try:
                with torch.enable_grad(), watch:
                    returned = step_fn() if batch is None else step_fn(batch)
            except Exception as error:
                failure = error
        leaves.check_gradients()
        origin = _blamed_origin(watch, returned, failure is not None)
    try:
        if failure is not None and origin is None:
            raise failure
    finally:
        failure = None  # its traceback holds this frame, and with it all tensors of the step
    return None if origin is None else _counted(origin.culprit, watch)


def _counted(culprit: Culprit, watch: NonfiniteMode) -> Culprit:
    """The culprit with the number of other parameters and buffers that were not finite either."""
    if culprit.phase != "parameter":
        return culprit
    count = sum(one.culprit.phase == "parameter" and not one.intended for one in watch.origins)
    return replace(culprit, also=count - 1)


def _states_of(state: StepState | Sequence[StepState] | None) -> list[StepState]:
    expect("state", state, StepState | Iterable | None, "StepStateKeeper.states or a StepState")
    states = [state] if isinstance(state, StepState) else list(state or ())
    for item in states:
        if not isinstance(item, StepState):
            raise TypeError(f"state has to be StepStateKeeper.states or a StepState; got {type(item).__name__} in it")
    return states


@contextlib.contextmanager
def _replaying() -> Iterator[None]:
    """Compiled models run eagerly, nodes keep tracebacks (anomaly mode), and warnings of the step are not repeated."""
    replays.append(None)
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                yield
    finally:
        replays.pop()


def _blamed_origin(watch: NonfiniteMode, returned: Any, failed: bool) -> Origin | None:
    """The origin to blame, if a result of the step is not finite."""
    results = [first(watch.taint.of(t)) for _, t in tensors_in(returned, "") if is_nonfinite(t)]
    final = [*watch.reached, *filter(None, results)]
    for origin in final:
        if not origin.intended or origin.reduced:
            return origin
    # A step that raised or stopped before there was a gradient.
    if failed or not watch.backward_ran:
        final += [origin for origin in watch.origins if not (origin.intended or origin.unwritten)]
    final += [origin for origin in watch.origins if origin.culprit.phase == "parameter" and not origin.intended]
    return next(iter(final), None)


def _mark(watch: NonfiniteMode, phase: Phase, named: Iterable[tuple[str, Tensor]], may_be_masks: bool = False) -> None:
    """Adds origins of what is not finite before the step begins."""
    for name, tensor in named:
        if watch.is_new(tensor):
            module = None if phase == "input" else name.rpartition(".")[0]
            intended = may_be_masks and looks_like_mask(tensor)
            watch.add(tensor, called=name, intended=intended, phase=phase, module=module, name=name)


def _all_parameters(model: Module, optimizers: Iterable[Optimizer]) -> list[tuple[str, Any]]:
    """The parameters of the model, and those that only an optimizer has, each once."""
    by_id: dict[int, tuple[str, Any]] = {id(p): (name, p) for name, p in model.named_parameters()}
    for named in map(named_parameters_of, optimizers):
        for name, parameter in zip(named.names(), named.parameters, strict=True):
            by_id.setdefault(id(parameter), (name, parameter))
    return list(by_id.values())


def _restoring_states(model: Module, states: list[StepState], watch: NonfiniteMode) -> RemovableHandle:
    """Restores the i-th of ``states`` before the i-th forward pass of ``model``, and the first one at once, too."""
    todo = list(states)

    def before_forward(module: Module, args: Any) -> None:
        if todo and not in_backward() and not is_evaluation(module):
            with watch.paused():
                todo.pop(0).restore(model, watch.before_write)
                _mark(watch, "parameter", model.named_buffers(), may_be_masks=True)

    if todo:
        todo[0].restore(model, watch.before_write)
    return model.register_forward_pre_hook(before_forward, prepend=True)


def takes_batch(step_fn: Callable[..., Any]) -> bool:
    """Whether a replay calls ``step_fn`` with the batch, not without arguments. TypeError if neither is possible."""
    if _binds(step_fn, None):
        return True
    if not _binds(step_fn):
        raise TypeError(
            "replay: expected a function that runs a step, of no argument or of the batch alone, got "
            f"{getattr(step_fn, '__qualname__', step_fn)}{inspect.signature(step_fn)}; wrap it: lambda batch: ..."
        )
    return False


def _binds(step_fn: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(step_fn).bind(*arguments)
    except ValueError:  # a builtin without a signature
        return True
    except TypeError:
        return False
    return True


class Replayer:
    """Runs the newest step again. With ``replay``, the function for it or True, it keeps the step's state and batch."""

    def __init__(self, model: Module, optimizer: Optimizer | None, scaler: Any, replay: Callable[..., Any] | bool):
        self._model, self._optimizer, self.scaler = model, optimizer, scaler
        self._step_fn = replay if callable(replay) else None
        self.clean = CLEAN  # what is said of a step that was finite this time
        self.keeps_state = bool(replay)
        self._keeps_batch = self.keeps_state and (self._step_fn is None or takes_batch(self._step_fn))
        self._states = StepStateKeeper(model) if replay else None
        self._batch: Any = None
        self._versions: list[int] = []
        self.forget()

    def forget(self) -> None:
        """Forgets the results, as for another run."""
        self.culprit: Culprit | None = None  # of the last replay
        self.step = -1  # that it ran
        self.text = ""  # its result in words, or why it failed
        self._last_incident = -QUIET

    def keep_batch(self, batch: Any) -> None:
        """Keeps the batch of the coming step, if a function may take it."""
        if self._keeps_batch:
            self._batch = batch

    def require_batch(self, step_fn: Callable[..., Any] | None = None) -> None:
        """Raises TypeError if the function needs a batch and none has been given: it would fail in the replay."""
        chosen = step_fn or self._step_fn
        if self._batch is None and chosen is not None and not _binds(chosen):
            raise TypeError(
                "replay: the function takes the batch, which the monitor does not have; "
                "call monitor.check_batch(batch) before each forward pass"
            )

    def end_step(self) -> None:
        """Marks a step as complete: its gradients are there, and the optimizer has not stepped."""
        if self._states is not None:
            self._versions = [parameter._version for parameter in self._model.parameters()]
            self._states.end_step()

    def run(self, step: int, step_fn: Callable[..., Any] | None, was_skipped: bool) -> Culprit | None:
        """Runs ``step``, the newest, again; see `gradstat.Monitor.replay`."""
        chosen = step_fn or self._step_fn
        if chosen is None:
            raise TypeError("no function to run: monitor.replay(step_fn), or gradstat.Monitor(..., replay=step_fn)")
        states = batch = None
        if self._states is None:
            warn(f"replay: {_NO_SAVED_STATE}", RuntimeWarning)
        else:
            now = [parameter._version for parameter in self._model.parameters()]
            # A fused optimizer increments versions even if it was told to skip.
            if self._versions and now != self._versions and not was_skipped:
                raise RuntimeError(
                    "the parameters have changed since that step, so it cannot be replayed. Call replay() "
                    "before optimizer.step(); or let on_anomaly='replay' do it; or skip such steps: on_anomaly='skip'"
                )
            batch = self._batch if takes_batch(chosen) else None
            self.require_batch(chosen)
            states = self._states.states
        self.culprit = find_culprit(
            self._model, chosen, state=states, batch=batch, optimizer=self._optimizer, scaler=self.scaler
        )
        self.step, self.text = step, f"replay of step {step}: {self.clean if self.culprit is None else self.culprit}"
        if states is None:
            self.text += f"\n{_NO_SAVED_STATE}"
        return self.culprit

    def run_once(self, step: int, run: Callable[[], object]) -> None:
        """Calls ``run``, once per incident, and warns of the result, whatever it is: the training must not end."""
        if step - self._last_incident < QUIET:
            return
        self._last_incident = step
        try:
            run()
        except Exception as error:
            self.culprit, self.step = None, step
            self.text = f"the replay of step {step} failed: {type(error).__name__}: {error}"
        warn(self.text)

    def remove(self) -> None:
        """Removes the hook from the model and drops everything kept."""
        if self._states is not None:
            self._states.remove()
        self._batch = None
