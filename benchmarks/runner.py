"""What benchmarks of many small trainings share: jobs in processes, trainings that are kept, ranks, and rows."""

from __future__ import annotations

import argparse
import atexit
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import rows
import torch
from helpers.ranks import Ranks

from gradstat._core.files import replacing
from gradstat.bench.timing import Quartiles, progress_bar

CPU = torch.device("cpu")
Result = TypeVar("Result")
# The arguments of a training, of which its file is named.
Job = tuple[Any, ...]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of a program that runs jobs and records rows."""
    parser = rows.parser_of(description)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="a folder for finished trainings, which are then run only once")
    return parser


def results_of(
    function: Callable[[Job], Result], jobs: Sequence[Job], processes: int = 1, keep: Path | None = None
) -> Iterator[Result]:
    """The results of a function for all jobs, in order; reports progress on stderr."""
    pool = ProcessPoolExecutor(processes) if processes > 1 else None
    with pool or nullcontext(), progress_bar(len(jobs), "trainings") as bar:
        for result in (map if pool is None else pool.map)(partial(_kept, function, keep), jobs):
            bar.update()
            yield result


def _kept(function: Callable[[Job], Result], folder: Path | None, job: Job) -> Result:
    """Runs a job; or reads its result from ``folder``, if it was run before."""
    torch.set_num_threads(1)
    if folder is None:
        return function(job)
    file = folder / f"{'-'.join(map(str, job)).replace('/', ' ')}.pickle"
    if not file.exists():
        result = function(job)
        with replacing(file) as opened:
            opened.write(pickle.dumps(result))
        return result
    made: Result = pickle.loads(file.read_bytes())
    return made


@cache
def _ranks() -> Ranks:
    pool = Ranks()
    atexit.register(pool.stop)
    return pool


def on_two_ranks(function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of rank 0 of a function of an imported module."""
    result: Result = _ranks().run(2, function, *arguments, timeout=120.0)[0]
    return result


def rows_of_values(
    group: str, case: str, provider: str, values: Mapping[str, float | Quartiles], unit: str = ""
) -> list[rows.Row]:
    """A row for each metric."""
    made = {metric: value if isinstance(value, Quartiles) else float(value) for metric, value in values.items()}
    return [rows.row(group, case, provider, metric, unit, value, CPU) for metric, value in made.items()]
