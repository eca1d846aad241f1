"""Watches a backward pass from inside: its nodes, and the hooks on parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from gradstat.monitor.replay import frames
from gradstat.monitor.replay.nonfinite_mode import NonfiniteMode
from gradstat.monitor.replay.operator_call import is_leaf_node
from gradstat.monitor.replay.taint import first, is_bad, report_of, values_of


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
            for gradient in filter(self._watch.is_new, grad_outputs):
                here = {**self._watch.at_node(node), "phase": "hook", "op": None}
                self._watch.add(gradient, called="gradient", **here)

    def _after(self, node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        with self._watch.paused():
            for gradient in filter(self._watch.is_new, grad_inputs):
                inputs = {f"grad_outputs[{i}]": g for i, g in enumerate(grad_outputs) if g is not None}
                self._watch.add(gradient, inputs=report_of(inputs), **self._watch.at_node(node))
            edges = zip(grad_inputs, node.next_functions, strict=False)
            self._local.done = node, [(_address(g), next_node) for g, (next_node, _) in edges if g is not None]

    def _target(self, node: Any, tensors: list[Tensor]) -> Any | None:
        """The node whose gradients are being added up, if ``node`` is done; None while it runs."""
        done, edges = getattr(self._local, "done", None) or (None, [])
        if done is not node:
            return None
        addresses = {_address(tensor) for tensor in tensors}
        return next((next_node for address, next_node in edges if address in addresses), node)


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
            self._handles.append(parameter.register_hook(partial(self._note, name)))
            look = parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._note(name, p.grad))
            self._handles.append(look)

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
            self._wrapped.append((hooks, key, hook))
            hooks[key] = partial(self._run, hook, name, gradient_of)

    def _run(self, hook: Any, name: str, gradient_of: Callable[[Any, Any], Tensor | None], given: Any) -> Any:
        """Runs a hook of the user, and blames it for what it brings along."""
        with self._watch.in_hook_on(name):
            result = hook(given)
        with self._watch.paused():
            gradient = gradient_of(given, result)
            if gradient is not None and self._watch.is_new(gradient):
                code = getattr(getattr(hook, "__func__", hook), "__code__", None)
                first_line = [frames.Line(code.co_filename, code.co_firstlineno, code.co_name)] if code else []
                was_written = gradient is given or given.grad is gradient
                here = {"phase": "hook", "module": name.rpartition(".")[0], "name": name, **frames.told(first_line)}
                inputs = None if was_written else report_of({"gradient": given})
                self._watch.add(gradient, called="gradient", inputs=inputs, **here)
        return result

    def look(self) -> None:
        """Reads what gradients there are, for those that came by no hook."""
        for name, parameter in self._parameters:
            self._note(name, parameter.grad)

    def _note(self, name: str, gradient: Tensor | None) -> None:
        with self._watch.paused():
            if gradient is None or not is_bad(gradient):
                return
            origin = first(self._watch.taint.of(gradient))
            if origin is None:
                module = name.rpartition(".")[0]
                origin = self._watch.add(gradient, called="gradient", phase="backward", module=module, name=name)
            origin.settle(gradient)
            self._watch.reached.append(origin)
