"""Draws the README's picture of the demo: loss and total norm over the steps, below them each layer's gradient norm.

python -m gradstat demo && python tools/demo_picture.py demo-output/run.gradstat [--output docs/demo.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from gradstat.recording import Recording, load

ROOT = Path(__file__).resolve().parent.parent

_NONFINITE, _LOSS, _NORM = "#ff2d55", "#1f6feb", "#8a8a8a"


def layers_of(names: tuple[str, ...]) -> dict[str, list[int]]:
    """Indices of the parameters of each module, modules in order."""
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        layers.setdefault(name.rpartition(".")[0], []).append(position)
    return layers


def draw(recording: Recording, path: Path) -> None:
    """Writes a PNG of a run, one of whose steps is not finite, to ``path``."""
    # Without pyplot no display is needed, and the caller's backend is not changed.
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    gradients, steps = recording.tables["gradient"], recording.steps
    layers = layers_of(gradients.names)
    squares = np.square(gradients.column("l2_norm"))  # of finite elements
    norms = np.array([np.sqrt(squares[:, at].sum(1)) for at in layers.values()])
    counts = gradients.column("nan_count") + gradients.column("inf_count")
    nonfinite = np.array([counts[:, at].any(1) for at in layers.values()])
    shown = np.ma.masked_array(np.log10(np.maximum(norms, 1e-12)), mask=nonfinite)
    low, high = np.percentile(shown.compressed(), [1, 99.5])

    figure = Figure(figsize=(14, 1.9 + 0.245 * len(layers)), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=[1, 0.135 * len(layers)], sharex=True)
    top.set_title("A small GPT learning Python, every gradient checked on every step", loc="left", fontsize=14)
    top.semilogy(steps, recording.scalars["norm"], color=_NORM, linewidth=1.1, label="gradient norm")
    top.semilogy(steps, recording.scalars["loss"], color=_LOSS, linewidth=1.8, label="loss")
    top.axvline(steps[nonfinite.any(0)][0], color=_NONFINITE, linewidth=1.2, linestyle="--", label="corrupted step")
    top.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    top.yaxis.set_major_formatter("{x:g}")
    top.yaxis.set_minor_formatter(NullFormatter())
    top.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    top.spines[["top", "right"]].set_visible(False)
    top.legend(loc="upper right", ncols=3, frameon=False, fontsize=10)

    colors = colormaps["viridis"].with_extremes(bad=_NONFINITE)
    image = bottom.imshow(shown, aspect="auto", cmap=colors, vmin=low, vmax=high, interpolation="nearest")
    bottom.set_yticks(range(len(layers)), list(layers), fontsize=9.5)
    bottom.tick_params(axis="y", length=0)
    bottom.set_xlabel("step")
    owners = [name.rpartition(".")[0].split(".")[:2] for name in layers]
    for row in range(1, len(owners)):
        if owners[row] != owners[row - 1]:  # a thin line between the blocks
            bottom.axhline(row - 0.5, color="white", linewidth=1.5)
    figure.colorbar(image, ax=bottom, label="log10 of the gradient norm", pad=0.01, fraction=0.03, extend="both")

    # A cell is only a few pixels wide, so a ring marks it.
    rows, columns = np.nonzero(nonfinite)
    ring = {"markersize": 13, "markerfacecolor": "none", "markeredgecolor": _NONFINITE, "markeredgewidth": 2}
    bottom.plot(columns, rows, linestyle="none", marker="o", **ring)
    if len(rows):
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        left = columns[0] > len(steps) / 2
        bottom.annotate(
            f"not finite: {list(layers)[rows[0]]}, step {columns[0]}{more}",
            (columns[0], rows[0]),
            xytext=(-14 if left else 14, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color="white",
            fontsize=11,
            fontweight="bold",
            bbox={"boxstyle": "round,pad=0.3", "facecolor": _NONFINITE, "edgecolor": "none"},
        )
    cell = Line2D(
        [], [], linestyle="none", marker="s", markersize=10, color=_NONFINITE, label="not finite (NaN or Inf)"
    )
    bottom.legend(handles=[cell], loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=10, borderpad=0)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "demo.png")
    options = parser.parse_args()
    draw(load(options.recording), options.output)


if __name__ == "__main__":
    main()
