"""`Inputs`: what a training step begins with, the model's inputs and what `Monitor.batch` was given."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradstat._core.hooks import Hook, hook_forward
from gradstat._core.host_copy import peek_interpreter_stack
from gradstat._core.nested import tensors_in
from gradstat._core.parameters import PLAIN_TYPES, NamedParameters
from gradstat.check import stats
from gradstat.monitor.probes.base import HookedProbe, Part, Pending, Watched, is_plain, measurable
from gradstat.monitor.probes.passes import PassRows, called
from gradstat.monitor.segments import PendingRows, Segment
from gradstat.replay.step_state import in_backward, is_replaying
from gradstat.rules.rows import Observation

_LABELS = "input['labels']"  # as models of transformers call them, which compute the loss
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
_version_of = operator.attrgetter("_version")
# More forward passes than this in one step are not measured, because so many cannot be micro-batches.
_MOST_PASSES = 64


class Inputs(HookedProbe):
    """Keeps a batch, and the floating inputs of a model's last forward pass in training, until they are taken.

    Inputs of earlier passes of a step are measured when the next pass begins, and only their rows are kept.
    """

    watch = "batch"
    lost = "the inputs of the model could not be measured"

    def __init__(self, watched: Watched) -> None:
        hook = Hook(self.keep)
        handle = hook_forward(called(watched.model), hook, before=True, with_kwargs=True)
        super().__init__(watched, {hook: handle})
        self._backend, self._ignore_index = watched.settings.options.backend, watched.settings.options.ignore_index
        classes = watched.settings.classes
        self._classes = dict(classes) if isinstance(classes, Mapping) else classes
        # In steps in which parameters are measured, features that are the same in all samples are looked for.
        self._looks = watched.settings.periods["parameters"]
        self._segment = Segment("input", ())
        self.forget()

    def forget(self) -> None:
        self._batch: _Batch | None = None
        self._earlier = PassRows()  # the rows of earlier passes
        self._passes = 0
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._integers: list[tuple[str, Tensor]] = []  # such as tokens; not measured
        self._has_others = False  # whether it got tensors of other kinds

    # A batch ---------------------------------------------------------------------------------------------

    def inspect(self, step: int, batch: Any) -> list[Observation]:
        """Collects the tensors of a batch, to be measured with the step; checks labels on the CPU at once."""
        observations: list[Observation] = []
        found = self._batch = _Batch(self._looks > 0 and step % self._looks == 0)
        for path, tensor in tensors_in(batch, "batch"):
            if not tensor.numel() or tensor.is_meta:
                continue
            if measurable(tensor):
                found.add("batch", path, tensor.detach())
            elif self._classes_of(path) and tensor.layout is torch.strided and _is_integer(tensor):
                low, high = torch.aminmax(torch.where(tensor == self._ignore_index, 0, tensor))
                if tensor.device.type == "cpu":
                    observations += self.check_label_range(step, path, float(low), float(high))
                else:
                    found.tensors["label"][path] = torch.stack([low, high]).to(torch.float64)
        return observations

    def _classes_of(self, path: str) -> int | None:
        """Number of classes of the labels at ``path``; None if it is unknown or they are not labels."""
        return self._classes.get(path) if isinstance(self._classes, dict) else self._classes

    def check_label_range(self, step: int, path: str, low: float, high: float) -> list[Observation]:
        """An observation if labels from ``low`` to ``high`` are outside of the classes."""
        classes = self._classes_of(path)
        if not classes or (low >= 0 and high < classes):
            return []
        return [Observation("label", step, {"name": path, "low": int(low), "high": int(high), "classes": classes})]

    # Inputs ----------------------------------------------------------------------------------------------

    def keep(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or in_backward() or is_replaying():
            return
        passes = self._passes + 1
        if passes > _MOST_PASSES or peek_interpreter_stack() is not None:  # torch.func's tensors must not be kept
            return
        if self._tensors:
            self._merge()
        self._passes = passes
        self._begin_pass()
        names = []
        for path, tensor in [*tensors_in(arguments, "input"), *tensors_in(keywords, "input")]:
            # What another model has computed is no data.
            if tensor.is_leaf and is_plain(tensor) and not tensor.is_inference():
                names.append(path)
                self._tensors.append(tensor)
                self._versions.append(tensor._version)
            elif tensor.dtype in _INTEGERS:
                self._integers.append((path, tensor))
            else:
                self._has_others = True
        if tuple(names) != self._segment.names:  # else the same object, which need not be compared
            self._segment = Segment("input", tuple(names))

    def _merge(self) -> None:
        """Measures what is kept, and merges its rows with those of earlier passes."""
        segment, tensors = self._unchanged()
        if tensors:
            with torch.no_grad():
                rows = stats(tensors, backend=self._backend)
                for path, tensor, row in zip(segment.names, tensors, rows.split(1), strict=True):
                    self._earlier.add(path, row, [tensor])

    def _unchanged(self) -> tuple[Segment, list[Tensor]]:
        """What the last pass got and is not taken yet, without tensors that were changed in place in the meantime."""
        segment, tensors, versions = self._segment, self._tensors, self._versions
        self._passes = 0
        self._begin_pass()
        if list(map(_version_of, tensors)) == versions:
            return segment, tensors
        same = [tensor._version == version for tensor, version in zip(tensors, versions, strict=True)]
        kept = [(name, t) for name, t, is_same in zip(segment.names, tensors, same, strict=False) if is_same]
        return Segment("input", tuple(name for name, _ in kept)), [tensor for _, tensor in kept]

    def _telling_integers(self) -> list[tuple[str, Tensor]]:
        """The integer inputs of the last pass, such as tokens and masks, and their names; without labels.

        Empty if it is not known of every input whether it is the same in all samples.
        """
        # A number, such as the Trainer's number of tokens in all micro-batches, is the same for all samples anyway.
        inputs = [(path, tensor) for path, tensor in self._integers if path != _LABELS and tensor.dim()]
        if self._has_others or self._earlier.seen or list(map(_version_of, self._tensors)) != self._versions:
            return []
        every = [*(tensor for _, tensor in inputs), *(tensor for tensor in self._tensors if tensor.dim())]
        return inputs if all(map(_has_samples, every)) else []

    def take(self, step: Pending, named: NamedParameters) -> Iterable[Part]:
        found, self._batch = self._batch, None
        is_telling = self._looks > 0 and step.step % self._looks == 0
        integers = self._telling_integers() if is_telling else []
        if self._earlier.seen:
            self._merge()
            names, measured = self._earlier.take()
            step.numbers.append(PendingRows([Segment("input", names)], measured))
        segment, tensors = self._unchanged()
        if found is None and not is_telling:  # the usual case
            return [(segment, tensors)] if tensors else ()
        found = found or _Batch(is_telling)
        found.add_inputs(zip(segment.names, tensors, strict=False), integers)  # no tensors if there was no pass
        return found.parts()


class _Batch:
    """A batch and the inputs of a step, by kind and path; no tensor twice."""

    def __init__(self, is_telling: bool) -> None:
        """``is_telling``: features that are the same in all samples are looked for."""
        self._is_telling = is_telling
        self.tensors: dict[str, dict[str, Tensor]] = {"batch": {}, "input": {}, "constant": {}, "label": {}}

    def add(self, kind: str, path: str, tensor: Tensor) -> None:
        self.tensors[kind][path] = tensor
        share = constant_features(tensor) if self._is_telling else None
        if share is not None:
            self.tensors["constant"][path] = share

    def add_inputs(self, inputs: Iterable[tuple[str, Tensor]], integers: list[tuple[str, Tensor]]) -> None:
        """Adds ``inputs``, and what is known of inputs that are ``integers``, such as tokens."""
        seen = {(t.data_ptr(), t.shape) for t in self.tensors["batch"].values() if is_plain(t)}
        for path, tensor in inputs:
            if (tensor.data_ptr(), tensor.shape) not in seen:
                self.add("input", path, tensor)
        every = [share for _, tensor in integers if (share := constant_features(tensor)) is not None]
        if every:
            every += self.tensors["constant"].values()
            # Positions and masks may be the same in all samples, so what counts is whether all inputs are.
            are_same = torch.stack([share.to(every[0].device) for share in every]).amin(0).floor()
            self.tensors["constant"] |= dict.fromkeys((path for path, _ in integers), are_same)

    def parts(self) -> list[Part]:
        return [(Segment(kind, tuple(of)), list(of.values())) for kind, of in self.tensors.items() if of]


def constant_features(tensor: Tensor) -> Tensor | None:
    """The fraction of features that are the same in all samples, ``[1]``; samples are along the first dimension."""
    if tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.shape[0] < 2 or tensor.dtype.is_complex:
        return None
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach().flatten(1), dim=0)
        return (low == high).to(torch.float32).mean().reshape(1)


def _has_samples(tensor: Tensor) -> bool:
    """Whether `constant_features` says something about a tensor."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > 0


def _is_integer(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or tensor.is_nested)
