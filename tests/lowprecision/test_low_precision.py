"""`LowPrecision`: what is measured of which products, who is named first, and what the study leaves as it was."""

import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import gradstat
from gradstat.demo.model import GPT, TINY
from gradstat.integrations.loggers import JsonlWriter, log_scalars
from gradstat.lowprecision._reference import quantized
from gradstat.lowprecision.formats import FORMATS
from gradstat.lowprecision.stats import table_of

PRODUCTS = ("output", "input gradient", "weight gradient")
EVERY = set(itertools.product(("up", "down", "head"), PRODUCTS))


class Net(nn.Module):
    """Tokens through an embedding, a residual block, which ``around`` calls, and a head."""

    def __init__(self, around: Callable[..., Any] = lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
        self.up, self.down, self.around = nn.Linear(64, 128), nn.Linear(128, 64), around

    def forward(self, x: Tensor) -> Any:
        x = self.tokens(x)
        return self.head(x + self.around(lambda x: self.down(self.up(x).relu()), x))


def train(model: nn.Module, steps: int, optimizer: Any = None, passes: int = 1, **autocast: Any) -> None:
    """Trains on random tokens, the same in each run."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(passes):
            tokens = torch.randint(96, (4, 17), generator=random)
            with torch.autocast("cpu", enabled=bool(autocast), **autocast):
                logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def products(study: gradstat.LowPrecision) -> set[tuple[str, str]]:
    """The layers and products that were studied."""
    return {(row["layer"], row["product"]) for row in study.table()}


def test_the_numbers_are_those_of_the_operator_on_what_the_products_take() -> None:
    model = Net()
    study, taken = gradstat.LowPrecision(model, ("mxfp4", "nvfp4", "e4m3"), every=1), {}

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        taken["input"], taken["weight"] = args[0].flatten(0, 1).detach(), module.weight.detach().clone()
        output.register_hook(lambda gradient: taken.update({"output gradient": gradient.flatten(0, 1)}))

    model.down.register_forward_hook(keep)
    train(model, 4)  # the third layer is studied in the fourth step
    rows = [row for row in study.table() if row["layer"] == "down"]
    assert len(rows) == 3 * 6  # formats, and operands of products
    for row in rows:
        is_weight = row["operand"] == "weight"
        across = row["product"] == "weight gradient" or (row["product"] == "input gradient" and is_weight)
        matrix = taken[row["operand"]].T if across else taken[row["operand"]]
        expected = gradstat.quantization_stats([matrix], row["format"], weight=is_weight)[0]
        nonzero, flushed, saturated, _, squares, errors = expected[:6].tolist()
        assert (row["flushed"], row["saturated"]) == pytest.approx((flushed / nonzero, saturated / nonzero))
        assert row["sqnr"] == pytest.approx(10 * math.log10(squares / errors))


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_the_noise_of_a_weight_gradient_is_what_quantizing_its_operands_makes(format: str) -> None:
    layer = nn.Linear(128, 64)
    size = torch.rand(256, 1) + 0.25  # of a token, in both operands
    x, g = torch.randn(256, 128) * size + 0.2, torch.randn(256, 64) * size + 0.2
    study = gradstat.LowPrecision(layer, [format], every=1)
    for _ in range(2):
        (layer(x) * g).sum().backward()
        study.step()
    exact = g.T.double() @ x.double()
    made = quantized(g, FORMATS[format], 0).T @ quantized(x, FORMATS[format], 0)
    (noise,) = {row["noise"] for row in study.table() if row["product"] == "weight gradient"}
    assert noise == pytest.approx(float((made - exact).norm() / exact.norm()), rel=0.1)


def outlier_channel(model: GPT) -> None:
    """As in large models: a channel of activations is 300 times as large, the weight it meets as small."""
    with torch.no_grad():
        model.get_parameter("blocks.1.mlp.up.bias")[5] += 300
        model.get_parameter("blocks.1.mlp.down.weight")[:, 5] /= 300


def tiny_gradients(model: GPT) -> None:
    up = model.get_submodule("blocks.0.mlp.up")
    up.register_forward_hook(lambda *args: args[2].detach() + 1e-36 * (args[2] - args[2].detach()))


PLANTED: dict[str, Callable[[GPT], Any]] = {
    "blocks.1.mlp.down": outlier_channel,
    "blocks.0.mlp.up": tiny_gradients,
    "head": lambda model: model.head.register_parameter("weight", model.tokens.weight),
}


@pytest.mark.parametrize("first", PLANTED)
def test_what_is_planted_is_named_first(first: str) -> None:
    model = GPT(TINY)
    PLANTED[first](model)
    study = gradstat.LowPrecision(model, every=1)
    train(model, 20, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert study.table()[0]["layer"] == first
    assert f"of 9 layers; keep {first}" in str(study)


def test_training_is_the_same_and_nothing_is_kept() -> None:
    plain, studied, alive = Net(), Net(), []
    study = gradstat.LowPrecision(studied, every=3)
    studied.up.register_forward_hook(lambda *args: alive.append(weakref.ref(args[2])))
    train(plain, 8)
    train(studied, 8)
    assert all(map(torch.equal, plain.state_dict().values(), studied.state_dict().values()))
    assert not any(module._forward_hooks for module in (studied.down, studied.head))
    assert not any(parameter._backward_hooks for parameter in studied.parameters())
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    model = weakref.ref(studied)
    del studied
    gc.collect()
    assert model() is None
    assert products(study) == EVERY


AROUND: dict[str, Callable[..., Any]] = {
    "plain": lambda block, x: block(x),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "called twice": lambda block, x: block(block(x)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("options", [{}, {"passes": 3}, {"dtype": torch.bfloat16}])
def test_each_layer_counts_once_in_a_step(around: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, measured = Net(AROUND[around]), list[torch.dtype]()
    study = gradstat.LowPrecision(model, ["mxfp8"], every=2)
    measure = "gradstat.lowprecision.operands.table_of"
    monkeypatch.setattr(measure, lambda *args: measured.append(args[0][0].dtype) or table_of(*args))
    train(model, 7, **options)  # a sampled step for each layer
    assert products(study) == EVERY
    assert measured == [options.get("dtype", torch.float32)] * 3 * 6  # layers, and operands in two directions


def test_a_product_that_a_layer_does_not_have_is_not_shown() -> None:
    model = Net()
    model.tokens.requires_grad_(False)
    model.up = Conv1D(128, 64)  # with a weight of [inputs, outputs]
    model.down.requires_grad_(False)  # as the layer that LoRA stands beside
    model.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    study = gradstat.LowPrecision(model, ["mxfp4"], every=1)
    train(model, 7, torch.optim.SGD(model.parameters(), lr=0.0))
    assert products(study) == EVERY - {("up", "input gradient"), ("down", "weight gradient")}
    (weight,) = [row for row in study.table() if row["layer"] == "up" and row["operand"] == "weight"]
    squares, errors = gradstat.quantization_stats(model.up.weight.detach().T, "mxfp4")[0, 4:6].tolist()
    assert weight["sqnr"] == pytest.approx(10 * math.log10(squares / errors))


def test_of_a_layer_whose_first_call_gets_no_gradient_the_output_is_studied() -> None:
    """As in peft's DoRA, which first gives its A and B an identity."""
    model = Net(lambda block, x: block(x).detach() + block(x))
    study = gradstat.LowPrecision(model, ["mxfp8"], every=1)
    train(model, 4)
    assert products(study) == EVERY - set(itertools.product(("up", "down"), PRODUCTS[1:]))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_code_is_told_once_and_not_compiled_again(in_place: bool, recwarn: pytest.WarningsRecorder) -> None:
    warnings.simplefilter("always")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = Net() if in_place else torch.compile(Net(), backend="eager")
    if in_place:
        model.compile(backend="eager")
    study, optimizer = gradstat.LowPrecision(model, every=2), torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, 1, optimizer)
    torch._dynamo.reset()  # so that the second step, which is sampled, is compiled
    train(model, 6, optimizer)
    (told,) = [str(warning.message) for warning in recwarn if "not watched" in str(warning.message)]
    assert "the matrix products of the model, which is compiled: torch.compile leaves hooks out of its" in told
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert study.table() == []


@pytest.mark.filterwarnings("ignore:gradstat. not watched")
def test_whose_steps_count() -> None:
    model, other = Net(), nn.Linear(2, 2)
    study = gradstat.LowPrecision(model, every=10)
    two = torch.optim.SGD(model.up.parameters()), torch.optim.Adam(model.down.parameters())
    for _ in range(5):
        for optimizer in (torch.optim.SGD(other.parameters()), *two):
            optimizer.step()
    assert study.steps == 5
    for _ in range(3):
        two[1].step()  # the first is no longer used
    assert study.steps == 8
    study.step()
    assert study.steps == 9


def test_layers_whose_turn_comes_later_are_not_called_unused() -> None:
    model = Net()
    model.spare = nn.Linear(8, 8)
    study = gradstat.LowPrecision(model, every=1)
    train(model, 2)
    assert "not yet measured, as a sample is of one layer in 4: up, down, spare" in str(study)
    train(model, 8)
    assert "not called when sampled: spare" in str(study)


def test_results_reach_print_page_and_loggers(tmp_path: Path) -> None:
    model = Net()
    study = gradstat.LowPrecision(model, every=2)
    assert "no finite layer was seen in 0 sampled steps" in str(study)
    train(model, 7)
    assert all(f"{layer}: {product}" in str(study) for layer, product in EVERY)
    assert "sampled:" not in str(study)
    page = study.write_page(tmp_path / "deep" / "page.html", "<b>").read_text()
    assert page.count("<td ") == 3 * 2 * 6
    assert "<h1>&lt;b&gt;" in page
    with JsonlWriter(tmp_path / "log.jsonl") as writer:
        log_scalars(writer, study.scalars(), 4)
    assert "lowprecision/nvfp4/noise/head" in (tmp_path / "log.jsonl").read_text()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"formats": ()}, {"formats": ["fp4"]}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong)).removesuffix('s')}.* expected "):
        gradstat.LowPrecision(Net(), **wrong)


def _study_of(how: str) -> tuple[set[tuple[str, str]], list[float]]:
    model: Any = Net()
    if how == "sharded":
        for part in (model.up, model.down, model):
            fully_shard(part)
    elif how == "replicated":
        model = nn.parallel.DistributedDataParallel(model)
    study = gradstat.LowPrecision(model, ["nvfp4"], every=1)
    train(model, 4)
    return products(study), [row["noise"] for row in study.table()]


def test_on_several_ranks_each_studies_its_own_products(ranks: Ranks) -> None:
    expected = pytest.approx(_study_of("alone")[1], rel=1e-3)
    for found, noise in [*ranks.run(2, _study_of, "sharded"), *ranks.run(2, _study_of, "replicated")]:
        assert {(name.removeprefix("module."), product) for name, product in found} == EVERY
        assert noise == expected
