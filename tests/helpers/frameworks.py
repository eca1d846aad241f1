"""Helpers for tests of frameworks: what they train, trainers without output or files, and running examples."""

import contextlib
import io
import logging
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

# Warnings that frameworks give about themselves.
OF_FRAMEWORKS = [
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
# For tests that do not check the monitor's warnings.
QUIET = pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")


class Net(nn.Module):
    """Returns its own loss, and computes NaN in chosen training forward passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.bad_at: set[int] = set()
        self.passes = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += self.training
        hidden = torch.tanh(self.first(x))
        if self.passes - 1 in self.bad_at:
            hidden = torch.log(-hidden.abs())
        return {"loss": (self.last(hidden) - labels).square().mean()}


def samples(count: int) -> TensorDataset:
    """Training data for `Net`: inputs and their sums."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def lightning_trainer(callbacks: Any, **options: Any) -> Any:
    """A Lightning trainer for one epoch on the CPU; ``callbacks``: one or a list."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(callbacks=callbacks, **{**off, "max_epochs": 1, "accelerator": "cpu", **options})


def training_arguments(folder: Path | str, **changes: Any) -> Any:
    """Arguments of transformers' Trainer for five steps of four samples on the CPU, each of which is logged."""
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        **{"max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 0.01},
        **{"use_cpu": True, "dataloader_pin_memory": False},
        **{"report_to": [], "save_strategy": "no", "disable_tqdm": True},
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def run_example(name: str, *arguments: str) -> str:
    """The output and warnings of an example in ``examples/``, run in this process, which has imported its framework."""
    path = str(Path(__file__).resolve().parents[2] / "examples" / name)
    shown = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
    return "\n".join([shown.getvalue(), *(str(warning.message) for warning in told)])


def forget_accelerators() -> None:
    """Resets the state that Accelerate keeps of the first accelerator, as the next one may be of another kind."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
