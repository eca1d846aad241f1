"""A progress bar where there is a terminal and tqdm, plain lines where not."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Counts steps towards ``total`` on stderr; a context manager."""

    def __init__(self, total: int, what: str) -> None:
        self.total = total
        self._what = what
        self._count = 0
        self._said = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                print(f"{what} (pip install 'gradstat[bench]' for a progress bar)", file=sys.stderr)
            else:
                self._bar = tqdm(total=total, desc=what, unit="round", dynamic_ncols=True, leave=False)

    def describe(self, what: str) -> None:
        """Says what is being done now."""
        self._what = what
        if self._bar is not None:
            self._bar.set_description(what)

    def advance(self) -> None:
        """One step is done."""
        self._count += 1
        if self._bar is not None:
            self._bar.update()
        elif time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            print(f"{self._what}: {self._count} of {self.total}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
