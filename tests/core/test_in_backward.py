"""`measure_in_backward`: rows found after backward are those of gradients as they are now, never as they were."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradstat
from gradstat import in_backward

HIDDEN = 1  # an element of a matrix that no sample looks at


@pytest.fixture(autouse=True)
def _for_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_backward, "_FEWEST", 1)
    monkeypatch.setattr(in_backward, "_last_cache", lambda: 0)


class Net(nn.Module):
    """A tied matrix, one without a gradient, a frozen one, a convolution, and one that is checkpointed."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tied = nn.Linear(16, 16)
        self.absent = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.frozen(self.tied(x)))
        x = self.convolution(x[:, None])[:, 0]
        inner: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return inner


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.randn(8, 16)).square().mean()
    return loss


def assert_right(model: nn.Module) -> gradstat.Report:
    """The report is, bit for bit, the one about copies of the gradients, of which nothing is known."""
    report = gradstat.check(model)
    having = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert report.to_dict()["tensors"] == gradstat.check_tensors(having).to_dict()["tensors"]
    return report


def with_gradient(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def hide_nan(model: nn.Module) -> None:
    """Spoils every matrix where nobody looks, which tells whether it is read."""
    for parameter in with_gradient(model):
        if parameter.dim() == 2:
            parameter.grad.data.view(-1)[HIDDEN] = math.nan


def monitored(model: nn.Module) -> bool:
    monitor = gradstat.Monitor(model, on_anomaly="record")
    found = [*monitor.step(1.0), *monitor.flush()]
    return not any(finding.rule == "nonfinite-gradient" for finding in found)


CONSUMERS: dict[str, Callable[[nn.Module], bool]] = {
    "check": lambda model: gradstat.check(model).ok,
    "clip": lambda model: bool(gradstat.clip_grad_norm_(model.parameters(), math.inf).isfinite()),
    "guarded_step": lambda model: not gradstat.guarded_step(torch.optim.SGD(model.parameters(), lr=0.1)).skipped,
    "Monitor.step": monitored,
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_what_is_found_is_not_read_again(consumer: str) -> None:
    model = Net()
    with gradstat.measure_in_backward(model) as measure:
        assert measure.reason is None
        loss_of(model).backward()
        hide_nan(model)
        assert CONSUMERS[consumer](model)
    hide_nan(model)
    assert not CONSUMERS[consumer](model)  # the hooks are gone, and all that was known


def test_a_clip_and_a_step_do_what_they_do_without() -> None:
    def train(in_backward: bool) -> tuple[Tensor, ...]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        measure = gradstat.measure_in_backward(model) if in_backward else None
        norms = []
        for step in range(4):
            loss_of(model).backward()
            if step % 2:
                norms.append(gradstat.guarded_step(optimizer, max_norm=1e-3).total_norm)
            else:
                norms.append(gradstat.clip_grad_norm_(model.parameters(), 1e-3))
                assert_right(model)
                optimizer.step()
            optimizer.zero_grad()
        if measure is not None:
            measure.remove()
        return *norms, *(parameter.detach() for parameter in model.parameters())

    for ours, theirs in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, theirs)


def _unscaled(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


def _other_data(model: Any) -> None:
    other = model.tied.weight.grad.clone()
    other.view(-1)[HIDDEN] = math.nan
    model.tied.weight.grad.data = other


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model.tied.weight.grad.mul_(2.0),
    "through a view": lambda model: model.tied.weight.grad.view(-1)[HIDDEN : HIDDEN + 1].fill_(math.nan),
    "in inference mode": torch.inference_mode()(lambda model: model.tied.weight.grad.mul_(2.0)),
    "all through .data": lambda model: [p.grad.data.mul_(2.0) for p in with_gradient(model)],
    "one through numpy": lambda model: model.inner[2].weight.grad.numpy().fill(3.0),
    "unscaled": _unscaled,
    "clipped by torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clipped by gradstat": lambda model: gradstat.clip_grad_norm_(model.parameters(), 1e-3),
    "other data": _other_data,
    "other shape": lambda model: model.tied.weight.grad.resize_(2, 3),
    "another tensor": lambda model: setattr(model.tied.weight, "grad", torch.randn(16, 16)),
    "accumulated": lambda model: loss_of(model).backward(),
    "with a graph": lambda model: loss_of(model).backward(create_graph=True),
    "set to zero": lambda model: model.zero_grad(set_to_none=False),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_hooks_is_noticed(change: str, enabled: bool) -> None:
    model = Net()
    with gradstat.measure_in_backward(model) as measure:
        loss_of(model).backward()
        measure.enabled = enabled
        CHANGES[change](model)
        assert_right(model)
        assert_right(model)


def test_another_tensor_in_the_place_of_the_old_one() -> None:
    model = nn.Linear(16, 16)
    reused = 0
    with gradstat.measure_in_backward(model):
        for _ in range(50):
            loss_of(model).backward()
            old, memory = id(model.weight.grad), model.weight.grad.data  # type: ignore[union-attr]
            memory.data.view(-1)[HIDDEN] = math.nan
            model.weight.grad = None
            model.weight.grad = memory.data
            reused += id(model.weight.grad) == old
            assert not gradstat.check(model).ok
            model.zero_grad()
    assert reused  # same object, memory and version


def test_a_later_hook_that_changes_gradients_is_noticed() -> None:
    def spoil(parameter: Tensor) -> None:
        parameter.grad.view(-1)[HIDDEN] = math.inf  # type: ignore[union-attr]

    model = Net()
    with gradstat.measure_in_backward(model):
        for parameter in model.inner.parameters():
            parameter.register_post_accumulate_grad_hook(spoil)
        loss_of(model).backward()
        assert len(assert_right(model).nonfinite) == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_several_backwards_of_one_graph_and_of_several(reentrant: bool) -> None:
    model = Net(reentrant)
    with gradstat.measure_in_backward(model) as measure:
        for micro_batch in range(3):
            measure.enabled = micro_batch == 2
            loss = loss_of(model)
            loss.backward(retain_graph=not reentrant)
            if not reentrant:
                loss.backward()
        assert_right(model)
        hide_nan(model)
        assert gradstat.check(model).missing == ("absent.weight", "absent.bias")
        assert gradstat.check(model).ok


def test_an_exception_in_the_middle_leaves_nothing_wrong() -> None:
    model = Net()
    with gradstat.measure_in_backward(model):
        loss_of(model).backward()
        model.inner[0].weight.register_post_accumulate_grad_hook(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model).backward()
        assert_right(model)


def test_a_compiled_model() -> None:
    model = Net()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with gradstat.measure_in_backward(compiled), gradstat.measure_in_backward(model):
        for _ in range(2):
            model.zero_grad()
            loss_of(compiled).backward()
            assert_right(model)
            hide_nan(model)
            assert gradstat.check(compiled).ok


def test_gradients_that_kernels_do_not_read_in_place() -> None:
    model = nn.Sequential(nn.EmbeddingBag(64, 16, sparse=True, mode="sum"), nn.Linear(16, 16))
    strange = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    with gradstat.measure_in_backward([*model.parameters(), strange]):
        loss = model(torch.randint(64, (8, 4))).square().mean()
        (loss + (strange * strange.conj()).real.sum()).backward()
        model.register_parameter("strange", strange)
        assert_right(model)


def test_nothing_is_kept_alive() -> None:
    model = Net()
    measure = gradstat.measure_in_backward(model)
    loss_of(model).backward()
    gradient, gone = (weakref.ref(one) for one in (model.tied.weight.grad, model))
    model.zero_grad()
    assert gradient() is None
    del model
    gc.collect()
    assert gone() is None
    measure.remove()


@pytest.mark.parametrize(
    ("shape", "home", "reason"),
    [
        ((8, 8), "meta", "no gradients are on the CPU"),
        ((8, 8), "cpu", "fit into a cache of"),
        ((1 << 24,), "cpu", "no matrix of 256 KiB to 16 MiB"),
        ((1 << 12, 1 << 12), "cpu", "no matrix of 256 KiB to 16 MiB"),
    ],
)
def test_it_says_where_it_does_not_pay(
    shape: tuple[int, ...], home: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(in_backward, "_last_cache", lambda: 32 << 20)
    parameter = nn.Parameter(torch.empty(shape, device=home))
    assert reason in str(gradstat.measure_in_backward(parameter).reason)
    monkeypatch.setattr(in_backward, "resolve", lambda *_: object())
    assert home == "meta" or "compiled kernels" in str(gradstat.measure_in_backward(parameter).reason)


@on_ranks(2)
def test_several_ranks_are_measured_afterwards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_backward, "_FEWEST", 1)
        patch.setattr(in_backward, "_last_cache", lambda: 0)
        assert "ranks" in str(gradstat.measure_in_backward(Net()).reason)
        patch.setattr(in_backward, "_why_not", lambda _: None)  # as if the ranks had met later
        for as_view in (True, False):
            model = nn.Linear(16, 16)
            gradstat.measure_in_backward(model)
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=as_view)
            gradstat.measure_in_backward(wrapped)
            for _ in range(2):
                torch.manual_seed(torch.distributed.get_rank())
                loss_of(wrapped).backward()
                assert_right(model)
        plain = nn.Linear(16, 16)
        gradstat.measure_in_backward(plain)
        (plain(torch.eye(16)[HIDDEN])[0] * torch.distributed.get_rank()).backward()
        torch.distributed.all_reduce(plain.weight.grad)
        assert_right(plain)
        sharded: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        measure = gradstat.measure_in_backward(sharded)
        for _ in range(2):
            loss_of(sharded).backward()
            with_hooks = gradstat.check(sharded).to_dict()
            measure.remove()
            assert with_hooks == gradstat.check(sharded).to_dict()
