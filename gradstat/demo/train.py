"""The training run: every step checked and clipped, one step corrupted on purpose."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

import gradstat
from gradstat.demo import corpus as text
from gradstat.demo.model import GPT

MAX_NORM = 1.0
CORRUPTED_VALUE = math.inf


def corrupt(module: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Overwrites one element of the input that ``module`` saved for backward, as a flipped bit in memory would."""

    # The output has already been computed, so the loss stays correct and only a gradient shows the fault.
    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        inputs[0].data[0, 3, 7] = CORRUPTED_VALUE  # sample, position, feature

    return module.register_forward_hook(hook)


def train(
    model: GPT, corpus: Tensor, steps: int, corrupted_step: int, corrupted_layer: int, seed: int, device: torch.device
) -> tuple[gradstat.monitor.Recording, gradstat.Report | None]:
    """Trains with AdamW, and corrupts the ``mlp.down`` of block ``corrupted_layer`` in ``corrupted_step``.

    Nonfinite steps are skipped. Returns the monitor's recording, and the report of the corrupted step if nonfinite.
    """
    from tqdm import tqdm

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    incident = None
    watch, every = {"activations": 10}, {"history": steps}
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record", max_norm=MAX_NORM, watch=watch, options=every)
    interactive = sys.stderr.isatty()
    progress = tqdm(range(steps), desc="training", unit="step", disable=not interactive, dynamic_ncols=True)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 30)
        handle = corrupt(model.blocks[corrupted_layer].mlp.down) if step == corrupted_step else None  # type: ignore[union-attr,arg-type]
        optimizer.zero_grad()
        loss = model.loss(text.batch(corpus, model.size.batch, model.size.context + 1, generator, device))
        loss.backward()
        if handle is not None:
            handle.remove()

        monitor.step(loss)
        report = gradstat.check(model)
        if report.ok:
            norm = float(gradstat.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
        else:
            norm = math.nan
            if step == corrupted_step:  # another nonfinite step would not show that the corruption was found
                incident = report
            progress.clear()
            _print_incident(report, step, loss.item())

        progress.set_postfix(loss=f"{loss.item():.3f}", grad_norm=f"{norm:.3f}", refresh=False)
        if not interactive and step % max(1, steps // 6) == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}  gradient norm {norm:.3f}", flush=True)
    monitor.remove()
    return monitor.recording(), incident


def _print_incident(report: gradstat.Report, step: int, loss: float) -> None:
    print(f"\nstep {step}: the loss is {loss:.3f}, which looks normal. But:\n\n{report}\n", flush=True)
    worst = report.nonfinite[0]
    element = ", ".join(map(str, worst.first_nonfinite or ()))
    print(
        f"the fault is in {worst.name}: {worst.nonfinite_count} elements are not finite, the first at [{element}];\n"
        f"the other {len(report) - len(report.nonfinite)} gradients are clean.\n"
        "The step is skipped and training continues.\n",
        flush=True,
    )
