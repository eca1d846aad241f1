"""The integration with the Trainer of Hugging Face transformers, under the real Trainer."""

import contextlib
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.frameworks import QUIET, Net, samples, training_arguments
from helpers.travelling import numbers_travel
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from gradstat.integrations.transformers import STATE_FILE, GradstatCallback, install
from gradstat.monitor import AnomalyError


def dataset(count: int = 64) -> list[dict[str, torch.Tensor]]:
    return [{"x": x, "labels": y} for x, y in samples(count)]


class InOrder(Trainer):
    """Uses samples in the order of the data set, so that a test knows which step gets which."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


Make = Callable[..., Trainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(kind: type[Trainer] = InOrder, **changes: Any) -> Trainer:
        return kind(Net(), training_arguments(tmp_path, **changes), train_dataset=dataset(), eval_dataset=dataset(4))

    return made


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def trained(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


def test_logs_are_the_same_and_their_norms_are_right(make: Make) -> None:
    plain, watched = (make(gradient_accumulation_steps=2, max_grad_norm=0.5) for _ in range(2))
    plain.train()
    with install(watched) as handle:
        watched.train()
    assert logged(watched, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    assert logged(watched, "grad/total_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    assert min(logged(watched, "grad/total_norm")) > 0.5  # measured before clipping
    assert logged(watched, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-4)
    assert logged(watched, "grad/loss") == pytest.approx(logged(watched, "loss"), abs=1e-4)
    assert handle.monitor.diagnose().steps == handle.monitor.steps == 5


def test_a_real_model_with_its_default_optimizer(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    tokens = [torch.randint(64, (16,)) for _ in range(32)]
    data = [{"input_ids": t, "labels": t} for t in tokens]
    settings = training_arguments(tmp_path, bf16=True, learning_rate=1e-5)
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=data)
    with install(trainer, watch={"activations": 2, "updates": 1}, log="parameters") as handle:
        trainer.train()
    assert handle.monitor.diagnose().ok
    assert "transformer.h.1.mlp.c_fc.weight" in handle.monitor.recording().tables["update"].names
    assert len(logged(trainer, "grad/l2_norm/transformer.wte.weight")) == 5
    assert logged(trainer, "grad_norm") == pytest.approx(logged(trainer, "grad/total_norm"), rel=1e-4)


def test_the_log_may_have_few_numbers(make: Make) -> None:
    trainer = make()
    with install(trainer, log="findings"):
        trainer.train()
    added = {name for line in trainer.state.log_history for name in line if name.startswith("grad/")}
    assert added == {"grad/findings", "grad/nonfinite_steps"}
    assert logged(trainer, "grad_norm")


def test_remove_leaves_the_trainer_as_it_was(make: Make) -> None:
    trainer = make()
    before = (set(vars(trainer)), dict(vars(trainer.accelerator)), list(trainer.callback_handler.callbacks))
    install(trainer).remove()
    handle = install(trainer)
    original = trainer.log
    seen = []
    trainer.log = lambda logs, *a: (seen.append(logs), original(logs, *a))[1]  # type: ignore[method-assign]
    handle.remove()
    # The optimizer is made earlier than without gradstat.
    assert {k for k in vars(trainer) if k not in before[0]} <= {"optimizer_cls_and_kwargs", "log"}
    assert set(vars(trainer.accelerator)) == set(before[1])
    assert trainer.callback_handler.callbacks == before[2]
    trainer.train()
    assert seen  # a patch on top of gradstat's still works
    assert "grad_norm" in trainer.state.log_history[0]
    assert not logged(trainer, "grad/total_norm")
    assert handle.monitor.steps == 0


@QUIET
def test_an_infinite_gradient_is_named_though_the_trainer_spreads_it(make: Make) -> None:
    """With ``max_grad_norm=0`` the Trainer clips to infinity, which turns all gradients into NaN if one is infinite."""
    ended = []
    for watches in (False, True):
        trainer = make(max_grad_norm=0, max_steps=1, optim="sgd")
        trainer.model.last.bias.register_hook(lambda g: g * float("inf"))
        with install(trainer) if watches else contextlib.nullcontext() as handle:
            trainer.train()
        ended.append(trained(trainer))
        assert logged(trainer, "grad_norm") == [float("inf")]
    torch.testing.assert_close(*ended, rtol=0, atol=0, equal_nan=True)
    (found,) = [f for f in handle.monitor.findings if f.rule == "nonfinite-gradient"]
    assert (found.name, found.evidence["nonfinite_tensors"]) == ("last.bias", 1)


@pytest.mark.parametrize("hidden", [True, False])
def test_a_hidden_loss_is_reported(make: Make, hidden: bool) -> None:
    trainer = make(max_steps=3, logging_nan_inf_filter=hidden)
    trainer.model.bad_at = {1}
    with install(trainer, on_anomaly="skip"):
        words = warnings_of(trainer.train)
    assert sum("logging_nan_inf_filter=True replaces it by the average" in one for one in words) == hidden
    assert torch.tensor(logged(trainer, "grad/loss")).isnan().tolist() == [False, True, False]
    assert torch.tensor(logged(trainer, "loss")).isnan().any() != hidden
    assert trainer.lr_scheduler.last_epoch == 3  # schedulers advance: docs/integrations.md


@QUIET
def test_numbers_that_travel_are_read_a_step_later(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: there is a sync on logging steps only, and the bad step is still skipped."""
    numbers_travel(monkeypatch)
    trainer = make(gradient_accumulation_steps=2, max_steps=6, logging_steps=6)
    trainer.model.bad_at = {5}  # of step 2
    found_at: list[int] = []
    with install(trainer, on_anomaly=["skip", lambda monitor, finding: found_at.append(monitor.steps)]) as handle:
        trainer.train()
    assert set(found_at) == {4}  # when step 3, the fourth, was measured
    assert {finding.step for finding in handle.monitor.findings if finding.severity == "error"} == {2}
    assert all(value.isfinite().all() for value in trained(trainer).values())
    assert logged(trainer, "grad/total_norm") == pytest.approx(logged(trainer, "grad_norm"), rel=1e-5)
    assert handle.monitor.recording().steps.tolist() == list(range(6))  # every step is measured, whatever is logged


def saving(make: Make, strategy: str, steps: int) -> Trainer:
    """A Trainer whose gradients are NaN in step 5; an epoch has four steps."""
    settings = {"save_strategy": strategy, "save_steps": 2, "save_total_limit": 1}
    if strategy == "best":
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    trainer = make(max_steps=steps, per_device_train_batch_size=16, **settings)
    trainer.model.first.bias.register_hook(lambda g: g * math.nan if trainer.state.global_step == 5 else g)
    return trainer


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("strategy", ["no", "steps", "epoch", "best"])
def test_what_a_stop_saves(make: Make, tmp_path: Path, strategy: str, skips: bool) -> None:
    """Nonfinite parameters are not saved, and do not rotate out good checkpoints."""
    trainer = saving(make, strategy, 32)
    with install(trainer, on_anomaly=["skip", "stop"] if skips else "stop"):
        words = warnings_of(trainer.train)
    how = "with finite parameters" if skips else "without saving a checkpoint (Monitor.is_healthy is False)"
    assert sum(f"the Trainer stops after step 6, {how}" in one for one in words) == 1
    assert trainer.state.global_step == 6
    found = {path.parent: load_file(path) for path in tmp_path.glob("checkpoint-*/model.safetensors")}
    expected = [] if strategy == "no" else ["checkpoint-6"] if skips else ["checkpoint-4"]
    assert [folder.name for folder in found] == expected
    assert all(value.isfinite().all() for weights in found.values() for value in weights.values())
    assert all((folder / STATE_FILE).is_file() for folder in found)


@QUIET
@pytest.mark.parametrize("strategy", ["steps", "epoch", "best"])
def test_an_unhealthy_state_rotates_no_checkpoint_out(make: Make, tmp_path: Path, strategy: str) -> None:
    trainer = saving(make, strategy, 12)
    with install(trainer, on_anomaly=["skip", "record"], healthy_checkpoints=True):
        words = warnings_of(trainer.train)
    assert trainer.state.global_step == 12
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert sum("checkpoints are not saved until" in one for one in words) == 1


@QUIET
def test_a_checkpoint_restores_the_monitor(make: Make, tmp_path: Path) -> None:
    trainer = make(max_steps=4, save_strategy="steps", save_steps=2)
    trainer.model.bad_at = {1}
    install(trainer, on_anomaly="skip")
    trainer.train()
    for resume in (str(tmp_path / "checkpoint-2"), True):
        again = make(max_steps=6)
        with install(again, on_anomaly="skip") as handle:
            again.train(resume_from_checkpoint=resume)
        assert [f.step for f in handle.monitor.findings if f.rule == "nonfinite-gradient"] == [1]
        assert handle.monitor.recording().steps.tolist() == list(range(6))
        assert logged(again, "grad/nonfinite_steps")[-1] == 1


@QUIET
@pytest.mark.filterwarnings("ignore:gradstat.*could not be saved")
def test_a_missing_or_damaged_state(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder, payload = tmp_path / "checkpoint-2", io.BytesIO()
    trainer = make(max_steps=2, save_strategy="steps", save_steps=2)
    install(trainer)
    with monkeypatch.context() as patch:
        patch.setattr("gradstat.integrations.transformers.replacing", full)
        trainer.train()  # to its end
    assert trainer.state.global_step == 2
    assert not (folder / STATE_FILE).exists()
    again = make(max_steps=4)
    with install(again) as handle:
        again.train(resume_from_checkpoint=str(folder))
    assert handle.monitor.recording().steps.tolist() == [2, 3]
    torch.save({**handle.state_dict(), "also": Path("would be unpickled")}, payload)
    for content in (payload.getvalue()[:1000], b"", payload.getvalue()):
        (folder / STATE_FILE).write_bytes(content)
        again = make(max_steps=4)
        with install(again), pytest.raises(RuntimeError, match=rf"{STATE_FILE} is damaged.*Delete it to resume"):
            again.train(resume_from_checkpoint=str(folder))


def test_labels_are_checked_before_the_loss_fails_on_them(make: Make) -> None:
    def no_classes(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**sample, "labels": torch.tensor([7])}

    trainer = make()
    trainer.train_dataset = [no_classes(sample) for sample in dataset()]
    watching = install(trainer, on_anomaly="raise", num_classes=5, watch={"inputs": 1})
    with watching, pytest.raises(AnomalyError, match="labels"):
        trainer.train()


def test_a_negative_limit_of_the_trainer_is_none_and_the_same_limit_is_no_second_clip(make: Make) -> None:
    for limit, own in ((-1.0, None), (-1.0, 1.0), (1.0, 1.0)):
        with install(make(max_grad_norm=limit), max_norm=own) as watching:
            assert ("clip" in watching.monitor.settings.remedies) == (own is not None)


@pytest.mark.parametrize("by_torch", [True, False])
def test_a_trainer_with_its_own_clip_is_measured_before_it_or_with_a_warning(make: Make, by_torch: bool) -> None:
    class Own(InOrder):
        def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
            if by_torch:
                return nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with torch.no_grad():
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                for parameter in model.parameters():
                    parameter.grad *= 0.1 / norm
            return norm

    if not hasattr(Trainer, "_clip_grad_norm"):
        pytest.skip("this version has no such method to override")
    trainer = make(kind=Own)
    with install(trainer) as handle:
        words = warnings_of(trainer.train)
    assert sum("clips neither by the accelerator nor by torch" in one for one in words) == (not by_torch)
    assert handle.monitor.steps == 5
    assert (logged(trainer, "grad/total_norm") == pytest.approx(logged(trainer, "grad_norm"))) == by_torch
    assert (max(logged(trainer, "grad/total_norm")) < 0.11) != by_torch


TWICE = r"clip configured twice: max_norm=0.5, and the Trainer's max_grad_norm=1"
ALONE = r"callback alone cannot watch gradients.*install\(trainer\)"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda make: install(Trainer), TypeError, r"a transformers.Trainer, got the class Trainer; build it first"),
        (lambda make: install(nn.Linear(1, 1)), TypeError, r"expected a transformers.Trainer, got Linear"),
        (lambda make: install(make(), log="all"), ValueError, "log is 'all'"),
        (lambda make: install(make(max_grad_norm=1.0), max_norm=0.5), ValueError, TWICE),
        (lambda make: make().add_callback(GradstatCallback), RuntimeError, ALONE),
    ],
)
def test_bad_arguments_are_refused_before_training(make: Make, call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(make)


def test_a_monitor_made_later(tmp_path: Path) -> None:
    trainer = InOrder(model_init=Net, args=training_arguments(tmp_path), train_dataset=dataset())
    handle = install(trainer)
    with pytest.raises(RuntimeError, match="does not exist yet: it is made when training begins"):
        _ = handle.monitor
    trainer.train()
    assert handle.monitor.steps == 5
    handle.remove()


@pytest.mark.parametrize(("warmup_steps", "is_told"), [(20, False), (70, True)])
def test_a_warm_up_that_is_longer_than_the_training_is_told_before_it_ends(
    make: Make, warmup_steps: int, is_told: bool
) -> None:
    trainer = make(max_steps=60, warmup_steps=warmup_steps)
    handle = install(trainer)
    texts = [text for text in warnings_of(trainer.train) if "long-warm-up" in text]
    assert ["come to the 0.01 that its scheduler warms up to after 70, but" in text for text in texts] == [
        True
    ] * is_told
    known = handle.watched[0].batches, handle.watched[0].samples
    assert known == (len(trainer.get_train_dataloader()), len(trainer.train_dataset))  # type: ignore[arg-type]
