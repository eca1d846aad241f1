"""What a monitor measures besides gradients: buffers, optimizer states, activations, outputs, batches."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd as _Dropout
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradstat import _fields
from gradstat._core.hooks import Hook, hook_forward, removed_with
from gradstat._core.host_copy import peek_interpreter_stack
from gradstat._core.measurement import Measurement
from gradstat._core.nested import tensors_in
from gradstat._core.parameters import PLAIN_TYPES
from gradstat._core.tensors import TensorInfo, is_uninitialized, why_not_measured
from gradstat.check import stats
from gradstat.monitor.segments import Segment
from gradstat.recording.kinds import name_of_state
from gradstat.replay.step_state import in_backward, is_replaying

_MEASURABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def measurable(tensor: object) -> bool:
    """Whether statistics of a tensor are useful: it is floating-point or complex, with 16 bits or more."""
    return isinstance(tensor, Tensor) and tensor.dtype in _MEASURABLE and why_not_measured("", tensor) is None


def buffers_of(model: nn.Module) -> tuple[Segment, list[Tensor]]:
    """The measurable buffers of a model."""
    named = [(name, buffer) for name, buffer in model.named_buffers() if measurable(buffer)]
    return Segment("buffer", tuple(name for name, _ in named)), [buffer for _, buffer in named]


def states_of(
    optimizer: Optimizer, parameters: Sequence[Tensor], names: tuple[str, ...]
) -> list[tuple[Segment, list[Tensor]]]:
    """The tensors in an optimizer's state that have the shape of their parameter, a segment for each state key."""
    # Keyed by id, because hashing a tensor is slow.
    states = {id(parameter): state for parameter, state in optimizer.state.items()}
    by_key: dict[str, tuple[list[str], list[Tensor]]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in states.get(id(parameter), {}).items():
            if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                of_key, tensors = by_key.setdefault(key, ([], []))
                of_key.append(name)
                tensors.append(value)
    return [(Segment(name_of_state(key), tuple(of_key)), tensors) for key, (of_key, tensors) in by_key.items()]


# All watched optimizers, since several may share a model.
optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Coverage(NamedTuple):
    """Names of parameters for which model and optimizer do not agree."""

    left_out: list[str]  # with a gradient, but in no optimizer
    unused: list[str]  # without a gradient and in no optimizer, such as a target network's
    frozen: list[str]  # frozen, but in the optimizer
    unknown: list[str]  # in the optimizer, not watched, and without a gradient
    besides: list[str]  # in the optimizer and watched, but not the model's
    steps: int = 0  # that the optimizer has taken since the last look, as far as known
    changes: int = 0  # in place since then, of one of its parameters
    settings: Mapping[str, float] = MappingProxyType({})  # its weight decay and eps, by group


def coverage(optimizer: Optimizer, parameters: Sequence[Tensor], names: Sequence[str], besides: list[str]) -> Coverage:
    """Compares ``optimizer`` with the watched ``parameters``; ``besides`` names those that the model does not have."""
    trained, watched = _ids_of(optimizer), set(map(id, parameters))
    frozen = [(n, p) for n, p in zip(names, parameters, strict=True) if not p.requires_grad]
    lacking: list[tuple[str, Tensor]] = []
    if not watched <= trained:
        anywhere = trained.union(*map(_ids_of, optimizers))
        lacking = [(n, p) for n, p in zip(names, parameters, strict=True) if id(p) not in anywhere and p.requires_grad]
    unknown: list[str] = []
    if not trained <= watched:
        unknown = [
            f"param_groups[{g}]['params'][{i}]"
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
            if id(parameter) not in watched and parameter.grad is None
        ]
    return Coverage(
        left_out=[name for name, parameter in lacking if parameter.grad is not None],
        unused=[name for name, parameter in lacking if parameter.grad is None],
        frozen=[name for name, parameter in frozen if id(parameter) in trained],
        unknown=unknown,
        besides=besides,
        settings={
            f"{name} of group {i}": float(group[name])
            for i, group in enumerate(optimizer.param_groups)
            for name in ("weight_decay", "eps")
            if isinstance(group.get(name), int | float)
        },
    )


def _ids_of(optimizer: Optimizer) -> set[int]:
    return set().union(*(map(id, group["params"]) for group in optimizer.param_groups))


def versions(parameters: Sequence[Tensor], names: Sequence[str]) -> dict[str, int]:
    """How often each of the ``parameters`` that are trained was changed in place, as autograd counts it."""
    return {
        name: parameter._version
        for name, parameter in zip(names, parameters, strict=True)
        if parameter.requires_grad and not is_uninitialized(parameter) and not parameter.is_inference()
    }


def leaves_of(computed: Tensor) -> list[tuple[weakref.ref[Tensor], int]]:
    """The parameters that ``computed`` depends on, each with its version; walks the graph. Not FSDP's own kinds."""
    waiting, seen = [computed.grad_fn], {computed.grad_fn}
    found: list[tuple[weakref.ref[Tensor], int]] = []
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if type(leaf) is nn.Parameter and not leaf.is_inference():
            found.append((weakref.ref(leaf), leaf._version))
        for behind, _ in () if node is None else node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return found


def untrained(leaves: Sequence[tuple[weakref.ref[Tensor], int]], parameters: Sequence[Tensor]) -> list[torch.Size]:
    """The shapes of ``leaves`` that have got gradients and no update since, and that nobody watches.

    They are neither among ``parameters`` nor in a watched optimizer. One that is not watched may train them, as for the
    discriminator of a GAN, but then they have changed.
    """
    watched = set(map(id, parameters)).union(*map(_ids_of, optimizers))
    alive = {id(leaf): (leaf, version) for reference, version in leaves if (leaf := reference()) is not None}
    return [
        leaf.shape
        for key, (leaf, version) in alive.items()
        if key not in watched and leaf._version == version and leaf.grad is not None
    ]


# Functions in a graph that are looked at; so many take a fifth of a second.
_MOST_NODES = 100_000


class BackwardOrder:
    """Records the order in which the gradients of the first step are complete, then removes its hooks."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.names: list[str] = []
        self.is_partial = False  # whether some parameters have no shape yet, and cannot have hooks
        noted = self.names  # no reference to self, nor to a parameter, from a parameter's hook
        handles: list[Any] = []
        self.remove = removed_with(self, handles)
        try:
            for name, parameter in named:
                if is_uninitialized(parameter):
                    self.is_partial = True
                elif parameter.requires_grad and parameter.is_leaf:
                    hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: _note(noted, name))
                    handles.append(hook)
        except BaseException:
            self.remove()
            raise

    def end(self) -> tuple[str, ...]:
        """The order, by when the gradient of each parameter was first complete."""
        self.remove()
        return tuple(dict.fromkeys(self.names))


def _note(noted: list[str], name: str) -> None:
    if len(noted) < 1_000_000:  # a model may never reach its first step
        noted.append(name)


class KeptGradients:
    """Tells whether an optimizer steps with gradients that contain those of its last step, since none were zeroed.

    It looks at one parameter. A gradient that a step has used is the same tensor when the next one is added to it, and
    its version is higher by exactly one: another tensor takes its place after it was set to None, and ``zero_()`` or
    any other change raises the version once more.

    Attributes:
        was_kept: Whether the last step used gradients that contain those of an earlier one.
        has_rival: Whether an optimizer has stepped that has none of the watched parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._follows: weakref.ref[Tensor] | None = None
        self._last: tuple[weakref.ref[Tensor], int] | None = None  # the gradient at the last event, and its version
        self._has_used = self._has_new = False  # whether it contains what a step has used, and what came afterwards
        self.was_kept = self.has_rival = False
        self._steps = self._version = 0  # of the optimizer; of the parameter
        self._handles: list[Any] = []
        self.remove = removed_with(self, self._handles)
        if hasattr(optimizer, "_optimizer_step_post_hooks"):  # else it has not called torch's __init__
            self._handles.append(optimizer.register_step_post_hook(Hook(self._has_stepped)))
        self._watched: set[int] = set()
        self._handles.append(register_optimizer_step_post_hook(Hook(self._any_has_stepped)))

    def _any_has_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        first = optimizer.param_groups[0]["params"][:1]  # enough, and not a loop over all in each step
        self.has_rival = self.has_rival or (bool(self._watched and first) and id(first[0]) not in self._watched)

    def follow(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        """Follows the first of the watched ``parameters`` that ``optimizer`` trains and that has a gradient."""
        self._watched = set(map(id, parameters))
        trained = _ids_of(optimizer)
        chosen = next((p for p in parameters if p.grad is not None and p.is_leaf and id(p) in trained), None)
        if chosen is None or len(self._handles) < 2 or (self._follows is not None and self._follows() is chosen):
            return
        for handle in self._handles[2:]:
            handle.remove()
        self._follows, self._last, self._version = weakref.ref(chosen), None, chosen._version
        self._handles[2:] = [chosen.register_post_accumulate_grad_hook(Hook(self._has_accumulated))]

    def _has_stepped(self, *_: Any) -> None:
        self._steps += 1
        parameter = None if self._follows is None else self._follows()
        gradient = None if parameter is None else parameter.grad
        self.was_kept = self._has_used and self._has_new
        self._has_used, self._has_new = gradient is not None, False
        self._last = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def _has_accumulated(self, parameter: Tensor) -> None:
        gradient, last = parameter.grad, self._last
        assert gradient is not None
        version = gradient._version
        is_continued = last is not None and last[0]() is gradient and version == last[1] + 1
        self._has_used, self._has_new = self._has_used and is_continued, True
        self._last = weakref.ref(gradient), version

    def progress(self) -> tuple[int, int]:
        """Since the last call, the steps of the optimizer, and how often the parameter was changed in place."""
        parameter = None if self._follows is None else self._follows()
        steps, version = self._steps, self._version
        self._steps, self._version = 0, version if parameter is None else parameter._version
        return steps, self._version - version


class Switched:
    """An observer whose hooks can be switched off, which makes them cheaper than a test in each.

    Attributes:
        remove: Removes the hooks.
    """

    def __init__(self, hooks: dict[Hook, Any], on: bool) -> None:
        """``hooks`` come with their handles."""
        self._hooks = list(hooks)
        self.remove = removed_with(self, list(hooks.values()))
        self.switch(on)

    def switch(self, on: bool) -> None:
        for hook in self._hooks:
            hook.on = on


class _PassRows:
    """Rows of tensors by name, each merged over the passes of a step in which it was measured."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Tensor, TensorInfo]] = {}

    def add(self, name: str, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Adds the rows of the ``tensors`` that one pass had under this name."""
        info, numel = TensorInfo.of(tensors[0]), sum(tensor.numel() for tensor in tensors)
        earlier = self.seen.get(name)
        if earlier is not None and earlier[0].device == rows.device:
            rows, numel = torch.cat([earlier[0], rows]), earlier[1].shape.numel() + numel
        if len(rows) > 1:
            rows = _fields.merge(torch, rows)[None]
            rows[:, _fields.INDEX["first_nonfinite"]] = torch.inf  # it would not say in which of them
            info = TensorInfo(torch.Size([numel]), info.dtype, info.device, None)
        self.seen[name] = rows, info

    def take(self, place: Callable[[str], int] | None = None) -> tuple[tuple[str, ...], Measurement]:
        """The names, sorted by ``place``, and their rows since the last call."""
        seen, self.seen = self.seen, {}
        names = tuple(sorted(seen, key=place))
        return names, Measurement.joined([seen[name][0] for name in names], [seen[name][1] for name in names])


def called(model: nn.Module) -> nn.Module:
    """The module that a program calls: ``model``, or if it has no forward pass its only child that is trained, if any.

    So it is for a LightningModule whose ``training_step`` calls a child, and for what only holds a model. Of several
    children none is chosen: one may end in an activation because another one follows.
    """
    while not _has_forward(model):
        trained = [child for child in model.children() if any(p.requires_grad for p in child.parameters())]
        if len(trained) != 1:
            break
        (model,) = trained
    return model


def _has_forward(module: nn.Module) -> bool:
    """Whether a module or its class defines a forward pass, other than the one of Lightning that raises."""
    forward = getattr(type(module), "forward", None)
    is_missing = forward is nn.Module.forward or getattr(forward, "__qualname__", "") == "LightningModule.forward"
    return not is_missing or "forward" in vars(module)


class Inputs(Switched):
    """Keeps the floating inputs of a model's last forward pass in training, while ``on``, until they are taken.

    Those of earlier passes of a step are measured when the next pass begins, and only their rows are kept.

    Attributes:
        earlier: The rows of earlier passes.
    """

    def __init__(self, model: nn.Module, backend: str | None) -> None:
        hook = Hook(self.keep)
        super().__init__({hook: hook_forward(model, hook, before=True, with_kwargs=True)}, on=True)
        self._backend = backend
        self._segment = Segment("input", ())
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._integers: list[tuple[str, Tensor]] = []  # of the last pass, such as tokens; not measured
        self._has_others = False  # whether it got tensors of other kinds
        self.earlier = _PassRows()
        self._passes = 0

    def keep(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or in_backward() or is_replaying():
            return
        passes = self._passes + 1
        if passes > _MOST_PASSES or peek_interpreter_stack() is not None:  # torch.func's tensors must not be kept
            return
        if self._tensors:
            self._merge()
        self._passes = passes
        found = [*tensors_in(arguments, "input"), *tensors_in(keywords, "input")]
        names, tensors, versions, self._integers, self._has_others = [], [], [], [], False
        for path, tensor in found:
            # What another model has computed is no data.
            if tensor.is_leaf and is_plain(tensor) and not tensor.is_inference():
                names.append(path)
                tensors.append(tensor)
                versions.append(tensor._version)
            elif tensor.dtype in _INTEGERS:
                self._integers.append((path, tensor))
            else:
                self._has_others = True
        if tuple(names) != self._segment.names:  # else the same object, which need not be compared
            self._segment = Segment("input", tuple(names))
        self._tensors, self._versions = tensors, versions

    def take(self) -> tuple[Segment, list[Tensor]]:
        """What the last pass since the last call got, without tensors that were changed in place in the meantime."""
        segment, tensors, versions = self._segment, self._tensors, self._versions
        self._tensors, self._versions, self._integers, self._passes = [], [], [], 0
        if list(map(_version_of, tensors)) == versions:
            return segment, tensors
        same = [tensor._version == version for tensor, version in zip(tensors, versions, strict=True)]
        kept = [(name, t) for name, t, is_same in zip(segment.names, tensors, same, strict=False) if is_same]
        return Segment("input", tuple(name for name, _ in kept)), [tensor for _, tensor in kept]

    def _merge(self) -> None:
        """Measures what is kept, and merges its rows with those of earlier passes."""
        segment, tensors = self.take()
        if not tensors:
            return
        with torch.no_grad():
            rows = stats(tensors, backend=self._backend)
            for path, tensor, row in zip(segment.names, tensors, rows.split(1), strict=True):
                self.earlier.add(path, row, [tensor])

    def take_merged(self) -> tuple[Segment, Measurement]:
        """The rows of the inputs of all passes since the last call; afterwards there is nothing to `take`."""
        self._merge()
        names, measured = self.earlier.take()
        return Segment("input", names), measured

    def integers(self) -> list[tuple[str, Tensor]]:
        """The integer inputs of the last pass, such as tokens and masks, and their names; without labels.

        Empty if it is not known of every input whether it is the same in all samples.
        """
        # A number, such as the Trainer's number of tokens in all micro-batches, is the same for all samples anyway.
        inputs = [(path, tensor) for path, tensor in self._integers if path != _LABELS and tensor.dim()]
        if self._has_others or list(map(_version_of, self._tensors)) != self._versions:
            return []
        every = [*(tensor for _, tensor in inputs), *(tensor for tensor in self._tensors if tensor.dim())]
        return inputs if all(map(_has_samples, every)) else []

    def forget(self) -> None:
        self._tensors, self._versions, self._integers, self.earlier, self._passes = [], [], [], _PassRows(), 0


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is measurable, and has elements in memory of its own."""
    is_dense = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_meta
    return is_dense and tensor.dtype in _MEASURABLE and tensor.numel() > 0


_LABELS = "input['labels']"  # as models of transformers call them, which compute the loss
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
_version_of = operator.attrgetter("_version")
# More forward passes than this in one step are not measured, because so many cannot be micro-batches.
_MOST_PASSES = 64


def _has_samples(tensor: Tensor) -> bool:
    """Whether `constant_features` says something about a tensor."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return tensor.dim() > 1 and len(tensor) > 1 and tensor.numel() > 0


def dropped_by(model: nn.Module) -> list[str]:
    """The names of modules whose dropout leaves less than a tenth: torch's, and others with a number ``dropout``."""
    shares = (
        (name, module.p if isinstance(module, _Dropout) else getattr(module, "dropout", 0))
        for name, module in model.named_modules()
        if module.training
    )
    return [name for name, share in shares if isinstance(share, float) and 0.9 < share <= 1]


class Activations(Switched):
    """Measures outputs of modules without children, in forward hooks while ``on``; keeps rows, not activations."""

    def __init__(self, model: nn.Module, backend: str | None) -> None:
        self._backend = backend
        self._seen = _PassRows()
        hooks = {
            Hook(self.measure, name): module
            for name, module in model.named_modules()
            if name and next(module.children(), None) is None
        }
        super().__init__({hook: hook_forward(module, hook) for hook, module in hooks.items()}, on=False)
        self._order = {name: i for i, (name, _) in enumerate(model.named_modules())}

    def measure(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [t for _, t in tensors_in(output, "") if measurable(t) and t.numel()]
        if not tensors:
            return
        with torch.no_grad():
            self._seen.add(name, stats([tensor.detach() for tensor in tensors], backend=self._backend), tensors)

    def take(self) -> tuple[Segment, Measurement]:
        names, measured = self._seen.take(self._order.__getitem__)
        return Segment("activation", names), measured


def constant_features(tensor: Tensor) -> Tensor | None:
    """The fraction of features that are the same in all samples, ``[1]``; samples are along the first dimension."""
    if tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.shape[0] < 2 or tensor.dtype.is_complex:
        return None
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach().flatten(1), dim=0)
        return (low == high).to(torch.float32).mean().reshape(1)
