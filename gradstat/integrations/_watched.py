"""One model with its optimizer under a monitor, fed by whatever drives its training steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradstat._arrival import Arrival
from gradstat._wrappers import without_ddp
from gradstat.accumulation import AccumulationReport
from gradstat.adaptive import AdaptiveClip
from gradstat.integrations._attribution import Attribution
from gradstat.integrations._latest import Latest
from gradstat.monitor import AnomalyError, AnomalyWarning, Finding, Monitor, default_rules
from gradstat.monitor.kinds import periods
from gradstat.monitor.policies import PolicyTable, find_stack_level

_OWN = ("model", "optimizer", "scaler")
# Rules whose findings some micro-batch is to blame for.
_OF_MICRO_BATCHES = ("nonfinite-gradient", "nonfinite-loss")


class Options:
    """What a user wants of monitors, looked at before there is one.

    Args:
        given: Arguments of `gradstat.Monitor`, without model, optimizer and scaler.
        source: What gives those, for the error.

    Raises:
        TypeError, ValueError: As `gradstat.Monitor`; or ``given`` has what is not the user's to give.
    """

    def __init__(self, given: Mapping[str, Any], source: str) -> None:
        for name in _OWN:
            if name in given:
                raise TypeError(f"{name} is taken from the {source}; leave it out")
        self.given = dict(given)
        rules = given.get("rules")
        self.rules = default_rules() if rules is None else list(rules)
        self.given["rules"] = self.rules
        self.wraps = bool(periods(given.get("watch"))["origin"])
        # All that Monitor has to say about arguments it says now, on a model of no consequence.
        stand_in = nn.Linear(1, 1)
        tried = dict(self.given, save_to=None, watch=_without_origin(given.get("watch")))
        if not callable(given.get("replay")):
            tried["replay"] = _nothing  # the function comes with what is trained
        Monitor(stand_in, torch.optim.SGD(stand_in.parameters(), lr=0.0), **tried).detach()
        self.policies = PolicyTable(given.get("on_anomaly"), [rule.name for rule in self.rules])
        self.replays = bool(given.get("replay")) or self.policies.uses("replay")


def _nothing() -> None:
    pass


def _without_origin(watch: Any) -> Any:
    if watch is None:
        return None
    wanted = dict(watch) if isinstance(watch, Mapping) else dict.fromkeys(watch, 1)
    return {**wanted, "origin": 0}


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside of those of frameworks. Attributes set on a wrapper would not reach it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner: Optimizer = optimizer
    return inner


class Watched:
    """A monitor and what it needs to be told.

    Args:
        model: As it is called; DDP is looked through, unless the origin of NaN is watched.
        optimizer: torch's.
        scaler: The loss scaler, if there is one.
        options: What the user wants.
        max_norm: What gradients are clipped to; None if they are not, or that is not known.
        step_fn: Does a step again, if replays are wanted and the user has given no function.
        several: Whether other ranks train along.

    Attributes:
        monitor: The monitor.
        measured: Whether the gradients of the coming step of the optimizer have been measured.
        attributions: By step, the reports of its micro-batches, of those in which something was found.
        on_findings: Called with findings after each step that brought some.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        scaler: Any,
        options: Options,
        max_norm: float | AdaptiveClip | None = None,
        step_fn: Callable[..., Any] | None = None,
        several: bool = False,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.latest = Latest()
        given = dict(options.given)
        given["rules"] = [*copy.deepcopy(options.rules), self.latest]  # rules remember what they have seen
        given.setdefault("max_norm", max_norm)
        if options.replays and not callable(given.get("replay")):
            given["replay"] = step_fn or given.get("replay", False)
        self._policies = options.policies
        watched = model if options.wraps else without_ddp(model)
        self.monitor = Monitor(watched, optimizer, scaler=scaler, **given)
        self._attribution = Attribution(without_ddp(model), keep=self.monitor.options.lag + 2)
        self._ids = {id(parameter) for parameter in model.parameters()}
        self._several = several
        self._agreed: Arrival | None = None
        self._stops = False
        self._losses: list[Tensor] = []
        self._known = 0
        self.measured = False
        self.attributions: dict[int, AccumulationReport] = {}
        self.on_findings: Callable[[list[Finding]], None] = lambda findings: None

    def holds(self, ids: Iterable[int]) -> bool:
        """Whether a parameter with one of these ids is the model's."""
        return not self._ids.isdisjoint(ids)

    @property
    def should_stop(self) -> bool:
        """Whether to stop, the same on all ranks."""
        return self._stops if self._several else self.monitor.should_stop

    def saw_batch(self, batch: Any) -> None:
        """Shows the monitor a batch, before the forward pass; raises as `step`."""
        self._telling(lambda: self.monitor.batch(batch))

    def forget(self) -> None:
        """What was not measured belongs to another model's step."""
        self._losses = []
        self._attribution.forget()

    def saw_backward(self, loss: Any, is_micro_batch: bool) -> None:
        """Takes note of a backward pass; nothing is waited for.

        Args:
            loss: What it began from.
            is_micro_batch: Whether the step has several.
        """
        self.measured = False
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
            self._losses.append(loss.detach().reshape(()))
        if is_micro_batch:
            self._attribution.check()

    def step(self, divisor: int) -> None:
        """Lets the monitor measure the step.

        Args:
            divisor: What the sum of the losses of micro-batches is divided by.

        Raises:
            AnomalyError: The policy ``"raise"`` applies; the message names the micro-batch, too.
        """
        losses, self._losses = self._losses, []
        loss = None
        if losses:
            loss = losses[0] if len(losses) == 1 else torch.stack([one.float() for one in losses]).sum()
            loss = loss / divisor if divisor != 1 else loss
        self._attribution.end_step(self.monitor.steps, losses)
        self.measured = True
        if self._several:
            loss = self._over_ranks(loss)
        self._telling(lambda: self.monitor.step(loss))

    def flush(self) -> None:
        """Waits for all numbers so far; raises as `step`."""
        self._telling(self.monitor.flush)

    def _over_ranks(self, loss: Tensor | None) -> Tensor | None:
        """The mean loss, so that all ranks find the same; the same collective also agrees on when to stop."""
        import torch.distributed as dist

        device = next(self.model.parameters()).device
        mine = torch.zeros((), device=device) if loss is None else loss.to(device)
        both = torch.stack([mine.double() / dist.get_world_size(), torch.zeros_like(mine).double()])
        both[1] = float(self.monitor.should_stop)
        dist.all_reduce(both)
        if self._agreed is not None:
            self._stops = self._stops or bool(self._agreed.wait() > 0)
        self._agreed = Arrival(both[1])
        if not self._agreed.travels:
            self._stops = self._stops or bool(self._agreed.wait() > 0)
        return None if loss is None else both[0]

    def _telling(self, call: Callable[[], object]) -> None:
        """Calls the monitor, and says which micro-batch was to blame for what it finds."""
        try:
            call()
        except AnomalyError as error:
            said = self._tell(error)
            if said:
                raise AnomalyError("\n".join([str(error), *said]), error.finding) from error
            raise
        self._tell(None)

    def _tell(self, error: AnomalyError | None) -> list[str]:
        findings = self.monitor.findings[self._known :]
        if not findings:
            return []
        self._known = len(self.monitor.findings)
        said = []
        for finding in findings:
            known = self._attribution.of(finding.step) if finding.rule in _OF_MICRO_BATCHES else None
            if known is None:
                continue
            text, self.attributions[finding.step] = known
            said.append(text)
            if error is None and self._policies.of(finding) != ("record",):
                warnings.warn(f"gradstat: {text}", AnomalyWarning, stacklevel=find_stack_level())
        self.on_findings(findings)
        return said

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the monitor's state; findings in it have been told."""
        self.monitor.load_state_dict(state)
        self._known = len(self.monitor.findings)

    def remove(self) -> None:
        """Ends the watch."""
        self._losses = []
        self.monitor.detach()
