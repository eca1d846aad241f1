"""Programs can use a watched model for other things than training, as if it were not watched."""

import copy
import io
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from helpers.frameworks import training_arguments
from helpers.training import backpropagated
from torch import nn
from transformers import Trainer

import gradstat
from gradstat.integrations import accelerate, transformers
from gradstat.integrations.lightning import GradstatCallback

Watcher = Callable[[nn.Module, torch.optim.Optimizer], Any]
WATCHERS: dict[str, Watcher] = {
    "auto": lambda model, optimizer: gradstat.auto(optimizer, model),
    "Monitor": gradstat.Monitor,
    "Monitor that watches everything": lambda model, optimizer: gradstat.Monitor(
        model, optimizer, watch=["activations", "outputs", "parameters", "buffers", "optimizer", "updates"]
    ),
    "Monitor that replays": lambda model, optimizer: gradstat.Monitor(model, optimizer, replay=True),
    "micro-batches": lambda model, optimizer: gradstat.MicroBatches(model),
}


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def loaded(model: nn.Module) -> nn.Module:
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        found: nn.Module = torch.load(io.BytesIO(saved(model)), weights_only=True)
    return found


def _accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> partial[Any]:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    return partial(accelerate.install, accelerator)


def _trainer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> partial[Any]:
    return partial(transformers.install, Trainer(model, training_arguments(folder), optimizers=(optimizer, None)))


# Functions that begin to watch.
FRAMEWORKS: dict[str, Callable[..., partial[Any]]] = {
    "patch": lambda *_: partial(gradstat.patch_torch),
    "Accelerate": _accelerate,
    "Lightning": lambda *_: partial(GradstatCallback, max_norm=1.0, on_anomaly=["warn", "skip"]),
    "Trainer": _trainer,
}


def beginning(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> partial[Any]:
    if kind in FRAMEWORKS:
        return FRAMEWORKS[kind](model, optimizer, folder)
    return partial(WATCHERS[kind], model, optimizer)


OPERATIONS: dict[str, Callable[[nn.Module], Any]] = {
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


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, watcher: Any, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        loss = backpropagated(optimizer, (model(torch.randn(8, 4, generator=generator)) - 1).square().mean())
        if isinstance(watcher, gradstat.Monitor):
            watcher.step(loss)
        optimizer.step()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", [*WATCHERS, *FRAMEWORKS])
def test_a_watched_model_can_be_saved_copied_and_compiled(kind: str, operation: str, tmp_path: Path) -> None:
    model, optimizer = made()
    watcher = beginning(kind, model, optimizer, tmp_path)()
    for _ in range(2):  # before and during a training
        torch.testing.assert_close(OPERATIONS[operation](model)(torch.ones(1, 4)), model(torch.ones(1, 4)))
        _steps(model, optimizer, watcher, 2)
    torch.testing.assert_close(OPERATIONS[operation](model)(torch.ones(1, 4)), model(torch.ones(1, 4)))
    getattr(watcher, "remove", lambda: None)()


# Programs that do something between steps: each is given a function that watches, and returns its result.


def _through(wrap: Callable[[nn.Module], Any], watched: bool = False) -> Callable[[Watcher], nn.Module]:
    """Trains the model through a wrapper, which may be what is watched."""

    def program(watch: Watcher) -> nn.Module:
        model, optimizer = made()
        wrapped = wrap(model)
        _steps(wrapped, optimizer, watch(wrapped if watched else model, optimizer), 20)
        return model

    return program


def _averaged(watch: Watcher) -> nn.Module:
    """Averages as torch makes them, and as trainers do, which copy the model and then its state."""
    model, optimizer = made()
    watcher = watch(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    for _ in range(5):
        _steps(model, optimizer, watcher, 4)
        average.update_parameters(model)
        for mine, its in zip(copied.state_dict().values(), model.state_dict().values(), strict=True):
            mine.lerp_(its, 0.1)
    return nn.Sequential(average, copied)


def _resumed(watch: Watcher) -> nn.Module:
    model, optimizer = made()
    watcher = watch(model, optimizer)
    _steps(model, optimizer, watcher, 20)
    file = io.BytesIO()
    monitor = getattr(watcher, "monitor", watcher)
    its = monitor.state_dict() if isinstance(monitor, gradstat.Monitor) else {}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": its}, file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again, optimizer = made()
    watcher = watch(again, optimizer)
    again.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if its:
        getattr(watcher, "monitor", watcher).load_state_dict(state["monitor"])
    _steps(again, optimizer, watcher, 20)
    return again


PROGRAMS: dict[str, Callable[[Watcher], nn.Module]] = {
    "compiled and watched": _through(partial(torch.compile, backend="eager"), watched=True),
    "watched below a compiled one": _through(partial(torch.compile, backend="eager")),
    "replicated": _through(nn.DataParallel),
    "averaged": _averaged,
    "resumed": _resumed,
}


@pytest.mark.filterwarnings("ignore:gradstat. not watched. the (activations|outputs|batch)")  # if compiled
@pytest.mark.filterwarnings("error::gradstat.monitor.AnomalyWarning")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", [*WATCHERS, "patch"])
def test_a_watched_program_gives_the_same_results(kind: str, program: str) -> None:
    def watch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        watcher = gradstat.patch_torch() if kind == "patch" else WATCHERS[kind](model, optimizer)
        made.append(watcher)
        return watcher

    made: list[Any] = []
    alone = PROGRAMS[program](lambda model, optimizer: None)
    watched = PROGRAMS[program](watch)
    for watcher in reversed(made):
        getattr(watcher, "remove", getattr(watcher, "detach", lambda: None))()
        monitor = getattr(watcher, "monitor", watcher)
        assert not isinstance(monitor, gradstat.Monitor) or monitor.recording().meta["model"] == "Sequential"
    for (name, value), other in zip(alone.state_dict().items(), watched.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def global_state() -> list[Any]:
    return [
        torch.random.get_rng_state().tolist(),
        random.getstate(),
        repr(numpy.random.get_state()),  # noqa: NPY002
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        list(warnings.filters),
        logging.getLogger().handlers,
        dict(os.environ),
        threading.active_count(),
    ]


@pytest.mark.parametrize("kind", [*WATCHERS, *FRAMEWORKS])
def test_global_state_and_saved_files_are_unchanged(kind: str, tmp_path: Path) -> None:
    """Random numbers, flags, warning filters, threads, and files of model and optimizer are as without gradstat."""
    states = []
    for watched in (False, False, True):  # frameworks set variables on first use
        random.seed(0)
        numpy.random.seed(0)  # noqa: NPY002
        model, optimizer = made()
        begin = beginning(kind, model, optimizer, tmp_path)
        before = global_state()
        watcher = begin() if watched else None
        if kind in WATCHERS:
            _steps(model, optimizer, watcher, 2)
        within = global_state()
        whole = {"model": model, "optimizer": optimizer.state_dict(), "all of it": optimizer}
        files = saved(whole)
        for end in ("remove", "detach"):
            getattr(watcher, end, lambda: None)()
        states.append([before, within, files, global_state()])
    assert states[1] == states[2]


def test_other_hooks_are_saved() -> None:
    model, optimizer = made()
    handle = model.register_forward_hook(print)
    gradstat.auto(optimizer, model)
    model[1].register_forward_pre_hook(print)
    copied = copy.deepcopy(model)
    assert print in copied._forward_hooks.values()
    assert print in copied[1]._forward_pre_hooks.values()
    handle.remove()
    assert print not in model._forward_hooks.values()


@pytest.mark.parametrize("kind", ["Accelerate", "Trainer"])
def test_a_second_install_replaces_the_first_unless_it_fails(kind: str, tmp_path: Path) -> None:
    model, optimizer = made()
    install = FRAMEWORKS[kind](model, optimizer, tmp_path)
    owners = [install.args[0], *([install.args[0].accelerator] if kind == "Trainer" else [])]

    def held() -> list[dict[str, int]]:
        return [{name: id(value) for name, value in vars(owner).items()} for owner in owners]

    before = held()
    replaced = install()
    with install() as first:
        then = held()
        with pytest.raises(ValueError, match="no file can be made"):
            install(save_to="/proc/nowhere/run.gradstat")
        assert held() == then
        if kind == "Accelerate":
            owners[0].backward(model(torch.ones(1, 4)).sum())
            owners[0]._optimizers[0].step()
            assert (first.monitor.steps, replaced.monitor.steps) == (1, 0)
    others = [names.keys() - kept.keys() for names, kept in zip(held(), before, strict=True)]
    assert set.union(*map(set, others)) <= {"optimizer_cls_and_kwargs"}  # an optimizer that was made earlier
