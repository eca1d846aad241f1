"""`Contents`: what a training holds at one moment, its weights and optimizer states, by a few numbers of each."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradstat._core.saved import COUNT, TEXT, numbers, require

COLUMNS = ("numel", "eps", "tiny", "norm", "sum", "min", "max")
"""The numbers of a tensor. Two are of its dtype: the relative precision, and the smallest magnitude above 0."""

WEIGHT = "parameter"  # the kind of weights, as of their rows

_PLAIN = {"kinds": [TEXT], "names": [TEXT], "optimizer": TEXT, "rank": COUNT, "ranks": COUNT}


class Contents(NamedTuple):
    """The parameters that are trained, and what their optimizer keeps for them.

    Attributes:
        kinds: By tensor, ``"parameter"``, or the key of an optimizer state.
        names: By tensor, the parameter.
        rows: ``[n, len(COLUMNS)]``, of the finite elements.
        optimizer: The class of the optimizer; empty if there is none.
        rank, ranks: The rank whose tensors these are, and how many there are.
    """

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    rows: npt.NDArray[np.float64]
    optimizer: str = ""
    rank: int = 0
    ranks: int = 1

    def places(self) -> dict[tuple[str, str], int]:
        """The row of each tensor, by kind and name; without optimizer states that are all zero, as new ones may be.

        Names are those inside the wrappers of DDP and ``torch.compile``, so that a run may go on without them.
        """
        names = [name.replace("_orig_mod.", "") for name in self.names]
        if all(name.startswith("module.") for name in names):
            names = [name.removeprefix("module.") for name in names]
        every = zip(self.kinds, names, self.rows[:, COLUMNS.index("norm")].tolist(), strict=True)
        return {(kind, name): i for i, (kind, name, norm) in enumerate(every) if norm or kind == WEIGHT}

    def to_plain(self) -> dict[str, Any]:
        """Lists, texts and a tensor, for a state."""
        lists = {"kinds": list(self.kinds), "names": list(self.names)}
        return {**self._asdict(), **lists, "rows": torch.tensor(self.rows, device="cpu")}

    @classmethod
    def from_plain(cls, held: Any, place: str) -> Contents:
        """The inverse of `to_plain`, a copy. ValueError, which names the ``place``, for anything else."""
        require(held, _PLAIN, place)
        if len(held["kinds"]) != len(held["names"]):
            raise ValueError(f"{place}['kinds']: expected one for each of {len(held['names'])} names")
        shape = len(held["names"]), len(COLUMNS)
        require(held, {"rows": numbers(shape, "numbers", torch.isreal)}, place)
        rows = held["rows"].detach().cpu().numpy().copy()
        return cls(tuple(held["kinds"]), tuple(held["names"]), rows, held["optimizer"], held["rank"], held["ranks"])
