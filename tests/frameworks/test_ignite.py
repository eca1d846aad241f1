"""Ignite's trainers, watched by `gradstat.auto`."""

import math
import warnings

import pytest
import torch
from torch import nn

import gradstat
from gradstat.monitor import AnomalyWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own warnings
    from ignite.engine import create_supervised_trainer


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("scaled", [False, True])
def test_accumulated_steps_with_and_without_a_scaler(scaled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    mode = {"amp_mode": "amp", "scaler": torch.amp.GradScaler("cpu")} if scaled else {}
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=2, **mode)
    handle = gradstat.auto(optimizer, model)
    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(12)]
    batches[7][0][1, 2] = math.nan
    with pytest.warns(AnomalyWarning) as caught:
        trainer.run(batches, max_epochs=1)
    assert __file__ in {warning.filename for warning in caught}
    assert handle.monitor.steps == 6
    assert {finding.step for finding in handle.monitor.findings if finding.severity == "error"} >= {3}
    assert handle.monitor.findings[0].step == 3
    handle.remove()
