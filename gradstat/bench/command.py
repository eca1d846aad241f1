"""``python -m gradstat bench``: what checks and clips cost on a user's own model and machine."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradstat._core.commands import Parser, UsageError
from gradstat._core.text import printable, wrapped
from gradstat.bench import steps
from gradstat.bench.machine import device_name, driver_or_threads, driver_version, versions
from gradstat.bench.timing import progress_bar

BUILT_IN = "gradstat.demo.model:example"
FACTORY_HELP = """\
FACTORY is called without arguments, with --device as torch's default device. It returns (model, loss), where
loss() does the forward pass, under autocast if you train so, and returns the loss.

A file bench_me.py in the current folder may hold:

  import torch

  def factory():
      model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 10))
      images, labels = torch.randn(64, 512), torch.randint(10, (64,))
      return model, lambda: torch.nn.functional.cross_entropy(model(images), labels)

  $ gradstat bench --model bench_me:factory
"""
DEVICE_HELP = "such as cpu, cuda or cuda:1 (default: the GPU if there is one)"


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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``bench`` with ``arguments``, by default those of the process. Returns 0.

    ValueError, with a message for the user, if the input cannot be measured.
    """
    options = _parser().parse_args(arguments)
    if options.rounds < 1:
        raise UsageError("--rounds must be at least 1")
    device = device_of(options.device)
    where = options.model or BUILT_IN
    try:
        model, loss = load(where, device)
    except UsageError as error:
        raise UsageError(f"--model {where}: {error}") from error
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise UsageError("the model has no parameter that requires a gradient, so there is nothing to train")
    step = steps.Step(model, loss, torch.optim.AdamW(trained, lr=steps.LEARNING_RATE), device)

    count, dtypes = sum(p.numel() for p in trained), {str(p.dtype).removeprefix("torch.") for p in trained}
    named = options.model or "the built-in GPT (--model measures yours)"
    told = f"{named}: {count:,} trained parameters in {len(trained):,} tensors of {', '.join(sorted(dtypes))}"
    print(wrapped(f"{told}; optimizer AdamW"))
    threads = driver_or_threads(driver_version(device), torch.get_num_threads())
    print(wrapped(f"on {device_name(device)}, {threads}; {versions()}"))
    compared = _runnable_variants(step, where)
    with progress_bar(steps.WARMUP + options.rounds, "measuring") as progress:
        measured = steps.costs(step, options.rounds, compared=compared, progress=lambda: progress.update(1))
    rounds = f"{options.rounds} interleaved rounds" if options.rounds > 1 else "one round, so its spread is not known"
    block = steps.BLOCK[device.type]
    rounds += f" of {block} steps with one sync at the end" * (block > 1)
    print(f"\nA training step, {rounds}:\n{steps.table(measured)}\n\n{conclusion(measured)}")
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


def load(where: str, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Calls the factory ``"module:attribute"``, described in `FACTORY_HELP`; returns its model and loss.

    Evaluates the loss once, to check that it is one.
    """
    module, _, attribute = where.partition(":")
    if not module or not attribute:
        raise UsageError("expected MODULE:FACTORY, such as bench_me:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = pkgutil.resolve_name(where)
    except ImportError as error:
        raise UsageError(f"importing {module} failed: {error}") from error
    except Exception as error:
        raise UsageError(f"importing {where} raised\n{_trace_of(error)}") from error
    try:
        with device:
            made = factory()
    except Exception as error:
        raise UsageError(f"{attribute}() raised\n{_trace_of(error)}") from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module) or not callable(made[1]):
        kind = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise UsageError(f"expected (model, loss) from {attribute}(), where loss() returns the loss, got {kind}")
    model, loss = made
    model.to(device)
    try:
        first = loss()
    except Exception as error:
        raise UsageError(f"the forward pass raised\n{_trace_of(error)}") from error
    if not isinstance(first, Tensor):
        raise UsageError(f"the loss must be a tensor, not a {type(first).__name__}")
    if first.numel() != 1 or first.is_complex():
        raise UsageError(
            f"the loss must be one real number, not a {first.dtype} tensor of shape {tuple(first.shape)}; reduce it, "
            "with .mean() for example"
        )
    if not first.requires_grad:
        raise UsageError("the loss has no graph, so there are no gradients; was it detached?")
    return model, loss


def _trace_of(error: Exception) -> str:
    """The traceback without the frames of this file, which are of no use to a user."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return "".join(["".join(traceback.format_list(frames)), *traceback.format_exception_only(error)]).rstrip()


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
                raise UsageError(f"--model {where}: a training step raised\n{_trace_of(error)}") from error
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
