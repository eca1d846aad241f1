"""The adapters run on every rank, so they compare replicas now and then; a monitor alone says that nobody does."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from helpers.frameworks import Net, lightning_trainer, samples, training_arguments
from helpers.ranks import on_ranks
from helpers.ranks_of_frameworks import accelerate_on_ranks, assert_alike, lightning_on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gradstat
from gradstat.integrations._adapter import Adapter
from gradstat.integrations._attachment import Attachment
from gradstat.integrations.accelerate import install

RECORD = {"error": "record", "warning": "record"}


def by_accelerate(model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return install(accelerator, on_anomaly=RECORD, **options), model, optimizer, accelerator.backward


def mismatches(monitor: gradstat.Monitor) -> list[tuple[int, str]]:
    monitor.flush()
    return [(f.step, f.name) for f in monitor.findings if f.rule == "replica-mismatch"]


@on_ranks(2, timeout=90.0)
def test_accelerate_compares_replicas_every_hundred_steps() -> None:
    with accelerate_on_ranks():
        for options, expected in (({}, [(100, "weight")]), ({"watch": {"replicas": 0}}, [])):
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            handle, wrapped, optimizer, backward = by_accelerate(model, optimizer, **options)
            for step in range(102):
                if step == 50 and dist.get_rank() == 1:
                    with torch.no_grad():
                        model.weight[0, 1] += 1e-3
                backward(wrapped(torch.randn(4, 3)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            assert mismatches(handle.monitor) == expected
            assert_alike(mismatches(handle.monitor))
            assert "not compared" not in repr(handle) or options
            handle.remove()


class Drifting(Net):
    """On rank 1, changes a weight by itself in step 50."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.passes == 50 and dist.get_rank() == 1:
            with torch.no_grad():
                self.first.weight[0, 1] += 1e-3
        return super().forward(x, labels)


def by_lightning(net: nn.Module, steps: int, folder: Path, **options: Any) -> Any:
    import lightning.pytorch as pl

    from gradstat.integrations.lightning import GradstatCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(*batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = GradstatCallback(on_anomaly=RECORD, **options)
    trainer = lightning_trainer(callback, strategy="ddp", devices=2, plugins=[lightning_on_ranks()], max_steps=steps)
    trainer.fit(Module(), DataLoader(samples(8 * steps), batch_size=4))
    return callback


def by_trainer(net: nn.Module, steps: int, folder: Path, **options: Any) -> Any:
    from transformers import Trainer

    from gradstat.integrations.transformers import install

    data = [{"x": x, "labels": y} for x, y in samples(8 * steps)]
    trainer = Trainer(net, training_arguments(folder, max_steps=steps, logging_steps=steps), train_dataset=data)
    handle = install(trainer, on_anomaly=RECORD, **options)
    trainer.train()
    return handle


@pytest.mark.parametrize("how", ["lightning", "trainer"])
@on_ranks(2, timeout=90.0)
def test_callbacks_of_trainers_compare_replicas_every_hundred_steps(how: str, tmp_path: Path) -> None:
    train, name = {"lightning": (by_lightning, "net.first.weight"), "trainer": (by_trainer, "first.weight")}[how]
    for options, expected in (({}, [(100, name)]), ({"watch": {"replicas": 0}}, [])):
        with accelerate_on_ranks(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the frameworks, about themselves
            monitor = train(Drifting(), 102, tmp_path, **options).monitor
        assert mismatches(monitor) == expected
        assert_alike(mismatches(monitor))


@on_ranks(2)
def test_only_what_ddp_replicates_is_compared_and_a_monitor_alone_says_that_nobody_looks() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    adapter = Adapter({"on_anomaly": RECORD}, "test")
    adapter.device = torch.device("cpu")

    def compares(model: nn.Module, is_replicated: bool = False) -> bool:
        adapter.is_replicated = is_replicated
        attachment = Attachment(adapter, model, optimizer, None)
        attachment.remove()
        return "not compared" not in repr(attachment.monitor)

    assert compares(DistributedDataParallel(model), is_replicated=True)
    assert not compares(model)
    model._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    assert not compares(DistributedDataParallel(model), is_replicated=True)
    assert "replicas not compared: watch={'replicas': n}" in repr(gradstat.Monitor(model))
    assert "compared" not in repr(gradstat.Monitor(model, watch={"replicas": 10}))


def test_a_process_alone_says_nothing_about_replicas() -> None:
    assert "replicas" not in repr(gradstat.Monitor(nn.Linear(2, 1)))


@pytest.mark.parametrize("how", ["accelerate", "monitor"])
@on_ranks(2, timeout=60.0)
def test_ranks_with_uneven_inputs_neither_hang_nor_compare(how: str) -> None:
    """Inside of DDP's ``join()`` some ranks take fewer steps, so nothing may wait for them."""
    model: Any = nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"on_anomaly": RECORD, "watch": {"replicas": 2}}
    with accelerate_on_ranks(), pytest.MonkeyPatch.context() as patch:
        accelerator = Accelerator(cpu=True)
        wrapped = DistributedDataParallel(model)
        if how == "accelerate":
            wrapped, optimizer = accelerator.prepare(model, optimizer)
            handle: Any = install(accelerator, **options)
        else:
            handle = gradstat.auto(wrapped, optimizer, **options)
        patch.setattr(Accelerator, "multi_device", True)  # else this does nothing
        with accelerator.join_uneven_inputs([wrapped], even_batches=False):
            for _ in range(4 + 3 * dist.get_rank()):
                accelerator.backward(wrapped(torch.randn(4, 3)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert handle.monitor.steps == 4 + 3 * dist.get_rank()
        assert mismatches(handle.monitor) == []
        handle.remove()
