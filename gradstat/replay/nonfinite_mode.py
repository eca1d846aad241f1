"""Intercepts every operation and every hook of a step, and determines which of them produced NaN or Inf."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from gradstat._core.hooks import removed_with
from gradstat.replay import frames
from gradstat.replay.culprit import Culprit
from gradstat.replay.operator_call import Call, is_leaf_node, node_name
from gradstat.replay.taint import (
    Origin,
    Taint,
    finite,
    first,
    has_nan,
    is_nonfinite,
    looks_like_mask,
    nan_or_inf,
    other_in_words,
    report_of,
    stored_values,
)

_PLAIN = (Tensor, Parameter)
_current_node: Callable[[], Any | None] = torch._C._current_autograd_node
# The sequence number that the next autograd node of this thread will get.
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_NO_NUMBER = 1 << 63  # leaves and the engine's own nodes have larger ones


class ModuleTracker:
    """Tracks forward passes on every thread: the innermost module whose range has a node's number created it."""

    def __init__(self, model: Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self._local = threading.local()
        self._ranges: list[tuple[int, int, int, str]] = []
        handles: list[Any] = []
        for module in self.names:
            if isinstance(module, torch.jit.ScriptModule):
                continue
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        self.detach = removed_with(self, handles)

    @property
    def _stack(self) -> list[tuple[Module, int]]:
        stack: list[tuple[Module, int]] = self._local.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: Module, args: Any) -> None:
        self._stack.append((module, _next_node()))

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        stack = self._stack
        while stack:  # an exception may have skipped hooks of inner modules
            innermost, begin = stack.pop()
            self._ranges.append((begin, _next_node(), threading.get_ident(), self.names[innermost]))
            if innermost is module:
                break

    def current(self) -> str | None:
        """The innermost module running on this thread; None outside of the model."""
        return self.names[self._stack[-1][0]] if self._stack else None

    def creator_of(self, node: Any) -> str | None:
        """The innermost module that created ``node``; None if it was created outside of the model."""
        number = node._sequence_nr()
        if number >= _NO_NUMBER:
            return None
        # Each thread numbers its nodes separately; one that recomputes a checkpoint also runs its backward pass.
        here = threading.get_ident()
        around = [r for r in self._ranges if r[0] <= number < r[1]]
        narrowest = min(around, key=lambda r: (r[2] != here, r[1] - r[0]), default=None)
        return None if narrowest is None else narrowest[3]


class _Input(NamedTuple):
    """An input of an operation: the tensor, its values before, and the origins of its nonfinite values."""

    name: str
    tensor: Tensor
    values: Tensor
    origins: list[Origin]


class NonfiniteMode(TorchDispatchMode):
    """A dispatch mode to run a step under; afterwards `taint` has the origins of nonfinite values."""

    def __init__(self, modules: ModuleTracker, names: dict[int, str], before_write: Callable[[Tensor], None]) -> None:
        """``names`` has parameter names by ``id``; ``before_write`` is called with a tensor about to be written."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.taint = Taint()
        self.origins: list[Origin] = []
        # Origins of nonfinite results of the step: losses that a backward pass began from, and complete gradients.
        self.reached: list[Origin] = []
        self.backward_ran = False
        self.modules = modules
        self.names = names
        self._nodes: set[Any] = set()  # autograd nodes with hooks among `_handles`
        self._handles: list[Any] = []
        self.before_write = before_write
        self.local = threading.local()  # `hook_on`: the parameter whose hook runs; `done`: the node that is done

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operations of this thread inside are not observed."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            yield

    def is_new(self, tensor: Tensor | None) -> bool:
        """Whether ``tensor`` is not finite and has no known origin."""
        return tensor is not None and is_nonfinite(tensor) and first(self.taint.of(tensor)) is None

    def add(
        self, tensor: Tensor, called: str = "output", intended: bool = False, unwritten: bool = False, **fields: Any
    ) -> Origin:
        """Adds an origin of the values in ``tensor``, named ``called`` in reports; ``fields`` are `Culprit` fields."""
        if unwritten:
            culprit = Culprit("nan", **fields)
        else:
            culprit = Culprit(nan_or_inf(tensor), output=report_of({called: tensor}), **fields)
        origin = Origin(len(self.origins), culprit, intended, unwritten)
        self.origins.append(origin)
        self.taint.add(tensor, origin)
        return origin

    def origin_of(self, tensor: Tensor) -> Origin:
        """The origin of the nonfinite values in ``tensor``; if no operation produced them, they came from outside."""
        origin = first(self.taint.of(tensor))
        if origin is None:
            here = self._location(Call(torch.ops.aten.detach.default, (tensor,), {}))
            here.update(phase="hook" if here["phase"] == "hook" else "input", op=None)
            # ``scores[mask] = inf`` makes a tensor of the number without dispatching an operation.
            number = tensor.dim() == 0 and not has_nan(tensor)
            origin = self.add(tensor, called="tensor", intended=number or looks_like_mask(tensor), **here)
        origin.complete(tensor)
        return origin

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass unwraps itself; its inner operations are dispatched here
        kwargs = kwargs or {}
        call = Call(func, args, kwargs)
        for argument in call.arguments:
            if argument.written:
                self.before_write(argument.tensor)
        node = _current_node()
        self._hook_graph(node)
        # A backward pass begins with ones that torch makes.
        starts = call.name == "ones_like" and any(line.function == "_make_grads" for line in frames.running_lines()[:9])
        if node is None and starts and is_nonfinite(args[0]):
            self.reached.append(self.origin_of(args[0]))
        self.backward_ran |= starts or node is not None
        inputs = []
        for name, tensor, written, read in call.arguments:
            if read:
                values = tensor.clone() if written and not tensor.is_sparse else tensor
                inputs.append(_Input(name, tensor, values, list(self.taint.of(tensor))))
        result = func(*args, **kwargs)
        if not call.is_view:
            self._trace_results(call, inputs, result)
        return result

    def _trace_results(self, call: Call, inputs: list[_Input], result: Any) -> None:
        written = {id(argument.tensor) for argument in call.arguments if argument.written}
        for tensor, is_main in call.results(result):
            if call.is_unwritten:
                if tensor.is_floating_point() or tensor.is_complex():
                    self.add(tensor, unwritten=True, **self._location(call))
                continue
            origin = self._origin_of_result(call, inputs, tensor, is_main) if is_nonfinite(tensor) else None
            if id(tensor) in written:
                self.taint.clear(tensor)
            if origin is not None:
                self.taint.add(tensor, origin)

    def _origin_of_result(self, call: Call, inputs: list[_Input], result: Tensor, is_main: bool) -> Origin:
        """The origin of the nonfinite values in ``result``: that of a nonfinite input, or the call itself."""
        nan = has_nan(result)
        if call.is_constant:
            return self._new_origin(call, [], result, intended=not nan)
        explained = torch.zeros((), dtype=torch.bool, device=result.device)
        inherited = []
        for name, tensor, values, origins in inputs:
            if not is_nonfinite(values):
                continue
            source = first(origins) or self.origin_of(tensor)
            source.complete(values)
            at = call.nonfinite_elements_from(name, values, result)
            if bool(at.any()):
                inherited.append(source)
                explained = explained | at
        origin = first(inherited)
        if origin is not None and not origin.intended:
            return origin
        if not nan and (call.has_infinite_number or not is_main):
            return origin or self._new_origin(call, inputs, result, intended=True)
        # Intended infinities may be passed on; turning them into NaN, or producing others, is a fault.
        if origin is not None and not nan and bool((explained | finite(result)).all()):
            if origin.reduced or not call.reduces((values for _, _, values, _ in inputs), result):
                return origin
            origin = self._new_origin(call, inputs, result, intended=True)
            origin.reduced = True
            return origin
        return self._new_origin(call, inputs, result)

    def _new_origin(self, call: Call, inputs: list[_Input], result: Tensor, intended: bool = False) -> Origin:
        went_in = report_of({name: values for name, _, values, _ in inputs})
        others = (other_in_words(name, values) for name, _, values, _ in inputs)
        words = (*filter(None, others), *call.lengths)
        return self.add(result, intended=intended, inputs=went_in, others=words, **self._location(call))

    # Hooks on nodes detect what dispatch cannot: which node is done while the engine accumulates gradients, and values
    # that are not finite because a hook produced them or a kernel wrote them without torch's knowledge.

    def _hook_graph(self, node: Any | None) -> None:
        """Hooks ``node`` and its graph, if it is new; None means that no backward pass runs, and removes all hooks."""
        if node is None:
            self.forget()
            return
        todo = [node]
        while todo:
            node = todo.pop()
            if node is None or node in self._nodes or is_leaf_node(node):
                continue
            self._nodes.add(node)
            self._handles.append(node.register_prehook(partial(self._before_node, node)))
            self._handles.append(node.register_hook(partial(self._after_node, node)))
            todo += [next_node for next_node, _ in node.next_functions]

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()

    def _before_node(self, node: Any, grad_outputs: Any) -> None:
        self.local.done = None
        with self.paused():
            for gradient in filter(self.is_new, grad_outputs):
                self.add(gradient, called="gradient", **{**self._node_location(node), "phase": "hook", "op": None})

    def _after_node(self, node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        with self.paused():
            for gradient in filter(self.is_new, grad_inputs):
                inputs = {f"grad_outputs[{i}]": g for i, g in enumerate(grad_outputs) if g is not None}
                self.add(gradient, inputs=report_of(inputs), **self._node_location(node))
            edges = zip(grad_inputs, node.next_functions, strict=False)
            self.local.done = node, [(_address(g), next_node) for g, (next_node, _) in edges if g is not None]

    def _accumulates_into(self, node: Any, tensors: list[Tensor]) -> Any | None:
        """The node whose gradients are being accumulated, if ``node`` is done; None while it runs."""
        done, edges = getattr(self.local, "done", None) or (None, [])
        if done is not node:
            return None
        addresses = {_address(tensor) for tensor in tensors}
        return next((next_node for address, next_node in edges if address in addresses), node)

    def _location(self, call: Call) -> dict[str, Any]:
        """Phase, module, operation, source line and name: the fields of a `Culprit` other than statistics."""
        lines = frames.running_lines()
        node = _current_node()
        here: dict[str, Any] = {"op": call.readable_name, "module": self.modules.current(), "phase": "forward"}
        if node is None:
            return {**here, **frames.user_fields(lines)}
        inside = [line for line in frames.below_engine(lines) if not frames.is_machinery(line)]
        if not inside:
            return self._location_in_node(node, [argument.tensor for argument in call.arguments])
        place = frames.user_fields(lines)
        if here["module"] is None:
            here["module"] = self._module_of(node)
        if not any(line.is_user_code for line in inside):
            place = frames.node_fields(node)
        if frames.is_recomputation(inside):
            return {**here, **place}
        if frames.is_torch(inside[-1], "autograd", "function.py"):
            return {**here, "phase": "backward", **place}
        return {**here, "phase": "hook", "name": getattr(self.local, "hook_on", None), **place}

    def _location_in_node(self, node: Any, tensors: list[Tensor]) -> dict[str, Any]:
        """As `_location`, inside of the engine and of torch's own derivatives."""
        # A node that is done is still the current one while the engine accumulates its results.
        target = node if is_leaf_node(node) else self._accumulates_into(node, tensors)
        if target is None:
            return self._node_location(node)
        here = {"phase": "accumulation", "op": "add", "module": self._module_of(target)}
        if is_leaf_node(target):
            return {**here, "name": self.names.get(id(target.variable)), **frames.user_fields(frames.running_lines())}
        return {**here, **frames.node_fields(target)}

    def _node_location(self, node: Any) -> dict[str, Any]:
        """As `_location`, for the derivative that ``node`` computes."""
        here = {"phase": "backward", "op": node_name(node), "module": self.modules.creator_of(node)}
        return {**here, **frames.node_fields(node)}

    def _module_of(self, node: Any) -> str | None:
        """The module that created a node, or that holds the parameter it accumulates into."""
        if is_leaf_node(node):
            name = self.names.get(id(node.variable))
            return None if name is None else name.rpartition(".")[0]
        return self.modules.creator_of(node)


def _address(tensor: Tensor) -> int:
    values = stored_values(tensor)
    return 0 if values is None else values.data_ptr()


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
        self._watch.local.hook_on = name
        try:
            result = hook(argument)
        finally:
            self._watch.local.hook_on = None
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
