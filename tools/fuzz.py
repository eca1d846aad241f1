"""`make fuzz`: a million tensors of random bits and layouts through every operation, compared with exact results.

    python tools/fuzz.py                          # a million, from a seed that is printed
    python tools/fuzz.py --seed 7 --tensors 1000  # reproducible, on every machine
    python tools/fuzz.py --seed 7 --batch 3       # one of the batches

Batches of zero, a few or thousands of tensors are drawn from the seed and the number of the batch. Each goes through
`stats`, by which tensors are counted, and two operations of fuzz_operations.py. A failure names the tensor, and
the command that repeats it.
"""

import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import rows
import tables
from helpers.fuzz import Batch
from helpers.fuzz_operations import OPERATIONS
from rows import Row

GROUP = "fuzz"

MILLION = 1_000_000
# Numbers of tensors in a batch, by backend; the reference is slow.
SIZES = {"native": (0, 1, 2, 7, 60, 300, 300, 1000, 4000), "reference": (1, 9, 60)}


class Case(NamedTuple):
    """One batch, and the operations to run on it."""

    seed: int
    number: int
    tensors: int
    backend: str
    operations: tuple[str, ...]

    @classmethod
    def drawn(cls, seed: int, number: int) -> "Case":
        source = random.Random(f"{seed}/{number}")
        backend = "reference" if source.random() < 0.05 else "native"
        tensors = source.choice(SIZES[backend])
        others = source.sample(sorted(set(OPERATIONS) - {"stats"}), 2)
        return cls(seed, number, tensors, backend, ("stats", *others))

    def run(self, device: str, apart: bool) -> None:
        source = random.Random(f"{self.seed}:{self.number}")
        batch = Batch.drawn(source.getrandbits(63), self.tensors, device, apart)
        fresh = batch.memory()
        for operation in self.operations:
            OPERATIONS[operation](batch, source, self.backend)
            batch.restore(fresh)  # a tensor that was multiplied by NaN would test nothing more


def run(seed: int, tensors: int, device: str = "cpu", apart: bool = False, progress: bool = False) -> Counter[str]:
    """Runs at least ``tensors`` tensors through `stats`; returns the number of tensors that each operation got."""
    done: Counter[str] = Counter()
    started = printed = time.monotonic()
    while done["stats"] < tensors:
        case = Case.drawn(seed, done["batches"])
        try:
            case.run(device, apart)
        except Exception:
            how = f"--seed {seed} --batch {case.number} --device {device}{' --apart' * apart}"
            print(f"\nrepeat it with: python tools/fuzz.py {how}")
            raise
        done["batches"] += 1
        for operation in case.operations:
            done[operation] += case.tensors
        if progress and time.monotonic() - printed > 10:
            printed = time.monotonic()
            print(f"{done['stats']:>10,} tensors, {printed - started:6.0f} s", flush=True)
    return done


def as_rows(done: Counter[str], seconds: float, device: torch.device) -> list[Row]:
    """The counts of `run` as rows: tensors by operation, number of batches, and time."""
    values = [(name, "tensors", "", float(count)) for name, count in done.most_common() if name != "batches"]
    values += [("all operations", "batches", "", float(done["batches"])), ("all operations", "time", "s", seconds)]
    return [rows.row(GROUP, case, "gradstat", metric, unit, value, device) for case, metric, unit, value in values]


def main() -> int:
    parser = rows.parser_of(__doc__)
    parser.add_argument("--tensors", type=int, default=MILLION, help="test at least this many (default %(default)s)")
    parser.add_argument("--seed", type=int, help="random seed (default: a new one)")
    parser.add_argument("--batch", type=int, help="only this batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--apart", action="store_true", help="an allocation for each tensor, as AddressSanitizer needs")
    options = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}, on {options.device}", flush=True)
    if options.batch is not None:
        case = Case.drawn(seed, options.batch)
        print(case, flush=True)
        case.run(options.device, options.apart)
        return 0
    started = time.monotonic()
    done = run(seed, options.tensors, options.device, options.apart, progress=True)
    made = as_rows(done, time.monotonic() - started, torch.device(options.device))
    print(f"none wrong:\n{tables.table_of_rows(made)}")
    rows.record(made, GROUP, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
