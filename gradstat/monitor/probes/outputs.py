"""What a monitor measures of a model's outputs: whether they are as the loss takes them, and follow the targets."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradstat._core.hooks import Hook, hook_forward
from gradstat._core.host_copy import HostCopy, peek_interpreter_stack
from gradstat._core.nested import tensors_in
from gradstat._core.parameters import NamedParameters
from gradstat.monitor.probes.base import HookedProbe, Pending, Run, is_plain
from gradstat.monitor.probes.graph import activation_behind, dropped_by, leaves_of
from gradstat.monitor.probes.passes import called
from gradstat.rules.output_facts import Activation, Fit, OutputFacts

# Activations that no values prove, since logits may have the same by chance.
_ACTIVATIONS = {"sigmoid": Activation.SIGMOID, "ReLU": Activation.RELU}
# Of larger outputs a sample is enough: so many rows, in all so many elements, and so many columns.
MOST_ROWS, MOST_ELEMENTS, MOST_COLUMNS = 2048, 2**23, 16
_FEW_PLACES, _FEW_OUTPUTS = 4, 8
_USUAL_DROPOUT = 0.5  # the share of elements that it sets to zero
_FEW_LABELS = 8  # so many gradients of other losses are not all as those of equal binary labels would be
_FEW_SAMPLES, _FEW_COLUMNS = 32, 64  # samples that are compared in pairs, and elements of each


class Outputs(HookedProbe):
    """Measures a model's predictions, and what the loss makes of them, in hooks while ``on``; keeps a few numbers.

    A prediction is certain if its largest logit exceeds the next by more than 10, so that a softmax gives every other
    class less than 5e-5. The size of logits alone means nothing, since a softmax ignores a common offset. If the loss
    takes their softmax, each row of the gradient that it sends back sums to 0, and the label is the smallest element.
    Of many rows only a sample is read, the same in both.
    """

    watch = "outputs"
    # So that mistakes with labels are known before much time is lost.
    early = frozenset([1, 2, 4, 8, 16, 32, *range(200, 256, 8)])

    def __init__(self, run: Run) -> None:
        hook = Hook(self.measure)
        super().__init__(run, {hook: hook_forward(called(run.model), hook)})
        self._seen: dict[str, Tensor] = {}  # by fields of `OutputFacts` and `Fit`, in tensors without dimensions

    def measure(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        # The pass of which there will be a gradient counts, and no transform's, whose tensors are not kept.
        if (self._seen and not torch.is_grad_enabled()) or peek_interpreter_stack() is not None:
            return
        computed = [tensor for _, tensor in tensors_in(output, "") if tensor.grad_fn is not None and tensor.dim()]
        logits = getattr(output, "logits", computed[0] if computed else output)
        if computed and "output 0" not in self.run.leaves:
            shares = [0.0]
            self.run.leaves["output 0"] = leaves_of(computed[0], lambda node: shares.append(dropped_by(node)))
            if max(shares) > _USUAL_DROPOUT:
                self.run.noted["dropped"] = max(shares)
            for at, one in enumerate(computed[1:_FEW_OUTPUTS], 1):
                self.run.leaves[f"output {at}"] = leaves_of(one)
        is_measured = is_plain(logits) and logits.is_floating_point() and logits.dim() > 0
        if is_measured:
            with torch.no_grad():
                every = logits.detach() if logits.dim() > 1 else logits.detach()[:, None]
                sample = sampled_rows(every)
                values = every[sample]
                if values.shape[-1] > 1:
                    largest = values.topk(2, -1).values
                    margin = largest[..., 0] - largest[..., 1]
                else:
                    margin = values.abs()
                self._seen = {"certain": (margin > 10).mean(dtype=torch.float32)}
                if logits.grad_fn is None:
                    return
                over = activation = torch.zeros((), device=values.device)
                if values.shape[-1] > 1:
                    over, named = _dim_over_samples(every), _ACTIVATIONS.get(activation_behind(logits.grad_fn))
                    activation = _are_probabilities(values) if named is None else activation + float(named)
                    self._seen["is_over_samples"] = over == 1
                seen = _Pass(self._seen, every, every._version, sample, over, activation)
            logits.register_hook(Hook(self.measure_gradient, seen))

    def measure_gradient(self, seen: _Pass, gradient: Tensor) -> None:
        # Of several forward passes before a backward pass the last counts, and none if the step was measured before.
        outputs, is_late = seen.outputs, not self.hooks[0].on or seen.facts is not self._seen
        if is_late or not is_plain(gradient) or outputs._version != seen.version:
            return
        with torch.no_grad():
            gradient = gradient.detach().view_as(outputs)
            is_of_logits = is_of_logarithms = gradient.new_zeros((), dtype=torch.bool)
            if outputs.shape[-1] > 1:
                is_of_logits, is_of_logarithms = _measure_classes(seen, gradient)
            if 2 * outputs[0].numel() <= MOST_ELEMENTS // 8:
                self._seen |= _fit_of(outputs, gradient, is_of_logits, is_of_logarithms)

    def take(self, step: Pending, named: NamedParameters) -> None:
        """Observes the facts of the last pass since the last call, if any."""
        seen, self._seen = self._seen, {}
        self.tell_unseen([""] if seen else [])
        if seen:
            zero = seen["certain"].new_zeros(())
            names = [*OutputFacts._fields[:-1], *(Fit._fields if "cross" in seen else ())]
            copy = HostCopy(torch.stack([seen.get(name, zero).float() for name in names]))
            step.late["outputs"] = lambda: OutputFacts.of(copy.wait().tolist())


class _Pass(NamedTuple):
    """What is kept of a forward pass until the gradient of its outputs comes."""

    facts: dict[str, Tensor]
    outputs: Tensor
    version: int  # of the outputs
    sample: Any  # as `sampled_rows`
    over: Tensor  # as `_dim_over_samples`
    activation: Tensor  # the `Activation` before the outputs, as a number


def _measure_classes(seen: _Pass, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Measures what a loss on classes makes of the sampled outputs; returns, as tensors, whether it is one.

    That is one of logits, whose softmax it takes, or one of logarithms of probabilities.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    classes, count = gradient.shape[-1], gradient.shape[:-1].numel()
    outputs, rows = seen.outputs[seen.sample].flatten(0, -2), gradient[seen.sample].flatten(0, -2)
    columns = rows
    norms, smallest = torch.linalg.vector_norm(rows, dim=-1, dtype=wide), rows.argmin(-1)
    if len(rows) < count:  # all rows of some columns: those of labels, since others may be zero
        some = norms.topk(min(MOST_COLUMNS, MOST_ELEMENTS // count, len(rows))).indices
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
    most, labelled = labels.amax(), (labels >= 0).sum()
    few = slice(max(1, MOST_ELEMENTS // 8 // classes))
    # A loss that takes logarithms of probabilities sends back one number for each sample: classes are last.
    are_logarithms = ((outputs[few].exp().sum(-1, dtype=wide) - 1).abs() < 0.01).all()
    is_last = is_one_label & (rows.amax() <= 0) & ((classes > 2) | are_logarithms)
    sums, largest = (torch.linalg.vector_norm(rows, order, -1, dtype=wide) for order in (1, math.inf))
    used = torch.linalg.vector_norm(rows, math.inf, 0, dtype=wide) > 0
    takes_classes, counted = cancels | is_last, labelled.clamp(min=1)
    middle = (labels * (labels >= 0)).sum(dtype=wide) / counted
    spread = ((labels - middle).square() * (labels >= 0)).sum(dtype=wide) / counted
    facts = {
        "is_over_samples": (seen.over == 1) | (is_last & (seen.over > 0)),
        "takes_over_samples": is_askew,
        "takes_one": (sums <= largest).all() & (used.sum() > 1) & ~are_logarithms,
        "activation": cancels * seen.activation,
        "classes": takes_classes * classes,
        "labels": takes_classes * labelled,
        "least": takes_classes * torch.where(labels >= 0, labels, most).amin(),
        "most": takes_classes * most,
        "middle": middle,
        "spread": spread,
        "right": takes_classes * (labels == outputs.argmax(-1)).sum() / counted,
    }
    seen.facts.update(facts)
    return cancels, is_last


def _are_probabilities(values: Tensor) -> Tensor:
    """`Activation.PROBABILITIES` if the values are that, as a number without dimensions, else 0."""
    low, high = torch.aminmax(values)
    is_one = ((values.sum(-1, dtype=torch.float32) - 1).abs() < 0.01).all()
    # Equal ones tell nothing, as those of a head that begins at zero.
    are_probabilities: Tensor = is_one & (low >= 0) & (high > low)
    return are_probabilities * float(Activation.PROBABILITIES)


def _fit_of(outputs: Tensor, gradient: Tensor, is_of_logits: Tensor, is_of_logarithms: Tensor) -> dict[str, Tensor]:
    """The sums of a `Fit` over a model's ``outputs``, by name.

    The gradient of a squared error is the residual times a number. That of a cross-entropy tells the labels, and it is
    one if the gradient is the same multiple, for each sample, of what the labels and outputs make it: so a policy's,
    which weighs actions by returns, is none. Of large outputs some samples are enough.
    """
    wide, every = torch.promote_types(outputs.dtype, torch.float32), 1 + outputs.numel() // (MOST_ELEMENTS // 8)
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
    of_few = _of_few(values, residuals)
    values, residuals = values - values.mean(0), residuals - residuals.mean(0)
    sums = values.square().sum(), (values * residuals).sum(), residuals.square().sum(), squares * ~is_exact
    counts = values.new_full((), values.numel()), values.new_full((), len(outputs))
    return dict(zip(Fit._fields, (*sums, *counts, *of_few), strict=True))


def _of_few(values: Tensor, residuals: Tensor) -> tuple[Tensor, ...]:
    """The fields of a `Fit` from ``evenness`` on, of a few samples and elements of each."""
    columns = slice(None, None, 1 + values.shape[1] // _FEW_COLUMNS)
    values, residuals = values[:_FEW_SAMPLES, columns], residuals[:_FEW_SAMPLES, columns]
    squares = residuals.square()
    apart, asked = values[:, None] - values, residuals[:, None] - residuals
    # Rounding in 16 bits only adds pairs that cross, and so do rows of gradients without a sample.
    least = -1e-3 * apart.norm(dim=-1) * asked.norm(dim=-1)
    pairs = max(1, len(values) * (len(values) - 1))
    crossing = ((apart * asked).sum(-1) < least).sum() / pairs
    facing = (residuals @ residuals.T < 0).sum() / pairs
    evenness = squares.mean() / squares.amax().clamp(min=torch.finfo(squares.dtype).tiny)
    return evenness, crossing, facing, (values * residuals >= 0).all()


def _is_one_number(values: Tensor, most: float) -> Tensor:
    """Whether all ``values`` but zeros are one positive number, up to the factor ``most``."""
    least = torch.where(values == 0, torch.inf, values).amin()
    return (least > 0) & (values.amax() <= most * least)


def _dim_over_samples(outputs: Tensor) -> Tensor:
    """1 if ``outputs`` are probabilities, or their logarithms, that sum to 1 over dim 0 and not over the last.

    2 if they do over dim 1 of three, which may be that of classes; 3 if over both; 0 if over neither. The first few
    places of other dims are enough.
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
    over: Tensor = ~is_one(-1) * sum(sums, outputs.new_zeros(()))
    return over


def sampled_rows(tensor: Tensor) -> tuple[Any, ...]:
    """An index of the leading dimensions of a tensor, which takes all its rows if these are few, else some.

    Those are equally far apart. So are their places in each dimension, such as that of time, because their number has
    no divisor in common with the sizes.
    """
    *sizes, classes = tensor.shape
    count, taken = math.prod(sizes), max(1, min(MOST_ROWS, MOST_ELEMENTS // classes))
    if taken >= count or not is_plain(tensor):
        return (...,)
    while math.gcd(taken, count) > 1:
        taken -= 1
    places, index = torch.arange(0, taken * count, count, device=tensor.device) // taken, list[Tensor]()
    for size in reversed(sizes):
        index.insert(0, places % size)
        places = places // size
    return tuple(index)
