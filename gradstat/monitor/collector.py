"""Measures a step, gradients and everything else that is due, in one launch, and starts the copy to the host."""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradstat._core import native
from gradstat._core.host_copy import HostCopy
from gradstat._core.nested import tensors_in
from gradstat._core.parameters import PLAIN_TYPES, NamedParameters, Parameters, gradients_of
from gradstat._core.tensors import is_distributed, shard_of
from gradstat._core.wrappers import uncompiled, without_ddp
from gradstat._step import loss_scale
from gradstat._step.optimizers import unwrapped
from gradstat.check import check_tensors
from gradstat.guard import checked_value, last_guards
from gradstat.monitor import observers
from gradstat.monitor.connection import Connection
from gradstat.monitor.options import MonitorOptions
from gradstat.monitor.outputs import Outputs
from gradstat.monitor.segments import PendingRows, ReduceTo, Segment, measure_segments, plain_parts
from gradstat.monitor.unwatched import Unwatched
from gradstat.recording.kinds import SCALARS
from gradstat.rules.rows import Observation, rate_name

_META = torch.device("meta")


class Pending(NamedTuple):
    """A step that was measured but not read yet."""

    step: int
    numbers: list[PendingRows]  # the first has the gradients as its first segment
    on_device: list[str]  # names of the scalars in the second segment
    scalars: dict[str, float]  # known on the host
    is_scaled: bool  # whether the gradients carry the loss scale
    origin: Callable[[], Any] | None  # asks all ranks which of them produced NaN, if that is watched
    observations: list[Observation]  # what is known without reading numbers
    facts: HostCopy | None  # about outputs, as `OutputFacts.of` takes them

    def kinds(self) -> set[str]:
        return {segment.kind for numbers in self.numbers for segment in numbers.segments}


class Collector:
    """Measures what is due in each step. ``reduce_to`` is for `PendingRows`, other arguments are a monitor's."""

    def __init__(
        self,
        connection: Connection,
        optimizer: Optimizer | None,
        scaler: Any,
        periods: Mapping[str, int],
        classes: int | Mapping[str, int] | None,
        options: MonitorOptions,
        reduce_to: ReduceTo,
        unwatched: Unwatched,
    ) -> None:
        self._reduce_to, self._unwatched = reduce_to, unwatched
        trained = connection.trained
        model = trained.model
        self._connection, self._trained, self._optimizer, self.scaler = connection, trained, optimizer, scaler
        if optimizer is not None:
            observers.optimizers.add(optimizer)
        self._periods, self._backend, self._extra_groups = periods, options.backend, options.extra_groups
        self._classes = dict(classes) if isinstance(classes, Mapping) else classes
        self._ignore_index = options.ignore_index
        # Only in multiples of this number is something due besides gradients and batches.
        sampled = [period for kind, period in periods.items() if kind not in ("gradients", "batch", "origin")]
        self._sampled = math.gcd(*sampled) or sys.maxsize
        self._origin = _track_origin(model, options.backend) if periods["origin"] else None
        if self._origin is not None:
            weakref.finalize(self, self._origin.remove).atexit = False
        named = trained.named_parameters()
        self._engine = named.engine
        inner = model if named.engine is None else named.engine.module
        self.backward_order: tuple[str, ...] = ()
        self._order_recorder: observers.BackwardOrder | None = _order_of(named)
        self._inner = inner
        self._outputs = Outputs(observers.called(inner)) if periods["outputs"] else None
        entered = observers.called(inner if named.engine else model)
        self._inputs = observers.Inputs(entered, options.backend) if periods["batch"] else None
        self._kept = None if optimizer is None else observers.KeptGradients(unwrapped(optimizer))
        self._activations = observers.Activations(inner, options.backend) if periods["activations"] else None
        self._segments = [Segment("gradient", ())]
        self._joined: tuple[Any, Any, list[Segment]] = (None, None, [])  # those, the inputs', and both
        self._named: NamedParameters | None = None  # of the last step
        self._on_device: list[str] = []
        self._batch: list[tuple[str, str, Tensor]] = []
        self._old_parameters: dict[str, Tensor] | None = None  # copies of parameters before the update
        self._last_seen: tuple[tuple[str, ...], list[weakref.ref[Tensor]]] = ((), [])
        self._switch_hooks(0)

    def collect(self, step: int, scalars: dict[str, float], on_device: dict[str, Tensor]) -> Pending:
        """Measures what is due in ``step``, and the ``scalars`` and ``on_device`` of `scalars`. No host sync."""
        self._connection.first_gradient = None, 0
        named = self._trained.named_parameters()
        helpers = native.helpers()
        if helpers is None or named.engine is not None:
            tensors, positions, missing = gradients_of(named.parameters, named.engine)
        else:
            tensors, positions, missing = helpers.gradients_of(named.parameters)
        if tensors and isinstance(tensors[0], Tensor):  # a shard of an engine's buffer is in no ``.grad``
            self._connection.first_gradient = weakref.ref(tensors[0]), tensors[0]._version
        engine_scale = None if named.engine is None else named.engine.loss_scale
        if engine_scale is not None:
            scalars["loss_scale"] = engine_scale
        observations: list[Observation] = []
        if missing:
            scalars["missing"] = float(len(missing))
            # Rows cannot tell a missing gradient from a frozen parameter.
            observations.append(Observation("missing", step, missing))
        if on_device:
            tensors = [*tensors, *on_device.values()]
        segments, first = self._segments, self._segments[0]
        names = first.names if named is self._named else named.names()
        if names is not first.names or positions != first.positions or [*on_device] != self._on_device:
            self._on_device = list(on_device)
            segments = self._segments = [Segment("gradient", tuple(names), positions)]
            if on_device:
                segments.append(Segment("scalars", tuple(on_device)))
        is_sampled = step % self._sampled == 0 or step in _EARLY
        if is_sampled and (step == _LOOK_AT_LEAVES or (step > 0 and self.is_due("parameters", step))):
            observations.append(Observation("dropped", step, observers.dropped_by(self._inner)))
        if step == _LOOK_AT_LEAVES:
            leaves, self._connection.leaves = self._connection.leaves or [], []  # looks at no other loss
            if named.engine is None and not is_distributed(named.parameters):
                leaves = leaves + ((self._outputs and self._outputs.leaves) or [])
                observations.append(Observation("untrained", step, observers.untrained(leaves, named.parameters)))
        if named is not self._named:
            self._notice_change(step, named.parameters, segments[0].names, observations)
            self._named = named
        others: list[PendingRows] = []
        facts: HostCopy | None = None
        if self._kept is not None and self._kept.was_kept:
            scalars["not_zeroed"], self._kept.was_kept = 1.0, False
        if self._connection.has_late_clip:
            scalars["late_clip"], self._connection.has_late_clip = 1.0, False
        if self._inputs is not None:
            try:
                is_due = is_sampled and self.is_due("parameters", step)
                segments, tensors = self._take_inputs(is_due, segments, tensors, others)
            except Exception:
                self._unwatched.report_failure(step, "the inputs of the model could not be measured")
        if self._batch or self._old_parameters is not None or is_sampled:
            segments, tensors = [*segments], [*tensors]
            # Gradients are measured even if this fails: other ranks wait in their collectives.
            with self._unwatched.suppress_errors(step, "parameters, buffers or optimizer states could not be measured"):
                for segment, more in self._due(step, self._local_parameters(named), segments[0].names, observations):
                    segments.append(segment)
                    tensors += more
                if self._outputs is not None and self.is_due("outputs", step):
                    facts = self._outputs.take()
            if self._activations is not None:
                segment, measured = self._activations.take()
                others += [PendingRows([segment], measured)] if measured.tables else []
        is_scaled = "loss_scale" in on_device and loss_scale.is_still_scaled(self.scaler, self._optimizer)
        left_out = self._unwatched.left_out
        numbers = measure_segments(
            segments, tensors, named.parameters, self._backend, self._reduce_to, left_out, self._extra_groups
        )
        if left_out:
            self._unwatched.report_left_out(step)
        is_scaled = is_scaled or engine_scale is not None
        origin = None
        if self._origin is not None:
            result = self._origin.pending_result()  # also in other steps, since it makes the watch begin anew
            origin = result if self.is_due("origin", step) and not self._connection.is_joining() else None
        if self._order_recorder is not None:
            is_partial = self._order_recorder.is_partial
            self.backward_order = self._order_recorder.end()
            self._order_recorder = _order_of(named) if is_partial else None
        if is_sampled or (step + 1) % self._sampled == 0 or step + 1 in _EARLY or self._periods["batch"] > 1:
            self._switch_hooks(step + 1)
        return Pending(step, numbers + others, self._on_device, scalars, is_scaled, origin, observations, facts)

    @property
    def is_scaled(self) -> bool:
        if self._engine is not None:
            return self._engine.loss_scale is not None
        return self.scaler is not None and bool(self.scaler.is_enabled())

    @property
    def has_rival(self) -> bool:
        return self._kept is not None and self._kept.has_rival

    @staticmethod
    def _local_parameters(named: NamedParameters) -> list[Any]:
        """The parameters, or with an engine this rank's shards of them."""
        return named.parameters if named.engine is None else named.engine.parameters(named.parameters)

    def _coverage(
        self, step: int, optimizer: Optimizer, parameters: list[Tensor], names: tuple[str, ...]
    ) -> Observation:
        besides = list(self._trained.besides._parameters)
        if besides and next(self._trained.model.parameters(), None) is None:
            besides = []  # nothing is besides the model if there is none
        seen = observers.coverage(optimizer, parameters, names, besides)
        steps, changes = (0, 0) if self._kept is None else self._kept.progress()
        return Observation("coverage", step, seen._replace(steps=steps, changes=changes))

    def _notice_change(
        self, step: int, parameters: list[Tensor], names: tuple[str, ...], observations: list[Observation]
    ) -> None:
        """If parameters were replaced, checks at once whether the optimizer has them all."""
        if names is self._last_seen[0]:
            return  # a changed module is walked again, which makes a new tuple of names
        last_seen = [reference() for reference in self._last_seen[1]]
        self._last_seen = names, list(map(weakref.ref, parameters))
        if len(last_seen) == len(parameters) and all(map(operator.is_, last_seen, parameters)):
            return
        self._old_parameters = None  # the difference to another parameter is no update
        if self._kept is not None and self._optimizer is not None:
            # Gradients of the last parameters are usually complete first, before others of the same bucket change.
            self._kept.follow(parameters[::-1], self._optimizer)
        if self._optimizer is not None and self._periods["optimizer"]:
            observations.append(self._coverage(step, self._optimizer, parameters, names))

    def resume(self, step: int) -> None:
        """Prepares for ``step`` of a resumed run, whose backward order is known."""
        if self._order_recorder is not None:
            self._order_recorder.remove()
            self._order_recorder = None
        self.forget()
        self._switch_hooks(step)

    def forget(self) -> None:
        """Drops what was kept for the next step, because the parameters were changed from outside."""
        self._batch, self._old_parameters = [], None
        if self._inputs is not None:
            self._inputs.forget()

    @property
    def origin_is_unknown(self) -> bool:
        """Whether gradients are reduced over ranks without recording which rank produced NaN."""
        if self._origin is not None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return False
        parameters = self._trained.named_parameters().parameters
        return torch.distributed.get_world_size() > 1 and not is_distributed(parameters)

    def is_due(self, kind: str, step: int) -> bool:
        """Whether ``kind``, a key of ``watch=``, is measured in ``step``."""
        period = self._periods[kind]
        return bool(period) and (step % period == 0 or (kind == "outputs" and step in _EARLY))

    # Scalars and batches ---------------------------------------------------------------------------------

    def scalars(
        self, loss: Tensor | float | None, lr: float | Tensor | None, given: Mapping[str, Tensor | float] | None = None
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Loss, learning rate, loss scale, what the guard said and what is ``given``: on the host, then on a device."""
        on_host: dict[str, float] = {}
        on_device: dict[str, Tensor] = {}
        others: list[tuple[str, Any]] = []
        if lr is None and self._optimizer is not None:
            groups = self._optimizer.param_groups
            lr = groups[0].get("lr")
            for number in range(1, len(groups)):
                rate = groups[number].get("lr")
                if rate is not lr and (isinstance(rate, Tensor) or isinstance(lr, Tensor) or rate != lr):
                    others.append((rate_name(number), rate))
        for name, value in given.items() if given else ():
            if name in SCALARS or name.startswith("lr["):
                raise ValueError(f"scalars has {name!r}, which gradstat records itself; choose another name")
            others.append((name, value))
        if self._connection.leaves is None and isinstance(loss, Tensor) and loss.grad_fn is not None:
            with self._unwatched.suppress_errors(0, "the graph of the loss could not be looked at"):
                self._connection.saw_loss([loss])
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
        guard = None if self._optimizer is None else last_guards.get(self._optimizer)
        if guard is not None and guard.reason is not None:
            on_device["refused"] = guard.reason
        return on_host, on_device

    def inspect_batch(self, step: int, batch: Any) -> list[Observation]:
        """Collects the tensors of a batch, to be measured with the step; checks labels on the CPU at once."""
        observations: list[Observation] = []
        self._batch = []
        for path, tensor in tensors_in(batch, "batch") if self.is_due("batch", step) else ():
            if not tensor.numel() or tensor.is_meta:
                continue
            if observers.measurable(tensor):
                self._batch.append(("batch", path, tensor.detach()))
                share = observers.constant_features(tensor) if self.is_due("parameters", step) else None
                if share is not None:
                    self._batch.append(("constant", path, share))
            elif self._classes_of(path) and tensor.layout is torch.strided and _is_integer(tensor):
                low, high = torch.aminmax(torch.where(tensor == self._ignore_index, 0, tensor))
                if tensor.device.type == "cpu":
                    observations += self.check_label_range(step, path, float(low), float(high))
                else:
                    self._batch.append(("label", path, torch.stack([low, high]).to(torch.float64)))
        if self.is_due("batches", step) and not self._connection.is_joining():
            from gradstat.distributed import verify_batches

            observations.append(Observation("batches", step, verify_batches(batch)))
        return observations

    def _take_inputs(
        self, is_due: bool, segments: list[Segment], tensors: list[Tensor], others: list[PendingRows]
    ) -> tuple[list[Segment], list[Tensor]]:
        """Segments and tensors with the model's inputs, except those of the batch; ``others`` gets measured rows.

        ``is_due``: parameters are measured in this step, so that constant features are looked for.
        """
        assert self._inputs is not None
        integers = self._inputs.integers() if is_due else []
        if self._inputs.earlier.seen:
            segment, measured = self._inputs.take_merged()
            others.append(PendingRows([segment], measured))
            integers = []  # it is not known whether the other inputs were the same in all samples
        segment, inputs = self._inputs.take()
        if not inputs and not integers:
            return segments, tensors
        if not self._batch and not is_due:  # the usual case
            if self._joined[0] is not segments or self._joined[1] is not segment:
                self._joined = segments, segment, [*segments, segment]
            return self._joined[2], [*tensors, *inputs]
        seen = {(t.data_ptr(), t.shape) for kind, _, t in self._batch if kind == "batch" and observers.is_plain(t)}
        for path, tensor in zip(segment.names, inputs, strict=True):
            if (tensor.data_ptr(), tensor.shape) in seen:
                continue
            self._batch.append(("input", path, tensor))
            share = observers.constant_features(tensor) if is_due else None
            if share is not None:
                self._batch.append(("constant", path, share))
        every = [share for _, tensor in integers if (share := observers.constant_features(tensor)) is not None]
        if every:
            every += [share for kind, _, share in self._batch if kind == "constant"]
            # Positions and masks may be the same in all samples, so what counts is whether all inputs are.
            are_same = torch.stack([share.to(every[0].device) for share in every]).amin(0).floor()
            self._batch += [("constant", path, are_same) for path, _ in integers]
        return segments, tensors

    def _classes_of(self, path: str) -> int | None:
        """Number of classes of the labels at ``path``; None if it is unknown or they are not labels."""
        return self._classes.get(path) if isinstance(self._classes, dict) else self._classes

    def check_label_range(self, step: int, path: str, low: float, high: float) -> list[Observation]:
        """An observation if labels from ``low`` to ``high`` are outside of the classes."""
        classes = self._classes_of(path)
        if not classes or (low >= 0 and high < classes):
            return []
        return [Observation("label", step, {"name": path, "low": int(low), "high": int(high), "classes": classes})]

    # What is measured only in some steps -----------------------------------------------------------------

    def _due(
        self, step: int, parameters: list[Tensor], names: tuple[str, ...], observations: list[Observation]
    ) -> Iterator[tuple[Segment, list[Tensor]]]:
        if self._batch:
            for kind in ("batch", "input", "constant", "label"):
                of_kind = [(path, tensor) for what, path, tensor in self._batch if what == kind]
                if of_kind:
                    yield Segment(kind, tuple(path for path, _ in of_kind)), [tensor for _, tensor in of_kind]
            self._batch = []
        if self._old_parameters is not None:
            old, self._old_parameters = self._old_parameters, None
            now = [p.detach() for name, p in zip(names, parameters, strict=True) if name in old]
            copies = list(old.values())
            # If not, the parameters were moved, or their data was replaced.
            if all(t.shape == p.shape and t.device in (p.device, _META) for t, p in zip(copies, now, strict=False)):
                updates = self._make_or_meta(step, now, lambda: list(torch._foreach_sub(now, copies)))
                yield Segment("update", tuple(old)), updates
        if self.is_due("updates", step):
            trained = [(n, p) for n, p in zip(names, parameters, strict=True) if p.requires_grad]
            named = [(name, parameter.detach()) for name, parameter in trained if observers.measurable(parameter)]
            now = [parameter for _, parameter in named]
            copies = self._make_or_meta(step, now, lambda: [parameter.clone() for parameter in now])
            self._old_parameters = {name: copy for (name, _), copy in zip(named, copies, strict=True)}
        if self.is_due("replicas", step) and not self._connection.is_joining():
            from gradstat.distributed import verify_replicas

            report = verify_replicas(self._trained.model, what=("parameters",))
            observations.append(Observation("replicas", step, report))
        yield from self.states(parameters, names, lambda kind: self.is_due(kind, step))
        if self.is_due("parameters", step):
            observations.append(Observation("versions", step, observers.versions(parameters, names)))
        if self._optimizer is not None and self.is_due("optimizer", step):
            observations.append(self._coverage(step, self._optimizer, parameters, names))

    def _make_or_meta(self, step: int, like: list[Tensor], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The tensors of ``make``; if it runs out of memory, meta tensors, so that no other rank waits in vain."""
        try:
            with torch.no_grad():
                return make()
        except Exception:
            self._unwatched.report_failure(step, "the last update could not be measured")
            return [torch.empty_like(tensor, device=_META) for tensor in like]

    def states(
        self, parameters: list[Tensor], names: tuple[str, ...], includes: Callable[[str], bool]
    ) -> Iterator[tuple[Segment, list[Tensor]]]:
        """The parameters, buffers and optimizer states whose kind ``includes`` accepts."""
        if includes("parameters") and parameters:
            yield Segment("parameter", names), parameters
        if includes("buffers"):
            segment, buffers = observers.buffers_of(self._inner)
            if buffers:
                yield segment, buffers
        if includes("optimizer") and self._optimizer is not None:
            yield from observers.states_of(self._optimizer, parameters, names)

    def measure_state(self, step: int, measured: set[str]) -> list[PendingRows]:
        """Measures parameters, buffers and optimizer states now, except the kinds in ``measured``; no collectives."""
        named = self._trained.named_parameters()
        parameters = self._local_parameters(named)
        if is_distributed(parameters):
            return []  # would need collectives, which the other ranks would not join
        segments, tensors = [], []
        names = named.names()
        for segment, some in self.states(parameters, tuple(names), lambda kind: bool(self._periods[kind])):
            # The states of a tensor subclass are kinds of their own, ``exp_avg.scale`` for instance.
            if segment.kind not in measured and not any(kind.startswith(f"{segment.kind}.") for kind in measured):
                segments.append(segment)
                tensors += some
        if not segments:
            return []
        numbers = measure_segments(segments, tensors, None, self._backend, None, self._unwatched.left_out)
        self._unwatched.report_left_out(step)
        return numbers

    def is_finite(self) -> bool:
        """Whether parameters and optimizer states are finite now; only this rank's shards. Syncs with the device."""
        named = self._trained.named_parameters()
        included = {"parameters": True, "buffers": False, "optimizer": bool(self._periods["optimizer"])}
        segments = self.states(self._local_parameters(named), tuple(named.names()), included.__getitem__)
        plain = [part.detach() for _, some in segments for tensor in some for _, part in plain_parts(shard_of(tensor))]
        measurable = [part for part in plain if observers.measurable(part)]
        return not check_tensors(measurable, backend=self._backend).nonfinite

    def _switch_hooks(self, step: int) -> None:
        hooked = (("batch", self._inputs), ("outputs", self._outputs), ("activations", self._activations))
        for kind, observer in hooked:
            if observer is not None:
                observer.switch(self.is_due(kind, step))

    def remove(self) -> None:
        """Removes all hooks and drops all tensors."""
        self.forget()
        for observer in (
            self._order_recorder, self._inputs, self._kept, self._outputs, self._activations, self._origin,
        ):  # fmt: skip
            if observer is not None:
                observer.remove()
        self._order_recorder = self._inputs = self._kept = None
        self._outputs = self._activations = self._origin = None


# Steps in which outputs are measured besides, so that mistakes with labels are known before much time is lost.
_EARLY = frozenset([1, 2, 4, 8, 16, 32, *range(200, 256, 8)])
# When parameters in the graph of the first loss have got updates, if anybody trains them; modules are looked at then.
_LOOK_AT_LEAVES = 16


def _order_of(named: NamedParameters) -> observers.BackwardOrder:
    return observers.BackwardOrder(list(zip(named.names(), named.parameters, strict=True)))


def _is_integer(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or tensor.is_nested)


def _track_origin(model: nn.Module, backend: str | None) -> Any:
    if not isinstance(uncompiled(model), DistributedDataParallel):
        raise TypeError(
            f"watch={{'origin': 1}} needs a DistributedDataParallel model of torch, the only wrapper that exposes "
            f"gradients before they are reduced; got {type(model).__module__}.{type(model).__qualname__}"
        )
    from gradstat.distributed import track_origin

    return track_origin(model, backend=backend)


def model_name(model: nn.Module) -> str:
    """The class name of a model without the wrappers of ``torch.compile`` and DDP; of parameters, what they are of."""
    model = uncompiled(without_ddp(uncompiled(model)))
    if not isinstance(model, Parameters):
        return type(model).__name__
    parts = dict.fromkeys(name.partition(".")[0] for name, _ in model.named_parameters())
    return " and ".join(parts) if 0 < len(parts) < 4 else "the optimizer's parameters"


def _number(value: Any) -> float:
    """A setting of a parameter group as a number; 0 if it is none."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def optimizer_settings(optimizer: Optimizer | None) -> dict[str, Any]:
    """The fields of `RunSettings` that describe an optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    makers = [kind.__module__ for kind in type(optimizer).__mro__ if "step" in vars(kind)]
    is_torchs = bool(makers) and makers[0].startswith("torch.")
    momenta, decays = [0.0], []
    for group in groups:
        betas = group.get("betas")
        first, *others = betas if isinstance(betas, tuple | list) and betas else (group.get("momentum"), None)
        momenta.append(_number(first))
        decays += [_number(group.get("alpha", group.get("rho")) if other is None else other) for other in others]
    return {
        "optimizer_eps": _number(groups[0].get("eps")) if groups else 0.0,
        "momentum": max(momenta),
        # Per step (beta2), the smallest of all groups; 0 if one is not known.
        "second_moment_decay": min(decays) if is_torchs and decays and all(0 < decay < 1 for decay in decays) else 0.0,
        "is_torchs": is_torchs,
        "maximizes": any(group.get("maximize") is True for group in groups),
        "initial_lrs": tuple(_number(group.get("initial_lr")) for group in groups),
    }
