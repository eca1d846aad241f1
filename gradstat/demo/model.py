"""A GPT, by default on bytes: embeddings, then pre-norm blocks of causal attention and an MLP."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a model and its batches."""

    layers: int
    width: int
    heads: int
    context: int  # tokens that a prediction sees, and the length of a training sample
    batch: int
    vocabulary: int = 256  # bytes
    tied: bool = False  # whether the head shares the embedding's weight, as in GPT-2


TINY = Size(layers=2, width=32, heads=2, context=32, batch=4)
SMALL = Size(layers=4, width=128, heads=4, context=64, batch=8)
MEDIUM = Size(layers=8, width=512, heads=8, context=256, batch=32)
# A step takes about 85 ms on two cores of a server: 17 M parameters, one sample.
MODEST = Size(layers=6, width=384, heads=6, context=64, batch=1, vocabulary=16384, tied=True)
GPT2 = Size(layers=12, width=768, heads=12, context=1024, batch=4, vocabulary=50257, tied=True)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class Block(nn.Module):
    """One layer: attention, then an MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        up, down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """Predicts the next token at every position."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        if size.tied:
            self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, length, vocabulary]`` for ``[batch, length]`` tokens, length at most the context."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(place)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token over ``[batch, context + 1]`` tokens."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.reshape(-1, self.size.vocabulary), tokens[:, 1:].reshape(-1))

    @torch.no_grad()
    def write(self, prompt: bytes, length: int) -> bytes:
        """Continues ``prompt`` by ``length`` sampled bytes."""
        device = self.head.weight.device
        out = list(prompt)
        for _ in range(length):
            logits = self(torch.tensor([out[-self.size.context :]], device=device))[0, -1]
            out.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1)))
        return bytes(out)


def example() -> tuple[GPT, Callable[[], Tensor]]:
    """The default model of ``python -m gradstat bench``: a GPT, and its loss on a random batch."""
    size = GPT2 if torch.get_default_device().type == "cuda" else MODEST
    model = GPT(size)
    tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1))
    return model, lambda: model.loss(tokens)
