"""A byte-level GPT: token and position embeddings, pre-norm blocks of causal attention and a perceptron."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model and its batches are."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


VOCABULARY = 256  # bytes
TINY = Size(layers=2, width=32, heads=2, context=32, batch=4)
SMALL = Size(layers=4, width=128, heads=4, context=64, batch=8)
MEDIUM = Size(layers=8, width=512, heads=8, context=256, batch=32)


class Attention(nn.Module):
    """Causal self-attention."""

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


class Perceptron(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """One layer: attention, then the perceptron, each behind a norm and beside a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = Perceptron(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, length, 256]`` for ``[batch, length]`` byte values, length at most the context."""
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(place)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte over ``[batch, context + 1]`` byte values."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    @torch.no_grad()
    def write(self, prompt: bytes, length: int) -> bytes:
        """Continues ``prompt`` by ``length`` sampled bytes."""
        device = self.head.weight.device
        out = list(prompt)
        for _ in range(length):
            logits = self(torch.tensor([out[-self.size.context :]], device=device))[0, -1]
            out.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1)))
        return bytes(out)
