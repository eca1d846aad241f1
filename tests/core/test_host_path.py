"""The direct path from Python to the kernels: taken for ordinary tensors, and for nothing that it would misread."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.devices import parameter_with
from helpers.exact import COMPLEX, FLOAT8, REAL
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import gradstat
from gradstat._core import backends, native
from gradstat._core import parameters as _plan

HELPERS = native.load_cpu()


def ordinary() -> list[Tensor]:
    return [
        *(torch.randn(5, 7).to(dtype) for dtype in [*REAL, *COMPLEX, *FLOAT8]),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.zeros(3, 0),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(9)[2:6],
        nn.Parameter(torch.randn(3)),
    ]


def test_ordinary_tensors_are_measured_directly() -> None:
    """helpers.fuzz_operations tests its results; for equal layouts it returns the same signature as the operator."""
    tensors = ordinary()
    checked, (table, signature) = HELPERS.check(tensors), torch.ops.gradstat.check(ordinary())
    assert (checked[0].shape, checked[1]) == (table.shape, signature)
    counters = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
    short, long = (
        call(tensors, 0.01, 2.0, torch.tensor(64.0), held)
        for call, held in zip((HELPERS.measure_step, torch.ops.gradstat.measure_step), counters, strict=True)
    )
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(short, long, strict=True))
    assert counters[0].tolist() == counters[1].tolist() == [1, 0, 0]


WIDE = torch.full((4, 4), 0.5, dtype=torch.float64)
FACTORS = [WIDE[0, 0], WIDE[0, :2].float(), WIDE[0, :0].float(), torch.tensor(0.5j), 0.5]
MULTIPLIERS = [WIDE[0].float(), WIDE[0, :3], WIDE[:, 0], WIDE[:2, :2].contiguous().t(), WIDE[:2, :2], None]


def test_numbers_of_another_kind_are_refused() -> None:
    tensors: Any = [torch.ones(2) for _ in range(4)]
    for factor in FACTORS:
        assert HELPERS.unscale_(tensors, factor) is None  # type: ignore[arg-type]
        is_real = isinstance(factor, Tensor) and not factor.is_complex()
        assert not HELPERS.scale_(tensors, factor.float() if is_real else factor)  # type: ignore[arg-type, union-attr]
    for multipliers in MULTIPLIERS:
        assert not HELPERS.scale_each_(tensors, multipliers)  # type: ignore[arg-type]
    scale, counters = torch.tensor(64.0), torch.zeros(3, dtype=torch.int64)
    for wrong in ((scale.double(), counters), (scale, counters.float()), (scale, counters[:2])):
        assert HELPERS.measure_step(tensors, 1.0, 2.0, *wrong) is None  # type: ignore[arg-type]
    assert not counters.any()
    assert all(tensor.tolist() == [1.0, 1.0] for tensor in tensors)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2)


REFUSED: dict[str, Callable[[], object]] = {
    "integers": lambda: torch.ones(2, dtype=torch.int32),
    "booleans": lambda: torch.ones(2, dtype=torch.bool),
    "lazily conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "lazily negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "lazily negated, complex": lambda: torch._neg_view(torch.ones(2, dtype=torch.complex64)),
    "not dense": lambda: torch.ones(4, 4)[:, ::2],
    "expanded": lambda: torch.ones(1).expand(3),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.ones(2, device="meta"),
    "zeros without memory": lambda: torch._efficientzerotensor(3),
    "fake": fake,
    "subclass": lambda: torch.ones(2).as_subclass(type("Sub", (Tensor,), {})),
    "no tensor": lambda: 1.0,
    "None": lambda: None,
}
NO_LISTS: list[Any] = [(torch.ones(2),), [], torch.ones(2), None]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_ordinary_is_left_alone(what: str) -> None:
    value: Any = REFUSED[what]()
    untouched = torch.full((3,), 2.0)
    assert HELPERS.check([untouched, value]) is None
    assert HELPERS.clip_([untouched, value], 0.1, 2.0) is None
    assert HELPERS.measure_norm([untouched, value], 0.1, 2.0) is None
    assert not HELPERS.scale_([untouched, value], torch.tensor(0.1, dtype=torch.float64))
    assert not HELPERS.scale_each_([untouched, value], torch.full((2,), 0.1, dtype=torch.float64))
    assert HELPERS.unscale_([untouched, value], torch.tensor(0.1)) is None
    assert HELPERS.check([value]) is None
    assert untouched.tolist() == [2.0] * 3
    assert [HELPERS.check(value) for value in NO_LISTS] == [None] * len(NO_LISTS)


def test_a_lazy_negation_is_measured_with_its_sign_and_a_batch_not_directly() -> None:
    lazy = torch.tensor([1 + 2j]).conj().imag
    assert lazy.is_neg()
    assert gradstat.check_tensors([lazy, torch.ones(1)])[0].min == -2.0
    assert torch.vmap(lambda x: x * float(HELPERS.check([x]) is None))(torch.ones(2, 3)).sum() == 6


def test_what_has_left_functionalize_is_refused() -> None:
    """Operators on functional tensors return functional tables, whose memory holds no numbers."""
    left: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        left.append(x + 1)
        return left[-1].sum()

    assert torch.func.functionalize(keep)(torch.ones(3)) == 6.0
    for wrapped in (left[0], torch._to_functional_tensor(torch.ones(3))):
        with pytest.raises(ValueError, match=r"was created inside [a-z.]*functionalize"):
            gradstat.check_tensors([wrapped, torch.ones(1)])
        with pytest.raises(ValueError, match=r"was created inside [a-z.]*functionalize"):
            gradstat.clip_grad_norm_([parameter_with(wrapped)], 0.1)
    assert gradstat.check_tensors([torch.func.functionalize(lambda x: x + 1)(torch.ones(3))])[0].sum == 6.0


@pytest.mark.parametrize("error_if_nonfinite", [False, True])
@pytest.mark.parametrize("max_norm", [0.1, 1e9, float("inf")])
def test_ordinary_gradients_are_not_read_another_way(
    max_norm: float, error_if_nonfinite: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = parameter_with(torch.full((4,), 2.0, device=device))
    monkeypatch.delattr("gradstat._core.measure._norm")
    assert gradstat.clip_grad_norm_([parameter], max_norm, error_if_nonfinite=error_if_nonfinite) == 4.0
    expected = torch.full((4,), 0.05 if max_norm == 0.1 else 2.0, device=device)
    torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=0.0)


def test_what_cannot_be_done_directly_the_dispatcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        measure_norm, check = staticmethod(HELPERS.measure_norm), staticmethod(HELPERS.check)

        def scale_(self, tensors: list[Tensor], multiplier: Tensor) -> bool:
            return False

    tensors = ordinary()
    expected = gradstat.stats(tensors)
    for direct_functions in (Refusing(), backends.NOT_COMPILED):  # as if this torch had no exchange interface
        monkeypatch.setattr(backends.resolve(None, "cpu"), "direct", direct_functions)
        assert torch.equal(gradstat.stats(tensors), expected)
        parameter = parameter_with(torch.ones(4))
        assert gradstat.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True) == 2.0
        assert parameter.grad.norm() == pytest.approx(1.0, abs=1e-6)


def test_a_list_that_changes_meanwhile_keeps_its_tensors() -> None:
    """The kernels run without the GIL, so the tensors must outlive the list's references."""
    tensors = [torch.ones(1 << 16) for _ in range(64)]
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for i in range(len(tensors)):
                tensors[i] = torch.ones(1 << 16)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            assert (gradstat.stats(tensors)[:, gradstat.FIELDS.index("sq_sum")] == 1 << 16).all()
    finally:
        stop.set()
        thread.join()


def small() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU()), nn.LayerNorm(3))
    model(torch.ones(1, 2)).sum().backward()
    return model


def test_a_plan_finds_the_parameters_without_walking_and_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    gradstat.check(model)
    expected = list(model.named_parameters())
    monkeypatch.setattr(nn.Module, "named_parameters", Mock(side_effect=AssertionError("the module was walked again")))
    named = _plan.named_parameters_of(model)
    assert all(a is b for a, (_, b) in zip(named.parameters, expected, strict=True))
    assert list(named.names()) == [name for name, _ in expected]
    # A layer that was taken out is freed.
    gone = [weakref.ref(model[1]), weakref.ref(model[1][0]), weakref.ref(model[1][0].weight)]
    model[1] = nn.Identity()
    del expected, named
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_without_the_extension_the_same_parameters_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    model[0].weight.grad = None
    model[0].bias.requires_grad_(False).grad = None
    with_helpers = _plan.gradients_of(_plan.named_parameters_of(model).parameters)
    monkeypatch.setattr(native, "helpers", lambda: None)
    named = _plan.named_parameters_of(model)
    assert list(named.names()) == [name for name, _ in model.named_parameters()]
    without = _plan.gradients_of(named.parameters)
    assert all(a is b for a, b in zip(with_helpers.tensors, without.tensors, strict=True))
    assert with_helpers.positions == without.positions == [2, 3, 4]
    assert with_helpers.missing == without.missing == [0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert _plan.gradients_of(named.parameters)[1:] == (None, None)


def test_references_are_balanced() -> None:
    model = small()
    parameters, gradients = list(model.parameters()), [p.grad for p in model.parameters()]
    plan = HELPERS.make_plan([weakref.ref(m) for m in model.modules()], parameters)
    factor, multipliers = torch.tensor(1.0), torch.ones(len(gradients), dtype=torch.float64)
    table = gradstat.stats([torch.ones(2)] * 3)
    watched = [model, plan, *parameters, *gradients, model[0]._parameters, factor, multipliers, table]
    if sys.version_info < (3, 12):  # from 3.12 None is immortal, and limited-API code increments its count only
        watched.append(None)

    def step() -> None:
        HELPERS.planned_parameters(plan)
        HELPERS.gradients_of(parameters)
        HELPERS.check(gradients)  # type: ignore[arg-type]
        HELPERS.check([*gradients, torch.tensor([1 + 2j]).conj().imag])  # type: ignore[list-item]
        HELPERS.clip_(gradients, 1e9, 2.0)  # type: ignore[arg-type]
        HELPERS.unscale_(gradients, factor)  # type: ignore[arg-type]
        HELPERS.scale_each_(gradients, multipliers)  # type: ignore[arg-type]
        HELPERS.scale_each_(gradients, factor)  # type: ignore[arg-type]

    step()
    before = [sys.getrefcount(o) for o in watched]
    for _ in range(2000):
        step()
    after = [sys.getrefcount(o) for o in watched]
    # None is shared by the whole interpreter, so its count varies a little.
    assert all(abs(a - b) < 100 for a, b in zip(before, after, strict=True))
