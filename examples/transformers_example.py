"""A small GPT-2 in the Trainer of transformers, in which a layer's gradient becomes NaN.

::

    pip install 'gradstat[transformers]'
    python examples/transformers_example.py

The model learns to predict bytes of Python's standard library, on the CPU, in about ten seconds. In a step halfway
through, a layer divides by a norm that is 0. The step is skipped and replayed, which names the operation and its line;
and training goes on. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradstat.demo import corpus
from gradstat.integrations.transformers import install


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive pieces of the standard library's sources, as bytes."""

    def __init__(self, length: int) -> None:
        self._bytes = corpus.read(corpus.standard_library(), limit=1_000_000)
        self._length = length

    def __len__(self) -> int:
        return len(self._bytes) // self._length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = self._bytes[i * self._length : (i + 1) * self._length].long()
        return {"input_ids": tokens, "labels": tokens}


class Fault:
    """Sets a layer's output to 0 and normalises it without an eps, in one micro-batch of one step."""

    def __init__(self, layer: torch.nn.Module, trainer: Trainer, step: int) -> None:
        self._trainer, self._step, self._passes = trainer, step, 0
        layer.register_forward_hook(self._after)

    def _after(self, layer: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self._passes += 1
        if self._trainer.state.global_step != self._step or self._passes % 2:
            return output
        empty = output * 0
        nothing: torch.Tensor = empty.norm(dim=-1, keepdim=True)
        return empty / nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(model, arguments, train_dataset=Texts(64))
        handle = install(trainer, on_anomaly=["warn", "skip", "replay"])
        Fault(model.get_submodule("transformer.h.1.mlp"), trainer, step=options.steps // 2)
        trainer.train()
        print(handle.monitor.diagnose())
        handle.remove()


if __name__ == "__main__":
    main()
