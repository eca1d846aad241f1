"""What a monitor measures besides gradients: buffers, optimizer states, activations, outputs, batches."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
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
    decays: tuple[float, ...] = ()  # its weight decay, by group


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
        decays=tuple(float(group.get("weight_decay") or 0.0) for group in optimizer.param_groups),
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


class _Switched:
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


class Inputs(_Switched):
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


class Activations(_Switched):
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


# Functions that make logits what no logits should be, as autograd names them.
_ACTIVATIONS = ("SoftmaxBackward0", "SigmoidBackward0", "ReluBackward0")
# Of larger outputs a sample is enough: so many rows, in all so many elements, and so many columns.
_MOST_ROWS, _MOST_ELEMENTS, _MOST_COLUMNS = 2048, 2**23, 16
_FEW_PLACES = 4


class Outputs(_Switched):
    """Measures a model's predictions, and what the loss makes of them, in hooks while ``on``; keeps a few numbers.

    A prediction is certain if its largest logit exceeds the next by more than 10, so that a softmax gives every other
    class less than 5e-5. The size of logits alone means nothing, since a softmax ignores a common offset. If the loss
    takes their softmax, each row of the gradient that it sends back sums to 0, and the label is the smallest element.
    Of many rows only a sample is read, the same in both.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[str, Tensor] = {}
        self.leaves: list[tuple[weakref.ref[Tensor], int]] | None = None  # of the first pass, as `leaves_of`
        hook = Hook(self.measure)
        super().__init__({hook: hook_forward(model, hook)}, on=False)

    def measure(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        computed = [tensor for _, tensor in tensors_in(output, "") if tensor.grad_fn is not None and tensor.dim()]
        logits = getattr(output, "logits", computed[0] if computed else output)
        if self.leaves is None:
            self.leaves = leaves_of(computed[0]) if computed else None
        if measurable(logits) and logits.is_floating_point() and logits.dim() and logits.numel():
            with torch.no_grad():
                every = logits.detach() if logits.dim() > 1 else logits.detach()[:, None]
                sample = _sample(every)
                values = every[sample]
                if values.shape[-1] > 1:
                    largest = values.topk(2, -1).values
                    margin = largest[..., 0] - largest[..., 1]
                else:
                    margin = values.abs()
                self._seen = {"logits": (margin > 10).mean(dtype=torch.float32).reshape(1)}
                in_transform = peek_interpreter_stack() is not None
                if logits.grad_fn is None or not is_plain(values) or in_transform:
                    return
                activation = torch.zeros(1, device=values.device)
                if values.shape[-1] > 1:
                    self._seen["over_samples"] = _is_over_samples(every)
                    activation = _activation_of(values)
                    if type(logits.grad_fn).__name__ in _ACTIVATIONS:
                        activation = -activation
            logits.register_hook(Hook(self.measure_gradient, activation, every, every._version, sample))

    def measure_gradient(
        self, activation: Tensor, outputs: Tensor, version: int, sample: Any, gradient: Tensor
    ) -> None:
        if not self._hooks[0].on or not is_plain(gradient) or outputs._version != version:
            return
        with torch.no_grad():
            gradient = gradient.detach().view_as(outputs)
            is_softmax = gradient.new_zeros((), dtype=torch.bool)
            if outputs.shape[-1] > 1:
                is_softmax = self._measure_classes(activation, outputs[sample].flatten(0, -2), sample, gradient)
            if 2 * outputs[0].numel() <= _MOST_ELEMENTS // 8:
                self._seen |= _fit_of(outputs, gradient, is_softmax)

    def _measure_classes(self, activation: Tensor, outputs: Tensor, sample: Any, gradient: Tensor) -> Tensor:
        """Measures what a loss on classes makes of the sampled ``outputs``; returns whether it is one, as a tensor."""
        wide = torch.promote_types(gradient.dtype, torch.float32)
        classes, count = gradient.shape[-1], gradient.shape[:-1].numel()
        rows = columns = gradient[sample].flatten(0, -2)
        norms, smallest = torch.linalg.vector_norm(rows, dim=-1, dtype=wide), rows.argmin(-1)
        if len(rows) < count:  # all rows of some columns: those of labels, since others may be zero
            some = norms.topk(min(_MOST_COLUMNS, _MOST_ELEMENTS // count, len(rows))).indices
            columns = gradient[..., smallest[some]].flatten(0, -2)
        # Elements of 16 bits are rounded by up to 2 ** -9; those of other losses cancel by chance, but not in all.
        limit = 0.01 * norms.amax()
        cancels = (rows.sum(-1, dtype=wide).abs() < limit).all()
        # Columns cancel instead, and each row has one label.
        is_askew = (columns.sum(0, dtype=wide).abs() < limit).all() & ~cancels
        is_one_label = (rows.topk(2, -1, largest=False).values[:, 1] >= 0).all()
        is_askew &= is_one_label
        is_askew &= classes not in (2, count) and columns.numel() > 0
        labels = torch.where(norms > 0, smallest, -1)  # no gradient where a label is ignored
        label, labelled = labels.amax(), (labels >= 0).sum()
        is_one = ((labels == label) | (labels < 0)).all()
        few = slice(max(1, _MOST_ELEMENTS // 8 // classes))
        activation = torch.where(_is_twice(outputs[few].to(wide), rows[few].to(wide)), -5.0, activation)
        self._seen["activation"] = torch.where(is_askew, 4.0, activation * cancels)
        # A loss that takes logarithms of probabilities sends back one number for each sample: classes are last.
        is_last = is_one_label & (rows.amax() <= 0) & (classes > 2)
        over = self._seen["over_samples"]
        self._seen["over_samples"] = torch.where(is_last, over.clamp(max=1), over)
        right = (labels == outputs.argmax(-1)).sum() / labelled.clamp(min=1)
        for name, value in (
            ("classes", classes), ("labels", labelled), ("label", is_one * (label + 1)), ("right", right),
        ):  # fmt: skip
            self._seen[name] = ((cancels | is_last) * value).float().reshape(1)
        is_softmax: Tensor = cancels | is_last
        return is_softmax

    def take(self) -> dict[str, Tensor]:
        """The numbers of the last forward pass since the last call, each ``[1]``, of the rows that were read.

        ``"logits"`` is the fraction that is certain. The others are 0 unless the loss takes their softmax, or one
        logarithm of a probability for each sample: the numbers of ``"classes"`` and of ``"labels"``; ``"label"``, which
        is 1 + the label if all are the same, else 0; ``"right"``, the fraction of labels whose logit is the largest;
        and ``"activation"``, 0 if some logits are negative, 1 if each row sums to 1, 3 if some are exactly 0, and 2 if
        all are in (0, 1]. That is negative if autograd names the function, 4 if the softmax is one over the samples,
        and -5 if it is one of a softmax. ``"over_samples"`` is 1 if the outputs are such a softmax already, or its
        logarithm, or one over places in a sequence. For the others see `_fit_of`.
        """
        seen, self._seen = self._seen, {}
        return seen


def _activation_of(values: Tensor) -> Tensor:
    """What `Outputs.take` calls the activation, ``[1]``, by the values alone."""
    low, high = torch.aminmax(values)
    is_one = ((values.sum(-1, dtype=torch.float32) - 1).abs() < 0.01).all()
    # Equal ones tell nothing, as those of a head that begins at zero.
    has_zero = low == 0
    is_activated = (low >= 0) & (high > low) & (has_zero | (high <= 1))
    activation: Tensor = is_activated * torch.where(is_one, 1.0, torch.where(has_zero, 3.0, 2.0))
    return activation.reshape(1)


def _is_twice(outputs: Tensor, gradient: Tensor) -> Tensor:
    """Whether a loss takes the softmax of the softmax of ``outputs``, ``[n, c]``, by the direction of its gradient."""

    def along(expected: Tensor) -> Tensor:
        return torch.nn.functional.cosine_similarity(expected.flatten(), gradient.flatten(), dim=0, eps=1e-30)

    label = torch.zeros_like(gradient).scatter_(1, gradient.argmin(1, keepdim=True), 1.0)
    label *= (gradient != 0).any(1, keepdim=True)
    probabilities = outputs.softmax(1)
    twice = probabilities.softmax(1) * label.any(1, keepdim=True) - label
    twice = probabilities * (twice - (probabilities * twice).sum(1, keepdim=True))
    once = probabilities * label.any(1, keepdim=True) - label
    return (along(twice) > 0.9999) & (along(once) < 0.99)


def _fit_of(outputs: Tensor, gradient: Tensor, is_softmax: Tensor) -> dict[str, Tensor]:
    """Sums over a model's ``outputs`` and their residuals, which tell whether they follow the targets; each ``[1]``.

    A residual is an output less its target. The gradient of a squared error is the residual times a number. Those of
    cross-entropies tell the labels, with which probabilities are compared; so does that of a binary one, on logits or
    on probabilities, which is recognised by what it is of them. Of large outputs some samples are enough.

    Returns:
        Around the means over samples, the sums of squared ``"outputs"``, of products with residuals as ``"cross"``, and
        of squared ``"residuals"``; the sum of squared gradients as ``"squares"``, 0 if residuals are exact; their
        ``"count"``, and the number of ``"samples"``.
    """
    wide, every = torch.promote_types(outputs.dtype, torch.float32), 1 + outputs.numel() // (_MOST_ELEMENTS // 8)
    squares = torch.linalg.vector_norm(gradient, dtype=wide).square()
    values, residuals = outputs[::every].to(wide).flatten(1), gradient[::every].to(wide).flatten(1)
    is_one, sizes = residuals < 0, residuals.abs()
    for_logits = sizes / torch.where(is_one, -values, values).sigmoid()
    for_probabilities, most = sizes * torch.where(is_one, values, 1 - values), 1.01 + 4 * torch.finfo(outputs.dtype).eps
    is_binary = _is_one_number(for_logits, most) | _is_one_number(for_probabilities, most)
    is_binary &= is_one.any() & (residuals > 0).any()
    residuals = torch.where(is_binary, values - is_one.to(values.dtype), residuals)
    is_exact = is_binary
    if outputs.dim() == 2:  # tokens of sequences have frequencies, which are learned first, and for long
        probabilities = values.softmax(1)
        labels = torch.zeros_like(values).scatter_(1, residuals.argmin(1, keepdim=True), 1.0)
        residuals = torch.where(is_softmax, probabilities - labels, residuals)
        values, is_exact = torch.where(is_softmax, probabilities, values), is_exact | is_softmax
    values, residuals = values - values.mean(0), residuals - residuals.mean(0)
    numbers = {
        "outputs": values.square().sum(),
        "cross": (values * residuals).sum(),
        "residuals": residuals.square().sum(),
        "squares": squares * ~is_exact,
        "count": values.new_full((), values.numel()),
        "samples": values.new_full((), len(outputs)),
    }
    return {name: number.float().reshape(1) for name, number in numbers.items()}


def _is_one_number(values: Tensor, most: float) -> Tensor:
    """Whether all ``values`` but zeros are one positive number, up to the factor ``most``."""
    least = torch.where(values == 0, torch.inf, values).amin()
    return (least > 0) & (values.amax() <= most * least)


def _is_over_samples(outputs: Tensor) -> Tensor:
    """1 if ``outputs`` are probabilities, or their logarithms, that sum to 1 over dim 0 and not over the last; ``[1]``.

    2 if they do over dim 1 of three, which may be that of classes. The first few places of other dims are enough.
    """
    while outputs.dim() > 3:
        outputs = outputs[:, 0]

    def is_one(dim: int) -> Tensor:
        places = tuple(slice(None if at == dim % outputs.dim() else _FEW_PLACES) for at in range(outputs.dim()))
        some = outputs[places]
        probabilities = torch.where((some <= 0).all(), some.exp(), some)
        sums = probabilities.sum(dim, dtype=torch.float32)
        return (probabilities >= 0).all() & ((sums - 1).abs() < 0.01).all()

    sums = [is_one(dim) * (1.0 + dim) for dim in range(outputs.dim() - 1) if outputs.shape[dim] > 1]
    return (~is_one(-1) * sum(sums, outputs.new_zeros(()))).float().reshape(1)


def _sample(tensor: Tensor) -> tuple[Any, ...]:
    """An index of the leading dimensions of a tensor, which takes all its rows if these are few, else some.

    Those are equally far apart. So are their places in each dimension, such as that of time, because their number has
    no divisor in common with the sizes.
    """
    *sizes, classes = tensor.shape
    count, taken = math.prod(sizes), max(1, min(_MOST_ROWS, _MOST_ELEMENTS // classes))
    if taken >= count or not is_plain(tensor):
        return (...,)
    while math.gcd(taken, count) > 1:
        taken -= 1
    places, index = torch.arange(0, taken * count, count, device=tensor.device) // taken, list[Tensor]()
    for size in reversed(sizes):
        index.insert(0, places % size)
        places = places // size
    return tuple(index)


def constant_features(tensor: Tensor) -> Tensor | None:
    """The fraction of features that are the same in all samples, ``[1]``; samples are along the first dimension."""
    if tensor.layout is not torch.strided or tensor.dim() < 2 or tensor.shape[0] < 2 or tensor.dtype.is_complex:
        return None
    with torch.no_grad():
        low, high = torch.aminmax(tensor.detach().flatten(1), dim=0)
        return (low == high).to(torch.float32).mean().reshape(1)
