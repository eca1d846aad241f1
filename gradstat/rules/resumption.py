"""The rule about a run that goes on from a checkpoint: what does not come back as it was."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from gradstat.recording.findings import Finding, Severity
from gradstat.rules.base import Rule, carried, same_for
from gradstat.rules.contents import WEIGHT, Contents
from gradstat.rules.rows import Bools, Floats, Window

# Backends and devices round partial sums in float32: by 1e-7 of the sum of magnitudes at most.
_ROUNDING = 1e-6
# A tensor is another one, not itself a step before or after, if its norm or its extremes differ by such a part, or its
# sum by so many norms. In small nets trained at high rates one step changes these by up to 0.001, 0.002 and 0.08.
_FAR = np.array([0.05, 0.3, 0.1])
# If this part of the elements is the same, the others are neither averages nor those of another step.
_SOME = 0.1
# Weights that all differ may be averages or those of another step. After 200 steps the loss of an average with a decay
# of 0.999 is up to 0.87 of the way back, and that of a new initialisation at 0.95 or more.
_BACK = 0.9
_RECENT = 20  # losses
_LISTED = 20  # names of tensors in the evidence

_OF_PART = (
    "a part of the checkpoint that was not restored: strict=False, renamed keys, or a layer that was tied or rebuilt",
)
_OF_ALL = ("weights that were not restored: model.load_state_dict() was not called, or got another checkpoint",)
_OF_STATES = (
    "an optimizer state that was not restored from the same checkpoint as the weights",
    "an optimizer whose parameters are in another order than when it was saved",
)
_NOT_LOADED = ("optimizer.load_state_dict() was not called, or a new optimizer was made after it",)


class NotRestored(Rule):
    """Weights or optimizer states that differ from those at the time when the monitor's state was saved.

    Norms, sums and extremes are compared in the first step after `gradstat.Monitor.load_state_dict`, before the
    optimizer steps. It is an error if most weights differ. Only tensors that were and are trained, on the same rank
    and with the same size, are compared: not those that were added, removed, frozen or sharded, and no buffers, which
    a forward pass changes. Missing states are reported if the optimizer is of the same class and there are as many
    ranks.

    Weights that all differ may be averages (EMA, SWA), or the state was saved at another moment. They are reported if
    they are far from the saved ones, the optimizer has all its states or none, and the loss is back near its first
    value, or some weights are constant that were not, as biases and gains of a new model, which no average makes.
    """

    name = "not-restored"
    causes = _OF_PART
    advice = (
        "print what model.load_state_dict() returns: the missing and unexpected keys",
        "load model, optimizer and monitor from one checkpoint, saved at the same step",
        "if the change is intended: monitor.load_state_dict(state, expect_restored=False)",
    )
    explains = ("loss-spike", "exploding-gradient", "parameter-jump", "optimizer-memory")

    _first, _losses = carried(math.nan), carried(list[float]())  # the first finite loss, and the last ones

    def review(self, window: Window) -> Iterable[Finding]:
        steps, losses, noted = window.losses.steps, window.losses.values, 0
        for seen in window.observed("restored"):
            at = bisect.bisect_left(steps, seen.step)
            self._note(losses[noted:at])
            noted = at
            before, now = seen.value
            if before.rank == now.rank and (before.ranks == now.ranks or now.rank == 0):  # others may have other shards
                loss = losses[at] if seen.step in steps[at : at + 1] else math.nan
                yield from self._compare(seen.step, before, now, loss)
        self._note(losses[noted:])

    def _note(self, losses: Sequence[float]) -> None:
        if math.isnan(self._first) and losses:
            self._first = losses[0]
        self._losses = [*self._losses, *losses][-_RECENT:]

    def _compare(self, step: int, before: Contents, now: Contents, loss: float) -> Iterator[Finding]:
        weights, states = _Pairs(before, now, are_weights=True), _Pairs(before, now, are_weights=False)
        lacking = _lacking(before, now)
        is_most = weights.share(weights.are_far) > 0.5
        if weights.same >= _SOME and not states.same < 0.5:
            is_told = bool(weights.are_far.any())
        else:  # nearly all weights differ; neither averages nor those of another step may be told
            is_of_this_step = states.same > 0.5 or not states.keys
            is_told = is_most and is_of_this_step and (weights.are_new or self._is_back(loss))
        if is_told:
            causes, severity = (_OF_ALL + _OF_PART if is_most else _OF_PART), "error" if is_most else self.severity
            yield self._of(weights, step, causes, severity)
        if states.are_far.any() and (states.same >= _SOME or weights.same > 0.5):
            yield self._of(states, step, _OF_STATES, self.severity)
        if lacking:
            kind, names = lacking[0][0], list(dict.fromkeys(name for _, name in lacking))
            more = f" and of {len(names) - 1} more" * (len(names) > 1)
            text = f"the optimizer has no {kind} of {names[0]}{more}, though it had when the monitor's state was saved"
            yield self.found(step, names[0], text, kind, None, _NOT_LOADED, parameters=names[:_LISTED])

    def _is_back(self, loss: float) -> bool:
        """Whether the ``loss`` has come back to about its first value."""
        recent = max(self._losses, default=math.inf)
        return loss - recent > _BACK * (self._first - recent) > 0

    def _of(self, pairs: _Pairs, step: int, causes: tuple[str, ...], severity: Severity) -> Finding:
        """A finding about the first tensor of ``pairs`` that is far from what it was."""
        i, others = int(pairs.are_far.argmax()), [pairs.keys[j][1] for j in np.flatnonzero(pairs.differ).tolist()]
        (kind, name), what = pairs.keys[i], "a norm of {3:.4g}, a sum of {4:.4g} and elements from {5:.4g} to {6:.4g}"
        text = f"{name if kind == WEIGHT else f'{kind} of {name}'} differs from its value when the monitor's state was "
        text += f"saved: it had {what.format(*pairs.before[i])}, and has {what.format(*pairs.now[i])}"
        text += same_for(len(others))
        return self.found(step, name, text, kind, severity, causes, parameters=others[:_LISTED], count=len(others))


def _lacking(before: Contents, now: Contents) -> list[tuple[str, str]]:
    """Kind and parameter of the states that an optimizer of the same class, on as many ranks, has not any more."""
    held = now.places()
    if before.optimizer != now.optimizer or before.ranks != now.ranks:
        return []
    return [
        (kind, now.names[held[WEIGHT, name]])
        for kind, name in before.places()
        if (kind, name) not in held and (WEIGHT, name) in held
    ]


class _Pairs:
    """Tensors of the same kind, name and size in two contents: the weights, or the states of one class of optimizer.

    Attributes:
        keys: Kind and name of each.
        before, now: Their rows.
        differ, are_far: Which are not the same, and which are far from what they were.
        are_new: Whether some have one value in all elements, and had several.
        same: The share of elements in tensors that are the same; NaN if there are no tensors.
    """

    def __init__(self, before: Contents, now: Contents, are_weights: bool) -> None:
        old, new = before.places(), now.places() if are_weights or before.optimizer == now.optimizer else {}
        pairs = [(old[key], new[key]) for key in old if key in new and (key[0] == WEIGHT) == are_weights]
        pairs = [(i, j) for i, j in pairs if before.rows[i, 0] == now.rows[j, 0]]
        self.keys = [(now.kinds[j], now.names[j]) for _, j in pairs]
        self.before, self.now = before.rows[[i for i, _ in pairs]], now.rows[[j for _, j in pairs]]
        distances = _distances(self.before, self.now)
        self.differ: Bools = np.asarray((distances > 0).any(1))
        self.are_far: Bools = np.asarray((distances >= _FAR).any(1))
        (*_, low, high), (*_, low_now, high_now) = self.before.T, self.now.T
        self.are_new = bool(((low < high) & (low_now == high_now)).any())
        self.same = self.share(~self.differ)

    def share(self, chosen: Bools) -> float:
        """The share of elements in the ``chosen`` tensors; NaN if there are no tensors."""
        sizes = self.before[:, 0]
        return float(sizes[chosen].sum() / sizes.sum()) if len(sizes) else math.nan


def _distances(before: Floats, now: Floats) -> Floats:
    """``[n, 3]``: how far norms, sums and extremes are apart, as in `_FAR`; 0 for a tensor that is the same.

    A tensor in another dtype is the same if rounding its elements explains the difference.
    """
    with np.errstate(all="ignore"):  # a state may hold anything
        (_, eps, tiny, *old), (numel, new_eps, new_tiny, *new) = before.T, now.T
        is_cast = (eps != new_eps) | (tiny != new_tiny)
        relative = np.where(is_cast, np.maximum(eps, new_eps), _ROUNDING)
        absolute = np.where(is_cast, np.maximum(tiny, new_tiny), 0.0)  # of an element
        norm, norms = np.maximum(old[0], new[0]), np.hypot(old[0], new[0])
        largest = np.max(np.abs([*old[2:], *new[2:]]), axis=0)
        gap, gap_of_sum, gap_low, gap_high = np.abs(np.subtract(new, old))
        gaps = np.stack([gap, gap_of_sum, np.maximum(gap_low, gap_high)], 1)
        of_norm = relative * norm + absolute * np.sqrt(numel)
        allowed = np.stack([of_norm, of_norm * np.sqrt(numel), relative * largest + absolute], 1)
        distances = np.nan_to_num(gaps / np.stack([norm, norms, largest], 1))
        return np.where((gaps > allowed).any(1, keepdims=True), distances, 0.0)
