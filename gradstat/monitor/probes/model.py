"""What is known of a model without measuring it: whom nobody trains, its settings, the backward order."""

from __future__ import annotations

import itertools
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd as _Dropout

from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_distributed, is_uninitialized
from gradstat.monitor.probes.base import Pending, Probe, Run
from gradstat.monitor.probes.graph import LossGraph
from gradstat.monitor.probes.optimizer import ids_of_all
from gradstat.rules.base import numbered

# Modules whose weights multiply what they get, unlike an embedding's, which may have any size.
_LAYERS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, _ConvNd)
# When parameters in the graph of the first loss have got updates, if anybody trains them.
_LOOK = 16


class ModelFacts(Probe):
    """Observes what the graph of the first loss says, and whose weights are a layer's.

    Among it is whom nobody trains: parameters in the graph of the first loss or the first outputs that have got
    gradients and no update since, and are neither watched nor in a watched optimizer. One that is not watched may train
    them, as for the discriminator of a GAN, but then they have changed.

    Attributes:
        in_float16: The names of parameters of another dtype whose gradients are computed in float16, by autocast.
        positive: By name, parameters of which only positive values make sense, and what the loss takes of them.
        loss_is_sum: Whether the loss has several terms, of which some may be detached.
        loss_has_no_sign: Whether the loss is, up to a factor, of numbers that are never negative.
    """

    early = frozenset([0, _LOOK])

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.period = run.settings.periods["parameters"]
        self.in_float16: tuple[str, ...] = ()
        self.positive: dict[str, str] = {}
        self.loss_is_sum = self.loss_has_no_sign = False
        self._graph: LossGraph | None = None  # until it was observed

    def saw_loss(self, losses: list[Tensor]) -> None:
        """Looks at the graph of the first loss, which is that of ``losses`` together."""
        self._graph = LossGraph.of(losses)
        self.run.leaves["loss"], self.loss_is_sum = self._graph.leaves, self._graph.is_sum
        self.loss_has_no_sign = self._graph.has_no_sign

    def begin(self, step: Pending, named: NamedParameters) -> None:
        layers = {id(p) for one in self.run.model.modules() if isinstance(one, _LAYERS) for p in one.parameters(False)}
        pairs = zip(named.names(), named.parameters, strict=True)
        step.observe("layers", [name for name, parameter in pairs if id(parameter) in layers])

    def take(self, step: Pending, named: NamedParameters) -> None:
        if self.run.leaves.get("loss"):
            half = {id(leaf()) for leaf, _, dtype in self.run.leaves["loss"] if dtype is torch.float16}
            pairs = zip(named.names(), named.parameters, strict=True)
            self.in_float16 = tuple(name for name, p in pairs if id(p) in half and p.dtype is not torch.float16)
        if self._graph is not None:
            positive = {id(leaf()): words for leaf, words in self._graph.positive}
            pairs = zip(named.names(), named.parameters, strict=True)
            self.positive = {name: positive[id(p)] for name, p in pairs if id(p) in positive}
            if self._graph.activated is not None:
                step.observe("activated", self._graph.activated)
            step.observe("idle", self._idle(named))
            self._graph = None
        if step.step == _LOOK:
            leaves = [leaf for graph in self.run.leaves.values() for leaf in graph]
            self.run.leaves.update({key: [] for key in self.run.leaves})  # looks at no other graph
            if named.engine is None and not is_distributed(named.parameters):
                watched = ids_of_all().union(map(id, named.parameters))
                alive = {id(leaf): (leaf, version) for found, version, _ in leaves if (leaf := found()) is not None}
                shapes = [
                    leaf.shape
                    for key, (leaf, version) in alive.items()
                    if key not in watched and leaf._version == version and leaf.grad is not None
                ]
                step.observe("untrained", shapes)

    def _idle(self, named: NamedParameters) -> list[str]:
        """The parameters of outputs that the first loss does not depend on, though it does on others of their kind.

        Two outputs are of a kind if they are computed from the same parameters, but for some of the same shapes whose
        names differ only in numbers: as those of several tasks are, unlike those of layers behind each other. Where
        more outputs are idle than not, the program chooses.
        """
        names = dict(zip(map(id, named.parameters), named.names(), strict=True))
        shapes = {name: parameter.shape for name, parameter in zip(named.names(), named.parameters, strict=True)}
        by_graph = {
            key: {names[id(leaf())] for leaf, *_ in leaves if id(leaf()) in names}
            for key, leaves in self.run.leaves.items()
        }
        of_loss = by_graph.pop("loss", set())

        def kinds(of: set[str]) -> frozenset[tuple[object, int]]:
            return frozenset(Counter((numbered(name)[0], shapes[name]) for name in of).items())

        used, idle = Counter[object](), dict[frozenset[str], object]()
        for one, other in itertools.permutations({frozenset(of): of for of in by_graph.values()}.values(), 2):
            rest, twins = one - of_loss, other - one
            if rest and one - rest == one & other and twins <= of_loss and kinds(rest) == kinds(twins):
                idle[frozenset(rest)] = kinds(rest)
                used[frozenset(rest)] += 1
        counts = Counter(idle.values())
        return sorted({name for rest, kind in idle.items() if counts[kind] <= used[rest] for name in rest})


_DROPOUTS = ("dropout", "attention_dropout", "dropout_p", "dropout_prob", "drop_prob")  # numbers of modules


def settings_of(model: nn.Module) -> dict[str, float]:
    """What modules are set to, by name: the largest dropout of each in training mode, and counts of what trains.

    If no module is in training mode, the number of those that behave differently in eval mode is there as well.
    """
    settings, are_training, trained, idle = dict[str, float](), 0, 0, 0
    for name, module in model.named_modules():
        held = vars(module)  # not getattr, which may run code of the module
        trained += sum(p is not None and p.requires_grad for p in module._parameters.values())
        shares = [held.get(key) for key in (("p",) if isinstance(module, _Dropout) else _DROPOUTS)]
        shares = [share for share in shares if isinstance(share, float) and 0 <= share <= 1]
        if not module.training:
            idle += isinstance(module, _BatchNorm) or any(shares)
            continue
        are_training += 1
        if shares:
            settings[f"dropout of {name or 'the model'}"] = max(shares)
    settings |= {"number of idle modules": idle} if idle and not are_training else {}
    return settings | {"number of modules in training mode": are_training, "number of parameters that train": trained}


class BackwardOrder(Probe):
    """Listens to the first step, and again to the next while some parameters have no shape and so cannot have hooks.

    Attributes:
        names: The parameters, by when the gradient of each was first complete.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.period = 0
        self.names: tuple[str, ...] = ()
        self._listen(run.trained.named_parameters())

    def _listen(self, named: NamedParameters) -> None:
        self._noted: list[str] = []
        noted = self._noted  # no reference to self, nor to a parameter, from a parameter's hook
        self._is_partial = any(map(is_uninitialized, named.parameters))
        try:
            for name, parameter in zip(named.names(), named.parameters, strict=True):
                if parameter.requires_grad and parameter.is_leaf and not is_uninitialized(parameter):
                    hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: _note(noted, name))
                    self.handles.append(hook)
        except BaseException:
            self.stop()
            raise

    def is_due(self, step: int) -> bool:
        return bool(self.handles) or self._is_partial

    def take(self, step: Pending, named: NamedParameters) -> None:
        if self.is_due(step.step):
            is_partial = self._is_partial
            self.stop()
            self.names = tuple(dict.fromkeys(self._noted))
            if is_partial:
                self._listen(named)

    def stop(self) -> None:
        """Listens to no further step."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._is_partial = False


def _note(noted: list[str], name: str) -> None:
    if len(noted) < 1_000_000:  # a model may never reach its first step
        noted.append(name)
