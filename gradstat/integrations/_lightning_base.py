"""What the Lightning callback is made of: the framework's base class, and what it does with a monitor as a whole."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradstat.adaptive import AdaptiveClip
from gradstat.automatic import Parameters
from gradstat.integrations._lightning_checks import require_version
from gradstat.integrations._policies import translated
from gradstat.monitor import Monitor
from gradstat.monitor.kinds import periods

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback_classes() -> tuple[Any, ...]:
    """The base classes of callbacks: of the packages that are imported already, else of the first there is."""
    names = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    for name in names or _PACKAGES:
        try:
            package = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
            continue
        require_version(name.partition(".")[0], package.__version__)
        if not names:
            names = [name]
            break
    if not names:
        raise ImportError(
            "gradstat.integrations.lightning needs Lightning, and neither lightning nor pytorch_lightning is "
            "installed; pip install 'gradstat[lightning]'"
        )
    return tuple(importlib.import_module(name).Callback for name in names)


class Part(Parameters):
    """The parameters of one optimizer, under the names that they have in the whole module."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        super().__init__((name, parameter) for name, parameter in module.named_parameters() if id(parameter) in own)


def try_out(max_norm: float | AdaptiveClip | None, on_anomaly: Any, options: dict[str, Any]) -> None:
    """Raises what the monitor will have against its options, before there is a model."""
    periods(options.get("watch"))
    others = {name: value for name, value in options.items() if name not in ("save_to", "watch")}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Monitor(model, optimizer, on_anomaly=translated(on_anomaly, []), max_norm=max_norm, **others).detach()


def leave(monitor: Monitor, error: BaseException | None) -> None:
    """Ends a watch, and saves its recording; whatever goes wrong with that, what ended the training is to be seen."""
    try:
        monitor.__exit__(None if error is None else type(error), error, None)
    except Exception as failure:
        warnings.warn(f"gradstat: {type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=2)
