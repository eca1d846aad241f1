"""Small versions of published training programs, for which the monitor must be silent.

They keep what matters: losses, optimizers, learning rates, schedules, initialization, and how loops are written. Each
calls gradstat as its users would, by `gradstat.auto` or a `gradstat.Monitor`, or not at all if it is not watched.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from helpers.training import GPT, RECORD, TOKENS, Optimize, Sentences, factory, serious
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import gradstat
from gradstat.monitor import Finding, Monitor


@dataclass(frozen=True)
class Outcome:
    """The values that must fall as the program learns, by step, and the trained modules."""

    curve: Sequence[float]
    modules: Sequence[nn.Module]

    def ends(self) -> tuple[float, float]:
        """The means of the first and of the last tenth of the curve."""
        tenth = max(1, len(self.curve) // 10)
        return sum(self.curve[:tenth]) / tenth, sum(self.curve[-tenth:]) / tenth

    def bits(self) -> list[bytes]:
        """The bytes of all parameters and buffers."""
        return [tensor.numpy().tobytes() for module in self.modules for tensor in module.state_dict().values()]


class Session:
    """A run of a program: its seed, its steps, and the calls of gradstat, which do nothing if it is not watched."""

    def __init__(self, seed: int, steps: int, is_watched: bool) -> None:
        self.seed, self.steps, self.is_watched = seed, steps, is_watched
        self.monitors: list[Monitor] = []

    def auto(self, optimizer: Optimizer, model: nn.Module | None = None, **options: Any) -> None:
        """`gradstat.auto`."""
        if self.is_watched:
            self.monitors.append(gradstat.auto(optimizer, model, on_anomaly=RECORD, **options).monitor)

    def by(self, optimize: Optimize, *models: nn.Module) -> Iterator[Optimizer]:
        """An optimizer for each of several models, watched by `gradstat.auto`."""
        for model in models:
            optimizer = optimize(model.parameters())
            self.auto(optimizer, model)
            yield optimizer

    def monitor(self, model: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> Monitor | None:
        """`gradstat.Monitor`."""
        if not self.is_watched:
            return None
        self.monitors.append(Monitor(model, optimizer, on_anomaly=RECORD, **options))
        return self.monitors[-1]

    def fit(
        self,
        model: nn.Module,
        batch: Callable[[], Any],
        loss: Callable[..., Tensor],
        optimizer: Optimizer | Optimize,
        by: str = "auto",
        each: Callable[[int], object] = lambda step: None,
        clip: float | None = None,
        kept: Sequence[nn.Module] = (),
        **options: Any,
    ) -> Outcome:
        """The loop that most programs have.

        Args:
            loss: Function of the tensors of a batch.
            optimizer: An optimizer, or what makes one from the parameters.
            by: What watches it, `gradstat.auto` or, with ``options``, a "monitor" that is shown the batches.
            each: Called after every step.
            clip: As for `train_step`.
            kept: Modules that are changed besides the model.
        """
        optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
        monitor = self.monitor(model, optimizer, **options) if by == "monitor" else self.auto(optimizer, model)
        curve = []
        for step in range(self.steps):
            data = batch()
            if monitor is not None:
                monitor.check_batch(data)
            curve.append(train_step(optimizer, loss(*data), monitor, clip))
            each(step)
        return Outcome(curve, [model, *kept])


@dataclass(frozen=True)
class Program:
    """A training program."""

    name: str
    short: int  # steps in a test
    steps: int  # in a long run, as docs/monitor.md states
    falls: float | None  # the share of its start to which the curve falls in a short run; None if that takes longer
    train: Callable[[Session], Outcome]  # random numbers are seeded before


PROGRAMS: list[Program] = []


def program(name: str, short: int, steps: int, falls: float | None = 0.7) -> Callable[..., None]:
    """Decorator that registers a function as a program."""
    return lambda train: PROGRAMS.append(Program(name, short, steps, falls, train))


def run(program: Program, seed: int, steps: int, on: bool = True) -> tuple[Outcome, list[Finding], list[Monitor]]:
    """Runs a program; returns its outcome, the findings above severity info, and the monitors."""
    torch.manual_seed(seed)
    random.seed(seed)
    session = Session(seed, steps, on)
    outcome = program.train(session)
    for monitor in session.monitors:
        monitor.remove()
    return outcome, [finding for monitor in session.monitors for finding in serious(monitor)], session.monitors


def train_step(optimizer: Optimizer, loss: Tensor, monitor: Monitor | None = None, clip: float | None = None) -> float:
    """One optimizer step, after clipping if ``clip`` is given; returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    if monitor is not None:
        monitor.step(loss.detach())
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    return loss.item()


def every(steps: int, call: Callable[[], object]) -> Callable[[int], None]:
    """Calls ``call`` after every ``steps`` steps, as at the end of an epoch."""

    def each(step: int) -> None:
        if (step + 1) % steps == 0:
            call()

    return each


@torch.no_grad()
def update_average(kept: nn.Module, model: nn.Module, decay: float) -> None:
    """Updates an exponential moving average of a model's parameters."""
    for mean, parameter in zip(kept.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, 1 - decay)


class Net(nn.Module):
    """A module with named parts, whose forward pass is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Images:
    """Noisy images in [0, 1], each of one of several coarse patterns, and labels of the patterns."""

    def __init__(self, seed: int, size: int, batch: int, classes: int = 10, noise: float = 0.1) -> None:
        self.random = torch.Generator().manual_seed(seed)
        coarse = torch.rand(classes, 1, 4, 4, generator=self.random)
        self.patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")
        self.batch, self.noise = batch, noise

    def __call__(self) -> tuple[Tensor, Tensor]:
        labels = torch.randint(len(self.patterns), (self.batch,), generator=self.random)
        return self.of(labels), labels

    def of(self, labels: Tensor) -> Tensor:
        """Images of the patterns ``labels``."""
        images = self.patterns[labels]
        return (images + self.noise * torch.randn(images.shape, generator=self.random)).clamp(0, 1)


# Examples of PyTorch -------------------------------------------------------------------------------------------


@program("VAE, summed loss", 200, 1000, 0.9)
def vae(session: Session) -> Outcome:
    """The loss is a sum over batch and pixels."""
    encoder, decoder = nn.Linear(400, 100), nn.Sequential(nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 400))
    model = nn.ModuleDict({"in": encoder, "mean": nn.Linear(100, 8), "log": nn.Linear(100, 8), "out": decoder})

    def loss(images: Tensor, _: Tensor) -> Tensor:
        pixels = (4 * images.flatten(1) - 1.5).clamp(0, 1)  # mostly black or white, as digits are
        hidden = encoder(pixels).relu()
        mean, log = model["mean"](hidden), model["log"](hidden)
        drawn = torch.sigmoid(decoder(mean + torch.randn_like(mean) * (0.5 * log).exp()))
        divergence = -0.5 * (1 + log - mean**2 - log.exp()).sum()
        return F.binary_cross_entropy(drawn, pixels, reduction="sum") + divergence

    return session.fit(model, Images(session.seed, 20, 128), loss, factory(Adam, 1e-3), "monitor")


@program("VQ-VAE", 300, 1000, 0.9)
def vq_vae(session: Session) -> Outcome:
    """The loss climbs to twice as much while the codes follow the encoder's growing outputs, then falls."""
    codes, mix = nn.Embedding(32, 8), torch.randn(4, 16)
    nn.init.uniform_(codes.weight, -0.5, 0.5)
    encoder, decoder = (nn.Sequential(nn.Linear(*ends), nn.ReLU(), nn.Linear(*out)) for ends, out in (
        ((16, 32), (32, 8)), ((8, 32), (32, 16))))  # fmt: skip
    model = nn.ModuleDict({"encoder": encoder, "codes": codes, "decoder": decoder})
    optimizer, curve = Adam(model.parameters(), 1e-3), []
    session.auto(optimizer, model)
    for _ in range(session.steps):
        inputs = (torch.randn(64, 4) @ mix).tanh()
        encoded = encoder(inputs)
        nearest = codes(torch.cdist(encoded, codes.weight).argmin(1))
        error = F.mse_loss(decoder(encoded + (nearest - encoded).detach()), inputs)
        of_codes = F.mse_loss(nearest, encoded.detach()) + 0.25 * F.mse_loss(encoded, nearest.detach())
        train_step(optimizer, error + of_codes)
        curve.append(error.item())
    return Outcome(curve, [model])


@program("DCGAN, two optimizers", 100, 400, None)
def dcgan(session: Session) -> Outcome:
    """Two optimizers; the generator's step also leaves gradients in the critic."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    for name, parameter in [*generator.named_parameters(), *critic.named_parameters()]:
        if name.endswith("weight"):
            nn.init.normal_(parameter, float(parameter.dim() == 1), 0.02)
    by_critic, by_generator = session.by(factory(Adam, 2e-4, betas=(0.5, 0.999)), critic, generator)
    images, curve, ones = Images(session.seed, 16, 16), [], torch.ones(16)
    for _ in range(session.steps):
        real, fake = images()[0] * 2 - 1, generator(torch.randn(16, 16, 1, 1))
        wrong = F.binary_cross_entropy(critic(fake.detach()), 0 * ones)
        train_step(by_critic, F.binary_cross_entropy(critic(real), ones) + wrong)
        train_step(by_generator, F.binary_cross_entropy(critic(fake), ones))
        curve.append(float((fake.detach().mean(0) - real.mean(0)).abs().mean()))
    return Outcome(curve, [generator, critic])


@program("LSTM, LBFGS", 10, 30, 0.5)
def time_sequence(session: Session) -> Outcome:
    """LBFGS on all data, in float64; gradients are computed in its closure."""
    phases = torch.randint(-80, 80, (8, 1)).double()
    waves = torch.sin((torch.arange(60.0).double() + phases) / 20)[..., None]
    cells, out = nn.LSTM(1, 16, 2, batch_first=True), nn.Linear(16, 1)
    model = Net(lambda net, x: net.out(net.cells(x)[0]), cells=cells, out=out).double()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
    session.auto(optimizer, model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
        loss.backward()
        return loss

    return Outcome([optimizer.step(closure).item() for _ in range(session.steps)], [model])


class CartPole:
    """A pole on a cart, to be balanced by pushes to the left and right, for at most ``longest`` steps."""

    def __init__(self, longest: int = 200) -> None:
        self.longest = longest
        self.reset()

    def reset(self) -> list[float]:
        """Starts an episode and returns its first state."""
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


def _by_episodes(session: Session, judge: Callable[..., Any], rate: float, **parts: nn.Module) -> Outcome:
    """One optimizer step per episode, with a loss summed over moves; ``judge`` gives probabilities and a value."""
    model = Net(judge, **parts)
    (optimizer,) = session.by(factory(Adam, rate), model)
    world, curve, running = CartPole(), [], 10.0
    while len(curve) < session.steps and running <= 150:  # until episodes are long on average
        state, over, logs, values = world.reset(), False, [], []
        while not over:
            shares, value = model(torch.tensor(state))
            choice = Categorical(shares, validate_args=False)
            action = choice.sample()
            logs.append(choice.log_prob(action))
            values.append(value)
            state, over = world.step(int(action))
        # Normalized discounted returns of a reward of 1 per step.
        returns = torch.tensor([*itertools.accumulate([1.0] * len(logs), lambda total, reward: reward + 0.99 * total)])
        returns, guessed = returns.flip(0), torch.cat(values)
        returns = (returns - returns.mean()) / (returns.std() + 1e-7)
        actor = -(torch.stack(logs) * (returns - guessed.detach())).sum()
        train_step(optimizer, actor + F.smooth_l1_loss(guessed, returns, reduction="sum"))
        curve.append(-float(len(logs)))
        running = 0.95 * running + 0.05 * len(logs)
    return Outcome(curve, [model])


@program("REINFORCE", 40, 400, None)
def reinforce(session: Session) -> Outcome:
    """A policy without a critic, with dropout."""
    policy = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(-1))
    return _by_episodes(session, lambda net, x: (net.policy(x), torch.zeros(1)), 1e-2, policy=policy)


@program("actor-critic", 40, 400, None)
def actor_critic(session: Session) -> Outcome:
    """A policy and a critic; with some seeds it gets stuck, as the original does."""

    def judge(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        x = net.affine(x).relu()
        return net.action(x).softmax(-1), net.value(x)

    parts = {"affine": nn.Linear(4, 128), "action": nn.Linear(128, 2), "value": nn.Linear(128, 1)}
    return _by_episodes(session, judge, 3e-2, **parts)


def _citations(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Papers on a subject cite each other and use the same words: returns words, links, subjects."""
    chance = torch.Generator().manual_seed(seed)
    subject = torch.randint(4, (120,), generator=chance)
    is_same = subject[:, None] == subject[None]
    links = (torch.rand(120, 120, generator=chance) < torch.where(is_same, 0.1, 0.01)).float()
    links = ((links + links.T + torch.eye(120)) > 0).float()
    typical = (torch.arange(60) % 4)[None] == subject[:, None]
    words = (torch.rand(120, 60, generator=chance) < torch.where(typical, 0.15, 0.03)).float()
    return words / words.sum(1, keepdim=True).clamp_min(1), links, subject


@program("GCN, sparse matrices", 200, 1000)
def gcn(session: Session) -> Outcome:
    """Graph convolutions without biases."""
    words, links, subject = _citations(session.seed)
    root = links.sum(1).rsqrt()
    words, links = words.to_sparse(), (root[:, None] * links * root).to_sparse()
    first, second = nn.Linear(60, 16, bias=False), nn.Linear(16, 4, bias=False)
    model = nn.ModuleList([first, second])

    def loss() -> Tensor:
        hidden = F.dropout(torch.sparse.mm(links, torch.sparse.mm(words, first.weight.T)).relu(), 0.5)
        return F.nll_loss(torch.sparse.mm(links, second(hidden)).log_softmax(1)[:80], subject[:80])

    return session.fit(model, tuple, loss, factory(Adam, 0.01, weight_decay=5e-4))


def _attention(inputs: int, outputs: int, heads: int) -> Net:
    def attend(net: Net, x: Tensor, links: Tensor) -> Tensor:
        values = F.dropout(x @ net.W, 0.6).view(len(x), heads, outputs).transpose(0, 1)
        scores = values @ net.a[:, :outputs] + (values @ net.a[:, outputs:]).mT
        shares = F.leaky_relu(scores, 0.2).masked_fill(links == 0, -9e16).softmax(-1)
        return (F.dropout(shares, 0.6) @ values).mean(0)

    weights = (nn.Parameter(nn.init.xavier_normal_(torch.empty(s)))
               for s in ((inputs, heads * outputs), (heads, 2 * outputs, 1)))  # fmt: skip
    return Net(attend, **dict(zip("Wa", weights, strict=True)))


@program("GAT", 200, 800, 0.9)
def gat(session: Session) -> Outcome:
    """Graph attention with a dropout of 0.6."""
    words, links, subject = _citations(session.seed)
    first, second = _attention(60, 16, 4), _attention(16, 4, 1)
    model = nn.ModuleList([first, second])

    loss = lambda: F.nll_loss(second(F.elu(first(words, links)), links).log_softmax(1)[:80], subject[:80])  # noqa: E731
    return session.fit(model, tuple, loss, factory(Adam, 0.005, weight_decay=5e-4), "monitor")


@program("word language model, no optimizer", 150, 1000, 0.9)
def word_language_model(session: Session) -> Outcome:
    """No optimizer: clips at 0.25 with a learning rate of 20, which is divided by 4 when the loss stops falling."""
    drop, words = nn.Dropout(0.2), nn.Embedding(TOKENS, 24)
    cells, out = nn.LSTM(24, 24, 2, dropout=0.2), nn.Linear(24, TOKENS)
    nn.init.uniform_(words.weight, -0.1, 0.1)
    nn.init.uniform_(out.weight, -0.1, 0.1)
    nn.init.zeros_(out.bias)
    model, sentences = nn.ModuleList([drop, words, cells, out]), Sentences(session.seed, length=12, size=10)
    monitor = session.monitor(model, max_norm=0.25)
    state: Any = None
    rate, best, curve = 20.0, math.inf, []
    for step in range(session.steps):
        tokens, following = (part.T for part in sentences())
        model.zero_grad()
        state = None if state is None else tuple(part.detach() for part in state)
        found, state = cells(drop(words(tokens)), state)
        loss = F.nll_loss(out(drop(found)).log_softmax(-1).flatten(0, 1), following.flatten())
        loss.backward()
        if monitor is not None:
            monitor.step(loss.detach(), lr=rate)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-rate)
        curve.append(loss.item())
        if (step + 1) % 200 == 0:
            mean = sum(curve[-200:]) / 200
            rate = rate if mean < best else rate / 4
            best = min(best, mean)
    return Outcome(curve, [model])


class _Goodness(nn.Linear):
    """A layer with its own optimizer, trained to be active for good inputs and inactive for bad ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (x.norm(2, 1, keepdim=True) + 1e-4)).relu()

    def loss(self, good: Tensor, bad: Tensor) -> Tensor:
        """Logistic loss of the mean squared activations around a threshold."""
        goods, bads = (self(x).pow(2).mean(1) for x in (good, bad))
        return torch.log1p(torch.exp(torch.cat([2 - goods, bads - 2]))).mean()


@program("forward-forward, an optimizer per layer", 150, 600)
def forward_forward(session: Session) -> Outcome:
    """Layers trained one after another, each by its own Adam on all data."""
    images, labels = Images(session.seed, 10, 200)()
    good, bad = images.flatten(1), images.flatten(1).clone()
    good[:, :10], bad[:, :10] = F.one_hot(labels, 10).float(), F.one_hot((labels + 3) % 10, 10).float()
    layers, curve = [_Goodness(100, 64), _Goodness(64, 64)], []
    for layer in layers:
        curve = session.fit(layer, lambda both=(good, bad): both, layer.loss, factory(Adam, 0.03)).curve
        good, bad = layer(good).detach(), layer(bad).detach()
    return Outcome(curve, layers)


def _resnet(width: int = 8) -> nn.Module:
    """Convolutions with batch norm; one of them has a bias in front of it."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )  # fmt: skip


def _adadelta(model: nn.Module, by: str) -> tuple[Optimizer, str, Callable[[int], None]]:
    """Adadelta at 1.0, multiplied by 0.7 each epoch; what watches it; and what to call after each step."""
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    return optimizer, by, every(100, StepLR(optimizer, 1, 0.7).step)


@program("siamese network, Adadelta", 120, 700, None)
def siamese(session: Session) -> Outcome:
    """Adadelta at 1.0, multiplied by 0.7 each epoch, on raw pixels from 0 to 255."""
    trunk, head = _resnet(), nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    model = nn.ModuleList([trunk, head])
    for layer in (head[0], head[2]):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.constant_(layer.bias, 0.01)
    images = Images(session.seed, 12, 32)

    def pairs() -> tuple[Tensor, Tensor, Tensor]:
        left, kinds = images()
        is_same = torch.rand(32) < 0.5
        right = images.of(torch.where(is_same, kinds, (kinds + torch.randint(1, 10, (32,))) % 10))
        return left * 255, right * 255, is_same.float()

    def loss(left: Tensor, right: Tensor, is_same: Tensor) -> Tensor:
        return F.binary_cross_entropy(head(torch.cat([trunk(left), trunk(right)], 1))[:, 0], is_same)

    return session.fit(model, pairs, loss, *_adadelta(model, "monitor"))


@program("MNIST, Adadelta", 150, 800)
def mnist(session: Session) -> Outcome:
    """Adadelta at 1.0, multiplied by 0.7 each epoch, with dropout."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10), nn.LogSoftmax(1),
    )  # fmt: skip

    loss = lambda images, labels: F.nll_loss(model((images - 0.1307) / 0.3081), labels)  # noqa: E731
    return session.fit(model, Images(session.seed, 12, 32), loss, *_adadelta(model, "auto"))


def _gram(x: Tensor) -> Tensor:
    flat = x.flatten(2)
    return flat @ flat.mT / x[0].numel()


@program("neural style, losses of 1e10", 120, 600, None)
def neural_style(session: Session) -> Outcome:
    """Losses times 1e5 and 1e10, through a frozen network."""
    seen = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    seen.requires_grad_(False)
    model = nn.Sequential(
        nn.ReflectionPad2d(2), nn.Conv2d(1, 8, 5), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1),
    )  # fmt: skip
    images = Images(session.seed, 12, 4)
    style = _gram(seen(images()[0][:1] * 255))

    def loss(pixels: Tensor) -> Tensor:
        made = seen(model(pixels))
        return 1e5 * F.mse_loss(made, seen(pixels)) + 1e10 * F.mse_loss(_gram(made), style.expand(len(pixels), -1, -1))

    return session.fit(model, lambda: [images()[0] * 255], loss, factory(Adam, 1e-3), "monitor")


@program("U-Net, dice, RMSprop with momentum", 100, 500)
def u_net(session: Session) -> Outcome:
    """RMSprop, whose momentum is one of gradients over their size, with a momentum of 0.999."""

    def twice(inputs: int, outputs: int) -> nn.Sequential:
        layers = [nn.Conv2d(a, outputs, 3, padding=1, bias=False) for a in (inputs, outputs)]
        return nn.Sequential(*(m for layer in layers for m in (layer, nn.BatchNorm2d(outputs), nn.ReLU())))

    parts = {"begin": twice(1, 8), "down": twice(8, 16), "up": twice(24, 8), "end": nn.Conv2d(8, 2, 1)}
    model = nn.ModuleDict(parts)

    def loss(pixels: Tensor, _: Tensor) -> Tensor:
        masks = (pixels[:, 0] > 0.5).long()
        noisy = pixels + 0.3 * torch.randn_like(pixels)
        high = model["begin"](noisy)
        low = F.interpolate(model["down"](F.max_pool2d(high, 2)), scale_factor=2)
        logits = model["end"](model["up"](torch.cat([high, low], 1)))
        shares, wanted = logits.softmax(1), F.one_hot(masks, 2).movedim(-1, 1).float()
        dice = 2 * (shares * wanted).sum((0, 2, 3)) / (shares + wanted).sum((0, 2, 3))
        return F.cross_entropy(logits, masks) + 1 - dice.mean()

    rmsprop = factory(torch.optim.RMSprop, 1e-5, weight_decay=1e-8, momentum=0.999)
    return session.fit(model, Images(session.seed, 12, 8), loss, rmsprop, clip=1.0)


@program("translation, transformer", 80, 400, None)
def translation(session: Session) -> Outcome:
    """A post-norm transformer, with Adam and nondefault betas; padding is ignored."""
    tables = {name: nn.Embedding(TOKENS, 32) for name in ("source", "target")}
    places = nn.Parameter(torch.randn(13, 32), requires_grad=False)
    inner, out = nn.Transformer(32, 4, 2, 2, 64, batch_first=True), nn.Linear(32, TOKENS)
    mask = nn.Transformer.generate_square_subsequent_mask(8)

    def translate(net: Net, *texts: Tensor) -> Tensor:
        x, y = (table(t) * 32**0.5 + places[:8] for table, t in zip(tables.values(), texts, strict=True))
        return out(inner(x, y, tgt_mask=mask, tgt_is_causal=True))

    model = Net(translate, **tables, places=places, inner=inner, out=out)
    for parameter in (p for p in model.parameters() if p.dim() > 1):
        nn.init.xavier_uniform_(parameter)
    words = torch.randperm(TOKENS - 1) + 1

    def batch() -> tuple[Tensor, Tensor]:
        source = torch.randint(1, TOKENS, (16, 8))
        source[:, 6:] *= torch.rand(16, 1) < 0.5  # padding
        return source, torch.where(source > 0, words[source - 1], 0).flip(1)

    def loss(source: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(source, target.roll(1, 1)).flatten(0, 1), target.flatten(), ignore_index=0)

    return session.fit(model, batch, loss, factory(Adam, 5e-4, betas=(0.9, 0.98), eps=1e-9))


# Language models, vision -------------------------------------------------------------------------------------


def _cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


@program("nanoGPT", 120, 600, None)
def nano_gpt(session: Session) -> Outcome:
    """Manual warm-up and cosine, weight decay for matrices only, a clip at 1, micro-batches, a disabled scaler."""
    model, sentences, steps = GPT(layers=2, width=24, tied=True, dropout=0.1), Sentences(session.seed), session.steps
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02 / 2 if name.endswith(("out.weight", "down.weight")) else 0.02)
    groups = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = AdamW(decays, lr=1e-3, betas=(0.9, 0.99))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    session.auto(optimizer, model, scaler=scaler)
    curve = []
    for step in range(steps):
        done = (step - 100) / max(1, steps - 100)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + _cosine(done) * 9e-4
        for _ in range(2):
            tokens, following = sentences()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten()) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        curve.append(2 * loss.item())
    return Outcome(curve, [model])


def _switch(net: Net, x: Tensor) -> Tensor:
    """Routes each token to one of several MLPs; those without tokens are not computed."""
    shares = net.route(x).softmax(-1)
    weight, chosen = shares.max(-1)
    out = torch.zeros_like(x)
    for i in chosen.unique().tolist():
        where = chosen == i
        out[where] = net.experts[i](x[where]) * weight[where][:, None]
    counts = F.one_hot(chosen, shares.shape[-1]).float()
    net.balance = shares.shape[-1] * (counts.mean(0) * shares.mean(0)).sum()
    return x + out


@program("mixture of experts", 150, 700)
def switch(session: Session) -> Outcome:
    """A mixture of experts with a balancing loss; in many steps some expert has no gradient."""
    route = nn.Linear(16, 8)
    perceptrons = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(8))
    experts = Net(_switch, route=route, experts=nn.ModuleList(perceptrons))
    model = nn.Sequential(nn.Linear(16, 16), experts, nn.LayerNorm(16), nn.Linear(16, 10))

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images.flatten(1)), labels) + 0.01 * experts.balance

    return session.fit(model, Images(session.seed, 4, 24), loss, factory(AdamW, 3e-3))


def _by_epochs(optimizer: Optimizer, first: float, epochs: int) -> Callable[[int], None]:
    """A warm-up over 5 epochs from a share of the learning rate, then a cosine; an epoch has 40 steps."""

    def share(epoch: int) -> float:
        return first + (1 - first) * (epoch / 5 if epoch < 5 else _cosine(min(1.0, epoch / epochs)))

    return every(40, LambdaLR(optimizer, share).step)


@program("timm: SGD, warm-up per epoch, average copy", 240, 1200)
def timm_sgd(session: Session) -> Outcome:
    """Warm-up from 1e-5 and a cosine, stepped once per epoch; Nesterov momentum, label smoothing, an EMA copy."""
    model = nn.Sequential(_resnet(), nn.Linear(64, 10))
    kept = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-5, nesterov=True)
    by_epochs = _by_epochs(optimizer, 1e-4, session.steps // 40)

    def each(step: int) -> None:
        update_average(kept, model, 0.9998)
        by_epochs(step)

    loss = lambda images, labels: F.cross_entropy(model(images), labels, label_smoothing=0.1)  # noqa: E731
    return session.fit(model, Images(session.seed, 12, 32), loss, optimizer, each=each, kept=[kept])


def _vit_block(drop: float) -> Net:
    """Attention and an MLP, with layer scale from 1e-5 and stochastic depth."""

    def path(x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1) >= drop) / (1 - drop)

    def block(net: Net, x: Tensor) -> Tensor:
        y = net.norm1(x)
        x = x + path(net.scale1 * net.attention(y, y, y, need_weights=False)[0])
        return x + path(net.scale2 * net.mlp(net.norm2(x)))

    parts = {"norm1": nn.LayerNorm(24), "norm2": nn.LayerNorm(24)}
    parts["attention"] = nn.MultiheadAttention(24, 4, batch_first=True)
    parts["mlp"] = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
    return Net(block, **parts, **{name: nn.Parameter(torch.full((24,), 1e-5)) for name in ("scale1", "scale2")})


def _vit(net: Net, x: Tensor) -> Tensor:
    x = net.patches(x).flatten(2).mT
    x = torch.cat([net.cls.expand(len(x), -1, -1), x], 1) + net.places
    return net.head(net.norm(net.blocks(x))[:, 0])


@program("timm: ViT, AdamW, stochastic depth", 240, 800, None)
def timm_vit(session: Session) -> Outcome:
    """AdamW, warm-up stepped per epoch, stochastic depth, layer scale, a head of zeros, mixup, a clip at 1."""
    patches, places = nn.Conv2d(1, 24, 4, 4), nn.Parameter(torch.randn(1, 10, 24) * 0.02)
    blocks, head = nn.Sequential(*(_vit_block(0.1 * i) for i in range(3))), nn.Linear(24, 10)
    for zeroed in head.parameters():
        nn.init.zeros_(zeroed)
    parts = {"patches": patches, "places": places, "cls": nn.Parameter(torch.zeros(1, 1, 24)), "blocks": blocks}
    model = Net(_vit, **parts, norm=nn.LayerNorm(24), head=head)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        share = random.betavariate(0.8, 0.8)
        found = model(share * images + (1 - share) * images.flip(0))
        return share * F.cross_entropy(found, labels) + (1 - share) * F.cross_entropy(found, labels.flip(0))

    images, each = Images(session.seed, 12, 32), _by_epochs(optimizer, 1e-3, session.steps // 40)
    return session.fit(model, images, loss, optimizer, "monitor", each, clip=1.0, max_norm=1.0)


def _detect(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """A class per location, and distances as means of distributions (DFL)."""
    x = net.trunk(x)
    shares = net.box(x).view(len(x), 4, 8, -1).transpose(1, 2).softmax(1)
    return net.dfl(shares)[:, 0], net.kind(x).flatten(2)


@program("YOLO: constant convolution, warm-up of biases", 200, 1000)
def yolo(session: Session) -> Outcome:
    """A constant convolution held by the optimizer, and warm-up per group: downwards for biases, and of momentum."""
    trunk = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(),
    )  # fmt: skip
    box, kind, dfl = nn.Conv2d(16, 4 * 8, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(8, 1, 1, bias=False).requires_grad_(False)
    dfl.weight.copy_(torch.arange(8.0).view(1, 8, 1, 1))
    nn.init.constant_(kind.bias, math.log(5 / 4 / 20))
    model = Net(_detect, trunk=trunk, box=box, kind=kind, dfl=dfl)
    biases = [p for p in model.parameters() if p.dim() < 2]
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD(biases, lr=0.01, momentum=0.937, nesterov=True)
    optimizer.add_param_group({"params": weights, "weight_decay": 5e-4})

    def loss(images: Tensor, kinds: Tensor) -> Tensor:
        distances, found = model(images)
        wanted = images.flatten(1).mean(1)[:, None, None] * 7 * torch.ones(4, 64)
        classes = F.one_hot(kinds, 4).float()[:, :, None].expand(-1, -1, 64)
        return 16 * (F.smooth_l1_loss(distances, wanted) + F.binary_cross_entropy_with_logits(found, classes))

    def warm_up(step: int) -> None:
        share = min(1.0, step / 100)
        rates = (0.1 + share * (0.01 - 0.1), share * 0.01)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - 0.99 * step / session.steps)
            group["momentum"] = 0.8 + share * (0.937 - 0.8)

    warm_up(0)
    images = Images(session.seed, 16, 16, classes=4)
    return session.fit(model, images, loss, optimizer, "monitor", warm_up, clip=10.0)


@program("SimCLR, learned temperature", 100, 500, 0.9)
def simclr(session: Session) -> Outcome:
    """Contrastive, with a learned temperature that is in the optimizer but not in the model."""
    trunk = nn.Sequential(_resnet(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    sharpness = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    optimizer = Adam([*trunk.parameters(), sharpness], 3e-4, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=session.steps)

    def loss(images: Tensor, _: Tensor) -> Tensor:
        views = [images + 0.1 * torch.randn_like(images), images.flip(-1) * (0.5 + torch.rand(32, 1, 1, 1))]
        left, right = F.normalize(trunk(torch.cat(views)), dim=1).chunk(2)
        logits = left @ right.T * sharpness.clamp(max=math.log(100)).exp()
        return (F.cross_entropy(logits, torch.arange(32)) + F.cross_entropy(logits.T, torch.arange(32))) / 2

    images = Images(session.seed, 12, 32, classes=200)
    return session.fit(trunk, images, loss, optimizer, each=every(1, scheduler.step))


@program("BYOL, target network", 100, 500)
def byol(session: Session) -> Outcome:
    """A target network in the module that requires gradients, gets none and is not in the optimizer."""

    def distance(net: Net, one: Tensor, other: Tensor) -> Tensor:
        found = net.predictor(net.online(one))
        with torch.no_grad():
            wanted = net.target(other)
        return 2 - 2 * F.cosine_similarity(found, wanted).mean()

    online = nn.Sequential(_resnet(), nn.Linear(64, 16))
    predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    target = copy.deepcopy(online)
    model = Net(distance, online=online, predictor=predictor, target=target)
    optimizer = AdamW([*online.parameters(), *predictor.parameters()], lr=1e-3)

    def loss(images: Tensor, _: Tensor) -> Tensor:
        one, other = (images + 0.1 * torch.randn_like(images) for _ in range(2))
        return model(one, other) + model(other, one)

    images = Images(session.seed, 12, 32, classes=200)
    return session.fit(model, images, loss, optimizer, "monitor", lambda _: update_average(target, online, 0.99))


@program("diffusion, average copy", 200, 1000, None)
def diffusion(session: Session) -> Outcome:
    """Predicts noise at random times, on a spiral; with an EMA copy."""
    layers = {"times": nn.Embedding(100, 32), "first": nn.Linear(2, 32), "second": nn.Linear(32, 32)}
    layers["out"] = nn.Linear(32, 2)
    model = Net(lambda net, x, time: net.out(F.gelu(net.second(F.gelu(net.first(x) + net.times(time))))), **layers)
    kept = copy.deepcopy(model)
    signal = (1 - torch.linspace(1e-3, 0.1, 100)).cumprod(0)

    def batch() -> tuple[Tensor, Tensor]:
        angle = torch.rand(128) * 9 + 3
        return torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 6, torch.randint(100, (128,))

    def loss(places: Tensor, times: Tensor) -> Tensor:
        noise, left = torch.randn_like(places), signal[times][:, None]
        return F.mse_loss(model(left.sqrt() * places + (1 - left).sqrt() * noise, times), noise)

    each = lambda _: update_average(kept, model, 0.999)  # noqa: E731
    return session.fit(model, batch, loss, factory(AdamW, 1e-3), each=each, kept=[kept])


@program("WGAN, weights cut off", 250, 1500, None)
def wgan(session: Session) -> Outcome:
    """The critic's weights are clamped to 0.01 after each step; five of its steps per step of the generator."""
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    by_generator, by_critic = session.by(factory(torch.optim.RMSprop, 5e-5), generator, critic)
    images, curve = Images(session.seed, 8, 64), []
    for step in range(session.steps):
        real = images()[0].flatten(1)
        fake = generator(torch.randn(64, 8)).detach()
        train_step(by_critic, critic(fake).mean() - critic(real).mean())
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.01, 0.01)
        if step % 5 == 0:
            train_step(by_generator, -critic(generator(torch.randn(64, 8))).mean())
        curve.append(float((fake.mean(0) - real.mean(0)).abs().mean()))
    return Outcome(curve, [generator, critic])


@program("DLRM, sparse gradients", 200, 1000, None)
def dlrm(session: Session) -> Outcome:
    """Sparse embedding gradients, with plain SGD at 0.1."""
    tables = nn.ModuleList(nn.EmbeddingBag(100, 8, mode="sum", sparse=True) for _ in range(3))
    bottom = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))
    model = nn.ModuleDict({"tables": tables, "bottom": bottom, "top": top})
    likes = torch.randn(3, 100)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        chosen, dense = (torch.rand(3, 64, 2) ** 2 * 100).long(), torch.randn(64, 4)
        score = torch.stack([likes[i][chosen[i]].sum(1) for i in range(3)]).sum(0) + dense.sum(1)
        return dense, chosen, (score > 0).float()

    def loss(dense: Tensor, chosen: Tensor, wanted: Tensor) -> Tensor:
        dense = bottom(dense)
        parts = torch.stack([dense, *(table(ids) for table, ids in zip(tables, chosen, strict=True))], 1)
        products = (parts @ parts.mT)[:, [1, 2, 2, 3, 3, 3], [0, 0, 1, 0, 1, 2]]
        return F.binary_cross_entropy_with_logits(top(torch.cat([dense, products], 1))[:, 0], wanted)

    return session.fit(model, batch, loss, factory(torch.optim.SGD, 0.1), "monitor")


@program("PINN", 150, 1000, None)
def pinn(session: Session) -> Outcome:
    """The loss is a differential equation: gradients of gradients, tanh, ever smaller."""
    model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))

    def loss(x: Tensor) -> Tensor:
        y = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (curve + y).square().mean() + (model(torch.zeros(1, 1)) - 1).square().sum()

    return session.fit(model, lambda: [torch.rand(64, 1) * 6], loss, factory(Adam, 1e-3))


class _Sine(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        size = 1 / inputs if inputs == 3 else math.sqrt(6 / inputs) / 30
        nn.init.uniform_(self.weight, -size, size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * super().forward(x))


@program("SIREN, signed distances, clipped from thousands to 1", 120, 600)
def siren(session: Session) -> Outcome:
    """Weights of 50 to 3,000 in the loss, and gradients of gradients, whose norm is clipped to 1."""
    model = nn.Sequential(_Sine(3, 48), _Sine(48, 48), _Sine(48, 48), nn.Linear(48, 1))

    def loss(directions: Tensor, others: Tensor) -> Tensor:
        normals = F.normalize(directions)
        points = torch.cat([normals / 2, others]).requires_grad_()
        distances = model(points)[:, 0]
        (slopes,) = torch.autograd.grad(distances.sum(), points, create_graph=True)
        outside = torch.exp(-100 * distances[64:].abs()).mean()
        turned = (1 - F.cosine_similarity(slopes[:64], normals)).mean()
        steep = (slopes.norm(dim=1) - 1).abs().mean()
        return 3e3 * distances[:64].abs().mean() + 1e2 * outside + 1e2 * turned + 50 * steep

    batch = lambda: [torch.randn(64, 3), torch.rand(64, 3) * 2 - 1]  # noqa: E731
    return session.fit(model, batch, loss, factory(Adam, 1e-4), clip=1.0)


# Reinforcement learning --------------------------------------------------------------------------------------


@program("DQN, target network", 200, 1200, None)
def dqn(session: Session) -> Outcome:
    """A target network in the model, reloaded every 50 steps."""
    q = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
    target = copy.deepcopy(q)
    agent, world = nn.ModuleDict({"q": q, "target": target}), CartPole()
    optimizer = Adam(q.parameters(), lr=2.5e-4)
    monitor = session.monitor(agent, optimizer)
    kept: list[tuple[list[float], int, list[float], bool]] = []
    curve, state = [], world.reset()
    for step in range(500 + 4 * session.steps):
        if random.random() < max(0.05, 1 - step / (2 * session.steps)):
            action = random.randrange(2)
        else:
            action = int(q(torch.tensor(state)).argmax())
        following, over = world.step(action)
        kept.append((state, action, following, over and world.steps < world.longest))
        if over:
            curve.append(-float(world.steps))
        state = world.reset() if over else following
        if step < 500 or step % 4:
            continue
        before, actions, after, ends = (torch.tensor(part) for part in zip(*random.choices(kept, k=128), strict=True))
        with torch.no_grad():
            wanted = 1 + 0.99 * target(after).max(1).values * ~ends
        train_step(optimizer, F.mse_loss(q(before).gather(1, actions[:, None])[:, 0], wanted), monitor)
        if step // 4 % 50 == 0:
            target.load_state_dict(q.state_dict())
    return Outcome(curve, [agent])


def _orthogonal(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def _rollout(actor: nn.Module, critic: nn.Module, worlds: Sequence[CartPole], length: int) -> Iterator[Tensor]:
    """States, actions, log-probabilities, advantages, values and ends of ``length`` steps in each world."""
    seen = []
    with torch.no_grad():
        for _ in range(length):
            states = torch.tensor([world.state for world in worlds])
            choice = Categorical(logits=actor(states), validate_args=False)
            actions = choice.sample()
            overs = [world.step(action)[1] for world, action in zip(worlds, actions.tolist(), strict=True)]
            for world in (world for world, over in zip(worlds, overs, strict=True) if over):
                world.reset()
            seen.append((states, actions, choice.log_prob(actions), critic(states)[:, 0], torch.tensor(overs)))
        states, actions, logs, values, ends = map(torch.stack, zip(*seen, strict=True))
        following = torch.cat([values[1:], critic(torch.tensor([world.state for world in worlds]))[:, 0][None]])
        gained, advantages = torch.zeros(len(worlds)), torch.zeros_like(values)
        for t in reversed(range(length)):
            gained = 1 + 0.99 * following[t] * ~ends[t] - values[t] + 0.99 * 0.95 * ~ends[t] * gained
            advantages[t] = gained
    yield from (part.flatten(0, 1) for part in (states, actions, logs, advantages, values, ends))


@program("PPO", 160, 800, None)
def ppo(session: Session) -> Outcome:
    """Clipped ratios and values, normalized advantages; a clip at 0.5, a learning rate that falls to zero."""
    actor, critic = (
        nn.Sequential(_orthogonal(4, 64), nn.Tanh(), _orthogonal(64, 64), nn.Tanh(), _orthogonal(64, outputs, gain))
        for outputs, gain in ((2, 0.01), (1, 1.0))
    )
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    (optimizer,) = session.by(factory(Adam, 2.5e-4, eps=1e-5), model)
    worlds, curve = [CartPole() for _ in range(4)], []
    rounds = max(1, session.steps // 16)
    for i in range(rounds):
        optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - i / rounds)
        states, actions, logs, advantages, values, ends = _rollout(actor, critic, worlds, 128)
        curve.append(float(ends.sum()))
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
            train_step(optimizer, policy.mean() - 0.01 * choice.entropy().mean() + 0.25 * worst.mean(), clip=0.5)
    return Outcome(curve, [model])


def _perceptron(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


@program("SAC, three optimizers", 120, 700, None)
def sac(session: Session) -> Outcome:
    """Three optimizers, two critics, EMA copies; the actor's loss also leaves gradients in the critics."""
    actor, critics = _perceptron(2, 2), nn.ModuleList(_perceptron(3, 1) for _ in range(2))
    targets = copy.deepcopy(critics)
    log_alpha = nn.Parameter(torch.zeros(1))
    (by_critics,), (by_actor,) = session.by(factory(Adam, 1e-3), critics), session.by(factory(Adam, 3e-4), actor)
    by_alpha = Adam([log_alpha], 1e-3)
    session.auto(by_alpha)
    place, speed = torch.randn(2)
    kept, curve = [], []

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(state).chunk(2, -1)
        drawn = Normal(mean, (-1.5 + 3.5 * torch.tanh(spread)).exp(), validate_args=False)
        raw = drawn.rsample()
        action = raw.tanh()
        return action, (drawn.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(-1)

    def values(nets: nn.ModuleList, state: Tensor, action: Tensor) -> Tensor:
        return torch.stack([net(torch.cat([state, action], -1))[..., 0] for net in nets])

    for step in range(session.steps + 64):
        state = torch.stack([place, speed])
        with torch.no_grad():
            action = act(state)[0] if step > 64 else torch.rand(1) * 2 - 1
            speed = 0.9 * speed + 0.2 * action[0]
            place = place + 0.2 * speed
        reward = -(place**2) - 0.1 * speed**2
        kept.append((state, action, reward, torch.stack([place, speed])))
        curve.append(-float(reward))
        if step % 40 == 39:
            place, speed = torch.randn(2)
        if step < 64:
            continue
        before, actions, rewards, after = map(torch.stack, zip(*random.choices(kept, k=64), strict=True))
        with torch.no_grad():
            alpha = log_alpha.exp()
            moves, logs = act(after)
            wanted = rewards + 0.95 * (values(targets, after, moves).min(0).values - alpha * logs)
        train_step(by_critics, (values(critics, before, actions) - wanted).square().mean(1).sum())
        moves, logs = act(before)
        train_step(by_actor, (alpha * logs - values(critics, before, moves).min(0).values).mean())
        train_step(by_alpha, (-log_alpha.exp() * (logs.detach() - 1)).mean())
        update_average(targets, critics, 0.995)
    return Outcome(curve, [actor, critics, targets])
