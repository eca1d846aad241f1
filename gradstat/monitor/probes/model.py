"""What is known of a model without measuring it: dropout of nearly all, and parameters that nobody trains."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd as _Dropout

from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_distributed
from gradstat.monitor.probes.base import Part, Pending, Probe, Watched
from gradstat.monitor.probes.optimizer import ids_of_all

if TYPE_CHECKING:
    from typing_extensions import Self

# When parameters in the graph of the first loss have got updates, if anybody trains them.
_LOOK = 16
# Functions in a graph that are looked at; so many take a fifth of a second.
_MOST_NODES = 100_000


class Dropped(Probe):
    """The names of modules whose dropout leaves less than a tenth: torch's, and others with a number ``dropout``."""

    watch = "parameters"
    early = frozenset([_LOOK])

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._model = watched.model

    @classmethod
    def of(cls, watched: Watched) -> Self:
        return cls(watched)

    def take(self, step: Pending, named: NamedParameters) -> Iterable[Part]:
        if step.step:  # a model may be prepared
            shares = (
                (name, module.p if isinstance(module, _Dropout) else getattr(module, "dropout", 0))
                for name, module in self._model.named_modules()
                if module.training
            )
            step.observe("dropped", [name for name, share in shares if isinstance(share, float) and 0.9 < share <= 1])
        return ()


class Untrained(Probe):
    """The shapes of parameters that have got gradients and no update since the first step, and that nobody watches.

    They are in the graph of the first loss, or of the first outputs, and neither among the watched parameters nor in a
    watched optimizer. One that is not watched may train them, as for the discriminator of a GAN, but then they have
    changed.
    """

    early = frozenset([_LOOK])

    def __init__(self, watched: Watched) -> None:
        self.period = 0
        self._leaves = watched.leaves

    def take(self, step: Pending, named: NamedParameters) -> Iterable[Part]:
        leaves = [leaf for found in self._leaves.values() for leaf in found]
        self._leaves.update(loss=[], outputs=[])  # looks at no other graph
        if named.engine is None and not is_distributed(named.parameters):
            watched = ids_of_all().union(map(id, named.parameters))
            alive = {id(leaf): (leaf, version) for reference, version in leaves if (leaf := reference()) is not None}
            shapes = [
                leaf.shape
                for key, (leaf, version) in alive.items()
                if key not in watched and leaf._version == version and leaf.grad is not None
            ]
            step.observe("untrained", shapes)
        return ()


def leaves_of(computed: Tensor) -> list[tuple[weakref.ref[Tensor], int]]:
    """The parameters that ``computed`` depends on, each with its version; walks the graph. Not FSDP's own kinds."""
    waiting, seen = [computed.grad_fn], {computed.grad_fn}
    found: list[tuple[weakref.ref[Tensor], int]] = []
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if type(leaf) is nn.Parameter and not leaf.is_inference():
            found.append((weakref.ref(leaf), leaf._version))
        for behind, _ in () if node is None else node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                waiting.append(behind)
    return found
