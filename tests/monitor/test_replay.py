"""find_culprit: which place it names as the first that made a NaN or Inf, and which places it does not blame."""

import gc
import json
import math
import re
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from gradstat.monitor import Culprit, find_culprit
from gradstat.replay import StepStateKeeper

Forward = Callable[[Tensor], Tensor]


def assert_source(culprit: Culprit, where: str | types.FunctionType) -> None:
    """Checks that it names the line that ends with the comment ``# where``, or the line of a one-line function."""
    path, _, number = culprit.source.rpartition(":")
    assert Path(path).resolve() == Path(__file__).resolve()
    lines = Path(__file__).read_text().splitlines()
    if isinstance(where, str):
        (expected,) = [i + 1 for i, line in enumerate(lines) if line.endswith("# " + where)]
    else:
        expected = where.__code__.co_firstlineno
    assert (int(number), culprit.line) == (expected, lines[expected - 1].strip()), culprit


class Inner(nn.Module):
    """One parameter, and a function of it and the input."""

    def __init__(self, f: Callable[..., Tensor], n: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.weight * x)


def model_of(f: Callable[..., Tensor], n: int = 3) -> nn.Module:
    return nn.Sequential(nn.Identity(), nn.Sequential(Inner(f, n)))


NUMBERS = torch.tensor([0.0, 1.0, 2.0])


def blamed(f: Callable[..., Tensor], x: Tensor = NUMBERS) -> Culprit | None:
    """The culprit, if any, of a step whose innermost module, ``1.0``, computes ``f``."""
    model = model_of(f, x.shape[-1])
    return find_culprit(model, lambda x: model(x).sum().backward(), batch=x)


# Operations, their derivatives, sums and hooks ------------------------------------------------------------------


LOG, SQRT = (
    lambda h: h.log(),
    lambda h: h.sqrt(),
)


def in_place(h: Tensor) -> Tensor:
    y = h + 0
    y.log_()  # in place
    return y


def chosen_between(h: Tensor) -> Tensor:
    overflows_where_log_is_used = ((1 - h.detach()) * 100).exp()
    return torch.where(h > 0.5, overflows_where_log_is_used, h.log())  # chosen between


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        zero = gradient * 0
        return zero / zero  # own backward


BAD = torch.full((3,), math.nan)


class BringsAlong(BadBackward):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return BAD


def used_twice(h: Tensor) -> Tensor:
    shared = h * 0 + 1e-3  # shared
    return (shared * 2e38) + (shared * 2e38) * 1.0


def reads_unwritten(h: Tensor) -> Tensor:
    memory = torch.empty(3)  # unwritten
    memory.numpy().fill(math.inf)  # invisible to torch
    return h * memory


def hooked(hook: Any, h: Tensor) -> Tensor:
    h.register_hook(hook)
    return h * 2


BAD_HOOK, IN_PLACE_HOOK, BARE_HOOK = (
    lambda gradient: gradient / 0,
    lambda parameter: parameter.grad.div_(0),
    lambda gradient: BAD,
)
FIRST = torch.tensor([True, False, False])
ROW = torch.tensor([[False] * 3, [True] * 3])
IN_A_LINE: list[tuple[str, str, str | None, Any]] = [
    ("forward", "inf", "exp", lambda h: (h * 100).exp()),
    ("forward", "inf", "reciprocal", lambda h: 1 / h),
    ("forward", "inf", "to", lambda h: (h * 60000).half().float()),
    ("forward", "inf", "log", lambda h: h.to(torch.float8_e4m3fn).float().log()),
    ("forward", "nan", "div", lambda h: (h * 0) / (h * 0).norm()),
    ("forward", "nan", "sub", lambda h: h * (torch.full_like(h, math.inf) - torch.full_like(h, math.inf))),
    ("forward", "nan", "softmax", lambda h: h.expand(2, 3).masked_fill(ROW, -math.inf).softmax(-1)),
    ("forward", "nan", "mul", lambda h: h + torch.triu(torch.full((3, 3), -math.inf), 1) * 0),
    ("forward", "inf", "exp", lambda h: (h * 100).masked_fill(FIRST, -math.inf).exp()),  # in addition to a mask
    ("forward", "inf", "nll_loss", lambda h: F.cross_entropy(h.masked_fill(FIRST, -math.inf), torch.tensor(0))),
    ("forward", "inf", "log", LOG),
    ("backward", "nan", "sqrt", lambda h: torch.where(h > 0, h.sqrt(), 0.0)),
    ("backward", "nan", "BringsAlong", lambda h: BringsAlong.apply(h)),  # no operation makes this NaN
    ("backward", "inf", "sqrt", SQRT),  # anomaly mode does not detect this
]


@pytest.mark.parametrize(
    ("phase", "kind", "op", "f", "where"),
    [
        *((*case, case[-1]) for case in IN_A_LINE),
        ("forward", "inf", "log_", in_place, "in place"),
        ("forward", "inf", "log", chosen_between, "chosen between"),  # of two, the one whose values are used
        ("forward", "inf", "empty", reads_unwritten, "unwritten"),
        ("backward", "nan", "div", BadBackward.apply, "own backward"),
        ("accumulation", "inf", "add", used_twice, "shared"),
        ("hook", "inf", "div", partial(hooked, BAD_HOOK), BAD_HOOK),
        ("hook", "nan", None, partial(hooked, BARE_HOOK), None),
    ],
)
def test_the_first_bad_operation(phase: str, kind: str, op: str, f: Any, where: Any) -> None:
    culprit = blamed(f)
    assert (culprit.phase, culprit.kind, culprit.op, culprit.module) == (phase, kind, op, "1.0")
    if where is not None:
        assert_source(culprit, where)


def test_a_culprit_tells_what_went_in_what_came_out_and_how_the_step_got_there() -> None:
    for f in (LOG, in_place):
        culprit = blamed(f)
        given, made = culprit.inputs["self"], culprit.output["output"]
        assert (culprit.inputs.ok, given.zero_count, given.max) == (True, 1, 2.0)
        assert (made.inf_count, made.first_nonfinite) == (1, (0,))
    functions = [frame.split(" in ")[1].split(":")[0] for frame in culprit.stack]
    assert functions == ["<lambda>", "forward", "in_place"]
    text = str(culprit)
    assert "Inf was first produced in the forward pass, by log_ in module '1.0'" in text
    assert f"at {culprit.source}\n      y.log_()  # in place" in text
    assert "input 1: 3 float32: 0 to 2, 1 zero, all finite" in text
    told = json.loads(json.dumps(culprit.to_dict(), allow_nan=False))
    assert (told["op"], told["inputs"][0]["zero_count"]) == ("log_", 1)
    assert "in the backward pass, by the derivative of sqrt in module '1.0'" in str(blamed(SQRT))
    assert "torch.empty and was not written" in str(blamed(reads_unwritten))
    assert blamed(used_twice).name is None  # no parameter
    root = Inner(LOG)
    culprit = find_culprit(root, lambda: root(torch.zeros(3)).sum().backward())
    assert (culprit.module, "in the model itself" in str(culprit)) == ("", True)


def penalised(model: nn.Linear) -> None:
    y = (model.weight * 0).pow(1.5).sum()  # penalty
    (gradient,) = torch.autograd.grad(y, model.weight, create_graph=True)
    gradient.sum().backward()


ONES = torch.ones(1, 3)
STEPS: list[tuple[str, str, Callable[[nn.Linear], object]]] = [
    ("forward", "log", lambda model: (model(ONES) * 0).log().sum().backward()),
    ("forward", "log", lambda model: torch.func.vmap(lambda x: (model(x) * 0).log())(ONES).sum().backward()),
    ("forward", "log", lambda model: (model(ONES) * TwoTensor(torch.zeros(3), ONES[0]).log().a).sum().backward()),
    ("backward", "sqrt", lambda model: (model(ONES) * torch.func.grad(root)(model.bias.detach())).sum().backward()),
    ("backward", "pow", penalised),
]


def root(weight: Tensor) -> Tensor:
    return (weight * 0).sqrt().sum()  # derived


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(("phase", "op", "step"), STEPS)
def test_outside_of_any_module_the_line_is_named(phase: str, op: str, step: Any) -> None:
    """Also of second derivatives, in function transforms, on wrapped tensors and beside scripted modules."""
    linear = nn.Linear(3, 3)
    culprit = find_culprit(nn.Sequential(linear, torch.jit.script(nn.Tanh())), lambda: step(linear))
    assert (culprit.phase, culprit.op, culprit.module) == (phase, op, None)
    assert_source(culprit, "penalty" if step is penalised else "derived" if op == "sqrt" else step)


@pytest.mark.parametrize("together", [True, False])
def test_an_overflow_when_gradients_of_two_uses_are_added(together: bool) -> None:
    """Either by the engine in one backward pass, or into the gradient of an earlier pass."""
    model = model_of(lambda h: h)
    weight = model[1][0].weight
    weight.data.fill_(0.1)

    def step() -> None:
        uses = [(weight * 2e38).sum() for _ in range(2)]
        for loss in [uses[0] + uses[1]] if together else uses:
            loss.backward()

    culprit = find_culprit(model, step)
    assert (culprit.phase, culprit.kind, culprit.name, culprit.module) == ("accumulation", "inf", "1.0.weight", "1.0")
    assert culprit.inputs.ok
    assert "when gradients of '1.0.weight' were accumulated" in str(culprit)


@pytest.mark.parametrize("hook", [BAD_HOOK, IN_PLACE_HOOK, BARE_HOOK])
def test_a_hook_on_a_parameter(hook: Any) -> None:
    model = model_of(lambda h: h)
    weight = model[1][0].weight
    (weight.register_post_accumulate_grad_hook if hook is IN_PLACE_HOOK else weight.register_hook)(hook)
    culprit = find_culprit(model, lambda: model(torch.ones(3)).sum().backward())
    assert (culprit.phase, culprit.name, culprit.module) == ("hook", "1.0.weight", "1.0")
    assert_source(culprit, hook)
    assert "by a hook of '1.0.weight'" in str(culprit)
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    assert list(hooks.values()) == [hook]


def test_a_hook_on_a_module() -> None:
    model, hook = model_of(SQRT), lambda m, gi, go: (gi[0] / 0,)
    model[1][0].register_full_backward_hook(hook)
    x = torch.ones(3, requires_grad=True)
    assert find_culprit(model, lambda: model(x * 1).sum().backward()) is None  # the weight is not affected
    model.insert(0, Inner(lambda h: h))
    culprit = find_culprit(model, lambda: model(x * 1).sum().backward())
    assert culprit.phase == "hook"
    assert_source(culprit, hook)


# Input and parameters ---------------------------------------------------------------------------------------


def test_a_bad_batch_is_named_by_the_expression_that_reaches_it_or_by_the_line_that_brings_it() -> None:
    model = nn.Linear(3, 2)
    batch = {"x": [torch.ones(2, 3), torch.tensor([[1.0, math.nan, 3.0]])], "y": torch.zeros(1)}

    def step(batch: Any) -> None:
        model(batch["x"][1]).sum().backward()  # brought

    culprit = find_culprit(model, step, batch=batch)
    assert (culprit.phase, culprit.kind, culprit.name) == ("input", "nan", "batch['x'][1]")
    assert "NaN was already in an input of the step: batch['x'][1]" in str(culprit)
    culprit = find_culprit(model, lambda: step(batch))
    assert (culprit.phase, culprit.name) == ("input", None)
    assert_source(culprit, "brought")
    batch["x"].reverse()
    assert find_culprit(model, step, batch=batch) is None


def test_a_bad_parameter_and_a_bad_buffer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
    model[1].running_mean[1] = math.inf
    culprit = find_culprit(model, lambda: model(torch.ones(4, 3)).sum().backward())
    assert (culprit.phase, culprit.kind, culprit.name, culprit.module) == ("parameter", "inf", "1.running_mean", "1")
    model[1].running_mean.zero_()
    model[2].weight.data[0, 1] = math.nan
    for used in (model, model[0]):  # the latter does not use the weight
        culprit = find_culprit(model, lambda used=used: used(torch.ones(4, 3)).sum().backward())
        assert (culprit.phase, culprit.kind, culprit.name) == ("parameter", "nan", "2.weight")
        assert culprit.output[0].first_nonfinite == (0, 1)
        assert culprit.also == 0
        assert "spread" not in str(culprit)
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    culprit = find_culprit(model, lambda: model(torch.ones(4, 3)).sum().backward())
    assert (culprit.name, culprit.also) == ("0.weight", 5)
    assert "'0.weight' and in 5 others before the step began" in str(culprit)
    assert "An optimizer step has spread it further:" in str(culprit)


# No false culprits ------------------------------------------------------------------------------------------


def attention_with_masks(h: Tensor) -> Tensor:
    q = h.view(1, 1, 3, 1).expand(1, 1, 3, 4)
    causal = torch.triu(torch.full((3, 3), float("-inf")), diagonal=1)
    allowed = torch.tril(torch.ones(3, 3, dtype=torch.bool))
    by_hand = (q @ q.mT + causal).softmax(-1) @ q
    filled = (q @ q.mT).masked_fill(~allowed, float("-inf")).softmax(-1) @ q
    chosen = torch.where(allowed, q @ q.mT, torch.tensor(float("-inf"))).softmax(-1) @ q
    fused = F.scaled_dot_product_attention(q, q, q, attn_mask=causal)
    fused = fused + F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)
    fused = fused + F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return by_hand + filled + chosen + fused


def other_ways_to_write_infinity(h: Tensor) -> Tensor:
    scores = h + torch.zeros(3, 3)
    future = torch.ones(3, 3, dtype=torch.bool).triu(1)
    a, b, c, d = (scores.clone() for _ in range(4))
    a[future] = -math.inf
    b[0, 1:] = -math.inf
    c.scatter_(1, torch.tensor([[0], [1], [2]]), -math.inf)
    d[future.T] = math.inf
    e = F.pad(scores, (0, 2), value=-math.inf)
    f = scores + (torch.zeros(3, 3) - math.inf).triu(1).nan_to_num(nan=0.0, neginf=-math.inf)
    g = scores + torch.zeros(3, 3).masked_fill(future, -math.inf)
    g[g < g.topk(1).values] = -float("inf")
    least = d.min(-1).values + torch.clamp(h, max=math.inf)
    return torch.cat([x.softmax(-1)[:, :3] for x in (a, b, c, e, f, g)]).sum(0) + least


def uninitialised_but_written(h: Tensor) -> Tensor:
    out = torch.empty(3, 2)
    out.copy_(torch.ones(3, 2))
    parts = torch.empty_like(out)
    torch.add(out, 1, out=parts)
    return h + parts.sum(1)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize(
    "f",
    [
        attention_with_masks,
        other_ways_to_write_infinity,
        lambda h: torch.where(h < 1, (h.detach() * 100).exp(), 0.0) + h,
        lambda h: h + h.detach().log().nan_to_num_(neginf=0.0),
        uninitialised_but_written,
    ],
)
def test_a_healthy_step_has_no_culprit_and_beside_it_the_true_one_is_found(f: Forward) -> None:
    assert blamed(f) is None
    culprit = blamed(lambda h: f(h).sum() + SQRT(h).sum())
    assert (culprit.phase, culprit.op) == ("backward", "sqrt")


def test_a_mask_in_a_buffer_or_the_batch_is_no_bad_input() -> None:
    def step(batch: list[Tensor]) -> None:
        (model(batch[0]) + model.mask + batch[1]).softmax(-1).square().sum().backward()  # attention

    model = Inner(lambda h: h)
    model.register_buffer("mask", torch.triu(torch.full((3, 3), -math.inf), 1))
    assert find_culprit(model, step, batch=(torch.ones(3), torch.tensor([0.0, 0.0, -math.inf]))) is None
    culprit = find_culprit(model, step, batch=(torch.ones(3), torch.full((3,), -math.inf)))
    assert (culprit.phase, culprit.op, culprit.kind) == ("forward", "softmax", "nan")
    assert_source(culprit, "attention")


# Realistic steps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gives_up", ["raises", "skips"])
def test_a_step_that_refuses_a_bad_loss_still_has_a_culprit(gives_up: str) -> None:
    model = model_of(LOG)

    def step() -> None:
        loss = model(torch.zeros(3)).sum() + model(torch.zeros(3)).log().sum()
        if torch.isfinite(loss):
            loss.backward()
        elif gives_up == "raises":
            raise FloatingPointError("loss is not finite")

    assert find_culprit(model, step).op == "log"


def test_it_can_be_called_without_gradients_but_not_in_a_backward_pass() -> None:
    model = model_of(LOG)
    with torch.no_grad():
        assert find_culprit(model, lambda: model(torch.zeros(3)).sum().backward())
    weight = model[1][0].weight
    weight.register_hook(lambda gradient: find_culprit(model, lambda: None))
    with pytest.raises(RuntimeError, match="cannot run in a hook of a backward pass"):
        model(torch.ones(3)).sum().backward()


LAYER = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": lambda: None}, r"model: expected a torch.nn.Module, .* got function"),
        ({"step_fn": torch.ones(1)}, r"step_fn: expected a function that runs the step, got Tensor"),
        ({"state": [3]}, r"state has to be StepStateKeeper.states or a StepState; got int in it"),
        ({"step_fn": {}.__getitem__, "batch": "unrelated"}, "unrelated"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(KeyError if told == "unrelated" else TypeError, match=told):
        find_culprit(**{"model": LAYER, "step_fn": LAYER, **arguments})


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("f", "phase"), [(LOG, "forward"), (SQRT, "backward")])
def test_a_checkpointed_block(f: Any, phase: str, reentrant: bool) -> None:
    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(self[0], x, use_reentrant=reentrant)

    model, x = Block(Inner(f)), NUMBERS.clone().requires_grad_()
    keeper = StepStateKeeper(model)
    model(x).sum().backward()
    assert len(keeper.states) == 1
    culprit = find_culprit(model, lambda: model(x).sum().backward(), state=keeper.states)
    assert (culprit.phase, culprit.module) == (phase, "0")
    assert_source(culprit, f)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_a_loss_scale_that_is_too_large(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(scale: float) -> Culprit | None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)

        def run(x: Tensor) -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = model(x).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        found = find_culprit(model, run, batch=torch.ones(2, 4) * 10, optimizer=optimizer, scaler=scaler)
        assert scaler._scale is None  # it is created on the first call
        return found

    is_half = dtype is torch.float16
    assert [found and found.kind for found in (step(1.0), step(2.0**24))] == [None, "inf" if is_half else None]
    model[0].weight.data.fill_(3e4)
    culprit = step(1.0)
    found = culprit and (culprit.phase, culprit.kind, culprit.module, culprit.op)
    assert found == (("forward", "inf", "0", "addmm") if is_half else None)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_run_eagerly(in_place: bool) -> None:
    model: Any = model_of(LOG)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    keeper = StepStateKeeper(model)
    step = lambda x: model(x).sum().backward()  # noqa: E731
    step(NUMBERS)
    assert len(keeper.states) == 1
    culprit = find_culprit(model, step, batch=NUMBERS, state=keeper.states)
    assert (culprit.op, culprit.module) == ("log", "1.0" if in_place else "_orig_mod.1.0")
    assert_source(culprit, LOG)


@pytest.mark.parametrize("refuses", [False, True])
def test_nothing_of_the_replay_stays_alive(refuses: bool) -> None:
    alive: list[weakref.ref[Any]] = []

    def f(h: Tensor) -> Tensor:
        y = h.log()
        alive.extend([weakref.ref(h), weakref.ref(y), weakref.ref(y.untyped_storage())])
        return y

    def step() -> None:
        loss = model(torch.zeros(3)).sum()
        if refuses:
            raise FloatingPointError
        loss.backward()

    model = model_of(f)
    gc.collect()
    gc.disable()
    try:
        assert find_culprit(model, step)
        still_there = [reference() for reference in alive]
    finally:
        gc.enable()
    assert still_there == [None] * 3
    assert not torch.is_anomaly_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Infinities on purpose, inputs without statistics, tensors without memory -----------------------------------------


@pytest.mark.parametrize(
    ("op", "penalty"),
    [
        ("mean", lambda logits: logits.mean().square()),
        ("sum", lambda logits: (logits * torch.arange(1.0, 7)).sum()),
        ("linalg_vector_norm", lambda logits: logits.norm(dim=-1).mean()),
        ("mse_loss", lambda logits: F.mse_loss(logits, torch.zeros(4, 6))),
        ("mm", lambda logits: (logits @ torch.ones(6, 2)).mean()),
        ("mean", lambda logits: torch.cat([logits, -logits]).neg().exp().mean()),
    ],
)
@pytest.mark.parametrize(
    "masked",
    [
        lambda logits, mask: logits.masked_fill(mask, -math.inf),
        lambda logits, mask: torch.where(mask, torch.tensor(-math.inf), logits),
        lambda logits, mask: logits + torch.zeros(4, 6).masked_fill(mask, -math.inf),
    ],
)
def test_a_mask_that_reaches_the_loss_is_blamed_on_what_did_not_leave_it_out(
    masked: Callable[[Tensor, Tensor], Tensor], op: str, penalty: Forward
) -> None:
    model, inputs, labels = nn.Linear(3, 6), torch.randn(4, 3), torch.zeros(4, dtype=torch.long)
    mask = torch.arange(6).expand(4, 6) == 5

    def step(weight: float) -> None:
        logits = masked(model(inputs), mask)
        (F.cross_entropy(logits, labels) + weight * penalty(logits) if weight else logits.softmax(1).max()).backward()

    culprit = find_culprit(model, lambda: step(1e-4))
    assert (culprit.kind, culprit.phase, culprit.op) == ("inf", "forward", op)
    assert_source(culprit, penalty)  # type: ignore[arg-type]
    assert find_culprit(model, lambda: step(0)) is None


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ("target, 4 int64: -100", lambda out: F.cross_entropy(out, torch.full((4,), -100))),
        ("other, scalar int64: 0", lambda out: (out.sum(1) * 0).sum() / torch.zeros(4, dtype=torch.bool).sum()),
        ("self, 0x3 float32: empty", lambda out: out[torch.zeros(4, dtype=torch.bool)].mean()),
        ("target_lengths: [7]", lambda out: F.ctc_loss(out[:, None], torch.ones(1, 7, dtype=torch.long), [4], [7])),
        ("other, 4x3 uint16", lambda out: (out / torch.zeros(4, 3, dtype=torch.uint16)).sum()),  # torch has no minimum
        ("mask, 4x3 bool: 12 True", lambda out: out.masked_fill(torch.ones(4, 3, dtype=torch.bool), math.nan).sum()),
    ],
)
def test_inputs_without_statistics_are_named(words: str, loss: Forward) -> None:
    model, inputs = nn.Linear(2, 3), torch.randn(4, 2)
    culprit = find_culprit(model, lambda: loss(model(inputs)).backward())
    assert words in culprit.others
    assert re.search(rf"  input \d: {re.escape(words)}", str(culprit))
    assert words in json.dumps(culprit.to_dict())


@pytest.mark.parametrize(
    "derivative",
    [
        lambda loss, weight: torch.autograd.grad(loss(weight), weight, create_graph=True)[0].square(),
        lambda loss, weight: torch.func.jvp(loss, (weight,), (torch.ones(4, 4),))[1],
        lambda loss, weight: torch.func.hessian(loss)(weight),
        lambda loss, weight: torch.autograd.functional.hvp(loss, weight, torch.ones(4, 4), create_graph=True)[1],
    ],
)
def test_lazy_zeros_of_second_derivatives_are_not_read(derivative: Callable[..., Tensor]) -> None:
    """They have no memory."""
    model, data = nn.Linear(4, 4), torch.randn(8, 4)

    def loss(weight: Tensor) -> Tensor:
        return (F.linear(data, weight) * 0).abs().sqrt().sum()

    culprit = find_culprit(model, lambda: (loss(model.weight) + derivative(loss, model.weight).sum()).backward())
    assert culprit.source is not None


# Notebooks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("/tmp/ipykernel_77/1570997521.py", "In[5]:2"),  # a kernel's name for a cell whose number it knows
        ("/tmp/ipykernel_77/42.py", "a cell:2"),  # of another kernel
        ("C:\\Temp\\ipykernel_77\\1570997521.py", "In[5]:2"),
        ("<ipython-input-12-0123456789ab>", "In[12]:2"),  # IPython in a terminal, and older kernels
        ("/home/me/ipykernel_77/train.py", "/home/me/ipykernel_77/train.py:2"),  # a file
        ("/tmp/ipykernel_77/1.py", None),  # without IPython
    ],
)
def test_the_code_of_a_notebook_is_named_by_its_cell(
    file: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = types.SimpleNamespace()  # as IPython.core.compilerop.CachingCompiler
    compiler.format_code_name = lambda name: ("Cell", "In[5]") if name.endswith("1570997521.py") else None
    ipython = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(compile=compiler))
    monkeypatch.setitem(sys.modules, "IPython", ipython if named else None)  # type: ignore[arg-type]
    names: dict[str, Any] = {}
    exec(compile("def f(x):\n    return x.log()", file, "exec"), names)
    culprit = blamed(names["f"], -torch.ones(3))
    assert culprit.source == (named or "a cell:2")
    assert culprit.stack[-1].startswith(f"{culprit.source} in f")
