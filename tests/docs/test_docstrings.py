"""The examples in docstrings run. What an example takes for granted stands in `TAKEN_FOR_GRANTED`."""

import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.frameworks import OF_FRAMEWORKS, QUIET
from public_names import public_names

pytestmark = OF_FRAMEWORKS
TRAINING = """
import itertools
import math
import torch
import gradstat
from torch import nn
from gradstat import *
from gradstat.monitor import *
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_of = nn.functional.mse_loss
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]
loss_of(model(batches[0][0]), batches[0][1]).backward()
"""
TAKEN_FOR_GRANTED = {
    "gradstat.adaptive.AdaptiveClip": "",
    "gradstat.SpikeGuard": "loss = model(batches[0][0]).mean()\nloss.backward()",
    "gradstat.patch_torch": """
torchs = torch.nn.utils.clip_grad_norm_
def train():
    assert torch.nn.utils.clip_grad_norm_ is not torchs
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
""",
    "gradstat.auto": "",
    "gradstat.integrations.loggers.ReportLogger": """
from gradstat.integrations.loggers import ReportLogger
from torch.utils.tensorboard import SummaryWriter
monitor, loss = Monitor(model), 1.0
writer = SummaryWriter()
SummaryWriter = lambda: writer
""",
    "gradstat.integrations.accelerate.install": """
import gradstat.integrations.accelerate
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(batches)
""",
    "gradstat.integrations.lightning.GradstatCallback": """
import functools
from lightning import Trainer
from gradstat.integrations.lightning import GradstatCallback
Trainer = functools.partial(Trainer, accelerator="cpu", logger=False, enable_checkpointing=False)
""",
    "gradstat.integrations.transformers.install": """
import gradstat.integrations.transformers
from transformers import Trainer, TrainingArguments
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}
model = Model()
dataset = [{"x": x, "labels": y} for x, y in zip(torch.randn(8, 4), torch.randn(8, 1))]
args = TrainingArguments("out", use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True)
""",
    "gradstat.Monitor": "",
    "gradstat.rules.rule": "",
    "gradstat.replay.Schedule": "loader = [x for x, _ in batches]",
    "gradstat.replay.StepStateKeeper": """
from gradstat.replay import StepStateKeeper
loader = [x for x, _ in batches]
def train_step(batch):
    loss = model(batch).mean()
    loss.backward()
    return loss.item()
""",
    "gradstat.monitor.assert_healthy": """
def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])
def made_small():
    return model, optimizer, itertools.cycle(batches)
""",
    "gradstat.MicroBatches": """
steps, accumulated = 2, 3
next_micro_batches = lambda: batches
loss = loss_of
""",
    "gradstat.distributed.track_origin": """
import torch.distributed as dist
from gradstat.distributed import track_origin
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp_model = nn.parallel.DistributedDataParallel(model)
""",
}
# What is done behind an example, whatever became of it: what it defines is called, what began is ended.
AFTERWARDS = {
    "gradstat.monitor.assert_healthy": "test_training(assert_healthy)",
    "gradstat.integrations.loggers.ReportLogger": "writer.close()",
    "gradstat.distributed.track_origin": "dist.destroy_process_group()",
}


def examples_in(text: str) -> Iterator[str]:
    """Indented blocks behind a line that ends with ``::``, and what stands behind ``>>>`` and ``...``."""
    for block in re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", text + "\n"):
        yield textwrap.dedent(block)
    prompted = re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", text, re.MULTILINE)
    if prompted:
        yield "\n".join(prompted) + "\n"


@functools.cache  # and not at import: pytest wants to import gradstat's plugin itself
def examples() -> dict[str, list[str]]:
    """By the shortest name of what they belong to."""
    things = {min(names, key=len): thing for thing, names in public_names().items() if not isinstance(thing, str)}
    found = {name: list(examples_in(inspect.getdoc(thing) or "")) for name, thing in things.items()}
    return {name: listed for name, listed in found.items() if listed}


def test_what_is_taken_for_granted_belongs_to_an_example() -> None:
    assert examples().keys() == TAKEN_FOR_GRANTED.keys()


@QUIET  # three steps of noise are what they are
@pytest.mark.parametrize("name", TAKEN_FOR_GRANTED)
def test_the_examples_of_a_docstring_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    exec(TRAINING + TAKEN_FOR_GRANTED[name], names)
    try:
        for example in examples()[name]:
            exec(compile(example, f"an example of {name}", "exec"), names)
    finally:
        exec(AFTERWARDS.get(name, ""), names)
