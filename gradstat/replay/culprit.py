"""`Culprit`: the first place that produced a NaN or Inf, found by running a step again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gradstat._core.text import count_of, plain_fields, printable
from gradstat.report import Report, nonfinite_words
from gradstat.tensor_stats import TensorStats

Phase = Literal["forward", "backward", "accumulation", "hook", "input", "parameter"]


@dataclass(frozen=True)
class Culprit:
    """The first place that produced a NaN or Inf which reached the gradients or the loss.

    Attributes:
        kind: ``"nan"`` or ``"inf"``: what was produced; ``"nan"`` if both.
        phase: ``"forward"`` and ``"backward"``: an operation of that pass. ``"accumulation"``: the sum of gradients.
            ``"hook"``: a hook on a tensor or module. ``"input"``: an input of the step. ``"parameter"``: a parameter or
            buffer that was not finite before the step began.
        module: Dotted name of the innermost module, ``""`` for the model itself, None outside of any.
        op: The operation, such as ``"log"``. In the backward pass, the operation whose derivative it was; or None.
        source: ``"path/file.py:line"`` of the user's code, ``"In[5]:line"`` of a notebook's: in the forward pass the
            innermost line outside of torch, in the backward pass the line of the forward pass whose derivative it was,
            or the line in the user's own backward or hook. None if there is none.
        line: The text of that line; empty if it cannot be read.
        name: Name of the parameter, buffer, part of the batch, or parameter whose gradient was computed; else None.
        inputs: Statistics of the inputs before the operation; None if no input can be measured.
        others: The inputs without statistics, in words: integers, booleans and empty tensors.
        output: Statistics of the output.
        stack: The user's lines that led there, outermost first, each ``"path/file.py:line in function: text"``.
        also: For ``"parameter"``, how many other parameters and buffers were not finite before the step began.
    """

    kind: Literal["nan", "inf"]
    phase: Phase
    module: str | None = None
    op: str | None = None
    source: str | None = None
    line: str = ""
    name: str | None = None
    inputs: Report | None = None
    output: Report | None = None
    stack: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    also: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values; a report as the list of its tensors."""
        values = plain_fields(self)
        for key in ("inputs", "output"):
            values[key] = values[key] and values[key]["tensors"]
        return values

    def _headline(self) -> str:
        what = {"nan": "NaN", "inf": "Inf"}[self.kind]
        op = self.op or "an operation"
        module = f" in module {self.module!r}" if self.module else " in the model itself" if self.module == "" else ""
        of_parameter = "" if self.name is None else f" of {self.name!r}"
        others = f" and in {self.also:,} other{'s' * (self.also > 1)}" if self.also else ""
        sentences = {
            "input": f"was already in an input of the step: {printable(self.name or 'a tensor made before the step')}",
            "parameter": f"was in the parameter or buffer {self.name!r}{others} before the step began",
            "hook": f"was first produced by a hook{of_parameter}{module}",
            "accumulation": f"was first produced when gradients{of_parameter} were accumulated{module}",
            "backward": f"was first produced in the backward pass, by the derivative of {op}{module}",
            "forward": f"was first produced in the forward pass, by {op}{module}",
        }
        return f"{what} {sentences[self.phase]}"

    def __str__(self) -> str:
        lines = [self._headline()]
        if self.source is not None:
            lines.append(f"  at {self.source}")
            if self.line:
                lines.append(f"      {self.line}")
        inputs, results = ([] if report is None else [*map(_words, report)] for report in (self.inputs, self.output))
        role = "derivative's input" if self.phase == "backward" else "input"
        lines += [f"  {role} {i}: {words}" for i, words in enumerate([*inputs, *self.others], 1)]
        lines += [f"  result: {words}" for words in results]
        if self.also:
            lines.append(
                "  An optimizer step has spread it further: load an earlier checkpoint, and replay before the step"
            )
        if self.op == "empty":
            lines.append(
                "  Its memory came from torch.empty and was not written, or by a kernel that torch does not see."
            )
        if len(self.stack) > 1:
            lines += ["  called from, outermost first:", *(f"    {frame}" for frame in self.stack[:-1])]
        return "\n".join(lines)


_NAMELESS = ("self", "other", "output")  # what torch calls the operands and the result of most operations


def _words(stats: TensorStats) -> str:
    """A tensor in one line: what is not finite in it, or its range."""
    shape = "x".join(map(str, stats.shape)) or "scalar"
    name = "" if stats.name in _NAMELESS else f"{printable(stats.name)}, "
    what = f"{name}{shape} {str(stats.dtype).removeprefix('torch.')}"
    finite = "no finite element" if not stats.finite_values else f"{stats.min + 0.0:.4g} to {stats.max + 0.0:.4g}"
    zeros = f", {count_of(stats.zero_count, 'zero')}" if stats.zero_count else ""
    if stats.ok:
        return f"{what}: {finite}{zeros}, all finite"
    words = f"{what}: {nonfinite_words(stats)}"
    return f"{words}; the rest {finite}{zeros}" if stats.finite_values else words
