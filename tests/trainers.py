"""What tests of frameworks share: what they train, trainers that show nothing and write nothing, running examples."""

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

# What frameworks say of themselves.
OF_FRAMEWORKS = [
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]
# Of what monitors say a test asks for what it is about.
QUIET = pytest.mark.filterwarnings("ignore::gradstat.monitor.AnomalyWarning")


class Net(nn.Module):
    """Gives its own loss, and breaks in chosen forward passes of the training."""

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
    """What `Net` is trained on: inputs and their sums."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def lightning_trainer(callbacks: Any, **options: Any) -> Any:
    """Lightning's for one epoch on the CPU; ``callbacks`` are a list of them or one."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(callbacks=callbacks, **{**off, "max_epochs": 1, "accelerator": "cpu", **options})


def training_arguments(folder: Path | str, **changes: Any) -> Any:
    """Of transformers' Trainer, for five steps of four samples on the CPU, all of which it logs."""
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        **{"max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 0.01},
        **{"use_cpu": True, "dataloader_pin_memory": False},
        **{"report_to": [], "save_strategy": "no", "disable_tqdm": True},
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def run_example(name: str, *arguments: str) -> str:
    """What an example of ``examples/`` shows and warns of. It runs here, where its framework is imported already."""
    path = str(Path(__file__).resolve().parent.parent / "examples" / name)
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
    """Accelerate keeps the state of its first accelerator for the process; the next one may be of another kind."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
