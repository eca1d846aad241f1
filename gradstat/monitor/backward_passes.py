"""`BackwardPasses`: which backward passes add to the gradients of some parameters, heard by hooks on a few of these."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from gradstat._core.hooks import Hook
from gradstat._core.tensors import is_uninitialized

State: TypeAlias = tuple[weakref.ref[Tensor] | None, int]
"""A gradient, if there is one, and its version, which another backward pass changes."""

_Hooked: TypeAlias = tuple[weakref.ref[Tensor], Any, Any]  # a parameter and the handles of its hooks


class BackwardPasses:
    """Hears which parameters a backward pass reaches, and whether gradients were zeroed before.

    At first each parameter has hooks. Of those that a pass reaches the first and the last keep them, by which other
    such passes are heard, also after one end of the model was frozen. Gradients are read in these hooks and at the end
    of a pass that was heard, since in the threads of others autograd may be writing them.
    """

    def __init__(self, model: nn.Module, hear: Callable[..., Any]) -> None:
        """``hear``, a method that is held weakly, is called for each hook; it then calls `reach`."""
        self._model, self._hear = model, weakref.WeakMethod(hear)
        self._hooked: dict[int, _Hooked] = {}  # by id, in the order of the parameters
        self._kept: dict[int, None] = {}  # ids of those that keep their hooks
        self._before: dict[int, State] = {}  # by id: the gradients that the last pass has reached, as they were before
        self._has_heard = False  # a pass since the last `check`
        self._parameters: Sequence[Tensor] = ()
        self._flat: list[Tensor] = []
        # Some parameter, and its gradient after the last pass: a look at all would take long.
        self._followed: Callable[[], Tensor | None] = lambda: None
        self._after: State = None, 0
        weakref.finalize(self, _remove, self._hooked).atexit = False

    def hear_all(self, parameters: Sequence[Tensor]) -> None:
        """Hears the passes that reach ``parameters``, from now on."""
        self.remove()
        self._parameters, hear = parameters, self._hear()
        # FSDP 1 computes with these, which are not always parameters of the model, and puts gradients aside meanwhile.
        flat = (getattr(module, "_flat_param", None) for module in self._model.modules())
        self._flat = [one for one in flat if one is not None]
        for parameter in (*parameters, *self._flat):
            if parameter.requires_grad and parameter.is_leaf and not is_uninitialized(parameter):
                reference = weakref.ref(parameter)
                hook = Hook(hear, reference)
                # The first is called before the gradient changes. FSDP calls only the second.
                handles = parameter.register_hook(hook), parameter.register_post_accumulate_grad_hook(hook)
                self._hooked[id(parameter)] = reference, *handles

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Hears all ``parameters`` again if no pass was heard since the last call, unless that has helped nothing."""
        has_heard, self._has_heard = self._has_heard, False
        if not has_heard and (self._kept or parameters is not self._parameters):
            self.hear_all(parameters)

    def begin(self) -> None:
        """A pass has reached the first parameter."""
        self._before = {}

    def is_followed(self, parameter: Tensor) -> bool:
        """Whether it is known of ``parameter`` that gradients were zeroed."""
        return self._followed() is parameter

    def reach(self, parameter: Tensor) -> None:
        """The running pass reaches ``parameter``."""
        if id(parameter) not in self._before:
            self._before[id(parameter)] = state_of(parameter.grad)

    def end(self) -> bool | None:
        """Whether gradients were zeroed before the pass that has ended; None if it has left none."""
        reached, earlier, followed = self._before, self._after, self._followed()
        self._has_heard = True
        if self._kept.keys().isdisjoint(reached):
            keys = [key for key in self._hooked if key in reached]
            self._kept |= dict.fromkeys((*keys[:1], *keys[-1:]))
        _remove(self._hooked, reached.keys() - self._kept.keys())
        self.note()
        before = reached.get(id(followed), self._after)
        if self._after[0] is None:  # another parameter may have a gradient
            kept = (self._hooked[key][0]() for key in self._kept if key in reached)
            others = (one for one in (*kept, *self._parameters) if one is not None and one.grad is not None)
            followed = next(others, None)
            self._followed = (lambda: None) if followed is None else weakref.ref(followed)
            self.note()
        return None if self._after[0] is None else not (self._flat or is_same(before, earlier))

    def note(self) -> None:
        """Gradients are others now, though not by a backward pass."""
        followed = self._followed()
        self._after = state_of(None if followed is None else followed.grad)

    @property
    def version(self) -> int:
        """Of the followed parameter, which an optimizer changes."""
        return getattr(self._followed(), "_version", 0)

    def remove(self) -> None:
        """Removes all hooks."""
        _remove(self._hooked)
        self._kept = {}


def _remove(hooked: dict[int, _Hooked], keys: Iterable[int] | None = None) -> None:
    for key in list(hooked if keys is None else keys):
        for handle in hooked.pop(key, (None,))[1:]:
            handle.remove()


def state_of(gradient: Tensor | None) -> State:
    return (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)


def is_same(one: State, other: State) -> bool:
    """Whether both are of one gradient in one version; references are compared by identity, as tensors cannot be."""
    return one[0] is other[0] and one[1] == other[1]
