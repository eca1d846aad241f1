"""`Recorder`: measures a step, gradients and all else that is due, in one launch, and starts the copy to the host."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
import weakref
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

from torch import Tensor, nn

from gradstat._core import native
from gradstat._core.parameters import PLAIN_TYPES, NamedParameters, Parameters, Trained, gradients_of
from gradstat._core.tensors import is_distributed, shard_of
from gradstat._core.wrappers import rank_and_size, uncompiled, without_ddp
from gradstat._step import loss_scale
from gradstat.check import check_tensors
from gradstat.guard import checked_value, last_guards
from gradstat.monitor.arguments import Settings
from gradstat.monitor.probes.averages import Averages
from gradstat.monitor.probes.base import Part, Pending, Probe, Run, measurable, own_shards
from gradstat.monitor.probes.gradients import GradientUse
from gradstat.monitor.probes.graph import Leaves
from gradstat.monitor.probes.inputs import Inputs
from gradstat.monitor.probes.model import BackwardOrder, ModelFacts, settings_of
from gradstat.monitor.probes.optimizer import OptimizerSteps
from gradstat.monitor.probes.outputs import Outputs
from gradstat.monitor.probes.passes import Activations
from gradstat.monitor.probes.ranks import Batches, Origin, Reduction, Replicas
from gradstat.monitor.probes.restored import Restored
from gradstat.monitor.probes.state import Buffers, OptimizerStates, ParameterValues, Updates, parameters_of
from gradstat.monitor.segments import PendingRows, ReduceTo, Segment, measure_segments, plain_parts
from gradstat.monitor.source import StepSource
from gradstat.monitor.unwatched import PROPAGATED_ERRORS, Unwatched
from gradstat.recording.kinds import SCALARS
from gradstat.rules.contents import Contents
from gradstat.rules.rows import Observation, rate_name

_P = TypeVar("_P", bound=Probe)

# In the order in which they are asked.
_PROBES: tuple[type[Probe], ...] = (
    OptimizerSteps, GradientUse, Inputs, Updates, Outputs, Reduction, Replicas, Batches, ParameterValues, Buffers,
    OptimizerStates, Activations, Averages,
)  # fmt: skip


class Recorder:
    """Measures what is due in each step of ``source``; ``settings`` are a monitor's."""

    def __init__(
        self,
        settings: Settings,
        trained: Trained,
        scaler: Any,
        source: StepSource,
        unwatched: Unwatched,
    ) -> None:
        options = settings.options
        self.trained, self.optimizer, self.scaler = trained, settings.optimizer, scaler
        self._backend, self._extra_groups, self._unwatched = options.backend, options.extra_groups, unwatched
        self._reduce_to: ReduceTo = "norm" if settings.guard is not None else "flag" if settings.skipped_by else None
        self._noted: dict[str, float] = {}
        self._leaves: dict[str, Leaves] = {}
        engine, helpers = settings.engine, native.helpers()
        self._engine, of_engine = engine, functools.partial(gradients_of, engine=engine)
        self._gradients_of = of_engine if engine is not None or helpers is None else helpers.gradients_of
        self.inner = trained.model if engine is None else engine.module
        run = Run(settings, trained, self.inner, unwatched, source, self._noted, self._leaves)
        origin, self._order = Origin.of(run), BackwardOrder(run)  # they may refuse a model, before there are hooks
        self._restored, self._facts = Restored(run), ModelFacts(run)
        probes = [origin, self._order, *(kind.of(run) for kind in _PROBES), self._facts, self._restored]
        self._probes = [probe for probe in probes if probe is not None]
        # Most steps are quiet: only what is due in every step is due, and nothing is due early.
        self._quiet = self._due = [probe for probe in self._probes if probe.period == 1]
        self._often = math.gcd(*(probe.period for probe in self._probes if probe.period > 1)) or sys.maxsize
        self._with_state = [probe for probe in self._probes if type(probe).state is not Probe.state]
        self._early = frozenset().union(*(probe.early for probe in self._probes))
        self._head = [Segment("gradient", ())]  # the gradients, and scalars that are on a device
        self._segments: list[Segment] = []  # of the last step: mostly those of the next, which then is the same list
        self._on_device: list[str] = []
        self._named: NamedParameters | None = None  # of the last step
        self._last_seen: tuple[Sequence[str], list[weakref.ref[Tensor]]] = ((), [])
        self._prepare(0)

    def _probe(self, kind: type[_P]) -> _P | None:
        """The probe of this kind, if the run has one."""
        return next((probe for probe in self._probes if isinstance(probe, kind)), None)

    def _prepare(self, step: int) -> None:
        """Finds out what is due in ``step``, and switches hooks on and off for it."""
        is_due = [probe.is_due(step) for probe in self._probes]
        for probe, on in zip(self._probes, is_due, strict=True):
            probe.switch(on)
        due = list(itertools.compress(self._probes, is_due))
        self._due = self._quiet if due == self._quiet else due

    def collect(self, step: int, scalars: dict[str, float], on_device: dict[str, Tensor]) -> Pending:
        """Measures what is due in ``step``, and the ``scalars`` and ``on_device`` of `scalars`. No host sync."""
        due = self._due
        if due is not self._quiet or (step + 1) % self._often == 0 or step + 1 in self._early:
            self._prepare(step + 1)
        named = self.trained.named_parameters()
        tensors, positions, missing = self._gradients_of(named.parameters)
        is_scaled = "loss_scale" in on_device and loss_scale.is_still_scaled(self.scaler, self.optimizer)
        if named.engine is not None and named.engine.loss_scale is not None:
            scalars["loss_scale"], is_scaled = named.engine.loss_scale, True
        pending = Pending(step, [], [*on_device], scalars, is_scaled, [], {})
        if missing:
            scalars["missing"] = float(len(missing))
            pending.observe("missing", missing)  # rows cannot tell a missing gradient from a frozen parameter
        if self._noted:
            scalars |= self._noted
            self._noted.clear()
        head = self._head
        names = head[0].names if named is self._named else tuple(named.names())
        if names is not head[0].names or positions != head[0].positions or pending.on_device != self._on_device:
            self._on_device = pending.on_device
            head = self._head = [Segment("gradient", names, positions)]
            if on_device:
                head.append(Segment("scalars", tuple(on_device)))
        if named is not self._named:
            self._begin(pending, named)
            self._named = named
        segments = [*head]
        tensors += on_device.values()
        for probe in due:
            # Gradients are measured even if this fails: other ranks wait in their collectives.
            try:
                for segment, more in probe.take(pending, named) or ():
                    segments.append(segment)
                    tensors += more
            except PROPAGATED_ERRORS:  # noqa: PERF203 - in most steps there is one
                raise
            except Exception:
                self._unwatched.report_failure(step, probe.lost)
        if segments == self._segments:
            segments = self._segments
        self._segments, left_out = segments, self._unwatched.left_out
        pending.numbers[:0] = measure_segments(
            segments, tensors, named.parameters, self._backend, self._reduce_to, left_out, self._extra_groups
        )
        if left_out:
            self._unwatched.report_left_out(step)
        return pending

    def _begin(self, pending: Pending, named: NamedParameters) -> None:
        """Informs probes if the parameters are others than in the step before."""
        names, parameters = named.names(), named.parameters
        if names is self._last_seen[0]:
            return  # a changed module is walked again, which makes a new tuple of names
        last_seen = [reference() for reference in self._last_seen[1]]
        self._last_seen = names, list(map(weakref.ref, parameters))
        if len(last_seen) != len(parameters) or not all(map(operator.is_, last_seen, parameters)):
            for probe in self._probes:
                probe.begin(pending, named)

    # What others tell it ---------------------------------------------------------------------------------

    def note(self, name: str, value: float) -> None:
        """Adds a scalar to the next step that is measured."""
        self._noted[name] = value

    def saw_loss(self, losses: Sequence[Any]) -> None:
        """Looks at the graph of the first loss."""
        graphs = [loss for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
        if graphs and "loss" not in self._leaves:
            self._facts.saw_loss(graphs)

    def inspect_batch(self, step: int, batch: Any) -> list[Observation]:
        """Collects the tensors of a batch, to be measured with the step; returns what is known of them at once."""
        return [seen for probe in self._due for seen in probe.inspect(step, batch)]

    def scalars(
        self, loss: Tensor | float | None, lr: float | Tensor | None, given: Mapping[str, Tensor | float] | None = None
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Loss, learning rate, loss scale, what the guard said and what is ``given``: on the host, then on a device."""
        on_host: dict[str, float] = {}
        on_device: dict[str, Tensor] = {}
        others: list[tuple[str, Any]] = []
        if lr is None and self.optimizer is not None:
            groups = self.optimizer.param_groups
            lr = groups[0].get("lr") if groups else None  # Lightning stands in for an optimizer with one of no group
            for number in range(1, len(groups)):
                rate = groups[number].get("lr")
                if rate is not lr and (isinstance(rate, Tensor) or isinstance(lr, Tensor) or rate != lr):
                    others.append((rate_name(number), rate))
        for name, value in given.items() if given else ():
            if name in SCALARS or name.startswith("lr["):
                raise ValueError(f"scalars has {name!r}, which gradstat records itself; choose another name")
            others.append((name, value))
        if "loss" not in self._leaves and isinstance(loss, Tensor) and loss.grad_fn is not None:
            with self._unwatched.suppress_errors(0, "the graph of the loss could not be looked at"):
                self.saw_loss([loss])
        for name, value in (("loss", loss), ("lr", lr), *others):
            if type(value) is float:
                on_host[name] = value
            elif isinstance(value, Tensor):
                if value.numel() != 1 or not value.dtype.is_floating_point:
                    checked_value(name, value)  # raises
                if value.is_cpu and type(value) in PLAIN_TYPES:
                    try:
                        on_host[name] = value.item()
                        continue
                    except RuntimeError:  # inside a torch.func transform, which `collect` reports
                        pass
                on_device[name] = value.detach()
            elif value is not None:
                if not isinstance(value, Real):
                    raise TypeError(f"{name} is a {type(value).__name__}; expected a number or a tensor of one element")
                on_host[name] = float(value)
        if self.scaler is not None:
            scale = getattr(self.scaler, "_scale", None)
            if scale is not None:
                on_device["loss_scale"] = scale
        guard = None if self.optimizer is None else last_guards.get(self.optimizer)
        if guard is not None and guard.reason is not None:
            on_device["refused"] = guard.reason
        return on_host, on_device

    # Between two steps -----------------------------------------------------------------------------------

    def measure_state(self, step: int, measured: set[str]) -> list[PendingRows]:
        """Measures parameters, buffers and optimizer states now, except the kinds in ``measured``; no collectives."""
        named = self.trained.named_parameters()
        parts = [
            part
            for probe in self._with_state
            for part in probe.state(named)
            # The states of a tensor subclass are kinds of their own, ``exp_avg.scale`` for instance.
            if part[0].kind not in measured and not any(kind.startswith(f"{part[0].kind}.") for kind in measured)
        ]
        return self._measured(step, named, parts)

    def measure_parameters(self, step: int) -> list[PendingRows]:
        """Measures the parameters now, if they are watched; no collectives."""
        values, named = self._probe(ParameterValues), self.trained.named_parameters()
        return [] if values is None else self._measured(step, named, values.state(named))

    def measure_unfinished(self, step: int) -> list[PendingRows]:
        """Measures what the model got in a step that an exception ended; no collectives."""
        inputs = self._probe(Inputs)
        return [] if inputs is None else self._measured(step, self.trained.named_parameters(), inputs.unfinished())

    def _measured(self, step: int, named: NamedParameters, parts: Sequence[Part]) -> list[PendingRows]:
        if not parts or is_distributed(own_shards(named)):
            return []  # would need collectives, which the other ranks would not join
        segments, tensors = [part[0] for part in parts], [tensor for part in parts for tensor in part[1]]
        numbers = measure_segments(segments, tensors, None, self._backend, None, self._unwatched.left_out)
        self._unwatched.report_left_out(step)
        return numbers

    def is_finite(self) -> bool:
        """Whether parameters and optimizer states are finite now; only this rank's shards. Syncs with the device."""
        named, states = self.trained.named_parameters(), self._probe(OptimizerStates)
        parts = parameters_of(named) + ([] if states is None else states.state(named))
        plain = [part.detach() for _, some in parts for tensor in some for _, part in plain_parts(shard_of(tensor))]
        return not check_tensors(list(filter(measurable, plain)), backend=self._backend).nonfinite

    def contents(self) -> Contents | None:
        """What the training holds now, for a state; None if it is not known. Waits for the device."""
        contents = None
        with self._unwatched.suppress_errors(0, "parameters and optimizer states could not be measured for a state"):
            contents = self._restored.measure(self.trained.named_parameters())()
        return contents  # noqa: RET504 - None after an error

    def resume(self, step: int, contents: Contents | None) -> None:
        """Prepares for ``step`` of a resumed run, whose backward order is known, and which should hold ``contents``."""
        self._order.stop()
        self.forget()
        if contents is not None:
            self._restored.expect(step, contents)
        self._prepare(step)

    def forget(self) -> None:
        """Drops what was kept for the next step, because the parameters were changed from outside."""
        for probe in self._probes:
            probe.forget()

    def remove(self) -> None:
        """Removes all hooks and drops all tensors."""
        for probe in self._probes:
            probe.forget()
            probe.remove()

    # What is known of the run ----------------------------------------------------------------------------

    @property
    def backward_order(self) -> tuple[str, ...]:
        """The names of the parameters, by when their gradients were complete in the first step."""
        return self._order.names

    @backward_order.setter
    def backward_order(self, names: tuple[str, ...]) -> None:
        self._order.names = names

    @property
    def is_scaled(self) -> bool:
        if self._engine is not None:
            return self._engine.loss_scale is not None
        return self.scaler is not None and bool(self.scaler.is_enabled())

    @property
    def has_other_optimizer(self) -> bool:
        """Whether an optimizer has stepped that has none of the watched parameters."""
        steps = self._probe(OptimizerSteps)
        return steps is not None and steps.has_other_optimizer

    def settings(self) -> dict[str, float]:
        """What the optimizer and modules are set to now, by name."""
        steps = self._probe(OptimizerSteps)
        return settings_of(self.inner) | (steps.settings() if steps is not None else {})

    @property
    def in_float16(self) -> tuple[str, ...]:
        """The parameters of another dtype whose gradients are computed in float16, as known since the first loss."""
        return self._facts.in_float16

    @property
    def positive(self) -> Mapping[str, str]:
        """What the first loss takes of parameters of which only positive values make sense, by their names."""
        return self._facts.positive

    @property
    def loss_is_sum(self) -> bool:
        """Whether the first loss has several terms."""
        return self._facts.loss_is_sum

    @property
    def loss_has_no_sign(self) -> bool:
        """Whether the first loss is, up to a factor, of numbers that are never negative."""
        return self._facts.loss_has_no_sign

    @property
    def origin_is_unknown(self) -> bool:
        """Whether gradients are reduced over ranks without recording which rank produced NaN."""
        if rank_and_size()[1] == 1 or self._probe(Origin) is not None:
            return False
        return not is_distributed(self.trained.named_parameters().parameters)


def model_name(model: nn.Module) -> str:
    """The class name of a model without the wrappers of ``torch.compile`` and DDP; of parameters, what they are of."""
    model = uncompiled(without_ddp(uncompiled(model)))
    if not isinstance(model, Parameters):
        return type(model).__name__
    parts = dict.fromkeys(name.partition(".")[0] for name, _ in model.named_parameters())
    return " and ".join(parts) if 0 < len(parts) < 4 else "the optimizer's parameters"
