"""Numbers that are in transit for a step, as those of a GPU, whose readers do not wait for them."""

import pytest
from torch import Tensor

from gradstat._core.host_copy import HostCopy, HostRows


class Travelling(HostCopy):
    """A copy that has to be waited for."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.needs_copy = True


def numbers_travel(patch: pytest.MonkeyPatch) -> None:
    """Pretends that what monitors measure, and votes of ranks, are in transit."""
    patch.setattr(HostRows, "needs_copy", True)
    patch.setattr("gradstat.monitor.ranks.HostCopy", Travelling)
