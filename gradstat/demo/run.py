"""The demo's command: options, the training run, the cost of checks in its training step, the page, the result."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gradstat._core.importing import Parser, UsageError
from gradstat._core.text import count_of, printable, wrapped
from gradstat.bench import steps as variants
from gradstat.bench.command import DEVICE_HELP, device_of
from gradstat.bench.machine import device_name
from gradstat.bench.timing import progress_bar
from gradstat.demo import corpus
from gradstat.demo.model import GPT, MEDIUM, SMALL, TINY
from gradstat.demo.train import train
from gradstat.monitor import Diagnosis, write_page
from gradstat.recording import save

# Seconds for the rounds of the cost stage, of which at least three are run.
_BUDGET = 20.0


def _parser() -> Parser:
    parser = Parser(
        prog="gradstat demo",
        description="Train a small byte-level GPT on the Python standard library's sources with every gradient checked "
        "on every step, corrupt one activation, see which layer is named and what the checks cost.",
    )
    parser.add_argument("--steps", type=int, help="training steps (default 300; 40 with --quick)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for the recording and the page that shows it (default %(default)s)",
    )
    parser.add_argument("--device", help=DEVICE_HELP)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and batches (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo with ``arguments``, by default those of the process.

    Returns 0 if exactly the corrupted layer was named, else 1. ValueError, with a message for the user, or
    FileNotFoundError if the demo cannot run.
    """
    options = _parser().parse_args(arguments)
    missing = [name for name in ("plotly", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the demo also needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    device = device_of(options.device)
    steps = (40 if options.quick else 300) if options.steps is None else options.steps
    if steps < 10:
        raise UsageError("--steps must be at least 10, to have healthy steps before and after the corrupted one")
    try:
        options.output.mkdir(parents=True, exist_ok=True)  # fail now rather than after a minute of training
    except OSError as error:
        raise UsageError(f"--output: cannot make the folder {options.output}: {error.strerror}") from error
    size = TINY if options.quick else MEDIUM if device.type == "cuda" else SMALL
    torch.manual_seed(options.seed)
    model = GPT(size).to(device)
    folder = corpus.standard_library()
    data = corpus.read(folder)
    where = device_name(device) if device.type == "cuda" else f"CPU, {count_of(_take_free_threads(), 'thread')}"
    parameters = list(model.parameters())
    introduction = (
        f"A GPT of {sum(p.numel() for p in parameters):,} parameters in {len(parameters)} tensors learns from "
    )
    introduction += f"{len(data):,} bytes of {folder} on {where}, torch {torch.__version__}."
    print(wrapped(introduction, 0))
    print("gradstat.check and gradstat.clip_grad_norm_ run on every step.")
    corrupted_step, layer = steps * 4 // 5, size.layers // 2
    culprit = f"blocks.{layer}.mlp.down"
    print(f"At step {corrupted_step}, one activation saved by {culprit} will be overwritten with Inf.\n", flush=True)

    recording, incident = train(model, data, steps, corrupted_step, layer, options.seed, device)
    losses = recording.scalars["loss"]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; a sample of its output:")
    print("\n".join(f"  | {line}" for line in _printable(model.write(b"def ", 120))) + "\n")

    saved = save(recording, options.output / "run.gradstat")
    page = write_page(recording, options.output / "run.html", title="The demo")
    print(Diagnosis.of(recording))
    print(f"\npage: {printable(str(page))}\nrecording, for `python -m gradstat view`: {printable(str(saved))}\n")
    _print_cost(model, data, 5 if options.quick else 20, where)

    named = [stats.name for stats in incident.nonfinite] if incident is not None else []
    if named == [f"{culprit}.weight"]:
        return 0
    but = f"but gradstat named: {named or 'none'}"
    print(f"\nFAILED: {culprit}.weight was corrupted at step {corrupted_step}, {but}", file=sys.stderr)
    return 1


def _print_cost(model: GPT, data: Tensor, rounds: int, where: str) -> None:
    """Measures what checks and clips cost in a training step, in so many rounds, or those that the budget allows."""
    size, device = model.size, model.head.weight.device
    tokens = corpus.batch(data, size.batch, size.context + 1, torch.Generator().manual_seed(1), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=variants.LEARNING_RATE)
    step = variants.Step(model, lambda: model.loss(tokens), optimizer, device)
    with progress_bar(rounds + variants.WARMUP, "cost of a step") as progress:
        costs = variants.costs(step, rounds, progress=lambda: progress.update(1), budget=_BUDGET)
        done = int(progress.n) - variants.WARMUP
    print(f"Cost of a training step ({where}, this model, median of {count_of(done, 'interleaved round')}):")
    print(variants.table(costs))
    if done < rounds:
        print(f"Measured in {done} rounds, not {rounds}: on this machine, as busy as it is, a round takes long.")


def _take_free_threads() -> int:
    """Lets torch use no more threads than cores are free: threads that have no core let all others wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = round(os.getloadavg()[0]) if hasattr(os, "getloadavg") else 0
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - busy)))
    return torch.get_num_threads()


def _printable(sample: bytes) -> list[str]:
    """The sample as lines of printable ASCII: sampled bytes may be anything, including terminal escapes."""
    return ["".join(chr(b) if 32 <= b < 127 else "?" for b in line) for line in sample.expandtabs(4).split(b"\n")]
