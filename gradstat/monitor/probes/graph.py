"""What the autograd graph of a loss says exactly: of which parameters it is, and what it takes of these and of outputs.

After the backward pass the tensors that a graph has saved are gone. Its functions, their sizes and indices remain.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradstat.rules.output_facts import ActivatedLogits

Leaves: TypeAlias = list[tuple[weakref.ref[Tensor], int, torch.dtype | None]]
"""Parameters, each with its version and the dtype in which its gradient is computed, None if not known."""

Positive: TypeAlias = list[tuple[weakref.ref[Tensor], str]]
"""Parameters of which only positive values make sense, each with what is computed of it, in words."""

_Edge: TypeAlias = tuple[Any, int]  # a function, and which of its outputs
_Part: TypeAlias = tuple[int, int, int]  # of a tensor: a dimension, an index and the size
_WHOLE: _Part = (0, 0, 1)

# Functions in a graph that are looked at; so many take a fifth of a second.
_MOST_NODES = 100_000

_ENOUGH = 64  # elements that tell a dropout

# Functions that move elements or cast them, and those that take some of them.
_MOVES = {
    "Alias", "Cat", "Clone", "Expand", "Permute", "Repeat", "ReshapeAlias", "Squeeze", "Stack", "T", "ToCopy",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
_TAKES_SOME = {
    "Diagonal", "Gather", "Index", "IndexSelect", "MaskedFill", "MaskedSelect", "Select", "Slice", "Split",
    "SplitWithSizes", "Unbind",
}  # fmt: skip
# Functions that take logits, and activations after which nothing is one.
_OF_LOGITS = {
    "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits",
    "LogSigmoid": "logsigmoid",
    "LogSoftmax": "log_softmax",
    "SoftMarginLoss": "soft_margin_loss",
}
_ACTIVATIONS = {"Relu": "ReLU", "Sigmoid": "sigmoid", "Softmax": "softmax"}

# Functions of one argument between a term of a loss and what the model computes. Terms that these make of the same
# outputs, as those of smoothed labels are, count as one.
_OF_A_TERM = {
    *_MOVES, *_TAKES_SOME, "Div", "LogSoftmax", "Logsumexp", "Mean", "Mul", "Neg", "NllLoss", "NllLoss2D", "Sum",
}  # fmt: skip

# Functions that are sums of two terms, of which not both can be 0 if a target is between 0 and 1.
_OF_TWO_TERMS = {"BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}

# Functions that are defined for positive numbers only: which argument, and in words. A quotient has any sign.
_OF_POSITIVE = {
    "Digamma": (0, "its digamma function"),
    "Lgamma": (0, "its log-gamma function"),
    "Log": (0, "its logarithm"),
    "Log10": (0, "its logarithm"),
    "Log2": (0, "its logarithm"),
    "Pow": (0, "a power of it"),
    "Rsqrt": (0, "its square root"),
    "Sqrt": (0, "its square root"),
    "StandardGamma": (0, "gamma variates of it"),
    "Xlogy": (1, "its logarithm"),
}


# Functions whose values are never negative.
_NOT_NEGATIVE = {"Abs", "CtcLoss", "HuberLoss", "MseLoss", "SmoothL1Loss"}


class LossGraph(NamedTuple):
    """What the graph of a loss says."""

    leaves: Leaves
    positive: Positive
    activated: ActivatedLogits | None  # if the loss takes logits, and gets what an activation has made of them
    is_sum: bool  # whether a loss has several terms, of which some may be detached
    has_no_sign: bool  # whether all losses are, up to a factor, of numbers that are never negative

    @classmethod
    def of(cls, losses: list[Tensor]) -> LossGraph:
        leaves: Leaves = []
        found = _PositiveLeaves()
        for loss in losses:
            leaves += leaves_of(loss, found.look_at)
        activated = (activated_logits(loss) for loss in losses)
        has_no_sign = all(map(is_never_negative, losses))
        first = next(filter(None, activated), None)
        return cls(leaves, found.whole(), first, any(map(is_sum, losses)), has_no_sign)


def leaves_of(computed: Tensor, visit: Callable[[Any], object] = id) -> Leaves:
    """The parameters that ``computed`` depends on; walks the graph and calls ``visit``. Not FSDP's own kinds."""
    waiting, seen = [computed.grad_fn], {computed.grad_fn}
    found: Leaves = []
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        assert node is not None
        visit(node)
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                leaf = getattr(behind, "variable", None)
                if type(leaf) is nn.Parameter and not leaf.is_inference():
                    # The backward function before the leaf gets gradients of the dtype in which it was computed.
                    metadata = node._input_metadata
                    found.append((weakref.ref(leaf), leaf._version, metadata[0].dtype if metadata else None))
                waiting.append(behind)
    return found


def dropped_by(node: Any) -> float:
    """The share of its input that a dropout sets to zero; 0 for another function, or if it is not known.

    It is known before the backward pass. On the CPU a dropout is a product with a tensor of two values.
    """
    name = _name(node)
    if name == "NativeDropout":
        return float(node._saved_p)
    if name != "Mul":
        return float(getattr(node, "_saved_dropout_p", 0.0))
    saved = node._raw_saved_other if node.next_functions[1:] and node.next_functions[1][0] is None else None
    # What a hook has packed, as of checkpointing, is not asked for: that may run the forward pass again.
    factor = saved.data if saved is not None and getattr(saved, "unpack_hook", saved) is None else None
    if type(factor) is not Tensor or not factor.is_cpu or factor.numel() < _ENOUGH:
        return 0.0
    times, count = factor.detach().max(), factor.count_nonzero()
    is_mask = times > 1 and ((factor == 0) | (factor == times)).all() and count * times < 2 * factor.numel()
    return 1 - 1 / float(times) if is_mask else 0.0


def _name(node: Any) -> str:
    """A function's name without torch's ending; empty for a leaf, and for a function that torch does not define."""
    name = type(node).__name__
    return name[:-9] if name[-9:-1] == "Backward" else ""


def _edges(node: Any, output: int = 0) -> list[_Edge]:
    """What ``node`` got, as far as it has a function. DDP passes each output on by itself."""
    if type(node).__name__ == "_DDPSinkBackward":
        return [node.next_functions[output]]
    return [edge for edge in node.next_functions if edge[0] is not None]


def activation_behind(node: Any) -> str:
    """The activation that made all of the output of ``node``, before elements were moved; empty if there is none."""
    waiting: list[_Edge] = [(node, 0)]
    names = set[str]()
    while waiting and names <= _ACTIVATIONS.keys():
        node, output = waiting.pop()
        name = _name(node)
        if name in _MOVES or name in _TAKES_SOME or type(node).__name__ == "_DDPSinkBackward":
            waiting += _edges(node, output)
        else:
            names.add(_written_by_hand(node) or name)
    return _ACTIVATIONS.get(names.pop(), "") if len(names) == 1 else ""


def activated_logits(loss: Tensor) -> ActivatedLogits | None:
    """What takes logits in the loss, behind which nothing belongs to it, and gets what an activation has made of them.

    A model may take such functions itself, for attention. So the search ends where a weight was used.
    """
    waiting: list[Any] = [loss.grad_fn]
    seen = {*waiting}
    labelled = set[Any]()  # logarithms of probabilities of which a loss takes that of one label for each sample
    found: list[Any] = []
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        name, behind = _name(node), [edge[0] for edge in _edges(node)]
        if name.startswith("NllLoss") and behind:
            while _name(behind[0]) in _MOVES:
                behind = [behind[0].next_functions[0][0]]
            labelled.add(behind[0])
        if (_written_by_hand(node) or name) in _OF_LOGITS:  # as in Categorical(logits=...)
            logits = node.next_functions[0]
            if logits[0] is not None and activation_behind(logits[0]):
                found.append(node)
        elif not any(map(_is_weight, behind)):
            waiting += (other for other in behind if other not in seen)
            seen.update(behind)
    if not found:
        return None
    first = found[0]
    name, activation, classes = _name(first), activation_behind(first.next_functions[0][0]), 0
    if labelled.intersection(found) == {*found} and activation != "ReLU":
        shape = first._input_metadata[0].shape
        classes = int(shape[_signed(first._saved_dim) % len(shape)])
    return ActivatedLogits(_OF_LOGITS.get(name, "x - logsumexp(x)"), activation, classes)


def is_sum(loss: Tensor) -> bool:
    """Whether ``loss`` is a sum of terms of different outputs, or of one and a number or a detached tensor.

    A binary cross-entropy is one of two terms, too.
    """
    waiting, ends = [loss.grad_fn], set[Any]()
    seen: set[Any] = {*waiting}
    while waiting and len(ends) < 2 and len(seen) < _MOST_NODES:
        node = waiting.pop()
        edges, is_added = _edges(node), _name(node) in ("Add", "Sub")
        if (is_added and len(edges) < 2) or _name(node) in _OF_TWO_TERMS:
            return True
        if is_added or (_name(node) in _OF_A_TERM and len(edges) == 1):
            behind = [edge[0] for edge in edges if edge[0] not in seen]
            seen.update(behind)
            waiting += behind
        else:
            ends.add(node)
    return len(ends) > 1


def is_never_negative(loss: Tensor) -> bool:
    """Whether ``loss`` is, up to a factor, a mean or a sum of numbers that are never negative: squares, for example."""
    node: Any = loss.grad_fn
    while node is not None:
        name, edges = _name(node), _edges(node)
        is_square = (name == "Pow" and len(edges) == 1 and node._saved_exponent % 2 == 0) or (
            name == "Mul" and len(edges) == 2 and edges[0] == edges[1]
        )
        is_entropy = name.startswith("NllLoss") and _name(edges[0][0]) == "LogSoftmax"
        if name in _NOT_NEGATIVE or is_square or is_entropy:
            return True
        is_factor = name in ("Div", "Mul") and math.prod(node._input_metadata[0].shape) == 1
        if len(edges) != 1 or not (is_factor or name in ("Mean", "Neg", "Sum", *_MOVES)):
            return False
        node = edges[0][0]
    return False


def _written_by_hand(node: Any) -> str:
    """The function of one tensor that is written as one of two: x - logsumexp(x), or exp(x) / sum(exp(x))."""
    name = _name(node)
    if name not in ("Div", "Sub") or len(node.next_functions) < 2:
        return ""
    (one, _), (other, _) = node.next_functions
    if name == "Sub" and _name(other) == "Logsumexp":
        return "LogSoftmax" if other.next_functions[0] == node.next_functions[0] else ""
    if name == "Div" and _name(one) == "Exp" and _name(other) == "Sum":
        summed = other.next_functions[0][0]
        is_of_same = _name(summed) == "Exp" and summed.next_functions[0] == one.next_functions[0]
        return "Softmax" if is_of_same else ""
    return ""


def _is_weight(node: Any) -> bool:
    while _name(node) in _MOVES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    leaf = getattr(node, "variable", None)
    return leaf is not None and leaf.numel() > 1


def _signed(number: int) -> int:
    """A dimension or index as autograd keeps it, without a sign."""
    return number - 2**64 if number >= 2**63 else number


class _PositiveLeaves:
    """Collects parameters whose logarithm is taken, for example, while a graph is walked."""

    def __init__(self) -> None:
        # By id: what is computed of the parameter, and of which parts of it.
        self._found: dict[int, tuple[nn.Parameter, str, set[_Part]]] = {}

    def look_at(self, node: Any) -> None:
        name = _name(node)
        at, words = _OF_POSITIVE.get(name, (-1, ""))
        if at < 0 or len(node.next_functions) <= at:
            return
        if name == "Pow":
            exponent = node._saved_exponent if len(node.next_functions) == 1 else 1
            # Whole powers of any number exist, and those with an even exponent have no sign.
            if exponent % 2 == 0 or (exponent > 0 and exponent % 1 == 0):
                return
        for leaf, part in _leaves_behind(node.next_functions[at]):
            self._found.setdefault(id(leaf), (leaf, words, set()))[2].add(part)

    def whole(self) -> Positive:
        """The parameters of which that is computed of all elements."""
        return [
            (weakref.ref(leaf), words)
            for leaf, words, parts in self._found.values()
            if any(sum(part[::2] == (dim, size) for part in parts) == size for dim, _, size in parts)
        ]


def _leaves_behind(edge: _Edge) -> Iterator[tuple[nn.Parameter, _Part]]:
    """The parameters whose elements ``edge`` brings, moved or times numbers, or parts of parameters."""
    waiting: list[tuple[Any, int, _Part]] = [(*edge, _WHOLE)]
    while waiting:
        node, output, part = waiting.pop()
        name, leaf = _name(node), getattr(node, "variable", None)
        if type(leaf) is nn.Parameter:
            yield leaf, part
            continue
        edges = [] if node is None else _edges(node)
        if name in ("Select", "Unbind") and part == _WHOLE:
            sizes = node._saved_self_sym_sizes if name == "Select" else ()
            index = _signed(node._saved_index) if name == "Select" else output
            dim = _signed(node._saved_dim)
            size = int(sizes[dim]) if name == "Select" else len(node._input_metadata)
            part = dim % len(sizes) if sizes else dim, index % size, size
        elif name not in _MOVES:
            # Times a number, or a tensor that nobody trains, but not its reciprocal.
            is_scaled = name == "Mul" or (name == "Div" and node.next_functions[0] in edges)
            edges = edges if is_scaled and len(edges) == 1 else []
        waiting += ((*behind, part) for behind in edges)
