"""The integration with Hugging Face Accelerate, in plain loops under the real Accelerator."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers.frameworks import QUIET, Net, forget_accelerators, samples
from helpers.ranks import on_ranks
from helpers.ranks_of_frameworks import accelerate_on_ranks, assert_alike
from helpers.travelling import numbers_travel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gradstat
from gradstat.distributed import audit_norm
from gradstat.integrations.accelerate import install
from gradstat.monitor import AnomalyError


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader(samples(4 * batches), batch_size=4)


Prepared = tuple[Accelerator, Any, Any, Any]


def prepare(bad_at: set[int] | None = None, accumulated: int = 1) -> Prepared:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    model = Net()
    model.bad_at = bad_at or set()
    return (accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader(6)))


def run(prepared: Prepared) -> None:
    """A typical training loop."""
    accelerator, model, optimizer, data = prepared
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@QUIET
@pytest.mark.parametrize("bad_at", [None, {2}])
def test_an_unhealthy_state_is_not_saved(
    tmp_path: Path, bad_at: set[int] | None, recwarn: pytest.WarningsRecorder
) -> None:
    prepared = prepare(bad_at=bad_at)
    with install(prepared[0], on_anomaly=["skip", "record"], healthy_checkpoints=True) as handle:
        prepared[0].register_for_checkpointing(handle)
        run(prepared)
        recwarn.clear()
        saved = prepared[0].save_state(str(tmp_path / "state"))
        if saved is not None:  # loading restores the monitor
            run(prepared)
            prepared[0].load_state(saved)
            assert handle.monitor.steps == 6
    assert (saved is None) == (bad_at is not None) == (not (tmp_path / "state").exists())
    assert ["checkpoints are not saved" in str(one.message) for one in recwarn] == [True] * (bad_at is not None)


def test_several_models_have_a_monitor_each() -> None:
    for precision in ("no", "fp16"):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        if precision == "fp16":
            accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=16.0), True
        maker, judge = nn.Linear(4, 1), nn.Linear(1, 1)
        maker, judge, first, second = accelerator.prepare(
            maker, judge, torch.optim.AdamW(maker.parameters()), torch.optim.SGD(judge.parameters(), lr=0.1)
        )
        handle = install(accelerator)
        with pytest.raises(RuntimeError, match=r"there are 2 monitors; use .monitors"):
            _ = handle.monitor
        losses: tuple[list[float], list[float]] = ([], [])
        for _ in range(3):
            made = maker(torch.randn(4, 4))
            for number, net, optimizer in ((1, judge, second), (0, maker, first)):
                loss = judge(made.detach()).square().mean() if net is judge else judge(made).mean()
                losses[number].append(loss.item())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                first.zero_grad()
                second.zero_grad()
        assert [monitor.steps for monitor in handle.monitors] == [3, 3]
        assert {"grad/0/total_norm", "grad/1/total_norm"} <= set(handle.scalars())
        for monitor, own in zip(handle.monitors, losses, strict=True):
            assert monitor.recording().scalars["loss"].tolist() == pytest.approx(own)
        handle.remove()
        forget_accelerators()


def test_a_monitor_skips_steps_of_an_optimizer_that_is_wrapped() -> None:
    accelerator, model, optimizer, data = prepare(bad_at={2})
    with gradstat.Monitor(model, optimizer, on_anomaly={"error": ("skip", "record")}) as monitor:
        for x, y in data:
            loss = model(x, y)["loss"]
            accelerator.backward(loss)
            monitor.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.steps == 6
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_handle_left_behind_does_not_disturb_another_training() -> None:
    handle = install(prepare()[0])
    forget_accelerators()  # whose state the handle would ask whether gradients are complete
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert handle.monitor.steps == 0
    assert not handle.monitor.diagnose().ok
    assert "no step of an optimizer of Net has been seen" in handle.monitor.diagnose().headline()


def test_clips_outside_of_a_step_are_refused_or_reported() -> None:
    prepared = prepare(accumulated=2)
    accelerator, model, *_ = prepared
    with (
        install(accelerator, max_norm=0.5),
        pytest.raises(ValueError, match=r"clip configured twice: install\(..., max_norm=0.5\).* called with 1.0"),
    ):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    handle = install(accelerator)
    with pytest.warns(UserWarning, match=r"while gradients are still being accumulated") as warned:
        run(prepared)
    assert len(warned) == 1
    assert handle.monitor.steps == 3
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match="parameters that belong to no watched model"):
        norm = accelerator.clip_grad_norm_(other.parameters(), 0.1)
    assert float(norm) == pytest.approx(math.sqrt(3))
    assert float(gradstat.check(other).total_norm) == pytest.approx(0.1, rel=1e-4)
    handle.remove()
    with (
        install(accelerator, max_norm=gradstat.FixedClip(0.5)),
        accelerator.accumulate(model),
        pytest.warns(UserWarning, match="the partial gradients are not measured"),
    ):
        accelerator.clip_grad_norm_(model.parameters(), math.inf)


def test_bad_arguments_are_refused_before_training() -> None:
    for given, words in ((Accelerator, "the class Accelerator; pass an inst"), (1, "int")):
        with pytest.raises(TypeError, match=f"expected an accelerate.Accelerator, got {words}"):
            install(given)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(RuntimeError, match=r"got one without model; call install\(\) after accelerator.prepare"):
        install(accelerator)
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"got one without optimizer"):
        install(accelerator)
    accelerator.prepare(torch.optim.SGD(model.parameters()))
    for options, error, words in (
        ({"model": model}, TypeError, "model is taken from the accelerator"),
        ({"on_anomaly": "checkpoint"}, ValueError, "unknown policy 'checkpoint'"),
        ({"on_anomaly": "replay"}, TypeError, r"needs replay=step_fn, a function"),
    ):
        with pytest.raises(error, match=words):
            install(accelerator, **options)
    install(accelerator).remove()


@pytest.mark.parametrize(
    ("models", "words"), [(1, "a single optimizer for Linear, got 2"), (2, "a separate optimizer for each of 2 models")]
)
def test_steps_are_skipped_where_each_model_has_one_optimizer_of_its_own(models: int, words: str) -> None:
    accelerator = Accelerator(cpu=True)
    made = [nn.Linear(2, 2) for _ in range(models)]
    parameters = [parameter for model in made for parameter in model.parameters()]
    groups = [[parameter] for parameter in parameters] if models == 1 else [parameters]
    prepared = accelerator.prepare(*made, *(torch.optim.SGD(group) for group in groups))
    for options, name in (({"on_anomaly": "skip"}, "'skip'"), ({"max_norm": 1.0}, "max_norm")):
        with pytest.raises(ValueError, match=f"{name} needs {words}"):
            install(accelerator, **options)
    with install(accelerator) as handle:
        for _ in range(3):
            accelerator.backward(sum(model(torch.ones(1, 2)).sum() for model in prepared[:models]))
            for optimizer in reversed(prepared[models:]):
                optimizer.step()
    assert [monitor.steps for monitor in handle.monitors] == [3] * models


@on_ranks(2)
def test_sharded_parameters_are_whole() -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import fully_shard

    with accelerate_on_ranks():
        accelerator = Accelerator(cpu=True)
        # Accelerate shards on GPUs only, so the model is sharded here and registered with the accelerator.
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        model = Net()
        model.bad_at = {2} if torch.distributed.get_rank() == 1 else set()
        fully_shard(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
        accelerator._models.append(model)
        data = accelerator.prepare(loader(12))
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = "FSDP", plugin
        assert accelerator.is_fsdp2
        with install(accelerator, on_anomaly="skip") as handle:
            norms = []
            for x, y in data:
                accelerator.backward(model(x, y)["loss"])
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
        recording = handle.monitor.recording()
        assert all(p.full_tensor().isfinite().all() for p in model.parameters())  # type: ignore[attr-defined]
    assert "scalars" not in recording.tables, set(recording.tables)
    assert "not compared" in repr(handle.monitor)  # only what DDP replicates is
    assert recording.scalars["norm"].tolist() == pytest.approx(norms, rel=1e-5, nan_ok=True)
    assert_alike([norms, handle.monitor.findings, recording.scalars["loss"].tolist()])
    for numbers in (norms, recording.scalars["loss"]):
        assert [math.isnan(number) for number in numbers] == [False, False, True, False, False, False]
    assert ("nonfinite-loss", 2, "loss") in [(f.rule, f.step, f.name) for f in handle.monitor.findings]


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ("what it returns", None),
        ("own shards", "each rank reports the norm of its own tensors"),
        ("shards twice", "everything counted 2 times"),
    ],
)
@on_ranks(2)
def test_a_wrong_norm_of_its_clip_is_explained(reports: str, told: str | None) -> None:
    from torch.distributed.fsdp import fully_shard

    with accelerate_on_ranks():
        accelerator, model = Accelerator(cpu=True), Net()
        fully_shard(model)
        x, y = next(iter(loader(4)))
        accelerator.backward(model(x, y)["loss"])
        norm = accelerator.clip_grad_norm_(model.parameters(), math.inf)
    if reports == "own shards":
        norm = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]
    if reports == "shards twice":
        norm = norm.full_tensor() * 2**0.5
    audit = audit_norm(model, norm)
    assert audit.ok is (told is None), audit
    assert told is None or audit.explanations[0].text.startswith(told), audit


@pytest.mark.parametrize("how", ["accelerate", "monitor"])
@on_ranks(2)
def test_ranks_with_uneven_inputs_neither_hang_nor_compare(how: str) -> None:
    """Inside of DDP's ``join()`` some ranks take fewer steps, so nothing may wait for them."""
    model: Any = nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    options: Any = {"on_anomaly": "record", "watch": {"replicas": 2}}
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
            for _ in range(4 + 3 * torch.distributed.get_rank()):
                accelerator.backward(wrapped(torch.randn(4, 3)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert handle.monitor.steps == 4 + 3 * torch.distributed.get_rank()
        handle.monitor.flush()
        assert "replica-mismatch" not in {finding.rule for finding in handle.monitor.findings}
        handle.remove()


@on_ranks(2)
def test_a_state_that_one_rank_finds_unhealthy_is_saved_by_none(tmp_path: Path) -> None:
    with accelerate_on_ranks():
        prepared = prepare()
        with install(prepared[0], on_anomaly="record", healthy_checkpoints=True):
            run(prepared)
            assert prepared[0].save_state(str(tmp_path / "healthy")) is not None
            next(prepared[1].parameters()).detach().fill_(math.nan if torch.distributed.get_rank() == 1 else 1.0)
            assert prepared[0].save_state(str(tmp_path / "unhealthy")) is None


@on_ranks(2)
def test_only_what_ddp_replicates_is_compared_and_a_monitor_alone_says_that_nobody_looks() -> None:
    def compares(model: nn.Module) -> bool:
        with accelerate_on_ranks():
            accelerator = Accelerator(cpu=True)
            accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
            with install(accelerator, on_anomaly="record") as handle:
                return "not compared" not in repr(handle.monitor)

    model = nn.Linear(3, 1)
    assert compares(model)
    model._ddp_params_and_buffers_to_ignore = ["bias"]  # type: ignore[assignment]
    assert not compares(model)
    assert "replicas not compared: watch={'replicas': n}" in repr(gradstat.Monitor(model))
    assert "compared" not in repr(gradstat.Monitor(model, watch={"replicas": 10}))


@pytest.mark.parametrize("travels", [False, True])
@on_ranks(2)
def test_an_error_of_one_rank_that_the_program_catches_is_raised_once_on_every_rank(travels: bool) -> None:
    """Also where numbers and votes arrive a step later, as on a GPU."""
    raised = []
    with accelerate_on_ranks(), pytest.MonkeyPatch.context() as patch:
        if travels:
            numbers_travel(patch)
        accelerator, model, optimizer, data = prepare()
        with install(accelerator, on_anomaly="raise"):
            for step, (x, y) in enumerate([*data, *data]):
                accelerator.backward(model(x, y)["loss"])
                if step == 1 and torch.distributed.get_rank() == 0:  # as a flipped bit would
                    next(model.parameters()).grad[0] = math.nan
                try:
                    optimizer.step()
                except AnomalyError as error:
                    raised.append((step, "another rank found an anomaly; see the error on that rank" in str(error)))
                optimizer.zero_grad()
                optimizer.state.clear()  # what NaN has become a part of
                for parameter in model.parameters():
                    parameter.data.nan_to_num_()
    assert raised == [(3 if travels else 1, torch.distributed.get_rank() == 1)], raised
