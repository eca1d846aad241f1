"""Does `gradstat.LowPrecision` rank layers as their quantization costs loss? Its ranks beside measured costs.

::

    python -m benchmarks.low_precision --seed 0
    python -m benchmarks.low_precision --reads

A small GPT, studied as it trains, learns bytes of Python's standard library. At a quarter, a half, three quarters and
the end of the run it goes on twice for 40 steps on the same batches: as it is, and with the operands of all three
products of one layer really quantized, forward and backward. The difference of the mean losses is the layer's cost.
Such short second runs are needed: two whole runs that differ by rounding alone end as far apart as most costs are.

With ``--reads``: what `gradstat.quantization_stats` takes on the CPU, in plain reads of the same tensor.
"""

from __future__ import annotations

import argparse
import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradstat
from gradstat.demo import corpus
from gradstat.demo.model import GPT, Size
from gradstat.lowprecision._reference import quantized
from gradstat.lowprecision.formats import FORMATS

SIZE = Size(layers=3, width=64, heads=4, context=64, batch=8)
BRANCH = 40  # steps of a second run


class Quantized(torch.autograd.Function):
    """A linear layer whose products take quantized operands, each along the dimension that the product sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.name, ctx.has_bias = name, bias is not None
        return nn.functional.linear(stored(x, name, -1), stored(weight, name, -1, True), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, tokens = gradient.flatten(0, -2), x.flatten(0, -2)
        of_input = (stored(rows, ctx.name, -1) @ stored(weight, ctx.name, 0, True)).view_as(x)
        of_weight = stored(rows, ctx.name, 0).T @ stored(tokens, ctx.name, 0)
        return of_input, of_weight, rows.sum(0) if ctx.has_bias else None, None


def stored(tensor: Tensor, name: str, dim: int, weight: bool = False) -> Tensor:
    return quantized(tensor, FORMATS[name], dim, weight).to(tensor.dtype)


def train(model: GPT, optimizer: torch.optim.Optimizer, data: Tensor, random: torch.Generator, steps: int) -> float:
    """The mean loss of so many steps."""
    losses = []
    for _ in range(steps):
        loss = model.loss(corpus.batch(data, SIZE.batch, SIZE.context + 1, random, "cpu"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def second_run(model: GPT, optimizer: torch.optim.Optimizer, data: Tensor, layer: str = "", name: str = "") -> float:
    """The mean loss of a continued copy, in which a ``layer`` is quantized if one is given."""
    copied = copy.deepcopy(model)
    continued = torch.optim.AdamW(copied.parameters())
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if layer:
        linear = copied.get_submodule(layer)
        linear.forward = functools.partial(_quantized, linear, name)  # type: ignore[method-assign]
    return train(copied, continued, data, torch.Generator().manual_seed(1), BRANCH)


def _quantized(linear: Any, name: str, x: Tensor) -> Any:
    return Quantized.apply(x, linear.weight, linear.bias, name)


def ranks(values: list[float]) -> Tensor:
    return torch.tensor(values).argsort().argsort().double()


def reads(size: tuple[int, int] = (2048, 1024), repeats: int = 15) -> None:
    """Prints the operator's time by format and dtype, a read (`torch.sum`) and a call in turn, in the thread's time."""
    torch.set_num_threads(1)
    layouts = {"rows": {}, "columns": {"dim": 0}, "weights": {"weight": True}}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(size).to(dtype)
        for name in FORMATS:
            found = []
            for options in layouts.values():
                calls = [x.sum, functools.partial(gradstat.quantization_stats, x, name, **options)]
                times = [[timed(call) for call in calls] for _ in range(repeats)]
                read, call = torch.tensor(times, dtype=torch.float64).median(0).values.tolist()
                found.append(f"{1e9 * call / x.numel():5.2f} ns, {call / read:4.1f} reads")
            print(f"{str(dtype).removeprefix('torch.'):<9} {name:<12} {dict(zip(layouts, found, strict=True))}")


def timed(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--formats", nargs="+", default=["mxfp4", "nvfp4"])
    parser.add_argument("--reads", action="store_true")
    options = parser.parse_args()
    if options.reads:
        reads()
        return
    torch.manual_seed(options.seed)
    model, data = GPT(SIZE), corpus.read(corpus.standard_library(), 2_000_000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    study, random = gradstat.LowPrecision(model, options.formats), torch.Generator().manual_seed(options.seed)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    costs = {(name, layer): 0.0 for name in options.formats for layer in layers}
    for _ in range(4):
        train(model, optimizer, data, random, options.steps // 4)
        plain = second_run(model, optimizer, data)
        for name, layer in costs:
            costs[name, layer] += (second_run(model, optimizer, data, layer, name) - plain) / 4
    table = {(row["format"], row["layer"]): row for row in study.table() if row["product"] == "output"}
    for name in options.formats:
        shares = [table[name, layer]["share"] for layer in layers]
        measured = [costs[name, layer] for layer in layers]
        correlation = torch.corrcoef(torch.stack([ranks(shares), ranks(measured)]))[0, 1]
        print(f"seed {options.seed}, {name}: rank correlation {correlation:.2f}")
        for share, cost, layer in sorted(zip(shares, measured, layers, strict=True), reverse=True):
            print(
                f"  {layer:<24} {share:8.3%} of the cost by the study, measured {1000 * cost:6.2f} millinats per token"
            )
    print(study)


if __name__ == "__main__":
    main()
