"""Sees every operation of a step, forward and backward, and decides which of them made something bad."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from gradstat.monitor.replay import frames
from gradstat.monitor.replay.culprit import Culprit
from gradstat.monitor.replay.module_tracker import ModuleTracker, current_node
from gradstat.monitor.replay.operator_call import Argument, Call, is_leaf_node, node_name, overlap
from gradstat.monitor.replay.taint import (
    Origin,
    Taint,
    finite,
    first,
    has_nan,
    is_bad,
    kind_of,
    looks_like_mask,
    report_of,
)

_PLAIN = (Tensor, Parameter)


class NonfiniteMode(TorchDispatchMode):
    """A mode to run a step under; the origins of what is bad are in `taint` afterwards.

    Attributes:
        origins: All there were, in order.
        reached: Origins of what is bad where a step ends, in the order of time: losses that a backward pass began from,
            and gradients when they were complete.
        backward_ran: Whether there was one.
    """

    def __init__(self, modules: ModuleTracker, names: dict[int, str], before_write: Callable[[Tensor], None]) -> None:
        """``names`` are those of parameters by their ``id``; ``before_write`` is told what is about to change."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.taint = Taint()
        self.origins: list[Origin] = []
        self.reached: list[Origin] = []
        self.backward_ran = False
        self.modules = modules
        self.names = names
        self.on_node: Callable[[Any | None], None] = lambda node: None
        self.accumulates_into: Callable[[Any, list[Tensor]], tuple[Any] | None] = lambda node, tensors: None
        self._before_write = before_write
        self._local = threading.local()

    # What hooks use ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What this thread does inside is not part of the step."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            yield

    @contextlib.contextmanager
    def in_hook_on(self, name: str) -> Iterator[None]:
        """A hook of the parameter ``name`` runs on this thread."""
        self._local.hook_on = name
        try:
            yield
        finally:
            self._local.hook_on = None

    def is_new(self, tensor: Tensor | None) -> bool:
        """Whether ``tensor`` is bad, and no operation was seen to make it so."""
        return tensor is not None and is_bad(tensor) and first(self.taint.of(tensor)) is None

    def add(self, tensor: Tensor, culprit: Culprit, intended: bool = False, unwritten: bool = False) -> Origin:
        """A new origin, of the values in ``tensor``."""
        origin = Origin(len(self.origins), culprit, intended, unwritten)
        self.origins.append(origin)
        self.taint.add(tensor, origin)
        return origin

    def origin_of(self, tensor: Tensor) -> Origin:
        """The origin of what is bad in ``tensor``; if no operation made it, it came from outside."""
        origin = first(self.taint.of(tensor))
        if origin is None:
            here = self._here(Call(torch.ops.aten.detach.default, (tensor,), {}))
            phase = here["phase"] if here["phase"] == "hook" else "input"
            here.update(phase=phase, op=None, output=report_of({"tensor": tensor}))
            kind = kind_of(tensor)
            # ``scores[mask] = inf`` makes a tensor of the number where no operation shows.
            number = tensor.dim() == 0 and kind == "inf"
            origin = self.add(tensor, Culprit(kind, **here), intended=number or looks_like_mask(tensor))
        origin.settle(tensor)
        return origin

    # The operations ---------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a wrapper unwraps itself, and what it does then comes by here
        kwargs = kwargs or {}
        call = Call(func, args, kwargs)
        for argument in call.arguments:
            if argument.written:
                self._before_write(argument.tensor)
        node = current_node()
        self.on_node(node)
        if node is not None:
            self.backward_ran = True
        elif call.name == "ones_like" and _starts_backward():
            self._note_root(args[0])
        before = [self._as_before(argument) for argument in call.arguments if argument.read]
        result = func(*args, **kwargs)
        if not call.is_view:
            self._judge(call, before, result)
        return result

    def _note_root(self, tensor: Tensor) -> None:
        self.backward_ran = True
        if is_bad(tensor):
            self.reached.append(self.origin_of(tensor))

    def _as_before(self, argument: Argument) -> tuple[Argument, Tensor, list[Origin]]:
        """An argument, its values as they are now, and the origins of what is bad in them."""
        keeps = argument.written and not argument.tensor.is_sparse
        values = argument.tensor.clone() if keeps else argument.tensor
        return argument, values, list(self.taint.of(argument.tensor))

    def _judge(self, call: Call, before: list[tuple[Argument, Tensor, list[Origin]]], result: Any) -> None:
        written = {id(argument.tensor) for argument in call.arguments if argument.written}
        for tensor, is_main in call.results(result):
            if call.is_unwritten:
                if tensor.is_floating_point() or tensor.is_complex():
                    self.add(tensor, Culprit("nan", **self._here(call)), unwritten=True)
                continue
            bad = is_bad(tensor)
            origin = self._decide(call, before, tensor, is_main) if bad else None
            if id(tensor) in written:
                self.taint.clear(tensor)
            if origin is not None:
                self.taint.add(tensor, origin)

    def _decide(
        self, call: Call, before: list[tuple[Argument, Tensor, list[Origin]]], result: Tensor, is_main: bool
    ) -> Origin:
        """The origin of what is bad in ``result``: that of something bad that went in, or the call itself."""
        nan = has_nan(result)
        if call.is_constant:
            return self._made_by(call, [], result, intended=not nan)
        explained = torch.zeros((), dtype=torch.bool, device=result.device)
        inherited = []
        for argument, values, origins in before:
            if not is_bad(values):
                continue
            source = first(origins) or self.origin_of(argument.tensor)
            source.settle(values)
            at = overlap(call, argument.name, values, result) if call.is_pointwise else None
            if at is None:
                inherited.append(source)
                explained = torch.ones_like(explained)
            elif bool(at.any()):
                inherited.append(source)
                explained = explained | at
        origin = first(inherited)
        if origin is not None and not origin.intended:
            return origin
        if not nan and (call.has_infinite_number or not is_main):
            return origin or self._made_by(call, before, result, intended=True)
        # Infinities that someone wrote may be passed on; to make NaN of them, or others beside them, is a fault.
        if origin is not None and not nan and bool((explained | finite(result)).all()):
            return origin
        return self._made_by(call, before, result)

    def _made_by(
        self,
        call: Call,
        before: list[tuple[Argument, Tensor, list[Origin]]],
        result: Tensor,
        intended: bool = False,
    ) -> Origin:
        inputs = report_of({argument.name: values for argument, values, _ in before})
        output = report_of({"output": result})
        culprit = Culprit(kind_of(result), inputs=inputs, output=output, **self._here(call))
        return self.add(result, culprit, intended=intended)

    # Where we are -----------------------------------------------------------------------------------------

    def _here(self, call: Call) -> dict[str, Any]:
        """Phase, module, operation, place and name: what a `Culprit` tells besides numbers."""
        lines = frames.running()
        node = current_node()
        here: dict[str, Any] = {"op": call.readable_name, "module": self.modules.current(), "phase": "forward"}
        if node is None:
            return {**here, **frames.users(lines).fields()}
        inside = [line for line in frames.below_engine(lines) if not frames.is_machinery(line)]
        if not inside:
            return self._in_node(node, [argument.tensor for argument in call.arguments])
        place = frames.users(lines)
        if here["module"] is None:
            here["module"] = self.owner_of(node)
        if not any(line.is_users for line in inside):
            place = frames.of_node(node)
        if frames.is_recomputation(inside):
            return {**here, **place.fields()}
        if frames.is_torch(inside[-1], "autograd", "function.py"):
            return {**here, "phase": "backward", **place.fields()}
        name = getattr(self._local, "hook_on", None)
        return {**here, "phase": "hook", "name": name, **place.fields()}

    def _in_node(self, node: Any, tensors: list[Tensor]) -> dict[str, Any]:
        """Inside of the engine and of torch's own derivatives."""
        # A node that is done still counts as the current one while the engine adds its results to others.
        target = (node,) if is_leaf_node(node) else self.accumulates_into(node, tensors)
        if target is None:
            return self.at_node(node)
        (node,) = target
        here: dict[str, Any] = {"phase": "accumulation", "op": "add"}
        if is_leaf_node(node):
            name = self.names.get(id(node.variable))
            place = frames.users(frames.running())
            return {**here, "name": name, "module": self.owner_of(node), **place.fields()}
        return {**here, "module": self.owner_of(node), **frames.of_node(node).fields()}

    def at_node(self, node: Any) -> dict[str, Any]:
        """The derivative that ``node`` is."""
        place = frames.of_node(node).fields()
        return {"phase": "backward", "op": node_name(node), "module": self.modules.maker_of(node), **place}

    def owner_of(self, node: Any) -> str | None:
        """The module that made a node, or holds the parameter that it accumulates into."""
        if is_leaf_node(node):
            name = self.names.get(id(node.variable))
            return None if name is None else name.rpartition(".")[0]
        return self.modules.maker_of(node)


def _starts_backward() -> bool:
    """Whether torch makes the ones that a backward pass begins with."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name == "_make_grads":
            return True
        frame = frame.f_back
    return False
