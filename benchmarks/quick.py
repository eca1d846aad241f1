"""`make bench`: what checks and clips cost next to torch's clip, a naive loop and a plain read of the same bytes.

Correctness is checked before anything is timed. Prints a table; ``--record`` also appends the rows to
``benchmarks/results/<device>/quick.jsonl``, which is where the figures in the README come from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from cases import PROVIDERS, SHAPES, checked_norm, parameters_of, small_transformer
from rows import Row, append, device_name, versions
from timing import interleaved
from tqdm import tqdm

import gradstat
from gradstat._plan import gradients_of, source_of
from gradstat.demo import corpus, costs
from gradstat.demo.model import GPT, SMALL


def compare(case: str, calls: dict[str, Callable[[], object]], size: int, rounds: int) -> list[Row]:
    timed = interleaved(calls, rounds)
    return [
        Row(n, case, "median time", "us", q.median * 1e6, size, q.low * 1e6, q.high * 1e6) for n, q in timed.items()
    ]


def lists(device: str, rounds: int) -> Iterator[list[Row]]:
    """Every provider on every list of shapes."""
    for case in SHAPES:
        parameters = parameters_of(case, device=device)
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = checked_norm(parameters)
        size = sum(g.numel() * g.element_size() for g in gradients)
        calls = {name: partial(call, parameters, norm) for name, call in PROVIDERS.items()}
        yield compare(case, calls, size, rounds)


def dtypes(device: str, rounds: int, elements: int = 1 << 26) -> Iterator[list[Row]]:
    """One large tensor of every type, next to a plain read of the same bytes and torch's norm, which is one field."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = torch.randn(elements, device=device).to(dtype)
        calls = {
            "gradstat.stats, all fields": lambda x=x: gradstat.stats([x]),
            "torch._foreach_norm": lambda x=x: torch._foreach_norm([x]),
            "plain read (sum as float32)": lambda x=x: x.view(torch.float32).sum(),
        }
        yield compare(
            f"64 M elements of {str(dtype).removeprefix('torch.')}", calls, x.numel() * x.element_size(), rounds
        )


def steps(device: str, rounds: int) -> Iterator[list[Row]]:
    """The demo's training step with and without checks."""
    torch.manual_seed(0)
    model = GPT(SMALL).to(device)
    data = corpus.read(corpus.standard_library())
    tokens = corpus.batch(data, SMALL.batch, SMALL.context + 1, torch.Generator().manual_seed(1), device)
    medians = costs.measure(model, tokens, rounds)
    case = "training step, GPT of 0.9 M parameters"
    yield [Row(name, case, "median time", "us", sorted(s)[len(s) // 2] * 1e6) for name, s in medians.items()]


def host(device: str, rounds: int) -> Iterator[list[Row]]:
    """Where the time of a check goes when there is little to read."""
    model = small_transformer().to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    parameters = list(model.parameters())
    source = source_of(model)
    gradients = gradients_of(source.parameters).tensors
    calls = {
        "gradstat.check(model).ok": lambda: gradstat.check(model).ok,
        "gradstat clip, unclipped": lambda: gradstat.clip_grad_norm_(parameters, 1e9),
        "torch clip, unclipped": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9),
        "of a check: find parameters": lambda: source_of(model),
        "of a check: collect gradients": lambda: gradients_of(source.parameters),
        "of a check: the table": lambda: gradstat.stats(gradients),
    }
    yield compare("144 small parameters in 85 modules", calls, 0, 20 * rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--rounds", type=int, default=15, help="timed rounds for every comparison (default %(default)s)"
    )
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/results")
    options = parser.parse_args()
    print(f"{device_name()}, {torch.get_num_threads()} threads, {versions()}")
    collected: list[Row] = []
    for group in tqdm([lists, host, dtypes, steps], desc="measuring", disable=not sys.stderr.isatty()):
        for rows in group(options.device, options.rounds):
            collected += rows
    case = None
    for row in collected:
        if row.case != case:
            case, base = row.case, row.value
            print(f"\n{case}")
        rate = f"{row.bytes / row.value / 1e3:8.1f} GB/s" if row.bytes else " " * 13
        print(f"  {row.provider:<28} {row.value:11.1f} us {rate} {row.value / base:8.2f} x")
    if options.record:
        print(f"\nrecorded in {append(collected, 'quick')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
