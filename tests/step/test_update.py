"""Statistics of the coming update, against the step that the optimizer then takes, and against float64 arithmetic."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from helpers.devices import DEVICES, INTERPRETED, thinned
from helpers.ranks import on_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam

import gradstat
from gradstat import UpdateStats, _fields, update_stats
from gradstat._core import backends

# Triton's interpreter computes with numpy, which warns of overflows in float32 sums.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

Make = Callable[[list[Tensor]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, 0.1),
    "SGD, maximize, L2": lambda p: SGD(p, 0.1, maximize=True, weight_decay=0.1),
    "SGD, momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "SGD, dampening, fused": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.3, fused=True),
    "SGD, Nesterov": lambda p: SGD(p, 0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: Adam(p, 1e-2),
    "Adam, L2, maximize": lambda p: Adam(p, 1e-2, weight_decay=0.3, maximize=True),
    "Adam, amsgrad": lambda p: Adam(p, 1e-2, betas=(0.5, 0.6), amsgrad=True),
    "Adam, tensors": lambda p: Adam(p, torch.tensor(1e-2), betas=(torch.tensor(0.5), torch.tensor(0.9)), foreach=False),
    "AdamW, eps 0": lambda p: AdamW(p, 1e-2, eps=0.0),
    "AdamW, fused": lambda p: AdamW(p, 1e-2, fused=True),
    "NAdam": lambda p: NAdam(p, 1e-2, weight_decay=0.1),
    "NAdam, decoupled": lambda p: NAdam(p, 1e-2, momentum_decay=0.1),
    "RAdam": lambda p: RAdam(p, 1e-2, betas=(0.9, 0.95)),
    "RAdam, L2": lambda p: RAdam(p, 1e-2, weight_decay=0.1, eps=1e-3, maximize=True),
    "Adamax": lambda p: Adamax(p, 1e-2, weight_decay=0.1, eps=1e-3),
}


def without_decay(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("decoupled_weight_decay"):
            group["weight_decay"] = 0.0


def set_gradients(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def close(value: float, expected: float, tolerance: float = 1e-12) -> bool:
    both_nan = math.isnan(value) and math.isnan(expected)
    return both_nan or value == expected or abs(value - expected) <= tolerance * abs(expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_it_is_what_the_step_then_does(name: str, dtype: torch.dtype, where: tuple[str, str]) -> None:
    backend, device = where
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in ((3, 5), (70,), ())]
    optimizer = OPTIMIZERS[name]([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.03}])
    # torch keeps NAdam's product and settings that are tensors in float32, and rounds each weight to its dtype.
    in_float32 = "NAdam" in name or "tensors" in name
    tolerance = 1e-3 if dtype is torch.float32 else 1e-6 if in_float32 else 1e-11
    for _ in range(7 if backend == "native" or name.startswith("RAdam") else 3):  # RAdam rectifies from the sixth on
        set_gradients(parameters)
        state = copy.deepcopy(optimizer.state_dict())
        report = update_stats(optimizer, backend=backend)
        after = optimizer.state_dict()
        assert str(after["param_groups"]) == str(state["param_groups"])
        assert after["state"].keys() == state["state"].keys()
        before = [parameter.detach().clone() for parameter in parameters]
        gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        momenta = [moment_of(optimizer, parameter) for parameter in parameters]
        without_decay(optimizer)
        optimizer.step()
        for stats, parameter, old, gradient, momentum in zip(
            report, parameters, before, gradients, momenta, strict=True
        ):
            update = parameter.detach().double() - old.double()
            assert close(stats.update_rms, update.square().mean().sqrt().item(), tolerance), stats
            assert close(stats.update_to_weight, (update.norm() / old.double().norm()).item(), tolerance), stats
            group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
            decay = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
            used = (-1 if group["maximize"] else 1) * gradient.double() + decay * old.double()
            assert stats.cosine == pytest.approx(cosine_of(used, momentum), abs=1e-5, nan_ok=True)
            expected = scaled_of(optimizer, group, parameter, used)
            assert close(stats.scaled_gradient_rms, expected, max(tolerance, 1e-5))


def moment_of(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    state = optimizer.state.get(parameter, {})
    momentum = state.get("exp_avg", state.get("momentum_buffer"))
    return None if momentum is None else momentum.double().clone()


def cosine_of(gradient: Tensor, momentum: Tensor | None) -> float:
    if momentum is None:
        return math.nan
    return ((gradient * momentum).sum() / gradient.norm() / momentum.norm()).item()


def scaled_of(optimizer: Optimizer, group: dict, parameter: Tensor, gradient: Tensor) -> float:
    """The scaled gradient's value, computed with the second moment after the step."""
    state = optimizer.state[parameter]
    if isinstance(optimizer, SGD):
        return math.nan
    if isinstance(optimizer, Adamax):
        return (gradient / state["exp_inf"].double()).square().mean().sqrt().item()
    second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"].double()
    correction = 1 - float(group["betas"][1]) ** float(state["step"])
    eps = group["eps"] / (math.sqrt(correction) if isinstance(optimizer, RAdam) else 1.0)
    return (gradient / ((second / correction).sqrt() + eps)).square().mean().sqrt().item()


# Backends against the reference -------------------------------------------------------------------------------

FORMULAS = range(len(_fields.UPDATE_FORMULAS))


def shorter(length: int, where: tuple[str, str]) -> int:
    """A third of a length for Triton's interpreter, which is slow, and whose steps have 256 to 1024 elements."""
    return length // 3 if where == INTERPRETED else length


def operands_of(formula: int, shape: tuple[int, ...] | int, dtype: torch.dtype, device: str) -> list[Tensor]:
    made = [torch.randn(shape, dtype=torch.float32) for _ in range(_fields.UPDATE_OPERANDS[formula])]
    made[3:] = [tensor.square() for tensor in made[3:]]
    return [tensor.to(dtype).to(device) for tensor in made]


def coefficients_of(count: int, device: str, **given: float) -> Tensor:
    ordinary = {"gradient_scale": 0.5, "weight_decay": 0.01, "momentum_decay": 0.9, "momentum_gain": 0.1}
    ordinary |= {"second_decay": 0.99, "second_gain": 0.01, "from_gradient": 0.3, "from_momentum": 1.7}
    ordinary |= {"root_scale": 1.1, "eps": 1e-8, "is_adaptive": 1.0, "lr": 1.0} | given
    return torch.tensor([list(ordinary.values())] * count, dtype=torch.float64, device=device)


def assert_same(
    where: tuple[str, str], operands: list[Tensor], formulas: list[int], tolerance: float, **given: float
) -> Tensor:
    backend, device = where
    coefficients = coefficients_of(len(formulas), device, **given)
    found = backends.resolve(backend, device).update_sums(operands, formulas, coefficients)
    expected = backends.resolve("reference", device).update_sums(operands, formulas, coefficients)
    assert_close_sums(found, expected, tolerance)
    return found


def assert_close_sums(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    # A sum of products may cancel, so the tolerance is relative to the norms of its factors.
    by = dict(zip(_fields.UPDATE_SUMS, expected.unbind(1), strict=True))
    size = expected.abs()
    size[:, _fields.UPDATE_SUMS.index("product")] = (by["gradient"] * by["momentum"]).sqrt()
    same = (found - expected).abs() <= tolerance * size
    assert (same | (found == expected) | (found.isnan() & expected.isnan())).all(), (found, expected)


@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_size(formula: int, dtype: torch.dtype, where: tuple[str, str]) -> None:
    sizes = [0, 1, 17, 1023, 1024, 4163]  # with Triton's interpreter, two chunks and a part of one
    if where != INTERPRETED:
        sizes += [3, 64, 255, 1029, 9001, *range(100, 140), 2 * 65536 + 77]
    operands = [tensor for size in sizes for tensor in operands_of(formula, size, dtype, where[1])]
    assert_same(where, operands, [formula] * len(sizes), 1e-13 if dtype is torch.float64 else 1e-6)


def test_several_chunks_of_triton_as_they_are() -> None:
    """In other tests chunks are shorter in its interpreter."""
    where = ("triton", DEVICES[-1])
    assert_same(where, operands_of(0, 40_001, torch.bfloat16, where[1]), [0], 1e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_operands_of_different_types_and_addresses(formula: int, where: tuple[str, str]) -> None:
    types = [torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.float32]
    length = shorter(3000, where)
    operands, formulas = [], []
    for turn in range(5):
        made = [
            t.to(types[(turn + i) % 5]) for i, t in enumerate(operands_of(formula, length, torch.float32, where[1]))
        ]
        operands += [*(tensor[i + turn :][: length - 223] for i, tensor in enumerate(made)), *made]
        formulas += [formula, formula]
    made = operands_of(formula, length + 1, torch.float32, where[1])
    operands += [tensor[i % 2 :][: length - 1] for i, tensor in enumerate(made)]
    assert_same(where, operands, [*formulas, formula], 1e-6)


@pytest.mark.parametrize(
    "given", [{}, {"eps": 0.0}, {"is_adaptive": 0.0}, {"eps": 1e-20, "weight_decay": 0.0}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_magnitudes_beyond_float32s_squares(
    given: dict[str, float], dtype: torch.dtype, where: tuple[str, str]
) -> None:
    operands: list[Tensor] = []
    scales, length = thinned([1e-30, 1e-22, 1e-15, 1e15, 1e25, 1e36], where, 2), shorter(2100, where)
    for formula in FORMULAS:
        for scale in scales:
            made = operands_of(formula, length, dtype, where[1])
            mixed = torch.where(torch.rand(length) < 0.5, scale, 1.0).to(dtype).to(where[1])
            for by in (torch.full_like(mixed, scale), mixed):
                scaled = [tensor * by for tensor in made[:3]]
                scaled += [(tensor.double() * by.double().square()).clamp(max=1e38).to(dtype) for tensor in made[3:]]
                operands += scaled
    formulas = [formula for formula in FORMULAS for _ in scales for _ in range(2)]
    assert_same(where, operands, formulas, 2e-6, **given)


def test_a_second_moment_that_decayed_into_subnormal_numbers(where: tuple[str, str]) -> None:
    """CUDA's approximate root flushes them to zero."""
    operands: list[Tensor] = []
    for formula in FORMULAS:
        gradient, weight, *state = operands_of(formula, shorter(2100, where), torch.float64, where[1])
        operands += [gradient.zero_(), weight, *state[:1], *(second.fill_(5e-323) for second in state[1:])]
    assert_same(where, operands, list(FORMULAS), 1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("formula", FORMULAS)
def test_what_is_not_finite_is_named(formula: int, bad: float, where: tuple[str, str]) -> None:
    """At any place of any operand; each operand has its column."""
    backend, device = where
    operands, formulas, expected = [], [], []
    length = shorter(2100, where)
    of_operand = ["gradient", "weight", "momentum", "second_moment", "second_moment"]
    for which in range(_fields.UPDATE_OPERANDS[formula]):
        for place in (0, length - 1) if where == INTERPRETED else (0, 1500, length - 1):
            made = operands_of(formula, length, torch.float32, device)
            made[which][place] = bad
            operands += made
            formulas.append(formula)
            expected.append(of_operand[which])
    sums = backends.resolve(backend, device).update_sums(
        operands, formulas, coefficients_of(len(formulas), device, weight_decay=0.0)
    )
    report = gradstat.UpdateReport(lambda: [str(i) for i in range(len(formulas))], sums, [length] * len(formulas))
    for stats, name in zip(report, expected, strict=True):
        assert stats.nonfinite == (name,)
        assert all(math.isnan(value) or math.isinf(value) for value in stats[1:-1]), stats


def test_zeros_are_exact(where: tuple[str, str]) -> None:
    for formula in FORMULAS:
        made = operands_of(formula, shorter(5000, where), torch.float32, where[1])
        for zeroed in ([0], [0, 2], [1], list(range(5))):
            operands = [tensor * 0 if i in zeroed else tensor for i, tensor in enumerate(made)]
            operands[0][shorter(4000, where) :] = made[0][shorter(4000, where) :]
            assert_same(where, operands, [formula], 1e-6, weight_decay=0.0)


# The public call ------------------------------------------------------------------------------------------------


def stepped(make: Make = lambda p: AdamW(p, 1e-2), steps: int = 2) -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = make(list(model.parameters()))
    for _ in range(steps):
        set_gradients(list(model.parameters()))
        optimizer.step()
    set_gradients(list(model.parameters()))
    return model, optimizer


def test_names_entries_and_forms() -> None:
    model, optimizer = stepped()
    model[2].bias.grad = None
    report = update_stats(model, optimizer)
    assert report.names == ("0.weight", "0.bias", "2.weight")
    assert len(report) == 3
    assert "2.bias" not in report
    with pytest.raises(KeyError, match=r"no parameter named '2.bias' with a gradient"):
        report["2.bias"]
    assert [stats.name for stats in report] == list(report.names)
    assert isinstance(report[0], UpdateStats)
    assert report.table.shape == (3, len(gradstat.UPDATE_FIELDS))
    assert report.table.dtype == torch.float64
    rows = [[getattr(stats, field) for field in gradstat.UPDATE_FIELDS] for stats in report]
    assert torch.allclose(report.table, torch.tensor(rows, dtype=torch.float64), rtol=1e-12)
    assert str(report).splitlines()[1].split() == list(gradstat.UPDATE_FIELDS)
    assert len(str(report).splitlines()) == 5


def test_model_and_optimizer_come_in_either_order() -> None:
    model, optimizer = stepped()
    assert (
        update_stats(model, optimizer).names
        == update_stats(optimizer, model).names
        == ("0.weight", "0.bias", "2.weight", "2.bias")
    )
    assert update_stats(model=model, optimizer=optimizer).names[0] == "0.weight"
    assert update_stats(optimizer=optimizer).names[0] == "group0.0"
    with pytest.raises(TypeError, match=r"expected one optimizer and one torch\.nn\.Module, got str beside the optim"):
        update_stats("model", optimizer)  # type: ignore[arg-type]


def test_overall_is_of_all_parameters_as_one() -> None:
    model, optimizer = stepped(lambda p: AdamW(p, 1e-2, weight_decay=0.0))
    overall = update_stats(optimizer).overall
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer.step()
    update = torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before
    assert overall[0].item() == pytest.approx(update.square().mean().sqrt().item(), rel=1e-4)
    assert overall[1].item() == pytest.approx((update.norm() / before.norm()).item(), rel=1e-4)


def test_no_gradient_at_all() -> None:
    model = nn.Linear(2, 2)
    report = update_stats(Adam(model.parameters()))
    assert len(report) == 0
    assert report.table.shape == (0, 4)
    assert list(report) == []
    str(report)


def assert_rms_is_that_of_the_step(optimizer: Optimizer, backend: str | None = None) -> None:
    report = update_stats(optimizer, backend=backend)
    parameters = [p for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    for stats, p, old in zip(report, parameters, before, strict=True):
        update = torch.view_as_real(p.detach() - old) if p.is_complex() else p.detach() - old
        assert stats.update_rms == pytest.approx(update.double().square().mean().sqrt().item(), rel=1e-4)


def test_a_state_that_begins_later_among_others() -> None:
    model, optimizer = stepped(lambda p: Adam(p, 1e-2), steps=0)
    model[0].weight.grad = None
    optimizer.step()
    set_gradients(list(model.parameters()))
    assert_rms_is_that_of_the_step(optimizer)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_parameters_count_both_parts(dtype: torch.dtype, where: tuple[str, str]) -> None:
    parameter = nn.Parameter(torch.randn(40, dtype=dtype, device=where[1]))
    optimizer = Adam([parameter], 1e-2)
    for _ in range(2):
        set_gradients([parameter])
        assert_rms_is_that_of_the_step(optimizer, where[0])


def of_other_layouts(device: str) -> list[Tensor]:
    dense = torch.randn(4, 6, 5, 3, device=device)
    not_dense = torch.randn(4, 6, 5, 6, device=device)[..., ::2]
    return [dense, dense.contiguous(memory_format=torch.channels_last), not_dense]


@pytest.mark.parametrize("make", [SGD, Adam])
def test_operands_of_other_layouts(make: type[Optimizer], where: tuple[str, str]) -> None:
    for parameter in map(nn.Parameter, of_other_layouts(where[1])):
        optimizer = make([parameter], 1e-2)
        for parameter.grad in of_other_layouts(where[1]):
            assert_rms_is_that_of_the_step(optimizer, where[0])


def test_the_loss_scale_is_taken_out() -> None:
    model, optimizer = stepped(lambda p: Adam(p, 1e-2, fused=True))
    plain = update_stats(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.scale(torch.zeros(()))
    for parameter in model.parameters():
        parameter.grad *= 4096.0
    assert torch.allclose(update_stats(optimizer, scaler=scaler).table, plain.table, rtol=1e-6, equal_nan=True)
    scaler.unscale_(optimizer)
    assert torch.allclose(update_stats(optimizer, scaler=scaler).table, plain.table, rtol=1e-6, equal_nan=True)
    scaler.update()
    update_stats(optimizer, scaler=scaler)
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 4096.0  # torch refuses it while there are entries
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert torch.equal(update_stats(optimizer, scaler=disabled).table, plain.table)


class Unknown(Adam):
    def step(self, closure: object = None) -> None:
        return None


def test_what_it_does_not_know_it_refuses() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    known = "supported are torch's SGD, Adam, AdamW, NAdam, RAdam, Adamax"
    wrong = [(Unknown, r"\w\.Unknown"), (torch.optim.RMSprop, "RMSprop"), (torch.optim.SparseAdam, "SparseAdam")]
    for kind, name in wrong:
        with pytest.raises(NotImplementedError, match=rf"{name} is not supported; {known}"):
            update_stats(kind(parameters))
    with pytest.raises(TypeError, match=r"optimizer: expected one of torch's SGD, .*, got Linear"):
        update_stats(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"scaler: expected a torch\.amp\.GradScaler"):
        update_stats(Adam(parameters), scaler=3)
    parameters[0].grad = torch.ones(2)
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        update_stats(Adam(parameters), backend="fast")


def test_gradients_and_states_it_cannot_read() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"gradient of 'weight' has the layout torch.sparse_coo"):
        update_stats(embedding, SGD(embedding.parameters(), 0.1))
    model, optimizer = stepped(lambda p: Adam(p, 1e-2))
    optimizer.state[model[2].weight]["exp_avg_sq"] = torch.ones(3)
    with pytest.raises(
        ValueError, match=r"'exp_avg_sq' of '2.weight' is shape \(3,\), expected a tensor of shape \(2, 5\)"
    ):
        update_stats(model, optimizer)
    for group in optimizer.param_groups:
        group["amsgrad"] = True
    with pytest.raises(ValueError, match=r"'max_exp_avg_sq' of '0\.weight' is None, expected a tensor"):
        update_stats(model, optimizer)


@on_ranks(2)
def test_sharded_parameters_are_measured_as_wholes() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    wholes = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]
    shards = [nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)])) for whole in wholes]
    whole_optimizer, optimizer = Adam(wholes, 1e-2), Adam(shards, 1e-2)
    for _ in range(3):
        set_gradients(wholes)
        for whole, shard in zip(wholes, shards, strict=True):
            shard.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
        expected, found = update_stats(whole_optimizer), update_stats(optimizer)
        assert torch.allclose(found.table, expected.table, rtol=1e-5, equal_nan=True)
        assert torch.allclose(found.overall, expected.overall, rtol=1e-5, equal_nan=True)
        whole_optimizer.step()
        optimizer.step()
    if dist.get_rank() == 1:
        optimizer.state[shards[0]]["exp_avg"] = None
        with pytest.raises(ValueError, match=r"'exp_avg' of 'group0\.0' is None"):
            update_stats(optimizer)
    else:
        assert update_stats(optimizer).table[0].isnan().all()


def test_a_report_can_be_sent_to_another_process() -> None:
    optimizer = Adam([("w", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(2)))], lr=0.1)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    report = gradstat.update_stats(optimizer)
    sent = pickle.loads(pickle.dumps(report))
    assert list(sent) == list(report)
    assert str(sent) == str(report)
    assert torch.equal(sent.table, report.table)
    assert torch.equal(sent.overall, report.overall)
