"""The statistics of golden runs: averages over windows of steps, and prediction intervals for those of one more run.

From ``K`` golden runs each *cell*, one feature of one tensor in one window, has a mean and a variance of ``K - 1``
degrees of freedom: too few to judge by. So the cells of one kind and feature, a *group*, share what they know:

1. A variance is divided by what is usual for its window and the size of its tensor: the logarithm of the group's
   variances is regressed on both. Then it is averaged over neighbouring windows. If their correlations are ``r``, those
   of their sample variances are ``r²``, and the average of ``n`` has ``d = (K - 1) n / (1 + 2 sum (1 - lag/n) r²)``
   degrees of freedom.
2. Variances are moderated by empirical Bayes: ``s² = (d0 s0² + d v) / (d0 + d)``, where ``d0`` and ``s0`` follow from
   the mean and the spread of ``log v`` in the group (G. K. Smyth, "Linear models and empirical Bayes methods for
   assessing differential expression in microarray experiments", Stat. Appl. Genet. Mol. Biol. 3:3, 2004, section 6).
3. ``t = (x - mean) / (s sqrt(1 + 1/K))`` of one more run has Student's distribution with ``d0 + d`` degrees of freedom.
   No more than ``3 (K - 1)`` are assumed, since tensors of a run deviate together, and no more than 8, since tails of
   training are heavier than normal ones. The normal deviate ``z`` has the same tail as ``t`` (G. W. Hill, "Algorithm
   395: Student's t-distribution", CACM 13, 1970).
4. The run is unlike if ``|z|`` of any cell is above the limit of its group: the normal quantile at
   ``1 - rate / (2 G N)`` for ``G`` groups and ``N`` cells in this one. By Bonferroni's inequality the rate is that of
   the whole run, however its cells depend on each other.
5. In case that tails are heavier still, each golden run is left out in turn and judged by the others; if one of them
   would be unlike, all intervals are widened until it is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradstat.recording.kinds import SCALARS, kind_of
from gradstat.recording.recording import COLUMNS, Recording, Series, nonfinite_cells

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Key = tuple[str, str]
"""A kind, as in `Recording.tables`, or the name of a scalar; and a feature."""
Sizes = Mapping[str, Mapping[str, int]]
"""By kind and name, numbers of elements."""

RATE = 0.05
"""The share of healthy runs that may be called unlike."""
# Differences of a thousandth do not count, even where all golden runs are the same.
_FLOOR = 1e-3
# Below this share of the median norm of its kind, a tensor counts as zero.
_ZERO = 1e-8
_WINDOWS = 16
_USED = [COLUMNS.index(name) for name in ("l2_norm", "mean", "std", "min", "max")]
# How many windows on each side share their variance, and the most degrees of freedom, also for each of a run's own.
_NEAR = 2
_MOST_FREEDOM = 8.0
_MOST_PER_OWN = 3.0
_MANY = 1e8  # degrees of freedom of what is known
_WHOLE = ("norm", "peak", "mean")
# Kinds that are not compared: statements about labels and predictions instead of tensors, and inputs of the model,
# which differ between ranks.
_LEFT_OUT = frozenset({"constant", "input", "output"})
_SCALARS = ("loss", "lr")
_TINY = 1e-30
_ZERO_LOG = math.log(_TINY) + 1  # up to here a logarithm stands for zero
# A gradient below this share of the largest in its module is rounding noise.
_NOISE = 1e-5
_FINE = 16  # parts of an octave, and of a scale, that numbers in a file are rounded to


def window_starts(steps: int) -> npt.NDArray[np.int64]:
    """Where windows over ``steps`` steps begin, and the end of the last: of 1, 2, 4 ... steps, then of constant length.

    The constant length is a sixteenth of all steps, rounded to a power of two, at least 16. So windows are never many.
    """
    longest = max(16, 1 << math.ceil(math.log2(max(1, steps / _WINDOWS))))
    starts, size = [0], 1
    while starts[-1] + 2 * size < steps or len(starts) == 1 < steps:
        starts.append(starts[-1] + size)
        size = min(2 * size, longest)
    return np.array([*starts, steps], np.int64)


def features_of(kind: str) -> tuple[str, ...]:
    """What is compared of tensors of a kind."""
    if kind in _LEFT_OUT:
        return ()
    whole = kind_of(kind).name in ("batch", "activation", "gradient", "parameter", "update")
    return (*_WHOLE, *["zeros"] * (kind == "parameter")) if whole else ("norm",)


def covered_windows(steps: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> Bools:
    """``[windows]``: which windows have all of their steps."""
    covered: Bools = np.diff(np.searchsorted(steps, starts)) == np.diff(starts)
    return covered


def rates_of_groups(names: Iterable[str]) -> set[str]:
    """Those of scalars that are the learning rates of other groups than the first."""
    return {name for name in names if name.startswith("lr[")}


def averages(
    recording: Recording, starts: npt.NDArray[np.int64], sizes: Sizes, rates: Iterable[str] = ()
) -> dict[Key, Floats]:
    """The averages of a run over the windows that it covers as a whole, by kind and feature, ``[windows, n]``.

    The tensors are those of ``sizes``. A group's rate, one of ``rates`` or recorded, is the first group's in steps
    without it. NaN stands for a window without a measurement, and for a tensor that the run has
    not, or in another size. As a norm or a scalar, Infinity stands for measurements without any value, as of a gradient
    that is None, and minus Infinity for those of which more than half are NaN or infinite.
    """
    covered = covered_windows(recording.steps, starts)
    found: dict[Key, Floats] = {}
    scalars = dict(recording.scalars)
    for name in rates_of_groups({*scalars, *rates}) if "lr" in scalars else ():
        own = scalars.get(name, scalars["lr"])
        scalars[name] = np.where(np.isnan(own), scalars["lr"], own)
    for name in scalars:
        is_given = (base := name.partition("[")[0]) not in SCALARS
        if is_given or base in _SCALARS:
            column = np.array(scalars[name], np.float64)[:, None]
            column[np.isinf(column)] = math.inf
            at = np.searchsorted(recording.steps, starts)
            if name == "loss":  # which may be recorded as NaN because it is, or because there is none
                column[np.asarray(scalars.get("loss_nonfinite", 0)) > 0] = math.inf
            if name == "loss" or is_given:  # which may be negative
                found[name, "value"] = _over_windows(column, at, covered, is_level=True)
            if not is_given:
                found[name, "log"] = _over_windows(np.log(np.maximum(column, _TINY)), at, covered, is_level=True)
    for kind in sizes:
        series = recording.tables.get(kind)
        if series is not None and series.names:
            at, place = np.searchsorted(series.steps, starts), _places(kind, series.sizes, sizes[kind])
            for feature, column in zip(features_of(kind), _features(kind, series), strict=False):
                means = _over_windows(column, at, covered, is_level=feature == "norm")
                found[kind, feature] = np.where(place < 0, np.nan, means[:, place])
    return found


def _places(kind: str, run: Mapping[str, int], golden: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Where the tensors of the golden runs are in a run, -1 for those that it has not; both are sizes by name."""
    is_any = kind_of(kind).sizes_vary  # the size of a gradient that is always None is 0
    place = {name: i for i, (name, size) in enumerate(run.items()) if is_any or size in (0, golden.get(name))}
    return np.array([place.get(name, -1) for name in golden], np.int64)


def noise_in(names: tuple[str, ...], norms: Floats) -> tuple[str, ...]:
    """Which gradients are rounding noise of other tensors of their module: below this share of the largest.

    The gradients of a bias before a batch norm, and of a key's bias, are 0 by construction. What is measured depends on
    the dtype, the device and the order of sums. ``norms`` are logarithms, ``[windows, n]``.
    """
    is_finite = np.isfinite(norms)
    count = is_finite.sum(0)
    level = np.where(count > 0, np.where(is_finite, norms, 0.0).sum(0) / np.maximum(count, 1), np.nan)
    _, module = np.unique([name.rpartition(".")[0] for name in names], return_inverse=True)
    largest = np.full(len(names), -np.inf)
    np.fmax.at(largest, module, level)
    return tuple(names[j] for j in np.flatnonzero(level - largest[module] < math.log(_NOISE)))


def exponential(number: float) -> float:
    """``exp(number)``, infinite where it overflows."""
    return math.exp(number) if number < 709 else math.inf


def as_printed(feature: str, average: float) -> float:
    """An average as it is printed: of logarithms the geometric mean, of peaks the peak over the root mean square."""
    if feature in ("norm", "log"):
        return 0.0 if average <= _ZERO_LOG else exponential(average)
    return 1 / max(-average, 1e-6) if feature == "peak" else average


def _features(kind: str, series: Series) -> Iterable[Floats]:
    """``[m, n]`` each, as of `features_of`.

    The logarithm of the norm, minus the root mean square over the peak, the mean over that, and the share of zeros.
    """
    # One copy, by column: a column of the rows is scattered in memory.
    l2_norm, mean, std, low, high = np.moveaxis(series.values[..., _USED], -1, 0).astype(np.float64, order="C")
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if kind_of(kind).sizes_vary:  # then the norm says how large the tensor is
            norm = rms = np.hypot(mean, std)
        else:
            norm, rms = l2_norm, l2_norm / np.sqrt(np.maximum(series.numel, 1))
        norm = np.nan_to_num(norm)
        is_zero = norm <= np.median(norm, 1, keepdims=True) * _ZERO
        # Masks, in buffers and batches, may be infinite in part.
        is_whole = kind_of(kind).names == "parameter" and kind != "buffer"
        is_lost = nonfinite_cells(series) & (is_whole | ~(norm > 0))
        norm = np.where(is_lost, np.inf, np.log(np.where(is_zero, _TINY, norm)))
        yield np.where(np.isnan(series.column("nan_count")), np.nan, norm)
        rms = np.where(is_lost | is_zero | (series.numel == 1), np.nan, rms)  # one element has a sign, but no shape
        yield -rms / np.maximum(-low, high)
        yield mean / rms
    # Trained weights are hardly ever exactly 0, but for a row that nothing trains. What begins at 0 may stay there in
    # part, as the bias of a dead unit.
    zeros = series.column("zero_fraction").astype(np.float64)
    yield np.where(zeros[:1] < 1, zeros, np.nan)


def _over_windows(column: Floats, at: npt.NDArray[np.int64], covered: Bools, is_level: bool) -> Floats:
    """Averages ``[windows, n]`` of the finite values from each of ``at`` to the next.

    If there is none, NaN; but for levels Infinity, and minus Infinity if more are infinite than finite.
    """
    means = np.full((len(covered), column.shape[1]), np.nan)
    for window in np.flatnonzero(covered & (np.diff(at) > 0)):
        part = column[at[window] : at[window + 1]]
        is_finite = np.isfinite(part)
        count = is_finite.sum(0)
        shares = np.where(is_finite, part, 0.0) / np.maximum(count, 1)  # whose sum does not overflow
        lost = np.isinf(part).sum(0)
        missing = np.where(lost > 0, -np.inf, np.inf) if is_level else np.nan
        means[window] = np.where((count > 0) & (count >= lost), shares.sum(0), missing)
    return means


class Interval(NamedTuple):
    """Where the cells of one kind and feature are in 19 of 20 runs: ``mean`` plus or minus ``half``, ``[windows, n]``.

    Both are NaN where some golden run has no value.
    """

    mean: Floats
    half: Floats


class _Fit(NamedTuple):
    """The prediction of the cells of one kind and feature."""

    mean: Floats  # [windows, n], of a new run
    scale: Floats  # its standard deviation
    freedom: float  # degrees of freedom
    limit: float  # of |z|


def intervals(values: Mapping[Key, Floats], sizes: Sizes) -> dict[Key, Interval]:
    """The prediction intervals from golden runs, whose averages are ``[runs, windows, n]``."""
    values = {key: np.where(np.isinf(value) | _rests(key, value), np.nan, value) for key, value in values.items()}
    # By how much intervals have to be wider so that each run would be like the others.
    wider = 1.0
    for i in range(max(map(len, values.values()), default=0)):
        for key, fit in _fits({key: np.delete(value, i, 0) for key, value in values.items()}, sizes).items():
            z = normal_deviate(np.abs(values[key][i] - fit.mean) / fit.scale, fit.freedom)
            wider = max(wider, float(np.fmax.reduce(z, axis=None, initial=0.0)) / fit.limit)
    return {key: _interval(fit, wider) for key, fit in _fits(values, sizes).items()}


def _rests(key: Key, value: Floats) -> Bools:
    """Where all golden runs have a zero that says nothing of other runs: in the backward pass, as of an idle expert."""
    is_zero: Bools = np.logical_and.reduce(value <= _ZERO_LOG, 0)
    is_judged = key[1] != "norm" or key[0] in ("batch", "buffer", "activation", "parameter")
    return np.zeros_like(is_zero) if is_judged else is_zero


def _interval(fit: _Fit, wider: float) -> Interval:
    """The interval with few digits, so that a file of it is small: its mean to a part of each tensor's least scale."""
    scale = np.exp2(np.round(_FINE * np.log2(wider * fit.scale)) / _FINE)
    unit = np.exp2(np.floor(np.log2(np.fmin.reduce(scale, 0)))) / _FINE
    grid = np.geomspace(0.1, 1e4, 2000)
    reach = np.interp(fit.limit, normal_deviate(grid, fit.freedom), grid)
    return Interval(np.round(fit.mean / unit) * unit, scale * reach)


def normal_deviate(t: Floats, freedom: float) -> Floats:
    """What exceeds ``t`` of Student's distribution as rarely, under the normal one; for values of at least 0."""
    a = freedom - 0.5
    b = 48 * a * a
    y = a * np.log1p(t * t / freedom)
    inner = (((-0.4 * y - 3.3) * y - 24) * y - 85.5) / (0.8 * y * y + 100 + b)
    result: Floats = ((inner + y + 3) / b + 1) * np.sqrt(y)
    return result


def _fits(values: Mapping[Key, Floats], sizes: Sizes) -> dict[Key, _Fit]:
    """The predictions of all cells for which each run has a value."""
    known = {key: value for key, value in values.items() if np.isfinite(value).all(0).any()}
    fits = {}
    for key, value in known.items():
        size = np.array(list(sizes[key[0]].values()), np.float64) if key[0] in sizes else np.full(1, np.inf)
        fits[key] = _fitted(value, size, RATE / len(known))
    return fits


def _fitted(values: Floats, size: Floats, rate: float) -> _Fit:
    """The prediction from ``values``, ``[runs, windows, n]``."""
    runs = len(values)
    mean = values.mean(0)  # NaN if one is
    rest = values - mean
    variance = (rest**2).sum(0) / (runs - 1)
    varies = variance > (_FLOOR / 100) ** 2
    widened = math.sqrt(1 + 1 / runs)
    freedom = _MANY
    scale = np.where(np.isnan(mean), np.nan, _FLOOR * widened)
    if varies.any():
        moderated, freedom = _moderated(rest, np.where(varies, variance, np.nan), size)
        scale = np.where(varies, np.sqrt(moderated + _FLOOR**2 + np.maximum(size, 1.0) ** -2) * widened, scale)
    limit = NormalDist().inv_cdf(1 - rate / (2 * int(np.isfinite(mean).sum())))
    return _Fit(mean, scale, freedom, limit)


def _moderated(rest: Floats, variance: Floats, size: Floats) -> tuple[Floats, float]:
    """Shrunken variances ``[windows, n]`` and their degrees of freedom; ``variance`` is NaN for what does not vary."""
    runs, windows, count = rest.shape
    usual = _usual(variance, size) if count > 2 else np.ones((windows, 1))
    near, used = _with_neighbours(variance / usual)
    unit = np.where(np.isnan(variance), 0.0, rest / np.sqrt((runs - 1) * np.fmax(variance, _TINY)))
    shared = sum(
        (1 - lag / used) * _squared_correlation((unit[:, lag:] * unit[:, :-lag]).sum(0), runs)
        for lag in range(1, min(math.ceil(used), windows))
    )
    d = (runs - 1) * used / (1 + 2 * shared)
    most = min(_MOST_FREEDOM, _MOST_PER_OWN * (runs - 1))
    if count <= 2:  # too few to share anything, and neighbours may vary less
        return np.fmax(near, variance) * usual, min(d, most)
    logs = np.log(near[np.isfinite(near)]) - polygamma(0, d / 2) + math.log(d / 2)
    spread = float(logs.var(ddof=1)) - polygamma(1, d / 2) if len(logs) > 1 else 0.0
    d0 = 2 * inverse_trigamma(spread) if spread > 1e-6 else _MANY
    prior = float(logs.mean()) + polygamma(0, d0 / 2) - math.log(d0 / 2)
    weight = d0 / (d0 + d)
    return usual * (weight * math.exp(prior) + (1 - weight) * near), max(1.0, min(d0 + d, most))


def _usual(variance: Floats, size: Floats) -> Floats:
    """``[windows, n]``: the variance to expect, by a regression of its logarithm on window and size of the tensor."""
    logs = np.ma.masked_invalid(np.log(variance))
    x = np.ma.array(np.broadcast_to(np.log(np.maximum(size, 1)), logs.shape), mask=logs.mask)
    y, mean = logs.mean(1, keepdims=True), x.mean(1, keepdims=True)
    dx = x - mean
    slope = float(np.clip((dx * (logs - y)).sum() / max((dx * dx).sum(), 1e-12), -1.0, 0.0))
    usual: Floats = np.exp((y + slope * (x.data - mean)).filled(0.0))
    return usual


def _with_neighbours(ratio: Floats) -> tuple[Floats, float]:
    """Means over five neighbouring windows, NaN where ``ratio`` is, and of how many values on average."""
    is_finite = np.isfinite(ratio)
    window = np.arange(len(ratio))
    near_by = (np.abs(window[:, None] - window) <= _NEAR).astype(np.float64)
    count = near_by @ is_finite
    near = near_by @ np.where(is_finite, ratio, 0.0) / np.maximum(count, 1)
    return np.where(is_finite, near, np.nan), float(count[is_finite].mean())


def _squared_correlation(products: Floats, runs: int) -> float:
    """The mean squared correlation of pairs, given sample correlations (0: unknown), which chance makes larger."""
    samples = products[products != 0]
    if not samples.size:
        return 0.0
    expected = 1 / (runs - 1)  # of independent samples
    return min(1.0, max(0.0, (float((samples**2).mean()) - expected) / (1 - expected))) if runs > 2 else 0.5


def polygamma(order: int, x: float) -> float:
    """Of the logarithm of the gamma function, the first derivative (order 0), the second (order 1), and so on."""
    return float(torch.special.polygamma(order, torch.tensor(x, dtype=torch.float64)))


def inverse_trigamma(value: float) -> float:
    """The ``x`` with ``polygamma(1, x) == value``."""
    low, high = 1e-8, 1e8
    for _ in range(60):  # more than a float64 has bits
        middle = math.sqrt(low * high)
        low, high = (middle, high) if polygamma(1, middle) > value else (low, middle)
    return low
