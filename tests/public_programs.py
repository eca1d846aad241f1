"""Training programs as others publish them, in which the monitor has to be silent: written anew and small.

What matters is kept: losses, optimizers, learning rates, schedules, initialisation, and how their loops are written.
Each calls gradstat as its user would, by `gradstat.auto` or a `gradstat.Monitor`, or not at all if not watched.
``python tools/diagnosis.py --only programs`` runs more and longer than the tests do.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from small_training import GPT, TOKENS, Sentences
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import gradstat
from gradstat.monitor import Finding, Monitor

RECORD = {"error": "record", "warning": "record", "lost-loss": "record"}


class Unwatched:
    """What a program has instead of a monitor if it is not watched."""

    def batch(self, batch: Any) -> None:
        """Nothing."""

    def step(self, loss: Any) -> None:
        """Nothing."""


class Watch:
    """The ways into gradstat that a program may use; none of them does anything unless ``on``."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.monitors: list[Monitor] = []

    def auto(self, optimizer: Optimizer, model: nn.Module | None = None, **options: Any) -> None:
        """`gradstat.auto`."""
        if self.on:
            self.monitors.append(gradstat.auto(optimizer, model, on_anomaly=RECORD, **options).monitor)

    def monitor(self, model: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> Monitor | Unwatched:
        """`gradstat.Monitor`."""
        if not self.on:
            return Unwatched()
        self.monitors.append(Monitor(model, optimizer, on_anomaly=RECORD, **options))
        return self.monitors[-1]

    def end(self) -> list[Finding]:
        """Ends it; everything that was found."""
        for monitor in self.monitors:
            monitor.detach()
        return [finding for monitor in self.monitors for finding in monitor.findings]


@dataclass(frozen=True)
class Outcome:
    """What has to fall as the program learns, step by step, and the modules that were trained."""

    course: Sequence[float]
    modules: Sequence[nn.Module]

    def ends(self) -> tuple[float, float]:
        """The means of the first and of the last tenth of the course."""
        tenth = max(1, len(self.course) // 10)
        return sum(self.course[:tenth]) / tenth, sum(self.course[-tenth:]) / tenth

    def digest(self) -> str:
        """Of all parameters and buffers, bit by bit."""
        digest = hashlib.sha256()
        for module in self.modules:
            for tensor in module.state_dict().values():
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def __str__(self) -> str:
        return "{:.3g} to {:.3g}".format(*self.ends())


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        name: For people.
        run: Trains for a number of steps, watched or not; random numbers are seeded before.
        short, steps: How many steps in a test, and in the table of docs/diagnosis.md.
        falls: To what share of its beginning the course falls in a short run; None where that takes longer.
    """

    name: str
    run: Callable[[Watch, int, int], Outcome]
    short: int
    steps: int
    falls: float | None = 0.7


def run(program: Program, seed: int, steps: int, on: bool = True) -> tuple[Outcome, list[Finding], list[Monitor]]:
    """Runs a program; its outcome, what was found that is no mere info, and the monitors."""
    torch.manual_seed(seed)
    random.seed(seed)
    watch = Watch(on)
    outcome = program.run(watch, seed, steps)
    found = [finding for finding in watch.end() if finding.severity != "info"]
    return outcome, found, watch.monitors


def fit(
    steps: int,
    batch: Callable[[], Any],
    loss: Callable[[Any], Tensor],
    optimizer: Optimizer,
    monitor: Monitor | Unwatched | None = None,
    each: Callable[[int], object] | None = None,
    clip: tuple[Any, float] | None = None,
) -> list[float]:
    """The loop that most programs have, and the losses; ``each`` is called behind every step."""
    course = []
    for step in range(steps):
        data = batch()
        if monitor is not None:
            monitor.batch(data)
        optimizer.zero_grad()
        value = loss(data)
        value.backward()
        if monitor is not None:
            monitor.step(value.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(*clip)
        optimizer.step()
        if each is not None:
            each(step)
        course.append(value.item())
    return course


def every(steps: int, call: Callable[[], object]) -> Callable[[int], None]:
    """Calls behind every so many steps, as at the end of an epoch."""

    def each(step: int) -> None:
        if (step + 1) % steps == 0:
            call()

    return each


@torch.no_grad()
def average(kept: nn.Module, model: nn.Module, decay: float) -> None:
    """Moves a copy's parameters towards those of a model."""
    for mean, parameter in zip(kept.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, 1 - decay)


class Images:
    """Images in [0, 1] of one of several coarse patterns each, with noise; and which."""

    def __init__(self, seed: int, size: int, batch: int, classes: int = 10, noise: float = 0.1) -> None:
        self.random = torch.Generator().manual_seed(seed)
        coarse = torch.rand(classes, 1, 4, 4, generator=self.random)
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")
        self.batch, self.noise = batch, noise

    def __call__(self) -> tuple[Tensor, Tensor]:
        labels = torch.randint(len(self.patterns), (self.batch,), generator=self.random)
        return self.of(labels), labels

    def of(self, labels: Tensor) -> Tensor:
        """Images of these patterns."""
        images = self.patterns[labels]
        return (images + self.noise * torch.randn(images.shape, generator=self.random)).clamp(0, 1)


# Examples of PyTorch -------------------------------------------------------------------------------------------


def vae(watch: Watch, seed: int, steps: int) -> Outcome:
    """Its loss is a sum over batch and pixels."""
    encoder, decoder = nn.Linear(400, 100), nn.Sequential(nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 400))
    model = nn.ModuleDict({"in": encoder, "mean": nn.Linear(100, 8), "log": nn.Linear(100, 8), "out": decoder})

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        pixels = (4 * data[0].flatten(1) - 1.5).clamp(0, 1)  # mostly black or white, as digits are
        hidden = encoder(pixels).relu()
        mean, log = model["mean"](hidden), model["log"](hidden)
        drawn = torch.sigmoid(decoder(mean + torch.randn_like(mean) * (0.5 * log).exp()))
        divergence = -0.5 * (1 + log - mean**2 - log.exp()).sum()
        return F.binary_cross_entropy(drawn, pixels, reduction="sum") + divergence

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch.monitor(model, optimizer)
    return Outcome(fit(steps, Images(seed, 20, 128), loss, optimizer, monitor), [model])


def _dcgan_init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def dcgan(watch: Watch, seed: int, steps: int) -> Outcome:
    """Two optimizers, and gradients in the discriminator that are left over from the generator's step."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    ).apply(_dcgan_init)  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0),
    ).apply(_dcgan_init)  # fmt: skip
    by_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    by_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    watch.auto(by_critic, critic)
    watch.auto(by_generator, generator)
    images, course = Images(seed, 16, 32), []
    ones, zeros = torch.ones(32), torch.zeros(32)
    for _ in range(steps):
        real = images()[0] * 2 - 1
        critic.zero_grad()
        F.binary_cross_entropy(critic(real), ones).backward()
        fake = generator(torch.randn(32, 16, 1, 1))
        F.binary_cross_entropy(critic(fake.detach()), zeros).backward()
        by_critic.step()
        generator.zero_grad()
        F.binary_cross_entropy(critic(fake), ones).backward()
        by_generator.step()
        course.append(float((fake.detach().mean(0) - real.mean(0)).abs().mean()))
    return Outcome(course, [generator, critic])


class _Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(1, 16, 2, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0])


def time_sequence(watch: Watch, seed: int, steps: int) -> Outcome:
    """LBFGS on all data, in float64; gradients are made in its closure."""
    phases = torch.randint(-80, 80, (8, 1)).double()
    waves = torch.sin((torch.arange(60.0).double() + phases) / 20)[..., None]
    model = _Sequence().double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
    watch.auto(optimizer, model)
    course = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
        loss.backward()
        return loss

    for _ in range(steps):
        course.append(optimizer.step(closure).item())  # type: ignore[union-attr]
    return Outcome(course, [model])


class CartPole:
    """A pole on a cart, to be held upright by pushes to the left and the right; at most so many steps."""

    def __init__(self, longest: int = 200) -> None:
        self.longest = longest
        self.reset()

    def reset(self) -> list[float]:
        """A new episode; its first state."""
        self.state, self.steps = [random.uniform(-0.05, 0.05) for _ in range(4)], 0
        return self.state

    def step(self, action: int) -> tuple[list[float], bool]:
        """The next state, and whether the episode is over."""
        x, speed, angle, turning = self.state
        force = (10.0 if action else -10.0) + 0.05 * turning**2 * math.sin(angle)
        cosine = math.cos(angle)
        turn = (9.8 * math.sin(angle) - cosine * force / 1.1) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        push = (force - 0.05 * turn * cosine) / 1.1
        self.state = [x + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * turning, turning + 0.02 * turn]
        self.steps += 1
        fell = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.209
        return self.state, fell or self.steps >= self.longest


def _returns(length: int) -> Tensor:
    """Discounted, of a reward of 1 in each step, normalised."""
    total, returns = 0.0, []
    for _ in range(length):
        total = 1 + 0.99 * total
        returns.append(total)
    made = torch.tensor(returns[::-1])
    return (made - made.mean()) / (made.std() + 1e-7)


def _is_solved(course: Sequence[float]) -> bool:
    """Whether the pole was held for long on average, which ends the program."""
    running = 10.0
    for length in course:
        running = 0.95 * running - 0.05 * length
    return running > 150


def reinforce(watch: Watch, seed: int, steps: int) -> Outcome:
    """A step is an episode; its loss is a sum over as many moves as there were."""
    policy = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(-1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    watch.auto(optimizer, policy)
    world, course = CartPole(), []
    for _ in range(steps):
        state, over, kept = world.reset(), False, []
        while not over:
            choice = Categorical(policy(torch.tensor(state)), validate_args=False)
            action = choice.sample()
            kept.append(choice.log_prob(action))
            state, over = world.step(int(action))
        optimizer.zero_grad()
        (-torch.stack(kept) * _returns(len(kept))).sum().backward()
        optimizer.step()
        course.append(-float(len(kept)))
        if _is_solved(course):
            break
    return Outcome(course, [policy])


class _ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.affine(x).relu()
        return self.action(x).softmax(-1), self.value(x)


def actor_critic(watch: Watch, seed: int, steps: int) -> Outcome:
    """As `reinforce`, beside a critic whose loss is a sum as well; slower than the original, which often gets stuck."""
    model = _ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    watch.auto(optimizer, model)
    world, course = CartPole(), []
    for _ in range(steps):
        state, over, kept, values = world.reset(), False, [], []
        while not over:
            shares, value = model(torch.tensor(state))
            choice = Categorical(shares, validate_args=False)
            action = choice.sample()
            kept.append(choice.log_prob(action))
            values.append(value)
            state, over = world.step(int(action))
        returns, guessed = _returns(len(kept)), torch.cat(values)
        actor = -(torch.stack(kept) * (returns - guessed.detach())).sum()
        optimizer.zero_grad()
        loss = actor + F.smooth_l1_loss(guessed, returns, reduction="sum")
        loss.backward()
        optimizer.step()
        course.append(-float(len(kept)))
        if _is_solved(course):
            break
    return Outcome(course, [model])


def _citations(seed: int, nodes: int = 120, words: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """A graph in which papers of a subject cite each other and use the same words: words, links, subjects."""
    chance = torch.Generator().manual_seed(seed)
    subject = torch.randint(4, (nodes,), generator=chance)
    is_same = subject[:, None] == subject[None]
    links = (torch.rand(nodes, nodes, generator=chance) < torch.where(is_same, 0.1, 0.01)).float()
    links = ((links + links.T + torch.eye(nodes)) > 0).float()
    typical = (torch.arange(words) % 4)[None] == subject[:, None]
    used = (torch.rand(nodes, words, generator=chance) < torch.where(typical, 0.15, 0.03)).float()
    return used / used.sum(1, keepdim=True).clamp_min(1), links, subject


def gcn(watch: Watch, seed: int, steps: int) -> Outcome:
    """A graph convolution without biases, on sparse matrices."""
    words, links, subject = _citations(seed)
    root = links.sum(1).rsqrt()
    words, links = words.to_sparse(), (root[:, None] * links * root).to_sparse()
    first, second = nn.Linear(60, 16, bias=False), nn.Linear(16, 4, bias=False)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    watch.auto(optimizer, model)

    def loss(_: Any) -> Tensor:
        hidden = F.dropout(torch.sparse.mm(links, torch.sparse.mm(words, first.weight.T)).relu(), 0.5)
        return F.nll_loss(torch.sparse.mm(links, second(hidden)).log_softmax(1)[:80], subject[:80])

    return Outcome(fit(steps, lambda: None, loss, optimizer), [model])


class _GraphAttention(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.W = nn.Parameter(nn.init.xavier_normal_(torch.empty(inputs, heads * outputs)))
        self.a = nn.Parameter(nn.init.xavier_normal_(torch.empty(heads, 2 * outputs, 1)))
        self.heads, self.outputs = heads, outputs

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        values = F.dropout(x @ self.W, 0.6).view(len(x), self.heads, self.outputs).permute(1, 0, 2)
        scores = values @ self.a[:, : self.outputs] + (values @ self.a[:, self.outputs :]).mT
        scores = F.leaky_relu(scores, 0.2).masked_fill(links == 0, -9e16)
        return (F.dropout(scores.softmax(-1), 0.6) @ values).mean(0)


def gat(watch: Watch, seed: int, steps: int) -> Outcome:
    """Graph attention with much dropout."""
    words, links, subject = _citations(seed)
    first, second = _GraphAttention(60, 16, 4), _GraphAttention(16, 4, 1)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    monitor = watch.monitor(model, optimizer)

    def loss(data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        found = second(F.elu(first(data[0], data[1])), data[1])
        return F.nll_loss(found.log_softmax(1)[:80], data[2][:80])

    return Outcome(fit(steps, lambda: (words, links, subject), loss, optimizer, monitor), [model])


class _WordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.words = nn.Dropout(0.2), nn.Embedding(TOKENS, 24)
        self.cells, self.out = nn.LSTM(24, 24, 2, dropout=0.2), nn.Linear(24, TOKENS)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        nn.init.uniform_(self.out.weight, -0.1, 0.1)
        nn.init.zeros_(self.out.bias)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        x, state = self.cells(self.drop(self.words(tokens)), state)
        return self.out(self.drop(x)).log_softmax(-1), state


def word_language_model(watch: Watch, seed: int, steps: int) -> Outcome:
    """No optimizer: a learning rate of 20 behind a clip at 0.25, divided by 4 where nothing is gained."""
    model, sentences = _WordModel(), Sentences(seed, length=12, size=10)
    monitor = watch.monitor(model, max_norm=0.25)
    state: Any = None
    rate, best, course = 20.0, math.inf, []
    for step in range(steps):
        tokens, following = (part.T for part in sentences())
        model.zero_grad()
        state = None if state is None else tuple(part.detach() for part in state)
        found, state = model(tokens, state)
        loss = F.nll_loss(found.flatten(0, 1), following.flatten())
        loss.backward()
        monitor.step(loss.detach(), lr=rate) if isinstance(monitor, Monitor) else None
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-rate)
        course.append(loss.item())
        if (step + 1) % 200 == 0:
            mean = sum(course[-200:]) / 200
            rate = rate if mean < best else rate / 4
            best = min(best, mean)
    return Outcome(course, [model])


class _Goodness(nn.Linear):
    """A layer with an optimizer of its own, which is to be active for one input and not for another."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)).relu()

    def loss(self, good: Tensor, bad: Tensor) -> Tensor:
        """Of the squares of what it gives, around a threshold."""
        goods, bads = (self(x).pow(2).mean(1) for x in (good, bad))
        return torch.log1p(torch.exp(torch.cat([2 - goods, bads - 2]))).mean()


def forward_forward(watch: Watch, seed: int, steps: int) -> Outcome:
    """Layers that are trained one after the other, each by its own Adam on all data."""
    images, labels = Images(seed, 10, 200)()
    good, bad = images.flatten(1), images.flatten(1).clone()
    good[:, :10], bad[:, :10] = F.one_hot(labels, 10).float(), F.one_hot((labels + 3) % 10, 10).float()
    layers, course = [_Goodness(100, 64), _Goodness(64, 64)], []
    for layer in layers:
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
        watch.auto(optimizer, layer)
        course = fit(steps, lambda: (good, bad), lambda data: layer.loss(*data), optimizer)  # noqa: B023
        good, bad = layer(good).detach(), layer(bad).detach()
    return Outcome(course, layers)


def _resnet(width: int = 8) -> nn.Module:
    """Convolutions with batch norm; one of them has a bias before it."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def siamese(watch: Watch, seed: int, steps: int) -> Outcome:
    """Adadelta at 1.0, divided by 0.7 each epoch, on pixels as they are, from 0 to 255."""
    trunk, head = _resnet(), nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    model = nn.ModuleList([trunk, head])
    for layer in (head[0], head[2]):
        nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
        nn.init.constant_(layer.bias, 0.01)  # type: ignore[arg-type]
    images = Images(seed, 12, 32)

    def pairs() -> tuple[Tensor, Tensor, Tensor]:
        left, kinds = images()
        is_same = torch.rand(32) < 0.5
        right = images.of(torch.where(is_same, kinds, (kinds + torch.randint(1, 10, (32,))) % 10))
        return left * 255, right * 255, is_same.float()

    def loss(data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy(head(torch.cat([trunk(data[0]), trunk(data[1])], 1))[:, 0], data[2])

    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    monitor = watch.monitor(model, optimizer)
    scheduler = StepLR(optimizer, 1, 0.7)
    return Outcome(fit(steps, pairs, loss, optimizer, monitor, every(100, scheduler.step)), [model])


def super_resolution(watch: Watch, seed: int, steps: int) -> Outcome:
    """Adam at 0.01 on orthogonal weights."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2),
    )  # fmt: skip
    for layer, gain in zip(model[::2], (2**0.5, 2**0.5, 2**0.5, 1.0), strict=False):
        nn.init.orthogonal_(layer.weight, gain)  # type: ignore[arg-type]
    images = Images(seed, 16, 16, noise=0.0)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(data[0]), data[1])

    def batch() -> tuple[Tensor, Tensor]:
        large = images()[0]
        return F.avg_pool2d(large, 2), large

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Outcome(fit(steps, batch, loss, optimizer, watch.monitor(model, optimizer)), [model])


def mnist(watch: Watch, seed: int, steps: int) -> Outcome:
    """Adadelta at 1.0, divided by 0.7 each epoch, with dropout."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10), nn.LogSoftmax(1),
    )  # fmt: skip
    images = Images(seed, 12, 32)

    def batch() -> tuple[Tensor, Tensor]:
        pixels, labels = images()
        return (pixels - 0.1307) / 0.3081, labels

    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    watch.auto(optimizer, model)
    scheduler = StepLR(optimizer, 1, 0.7)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        return F.nll_loss(model(data[0]), data[1])

    return Outcome(fit(steps, batch, loss, optimizer, each=every(100, scheduler.step)), [model])


def mnist_rnn(watch: Watch, seed: int, steps: int) -> Outcome:
    """Adadelta at 0.1 on an LSTM over rows, behind a batch norm."""
    cells = nn.LSTM(12, 24, batch_first=True)
    head = nn.Sequential(
        nn.BatchNorm1d(24), nn.Dropout(0.25), nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 10)
    )
    model = nn.ModuleList([cells, head])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
    monitor = watch.monitor(model, optimizer)
    scheduler = StepLR(optimizer, 1, 0.7)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(head(cells(data[0][:, 0])[0][:, -1]), data[1])

    each = every(100, scheduler.step)
    return Outcome(fit(steps, Images(seed, 12, 32), loss, optimizer, monitor, each), [model])


def regression(watch: Watch, seed: int, steps: int) -> Outcome:
    """A polynomial of degree 4 by a linear map and gradient descent written by hand."""
    model, weights = nn.Linear(4, 1), torch.randn(4, 1) * 5
    monitor, course = watch.monitor(model), []
    for _ in range(steps):
        powers = torch.randn(32, 1) ** torch.arange(1, 5)
        model.zero_grad()
        loss = F.smooth_l1_loss(model(powers), powers @ weights + 2)
        loss.backward()
        monitor.step(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
        course.append(loss.item())
    return Outcome(course, [model])


def _gram(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    return flat @ flat.mT / x[0].numel()


def neural_style(watch: Watch, seed: int, steps: int) -> Outcome:
    """Losses times 1e5 and 1e10, through a network that is frozen."""
    seen = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    seen.requires_grad_(False)
    model = nn.Sequential(
        nn.ReflectionPad2d(2), nn.Conv2d(1, 8, 5), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1),
    )  # fmt: skip
    images = Images(seed, 12, 4)
    style = _gram(seen(images()[0][:1] * 255))

    def loss(data: Tensor) -> Tensor:
        made = seen(model(data))
        return 1e5 * F.mse_loss(made, seen(data)) + 1e10 * F.mse_loss(_gram(made), style.expand(len(data), -1, -1))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    monitor = watch.monitor(model, optimizer)
    return Outcome(fit(steps, lambda: images()[0] * 255, loss, optimizer, monitor), [model])


class _Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, 32), nn.Embedding(TOKENS, 32)
        self.places = nn.Parameter(torch.randn(13, 32), requires_grad=False)
        self.inner = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.out = nn.Linear(32, TOKENS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = (table(t) * 32**0.5 + self.places[: t.shape[1]] for table, t in
                ((self.source, source), (self.target, target)))  # fmt: skip
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.out(self.inner(x, y, tgt_mask=mask, tgt_is_causal=True))


def translation(watch: Watch, seed: int, steps: int) -> Outcome:
    """A transformer with norms behind its layers, by Adam with betas of its own; padding is ignored."""
    model, words = _Translation(), torch.randperm(TOKENS - 1) + 1

    def batch() -> tuple[Tensor, Tensor]:
        source = torch.randint(1, TOKENS, (16, 8))
        source[:, 6:] *= torch.rand(16, 1) < 0.5  # padding
        return source, torch.where(source > 0, words[source - 1], 0).flip(1)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        found = model(data[0], data[1].roll(1, 1))
        return F.cross_entropy(found.flatten(0, 1), data[1].flatten(), ignore_index=0)

    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-9)
    watch.auto(optimizer, model)
    return Outcome(fit(steps, batch, loss, optimizer), [model])


# Language models, vision -------------------------------------------------------------------------------------


def nano_gpt(watch: Watch, seed: int, steps: int) -> Outcome:
    """Warm-up and cosine by hand, weight decay for matrices alone, a clip at 1, micro-batches, an idle scaler."""
    model, sentences = GPT(layers=2, width=24, tied=True, dropout=0.1), Sentences(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02 / 2 if name.endswith(("out.weight", "down.weight")) else 0.02)
    groups = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(decays, lr=1e-3, betas=(0.9, 0.99))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    watch.auto(optimizer, model, scaler=scaler)
    course = []
    for step in range(steps):
        done = (step - 100) / max(1, steps - 100)
        rate = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 0.5 * (1 + math.cos(math.pi * done)) * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(2):
            tokens, following = sentences()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        course.append(2 * loss.item())
    return Outcome(course, [model])


class _Experts(nn.Module):
    """A switch between perceptrons; those that get no token take no part."""

    def __init__(self, width: int = 16, count: int = 8) -> None:
        super().__init__()
        self.route = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width))
                                     for _ in range(count))  # fmt: skip
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.route(x).softmax(-1)
        weight, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            where = chosen == i
            out[where] = self.experts[i](x[where]) * weight[where][:, None]
        counts = F.one_hot(chosen, shares.shape[-1]).float()
        self.balance = shares.shape[-1] * (counts.mean(0) * shares.mean(0)).sum()
        return x + out


def switch(watch: Watch, seed: int, steps: int) -> Outcome:
    """A mixture of experts with a loss for balance; in many steps an expert has no gradient."""
    experts = _Experts()
    model = nn.Sequential(nn.Linear(16, 16), experts, nn.LayerNorm(16), nn.Linear(16, 10))
    images = Images(seed, 4, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch.auto(optimizer, model)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(data[0].flatten(1)), data[1]) + 0.01 * experts.balance

    return Outcome(fit(steps, images, loss, optimizer), [model])


def timm_sgd(watch: Watch, seed: int, steps: int) -> Outcome:
    """Warm-up from 1e-5 and a cosine, stepped once per epoch; Nesterov momentum, label smoothing, an average copy."""
    model = nn.Sequential(_resnet(), nn.Linear(64, 10))
    kept = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-5, nesterov=True)
    epochs = steps // 40

    def set_rate(epoch: int) -> None:
        cosine = 0.05 * (1 + math.cos(math.pi * epoch / epochs))
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 + epoch * (group["initial_lr"] - 1e-5) / 5 if epoch < 5 else cosine

    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    set_rate(0)
    watch.auto(optimizer, model)

    def each(step: int) -> None:
        average(kept, model, 0.9998)
        if (step + 1) % 40 == 0:
            set_rate((step + 1) // 40)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(data[0]), data[1], label_smoothing=0.1)

    return Outcome(fit(steps, Images(seed, 12, 32), loss, optimizer, each=each), [model, kept])


class _ViTBlock(nn.Module):
    """Attention and a perceptron, scaled from 1e-5, each left out now and then."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 1e-5)) for _ in range(2))
        self.drop = drop

    def _path(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1) >= self.drop) / (1 - self.drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self._path(self.scale1 * self.attention(y, y, y, need_weights=False)[0])
        return x + self._path(self.scale2 * self.mlp(self.norm2(x)))


class _ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 24, 4, 4)
        self.places, self.cls = nn.Parameter(torch.randn(1, 10, 24) * 0.02), nn.Parameter(torch.zeros(1, 1, 24))
        self.blocks = nn.ModuleList(_ViTBlock(24, 0.1 * i) for i in range(3))
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 10)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def timm_vit(watch: Watch, seed: int, steps: int) -> Outcome:
    """AdamW, warm-up stepped per epoch, stochastic depth, layer scale, a head of zeros, mixed labels, a clip at 1."""
    model, images = _ViT(), Images(seed, 12, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    epochs = steps // 40
    scheduler = LambdaLR(
        optimizer, lambda e: 1e-3 + e / 5 if e < 5 else 1e-3 + 0.5 * (1 + math.cos(math.pi * min(1.0, e / epochs)))
    )
    monitor = watch.monitor(model, optimizer, max_norm=1.0)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        share = random.betavariate(0.8, 0.8)
        found = model(share * data[0] + (1 - share) * data[0].flip(0))
        return share * F.cross_entropy(found, data[1]) + (1 - share) * F.cross_entropy(found, data[1].flip(0))

    clip = (list(model.parameters()), 1.0)
    return Outcome(fit(steps, images, loss, optimizer, monitor, every(40, scheduler.step), clip), [model])


class _Detector(nn.Module):
    """Convolutions with batch norm, a class for each place, and distances as the mean of a distribution (DFL)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16),
            nn.SiLU(),
        )  # fmt: skip
        self.box, self.kind = nn.Conv2d(16, 4 * 8, 1), nn.Conv2d(16, 4, 1)
        self.dfl = nn.Conv2d(8, 1, 1, bias=False).requires_grad_(False)
        self.dfl.weight.copy_(torch.arange(8.0).view(1, 8, 1, 1))
        nn.init.constant_(self.kind.bias, math.log(5 / 4 / 20))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        shares = self.box(x).view(len(x), 4, 8, -1).transpose(1, 2).softmax(1)
        return self.dfl(shares)[:, 0], self.kind(x).flatten(2)


def yolo(watch: Watch, seed: int, steps: int) -> Outcome:
    """A constant convolution that the optimizer holds, groups with a warm-up each, biases downwards, and momentum."""
    model, images = _Detector(), Images(seed, 16, 16, classes=4)
    biases = [p for p in model.parameters() if p.dim() < 2]
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD(biases, lr=0.01, momentum=0.937, nesterov=True)
    optimizer.add_param_group({"params": weights, "weight_decay": 5e-4})
    monitor = watch.monitor(model, optimizer)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        distances, kinds = model(data[0])
        wanted = data[0].flatten(1).mean(1)[:, None, None] * 7 * torch.ones(4, 64)
        classes = F.one_hot(data[1], 4).float()[:, :, None].expand(-1, -1, 64)
        return 16 * (F.smooth_l1_loss(distances, wanted) + F.binary_cross_entropy_with_logits(kinds, classes))

    def warm_up(step: int) -> None:
        share = min(1.0, step / 100)
        rates = (0.1 + share * (0.01 - 0.1), share * 0.01)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - 0.99 * step / steps)
            group["momentum"] = 0.8 + share * (0.937 - 0.8)

    warm_up(0)
    clip = (list(model.parameters()), 10.0)
    return Outcome(fit(steps, images, loss, optimizer, monitor, warm_up, clip), [model])


def simclr(watch: Watch, seed: int, steps: int) -> Outcome:
    """Contrastive, with a temperature that is learned outside of the model, in the same optimizer."""
    trunk = nn.Sequential(_resnet(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    sharpness = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    optimizer = torch.optim.Adam([*trunk.parameters(), sharpness], 3e-4, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    watch.auto(optimizer, trunk)
    images = Images(seed, 12, 32, classes=200)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        views = [data[0] + 0.1 * torch.randn_like(data[0]), data[0].flip(-1) * (0.5 + torch.rand(32, 1, 1, 1))]
        left, right = F.normalize(trunk(torch.cat(views)), dim=1).chunk(2)
        logits = left @ right.T * sharpness.clamp(max=math.log(100)).exp()
        return (F.cross_entropy(logits, torch.arange(32)) + F.cross_entropy(logits.T, torch.arange(32))) / 2

    return Outcome(fit(steps, images, loss, optimizer, each=lambda _: scheduler.step()), [trunk])


class _Byol(nn.Module):
    """An online network with a predictor, and its slow copy, which all parameters of the module include."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(_resnet(), nn.Linear(64, 16))
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.target = copy.deepcopy(self.online)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        found = self.predictor(self.online(one))
        with torch.no_grad():
            wanted = self.target(other)
        return 2 - 2 * F.cosine_similarity(found, wanted).mean()


def byol(watch: Watch, seed: int, steps: int) -> Outcome:
    """A target network that requires gradients, gets none and is not in the optimizer."""
    model, images = _Byol(), Images(seed, 12, 32, classes=200)
    optimizer = torch.optim.AdamW([*model.online.parameters(), *model.predictor.parameters()], lr=1e-3)
    monitor = watch.monitor(model, optimizer)

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (data[0] + 0.1 * torch.randn_like(data[0]) for _ in range(2))
        return model(one, other) + model(other, one)

    def each(_: int) -> None:
        average(model.target, model.online, 0.99)

    return Outcome(fit(steps, images, loss, optimizer, monitor, each), [model])


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(100, 32)
        self.first, self.second, self.out = nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.out(F.gelu(self.second(F.gelu(self.first(x) + self.times(time)))))


def diffusion(watch: Watch, seed: int, steps: int) -> Outcome:
    """Noise is predicted at random times, on a spiral; an average copy."""
    model = _Denoiser()
    kept = copy.deepcopy(model)
    signal = (1 - torch.linspace(1e-3, 0.1, 100)).cumprod(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch.auto(optimizer, model)

    def batch() -> tuple[Tensor, Tensor]:
        angle = torch.rand(128) * 9 + 3
        return torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 6, torch.randint(100, (128,))

    def loss(data: tuple[Tensor, Tensor]) -> Tensor:
        noise, left = torch.randn_like(data[0]), signal[data[1]][:, None]
        return F.mse_loss(model(left.sqrt() * data[0] + (1 - left).sqrt() * noise, data[1]), noise)

    return Outcome(fit(steps, batch, loss, optimizer, each=lambda _: average(kept, model, 0.999)), [model, kept])


def wgan(watch: Watch, seed: int, steps: int) -> Outcome:
    """A critic whose weights are cut off at 0.01 behind each step, five of which go to one of the generator."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    by_generator, by_critic = (torch.optim.RMSprop(m.parameters(), lr=5e-5) for m in (generator, critic))
    watch.auto(by_generator, generator)
    watch.auto(by_critic, critic)
    images, course = Images(seed, 8, 64), []
    for step in range(steps):
        real = images()[0].flatten(1)
        fake = generator(torch.randn(64, 8))
        by_critic.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        by_critic.step()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.01, 0.01)
        if step % 5 == 0:
            by_generator.zero_grad()
            (-critic(generator(torch.randn(64, 8))).mean()).backward()
            by_generator.step()
        course.append(float((fake.detach().mean(0) - real.mean(0)).abs().mean()))
    return Outcome(course, [generator, critic])


def dlrm(watch: Watch, seed: int, steps: int) -> Outcome:
    """Sparse gradients of embeddings, by plain SGD at 0.1."""
    tables = nn.ModuleList(nn.EmbeddingBag(100, 8, mode="sum", sparse=True) for _ in range(3))
    bottom, top = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU()),
        nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1)),
    )
    model = nn.ModuleDict({"tables": tables, "bottom": bottom, "top": top})
    likes = torch.randn(3, 100)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        chosen, dense = (torch.rand(3, 64, 2) ** 2 * 100).long(), torch.randn(64, 4)
        score = torch.stack([likes[i][chosen[i]].sum(1) for i in range(3)]).sum(0) + dense.sum(1)
        return dense, chosen, (score > 0).float()

    def loss(data: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        dense = bottom(data[0])
        parts = torch.stack([dense, *(table(ids) for table, ids in zip(tables, data[1], strict=True))], 1)
        products = (parts @ parts.mT)[:, [1, 2, 2, 3, 3, 3], [0, 0, 1, 0, 1, 2]]
        return F.binary_cross_entropy_with_logits(top(torch.cat([dense, products], 1))[:, 0], data[2])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Outcome(fit(steps, batch, loss, optimizer, watch.monitor(model, optimizer)), [model])


def pinn(watch: Watch, seed: int, steps: int) -> Outcome:
    """A differential equation is the loss: gradients of gradients, tanh, ever smaller."""
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watch.auto(optimizer, model)

    def loss(x: Tensor) -> Tensor:
        y = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (curve + y).square().mean() + (model(torch.zeros(1, 1)) - 1).square().sum()

    return Outcome(fit(steps, lambda: torch.rand(64, 1) * 6, loss, optimizer), [model])


# Reinforcement learning --------------------------------------------------------------------------------------


class _Agent(nn.Module):
    """A network for values of moves, and the copy by which they are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
        self.target = copy.deepcopy(self.q)


def dqn(watch: Watch, seed: int, steps: int) -> Outcome:
    """A target network in the model, loaded anew every 50 steps."""
    agent, world = _Agent(), CartPole()
    optimizer = torch.optim.Adam(agent.q.parameters(), lr=2.5e-4)
    monitor = watch.monitor(agent, optimizer)
    kept: list[tuple[list[float], int, list[float], bool]] = []
    course, state = [], world.reset()
    for step in range(500 + 4 * steps):
        if random.random() < max(0.05, 1 - step / (2 * steps)):
            action = random.randrange(2)
        else:
            action = int(agent.q(torch.tensor(state)).argmax())
        following, over = world.step(action)
        kept.append((state, action, following, over and world.steps < world.longest))
        if over:
            course.append(-float(world.steps))
        state = world.reset() if over else following
        if step < 500 or step % 4:
            continue
        before, actions, after, ends = (torch.tensor(part) for part in zip(*random.choices(kept, k=128), strict=True))
        with torch.no_grad():
            wanted = 1 + 0.99 * agent.target(after).max(1).values * ~ends
        loss = F.mse_loss(agent.q(before).gather(1, actions[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        monitor.step(loss.detach())
        optimizer.step()
        if step // 4 % 50 == 0:
            agent.target.load_state_dict(agent.q.state_dict())
    return Outcome(course, [agent])


def _orthogonal(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _rollout(actor: nn.Module, critic: nn.Module, worlds: Sequence[CartPole], length: int) -> Iterator[Tensor]:
    """States, moves, their logarithms, advantages and values of so many moves in each world."""
    seen = [[] for _ in range(5)]  # type: list[list[Tensor]]
    with torch.no_grad():
        for _ in range(length):
            states = torch.tensor([world.state for world in worlds])
            choice = Categorical(logits=actor(states), validate_args=False)
            actions = choice.sample()
            overs = [world.step(action)[1] for world, action in zip(worlds, actions.tolist(), strict=True)]
            for world in (world for world, over in zip(worlds, overs, strict=True) if over):
                world.reset()
            for part, value in zip(
                seen,
                (states, actions, choice.log_prob(actions), critic(states)[:, 0], torch.tensor(overs)),
                strict=True,
            ):
                part.append(value)
        states, actions, logs, values, ends = map(torch.stack, seen)
        following = torch.cat([values[1:], critic(torch.tensor([world.state for world in worlds]))[:, 0][None]])
        gained, advantages = torch.zeros(len(worlds)), torch.zeros_like(values)
        for t in reversed(range(length)):
            gained = 1 + 0.99 * following[t] * ~ends[t] - values[t] + 0.99 * 0.95 * ~ends[t] * gained
            advantages[t] = gained
    yield from (part.flatten(0, 1) for part in (states, actions, logs, advantages, values, ends))


def ppo(watch: Watch, seed: int, steps: int) -> Outcome:
    """Clipped ratios, advantages and values; a clip at 0.5, a learning rate that falls to zero."""
    actor = nn.Sequential(_orthogonal(4, 64), nn.Tanh(), _orthogonal(64, 64), nn.Tanh(), _orthogonal(64, 2, 0.01))
    critic = nn.Sequential(_orthogonal(4, 64), nn.Tanh(), _orthogonal(64, 64), nn.Tanh(), _orthogonal(64, 1, 1.0))
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)
    watch.auto(optimizer, model)
    worlds, course = [CartPole() for _ in range(4)], []
    rounds = max(1, steps // 16)
    for i in range(rounds):
        optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - i / rounds)
        states, actions, logs, advantages, values, ends = _rollout(actor, critic, worlds, 128)
        course.append(float(ends.sum()))
        for part in (part for _ in range(4) for part in torch.randperm(512).chunk(4)):
            choice = Categorical(logits=actor(states[part]), validate_args=False)
            ratio = (choice.log_prob(actions[part]) - logs[part]).exp()
            gain = advantages[part]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            wanted = (advantages + values)[part]
            guess, before = critic(states[part])[:, 0], values[part]
            cut = before + (guess - before).clamp(-0.2, 0.2)
            worst = torch.max((guess - wanted).square(), (cut - wanted).square())
            policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2))
            optimizer.zero_grad()
            (policy.mean() - 0.01 * choice.entropy().mean() + 0.25 * worst.mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return Outcome(course, [model])


def _perceptron(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def sac(watch: Watch, seed: int, steps: int) -> Outcome:
    """Three optimizers, two critics, slow copies; the actor's loss leaves gradients in the critics."""
    actor, critics = _perceptron(2, 2), nn.ModuleList(_perceptron(3, 1) for _ in range(2))
    targets = copy.deepcopy(critics)
    log_alpha = nn.Parameter(torch.zeros(1))
    by_critics, by_actor, by_alpha = (
        torch.optim.Adam(params, lr=rate)
        for params, rate in ((critics.parameters(), 1e-3), (actor.parameters(), 3e-4), ([log_alpha], 1e-3))
    )
    for optimizer, model in ((by_critics, critics), (by_actor, actor), (by_alpha, None)):
        watch.auto(optimizer, model)
    place, speed = torch.randn(2)
    kept, course = [], []

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(state).chunk(2, -1)
        drawn = Normal(mean, (-1.5 + 3.5 * torch.tanh(spread)).exp(), validate_args=False)
        raw = drawn.rsample()
        action = raw.tanh()
        return action, (drawn.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(-1)

    def least(nets: nn.ModuleList, state: Tensor, action: Tensor) -> Tensor:
        return torch.stack([net(torch.cat([state, action], -1))[..., 0] for net in nets])

    for step in range(steps + 64):
        state = torch.stack([place, speed])
        with torch.no_grad():
            action = act(state)[0] if step > 64 else torch.rand(1) * 2 - 1
            speed = 0.9 * speed + 0.2 * action[0]
            place = place + 0.2 * speed
        reward = -(place**2) - 0.1 * speed**2
        kept.append((state, action, reward, torch.stack([place, speed])))
        course.append(-float(reward))
        if step % 40 == 39:
            place, speed = torch.randn(2)
        if step < 64:
            continue
        before, actions, rewards, after = map(torch.stack, zip(*random.choices(kept, k=64), strict=True))
        with torch.no_grad():
            alpha = log_alpha.exp()
            moves, logs = act(after)
            wanted = rewards + 0.95 * (least(targets, after, moves).min(0).values - alpha * logs)
        by_critics.zero_grad()
        (least(critics, before, actions) - wanted).square().mean(1).sum().backward()
        by_critics.step()
        by_actor.zero_grad()
        moves, logs = act(before)
        (alpha * logs - least(critics, before, moves).min(0).values).mean().backward()
        by_actor.step()
        by_alpha.zero_grad()
        (-log_alpha.exp() * (logs.detach() - 1)).mean().backward()
        by_alpha.step()
        average(targets, critics, 0.995)
    return Outcome(course, [actor, critics, targets])


PROGRAMS: tuple[Program, ...] = (
    Program("VAE, summed loss", vae, 200, 1000, 0.9),
    Program("DCGAN, two optimizers", dcgan, 120, 500, None),
    Program("LSTM on sines, LBFGS", time_sequence, 10, 30, 0.5),
    Program("REINFORCE", reinforce, 40, 400, None),
    Program("actor-critic", actor_critic, 40, 400, None),
    Program("GCN, sparse matrices", gcn, 200, 1000),
    Program("GAT, dropout of 0.6", gat, 200, 800, 0.9),
    Program("word language model, no optimizer", word_language_model, 150, 1000, 0.9),
    Program("forward-forward, an optimizer per layer", forward_forward, 150, 600),
    Program("siamese network, Adadelta", siamese, 120, 700, None),
    Program("super resolution, orthogonal weights", super_resolution, 120, 700),
    Program("MNIST, Adadelta", mnist, 150, 800),
    Program("MNIST by rows, LSTM and batch norm", mnist_rnn, 150, 800, 0.95),
    Program("polynomial regression, no optimizer", regression, 200, 2000, 0.9),
    Program("neural style, losses of 1e10", neural_style, 120, 600, None),
    Program("translation, transformer", translation, 80, 400, None),
    Program("nanoGPT", nano_gpt, 120, 600, None),
    Program("mixture of experts", switch, 150, 700),
    Program("timm: SGD, warm-up per epoch, average copy", timm_sgd, 240, 1200),
    Program("timm: ViT, AdamW, stochastic depth", timm_vit, 240, 800, None),
    Program("YOLO: constant convolution, warm-up of biases", yolo, 200, 1000),
    Program("SimCLR, learned temperature", simclr, 100, 500, 0.9),
    Program("BYOL, target network", byol, 100, 500),
    Program("diffusion on a spiral, average copy", diffusion, 200, 1000, None),
    Program("WGAN, weights cut off", wgan, 250, 1500, None),
    Program("DLRM, sparse gradients", dlrm, 200, 1000, None),
    Program("differential equation (PINN)", pinn, 150, 1000, None),
    Program("DQN, target network", dqn, 200, 1200, None),
    Program("PPO", ppo, 160, 800, None),
    Program("SAC, three optimizers", sac, 120, 700, None),
)
