"""A monitor on several ranks: sharded and replicated models, the same findings everywhere."""

import contextlib
import gc
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from helpers.ranks_of_frameworks import assert_alike
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradstat


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


@on_ranks(2)
def test_sharded_training_is_told_of_whole_tensors() -> None:
    whole, model = _model(), _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # both models stay equal
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record")
    expected = []
    for step in range(6):
        torch.manual_seed(step)
        x = torch.randn(4, 6)
        for net in (whole, model):
            net.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
        gradient = model[2].weight.grad  # type: ignore[index,union-attr]
        last = dist.get_rank() == dist.get_world_size() - 1
        if step == 4 and last:
            gradient._local_tensor[-1, 2] = math.nan  # in the last row of the whole weight
        expected.append(math.nan if step == 4 else gradstat.check(whole).total_norm)
        assert bool(monitor.step(loss)) == (step == 4)
        if step < 4:
            optimizer.step()
        if step == 4:
            assert monitor.latest().report["2.weight"].nonfinite_ranks == 1
    np.testing.assert_allclose(monitor.recording().scalars["norm"], expected, rtol=1e-6)
    finding = monitor.findings[0]
    assert (finding.rule, finding.step, finding.name) == ("nonfinite-gradient", 4, "2.weight")
    assert finding.evidence["first"] == [2, 2]
    assert_alike(finding.text)
    assert monitor.recording().tables["parameter"].numel.tolist() == [60, 10, 30, 3]


@on_ranks(2)
def test_the_rank_that_brought_it_is_named_whenever_numbers_arrive() -> None:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record", watch={"origin": 1})
    for step in range(4):
        x = torch.randn(4, 6)
        if step == 2 and dist.get_rank() == 1:
            x[0, 0] = math.inf
        optimizer.zero_grad()
        model(x).square().mean().backward()
        monitor.step()
        if step != 2:
            optimizer.step()
    (bad,) = [finding for finding in monitor.findings if finding.rule == "nonfinite-rank"]
    assert (bad.step, bad.evidence["ranks"]) == (2, [1])
    rules = [finding.rule for finding in monitor.findings]
    assert ("nonfinite-batch" in rules) == (dist.get_rank() == 1)  # only that rank has seen its inputs
    assert_alike([rule for rule in rules if rule != "nonfinite-batch"])
    monitor.remove()
    with pytest.raises(TypeError, match="needs the optimizer"):
        gradstat.Monitor(model, watch={"origin": 1}, on_anomaly="skip")
    for period in (2, 1, 0):  # the model may be watched again
        again = gradstat.Monitor(model, watch={"origin": period}, on_anomaly="record")
        for _ in range(2):
            model.zero_grad()
            model(torch.full((4, 6), math.nan)).sum().backward()
            again.step()
        found = {finding.rule: finding for finding in again.findings}
        assert [finding.step for rule, finding in found.items() if rule == "nonfinite-rank"] == [0] * (period > 0)
        # Several ranks are told how to find the one.
        assert ('watch={"origin": 1}' in found["nonfinite-gradient"].advice[0]) == (period == 0)
        del again, found
        gc.collect()


@on_ranks(2)
@pytest.mark.parametrize("loss_is_known", [False, True])
def test_experts_on_other_ranks_are_in_the_norm(loss_is_known: bool) -> None:
    """For plain gradients with ``extra_groups``: ranks skip a step together, and one may have no gradients at all."""
    expert, last = nn.Linear(6, 3), dist.get_rank() == 1
    optimizer = torch.optim.SGD(expert.parameters(), 1e-3)
    options = {"extra_groups": [(dist.group.WORLD, list(expert.parameters()))]}
    monitor = gradstat.Monitor(expert, optimizer, on_anomaly={"error": ("skip", "record")}, options=options)
    for step in range(4):
        optimizer.zero_grad()
        if step != 1 or last:
            expert(torch.full((4, 6), math.nan if step == 2 and last else 1.0)).sum().backward()
        squares = sum(p.grad.double().square().sum() for p in expert.parameters() if p.grad is not None)
        dist.all_reduce(total := torch.as_tensor(squares, dtype=torch.float64))
        monitor.step(torch.tensor(1.0) if loss_is_known else None)
        assert monitor.latest().scalars["norm"] == pytest.approx(total.sqrt().item(), nan_ok=True)  # type: ignore[union-attr]
        before = expert.weight.detach().clone()
        optimizer.step()
        assert torch.equal(expert.weight, before) == (step == 2 or (step == 1 and not last))
    assert ("nonfinite-gradient" in [finding.rule for finding in monitor.findings]) == last


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_the_losses_of_all_micro_batches_are_heard_where_gradients_are_sharded(set_to_none: bool) -> None:
    model, expected = _model(), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradstat.auto(model, optimizer, on_anomaly="record") as handle:
        for _ in range(4):
            optimizer.zero_grad(set_to_none)
            losses = [model(torch.randn(4, 6)).square().mean() for _ in range(2)]
            for loss in losses:
                loss.backward()
            expected.append(sum(loss.item() for loss in losses))
            optimizer.step()
    np.testing.assert_allclose(handle.monitor.recording().scalars["loss"], expected, rtol=1e-6)


@on_ranks(2)
def test_an_error_on_one_rank_leaves_no_other_waiting() -> None:
    model = _model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    everything = {"parameters": 1, "updates": 1, "optimizer": 1}
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record", watch=everything)
    broken, subtract = dist.get_rank() == 1, torch._foreach_sub

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    for step in range(8):
        model(torch.randn(4, 6)).square().mean().backward()
        if broken and step == 3:
            torch._foreach_sub = out_of_memory
        if broken and step == 6:
            gradient = model[0].weight.grad  # type: ignore[index,union-attr]
            gradient._local_tensor = gradient._local_tensor.to(torch.int32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            monitor.step()
        torch._foreach_sub = subtract
        if step != 6:
            optimizer.step()
        optimizer.zero_grad()
    texts = [finding.text for finding in monitor.findings]
    recording = monitor.recording()
    assert recording.steps.tolist() == [0, 1, 2, 3, 4, 5, 7], texts
    assert sorted(set(recording.tables) & {"parameter", "update"}) == ["parameter", "update"]
    assert not np.isnan(recording.tables["parameter"].values).any()
    if broken:
        assert sum("the last update could not be measured" in text for text in texts) == 1, texts
    assert sum("a step could not be" in text for text in texts) == 1, texts


@on_ranks(2)
@pytest.mark.parametrize("kind", ["healthy", "accumulated", "module", "no_sync", "autograd.grad"])
@pytest.mark.parametrize("how", ["monitor", "auto"])
def test_gradients_that_ddp_does_not_reduce_are_told(kind: str, how: str) -> None:
    net = _model()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gradstat.auto(model, optimizer, on_anomaly="record") if how == "auto" else None
    monitor = gradstat.Monitor(model, optimizer, on_anomaly="record") if handle is None else handle.monitor
    for _ in range(18):
        optimizer.zero_grad()
        x = torch.randn(4, 6)
        if kind == "accumulated":
            with model.no_sync():
                model(x).square().mean().backward()
        with model.no_sync() if kind == "no_sync" else contextlib.nullcontext():
            loss = (net if kind == "module" else model)(x).square().mean()
            if kind == "autograd.grad":
                parameters = [*net.parameters()]
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    parameter.grad = gradient
            else:
                loss.backward()
        if handle is None:
            monitor.step(loss)
        optimizer.step()
    monitor.remove()
    told = [finding for finding in monitor.findings if finding.rule == "unreduced-gradients"]
    assert [finding.step for finding in told] == [0] * (kind not in ("healthy", "accumulated"))
    assert all(("no_sync()" in finding.causes[0]) == (kind == "no_sync") for finding in told)
