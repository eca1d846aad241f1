"""The Lightning callback in real trainings on the CPU: what it measures, clips, decides, logs, keeps and refuses."""

import csv
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from helpers.frameworks import OF_FRAMEWORKS, QUIET, lightning_trainer
from helpers.processes import Forks
from helpers.ranks import on_ranks
from helpers.ranks_of_frameworks import lightning_on_ranks
from helpers.travelling import numbers_travel
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import gradstat
from gradstat.integrations.lightning import GradstatCallback
from gradstat.monitor import Finding, Rule, default_rules, rule
from gradstat.monitor.ranks import RankVotes

pytestmark = [*OF_FRAMEWORKS, QUIET]


class Model(pl.LightningModule):
    """A small net whose loss is bad in some steps: ``spoil`` maps them to kinds of faults."""

    def __init__(self, make: Callable[..., Any] = torch.optim.SGD, spoil: dict[int, str] | None = None, **options: Any):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.make, self.spoil, self.options = make, spoil or {}, {"lr": 0.1, **options}
        self.gradients: list[dict[str, Tensor]] = []
        self.clipped: list[float] = []

    def loss_of(self, batch: Any) -> Tensor:
        x, y = batch
        outputs = self.net(x)
        kind = self.spoil.get(self.global_step)
        if kind == "sqrt":  # finite, with an infinite derivative
            outputs = outputs * (1 + torch.sqrt(outputs - outputs))
        elif kind == "nan":
            outputs = outputs * math.nan
        return nn.functional.cross_entropy(outputs, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("calls", 1.0, reduce_fx="sum", on_epoch=True, on_step=False, logger=False)
        loss = self.loss_of(batch)
        self.log("train_loss", loss, logger=False)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(self.whole())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.clipped.append(norm_of(self.whole()))

    def whole(self) -> dict[str, Tensor]:
        """The gradients, of all shards."""
        found: dict[str, Any] = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        return {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in found.items()}

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), **self.options)


def data(batches: int = 8, seed: int = 5) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * batches, 6, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (4 * batches,), generator=generator)), batch_size=4)


def fit(callback: Any, model: pl.LightningModule, batches: int = 8, **options: Any) -> pl.Trainer:
    made = lightning_trainer(callback, **options)
    made.fit(model, data(batches))
    return made


def test_a_warm_up_that_is_longer_than_the_training_is_told_before_it_ends() -> None:
    class Warming(Model):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.01)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 70))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    for max_steps, is_told in ((60, True), (80, False)):
        callback = GradstatCallback()
        fit(callback, Warming(), 90, max_steps=max_steps)
        told = [found.text for found in callback.monitor.findings if found.rule == "long-warm-up"]
        assert ["after 70, but the run has 60" in text for text in told] == [True] * is_told
        assert (callback.watched[0].batches, callback.watched[0].samples) == (90, 360)


@pytest.mark.parametrize("is_one", [False, True])
def test_an_optimizer_that_replaces_that_of_the_trainer_is_told_by_one_monitor(is_one: bool) -> None:
    class Replacing(Model):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if not is_one or batch_idx == 0:
                self.trainer.optimizers = [torch.optim.SGD(self.parameters(), 0.01)]

    callback = GradstatCallback(on_anomaly="record")
    fit(callback, Replacing(), 120)
    (monitor,) = callback.monitors
    assert monitor.steps == 120
    (told,) = (found.text for found in monitor.findings if found.rule == "optimizer-coverage")
    assert "another optimizer (SGD) steps the same parameters" in told


def scaled() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]}


def norm_of(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def norms(callback: GradstatCallback) -> list[float]:
    return callback.monitor.recording().scalars["norm"].tolist()


def test_max_norm_leaves_the_trainers_settings_and_the_optimizer_as_they_are() -> None:
    """Also if the fit fails between clip and step."""
    seen: list[Any] = []

    class Overriding(Model):
        def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:  # type: ignore[override]
            seen.append(options["gradient_clip_val"])
            self.clip_gradients(optimizer, **options)
            if self.spoil:
                raise ZeroDivisionError

    model = Overriding()
    made = fit(GradstatCallback(max_norm=0.02, on_anomaly="record"), model)
    assert set(seen) == {None}
    assert model.clipped == pytest.approx([0.02] * 8, rel=1e-3)
    assert not {"clip_gradients", "optimizer_step"} & set(vars(made.precision_plugin))
    made = lightning_trainer(GradstatCallback(max_norm=0.01), **scaled())
    with pytest.raises(ZeroDivisionError):
        made.fit(Overriding(torch.optim.AdamW, {7: "nan"}, fused=True), data())
    assert made.gradient_clip_val is None
    assert not {"grad_scale", "found_inf"} & set(vars(made.strategy.optimizers[0]))


@pytest.mark.parametrize("options", [{}, scaled()], ids=["float32", "scaled"])
def test_a_module_that_changes_gradients_before_they_are_clipped_is_measured_once(options: dict[str, Any]) -> None:
    class Doubling(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            super().on_before_optimizer_step(optimizer)
            for parameter in self.parameters():
                parameter.grad *= 2  # type: ignore[operator]

    callback, model = GradstatCallback(on_anomaly="record"), Doubling()
    fit(callback, model, gradient_clip_val=0.5, **options)
    assert norms(callback) == pytest.approx([norm_of(gradients) for gradients in model.gradients], rel=1e-5)


def test_a_child_that_the_training_step_calls_is_watched_for_inputs_and_outputs() -> None:
    """The forward pass of the module itself is never called."""

    class Activated(Model):
        def loss_of(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x.log() if self.global_step == 6 else x), y)

    model = Activated()
    model.net.append(nn.Sigmoid())
    callback = GradstatCallback(on_anomaly="record")
    fit(callback, model)
    found = [(one.rule, one.name) for one in callback.monitor.findings]
    assert {("activation-before-softmax", "logits"), ("nonfinite-batch", "input[0]")} <= set(found)


def test_a_clip_by_value_stays_lightnings() -> None:
    trained = []
    for callbacks in ([], GradstatCallback(on_anomaly="record")):
        torch.manual_seed(1)
        trained.append(Model())
        fit(callbacks, trained[-1], gradient_clip_val=0.01, gradient_clip_algorithm="value")
    assert all(map(torch.equal, trained[0].parameters(), trained[1].parameters()))


def test_stop_and_checkpoint(tmp_path: Path) -> None:
    model = Model(spoil={3: "nan"})
    callback = GradstatCallback(on_anomaly=["stop", "checkpoint", "skip"], save_dir=tmp_path)
    assert fit(callback, model).global_step == 4
    (saved,) = callback.checkpoints
    assert saved == tmp_path / "gradstat-step3.ckpt"
    state = torch.load(saved, weights_only=True)
    assert state["global_step"] == 3
    assert all(value.isfinite().all() for value in state["state_dict"].values())
    assert state["callbacks"]["GradstatCallback"]["monitors"][0]["steps"] == 4


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(
    "saving",
    [
        {"every_n_train_steps": 1, "save_last": True},
        {"every_n_train_steps": 2},
        {"every_n_epochs": 1, "save_last": "link"},
        {"save_on_train_epoch_end": False, "save_last": True},
        {"every_n_train_steps": 1, "monitor": "train_loss"},
        {"every_n_train_steps": 50, "save_last": True},
    ],
)
def test_what_a_stop_lets_others_save(tmp_path: Path, saving: dict[str, Any], skips: bool) -> None:
    """Nonfinite parameters are not saved, and do not rotate out good checkpoints."""

    class Validated(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss_of(batch)

    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=1, **saving)
    callback = GradstatCallback(on_anomaly=["skip", "stop"] if skips else "stop")
    made = lightning_trainer([checkpoint, callback], max_epochs=4, enable_checkpointing=True)
    made.fit(Validated(spoil={5: "sqrt"}), data(4), data(1))
    assert callback.should_stop
    assert made.global_step == 6
    files = list(tmp_path.glob("*.ckpt"))
    assert bool(files) == (skips or saving.get("every_n_train_steps") != 50)
    for file in files:
        state = torch.load(file, weights_only=True)
        assert all(value.isfinite().all() for value in state["state_dict"].values()), file
    assert not {"_save_topk_checkpoint", "_save_last_checkpoint"} & set(vars(checkpoint))


@pytest.mark.parametrize("skips", [False, True])
def test_an_unhealthy_state_replaces_no_checkpoint(tmp_path: Path, skips: bool) -> None:
    """Whether or not parameters are finite; a healthy state is saved as usual."""
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    callback = GradstatCallback(on_anomaly=["skip", "record"] if skips else "record", healthy_checkpoints=True)
    made = lightning_trainer([checkpoint, callback], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="checkpoints are not saved until") as warned:
        made.fit(Model(spoil={5: "nan"}), data(8))
    assert made.global_step == 8
    assert {torch.load(file, weights_only=True)["global_step"] for file in tmp_path.glob("*.ckpt")} == {5}
    assert sum("checkpoints are not saved" in str(one.message) for one in warned) == 1


@pytest.mark.parametrize(
    ("accumulate", "options"), [(3, {}), (1, {"precision": "bf16-mixed"}), (1, scaled()), (3, scaled())]
)
def test_the_step_that_runs_again_gives_the_same_gradients(accumulate: int, options: dict[str, Any]) -> None:
    compared: list[int] = []

    def repeat(trainer: Any, module: Any, optimizer: Any) -> None:
        before = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        compared.append(len(callback._step_replay()))
        torch.testing.assert_close([p.grad for p in module.parameters()], before, rtol=0, atol=0)

    class Dropping(Model):
        def loss_of(self, batch: Any) -> Tensor:
            return super().loss_of((nn.functional.dropout(batch[0], 0.5), batch[1]))

    callback = GradstatCallback(on_anomaly=["replay"])
    model = Dropping(torch.optim.AdamW, fused=True)  # a scaler does not unscale its gradients
    callbacks = [LambdaCallback(on_before_optimizer_step=repeat), callback]
    made = fit(callbacks, model, batches=6, accumulate_grad_batches=accumulate, **options)
    assert compared == [accumulate] * (6 // accumulate)
    assert made.callback_metrics["calls"] == 6  # a replay logs nothing


class Two(pl.LightningModule):
    """Two nets, or only the first, that are trained alternately, with manual optimization."""

    clip: Any = None  # as `(module, optimizer, parameters) -> None`

    def __init__(self, bad: int | None = None, names: str = "ab") -> None:
        super().__init__()
        self.automatic_optimization = False
        for name in names:
            self.add_module(name, nn.Linear(6, 3))
        self.bad = bad
        self.norms: dict[str, list[float]] = {name: [] for name in names}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x, y), optimizers = batch, self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for (name, net), optimizer in zip(self.named_children(), optimizers, strict=True):
            loss = nn.functional.cross_entropy(net(x), y) * (math.nan if batch_idx == self.bad and name == "b" else 1)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.norms[name].append(norm_of({n: p.grad for n, p in net.named_parameters()}))  # type: ignore[misc]
            if self.clip is not None:
                self.clip(optimizer, net.parameters())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.children()]


def test_several_optimizers_have_a_monitor_each(tmp_path: Path) -> None:
    callback = GradstatCallback(max_norm=0.05, on_anomaly=["skip", "record"], log_every=2)
    model = Two(bad=5)
    logger = CSVLogger(tmp_path)
    fit(callback, model, logger=logger)
    a, b = callback.monitors
    assert [monitor.diagnose().model for monitor in (a, b)] == ["a", "b"]
    assert a.recording().tables["gradient"].names == ("a.weight", "a.bias")
    assert a.recording().scalars["norm"].tolist() == pytest.approx(model.norms["a"], rel=1e-6)
    assert b.recording().scalars["norm"].tolist() == pytest.approx(model.norms["b"], rel=1e-6, nan_ok=True)
    assert {finding.step for finding in b.findings if finding.severity == "error"} == {5}
    assert not [finding for finding in a.findings if finding.severity == "error"]
    assert all(p.isfinite().all() for p in model.parameters())
    assert norm_of({n: p.grad for n, p in model.a.named_parameters()}) == pytest.approx(0.05, rel=1e-3)  # type: ignore[misc]
    logger.save()
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "grad/0/total_norm" in header
    assert "grad/1/total_norm" in header


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize(
    "clip",
    [
        lambda module, optimizer, _: module.clip_gradients(optimizer, 0.01, "norm"),
        lambda module, optimizer, _: module.clip_gradients(optimizer, 0.01, "value"),
        lambda _module, _optimizer, parameters: nn.utils.clip_grad_norm_(parameters, 0.01),
        lambda _module, _optimizer, parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    ],
)
def test_under_manual_optimization_a_clip_in_the_step_is_measured_before(
    clip: Any, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Two, "clip", clip)
    callback, model = GradstatCallback(on_anomaly="record"), Two(names=names)
    fit(callback, model)
    for monitor, name in zip(callback.monitors, names, strict=True):
        scalars = monitor.recording().scalars
        assert scalars["norm"].tolist() == pytest.approx(model.norms[name], rel=1e-5)
        assert not any(map(math.isnan, scalars["loss"]))


def test_a_skipped_step_is_shown_logged_saved_and_resumed_behind(tmp_path: Path) -> None:
    shown: list[Any] = []

    def scheduled(parameters: Any, lr: float) -> Any:
        optimizer = torch.optim.SGD(parameters, lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def show(trainer: Any, *_: Any) -> None:
        shown.append(trainer.progress_bar_metrics.get("gradstat"))

    first = GradstatCallback(
        max_norm=gradstat.AutoClip(percentile=50), on_anomaly=["skip", "record"], per_tensor=("l2_norm",), top=None
    )
    model, loggers = Model(scheduled, {3: "nan"}), [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "tb")]
    callbacks = [first, LambdaCallback(on_train_batch_end=show)]
    made = fit(callbacks, model, enable_progress_bar=True, logger=loggers, log_every_n_steps=3)
    assert shown[2:4] == [None, "step 3: the loss is NaN"]
    (configured,) = made.lr_scheduler_configs
    assert configured.scheduler.last_epoch == made.global_step == 8  # schedulers advance
    rows = list(csv.DictReader((Path(loggers[0].log_dir) / "metrics.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == [2, 5]
    assert [float(row["grad/total_norm"]) for row in rows] == pytest.approx([norms(first)[i] for i in (2, 5)])
    expected = float(model.gradients[2]["net.0.weight"].norm())
    assert float(rows[0]["grad/l2_norm/net.0.weight"]) == pytest.approx(expected)
    events = EventAccumulator(loggers[1].log_dir)
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("grad/total_norm")]
    assert logged == [(step, pytest.approx(norms(first)[step], rel=1e-6)) for step in (2, 5)]
    made.save_checkpoint(tmp_path / "last.ckpt")
    again, silent = gradstat.AutoClip(percentile=50), CSVLogger(tmp_path)
    second = GradstatCallback(max_norm=again, on_anomaly="record", log_every=0)
    made = lightning_trainer(second, max_epochs=2, logger=silent, log_every_n_steps=1)
    made.fit(Model(scheduled), data(), ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    assert silent.experiment.metrics == []
    assert second.monitor.steps == 16
    assert second.monitor.recording().steps.tolist() == list(range(16))
    assert second.monitor.findings[: len(first.monitor.findings)] == first.monitor.findings
    assert again.summary().steps == 15  # the skipped step had nothing to clip


def test_a_negative_clip_of_the_trainer_is_none() -> None:
    for own in (None, 1.0):
        callback = GradstatCallback(max_norm=own, on_anomaly="record")
        fit(callback, Model(), gradient_clip_val=-1.0)
        assert ("clip" in callback.monitor.settings.remedies) == (own is not None)


class Iterating(Model):
    def training_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("options", "model", "words"),
    [
        ({"maxnorm": 1.0}, None, r"GradstatCallback\(\) has no argument 'maxnorm'; did you mean 'max_norm'\?"),
        ({"log_every": -1}, None, "log_every is -1"),
        ({"on_anomaly": "explode"}, None, "unknown policy 'explode'; known: record, .*checkpoint"),
        ({"per_tensor": ("median",)}, None, "per_tensor: unknown name 'median'"),
        ({"watch": "gradient"}, None, "cannot watch 'gradient'; known: gradients"),
        ({"optimizer": None}, None, "optimizer is taken from the trainer; leave it out"),
        ({"max_norm": -1}, None, "max_norm is -1"),
        ({"max_norm": "1"}, None, "max_norm: expected a number"),
        ({"max_norm": 1.0}, Model, r"max_norm=1\.0\) and Trainer\(gradient_clip_val=0\.5\).*Set only one"),
        ({"on_anomaly": "replay"}, Two, "replay needs a function that runs the step under manual optimization"),
        ({"on_anomaly": "replay"}, Iterating, "dataloader_iter, which cannot be rewound"),
    ],
)
def test_what_cannot_be_done_is_refused(options: Any, model: Any, words: str) -> None:
    """Without a trainer, if that needs none."""
    with pytest.raises((TypeError, ValueError), match=words):
        fit(GradstatCallback(**options), model(), gradient_clip_val=0.5 if model is Model else None)


def test_a_callback_can_be_pickled_and_is_the_only_one() -> None:
    own = default_rules()[0]
    callback = GradstatCallback(on_anomaly={own.name: "checkpoint"}, rules=[own], watch={"origin": 1}, log_every=0)
    assert pickle.loads(pickle.dumps(callback)).monitors == ()
    made = lightning_trainer(callback)
    made.callbacks.append(GradstatCallback())
    with pytest.raises(RuntimeError, match=r"expected one GradstatCallback .* found 2.* Remove"):
        made.fit(Model(), data())


def test_a_step_of_lbfgs_is_measured_once_and_each_evaluation_is_clipped() -> None:
    norms_seen: list[float] = []

    class Recording(torch.optim.LBFGS):
        def _gather_flat_grad(self) -> Tensor:  # what it reads after each evaluation
            flat: Tensor = super()._gather_flat_grad()  # type: ignore[misc]
            norms_seen.append(float(flat.norm()))
            return flat

    callback = GradstatCallback(max_norm=1e-3, on_anomaly="record")
    model = Model(Recording, max_iter=3)
    made = fit(callback, model, batches=2)
    assert callback.monitor.steps == made.global_step == 2 < len(model.gradients)
    assert norms_seen == pytest.approx([1e-3] * len(norms_seen), rel=2e-3)
    assert norms(callback)[0] == pytest.approx(norm_of(model.gradients[0]))


def test_frameworks_are_imported_on_demand_and_missing_ones_are_named(forks: Forks) -> None:
    printed = forks.output_of(
        """
        import importlib, sys, warnings
        from types import ModuleType
        import gradstat, gradstat.monitor, gradstat.integrations, gradstat.integrations.loggers
        heavy = {"lightning", "pytorch_lightning", "tensorboard", "wandb", "mlflow", "transformers", "accelerate"}
        print(sorted(heavy & set(sys.modules)))

        missing = dict.fromkeys(["lightning", "lightning.pytorch", "pytorch_lightning"])
        old = ModuleType("accelerate")
        old.__version__ = "0.34.2.dev0"
        for name, module in (("lightning", None), ("accelerate", None), ("accelerate", old)):
            sys.modules.update(missing, accelerate=module)
            try:
                importlib.import_module(f"gradstat.integrations.{name}")
            except ImportError as error:
                print(error)
        for name in (*missing, "accelerate"):
            del sys.modules[name]

        warnings.simplefilter("ignore")
        import pytorch_lightning as pl
        from pytorch_lightning.demos.boring_classes import BoringModel
        from gradstat.integrations.lightning import GradstatCallback
        callback = GradstatCallback(max_norm=1.0)
        off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        trainer = pl.Trainer(max_steps=4, limit_val_batches=0, accelerator="cpu", callbacks=[callback], **off)
        trainer.fit(BoringModel())
        print(isinstance(callback, pl.Callback), callback.monitor.steps)
        """
    ).splitlines()
    assert printed[0] == "[]"
    assert "neither lightning nor pytorch_lightning is installed; pip install 'gradstat[lightning]'" in printed[1]
    assert "needs accelerate>=1.0, which is not installed: pip install -U 'accelerate>=1.0'" in printed[2]
    assert "needs accelerate>=1.0, found 0.34.2.dev0: pip install -U 'accelerate>=1.0'" in printed[3]
    assert printed[-1] == "True 4"  # pytorch_lightning is served under its own name


@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}])
def test_a_training_without_an_optimizer_goes_on(options: dict[str, Any]) -> None:
    class Untrained(Model):
        def configure_optimizers(self) -> None:
            return None

    callback = GradstatCallback(on_anomaly="record", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = fit(callback, Untrained())
    assert made.global_step == 8


def fit_on_ranks(callbacks: list[Any], model: pl.LightningModule, strategy: Any = "ddp", **options: Any) -> pl.Trainer:
    """Trains on all ranks, each with its own data."""
    settings = {"devices": dist.get_world_size(), "plugins": [lightning_on_ranks()], "use_distributed_sampler": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = lightning_trainer(callbacks, strategy=strategy, **settings, **options)
        made.fit(model, data(seed=dist.get_rank()))
    return made


@rule("wanted", severity="error")
def wanted(self: Rule, window: Any) -> list[Finding]:
    """Finds something in step 3, on rank 1 only."""
    is_here = dist.get_rank() == 1 and 3 in window.steps
    return [self.found(3, "loss", "it is here")] if is_here else []


def stops(monitor: gradstat.Monitor, _finding: Finding) -> None:
    monitor.should_stop = True


@pytest.mark.parametrize("policy", [stops, "checkpoint"])
@on_ranks(2)
def test_policies_of_one_rank_are_carried_out_on_all(policy: Any, tmp_path: Path) -> None:
    rules, options = [*default_rules(), wanted()], {"review_every": 1}
    callback = GradstatCallback(on_anomaly=["record", policy], rules=rules, options=options, save_dir=tmp_path)
    assert fit_on_ranks([callback], Model()).global_step == (4 if policy is stops else 8)
    assert callback.checkpoints == [tmp_path / "gradstat-step3.ckpt"] * (policy == "checkpoint")
    assert all(path.exists() for path in callback.checkpoints)


class _Sharded(Model):
    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@on_ranks(2)
def test_sharded_gradients_are_measured_and_clipped_as_a_whole() -> None:
    model = _Sharded(torch.optim.AdamW, {3: "sqrt"} if dist.get_rank() == 1 else {})
    callback = GradstatCallback(max_norm=0.01, on_anomaly=["skip", "record"])
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    assert fit_on_ranks([callback], model, strategy).global_step == 8
    assert all(p.to_local().isfinite().all() for p in model.parameters())  # type: ignore[attr-defined]
    assert norms(callback) == pytest.approx([norm_of(g) for g in model.gradients], rel=1e-6, nan_ok=True)
    assert [math.isfinite(norm) for norm in norms(callback)] == [step != 3 for step in range(8)]
    assert model.clipped[:3] + model.clipped[4:] == pytest.approx([0.01] * 7, abs=1e-5)


@on_ranks(2)
def test_votes_that_travel_arrive_once_and_a_step_later_on_all_ranks_and_means_are_of_ranks_with_a_number() -> None:
    """As on a GPU, where calls do not wait for votes; a call that waits also gets those of the call before."""
    first = dist.get_rank() == 0
    losses = RankVotes(torch.device("cpu"))
    assert losses.mean(torch.tensor(3.0 if first else 5.0)) == 4.0
    assert losses.mean(None if first else torch.tensor(3.0)) == (None if first else 3.0)
    calls = [([first, False], False), ([False, False], False), ([False, first], False)]
    calls += [([False, False], True)] * 2
    with pytest.MonkeyPatch.context() as patch:
        numbers_travel(patch)
        votes = RankVotes(torch.device("cpu"))
        received = [votes.any_of(wants, wait) for wants, wait in calls]
    assert received == [[False, False], [True, False], [False, False], [False, True], [False, False]]
