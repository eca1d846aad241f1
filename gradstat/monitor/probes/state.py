"""What training keeps from step to step: parameters, buffers and optimizer states, and what a step adds to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradstat._core.host_copy import HostCopy
from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_uninitialized
from gradstat.monitor.probes.base import Part, Pending, Probe, Run, is_plain, measurable, own_shards
from gradstat.monitor.probes.optimizer import ids_of
from gradstat.monitor.segments import Segment
from gradstat.recording.kinds import name_of_state
from gradstat.rules.weights import Moves

_META = torch.device("meta")
_SAMPLE = 64  # elements of a weight that are compared from look to look, equally far apart


class ParameterValues(Probe):
    """Also observes how often each was changed in place, as autograd counts it, and how far some elements have moved.

    Elements are compared of weights that the optimizer has, or that have a gradient if no optimizer is known.
    """

    watch = "parameters"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._step, self._versions = 0, dict[str, int]()  # of the last look
        self._names: tuple[str, ...] = ()  # of weights
        self._sample = torch.empty(0)  # elements of each

    def state(self, named: NamedParameters) -> list[Part]:
        return parameters_of(named)

    @torch.no_grad()
    def take(self, step: Pending, named: NamedParameters) -> list[Part]:
        optimizer, versions, rows, names = self.run.settings.optimizer, dict[str, int](), list[Tensor](), list[str]()
        trained = None if optimizer is None else ids_of(optimizer)
        for name, key, parameter in zip(named.names(), map(id, named.parameters), own_shards(named), strict=True):
            if parameter.requires_grad and not is_uninitialized(parameter) and not parameter.is_inference():
                versions[name], each = parameter._version, parameter.numel() // _SAMPLE
                is_trained = parameter.grad is not None if trained is None else key in trained
                is_beside = not rows or rows[0].device == parameter.device
                if is_trained and is_beside and each and parameter.dim() > 1 and is_plain(parameter):
                    rows.append(parameter.reshape(-1)[: each * _SAMPLE : each])
                    names.append(name)
        before, last, old, self._step, self._versions = self._sample, self._step, self._versions, step.step, versions
        is_same, self._names = self._names == tuple(names), tuple(names)
        self._sample = torch.stack([row.float() for row in rows]) if rows else torch.empty(0)
        moves = Moves(0, {}, {}, {})
        if old.keys() == versions.keys() and step.step > last:
            moves = Moves(step.step - last, {name: versions[name] - old[name] for name in versions}, {}, {})
        if moves.steps and is_same and rows and before.device == self._sample.device:
            now, apart = self._sample, self._sample - before
            numbers = torch.cosine_similarity(now, before, dim=1), apart.square().mean(1).sqrt()
            copy = HostCopy(torch.stack(numbers).double())
            step.late["moves"] = functools.partial(_moves, moves, self._names, copy)
        else:
            step.observe("moves", moves)
        return self.state(named)

    def forget(self) -> None:
        self._versions = {}


def _moves(moves: Moves, names: tuple[str, ...], copy: HostCopy) -> Moves:
    cosines, distances = copy.wait().tolist()
    return moves._replace(
        cosines=dict(zip(names, cosines, strict=True)), distances=dict(zip(names, distances, strict=True))
    )


class Buffers(Probe):
    watch = "buffers"

    def state(self, named: NamedParameters) -> list[Part]:
        found = {name: buffer for name, buffer in self.run.model.named_buffers() if measurable(buffer)}
        return [(Segment("buffer", tuple(found)), list(found.values()))] if found else []


class OptimizerStates(Probe):
    watch = "optimizer"

    @classmethod
    def of(cls, run: Run) -> Probe | None:
        if run.settings.optimizer is not None:
            return super().of(run)
        if cls.watch in run.settings.asked:
            run.unwatched.leave_out("optimizer states", "of a run without an optimizer: Monitor(model, optimizer)")
        return None

    def state(self, named: NamedParameters) -> list[Part]:
        assert self.run.settings.optimizer is not None
        return states_of(self.run.settings.optimizer, named)


def parameters_of(named: NamedParameters) -> list[Part]:
    """The parameters, but for frozen integers of more than 8 bits: Keras keeps the state of a generator in one."""
    triples = zip(named.names(), named.parameters, own_shards(named), strict=True)
    kept = {name: shard for name, parameter, shard in triples if not _is_frozen_integer(parameter)}
    return [(Segment("parameter", tuple(kept)), list(kept.values()))] if kept else []


def _is_frozen_integer(parameter: Tensor) -> bool:
    is_integer = not (parameter.is_floating_point() or parameter.is_complex())
    return is_integer and not parameter.requires_grad and parameter.dtype.itemsize > 1  # weights are packed in 8


def states_of(optimizer: Optimizer, named: NamedParameters) -> list[Part]:
    """The tensors in an optimizer's state that have the shape of their parameter, a segment for each state key."""
    by_key: dict[str, tuple[list[str], list[Tensor]]] = {}
    for key, name, parameter, value in every_state_of(optimizer, named):
        if value.shape == parameter.shape:
            of_key, tensors = by_key.setdefault(key, ([], []))
            of_key.append(name)
            tensors.append(value)
    return [(Segment(name_of_state(key), tuple(of_key)), tensors) for key, (of_key, tensors) in by_key.items()]


def every_state_of(optimizer: Optimizer, named: NamedParameters) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """The tensors in an optimizer's state, but counts of steps: key, name of the parameter, parameter and state."""
    # Keyed by id, because hashing a tensor is slow.
    states = {id(parameter): state for parameter, state in optimizer.state.items()}
    for name, parameter in zip(named.names(), named.parameters, strict=True):
        for key, value in states.get(id(parameter), {}).items():
            if key != "step" and isinstance(value, Tensor):
                yield key, name, parameter, value


class Updates(Probe):
    """Copies the parameters when it is due; one step later, what was added to them in between."""

    watch = "updates"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._old: dict[str, Tensor] | None = None  # copies of parameters before the update

    def is_due(self, step: int) -> bool:
        return step % self.period in (0, 1 % self.period)

    def begin(self, step: Pending, named: NamedParameters) -> None:
        self._old = None  # the difference to another parameter is no update

    def take(self, step: Pending, named: NamedParameters) -> Iterator[Part]:
        old, self._old = self._old, None
        parameters = dict(zip(named.names(), own_shards(named), strict=True))
        if old is not None:
            now, copies = [p.detach() for name, p in parameters.items() if name in old], list(old.values())
            # If not, the parameters were moved, or their data was replaced.
            if all(t.shape == p.shape and t.device in (p.device, _META) for t, p in zip(copies, now, strict=False)):
                updates = self._make_or_meta(step.step, now, lambda: list(torch._foreach_sub(now, copies)))
                yield Segment("update", tuple(old)), updates
        if step.step % self.period == 0:
            kept = {n: p.detach() for n, p in parameters.items() if p.requires_grad and measurable(p)}
            before = list(kept.values())
            copies = self._make_or_meta(step.step, before, lambda: [parameter.clone() for parameter in before])
            self._old = dict(zip(kept, copies, strict=True))

    def _make_or_meta(self, step: int, like: list[Tensor], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The tensors of ``make``; if it runs out of memory, meta tensors, so that no other rank waits in vain."""
        try:
            with torch.no_grad():
                return make()
        except Exception:
            self.run.unwatched.report_failure(step, "the last update could not be measured")
            return [torch.empty_like(tensor, device=_META) for tensor in like]

    def forget(self) -> None:
        self._old = None
