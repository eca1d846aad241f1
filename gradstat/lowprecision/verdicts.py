"""From what formats do to operands to the noise of products: which layers to keep in bfloat16, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradstat._core.text import columns, count_of, lines_of, listed, printable

Means: TypeAlias = Mapping[Any, npt.NDArray[np.float64]]
"""Of a layer. Those of an operand and a direction, 0 for blocks along the rows of its matrix and 1 across them, are
``[formats, 3]``: the shares of nonzero elements that are flushed and saturated, and the square of the relative error.
"""
Row: TypeAlias = dict[str, Any]
"""One mapping of `LowPrecision.table`."""

# The operands of each product, and the direction of their blocks.
_PRODUCTS = {
    "output": (("input", 0), ("weight", 0)),
    "input gradient": (("output gradient", 0), ("weight", 1)),
    "weight gradient": (("output gradient", 1), ("input", 1)),
}
# A gradient whose norm is below sqrt(3) times the noise trains badly, by theory and experiment (arXiv 2505.19115), and
# the operands of the weight gradient are what makes MXFP4 diverge (2605.09825). Other products have the same limit.
LIMIT = 1 / math.sqrt(3)
# Of normally distributed elements NVFP4 and MXFP4 flush 7 to 10 %.
_MOST_FLUSHED = 0.5
# A layer that costs more than all others, and four times an equal part, is kept if its output's noise is above that of
# formats of eight bits.
_LARGEST_SHARE, _EQUAL_PARTS, _LEAST_NOISE = 0.5, 4, 0.1
_SHOWN, _NAMED = 24, 8


def table_of(formats: Sequence[str], layers: Mapping[str, Means]) -> list[Row]:
    """The rows of `LowPrecision.table`, those of layers to keep first, then by what the noise costs.

    **The noise of a product.** Let the errors of the elements of its operands be independent, of mean zero, and their
    squares in the proportions a and b to the squares of the elements. Then (a + b) times the sum of the squares of all
    terms that the product adds up is what to expect of the square of its noise. Of the weight gradient, the sum over
    tokens t of the outer products of x[t] and g[t], these terms' squares are the sum over t of |x[t]|^2 |g[t]|^2: that
    and the norm of the weight gradient are measured. The noise of the others is given as sqrt(a + b) of their norms.

    **What noise costs.** Noise e[t] in a layer's output raises the loss, to second order and with the empirical Fisher
    matrix for the second derivatives, by the sum over t of (g[t] e[t])^2, up to a factor that all layers share. If the
    elements of e[t] are independent, that is (a + b) times the sum over t of |x[t]|^2 |g[t]|^2, times the mean square
    of the weight's elements.
    """
    found = list[tuple[tuple[int, float], list[Row]]]()
    by_format = [_rows_of(layers, number) for number in range(len(formats))]
    for layer in by_format[0]:
        rows, badness = list[Row](), (0, 0.0)
        for format, every in zip(formats, by_format, strict=True):
            severity, why = _judged(every[layer], len(every))
            badness = max(badness, (severity, every[layer][0]["share"]))
            verdict = {"keep": severity > 0, "why": why}
            rows += [{"layer": layer, "format": format, **row, **verdict} for row in every[layer]]
        found.append((badness, rows))
    found.sort(key=lambda one: one[0], reverse=True)
    return [row for _, rows in found for row in rows]


def _rows_of(layers: Mapping[str, Means], number: int) -> dict[str, list[Row]]:
    """What the ``number``-th format does to each operand of the products of each layer with finite operands."""
    every = dict[str, list[Row]]()
    costs = dict[str, float]()
    for layer, means in layers.items():
        rows = list[Row]()
        for product, places in _PRODUCTS.items():
            operands = {place[0]: means[place][number] for place in places if place in means}
            if len(operands) == 2 and not any(np.isnan(values).any() for values in operands.values()):
                gain = float(means.get("gain", 1.0)) if product == "weight gradient" else 1.0
                noise = math.sqrt(gain * sum(error for *_, error in operands.values()))
                for name, (flushed, saturated, error) in operands.items():
                    numbers = {"flushed": float(flushed), "saturated": float(saturated), "noise": noise}
                    sqnr = -10 * math.log10(error) if error else math.inf
                    rows.append({"product": product, "operand": name, "sqnr": sqnr, **numbers})
        if rows and rows[0]["product"] == "output":
            every[layer] = rows
            costs[layer] = rows[0]["noise"] ** 2 * float(means.get("sensitivity", 0.0))
    whole = sum(costs.values()) or 1.0
    return {layer: [{**row, "share": costs[layer] / whole} for row in rows] for layer, rows in every.items()}


def _judged(rows: Sequence[Row], layers: int) -> tuple[int, str]:
    """How bad a format is for one of so many layers, and the rule by which it is to be kept; 0 if by none."""
    noisy, flushed = (max(rows, key=lambda row: row[key]) for key in ("noise", "flushed"))
    if noisy["noise"] > LIMIT:
        source = "arXiv 2505.19115" + ", 2605.09825" * (noisy["product"] == "weight gradient")
        return 2, f"the {noisy['product']}'s noise exceeds its norm over the root of 3 ({source})"
    if flushed["flushed"] > _MOST_FLUSHED:
        return 2, f"{flushed['flushed']:.0%} of the {flushed['operand']} become zero (for the {flushed['product']})"
    if rows[0]["share"] > max(_LARGEST_SHARE, _EQUAL_PARTS / layers) and rows[0]["noise"] > _LEAST_NOISE:
        return 1, "by estimate the output's noise costs more loss than that of all other layers (empirical Fisher)"
    return 0, ""


def summary_of(formats: Sequence[str], table: Sequence[Row]) -> list[str]:
    """A line for each format: how many layers may take it, and which to keep."""
    layers = len({row["layer"] for row in table})
    lines = []
    for format in formats:
        kept = list(dict.fromkeys(row["layer"] for row in table if row["format"] == format and row["keep"]))
        line = f"{format}: suits {layers - len(kept)} of {count_of(layers, 'layer')}"
        lines.append(line + (f"; keep {listed(kept, _NAMED)}" if kept else ""))
    return lines


def text_of(formats: Sequence[str], table: Sequence[Row]) -> list[str]:
    """The lines of a printed study: summary, reasons, and a line for each layer and product."""
    reasons = dict.fromkeys(f"  {row['layer']}, {row['format']}: {row['why']}" for row in table if row["keep"])
    heads = [head for name in formats for head in (f"{name}: cost %", "noise", "SQNR dB", "flushed %", "saturated %")]
    lines = dict[tuple[str, str], list[Row]]()
    for row in table:
        lines.setdefault((row["layer"], row["product"]), []).append(row)
    cells = [["layer: product", *heads]]
    for (layer, product), rows in [*lines.items()][:_SHOWN]:
        cells.append([f"{layer}: {product}"])
        for first, second in zip(rows[::2], rows[1::2], strict=True):  # its two operands in each format
            pairs = [f"{first['sqnr']:.1f} / {second['sqnr']:.1f}"]
            pairs += [f"{100 * first[key]:.1f} / {100 * second[key]:.1f}" for key in ("flushed", "saturated")]
            cells[-1] += [f"{100 * first['share']:.1f}", f"{first['noise']:.2g}", *pairs]
    keep = ["keep in bfloat16:", *lines_of([*reasons], _SHOWN, str)] if reasons else []
    more = [f"and {len(lines) - _SHOWN:,} more lines, in table()"] if len(lines) > _SHOWN else []
    return list(map(printable, [*summary_of(formats, table), *keep, *columns(cells), *more]))
