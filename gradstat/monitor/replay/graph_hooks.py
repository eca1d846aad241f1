"""Watches a backward pass from inside: its nodes, and the hooks on parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from gradstat.monitor.replay import frames
from gradstat.monitor.replay.culprit import Culprit
from gradstat.monitor.replay.nonfinite_mode import NonfiniteMode
from gradstat.monitor.replay.operator_call import is_leaf_node
from gradstat.monitor.replay.taint import first, is_bad, kind_of, report_of, values_of


class GraphHooks:
    """Hooks on the nodes of each graph that is run backward.

    They see what no operation shows: which node is done while the engine adds gradients up, and bad values that a
    kernel has written behind torch's back or a hook has brought along.
    """

    def __init__(self, watch: NonfiniteMode) -> None:
        self._watch = watch
        self._nodes: set[Any] = set()
        self._handles: list[Any] = []
        self._local = threading.local()
        watch.on_node = self._meet
        watch.accumulates_into = self._target

    def _meet(self, node: Any | None) -> None:
        """Hooks ``node`` and all below it, if it was not met before; None is met when no backward pass runs."""
        if node is None:
            self.forget()
            return
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node in self._nodes or is_leaf_node(node):
                continue
            self._nodes.add(node)
            self._handles.append(node.register_prehook(partial(self._before, node)))
            self._handles.append(node.register_hook(partial(self._after, node)))
            todo += [next_node for next_node, _ in node.next_functions]

    def forget(self) -> None:
        """Lets go of the graphs that were run."""
        if not self._nodes:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _before(self, node: Any, grad_outputs: Any) -> None:
        self._local.done = None
        with self._watch.paused():
            for gradient in grad_outputs:
                if self._watch.is_new(gradient):
                    here = {**self._watch.at_node(node), "phase": "hook", "op": None}
                    output = report_of({"gradient": gradient})
                    self._watch.add(gradient, Culprit(kind_of(gradient), output=output, **here))

    def _after(self, node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        with self._watch.paused():
            for gradient in grad_inputs:
                if self._watch.is_new(gradient):
                    inputs = {f"grad_outputs[{i}]": g for i, g in enumerate(grad_outputs) if g is not None}
                    here = {**self._watch.at_node(node), "inputs": report_of(inputs)}
                    output = report_of({"output": gradient})
                    self._watch.add(gradient, Culprit(kind_of(gradient), output=output, **here))
            edges = zip(grad_inputs, node.next_functions, strict=False)
            self._local.done = node, [(_address(g), next_node) for g, (next_node, _) in edges if g is not None]

    def _target(self, node: Any, tensors: list[Tensor]) -> tuple[Any] | None:
        """The node whose gradients are being added up, if ``node`` is done; None while it runs."""
        done, edges = getattr(self._local, "done", None) or (None, [])
        if done is not node:
            return None
        addresses = {_address(tensor) for tensor in tensors}
        for address, next_node in edges:
            if address in addresses:
                return (next_node,)
        return (node,)


def _address(tensor: Tensor) -> int:
    values = values_of(tensor)
    return 0 if values is None else values.data_ptr()


class LeafHooks:
    """Hooks on parameters, around those of the user: what is bad in a gradient when it is complete, and who made it."""

    def __init__(self, watch: NonfiniteMode, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._watch = watch
        self._parameters = [(name, p) for name, p in parameters if p.requires_grad and p.is_leaf]
        self._handles: list[Any] = []
        self._wrapped: list[tuple[dict[int, Any], int, Any]] = []

    def attach(self) -> None:
        for name, parameter in self._parameters:
            self._wrap(parameter._backward_hooks, name, lambda given, result: given if result is None else result)
            self._wrap(parameter._post_accumulate_grad_hooks, name, lambda given, result: given.grad)
            self._handles.append(parameter.register_hook(partial(self._arrived, name)))
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for hooks, key, hook in self._wrapped:
            if key in hooks:
                hooks[key] = hook
        self._handles.clear()
        self._wrapped.clear()

    def _wrap(self, hooks: Any, name: str, gradient_of: Callable[[Any, Any], Tensor | None]) -> None:
        for key, hook in list((hooks or {}).items()):

            def wrapped(given: Any, hook: Callable[[Any], Any] = hook) -> Any:
                with self._watch.in_hook_on(name):
                    result = hook(given)
                with self._watch.paused():
                    gradient = gradient_of(given, result)
                    if gradient is not None and self._watch.is_new(gradient):
                        self._blame(
                            gradient, name, hook, None if gradient is given or given.grad is gradient else given
                        )
                return result

            self._wrapped.append((hooks, key, hook))
            hooks[key] = wrapped

    def _blame(self, gradient: Tensor, name: str, hook: Any, given: Tensor | None) -> None:
        code = getattr(getattr(hook, "__func__", hook), "__code__", None)
        place = frames.Place() if code is None else frames.Place.of_code(code)
        inputs = None if given is None else report_of({"gradient": given})
        output, module = report_of({"gradient": gradient}), name.rpartition(".")[0]
        culprit = Culprit(kind_of(gradient), "hook", module, name=name, inputs=inputs, output=output, **place.fields())
        self._watch.add(gradient, culprit)

    def _arrived(self, name: str, gradient: Tensor) -> None:
        with self._watch.paused():
            self._note(name, gradient)

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        with self._watch.paused():
            if parameter.grad is not None:
                self._note(name, parameter.grad)

    def look(self) -> None:
        """Reads what gradients there are, for those that came by no hook."""
        for name, parameter in self._parameters:
            if parameter.grad is not None:
                self._note(name, parameter.grad)

    def _note(self, name: str, gradient: Tensor) -> None:
        if not is_bad(gradient):
            return
        origin = first(self._watch.taint.of(gradient))
        if origin is None:
            output = report_of({"gradient": gradient})
            culprit = Culprit(kind_of(gradient), "backward", name.rpartition(".")[0], name=name, output=output)
            origin = self._watch.add(gradient, culprit)
        origin.settle(gradient)
        self._watch.reached.append(origin)
