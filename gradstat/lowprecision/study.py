"""`LowPrecision`: what formats of eight and of four bits would do to the matrix products of each layer."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradstat._core.hooks import NOT_CALLED, Hook, hook_forward, opaque_parts, removed_with
from gradstat._core.host_copy import is_capturing, peek_interpreter_stack
from gradstat._core.text import count_of, expect, listed
from gradstat._core.warn import warn
from gradstat.lowprecision.formats import FORMATS, format_of
from gradstat.lowprecision.operands import Layer, is_operand, weight_of
from gradstat.lowprecision.page import write_page
from gradstat.lowprecision.verdicts import table_of, text_of

# A sampled step takes one layer in so many, in turn: on a CPU the statistics of all would take one to three steps.
_TURNS = 4


class LowPrecision:
    """Says for each linear layer, while it trains, what formats of eight and four bits would do to its products. ::

        study = gradstat.LowPrecision(model)
        train(model)  # unchanged, in float32 or bfloat16
        print(study)

    Hooks take the operands of a layer in sampled steps and keep only statistics. Neither the training nor its
    bits change, and no step waits for a GPU. A layer has up to three products, each of two operands: the output
    (input and weight), the gradient of the input (gradient of the output and weight), the gradient of the weight
    (gradient of the output and input, in blocks of tokens). Formats are applied along the dimension that the product
    sums over, with rounding to nearest even, to what the product takes: under autocast that is a tensor of 16 bits.

    Layers are ``torch.nn.Linear``, with its subclasses, and transformers' ``Conv1D``. Of a layer that is called several
    times in a step the first call counts. A forward pass that a checkpoint recomputes does not count twice. Steps are
    those of torch's optimizers that have parameters of the model; with another, call `step`. The first sampled step is
    the second one: by then it is known who steps, and what is compiled. A sampled step takes one layer in four, in
    turn.

    Args:
        model: The model, with or without its wrapper of DDP or FSDP, and with or without a `gradstat.Monitor`.
        formats: The names of the formats, as for `gradstat.quantization_stats`.
        every: One in so many steps is sampled.

    Attributes:
        formats, every: As given.
        steps: Number of steps that have ended.

    Raises:
        TypeError, ValueError: An argument is invalid. The message says what was expected.
    """

    def __init__(self, model: nn.Module, formats: Iterable[str] = ("mxfp8", "nvfp4"), every: int = 100) -> None:
        expect("model", model, nn.Module, "a torch.nn.Module")
        expect("formats", formats, Iterable, "names of formats")
        self.formats: tuple[str, ...] = (formats,) if isinstance(formats, str) else tuple(formats)
        if not self.formats:
            raise ValueError(f"formats is empty; expected some of {', '.join(FORMATS)}")
        if type(every) is not int or every < 1:
            raise ValueError(f"every is {every!r}; expected a number of steps of at least 1")
        self._formats = [format_of(name) for name in self.formats]
        self.every: int = every
        self.steps: int = 0
        self._model = weakref.ref(model)
        # By optimizer, its steps; None if it has no parameter of the model.
        self._steps_of: weakref.WeakKeyDictionary[Optimizer, int | None] = weakref.WeakKeyDictionary()
        self._is_sampled, self._samples = False, 0  # whether the coming step is, and how many were
        self._layers: list[str] = []  # all of the last sampled step
        self._measured: dict[str, Layer] = {}  # those called in the sampled step, so far
        self._arriving: deque[tuple[str, Layer]] = deque()
        self._sums: dict[str, dict[Any, tuple[Any, Any]]] = {}  # of `Means` by layer, behind numbers of steps
        self._handles: list[Any] = []  # of hooks in the sampled step
        self._remove_hooks = removed_with(self, self._handles)
        self._remove = removed_with(self, [register_optimizer_step_post_hook(Hook(self._stepped))])

    # Steps ------------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Removes all hooks. The study can still be printed."""
        self._remove()
        self._remove_hooks()

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Ends a step at the first of the optimizers that have parameters of the model, if there are several."""
        if optimizer not in self._steps_of:
            model = self._model()
            own = set() if model is None else set(map(id, model.parameters()))
            is_own = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            self._steps_of[optimizer] = max(self.steps - 1, 0) if is_own else None
        before = self._steps_of[optimizer]
        if before is not None:
            self._steps_of[optimizer] = before + 1
            if before == self.steps:
                self.step()

    def step(self) -> None:
        """Ends a step. To be called where no optimizer of torch's class has the model's parameters, as with DeepSpeed.

        Reads what has arrived, ends the sample of the step, and begins one if the next step is due.
        """
        while self._arriving and self._arriving[0][1].has_arrived():
            self._read(*self._arriving.popleft())
        if self._is_sampled:
            while self._handles:
                self._handles.pop().remove()
            for name, layer in self._measured.items():
                layer.send()
                self._arriving.append((name, layer))
            self._samples, self._measured = self._samples + 1, {}
        model, self._is_sampled = self._model(), self.steps % self.every == 0
        self.steps += 1
        if model is None or not self._is_sampled:
            return
        layers = [name for name, module in model.named_modules() if weight_of(module) is not None]
        opaque, self._layers = opaque_parts(model, layers or [""]), layers
        turns = max(1, min(_TURNS, len(layers)))
        for name in layers[self._samples % turns :: turns]:
            # In compiled parts a hook would only have them compiled again.
            if not any(part == "" or f"{name}.".startswith(f"{part}.") for part in opaque):
                hook = Hook(self._forward, name)
                self._handles.append(hook_forward(model.get_submodule(name), hook, with_kwargs=True, prepend=True))
        whys: Iterable[str] = ()
        if self._samples == 0:
            whys = opaque.values() if layers or opaque else ["of a model without linear layers"]
        elif self._samples == turns and not (opaque or self._sums or self._arriving):
            whys = [NOT_CALLED]
        for why in whys:
            warn(f"not watched: the matrix products {why}", UserWarning)

    # One layer in a sampled step --------------------------------------------------------------------------

    def _forward(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given: Any = args[0] if args else next(iter(kwargs.values()), None)
        weight = weight_of(module)
        # Without gradients it is an evaluation, or the first pass of a checkpoint. A transform's tensors are not kept.
        if name in self._measured or not torch.is_grad_enabled() or peek_interpreter_stack() is not None:
            return
        if weight is None or not is_operand(given) or not isinstance(output, Tensor) or is_capturing():
            return
        with torch.no_grad():
            layer = self._measured[name] = Layer(self._formats)
            layer.take_forward(module, given, weight)
        if output.requires_grad:
            output.register_hook(Hook(layer.take_gradient))
            if weight.requires_grad:
                self._handles.append(weight.register_hook(Hook(layer.take_weight_gradient)))

    # Results ----------------------------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """All numbers as plain data, the worst layer first: a mapping for each layer, format, product and operand.

        Waits for the device if numbers have not arrived.

        Returns:
            Mappings with ``layer``, ``format``, ``product``, ``operand``; ``sqnr``, the signal to quantization noise in
            dB; ``flushed`` and ``saturated``, shares of the nonzero elements; ``noise``, of the product, relative to
            its norm; ``share``, of what the noise of all layers' outputs costs; ``keep``, whether the layer is to be
            kept in bfloat16, and ``why``.
        """
        while self._arriving:
            self._read(*self._arriving.popleft())
        with np.errstate(invalid="ignore"):
            means = {
                layer: {key: total / count for key, (count, total) in sums.items() if np.any(count)}
                for layer, sums in self._sums.items()
            }
        return table_of(self.formats, means)

    def scalars(self) -> dict[str, float]:
        """Numbers for loggers, by name: ``log_scalars(writer, study.scalars(), step)``. Waits as `table`.

        ``lowprecision/nvfp4/keep/<layer>`` is 1 if the layer is to be kept, else 0, and
        ``lowprecision/nvfp4/noise/<layer>`` the largest noise of its products.
        """
        found = dict[str, float]()
        for row in self.table():
            for key in ("keep", "noise"):
                name = f"lowprecision/{row['format']}/{key}/{row['layer']}"
                found[name] = max(float(row[key]), found.get(name, 0.0))
        return found

    def write_page(self, path: str | os.PathLike[str], title: str = "Low precision") -> Path:
        """Writes an HTML page without scripts, a heat map of layers by operands with ``title``, and returns ``path``.

        Missing folders are made, an existing file is replaced atomically. OSError: the page cannot be written.
        """
        return write_page(self.formats, self.table(), str(self), path, title)

    def _read(self, name: str, layer: Layer) -> None:
        """Adds a step to the sums. What is not finite is left out, as before a scaler has found its scale."""
        sums = self._sums.setdefault(name, {})
        for key, new in layer.means().items():
            count, total = sums.get(key, (0, 0.0))
            is_known = np.isfinite(new)
            sums[key] = count + is_known, total + np.where(is_known, new, 0.0)

    def __str__(self) -> str:
        table = self.table()
        steps = count_of(self._samples, "sampled step")
        if not table:
            return f"gradstat: no finite layer was seen in {steps}; the first is the second that an optimizer takes"
        title = f"gradstat: matrix products in low precision, means of {steps}"
        unseen = [name for name in self._layers if name not in self._sums]
        turns = min(_TURNS, len(self._layers))
        is_early = self._samples < turns
        why = f"not yet measured, as a sample is of one layer in {turns}" if is_early else "not called when sampled"
        more = [f"{why}: {listed(unseen, 8)}"] if unseen else []
        return "\n".join([title, *text_of(self.formats, table), *more])
