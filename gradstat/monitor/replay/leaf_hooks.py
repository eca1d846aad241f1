"""Hooks on parameters, around those of the user, while a step is run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from gradstat.monitor.replay import frames
from gradstat.monitor.replay.nonfinite_mode import NonfiniteMode
from gradstat.monitor.replay.taint import first, is_nonfinite, report_of


class LeafHooks:
    """Hooks on parameters, around those of the user: find nonfinite values in complete gradients, and their origins."""

    def __init__(self, watch: NonfiniteMode, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._watch = watch
        self._parameters = [(name, p) for name, p in parameters if p.requires_grad and p.is_leaf]
        self._added = contextlib.ExitStack()
        self.detach = self._added.close
        for name, parameter in self._parameters:
            self._wrap(parameter._backward_hooks, name, lambda argument, result: argument if result is None else result)
            self._wrap(parameter._post_accumulate_grad_hooks, name, lambda argument, result: argument.grad)
            self._added.callback(parameter.register_hook(partial(self._check, name)).remove)
            look = parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._check(name, p.grad))
            self._added.callback(look.remove)

    def _wrap(self, hooks: Any, name: str, gradient_of: Callable[[Any, Any], Tensor | None]) -> None:
        for key, hook in list((hooks or {}).items()):
            hooks[key] = partial(self._run, hook, name, gradient_of)
            self._added.callback(_put_back, hooks, key, hook)

    def _run(self, hook: Any, name: str, gradient_of: Callable[[Any, Any], Tensor | None], argument: Any) -> Any:
        """Runs a hook of the user, and attributes what is not finite in its result to it, if that is new."""
        with self._watch.in_hook_on(name):
            result = hook(argument)
        with self._watch.paused():
            gradient = gradient_of(argument, result)
            if gradient is not None and self._watch.is_new(gradient):
                code = getattr(getattr(hook, "__func__", hook), "__code__", None)
                first_line = [frames.Line(code.co_filename, code.co_firstlineno, code.co_name)] if code else []
                was_written = gradient is argument or argument.grad is gradient
                here: dict[str, Any] = {"phase": "hook", "module": name.rpartition(".")[0], "name": name}
                inputs = None if was_written else report_of({"gradient": argument})
                self._watch.add(gradient, called="gradient", inputs=inputs, **here, **frames.culprit_fields(first_line))
        return result

    def check_gradients(self) -> None:
        """Checks all gradients, for those that no hook was called with."""
        for name, parameter in self._parameters:
            self._check(name, parameter.grad)

    def _check(self, name: str, gradient: Tensor | None) -> None:
        with self._watch.paused():
            if gradient is None or not is_nonfinite(gradient):
                return
            origin = first(self._watch.taint.of(gradient))
            if origin is None:
                module = name.rpartition(".")[0]
                origin = self._watch.add(gradient, called="gradient", phase="backward", module=module, name=name)
            origin.complete(gradient)
            self._watch.reached.append(origin)


def _put_back(hooks: dict[int, Any], key: int, hook: Any) -> None:
    if key in hooks:  # otherwise the step has removed it
        hooks[key] = hook
