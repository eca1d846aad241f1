"""Third-party optimizers give the same bits under `gradstat.auto`, and cause no findings or warnings."""

from typing import Any

import pytest
import torch
import torch_optimizer
from torch import Tensor, nn

import gradstat

NAMES = sorted(set(torch_optimizer._NAME_OPTIM_MAP) - {"lookahead"})  # it wraps another optimizer


def trained(kind: Any, watched: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = kind(model.parameters(), lr=1e-3)
    handle = gradstat.auto(optimizer, model, on_anomaly="record") if watched else None
    for _ in range(12):
        optimizer.zero_grad()
        (model(torch.randn(16, 4)) - 1).square().mean().backward()
        optimizer.step()
    return list(model.parameters()), handle


@pytest.mark.filterwarnings("ignore:This overload of:UserWarning")  # torch's warning about these optimizers
@pytest.mark.parametrize("name", NAMES)
def test_torch_optimizer(name: str) -> None:
    alone, _ = trained(torch_optimizer._NAME_OPTIM_MAP[name], False)
    watched, handle = trained(torch_optimizer._NAME_OPTIM_MAP[name], True)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert handle.monitor.steps == 12
    assert not handle.monitor.findings
