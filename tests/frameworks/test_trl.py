"""TRL's trainers are subclasses of transformers' Trainer, so `install` works for them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from gradstat.integrations.transformers import install
from gradstat.monitor import AnomalyWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_a_bad_step_is_named_and_skipped(kind: str, tmp_path: Path) -> None:
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
