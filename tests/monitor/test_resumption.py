"""What does not come back with a checkpoint is told in the first step after it was loaded, and nothing else is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from helpers.training import RECORD
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

import gradstat
from gradstat.monitor import Finding, Monitor

TOKENS, WIDTH, STEPS = 12, 8, 60
TABLE = torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(9)).mul(3).softmax(-1)


class Net(nn.Module):
    def __init__(self, blocks: int = 3, low_rank: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.low = nn.Parameter(torch.randn(WIDTH, 2) / 3) if low_rank else None
        self.high = nn.Parameter(torch.zeros(2, TOKENS)) if low_rank else None
        if low_rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name in ("low", "high"))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x)
        return logits if self.low is None else logits + x @ self.low @ self.high


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-2)


def two_groups(parameters: Any) -> Optimizer:
    every = list(parameters)
    return AdamW([{"params": [p for p in every if p.dim() == dim]} for dim in (2, 1)], lr=1e-2)


class Run:
    """A training of a `Net`, with its monitor."""

    def __init__(
        self, model: Net, optimize: Callable[[Any], Optimizer] = adamw, auto: bool = False, has_loss: bool = True
    ) -> None:
        self.model, self.optimizer, self.auto, self.has_loss = model, optimize(model.parameters()), auto, has_loss
        make = gradstat.auto if auto else Monitor
        made: Any = make(model, self.optimizer, on_anomaly=RECORD)
        self.monitor: Monitor = made.monitor if auto else made
        self.losses: list[float] = []
        self.average = copy.deepcopy(model.state_dict())
        self.first: Run | None = None  # whose checkpoint it goes on from

    def train(self, steps: int) -> None:
        for _ in range(steps):
            draw = torch.Generator().manual_seed(len(self.losses))
            ids = torch.randint(TOKENS, (64,), generator=draw)
            loss = nn.functional.cross_entropy(
                self.model(ids).float(), torch.multinomial(TABLE[ids], 1, generator=draw)[:, 0]
            )
            self.optimizer.zero_grad()
            loss.backward()
            if not self.auto:
                self.monitor.step(loss if self.has_loss else None)
            self.optimizer.step()
            self.losses.append(loss.item())
            for name, value in self.model.state_dict().items():
                if self.first is None:
                    self.average[name].lerp_(value, 0.02)


@dataclass
class Saved:
    """A checkpoint."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    monitor: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> Saved:
        return cls(*copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.monitor.state_dict())))


@dataclass
class Resumption:
    """How a run of 60 steps goes on, and what must be told of its step 60: severities, names and words of the text."""

    told: str = ""
    lose: Callable[[Saved, Run, list[Saved]], object] = lambda saved, run, earlier: None
    model: Callable[[], Net] = Net
    then: Callable[[], Net] | None = None
    optimize: Callable[[Any], Optimizer] = adamw
    then_optimize: Callable[[Any], Optimizer] | None = None
    run: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    seed: int = 1  # of the model that goes on
    before: bool = False  # the monitor's state is loaded before the others

    def findings(self) -> list[Finding]:
        torch.manual_seed(0)
        first = Run(self.model(), self.optimize, **self.run)
        earlier = []
        for _ in range(3):
            first.train(STEPS // 3)
            earlier.append(Saved.of(first))
        saved = Saved.of(first)
        first.monitor.remove()
        torch.manual_seed(self.seed)
        run = Run((self.then or self.model)(), self.then_optimize or self.optimize, **self.run)
        run.first, run.average = first, first.average
        self.lose(saved, run, earlier)
        file = io.BytesIO()
        torch.save(saved.monitor, file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        if self.before:
            run.monitor.load_state_dict(state, **self.load)
        run.model.load_state_dict(saved.model, strict=False)
        if saved.optimizer:
            run.optimizer.load_state_dict(saved.optimizer)
        if not self.before:
            run.monitor.load_state_dict(state, **self.load)
        run.losses = first.losses
        run.train(1)
        return [finding for finding in run.monitor.findings if finding.rule == "not-restored"]


def without(*prefixes: str) -> Callable[[Saved, Run, Any], None]:
    def lose(saved: Saved, run: Run, earlier: Any) -> None:
        saved.model = {name: value for name, value in saved.model.items() if not name.startswith(prefixes)}

    return lose


def with_part(part: str, of: Callable[[Saved, Run, list[Saved]], Any]) -> Callable[..., None]:
    return lambda saved, run, earlier: setattr(saved, part, of(saved, run, earlier))


def without_states(of_group: int) -> Callable[..., None]:
    def lose(saved: Saved, run: Run, earlier: Any) -> None:
        for number in saved.optimizer["param_groups"][of_group]["params"]:
            del saved.optimizer["state"][number]

    return lose


def with_states_exchanged(saved: Saved, run: Run, earlier: Any) -> None:
    states = saved.optimizer["state"]
    states[1], states[6] = states[6], states[1]  # of the norms of two blocks


def contents_of(saved: Saved) -> dict[str, Any]:
    contents: dict[str, Any] = saved.monitor["contents"]
    return contents


def beyond_wrappers(saved: Saved, run: Run, earlier: Any) -> None:
    """The state was saved under DDP, of a compiled model."""
    without("head")(saved, run, earlier)
    contents = contents_of(saved)
    contents.update(names=[f"module._orig_mod.{name}" for name in contents["names"]])


def sgd(momentum: float) -> Callable[[Any], Optimizer]:
    return lambda parameters: SGD(parameters, lr=0.3 * (1 - momentum), momentum=momentum)


no_weights, no_optimizer = with_part("model", lambda *_: {}), with_part("optimizer", lambda *_: {})
of_an_older_step = with_part("optimizer", lambda saved, run, earlier: earlier[1].optimizer)
the_embedding = with_part("model", lambda saved, *_: {**saved.model, "head.weight": saved.model["embed.weight"]})
the_average = with_part("model", lambda saved, run, earlier: run.average)
bfloat16 = lambda: Net().to(torch.bfloat16)  # noqa: E731
HEAD = "warning head.weight: differs from its value when the monitor's state was saved"
NONE = "warning embed.weight: the optimizer has no exp_avg of embed.weight and of 19 more"
ALL = "error embed.weight: the same holds for 19 more"


FAULTS = {
    "a head from the embedding": Resumption(HEAD, the_embedding),
    "a head from the embedding, by auto": Resumption(HEAD, the_embedding, run={"auto": True}),
    "a new head": Resumption(HEAD, without("head")),
    "a new head, without DDP from now on": Resumption(HEAD, beyond_wrappers),
    "a new head, SGD": Resumption(HEAD, without("head"), optimize=sgd(0.0)),
    "a block is left out": Resumption("warning blocks.1.0.weight: the same holds for 5 more", without("blocks.1.")),
    "most of the model is left out": Resumption("error blocks.0.0.weight: for 17 more", without("blocks.")),
    "a block, and then bfloat16": Resumption("warning blocks.1.0.weight: 5 more", without("blocks.1."), then=bfloat16),
    "a block in bfloat16": Resumption("warning blocks.1.0.weight: 5 more", without("blocks.1."), bfloat16),
    "a block, the monitor first": Resumption("warning blocks.1.0.weight: 5", without("blocks.1."), before=True),
    "a tied embedding": Resumption("warning embed.weight: was", without("embed", "head"), lambda: Net(tied=True)),
    "all weights": Resumption(ALL, no_weights),
    "all weights, of the same seed": Resumption("error blocks.0.0.weight: 19 more", no_weights, seed=0),
    "all weights, SGD": Resumption(ALL, no_weights, optimize=sgd(0.0)),
    "all weights, no loss": Resumption(ALL, no_weights, run={"has_loss": False}),
    "low-rank corrections": Resumption("error low: the same holds for 1", without("low", "high"),
                                       lambda: Net(low_rank=True)),
    "the optimizer": Resumption(NONE, no_optimizer),
    "the optimizer, SGD": Resumption("warning embed.weight: no momentum_buffer of embed.weight and of 19 more",
                                     no_optimizer, optimize=sgd(0.9)),
    "the optimizer, RMSprop": Resumption("warning embed.weight: no square_avg of embed.weight", no_optimizer,
                                         optimize=lambda parameters: RMSprop(parameters, lr=1e-2)),
    "the optimizer, Adafactor": Resumption("warning embed.weight: no row_var of embed.weight", no_optimizer,
                                           optimize=lambda parameters: Adafactor(parameters, lr=1e-1)),
    "the optimizer, Adagrad": Resumption("warning embed.weight: no sum of embed.weight", no_optimizer,
                                         optimize=lambda parameters: Adagrad(parameters, lr=1e-1)),
    "one of its groups": Resumption("warning blocks.0.0.weight: no exp_avg of blocks.0.0.weight and of 11 more",
                                    without_states(1), optimize=two_groups),
    "the optimizer of an older step": Resumption("warning embed.weight: exp_avg of embed.weight differs",
                                                 of_an_older_step),
    "states in another order": Resumption("warning blocks.0.0.weight: the same holds for 3 more",
                                          with_states_exchanged),
    "everything": Resumption(f"{ALL} + {NONE}", lambda *all_: (no_weights(*all_), no_optimizer(*all_))),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS)
def test_what_is_not_restored_is_told_at_once(case: Resumption) -> None:
    found = case.findings()
    told = [what.partition(": ") for what in case.told.split(" + ")]
    assert [f"{finding.severity} {finding.name}" for finding in found] == [place for place, _, _ in told]
    for finding, (_, _, words) in zip(found, told, strict=True):
        assert finding.step == STEPS
        assert words in finding.text
        assert all((finding.causes, finding.advice))


def saved_with_averages(saved: Saved, run: Run, earlier: Any) -> None:
    """The monitor's state was saved after it was detached, while averaged weights were in place."""
    assert run.first is not None
    run.first.model.load_state_dict(run.first.average)
    saved.monitor = run.first.monitor.state_dict()


def frozen(saved: Saved, run: Run, earlier: Any) -> None:
    run.model.embed.requires_grad_(False)
    saved.model["embed.weight"] = torch.zeros(TOKENS, WIDTH)


def of_an_older_version(saved: Saved, run: Run, earlier: Any) -> None:
    no_weights(saved, run, earlier)
    del saved.monitor["contents"]


def on_another_rank(saved: Saved, run: Run, earlier: Any) -> None:
    no_weights(saved, run, earlier)
    contents_of(saved).update(rank=1, ranks=2)


def of_more_ranks(saved: Saved, run: Run, earlier: Any) -> None:
    """The optimizer's states may have been divided among them."""
    no_optimizer(saved, run, earlier)
    contents_of(saved).update(ranks=2)


def stepped_already(saved: Saved, run: Run, earlier: Any) -> None:
    """Another optimizer has trained the head before this one steps, as in a GAN."""
    run.model.load_state_dict(saved.model)
    saved.model = {}
    run.model.head.weight.grad = torch.ones_like(run.model.head.weight)
    other = SGD([run.model.head.weight], lr=1.0)
    run.model.register_forward_pre_hook(lambda *_: other.step())


HEALTHY = {
    "everything is restored": Resumption(),
    "by auto": Resumption(run={"auto": True}),
    "the monitor first": Resumption(before=True),
    "SGD": Resumption(optimize=sgd(0.0)),
    "SGD with momentum": Resumption(optimize=sgd(0.9)),
    "Adafactor": Resumption(optimize=lambda parameters: Adafactor(parameters, lr=1e-1)),
    "amsgrad": Resumption(optimize=lambda parameters: Adam(parameters, lr=1e-2, amsgrad=True)),
    "then in bfloat16": Resumption(then=bfloat16),
    "then in float32": Resumption(model=bfloat16, then=Net),
    "then in float64": Resumption(then=lambda: Net().double()),
    "averaged weights": Resumption(lose=the_average),
    "averaged weights, SGD": Resumption(lose=the_average, optimize=sgd(0.0)),
    "averaged weights, no loss": Resumption(lose=the_average, run={"has_loss": False}),
    "a state saved beside averaged weights": Resumption(lose=saved_with_averages),
    "a state of another step": Resumption(
        lose=with_part("monitor", lambda saved, run, earlier: earlier[1].monitor)),
    "weights and optimizer of another step": Resumption(
        lose=lambda saved, run, earlier: (of_an_older_step(saved, run, earlier),
                                          setattr(saved, "model", earlier[1].model))),
    "they were changed on purpose": Resumption(lose=lambda *all_: (no_weights(*all_), no_optimizer(*all_)),
                                               load={"expect_restored": False}),
    "another optimizer": Resumption(lose=no_optimizer, then_optimize=sgd(0.9)),
    "a layer more": Resumption(then=lambda: Net(4), lose=no_optimizer, then_optimize=sgd(0.9)),
    "a layer less": Resumption(then=lambda: Net(2), lose=no_optimizer, then_optimize=sgd(0.9)),
    "frozen weights": Resumption(lose=frozen),
    "low-rank corrections": Resumption(model=lambda: Net(low_rank=True)),
    "a state of an older version": Resumption(lose=of_an_older_version),
    "a state of another rank": Resumption(lose=on_another_rank),
    "a state of more ranks": Resumption(lose=of_more_ranks),
    "another optimizer stepped before": Resumption(lose=stepped_already),
}  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY.values(), ids=HEALTHY)
def test_nothing_is_told_of_what_is_restored_or_was_changed_on_purpose(case: Resumption) -> None:
    assert case.findings() == []


def on_ranks(lost_on: int, state_of_rank_0: bool) -> list[str]:
    """What this rank's monitor tells, if the rank ``lost_on`` does not restore its optimizer."""
    torch.set_num_threads(1)

    def run() -> Run:
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(Net())
        return Run(model)

    first, rank = run(), torch.distributed.get_rank()
    first.train(5)
    saved, again = Saved.of(first), run()
    again.model.load_state_dict(saved.model)
    if rank != lost_on:
        again.optimizer.load_state_dict(saved.optimizer)
    states = [saved.monitor]
    if state_of_rank_0:
        torch.distributed.broadcast_object_list(states)
    again.monitor.load_state_dict(states[0])
    again.losses = first.losses
    again.train(1)
    return [finding.rule for finding in again.monitor.findings if finding.rule == "not-restored"]


def test_each_rank_compares_with_the_state_that_it_saved_itself(ranks: Ranks) -> None:
    assert ranks.run(2, on_ranks, -1, False) == [[], []]
    assert ranks.run(2, on_ranks, 1, False) == [[], ["not-restored"]]
    assert ranks.run(2, on_ranks, 0, True) == [["not-restored"], []]
    assert ranks.run(2, on_ranks, 1, True) == [[], []]  # not known: states may be divided among ranks
