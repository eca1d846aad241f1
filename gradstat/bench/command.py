"""``python -m gradstat bench``: what checks and clips cost on a user's own model and machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradstat._core.files import replacing
from gradstat._core.importing import Parser, UsageError, attribute_of, trace_of
from gradstat._core.text import printable, wrapped
from gradstat.bench import steps
from gradstat.bench.machine import device_name, driver_or_threads, driver_version, versions
from gradstat.bench.timing import progress_bar

BUILT_IN = "gradstat.demo.model:example"
FACTORY_HELP = """\
FACTORY is called without arguments, with --device as torch's default device, and returns

  (model, batch)     the loss is what model(batch) returns: its .loss, its ["loss"], or the mean of the
                     (first) tensor. A tuple or list is passed as model(*batch), a mapping as model(**batch).
  (model, loss)      where loss() does the forward pass and returns the loss.

A file bench_me.py in the current folder may hold:

  import torch

  def factory():
      model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))
      images, labels = torch.randn(64, 512), torch.randint(10, (64,))
      return model, lambda: torch.nn.functional.cross_entropy(model(images), labels)

  $ gradstat bench --model bench_me:factory
"""
DEVICE_HELP = "such as cpu, cuda or cuda:1 (default: the GPU if there is one)"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=steps.LEARNING_RATE),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=steps.LEARNING_RATE, momentum=0.9),
}


def _parser() -> Parser:
    parser = Parser(
        prog="gradstat bench",
        description="Time a training step of your model, plain and with gradstat, torch's clip, a naive .item() loop\n"
        "and detect_anomaly, and measure the memory each adds.",
        epilog=FACTORY_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", metavar="MODULE:FACTORY", help="makes your model, see below (default: a built-in GPT)"
    )
    parser.add_argument("--device", help=DEVICE_HELP)
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of every variant (default %(default)s)")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="default: %(default)s")
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help="run the forward pass under torch.autocast")
    parser.add_argument("--threads", type=int, help="threads torch uses on the CPU (default: torch's choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file to write the results to as well")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``bench`` with ``arguments``, by default those of the process. Returns 0.

    ValueError, with a message for the user, if the input cannot be measured.
    """
    options = _parser().parse_args(arguments)
    if options.rounds < 1:
        raise UsageError("--rounds must be at least 1")
    if options.threads is not None:
        if options.threads < 1:
            raise UsageError("--threads must be at least 1")
        torch.set_num_threads(options.threads)
    if options.json is not None and not options.json.parent.is_dir():
        raise UsageError(f"--json: there is no folder {options.json.parent}")
    device = device_of(options.device)
    autocast = None if options.autocast is None else getattr(torch, options.autocast)
    where = options.model or BUILT_IN
    try:
        model, loss = load(where, device)
        loss = _scalar(loss, device, autocast)
    except UsageError as error:
        raise UsageError(f"--model {where}: {error}") from error
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient, so there is nothing to train")
    step = steps.Step(model, loss, OPTIMIZERS[options.optimizer](trained), device)

    setting = {
        "device": device_name(device),
        "driver": driver_version(device),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "parameters": sum(p.numel() for p in trained),
        "tensors": len(trained),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trained}),
        "optimizer": options.optimizer,
        "autocast": options.autocast,
        "rounds": options.rounds,
    }
    autocast = f", autocast to {options.autocast}" if options.autocast else ""
    named = options.model or "the built-in GPT (--model measures yours)"
    title = f"{named}: {setting['parameters']:,} trained parameters in {setting['tensors']:,} tensors of "
    print(wrapped(f"{title}{', '.join(setting['dtypes'])}{autocast}; optimizer {options.optimizer}"))
    threads = driver_or_threads(setting["driver"], setting["threads"])
    print(wrapped(f"on {setting['device']}, {threads}; {setting['versions']}"))
    compared = _runnable_variants(step, where)
    with progress_bar(steps.WARMUP + options.rounds, "measuring") as progress:
        measured = steps.costs(step, options.rounds, compared=compared, progress=lambda: progress.update(1))
    count = f"{options.rounds} interleaved rounds" if options.rounds > 1 else "one round, so its spread is not known"
    block = steps.BLOCK[device.type]
    count += f" of {block} steps with one sync at the end" * (block > 1)
    alone = "the call alone is timed inside of the step, and varies less than the ratio of whole steps"
    print(f"\n{wrapped(f'A training step, {count}; {alone}:')}\n{steps.table(measured)}\n\n{conclusion(measured)}")
    if options.json is not None:
        content = {**setting, "model": where, "variants": [_plain(cost) for cost in measured]}
        with replacing(options.json) as file:
            file.write(f"{json.dumps(content, indent=2)}\n".encode())
        print(f"written to {printable(str(options.json))}")
    return 0


def device_of(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: expected a cpu or cuda device")
    return device


def load(where: str, device: torch.device) -> tuple[nn.Module, Callable[[], Any]]:
    """Calls the factory ``"module:attribute"``, described in `FACTORY_HELP`; returns its model and the forward pass."""
    factory = attribute_of(where, "MODULE:FACTORY, such as bench_me:factory")
    attribute = where.partition(":")[2]
    try:
        with device:
            made = factory()
    except Exception as error:
        raise UsageError(f"{attribute}() raised\n{trace_of(error, __file__)}") from error
    if isinstance(made, nn.Module):
        raise UsageError(
            f"{attribute}() returned a module alone; return (model, batch) or (model, loss), so that a step can be "
            "taken"
        )
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        kind = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise UsageError(f"expected (model, batch) or (model, loss) from {attribute}(), got {kind}")
    model, second = made
    model.to(device)
    if callable(second) and not isinstance(second, Tensor):
        return model, second
    if isinstance(second, Mapping):  # of any kind, such as the batches of transformers
        second = dict(second)
    return model, _forward(model, tree_map_only(Tensor, lambda tensor: tensor.to(device), second))


def _forward(model: nn.Module, batch: Any) -> Callable[[], Any]:
    def forward() -> Any:
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        if isinstance(output, Mapping) and "loss" in output:
            output = output["loss"]
        elif getattr(output, "loss", None) is not None:
            output = output.loss
        elif isinstance(output, (tuple, list)) and output:
            output = output[0]
        return output.float().mean() if isinstance(output, Tensor) and not output.is_complex() else output

    return forward


def _scalar(loss: Callable[[], Any], device: torch.device, autocast: torch.dtype | None) -> Callable[[], Tensor]:
    """The forward pass under autocast; runs it once to check that it returns a loss."""

    def forward() -> Any:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            return loss()

    try:
        first = forward()
    except Exception as error:
        raise UsageError(f"the forward pass raised\n{trace_of(error, __file__)}") from error
    if not isinstance(first, Tensor):
        raise UsageError(f"the loss must be a tensor, not a {type(first).__name__}")
    if first.numel() != 1 or first.is_complex():
        raise UsageError(
            f"the loss must be one real number, not a {first.dtype} tensor of shape {tuple(first.shape)}; reduce it, "
            "with .mean() for example"
        )
    if not first.requires_grad:
        raise UsageError("the loss has no graph, so there are no gradients; was it detached?")
    return forward


def _runnable_variants(step: steps.Step, where: str) -> list[steps.Variant]:
    """The variants that run on this step. Checks their results against float64, then runs one step of each."""
    try:
        steps.verify(step)
    except (ValueError, steps.WrongAnswerError) as error:
        raise UsageError(f"--model {where}: {error}") from error
    running: list[steps.Variant] = []
    for variant in steps.variants(step.device):
        try:
            variant.run(step)
        except Exception as error:  # noqa: PERF203 - a step takes longer than a try
            if not running:  # the plain step
                raise UsageError(f"--model {where}: a training step raised\n{trace_of(error, __file__)}") from error
            why = printable(f"it raised {type(error).__name__}: {error}")
            print(f"left out: {variant.name}, since {why}", file=sys.stderr)
        else:
            running.append(variant)
    return running


def conclusion(measured: list[steps.Cost]) -> str:
    """One sentence: what gradstat and ``detect_anomaly`` add to this step."""
    shares = {cost.name: cost.share(measured[0]) for cost in measured}
    if steps.CHECK not in shares:
        return "gradstat.check did not run on this model."
    anomaly = f", detect_anomaly {shares[steps.ANOMALY]}" if steps.ANOMALY in shares else ""
    return f"Added to a step: gradstat.check {shares[steps.CHECK]}{anomaly}."


def _plain(cost: steps.Cost) -> dict[str, Any]:
    return {
        "name": cost.name,
        "seconds": cost.seconds._asdict(),
        "ratio": cost.ratio._asdict(),
        "seconds_of_the_call": cost.inside and cost.inside._asdict(),
        "extra_bytes": cost.extra_bytes._asdict(),
    }
