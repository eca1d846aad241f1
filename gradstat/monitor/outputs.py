"""What a monitor measures of a model's outputs: whether they are as the loss takes them, and follow the targets."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from gradstat._core.hooks import Hook, hook_forward
from gradstat._core.host_copy import peek_interpreter_stack
from gradstat._core.nested import tensors_in
from gradstat.monitor.observers import Switched, is_plain, leaves_of, measurable
from gradstat.recording.kinds import FIT

# Functions that make logits what no logits should be, as autograd names them.
_ACTIVATIONS = ("SoftmaxBackward0", "SigmoidBackward0", "ReluBackward0")
# Of larger outputs a sample is enough: so many rows, in all so many elements, and so many columns.
_MOST_ROWS, _MOST_ELEMENTS, _MOST_COLUMNS = 2048, 2**23, 16
_FEW_PLACES = 4
_FEW_LABELS = 8  # so many gradients of other losses are not all as those of equal binary labels would be


class Outputs(Switched):
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
        if self._seen and not torch.is_grad_enabled():
            return  # the pass of which there will be a gradient counts
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
            logits.register_hook(Hook(self.measure_gradient, self._seen, activation, every, every._version, sample))

    def measure_gradient(
        self, seen: dict[str, Tensor], activation: Tensor, outputs: Tensor, version: int, sample: Any, gradient: Tensor
    ) -> None:
        # Of several forward passes before a backward pass the last counts, and none if the step was measured before.
        is_late = not self._hooks[0].on or seen is not self._seen
        if is_late or not is_plain(gradient) or outputs._version != version:
            return
        with torch.no_grad():
            gradient = gradient.detach().view_as(outputs)
            is_of_logits = is_of_logarithms = gradient.new_zeros((), dtype=torch.bool)
            if outputs.shape[-1] > 1:
                rows = outputs[sample].flatten(0, -2)
                is_of_logits, is_of_logarithms = self._measure_classes(activation, rows, sample, gradient)
            if 2 * outputs[0].numel() <= _MOST_ELEMENTS // 8:
                self._seen |= _fit_of(outputs, gradient, is_of_logits, is_of_logarithms)

    def _measure_classes(
        self, activation: Tensor, outputs: Tensor, sample: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Measures what a loss on classes makes of the sampled ``outputs``; returns, as tensors, whether it is one.

        That is one of logits, whose softmax it takes, or one of logarithms of probabilities.
        """
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
        sums, largest = (torch.linalg.vector_norm(rows, order, -1, dtype=wide) for order in (1, math.inf))
        used = torch.linalg.vector_norm(rows, math.inf, 0, dtype=wide) > 0
        are_logarithms = ((outputs[few].exp().sum(-1, dtype=wide) - 1).abs() < 0.01).all()
        is_one_of = (sums <= largest).all() & (used.sum() > 1) & ~are_logarithms
        self._seen["one_of"] = is_one_of.float().reshape(1)
        over = self._seen["over_samples"]
        self._seen["over_samples"] = torch.where(is_last, over.clamp(max=1), over)
        right = (labels == outputs.argmax(-1)).sum() / labelled.clamp(min=1)
        for name, value in (
            ("classes", classes), ("labels", labelled), ("label", is_one * (label + 1)), ("right", right),
        ):  # fmt: skip
            self._seen[name] = ((cancels | is_last) * value).float().reshape(1)
        return cancels, is_last

    def take(self) -> dict[str, Tensor]:
        """The numbers of the last forward pass since the last call, each ``[1]``, of the rows that were read.

        ``"logits"`` is the fraction that is certain. The others are 0 unless the loss takes their softmax, or one
        logarithm of a probability for each sample: the numbers of ``"classes"`` and of ``"labels"``; ``"label"``, which
        is 1 + the label if all are the same, else 0; ``"right"``, the fraction of labels whose logit is the largest;
        and ``"activation"``, 0 if some logits are negative, 1 if each row sums to 1, 3 if some are exactly 0, and 2 if
        all are in (0, 1]. That is negative if autograd names the function, 4 if the softmax is one over the samples,
        and -5 if it is one of a softmax. ``"over_samples"`` is 1 if the outputs are such a softmax already, or its
        logarithm, or one over places in a sequence. ``"one_of"`` is 1 if the loss takes one output of each row, not
        the same in all and no logarithm of a probability, as Q-learning takes that of the action. For the others see
        `_fit_of`.
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
    has_label = (gradient != 0).any(1, keepdim=True)

    def along(expected: Tensor) -> Tensor:
        expected = (expected * has_label).flatten()
        return torch.nn.functional.cosine_similarity(expected, gradient.flatten(), dim=0, eps=1e-30)

    label = torch.zeros_like(gradient).scatter_(1, gradient.argmin(1, keepdim=True), 1.0)
    probabilities = outputs.softmax(1)
    twice = probabilities.softmax(1) - label
    twice = probabilities * (twice - (probabilities * twice).sum(1, keepdim=True))
    return (along(twice) > 0.9999) & (along(probabilities - label) < 0.99)


def _fit_of(outputs: Tensor, gradient: Tensor, is_of_logits: Tensor, is_of_logarithms: Tensor) -> dict[str, Tensor]:
    """Sums over a model's ``outputs`` and their residuals, which tell whether they follow the targets; each ``[1]``.

    A residual is an output less its target. The gradient of a squared error is the residual times a number. That of a
    cross-entropy tells the labels, and it is one if the gradient is the same multiple, for each sample, of what the
    labels and outputs make it: so a policy's, which weighs actions by returns, is none. Of large outputs some samples
    are enough.

    Returns:
        By the names in `FIT`: around the means over samples, the sums of squared ``"outputs"``, of products with
        residuals as ``"cross"``, and of squared ``"residuals"``; the sum of squared gradients as ``"squares"``, 0 if
        residuals are exact; their ``"count"``, and the number of ``"samples"``.
    """
    wide, every = torch.promote_types(outputs.dtype, torch.float32), 1 + outputs.numel() // (_MOST_ELEMENTS // 8)
    squares = torch.linalg.vector_norm(gradient, dtype=wide).square()
    values, residuals = outputs[::every].to(wide).flatten(1), gradient[::every].to(wide).flatten(1)
    is_one, sizes = residuals < 0, residuals.abs()
    for_logits = sizes / torch.where(is_one, -values, values).sigmoid()
    for_probabilities, most = sizes * torch.where(is_one, values, 1 - values), 1.01 + 4 * torch.finfo(outputs.dtype).eps
    is_binary = _is_one_number(for_logits, most) | _is_one_number(for_probabilities, most)
    is_binary &= (is_one.any() & (residuals > 0).any()) | ((residuals != 0).sum() >= _FEW_LABELS)
    # Without a gradient there is no label.
    residuals = torch.where(is_binary & (residuals != 0), values - is_one.to(values.dtype), residuals)
    is_exact = is_binary
    if outputs.dim() == 2:  # tokens of sequences have frequencies, which are learned first, and for long
        probabilities = values.softmax(1)
        from_labels = probabilities.scatter_add(1, residuals.argmin(1, keepdim=True), -torch.ones_like(values))
        norms, expected = torch.linalg.vector_norm(residuals, dim=1), torch.linalg.vector_norm(from_labels, dim=1)
        is_of_logits = is_of_logits & _is_one_number(torch.where(expected > 1e-3, norms / expected, 0.0), most)
        is_class = is_of_logits | (is_of_logarithms & _is_one_number(norms, most))
        residuals = torch.where(is_class, from_labels * (norms > 0)[:, None], residuals)
        values, is_exact = torch.where(is_class, probabilities, values), is_exact | is_class
    values, residuals = values - values.mean(0), residuals - residuals.mean(0)
    sums = values.square().sum(), (values * residuals).sum(), residuals.square().sum(), squares * ~is_exact
    counts = values.new_full((), values.numel()), values.new_full((), len(outputs))
    return {name: number.float().reshape(1) for name, number in zip(FIT, (*sums, *counts), strict=True)}


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
