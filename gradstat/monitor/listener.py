"""`StepListener`: takes a monitor's steps when it hears that gradients are about to be changed or used.

Clips and loss scalers change gradients before the optimizer steps, and a scaler may skip the step. Each of them
announces what it is about to do (`gradstat._core.announce`), and the monitor measures before the first of them does.
What only the program or its framework knows, the listener asks the monitor's `StepSource`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradstat._core import announce
from gradstat._core.announce import Closure
from gradstat._core.parameters import named_parameters_of
from gradstat._step import decision, torch_calls
from gradstat._step.record import clip_before_step
from gradstat.adaptive import AdaptiveClip
from gradstat.adaptive._base import Limit
from gradstat.monitor.backward_passes import BackwardPasses, State, is_same, state_of
from gradstat.monitor.monitor import Monitor
from gradstat.monitor.probes.gradients import Zeroed
from gradstat.monitor.probes.optimizer import ids_of
from gradstat.monitor.zeroed_passes import ZeroedPasses
from gradstat.rules.rows import Observation

# So many calls, two for each step, tell that another optimizer has replaced the watched one.
_REPLACED = 32

_CLIPS = "calls of clips and loss scalers could not be tracked"


class StepListener:
    """Hears what is announced about the parameters of ``monitor`` and about ``optimizer``, and takes its steps.

    Args:
        max_norm: What gradients are clipped to after they were measured; None to leave them as they are.
        steps_itself: Whether no other optimizer steps in place of this one, as SAM does.
    """

    def __init__(
        self, monitor: Monitor, optimizer: Optimizer | None, max_norm: Limit | None, steps_itself: bool = False
    ) -> None:
        self.monitor, self.optimizer, self._max_norm = monitor, optimizer, max_norm
        self._source, self._recorder = monitor.source, monitor.recorder
        # The first of the gradients that have been measured, and of those that the last step has used.
        self._measured: State | None = None
        self._used: State | None = None
        self._passes = BackwardPasses(monitor.recorder.inner, self.hear)
        self._thread: int | None = None  # that trains; another one's announcements may concern another model
        self._known: Sequence[Tensor] = ()  # what was watched when it last looked
        self._roots: list[Tensor] = []  # whose backward passes have changed the gradients since they were zeroed
        self._zeroed = ZeroedPasses(self._parameters, self._source.outermost)
        self._clips_late = False
        self._is_over = False  # the step has been measured; further calls of its closure are ignored
        self._running: Optimizer | None = None  # the optimizer whose step has begun and not ended
        self._steps_itself = steps_itself  # or a step of this very optimizer has been seen
        self._trained_ids = ids_of(optimizer) if optimizer is not None else set[int]()
        self._beside = 0  # calls about steps of other optimizers of its parameters, since its own last step
        self.others: set[str] = set()  # classes of other optimizers whose steps were seen before the first of ours

    def listen(self) -> None:
        """Begins to hear announcements."""
        torch_calls.listen(self)
        with self._contained():
            self._passes.hear_all(self._parameters())

    def remove(self) -> None:
        """Hears nothing any more."""
        torch_calls.leave(self)
        self._passes.remove()

    # Announcements ---------------------------------------------------------------------------------------

    def before_change(self, parameters: Sequence[Tensor], scaler: Any, loss: Any, limit: Any) -> None:
        """Measures the complete gradients of ``parameters``, unless it has, before ``scaler`` or a clip changes them.

        ``loss`` is the step's, or None, and ``limit`` the clip's.
        """
        if not (self.holds(parameters) and self._source.is_complete()):
            return
        if scaler is None and self._are_used():
            self._clips_late = True
            return
        with self._contained():
            self._zeroed.before_change()
        self.measure(scaler, loss)
        if self.monitor.clips is not None:
            self.monitor.clips.before_change(parameters, scaler, loss, limit)

    def after_change(self, parameters: Sequence[Tensor]) -> None:
        """Notes that the gradients of ``parameters`` have been measured, though they are others now."""
        if self.holds(parameters) and self._source.is_complete():
            with self._contained():
                self._passes.note()
                self._zeroed.after_change()
                now = state_of(self._first_gradient())
                if self._clips_late:
                    self._used, self._clips_late = now, False
                else:
                    self._measured = now

    def hear(self, parameter: weakref.ref[Tensor], *_: Tensor) -> None:
        """A hook on ``parameter``: a backward pass is about to add to its gradient, or has."""
        reached = parameter()
        assert reached is not None
        running = announce.running_pass(reached.is_cpu)
        if running is None:
            return
        if self not in running.reached:
            running.reached.append(self)
            self._thread = running.thread
            self._passes.begin()
        self._passes.reach(reached)
        if self._zeroed.is_looking and self._passes.is_followed(reached):
            with self._contained():
                self._zeroed.before_pass(reached.grad)

    def after_backward(self, losses: Sequence[Tensor]) -> None:
        """Takes ``losses`` for those of the coming step; forgets those of gradients that were zeroed.

        Warns if no step uses any of them.
        """
        zeroed = None
        with self._contained():
            version, were_zeroed = self._passes.version, self._passes.end()
            if were_zeroed is not None:
                versions, wrapper = (version, self._passes.version), self._source.wrapper
                is_local = not getattr(wrapper, "require_backward_grad_sync", True)
                zeroed = self._zeroed.after_pass(were_zeroed, versions, wrapper.training, is_local)
            if were_zeroed:
                self._roots.clear()
            if were_zeroed is not None and not self._source.tells_backward:
                self._measured = None
                self._roots += [loss.detach().reshape(()) for loss in losses]
                self._recorder.saw_loss(losses)
        if zeroed is not None:
            self._tell(zeroed)

    def _tell(self, zeroed: Zeroed) -> None:
        """Lets the monitor respond to passes that no step uses."""
        seen = [Observation("unused", self.monitor.steps - zeroed.steps, zeroed)]
        self.monitor.responder.respond_to(self.monitor, seen)

    def backward_failed(self, error: BaseException) -> None:
        """Keeps what ended the run, unless it goes on."""
        self.monitor.reviewer.note_error(error)

    def saw_backward(self) -> None:
        """A backward pass has added to the gradients, as the source says (`StepSource.tells_backward`)."""
        self._measured = None

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """Measures and clips before ``optimizer`` steps, or in its closure, which computes the gradients."""
        if optimizer is self.optimizer:
            self._steps_itself, self._thread, self._beside = True, threading.get_ident(), 0
        elif not self._steps_in_place(optimizer):
            return closure
        # A step that has raised in a hook or in the optimizer did not end.
        has_failed, self._running = self._running is optimizer, optimizer
        if closure is None:
            if has_failed:
                self._is_over = False
            if has_failed or self._measured is None:
                self.measure()
            self._judge_passes()
            if self._max_norm is not None:
                _clip(optimizer, self._max_norm)
            return None
        # The gradients of the closure's first call are the step's. It may compute none, as Lightning's under manual
        # optimization; then those that were measured before stay measured.
        self._measured, self._is_over = None if has_failed else self._measured, False

        def evaluated() -> Any:
            loss = closure()
            is_first = not self._is_over
            self.measure(None, loss)  # unless a clip in the closure has
            self._is_over = True
            if is_first:
                self._judge_passes()
            # An adaptive clip would take each evaluation for a step.
            if self._max_norm is not None and (is_first or not isinstance(self._max_norm, AdaptiveClip)):
                _clip(optimizer, self._max_norm)
            return loss

        return evaluated

    def after_step(self, optimizer: Optimizer) -> None:
        """Marks the coming step of ``optimizer`` as not measured yet."""
        if optimizer is self.optimizer or self._steps_in_place(optimizer):
            self._used, self._measured, self._is_over, self._running = self._measured, None, False, None
            self._zeroed.after_step()

    def _judge_passes(self) -> None:
        """Warns of backward passes that the step which begins does not use."""
        zeroed = None
        try:
            zeroed = self._zeroed.before_step()
        except Exception:
            self.monitor.unwatched.report_failure(self.monitor.steps, _CLIPS)
        if zeroed is not None:
            self._tell(zeroed)

    # Steps -----------------------------------------------------------------------------------------------

    def measure(self, scaler: Any = None, loss: Any = None) -> None:
        """Lets the monitor take the step, unless it has; ``scaler`` and ``loss`` as far as they are announced.

        Raises as `Monitor.step`.
        """
        if self._is_over:
            return
        monitor = self.monitor
        try:
            are_scaled = torch_calls.has_losses()
            if are_scaled and scaler is None and len(announce.listeners()) == 1:
                scaler = torch_calls.only_scaler()  # no other can have scaled these gradients
            if scaler is not None and monitor.scaler is None:
                monitor.scaler = scaler
            if self._measured is not None and self.is_measured():
                return
            self._passes.check(self._parameters())
            heard, self._roots = self._roots, []
            heard = torch_calls.losses_scaled_by(monitor.scaler) if are_scaled else heard
            loss = self._source.loss(heard if loss is None else [loss])
        except Exception:
            monitor.unwatched.report_failure(monitor.steps, _CLIPS)
        # A closure may return anything.
        is_loss = isinstance(loss, (int, float)) or (isinstance(loss, Tensor) and loss.numel() == 1)
        try:
            monitor.step(loss if is_loss else None)
        finally:  # a program may catch the error of a policy
            self._measured = state_of(self._first_gradient())

    def is_measured(self) -> bool:
        """Whether the current gradients have been measured: no backward pass has changed them since."""
        if self._measured is None or self._source.tells_backward:
            return self._measured is not None
        now = state_of(self._first_gradient())
        return now[0] is None or is_same(now, self._measured)

    def holds(self, parameters: Sequence[object]) -> bool:
        """Whether the optimizer trains any of ``parameters``: the model may have others, of a network in turn."""
        trained: Sequence[object] = ()
        with self._contained():
            trained = self._trained()
        if trained and parameters and trained[0] is parameters[0]:
            return True
        return not set(map(id, trained)).isdisjoint(map(id, parameters))

    def _contained(self) -> Any:
        """Turns gradstat's own errors inside into one warning; those of policies pass."""
        return self.monitor.unwatched.suppress_errors(self.monitor.steps, _CLIPS)

    def _parameters(self) -> Sequence[Tensor]:
        """What is watched. In another thread than the one that trains, what was when that one looked last."""
        if self._thread is None or self._thread == threading.get_ident():
            self._known = self._recorder.trained.named_parameters().parameters
        return self._known

    def _trained(self) -> Sequence[Tensor]:
        """What the optimizer trains; what is watched, if there is none or it has no parameters of its own."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        own = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        return own or self._parameters()

    def _steps_in_place(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` takes the steps of the watched one, for whose parameters it was made, as SAM does.

        So does one that has replaced it.
        """
        if any(listener.optimizer is optimizer for listener in announce.listeners()):
            return False
        if self._steps_itself:
            first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
            self._beside += id(first) in self._trained_ids
            return self._beside > _REPLACED
        if not self.holds(named_parameters_of(optimizer).parameters):
            self.others.add(type(optimizer).__name__)
            return False
        return True

    def _are_used(self) -> bool:
        """Whether a change of the current gradients has no effect: there are none, or the last step has used them."""
        is_none = is_used = False
        with self._contained():
            now = state_of(self._first_gradient())
            is_none, is_used = now[0] is None, self._used is not None and is_same(now, self._used)
        return is_none or is_used

    def _first_gradient(self) -> Tensor | None:
        gradients = (parameter.grad for parameter in self._trained())
        return next((gradient for gradient in gradients if gradient is not None), None)


def _clip(optimizer: Optimizer, limit: Limit) -> None:
    decision.carry_out(optimizer)  # a skipped step is not clipped
    clip_before_step(optimizer, limit)
