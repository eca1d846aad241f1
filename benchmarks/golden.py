"""Measures how often golden runs call healthy runs unlike, and which mistakes and harmless changes they notice.

Small models are trained with many seeds. For each model, held-out healthy runs are compared with golden sets of 3, 5
and 8 runs, drawn at random. Then runs with one mistake of refactoring, or one harmless change, are compared with sets
of five. ::

    python benchmarks/golden.py --keep /tmp/runs      # recordings are kept there, and made only once
    python benchmarks/golden.py --keep /tmp/runs --record
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import runner
import tables
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from detection_mistakes import changed, constant_sample, groups, never_zeroed, shuffled, times
from helpers.training import CLASSES, TOKENS, Clusters, Recurrent, Sentences, Training, cnn, factory, train
from helpers.training_faults import every_batch
from rows import Row, record
from runner import rows_of_values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from gradstat.monitor import Golden, Monitor, Recording

STEPS = 160
HEALTHY_GROUP, MISTAKE_GROUP, HARMLESS_GROUP = (f"golden, {what}" for what in ("healthy", "mistakes", "harmless"))
POOL = 40  # seeds from which golden runs are drawn; the next ones are held out
SEEDS = (900, 901)  # of runs with a mistake
Batch = tuple[Tensor, Tensor]


# Healthy trainings -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Two heads; its projections are separate, so that the key's bias has no effect."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.causal, self.scaled = True, True
        self.eager = False  # in plain operations
        self.mixes_heads = False  # view() instead of transpose()
        self.kernel: SDPBackend | None = None

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape

        def heads(y: Tensor) -> Tensor:
            if self.mixes_heads:
                return y.view(n, 2, length, width // 2)
            return y.view(n, length, 2, width // 2).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scale = (width // 2) ** -0.5 if self.scaled else 1.0
        if self.eager:
            scores = q @ k.transpose(-1, -2) * scale
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = scores.masked_fill(mask, -math.inf).softmax(-1) @ v
        else:
            with nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.0)
        self.pre_norm, self.residual = True, True
        self.activation: Callable[[Tensor], Tensor] = F.gelu

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.pre_norm:
            x = self.norm1(x + self.drop(self.attention(x)))
            return self.norm2(x + self.drop(self.mlp(x)))
        kept = 1.0 if self.residual else 0.0
        x = kept * x + self.drop(self.attention(self.norm1(x)))
        return kept * x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Two blocks over 32 tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(32, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.positions, self.final_norm = True, True
        self.recomputes = False  # activation checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions:
            x = x + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(self.norm(x) if self.final_norm else x)


def perceptron() -> nn.Sequential:
    """Two hidden layers with batch norm, so that the biases before it have no effect."""
    drop = nn.Dropout(0.0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), drop,
        nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), drop, nn.Linear(32, CLASSES),
    )  # fmt: skip


class Phrases:
    """Token sequences in which half of the tokens follow from the one before, the others from the one before that."""

    def __init__(self, size: int, length: int = 16) -> None:
        task = torch.Generator().manual_seed(0)
        self.follows = torch.stack([torch.randperm(TOKENS, generator=task) for _ in range(2)])
        self.shares = 1 / torch.arange(1.0, TOKENS + 1)
        self.random = task
        self.size, self.length = size, length

    def __call__(self) -> Batch:
        shape = self.size, self.length + 2
        drawn = torch.multinomial(self.shares, shape[0] * shape[1], True, generator=self.random).view(shape)
        back = torch.arange(shape[1]) % 2
        surprise = torch.rand(shape, generator=self.random) < 0.2
        for i in range(2, shape[1]):
            known = self.follows[back[i], drawn[:, i - 1 - int(back[i])]]
            drawn[:, i] = torch.where(surprise[:, i], drawn[:, i], known)
        return drawn[:, 1:-1], drawn[:, 2:]


def grouped(
    kind: type[Optimizer] = torch.optim.AdamW, lr: float = 1e-2, weight_decay: float = 0.1, **options: Any
) -> Callable[[Iterable[Tensor]], Optimizer]:
    """A factory for an optimizer in which biases and norms do not decay."""

    def make(parameters: Iterable[Tensor]) -> Optimizer:
        parameters = list(parameters)
        matrices, others = ([p for p in parameters if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return kind(groups, lr=lr, **options)  # type: ignore[call-arg]

    return make


# The task is always the same; weights and samples depend on the seed. Nothing was tuned on the CNN and the LSTM, which
# are used for healthy runs only.
HEALTHY: dict[str, Callable[[int], Training]] = {
    "transformer": lambda seed: train(
        1000 + seed, Transformer, grouped(), Phrases(16), max_norm=1.0, shown=False,
        schedule=lambda step: min(1.0, (step + 1) / 10),
    ),
    "MLP": lambda seed: train(
        1000 + seed, perceptron, grouped(lr=2e-3, weight_decay=0.01), Clusters(0, 16, noise=2.0), max_norm=math.inf,
        shown=False,
    ),
    "CNN": lambda seed: train(
        seed, cnn, factory(torch.optim.SGD, 0.05, momentum=0.9, weight_decay=5e-4),
        Clusters(0, 1, 8, 8, size=16, noise=2.0),
    ),
    "LSTM": lambda seed: train(
        seed, lambda: Recurrent(nn.LSTM), factory(torch.optim.Adam, 5e-3), Sentences(0), max_norm=1.0
    ),
}  # fmt: skip


# Ways to run a training ------------------------------------------------------------------------------------------


class MeanOverRanks:
    """Takes the place of a training's monitor, which gets the mean loss of all ranks."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def step(self, loss: Tensor) -> None:
        dist.all_reduce(loss)
        self._monitor.step(loss / dist.get_world_size())


def recorded(training: Training) -> Recording:
    """The recording of a training."""
    monitor = training.monitor()
    for _ in training.steps(MeanOverRanks(monitor) if dist.is_initialized() else monitor, 0, STEPS):  # type: ignore[arg-type]
        pass
    monitor.remove()
    return monitor.recording()


# Mistakes and harmless changes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A change of a healthy training.

    Attributes:
        what: What is changed, in words.
        change: Changes the training.
        names: A part that `GoldenComparison.where` or ``what`` has to contain; empty if there is no right answer.
        model: The training it is made in.
        threads: The number of torch's threads.
        is_on_ranks: Whether this is done on two ranks.
    """

    what: str
    change: Callable[[Any], object] = lambda training: None
    names: str = ""
    model: str = "transformer"
    threads: int = 1
    is_on_ranks: bool = False


def sets(**values: Any) -> Callable[[Any], None]:
    """Sets attributes of all modules that have them."""

    def change(training: Training) -> None:
        for module in training.model.modules():
            for name, value in values.items():
                if hasattr(module, name):
                    setattr(module, name, value)

    return change


def on_model(change: Callable[[Any], object]) -> Callable[[Any], None]:
    """Changes the model."""
    return lambda training: torch.no_grad()(change)(training.model)


def by(optimize: Callable[[Iterable[Tensor]], Optimizer]) -> Callable[[Any], None]:
    """Replaces the optimizer by one of the parameters that the model has then."""

    def change(training: Training) -> None:
        training.optimizer = optimize([p for p in training.model.parameters() if p.requires_grad])

    return change


def both(first: Callable[[Any], object], second: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda training: (first(training), second(training))


def with_loss(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], None]:
    """Replaces the cross-entropy of logits and labels."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return function(model(batch[0]).flatten(0, -2).float(), batch[1].flatten())

    return lambda training: setattr(training, "loss", loss)


def _accumulates(training: Any) -> None:
    training.batch.size //= 2
    training.accumulate = 2


def _half_a_batch(training: Any) -> None:
    training.batch.size //= 2


def _repeats(steps: int) -> Callable[[Any], None]:
    """Every batch is used for so many steps."""

    def change(training: Any) -> None:
        draw, numbers = training.batch, itertools.count()
        kept: list[Batch] = []

        def batch() -> Batch:
            if next(numbers) % steps == 0:
                kept[:] = [draw()]
            return kept[0]

        training.batch = batch

    return change


def _renamed(batch: Batch) -> Batch:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(9))
    return order[batch[0]], order[batch[1]]


def _missing_feature(batch: Batch) -> Batch:
    inputs = batch[0].clone()
    inputs[:, 3] = 0
    return inputs, batch[1]


def _tied(model: Any) -> None:
    model.head.weight = model.tokens.weight


def _ddp(training: Any) -> None:
    training.model = DistributedDataParallel(training.model)


def _fsdp(training: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*training.model.blocks, training.model):
        fully_shard(module, mesh=mesh)
    by(grouped())(training)


def _split(batch: Batch) -> Batch:
    """The part of a batch of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return batch[0][rank::world], batch[1][rank::world]


def _autocast(dtype: torch.dtype) -> Callable[[Any], None]:
    def change(training: Training) -> None:
        training.autocast = dtype
        training.scaler = torch.amp.GradScaler("cpu") if dtype == torch.float16 else None

    return change


def _by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(1, labels[:, None]).mean()


MISTAKES = (
    Case("loss not divided under accumulation", both(_accumulates, times(2.0)), "everywhere"),
    Case("half a batch", _half_a_batch, "everywhere"),
    Case("one matrix frozen", on_model(lambda model: model.blocks[1].up.weight.requires_grad_(False)), "blocks.1.up"),
    Case("dropout 0.2 added", sets(p=0.2)),
    Case("not causal", sets(causal=False), "everywhere"),
    Case("SGD for AdamW", by(grouped(torch.optim.SGD, momentum=0.9)), "everywhere"),
    Case("post-norm for pre-norm", sets(pre_norm=False), "everywhere"),
    Case("scores not scaled", sets(scaled=False), "attention"),
    Case("learning rate times 1.5", groups(lr=1.5e-2), "learning rate"),
    Case("learning rate times 1.1", groups(lr=1.1e-2), "learning rate"),
    Case("no warm-up", lambda training: setattr(training, "schedule", None), "learning rate"),
    Case("β1 = 0", groups(betas=(0.0, 0.999)), "optimizer"),
    Case("β2 = 0.95", groups(betas=(0.9, 0.95)), "optimizer"),
    Case("eps 1e-3", groups(eps=1e-3), "optimizer"),
    Case("eps 1e-5", groups(eps=1e-5), "optimizer"),
    Case("weight decay 0", groups(weight_decay=0.0), "optimizer"),
    Case("decay on norms and biases", groups(weight_decay=0.1), "optimizer"),
    Case("label smoothing 0.1", with_loss(partial(F.cross_entropy, label_smoothing=0.1)), "the loss"),
    Case("initial weights times 0.5", changed(lambda w: w.mul_(0.5)), "initial parameters"),
    Case("initial weights times 1.2", changed(lambda w: w.mul_(1.2)), "initial parameters"),
    Case("each batch four times", _repeats(4), "batches"),
    Case("one batch for ever", _repeats(STEPS), "everywhere"),
    Case("ReLU for GELU", sets(activation=F.relu)),
    Case("labels shuffled", shuffled(1.0), "everywhere"),
    Case("labels not shifted", every_batch(lambda batch: (batch[0], batch[0])), "everywhere"),
    Case("sequences reversed", every_batch(lambda batch: (batch[0].flip(1), batch[1].flip(1))), "everywhere"),
    Case("one sample in all places of a batch", every_batch(constant_sample), "everywhere"),
    Case("no residual connections", sets(residual=False), "everywhere"),
    Case("no final norm", sets(final_norm=False), "norm"),
    Case("no positions", sets(positions=False), "places"),
    Case("heads mixed by view()", sets(mixes_heads=True), "attention"),
    Case("loss summed", with_loss(partial(F.cross_entropy, reduction="sum")), "everywhere"),
    Case("softmax before the cross-entropy", with_loss(lambda x, y: F.cross_entropy(x.softmax(-1), y)), "everywhere"),
    Case("clip at 0.1", lambda training: setattr(training, "max_norm", 0.1), "optimizer"),
    Case("gradients not cleared", never_zeroed, "everywhere"),
    Case("head of zeros", on_model(lambda model: model.head.weight.zero_()), "head"),
    Case("half of the head zeros", on_model(lambda model: model.head.weight[: TOKENS // 2].zero_()), "head"),
    Case("head tied to the embedding", both(on_model(_tied), by(grouped())), "tokens|head"),
    Case("first block detached", on_model(
        lambda model: model.blocks[0].register_forward_hook(lambda module, inputs, output: output.detach())
    ), "tokens|blocks.0"),
    Case("second block skipped", on_model(
        lambda model: model.blocks[1].register_forward_hook(lambda module, inputs, output: inputs[0])
    ), "blocks.1"),
    Case("gradient of the head halved", on_model(
        lambda model: model.head.weight.register_hook(lambda gradient: 0.5 * gradient)
    ), "head"),
    Case("inputs not normalised", every_batch(lambda batch: (3 * batch[0] + 2, batch[1])), "buffers", "MLP"),
    Case("one input feature missing", every_batch(_missing_feature), "0", "MLP"),
    Case("labels shuffled, MLP", shuffled(1.0), "everywhere", "MLP"),
    Case("batch norm in evaluation mode", on_model(nn.Module.eval), "buffers", "MLP"),
    Case("dropout 0.5 added, MLP", sets(p=0.5), model="MLP"),
    Case("half a batch, MLP", _half_a_batch, "everywhere", "MLP"),
    Case("learning rate times 1.5, MLP", groups(lr=3e-3), "learning rate", "MLP"),
)  # fmt: skip

HARMLESS = (
    Case("another seed"),
    Case("fused AdamW", by(grouped(fused=True))),
    Case("foreach AdamW", by(grouped(foreach=True))),
    Case("AdamW one by one", by(grouped(foreach=False))),
    Case("tanh GELU", sets(activation=partial(F.gelu, approximate="tanh"))),
    Case("torch.compile, aot_eager", lambda t: setattr(t, "model", torch.compile(t.model, backend="aot_eager"))),
    Case("torch.compile, inductor", lambda t: setattr(t, "model", torch.compile(t.model))),
    Case("activation checkpointing", sets(recomputes=True)),
    Case("two threads", threads=2),
    Case("math SDPA", sets(kernel=SDPBackend.MATH)),
    Case("flash SDPA", sets(kernel=SDPBackend.FLASH_ATTENTION)),
    Case("attention in plain operations", sets(eager=True)),
    Case("bf16 autocast", _autocast(torch.bfloat16)),
    Case("fp16 autocast with a scaler", _autocast(torch.float16)),
    Case("two micro-batches, divided", _accumulates),
    Case("cross-entropy by hand", with_loss(_by_hand)),
    Case("tokens renamed", every_batch(_renamed)),
    Case("DDP on two ranks", both(_ddp, every_batch(_split)), is_on_ranks=True),
    Case("FSDP2 on two ranks", both(_fsdp, every_batch(_split)), is_on_ranks=True),
    Case("fused AdamW, MLP", by(grouped(lr=2e-3, weight_decay=0.01, fused=True)), model="MLP"),
    Case("bf16 autocast, MLP", _autocast(torch.bfloat16), model="MLP"),
    Case("fp16 autocast, MLP", _autocast(torch.float16), model="MLP"),
)

CASES = {case.what: case for case in (*(Case(model, model=model) for model in HEALTHY), *MISTAKES, *HARMLESS)}


def run(what: str, seed: int) -> Recording:
    """The recording of a case."""
    case = CASES[what]
    torch.set_num_threads(case.threads)
    training: Any = HEALTHY[case.model](seed)
    training.batch.random = torch.Generator().manual_seed(seed)
    case.change(training)
    return recorded(training)


def run_job(job: runner.Job) -> Recording:
    """Runs a case, by what is changed and a seed."""
    what, seed = job
    return runner.on_two_ranks(run, what, seed) if CASES[what].is_on_ranks else run(what, seed)


# What is measured ------------------------------------------------------------------------------------------------


Runs = Callable[[Sequence[runner.Job]], list[Recording]]


def healthy_rows(runs: Runs, held_out: int, sets: int) -> Iterator[Row]:
    """How many held-out healthy runs are called unlike."""
    for name in HEALTHY:
        made = runs([(name, seed) for seed in range(POOL + held_out)])
        pool, others, chosen = made[:POOL], made[POOL:], random.Random(0)
        for count in (3, 5, 8):
            golden = [Golden.of(chosen.sample(pool, count)) for _ in range(sets)]
            shares = [statistics.fmean(not one.compare(other).ok for other in others) for one in golden]
            values = {"called unlike": 100 * statistics.fmean(shares), "called unlike, worst set": 100 * max(shares)}
            case, provider = f"{name}, {held_out} held-out runs", f"{count} golden runs"
            yield from rows_of_values(HEALTHY_GROUP, case, provider, values, "%")


def case_rows(runs: Runs, group: str, cases: Sequence[Case], sets: int) -> Iterator[Row]:
    """How many runs with a change are called unlike, and which places are named."""
    golden = {
        model: [Golden.of(runs([(model, seed) for seed in range(5 * i, 5 * i + 5)])) for i in range(sets)]
        for model in ("transformer", "MLP")
    }
    made = runs([(case.what, seed) for case in cases for seed in SEEDS])
    for number, case in enumerate(cases):
        of_case = made[number * len(SEEDS) :][: len(SEEDS)]
        compared = [one.compare(recording) for one in golden[case.model] for recording in of_case]
        unlike = [f"{one.where}: {one.what}" for one in compared if not one.ok]
        values = {"called unlike": 100 * len(unlike) / len(compared)}
        if unlike and case.names:
            right = statistics.fmean(any(name in told for name in case.names.split("|")) for told in unlike)
            values["right place"] = 100 * right
        yield from rows_of_values(group, case.what, "Golden.compare", values, "%")


def main() -> int:
    parser = runner.parser_of(__doc__)
    parser.add_argument("--held-out", type=int, default=100, help="healthy runs of each model (default %(default)s)")
    parser.add_argument("--sets", type=int, default=30, help="golden sets of each size (default %(default)s)")
    options = parser.parse_args()
    made: dict[runner.Job, Recording] = {}

    def runs(jobs: Sequence[runner.Job]) -> list[Recording]:
        new = [job for job in jobs if job not in made]
        made.update(zip(new, runner.results_of(run_job, new, options.jobs, options.keep), strict=True))
        return [made[job] for job in jobs]

    rows = [
        *healthy_rows(runs, options.held_out, options.sets),
        *case_rows(runs, MISTAKE_GROUP, MISTAKES, 4),
        *case_rows(runs, HARMLESS_GROUP, HARMLESS, 4),
    ]
    print(tables.golden(rows))
    record(rows, "golden", options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
