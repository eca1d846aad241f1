"""What the Lightning callback is made of: the framework's base class, and a part of a module for each optimizer."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradstat.integrations._lightning_checks import require_version

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


class Part(nn.Module):
    """The parameters of one optimizer, under the names that they have in the whole module."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in module.named_parameters():
            if id(parameter) in own:
                self._parameters[name] = parameter  # register_parameter refuses the dots
