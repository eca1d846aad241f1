"""What programs do with a model besides training it goes on as if nobody watched."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradstat

WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "auto": lambda model, optimizer: gradstat.auto(optimizer, model),
    "Monitor": gradstat.Monitor,
    "Monitor that watches everything": lambda model, optimizer: gradstat.Monitor(
        model, optimizer, watch=["activations", "outputs", "parameters", "buffers", "optimizer", "updates"]
    ),
    "Monitor that replays": lambda model, optimizer: gradstat.Monitor(model, optimizer, replay=True),
    "micro-batches": lambda model, optimizer: gradstat.MicroBatches(model),
}


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def loaded(model: nn.Module) -> nn.Module:
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        found: nn.Module = torch.load(io.BytesIO(saved(model)), weights_only=True)
    return found


DEEDS: dict[str, Callable[[nn.Module], Any]] = {
    "load": loaded,
    "copy": copy.deepcopy,
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, torch.ones(1, 4)),
    "export": lambda model: torch.export.export(model, (torch.ones(1, 4),)).module(),
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "parallel": nn.DataParallel,
    "average": torch.optim.swa_utils.AveragedModel,
}


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, watcher: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        if isinstance(watcher, gradstat.Monitor):
            watcher.step(loss)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_watched_model_can_be_handed_on(way: str, deed: str) -> None:
    model, optimizer = made()
    watcher = WAYS[way](model, optimizer)
    for _ in range(2):  # as new, and in the middle of a training
        another = DEEDS[deed](model)
        torch.testing.assert_close(another(torch.ones(1, 4)), model(torch.ones(1, 4)))
        train(model, optimizer, watcher)
    torch.testing.assert_close(DEEDS[deed](model)(torch.ones(1, 4)), model(torch.ones(1, 4)))


@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_a_watched_model_and_optimizer_is_that_of_any_other(way: str) -> None:
    files = []
    for watched in (False, True):
        model, optimizer = made()
        watcher = WAYS[way](model, optimizer) if watched else None
        train(model, optimizer, watcher)
        whole = {"model": model, "optimizer": optimizer.state_dict(), "all of it": optimizer}
        files.append(saved(whole))  # type: ignore[arg-type]
    assert files[0] == files[1]


def test_hooks_of_others_stay_in_the_file() -> None:
    model, optimizer = made()
    handle = model.register_forward_hook(print)
    gradstat.auto(optimizer, model)
    model[1].register_forward_pre_hook(print)
    copied = copy.deepcopy(model)
    assert print in copied._forward_hooks.values()
    assert print in copied[1]._forward_pre_hooks.values()
    handle.remove()
    assert print not in model._forward_hooks.values()
