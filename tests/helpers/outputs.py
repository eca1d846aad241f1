"""The probe of outputs by itself, without a monitor: what it notes of the passes of any module."""

from types import SimpleNamespace
from typing import Any

from torch import nn

from gradstat.monitor.probes.base import Pending
from gradstat.monitor.probes.outputs import Outputs
from gradstat.recording.kinds import DEFAULT_WATCH
from gradstat.rules.output_facts import OutputFacts


class SeenOutputs:
    """Looks at the outputs of ``model`` from now on."""

    def __init__(self, model: nn.Module) -> None:
        run: Any = SimpleNamespace(model=model, settings=SimpleNamespace(periods=DEFAULT_WATCH, asked={}), leaves={})
        self._probe = Outputs(run)

    def take(self) -> OutputFacts | None:
        """The facts of the last pass since the last call."""
        step, nothing = Pending(0, [], [], {}, False, [], {}), None
        assert self._probe.take(step, nothing) is None
        return step.late["outputs"]() if step.late else None
