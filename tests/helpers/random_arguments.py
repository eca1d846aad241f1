"""Random arguments of the operators that decide about a step: most are wrong.

A program, so that a crash ends no test; its arguments are ``decide_clip_`` or ``guard_``, and a count.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import gradstat

NUMBERS = (0.0, 1.0, 2.0, 0.5, 3.0, 50.0, -1.0, -7.0, 1e6, -1e9, 1e300, -1e300, 2.0**53, 2.0**63, 5e-324)
NUMBERS += (math.nan, math.inf, -math.inf)
WHOLE = (0, 1, 2, 3, 7, -1, -7, 64, 2**31, 2**48, 2**48 + 1, 2**62, 2**63 - 1, -(2**63), 2**64 // 3 + 1)
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool)
AROUND = 64  # elements of memory on both sides of a tensor, which nothing may write


class Drawn:
    """Draws arguments, each wrong with the probability ``wrong``."""

    def __init__(self, source: random.Random) -> None:
        self.source, self.wrong = source, source.choice((0.0, 0.05, 0.3))
        self._memory: list[tuple[Tensor, int, int]] = []

    def is_wrong(self) -> bool:
        return self.source.random() < self.wrong

    def number(self) -> float:
        return self.source.choice(NUMBERS) if self.is_wrong() else self.source.choice((0.0, 0.9, 1.0, 2.5, 25.0, 95.0))

    def numbers(self, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """A tensor of ``count`` small counts inside a larger memory, or something else."""
        if self.is_wrong():
            dtype = self.source.choice(DTYPES)
        if self.is_wrong():
            count = max(count + self.source.choice((-1, 1, 5, -count)), 0)
        count = count if 0 <= count < 10_000 else self.source.randrange(40)
        memory = torch.full((count + 2 * AROUND,), 77).to(dtype)
        inside = memory[AROUND : AROUND + count]
        inside.copy_(torch.tensor([float(self.source.randrange(9)) for _ in range(count)]).to(dtype))
        for i in range(count):
            if self.is_wrong():
                inside[i] = self.source.choice(NUMBERS if dtype.is_floating_point else (0, 1))
        self._memory.append((memory, AROUND, AROUND + count))
        if self.is_wrong():
            return self.source.choice(
                (
                    lambda: inside.to("meta"),
                    lambda: inside[::2],
                    lambda: inside[:1].expand(count),
                    lambda: inside.clone().to_sparse(),
                    lambda: torch._efficientzerotensor((count,), dtype=dtype),
                    lambda: without_memory(inside.clone()),
                    lambda: inside.view(torch.uint8)[: count // 2] if count else inside,
                    lambda: torch.empty(2**60, 0, dtype=dtype),
                    lambda: torch.zeros(1, 1, dtype=dtype).expand(2**59, 10),
                )
            )()
        return inside

    def maybe(self, make: Callable[[], Tensor]) -> Tensor | None:
        return make() if self.source.random() < 0.5 else None

    def window(self) -> int:
        return self.source.choice(WHOLE) if self.is_wrong() else self.source.choice((1, 2, 8, 9, 33))

    def assert_nothing_beside_was_written(self) -> None:
        for memory, start, end in self._memory:
            expected = torch.tensor(77).to(memory.dtype)
            beside = torch.cat([memory[:start], memory[end:]])
            assert (beside.view(torch.uint8) == expected.expand_as(beside).contiguous().view(torch.uint8)).all()


def without_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def decide_clip_(drawn: Drawn) -> object:
    source, window = drawn.source, drawn.window()
    rule = source.choice(WHOLE) if drawn.is_wrong() else source.randrange(5)
    rows, columns = source.choice((0, 1, 2, 5)), 10 + (source.choice((-1, 1)) if drawn.is_wrong() else 0)
    own = {2: 2, 3: rows}.get(rule, 0)
    measured = drawn.numbers(rows * columns) if rule in (3, 4) or source.random() < 0.3 else drawn.numbers(1)
    if measured.numel() == rows * columns and rows != 1:
        measured = measured.reshape(rows, columns)
    wants_weights = (rule == 4) != drawn.is_wrong()
    return torch.ops.gradstat.decide_clip_(
        max(min(rule, 2**63 - 1), -(2**63)),
        [drawn.number() for _ in range(source.choice((0, 7)) if drawn.is_wrong() else 5)],
        drawn.numbers(6 + window + own),
        window,
        measured,
        drawn.numbers(rows * 10) if wants_weights else None,
        drawn.maybe(lambda: drawn.numbers(1, torch.float32)),
        drawn.maybe(lambda: drawn.numbers(1, torch.float32)),
    )


def guard_(drawn: Drawn) -> object:
    source, window = drawn.source, drawn.window()
    options = [source.choice((0.0, 1.0)), *(drawn.number() for _ in range(6 + drawn.is_wrong()))]
    value = source.choice((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn))
    return torch.ops.gradstat.guard_(
        options,
        drawn.numbers(9 + 2 * window),
        window,
        drawn.numbers(2),
        drawn.numbers(3, torch.float32),
        drawn.maybe(lambda: drawn.numbers(1, value)),
        drawn.maybe(lambda: drawn.numbers(3, torch.int64)),
    )


def calls(operator: Callable[[Drawn], object], count: int) -> Iterator[str]:
    """Whether each call was done or refused, with an error that says why."""
    for seed in range(count):
        drawn = Drawn(random.Random(seed))
        try:
            operator(drawn)
            how = "done"
        except (RuntimeError, ValueError, TypeError, OverflowError, IndexError):
            how = "refused"
        drawn.assert_nothing_beside_was_written()
        yield how


def main() -> None:
    what, count = sys.argv[1], int(sys.argv[2])
    gradstat.backends()
    warnings.simplefilter("ignore")
    print(what, dict(Counter(calls({"decide_clip_": decide_clip_, "guard_": guard_}[what], count))))


if __name__ == "__main__":
    main()
