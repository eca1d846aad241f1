"""The training steps to measure: ResNets, written out here, and GPTs of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradstat.bench.steps import LEARNING_RATE, Step
from gradstat.demo.model import GPT, GPT2, MODEST, SMALL, Size

_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


class Residual(nn.Module):
    """A block of a ResNet: two 3x3 convolutions (18), or 1x1, 3x3, 1x1 (50), with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            plan = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            plan = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, size, stride=step, padding=size // 2, bias=False) for a, b, size, step in plan
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in plan)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y if number == 0 else F.relu(y)))
        return F.relu(y + self.shortcut(x))


def resnet(depth: int) -> nn.Sequential:
    """ResNet-18 (62 parameters, 11.7 M elements) or -50 (161 parameters, 25.6 M) for 1,000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    bottleneck, channels = depth >= 50, 64
    for stage, blocks in enumerate(_BLOCKS[depth]):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Residual(channels, width, 2 if stage and not block else 1, bottleneck))
            channels = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


@dataclass(frozen=True, slots=True)
class Training:
    """A training step to measure.

    Attributes:
        name: Model, parameters and batch, as displayed.
        make: Makes the step on a device.
        devices: The types of device to measure on.
        quick: Also part of the quick set.
    """

    name: str
    make: Callable[[torch.device], Step]
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    quick: bool = False


def resnet_step(depth: int, images: int, device: torch.device, side: int = 224) -> Step:
    """One step of a ResNet on random images, in bfloat16 autocast on a GPU."""
    torch.manual_seed(0)
    model = resnet(depth).to(device)
    batch = torch.randn(images, 3, side, side, device=device)
    labels = torch.randint(1000, (images,), device=device)
    return _step(model, lambda: F.cross_entropy(model(batch), labels), device)


def gpt_step(size: Size, length: int, device: torch.device) -> Step:
    """One step of a GPT on random tokens, in bfloat16 autocast on a GPU."""
    torch.manual_seed(0)
    model = GPT(size).to(device)
    tokens = torch.randint(size.vocabulary, (size.batch, length + 1), device=device)
    return _step(model, lambda: model.loss(tokens), device)


def _step(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> Step:
    def forward() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            return loss()

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    return Step(model, forward, optimizer, device)


CPU, CUDA = frozenset({"cpu"}), frozenset({"cuda"})
# Those that the README shows come first, since the time on a GPU may run out.
TRAININGS = (
    Training("GPT-2 small 124 M, batch 8x1024", lambda device: gpt_step(replace(GPT2, batch=8), 1024, device), CUDA),
    Training("ResNet-50, 64 images of 224", lambda device: resnet_step(50, 64, device), CUDA, quick=True),
    Training("GPT 0.9 M, batch 8x64", lambda device: gpt_step(SMALL, 64, device)),
    Training("GPT 17 M, batch 1x64", lambda device: gpt_step(MODEST, 64, device), CPU, quick=True),
    Training("GPT-2 small 124 M, batch 1x64", lambda device: gpt_step(replace(GPT2, batch=1), 64, device), CPU),
    Training("ResNet-18, 2 images of 224", lambda device: resnet_step(18, 2, device), CPU),
    Training("ResNet-50, 2 images of 224", lambda device: resnet_step(50, 2, device), CPU),
)
