"""`Inputs`: what a training step begins with, the model's inputs and what `Monitor.check_batch` was given."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradstat._core.hooks import Hook, hook_forward
from gradstat._core.host_copy import HostCopy, peek_interpreter_stack
from gradstat._core.nested import tensors_in
from gradstat._core.parameters import PLAIN_TYPES, NamedParameters
from gradstat.check import stats
from gradstat.monitor.probes.base import HookedProbe, Part, Pending, Run, is_plain, measurable
from gradstat.monitor.probes.passes import PassRows, called
from gradstat.monitor.probes.samples import is_known, is_look, numbers_of
from gradstat.monitor.segments import PendingRows, Segment
from gradstat.replay.step_state import in_backward, is_replaying
from gradstat.rules.rows import Observation

_LABELS = "['labels']"  # in paths, as models of transformers call them, which compute the loss
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
_version_of = operator.attrgetter("_version")
# More forward passes than this in one step are not measured, because so many cannot be micro-batches.
_MOST_PASSES = 64


class Inputs(HookedProbe):
    """Keeps a batch, and the floating inputs of a model's last forward pass in training, until they are taken.

    Inputs of earlier passes of a step are measured when the next pass begins, and only their rows are kept.
    """

    watch = "inputs"
    lost = "the inputs of the model could not be measured"

    def __init__(self, run: Run) -> None:
        hook = Hook(self.keep)
        handle = hook_forward(called(run.model), hook, before=True, with_kwargs=True)
        super().__init__(run, {hook: handle})
        classes = run.settings.num_classes
        self._classes = dict(classes) if isinstance(classes, Mapping) else classes
        # In steps in which parameters are measured, inputs that are the same in all samples are looked for.
        self._telling = run.settings.periods["parameters"]
        self._segment = Segment("input", ())  # of the last pass with inputs
        self.forget()

    def forget(self) -> None:
        self._batch: _Batch | None = None
        self._labels: list[tuple[str, HostCopy]] = []  # on another device: the smallest and the largest, by path
        self._samples: list[tuple[str, HostCopy]] = []  # what `numbers_of` says of the batch and of a pass
        self._last, self._passes = _NOTHING, 0
        self._earlier = PassRows()

    def inspect(self, step: int, batch: Any) -> list[Observation]:
        """Collects the tensors of a batch, to be measured with the step; checks labels on the CPU at once."""
        of_cpu: list[tuple[str, HostCopy]] = []
        self._labels, self._samples = [], []
        self._batch = _Batch(self._telling > 0 and step % self._telling == 0)
        every = [*tensors_in(batch, "batch")]
        if self._is_look(step):
            self._look_at(every)
        for path, tensor in every:
            if not tensor.numel() or tensor.is_meta:
                continue
            if measurable(tensor):
                self._batch.add("batch", path, tensor.detach())
            elif self._classes_of(path) and tensor.layout is torch.strided and _is_integer(tensor):
                extremes = torch.aminmax(torch.where(tensor == self.run.settings.options.ignore_index, 0, tensor))
                (of_cpu if tensor.is_cpu else self._labels).append((path, HostCopy(torch.stack(extremes))))
        return [Observation("label", step, seen)] if (seen := self._out_of_range(of_cpu)) else []

    def _is_look(self, step: int) -> bool:
        """Whether the samples of ``step`` are compared with those of other steps."""
        return self._telling > 0 and is_look(step // self.period, self._telling)

    def _look_at(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Looks at the samples in some tensors, without labels; a number, such as that of tokens, is of no sample."""
        every = [(path, tensor) for path, tensor in named if _LABELS not in path and tensor.dim()]
        if every and all(is_known(tensor) for _, tensor in every):
            self._samples.append((every[0][0], HostCopy(numbers_of([tensor for _, tensor in every]))))

    def _classes_of(self, path: str) -> int | None:
        """Number of classes of the labels at ``path``; None if it is unknown or they are not labels."""
        return self._classes.get(path) if isinstance(self._classes, dict) else self._classes

    def _out_of_range(self, labels: list[tuple[str, HostCopy]]) -> list[tuple[str, int, int, int]]:
        """Those of the ``labels`` that are outside of their classes: path, extremes, number. Waits for the copies."""
        every = ((path, *copy.wait().tolist(), self._classes_of(path)) for path, copy in labels)
        return [(path, low, high, classes) for path, low, high, classes in every if low < 0 or high >= classes]

    def keep(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or in_backward() or is_replaying():
            return
        if self._passes >= _MOST_PASSES or peek_interpreter_stack() is not None:  # a transform's tensors are not kept
            return
        if self._last.tensors:
            self._merge()
        self._passes += 1
        names, tensors, integers, has_others = [], [], [], False
        for path, tensor in [*tensors_in(arguments, "input"), *tensors_in(keywords, "input")]:
            # What another model has computed is no data.
            if tensor.is_leaf and is_plain(tensor) and not tensor.is_inference():
                names.append(path)
                tensors.append(tensor)
            elif tensor.dtype in _INTEGERS:
                integers.append((path, tensor))
            else:
                has_others = True
        if tuple(names) != self._segment.names:  # else the same object, which need not be compared
            self._segment = Segment("input", tuple(names))
        self._last = _Pass(self._segment, tensors, list(map(_version_of, tensors)), integers, has_others)

    def _merge(self) -> None:
        """Measures what is kept, and merges its rows with those of earlier passes."""
        last, self._last = self._last.unchanged(), _NOTHING
        if last.tensors:
            with torch.no_grad():
                rows = stats(last.tensors, backend=self.run.settings.options.backend)
                for path, tensor, row in zip(last.segment.names, last.tensors, rows.split(1), strict=True):
                    self._earlier.add(path, row, [tensor])

    def unfinished(self) -> list[Part]:
        """What is kept of a step that an exception ended."""
        batch, self._batch = self._batch or _Batch(is_telling=False), None
        batch.add_inputs(self._last.unchanged())
        return batch.parts()

    def take(self, step: Pending, named: NamedParameters) -> Iterable[Part] | None:
        batch, self._batch = self._batch, None
        if self._labels:
            step.late["label"] = functools.partial(self._out_of_range, self._labels)
            self._labels = []
        if self.may_tell:  # a call in every step otherwise
            self.tell_unseen([] if batch is None and not self._passes else [""])
        if self._is_look(step.step) and not (last := self._last.unchanged()).has_others:
            self._look_at([*zip(last.segment.names, last.tensors, strict=True), *last.integers])
        if self._samples:
            step.late["samples"] = functools.partial(_read, self._samples)
            self._samples = []
        if self._earlier.seen:
            self._merge()
            names, measured = self._earlier.take()
            step.numbers.append(PendingRows.of([Segment("input", names)], measured))
        last, self._last, self._passes = self._last, _NOTHING, 0
        if list(map(_version_of, last.tensors)) != last.versions:
            last = last.unchanged()
        is_telling = self._telling > 0 and step.step % self._telling == 0
        if batch is None and not is_telling:  # the usual case
            return [(last.segment, last.tensors)] if last.tensors else None
        batch = batch or _Batch(is_telling)
        batch.add_inputs(last)
        return batch.parts()


class _Pass(NamedTuple):
    """What a model was called with."""

    segment: Segment
    tensors: list[Tensor]
    versions: list[int]
    integers: list[tuple[str, Tensor]]  # such as tokens; not measured
    has_others: bool  # whether it got tensors of other kinds

    def unchanged(self) -> _Pass:
        """Without tensors that were changed in place in the meantime."""
        named = zip(self.segment.names, self.tensors, self.versions, strict=True)
        kept = {name: tensor for name, tensor, version in named if tensor._version == version}
        if len(kept) == len(self.tensors):
            return self
        return self._replace(segment=Segment("input", tuple(kept)), tensors=list(kept.values()), has_others=True)

    def telling_integers(self) -> list[tuple[str, Tensor]]:
        """The integer inputs, such as tokens and masks, and their names; without labels.

        Empty if it is not known of every input whether it is the same in all samples.
        """
        # A number, such as the Trainer's number of tokens in all micro-batches, is the same for all samples anyway.
        inputs = [(path, tensor) for path, tensor in self.integers if _LABELS not in path and tensor.dim()]
        every = [*(tensor for _, tensor in inputs), *(tensor for tensor in self.tensors if tensor.dim())]
        return [] if self.has_others or not all(map(_has_samples, every)) else inputs


_NOTHING = _Pass(Segment("input", ()), [], [], [], False)


class _Batch:
    """A batch and the inputs of a step, by kind and path; no tensor twice."""

    def __init__(self, is_telling: bool) -> None:
        """``is_telling``: tensors that are the same in all samples are looked for."""
        self._is_telling = is_telling
        self.tensors: dict[str, dict[str, Tensor]] = {"batch": {}, "input": {}, "constant": {}}

    def add(self, kind: str, path: str, tensor: Tensor) -> None:
        self.tensors[kind][path] = tensor
        is_same = same_in_all_samples(tensor) if self._is_telling else None
        if is_same is not None:
            self.tensors["constant"][path] = is_same

    def add_inputs(self, inputs: _Pass) -> None:
        seen = {(t.data_ptr(), t.shape) for t in self.tensors["batch"].values() if is_plain(t)}
        for path, tensor in zip(inputs.segment.names, inputs.tensors, strict=True):
            if (tensor.data_ptr(), tensor.shape) not in seen:
                self.add("input", path, tensor)
        integers = inputs.telling_integers() if self._is_telling else []
        every = [is_same for _, tensor in integers if (is_same := same_in_all_samples(tensor)) is not None]
        if every:
            every += self.tensors["constant"].values()
            # Positions and masks may be the same in all samples, so what counts is whether all inputs are.
            are_same = torch.stack([is_same.to(every[0].device) for is_same in every]).amin(0)
            self.tensors["constant"] |= dict.fromkeys((path for path, _ in integers), are_same)

    def parts(self) -> list[Part]:
        return [(Segment(kind, tuple(of)), list(of.values())) for kind, of in self.tensors.items() if of]


def same_in_all_samples(tensor: Tensor) -> Tensor | None:
    """``[1]``: 1 if all samples, along the first dimension, are the same, else 0. None if nothing can be said."""
    if tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.shape[0] < 2 or tensor.dtype.is_complex:
        return None
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach().flatten(1), dim=0)
        return (low == high).all().to(torch.float32).reshape(1)


def _read(samples: list[tuple[str, HostCopy]]) -> list[tuple[str, float, list[float]]]:
    """By path of the first tensor, how much samples differ, and the numbers of all. Waits for the copies."""
    every = [(path, *copy.wait().tolist()) for path, copy in samples]
    return [(path, bits, numbers) for path, bits, *numbers in every]


def _has_samples(tensor: Tensor) -> bool:
    """Whether `same_in_all_samples` says something about a tensor."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > 0


def _is_integer(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or tensor.is_nested)
