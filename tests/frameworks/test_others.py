"""Trainers and optimizers that need no adapter: torch_optimizer, Ignite, an unmodified recipe of torchtune, and TRL."""

import importlib.util
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_optimizer
import torchtune
from datasets import Dataset
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torchtune.models.llama2 import llama2
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import gradstat
from gradstat.integrations.transformers import install
from gradstat.monitor import AnomalyWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own warnings
    from ignite.engine import create_supervised_trainer

NAMES = sorted(set(torch_optimizer._NAME_OPTIM_MAP) - {"lookahead"})  # it wraps another optimizer


def trained(kind: Any, watched: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = kind(model.parameters(), lr=1e-3)
    handle = gradstat.auto(optimizer, model, on_anomaly="record") if watched else None
    for _ in range(12):
        optimizer.zero_grad()
        (model(torch.randn(16, 4)) - 1).square().mean().backward()
        optimizer.step()
    return list(model.parameters()), handle


@pytest.mark.filterwarnings("ignore:This overload of:UserWarning")  # torch's warning about these optimizers
@pytest.mark.parametrize("name", NAMES)
def test_torch_optimizer(name: str) -> None:
    """The same bits, and no findings or warnings."""
    alone, _ = trained(torch_optimizer._NAME_OPTIM_MAP[name], False)
    watched, handle = trained(torch_optimizer._NAME_OPTIM_MAP[name], True)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert handle.monitor.steps == 12
    assert not handle.monitor.findings


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("scaled", [False, True])
def test_ignite_with_accumulated_steps(scaled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    mode = {"amp_mode": "amp", "scaler": torch.amp.GradScaler("cpu")} if scaled else {}
    trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, gradient_accumulation_steps=2, **mode)
    handle = gradstat.auto(optimizer, model)
    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(12)]
    batches[7][0][1, 2] = math.nan
    with pytest.warns(AnomalyWarning) as caught:
        trainer.run(batches, max_epochs=1)
    assert __file__ in {warning.filename for warning in caught}
    assert handle.monitor.steps == 6
    assert {finding.step for finding in handle.monitor.findings if finding.severity == "error"} >= {3}
    assert handle.monitor.findings[0].step == 3
    handle.remove()


SHAPE = {"vocab_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16, "max_seq_len": 32}


class Checkpointer:
    def __init__(self, model_type: str, should_load_recipe_state: bool) -> None:
        pass

    def load_checkpoint(self) -> dict[str, Any]:
        return {"model": llama2(**SHAPE).state_dict()}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        pass


class Tokens:
    pad_id = 0


def dataset(tokenizer: Tokens, **_: Any) -> list[dict[str, list[int]]]:
    tokens = torch.randint(1, 32, (16, 12)).tolist()
    return [{"tokens": line, "labels": line} for line in tokens]


def recipe(folder: Path, **changes: Any) -> Any:
    """Loads the recipe from its file, which is a program and cannot be imported by name."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    here = __name__
    settings = {
        **{"device": "cpu", "dtype": "fp32", "seed": 0, "epochs": 1, "batch_size": 2, "output_dir": str(folder)},
        **dict.fromkeys(("resume_from_checkpoint", "optimizer_in_bwd", "compile", "shuffle"), False),
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 2,
        "checkpointer": {"_component_": f"{here}.Checkpointer", "model_type": "LLAMA2"},
        "model": {"_component_": "torchtune.models.llama2.llama2", **SHAPE},
        "tokenizer": {"_component_": f"{here}.Tokens"},
        "dataset": {"_component_": f"{here}.dataset"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder)},
        **changes,
    }
    configuration = OmegaConf.create(settings)
    made = module.FullFinetuneRecipeSingleDevice(configuration)
    made.setup(configuration)
    return made


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_bad_step_of_torchtune_is_named_before_the_clip(clip: float | None, tmp_path: Path) -> None:
    made = recipe(tmp_path, clip_grad_norm=clip)
    handle = gradstat.auto(made._optimizer, made._model)
    name = "layers.1.attn.q_proj.weight"
    parameter = dict(made._model.named_parameters())[name]
    parameter.register_hook(lambda gradient: gradient * math.nan if made.global_step == 2 else gradient)
    with pytest.warns(AnomalyWarning, match=name):
        made.train()
    made.cleanup()
    assert handle.monitor.steps == 4
    found = handle.monitor.findings[0]
    assert (found.step, found.name, found.evidence["nonfinite_tensors"]) == (2, name, 1)
    assert (handle.monitor.recording().scalars["norm"][:2] > 0.1).all()  # divided by tokens, and before the clip
    handle.remove()


def parts() -> dict[str, Any]:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=16, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0
    )
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return {
        "model": GPT2LMHeadModel(config),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
    }


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_a_bad_step_of_trl_is_named_and_skipped(kind: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 4, "use_cpu": True, "report_to": []}
    settings |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "bf16": False}
    if kind == "SFT":
        arguments = SFTConfig(per_device_train_batch_size=2, max_length=16, **settings)
        data = Dataset.from_list([{"text": "a b c d e f g h"}] * 16)
        trainer = SFTTrainer(args=arguments, train_dataset=data, **parts())
    else:
        arguments = GRPOConfig(per_device_train_batch_size=4, num_generations=4, max_completion_length=8, **settings)
        trainer = GRPOTrainer(
            args=arguments,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            train_dataset=Dataset.from_list([{"prompt": "a b c"}] * 16),
            **parts(),
        )
    name = "transformer.h.0.ln_1.bias"
    parameter = dict(trainer.model.named_parameters())[name]
    parameter.register_hook(lambda gradient: gradient * math.nan if trainer.state.global_step == 2 else gradient)
    with install(trainer, on_anomaly=["warn", "skip"]) as handle, pytest.warns(AnomalyWarning, match=name):
        trainer.train()
    assert handle.monitor.steps == 4
    assert [(f.step, f.rule, f.name) for f in handle.monitor.findings] == [(2, "nonfinite-gradient", name)]
    assert all(value.isfinite().all() for value in trainer.model.parameters())
    shown = [entry["grad/total_norm"] for entry in trainer.state.log_history if "grad/total_norm" in entry]
    assert [math.isfinite(norm) for norm in shown] == [True, True, False, True]
