"""Published faults, for the benchmark of detection: DEForm's mutation operators, and TrainCheck's silent errors.

The operators come from the package ``defaultplusplus`` (``pip install --no-deps defaultplusplus==0.4.1``) and are
applied to tiny BERT and GPT-2 models of transformers with random weights. TrainCheck's errors (OSDI 2025) are written
anew from their descriptions; those here need no GPU, and only what a monitor of gradients can see.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F  # noqa: N812
from detection_judging import ONSET, Case
from detection_mistakes import never_zeroed, of_a_copy
from helpers.training import CLASSES, TOKENS, Training, factory, train, train_mlp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

HAS_OPERATORS = find_spec("defaultplusplus") is not None and find_spec("transformers") is not None


class Sentences:
    """Token sequences, of which two tokens determine the next one three times out of four; the rest is chance.

    Their class, if ``classes``, is that of the first token, and wrong every fifth time. Both leave a loss that no model
    can get below. Token 0 pads the ends of half of the sequences.
    """

    def __init__(self, seed: int, length: int, size: int, has_classes: bool) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.follows = torch.randint(1, TOKENS, (TOKENS, TOKENS), generator=self.random)
        self.length, self.size, self.has_classes = length, size, has_classes

    def __call__(self) -> tuple[Tensor, Tensor]:
        shape = (self.size, self.length + 1)
        tokens = torch.randint(1, TOKENS, shape, generator=self.random)
        is_chance = torch.rand(shape, generator=self.random) < 0.25
        for i in range(2, self.length + 1):
            # Few of the pairs occur in few steps, so that only the parity of the older token counts.
            follows = self.follows[tokens[:, i - 2] % 2, tokens[:, i - 1]]
            tokens[:, i] = torch.where(is_chance[:, i], tokens[:, i], follows)
        ends = torch.randint(self.length // 2, 2 * self.length, (self.size, 1), generator=self.random)
        is_padding = torch.arange(self.length + 1) >= ends
        inputs = tokens.masked_fill(is_padding, 0)[:, : self.length]
        if not self.has_classes:
            return inputs, tokens.masked_fill(is_padding, -100)[:, 1:]
        wrong = torch.randint(CLASSES, (self.size,), generator=self.random)
        is_wrong = torch.rand(self.size, generator=self.random) < 0.2
        return inputs, torch.where(is_wrong, wrong, (tokens[:, 0] + tokens[:, 1] % 2) % CLASSES)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(input_ids=batch[0], attention_mask=(batch[0] != 0).long()).logits
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def _bert(width: int, layers: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=TOKENS, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, num_labels=CLASSES,
        intermediate_size=2 * width, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _gpt2(width: int, layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=TOKENS, n_positions=32, n_embd=width, n_layer=layers, n_head=2, embd_pdrop=0.0, resid_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _transformer(model: Callable[[], nn.Module], length: int, is_encoder: bool) -> Callable[[int], Training]:
    optimize = factory(torch.optim.AdamW, 3e-3)
    return lambda seed: train(seed, model, optimize, Sentences(seed, length, 16, is_encoder), loss=_loss)


# Each with its half, and its scope as DEForm names it.
TRANSFORMERS = (
    ("BERT, width 16", "tuning", "encoder", _transformer(lambda: _bert(16, 2), 8, True)),
    ("GPT-2, width 16", "tuning", "decoder", _transformer(lambda: _gpt2(16, 2), 8, False)),
    ("BERT, width 24", "figures", "encoder", _transformer(lambda: _bert(24, 3), 10, True)),
    ("GPT-2, width 24", "figures", "decoder", _transformer(lambda: _gpt2(24, 3), 10, False)),
)

# Where in a model an operator of each component is, by words in names of modules and parameters.
_PLACES = {
    "embedding": "embed|wte|wpe",
    "masking": "att",
    "qkv": "att|query|key|value|qkv",
    "score": "att",
    "positional": "position|wpe|embed",
    "kernel": "att",
    "variant": "att",
    "kv_cache": "att",
    "ffn": "intermediate|output|mlp|fc|proj",
    "layernorm": "[Nn]orm|ln_",
    "residual": "layer|encoder|block|^h|\\.h\\.",
    "output": "classifier|head|score|logits|loss",
}


def _operators() -> Iterator[Case]:
    """The operators for encoders or decoders, with the largest of numeric strengths or each of several choices."""
    from defaultplusplus.deform import OPERATORS, get_injector

    for subject, half, scope, training in TRANSFORMERS:
        for name, operator in OPERATORS.items():
            grid = operator.param_grid
            for value in (None,) if not grid else grid if isinstance(grid[-1], str) else grid[-1:]:
                if operator.scope not in (scope, "both"):
                    continue

                def breaks(training: Training, name: str = name, value: Any = value) -> None:
                    torch.manual_seed(0)  # of operators that draw numbers
                    get_injector(name, param_value=value)(training.model).__enter__()

                told = "" if value is None else f", {operator.param_name} {value}"
                what, component = f"{name}: {operator.root_cause.replace('_', ' ')}{told}", operator.component.value
                # Those of all layers, or of the last, change what all gradients come through.
                is_everywhere = component in ("layernorm", "residual", "output")
                for onset in (ONSET, 0):
                    yield Case(
                        "operators", half, subject, what, training, breaks, _PLACES[component], onset,
                        is_everywhere=is_everywhere,
                    )  # fmt: skip


def _on_ranks(seed: int) -> Training:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    made = train_mlp(2 * seed + rank, shown=False)
    torch.manual_seed(seed)  # torch's dropout and the like are the same on all ranks
    return made


def _frozen(training: Training) -> None:
    for parameter in list(training.model.parameters())[:4]:
        parameter.requires_grad_(False)


def _replaced(training: Training) -> None:
    """All parameters are new objects, as after a conversion that overwrites them; the optimizer gets the new ones."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        training.model.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    optimizer = training.optimizer
    training.optimizer = type(optimizer)(training.model.parameters(), lr=optimizer.param_groups[0]["lr"])


def _unwrapped(training: Training) -> None:
    """Every other step goes through the module without its DDP wrapper, so that its gradients are not averaged."""
    healthy, steps = training.loss, iter(range(1 << 30))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inner = model.module if isinstance(model, DistributedDataParallel) and next(steps) % 2 else model
        return healthy(inner, batch)

    training.loss = loss


def _clipped_on_one_rank(training: Training) -> None:
    training.max_norm = 0.05 if torch.distributed.get_rank() == 0 else None


def _rate_of_its_own(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= 1 + torch.distributed.get_rank()


def _silent_errors() -> Iterator[Case]:
    for what, breaks, ranks in (
        ("zero_grad is never called", never_zeroed, 1),
        ("the optimizer holds the parameters of another model", of_a_copy, 1),
        ("parameters that should train are frozen", _frozen, 1),
        ("parameters replaced after wrapping in DDP", _replaced, 2),
        ("every other step through the unwrapped module", _unwrapped, 2),
        ("gradients clipped on one rank only", _clipped_on_one_rank, 2),
        ("gradients never synced", lambda t: setattr(t.model, "require_backward_grad_sync", False), 2),
        ("another learning rate on each rank", _rate_of_its_own, 2),
    ):
        subject, training = ("MLP", train_mlp) if ranks == 1 else ("MLP, DDP on 2 ranks", _on_ranks)
        for onset in (ONSET, 0):
            yield Case(
                "silent errors", "both", subject, what, training, breaks, "", onset, ranks=ranks,
                broken_ranks=tuple(range(ranks)),
            )  # fmt: skip


def cases() -> Iterator[Case]:
    """The operators, if they are installed, and the silent errors."""
    return itertools.chain(_operators() if HAS_OPERATORS else (), _silent_errors())
