"""`MonitorOptions`: settings of a monitor that are seldom changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gradstat._core.backends import known_name
from gradstat._core.tensors import ExtraGroups
from gradstat._core.text import expect


@dataclass(frozen=True, kw_only=True)
class MonitorOptions:
    """Settings of a `gradstat.Monitor` that are rarely changed, passed as ``options``, or as a mapping of some of them.

    Attributes:
        history: How many steps are kept for `Monitor.recording`.
        max_bytes: Memory limit of the history; fewer steps are kept if needed.
        lag: On a GPU the numbers of a step are read this many steps later, when their copy has finished. 0 reads them
            at once, with a host sync in every step. On the CPU nothing is copied and they are always read at once.
        review_every: Maximum number of healthy steps between two reviews. Before step 4,096 they are more frequent: at
            least every sixteenth of the run or every 64 steps.
        rollback_every: For ``"rollback"``, the number of steps between two copies of the state to host memory. It is
            larger if the numbers of a step are read later than that.
        ignore_index: A label value that marks positions without a label.
        backend: As in `gradstat.check`.
        extra_groups: As in `gradstat.check`, but in lists, not iterators, since every step reads them. Norms and counts
            are then those of all ranks, while findings about single tensors stay on their ranks.

    Raises:
        ValueError: A number is not an integer, or too small, or the backend is not known.
    """

    history: int = 1000
    max_bytes: int = 256 * 2**20
    lag: int = 1
    review_every: int = 256
    rollback_every: int = 100
    ignore_index: int = -100
    backend: str | None = None
    extra_groups: ExtraGroups | None = None

    def __post_init__(self) -> None:
        for name, least in (("history", 0), ("max_bytes", 0), ("lag", 0), ("review_every", 1), ("rollback_every", 1)):
            number = getattr(self, name)
            if type(number) is not int or number < least:
                raise ValueError(f"{name} is {number!r}; expected a whole number of at least {least}")
        known_name(self.backend)  # an unknown name raises here, not in a step

    @classmethod
    def of(cls, options: MonitorOptions | Mapping[str, Any] | None) -> MonitorOptions:
        """The given options, with defaults for all others.

        Raises:
            TypeError: ``options`` is neither options nor a mapping.
            ValueError: A name is not known, or a number is not an integer, or too small.
        """
        if isinstance(options, MonitorOptions):
            return options
        expect("options", options, Mapping | None, "MonitorOptions or a mapping")
        known = [field.name for field in fields(cls)]
        for name in options or ():
            if name not in known:
                raise ValueError(f"options: unknown name {name!r}; known: {', '.join(known)}")
        return cls(**(options or {}))
