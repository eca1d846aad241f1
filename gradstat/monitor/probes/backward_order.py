"""`BackwardOrder`: the order in which the gradients of the first step are complete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradstat._core.hooks import removed_with
from gradstat._core.parameters import NamedParameters
from gradstat._core.tensors import is_uninitialized
from gradstat.monitor.probes.base import Part, Pending, Probe, Watched


class BackwardOrder(Probe):
    """Listens to the first step, and again to the next while some parameters have no shape and so cannot have hooks.

    Attributes:
        names: The parameters, by when the gradient of each was first complete.
    """

    def __init__(self, watched: Watched) -> None:
        self.period = 0
        self.names: tuple[str, ...] = ()
        self._listen(watched.trained.named_parameters())

    def _listen(self, named: NamedParameters) -> None:
        self._is_listening, self._is_partial = True, False
        self._noted: list[str] = []
        noted = self._noted  # no reference to self, nor to a parameter, from a parameter's hook
        handles: list[Any] = []
        self._remove = removed_with(self, handles)
        try:
            for name, parameter in zip(named.names(), named.parameters, strict=True):
                if is_uninitialized(parameter):
                    self._is_partial = True
                elif parameter.requires_grad and parameter.is_leaf:
                    hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: _note(noted, name))
                    handles.append(hook)
        except BaseException:
            self.remove()
            raise

    def is_due(self, step: int) -> bool:
        return self._is_listening

    def take(self, step: Pending, named: NamedParameters) -> Iterable[Part]:
        if self._is_listening:
            self.remove()
            self.names = tuple(dict.fromkeys(self._noted))
            if self._is_partial:
                self._listen(named)
        return ()

    def remove(self) -> None:
        self._is_listening = False
        self._remove()


def _note(noted: list[str], name: str) -> None:
    if len(noted) < 1_000_000:  # a model may never reach its first step
        noted.append(name)
