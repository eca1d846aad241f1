"""The Lightning callback under DDP on two CPU processes: decisions come after the reduction and are the same on all."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from ranked import lightning_on_ranks
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from gradstat._core.host_copy import HostCopy
from gradstat.integrations._watch import Ranks as Votes
from gradstat.integrations.lightning import GradstatCallback
from gradstat.monitor import AnomalyError


class _Model(pl.LightningModule):
    def __init__(self, bad: int | None = None, fused: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.bad, self.fused = bad, fused
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        outputs = self.net(x)
        if batch_idx == self.bad and self.global_rank == 1:
            outputs = outputs * (1 + torch.sqrt(outputs - outputs))
        return nn.functional.cross_entropy(outputs, y)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(
            math.sqrt(sum(float(p.grad.double().square().sum()) for p in self.parameters() if p.grad is not None))
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=self.fused)


def _fit(callbacks: list[Any], model: pl.LightningModule, **options: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(32, 6, generator=generator), torch.randint(3, (32,), generator=generator)
    made = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=options.pop("strategy", "ddp"),
        plugins=[lightning_on_ranks()],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(model, DataLoader(TensorDataset(x, y), batch_size=4))
    return made


def _skipping(fused: bool) -> tuple[list[float], list[float], list[Tensor], list[int], int]:
    model, callback = _Model(3, fused), GradstatCallback(max_norm=0.1, on_anomaly=["skip", "record"])
    made = _fit([callback], model)
    assert callback.monitor is not None
    errors = [finding.step for finding in callback.monitor.findings if finding.severity == "error"]
    norms = callback.monitor.recording().scalars["norm"].tolist()
    return norms, model.norms, [p.detach() for p in model.parameters()], errors, made.global_step


def test_statistics_and_skips_are_of_the_reduced_gradients(ranks: Ranks) -> None:
    for fused in (False, True):
        first, second = ranks.run(2, _skipping, fused)
        norms, seen, parameters, errors, steps = first
        assert steps == 8
        assert errors == [3]
        assert all(p.isfinite().all() for p in parameters)
        assert [n for i, n in enumerate(norms) if i != 3] == [n for i, n in enumerate(second[0]) if i != 3], (
            "ranks see the same"
        )
        for i in (0, 1, 2, 4, 5, 6, 7):
            assert abs(norms[i] - seen[i]) < 1e-6 * norms[i]
        assert not math.isfinite(norms[3])
        assert not math.isfinite(second[0][3])
        for one, other in zip(parameters, second[2], strict=True):
            assert torch.equal(one, other)
        assert second[3:] == (errors, 8)


class _OneWants(pl.Callback):
    """On rank 1 alone something is wanted in step 3."""

    def __init__(self, callback: GradstatCallback, policy: str) -> None:
        self.callback, self.policy = callback, policy

    def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            (watch,) = self.callback.watches
            if self.policy == "stop":
                watch.monitor.should_stop = True
            elif self.policy == "raise":
                watch._error = AnomalyError("it is on this rank")
            else:
                watch._noted.add(self.policy)


def _agreeing(policy: str, folder: str) -> tuple[int, list[str], str]:
    callback = GradstatCallback(on_anomaly="record", save_dir=folder)
    message = ""
    try:
        made = _fit([_OneWants(callback, policy), callback], _Model())
        steps = made.global_step
    except AnomalyError as error:
        message, steps = str(error), -1
    return steps, [path.name for path in callback.checkpoints], message


def test_what_one_rank_wants_all_do(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks.run(2, _agreeing, "stop", str(tmp_path)) == [(4, [], ""), (4, [], "")]
    saved = ["gradstat-step3.ckpt"]
    assert ranks.run(2, _agreeing, "checkpoint", str(tmp_path)) == [(8, saved, ""), (8, saved, "")]
    assert (tmp_path / saved[0]).exists()
    first, second = ranks.run(2, _agreeing, "raise", str(tmp_path))
    assert "another rank found an anomaly" in first[2]
    assert "it is on this rank" in second[2]


def _replaying(accumulate: int) -> tuple[str, int]:
    callback = GradstatCallback(on_anomaly=["replay", "skip"])
    made = _fit([callback], _Model(5), accumulate_grad_batches=accumulate)
    assert callback.monitor is not None
    return str(callback.monitor.culprit), made.global_step


def test_a_replay_finds_the_line_on_the_rank_that_made_it(ranks: Ranks) -> None:
    for accumulate in (1, 2):
        (clean, steps), (culprit, others_steps) = ranks.run(2, _replaying, accumulate)
        assert clean == "None"
        assert "derivative of sqrt" in culprit
        assert "torch.sqrt(outputs - outputs)" in culprit
        assert steps == others_steps == 8 // accumulate


def _blaming() -> dict[int, dict[str, int]]:
    callback = GradstatCallback(on_anomaly="skip")
    _fit([callback], _Model(4), accumulate_grad_batches=4)
    return {step: dict(report.first_bad) for step, report in callback.micro_batch_reports.items()}


def test_the_micro_batch_is_told_on_the_rank_that_made_it(ranks: Ranks) -> None:
    first, second = ranks.run(2, _blaming)
    assert set(second[1].values()) == {0}
    assert set(first[1].values()) == {3}  # it came with the reduction of the last one


class _Sharded(_Model):
    def __init__(self, bad: int | None) -> None:
        super().__init__(bad)
        self.after: list[float] = []

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.norm())

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*arguments, **options)
        self.after.append(self.norm())

    def norm(self) -> float:
        gradients: list[Any] = [p.grad for p in self.parameters() if p.grad is not None]
        return math.sqrt(sum(float(g.full_tensor().double().square().sum()) for g in gradients))


def _sharding() -> tuple[list[float], list[float], bool, list[float], int]:
    model = _Sharded(3)
    callback = GradstatCallback(max_norm=0.1, on_anomaly=["skip", "record"])
    made = _fit([callback], model, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    assert callback.monitor is not None
    norms = callback.monitor.recording().scalars["norm"].tolist()
    finite = all(p.to_local().isfinite().all() for p in model.parameters())  # type: ignore[attr-defined]
    return norms, model.norms, finite, model.after, made.global_step


def test_sharded_gradients_are_measured_and_clipped_as_a_whole(ranks: Ranks) -> None:
    for norms, seen, finite, after, steps in ranks.run(2, _sharding):
        assert steps == 8
        assert finite
        assert math.isnan(norms[3])
        for i in (0, 1, 2, 4, 5, 6, 7):
            assert abs(norms[i] - seen[i]) < 1e-6 * norms[i]
            assert abs(after[i] - 0.1) < 1e-4


def _watching_origins() -> tuple[list[int], list[str]]:
    callback = GradstatCallback(on_anomaly=["skip", "record"], watch=["origin"])
    _fit([callback], _Model(3))
    assert callback.monitor is not None
    found = [finding for finding in callback.monitor.findings if finding.rule == "bad-rank"]
    return [finding.step for finding in found], [finding.text for finding in found]


def test_the_rank_that_brought_it_is_named_on_all(ranks: Ranks) -> None:
    first, second = ranks.run(2, _watching_origins)
    assert first == second
    assert first[0] == [3]
    assert "rank 1" in first[1][0]


def _votes_that_travel() -> list[list[bool]]:
    first = dist.get_rank() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "travels", True)
        votes = Votes(torch.device("cpu"))
        heard = [votes.any_of([first, False], wait=False), votes.any_of([False, False], wait=False)]
        heard.append(votes.any_of([False, first], wait=False))
        return [*heard, votes.any_of([False, False], wait=True), votes.any_of([False, False], wait=True)]


def test_votes_that_travel_are_heard_once_and_a_step_later_on_all_ranks(ranks: Ranks) -> None:
    """As on a GPU, where nobody waits for them; who waits hears the one before, too."""
    expected = [[False, False], [True, False], [False, False], [False, True], [False, False]]
    assert ranks.run(2, _votes_that_travel) == [expected, expected]
