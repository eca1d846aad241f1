"""The picture: gradient norm of every layer over the steps, below the loss and the total norm."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradstat.demo.train import Run


def layers_of(names: tuple[str, ...]) -> dict[str, list[int]]:
    """Positions of the parameters of each module, modules in order."""
    layers: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        layers.setdefault(name.rpartition(".")[0], []).append(position)
    return layers


def draw(run: Run, path: Path) -> None:
    """Writes a PNG of ``run`` to ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers = layers_of(run.names)
    squares = np.square(np.array(run.layer_norms))
    norms = np.array([np.sqrt(squares[:, at].sum(1)) for at in layers.values()])
    bad = np.array([np.array(run.bad)[:, at].any(1) for at in layers.values()])
    colors = plt.get_cmap("viridis").with_extremes(bad="#ff2d55")
    with np.errstate(divide="ignore"):
        shown = np.ma.masked_array(np.log10(np.maximum(norms, 1e-12)), mask=bad)
    low, high = np.percentile(shown.compressed(), [1, 99.5])

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(14, 8.4), height_ratios=[1, 3.4], sharex=True, layout="constrained", dpi=100
    )
    steps = np.arange(len(run.losses))
    top.plot(steps, run.losses, color="#1f6feb", linewidth=1.6)
    top.set_ylabel("loss", color="#1f6feb")
    twin = top.twinx()
    twin.semilogy(steps, run.norms, color="#8a8a8a", linewidth=1.0)
    twin.set_ylabel("gradient norm", color="#6a6a6a")
    top.set_title("A small GPT learning Python, every gradient checked on every step", loc="left", fontsize=14)
    for axes in (top, twin):
        axes.spines["top"].set_visible(False)
    top.axvline(run.corrupted_step, color="#ff2d55", linewidth=1, linestyle="--")

    image = bottom.imshow(shown, aspect="auto", cmap=colors, vmin=low, vmax=high, interpolation="nearest")
    bottom.set_yticks(range(len(layers)), list(layers), fontsize=8.5)
    bottom.set_xlabel("step")
    figure.colorbar(image, ax=bottom, label="gradient norm, log10", pad=0.01, fraction=0.03)
    for row, step in zip(*np.nonzero(bad), strict=True):
        # One cell is a few pixels wide: a ring makes it findable.
        bottom.plot(step, row, "o", markersize=13, markerfacecolor="none", markeredgecolor="#ff2d55", markeredgewidth=2)
        bottom.annotate(
            f"not finite: {list(layers)[row]}, step {step}",
            (step, row),
            xytext=(-14, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color="white",
            fontsize=10,
            fontweight="bold",
            bbox={"boxstyle": "round,pad=0.3", "facecolor": "#ff2d55", "edgecolor": "none"},
        )
    figure.savefig(path)
    plt.close(figure)
